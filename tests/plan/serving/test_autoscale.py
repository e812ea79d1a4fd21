"""Replicas over a day: against all schedules there are, and against days one can count."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.plan.serving.autoscale import rates_over_time, scale
from foretell.simulate.serving import Requests


def least(needed: list[int], delay: int) -> int:
    """The fewest paid windows of any schedule that serves enough, by trying all.

    A schedule says which replicas run when; one that starts is paid for in the `delay` windows before, which must
    exist.
    """
    best = 10**9
    for runs in itertools.product(itertools.product((0, 1), repeat=len(needed)), repeat=max(needed)):
        if any(sum(run[w] for run in runs) < n for w, n in enumerate(needed)):
            continue
        paid = 0
        for run in runs:
            on = list(run)
            for w in range(len(run)):
                if run[w] and (w == 0 or not run[w - 1]):
                    for before in range(max(0, w - delay), w):
                        on[before] = 1
            paid += sum(on)
        best = min(best, paid)
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_schedule_is_the_cheapest_of_all(seed: int, delay: int) -> None:
    needed = np.random.default_rng(seed).integers(0, 3, 6)
    needed[3] = 2
    found = scale(needed.astype(float), 600.0, 1.0, start_s=600.0 * delay, fewest=0)
    assert (found.serving >= found.needed).all()
    assert found.beyond == 0.0
    assert found.paid.sum() == least(needed.tolist(), delay)
    assert found.replica_hours == pytest.approx(found.paid.sum() / 6)


def test_a_day_with_one_busy_hour() -> None:
    rate = np.full(24, 2.0)
    rate[12] = 10.0
    found = scale(rate, 3600.0, 2.0, start_s=1800.0, usd_per_h=3.0)
    assert found.serving.tolist() == [1] * 12 + [5] + [1] * 11
    assert found.paid.tolist() == [1.0] * 11 + [5.0, 5.0] + [1.0] * 11  # four start an hour early
    assert found.replica_hours == 32.0
    assert found.fixed_hours == 120.0
    assert found.saved == pytest.approx(1 - 32 / 120)
    document = found.to_dict()
    assert document["cost_usd"] == pytest.approx(96.0)
    assert document["fixed_cost_usd"] == pytest.approx(360.0)
    assert [row["most"] for row in document["hours"]] == found.serving.tolist()
    assert sum(row["cost_usd"] for row in document["hours"]) == pytest.approx(96.0)


def test_reacting_is_late() -> None:
    rate = np.array([2.0, 2.0, 10.0, 10.0, 10.0, 2.0, 2.0])
    found = scale(rate, 600.0, 2.0, start_s=600.0, policy="reactive")
    # The rise is seen at the end of window 2, asked for, and served from window 4 on; the fall at the end of 5.
    assert found.serving.tolist() == [1, 1, 1, 1, 5, 5, 1]
    assert found.paid.tolist() == [1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 1.0]
    assert found.beyond == pytest.approx(16.0 / 38.0)
    assert scale(rate, 600.0, 2.0, start_s=600.0).beyond == 0.0


def test_reacting_never_asks_twice() -> None:
    found = scale(np.full(12, 10.0), 60.0, 1.0, start_s=300.0, policy="reactive", fewest=1)
    assert found.paid.max() == 10
    assert found.serving[0] == 10  # it begins with what the first window needs


def test_headroom_and_fewest() -> None:
    assert scale([4.0, 0.0], 60.0, 1.0, start_s=0.0, headroom=0.25).needed.tolist() == [5, 1]
    assert scale([4.0, 0.0], 60.0, 1.0, start_s=0.0, fewest=3).needed.tolist() == [4, 3]


def test_rates_of_a_trace() -> None:
    requests = Requests.of([0.0, 1.0, 59.0, 61.0, 200.0], 1, 1)
    assert rates_over_time(requests, 60.0).tolist() == [3 / 60, 1 / 60, 0.0, 1 / 60]


def test_what_makes_no_sense() -> None:
    with pytest.raises(InputError, match="policy is 'soon'"):
        scale([1.0], 60.0, 1.0, start_s=0.0, policy="soon")
    with pytest.raises(InputError, match="rates over time"):
        scale([0.0], 60.0, 1.0, start_s=0.0)
    with pytest.raises(InputError, match="not negative"):
        scale([1.0], 60.0, 1.0, start_s=-1.0)
    with pytest.raises(InfeasibleError, match="serves no request"):
        scale([1.0], 60.0, 0.0, start_s=0.0)
    with pytest.raises(InputError, match="too many"):
        rates_over_time(Requests.of([0.0, 1e9], 1, 1), 1e-3)


@pytest.mark.parametrize("window_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_window_takes_time(window_s: float) -> None:
    with pytest.raises(InputError, match="give a time above 0"):
        rates_over_time(Requests.of([0.0, 5.0], 10, 10), window_s)


def test_too_many_windows() -> None:
    with pytest.raises(InputError, match="give longer windows"):
        rates_over_time(Requests.of([0.0, 1e9], 10, 10), 1e-6)
