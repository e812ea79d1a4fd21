"""`explain`: one op's time, as its formula with the numbers in it."""

from __future__ import annotations

from foretell.cost.model import AUTO, OpTimes, Settings, default_model, models
from foretell.cost.program import lower
from foretell.errors import InputError
from foretell.graph import Graph, Tensor
from foretell.hardware.device import Device
from foretell.units import format_count, format_time

_WIDTH = 80


def explain(graph: Graph, device: Device, op_index: int, *, runtime: str = "eager", model: str = AUTO) -> str:
    """How the time of op number `op_index` of `graph` on `device` comes about, in at most 80 columns.

    Raises InputError for an index the graph does not have.
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
    predictor = models()[model]
    settings = Settings.of(graph, runtime)
    program = lower(graph, runtime)
    times = predictor.op_times(program, device, settings)
    step = predictor.step(program, times, settings)
    lines = [
        f"op {op_index} of {graph.name}: {op.name} ({op.kind}, {op.phase})",
        f"  module   {op.module or '(none)'}",
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
    lines += predictor.formula(program, times, op_index, device)
    repeat = float(program.table.repeat[op_index])
    busy, gap = float(step.busy_s[op_index]), float(step.gap_s[op_index])
    lines.append("")
    one = float(times.busy_s[op_index])
    lines.append(f"one run    {format_time(one)} on {device.name}, {_bound(times, op_index)} bound")
    if repeat != 1:
        lines.append(f"step       {format_time(busy)}: {repeat:g} equal runs")
    if gap > 0:
        lines.append(f"waiting    {format_time(gap)} before it, for the host to issue it")
    share = (busy + gap) / step.time_s if step.time_s else 0.0
    lines.append(f"share      {share:.1%} of a step of {format_time(step.time_s)} ({runtime}, {model})")
    return "\n".join(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for line in lines)


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
