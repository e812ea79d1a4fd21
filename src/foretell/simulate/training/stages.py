"""Which layers lie on which rank of the pipeline."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretell.workload.llm.config import LLMConfig, layer_kinds

Ints = npt.NDArray[np.int64]

__all__ = ["layers_of"]


@lru_cache(maxsize=4096)
def layers_of(config: LLMConfig, pp: int, vp: int = 1, first: int = 0, last: int = 0) -> Ints:
    """Layers of each group on each chunk of each rank: (pp, vp, groups), read-only.

    Layers go in order through the chunks, rank by rank and then chunk by chunk (Megatron's virtual stages). `first` and
    `last` are the layers of the first and last rank, 0 for as many as the others have. What does not divide evenly goes
    to the earlier chunks, one layer each.
    """
    inner = config.layers - first - last
    free = [rank for rank in range(pp) if not (rank == 0 and first) and not (rank == pp - 1 and last)]
    counts = np.zeros((vp, pp), dtype=np.int64)
    if free:
        counts[:, free] = _even(inner, vp * len(free)).reshape(vp, len(free))
    if first:
        counts[:, 0] = _even(first, vp)
    if last:
        counts[:, pp - 1] = _even(last, vp)
    ends = np.cumsum(counts.reshape(-1))
    index = {(group.window, group.moe): i for i, group in enumerate(config.groups)}
    kinds = np.array([index[kind] for kind in layer_kinds(config)])
    result = np.zeros((vp, pp, len(config.groups)), dtype=np.int64)
    for chunk, (start, end) in enumerate(zip(ends - counts.reshape(-1), ends, strict=True)):
        result[chunk // pp, chunk % pp] = np.bincount(kinds[max(0, start):end], minlength=len(config.groups))
    result = np.ascontiguousarray(result.transpose(1, 0, 2))
    result.flags.writeable = False
    return result


def _even(total: int, parts: int) -> Ints:
    return np.array([total // parts + (i < total % parts) for i in range(parts)], dtype=np.int64)
