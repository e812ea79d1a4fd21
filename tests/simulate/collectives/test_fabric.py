"""Collectives against closed forms, byte counts link by link, and laws that any fabric keeps."""

import math

import numpy as np
import pytest

import foretell.simulate.collectives
from foretell.errors import InputError, UnknownNameError
from foretell.hardware import cluster
from foretell.simulate.collectives import KINDS, Fabric, algorithms, bus_factor, member
from foretell.simulate.collectives.rates import Curve, LinkRates, Protocol

PLAIN = Curve((Protocol(0.0, 0.0, 1.0),), wire=1.0, copy=0.0)
BULK = 4e9


def ideal(text: str, **options) -> Fabric:
    """A fabric whose links give what they signal, without latency."""
    from dataclasses import replace

    made = Fabric.of(cluster(text), **options)
    node = None if made.node_kind is None else LinkRates(made.node_kind, "ideal", {"any": PLAIN})
    network = None if made.network_kind is None else LinkRates(made.network_kind, "ideal", {"any": PLAIN})
    return replace(made, node_rates=node, network_rates=network, _geometry={})


def test_closed_forms():
    fabric = ideal("2x dgx-h100")  # 450 GB/s a GPU in a node; eight ports of 50 GB/s a node
    assert fabric.time_s("all_reduce", BULK, 8, algorithm="ring") == pytest.approx(2 * 7 / 8 * BULK / 450e9)
    assert fabric.time_s("all_gather", BULK, 8) == pytest.approx(7 / 8 * BULK / 450e9)
    assert fabric.time_s("reduce_scatter", BULK, 4) == pytest.approx(3 / 4 * BULK / 450e9)
    assert fabric.time_s("all_to_all", BULK, 8) == pytest.approx(7 / 8 * BULK / 450e9)
    assert fabric.time_s("send_recv", BULK, 2) == pytest.approx(BULK / 450e9)
    assert fabric.time_s("broadcast", BULK, 8) == pytest.approx(BULK / 450e9)
    # NVLink SHARP: everything out once, the sums back; the multicast comes back too: 1 + 1/8.
    assert fabric.time_s("all_reduce", BULK, 8, algorithm="nvls") == pytest.approx(9 / 8 * BULK / 450e9)
    # Sixteen ranks: 15/16 of the data twice through ports of 400 GB/s together.
    assert fabric.time_s("all_reduce", BULK, 16, algorithm="ring") == pytest.approx(2 * 15 / 16 * BULK / 400e9)
    # Half of what a rank holds goes to the other node, through one port of 50 GB/s.
    assert fabric.time_s("all_to_all", BULK, 16) == pytest.approx(BULK / 2 / 50e9)


def test_all_reduce_is_scatter_and_gather():
    fabric = ideal("4x dgx-a100")
    for size, stride in ((2, 1), (8, 1), (32, 1), (4, 8), (8, 4)):
        whole, scatter, gather = (
            fabric.time_s(kind, BULK, size, stride, algorithm="ring")
            for kind in ("all_reduce", "reduce_scatter", "all_gather")
        )
        assert whole == pytest.approx(scatter + gather)


def ring_traffic(fabric: Fabric, size: int, stride: int, nbytes: float) -> float:
    """Brute force: lay the rings of all groups over the nodes, sum the bytes on each node's ports, take the busiest."""
    local, nodes = fabric.local, fabric.ranks // fabric.local
    out = np.zeros(nodes)
    block = size * stride
    for start in range(fabric.ranks):
        if start % block < stride:
            ranks = [start + stride * i for i in range(size)]
            for a, b in zip(ranks, ranks[1:] + ranks[:1], strict=True):
                if a // local != b // local:
                    out[a // local] += 2 * (size - 1) / size * nbytes
    return out.max() / (fabric.ports * fabric.port_rate)


def pairwise_traffic(fabric: Fabric, size: int, stride: int, nbytes: float) -> float:
    local, nodes = fabric.local, fabric.ranks // fabric.local
    out = np.zeros(nodes)
    block = size * stride
    for start in range(fabric.ranks):
        if start % block < stride:
            ranks = [start + stride * i for i in range(size)]
            for a in ranks:
                for b in ranks:
                    if a // local != b // local:
                        out[a // local] += nbytes / size
    return out.max() / (fabric.ports * fabric.port_rate)


@pytest.mark.parametrize("over", ["8x ib-ndr", "1x ib-hdr", "4x ib-edr"])
@pytest.mark.parametrize(("size", "stride"), [(4, 8), (16, 2), (8, 4), (2, 8), (2, 16), (32, 1), (4, 4)])
def test_ports_are_shared_as_the_links_say(over: str, size: int, stride: int):
    fabric = ideal(f"4x dgx-h100 over {over}")
    counted = ring_traffic(fabric, size, stride, BULK)
    inside = 0.0 if stride >= 8 else 2 * (size - 1) / size * BULK / 450e9
    found = fabric.time_s("all_reduce", BULK, size, stride, algorithm="ring")
    assert found == pytest.approx(max(counted, inside))
    counted = pairwise_traffic(fabric, size, stride, BULK)
    assert fabric.time_s("all_to_all", BULK, size, stride) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("per_node", [4, 8, 72])
def test_members_counted_one_by_one(per_node: int):
    from foretell.simulate.collectives.fabric import members

    ranks = per_node * 6
    for size in range(1, 26):
        for stride in (1, 2, 3, 4, 6, 8, 12, 16):
            block = size * stride
            if ranks % block:
                continue
            starts = [start for start in range(ranks) if start % block < stride]
            groups = [[start + stride * i for i in range(size)] for start in starts]
            homes = [[rank // per_node for rank in group] for group in groups]
            most = max(len(set(home)) for home in homes)
            local = max(home.count(node) for home in homes if len(set(home)) == most for node in home)
            assert members(per_node, ranks, size, stride) == (local, most)


def test_groups_contend_only_where_ports_are_shared():
    rails, shared = ideal("4x dgx-h100"), ideal("4x dgx-h100 over 1x ib-ndr")
    alone = rails.time_s("all_reduce", BULK, 4, 8, concurrent=False)
    assert rails.time_s("all_reduce", BULK, 4, 8) == pytest.approx(alone)
    alone = shared.time_s("all_reduce", BULK, 4, 8, concurrent=False)
    assert shared.time_s("all_reduce", BULK, 4, 8) == pytest.approx(8 * alone)


def test_oversubscribed_spine():
    # One leaf holds 2 nodes; groups of 8 apart by a node have both under one leaf, apart by two nodes one.
    flat = ideal("8x dgx-h100", leaf_ports=2)
    thin = ideal("8x dgx-h100", leaf_ports=2, oversubscription=4)
    near, far = (8, 8), (4, 16)
    assert flat.time_s("all_reduce", BULK, *far, algorithm="ring") == pytest.approx(2 * 3 / 4 * BULK / 50e9)
    # All of a ring leaves the leaf where it has one member a leaf, half of it where it has two.
    assert thin.time_s("all_reduce", BULK, *far, algorithm="ring") == pytest.approx(4 * 2 * 3 / 4 * BULK / 50e9)
    assert thin.time_s("all_reduce", BULK, *near, algorithm="ring") == pytest.approx(2 * 2 * 7 / 8 * BULK / 50e9)
    # Of 7 parts sent out, 6 leave the leaf.
    assert thin.time_s("all_to_all", BULK, *near) == pytest.approx(4 * 6 / 8 * BULK / 50e9)


def test_three_levels_spare_the_spine():
    fabric = ideal("8x dgx-h100", leaf_ports=2, oversubscription=8)
    two, three = (fabric.time_s("all_reduce", BULK, 64, algorithm=f"hierarchical-{n}") for n in (2, 3))
    # In the node, twice 7/8; between 2 nodes at 400 GB/s, twice 1/2; a half between 4 leaves at 50 GB/s, twice 3/4.
    byhand = 2 * 7 / 8 * BULK / 450e9 + 2 / 2 * BULK / 400e9 + 2 * 3 / 4 * BULK / 2 / 50e9
    assert three == pytest.approx(byhand)
    assert three < two


@pytest.mark.parametrize("text", ["4x dgx-h100", "2x dgx-a100", "8x l40s", "dgx-1v", "2x gb200-nvl72", "mi300x-8x"])
@pytest.mark.parametrize("kind", KINDS)
def test_laws(text: str, kind: str):
    fabric = Fabric.of(cluster(text))
    sizes = 2 ** np.arange(int(math.log2(fabric.ranks)) + 1)
    nbytes = np.geomspace(1, 1e10, 41)
    times = fabric.time_s(kind, nbytes[:, None], sizes[None, :])
    assert times.shape == (41, len(sizes))
    assert np.all(times[:, 0] == 0)
    assert np.all(times[:, 1:] > 0)
    assert np.all(np.diff(times, axis=0) >= 0)
    assert np.all(fabric.time_s(kind, 0, sizes) == 0)
    limit = nbytes[:, None] * np.array([bus_factor(kind, int(n)) * (n > 1) for n in sizes]) / 1.6e12
    assert np.all(times >= limit)


@pytest.mark.parametrize("kind", KINDS)
def test_bandwidth_never_hurts(kind: str):
    nbytes = np.geomspace(1e3, 1e10, 29)
    sizes = np.array([2, 4, 8, 16, 32])[:, None]
    slow, fast = (Fabric.of(cluster(f"4x dgx-h100 over 8x {net}")) for net in ("ib-hdr", "ib-ndr"))
    assert np.all(fast.time_s(kind, nbytes, sizes) <= slow.time_s(kind, nbytes, sizes))
    thin, flat = (Fabric.of(cluster("64x dgx-h100"), oversubscription=f).time_s(kind, nbytes, 512) for f in (4, 1))
    assert np.all(flat <= thin)


def test_rows_equal_single_calls():
    fabric = Fabric.of(cluster("4x dgx-a100"))
    size, stride = np.array([2, 8, 4, 32, 1, 2]), np.array([1, 1, 8, 1, 4, 16])
    nbytes = np.array([1e3, 1e6, 1e7, 1e9, 1e5, 0.0])
    for kind in KINDS:
        rows = fabric.time_s(kind, nbytes, size, stride)
        one = [float(fabric.time_s(kind, *row)) for row in zip(nbytes, size, stride, strict=True)]
        assert rows.tolist() == one


def test_auto_is_the_fastest_and_route_says_so():
    fabric = Fabric.of(cluster("8x dgx-h100"))
    for size, stride in ((8, 1), (64, 1), (8, 8)):
        for nbytes in (1e4, 1e7, 1e9):
            route = fabric.route("all_reduce", nbytes, size, stride)
            assert route.time_s == min(route.candidates.values()) == route.candidates[route.algorithm]
            forced = fabric.time_s("all_reduce", nbytes, size, stride, algorithm=route.algorithm)
            assert route.time_s == pytest.approx(float(forced))
            assert route.algorithm in str(route)
    assert fabric.route("all_reduce", 1e9, 8, 8).bottleneck == "network"
    assert fabric.route("all_gather", 4e9, 8, 1).bottleneck == "node"
    assert fabric.route("all_reduce", 1e3, 8, 1).bottleneck == "latency"
    assert fabric.route("all_reduce", 1e3, 1, 1).time_s == 0
    spine = Fabric.of(cluster("64x dgx-h100"), oversubscription=8).route("all_to_all", 1e10, 512)
    assert spine.bottleneck == "spine"


def test_sharp_halves_what_a_node_sends():
    plain, reducing = ideal("4x dgx-h100"), ideal("4x dgx-h100", sharp=True)
    assert plain.time_s("all_reduce", BULK, 4, 8) == pytest.approx(2 * 3 / 4 * BULK / 50e9)
    assert reducing.time_s("all_reduce", BULK, 4, 8) == pytest.approx(BULK / 50e9)
    assert "sharp" in reducing.route("all_reduce", BULK, 4, 8).candidates
    with pytest.raises(InputError, match="sharp"):
        plain.time_s("all_reduce", BULK, 4, 8, algorithm="sharp")


def test_what_is_wrong_is_said():
    fabric = Fabric.of(cluster("2x dgx-a100"))
    with pytest.raises(UnknownNameError, match="all_reduce"):
        fabric.time_s("allreduce", 1e6, 8)
    with pytest.raises(UnknownNameError, match="hierarchical-2"):
        fabric.time_s("all_reduce", 1e6, 8, algorithm="hierarchical")
    with pytest.raises(InputError, match="does no all_gather"):
        fabric.time_s("all_gather", 1e6, 8, algorithm="tree")
    with pytest.raises(InputError, match="does not fit in 16"):
        fabric.time_s("all_reduce", 1e6, 8, 8)
    with pytest.raises(InputError, match="negative"):
        fabric.time_s("all_reduce", -1, 8)
    with pytest.raises(InputError, match="1 or more"):
        fabric.time_s("all_reduce", 1, 0)
    with pytest.raises(InputError, match="below 1"):
        Fabric.of(cluster("2x dgx-a100"), oversubscription=0.5)
    with pytest.raises(InputError, match="below 1"):
        Fabric.of(cluster("2x dgx-a100"), leaf_ports=0)
    with pytest.raises(InputError, match="trn2"):
        Fabric.of(cluster("trn2-48xlarge"))
    assert fabric.time_s("all_reduce", [], 8).shape == (0,)


def test_registry():
    from foretell.errors import ForetellError
    from foretell.simulate.collectives import algorithm

    assert {"ring", "tree", "nvls", "pairwise", "sharp", "hierarchical-2", "hierarchical-3"} <= set(algorithms())
    assert callable(foretell.simulate.collectives.algorithms)  # no module of that name may hide it
    assert all(member(name).source and member(name).summary for name in algorithms())
    with pytest.raises(ForetellError, match="registered already"):
        algorithm("Ring", kinds=("all_reduce",), source="nobody")(member("ring").run)
    with pytest.raises(UnknownNameError):
        algorithms("gather")


@pytest.mark.parametrize("over", ["8x ib-ndr", "1x ib-hdr"])
@pytest.mark.parametrize(("size", "stride"), [(32, 1), (16, 2), (8, 4), (16, 1)])
def test_hierarchy_link_by_link(over: str, size: int, stride: int):
    """Brute force: scatter, all-reduce and gather, phase by phase, the busiest link of each."""
    fabric = ideal(f"4x dgx-h100 over {over}")
    local, nodes = 8, 4
    nvlink, ports = np.zeros(32), np.zeros(nodes)
    for start in range(32):
        if start % (size * stride) < stride:
            ranks = [start + stride * i for i in range(size)]
            homes = [[r for r in ranks if r // local == node] for node in sorted({r // local for r in ranks})]
            for home in homes:
                for rank in home:  # of a ring of len(home), for the scatter and again for the gather
                    nvlink[rank] += 2 * (len(home) - 1) / len(home) * BULK
            for place in range(len(homes[0])):
                for home in homes:
                    part = BULK / len(home)
                    ports[home[place] // local] += 2 * (len(homes) - 1) / len(homes) * part
    counted = nvlink.max() / 450e9 + ports.max() / (fabric.ports * fabric.port_rate)
    assert fabric.time_s("all_reduce", BULK, size, stride, algorithm="hierarchical-2") == pytest.approx(counted)


def binary_tree(count: int) -> list[tuple[int, int]]:
    """Edges (parent, child) of a tree over 0 … count - 1 whose odd members are leaves, 0 above all the others."""

    def below(low: int, high: int, parent: int) -> list[tuple[int, int]]:
        if low > high:
            return []
        step = 1
        while low + 2 * step - 1 <= high:
            step *= 2
        middle = low + step - 1
        return [(parent, middle), *below(low, middle - 1, middle), *below(middle + 1, high, middle)]

    return below(1, count - 1, 0)


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 6, 8, 12, 16, 31, 32])
def test_two_trees_link_by_link(nodes: int):
    """No node sends more than the model says, in two trees of half the data each, the second the first turned round."""
    fabric = ideal(f"{nodes}x dgx-h100")
    first = binary_tree(nodes)
    turned = [tuple((nodes - 1 - a if nodes % 2 == 0 else (a + 1) % nodes) for a in edge) for edge in first]
    sent = np.zeros(nodes)
    for parent, child in [*first, *turned]:
        sent[parent] += BULK / 2  # down
        sent[child] += BULK / 2  # up
    found = float(fabric.time_s("all_reduce", BULK, nodes, 8, algorithm="tree"))
    assert sent.max() / 50e9 <= found * (1 + 1e-9)
    if nodes <= 4:
        assert sent.max() / 50e9 == pytest.approx(found)
