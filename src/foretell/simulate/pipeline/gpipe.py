"""GPipe: all micro-batches forward, then all backward."""

from __future__ import annotations

import numpy as np

from foretell.simulate.pipeline.schedule import REGISTRY, Ints, Order, Schedule, Task


def order(pp: int, vp: int, micro_batches: int) -> Order:
    """Every rank: F0 F1 … B0 B1 …"""
    tasks = tuple(Task(kind, 0, k) for kind in "FB" for k in range(micro_batches))
    return (tasks,) * pp


def in_flight(pp: int, vp: int, micro_batches: int) -> Ints:
    """All of them, on every rank."""
    return np.full((pp, vp), micro_batches)


SCHEDULE = REGISTRY.register(
    Schedule(
        name="gpipe",
        title="GPipe",
        source="Huang et al.: GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019",
        order=order,
        in_flight=in_flight,
    )
)
