"""`Timeline`: events in lanes as NumPy columns, so that a trace of millions of events stays small."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Counter", "Timeline"]

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Counter:
    """A quantity over time, such as allocated bytes: `value[i]` from `time_s[i]` until the next."""

    name: str
    unit: str
    time_s: Floats
    value: Floats

    def __post_init__(self) -> None:
        _columns(f"counter {self.name!r}", {"time_s": self.time_s, "value": self.value}, len(self.time_s))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events, one a row; every column has the same length.

    `lane`, `name` and `kind` are indices into `lanes`, `names` and `kinds`, each text held once. `args` holds further
    columns by name: numbers (NaN where an event has none) or texts (empty where it has none). Events of one lane may
    nest but are otherwise in no order that is relied upon. `about` says where the timeline comes from.
    """

    lanes: tuple[str, ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    lane: Codes
    start_s: Floats
    duration_s: Floats
    name: Codes
    kind: Codes
    args: Mapping[str, npt.NDArray[Any]] = field(default_factory=lambda: MappingProxyType({}))
    counters: tuple[Counter, ...] = ()
    about: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        count = len(self.start_s)
        numbers = {"start_s": self.start_s, "duration_s": self.duration_s}
        _columns("timeline", {**numbers, "lane": self.lane, "name": self.name, "kind": self.kind, **self.args}, count)
        for what, codes, texts in (
            ("lane", self.lane, self.lanes),
            ("name", self.name, self.names),
            ("kind", self.kind, self.kinds),
        ):
            if count and not 0 <= int(codes.min()) <= int(codes.max()) < len(texts):
                raise ValueError(f"timeline: a {what} is none of the {len(texts)} {what}s")
        for what, column in numbers.items():
            if not np.isfinite(column).all():
                raise ValueError(f"timeline: {what} is not finite everywhere")
        if count and float(self.duration_s.min()) < 0.0:
            raise ValueError("timeline: a duration is negative")

    @staticmethod
    def of(
        *,
        lane: Iterable[str],
        start_s: npt.ArrayLike,
        duration_s: npt.ArrayLike,
        name: Iterable[str],
        kind: Iterable[str] | None = None,
        args: Mapping[str, npt.ArrayLike] | None = None,
        lanes: Sequence[str] = (),
        counters: Iterable[Counter] = (),
        about: Mapping[str, str] | None = None,
    ) -> Timeline:
        """A timeline of columns with their texts written out; `lanes` fixes the order in which lanes are shown.

        Columns are copied. Raises ValueError where their lengths differ, or a time is not finite or negative.
        """
        starts = np.array(start_s, dtype=np.float64)
        all_lanes, lane_codes = _coded(lane, lanes)
        names, name_codes = _coded(name)
        kinds, kind_codes = _coded([""] * len(starts) if kind is None else kind)
        return Timeline(
            lanes=all_lanes,
            names=names,
            kinds=kinds,
            lane=lane_codes,
            start_s=starts,
            duration_s=np.array(duration_s, dtype=np.float64),
            name=name_codes,
            kind=kind_codes,
            args=MappingProxyType({key: np.array(column) for key, column in (args or {}).items()}),
            counters=tuple(counters),
            about=MappingProxyType(dict(about or {})),
        )

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def end_s(self) -> float:
        """When the last event ends; 0 where there is none."""
        return float((self.start_s + self.duration_s).max()) if len(self) else 0.0

    def busy_s(self, lane: str, *, without: Sequence[str] = ()) -> float:
        """Durations of a lane's events added up, those of the kinds `without` left out. Nested ones count twice."""
        kept = self.lane == self.lanes.index(lane)
        for kind in without:
            if kind in self.kinds:
                kept &= self.kind != self.kinds.index(kind)
        return math.fsum(self.duration_s[kept])


def _coded(texts: Iterable[str], first: Sequence[str] = ()) -> tuple[tuple[str, ...], Codes]:
    """The distinct texts, those of `first` before the others, and the index of each text among them."""
    code = {text: index for index, text in enumerate(first)}
    codes = np.fromiter((code.setdefault(text, len(code)) for text in texts), dtype=np.int32)
    return tuple(code), codes


def _columns(where: str, columns: Mapping[str, npt.NDArray[Any]], count: int) -> None:
    """Make the columns read-only. Raises ValueError where one is not a column of `count` rows."""
    for name, column in columns.items():
        if column.shape != (count,):
            raise ValueError(f"{where}: {name} has shape {column.shape}, not ({count},)")
        column.flags.writeable = False
