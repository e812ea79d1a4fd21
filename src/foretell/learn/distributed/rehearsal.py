"""`rehearse`: a pipeline schedule played by real processes that wait on real messages, and sleep in place of computing.

Processes that share two cores cannot show the speed of a schedule by computing; asleep they can. What they take is held
against `foretell.simulate.pipeline.simulate`, whose task order they follow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretell.learn.distributed.wire import Group, Wire
from foretell.simulate.pipeline import Task, Times, named

__all__ = ["Rehearsal", "rehearse", "step_time"]

#: How long ranks have to hear when the step begins.
_LEAD_S = 0.03


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What one rank did: its tasks in order, and when each began and ended, in seconds from the common start."""

    tasks: tuple[Task, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]


def rehearse(rank: int, schedule: str, micro_batches: int, times: Times) -> Rehearsal:
    """Play `schedule` as rank `rank` of `times.pp`; all those ranks must call it together.

    A task sleeps for as long as `times` says, once the rank is free and what it needs has come; a message holds one
    number. Raises InputError where the schedule cannot be had.
    """
    pp, vp = times.pp, times.vp
    member = named(schedule, vp)
    member.check(pp, vp, micro_batches)
    stage_of = {member.place(pp, vp, stage): stage for stage in range(pp * vp)}
    rank_of = {stage: owner for (owner, _), stage in stage_of.items()}
    wire = Wire(rank)
    number = torch.zeros(1)
    tasks = member.order(pp, vp, micro_batches)[rank]
    began, ended = [], []
    # One clock for all processes of a machine; the latest rank to come says when to start.
    ready = torch.tensor([time.monotonic()], dtype=torch.float64)
    zero = float(Group(wire, range(pp), "start").all_reduce(ready, torch.maximum)) + _LEAD_S
    _sleep_until(zero)
    for task in tasks:
        stage = stage_of[rank, task.chunk]
        before, after = (stage - 1, stage + 1) if task.kind == "F" else (stage + 1, stage - 1)
        tag = (task.micro_batch * pp * vp + stage) * 2 + (task.kind == "B")
        if task.kind != "W" and before in rank_of and rank_of[before] != rank:
            wire.receive(number, rank_of[before], tag)
        began.append(time.monotonic())
        _sleep_until(began[-1] + _duration(times, member.splits, rank, task))
        ended.append(time.monotonic())
        if task.kind != "W" and after in rank_of and rank_of[after] != rank:
            wire.send(number, rank_of[after], "pp", tag + 2 * (after - stage))
    wire.flush()
    return Rehearsal(tasks, tuple(t - zero for t in began), tuple(t - zero for t in ended))


def step_time(rehearsals: Sequence[Rehearsal]) -> float:
    """Seconds from the start to the end of the last rank's last task."""
    return max(played.end_s[-1] for played in rehearsals)


def _duration(times: Times, splits: bool, rank: int, task: Task) -> float:
    place = (rank, task.chunk)
    if task.kind == "F":
        return float(times.forward_s[place])
    if task.kind == "W":
        return float(times.weights_s[place])
    return float(times.backward_s[place]) - (float(times.weights_s[place]) if splits else 0.0)


def _sleep_until(moment: float) -> None:
    if (left := moment - time.monotonic()) > 0:
        time.sleep(left)
