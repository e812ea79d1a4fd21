"""Interleaved 1F1B: each rank holds several chunks of layers, dealt in turn, so that the pipeline fills sooner."""

from __future__ import annotations

import numpy as np

from foretell.simulate.pipeline import one_f_one_b
from foretell.simulate.pipeline.schedule import REGISTRY, Ints, Order, Schedule, Task


def order(pp: int, vp: int, micro_batches: int) -> Order:
    """Rank r: ``2 (pp - r - 1) + (vp - 1) pp`` forwards, then F and B in turn, then the backwards left.

    Micro-batches go in rounds of `pp` through chunk after chunk (backward: from the last chunk on). With one chunk a
    rank it is 1F1B.
    """
    if vp == 1:
        return one_f_one_b.order(pp, vp, micro_batches)
    count = vp * micro_batches
    forward = [Task("F", k // pp % vp, k // (pp * vp) * pp + k % pp) for k in range(count)]
    backward = [Task("B", vp - 1 - task.chunk, task.micro_batch) for task in forward]
    ranks = []
    for rank in range(pp):
        warm_up = _warm_up(pp, vp, micro_batches, rank)
        tasks = forward[:warm_up]
        for k in range(count):
            tasks += forward[warm_up + k : warm_up + k + 1]
            tasks.append(backward[k])
        ranks.append(tuple(tasks))
    return tuple(ranks)


def _warm_up(pp: int, vp: int, micro_batches: int, rank: int) -> int:
    return min(2 * (pp - rank - 1) + (vp - 1) * pp, vp * micro_batches)


def in_flight(pp: int, vp: int, micro_batches: int) -> Ints:
    """What the warm-up and one forward more have put into each chunk."""
    if vp == 1:
        return one_f_one_b.in_flight(pp, vp, micro_batches)
    warm_up = np.array([_warm_up(pp, vp, micro_batches, rank) for rank in range(pp)])
    held = np.minimum(warm_up + 1, vp * micro_batches)
    rounds, rest = np.divmod(held, pp * vp)
    return np.asarray(rounds[:, None] * pp + np.clip(rest[:, None] - pp * np.arange(vp), 0, pp))


SCHEDULE = REGISTRY.register(
    Schedule(
        name="interleaved",
        title="Interleaved 1F1B",
        source="Narayanan et al.: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,"
        " SC 2021, section 2.2",
        order=order,
        in_flight=in_flight,
        chunked=True,
        whole_rounds=True,
    )
)
