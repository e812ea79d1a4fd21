"""What a captured workload does: a summary by kind of operation, and the operations one by one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foretell.cost.estimate import BOUNDS, Estimate
from foretell.graph import PHASES, Graph, Op
from foretell.report.text import Bar, Flow, Framed, add_row, count, not_counted_text, share, shorten, singular, tail
from foretell.units import format_bytes, format_count, format_flops, format_time
from foretell.workload.options import Options

__all__ = ["dearest_ops", "graph_settings", "graph_summary", "op_table", "short_name"]


def short_name(name: str) -> str:
    """A dispatcher name without what goes without saying: ``aten.mm.default`` → ``mm``, others keep their namespace."""
    return name.removeprefix("aten.").removesuffix(".default")


def graph_settings(graph: Graph, options: Options | None = None, limit: int = 3) -> tuple[str, ...]:
    """What a step is given: shapes of its first `limit` inputs, and how it was captured where `options` are known."""
    shapes = []
    names = graph.provenance.get("inputs", "").split(", ")
    for at, index in enumerate(graph.inputs[:limit]):
        tensor = graph.tensors[index]
        layout = f" {tensor.layout.replace('_', ' ')}" if tensor.layout == "channels_last" else ""
        name = shorten(names[at], 20) if len(names) == len(graph.inputs) > 1 else "input"
        shapes.append(f"{name} {'×'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}{layout}")
    if len(graph.inputs) > limit:
        shapes.append(f"{count(len(graph.inputs) - limit, 'input')} more")
    shapes += [note for note in graph.provenance.get("sizes", "").split(", ") if note]  # of a program left open
    context = graph.provenance.get("context", "") if graph.mode == "decode" else ""
    if options is not None and options.context is not None:
        context = str(options.context)
    if context.isascii() and context.isdigit() and len(context) < 13:  # a file may hold any
        shapes.append(f"{int(context):,} tokens cached")
    if options is None:  # of a file, which says it itself
        how = [shorten(word, 80) for word in graph.provenance.get("training", "").split(", ") if word]
    else:
        how = [*options.training()]
        if options.quantize is not None:
            how.append(options.quantize)
    return (*shapes, *how)


def shape_text(graph: Graph, op: Op) -> str:
    """Shape and element type of what an op writes first (of what it reads where it writes nothing)."""
    which = op.outputs or op.inputs
    if not which:
        return ""
    tensor = graph.tensors[which[0]]
    return f"{'×'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"


def graph_summary(graph: Graph, *, settings: Sequence[str] = ()) -> RenderableType:
    """Counts of a graph: ops, arithmetic under both conventions, parameters, traffic, and each kind's part."""
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(ratio=1)

    step = ", ".join(f"{n:,} {noun if n != 1 else singular(noun)}" for noun, n in graph.items.items())
    add_row(rows, "Settings", Flow(*settings, graph.precision))
    add_row(rows, "Step", Flow(step, count(sum(op.repeat for op in graph.ops), "op")))
    frozen = graph.parameters - graph.trainable_parameters
    parameters = f"{format_count(graph.parameters)} parameters"
    add_row(
        rows,
        "Parameters",
        Flow(
            f"{graph.parameters:,}",
            format_bytes(graph.parameter_bytes),
            f"{format_count(frozen)} frozen" if frozen and graph.mode == "train" else None,
        )
        if graph.parameters
        else parameters,
    )
    add_row(rows, "Arithmetic", Flow(format_flops(graph.flops()), f"{graph.macs():,} multiply-adds"))
    by_norms = graph.macs("fvcore")
    if by_norms != graph.macs():
        add_row(rows, "", Flow(f"{by_norms:,} multiply-adds with normalisation, as fvcore counts"))
    phases = [phase for phase in PHASES if any(op.phase == phase for op in graph.ops)]
    if len(phases) > 1:
        add_row(rows, "", Flow(*(f"{phase} {format_flops(graph.flops(phase=phase))}" for phase in phases)))
    read = sum(op.bytes_read * op.repeat for op in graph.ops)
    written = sum(op.bytes_written * op.repeat for op in graph.ops)
    add_row(rows, "Traffic", Flow(f"{format_bytes(read)} read", f"{format_bytes(written)} written"))
    add_row(rows, "", "")
    add_row(rows, "By kind", _kinds(graph))
    if graph.not_counted:
        add_row(rows, "", "")
        add_row(rows, "Not counted", Text(not_counted_text(graph.not_counted)))
    return Framed(f"{graph.name} · {graph.mode}", rows)


def _kinds(graph: Graph) -> RenderableType:
    totals: dict[str, list[int]] = {}
    for op in graph.ops:
        total = totals.setdefault(op.kind, [0, 0, 0])
        for i, value in enumerate((1, op.flops, op.bytes_read + op.bytes_written)):
            total[i] += value * op.repeat
    traffic = sum(total[2] for total in totals.values())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("kind", no_wrap=True)
    table.add_column("ops", justify="right")
    table.add_column("arithmetic", justify="right", no_wrap=True)
    table.add_column("traffic", justify="right", no_wrap=True)
    table.add_column("of all traffic", no_wrap=True)
    for kind, (ops, flops, nbytes) in sorted(totals.items(), key=lambda item: (-item[1][1], -item[1][2], item[0])):
        part = nbytes / traffic if traffic else 0.0
        add_row(
            table,
            kind,
            f"{ops:,}",
            format_flops(flops) if flops else "",
            format_bytes(nbytes) if nbytes else "",
            Bar(part, 14),
        )
    return table


def op_table(graph: Graph) -> RenderableType:
    """Every op of a graph with its index, in the order they run."""
    return _Ops(graph, range(len(graph.ops)))


def dearest_ops(graph: Graph, estimate: Estimate, limit: int = 20) -> RenderableType:
    """The ops that take longest on the estimate's device, dearest first, with what limits each."""
    times = estimate.ops.time_s
    order = sorted(range(len(graph.ops)), key=lambda i: (-times[i], i))[:limit]
    shown = f"the {len(order)} dearest of {count(len(graph.ops), 'op')}; explain one with --op #"
    return Group(
        Text(f"{graph.name} · {graph.mode} on {estimate.device}", style="bold"),
        Text(""),
        _Ops(graph, order, estimate),
        Text(""),
        Text(shown, style="dim"),
    )


_LEAST_MODULE = 14


class _Ops:
    """Rows of ops; shapes and modules give way where the console is narrow."""

    def __init__(self, graph: Graph, order: Sequence[int], estimate: Estimate | None = None) -> None:
        self.graph = graph
        self.order = order
        self.estimate = estimate

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        graph, estimate = self.graph, self.estimate
        width = options.max_width
        trains = any(graph.ops[i].phase != "forward" for i in self.order)
        gap = 2 if width >= 100 else 1
        heads = ["#", "op", *(["phase"] if trains else [])]
        heads += ["writes", "FLOP", "bytes", "module"] if estimate is None else ["time", "share", "bound by", "module"]
        rows: list[list[str]] = []
        for i in self.order:
            op = graph.ops[i]
            name = short_name(op.name) + (f" ×{op.repeat}" if op.repeat > 1 else "")
            cells = [str(i), tail(name, max(18, width // 4))]
            if trains:
                cells.append(op.phase)
            if estimate is None:
                flops = format_count(op.flops * op.repeat) if op.flops else ("" if op.counted else "?")
                moved = (op.bytes_read + op.bytes_written) * op.repeat
                cells += [shape_text(graph, op), flops, format_bytes(moved) if moved else ""]
            else:
                time_s = float(estimate.ops.time_s[i])
                part = time_s / estimate.time_s if estimate.time_s > 0 else 0.0
                cells += [format_time(time_s), share(part), BOUNDS[int(estimate.ops.bound[i])]]
            rows.append([*cells, op.module])
        room = {head: max(len(head), *(len(row[at]) for row in rows), 0) for at, head in enumerate(heads)}
        room["module"] = min(room["module"], max(_LEAST_MODULE, width // 4))
        # Numbers are never cut; the rest gives way in turns.
        for head, least in (("op", 16), ("module", 14), ("writes", 16), ("op", 14), ("writes", 8), ("module", 8)):
            over = sum(room.values()) + gap * len(room) - width
            if head in room and over > 0:
                room[head] = max(min(least, room[head]), room[head] - over)
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for head in heads:
            right = head in ("#", "FLOP", "bytes", "time", "share")
            table.add_column(head, justify="right" if right else "left", no_wrap=True, width=room[head])
        for row in rows:
            shown = dict(zip(heads, row, strict=True))
            shown["op"], shown["module"] = tail(shown["op"], room["op"]), tail(shown["module"], room["module"])
            if "writes" in shown:
                shown["writes"] = shorten(shown["writes"], room["writes"])
            add_row(table, *shown.values())
        yield table
