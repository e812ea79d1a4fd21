"""Double binary trees between nodes, a chain within each: few steps, for small messages on many nodes."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import algorithm, seconds
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009"


@algorithm("tree", kinds=("all_reduce",), source=SOURCE)
def tree(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Reduced up two trees, half of the data each, and sent down again; every node is a leaf in one of them."""
    if fabric.network_rates is None:
        return np.full_like(nbytes, np.inf)
    # A leaf of one tree (1 up) is an inner node of the other (1 up, 2 down): 4 halves a node, all but the root's.
    sent = 2 * nbytes * (groups.nodes - 1) / groups.nodes
    depth = 2 * np.ceil(np.log2(np.maximum(groups.nodes, 2)))
    rate = np.minimum(groups.node_rate, groups.leaf * groups.spine_rate)
    time = seconds(fabric.network_rates.curve("tree", kind), depth, sent, nbytes, rate)
    if fabric.node_rates is not None:
        chain = 2 * (groups.local - 1)
        inside = seconds(fabric.node_rates.curve("tree", kind), chain, 2 * nbytes, nbytes, groups.ring_rate)
        time = np.where(groups.local > 1, np.maximum(time, inside), time)
    return np.where(groups.across, time, np.inf)
