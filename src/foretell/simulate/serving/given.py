"""What a caller gives, by its kind and range: each check names the field, what it is, and the repair."""

from __future__ import annotations

import math
import numbers
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError

__all__ = ["instance", "number", "text", "whole", "wholes"]

_Kind = TypeVar("_Kind")
_MOST = 2**63 - 1


def number(
    value: Any, field: str, where: str, *, least: float = 0.0, most: float = math.inf, above: bool = False
) -> float:
    """`value`, a number from `least` (or `above` it) to `most`. Raises InputError for anything else.

    >>> number(1, "bytes_per_s", "link", above=True)
    1
    """
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good or not (least < value <= most if above else least <= value <= most):
        ends = f"{', up' if above else ''} to {most:g}" if most < math.inf else "" if above else " on"
        repair = f"give a number {'above' if above else 'from'} {least:g}{ends}"
        raise InputError(f"{field} is {_shown(value)}", where, repair)
    return value  # type: ignore[no-any-return]


def whole(value: Any, field: str, where: str, *, least: int = 0, most: int = _MOST) -> int:
    """`value`, a whole number from `least` to `most`. Raises InputError for anything else."""
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not good or not least <= int(value) <= most:
        ends = f" to {most:,}" if most < _MOST else " on"
        raise InputError(f"{field} is {_shown(value)}", where, f"give a whole number from {least:,}{ends}")
    return int(value)


def text(value: Any, field: str, where: str) -> str:
    """`value`, a text. Raises InputError for anything else."""
    return instance(value, str, field, where, "a text")


def instance(value: Any, kind: type[_Kind], field: str, where: str, wanted: str = "") -> _Kind:
    """`value`, of a `kind`. Raises InputError for anything else."""
    if not isinstance(value, kind):
        raise InputError(f"{field} is {_shown(value)}", where, f"give {wanted or 'a ' + kind.__name__}")
    return value


def wholes(values: npt.ArrayLike, field: str, where: str) -> npt.NDArray[np.int64]:
    """A column of whole numbers. Raises InputError with the first that is none."""
    try:
        column = np.asarray(values)
    except ValueError:  # rows of different lengths
        column = np.empty(0, dtype=object)
    if column.dtype.kind in "iu" and (column.dtype.kind == "i" or not column.size or column.max() <= _MOST):
        return column.astype(np.int64)
    if column.dtype.kind == "f":
        bad = ~(np.isfinite(column) & (column == np.floor(column)) & (np.abs(column) < 2.0**63))
        if not bad.any():
            return column.astype(np.int64)
        raise InputError(f"{field} is {column[bad].flat[0]:g}", where, "give whole numbers")
    raise InputError(f"{field} is {_shown(values)}", where, "give whole numbers below 2^63")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:39] + "…"
