"""`here`: fit the processor model to microbenchmarks of the machine at hand; `from_table`: scales from measurements.

`here` times `microbench` cases and looks for the constants of `kernels.cpu` under which the model gives those times:
least squares of log(predicted / measured), robust (Huber), each constant held near where it started by a weak prior, so
that what no case shows stays sensible. A single operation is repeated in a tight loop, where its median misses the
disturbances and cold caches that it meets among others; chains have them. One factor, `alone`, common to all single
operations, is fitted along and dropped.

On a GPU the same run gives the peaks and bandwidth it sustains, and `Scales` on the model that predicts it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.calibrate import microbench
from foretell.calibrate.microbench import Case, Clock, Sample
from foretell.cost import calibration
from foretell.cost.cpu import BANDWIDTH, FARTHEST, FLOPS, caches_of
from foretell.cost.kernels import cpu
from foretell.cost.program import Program, lower
from foretell.errors import InputError
from foretell.graph import OpTable
from foretell.hardware.device import Device
from foretell.hardware.local import CALIBRATION, local_device, local_folder

Floats = npt.NDArray[np.float64]
Report = Callable[[str, int, int], None]

MOST_S = 3600.0
_HUBER = 0.15  # residuals beyond this count linearly
_PRIOR = 0.1  # weight of ln(constant / start) beside a residual
_CHAIN_OPS = 8  # a case of more ops is a chain…
_CHAIN_WEIGHT = 3.0  # …and counts as several: it is what networks are made of
_LEAST_S = 0.15  # of building, warming up, timing and capturing a case at the least
_TINY_S = 5e-5  # a chain whose ops take less shows dispatch, and counts once


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants of the processor model, and ln(predicted / measured) by case."""

    constants: Mapping[str, float]
    residuals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Here:
    """What a calibration of this machine wrote and found: median error over cases, median spread between passes."""

    device: Device
    calibration: Path
    toml: Path
    cases: int
    error: float
    spread: float


def fit(programs: Mapping[str, Program], seconds: Mapping[str, tuple[float, float]], device: Device) -> Fitted:
    """The constants under which `programs` take `seconds` (case → median, spread between passes) on `device`."""
    names = [name for name in programs if name in seconds]
    if not names:
        raise InputError("no case was measured", "--here", "let it run for longer")
    table = OpTable.concatenate([programs[name].table for name in names])
    whole = Program.of(table)
    strided = np.concatenate([programs[name].strided for name in names])
    counts = np.array([len(programs[name]) for name in names])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    contexts = [cpu.Context.of(programs[name].table) for name in names]
    context = cpu.Context(
        np.concatenate([c.weights_bytes for c in contexts]), np.concatenate([c.single for c in contexts])
    )
    caches, _ = caches_of(device)
    keys = list(cpu.DEFAULTS)
    measured = np.array([seconds[name][0] for name in names])
    spread = np.array([seconds[name][1] for name in names])
    chain = counts > _CHAIN_OPS
    weight = 1.0 / np.hypot(0.1, 0.5 * np.log(spread))
    weight *= np.where(chain & (measured / counts > _TINY_S), _CHAIN_WEIGHT, 1.0) / weight.mean()

    def residual(x: Floats) -> Floats:
        constants = dict(zip(keys, np.exp(x[:-1]), strict=True))
        times = cpu.times(table, strided, whole.names, whole.name_code, context, caches, constants)
        total = np.add.reduceat(times.total_s * table.repeat, starts)
        return np.asarray(np.log(total / measured) - np.where(chain, 0.0, x[-1]))

    start = np.log([*(cpu.DEFAULTS[key] for key in keys), 1.0])
    found = _least_squares(residual, start, weight)
    far = np.log(FARTHEST * 0.999)  # rounded when written, and still within
    found[:-1] = np.clip(found[:-1], start[:-1] - far, start[:-1] + far)
    left = residual(found)
    return Fitted(
        constants=dict(zip(keys, np.exp(found[:-1]).tolist(), strict=True)),
        residuals=dict(zip(names, left.tolist(), strict=True)),
    )


def _least_squares(residual: Callable[[Floats], Floats], start: Floats, weight: Floats, steps: int = 30) -> Floats:
    """Levenberg-Marquardt with Huber's loss and the prior of this module."""

    def loss(x: Floats, r: Floats) -> float:
        size = np.abs(r)
        huber = np.where(size < _HUBER, 0.5 * r * r, _HUBER * (size - 0.5 * _HUBER))
        return float((weight * huber).sum() + 0.5 * _PRIOR**2 * ((x - start) ** 2).sum())

    x, damping, small = start.copy(), 1.0, 0.02
    left = residual(x)
    value = loss(x, left)
    for _ in range(steps):
        columns = [(residual(x + small * unit) - left) / small for unit in np.eye(len(x))]
        jacobian = np.stack(columns, axis=1)
        robust = weight * np.minimum(1.0, _HUBER / np.maximum(np.abs(left), 1e-9))
        normal = jacobian.T @ (robust[:, None] * jacobian) + _PRIOR**2 * np.eye(len(x))
        slope = jacobian.T @ (robust * left) + _PRIOR**2 * (x - start)
        before = value
        for _ in range(8):
            step = np.clip(-np.linalg.solve(normal + 0.05 * damping * np.eye(len(x)), slope), -0.7, 0.7)
            there = residual(x + step)
            reached = loss(x + step, there)
            if reached < value:
                x, left, value, damping = x + step, there, reached, damping / 3.0
                break
            damping *= 3.0
        if before - value <= 1e-4 * before:
            break
    return x


def here(
    out: Path | None = None,
    seconds: float = 90.0,
    *,
    kind: str = "cpu",
    cases: Sequence[Case] | None = None,
    clock: Clock | None = None,
    progress: Report = lambda what, done, total: None,
) -> Here:
    """Measure this machine and write its calibration to `out` (default: `local_folder`), its data sheet beside it.

    All of it takes about `seconds`; InputError says how many are needed where that is too little for one pass. Samples
    are kept next to `out` as they come, so that an interrupted run goes on from there.
    """
    start = time.perf_counter()
    chosen = cases or (microbench.cpu_cases() if kind == "cpu" else microbench.gpu_cases())
    least = max(1.0, math.ceil(_LEAST_S * len(chosen) / 5) * 5.0) if len(chosen) > 1 / _LEAST_S else 0.0
    if not least <= seconds <= MOST_S:
        what = f"{seconds:g} seconds are too few for {len(chosen)} cases" if seconds < least else f"{seconds:g} seconds"
        raise InputError(what, "--seconds", f"give {max(1.0, least):g} to {MOST_S:g}; 90 are enough")
    default = CALIBRATION if kind == "cpu" else f"local-{kind}.calibration.json"
    path = local_folder() / default if out is None else out
    _writable(path)
    stem = path.name.removesuffix(".json").removesuffix(".calibration")
    toml = path.with_name(f"{stem}.toml")
    programs: dict[str, Program] = {}
    for i, case in enumerate(chosen):
        progress("Reading", i, len(chosen))
        programs[case.name] = lower(microbench.graph_of(case))
    samples = microbench.run(
        path.with_name(f"{stem}.samples.jsonl"),
        seconds - (time.perf_counter() - start),
        cases=chosen,
        clock=clock,
        device="cpu" if kind == "cpu" else "cuda",
        progress=lambda done, total: progress("Measuring", done, total),
    )
    progress("Fitting", 0, 1)
    found = microbench.medians(samples)
    device = sustained(local_device(gpu=kind != "cpu", measured=False), programs, found)
    provenance = _provenance(samples, found, kind)
    if kind == "cpu":
        fitted = fit(programs, found, device)
        _write(path, calibration_of(fitted, found, device, provenance))
        errors = np.abs(list(fitted.residuals.values()))
    else:
        from foretell.calibrate.tables import scales_of
        from foretell.cost.model import Settings, default_model, models

        name = default_model(device)
        model, settings = models()[name], Settings()
        rows = [(p, model.op_times(p, device, settings), found[n][0]) for n, p in programs.items() if n in found]
        scales = scales_of(rows, device.name, name, provenance)
        _write(path, scales.to_dict())
        errors = np.abs([np.log(f.mid) for f in scales.factors.values()])
    _write_text(toml, toml_of(device))
    return Here(
        device=device,
        calibration=path,
        toml=toml,
        cases=len(found),
        error=float(np.median(errors)),
        spread=float(np.median([spread for _, spread in found.values()])),
    )


def calibration_of(
    fitted: Fitted, found: Mapping[str, tuple[float, float]], device: Device, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """The calibration document. Its interval: what the fit left of 80 % of the cases, and the drift between passes.

    Slowest over fastest of three passes spans 1.7 standard deviations in the mean. The speed while calibrating and
    while predicted work runs differ by 1.28 · √2 = 1.8 in 80 of 100 cases: about as much.
    """
    drift = float(np.median([np.log(spread) for _, spread in found.values()]))
    left = np.negative(list(fitted.residuals.values()))
    low, high = (float(np.hypot(quantile, drift)) for quantile in np.quantile(left, (0.1, 0.9)))
    interval = [round(float(np.exp(-low)), 4), round(float(np.exp(high)), 4)]
    reference = {FLOPS: device.peak("fp32", "vector"), BANDWIDTH: device.memory_bandwidth_bytes_per_s}
    return {
        "schema": calibration.SCHEMA,
        "model": "cpu",
        "constants": {name: float(f"{value:.4g}") for name, value in {**fitted.constants, **reference}.items()},
        "intervals": {"default": [0.4, 2.5], "host": [1.0, 1.0], "inference.eager": interval},
        "provenance": dict(provenance),
    }


def sustained(device: Device, programs: Mapping[str, Program], found: Mapping[str, tuple[float, float]]) -> Device:
    """`device` with the bandwidth and the peaks its cases sustained, where they are more than it was known for."""
    bandwidth = device.memory_bandwidth_bytes_per_s or 0.0
    peaks = dict(device.peaks)
    sources = dict(device.sources)
    measured = f"foretell calibrate --here, {microbench.today()}"
    stream, most = 0.0, 0.0
    from foretell.cost.rates import FORMATS

    unit = "vector" if device.kind == "cpu" else "tensor"
    for name, program in programs.items():
        if name not in found:
            continue
        table, seconds = program.table, found[name][0]
        moved = float((table.bytes_read + table.bytes_written).sum())
        if not table.macs.any() and moved > most:  # the largest that only moves data
            most, stream = moved, moved / seconds
        if len(table) <= _CHAIN_OPS and table.macs.any():
            number_format = FORMATS[int(table.dtype[int(table.macs.argmax())])]
            key = f"{number_format}.{'vector' if number_format == 'fp32' else unit}"
            rate = 2.0 * float(table.macs.sum()) / seconds
            if rate > peaks.get(key, 0.0):
                peaks[key], sources[f"peaks.{key}"] = rate, measured
    if not bandwidth and stream:
        bandwidth, sources["memory_bandwidth_bytes_per_s"] = stream, measured
    from foretell.hardware.device import FrozenMap

    return replace(
        device,
        peaks=FrozenMap(peaks),
        memory_bandwidth_bytes_per_s=bandwidth or None,
        sources=FrozenMap(sources),
    )


def toml_of(device: Device) -> str:
    """The device as a file of the catalogue's format, each number with its source."""
    lines = [f"{key} = {json.dumps(getattr(device, key))}" for key in ("title", "vendor", "kind", "architecture")]
    keys: dict[str, str] = {}

    def cell(value: str | int, source: str) -> str:
        key = keys.setdefault(source, f"s{len(keys) + 1}")
        return f'[{json.dumps(value)}, "{key}"]'

    numbers: tuple[tuple[str, str, str], ...] = (
        ("multiprocessors", "multiprocessors", ""),
        ("l1_per_sm", "l1_bytes_per_sm", " B"),
        ("l2", "l2_bytes", " B"),
        ("l3", "l3_bytes", " B"),
        ("memory", "memory_bytes", " B"),
        ("memory_bandwidth", "memory_bandwidth_bytes_per_s", " B/s"),
    )
    for key, field, unit in numbers:
        value = getattr(device, field)
        if value is not None:
            text = int(value) if not unit else f"{value:.5g}{unit}" if unit == " B/s" else f"{int(value)}{unit}"
            lines.append(f"{key} = {cell(text, device.sources.get(field, 'this system'))}")
    lines += ["", "[peaks]"]
    for name, rate in device.peaks.items():
        source = device.sources.get(f"peaks.{name}", "this system")
        lines.append(f'"{name}" = {cell(f"{rate / 1e9:.5g} GFLOP/s", source)}')
    lines += ["", "[sources]", *(f"{key} = {json.dumps(source, ensure_ascii=False)}" for source, key in keys.items())]
    return "\n".join(lines) + "\n"


def _provenance(samples: Sequence[Sample], found: Mapping[str, tuple[float, float]], kind: str) -> dict[str, Any]:
    spreads = [spread for _, spread in found.values()]
    return {
        "source": "microbenchmarks of the machine itself (foretell calibrate --here)",
        "licence": "none: measured here",
        "machine": microbench.machine("cpu" if kind == "cpu" else "cuda"),
        "date": microbench.today(),
        "rows": len(found),
        "passes": 1 + max((sample.turn for sample in samples), default=0),
        "spread": {"median": round(float(np.median(spreads)), 3), "90 %": round(float(np.quantile(spreads, 0.9)), 3)},
        "method": "robust least squares of log(predicted / measured) with a weak prior on every constant",
    }


def _writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", f"--out {path}", "give another file") from None
    if path.is_dir():
        raise InputError("is a folder", f"--out {path}", "give a file")


def _write(path: Path, document: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", f"--out {path}", "give another file") from None
