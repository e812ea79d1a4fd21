"""Double binary trees between nodes, a chain within each: few steps, for small messages on many nodes."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import Leg, algorithm, levels
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009"


@algorithm("tree", kinds=("all_reduce",), source=SOURCE)
def tree(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Reduced up two trees, half of the data each, and sent down again; every node is a leaf in one of them."""
    if fabric.network_rates is None or not groups.across.any():
        return np.full_like(nbytes, np.inf)
    near = None
    if fabric.node_rates is not None:
        chain = 2 * (groups.local - 1)
        near = Leg(fabric.node_rates.curve("tree", kind), chain, 2 * nbytes, nbytes, groups.ring_rate)
    return np.where(groups.across, levels(near, between_nodes(kind, nbytes, groups, fabric), groups), np.inf)


def between_nodes(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric) -> Leg:
    """The part of two trees that runs between nodes."""
    assert fabric.network_rates is not None
    # The busiest node is a leaf of one tree (one half of the data up) and inside the other (one half up, two down).
    # Two nodes swap halves; the second of three has two leaves below it and none above.
    halves = np.select([groups.nodes <= 2, groups.nodes <= 3], [2.0, 3.0], 4.0)
    depth = 2 * np.ceil(np.log2(np.maximum(groups.nodes, 2)))
    rate = np.minimum(groups.node_rate, groups.leaf * groups.spine_rate)
    return Leg(fabric.network_rates.curve("tree", kind), depth, halves * nbytes / 2, nbytes, rate)
