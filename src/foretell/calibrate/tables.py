"""Scales from a table of measurements: factors by kind of operation on the times that a cost model predicts.

A factor is the median of measured over predicted, shrunk towards 1 by how few rows there are; its interval holds 80 %
of the measurements around it (a factor of 2, which is assumed, where there are fewer than four). A table of single
operators gives a factor a kind, a table of whole workloads one for all, or one for training and one for inference.
Columns of a table:

=====================  =============================================================================================
``kind``               operators: matmul, batched_matmul, convolution, attention, pointwise, copy, softmax or
                       normalization, with the columns of that kind:
``m,n,k``              matmul; batched_matmul also ``batch``
``batch,channels,…``   convolution: batch, in_channels, out_channels, height, width, kernel, stride, groups (1)
``batch,heads,…``      attention: batch, heads, queries, keys, depth
``elements``           pointwise, copy
``rows,columns``       softmax, normalization
``workload``           workloads instead of ``kind``: as in ``foretell predict``; ``batch`` (1), ``precision`` (fp32),
                       ``phase`` (inference)
``dtype``              operators: float32 unless given
``time_s``             measured seconds of one run or step
``device``             optional: one device only
=====================  =============================================================================================
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from foretell import documents
from foretell.cost.model import OpTimes, Settings, models
from foretell.cost.program import Program, lower
from foretell.cost.scales import ALL, BY_MODE, LEAST, LIMIT_BYTES, MOST, Factor, Scales, trains
from foretell.errors import ForetellError, InputError, unknown
from foretell.graph import DTYPES, KINDS, OpTable
from foretell.graph.dtypes import is_floating
from foretell.graph.op import Tensor, make_op
from foretell.hardware.device import Device
from foretell.workload.options import DTYPE_SHORT

LIMIT_ROWS = 100_000
_DTYPES = (*filter(is_floating, DTYPES), "int8")  # what the kinds of a table compute in
_MOST_ELEMENTS = 2**40
_SHRINK = 4.0  # a factor of this many rows is half way between 1 and its median
FEW = 4  # so many rows show a range
_BARE = math.log(2.0)  # half-width where there are fewer
_ABSURD = 100.0
_UNITS = {3: "milliseconds", 6: "microseconds", 9: "nanoseconds"}  # by the power of ten a second has
_SHOWN = 5


def factor_of(ratios: Sequence[float]) -> Factor:
    """The factor of measured / predicted `ratios`.

    >>> factor_of([2.0] * 12).mid == 2.0 ** 0.75
    True
    """
    logs = np.log(ratios)
    count = len(logs)
    mid = float(np.median(logs)) * count / (count + _SHRINK)
    off = np.sort(np.abs(logs - mid))
    rank = math.ceil(0.8 * (count + 1))  # conformal: the next row falls within with at least 80 %
    half = float(off[rank - 1]) if rank <= count else max(_BARE, float(off[-1]))
    low, mid, high = (min(max(math.exp(log), LEAST), MOST) for log in (-half, mid, half))
    return Factor(low, mid, high, count)


def scales_of(
    rows: Iterable[tuple[Program, OpTimes, float]], device: str, model: str, provenance: Mapping[str, Any],
    whole: bool = False,
) -> Scales:
    """Scales from (program, the model's times of it, measured seconds); `whole` gives one factor for all kinds.

    A row counts for the kind that takes most of its predicted time. Whole workloads of which some train and some do
    not get a factor for each.
    """
    rows = list(rows)
    mixed = whole and len({trains(program) for program, _, _ in rows}) == 2
    ratios: dict[str, list[float]] = {}
    for program, times, measured_s in rows:
        spent = np.maximum(times.busy_s, times.host_s) * program.table.repeat
        every = BY_MODE[trains(program)] if mixed else ALL
        kind = every if whole else KINDS[int(program.table.kind[int(np.argmax(spent))])]
        ratios.setdefault(kind, []).append(measured_s / float(spent.sum()))
    factors = {kind: factor_of(values) for kind, values in sorted(ratios.items())}
    return Scales(device, model, MappingProxyType(factors), MappingProxyType(dict(provenance)))


def from_table(path: Path, device: Device, model: str) -> Scales:
    """Scales on `model` from a table of measurements (see the module for its columns).

    Raises InputError naming file and rows for missing columns, times that are no positive numbers, several devices,
    and times a hundred times off what is predicted: they are most often in another unit.
    """
    from foretell.calibrate.microbench import today

    text = documents.read_text(path, "CSV table", LIMIT_BYTES)
    where = str(path)
    columns, lines = _lines(text, where)
    whole = "workload" in columns
    for wanted in ("time_s", "workload" if whole else "kind"):
        if wanted not in columns:
            hint = f"it has {', '.join(columns)[:200]}; see docs/calibrate.md"
            raise InputError(f"lacks the column {wanted!r}", where, hint)
    if whole and "kind" in columns:
        raise InputError("has both a column 'kind' and a column 'workload'", where, "give one table of each")
    _one_device(lines, device, where)
    times_s = _times(lines, where)
    programs = _workloads(lines, where) if whole else _operators(lines, where)
    predictor = models()[model]
    rows: list[tuple[Program, OpTimes, float]] = []
    for program, settings, measured in zip(*programs, times_s, strict=True):
        rows.append((program, predictor.op_times(program, device, settings), measured))
    _plausible(rows, where)
    provenance = {
        "source": path.name,
        "rows": len(rows),
        "date": today(),
        "method": f"medians of measured / predicted by kind, shrunk by {_SHRINK:g} rows towards 1",
        "licence": "the table's own",
    }
    return scales_of(rows, device.name, model, provenance, whole=whole)


def _lines(text: str, where: str) -> tuple[list[str], list[dict[str, str]]]:
    """The columns, and the rows by column. Raises InputError naming the row that is malformed."""
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""))  # some editors write a mark first
    columns: list[str] | None = None
    lines: list[dict[str, str]] = []
    try:
        for row in reader:
            if not row:
                continue
            if columns is None:
                columns = [name.strip() for name in row]
                twice = [name for name in columns if columns.count(name) > 1]
                if twice:
                    raise InputError(f"has the column {twice[0][:40]!r} twice", where, "keep one of them")
                continue
            at = f"{where}, row {_row(len(lines))}"
            if len(row) > len(columns):
                what = f"has {len(row)} fields under {len(columns)} columns"
                raise InputError(what, at, "put a text that holds commas between quotes")
            lines.append(dict(zip(columns, row, strict=False)))
            if len(lines) > LIMIT_ROWS:
                raise InputError(f"holds more than {LIMIT_ROWS:,} rows", where, "give a sample")
    except csv.Error as error:
        at = f"{where}, row {_row(len(lines))}"
        raise InputError(f"is no CSV: {error}", at, "close the quotes, and write one measurement a line") from None
    if columns is None or not lines:
        raise InputError("holds no rows", where, "give a header and one measurement a line")
    return columns, lines


def _row(i: int) -> int:
    return i + 2  # a file's first line is its header


def _listed(rows: Sequence[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:_SHOWN])
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"row{'s' if len(rows) > 1 else ''} {shown}{more}"


def _one_device(lines: Sequence[Mapping[str, str]], device: Device, where: str) -> None:
    from foretell.hardware import device as named

    first: dict[str, int] = {}
    for i, line in enumerate(lines):
        name = (line.get("device") or "").strip()
        if name:
            first.setdefault(name, _row(i))
    if len(first) > 1:
        said = ", ".join(f"{name[:40]!r} (row {row})" for name, row in list(first.items())[:_SHOWN])
        raise InputError(f"mixes devices: {said}", where, "give one table for each device")
    for name, row in first.items():
        try:
            found = named(name).name
        except ForetellError as error:
            raise InputError(error.message, f"{where}, row {row}", error.hint) from None
        if found != device.name:
            raise InputError(f"measures {found}, not {device.name}", f"{where}, row {row}", f"calibrate --on {found}")


def _times(lines: Sequence[Mapping[str, str]], where: str) -> list[float]:
    times_s: list[float] = []
    bad: list[int] = []
    for i, line in enumerate(lines):
        try:
            value = float(line.get("time_s") or "")
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            bad.append(_row(i))
        times_s.append(value)
    if bad:
        raise InputError("time_s is not a number above zero", f"{where}, {_listed(bad)}", "mend or remove them")
    return times_s


def _plausible(rows: Sequence[tuple[Program, OpTimes, float]], where: str) -> None:
    """Refuse times a hundred times above what is predicted, or below what peak and bandwidth allow."""
    long: list[int] = []
    short: list[int] = []
    ratios: list[float] = []
    for i, (program, times, measured) in enumerate(rows):
        repeat = program.table.repeat
        predicted = float((np.maximum(times.busy_s, times.host_s) * repeat).sum())
        least = float((np.maximum(times.ideal_s, times.memory_s / 4.0) * repeat).sum())
        if measured > _ABSURD * predicted:
            long.append(_row(i))
        elif measured < least / _ABSURD:
            short.append(_row(i))
        ratios.append(measured / predicted)
    if long or short:
        which = f"{_listed(long or short)}"
        off = float(np.median([ratios[row - 2] for row in (long or short)]))
        nearest = min(_UNITS, key=lambda power: abs(power - math.log10(off)))
        unit = _UNITS[nearest] if long and not short else "a larger unit" if short and not long else "several units"
        factor = f"{off:.3g}"
        raise InputError(
            f"time_s is {factor} times what the device can be expected to take: in {unit}?",
            f"{where}, {which}",
            "give seconds",
        )


def _workloads(lines: Sequence[Mapping[str, str]], where: str) -> tuple[list[Program], list[Settings]]:
    from foretell.api import capture

    made: dict[tuple[str, ...], tuple[Program, Settings]] = {}
    programs, settings = [], []
    for i, line in enumerate(lines):
        key = tuple((line.get(name) or "").strip() for name in ("workload", "batch", "precision", "phase"))
        if key not in made:
            if key[0].partition(":")[0] == "py":  # a table is data
                at = f"{where}, row {_row(i)}"
                raise InputError(f"workload {key[0]!r} would run a file", at, "capture it to a graph.json first")
            named = zip(("precision", "phase"), key[2:], strict=True)
            given: dict[str, Any] = {name: value for name, value in named if value}
            if key[1]:
                given["batch"] = _whole(line, "batch", f"{where}, row {_row(i)}")
            try:
                graph = capture(key[0], **given)
            except ForetellError as error:
                raise InputError(error.message, f"{where}, row {_row(i)}", error.hint) from error
            made[key] = lower(graph), Settings.of(graph)
        programs.append(made[key][0])
        settings.append(made[key][1])
    return programs, settings


def _operators(lines: Sequence[Mapping[str, str]], where: str) -> tuple[list[Program], list[Settings]]:
    programs = []
    for i, line in enumerate(lines):
        at = f"{where}, row {_row(i)}"
        kind = (line.get("kind") or "").strip()
        if kind not in _OPERATORS:
            error = unknown("kind of operator", kind, _OPERATORS)
            raise InputError(error.message, at, error.hint)
        dtype = (line.get("dtype") or "float32").strip()
        dtype = DTYPE_SHORT.get(dtype, dtype)
        if dtype not in _DTYPES:
            error = unknown("dtype of an operator" if dtype in DTYPES else "dtype", dtype, _DTYPES)
            raise InputError(error.message, at, error.hint)
        try:
            name, shapes, outputs, attrs = _OPERATORS[kind](partial(_whole, line, at=at))
        except _Impossible as error:
            raise InputError(str(error), at, "mend or remove the row") from None
        if any(math.prod(shape) > _MOST_ELEMENTS for shape in (*shapes, outputs)):
            raise InputError(f"a tensor of more than {_MOST_ELEMENTS:,} elements", at, "mend or remove the row")
        tensors = [Tensor(shape, dtype, t) for t, shape in enumerate((*shapes, outputs))]
        op = make_op(name, tensors, tuple(range(len(shapes))), (len(shapes),), attrs=attrs)
        programs.append(Program.of(OpTable.from_ops([op], tensors)))
    return programs, [Settings()] * len(programs)


def _whole(line: Mapping[str, str], key: str, at: str) -> int:
    """A whole number above zero in a column."""
    text = (line.get(key) or "").strip()
    if not text and key == "groups":
        return 1
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 0 < value < 2**40:
        said = f"{key} is {text[:40]!r}, not a whole number above zero"
        said = said if key in line else f"lacks the column {key!r}"
        raise InputError(said, at, "docs/calibrate.md lists each kind's columns")
    return value


class _Impossible(ValueError):
    """Sizes that no operator has together."""


Shape = tuple[int, ...]
Number = Callable[[str], int]
Operator = tuple[str, tuple[Shape, ...], Shape, Mapping[str, Any]]


def _mm(of: Number) -> Operator:
    m, n, k = of("m"), of("n"), of("k")
    return "aten.mm.default", ((m, k), (k, n)), (m, n), {}


def _bmm(of: Number) -> Operator:
    b, m, n, k = of("batch"), of("m"), of("n"), of("k")
    return "aten.bmm.default", ((b, m, k), (b, k, n)), (b, m, n), {}


def _convolution(of: Number) -> Operator:
    b, c, out, height, width = (of(key) for key in ("batch", "in_channels", "out_channels", "height", "width"))
    kernel, stride, groups = of("kernel"), of("stride"), of("groups")
    pad = (kernel - 1) // 2
    size = tuple((side + 2 * pad - kernel) // stride + 1 for side in (height, width))
    attrs = {"stride": (stride, stride), "dilation": (1, 1), "groups": groups, "transposed": False}
    if c % groups or out % groups:
        raise _Impossible(f"{groups} groups do not divide {c} in_channels and {out} out_channels")
    if min(size) < 1:
        raise _Impossible(f"a window of {kernel} does not fit an image of {height} × {width}")
    weight = (out, c // groups, kernel, kernel)
    return "aten.convolution.default", ((b, c, height, width), weight), (b, out, *size), attrs


def _attention(of: Number) -> Operator:
    b, heads, queries, keys, depth = (of(key) for key in ("batch", "heads", "queries", "keys", "depth"))
    q, k = (b, heads, queries, depth), (b, heads, keys, depth)
    return "foretell.sdpa.default", (q, k, k), q, {"causal": False}


def _flat(name: str) -> Callable[[Number], Operator]:
    return lambda of: (name, ((of("elements"),),), (of("elements"),), {})


def _rowwise(name: str) -> Callable[[Number], Operator]:
    return lambda of: (name, ((of("rows"), of("columns")),), (of("rows"), of("columns")), {"dim": -1})


_OPERATORS: dict[str, Callable[[Number], Operator]] = {
    "matmul": _mm,
    "batched_matmul": _bmm,
    "convolution": _convolution,
    "attention": _attention,
    "pointwise": _flat("aten.relu.default"),
    "copy": _flat("aten.clone.default"),
    "softmax": _rowwise("aten._softmax.default"),
    "normalization": _rowwise("aten.native_layer_norm.default"),
}


def write(scales: Scales, path: Path) -> None:
    """Write scales as JSON. Raises InputError where the file cannot be written."""
    try:
        path.write_text(json.dumps(scales.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", f"--out {path}", "give another file") from None
