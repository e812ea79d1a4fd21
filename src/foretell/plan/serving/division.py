"""`division`: which sizes of requests a unit of a mix serves, as a small grid of tokens in and out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.plan.serving.load import INPUT_EDGES, OUTPUT_EDGES, Load

__all__ = ["Division", "division"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Division:
    """Shares of the requests of each size that a unit serves, (inputs, outputs); NaN where there are none.

    A row has requests of up to so many tokens in as `inputs` says, a column of up to so many out as `outputs` says,
    each beginning after the one before; the last has no end.
    """

    inputs: tuple[float, ...]
    outputs: tuple[float, ...]
    shares: Floats


def division(load: Load, shares: npt.ArrayLike) -> Division:
    """How a load is divided, by the share of each of its groups (those of `load.buckets`) that a unit serves.

    Neighbouring sizes that are divided alike are put together: of a plain rule little is left.

    >>> found = division(Load.of([50, 400, 3000], [20, 20, 20]), [1.0, 1.0, 0.25])
    >>> found.inputs, found.outputs, found.shares.tolist()
    ((2048, inf), (inf,), [[1.0], [0.25]])
    """
    rows, columns = np.searchsorted(INPUT_EDGES, load.input_tokens), np.searchsorted(OUTPUT_EDGES, load.output_tokens)
    grid = np.full((len(INPUT_EDGES) + 1, len(OUTPUT_EDGES) + 1), np.nan)
    grid[rows, columns] = np.asarray(shares)
    grid, inputs = _together(grid, INPUT_EDGES)
    turned, outputs = _together(grid.T, OUTPUT_EDGES)
    return Division(inputs, outputs, turned.T)


def _together(grid: Floats, edges: tuple[int, ...]) -> tuple[Floats, tuple[float, ...]]:
    """A grid with rows put together that do not contradict each other, and where each of them ends."""
    found: list[Floats] = []
    first: list[int] = []  # row of the grid that each begins with
    for at in np.flatnonzero(~np.isnan(grid).all(axis=1)):
        row = grid[at]
        if found and bool((np.isnan(row) | np.isnan(found[-1]) | (row == found[-1])).all()):
            found[-1] = np.where(np.isnan(row), found[-1], row)
        else:
            found.append(row)
            first.append(int(at))
    return np.stack(found), (*(edges[at - 1] for at in first[1:]), np.inf)
