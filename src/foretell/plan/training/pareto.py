"""The Pareto front of a few axes, less of each being better."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["front"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def front(points: Floats, step: float = 0.0) -> Ints:
    """Rows of `points` (rows, axes) that no other row equals or betters in every axis, best in the first axis first.

    Of rows that are equal the first is kept. With a `step`, axes are compared in steps of that share (0.01: 1 %), so
    that no two rows of the front differ by less in all of them; values must then be positive. An axis that is not
    known (NaN) anywhere is left out.

    >>> front(np.array([[1.0, 5.0], [2.0, 4.0], [2.0, 6.0], [1.0, 5.0]])).tolist()
    [0, 1]
    """
    points = np.asarray(points, dtype=np.float64)
    points = points[:, ~np.isnan(points).any(axis=0)]
    if not points.size:
        return np.arange(min(1, len(points)), dtype=np.int64)
    coarse = np.floor(np.log(points) / np.log1p(step)) if step else points
    # The best of a cell comes first in it, and whatever is dominated comes after what dominates it.
    order = np.lexsort((*points.T[::-1], *coarse.T[::-1]))
    rest = np.asarray(order, dtype=np.int64)
    found = []
    while len(rest):
        best, rest = rest[0], rest[1:]
        found.append(int(best))
        rest = rest[(coarse[rest] < coarse[best]).any(axis=1)]
    return np.array(found, dtype=np.int64)
