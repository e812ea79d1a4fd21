"""Direct all-reduce for small messages within a node, as serving engines use it: one kernel, peers' memory read."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import algorithm, seconds
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "the custom all-reduce kernels of TensorRT-LLM and vLLM, one-shot and two-shot"


@algorithm("one-shot", kinds=("all_reduce",), source=SOURCE, auto=False)
def one_shot(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Every rank reads every other rank's whole buffer: one step, size - 1 times the bytes."""
    if fabric.node_rates is None:
        return np.full_like(nbytes, np.inf)
    sent = nbytes * (groups.size - 1)
    time = seconds(fabric.node_rates.curve("one-shot", kind), groups.size - 1, sent, nbytes, groups.mesh_rate)
    return np.where(groups.across, np.inf, time)


@algorithm("two-shot", kinds=("all_reduce",), source=SOURCE, auto=False)
def two_shot(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Every rank reduces its share, read from all others, then reads the others' shares: two steps."""
    if fabric.node_rates is None:
        return np.full_like(nbytes, np.inf)
    sent = 2 * nbytes * (groups.size - 1) / groups.size
    time = seconds(fabric.node_rates.curve("two-shot", kind), groups.size - 1, sent, nbytes, groups.mesh_rate)
    return np.where(groups.across, np.inf, time)
