"""The timeline of a predicted step: the device's stream, the host that launches, and memory."""

from __future__ import annotations

import numpy as np

from foretell.cost.estimate import BOUNDS, Estimate
from foretell.cost.program import Program
from foretell.graph import Graph, Op
from foretell.timeline.timeline import Counter, Floats, Timeline

__all__ = ["DEVICE_LANE", "HOST_LANE", "WAIT", "step_timeline"]

DEVICE_LANE = "device stream"
HOST_LANE = "host launches"
#: The kind of events in which the device waits for the host.
WAIT = "wait"


def step_timeline(graph: Graph, estimate: Estimate, program: Program | None = None) -> Timeline:
    """One step of `graph` as `estimate` (of the same graph) has it; `program` is the graph lowered for its runtime.

    The device runs ops one after another; where it waits for the host there is an event of kind ``wait``, so the
    events of its lane fill the estimate's time. The host issues ops one after another, ahead of the device. An op of
    equal layers (`Op.repeat`) is one event for all its runs, as in the estimate. Ops that neither launch anything nor
    take the host's time have no event. Raises ValueError where the estimate is not of this graph.
    """
    columns = estimate.ops
    if len(columns) != len(graph.ops):
        raise ValueError(f"the estimate has {len(columns)} ops, the graph {len(graph.ops)}")
    count = len(columns)
    gap = np.zeros(count) if columns.gap_s is None else columns.gap_s
    host = np.zeros(count) if columns.host_s is None else columns.host_s
    busy = columns.time_s - gap
    start = np.cumsum(columns.time_s) - columns.time_s  # of the wait before the op
    issue = np.cumsum(host) - host
    begins = max(0.0, estimate.host_s - float(host.sum()))  # what the host does before it issues the first op

    # Rows: waits, then runs on the device, then launches; the op of each, -1 for the host's beginning.
    waits, runs, launches = (np.flatnonzero(column > 0.0) for column in (gap, busy, host))
    first = np.array([-1] if begins > 0.0 and count else [], dtype=np.int64)
    op = np.concatenate([waits, runs, first, launches])
    n_wait, n_run, n_first, n_launch = len(waits), len(runs), len(first), len(launches)
    shown = [_shown(o) for o in graph.ops]
    running = np.zeros(len(op), dtype=np.bool_)
    running[n_wait : n_wait + n_run] = True

    def of_runs(column: Floats) -> Floats:
        return np.where(running, column[op], np.nan)

    table = graph.table() if program is None else program.table
    bounds = np.array(BOUNDS)[columns.bound]
    launched = np.arange(len(op)) >= n_wait + n_run + n_first
    about_op = running | launched
    return Timeline.of(
        lanes=(DEVICE_LANE, HOST_LANE),
        lane=[DEVICE_LANE] * (n_wait + n_run) + [HOST_LANE] * (n_first + n_launch),
        start_s=np.concatenate([start[waits], (start + gap)[runs], np.zeros(n_first), begins + issue[launches]]),
        duration_s=np.concatenate([gap[waits], busy[runs], np.full(n_first, begins), host[launches]]),
        name=[*["waiting for the host"] * n_wait, *(shown[i] for i in runs), *["step begins"] * n_first]
        + [f"launch {shown[i]}" for i in launches],
        kind=[*[WAIT] * n_wait, *(graph.ops[i].kind for i in runs), *["host"] * n_first, *["launch"] * n_launch],
        args={
            "op": np.where(about_op, op, np.nan),
            "module": np.where(about_op, table.module[op].astype(np.str_), ""),
            "phase": np.where(running, np.array([o.phase for o in graph.ops], dtype=np.str_)[op], ""),
            "shapes": np.where(running, np.array([_shapes(graph, o) for o in graph.ops], dtype=np.str_)[op], ""),
            "runs": of_runs(table.repeat),
            "flops": of_runs(2.0 * table.macs * table.repeat),
            "bytes": of_runs((table.bytes_read + table.bytes_written) * table.repeat),
            "limited by": np.where(running, bounds[op], ""),
        },
        counters=() if estimate.memory.timeline_bytes is None else (_memory(estimate, start),),
        about={
            "workload": estimate.workload,
            "device": estimate.device,
            "mode": estimate.mode,
            "precision": estimate.precision,
            "runtime": estimate.runtime,
            "model": f"predicted by Foretell, {estimate.model} model",
        },
    )


def _memory(estimate: Estimate, start_s: Floats) -> Counter:
    levels = estimate.memory.timeline_bytes
    assert levels is not None
    return Counter("allocated memory", "bytes", start_s.copy(), np.asarray(levels, dtype=np.float64).copy())


def _shown(op: Op) -> str:
    name = op.name.removeprefix("aten.").removesuffix(".default")
    return f"{name} ×{op.repeat}" if op.repeat > 1 else name


def _shapes(graph: Graph, op: Op, most: int = 4) -> str:
    """``(64×3×224×224 float32, …) → 64×64×112×112 float32``: the first `most` operands and the first result."""

    def text(index: int) -> str:
        tensor = graph.tensors[index]
        return f"{'×'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"

    more = [f"{len(op.inputs) - most} more"] if len(op.inputs) > most else []
    operands = ", ".join([*map(text, op.inputs[:most]), *more])
    return f"({operands}) → {text(op.outputs[0])}" if op.outputs else f"({operands})"
