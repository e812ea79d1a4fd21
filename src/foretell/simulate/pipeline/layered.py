"""Layered gradient accumulation on a modular pipeline: every micro-batch passes a layer before the next layer starts.

Layers are dealt to the ranks in turn (a chunk is one layer, or a few). A chunk's parameters are so needed in one piece
of the forward pass and one of the backward pass, and its gradients are complete long before the step ends.
"""

from __future__ import annotations

import numpy as np

from foretell.simulate.pipeline.closed import Floats, Ints, Rows, sweep
from foretell.simulate.pipeline.schedule import REGISTRY, Order, Schedule, Task


def order(pp: int, vp: int, micro_batches: int) -> Order:
    """Every rank: chunk by chunk all forwards, then from the last chunk on all backwards."""
    forward = [Task("F", chunk, k) for chunk in range(vp) for k in range(micro_batches)]
    backward = [Task("B", chunk, k) for chunk in reversed(range(vp)) for k in range(micro_batches)]
    return ((*forward, *backward),) * pp


def in_flight(pp: int, vp: int, micro_batches: int) -> Ints:
    """All of them, on every chunk."""
    return np.full((pp, vp), micro_batches)


def step_time(rows: Rows) -> Floats:
    """GPipe's, round after round. Exact where a rank's chunks are alike; ``(m v + p - 1)(f + b) / v`` for equal ranks.

    That needs ``m ≥ p``; with fewer micro-batches a rank waits in each round for the first to come back.
    """
    chunks = rows.vp[:, None]
    zero = np.zeros_like(rows.pp)
    return sweep(rows, rows.forward_s / chunks, rows.pp - 1) + sweep(rows, rows.backward_s / chunks, zero)


SCHEDULE = REGISTRY.register(
    Schedule(
        name="layered",
        title="Layered (modular pipeline)",
        source="Lamy-Poirier: Layered gradient accumulation and modular pipeline parallelism, 2021 (arXiv 2106.02679)",
        order=order,
        in_flight=in_flight,
        step_time=step_time,
        chunked=True,
    )
)
