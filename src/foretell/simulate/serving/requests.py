"""`Requests`: what a server is asked for, as columns in order of arrival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.simulate.serving.given import instance, wholes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

__all__ = ["LATEST_S", "Requests"]

_Value = TypeVar("_Value")
_WHERE = "requests"

#: The latest that a request may come, some 300 years: a clock of 64 bits there still tells microseconds apart.
LATEST_S = 1e10


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests, one a row, sorted by arrival; columns are read-only.

    `arrival_s` counts from the first one's zero of time. `input_tokens` and `output_tokens` are at least 1.
    `prefix` is an id of what the prompt begins with and `prefix_tokens` how long that is (0: shared with nobody):
    requests of one id share that many tokens. `about` says where they come from, and `skipped` counts rows of a file
    that could not be used, by reason. `row` is the row of that file that each is from, None where there is no file.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    prefix: Ints
    prefix_tokens: Ints
    about: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    skipped: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    row: Ints | None = None

    def __post_init__(self) -> None:
        names = ("arrival_s", "input_tokens", "output_tokens", "prefix", "prefix_tokens")
        for name in names if self.row is None else (*names, "row"):
            column = instance(getattr(self, name), np.ndarray, name, _WHERE, "columns, or let Requests.of make them")
            if column.ndim != 1 or len(column) != len(self.arrival_s):
                what = f"{name} has shape {column.shape}, arrival_s {self.arrival_s.shape}"
                raise InputError(what, _WHERE, "give columns of one length")
            column.flags.writeable = False
        count = len(self.arrival_s)
        if not count:
            raise InputError("no request", _WHERE, "give at least one")
        if not np.isfinite(self.arrival_s).all() or self.arrival_s.min() < 0 or (np.diff(self.arrival_s) < 0).any():
            raise InputError("arrivals are not sorted times from 0 on", _WHERE, "give times; Requests.of sorts them")
        if self.arrival_s[-1] > LATEST_S:
            what = f"the last arrives after {self.arrival_s[-1]:.3g} s"
            raise InputError(what, _WHERE, f"give times up to {LATEST_S:g} s, or a higher rate")
        for name, least in (("input_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0)):
            if getattr(self, name).min() < least:
                raise InputError(f"{name} below {least}", _WHERE, f"give {least} or more")

    @staticmethod
    def of(
        arrival_s: npt.ArrayLike,
        input_tokens: npt.ArrayLike,
        output_tokens: npt.ArrayLike,
        prefix: npt.ArrayLike = 0,
        prefix_tokens: npt.ArrayLike = 0,
        *,
        about: Mapping[str, str] | None = None,
        skipped: Mapping[str, int] | None = None,
        row: npt.ArrayLike | None = None,
    ) -> Requests:
        """Columns that broadcast, copied and sorted by arrival (equal arrivals keep their order).

        Raises InputError for what is no number, or no column.
        """
        given = {"input_tokens": input_tokens, "output_tokens": output_tokens, "prefix": prefix,
                 "prefix_tokens": prefix_tokens}  # fmt: skip
        arrival, columns = _seconds(arrival_s), {name: wholes(values, name, _WHERE) for name, values in given.items()}
        shapes = {"arrival_s": arrival.shape, **{name: column.shape for name, column in columns.items()}}
        if any(len(shape) > 1 for shape in shapes.values()) or len({*shapes.values()} - {(), (1,)}) > 1:
            said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise InputError(f"the columns' shapes are {said}", _WHERE, "give columns of one length, or one number")
        count = np.broadcast_shapes(*shapes.values())
        order = np.argsort(np.broadcast_to(arrival, count), kind="stable")
        rows = None if row is None else wholes(row, "row", _WHERE)
        if rows is not None and rows.shape != count:
            raise InputError(f"row has shape {rows.shape}, not {count}", _WHERE, "give one a request")
        inputs, outputs, prefixes, shared = (np.broadcast_to(column, count)[order] for column in columns.values())
        return Requests(
            np.broadcast_to(arrival, count)[order], inputs, outputs, prefixes, shared,
            about=_mapping(about, "about"), skipped=_mapping(skipped, "skipped"),
            row=None if rows is None else rows[order],
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.arrival_s)


def _seconds(values: npt.ArrayLike) -> Floats:
    """A column of times."""
    try:
        column = np.atleast_1d(np.asarray(values))
        if column.dtype.kind in "iuf":
            return column.astype(np.float64)
    except ValueError:  # rows of different lengths
        pass
    raise InputError(f"arrival_s is {values!r:.40}", _WHERE, "give seconds")


def _mapping(given: Mapping[str, _Value] | None, name: str) -> Mapping[str, _Value]:
    if not isinstance(given, Mapping | None):
        raise InputError(f"{name} is {given!r:.40}", _WHERE, "give a mapping")
    return MappingProxyType(dict(given or {}))
