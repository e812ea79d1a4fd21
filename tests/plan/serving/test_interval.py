"""Intervals of simulated shares, held against queues whose long-run share is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from foretell.plan.serving.interval import independent, interval, joined, needed

GOAL = 0.9


def within_limit(busy: float, count: int, runs: int) -> np.ndarray:
    """Whether each customer of M/M/1 queues in their steady state is through within the time that 90 % are,
    (count, runs): the time there is exponential, of mean 1 / (1 - busy) services.
    """
    rng = np.random.default_rng(0)
    wait = np.where(rng.random(runs) < busy, rng.exponential(1 / (1 - busy), runs), 0.0)
    kept = np.empty((count, runs), dtype=bool)
    for row in range(count):
        stay = wait + rng.exponential(1.0, runs)
        kept[row] = stay <= -np.log(1 - GOAL) / (1 - busy)
        wait = np.maximum(0.0, stay - rng.exponential(1 / busy, runs))
    return kept


@pytest.mark.parametrize(("busy", "count", "least"), [(0.5, 2000, 0.92), (0.8, 8000, 0.92), (0.9, 32_000, 0.92)])
def test_intervals_hold_the_share_of_a_queue_as_often_as_they_say(busy: float, count: int, least: float) -> None:
    kept = within_limit(busy, count, 250)
    ends = [interval(float(one.mean()), independent(one)) for one in kept.T]
    held = np.mean([low <= GOAL <= high for low, high in ends])
    assert least <= held <= 0.99
    # As if requests were independent, most intervals would miss it.
    alone = [interval(float(one.mean()), count) for one in kept.T]
    assert np.mean([low <= GOAL <= high for low, high in alone]) < 0.6


def test_requests_that_are_independent_count_nearly_in_full() -> None:
    rng = np.random.default_rng(0)
    counts = [independent(rng.random(4000) < GOAL) for _ in range(100)]
    assert max(counts) <= 4000
    assert np.median(counts) > 2200  # twenty batches say no better how much they vary
    # What fares alike in twenties is worth one of them.
    assert np.median([independent(np.repeat(rng.random(200) < GOAL, 20)) for _ in range(100)]) < 200


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_where_all_fare_alike_the_interval_has_a_width(share: float) -> None:
    low, high = interval(share, independent(np.full(800, share == 1.0)))
    assert low <= share <= high
    assert 0.004 < high - low < 0.006
    assert interval(1.0, independent(np.ones(3, dtype=bool)))[0] < 0.5


def test_of_independent_requests_it_is_wilsons() -> None:
    for kept, count in ((90, 100), (1, 7), (0, 20)):
        known = binomtest(kept, count).proportion_ci(method="wilson")
        assert interval(kept / count, count) == pytest.approx((known.low, known.high), abs=1e-6)


def test_a_share_of_parts() -> None:
    assert joined([(2.0, 0.9, 0.8, 0.95)]) == pytest.approx((0.9, 0.8, 0.95))
    # Two parts alike are as sure as twice the requests: a root of two closer.
    mean, low, high = joined([(1.0, 0.9, 0.86, 0.94)] * 2)
    assert (mean, low, high) == pytest.approx((0.9, 0.9 - 0.04 / 2**0.5, 0.9 + 0.04 / 2**0.5))
    # And the normal case by numbers: independent normal estimates of known spread.
    rng = np.random.default_rng(0)
    drawn = 0.75 * rng.normal(0.9, 0.02, 200_000) + 0.25 * rng.normal(0.8, 0.05, 200_000)
    ends = joined([(3.0, 0.9, 0.9 - 1.96 * 0.02, 0.9 + 1.96 * 0.02), (1.0, 0.8, 0.8 - 1.96 * 0.05, 0.8 + 1.96 * 0.05)])
    assert ends[1:] == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))), abs=5e-4)


def test_what_is_needed_takes_the_goal_out_of_the_interval() -> None:
    share, count = 0.915, 400.0
    low, high = interval(share, count)
    assert low < GOAL < high
    times = needed(share, low, high, GOAL)
    assert interval(share, 0.7 * times * count)[0] < GOAL < interval(share, 1.1 * times * count)[0]
    assert needed(0.9, 0.8, 0.95, 0.9) == float("inf")
