"""Occupancy for reading: one launch in full, or a row for each kernel of a file."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foretell.cost.binaries import short_name
from foretell.cost.launches import Launch
from foretell.report.text import Bar, Flow, add_row, count, share, shorten
from foretell.units import format_bytes

__all__ = ["launch_table", "launch_view"]

_NAMES = {"warps": "warps", "registers": "registers", "shared": "shared memory", "blocks": "blocks"}
_NAMES |= {"barriers": "barriers", "launch bounds": "launch bounds"}
_BRIEF = {"shared": "shared"}


def launch_view(launch: Launch) -> RenderableType:
    """What is resident, what limits it, what would lift it, and what the grid makes of it."""
    one = launch.calculation
    head = Table.grid(padding=(0, 2))
    head.add_column(no_wrap=True, style="bold")
    head.add_column(no_wrap=True, justify="right")
    head.add_column()
    resident = f"{count(one.blocks, 'block')}, {one.warps} of {one.max_warps} warps a multiprocessor"
    head.add_row("theoretical", share(one.occupancy), Bar(one.occupancy))
    head.add_row("", "", resident)
    if launch.achieved is not None and launch.grid is not None:
        low, high = launch.achieved_interval or (launch.achieved, launch.achieved)
        head.add_row("achieved", share(launch.achieved), Bar(launch.achieved))
        head.add_row("", "", f"{share(low)} to {share(high)} in 80 % of kernels")
        head.add_row("", "", f"grid of {count(launch.grid, 'block')}, {launch.waves:.3g} waves")
    parts: list[RenderableType] = [
        Text(f"Occupancy on {launch.place}", style="bold"),
        Flow(
            launch.name and short_name(launch.name),
            count(one.registers, "register"),
            f"{format_bytes(one.shared_bytes)} shared memory",
            f"blocks of {count(one.block, 'thread')}",
            f"{count(one.barriers, 'barrier')}" if one.barriers else None,
        ),
        Text(""),
        head,
        Text(""),
        _limits(launch),
    ]
    if one.changes:
        lifts = Table.grid(padding=(0, 2))
        lifts.add_column(no_wrap=True)
        lifts.add_column(no_wrap=True, justify="right")
        lifts.add_column()
        for change in one.changes:
            lifts.add_row(f"  {change.text}", share(change.occupancy), f"{count(change.blocks, 'block')}")
        parts += [Text(""), Text("Would lift it, all else as it is", style="bold"), lifts]
    elif one.blocks:
        parts += [Text(""), Text("No change of registers, shared memory or block alone would lift it.")]
    if one.carveout_bytes is not None and one.l1_bytes is not None and one.blocks:
        text = f"{format_bytes(one.carveout_bytes)} configured as shared memory hold these blocks"
        parts += [Text(""), Text(f"{text}; {format_bytes(one.l1_bytes)} are left to the L1 cache.", style="dim")]
    if one.shared_bytes > 48 << 10 and one.blocks:
        parts.append(Text("More than 48 KiB a block must be dynamic and asked for: cudaFuncSetAttribute.", style="dim"))
    return Group(*parts)


def _limits(launch: Launch) -> RenderableType:
    one = launch.calculation
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_row(Text("Limit", style="bold"), Text("blocks", style="bold"), "")
    for cause, blocks in one.limits.items():
        limiting = cause in one.limiting
        table.add_row(
            Text(f"  {_NAMES[cause]}"), Text(f"{blocks}"), Text("◀ limits" if limiting else "", style="yellow")
        )
    return table


def launch_table(launches: Sequence[Launch]) -> RenderableType:
    """A row a kernel, by the place it would run on: resources, occupancy, the limit, and the least change."""
    return _Launches(tuple(launches))


class _Launches:
    """The table; names of kernels give way where the console is narrow."""

    def __init__(self, launches: tuple[Launch, ...]) -> None:
        self.launches = launches

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with_grid = any(launch.achieved is not None for launch in self.launches)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("\nkernel", no_wrap=True)
        for name in ("\nregs", "\nshared", "\nblock", "occu-\npancy"):
            table.add_column(name, justify="right", no_wrap=True)
        if with_grid:
            table.add_column("achie-\nved", justify="right", no_wrap=True)
        table.add_column("limited\nby", no_wrap=True)
        table.add_column("would\nlift it", no_wrap=True)
        rows = [(launch, self._cells(launch)) for launch in self.launches]
        fixed = [max([6, *(len(cells[i]) for _, cells in rows)]) for i in range(7)]
        used = sum(fixed) - (0 if with_grid else fixed[4]) + 8
        width = max(12, options.max_width - used)
        place = None
        for launch, cells in rows:
            if launch.place != place:
                place = launch.place
                if table.row_count:
                    table.add_row()
                add_row(table, Text(shorten(place, width), style="bold cyan"))
            name = short_name(launch.name or "")
            if not with_grid:
                cells = (*cells[:4], *cells[5:])
            add_row(table, shorten(f"  {name}", width), *cells)
        yield table

    @staticmethod
    def _cells(launch: Launch) -> tuple[str, ...]:
        one = launch.calculation
        causes = [_BRIEF.get(cause, cause) for cause in one.limiting]
        lift = ""
        if one.changes:
            change = one.changes[0]
            what = {"registers": "≤{} regs", "shared": "≤{} shared", "block": "block {}"}[change.knob]
            value = format_bytes(change.value) if change.knob == "shared" else str(change.value)
            lift = f"{what.format(value)}: {share(change.occupancy)}"
        return (
            str(one.registers),
            format_bytes(one.shared_bytes),
            str(one.block),
            share(one.occupancy) if one.blocks else "none",
            "" if launch.achieved is None else share(launch.achieved),
            causes[0] + ("+" if len(causes) > 1 else "") if causes else "",
            lift,
        )
