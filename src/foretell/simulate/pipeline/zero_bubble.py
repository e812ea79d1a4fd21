"""Zero bubble, ZB-H1: the backward pass in two, so that gradients of weights fill what 1F1B leaves idle."""

from __future__ import annotations

import numpy as np

from foretell.simulate.pipeline.schedule import REGISTRY, Ints, Order, Schedule, Task


def order(pp: int, vp: int, micro_batches: int) -> Order:
    """Rank r: 1F1B, the gradients of weights following those of inputs r micro-batches later.

    Every rank so has the same number of micro-batches in flight as the first, whose memory is that of 1F1B.
    """
    return tuple(_rank(rank, min(pp - 1 - rank, micro_batches), micro_batches) for rank in range(pp))


def _rank(delay: int, warm_up: int, micro_batches: int) -> tuple[Task, ...]:
    tasks = [Task("F", 0, k) for k in range(warm_up)]
    for k in range(micro_batches):
        if warm_up + k < micro_batches:
            tasks.append(Task("F", 0, warm_up + k))
        tasks.append(Task("B", 0, k))
        if k >= delay:
            tasks.append(Task("W", 0, k - delay))
    tasks += [Task("W", 0, k) for k in range(max(0, micro_batches - delay), micro_batches)]
    return tuple(tasks)


def in_flight(pp: int, vp: int, micro_batches: int) -> Ints:
    """As many as there are ranks, on each."""
    return np.full((pp, vp), min(pp, micro_batches))


SCHEDULE = REGISTRY.register(
    Schedule(
        name="zero-bubble",
        title="Zero bubble (ZB-H1)",
        source="Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1",
        order=order,
        in_flight=in_flight,
        splits=True,
    )
)
