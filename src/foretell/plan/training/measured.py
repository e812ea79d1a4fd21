"""Calibrating from a user's own training runs: `read_runs`, `fit`, `scaled`.

A run that was timed tells how far the model is off on that machine with that framework, and most of it stays so for
other plans there. `fit` finds factors for compute and for communication, or one factor for both where the runs do not
tell them apart; `scaled` applies them. What is then predicted is extrapolated from the runs, and `Scale.basis` says
from how far; `Scale.interval` is wider the farther.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell import units
from foretell.documents import read_json_text, read_text
from foretell.errors import InputError, unknown
from foretell.hardware.cluster import Cluster
from foretell.hardware.cluster import cluster as parse_cluster
from foretell.plan.training import emit
from foretell.simulate.training.memory import memory
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.simulate.training.step import StepTable, step
from foretell.workload import llm
from foretell.workload.llm.config import LLMConfig

__all__ = ["SCHEMA", "MeasuredRun", "Scale", "fit", "read_runs", "scaled"]

Floats = npt.NDArray[np.float64]
Predict = Callable[[LLMConfig, TrainingPlan, Cluster], StepTable]

#: Name and version of the document that `read_runs` takes.
SCHEMA = "foretell.training-run/1"

_LIMIT_BYTES = 1_000_000
_MOST_RUNS = 10_000
_KEYS = ("schema", "runs")
_RUN_KEYS = ("model", "on", "plan", "import", "step_s", "tokens_per_s", "memory_bytes", "note")

_COMPUTE = ("compute_s", "recompute_s", "host_s")
_EXPOSED = ("tp_s", "cp_s", "ep_s", "pp_s")

# How far a plan is off once a run of the same model on the same kind of machine is matched: ends of the interval that
# holds 80 % of |ln(measured / predicted)| over pairs of rows of one table, one predicted from the other. Pairs of one
# model that are parallel in the same way are within 0.04 in llm-foundry's table (648 pairs), farther with each doubling
# of devices (0.08 at 16 times as many) and from model to model (0.09); pairs that are parallel in other ways are within
# 0.24 in vTrain's (1,524 pairs on 64 to 512 devices). tests/plan/emit/test_measured.py holds them to it.
_SPREAD, _PER_DOUBLING, _OTHER_MODEL, _OTHER_WAY = 0.05, 0.01, 0.05, 0.15
_WAY = ("tp", "cp", "pp", "vp", "ep", "schedule", "zero", "recompute")
# From one kind of device to another nothing carries over that was measured; wide enough to show it.
_OTHER_DEVICE = 0.25
# The two factors differ by about this much before anything is measured (standard deviation), and a run is matched this
# well by its own factors; whether runs tell the factors apart is judged by how much of the former is left.
_APART, _NOISE, _KNOWN = 0.5, 0.03, 0.25
_BETTER = 0.5  # of the squared error that one factor leaves
_ODD = 20.0  # times slower or faster than predicted: not this plan, or another unit
_FACTORS = (0.2, 5.0)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One training run that was timed: seconds of a step, and the bytes its fullest GPU reserved, where measured."""

    config: LLMConfig
    plan: TrainingPlan
    cluster: Cluster
    step_s: float
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """What measured runs do to predicted seconds: factors for `compute` and `communication`.

    `separate` says whether the runs tell the two apart; else they are one factor. `spread` is the half-width of the
    80 % interval, in logarithm, for a plan that is like the runs. `memory` is measured over predicted bytes, None where
    no run says.
    """

    compute: float
    communication: float
    separate: bool
    spread: float
    runs: tuple[MeasuredRun, ...]
    memory: float | None = None

    def interval(self, config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> tuple[float, float]:
        """Low and high end of the 80 % interval of a scaled time, as factors of it."""
        width = min(self._width(run, config, plan, cluster) for run in self.runs)
        return math.exp(-width), math.exp(width)

    def basis(self, config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> str:
        """In a sentence what a scaled time rests on, and where it reaches beyond the runs."""
        near = min(self.runs, key=lambda run: self._width(run, config, plan, cluster))
        if near.plan == plan and near.config == config and _kinds(near.cluster) == _kinds(cluster):
            return f"measured in your run of {_count(plan.devices, 'device')}"
        several = f"{len(self.runs)} runs, the nearest" if len(self.runs) > 1 else "run"
        beyond = "; ".join(
            f"{what} {_shown(here)}, measured at {_shown(there)}"
            for what, here, there in (
                ("devices", plan.devices, near.plan.devices),
                ("kind of device", _kinds(cluster), _kinds(near.cluster)),
                ("model", config.name, near.config.name),
                ("sequence", plan.seq_len, near.plan.seq_len),
                ("precision", plan.precision, near.plan.precision),
                ("framework", plan.framework, near.plan.framework),
                *((name, getattr(plan, name), getattr(near.plan, name)) for name in _WAY),
            )
            if here != there
        )
        text = f"extrapolated from your {several} of {_count(near.plan.devices, 'device')}"
        return f"{text}: {beyond}" if beyond else f"{text}, of another plan"

    def _width(self, run: MeasuredRun, config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> float:
        doublings = abs(math.log2(plan.devices / run.plan.devices))
        other_model = _OTHER_MODEL if _shape(config) != _shape(run.config) else 0.0
        other_device = _OTHER_DEVICE if _kinds(cluster) != _kinds(run.cluster) else 0.0
        other_way = _OTHER_WAY if any(getattr(plan, name) != getattr(run.plan, name) for name in _WAY) else 0.0
        return self.spread + _PER_DOUBLING * doublings + other_model + other_device + other_way


def _kinds(cluster: Cluster) -> tuple[str, ...]:
    return tuple(sorted({node.device.name for _, node in cluster.groups}))


def _shape(config: LLMConfig) -> tuple[Any, ...]:
    return (config.layers, config.hidden, config.heads, config.intermediate, config.vocab, config.moe, config.mla)


def _shown(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(str(item) for item in value) if isinstance(value, tuple) else str(value)[:80]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


# --- fitting and applying ---------------------------------------------------------------------------------------------


def _shares(table: StepTable) -> tuple[Floats, Floats]:
    """Seconds that compute and exposed communication stand for; waiting in the pipeline is for both as they come."""
    compute = np.asarray(sum(getattr(table, name) for name in _COMPUTE))
    exposed = np.asarray(sum(getattr(table, name) for name in _EXPOSED))
    busy = compute + exposed
    part = np.divide(compute, busy, out=np.ones_like(compute), where=busy > 0)
    return (
        compute + table.optimizer_s + part * table.bubble_s,
        exposed + table.dp_s + (1.0 - part) * table.bubble_s,
    )


def scaled(table: StepTable, scale: Scale) -> StepTable:
    """Predicted steps as the measured runs would have them: each part times the factor of its kind.

    >>> from foretell.hardware import cluster
    >>> from foretell.workload import llm
    >>> plan, on = TrainingPlan(64, 2048, tp=2, dp=4), cluster("1x dgx-h100")
    >>> table = step(llm.config("gpt2-xl"), plan, on)
    >>> run = MeasuredRun(llm.config("gpt2-xl"), plan, on, step_s=1.5 * float(table.time_s[0]))
    >>> found = fit([run])
    >>> round(found.compute, 6), round(float(scaled(table, found).time_s[0]) / run.step_s, 6)
    (1.5, 1.0)
    """
    a, b = scale.compute, scale.communication
    compute = np.asarray(sum(getattr(table, name) for name in _COMPUTE))
    exposed = np.asarray(sum(getattr(table, name) for name in _EXPOSED))
    busy = compute + exposed
    mixed = np.divide(a * compute + b * exposed, busy, out=np.full_like(compute, a), where=busy > 0)
    changes = {name: a * getattr(table, name) for name in (*_COMPUTE, "optimizer_s")}
    changes |= {name: b * getattr(table, name) for name in (*_EXPOSED, "dp_s", "hidden_s")}
    return dataclasses.replace(table, **changes, bubble_s=mixed * table.bubble_s)


def fit(runs: Sequence[MeasuredRun], predict: Predict = step) -> Scale:
    """The factors that bring predictions closest to the runs.

    One factor for everything is the median of measured over predicted. Communication gets a factor of its own, by least
    squares of relative errors, where the runs differ enough in it to tell the two apart and that explains the runs
    markedly better. Raises InputError where there is no run, or one is out of all proportion.
    """
    if not runs:
        raise InputError("holds no run", "measured runs", "give at least one")
    asked = [(run.config, run.plan, run.cluster) for run in runs]
    distinct = {key: predict(*key) for key in dict.fromkeys(asked)}
    tables = [distinct[key] for key in asked]
    shares = [_shares(table) for table in tables]
    compute = np.array([float(pair[0][0]) for pair in shares])
    exposed = np.array([float(pair[1][0]) for pair in shares])
    measured = np.array([run.step_s for run in runs])
    ratios = measured / (compute + exposed)
    for index, ratio in enumerate(ratios):
        if not 1.0 / _ODD < ratio < _ODD:
            raise InputError(
                f"a step of {measured[index]:.4g} s is {ratio:.3g} times the {measured[index] / ratio:.4g} s predicted",
                f"run {index + 1}", "check its unit, plan and devices",
            )  # fmt: skip
    factors = _factors(compute / measured, exposed / measured)
    left = np.log(measured / (factors[0] * compute + factors[1] * exposed))
    spread = _SPREAD
    if len(runs) > 2:
        spread = max(spread, 1.2816 * float(np.sqrt(np.sum(left**2) / (len(runs) - 1))))
    return Scale(
        compute=factors[0], communication=factors[1], separate=factors[2], spread=spread, runs=tuple(runs),
        memory=_memory(runs),
    )  # fmt: skip


def _factors(compute: Floats, exposed: Floats) -> tuple[float, float, bool]:
    """(compute, communication, whether apart) that make ``a · compute + b · exposed`` closest to 1."""
    total = compute + exposed
    common = float(np.median(1.0 / total))
    # Unknowns: a, and d = b − a, which is `_APART` or so before anything is known.
    design = np.stack([total, exposed], axis=1) / _NOISE
    precision = design.T @ design + np.diag([0.0, 1.0 / _APART**2])
    a, d = np.linalg.solve(precision, design.T @ np.full(len(total), 1.0 / _NOISE))
    known = float(np.sqrt(np.linalg.inv(precision)[1, 1])) < _KNOWN
    if not known or not all(_FACTORS[0] * common < factor < _FACTORS[1] * common for factor in (a, a + d)):
        return common, common, False
    alone, apart = (float(np.sum(np.log(made) ** 2)) for made in (common * total, a * total + d * exposed))
    return (float(a), float(a + d), True) if apart < _BETTER * alone else (common, common, False)


def _memory(runs: Sequence[MeasuredRun]) -> float | None:
    found = []
    for index, run in enumerate(runs, 1):
        if run.memory_bytes is not None:
            table = memory(run.config, PlanTable.of([run.plan]), run.cluster.groups[0][1].device)
            found.append(run.memory_bytes / float(table.reserved_bytes[0]))
            if not 1.0 / _ODD < found[-1] < _ODD:
                raise InputError(
                    f"{units.format_bytes(run.memory_bytes)} of memory are {found[-1]:.3g} times what is predicted",
                    f"run {index}", "check its unit, plan and devices",
                )  # fmt: skip
    return float(np.median(found)) if found else None


# --- reading ----------------------------------------------------------------------------------------------------------


def read_runs(path: str | Path, config: LLMConfig | None = None) -> tuple[MeasuredRun, ...]:
    """The runs of a ``foretell.training-run/1`` document (docs/schema.md); `config` is the model where none is named.

    A run's plan is written out, or in a file of Megatron-LM, torchtitan or DeepSpeed beside the document, or both: then
    what is written out wins. Raises InputError where a run is malformed, or its plan is not of its devices.
    """
    path = Path(path)
    text = read_text(path, "document of measured runs", _LIMIT_BYTES)
    where = path.name[:80]
    data = read_json_text(text, where, "document of measured runs")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f'has no "schema": "{SCHEMA}"', where, "see docs/schema.md for an example")
    _only(data, _KEYS, where)
    runs = data.get("runs")
    if not isinstance(runs, list) or not 1 <= len(runs) <= _MOST_RUNS:
        raise InputError(f"'runs' is no list of 1 to {_MOST_RUNS:,} runs", where)
    return tuple(_run(item, path.parent, config, f"{where}: run {i}") for i, item in enumerate(runs, 1))


def _run(data: Any, folder: Path, default: LLMConfig | None, where: str) -> MeasuredRun:
    if not isinstance(data, dict):
        raise InputError("is no object", where)
    _only(data, _RUN_KEYS, where)
    given: dict[str, Any] = {}
    config = default
    if "import" in data:
        found = emit.read(folder / _text(data, "import", where))
        given, config = dict(found.plan), default or found.config
    if "model" in data:
        config = llm.config(_text(data, "model", where))
    if config is None:
        raise InputError("does not name its model", where, 'add "model": "llm:…", or name a workload')
    on = parse_cluster(_text(data, "on", where))
    written = data.get("plan", {})
    if not isinstance(written, dict):
        raise InputError("'plan' is no object", where)
    _only(written, [item.name for item in dataclasses.fields(TrainingPlan)], f"{where}: plan")
    given |= written
    missing = [name for name in ("global_batch", "seq_len") if name not in given]
    if missing:
        raise InputError(f"does not say {' and '.join(missing)}", f"{where}: plan", "add it")
    group = math.prod(given[name] for name in ("tp", "cp", "pp") if isinstance(given.get(name), int))
    if "dp" not in given and group > 0 and on.device_count % group == 0:
        given["dp"] = on.device_count // group
    plan = TrainingPlan(**given)
    if plan.devices != on.device_count:
        raise InputError(
            f"tp {plan.tp} · cp {plan.cp} · dp {plan.dp} · pp {plan.pp} = {plan.devices:,} devices, "
            f"{on.name!r} has {on.device_count:,}", where, "correct the degrees or the cluster",
        )  # fmt: skip
    return MeasuredRun(config, plan, on, _seconds(data, plan, where), _bytes(data, where))


def _only(data: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in data:
        if key not in keys:
            raise unknown(f"key in {where}:", str(key), keys)


def _text(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise InputError(f"{key!r} is {'missing' if key not in data else 'no text'}", where, f'add "{key}": "…"')
    return value


def _number(data: Mapping[str, Any], key: str, where: str) -> float:
    value = data[key]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e18:
        raise InputError(f"{key!r} is {str(value)[:40]}, want a number above 0", where)
    return float(value)


def _seconds(data: Mapping[str, Any], plan: TrainingPlan, where: str) -> float:
    if ("step_s" in data) == ("tokens_per_s" in data):
        repair = "give seconds of a step, or tokens a second of all devices"
        raise InputError("wants one of 'step_s' and 'tokens_per_s'", where, repair)
    if "step_s" in data:
        return _number(data, "step_s", where)
    return plan.tokens / _number(data, "tokens_per_s", where)


def _bytes(data: Mapping[str, Any], where: str) -> float | None:
    if "memory_bytes" not in data:
        return None
    if isinstance(data["memory_bytes"], str):
        return float(units.parse_bytes(data["memory_bytes"], where))
    return _number(data, "memory_bytes", where)
