"""What the links inside one machine carry for a group of its devices: rates as signalled, bytes/s, one direction."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import permutations

from foretell.errors import InputError
from foretell.hardware.cluster import Node

__all__ = ["bridged_pair", "hamiltonian_rings", "kind_of_wiring", "mesh_rate", "pair_rate", "ring_rate"]

#: DGX-1 with V100: links between GPU pairs (NVIDIA DGX-1 With Tesla V100 System Architecture, 2017, figure 4).
CUBE_OF_SIX = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
#: DGX-1 with P100: one link a pair, two quads joined corner to corner (the same paper's predecessor, 2016).
CUBE_OF_FOUR = {
    (0, 1): 1, (0, 2): 1, (0, 3): 1, (1, 2): 1, (1, 3): 1, (2, 3): 1, (4, 5): 1, (4, 6): 1,
    (4, 7): 1, (5, 6): 1, (5, 7): 1, (6, 7): 1, (0, 4): 1, (1, 5): 1, (2, 6): 1, (3, 7): 1,
}  # fmt: skip
#: Devices behind one PCIe switch, as most eight-card servers have it (two or four).
CARDS_PER_SWITCH = 2


def kind_of_wiring(node: Node, peer_access: bool) -> str:
    """The kind of link inside `node`, as the calibration names it: ``nvlink-4-nvswitch``, ``pcie-5-host``.

    Raises InputError where the node's data sheet names no link.
    """
    if node.link is None:
        raise InputError(f"no link between the devices of {node.name!r} is known", None, "name the link in its file")
    generation = f"-{node.link.generation}" if node.link.generation else ""
    if node.link.topology == "bridge":
        return f"{node.link.kind}{generation}-bridge"
    if node.topology == "pcie-tree":
        return f"pcie{generation}" + ("" if peer_access else "-host")
    shape = {"nvswitch": "nvswitch", "full-mesh": "full", "hybrid-mesh": "mesh", "torus": "torus"}[node.topology]
    return f"{node.link.kind}{generation}-{shape}"


def _total(node: Node) -> float:
    if node.link is None or node.link.total_bandwidth_bytes_per_s is None:
        raise InputError(f"the bandwidth inside {node.name!r} is not known", None, "give its link a bandwidth")
    return node.link.total_bandwidth_bytes_per_s


def bridged_pair(node: Node) -> Node:
    """Two neighbours of `node` and the bridge between them, as a machine of two.

    Raises InputError where its devices take no bridge.
    """
    bridge = next((link for link in node.device.links if link.topology == "bridge"), None)
    if bridge is None or node.topology != "pcie-tree":
        raise InputError(f"{node.device.name} takes no bridge in {node.name!r}", "bridges", "leave it out")
    name = f"a bridged pair of {node.device.name}"
    return replace(node, name=name, count=2, topology="nvswitch", link=bridge, nics=())


def ring_rate(node: Node, members: int, stride: int, alone: bool = False) -> float:
    """What each of `members` devices `stride` apart can send along rings through all of them."""
    total = _total(node)
    if node.topology == "full-mesh":
        return total * (members - 1) / max(1, node.count - 1)
    if node.topology == "hybrid-mesh" and node.link is not None:
        return total / node.link.count * hamiltonian_rings(node.link.count, members, stride)
    if node.topology == "torus" and node.link is not None:
        return total * _axes(node, members * stride) * 2 / node.link.count
    if node.topology == "pcie-tree" and not alone:
        return total / min(stride, CARDS_PER_SWITCH)
    return total


def mesh_rate(node: Node, members: int, stride: int, alone: bool = False) -> float:
    """What each of `members` devices can send when all send to all at once."""
    if node.topology == "hybrid-mesh":  # Pairs without a link go through a neighbour: two hops for one.
        return ring_rate(node, members, stride) / (1 if members <= 4 else 2)
    rate = ring_rate(node, members, stride, alone)
    if node.topology == "torus" and node.link is not None:
        side = round(math.pow(node.count, 2 / node.link.count))
        hops = min(members * stride, side) / 4
        return rate / max(1.0, hops * _axes(node, members * stride))
    return rate


def pair_rate(node: Node, stride: int) -> float:
    """What a device can send to the one `stride` further on."""
    total = _total(node)
    if node.topology == "full-mesh":
        return total / max(1, node.count - 1)
    if node.topology == "hybrid-mesh" and node.link is not None:
        links = _cube(node.link.count).get((0, stride), 0)
        return total / node.link.count * max(links, 0.5)
    if node.topology == "torus" and node.link is not None:
        return total / node.link.count
    return total


def _axes(node: Node, span: int) -> int:
    """How many axes of a torus a block of `span` devices stretches over."""
    assert node.link is not None
    most = max(1, node.link.count // 2)
    side = max(2, round(math.pow(node.count, 1 / most)))
    return min(most, max(1, math.ceil(math.log(max(2, span)) / math.log(side) - 1e-9)))


def _cube(links: int) -> dict[tuple[int, int], int]:
    return CUBE_OF_FOUR if links <= 4 else CUBE_OF_SIX


@cache
def hamiltonian_rings(links: int, members: int, stride: int) -> float:
    """How many rings through `members` GPUs of a DGX-1, `stride` apart, share no link in either direction.

    Every undirected ring counts twice, being run both ways. Where no ring exists (five GPUs), data goes back over
    the way it came: one ring, both ways, each link used twice.

    >>> hamiltonian_rings(6, 8, 1), hamiltonian_rings(6, 4, 1), hamiltonian_rings(6, 3, 1), hamiltonian_rings(6, 2, 1)
    (6.0, 4.0, 2.0, 1.0)
    """
    cube = _cube(links)
    chosen = [rank * stride for rank in range(members)]
    free = {(a, b): n for (a, b), n in cube.items() if a in chosen and b in chosen}
    if members == 2:
        return float(free.get((chosen[0], chosen[1]), 0.5))
    rings = [(chosen[0], *rest) for rest in permutations(chosen[1:]) if rest[0] < rest[-1]]
    usable = [edges for edges in map(_edges, rings) if all(edge in free for edge in edges)]
    return 2.0 * _pack(usable, free, min(links, 6) // 2) or 1.5


def _edges(ring: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(min(a, b), max(a, b)) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)]


def _pack(rings: list[list[tuple[int, int]]], free: dict[tuple[int, int], int], most: int) -> int:
    """The most rings of `rings` that fit in `free` links together."""
    best = 0
    for at, ring in enumerate(rings):
        if all(free[edge] > 0 for edge in ring):
            left = dict(free)
            for edge in ring:
                left[edge] -= 1
            rest = [r for r in rings[at:] if all(left[e] > 0 for e in r)]
            best = max(best, 1 + _pack(rest, left, most - 1))
            if best >= most:
                return best
    return best
