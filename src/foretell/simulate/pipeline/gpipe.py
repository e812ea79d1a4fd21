"""GPipe: all micro-batches forward, then all backward."""

from __future__ import annotations

import numpy as np

from foretell.simulate.pipeline.closed import Floats, Ints, Rows, sweep
from foretell.simulate.pipeline.schedule import REGISTRY, Order, Schedule, Task


def order(pp: int, vp: int, micro_batches: int) -> Order:
    """Every rank: F0 F1 … B0 B1 …"""
    tasks = tuple(Task(kind, 0, k) for kind in "FB" for k in range(micro_batches))
    return (tasks,) * pp


def in_flight(pp: int, vp: int, micro_batches: int) -> Ints:
    """All of them, on every rank."""
    return np.full((pp, vp), micro_batches)


def step_time(rows: Rows) -> Floats:
    """Down the pipeline and back: ``Σ f + (m - 1) max f + Σ b + (m - 1) max b`` over ranks; exact."""
    zero = np.zeros_like(rows.pp)
    return sweep(rows, rows.forward_s, rows.pp - 1) + sweep(rows, rows.backward_s, zero)


SCHEDULE = REGISTRY.register(
    Schedule(
        name="gpipe",
        title="GPipe",
        source="Huang et al.: GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019",
        order=order,
        in_flight=in_flight,
        step_time=step_time,
    )
)
