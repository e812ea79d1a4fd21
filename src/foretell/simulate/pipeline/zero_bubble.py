"""Zero bubble, ZB-H1: the backward pass in two, so that gradients of weights fill what 1F1B leaves idle."""

from __future__ import annotations

import numpy as np

from foretell.simulate.pipeline.closed import Floats, Ints, Rows, at, cumulated, longest_from
from foretell.simulate.pipeline.schedule import REGISTRY, Order, Schedule, Task


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


def step_time(rows: Rows) -> Floats:
    """Step times. For equal ranks, ``m ≥ p`` and no messages ``m (f + b + w) + (p - 1) max(f + b - w, f, b)``; exact.

    ``b`` is the backward pass without ``w``, the gradients of weights. Where ranks differ it is a lower bound, from
    the paths that begin as those of 1F1B do and end on the first rank, or where they turned last. Messages that fly
    are hidden by W in the steady state while two take no longer than it does; where they take longer it is a lower
    bound as well.
    """
    present, last, rank = rows.present, rows.pp[:, None] - 1, rows.rank
    send, flight = rows.blocking_s[:, None], rows.latency_s[:, None]
    weights = rows.weights_s
    forward = np.where(present, rows.forward_s + np.where(rank < last, send, 0.0), 0.0)
    backward = np.where(present, rows.backward_s - weights + np.where(rank > 0, send, 0.0), 0.0)
    jobs = rows.micro_batches[:, None]
    warm_up = np.minimum(last - rank, jobs - 1)
    down, up = cumulated(forward, present) + rank * flight, cumulated(backward, present) + rank * flight
    begin = longest_from(down + up + warm_up * np.maximum.accumulate(forward, axis=1), present) - up
    turns = jobs - 1 - warm_up
    bulk = begin + turns * (forward + backward) + np.maximum(turns - rank, 0) * weights - down
    both = backward + weights
    # What can be spent on B with W between them while the last F runs down; with few micro-batches W may come later.
    slowest = np.maximum.accumulate(np.where(jobs > last, both, backward), axis=1)
    to_first = longest_from(down + up + warm_up * slowest, present) + weights[:, :1]
    stop = np.where(present, np.minimum(rank + 1, jobs) * weights - (up - backward), -np.inf)
    between = np.clip(jobs - 1 - rank, 0, warm_up) * weights
    anywhere = longest_from(down + up + warm_up * backward + between, present) + np.maximum.accumulate(stop, axis=1)
    usable = present & ((turns > 0) | (rank == last))
    ends = np.maximum(to_first, anywhere)
    longest = np.where(usable, bulk + ends, -np.inf).max(axis=1, initial=-np.inf)
    # Where the first ranks' warm-up takes all micro-batches: all F on the slowest of them, or all B and W on the first.
    whole = rows.pp - rows.micro_batches
    which = np.clip(whole, 0, None)
    all_forward = at(ends, which) + (rows.micro_batches - 1) * at(np.maximum.accumulate(forward, axis=1), which)
    all_backward = begin[:, 0] + rows.micro_batches * both[:, 0]
    return np.asarray(np.where(whole >= 0, np.maximum(longest, np.maximum(all_forward, all_backward)), longest))


SCHEDULE = REGISTRY.register(
    Schedule(
        name="zero-bubble",
        title="Zero bubble (ZB-H1)",
        source="Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1",
        order=order,
        in_flight=in_flight,
        step_time=step_time,
        splits=True,
    )
)
