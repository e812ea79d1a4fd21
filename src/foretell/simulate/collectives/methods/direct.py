"""Direct all-reduce for small messages within a node, as serving engines use it: one kernel, peers' memory read."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import Leg, algorithm, seconds
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "the custom all-reduce kernels of TensorRT-LLM and vLLM, one-shot and two-shot"


@algorithm("one-shot", kinds=("all_reduce",), source=SOURCE, auto=False)
def one_shot(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Every rank reads every other rank's whole buffer: one step, size - 1 times the bytes."""
    if fabric.node_rates is None:
        return np.full_like(nbytes, np.inf)
    sent = nbytes * (groups.size - 1)
    curve = fabric.node_rates.curve("one-shot", kind)
    time = seconds(Leg(curve, groups.size - 1, sent, nbytes, groups.mesh_rate))
    return np.where(groups.across, np.inf, time)


@algorithm("two-shot", kinds=("all_reduce",), source=SOURCE, auto=False)
def two_shot(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Every rank reduces its share, read from all others, then reads the others' shares: two steps."""
    if fabric.node_rates is None:
        return np.full_like(nbytes, np.inf)
    sent = 2 * nbytes * (groups.size - 1) / groups.size
    curve = fabric.node_rates.curve("two-shot", kind)
    time = seconds(Leg(curve, groups.size - 1, sent, nbytes, groups.mesh_rate))
    return np.where(groups.across, np.inf, time)


@algorithm("direct", kinds=("all_reduce",), source=SOURCE, auto=False)
def direct(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """The faster of one shot and two, as the engines choose by size."""
    return np.minimum(one_shot(kind, nbytes, groups, fabric), two_shot(kind, nbytes, groups, fabric))
