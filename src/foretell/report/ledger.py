"""The ledger of claims: all of them as a table, or some in full."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foretell.claims import VERDICTS, Claim
from foretell.report.text import add_row, count
from foretell.units import format_time

__all__ = ["claims_in_full", "claims_table"]

_STYLES = {"reproduced": "green", "partly": "yellow", "not reproduced": "red", "not tried": "dim"}
_WIDE = 110  # cells from which titles are shown
_WIDEST = 150


def claims_table(claims: Sequence[Claim]) -> RenderableType:
    """A row a claim: what is claimed, what is obtained, how, and the verdict; then how many of each verdict."""
    return Group(_Table(claims), Text(""), Text(_summary(claims), style="bold"))


class _Table:
    """The table, by system. What a claim says in words needs a wide console; its name says it in brief."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        self.claims = claims

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST)
        wide = width >= _WIDE
        table = Table(box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0), header_style="bold", expand=True)
        table.add_column("claim", no_wrap=True)
        if wide:
            table.add_column("", ratio=5)
        table.add_column("claimed", ratio=3)
        table.add_column("obtained", ratio=4)
        table.add_column("verdict", no_wrap=True)
        system = None
        for claim in self.claims:
            if claim.system != system:
                if system is not None:
                    table.add_row()
                system = claim.system
                add_row(table, Text(system, style="bold cyan"))
            got = f"{claim.obtained.text}, {claim.how}" if claim.obtained else ""
            name = f"  {claim.id.removeprefix(f'{system}/')}"
            title = [claim.title] if wide else []
            add_row(table, name, *title, claim.claimed.text, got, _verdict(claim))
        yield from console.render(table, options.update(width=width))


def claims_in_full(claims: Sequence[Claim]) -> RenderableType:
    """All that is known of each claim: where it stands, its setting, how the verdict follows, when it was obtained."""
    parts: list[RenderableType] = []
    for claim in claims:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(max_width=100)
        add_row(rows, "Source", str(claim.source))
        add_row(rows, "Setting", claim.setting)
        add_row(rows, "Metric", claim.metric)
        add_row(rows, "Claimed", claim.claimed.text)
        add_row(rows, "Obtained", f"{claim.obtained.text}, {claim.how}" if claim.obtained else "not tried")
        add_row(rows, "Verdict", Text.assemble(_verdict(claim), (f": {claim.rule.text}", "dim")))
        if claim.note:
            add_row(rows, "Note", claim.note)
        if claim.record is not None:
            versions = ", ".join(f"{name} {version}" for name, version in claim.record.versions.items())
            add_row(rows, "Obtained on", f"{claim.record.date} in {format_time(claim.record.took_s)}; {versions}")
            add_row(rows, "By", claim.record.command)
        parts += [Text(claim.title, style="bold"), Text(claim.id, style="dim"), rows, Text("")]
    return Group(*parts, Text(_summary(claims), style="bold"))


def _verdict(claim: Claim) -> Text:
    return Text(claim.verdict, style=_STYLES[claim.verdict])


def _summary(claims: Sequence[Claim]) -> str:
    found = [claim.verdict for claim in claims]
    counts = [f"{found.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in found]
    systems = count(len({claim.system for claim in claims}), "system")
    return f"{count(len(claims), 'claim')} of {systems}: " + ", ".join(counts)
