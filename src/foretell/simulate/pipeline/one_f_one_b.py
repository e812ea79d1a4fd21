"""1F1B (PipeDream-Flush): after a warm-up, each rank runs one forward and one backward in turn."""

from __future__ import annotations

import numpy as np

from foretell.simulate.pipeline.closed import Bools, Floats, Ints, Rows, at, cumulated, longest_from
from foretell.simulate.pipeline.schedule import REGISTRY, Order, Schedule, Task


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


def step_time(rows: Rows) -> Floats:
    """Step times. With equal ranks and no messages ``(m + p - 1)(f + b)``.

    Exact for any times of ranks where nothing is sent or sends keep the sender waiting (Megatron-LM's way without
    chunks). A message that travels while its sender computes is waited for all the same: the path down and up costs
    two messages a rank for each further micro-batch. There the first micro-batches are followed one by one, and beyond
    `FOLLOWED` times as many as ranks all further ones take the time of the slowest cycle: exact up to that and
    for equal ranks, within 3 % for others.
    """
    flying = rows.latency_s > 0.0
    result = np.empty(len(rows.pp))
    result[~flying] = _of_paths(rows.take(~flying))
    for ranks in np.unique(rows.pp[flying]).tolist():
        which = flying & (rows.pp == ranks)
        result[which] = _followed(rows.take(which))
    return result


#: Micro-batches that are followed one by one where messages fly, as a multiple of the ranks (up to one more).
FOLLOWED = 2


def _of_paths(rows: Rows) -> Floats:
    """The longest path. It gains one micro-batch a ``F B`` of any rank, so all but its ends lie on one rank, `i`.

    Its beginning leads to the first ``B`` of rank i: down to some rank q ≥ i with, on the slowest rank passed, the
    ``F`` of q's warm-up, then up. Its end is the mirror image. Ranks whose warm-up takes all micro-batches have no
    ``F B`` in turn; where all of the path lies on those, it has all its ``F`` (or ``B``) on the slowest of them.
    """
    present, last = rows.present, rows.pp[:, None] - 1
    send = np.where(present, rows.blocking_s[:, None], 0.0)
    forward = np.where(present, rows.forward_s + np.where(rows.rank < last, send, 0.0), 0.0)
    backward = np.where(present, rows.backward_s + np.where(rows.rank > 0, send, 0.0), 0.0)
    jobs = rows.micro_batches[:, None]
    warm_up = last - rows.rank
    down, up = cumulated(forward, present), cumulated(backward, present)
    slowest_f, slowest_b = (np.maximum.accumulate(values, axis=1) for values in (forward, backward))
    begin = longest_from(down + up + warm_up * slowest_f, present)
    end = longest_from(down + up + warm_up * slowest_b, present)
    turns = jobs - 1 - warm_up
    paths = begin - up + end - down + turns * (forward + backward)
    longest = np.where(present & (turns > 0), paths, -np.inf).max(axis=1, initial=-np.inf)
    whole = rows.pp - rows.micro_batches  # the last rank whose warm-up takes all micro-batches, from 0 on
    which = np.clip(whole, 0, None)
    rest = rows.micro_batches - 1
    all_forward = at(end, which) + rest * at(slowest_f, which)
    all_backward = at(begin, which) + rest * at(slowest_b, which)
    return np.asarray(np.where(whole >= 0, np.maximum(longest, np.maximum(all_forward, all_backward)), longest))


def _followed(rows: Rows) -> Floats:
    """Every task's time for the first micro-batches, of rows of as many ranks; wave by wave over rows and ranks.

    In wave t rank i runs ``F`` number (t - i) / 2 and ``B`` number (t + 1 + i) / 2 - p, where those are whole and
    there: whatever a task needs has then run in an earlier wave.
    """
    count, ranks = rows.forward_s.shape
    over = np.maximum(rows.micro_batches // ranks - FOLLOWED, 0) * ranks  # in whole cycles of all ranks
    jobs = rows.micro_batches - over
    most = int(jobs.max(initial=0))
    flight = rows.latency_s[:, None]
    free, f_sent, b_sent = np.zeros((3, count, ranks))  # when each rank is free; its last message either way is there
    f_came, b_came = np.zeros((2, count, ranks + 2))  # by receiver, numbered from 1; taken in the wave after
    order = np.arange(ranks)
    for wave in range(2 * (most + ranks) - 1):
        for forward in (True, False):
            twice = wave - order if forward else wave + 1 + order - 2 * ranks
            there = np.flatnonzero((twice % 2 == 0) & (twice >= 0) & (twice < 2 * most))
            if not len(there):
                continue
            start, stop = int(there[0]), int(there[-1]) + 1
            some, to = slice(start, stop, 2), 1 if forward else -1
            mine: Bools = twice[some] < 2 * jobs[:, None]
            came, sent, seconds = (
                (f_came, f_sent, rows.forward_s) if forward else (b_came, b_sent, rows.backward_s)
            )
            ends = np.maximum(free[:, some], came[:, start + 1 : stop + 1 : 2]) + seconds[:, some]
            np.copyto(free[:, some], ends, where=mine)
            np.copyto(sent[:, some], np.maximum(ends, sent[:, some]) + flight, where=mine)
            came[:, start + 1 + to : stop + 1 + to : 2] = sent[:, some]
    length = free.max(axis=1)
    both = cumulated(rows.forward_s + rows.backward_s, rows.present)
    period = np.maximum((rows.forward_s + rows.backward_s).max(axis=1), flight[:, 0])
    for size in range(2, ranks + 1):
        cycle = both[:, size - 1 :] - np.pad(both, ((0, 0), (1, 0)))[:, : ranks - size + 1]
        period = np.maximum(period, (cycle.max(axis=1) + 2 * (size - 1) * flight[:, 0]) / size)
    return np.asarray(length + over * period)


SCHEDULE = REGISTRY.register(
    Schedule(
        name="1f1b",
        title="1F1B",
        source="Narayanan et al.: Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021 (PipeDream-Flush)",
        order=order,
        in_flight=in_flight,
        step_time=step_time,
    )
)
