"""A comparison for reading and for other programs: a table, CSV, JSON, Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foretell.compare import COLUMNS, Comparison, Row
from foretell.errors import ForetellError, InputError, unknown
from foretell.report.documents import json_text
from foretell.report.text import add_row, rate, share, shorten
from foretell.units import format_bytes, format_energy, format_money, format_time

__all__ = ["COMPARE_SORT", "FORMATS", "compare_table", "write_table"]

FORMATS: tuple[str, ...] = (".csv", ".json", ".parquet")

# Best first; what is unknown comes last.
_SORT: Mapping[str, Callable[[Row], float | None]] = {
    "time": lambda r: r.time_s,
    "speed": lambda r: None if r.throughput_per_s is None else -r.throughput_per_s,
    "memory": lambda r: r.memory_bytes,
    "energy": lambda r: r.energy_j_per_item,
    "price": lambda r: r.usd_per_million,
}
COMPARE_SORT: tuple[str, ...] = ("asked", *_SORT)

# What goes first where not every column fits.
_DISPENSABLE = ("MFU", "energy", "time")
_LEAST = 14


def _lacks_framework(name: str) -> bool:
    """Whether what the framework itself takes is unknown on a device, which its memory then lacks."""
    from foretell.cost.memory import framework_bytes
    from foretell.hardware import device

    try:
        return framework_bytes(device(name)) == 0
    except ForetellError:  # a device of the caller's own
        return False


def _sorted(rows: Sequence[Row], by: str) -> list[Row]:
    if by not in COMPARE_SORT:
        raise unknown("sort key", by, COMPARE_SORT)
    if by == "asked":
        return list(rows)

    def rank(row: Row) -> tuple[bool, float]:
        value = _SORT[by](row)
        return value is None, 0.0 if value is None else value

    return sorted(rows, key=rank)


def compare_table(result: Comparison, *, sort: str = "asked", top: int | None = None) -> RenderableType:
    """A table, a row a combination; ● marks the Pareto front. `top` cuts it after that many rows."""
    rows = _sorted(result.rows, sort)
    shown = rows if top is None else rows[:top]
    lines: list[RenderableType] = [_Rows(shown)]
    axes = ", ".join(result.axes)
    foot = f"● no other row of the workload is as good in every of {axes} and better in one"
    if any(row.fits is False for row in shown):
        foot += "; dim rows do not fit"
    if any(row.pareto for row in shown):
        lines += [Text(""), Text(foot, style="dim")]
    bare = sorted({row.device for row in shown if not row.problem and _lacks_framework(row.device)})
    if bare and len(bare) < len({row.device for row in shown}):
        lines.append(Text(f"memory of {', '.join(bare)} is without the framework's own, unknown there", style="dim"))
    if len(shown) < len(rows):
        lines.append(Text(f"{len(rows) - len(shown)} more rows; --top 0 shows all", style="dim"))
    if result.reused:
        lines.append(Text(f"{result.reused} of {len(result.rows)} rows are from an earlier run", style="dim"))
    if result.interrupted:
        lines.append(Text("Interrupted: the same command goes on from here"))
    return Group(*lines)


class _Rows:
    """The table: as many columns as the console holds uncut."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self.rows
        word = {True: "yes", False: "no", None: "?"}

        def cells(name: str, show: Callable[[Any], str]) -> list[str]:
            values = [getattr(row, name) for row in rows]
            return ["" if r.problem else "?" if v is None else show(v) for r, v in zip(rows, values, strict=True)]

        items = {row.item for row in rows if row.item}
        noun = next(iter(items)) if len(items) == 1 else "items"
        columns: dict[str, list[str]] = {
            "": ["●" if row.pareto else " " for row in rows],
            "workload": [row.workload for row in rows],
            "device": [row.device for row in rows],
            "precision": [row.precision for row in rows],
            "batch": [f"{row.batch:,}" for row in rows],
            "time": cells("time_s", format_time),
            f"{noun}/s": cells("throughput_per_s", rate),
            "memory": cells("memory_bytes", format_bytes),
            "fits": ["" if row.problem else word[row.fits] for row in rows],
            "MFU": cells("mfu", share),
            "energy": cells("energy_j_per_item", format_energy),
            "$/M": cells("usd_per_million", format_money),
        }
        said = []
        for name in ("workload", "precision", "batch", "device"):  # what is the same everywhere is said once
            if rows and len(set(columns[name])) == 1 and len(rows) > 1:
                said.append(f"{name} {columns.pop(name)[0]}")
        width = {name: max(map(len, (name, *values))) for name, values in columns.items()}
        for name in _DISPENSABLE:
            if sum(w + 1 for w in width.values()) > options.max_width:
                width.pop(name)
                columns.pop(name)
        for name in ("workload", "device"):
            over = sum(w + 1 for w in width.values()) - options.max_width
            if over > 0 and name in width:
                width[name] = max(min(width[name], _LEAST), width[name] - over)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in columns:
            left = name in ("", "workload", "device", "precision")
            table.add_column(name, justify="left" if left else "right", no_wrap=True, width=width[name])
        for i, row in enumerate(rows):
            values = [shorten(columns[name][i], width[name]) for name in columns]
            add_row(table, *values, style="dim" if row.fits is False else None)
        if said:
            yield Text(" · ".join(said), style="bold")
            yield Text("")
        yield table
        problems = {row.problem: f"{row.workload} {row.precision} on {row.device}" for row in reversed(rows)}
        problems.pop("", None)
        for problem, where in reversed(problems.items()):
            yield Text(f"{where}: {problem}")


def write_table(result: Comparison, path: Path) -> None:
    """Write all rows as CSV, JSON or Parquet, by the file's ending, whole or not at all.

    Raises InputError for another ending or a file that cannot be written, ForetellError where Parquet's library is
    missing.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise InputError(f"{path.name!r} names no kind of table", "--out", f"end the name in {', '.join(FORMATS)}")
    data = {".csv": _csv, ".json": _json, ".parquet": _parquet}[suffix](result)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", str(path), "give another file") from error


def _csv(result: Comparison) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in result.to_dicts():
        writer.writerow({name: _plain(value) for name, value in row.items()})
    return text.getvalue().encode()


def _plain(value: Any) -> Any:
    """A cell no spreadsheet takes for a formula."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return value


def _json(result: Comparison) -> bytes:
    return json_text(result.to_dict()).encode() + b"\n"


def _parquet(result: Comparison) -> bytes:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ForetellError(f"Parquet needs pyarrow ({error})", "pip install 'foretell[tables]'") from error
    kinds = {"str": arrow.string(), "int": arrow.int64(), "float": arrow.float64(), "bool": arrow.bool_()}
    types = {name: kinds[str(kind).partition(" ")[0]] for name, kind in Row.__annotations__.items()}
    rows = result.to_dicts()
    table = arrow.table({name: arrow.array([row[name] for row in rows], types[name]) for name in COLUMNS})
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())
