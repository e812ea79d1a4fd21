"""Pairwise exchange: every rank sends each other rank its part directly; and a message from one rank to the next."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import Leg, algorithm, levels, seconds
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005"


@algorithm("pairwise", kinds=("all_to_all",), source=SOURCE, multiprocessors=32)
def pairwise(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Parts for the own node over its links, parts for other nodes through the ports, both at once."""
    part = nbytes / groups.size
    near = far = None
    if fabric.node_rates is not None:
        sent = part * (groups.local - 1)
        curve = fabric.node_rates.curve("pairwise", kind)
        near = Leg(curve, groups.local - 1, sent, part * groups.local, groups.mesh_rate)
    if fabric.network_rates is not None:
        rates = fabric.network_rates
        sent = part * (groups.size - groups.local) * groups.local  # by all ranks of a node
        over_spine = part * (groups.size - groups.local * groups.leaf) * groups.local
        narrow = np.divide(groups.node_rate, groups.spine_rate, out=np.zeros_like(nbytes), where=groups.leaves > 1)
        load = np.maximum(sent, over_spine * narrow)
        curve = rates.curve("pairwise", kind)
        # A rank with one peer outside has one connection, which fills a port no better than a message does.
        lonely = groups.size - groups.local == 1
        load = np.where(lonely, load * rates.curve("direct-send", "send_recv").wire / curve.wire, load)
        far = Leg(curve, groups.nodes - 1, load, nbytes, groups.node_rate)
    return levels(near, far, groups)


@algorithm("direct-send", kinds=("send_recv",), source="NCCL, send and receive", multiprocessors=2)
def send(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """One message from each rank of a chain to the next; the hop out of the node counts where there is one."""
    one = np.ones_like(nbytes)
    near = far = None
    if fabric.node_rates is not None:
        near = Leg(fabric.node_rates.curve("direct-send", kind), one, nbytes, nbytes, groups.pair_rate)
    if fabric.network_rates is not None:
        rate = np.minimum(groups.message_rate, np.where(groups.leaf > 1, np.inf, groups.spine_rate))
        far = Leg(fabric.network_rates.curve("direct-send", kind), one, nbytes, nbytes, rate)
        # The hop between nodes is a chain's slowest, and has a port, not the links within a node, before it.
        return np.where(groups.across, seconds(far), 0.0 if near is None else seconds(near))
    return levels(near, far, groups)
