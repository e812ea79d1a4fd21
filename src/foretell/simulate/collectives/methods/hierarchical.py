"""Hierarchies: reduce within a node first, so that less crosses the slow links; two levels, or three with leaves."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import PASSES, Leg, algorithm, seconds
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "Cho et al., BlueConnect: Decomposing all-reduce on heterogeneous network hierarchy, MLSys 2019"
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@algorithm("hierarchical-2", kinds=KINDS, source=SOURCE)
def two_levels(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Scatter within each node, the collective between ranks of equal place, gather within each node."""
    if fabric.network_rates is None or fabric.node_rates is None or not groups.across.any():
        return np.full_like(nbytes, np.inf)
    rate = np.minimum(groups.node_rate, groups.leaf * groups.spine_rate)
    time = _inside(kind, nbytes, groups, fabric) + _between(kind, nbytes, groups.nodes, rate, fabric)
    return np.where(groups.across & (groups.local > 1), time, np.inf)


@algorithm("hierarchical-3", kinds=KINDS, source=SOURCE)
def three_levels(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """As two levels, and between leaf switches apart: only a leaf's share of the data crosses the spine."""
    if fabric.network_rates is None or not (groups.leaves > 1).any():
        return np.full_like(nbytes, np.inf)
    under = _between(kind, nbytes, groups.leaf, groups.node_rate, fabric)
    over = _between(kind, nbytes / groups.leaf, groups.leaves, groups.spine_rate, fabric)
    time = under + over
    if fabric.node_rates is not None:
        time = time + np.where(groups.local > 1, _inside(kind, nbytes, groups, fabric), 0.0)
    return np.where((groups.leaves > 1) & (groups.leaf > 1), time, np.inf)


def _inside(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric) -> Floats:
    """The scatter and the gather within a node (one of them, but for an all-reduce)."""
    assert fabric.node_rates is not None
    sent = nbytes * (groups.local - 1) / groups.local
    halves = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
    time: Floats = np.zeros_like(nbytes)
    for half in halves:
        curve = fabric.node_rates.curve("ring", half)
        time = time + seconds(Leg(curve, groups.local - 1, sent, nbytes, groups.ring_rate))
    return time


def _between(kind: str, nbytes: Floats, members: Floats, rate: Floats, fabric: Fabric) -> Floats:
    """The collective between `members` nodes, each sending through all its ports at `rate`."""
    assert fabric.network_rates is not None
    passes = PASSES[kind]
    sent = passes * nbytes * (members - 1) / members
    return seconds(Leg(fabric.network_rates.curve("ring", kind), passes * (members - 1), sent, nbytes, rate))
