"""`learned`: the kernel model, corrected by what measurements of operations and of whole steps leave of it.

    time of an op   = kernel model · residual of its family (matrix products, attention, …)
    time of a step  = Σ of its ops · residual of steps

Residuals are boosted trees over dimensionless features (`residual.py`, `features.py`), fitted on openly licensed
measurements, clipped to the range these spanned, and never let arithmetic be faster than the device's peak. The
residual of steps was fitted on networks whose products run on tensor cores; it leaves steps in fp32 to physics, where
learning from the few devices that were measured did not carry over to others. The further a step lies outside what it
was fitted on (a language model's decoding, say), the less it corrects, and the wider the interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretell.cost import residual
from foretell.cost.features import FEATURES, step_features
from foretell.cost.kernel import KERNEL, Kernel, step_bytes
from foretell.cost.model import REGISTRY, OpTimes, Settings, Step, schedule
from foretell.cost.program import Program
from foretell.cost.residual import Residual
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Share of a step's arithmetic on tensor cores from which the residual of steps applies.
_ON_TENSOR_CORES = 0.5
_TENSOR = FEATURES.index("tensor")
# Beyond this share of features outside their range, a step is foreign and the residual of steps says nothing.
_FOREIGN = 0.25
# So far beyond the largest share of the time that an operation had among them, too.
_FOREIGN_SHARE = 0.1
_SHARES = [i for i, name in enumerate(FEATURES) if name.startswith("share.")]


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors (low, mid, high) on each step of a program, and how much each step is like those fitted on (0 to 1)."""

    low: Floats
    mid: Floats
    high: Floats
    familiar: Floats


@dataclass(frozen=True, slots=True)
class Learned:
    """The kernel model with residuals on top: `operations` by family of kernels, `steps` of whole steps (or none)."""

    kernel: Kernel
    operations: Mapping[str, Residual]
    steps: Residual | None
    name: str = "learned"

    def op_times(self, program: Program, device: Device, settings: Settings) -> OpTimes:
        """Times of the ops of one step. Raises InputError where the device lacks a number that has no stand-in."""
        return self.step_times(program, device, settings, np.zeros(min(1, len(program)), dtype=np.int64))

    def operator_times(self, program: Program, device: Device, settings: Settings) -> OpTimes:
        """Times of ops that make no step together, such as the rows of a table."""
        return self.kernel.corrected(program, device, settings, self.operations)

    def step_times(self, program: Program, device: Device, settings: Settings, starts: Ints) -> OpTimes:
        """Times of the ops of several steps, which begin at rows `starts`."""
        times = self.kernel.corrected(program, device, settings, self.operations, step_bytes(program, starts))
        if self.steps is None or not len(starts) or device.kind != "gpu":  # nothing else was measured
            return times
        correction = self.correction(program, times, device, settings, starts)
        step = np.searchsorted(starts, np.arange(len(program)), side="right") - 1
        factor = correction.mid[step]
        # No faster than arithmetic at peak.
        compute = np.maximum(times.compute_s * factor, np.minimum(times.compute_s, times.ideal_s))
        return replace(
            times,
            compute_s=compute,
            memory_s=times.memory_s * factor,
            launch_s=times.launch_s * factor,
            details={
                **times.details,
                "step_factor": factor,
                "interval_low": (correction.low / correction.mid)[step],
                "interval_high": (correction.high / correction.mid)[step],
            },
        )

    def correction(
        self, program: Program, times: OpTimes, device: Device, settings: Settings, starts: Ints
    ) -> Correction:
        """What the residual of steps says of the steps that `times` predicts."""
        assert self.steps is not None
        x = step_features(program, times, device, settings, starts)
        low, mid, high = self.steps.factors(x, self.steps.has_seen(device))
        familiar = familiarity(self.steps, x)
        # Steps without tensor cores were measured, though not fitted; others foreign were not.
        which = np.where(x[:, _TENSOR] < _ON_TENSOR_CORES, 0, 1)
        known = np.array([self.steps.provenance[name] for name in ("vector_interval", "foreign_interval")])
        default_low, default_high = known[which].T
        centre = mid**familiar
        return Correction(
            centre * (low / mid) ** familiar * default_low ** (1.0 - familiar),
            centre,
            centre * (high / mid) ** familiar * default_high ** (1.0 - familiar),
            familiar,
        )

    def step(self, program: Program, times: OpTimes, settings: Settings) -> Step:
        """Ops one after another, the host running ahead."""
        return schedule(times, program.table.repeat)

    def interval(
        self, program: Program, times: OpTimes, step: Step, device: Device, settings: Settings
    ) -> tuple[float, float, str]:
        """Conformal interval of the residual of steps, and of hosts where the device waits for the host."""
        if self.steps is None or "interval_low" not in times.details or not len(program):
            return self.kernel.interval(program, times, step, device, settings)
        low, high = (float(times.details[f"interval_{end}"][0]) for end in ("low", "high"))
        seen = self.steps.has_seen(device)
        basis = f"conformal, held-out {'families' if seen else 'GPUs'}"
        waiting = float(step.gap_s.sum()) / step.time_s if step.time_s else 0.0
        host_low, host_high = self.kernel.calibration.intervals["host"]
        low, high = (
            float(np.exp(sign * np.hypot(np.log(own), waiting * np.log(host))))
            for sign, own, host in ((-1.0, low, host_low), (1.0, high, host_high))
        )
        if waiting > 0.2:
            basis += ", and how hosts differ"
        return low, high, basis

    def formula(self, program: Program, times: OpTimes, row: int, device: Device) -> list[str]:
        """The kernel model's account of one op, and the factors on it."""
        lines = self.kernel.formula(program, times, row, device)
        for name, label in (("op_factor", "operations alike"), ("step_factor", "steps alike")):
            if name in times.details:
                lines.append(f"× {float(times.details[name][row]):.3f}  what measurements of {label} leave of it")
        return lines


def familiarity(steps: Residual, x: Floats) -> Floats:
    """How like the steps fitted on each row of features is: 1 inside their range, 0 well outside.

    A step that spends more of its time on one kind of operation than any that was fitted on (a lone product, a
    perceptron) is foreign by that alone.
    """
    ranges: Mapping[str, tuple[float, float]] = steps.provenance["ranges"]
    low, high = (np.array([ranges[name][end] for name in FEATURES]) for end in (0, 1))
    slack = 0.1 * (high - low) + 1e-9
    outside = ((x < low - slack) | (x > high + slack)).mean(axis=1)
    beyond = np.max((x - high - slack)[:, _SHARES], axis=1) / _FOREIGN_SHARE
    like = np.minimum(1.0 - outside / _FOREIGN, 1.0 - np.maximum(0.0, beyond))
    return np.where(x[:, _TENSOR] < _ON_TENSOR_CORES, 0.0, np.maximum(0.0, like))


REGISTRY.register(
    Learned(KERNEL, {family: residual.load(family) for family in ("gemm", "attention")}, residual.load("steps"))
)
