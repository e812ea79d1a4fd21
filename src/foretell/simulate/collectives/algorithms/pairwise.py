"""Pairwise exchange: every rank sends each other rank its part directly; and a message from one rank to the next."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import algorithm, seconds
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005"


@algorithm("pairwise", kinds=("all_to_all",), source=SOURCE)
def pairwise(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Parts for the own node over its links, parts for other nodes through the ports, both at once."""
    part = nbytes / groups.size
    time: Floats = np.zeros_like(nbytes)
    if fabric.node_rates is not None:
        sent = part * (groups.local - 1)
        curve = fabric.node_rates.curve("pairwise", kind)
        inside = seconds(curve, groups.local - 1, sent, nbytes * groups.local / groups.size, groups.mesh_rate)
        time = np.where(groups.local > 1, inside, 0.0)
    if fabric.network_rates is not None:
        outside_sent = part * (groups.size - groups.local) * groups.local  # by all ranks of a node
        over_spine = part * (groups.size - groups.local * groups.leaf) * groups.local
        curve = fabric.network_rates.curve("pairwise", kind)
        narrow = np.divide(groups.node_rate, groups.spine_rate, out=np.zeros_like(nbytes), where=groups.leaves > 1)
        load = np.maximum(outside_sent, over_spine * narrow)
        outside = seconds(curve, groups.nodes - 1, load, nbytes, groups.node_rate)
        time = np.where(groups.across, np.maximum(time, outside), time)
    return time


@algorithm("direct-send", kinds=("send_recv",), source="one message, NCCL's send and receive")
def send(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """One message from each rank of a chain to the next; the hop out of the node counts where there is one."""
    one = np.ones_like(nbytes)
    time: Floats = np.zeros_like(nbytes)
    if fabric.node_rates is not None:
        inside = seconds(fabric.node_rates.curve("direct-send", kind), one, nbytes, nbytes, groups.pair_rate)
        time = np.where(groups.local > 1, inside, 0.0)
    if fabric.network_rates is not None:
        curve = fabric.network_rates.curve("direct-send", kind)
        rate = np.minimum(groups.message_rate, np.where(groups.leaf > 1, np.inf, groups.spine_rate))
        outside = seconds(curve, one, nbytes, nbytes, rate)
        time = np.where(groups.across, np.maximum(time, outside), time)
    return time
