"""Occupancy for reading: one launch in full, or a row for each kernel of a file."""

from __future__ import annotations

import re
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
_MOST_ROWS = 40
_ACHIEVED = "achie-\nved"
_HEADINGS = ("\nregs", "\nshared", "\nblock", "occu-\npancy", _ACHIEVED, "limited\nby", "would\nlift it")
_BLANK = ("",) * len(_HEADINGS)


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
    """A row a kernel, by the place it would run on: resources, occupancy, the limit, and the least change.

    Those of least occupancy come first; of more than fit a screen or two, the others are counted.
    """
    places: dict[str, list[Launch]] = {}
    for one in sorted(launches, key=lambda one: (one.calculation.occupancy, one.name or "")):
        places.setdefault(one.place, []).append(one)
    return _Launches(tuple(tuple(places[place]) for place in sorted(places, key=_in_order)))


def _in_order(place: str) -> tuple[str | float, ...]:
    """So that 8.0 comes before 12.0."""
    return tuple(float(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+\.\d+)", place)))


class _Launches:
    """The table; names of kernels give way where the console is narrow."""

    def __init__(self, places: tuple[tuple[Launch, ...], ...]) -> None:
        self.places = places

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = max(_MOST_ROWS // max(len(self.places), 1), 5)  # rows of each place
        shown = [(launches[0].place, launches[:most], launches[most:]) for launches in self.places]
        with_grid = any(launch.achieved is not None for _, launches, _ in shown for launch in launches)
        kept = [i for i in range(len(_HEADINGS)) if with_grid or _HEADINGS[i] != _ACHIEVED]
        # Each row with its style: a place, its kernels, and how many more there are.
        rows: list[tuple[str, tuple[str, ...], str | None]] = []
        for place, launches, more in shown:
            if rows:
                rows.append(("", _BLANK, None))
            if len(shown) > 1:
                rows.append((place, _BLANK, "bold cyan"))
            rows += [(f"  {short_name(launch.name or '')}", self._cells(launch), None) for launch in launches]
            if more:
                least = f"≥ {share(more[0].calculation.occupancy)}"
                rows.append((f"  and {len(more):,} more", ("", "", "", least, "", "", ""), "dim"))
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("\nkernel", no_wrap=True)
        used = 0
        for i in kept:
            table.add_column(_HEADINGS[i], justify="right" if i < 5 else "left", no_wrap=True)
            used += 1 + max(map(len, (*_HEADINGS[i].split("\n"), *(cells[i] for _, cells, _ in rows))))
        width = max(12, options.max_width - used)
        for name, cells, style in rows:
            add_row(table, shorten(name, width), *(cells[i] for i in kept), style=style)
        if len(shown) == 1:
            yield Text(shown[0][0], style="bold cyan")
        yield table
        if hidden := sum(len(more) for _, _, more in shown):
            left_out = f"{count(hidden, 'kernel')} {'is' if hidden == 1 else 'are'} not"
            yield Text("")
            yield Text(f"The least occupied are shown, {left_out}; --json has all.", style="dim")

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
