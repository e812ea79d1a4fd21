"""Pipelines for reading: one step drawn rank by rank, and schedules side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from foretell.report.text import Flow, count, share
from foretell.simulate.pipeline import Simulation
from foretell.units import format_bytes, format_time

__all__ = ["Gantt", "pipeline_table", "pipeline_view"]

#: How a task of each kind is drawn, here and on a terminal that has only ASCII; and what else a cell may hold.
_CELLS = {"F": ("░", "F", "cyan"), "B": ("█", "B", "blue"), "W": ("▒", "W", "magenta"), "send": ("╌", "-", "yellow"),
          "": (" ", ".", "")}  # fmt: skip
_MEANING = {"F": "forward", "B": "backward", "W": "gradients of weights", "send": "kept by a send"}
#: Ranks drawn; of more, some at equal distances.
_MOST_ROWS = 32


class Gantt:
    """One rank's step on a line: what it does, cell by cell.

    Where tasks are shorter than a cell, each kind gets as many cells as its share of the time, near to where it ran.
    """

    def __init__(self, simulation: Simulation, rank: int, width: int = 60) -> None:
        self.simulation = simulation
        self.rank = rank
        self.width = width

    def cells(self, width: int) -> list[str]:
        """For each of `width` equal slices of the step a kind of task, ``send``, or nothing."""
        s = self.simulation
        mine = s.tasks(self.rank)
        if not s.overlap_p2p:
            mine |= (s.rank == self.rank) & np.isin(s.kind, [3, 4])
        kinds = ["F", "B", "W", "send"]
        spent = np.zeros((width, len(kinds) + 1))
        scale = width / s.step_s if s.step_s > 0 else 0.0
        order = np.flatnonzero(mine)
        columns = (s.kind[order], s.start_s[order] * scale, s.end_s[order] * scale)
        for kind, start, end in zip(*(column.tolist() for column in columns), strict=True):
            code = min(kind, 3)
            first, last = int(start), min(int(end), width - 1)
            for cell in range(first, last + 1):
                spent[cell, code] += max(0.0, min(end, cell + 1) - max(start, cell))
        spent[:, -1] = np.maximum(0.0, 1.0 - spent[:, :-1].sum(axis=1))
        owed = np.zeros(len(kinds) + 1)
        shown = []
        for slice_ in spent:
            owed += slice_
            # What was not drawn may be drawn a little later, but not long after it has ended.
            best = int(np.argmax(np.where(slice_ > 1e-9, owed, -np.inf)))
            owed[best] -= 1.0
            owed = np.clip(owed, -1.0, 1.0)
            shown.append([*kinds, ""][best])
        return shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = self.cells(max(1, min(self.width, options.max_width)))
        start = 0
        for end in range(1, len(cells) + 1):
            if end == len(cells) or cells[end] != cells[start]:
                full, plain, style = _CELLS[cells[start]]
                yield Segment((plain if options.ascii_only else full) * (end - start), Style.parse(style or "none"))
                start = end

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(16, self.width), self.width).with_maximum(options.max_width)


class _Legend:
    """Which shading stands for what."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = kinds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        at = 1 if options.ascii_only else 0
        parts = [Text.assemble((_CELLS[k][at] * 2, _CELLS[k][2]), f" {_MEANING[k]}") for k in self.kinds]
        yield from Flow(*parts).lines(options.max_width)


def pipeline_view(
    simulation: Simulation, settings: Sequence[str] = (), activation_bytes: Sequence[float] | None = None
) -> RenderableType:
    """One step: its length, what it is made of, and every rank over time.

    `activation_bytes` are those that each rank holds at its peak, where they are known.
    """
    s = simulation
    pp, vp = s.times.pp, s.times.vp
    head = [
        count(pp, "rank"),
        f"{vp} chunks each" if vp > 1 else None,
        _batches(s.micro_batches),
        *settings,
    ]
    figures = Table.grid(padding=(0, 2))
    figures.add_column()
    figures.add_column(justify="right")
    figures.add_column()
    figures.add_row("step", Text(format_time(s.step_s), style="bold"), "")
    figures.add_row("bubble", share(s.bubble), "of the step idle, mean over ranks")
    if s.p2p_exposed_s or s.times.p2p_s.any():
        how = "messages between stages that nothing hides"
        figures.add_row("exposed p2p", format_time(s.p2p_exposed_s), how)
    if s.dp_exposed_s or s.times.gather_s.any() or s.times.reduce_s.any():
        figures.add_row("exposed dp", format_time(s.dp_exposed_s), "gathers and reductions that nothing hides")
    held = s.peak_in_flight.sum(axis=1)
    what = "micro-batches" if vp == 1 else "chunks × micro-batches"
    figures.add_row("in flight", f"{held.max()}", f"{what} on the fullest rank")
    shown = np.unique(np.linspace(0, pp - 1, min(pp, _MOST_ROWS)).round()).astype(int).tolist()
    rows = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    rows.add_column("rank", justify="right", no_wrap=True, min_width=4)
    rows.add_column("one step", no_wrap=True)
    rows.add_column("idle", justify="right", no_wrap=True, min_width=5)
    rows.add_column("held", justify="right", no_wrap=True, min_width=4)
    if activation_bytes is not None:
        rows.add_column("memory", justify="right", no_wrap=True, min_width=8)
    for rank in shown:
        idle = float(s.bubble_s[rank]) / s.step_s if s.step_s else 0.0
        memory = [] if activation_bytes is None else [format_bytes(activation_bytes[rank])]
        width = 60 if activation_bytes is None else 52
        rows.add_row(str(rank), Gantt(s, rank, width), share(max(0.0, idle)), str(held[rank]), *memory)
    drawn = list(s.schedule.kinds) + (["send"] if s.send_s.any() else [])
    lines: list[RenderableType] = [Text(s.schedule.title, style="bold"), Flow(*head), Text(""), figures, Text("")]
    lines += [rows, _Legend(drawn)]
    if len(shown) < pp:
        lines.append(Text(f"{len(shown)} of {pp} ranks are drawn", style="dim"))
    if activation_bytes is not None:
        lines.append(Text("memory: activations at the rank's peak · not in the step: the exchange between data-parallel"
                          " ranks, the optimiser", style="dim"))
    lines += [Text(""), Text(s.schedule.source, style="dim")]
    return Group(*lines)


def pipeline_table(found: Sequence[Simulation], refused: Sequence[tuple[str, str]] = ()) -> RenderableType:
    """Schedules side by side, fastest first; `refused` are names of others, and why they cannot be had."""
    ordered = sorted(found, key=lambda s: float(f"{s.step_s:.9g}"))  # equal ones stay as they are listed
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("schedule", no_wrap=True)
    for name in ("vp", "step", "bubble", "exposed", "in flight", "slower"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in ordered:
        slower = s.step_s / ordered[0].step_s - 1 if ordered[0].step_s else 0.0
        exposed = s.p2p_exposed_s + s.dp_exposed_s
        table.add_row(
            s.schedule.name,
            str(s.times.vp),
            format_time(s.step_s),
            share(s.bubble),
            format_time(exposed) if exposed else "none",
            f"{(s.peak_in_flight.sum(axis=1) / s.times.vp).max():.3g}",
            "" if s is ordered[0] else share(slower),
        )
    first = found[0]
    lines: list[RenderableType] = [
        Text("Pipeline schedules", style="bold"),
        Flow(count(first.times.pp, "rank"), _batches(first.micro_batches)),
        Text(""),
        table,
        Text(""),
        Text("in flight: most micro-batches whose activations one rank holds, of all its layers", style="dim"),
    ]
    lines += [Text(f"· {name}: {why}", style="dim") for name, why in refused]
    return Group(*lines)


def _batches(number: int) -> str:
    return f"{number:,} micro-batch{'' if number == 1 else 'es'}"
