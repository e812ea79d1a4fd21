"""1F1B (PipeDream-Flush): after a warm-up, each rank runs one forward and one backward in turn."""

from __future__ import annotations

import numpy as np

from foretell.simulate.pipeline.schedule import REGISTRY, Ints, Order, Schedule, Task


def order(pp: int, vp: int, micro_batches: int) -> Order:
    """Rank r: as many forwards as there are ranks after it, then F and B in turn, then the backwards left."""
    return tuple(_rank(min(pp - 1 - rank, micro_batches), micro_batches) for rank in range(pp))


def _rank(warm_up: int, micro_batches: int) -> tuple[Task, ...]:
    tasks = [Task("F", 0, k) for k in range(warm_up)]
    for k in range(micro_batches):
        if warm_up + k < micro_batches:
            tasks.append(Task("F", 0, warm_up + k))
        tasks.append(Task("B", 0, k))
    return tuple(tasks)


def in_flight(pp: int, vp: int, micro_batches: int) -> Ints:
    """One on the last rank, one more on each before it."""
    return np.minimum(pp - np.arange(pp), micro_batches)[:, None]


SCHEDULE = REGISTRY.register(
    Schedule(
        name="1f1b",
        title="1F1B",
        source="Narayanan et al.: Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021 (PipeDream-Flush)",
        order=order,
        in_flight=in_flight,
    )
)
