"""What the links inside a machine carry, against the wiring drawn out link by link."""

import itertools

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.hardware import cluster, node
from foretell.simulate.collectives import Fabric, wiring


@pytest.mark.parametrize(("size", "rings"), [(2, 1), (3, 2), (4, 4), (6, 2), (7, 4), (8, 6)])
def test_rings_of_a_dgx1_are_what_its_links_allow(size: int, rings: int):
    assert wiring.hamiltonian_rings(6, size, 1) == rings
    assert wiring.ring_rate(node("dgx-1v"), size, 1) == rings * 25e9


def test_dgx1_has_six_links_a_gpu_and_its_forerunner_four():
    for links, cube in ((6, wiring.CUBE_OF_SIX), (4, wiring.CUBE_OF_FOUR)):
        for gpu in range(8):
            assert sum(count for pair, count in cube.items() if gpu in pair) == links
    assert wiring.hamiltonian_rings(4, 8, 1) == 4  # two rings, both ways, use all four links


def test_full_mesh_gives_a_link_for_each_peer():
    machine = node("mi300x-8x")
    assert wiring.pair_rate(machine, 3) == 64e9
    for size in (2, 4, 8):
        assert wiring.ring_rate(machine, size, 1) == (size - 1) * 64e9


def test_torus_by_brute_force():
    """All-to-all on 4 x 4 x 4: every part crosses as many links as its shortest way has, spread over six a chip."""
    ways = [sum(min(d, 4 - d) for d in offset) for offset in itertools.product(range(4), repeat=3)]
    hops = sum(ways) / len(ways)
    machine = cluster("64x tpu-v4").groups[0][1]  # 4 x 4 x 4, six links a chip
    assert wiring.ring_rate(machine, 4, 1) == 2 * 50e9
    assert wiring.ring_rate(machine, 64, 1) == 6 * 50e9
    assert wiring.pair_rate(machine, 1) == 50e9
    assert wiring.mesh_rate(machine, 64, 1) == pytest.approx(6 * 50e9 / hops)


def test_pcie_groups_across_switches_share_the_way_up():
    machine = node("l40s-pcie-8x")
    assert wiring.ring_rate(machine, 2, 4) == wiring.ring_rate(machine, 8, 1) / 2
    assert wiring.ring_rate(machine, 2, 4, alone=True) == wiring.ring_rate(machine, 8, 1)


def test_kinds_and_what_they_borrow():
    names = {
        "dgx-h100": "nvlink-4-nvswitch",
        "dgx-1v": "nvlink-2-mesh",
        "mi300x-8x": "xgmi-4-full",
        "gaudi-2-8x": "roce-100GbE-full",
        "8x l40s": "pcie-4",
        "8x rtx-4090": "pcie-4-host",
    }
    for text, kind in names.items():
        fabric = Fabric.of(cluster(text))
        assert fabric.node_kind == kind
        assert bool(fabric.notes) == (fabric.node_rates is not None and fabric.node_rates.measured_on != kind)
    assert Fabric.of(cluster("8x rtx-4090"), peer_access=True).node_kind == "pcie-4"
    assert "nvlink-3-nvswitch" in Fabric.of(cluster("dgx-2")).notes[0]
    with pytest.raises(InputError, match="trn1"):
        Fabric.of(cluster("trn1-32xlarge"))


def test_a_port_set_lower_is_slower():
    usual, set_low = (Fabric.of(cluster("2x dgx-h100"), port_bytes_per_s=rate) for rate in (None, 25e9))
    ratio = set_low.time_s("all_reduce", 1e10, 2, 8) / usual.time_s("all_reduce", 1e10, 2, 8)
    assert ratio == pytest.approx(2, rel=0.01)
    with pytest.raises(InputError, match="above 0"):
        Fabric.of(cluster("2x dgx-h100"), port_bytes_per_s=0.0)


def test_bridges_join_neighbours_only():
    plain, bridged = (Fabric.of(cluster("4x a100-pcie-80gb"), bridges=on) for on in (False, True))
    size, stride = np.array([2, 2, 4]), np.array([1, 2, 1])
    for kind in ("all_reduce", "send_recv"):
        slow, fast = (fabric.time_s(kind, 1e9, size, stride) for fabric in (plain, bridged))
        assert fast[0] < slow[0] / 5  # 300 GB/s for 31.5
        assert fast[1] == slow[1]
        # A ring through both pairs uses each slot one way only.
        assert slow[2] / 2 < fast[2] <= slow[2]
    assert bridged.to_dict()["bridge_kind"] == "nvlink-3-bridge"
    assert any("nvlink-3-nvswitch" in note for note in bridged.notes)
    with pytest.raises(InputError, match="takes no bridge"):
        Fabric.of(cluster("8x l40s"), bridges=True)
    with pytest.raises(InputError, match="takes no bridge"):
        Fabric.of(cluster("dgx-a100"), bridges=True)


def test_mixed_nodes_are_as_slow_as_the_slowest():
    mixed = Fabric.of(cluster("1x dgx-a100 + 1x dgx-h100"))
    assert mixed.node_kind == "nvlink-3-nvswitch"
    sizes = np.array([8, 16])
    slow = Fabric.of(cluster("2x dgx-a100"))
    assert np.allclose(mixed.time_s("all_reduce", 1e9, sizes), slow.time_s("all_reduce", 1e9, sizes))
