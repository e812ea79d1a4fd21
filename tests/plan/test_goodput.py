"""Goodput: the closed forms against a naive simulation, second by second of fate, and against what was published."""

import math
import random

import numpy as np
import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.plan.training.goodput import DAY_S, H100_MTBF_S, Reliability, young_interval_s


def naive(job: Reliability, interval: float, segments: int, seed: int) -> dict[str, float]:
    """One long run, told as it happens: draw when the next failure comes, see what it hits."""
    rng = random.Random(seed)
    spent = {"train": 0.0, "save": 0.0, "lost": 0.0, "away": 0.0, "failures": 0.0}
    rate = job.devices / job.mtbf_device_s + job.nodes / job.mtbf_node_s
    done = 0
    while done < segments:
        failure = rng.expovariate(rate)
        if failure >= interval + job.checkpoint_s:
            done += 1
            spent["train"] += interval
            spent["save"] += job.checkpoint_s
            continue
        spent["lost"] += failure
        spent["failures"] += 1
        while True:
            spent["away"] += job.repair_s
            failure = rng.expovariate(rate)
            if failure >= job.restart_s:
                spent["away"] += job.restart_s
                break
            spent["away"] += failure
            spent["failures"] += 1
    return spent


JOBS = [
    (Reliability(1000, 1e7, checkpoint_s=60, restart_s=300), 1500.0),
    (Reliability(1000, 5e6, checkpoint_s=300, restart_s=3000, repair_s=1000), 4000.0),
    (Reliability(64, 1e9, nodes=8, mtbf_node_s=4e4, checkpoint_s=100, restart_s=600, repair_s=100), 2000.0),
    (Reliability(1000, 1e7, checkpoint_s=0, restart_s=500), 3000.0),
]


@pytest.mark.parametrize(("job", "interval"), JOBS)
def test_the_shares_are_those_of_a_long_simulated_run(job: Reliability, interval: float) -> None:
    spent = naive(job, interval, 60_000, seed=1)
    failures = spent.pop("failures")
    total = sum(spent.values())
    found = job.goodput(interval)
    assert found.share == pytest.approx(spent["train"] / total, rel=0.01)
    assert found.checkpoint == pytest.approx(spent["save"] / total, rel=0.01, abs=1e-9)
    assert found.lost == pytest.approx(spent["lost"] / total, rel=0.03)
    assert found.restart == pytest.approx(spent["away"] / total, rel=0.03)
    assert found.failures_per_day == pytest.approx(failures / total * DAY_S, rel=0.03)
    assert found.share + found.checkpoint + found.lost + found.restart == pytest.approx(1.0)


@pytest.mark.parametrize(("job", "interval"), JOBS)
def test_sampled_runs_have_the_expected_mean_and_spread(job: Reliability, interval: float) -> None:
    walls = job.sample(200 * interval, interval_s=interval, runs=4000, seed=2)
    assert (np.diff(walls) >= 0).all()
    assert walls.mean() == pytest.approx(job.goodput(interval).wall_s(200 * interval), rel=0.01)
    again = [sum(v for k, v in naive(job, interval, 200, seed).items() if k != "failures") for seed in range(400)]
    assert walls.std() == pytest.approx(np.std(again), rel=0.15)
    assert (job.sample(200 * interval, interval_s=interval, runs=10, seed=2) != walls[:10]).any()


def test_a_run_that_does_not_divide_ends_with_a_shorter_segment() -> None:
    job = Reliability(1, checkpoint_s=10)
    assert job.sample(250, interval_s=100, runs=2).tolist() == [280.0, 280.0]
    assert job.sample(300, interval_s=100, runs=1).tolist() == [330.0]


@pytest.mark.parametrize(("job", "interval"), JOBS[:3])
def test_the_best_interval_is_better_than_any_other(job: Reliability, interval: float) -> None:
    best = job.best_interval_s()
    at_best = job.goodput().share
    grid = best * np.linspace(0.2, 5, 400)
    shares = [job.goodput(float(tau)).share for tau in grid]
    assert max(shares) <= at_best * (1 + 1e-12)
    assert grid[int(np.argmax(shares))] == pytest.approx(best, rel=0.02)


def test_the_best_interval_becomes_youngs_when_checkpoints_are_short() -> None:
    for checkpoint, most in ((1.0, 0.003), (100.0, 0.03), (10_000.0, 0.3)):
        job = Reliability(1000, 1e8, checkpoint_s=checkpoint)
        young = young_interval_s(checkpoint, job.mtbf_s)
        assert job.best_interval_s() == pytest.approx(young, rel=most)
        assert job.best_interval_s() < young
    # Daly's higher-order estimate (2006, equation 37) lies between.
    job = Reliability(1000, 1e8, checkpoint_s=1000)
    c, m = 1000.0, job.mtbf_s
    daly = math.sqrt(2 * c * m) * (1 + math.sqrt(c / (2 * m)) / 3 + c / (2 * m) / 9) - c
    assert job.best_interval_s() == pytest.approx(daly, rel=1e-3)


def test_without_failures_only_checkpoints_cost_and_without_either_nothing() -> None:
    assert Reliability(8).goodput().share == 1.0
    assert Reliability(8, checkpoint_s=10).goodput(90).share == pytest.approx(0.9)
    assert Reliability(8).best_interval_s() == math.inf
    assert Reliability(8).goodput(100).wall_s(1000) == 1000
    free = Reliability(1000, 1e7, restart_s=500)
    assert free.best_interval_s() == 0
    assert free.goodput().share == pytest.approx(free.goodput(1e-3).share, rel=1e-6)
    assert free.goodput().lost == 0


def test_more_devices_longer_restarts_and_longer_checkpoints_cost() -> None:
    base = Reliability(1000, 1e7, checkpoint_s=60, restart_s=300).goodput().share
    for worse in ({"devices": 2000}, {"checkpoint_s": 120}, {"restart_s": 600}, {"repair_s": 600}, {"nodes": 10}):
        given = {"devices": 1000, "mtbf_device_s": 1e7, "mtbf_node_s": 1e6, "checkpoint_s": 60, "restart_s": 300}
        assert Reliability(**{**given, **worse}).goodput().share < base


def test_llama_3_on_16384_h100() -> None:
    """419 interruptions in 54 days, and over 90 % effective training time (arXiv 2407.21783, section 3.3.4)."""
    job = Reliability(16384, H100_MTBF_S, checkpoint_s=5, restart_s=600)
    found = job.goodput()
    # While the job is up, or coming up, it fails at the measured rate.
    assert found.failures_per_day * 54 == pytest.approx(419, rel=1e-9)
    assert found.share > 0.9
    # What restarts may take at most for that: about a quarter of an hour, as a grid search says.
    longest = max(r for r in range(0, 3600, 30) if Reliability(16384, H100_MTBF_S, checkpoint_s=5, restart_s=r)
                  .goodput().share > 0.9)  # fmt: skip
    assert 600 <= longest <= 1200


def test_hopeless_runs_and_wrong_input_are_told_apart() -> None:
    with pytest.raises(InfeasibleError, match="practically never ends"):
        Reliability(10**6, 1e6, checkpoint_s=1, restart_s=1).goodput(1000)
    with pytest.raises(InfeasibleError):
        Reliability(10**6, 1e6, checkpoint_s=1, restart_s=1).sample(1e4, interval_s=1000)
    for wrong in ({"devices": 0}, {"mtbf_device_s": 0.0}, {"mtbf_node_s": -1.0}, {"checkpoint_s": -1.0},
                  {"restart_s": math.inf}, {"mtbf_device_s": math.nan}, {"repair_s": math.nan}):  # fmt: skip
        with pytest.raises(InputError):
            Reliability(**{"devices": 8, **wrong})
    with pytest.raises(InputError, match="want a time"):
        Reliability(8, 1e6).goodput(-1)
    with pytest.raises(InputError, match="never saves"):
        Reliability(8, 1e6).goodput(math.inf)
    with pytest.raises(InputError, match="fewer runs"):
        Reliability(8, 1e6, checkpoint_s=0.1).sample(1e6, interval_s=1.0, runs=1000)
    with pytest.raises(InputError):
        Reliability(8, 1e6, checkpoint_s=0.1).sample(0)
    with pytest.raises(InputError, match="more than 0"):
        Reliability(8, 1e6).sample(10)
