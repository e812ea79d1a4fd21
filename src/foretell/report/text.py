"""Small pieces of text that every report is made of: bars, shares, rates, shortened paths."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from foretell.units import format_count, format_time

__all__ = [
    "UNKNOWN",
    "Bar",
    "Flow",
    "Framed",
    "add_row",
    "count",
    "interval",
    "not_counted_text",
    "rate",
    "share",
    "shorten",
    "singular",
    "tail",
]

#: What stands where a figure is not known: a dash would read as zero.
UNKNOWN = "unknown"


class Bar:
    """`share` (0 to 1) of a track, at most `width` cells long; beyond 1 it is full and ends in ``▶``.

    Length alone carries the meaning, so it reads the same without colour. It does not fill the height of its line, so
    that bars below each other stay apart. On a terminal that has only ASCII it is drawn with ``#`` and ``.``.
    """

    def __init__(self, share: float, width: int = 24, style: str = "cyan") -> None:
        self.share = share
        self.width = width
        self.style = style

    def text(self, width: int, ascii_only: bool = False) -> tuple[str, str]:
        """The filled part and the rest of the track; together `width` cells."""
        share = 0.0 if math.isnan(self.share) else max(0.0, self.share)
        line, half, dot, over = ("#", "", ".", ">") if ascii_only else ("━", "╸", "·", "▶")
        if share > 1.0:
            return line * (width - 1) + over, ""
        halves = max(round(2 * share * width), 1 if share > 0.0 else 0)  # what is there must be seen
        filled = line * (halves // 2) + (half or line) * (halves % 2)
        return filled, dot * (width - len(filled))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        filled, rest = self.text(min(self.width, options.max_width), options.ascii_only)
        yield Segment(filled, Style.parse(self.style))
        yield Segment(rest, Style(dim=True))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, self.width), self.width).with_maximum(options.max_width)


class Flow:
    """Parts in a row with a dot between them, broken across lines only between parts."""

    def __init__(self, *parts: str | Text | None, separator: str = " · ") -> None:
        self.parts = [Text(part) if isinstance(part, str) else part for part in parts if part]
        self.separator = separator

    def lines(self, width: int) -> list[Text]:
        """The rows that `width` cells take."""
        rows: list[Text] = []
        for part in self.parts:
            if rows and rows[-1].cell_len + len(self.separator) + part.cell_len <= width:
                rows[-1] = Text.assemble(rows[-1], (self.separator, "dim"), part)
            else:
                rows.append(part)
        return rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        lengths = [part.cell_len for part in self.parts] or [0]
        whole = sum(lengths) + len(self.separator) * (len(lengths) - 1)
        return Measurement(max(lengths), whole).with_maximum(options.max_width)


class Framed:
    """`body` in a frame on a terminal; under a plain heading where output is piped or kept, so that it can be searched.

    Never wider than `limit`: long lines of numbers are hard to follow.
    """

    def __init__(self, title: str, body: RenderableType, footer: str = "", limit: int = 100) -> None:
        self.title = title
        self.body = body
        self.footer = footer
        self.limit = limit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, self.limit)
        if console.is_terminal:
            yield Panel(
                self.body,
                title=Text(shorten(self.title, width - 6), style="not dim bold"),
                title_align="left",
                subtitle=Text(shorten(self.footer, width - 6), style="dim") if self.footer else None,
                subtitle_align="right",
                border_style="dim",
                padding=(1, 2),
                width=width,
            )
            return
        yield Text(self.title)
        yield Text("")
        yield from console.render(self.body, options.update(width=width))
        if self.footer:
            yield Text("")
            yield Text(self.footer)


def add_row(table: Table, *cells: RenderableType, style: str | None = None) -> None:
    """Add a row whose strings are taken as they are: names and sources may hold what rich would read as markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def share(value: float) -> str:
    """A share of one as per cent: two significant digits below ten, none lost at the ends.

    >>> share(0.4213), share(0.0213), share(0.0004), share(0.0), share(1.0)
    ('42 %', '2.1 %', '< 0.1 %', '0 %', '100 %')
    """
    if value != value:
        return UNKNOWN
    percent = 100.0 * value
    if percent == 0.0:
        return "0 %"
    if percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if percent < 9.95 else f"{percent:.0f} %"


def rate(value: float) -> str:
    """A throughput: whole numbers with separators from 100 up, three significant digits below.

    >>> rate(2735.4), rate(31.416), rate(0.01234), rate(1.2e9)
    ('2,735', '31.4', '0.0123', '1.2 G')
    """
    if not math.isfinite(value):
        return UNKNOWN
    if value >= 1e7:
        return format_count(value)
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def interval(low_s: float, high_s: float) -> str:
    """Two times in few cells; a unit they share is said once.

    >>> interval(16e-3, 28.4e-3), interval(0.9e-3, 1.2)
    ('16–28.4 ms', '900 µs–1.2 s')
    """
    low, high = format_time(low_s), format_time(high_s)
    if low.count(" ") == high.count(" ") == 1 and low.split(" ")[1] == high.split(" ")[1]:
        low = low.split(" ")[0]
    return f"{low}–{high}"


def count(number: int, noun: str) -> str:
    """A number with its noun: ``count(1, "op")`` is ``'1 op'``, ``count(1200, "op")`` is ``'1,200 ops'``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def singular(noun: str) -> str:
    """``images`` → ``image``: what one of the `items` of a step is called."""
    if noun.endswith("ies"):
        return noun[:-3] + "y"
    return noun[:-1] if noun.endswith("s") and not noun.endswith("ss") else noun


def shorten(text: str, width: int) -> str:
    """At most `width` cells of `text`; the end gives way."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def tail(path: str, width: int) -> str:
    """At most `width` cells of a dotted path; its beginning gives way, being shared by most modules.

    >>> tail("model.layers.31.self_attn.q_proj", 20)
    '…31.self_attn.q_proj'
    """
    return path if len(path) <= width else "…" + path[len(path) - max(0, width - 1) :]


def middle(name: str, width: int) -> str:
    """At most `width` cells of a name; its middle gives way, as devices of a family differ at their ends.

    >>> middle("rtx-pro-6000-workstation", 12)
    'rtx-pr…ation'
    """
    if len(name) <= width:
        return name
    end = max(0, width - 1) // 2
    return name[: max(0, width - 1 - end)] + "…" + name[len(name) - end :]


def not_counted_text(not_counted: Mapping[str, int]) -> str:
    """One sentence of what a figure leaves out: ops without a rule (with how often they run), then the rest by name."""
    ops = [f"{name} ×{times}" for name, times in not_counted.items() if times > 0]
    rest = [name for name, times in not_counted.items() if times == 0]
    sentences = []
    if ops:
        sentences.append("arithmetic of " + ", ".join(ops))
    if rest:
        sentences.append("; ".join(rest))
    return "; ".join(sentences)
