"""`cpu`: eager PyTorch on a processor, costed by the physics in `kernels.cpu` with constants measured on it.

The constants are those of the machine at hand, if ``foretell calibrate --here`` has run on it, else those shipped
(``calibrations/cpu.json``), scaled to the device's peak and bandwidth. Host and device are one: nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration, load, local, local_path
from foretell.cost.kernels import cpu
from foretell.cost.model import REGISTRY, OpTimes, Settings, Step
from foretell.cost.program import Program
from foretell.cost.rates import FORMATS, bandwidth, matrix_rate, vector_rate
from foretell.errors import InputError
from foretell.hardware.device import Device
from foretell.units import format_bytes, format_flops, format_time

Floats = npt.NDArray[np.float64]

# Reference of the constants: what the calibrated machine's data sheet said.
FLOPS, BANDWIDTH = "reference.flops", "reference.bandwidth"
_REFERENCES = {FLOPS: (1e7, 1e18), BANDWIDTH: (1e6, 1e16)}  # what a processor may have, per second
FARTHEST = 1e4  # a constant beyond this factor of where a fit begins is no processor's
_L3_PER_L2 = 8.0  # where a level is unknown


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor model. `calibration` None stands for that of the machine at hand, or the shipped one."""

    calibration: Calibration | None = None
    name: str = "cpu"

    def op_times(self, program: Program, device: Device, settings: Settings) -> OpTimes:
        """Times of every op. Raises InputError for what is no processor, or lacks a peak or bandwidth."""
        if device.kind != "cpu":
            raise InputError(f"is a {device.kind}", f"device {device.name!r}", "model `cpu` is for processors")
        table = program.table
        constants = self._constants(device)
        caches, notes = caches_of(device)
        times = cpu.times(
            table, program.strided, program.names, program.name_code, cpu.Context.of(table), caches, constants
        )
        # What was calibrated is fp32; other formats run as much slower or faster as their peaks say.
        peak = np.ones(len(table))
        slower = np.ones(len(table))
        for code in np.unique(table.dtype):
            rows = table.dtype == code
            peak[rows] = matrix_rate(device, FORMATS[code]).flops_per_s
            if FORMATS[code] != "fp32" and bool((table.macs[rows] > 0).any()):
                slower[rows] = matrix_rate(device, "fp32").flops_per_s / peak[rows]
                notes = (*notes, f"{FORMATS[code]} was not calibrated on a processor: scaled by its peak")
        if settings.mode == "train":
            notes = (*notes, "training was not calibrated on a processor")
        arithmetic = times.arithmetic_s * slower
        body = np.maximum(times.total_s - times.dispatch_s + arithmetic - times.arithmetic_s, 0.0)
        by_compute = arithmetic >= times.traffic_s
        ideal = 2.0 * table.macs * np.where(table.causal, 0.5, 1.0) / peak
        return OpTimes(
            compute_s=np.where(by_compute, body, np.minimum(arithmetic, body)),
            memory_s=np.where(by_compute, np.minimum(times.traffic_s, body), body),
            launch_s=times.dispatch_s * (program.issues > 0),
            host_s=np.zeros(len(table)),
            ideal_s=np.minimum(ideal, body),
            details={
                "arithmetic_s": arithmetic,
                "traffic_s": times.traffic_s,
                "body_s": body,
                "flops": 2.0 * table.macs,
                "bytes": table.bytes_read + table.bytes_written,
            },
            notes=notes,
        )

    def step(self, program: Program, times: OpTimes, settings: Settings) -> Step:
        """Ops one after another."""
        busy = times.busy_s * program.table.repeat
        return Step(time_s=float(busy.sum()), busy_s=busy, gap_s=np.zeros(len(busy)), host_s=0.0)

    def interval(
        self, program: Program, times: OpTimes, step: Step, device: Device, settings: Settings
    ) -> tuple[float, float, str]:
        """What the fit left of microbenchmarks, on the machine itself; the shipped default elsewhere."""
        calibration = self._of(device)
        key = f"{settings.mode}.{settings.runtime}"
        own = calibration.provenance.get("machine", {}).get("device") == device.title
        if key in calibration.intervals and own:
            low, high = calibration.intervals[key]
            return low, high, "residuals of this machine's microbenchmarks, and how its speed drifts"
        low, high = calibration.intervals["default"]
        return low, high, "provisional: constants of another processor, or of other work"

    def formula(self, program: Program, times: OpTimes, row: int, device: Device) -> list[str]:
        """Arithmetic, traffic and dispatch of one op."""
        value = {name: float(column[row]) for name, column in times.details.items()}
        return [
            "time = arithmetic and traffic + dispatch",
            "",
            f"arithmetic = {format_time(value['arithmetic_s'])}  ({format_flops(value['flops'])})",
            f"traffic    = {format_time(value['traffic_s'])}  ({format_bytes(value['bytes'])}, layouts and new pages)",
            f"both       = {format_time(value['body_s'])}  (pointwise work overlaps them, products do not)",
            f"dispatch   = {format_time(float(times.launch_s[row]))}",
        ]

    def _of(self, device: Device) -> Calibration:
        if self.calibration is not None:
            return self.calibration
        found = local() if device.name == "local" else None
        return load("cpu") if found is None else checked(found, str(local_path()))

    def _constants(self, device: Device) -> Mapping[str, float]:
        """The calibration's constants for a device of other peak and bandwidth."""
        calibration = self._of(device)
        faster = vector_rate(device).flops_per_s / calibration[FLOPS]
        wider = bandwidth(device) / calibration[BANDWIDTH]
        scale = {"rate": faster, "element": 1 / faster, "row": 1 / faster}
        scale |= {"byte.l2": 1 / faster, "byte.l3": 1 / faster, "byte.memory": 1 / wider}
        return {
            name: calibration[name] * scale.get(name, scale.get(name.partition(".")[0], 1.0)) for name in cpu.DEFAULTS
        }


def checked(calibration: Calibration, where: str) -> Calibration:
    """`calibration`, whose constants are this model's; InputError names what is missing or implausible in the file."""
    repair = "measure anew with `foretell calibrate --here`"
    if calibration.model != "cpu":
        raise InputError(f"is a calibration of model {calibration.model[:40]!r}, not 'cpu'", where, repair)
    ranges = {name: (value / FARTHEST, value * FARTHEST) for name, value in cpu.DEFAULTS.items()} | _REFERENCES
    for name, (least, most) in ranges.items():
        if name not in calibration.constants:
            raise InputError(f"lacks the constant {name!r}", where, repair)
        value = calibration[name]
        if not least <= value <= most:
            raise InputError(f"constant {name!r} is {value:g}, not from {least:g} to {most:g}", where, repair)
    machine = calibration.provenance.get("machine", {})
    if not isinstance(machine, Mapping):
        raise InputError("provenance.machine is no object", where, repair)
    return calibration


def caches_of(device: Device) -> tuple[cpu.Caches, tuple[str, ...]]:
    """The caches of a device, and notes on what stood in for an unknown one."""
    notes = []
    l2, l3 = device.l2_bytes, device.l3_bytes
    if l2 is None:
        l2 = 2**20 * (device.multiprocessors or 1)
        notes.append(f"l2 of {device.name} unknown: taken as 1 MiB a core")
    if l3 is None:
        l3 = int(l2 * _L3_PER_L2)
        notes.append(f"l3 of {device.name} unknown: taken as {_L3_PER_L2:g} times its l2")
    return cpu.Caches(float(l2), float(max(l3, l2))), tuple(notes)


REGISTRY.register(Cpu())
