"""`Scales`: factors by kind of operation on the times that a cost model predicts for a device, and `Scaled` models.

`foretell.calibrate.tables` makes them from measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell import documents
from foretell.cost.model import CostModel, OpTimes, Settings, Step, models
from foretell.cost.program import Program
from foretell.errors import InputError
from foretell.graph import KINDS
from foretell.graph.table import PHASE_CODE
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]

SCHEMA = "foretell.scales/1"
LIMIT_BYTES = 16 * 2**20
ALL = "all"
BY_MODE = {True: "all.train", False: "all.inference"}  # whole workloads, by whether the step trains
LEAST, MOST = 1e-3, 1e3  # a factor beyond is another unit, not another speed
_MOST_ROWS = 10**9


@dataclass(frozen=True, slots=True)
class Factor:
    """What to multiply by, the range around it (over `mid`) that held 80 % of the rows, and how many there were."""

    low: float
    mid: float
    high: float
    rows: int


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors by kind (or ``all``, or ``all.train`` and ``all.inference``) on the times of `model` on `device`."""

    device: str
    model: str
    factors: Mapping[str, Factor]
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The document `read` reads."""
        factors = {k: [*(round(v, 4) for v in (f.low, f.mid, f.high)), f.rows] for k, f in self.factors.items()}
        return {
            "schema": SCHEMA,
            "device": self.device,
            "model": self.model,
            "factors": factors,
            "provenance": dict(self.provenance),
        }


def parse(text: str, where: str) -> Scales:
    """Read scales. Raises InputError naming what is wrong and where."""
    repair = "write the file with `foretell calibrate --from TABLE.csv --on DEVICE`"
    data = documents.read_json_text(text, where, "calibration")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f'"schema" is not {SCHEMA!r}', where, repair)
    if not all(isinstance(data.get(key), str) for key in ("device", "model")):
        raise InputError("device and model must be texts", where, repair)
    factors, provenance = data.get("factors"), data.get("provenance")
    if not isinstance(factors, dict) or not isinstance(provenance, dict):
        raise InputError("factors and provenance must be objects", where, repair)
    read: dict[str, Factor] = {}
    for kind, row in factors.items():
        if kind not in (ALL, *BY_MODE.values(), *KINDS):
            raise InputError(f"unknown kind {kind[:40]!r}", where, repair)
        numbers = isinstance(row, list) and len(row) == 4 and all(type(v) in (int, float) for v in row)
        if not numbers or not (
            LEAST <= row[0] <= 1 <= row[2] <= MOST and LEAST <= row[1] <= MOST and 1 <= row[3] <= _MOST_ROWS
        ):
            said = f"[low ≤ 1, factor, high ≥ 1, rows] with factors from {LEAST:g} to {MOST:g} and a count of rows"
            raise InputError(f"factor {kind!r} is {str(row)[:60]}, not {said}", where, repair)
        read[kind] = Factor(float(row[0]), float(row[1]), float(row[2]), int(row[3]))
    return Scales(data["device"], data["model"], MappingProxyType(read), MappingProxyType(provenance))


def calibrated(path: Path, device: Device, model: str) -> CostModel:
    """The cost model that a calibration file stands for on `device`.

    That is scales on `model`, or the processor model with the file's constants. Raises InputError where the file is
    for another device or model.
    """
    from foretell.cost import calibration
    from foretell.cost.cpu import Cpu, checked

    text = documents.read_text(path, "calibration", LIMIT_BYTES)
    data = documents.read_json_text(text, str(path), "calibration")
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == calibration.SCHEMA:
        constants = calibration.parse(text, str(path))
        if constants.model != "cpu" or device.kind != "cpu":
            what = f"is a calibration of model {constants.model!r}, not for {device.name}"
            raise InputError(what, str(path), "give the one for it")
        return Cpu(checked(constants, str(path)))
    scales = parse(text, str(path))
    if scales.device != device.name:
        raise InputError(f"is for {scales.device}, not {device.name}", str(path), "give the calibration of that device")
    if scales.model != model:
        raise InputError(f"is for model {scales.model!r}, not {model!r}", str(path), f"add --model {scales.model}")
    return Scaled(models()[model], scales)


def trains(program: Program) -> bool:
    """Whether a program is a training step: it has ops of another phase than the forward."""
    return bool((program.table.phase != PHASE_CODE["forward"]).any())


@dataclass(frozen=True, slots=True)
class Scaled:
    """A cost model with scales on it."""

    base: CostModel
    scales: Scales

    @property
    def name(self) -> str:
        """The name of the model below."""
        return self.base.name

    def op_times(self, program: Program, device: Device, settings: Settings) -> OpTimes:
        """Times of the model below, each by the factor of its kind."""
        times = self.base.op_times(program, device, settings)
        factor = self._column(program, "mid")
        note = f"scaled by measurements: {', '.join(sorted(self.scales.factors))}"
        return replace(
            times,
            compute_s=times.compute_s * factor,
            memory_s=times.memory_s * factor,
            launch_s=times.launch_s * factor,
            host_s=times.host_s * factor,
            notes=(*times.notes, note),
        )

    def step(self, program: Program, times: OpTimes, settings: Settings) -> Step:
        """As the model below."""
        return self.base.step(program, times, settings)

    def interval(
        self, program: Program, times: OpTimes, step: Step, device: Device, settings: Settings
    ) -> tuple[float, float, str]:
        """The model's own for what has no factor, the measurements' for what has one, by their share of the time."""
        low, high, basis = self.base.interval(program, times, step, device, settings)
        share = step.busy_s + step.gap_s
        total = float(share.sum())
        if total <= 0 or not self.scales.factors:
            return low, high, basis
        lows, highs = self._column(program, "low", low), self._column(program, "high", high)
        other = BY_MODE[not trains(program)]
        rows = sum(f.rows for kind, f in self.scales.factors.items() if kind != other)
        measured = "1 measurement" if rows == 1 else f"{rows:,} measurements"
        return (
            min(1.0, float((lows * share).sum()) / total),
            max(1.0, float((highs * share).sum()) / total),
            f"{measured} on {self.scales.device}; elsewhere {basis}",
        )

    def formula(self, program: Program, times: OpTimes, row: int, device: Device) -> list[str]:
        """The model's own, and the factor."""
        factor = float(self._column(program, "mid")[row])
        return [*self.base.formula(program, times, row, device), f"measured   × {factor:.3f} (included)"]

    def _column(self, program: Program, which: str, default: float = 1.0) -> Floats:
        every = self.scales.factors.get(BY_MODE[trains(program)], self.scales.factors.get(ALL))
        otherwise = default if every is None else getattr(every, which)
        by_kind = [getattr(self.scales.factors.get(kind), which, otherwise) for kind in KINDS]
        return np.asarray(np.array(by_kind)[program.table.kind])
