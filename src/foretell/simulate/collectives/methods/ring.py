"""Rings: every rank sends to the next, all links busy at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import PASSES, Leg, algorithm, levels
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009"


@algorithm("ring", kinds=("all_reduce", "all_gather", "reduce_scatter", "broadcast"), source=SOURCE)
def ring(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Round a ring through all ranks; over nodes, several rings enter and leave each by different ports."""
    passes = PASSES.get(kind, 1.0)
    # A broadcast is cut into pieces that follow each other round the ring: all of it crosses each link.
    sent = nbytes if kind == "broadcast" else passes * nbytes * (groups.size - 1) / groups.size
    near = joined = far = None
    # Each pass takes size - 1 hops, of which one a node, all but the last, are between nodes.
    outside = passes * (groups.nodes - 1)
    if fabric.node_rates is not None:
        steps = passes * (groups.size - 1) - outside
        near = Leg(fabric.node_rates.curve("ring", kind), steps, sent, nbytes, groups.ring_rate)
        if fabric.pairs is not None:
            joined = replace(near, curve=fabric.node_rates.curve("bridged-ring", kind))
    if fabric.network_rates is not None:
        # One hop in `leaf` leaves the leaf switch.
        rate = np.minimum(groups.node_rate, groups.leaf * groups.spine_rate)
        far = Leg(fabric.network_rates.curve("ring", kind), outside, sent, nbytes, rate)
    time = levels(near, far, groups)
    if joined is not None:
        # With every second hop over a bridge, a card either sends or receives through its slot, not both at once.
        time = np.where((groups.size > 2) & (groups.stride == 1), levels(joined, far, groups), time)
    return time
