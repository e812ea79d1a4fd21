"""Columns over a grid of one count or two, and what lies between grid points."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

__all__ = ["Curve", "Surface", "counts", "powers"]


def counts(most: int) -> Floats:
    """0, every whole number to 64, then steps of an eighth of what they begin at: kernels step at such sizes."""
    points = [*range(65)]
    while points[-1] < most:
        points.append(points[-1] + max(8, 1 << (points[-1].bit_length() - 4)))
    return np.array(points, dtype=np.float64)


def powers(most: float, each: int) -> Floats:
    """1 to at least `most`, `each` points a doubling."""
    return np.asarray(2.0 ** (np.arange(int(np.ceil(np.log2(max(2.0, most)) * each)) + 1) / each))


@dataclass(frozen=True)
class Curve:
    """Values (columns, points) at rising `x` (points,); linear between, and beyond the last as its last stretch."""

    x: Floats
    values: Floats

    def rows(self, columns: slice | Ints, at: Floats) -> Floats:
        """(columns, at)."""
        index = np.clip(np.searchsorted(self.x, at, side="right") - 1, 0, len(self.x) - 2)
        low = self.x[index]
        part = (at - low) / (self.x[index + 1] - low)
        below = self.values[columns][..., index]
        return np.asarray(below + part * (self.values[columns][..., index + 1] - below))


@dataclass(frozen=True)
class Surface:
    """Values (columns, x points, y points) at rising `x` and `y` of at least 1; bilinear between points.

    Times are sums of a constant and of terms in either count and their product, which is what is interpolated exactly.
    """

    x: Floats
    y: Floats
    values: Floats

    def rows(self, columns: slice | Ints, x: Floats, y: Floats) -> Floats:
        """(columns, at); 0 where a count is 0."""
        there = (x > 0.0) & (y > 0.0)
        x, y = np.maximum(x, 1.0), np.maximum(y, 1.0)
        i, u = self._place(self.x, x)
        j, v = self._place(self.y, y)
        value = self.values[columns]
        found = (
            value[..., i, j] * (1.0 - u) * (1.0 - v) + value[..., i + 1, j] * u * (1.0 - v)
            + value[..., i, j + 1] * (1.0 - u) * v + value[..., i + 1, j + 1] * u * v
        )  # fmt: skip
        return np.where(there, found, 0.0)

    @staticmethod
    def _place(grid: Floats, at: Floats) -> tuple[Ints, Floats]:
        """The cell of each value, and where in it, linearly; past the last point as the last cell goes on."""
        index = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
        low = grid[index]
        return index, np.asarray((at - low) / (grid[index + 1] - low))
