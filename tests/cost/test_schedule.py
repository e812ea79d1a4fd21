"""How op times add up to a step, against a plain simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.cost.model import OpTimes, schedule


def op_times(busy: list[float], host: list[float]) -> OpTimes:
    zero = np.zeros(len(busy))
    return OpTimes(np.array(busy), zero, zero, np.array(host), zero, {})


def simulated(busy: list[float], host: list[float]) -> float:
    """The host issues in order without waiting; the device starts an op when free and the op is issued."""
    issued = free = 0.0
    for b, h in zip(busy, host, strict=True):
        issued += h
        free = max(free, issued) + b
    return free


def test_device_bound_waits_only_for_the_first_op():
    step = schedule(op_times([10.0, 10.0], [1.0, 1.0]), np.ones(2))
    assert step.time_s == 21.0
    assert step.gap_s.tolist() == [1.0, 0.0]


def test_host_bound_waits_before_every_op():
    step = schedule(op_times([1.0, 1.0, 1.0], [10.0, 10.0, 10.0]), np.ones(3))
    assert step.time_s == 31.0
    assert step.host_s == 30.0
    assert step.gap_s.tolist() == [10.0, 9.0, 9.0]


def test_a_repeated_op_starts_when_its_first_run_is_issued():
    step = schedule(op_times([10.0], [1.0]), np.array([3.0]))
    assert step.time_s == 31.0
    assert schedule(op_times([1.0], [10.0]), np.array([3.0])).time_s == pytest.approx(30.0)  # the host's own time


durations = st.lists(
    st.tuples(st.floats(0, 10, allow_subnormal=False), st.floats(0, 10, allow_subnormal=False)), min_size=1, max_size=30
)


@given(durations)
def test_agrees_with_a_simulation(pairs):
    busy, host = [b for b, _ in pairs], [h for _, h in pairs]
    step = schedule(op_times(busy, host), np.ones(len(pairs)))
    assert step.time_s == pytest.approx(simulated(busy, host), abs=1e-9)
    assert step.busy_s.sum() + step.gap_s.sum() == pytest.approx(step.time_s, abs=1e-9)
    assert (step.gap_s >= 0).all()


@given(durations, st.integers(0, 29), st.integers(1, 50))
def test_repeating_an_op_more_often_never_shortens_the_step(pairs, which, times):
    busy, host = [b for b, _ in pairs], [h for _, h in pairs]
    repeat = np.ones(len(pairs))
    before = schedule(op_times(busy, host), repeat).time_s
    repeat[which % len(pairs)] = times
    step = schedule(op_times(busy, host), repeat)
    assert step.time_s >= before - 1e-9
    assert step.time_s >= max((np.array(busy) * repeat).sum(), step.host_s) - 1e-9


def test_nothing_takes_no_time():
    assert schedule(op_times([], []), np.ones(0)).time_s == 0.0
