"""`convmeter`: a step is linear in FLOPs and in the sizes of convolutions' inputs and outputs.

T. Beringer, J. Stock, A. Mazaheri, F. Wolf: Dissecting Convolutional Neural Networks for Runtime and Scalability
Prediction (ICPP 2024). With b the batch size, all of one image:

    forward  = b · (c₁ · FLOP + c₂ · inputs + c₃ · outputs) + c₄
    backward = b · (c₅ · FLOP + c₆ · inputs + c₇ · outputs) + c₈
    update   = c₉ · layers + c₁₀ · weights [+ c₁₁ · nodes, on several nodes]

The coefficients of a device come from a few networks measured on it, by least squares. So that a device nobody
measured has some too, ours are kept without units: FLOP are counted in seconds at the peak of their precision, sizes in
seconds at the memory's bandwidth. A coefficient is then how many such seconds count, which one set for all devices
states roughly.

Matrix products count as the 1×1 convolutions they are. Everything else (norms, activations) is in the coefficients, as
in the paper; what an op is given is what its own terms say, and the constant goes to layers in equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration, load
from foretell.cost.model import REGISTRY, OpTimes, Settings, Step
from foretell.cost.program import Program
from foretell.cost.rates import FORMATS, bandwidth, matrix_rate
from foretell.errors import InputError
from foretell.graph import DTYPES, KINDS, PHASES, dtype_bytes
from foretell.hardware.device import Device
from foretell.units import format_time

Floats = npt.NDArray[np.float64]

_LAYERS = ("convolution", "matmul", "batched_matmul", "grouped_matmul", "attention", "recurrent")
_IS_LAYER = np.array([kind in _LAYERS for kind in KINDS])
_ITEMSIZE = np.array([dtype_bytes(dtype) for dtype in DTYPES], dtype=np.float64)
_CONVOLUTION = KINDS.index("convolution")
_FORWARD, _BACKWARD = PHASES.index("forward"), PHASES.index("backward")

#: Terms of a forward or backward pass, in the order of `features`; ``constant`` is in seconds a pass.
TERMS = ("compute", "inputs", "outputs", "constant")


@dataclass(frozen=True, slots=True)
class Features:
    """What the formula is linear in, of each op: seconds at the data sheet's rates, all columns (rows,).

    `layer` marks rows that count, `backward` those of the backward pass, `weights` seconds to move an update's weights.
    """

    compute: Floats
    inputs: Floats
    outputs: Floats
    weights: Floats
    layer: npt.NDArray[np.bool_]
    backward: npt.NDArray[np.bool_]

    def totals(self, repeat: Floats, backward: bool) -> Floats:
        """(compute, inputs, outputs, 1) of one pass."""
        rows = self.layer & (self.backward == backward)
        columns = (self.compute, self.inputs, self.outputs)
        return np.array([*(float((column * repeat)[rows].sum()) for column in columns), float(rows.any())])


def features(program: Program, device: Device, settings: Settings) -> Features:
    """The formula's terms of every op. Raises InputError where the device lacks a peak or bandwidth."""
    table = program.table
    layer = _IS_LAYER[table.kind] & (table.macs > 0)
    peak = np.ones(len(table))
    for code in np.unique(table.dtype[layer]):
        for convolution, tf32 in ((True, settings.conv_tf32), (False, settings.matmul_tf32)):
            rows = layer & (table.dtype == code) & ((table.kind == _CONVOLUTION) == convolution)
            number_format = "tf32" if tf32 and FORMATS[code] == "fp32" else FORMATS[code]
            peak[rows] = matrix_rate(device, number_format).flops_per_s
    rate = bandwidth(device)
    weights = table.gemm_batch * table.gemm_n * table.gemm_k * _ITEMSIZE[table.dtype]
    inputs = np.maximum(table.bytes_read - np.where(table.kind == _CONVOLUTION, weights, 0.0), 0.0)
    update = table.phase == PHASES.index("optimizer")
    return Features(
        compute=np.where(layer, 2.0 * table.macs / peak, 0.0),
        inputs=np.where(layer, inputs / rate, 0.0),
        outputs=np.where(layer, table.bytes_written / rate, 0.0),
        weights=np.where(update, (table.bytes_read + table.bytes_written) / rate, 0.0),
        layer=layer,
        backward=table.phase == _BACKWARD,
    )


def least_squares(columns: Floats, measured_s: Floats) -> Floats:
    """Coefficients ≥ 0 (terms,) of `columns` (rows, terms) that predict times with least squared relative error.

    Active-set least squares (C. Lawson and R. Hanson, Solving Least Squares Problems, 1974), of relative errors, so
    that a small network counts as much as a large one. Raises InputError with fewer rows than terms.
    """
    if len(columns) < columns.shape[1]:
        counts = f"{len(columns)} measurements for {columns.shape[1]} coefficients"
        raise InputError(counts, "convmeter", "measure more networks")
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    a, b = columns / scale / measured_s[:, None], np.ones(len(columns))
    passive = np.zeros(a.shape[1], dtype=np.bool_)
    x = np.zeros(a.shape[1])
    for _ in range(10 * a.shape[1]):
        slope = a.T @ (b - a @ x)
        if passive.all() or slope[~passive].max() <= 1e-9 * len(b):
            break
        passive[np.flatnonzero(~passive)[slope[~passive].argmax()]] = True
        while True:
            trial = np.zeros_like(x)
            trial[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            negative = passive & (trial <= 0)
            if not negative.any():
                break
            step = (x[negative] / np.maximum(x[negative] - trial[negative], 1e-300)).min()
            x = x + step * (trial - x)
            passive &= x > 1e-12
            x[~passive] = 0.0
        x = trial
    return np.asarray(x / scale)


def update_s(layers: int, weights: int, nodes: int, coefficients: Sequence[float]) -> float:
    """Seconds of a gradient update over `nodes`: coefficients are seconds a layer, a weight and a node.

    On one node the last term is left out.

    >>> update_s(50, 25_000_000, 4, (2e-6, 1e-11, 1e-3))
    0.00435
    """
    per_layer, per_weight, per_node = coefficients
    return per_layer * layers + per_weight * weights + (per_node * nodes if nodes > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class ConvMeter:
    """The linear model with one set of coefficients for each device measured, and one for the others."""

    calibration: Calibration
    name: str = "convmeter"

    def coefficients(self, device: Device, settings: Settings, channels_last: bool) -> tuple[dict[str, float], bool]:
        """Coefficients by dotted term, and whether they are this device's own.

        The nearest condition stands in: without layout, then without runtime.
        """
        layout = ".channels_last" if channels_last else ""
        constants = self.calibration.constants
        runtime = f"{settings.mode}.{settings.runtime}"
        conditions = (f"{runtime}{layout}", runtime, f"{settings.mode}.eager{layout}", f"{settings.mode}.eager")
        for owner, own in ((f"{device.name}.", True), ("", False)):
            for condition in conditions:
                start = f"{owner}{condition}."
                if f"{start}forward.compute" in constants:
                    return {n.removeprefix(start): v for n, v in constants.items() if n.startswith(start)}, own
        raise InputError(f"no coefficients for mode {settings.mode!r}", "calibration of convmeter", "fit it anew")

    def op_times(self, program: Program, device: Device, settings: Settings) -> OpTimes:
        """Each op's own terms. Raises InputError where the device lacks a peak or bandwidth."""
        table = program.table
        of = features(program, device, settings)
        convolutions = table.kind == _CONVOLUTION
        channels_last = bool(convolutions.any() and table.channels_last[convolutions].mean() > 0.5)
        values, own = self.coefficients(device, settings, channels_last)
        pass_of = np.where(of.backward, 1, 0)
        parts = {}
        for term, column in (("compute", of.compute), ("inputs", of.inputs), ("outputs", of.outputs)):
            pair = np.array([values[f"forward.{term}"], values.get(f"backward.{term}", values[f"forward.{term}"])])
            parts[term] = pair[pass_of] * column
        constant = np.zeros(len(table))
        for backward, prefix in ((False, "forward"), (True, "backward")):
            rows = of.layer & (of.backward == backward)
            layers = float(table.repeat[rows].sum())
            if layers:
                constant[rows] = values.get(f"{prefix}.constant", 0.0) / layers
        update = table.phase == PHASES.index("optimizer")
        parts["weights"] = values.get("update.weights", 0.0) * of.weights
        constant = np.where(update, values.get("update.constant", 0.0) / max(1.0, float(update.sum())), constant)
        # Terms add up, so the larger of arithmetic and traffic takes the sum: the time is their maximum, as everywhere.
        arithmetic, traffic = parts["compute"], parts["inputs"] + parts["outputs"] + parts["weights"]
        time = arithmetic + traffic
        by_arithmetic = arithmetic >= traffic
        compute = np.where(by_arithmetic, time, arithmetic)
        return OpTimes(
            compute_s=compute,
            memory_s=np.where(by_arithmetic, traffic, time),
            launch_s=constant,
            host_s=np.zeros(len(table)),
            ideal_s=np.minimum(of.compute, compute),
            details={**{f"{term}_s": part for term, part in parts.items()}, "constant_s": constant},
            notes=() if own else (f"no coefficients of {device.name}: those of all devices, by its data sheet",),
        )

    def step(self, program: Program, times: OpTimes, settings: Settings) -> Step:
        """The sum: the formula knows no host."""
        busy = times.busy_s * program.table.repeat
        return Step(time_s=float(busy.sum()), busy_s=busy, gap_s=np.zeros(len(busy)), host_s=0.0)

    def interval(
        self, program: Program, times: OpTimes, step: Step, device: Device, settings: Settings
    ) -> tuple[float, float, str]:
        """Quantiles of held-out residuals of the calibration."""
        own = any(name.startswith(f"{device.name}.{settings.mode}.") for name in self.calibration.constants)
        condition = f"{settings.mode}.{settings.runtime}" + ("" if own else ".unseen")
        low, high = self.calibration.intervals.get(condition, self.calibration.intervals["default"])
        return low, high, f"residuals of held-out {'families' if own else 'GPUs'}, {settings.mode}"

    def formula(self, program: Program, times: OpTimes, row: int, device: Device) -> list[str]:
        """The terms of one op."""
        value = {name: float(column[row]) for name, column in times.details.items()}
        return [
            "time = c₁ · FLOP + c₂ · inputs + c₃ · outputs + c₄ / layers",
            "",
            f"FLOP     {format_time(value['compute_s'])}",
            f"inputs   {format_time(value['inputs_s'])}",
            f"outputs  {format_time(value['outputs_s'])}",
            f"weights  {format_time(value['weights_s'])}",
            f"constant {format_time(value['constant_s'])}",
        ]


REGISTRY.register(ConvMeter(load("convmeter")))
