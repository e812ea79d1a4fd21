"""Schedules take as long among real processes as the simulator says, and no less."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.learn.distributed import Workers
from foretell.learn.distributed.rehearsal import Rehearsal, rehearse, step_time
from foretell.simulate.pipeline import Times, simulate

PP, MICRO_BATCHES, FORWARD, BACKWARD = 4, 4, 0.03, 0.06
VP = {"interleaved": 2, "layered": 2}


def play(workers: Workers, schedule: str, times: Times) -> list[Rehearsal]:
    """The quickest of up to eight tries: what else the machine does can only delay it."""
    best: list[Rehearsal] = []
    for _ in range(8):
        found = workers.run(rehearse, times.pp, schedule, MICRO_BATCHES, times)
        best = min(best or found, found, key=step_time)
        if step_time(best) < 1.12 * simulate(schedule, times, MICRO_BATCHES).step_s:
            break
    return best


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "layered"])
def test_processes_take_as_long_as_simulated(schedule: str, workers: Workers) -> None:
    vp = VP.get(schedule, 1)
    times = Times.of(FORWARD / vp, BACKWARD / vp, pp=PP, vp=vp)
    simulated = simulate(schedule, times, MICRO_BATCHES)
    played = play(workers, schedule, times)
    assert simulated.step_s <= step_time(played) <= 1.2 * simulated.step_s
    for rank, found in enumerate(played):
        mine = simulated.tasks(rank)
        # No task begins before it can, in the order and at the times that the simulator has.
        assert [task.micro_batch for task in found.tasks] == simulated.micro_batch[mine].tolist()
        assert (np.array(found.start_s) >= simulated.start_s[mine] - 1e-3).all()


def test_the_bubble_is_the_papers(workers: Workers) -> None:
    """1F1B idles (p-1)/(m+p-1) of a step; with two chunks a rank, its idle time halves (Narayanan et al., 2021)."""
    busy = MICRO_BATCHES * (FORWARD + BACKWARD)
    idle = {}
    for vp in (1, 2):
        times = Times.of(FORWARD / vp, BACKWARD / vp, pp=PP, vp=vp)
        step = step_time(play(workers, "1f1b", times))
        idle[vp] = step - busy
        assert idle[vp] / step == pytest.approx((PP - 1) / (vp * MICRO_BATCHES + PP - 1), abs=0.1)
    assert idle[2] < 0.9 * idle[1]


def test_unlike_ranks_wait_for_the_slowest(workers: Workers) -> None:
    times = Times.of([FORWARD, 2 * FORWARD], [BACKWARD, 2 * BACKWARD])
    simulated = simulate("1f1b", times, MICRO_BATCHES)
    assert simulated.step_s <= step_time(play(workers, "1f1b", times)) <= 1.2 * simulated.step_s


def test_a_schedule_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(InputError, match="a rank holds one chunk"):
        rehearse(0, "gpipe", 4, Times.of(1.0, 1.0, pp=2, vp=2))
