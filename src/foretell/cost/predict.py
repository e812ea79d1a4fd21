"""`estimate`: a graph on a device, as an `Estimate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from foretell.cost.energy import activity_of, check_limits, energy_of, power_of, slowed, throttle
from foretell.cost.estimate import BOUNDS, Estimate, Memory, OpEstimates, frozen
from foretell.cost.model import AUTO, OpTimes, Settings, Step, default_model, models
from foretell.cost.program import Program, lower
from foretell.graph import Graph
from foretell.hardware.device import Device
from foretell.units import format_bytes, format_time

# What a step's time leaves out whatever the graph.
_LEFT_OUT = ("data loading", "host-device input copies")

# Numbers of a data sheet that times depend on and that have stand-ins, and by what each that is unknown widens an
# interval: the square root of how far cards of one generation differ in them.
_TIMED: Mapping[str, tuple[str, ...]] = {
    "gpu": ("multiprocessors", "boost_clock_hz", "l2_bytes"),
    "cpu": ("multiprocessors", "l2_bytes", "l3_bytes"),
    "accelerator": (),
}
_PER_UNKNOWN = 1.3

# A module is split into its children while it holds more than this share of the time.
_MODULE_SHARE = 0.25
_MODULES = 24


def estimate(
    graph: Graph,
    device: Device,
    *,
    runtime: str = "eager",
    model: str = AUTO,
    calibration: Path | None = None,
    memory: Memory | None = None,
    program: Program | None = None,
    power_limit_w: float | None = None,
    clock_hz: float | None = None,
) -> Estimate:
    """How long, how large and how dear one step of `graph` is on `device`.

    `memory` and `program` (the graph lowered for `runtime`) are computed where not given; both depend on the graph
    alone, or nearly, so one caller asking for many devices may pass them on. `model` is ``auto`` for the one that
    knows the device best; `calibration` a file that ``foretell calibrate`` wrote for it. `power_limit_w` and
    `clock_hz` are what the device is set to (its TDP, boost). Raises UnknownNameError for a runtime or model we do not
    know, InputError where the device lacks a number that nothing stands in for, or does not allow a limit.
    """
    check_limits(device, power_limit_w, clock_hz)
    if model == AUTO:
        model = default_model(device)
    predictor = models()[model]
    if calibration is not None:
        from foretell.cost.scales import calibrated

        predictor = calibrated(calibration, device, model)
        model = predictor.name
    settings = Settings.of(graph, runtime)
    if program is None:
        program = lower(graph, runtime)
    times = predictor.op_times(program, device, settings)
    step = predictor.step(program, times, settings)
    repeat = program.table.repeat

    power = power_of(device)
    notes = times.notes if power is not None else (*times.notes, f"tdp of {device.name} unknown: no energy")
    if power is not None:
        activity = activity_of(power, device, program, times, step)
        locked = None if clock_hz is None or device.boost_clock_hz is None else clock_hz / device.boost_clock_hz
        settled = throttle(power, activity, power_limit_w, locked)
        notes = (*notes, *power.notes, *settled.notes)
        if settled.scale < 1.0:
            times = slowed(times, settled)
            step = predictor.step(program, times, settings)

    compute, moving = times.compute_s * repeat, times.memory_s * repeat
    launch = times.launch_s * repeat + step.gap_s
    limit = np.maximum(compute, moving)
    by_compute = compute >= moving
    bound = np.where(launch > limit, 2, np.where(by_compute, 0, 1)).astype(np.int8)
    breakdown = dict(
        zip(
            BOUNDS,
            (float(limit[by_compute].sum()), float(limit[~by_compute].sum()), float(launch.sum())),
            strict=True,
        )
    )
    time_s = sum(breakdown.values())
    low, high, basis = predictor.interval(program, times, step, device, settings)
    unknown = [name for name in _TIMED[device.kind] if getattr(device, name) is None]
    if device.vendor == "NVIDIA" and device.kind == "gpu" and device.compute_capability is None:
        unknown.append("compute_capability")  # says which kernels its libraries have
    if device.memory_bytes is None:
        notes = (*notes, f"memory of {device.name} unknown: whether the step fits is too")
    if unknown:
        wider = float(np.log(_PER_UNKNOWN) * np.sqrt(len(unknown)))
        low, high = float(np.exp(-np.hypot(np.log(low), wider))), float(np.exp(np.hypot(np.log(high), wider)))
        notes = (*notes, f"{', '.join(unknown)} of {device.name} unknown: the interval is wider for it")
    memory = _memory(graph, device) if memory is None else memory
    if memory.pageable_bytes:
        notes = (*notes, _paging(memory, device))
    op_time = limit + launch
    energy = None if power is None else energy_of(power, activity, settled, op_time)
    ideal = float((times.ideal_s * repeat).sum())
    return Estimate(
        workload=graph.name,
        device=device.name,
        mode=graph.mode,
        precision=graph.precision,
        runtime=runtime,
        model=model,
        items=graph.items,
        time_s=time_s,
        time_interval_s=(time_s * low, time_s * high),
        interval_basis=basis,
        breakdown_s=frozen(breakdown),
        flops=graph.flops(),
        macs=graph.macs(),
        parameters=graph.parameters,
        mfu=min(1.0, ideal / time_s) if ideal > 0 else None,  # min: rounding
        memory=memory,
        energy_j=None if energy is None else float(energy.sum()),
        cost_usd=None if device.price_usd_per_h is None else device.price_usd_per_h * time_s / 3600.0,
        ops=OpEstimates(
            time_s=op_time,
            compute_s=compute,
            memory_s=moving,
            launch_s=launch,
            bound=bound,
            energy_j=energy,
            gap_s=step.gap_s,
            host_s=times.host_s * repeat,
        ),
        modules=dearest_modules([op.module for op in graph.ops], op_time.tolist()),
        not_counted=frozen({**graph.not_counted, **dict.fromkeys(_LEFT_OUT, 0)}),
        notes=notes,
        occupancy=_mean_occupancy(times, step),
        host_s=step.host_s,
    )


def _mean_occupancy(times: OpTimes, step: Step) -> float | None:
    """Mean achieved occupancy over the time that kernels run; None where the model knows no launches."""
    column = times.details.get("occupancy")
    busy = float(step.busy_s.sum())
    return None if column is None or busy <= 0 else float((column * step.busy_s).sum() / busy)


def _memory(graph: Graph, device: Device) -> Memory:
    from foretell.cost.memory import peak_memory

    return peak_memory(graph, device)


def _paging(memory: Memory, device: Device) -> str:
    """What of a paged optimizer's state moves to the host, and how long that takes."""
    text = f"{format_bytes(memory.pageable_bytes)} of optimizer state can move to the host"
    moved = memory.paged_out_bytes
    if not moved or not memory.fits:
        return text
    text += f"; {format_bytes(moved)} must for the step to fit, "
    link = device.link("pcie")
    bandwidth = None if link is None else link.total_bandwidth_bytes_per_s
    if not bandwidth:
        return text + "which takes time not counted: the host link is unknown"
    return text + f"which takes at least {format_time(2 * moved / bandwidth)} a step there and back, not counted"


def dearest_modules(paths: list[str], times_s: list[float]) -> tuple[tuple[str, float], ...]:
    """Time by module, dearest first, at the depth that tells something.

    Starts from the top-level modules and splits those that hold more than a quarter of the time into their children,
    as long as they have several. Times sum to the total; ops outside any module stand under ``""``.

    >>> dearest_modules(["a.x", "a.y", "b", ""], [4.0, 3.0, 2.0, 1.0])
    (('a.x', 4.0), ('a.y', 3.0), ('b', 2.0), ('', 1.0))
    """
    total = sum(times_s)
    times: dict[str, float] = {}
    for path, time in zip(paths, times_s, strict=True):
        times[path] = times.get(path, 0.0) + time
    groups = _children("", times)
    kept: dict[str, float] = {}
    while groups:
        name, members = groups.popitem()
        share = sum(members.values())
        children = _children(name, members) if share > _MODULE_SHARE * total else {}
        if (len(children) > 1 and len(groups) + len(kept) + len(children) <= _MODULES) or (
            len(children) == 1 and name not in children
        ):
            groups |= children
        else:
            kept[name] = share
    return tuple(sorted(kept.items(), key=lambda item: (-item[1], item[0])))


def _children(parent: str, times: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The paths of `times` by the module one level below `parent`; the parent's own ops stand under its name."""
    depth = len(parent.split(".")) if parent else 0
    result: dict[str, dict[str, float]] = {}
    for path, time in times.items():
        name = ".".join(path.split(".")[: depth + 1]) if path else ""
        result.setdefault(name, {})[path] = time
    return result
