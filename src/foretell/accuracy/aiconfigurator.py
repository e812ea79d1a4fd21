"""Operator measurements of AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0): matrix products and attention.

One table is one system, framework version and operator: ``<system>__<framework>-<version>__<table>.csv.gz``, also in
``power/``. Latencies are milliseconds of one call among many replayed in a CUDA graph, so no launch gap is in them.

What a call is, as the collector runs it:

* ``gemm``: a framework's linear layer, x (m, k) · wᵀ (k, n). Formats below 16 bits get x in bfloat16 and quantise it
  first: per tensor or token (``fp8``), per 128 values (``fp8_block``), per 16 (``nvfp4``); this is part of the time.
* ``context_attention``: causal, of `isl` new queries after `step` cached ones; ``generation_attention``: one query a
  sequence against `step` cached keys and its own; ``encoder_attention``: all queries against all keys.
  Keys and values are read from a cache of type `kv_cache_dtype`.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretell.accuracy.columns import op_table
from foretell.accuracy.measured import Measured
from foretell.cost.model import Settings
from foretell.cost.program import Program
from foretell.errors import ForetellError, InputError
from foretell.graph import OpTable
from foretell.hardware import device

Strings = npt.NDArray[np.str_]
Floats = npt.NDArray[np.float64]

#: The dispatcher's name of the product and the element type, by the table's `gemm_dtype`. The last part of a
#: ``quantized_mm`` says what shares a scale: a whole tensor, a token, 128 values, 16 values.
GEMM_FORMATS: dict[str, tuple[str, str]] = {
    "bfloat16": ("aten.mm.default", "bfloat16"),
    "float16": ("aten.mm.default", "float16"),
    "fp8": ("foretell.quantized_mm.token", "float8_e4m3fn"),
    "fp8_block": ("foretell.quantized_mm.block", "float8_e4m3fn"),
    "nvfp4": ("foretell.quantized_mm.nvfp4", "float4_e2m1fn_x2"),
}
#: Bytes a weight takes, its share of the scales included.
_WEIGHT_BYTES = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4 / 128**2,
    "nvfp4": 0.5 + 1 / 16,
}
_KV_BYTES = {"bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}
_PER_TENSOR = "foretell.quantized_mm.tensor"  # what vLLM's fp8 is up to 0.14, by the time its activations take
_ATTENTION = ("context_attention", "generation_attention", "encoder_attention")
_TABLES = ("gemm", *_ATTENTION)
_LARGEST = 2**31  # what a size may be
_LONGEST_S = 60.0  # a longer call is a wrong unit


def read(folder: Path) -> list[Measured]:
    """Every table of matrix products and attention in `folder` and its ``power``, one `Measured` a device and format.

    Raises InputError where there is none, or naming the file and row of what is malformed.
    """
    files = sorted((*folder.glob("*.csv.gz"), *folder.glob("power/*.csv.gz")))
    tables = [path for path in files if path.name.removesuffix(".csv.gz").split("__")[-1] in _TABLES]
    if not tables:
        raise InputError("holds no table of gemm or attention", str(folder), "place the tables SOURCE.md lists")
    return [measured for path in tables for measured in read_table(path)]


def read_table(path: Path) -> list[Measured]:
    """One table, split by number format. Raises InputError naming the row of what is malformed."""
    parts = path.name.removesuffix(".csv.gz").split("__")
    if len(parts) != 3 or parts[2] not in _TABLES:
        repair = f"name it SYSTEM__FRAMEWORK-VERSION__TABLE.csv.gz, TABLE one of {', '.join(_TABLES)}"
        raise InputError("is not named as the published tables are", path.name, repair)
    system, framework, table = parts
    columns = _Columns(path)
    latency_s = columns.numbers("latency", 1e-6, _LONGEST_S * 1e3) / 1e3
    names = set(columns["device"])
    if len(names) != 1:
        raise InputError(f"mixes devices: {', '.join(sorted(map(repr, names)))}", path.name, "split it by device")
    try:
        gpu = device(names.pop())
    except ForetellError as error:
        raise InputError(error.message, path.name, error.hint) from None
    formats, rows_of = (_gemm if table == "gemm" else _attention)(columns, table)
    result = []
    for number_format in sorted(set(formats)):
        rows = np.flatnonzero(formats == number_format)
        ops, group = rows_of(number_format, rows)
        result.append(
            Measured(
                name=f"aiconfigurator-{table}-{number_format}-{system}-{framework}",
                device=gpu,
                settings=Settings(),
                program=Program.of(ops),
                starts=np.arange(len(rows)),
                measured_s=latency_s[rows],
                group=group,
                issued="graph",
                source=path.name,
            )
        )
    return result


class _Columns:
    """The columns of one file by name, as text; numbers are checked when asked for."""

    def __init__(self, path: Path) -> None:
        self.where = path.name
        try:
            with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
                header, *rows = list(csv.reader(file)) or [[]]
        except (EOFError, OSError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"is damaged: {error}", self.where, "fetch it anew") from error
        if not rows:
            raise InputError("holds no rows", self.where, "use the table as published")
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            raise InputError(f"has the column {twice[0][:40]!r} twice", self.where, "use the table as published")
        short = next((i for i, row in enumerate(rows) if len(row) != len(header)), None)
        if short is not None:
            raise InputError(f"has {len(rows[short])} fields, not {len(header)}", f"{self.where}:{short + 2}")
        self._text = dict(zip(header, zip(*rows, strict=True), strict=True))

    def __contains__(self, name: str) -> bool:
        return name in self._text

    def __getitem__(self, name: str) -> tuple[str, ...]:
        if name not in self._text:
            raise InputError(f"lacks the column {name!r}", self.where, "use the table as published")
        return self._text[name]

    def text(self, name: str, known: Iterator[str] | dict[str, object] | tuple[str, ...]) -> Strings:
        """A column of names, each one of `known`."""
        values, allowed = np.array(self[name]), set(known)
        wrong = np.flatnonzero(~np.isin(values, list(allowed)))
        if len(wrong):
            known_ = f"known: {', '.join(sorted(allowed))}"
            raise InputError(f"{name} is {str(values[wrong[0]])[:40]!r}", f"{self.where}:{wrong[0] + 2}", known_)
        return values

    def sizes(self, name: str, least: int = 1) -> Floats:
        """A column of whole numbers."""
        values = self.numbers(name, least, _LARGEST)
        wrong = np.flatnonzero(values % 1)
        if len(wrong):
            raise InputError(f"{name} is {values[wrong[0]]:g}, no whole number", f"{self.where}:{wrong[0] + 2}")
        return values

    def numbers(self, name: str, least: float, most: float) -> Floats:
        """A column of numbers within a range."""
        try:
            values = np.array(self[name], dtype=np.float64)
        except ValueError as error:
            raise InputError(f"{name} holds what is no number: {error}", self.where) from None
        wrong = np.flatnonzero(~((values >= least) & (values <= most)))
        if len(wrong):
            row = f"{self.where}:{wrong[0] + 2}"
            raise InputError(f"{name} is {values[wrong[0]]:g}, not from {least:g} to {most:g}", row)
        return values


_Rows = Callable[[str, npt.NDArray[np.int64]], tuple[OpTable, npt.NDArray[np.object_]]]


def _gemm(columns: _Columns, table: str) -> tuple[Strings, _Rows]:
    formats = columns.text("gemm_dtype", tuple(GEMM_FORMATS))
    m, n, k = (columns.sizes(name) for name in "mnk")

    def rows_of(number_format: str, rows: npt.NDArray[np.int64]) -> tuple[OpTable, npt.NDArray[np.object_]]:
        name, dtype = GEMM_FORMATS[number_format]
        if number_format == "fp8" and _version(columns) < (0, 15):
            name = _PER_TENSOR
        mr, nr, kr = m[rows], n[rows], k[rows]
        ops = op_table(
            name,
            dtype,
            kind="matmul",
            macs=mr * nr * kr,
            bytes_read=2.0 * mr * kr + _WEIGHT_BYTES[number_format] * nr * kr,
            bytes_written=2.0 * mr * nr,
            elements=mr * nr,
            gemm_batch=1.0,
            gemm_m=mr,
            gemm_n=nr,
            gemm_k=kr,
        )
        return ops, _labels(nr, kr)

    return formats, rows_of


def _version(columns: _Columns) -> tuple[int, ...]:
    """(0, 14) for vLLM 0.14.0; other frameworks count as new."""
    if columns["framework"][0].lower() != "vllm":
        return (1, 0)
    try:
        return tuple(int(part) for part in columns["version"][0].split(".")[:2])
    except ValueError:
        return (1, 0)


def _attention(columns: _Columns, table: str) -> tuple[Strings, _Rows]:
    encoder = table == "encoder_attention"
    batch, heads, depth = (columns.sizes(name) for name in ("batch_size", "num_heads", "head_dim"))
    queries = columns.sizes("isl")
    if encoder:
        formats = columns.text("attn_dtype", tuple(_KV_BYTES))
        kv_heads, cached, window = heads, np.zeros(len(heads)), np.zeros(len(heads))
    else:
        formats = columns.text("kv_cache_dtype", tuple(_KV_BYTES))
        kv_heads, cached = columns.sizes("num_key_value_heads"), columns.sizes("step", 0)
        window = columns.sizes("window_size", 0) if "window_size" in columns else np.zeros(len(heads))
    keys = cached + queries
    keys = np.where(window > 0, np.minimum(keys, window), keys)

    def rows_of(number_format: str, rows: npt.NDArray[np.int64]) -> tuple[OpTable, npt.NDArray[np.object_]]:
        b, h, g, q, s, d = (column[rows] for column in (batch, heads, kv_heads, queries, keys, depth))
        ops = op_table(
            "foretell.sdpa.default",
            "bfloat16",
            kind="attention",
            macs=2.0 * b * h * q * s * d,
            bytes_read=2.0 * b * h * q * d + 2.0 * _KV_BYTES[number_format] * b * g * s * d,
            bytes_written=2.0 * b * h * q * d,
            elements=b * h * q * d,
            gemm_batch=b * g,
            gemm_m=q * (h / g),
            gemm_n=s,
            gemm_k=d,
            causal=(q > 1) & (not encoder),
            operands=4.0,
        )
        return ops, _labels(h, g, d)

    return formats, rows_of


def _labels(*parts: Floats) -> npt.NDArray[np.object_]:
    """``"4096,128"``: what rows are held out together by."""
    distinct, index = np.unique(np.stack(parts, axis=1), axis=0, return_inverse=True)
    names = np.array([",".join(f"{value:g}" for value in row) for row in distinct], dtype=object)
    return np.asarray(names[index.reshape(-1)], dtype=object)
