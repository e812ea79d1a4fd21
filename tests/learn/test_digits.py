"""Large minibatches on real digits: with the rules as good as small ones, and worse without any of them."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

import pytest
import torch

from foretell.learn import digits as task

pytest.importorskip("sklearn", reason="scikit-learn is not installed (pip install scikit-learn)")

#: 16 workers of 8 samples; 15 epochs, five of them warm-up.
LOW, HIGH = 0.05, 0.25
SMALL = {"workers": 1, "per_worker": 8, "epochs": 15, "base_rate": LOW}
LARGE = SMALL | {"workers": 16}


@cache
def data() -> task.Digits:
    torch.set_num_threads(1)
    return task.digits()


def accuracy(seeds: int, **settings: Any) -> float:
    return fmean(task.learn(data(), seed=seed, **settings) for seed in range(seeds))


@cache
def by_the_rules() -> float:
    return accuracy(3, **LARGE)


def test_the_digits_are_real() -> None:
    assert data().images.shape == (1258, 1, 8, 8)
    assert data().test_images.shape == (539, 1, 8, 8)
    assert torch.cat([data().labels, data().test_labels]).bincount().tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180  # the counts in UCI's description of them, optdigits.names
    ]  # fmt: skip
    assert (data().images.min(), data().images.max()) == (0, 1)


def test_a_batch_16_times_larger_learns_as_well() -> None:
    assert accuracy(1, **SMALL) - by_the_rules() < 0.015


def test_without_scaling_it_does_not() -> None:
    assert accuracy(2, **LARGE, scale=False) < by_the_rules() - 0.015


def test_at_a_high_rate_it_needs_warming_up() -> None:
    high = LARGE | {"base_rate": HIGH, "epochs": 10}
    assert accuracy(3, **high, warmup_epochs=0.0) < accuracy(3, **high) - 0.02


def test_the_same_seed_gives_the_same() -> None:
    short = LARGE | {"epochs": 2}
    losses: list[list[float]] = [[], []]
    found = [task.learn(data(), **short, watch=lambda step, loss, to=to: to.append(loss)) for to in losses]
    assert found[0] == found[1]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2 * (1258 // 128)
    assert task.learn(data(), **short, seed=1) != found[0]


def test_a_loss_that_is_lost_ends_it() -> None:
    """A rate beyond all bounds: accuracy is that of guessing, and nothing raises."""
    assert task.learn(data(), **LARGE | {"base_rate": 1e9, "epochs": 1}) < 0.3
