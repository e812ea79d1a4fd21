"""Power and energy of a step: what a device draws, at which clock it settles, and what that does to time.

    power = idle + leakage · v + (core energy · v² + memory energy) / time

* *Idle* is the data sheet's; *leakage* is what a card with work draws besides, a share of its power limit (TDP).
* *Core energy* is joules per FLOP by number format, plus what issuing instructions takes while the arithmetic units are
  held. It follows the square of the voltage.
* *Memory energy* is joules per byte from DRAM, by its type, and from the L2 cache. DRAM has a voltage of its own.
* v is the voltage over that at boost clock: flat up to a *knee*, then linear in the clock.

Work done once takes the same number of cycles at any clock x (over boost), so its core power goes as x · v². A card
under a limit settles at the highest clock whose power does not exceed it. Times of arithmetic then go as 1/x; those of
DRAM stay, until the chip is too slow to ask for data (x below ``memory.knee``).

Joules per FLOP are not on data sheets, but what they imply is: a dense matrix product draws TDP at a clock a little
above the *base* clock, which is what a vendor guarantees under such a load. Constants and their provenance are in
``calibrations/energy.json``; a new device needs TDP, and better also idle power, clocks, peaks and memory type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration, load
from foretell.cost.model import OpTimes, Step
from foretell.cost.program import Program
from foretell.cost.rates import FORMATS
from foretell.errors import InputError
from foretell.hardware.device import Device
from foretell.units import format_power

Floats = npt.NDArray[np.float64]

_IDLE_SHARE = 0.15  # of TDP, where idle power is unknown
_LOWEST_CLOCK = 0.1  # of boost: about the 210 MHz that NVIDIA's cards can be locked to
_HALVINGS = 20  # of the clock: to a millionth of boost
_REFERENCES = ("bf16.tensor", "fp16.tensor", "fp16.vector", "fp32.vector")


@dataclass(frozen=True, slots=True)
class Power:
    """What a device draws at its boost clock, in watts, and how that follows the clock.

    `core_w` is of matrix arithmetic at the peak of its 16-bit format, `vector_w` of ordinary arithmetic at its peak,
    both above `idle_w` and `leakage_w`. `format_w` is `core_w` at the peak of other formats, over that of 16 bits.
    `knee` and `slope` give the voltage: 1 at and below the knee, growing by `slope` per unit of x above it.
    """

    idle_w: float
    leakage_w: float
    core_w: float
    vector_w: float
    format_w: tuple[tuple[str, float], ...]
    issue: float
    dram_j_per_byte: float
    l2_j_per_byte: float
    limit_w: float
    knee: float
    slope: float
    memory_knee: float
    notes: tuple[str, ...] = ()

    def voltage(self, clock: Floats | float) -> Floats:
        """Voltage at a clock (both over those at boost)."""
        above = 1.0 + self.slope * np.maximum(0.0, np.asarray(clock, dtype=np.float64) - self.knee)
        return np.asarray(above / (1.0 + self.slope * max(0.0, 1.0 - self.knee)))

    def clock_of(self, voltage: float) -> float:
        """The highest clock, at most boost, that a voltage allows; the knee where it is the lowest or less."""
        if self.slope == 0.0 or voltage >= 1.0:
            return 1.0
        above = voltage * (1.0 + self.slope * max(0.0, 1.0 - self.knee)) - 1.0
        return float(min(1.0, self.knee + max(0.0, above) / self.slope))

    def memory_slowdown(self, clock: Floats | float) -> Floats:
        """By how much DRAM traffic takes longer than at boost clock."""
        return np.maximum(1.0, self.memory_knee / np.asarray(clock, dtype=np.float64))

    def settled(self, core_w: float, memory_w: float, limit_w: float) -> float:
        """The clock at which work that draws `core_w` (at boost *voltage*) and `memory_w` at its own pace runs.

        This solves ``idle + leakage · v + core_w · v² + memory_w = limit`` for the voltage: the pace is known, as
        measured or predicted, the clock that it was reached at is not.
        """
        free = limit_w - self.idle_w - memory_w
        if self.leakage_w + core_w <= free:
            return 1.0
        if free <= 0.0 or core_w <= 0.0:
            return self.clock_of(0.0)
        root = np.sqrt(self.leakage_w**2 + 4.0 * core_w * free)
        return self.clock_of(float((root - self.leakage_w) / (2.0 * core_w)))


def power_of(device: Device, calibration: Calibration | None = None) -> Power | None:
    """What `device` draws, from its data sheet; None where its TDP is unknown."""
    return _shipped(device) if calibration is None else _power(device, calibration)


@lru_cache(maxsize=1024)
def _shipped(device: Device) -> Power | None:
    return _power(device, load("energy"))


def _power(device: Device, constant: Calibration) -> Power | None:
    if device.tdp_w is None:
        return None
    notes: tuple[str, ...] = ()
    idle = device.idle_w
    if idle is None:
        idle = _IDLE_SHARE * device.tdp_w
        notes = (f"idle power of {device.name} unknown: taken as {_IDLE_SHARE:.0%} of its TDP",)
    dram = dram_energy(device.memory_type, constant)
    knee, slope = constant["voltage.knee"], constant["voltage.slope"]
    bare = Power(
        idle_w=idle,
        leakage_w=constant["leakage"] * device.tdp_w,
        core_w=0.0,
        vector_w=0.0,
        format_w=(),
        issue=constant["core.issue"],
        dram_j_per_byte=dram,
        l2_j_per_byte=constant["l2.joules_per_byte"],
        limit_w=device.tdp_w,
        knee=knee,
        slope=slope,
        memory_knee=constant["memory.knee"],
    )
    # A dense product at its sustained clock draws TDP.
    clock = sustained_clock(device, constant)
    voltage = float(bare.voltage(clock))
    used = constant["dense.utilization"]
    memory = constant["dense.memory"] * dram * (device.memory_bandwidth_bytes_per_s or 0.0)
    core = (device.tdp_w - idle - bare.leakage_w * voltage - memory) / (used * clock * voltage**2)
    core = max(core, 0.2 * device.tdp_w)  # no card is all idle and memory
    reference = next((device.peaks[name] for name in _REFERENCES if name in device.peaks), None)
    formats = []
    for name in sorted({*FORMATS, "tf32"}):
        peak = device.peak(name, "tensor")
        if peak is not None and reference:
            formats.append((name, constant[f"format.{name}"] * peak / reference))
    return Power(
        idle_w=bare.idle_w,
        leakage_w=bare.leakage_w,
        core_w=core,
        vector_w=core * (constant["core.vector"] if formats else 1.0),
        format_w=tuple(formats),
        issue=bare.issue,
        dram_j_per_byte=dram,
        l2_j_per_byte=bare.l2_j_per_byte,
        limit_w=bare.limit_w,
        knee=knee,
        slope=slope,
        memory_knee=bare.memory_knee,
        notes=notes,
    )


def sustained_clock(device: Device, constant: Calibration) -> float:
    """The clock over boost at which a dense matrix product draws TDP: between base, if that is known, and boost."""
    if device.base_clock_hz and device.boost_clock_hz:
        return float(min(1.0, (device.base_clock_hz / device.boost_clock_hz) ** constant["dense.base"]))
    return constant["dense.clock"]


def dram_energy(memory_type: str | None, constant: Calibration) -> float:
    """Joules per byte from DRAM of a type: its own constant, or that of its family (GDDR6X → GDDR6 → GDDR)."""
    names, name = constant.constants, memory_type or ""
    for length in range(len(name), 0, -1):
        if f"dram.{name[:length]}" in names:
            return names[f"dram.{name[:length]}"]
    return names["dram.default"]


@dataclass(frozen=True, slots=True)
class Activity:
    """What the ops of a step do, columns parallel to the ops and of the whole step (`repeat` included).

    `compute_s`, `memory_s` and `fixed_s` (launches and waiting for the host) are at the clock that the times assume;
    `core_j` is at boost voltage, `memory_j` at any.
    """

    compute_s: Floats
    memory_s: Floats
    fixed_s: Floats
    core_j: Floats
    memory_j: Floats

    def time_s(self, scale: float = 1.0, memory_slowdown: float = 1.0) -> Floats:
        """Seconds of each op with the clock `scale` times what the times assume."""
        return np.maximum(self.compute_s / scale, self.memory_s * memory_slowdown) + self.fixed_s


@dataclass(frozen=True, slots=True)
class Operation:
    """Where a device settles: its `clock` over boost, and over the one that the times assume (`scale`).

    `dynamic` is by how much the dynamic energy is less than the constants say, where even the lowest voltage would
    exceed the limit at the given pace; 1 otherwise.
    """

    clock: float
    scale: float
    memory_slowdown: float
    dynamic: float = 1.0
    notes: tuple[str, ...] = ()


def activity_of(power: Power, device: Device, program: Program, times: OpTimes, step: Step) -> Activity:
    """What each op of a step does, from a model's times of its ops."""
    table, repeat = program.table, program.table.repeat
    ordinary = device.peak("fp32", "vector") or np.inf
    rate = np.where(table.causal, 1.0, 2.0) * table.macs / np.maximum(times.ideal_s, 1e-30)
    relative = dict(power.format_w)
    # float32 products that outrun the ordinary units run as TF32, formats without a path of their own as 16 bits.
    names = ["tf32" if name == "fp32" else name for name in FORMATS]
    matrix_w = power.core_w * np.array([relative.get(name, 1.0) for name in names])
    at_peak = np.where(rate > 1.2 * ordinary, matrix_w[table.dtype], power.vector_w)
    held = np.maximum(times.ideal_s, times.compute_s)
    core = at_peak * ((1.0 - power.issue) * times.ideal_s + power.issue * held)
    peak = device.memory_bandwidth_bytes_per_s or 0.0
    details = times.details
    moved = details.get("moved_bytes", table.bytes_read + table.bytes_written)
    if "dram_bytes" in details:
        dram = details["dram_bytes"]
    else:
        dram = moved / details["l2_speedup"] if "l2_speedup" in details else moved
    dram = np.minimum(dram, times.busy_s * peak)
    memory = dram * power.dram_j_per_byte + details.get("l2_bytes", moved) * power.l2_j_per_byte
    return Activity(
        compute_s=times.compute_s * repeat,
        memory_s=times.memory_s * repeat,
        fixed_s=step.busy_s - np.maximum(times.compute_s, times.memory_s) * repeat + step.gap_s,
        core_j=core * repeat,
        memory_j=memory * repeat,
    )


def slowed(times: OpTimes, operation: Operation) -> OpTimes:
    """`times` at the clock the device settles at; as they are where it keeps its own."""
    if operation.scale >= 1.0:
        return times
    slower = times.memory_s * operation.memory_slowdown
    return replace(times, compute_s=times.compute_s / operation.scale, memory_s=slower)


def throttle(
    power: Power,
    activity: Activity,
    limit_w: float | None = None,
    clock: float | None = None,
    *,
    assumed: float | None = None,
) -> Operation:
    """Where the device settles under a power limit and a locked clock (over boost); neither: as it comes.

    The times of `activity` are of a card at its stock limit, whose clock `assumed` follows from the power balance
    where it is not given. The limit holds for the step's average power.
    """
    time = float(activity.time_s().sum())
    if time <= 0.0:
        return Operation(1.0, 1.0, 1.0)
    core, memory = float(activity.core_j.sum()), float(activity.memory_j.sum())
    stock = power.settled(core / time, memory / time, power.limit_w) if assumed is None else assumed
    voltage = float(power.voltage(stock))
    dynamic = (core * voltage**2 + memory) / time
    free = power.limit_w - power.idle_w - power.leakage_w * voltage
    less = min(1.0, max(0.0, free) / dynamic) if dynamic > 0.0 else 1.0
    ceiling = min(stock, 1.0 if clock is None else clock)
    limit = power.limit_w if limit_w is None else limit_w
    if ceiling == stock and limit >= power.limit_w:
        return Operation(stock, 1.0, 1.0, less)

    def drawn_w(at: float) -> float:
        volts = float(power.voltage(at))
        slowdown = float(power.memory_slowdown(at) / power.memory_slowdown(stock))
        dynamic_j = less * (core * volts**2 + memory)
        return power.idle_w + power.leakage_w * volts + dynamic_j / float(activity.time_s(at / stock, slowdown).sum())

    notes: tuple[str, ...] = ()
    settled, low = ceiling, min(ceiling, _LOWEST_CLOCK)
    if drawn_w(ceiling) > limit:
        if drawn_w(low) > limit:
            settled = low
            notes = (f"even at the lowest clock the work draws more than {format_power(limit)}",)
        else:  # power grows with the clock: halve the interval
            for _ in range(_HALVINGS):
                settled = (low + ceiling) / 2.0
                low, ceiling = (low, settled) if drawn_w(settled) > limit else (settled, ceiling)
            settled = low
    return Operation(
        settled,
        settled / stock,
        float(power.memory_slowdown(settled) / power.memory_slowdown(stock)),
        less,
        notes,
    )


def energy_of(power: Power, activity: Activity, operation: Operation, time_s: Floats) -> Floats:
    """Joules of each op of a step that takes `time_s` at the clock the device settled at."""
    voltage = float(power.voltage(operation.clock))
    standing = power.idle_w + power.leakage_w * voltage
    dynamic = operation.dynamic * (activity.core_j * voltage**2 + activity.memory_j)
    return np.asarray(standing * time_s + dynamic)


def check_limits(device: Device, power_limit_w: float | None, clock_hz: float | None) -> None:
    """Raises InputError where a limit is outside what the card allows, or the number that bounds it is unknown."""
    where = f"on {device.name}"
    if power_limit_w is not None:
        power = power_of(device)
        if power is None:
            raise InputError("its TDP is unknown, so no power limit can be set", where, "add `tdp` to its TOML file")
        if not power.idle_w < power_limit_w <= power.limit_w:
            raise InputError(
                f"a power limit of {format_power(power_limit_w)} is outside what the card allows",
                where,
                f"give more than {format_power(power.idle_w)} (idle) and at most {format_power(power.limit_w)} (TDP)",
            )
    if clock_hz is not None:
        boost = device.boost_clock_hz
        if boost is None:
            raise InputError("its boost clock is unknown, so none can be set", where, "add `boost_clock` to its TOML")
        if not _LOWEST_CLOCK * boost <= clock_hz <= boost:
            raise InputError(
                f"a clock of {clock_hz / 1e6:.0f} MHz is outside what the card allows",
                where,
                f"give {_LOWEST_CLOCK * boost / 1e6:.0f} MHz to {boost / 1e6:.0f} MHz (boost)",
            )
