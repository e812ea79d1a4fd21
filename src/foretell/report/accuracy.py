"""How well predictions agree with measurements: a row a slice, and what could not be predicted."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foretell.accuracy import Report, Score, SliceResult, TableResult
from foretell.report.text import add_row, count, shorten

__all__ = ["accuracy_view"]

_WIDE = 120  # cells from which a slice and its figures share a line

# Heading → what stands under it. Errors are |predicted / measured - 1|, the bias keeps the sign.
_COLUMNS: tuple[tuple[str, Callable[[Score], str]], ...] = (
    ("n", lambda s: f"{s.n:,}"),
    ("median", lambda s: f"{s.median:.1%}"),
    ("mean", lambda s: f"{s.mean:.1%}"),
    ("90th", lambda s: f"{s.p90:.1%}"),
    ("bias", lambda s: f"{s.bias:+.1%}"),
    ("covered", lambda s: f"{s.coverage:.0%}"),
    ("width", lambda s: f"{s.width:.2f}"),
    ("failed", lambda s: f"{s.failed:,}"),
)
_LEGEND = (
    "Errors are |predicted / measured - 1| of the step time: median, mean and 90th percentile. Bias keeps the sign. "
    "Covered: measurements inside the 80 % interval. Width: the interval's high end over its low end."
)


def accuracy_view(report: Report) -> RenderableType:
    """A table of the scores of `report`, then why rows failed and which slices' files are not there."""
    parts: list[RenderableType] = [_Scores(report), Text("")]
    parts.append(Text(_LEGEND, style="dim"))
    failures: dict[str, int] = {}
    for result in report.results:
        for reason, times in result.failures.items():
            failures[reason] = failures.get(reason, 0) + times
    if failures:
        parts += [Text(""), Text("Not predicted", style="bold")]
        for reason, times in failures.items():
            parts.append(Text(f"{times:>5,}  {textwrap.shorten(reason, 300, placeholder=' …')}"))
    if report.absent:
        left = f"{count(len(report.absent), 'slice')} left out, the data folder lacks their files: "
        parts += [Text(""), Text(left + ", ".join(report.absent))]
    if report.interrupted:
        parts += [Text(""), Text("Interrupted: the figures are of what was done; run again to go on.", style="bold")]
    return Group(*parts)


class _Scores:
    """The table; in a narrow console a slice's name, being long, has a line of its own above its figures."""

    def __init__(self, report: Report) -> None:
        self.rows = [(_name(result), _cells(result)) for result in report.results]
        scores = [result.score for result in report.results if result.score is not None]
        if len(scores) > 1:
            self.rows.append((f"mean of {len(scores)} slices", [show(_mean(scores)) for _, show in _COLUMNS]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("slice" if wide else "", no_wrap=True)
        for heading, _ in _COLUMNS:
            table.add_column(heading, justify="right", no_wrap=True)
        for name, cells in self.rows:
            add_row(table, name if wide else "", *cells)
        if wide:
            yield table
            return
        # Drawn as one table, so that columns line up; then each line gets its name above it.
        header, *lines = console.render_lines(table, options, pad=False)
        for name, line in zip(("slice", *(name for name, _ in self.rows)), (header, *lines), strict=True):
            yield Text(shorten(name, options.max_width), style="bold" if line is header else "")
            yield Text("".join(segment.text for segment in line))


def _mean(scores: Sequence[Score]) -> Score:
    def mean(name: str) -> float:
        return float(sum(getattr(score, name) for score in scores) / len(scores))

    return Score(
        n=sum(score.n for score in scores),
        failed=sum(score.failed for score in scores),
        **{name: mean(name) for name in ("median", "mean", "p90", "bias", "coverage", "width")},
    )


def _name(result: SliceResult | TableResult) -> str:
    return result.name + ("" if result.complete else " (stopped)")


def _cells(result: SliceResult | TableResult) -> list[str]:
    score = result.score
    if score is None:
        return ["0", *[""] * (len(_COLUMNS) - 2), f"{sum(result.failures.values()):,}"]
    return [show(score) for _, show in _COLUMNS]
