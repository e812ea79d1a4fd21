"""How predictions of measured serving are judged: errors by group, and the bars they have to meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.accuracy.serving.row import Row
from foretell.accuracy.serving.steady import Steady
from foretell.errors import ForetellError, unknown
from foretell.simulate.serving import ServingPlan

__all__ = ["BARS", "FIGURES", "Bar", "Verdict", "errors", "grouped", "judge", "verdicts"]

Floats = npt.NDArray[np.float64]

#: What rows state and predictions have, by the names of both.
FIGURES = ("tpot_s", "ttft_s", "itl_s", "tokens_per_s", "power_w")


def errors(rows: Sequence[Row], found: Sequence[Steady | ForetellError], figure: str) -> Floats:
    """Signed relative errors of a figure, (rows,); NaN where a row does not state it, infinite where none is predicted.

    Raises UnknownNameError for a figure that is none of `FIGURES`.
    """
    if figure not in FIGURES:
        raise unknown("figure", figure, FIGURES)
    result = np.full(len(rows), np.nan)
    for i, (row, one) in enumerate(zip(rows, found, strict=True)):
        measured = float(getattr(row, figure))
        if measured:
            result[i] = np.inf if isinstance(one, ForetellError) else getattr(one, figure) / measured - 1.0
    return result


def grouped(rows: Sequence[Row], label: str) -> dict[str, list[int]]:
    """Which rows have each value of a field of `Row`, its plan or its shape, such as ``family``, ``gpu`` or ``tp``.

    Raises UnknownNameError for a field that none of them has.
    """
    found: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        holder = next((part for part in (row, row.plan, row.config) if hasattr(part, label)), None)
        if holder is None:
            raise unknown("field", label, (*(f.name for f in fields(Row)), *(f.name for f in fields(ServingPlan))))
        found.setdefault(str(getattr(holder, label)), []).append(i)
    return dict(sorted(found.items()))


def _mean(error: Floats) -> float:
    return float(error.mean())


def _median(error: Floats) -> float:
    return float(np.median(error))


@dataclass(frozen=True, slots=True)
class Bar:
    """What absolute errors of a figure in a source's rows have to meet: `value` of them is at most `limit`."""

    source: str
    figure: str
    name: str
    limit: float
    value: Callable[[Floats], float]
    judged: Mapping[str, Any] = field(default_factory=dict)

    def takes(self, row: Row) -> bool:
        """Whether a row is judged: of the source, stating the figure, and with the values in `judged`."""
        stated = row.source == self.source and getattr(row, self.figure) > 0
        return bool(stated and all(getattr(row, name) in want for name, want in self.judged.items()))


BARS: tuple[Bar, ...] = (
    Bar("silicon-sample", "tpot_s", "TPOT, median", 0.10, _median),
    Bar("silicon-sample", "tpot_s", "TPOT, mean", 0.15, _mean),
    Bar("tensorrt-llm", "tokens_per_s", "throughput, median", 0.15, _median),
    Bar("ml-energy", "itl_s", "inter-token latency, median", 0.08, _median),
    Bar("ml-energy", "power_w", "power, median", 0.06, _median),
    Bar("splitwise", "tpot_s", "token time, mean", 0.06, _mean),
    Bar("splitwise", "ttft_s", "prompt time, mean", 0.10, _mean),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out at a bar, of how many rows."""

    source: str
    name: str
    value: float
    limit: float
    n: int

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return self.value <= self.limit


def judge(rows: Sequence[Row], found: Sequence[Steady | ForetellError], bar: Bar) -> Verdict | None:
    """What comes out at a bar; None where it judges none of the rows. A row without a prediction counts as 100 %."""
    picked = np.array([bar.takes(row) for row in rows], dtype=bool)
    if not picked.any():
        return None
    error = np.abs(errors(rows, found, bar.figure)[picked])
    error[np.isinf(error)] = 1.0
    return Verdict(bar.source, bar.name, bar.value(error), bar.limit, int(picked.sum()))


def verdicts(rows: Sequence[Row], found: Sequence[Steady | ForetellError]) -> list[Verdict]:
    """Every bar that any of the rows is judged by, and for each source that all its rows are answered."""
    results = [verdict for bar in BARS if (verdict := judge(rows, found, bar)) is not None]
    for source, members in grouped(rows, "source").items():
        missing = sum(isinstance(found[i], ForetellError) for i in members)
        results.append(Verdict(source, "share not answered", missing / len(members), 0.0, len(members)))
    return results
