"""Interleaved 1F1B: each rank holds several chunks of layers, dealt in turn, so that the pipeline fills sooner."""

from __future__ import annotations

import numpy as np

from foretell.simulate.pipeline import one_f_one_b
from foretell.simulate.pipeline.closed import Bools, Floats, Ints, Rows, at, cumulated, longest_from
from foretell.simulate.pipeline.schedule import REGISTRY, Order, Schedule, Task


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


def step_time(rows: Rows) -> Floats:
    """Step times. With equal ranks and no messages ``m (f + b) + (p - 1)(f + b) / v``.

    Exact for equal ranks, with messages too (flying ones up to half a chunk's ``f + b``). For ranks that differ by
    less than 5 % it has been equal to the simulator throughout where nothing waits for a send; for others it is
    within 2 %. Chunks of a rank are taken to be alike.
    """
    alone = rows.vp == 1
    result = np.empty(len(rows.pp))
    result[alone] = one_f_one_b.step_time(rows.take(alone))
    result[~alone] = _of_paths(rows.take(~alone))
    return result


def _of_paths(rows: Rows) -> Floats:
    """The longest of these paths, counted in micro-batches times chunks (slots).

    As in 1F1B all but a path's ends lies on one rank, i. A way down and up again gains two slots a rank, not one, so
    that it never pays in between, and messages that fly are hidden there. New are the ways round: from the last rank
    to the first and the next chunk, which gains `pp` slots for one chunk of every rank. They are taken each time at the
    beginning (or the end), or once after the last rank has run `pp` slots of ``F B``.
    """
    if not len(rows.pp):
        return np.empty(0)
    present, rank, p, v, m = rows.present, rows.rank, *(a[:, None] for a in (rows.pp, rows.vp, rows.micro_batches))
    send = np.where(p > 1, rows.blocking_s[:, None], 0.0)
    flight = np.where(p > 1, rows.latency_s[:, None], 0.0)
    last, slots = p - 1, v * m
    forward = np.where(present, rows.forward_s / v + send, 0.0)
    backward = np.where(present, rows.backward_s / v + send, 0.0)
    warm_up = np.minimum(2 * (last - rank) + (v - 1) * p, slots - 1)
    turns = slots - 1 - warm_up
    # The last stage's F and the first stage's B are not sent.
    down = cumulated(forward, present) + rank * flight - np.where(rank == last, send, 0.0)
    up = cumulated(backward, present) + rank * flight
    both = forward + backward
    unsent = np.where(rank == last, np.maximum(turns - (m - p) * (v - 1), 0), 0)
    unsent = np.where(rank == 0, np.maximum(m - 2 * p + 1, unsent), unsent)
    bulk = turns * both - unsent * send
    ends_b = np.where(rank == 0, backward - send / v, backward)
    f_first = _first(forward, warm_up, p, v, flight, present)
    b_last = _first(ends_b, warm_up, p, v, flight, present)
    own_begin, own_end = down + up + f_first, down + up - send + b_last
    begin, end = longest_from(own_begin, present) - up, longest_from(own_end, present) - down

    def longest(paths: Floats, where: Bools) -> Floats:
        return np.asarray(np.where(present & where, paths, -np.inf).max(axis=1, initial=-np.inf))

    final = rows.pp - 1
    round_f = (at(down + f_first + p * both, final) + (flight - (p - 2) * send)[:, 0])[:, None]
    round_b = (at(up - send + b_last + p * both, final) + (flight - (p - 1) * send)[:, 0])[:, None]
    skipped = (2 + 2 * rank) * both
    paths = [
        longest(begin + end + bulk, turns > 0),
        longest(round_f + down - skipped + end + bulk, turns > 2 + 2 * rank),
        longest(round_b + up - skipped + begin + bulk, turns > 2 + 2 * rank),
        longest(round_f + round_b + down + up - 2 * skipped + bulk, turns > 4 + 4 * rank),
    ]
    # Ranks whose warm-up takes everything, if there are any: all F (or all B) of the path lies on them.
    idle = np.maximum((present & (turns <= 0)).sum(axis=1) - 1, 0)
    some = (present & (turns <= 0)).any(axis=1)
    for values, ending, way in ((forward, end, down), (ends_b, begin, up - send)):
        everything = at(_first(values, np.broadcast_to(slots - 1, values.shape), p, v, flight, present, True), idle)
        paths.append(np.where(some, at(ending + way, idle) + everything, -np.inf))
    return np.asarray(np.max(paths, axis=0))


def _first(
    values: Floats, slots: Ints, p: Ints, v: Ints, flight: Floats, present: Bools, whole: bool = False
) -> Floats:
    """The longest way to spend `slots` slots with tasks of one kind on ranks up to each, or going round: (rows, ranks).

    Going round lets the path use the slowest rank of all, for slots that come before the last chunk of a round.
    """
    slowest = np.maximum.accumulate(values, axis=1)
    most = slowest[:, -1:]
    around = np.where(present, values, 0.0).sum(axis=1, keepdims=True) + p * flight
    rank = np.arange(values.shape[1])[None, :]
    left = np.zeros_like(slots) if whole else np.maximum(0, 2 * (p - 1 - rank) - (p - 1))
    rounds = v - 1
    path = rounds * around + (slots - rounds * p - left) * most + left * slowest
    return np.maximum(slots * slowest, np.where(slots >= rounds * p + left, path, -np.inf))


SCHEDULE = REGISTRY.register(
    Schedule(
        name="interleaved",
        title="Interleaved 1F1B",
        source="Narayanan et al.: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,"
        " SC 2021, section 2.2",
        order=order,
        in_flight=in_flight,
        step_time=step_time,
        chunked=True,
        whole_rounds=True,
    )
)
