"""How long a prompt takes by the iteration model: what loading its beginning is measured against."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from foretell.simulate.serving.batch import Batch
from foretell.simulate.serving.offload.hierarchy import Prefill

Floats = npt.NDArray[np.float64]

__all__ = ["Timed", "prefill_of"]


class Timed(Protocol):
    """What `prefill_of` needs of `foretell.simulate.serving.iteration.Iterations`."""

    def time_s(self, batch: Batch, /) -> Floats:
        """Seconds of each iteration."""
        ...


def prefill_of(iterations: Timed, chunk_tokens: int = 8192) -> Prefill:
    """Seconds to compute new tokens behind cached ones alone in the engine, in iterations of up to `chunk_tokens`."""

    def seconds(cached: Floats, new: Floats) -> Floats:
        cached, new = np.asarray(cached, np.float64), np.asarray(new, np.float64)
        steps = max(1, int(np.ceil(new.max() / chunk_tokens))) if new.size else 1
        total = np.zeros(len(new))
        for step in range(steps):
            done = np.minimum(new, step * float(chunk_tokens))
            q = np.minimum(new - done, float(chunk_tokens))
            there = q > 0.0
            if not there.any():
                break
            behind = (cached + done)[there]
            q = q[there]
            total[there] += iterations.time_s(
                Batch.of(
                    prefill_seqs=1.0, prefill_tokens=q, prefill_pairs=q * behind + q * (q + 1.0) / 2.0,
                    prefill_cached=behind, sampled=((done + chunk_tokens)[there] >= new[there]) * 1.0,
                )
            )  # fmt: skip
        return total

    return seconds
