"""The cheapest mix of GPU types: against all there is, against single types, and what has no answer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from foretell.errors import InfeasibleError
from foretell.plan.serving.melange import cheapest, profile, single


def brute(rate: list[float], capacity: np.ndarray, cost: list[float], slices: int) -> float:
    """The least cost over every way to give the slices of every bucket to options."""
    options = range(len(cost))
    ways = [w for w in itertools.product(range(slices + 1), repeat=len(cost)) if sum(w) == slices]
    best = math.inf
    for chosen in itertools.product(ways, repeat=len(rate)):
        work = [0.0] * len(cost)
        for i, row in enumerate(chosen):
            for j in options:
                if row[j]:
                    work[j] += math.inf if capacity[i, j] == 0 else rate[i] * row[j] / slices / capacity[i, j]
        if all(map(math.isfinite, work)):
            best = min(best, sum(cost[j] * math.ceil(work[j] - 1e-6) for j in options))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_the_mix_is_the_cheapest_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    buckets, options = int(rng.integers(1, 4)), int(rng.integers(2, 4))
    rate = rng.uniform(0.5, 6.0, buckets)
    capacity = rng.uniform(0.3, 4.0, (buckets, options)) * (rng.random((buckets, options)) > 0.2)
    capacity[:, 0] = np.maximum(capacity[:, 0], 0.2)
    cost = rng.uniform(0.5, 5.0, options)
    found = cheapest(rate, capacity, cost, slices=3)
    assert found.proven
    assert found.cost == pytest.approx(brute(list(rate), capacity, list(cost), 3))
    # What it says is a mix: every slice once, none where it cannot run, no instance overfull.
    assert (found.slices.sum(axis=1) == 3).all()
    assert (found.slices[capacity == 0] == 0).all()
    assert (found.work <= found.instances + 1e-6).all()
    alone = [mix.cost for mix in single(rate, capacity, cost) if mix is not None]
    assert found.cost <= min(alone) + 1e-9


def test_two_types_are_cheaper_than_each_alone() -> None:
    # 1.2 requests/s; a big GPU serves 1, a small one 0.25, at a tenth of the price: 1 big + 1 small < 2 big, 5 small.
    found = cheapest([1.2], [[1.0, 0.25]], [5.0, 2.0], slices=6)
    assert found.instances.tolist() == [1, 1]
    assert found.cost == 7.0
    assert [mix.cost for mix in single([1.2], [[1.0, 0.25]], [5.0, 2.0]) if mix] == [10.0, 10.0]


def test_what_a_gpu_cannot_serve_goes_elsewhere() -> None:
    found = cheapest([1.0, 1.0], [[4.0, 2.0], [0.0, 1.0]], [1.0, 10.0])
    assert found.shares.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert single([1.0, 1.0], [[4.0, 2.0], [0.0, 1.0]], [1.0, 10.0])[0] is None


def test_no_gpu_serves_a_bucket() -> None:
    said = r"requests with 9,000 tokens in, 10 out, 25.0 % of all, meet TPOT ≤ 40 ms on none of l4, a10g"
    with pytest.raises(InfeasibleError, match=said):
        cheapest([3.0, 1.0], [[1.0, 1.0], [0.0, 0.0]], [1.0, 1.0], slo="TPOT ≤ 40 ms", options=["l4", "a10g"],
                 names=["100 tokens in, 10 out", "9,000 tokens in, 10 out"])  # fmt: skip


def test_as_many_as_there_are() -> None:
    few = cheapest([3.0], [[1.0, 1.0]], [1.0, 5.0], available=[2, None], slices=6)
    assert few.instances.tolist() == [2, 1]
    said = r"too few instances \(1 of l4, 1 of a10g\) for 3 requests/s"
    with pytest.raises(InfeasibleError, match=said):
        cheapest([3.0], [[1.0, 1.0]], [1.0, 5.0], available=[1, 1], stock=["1 of l4", "1 of a10g"])


def test_many_buckets_are_solved_in_time() -> None:
    rng = np.random.default_rng(1)
    size = rng.uniform(0.1, 4.0, 60)
    capacity = 1 / (size[:, None] * np.array([0.3, 0.6, 2.0, 2.5])) * (size[:, None] < np.array([9, 9, 2.5, 1.5]))
    rate, cost = rng.uniform(0.1, 1.0, 60), np.array([7.0, 3.5, 1.0, 0.8])
    found = cheapest(rate, capacity, cost)
    assert found.cost >= (rate / (capacity / cost).max(axis=1)).sum()  # not even fractions of instances are cheaper
    assert found.cost <= min(mix.cost for mix in single(rate, capacity, cost) if mix is not None)


def test_a_profile_asks_for_every_bucket() -> None:
    asked = profile(lambda gpu, i, j: i * j * len(gpu), ["l4", "a10"], [1, 2], [10, 20])
    assert asked.tolist() == [[20.0, 30.0], [80.0, 120.0]]


@pytest.mark.parametrize(("rate", "capacity", "cost"), [
    ([0.0], [[1.0]], [1.0]), ([1.0], [[-1.0]], [1.0]), ([1.0], [[1.0]], [0.0]), ([1.0], [[1.0, 1.0]], [1.0]),
    ([np.nan], [[1.0]], [1.0]),
])  # fmt: skip
def test_what_is_no_question(rate: list[float], capacity: list[list[float]], cost: list[float]) -> None:
    with pytest.raises(ValueError, match=r"positive|not \(buckets, options\)|at least 0"):
        cheapest(rate, capacity, cost)


def test_however_little_there_is_to_serve_takes_an_instance() -> None:
    found = cheapest([1e-9], [[1.0, 10.0]], [1.0, 5.0])
    assert (found.instances.tolist(), found.cost) == ([1, 0], 1.0)
