"""The simulator: every task of every rank, every message, in time.

Each rank runs its tasks in the schedule's order, each as soon as the rank is free and what it needs has come. As the
order is fixed, one pass in an order that respects needs gives every time exactly; there are no ties to break.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.simulate.pipeline.closed import Floats, Ints
from foretell.simulate.pipeline.schedule import Order, Schedule, named
from foretell.simulate.pipeline.times import Times
from foretell.timeline import Counter, Timeline

__all__ = ["Simulation", "peak", "simulate"]

#: Kinds of events beside the tasks' own; also their lanes.
NEXT, PREVIOUS, GATHER, REDUCE = "send next", "send previous", "gather", "reduce"
KINDS = ("F", "B", "W", NEXT, PREVIOUS, GATHER, REDUCE)
_NAMES = {"F": "forward", "B": "backward", "W": "backward weights"}


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated step. Events are columns: `kind` (index into `KINDS`), `rank`, `chunk`, `micro_batch` (−1 for those
    of the data-parallel group), `start_s`, `end_s`; tasks come first, rank by rank in the order they ran.

    By rank, (pp,): `busy_s` is spent on tasks, `send_s` on sends that keep the rank from computing, and `bubble_s` is
    the rest of the step. `p2p_exposed_s` is what the step would be shorter by were messages between stages free, and
    `dp_exposed_s` what then remains to be saved by free gathers and reductions. `peak_in_flight` is (pp, vp), see
    `foretell.simulate.pipeline.in_flight`.
    """

    schedule: Schedule
    times: Times
    micro_batches: int
    overlap_p2p: bool
    step_s: float
    busy_s: Floats
    send_s: Floats
    p2p_exposed_s: float
    dp_exposed_s: float
    peak_in_flight: Ints
    kind: Ints
    rank: Ints
    chunk: Ints
    micro_batch: Ints
    start_s: Floats
    end_s: Floats

    @property
    def bubble_s(self) -> Floats:
        """Seconds in which each rank neither computes nor is kept by a send, (pp,)."""
        return self.step_s - self.busy_s - self.send_s

    @property
    def bubble(self) -> float:
        """The bubble's share of the step, mean over ranks."""
        return float(self.bubble_s.mean()) / self.step_s if self.step_s else 0.0

    def tasks(self, rank: int) -> npt.NDArray[np.bool_]:
        """Which events are tasks of a rank."""
        return np.asarray((self.rank == rank) & (self.kind < 3))

    def timeline(self, about: Mapping[str, str] | None = None) -> Timeline:
        """The step as a timeline: lanes for each rank's tasks, its sends either way and its data-parallel group.

        A counter for each rank says how many activations it holds (chunks times micro-batches).
        """
        lane_of = np.array([0, 0, 0, 1, 2, 3, 3])[self.kind]
        shown = ("", " → next", " → previous", " data parallel")
        names = np.array([f"rank {rank}{what}" for rank in range(self.times.pp) for what in shown])
        used = names[np.unique(self.rank * 4 + lane_of)]
        kinds = np.array([_NAMES.get(kind, kind) for kind in KINDS])[self.kind]
        chunks = [f" c{c}" if self.times.vp > 1 else "" for c in range(self.times.vp)]
        labels = [
            f"{KINDS[k]}{m}{chunks[c]}" if m >= 0 else f"{KINDS[k]}{chunks[c]}"
            for k, m, c in zip(self.kind.tolist(), self.micro_batch.tolist(), self.chunk.tolist(), strict=True)
        ]
        return Timeline.of(
            lanes=used.tolist(),
            lane=names[self.rank * 4 + lane_of].tolist(),
            start_s=self.start_s,
            duration_s=self.end_s - self.start_s,
            name=labels,
            kind=kinds.tolist(),
            args={
                "micro-batch": np.where(self.micro_batch < 0, np.nan, self.micro_batch),
                "chunk": self.chunk.astype(np.float64),
            },
            counters=[self._held(rank) for rank in range(self.times.pp)],
            about={
                "workload": f"{self.schedule.title}, pp {self.times.pp}, vp {self.times.vp},"
                f" {self.micro_batches} micro-batches",
                "model": "simulated by Foretell",
                **(about or {}),
            },
        )

    def _held(self, rank: int) -> Counter:
        mine = np.flatnonzero(self.tasks(rank))
        last = KINDS.index(self.schedule.kinds[-1])
        steps = np.where(self.kind[mine] == 0, 1.0, np.where(self.kind[mine] == last, -1.0, 0.0))
        when = np.where(steps > 0, self.start_s[mine], self.end_s[mine])[steps != 0]
        return Counter(f"rank {rank} activations held", "micro-batches", when, np.cumsum(steps[steps != 0]))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, for JSON; events are in the timeline."""
        return {
            "schedule": self.schedule.name,
            "pp": self.times.pp,
            "vp": self.times.vp,
            "micro_batches": self.micro_batches,
            "overlap_p2p": self.overlap_p2p,
            "step_s": self.step_s,
            "bubble": self.bubble,
            "p2p_exposed_s": self.p2p_exposed_s,
            "dp_exposed_s": self.dp_exposed_s,
            "ranks": [
                {
                    "busy_s": float(self.busy_s[rank]),
                    "send_s": float(self.send_s[rank]),
                    "bubble_s": float(self.bubble_s[rank]),
                    "in_flight": self.peak_in_flight[rank].tolist(),
                }
                for rank in range(self.times.pp)
            ],
        }


def simulate(
    schedule: str,
    times: Times,
    micro_batches: int,
    *,
    overlap_p2p: bool = True,
    overlap_dp: bool = True,
    scale: npt.ArrayLike | None = None,
) -> Simulation:
    """Run one step of a pipeline.

    With `overlap_p2p` a message travels on a lane of its own for each sender and direction, one after another, while
    the sender computes on; without, the sender waits until it has been received. With `overlap_dp` each chunk's
    gather and reduction run on the rank's data-parallel lane while it computes, piece by piece: gathers from the
    step's beginning on in the order of their use, reductions as gradients are complete. Without, all gathers precede
    and all reductions follow the rank's tasks. `scale`, (micro_batches,), multiplies the tasks of each micro-batch,
    where they differ in length.

    Raises UnknownNameError, and InputError where the schedule cannot be had or a scale is wrong.

    >>> one = simulate("1f1b", Times.of(1.0, 2.0, pp=4), 8)
    >>> one.step_s, one.bubble == 3 / 11
    (33.0, True)
    """
    member = named(schedule, times.vp)
    member.check(times.pp, times.vp, micro_batches)
    factors = np.ones(micro_batches) if scale is None else np.asarray(scale, dtype=np.float64)
    if factors.shape != (micro_batches,) or not np.isfinite(factors).all() or (factors < 0).any():
        raise InputError("scale is not one number ≥ 0 for each micro-batch", "simulate")
    order = member.order(times.pp, times.vp, micro_batches)
    columns = _columns(member, order)
    found = _run(member, columns, times, factors, overlap_p2p, overlap_dp)
    no_p2p = replace(times, p2p_s=np.zeros_like(times.p2p_s))
    bare = replace(no_p2p, gather_s=np.zeros_like(times.gather_s), reduce_s=np.zeros_like(times.reduce_s))
    step = found.step_s
    without_p2p = _run(member, columns, no_p2p, factors, True, overlap_dp).step_s if times.p2p_s.any() else step
    has_dp = times.gather_s.any() or times.reduce_s.any()
    without_dp = _run(member, columns, bare, factors, True, True).step_s if has_dp else without_p2p
    rank, kind, chunk, micro_batch = columns
    pp = times.pp
    busy = np.bincount(rank, found.seconds, pp).astype(np.float64)
    sends = found.sends
    waited = np.zeros(0) if overlap_p2p else sends[5] - sends[4]
    send_s = np.bincount(sends[1].astype(np.int64)[: len(waited)], waited, pp).astype(np.float64)
    dp = found.dp
    return Simulation(
        schedule=member,
        times=times,
        micro_batches=micro_batches,
        overlap_p2p=overlap_p2p,
        step_s=step,
        busy_s=busy,
        send_s=send_s,
        p2p_exposed_s=step - without_p2p,
        dp_exposed_s=without_p2p - without_dp,
        peak_in_flight=peak(order, times.vp, member.kinds[-1]),
        kind=np.concatenate([kind, sends[0].astype(np.int64), dp[0].astype(np.int64)]),
        rank=np.concatenate([rank, sends[1].astype(np.int64), dp[1].astype(np.int64)]),
        chunk=np.concatenate([chunk, sends[2].astype(np.int64), dp[2].astype(np.int64)]),
        micro_batch=np.concatenate([micro_batch, sends[3].astype(np.int64), dp[3].astype(np.int64)]),
        start_s=np.concatenate([found.start_s, sends[4], dp[4]]),
        end_s=np.concatenate([found.end_s, sends[5], dp[5]]),
    )


def peak(order: Order, vp: int, last: str, weights: npt.ArrayLike = 1.0) -> Ints:
    """Counted along the order: micro-batches each chunk holds when its rank first holds most, (pp, vp).

    `last` is the kind of task that lets go of activations. `weights`, (pp, vp), makes some chunks count more, as by
    the bytes of their activations.
    """
    weight = np.broadcast_to(np.asarray(weights, dtype=np.float64), (len(order), vp)).tolist()
    result = np.zeros((len(order), vp), dtype=np.int64)
    for rank, tasks in enumerate(order):
        now, total, most, each = [0] * vp, 0.0, 0.0, weight[rank]
        best = list(now)
        for kind, chunk, _ in tasks:
            if kind == "F":
                now[chunk] += 1
                total += each[chunk]
                if total > most * (1 + 1e-12):
                    most, best = total, list(now)
            elif kind == last:
                now[chunk] -= 1
                total -= each[chunk]
        result[rank] = best
    return result


_Columns = tuple[Ints, Ints, Ints, Ints]  # rank, kind, chunk, micro-batch of every task, rank by rank


def _columns(schedule: Schedule, order: Order) -> _Columns:
    each = len(order[0])
    tasks = [task for row in order for task in row]
    code = {kind: index for index, kind in enumerate("FBW")}
    kind = np.fromiter((code[task[0]] for task in tasks), np.int64, len(tasks))
    chunk = np.fromiter((task[1] for task in tasks), np.int64, len(tasks))
    micro_batch = np.fromiter((task[2] for task in tasks), np.int64, len(tasks))
    return np.repeat(np.arange(len(order)), each), kind, chunk, micro_batch


@dataclass(frozen=True, slots=True)
class _Run:
    step_s: float
    seconds: Floats  # of work in each task; one that begins before all its parameters are there may last longer
    start_s: Floats
    end_s: Floats
    sends: tuple[Floats, ...]  # kind, rank, chunk, micro-batch, start, end
    dp: tuple[Floats, ...]  # the same


def _run(
    schedule: Schedule, columns: _Columns, times: Times, scale: Floats, overlap_p2p: bool, overlap_dp: bool
) -> _Run:
    rank, kind, chunk, micro_batch = columns
    pp, vp, count = times.pp, times.vp, len(scale)
    stages = pp * vp
    place = [schedule.place(pp, vp, stage) for stage in range(stages)]
    stage_of = np.zeros((pp, vp), dtype=np.int64)
    for index, (where, which) in enumerate(place):
        stage_of[where, which] = index
    rank_of = np.array([where for where, _ in place])

    # What each task needs from elsewhere and whom it serves, as indices into the messages: F of a stage into [0, ·),
    # B into [stages · count, ·); -1 where there is nothing.
    stage = stage_of[rank, chunk]
    forward, backward = kind == 0, kind == 1
    own = np.where(forward, 0, stages * count) + stage * count + micro_batch
    need = np.where((forward & (stage > 0)) | (backward & (stage < stages - 1)), own, -1)
    serves = forward & (stage < stages - 1) | backward & (stage > 0)
    give = np.where(serves, own + np.where(forward, count, -count), -1)
    to = np.where(serves, rank_of[np.clip(np.where(forward, stage + 1, stage - 1), 0, stages - 1)], rank)
    travel = np.where(serves & (to != rank), times.p2p_s[rank, to], 0.0)
    seconds = np.stack([times.of_kind(k, schedule.splits) for k in "FBW"])[kind, rank, chunk] * scale[micro_batch]

    gathered, gather_end = _gathers(times)
    pieces = times.pieces.tolist()
    begun = (np.array(gather_end) - times.gather_s * (1.0 - 1.0 / times.pieces)).tolist()  # the first piece is there
    need_list, give_list, way = need.tolist(), give.tolist(), np.where(forward, 0, 1).tolist()
    length, delay = seconds.tolist(), travel.tolist()
    kinds, chunks = kind.tolist(), chunk.tolist()
    arrives = [-1.0] * (2 * stages * count)
    waits = [-1] * (2 * stages * count)  # the rank that stands still for a message
    each = len(kinds) // pp
    start, end, sent = [0.0] * len(kinds), [0.0] * len(kinds), [0.0] * len(kinds)
    at = [r * each for r in range(pp)]
    free = [0.0 if overlap_dp else max(gather_end[r]) for r in range(pp)]
    lanes = [[0.0, 0.0] for _ in range(pp)]
    ready = list(reversed(range(pp)))
    while ready:
        r = ready.pop()
        i, stop, now, lane, gathers = at[r], (r + 1) * each, free[r], lanes[r], gather_end[r]
        while i < stop:
            n = need_list[i]
            if n >= 0:
                came = arrives[n]
                if came < 0.0:
                    waits[n] = r
                    break
                if came > now:
                    now = came
            if kinds[i] == 0 and gathers[chunks[i]] > now:
                c = chunks[i]
                start[i] = max(now, begun[r][c])
                now = max(start[i] + length[i], gathers[c] + length[i] / pieces[r][c])
            else:
                start[i] = now
                now += length[i]
            end[i] = now
            g = give_list[i]
            if g >= 0:
                there = now
                if delay[i] > 0.0:
                    if overlap_p2p:
                        there = max(now, lane[way[i]])
                        sent[i] = there
                        there += delay[i]
                        lane[way[i]] = there
                    else:
                        sent[i] = now
                        now += delay[i]
                        there = now
                arrives[g] = there
                if waits[g] >= 0:
                    ready.append(waits[g])
            i += 1
        at[r], free[r] = i, now
    stuck = [r for r in range(pp) if at[r] < (r + 1) * each]
    if stuck:
        raise RuntimeError(f"schedule {schedule.name}: ranks {stuck} wait for each other")

    ends = np.array(end)
    travels = np.flatnonzero(travel > 0.0)
    sends = (
        np.where(kind[travels] == 0, 3.0, 4.0),
        rank[travels].astype(np.float64),
        chunk[travels].astype(np.float64),
        micro_batch[travels].astype(np.float64),
        np.array(sent)[travels],
        np.array(sent)[travels] + travel[travels],
    )
    dp = _reductions(times, columns, seconds, ends, np.array(free), gathered, overlap_dp)
    step = max(float(np.max(free)), float(dp[5].max()) if len(dp[5]) else 0.0)
    return _Run(step, seconds, np.array(start), ends, sends, dp)


_Event = tuple[float, float, float, float, float, float]


def _gathers(times: Times) -> tuple[list[_Event], list[list[float]]]:
    """Each rank's gathers, chunk after chunk from the beginning on; when each has its parameters."""
    events: list[_Event] = []
    ends = np.cumsum(times.gather_s, axis=1)
    for rank, chunk in zip(*np.nonzero(times.gather_s), strict=True):
        end = float(ends[rank, chunk])
        events.append((KINDS.index(GATHER), rank, chunk, -1, end - float(times.gather_s[rank, chunk]), end))
    return events, ends.tolist()


def _reductions(
    times: Times,
    columns: _Columns,
    seconds: Floats,
    ends: Floats,
    free: Floats,
    gathered: list[_Event],
    overlap: bool,
) -> tuple[Floats, ...]:
    """Gathers and reductions as columns; each chunk is reduced as its last task completes it, one after another.

    Pieces that are complete at equal distances and take equally long end when the first one's turn allows, or with
    the last one's own reduction.
    """
    events = list(gathered)
    rank, _, chunk, _ = columns
    last = np.zeros((times.pp, times.vp), dtype=np.int64)
    last[rank, chunk] = np.arange(len(rank))  # a rank's tasks stand in order: the last one stays
    complete = ends[last]
    first = complete - seconds[last] * (1.0 - 1.0 / times.pieces)
    for r in range(times.pp):
        lane = 0.0  # gathers are over: a chunk's last task comes after every chunk's first
        for c in np.argsort(complete[r], kind="stable").tolist():
            whole = float(times.reduce_s[r, c])
            if whole > 0.0:
                begin = max(lane, float(first[r, c]) if overlap else float(free[r]))
                lane = begin + whole
                if overlap:
                    lane = max(lane, float(complete[r, c]) + whole / float(times.pieces[r, c]))
                events.append((KINDS.index(REDUCE), r, c, -1, begin, lane))
    table = np.array(events, dtype=np.float64).reshape(-1, 6)
    return tuple(table.T)
