"""`Requests`: what a server is asked for, as columns in order of arrival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

__all__ = ["LATEST_S", "Requests"]

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
        count = len(self.arrival_s)
        for name in ("arrival_s", "input_tokens", "output_tokens", "prefix", "prefix_tokens"):
            column = getattr(self, name)
            if column.shape != (count,):
                raise ValueError(f"requests: {name} has shape {column.shape}, not ({count},)")
            column.flags.writeable = False
        if not count:
            raise InputError("no request", "requests", "give at least one")
        if not np.isfinite(self.arrival_s).all() or self.arrival_s.min() < 0 or (np.diff(self.arrival_s) < 0).any():
            raise InputError("arrivals are not sorted times from 0 on", "requests")
        if self.arrival_s[-1] > LATEST_S:
            what = f"the last arrives after {self.arrival_s[-1]:.3g} s"
            raise InputError(what, "requests", f"give times up to {LATEST_S:g} s, or a higher rate")
        for name, least in (("input_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0)):
            if getattr(self, name).min() < least:
                raise InputError(f"{name} below {least}", "requests")

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
        """Columns that broadcast, copied and sorted by arrival (equal arrivals keep their order)."""
        arrival = np.atleast_1d(np.asarray(arrival_s, dtype=np.float64))
        whole = [np.asarray(c, dtype=np.int64) for c in (input_tokens, output_tokens, prefix, prefix_tokens)]
        columns = np.broadcast_arrays(arrival, *whole)
        order = np.argsort(columns[0], kind="stable")
        arrivals, inputs, outputs, prefixes, shared = (np.array(column[order]) for column in columns)
        return Requests(
            arrivals, inputs, outputs, prefixes, shared,
            about=MappingProxyType(dict(about or {})), skipped=MappingProxyType(dict(skipped or {})),
            row=None if row is None else np.asarray(row, dtype=np.int64)[order],
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.arrival_s)
