"""`explain`: one op's time, as its formula with the numbers in it."""

from __future__ import annotations

from pathlib import Path

from foretell.cost.energy import activity_of, check_limits, power_of, slowed, throttle
from foretell.cost.model import AUTO, CostModel, OpTimes, Settings, Step, default_model, models
from foretell.cost.program import Program, lower
from foretell.cost.scales import calibrated
from foretell.errors import InputError
from foretell.graph import Graph, Tensor
from foretell.hardware.device import Device
from foretell.units import format_count, format_time

_WIDTH = 80


def explain(
    graph: Graph,
    device: Device,
    op_index: int,
    *,
    runtime: str = "eager",
    model: str = AUTO,
    calibration: Path | None = None,
    power_limit_w: float | None = None,
    clock_hz: float | None = None,
) -> str:
    """How the time of op number `op_index` of `graph` on `device` comes about, in at most 80 columns.

    The keywords are those of `estimate`. Raises InputError for an index the graph does not have, and as `estimate`.
    """
    if not 0 <= op_index < len(graph.ops):
        raise InputError(
            f"op {op_index} does not exist",
            graph.name,
            f"it has ops 0 to {len(graph.ops) - 1}; list them with `foretell capture … --ops`",
        )
    op = graph.ops[op_index]
    if model == AUTO:
        model = default_model(device)
    check_limits(device, power_limit_w, clock_hz)
    predictor = models()[model]
    if calibration is not None:
        predictor = calibrated(calibration, device, model)
        model = predictor.name
    settings = Settings.of(graph, runtime)
    program = lower(graph, runtime)
    times = predictor.op_times(program, device, settings)
    step = predictor.step(program, times, settings)
    what = f"{op.name} ({op.kind}, {op.phase})"
    title = f"op {op_index} of {graph.name}: {what}"
    module = op.module or "(none)"
    room = _WIDTH - len("  module   ")
    lines = [
        *([title] if len(title) <= _WIDTH else [f"op {op_index} of {graph.name}", f"  op       {what}"]),
        f"  module   {module if len(module) <= room else '…' + module[1 - room :]}",
        *_operands("in", [graph.tensors[t] for t in op.inputs]),
        *_operands("out", [graph.tensors[t] for t in op.outputs]),
    ]
    if op.gemm is not None:
        batch, m, n, k = op.gemm
        lines.append(f"  product  {batch} × ({m} × {k}) · ({k} × {n}), {format_count(op.macs)} multiply-adds")
    lines.append("")
    mine = int(program.group[op_index])
    chain = [i for i in range(len(program)) if program.group[i] == mine]
    if len(chain) > 1:
        others = ", ".join(str(i) for i in chain[:8]) + (" …" if len(chain) > 8 else "")
        lines += [f"fused with ops {others} into one kernel: traffic between them is gone", ""]
    idle = times.busy_s[op_index] <= 0
    if idle:
        lines.append("costs the device nothing: no kernel runs and no bytes move")
    else:
        lines += predictor.formula(program, times, op_index, device)
    if not idle and (power_limit_w is not None or clock_hz is not None):
        times, step, limited = _limited(predictor, program, times, device, settings, power_limit_w, clock_hz)
        lines += limited
    repeat = float(program.table.repeat[op_index])
    busy, gap = float(step.busy_s[op_index]), float(step.gap_s[op_index])
    if not idle:
        one = float(times.busy_s[op_index])
        lines += ["", f"one run    {format_time(one)} on {device.name}, {_bound(times, op_index)} bound"]
    elif times.host_s[op_index] > 0:
        lines += ["", f"the host   {format_time(float(times.host_s[op_index]))} to issue it"]
    if repeat != 1 and not idle:
        lines.append(f"step       {format_time(busy)}: {repeat:g} equal runs")
    if gap > 0:
        lines.append(f"waiting    {format_time(gap)} before it, for the host to issue it")
    share = (busy + gap) / step.time_s if step.time_s else 0.0
    lines.append(f"share      {share:.1%} of a step of {format_time(step.time_s)} ({runtime}, {model})")
    return _cut(lines)


def _cut(lines: list[str]) -> str:
    return "\n".join(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for line in lines)


def _limited(
    predictor: CostModel,
    program: Program,
    times: OpTimes,
    device: Device,
    settings: Settings,
    limit_w: float | None,
    clock_hz: float | None,
) -> tuple[OpTimes, Step, list[str]]:
    """Times and step as `estimate` has them under a power limit or a locked clock, and what they are multiplied by."""
    step = predictor.step(program, times, settings)
    power = power_of(device)
    if power is None:
        return times, step, []
    locked = None if clock_hz is None or device.boost_clock_hz is None else clock_hz / device.boost_clock_hz
    settled = throttle(power, activity_of(power, device, program, times, step), limit_w, locked)
    if settled.scale >= 1.0:
        return times, step, []
    slower = slowed(times, settled)
    lines = [
        f"× {1.0 / settled.scale:.3f}  arithmetic, at the clock that the limit leaves",
        f"× {settled.memory_slowdown:.3f}  traffic, likewise",
    ]
    return slower, predictor.step(program, slower, settings), lines


def _operands(title: str, tensors: list[Tensor]) -> list[str]:
    shown = [f"  {title:<8} {_tensor(t)}" for t in tensors[:4]]
    if len(tensors) > 4:
        shown.append(f"  {'':<8} … and {len(tensors) - 4} more")
    return shown


def _tensor(tensor: Tensor) -> str:
    shape = " × ".join(str(size) for size in tensor.shape) or "scalar"
    layout = "" if tensor.layout == "contiguous" else f", {tensor.layout.replace('_', ' ')}"
    return f"{shape} {tensor.dtype}{layout}"


def _bound(times: OpTimes, row: int) -> str:
    compute, memory, launch = times.compute_s[row], times.memory_s[row], times.launch_s[row]
    if launch > max(compute, memory):
        return "launch"
    return "compute" if compute >= memory else "memory"
