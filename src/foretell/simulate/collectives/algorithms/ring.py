"""Rings: every rank sends to the next, all links busy at once."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import PASSES, algorithm, seconds
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009"


@algorithm("ring", kinds=("all_reduce", "all_gather", "reduce_scatter", "broadcast"), source=SOURCE)
def ring(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Round a ring through all ranks; over nodes, several rings enter and leave each by different ports."""
    passes = PASSES.get(kind, 1.0)
    # A broadcast is cut into pieces that follow each other round the ring: all of it crosses each link.
    sent = nbytes if kind == "broadcast" else passes * nbytes * (groups.size - 1) / groups.size
    time: Floats = np.zeros_like(nbytes)
    steps_outside = passes * np.where(groups.across, groups.nodes, 0.0)
    if fabric.node_rates is not None:
        steps = passes * (groups.size - 1) - steps_outside
        inside = seconds(fabric.node_rates.curve("ring", kind), np.maximum(steps, 0), sent, nbytes, groups.ring_rate)
        time = np.where(groups.local > 1, inside, 0.0)
    if fabric.network_rates is not None:
        # One hop in `leaf` leaves the leaf switch.
        rate = np.minimum(groups.node_rate, groups.leaf * groups.spine_rate)
        outside = seconds(fabric.network_rates.curve("ring", kind), steps_outside, sent, nbytes, rate)
        time = np.where(groups.across, np.maximum(outside, time), time)
    return time
