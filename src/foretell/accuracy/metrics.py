"""How good a set of predictions is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Score:
    """Of n predictions: relative errors |p − m| / m (median, mean, 90th percentile), bias, and how intervals did.

    `bias` is the median of p / m − 1. `coverage` is the share of measurements inside the 80 % interval, `width` the
    median of its high / low. `failed` counts rows that could not be predicted.
    """

    n: int
    median: float
    mean: float
    p90: float
    bias: float
    coverage: float
    width: float
    failed: int = 0


def score(
    measured: Sequence[float],
    predicted: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    failed: int = 0,
) -> Score | None:
    """The score of parallel sequences in seconds; None where they are empty.

    >>> score([1.0, 2.0], [1.1, 1.8], [0.9, 1.9], [1.2, 2.1]).mean
    0.1
    """
    if not measured:
        return None
    m, p = np.asarray(measured), np.asarray(predicted)
    lows, highs = np.asarray(low), np.asarray(high)
    error = np.abs(p - m) / m
    return Score(
        n=len(m),
        median=round(float(np.median(error)), 12),
        mean=round(float(error.mean()), 12),
        p90=round(float(np.quantile(error, 0.9)), 12),
        bias=float(np.median(p / m) - 1.0),
        coverage=float(np.mean((lows <= m) & (m <= highs))),
        width=float(np.median(highs / lows)),
        failed=failed,
    )
