"""How predictions of `Row`s are judged: errors by group, the bars they have to meet, and the quality of choices.

An error is of what the source states: of a step's time, or of tokens per second, predicted / measured − 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foretell.accuracy.training.row import Row
from foretell.errors import unknown
from foretell.hardware.cluster import Cluster
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.workload.llm import LLMConfig

__all__ = ["BARS", "Bar", "Choice", "Verdict", "choices", "errors", "grouped", "predict", "verdicts"]

Floats = npt.NDArray[np.float64]

#: Sources that state the time of a step; the others state tokens per second.
STATE_TIMES = ("calculon", "vtrain-single", "vtrain-multi")


class Times(Protocol):
    """What `predict` needs of a prediction."""

    @property
    def time_s(self) -> Floats:
        """Seconds of a step, (plans,)."""
        ...


def predict(rows: Sequence[Row], steps: Callable[[LLMConfig, PlanTable, Cluster], Times]) -> Floats:
    """Seconds of each row's step, (rows,); those of one model on one cluster are asked for at once."""
    together: dict[tuple[LLMConfig, str], list[int]] = {}
    for i, row in enumerate(rows):
        together.setdefault((row.config, row.cluster.name), []).append(i)
    seconds = np.empty(len(rows))
    for (config, _), members in together.items():
        table = PlanTable.of(rows[i].plan for i in members)
        seconds[members] = steps(config, table, rows[members[0]].cluster).time_s
    return seconds


def errors(rows: Sequence[Row], seconds: npt.ArrayLike) -> Floats:
    """Signed relative errors of predicted `seconds`, (rows,): of time or of tokens per second, by the source."""
    ratio = np.asarray(seconds, dtype=float) / np.array([row.step_s for row in rows])
    of_time = np.array([row.source in STATE_TIMES for row in rows], dtype=bool)
    return np.where(of_time, ratio, 1.0 / ratio) - 1.0


def grouped(rows: Sequence[Row], label: str) -> dict[str, list[int]]:
    """Which rows have each value of a field of `Row`, its plan or its shape, such as ``family``, ``gpus`` or ``tp``.

    Raises UnknownNameError for a field that none of them has.
    """
    found: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        holder = next((part for part in (row, row.plan, row.config) if hasattr(part, label)), None)
        if holder is None:
            raise unknown("field", label, (*(f.name for f in fields(Row)), *(f.name for f in fields(TrainingPlan))))
        found.setdefault(getattr(holder, label), []).append(i)
    return {str(value): found[value] for value in sorted(found)}


def _mean(error: Floats) -> float:
    return float(error.mean())


def _median(error: Floats) -> float:
    return float(np.median(error))


def _largest(error: Floats) -> float:
    return float(error.max())


def _beyond(limit: float) -> Callable[[Floats], float]:
    return lambda error: float((error > limit).mean())


@dataclass(frozen=True, slots=True)
class Bar:
    """What absolute errors of a source's rows have to meet: `value` of them is at most `limit`."""

    source: str
    name: str
    limit: float
    value: Callable[[Floats], float]
    judged: Mapping[str, Any] = field(default_factory=dict)

    def takes(self, row: Row) -> bool:
        """Whether a row is judged: of the source, and with the values in `judged`."""
        return row.source == self.source and all(getattr(row, name) in want for name, want in self.judged.items())


_A100 = {"device": ("a100-sxm4-80gb", "a100-sxm4-40gb")}
_JUDGE = {"split": ("judge",)}
BARS: tuple[Bar, ...] = (
    Bar("calculon", "mean", 0.035, _mean),
    Bar("calculon", "largest", 0.08, _largest),
    Bar("vtrain-single", "mean, 8 GPUs", 0.085, _mean, _JUDGE),
    Bar("vtrain-multi", "mean", 0.08, _mean),
    Bar("vtrain-multi", "median", 0.05, _median),
    Bar("llm-foundry", "mean, A100", 0.05, _mean, _A100),
    Bar("llm-foundry", "share beyond 15 %, A100", 0.05, _beyond(0.15), _A100),
    Bar("nemo", "mean", 0.05, _mean),
    Bar("megatron-bridge", "mean, dense", 0.04, _mean, {**_JUDGE, "moe": (False,)}),
    Bar("megatron-bridge", "mean, MoE", 0.12, _mean, {**_JUDGE, "moe": (True,)}),
    Bar("megatron-bridge", "largest, MoE", 0.25, _largest, {**_JUDGE, "moe": (True,)}),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out at a bar, of how many rows or groups."""

    source: str
    name: str
    value: float
    limit: float
    n: int

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return self.value <= self.limit


def verdicts(rows: Sequence[Row], seconds: npt.ArrayLike) -> list[Verdict]:
    """Every bar that any of the rows is judged by, those of choices included."""
    error, times = np.abs(errors(rows, seconds)), np.asarray(seconds, dtype=float)
    found = []
    for bar in BARS:
        picked = np.array([bar.takes(row) for row in rows], dtype=bool)
        if picked.any():
            found.append(Verdict(bar.source, bar.name, bar.value(error[picked]), bar.limit, int(picked.sum())))
    for source in ("vtrain-single", "vtrain-multi"):
        picked = np.array([row.source == source for row in rows], dtype=bool)
        if not picked.any():
            continue
        regret = np.array([c.regret for c in choices([r for r in rows if r.source == source], times[picked])])
        if source == "vtrain-multi":
            found.append(Verdict(source, "choice: largest regret", _largest(regret), 0.03, len(regret)))
        else:
            found.append(Verdict(source, "choice: mean regret", _mean(regret), 0.02, len(regret)))
            found.append(Verdict(source, "choice: share beyond 3 %", _beyond(0.03)(regret), 0.15, len(regret)))
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that a prediction picks among measured alternatives, and the one that was fastest."""

    chosen: Row
    fastest: Row
    of: int

    @property
    def regret(self) -> float:
        """How much longer the chosen one took, as measured."""
        return self.chosen.step_s / self.fastest.step_s - 1.0


def choices(rows: Sequence[Row], seconds: npt.ArrayLike) -> list[Choice]:
    """The best of every group of alternatives, by the predicted `seconds`."""
    times = np.asarray(seconds, dtype=float)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        key = (row.source, row.gpus, row.plan.global_batch, row.config.hidden, row.config.layers)
        groups.setdefault(key, []).append(i)
    return [
        Choice(rows[members[int(np.argmin(times[members]))]], min((rows[i] for i in members), key=lambda r: r.step_s),
               len(members))
        for members in groups.values()
    ]  # fmt: skip
