"""Readers of NeuSight's measurements (sitar-lab/NeuSight, `scripts/asplos/`, MIT): fp32 operators and transformers.

Operators: one row is one call between two CUDA events, mean of the 5 fastest of 25, launch gap included (floor about
0.04 ms). Products run on CUDA cores (no TF32): ``linear`` is a row-major input times a transposed weight with bias,
``bmm`` a plain batched product, and **N is the contraction** in both. Elementwise operands are contiguous zeros.

Transformers: ``e2e_latency`` of ``transformers`` models on PyTorch 2.1, fp32 (`foretell.accuracy.neusight_models`); in
training, forward and backward are timed apart and added, the loss between them and an optimizer step left out.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foretell import documents
from foretell.accuracy.columns import op_table
from foretell.accuracy.measured import Measured
from foretell.accuracy.neusight_models import graph
from foretell.cost.model import Settings
from foretell.cost.program import Program, lower
from foretell.errors import ForetellError, InputError, UnknownNameError
from foretell.graph import Graph, OpTable
from foretell.hardware import device as find_device
from foretell.hardware.device import Device

_FP32 = 4.0
_MOST_MS = 1e5
_MOST_SIZE = 10**9  # of a configuration; token numbers and widths are far below
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)

# Operator → (dispatcher name, tensors read).
_ELEMENTWISE: dict[str, tuple[str, int]] = {
    "add": ("aten.add.Tensor", 2),
    "mul": ("aten.mul.Tensor", 2),
    "div": ("aten.div.Tensor", 2),
    "pow": ("aten.pow.Tensor_Tensor", 2),
    "addu": ("aten.add.Scalar", 1),
    "mulu": ("aten.mul.Scalar", 1),
    "divu": ("aten.div.Scalar", 1),
    "powu": ("aten.pow.Tensor_Scalar", 1),
    "relu": ("aten.relu.default", 1),
    "gelu": ("aten.gelu.default", 1),
    "tanh": ("aten.tanh.default", 1),
}


def read_operators(folder: Path) -> list[Measured]:
    """Every operator table under ``test/`` and ``train/`` of NeuSight's folder, one `Measured` a device and operator.

    Groups are shapes. Raises InputError naming file and row of what is no measurement.
    """
    result: list[Measured] = []
    for part in ("test", "train"):
        for path in sorted((folder / part).glob("*.csv*")):
            result += _operators(path, f"neusight/{part}/{path.name}")
    if not result:
        raise InputError("holds no operator tables", str(folder), "expects test/bmm.csv.gz and its like")
    return result


def _operators(path: Path, source: str) -> Iterator[Measured]:
    rows: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    dims: tuple[str, ...] = ("B", "M", "N", "K")
    first = True
    for line, record in _records(path, source, ("OPName", "Latency", "Device", "B")):
        if first:
            dims = ("B", "M", "N", "K") if "M" in record else ("B", "H")
            first = False
        where = f"{source}:{line}"
        name = record["OPName"]
        if name not in ("bmm", "linear", "ln", "softmax", *_ELEMENTWISE):
            raise InputError(f"operator {name!r} is not known", where, f"known: {', '.join(_ELEMENTWISE)} and so on")
        time = _number(record, "Latency", where, _MOST_MS)
        sizes = tuple(float(_whole(record, dim, where, 1e9)) for dim in dims)
        rows.setdefault((record["Device"], name), []).append((time / 1e3, *sizes))
    for (gpu, name), values in sorted(rows.items()):
        seconds, *sizes = (np.array(column) for column in zip(*values, strict=True))
        table = _products(name, *sizes) if len(dims) == 4 else _rows(name, *sizes)
        yield Measured(
            name=f"neusight-{path.parent.name}-{name}",
            device=_device(gpu, source),
            settings=Settings(),
            program=Program.of(table),
            starts=np.arange(len(table)),
            measured_s=seconds,
            group=np.array([f"{name}:{'x'.join(f'{s:g}' for s in shape)}" for _, *shape in values], dtype=object),
            issued="call",
            source=source,
        )


def _products(name: str, b: Any, m: Any, n: Any, k: Any) -> OpTable:
    """Columns of ``bmm`` and ``linear``; N is reduced, K is the result's width."""
    batched = name == "bmm"
    rows, batch = (m, b) if batched else (b * m, np.ones_like(b))
    weight = n * k
    return op_table(
        "aten.bmm.default" if batched else "aten.addmm.default",
        "float32",
        macs=b * m * n * k,
        bytes_read=_FP32 * (batch * (rows * n + weight) + (0 if batched else k)),
        bytes_written=_FP32 * b * m * k,
        elements=b * m * k,
        gemm_batch=batch,
        gemm_m=rows,
        gemm_n=k,
        gemm_k=n,
        operands=3 if batched else 4,
    )


def _rows(name: str, b: Any, h: Any) -> OpTable:
    """Columns of elementwise operators, softmax and layer norm over ``b`` rows of ``h`` elements."""
    elements = b * h
    if name == "softmax":
        return op_table("aten._softmax.default", "float32", bytes_read=_FP32 * elements, bytes_written=_FP32 * elements,
                        elements=elements, reduced=h, operands=2)
    if name == "ln":
        return op_table("aten.native_layer_norm.default", "float32", bytes_read=_FP32 * (elements + 2 * h),
                        bytes_written=_FP32 * (elements + 2 * b), elements=elements, reduced=h, operands=6)
    full, reads = _ELEMENTWISE[name]
    return op_table(full, "float32", bytes_read=_FP32 * reads * elements, bytes_written=_FP32 * elements,
                    elements=elements, operands=reads + 1)


# --- transformers ----------------------------------------------------------------------------------------------------

_MODES = {"inf": "inference", "train": "train"}
_RUNTIMES = {"": "eager", "fusion": "compiled"}


def read_models(folder: Path) -> list[Measured]:
    """Whole transformers of ``label_e2e.csv``, one `Measured` a device, mode and runtime; groups are models.

    Left out are runs on several GPUs (dp4, tp4, pp4) and mixtures of experts (switch…), whose experts' loads and host
    synchronisation the table does not tell. Raises InputError naming the row of what is no measurement, or the missing
    configuration.
    """
    path, source = folder / "label_e2e.csv", "neusight/label_e2e.csv"
    needed = ("device", "model", "mode", "seqlen", "batch", "option", "e2e_latency")
    found: dict[tuple[str, str, str], list[tuple[Program, float, str]]] = {}
    programs: dict[tuple[Any, ...], Program] = {}
    for line, record in _records(path, source, needed):
        where = f"{source}:{line}"
        option, model = record["option"], record["model"]
        if option not in _RUNTIMES or model.startswith("switch"):
            continue
        if record["mode"] not in _MODES:
            raise InputError(f"mode {record['mode']!r} is neither inf nor train", where)
        mode, runtime = _MODES[record["mode"]], _RUNTIMES[option]
        time = _number(record, "e2e_latency", where, 1e7)
        batch, tokens = (_whole(record, size, where, 1e6) for size in ("batch", "seqlen"))
        key = (model, mode, runtime, batch, tokens)
        if key not in programs:
            programs[key] = lower(_graph(folder, model, mode, batch, tokens, where), runtime)
        found.setdefault((record["device"], mode, runtime), []).append((programs[key], time / 1e3, model))
    return [
        Measured(
            name=f"neusight-models-{mode}-{runtime}",
            device=_device(gpu, source),
            settings=Settings(runtime=runtime, mode=mode),
            program=_joined([program for program, _, _ in rows]),
            starts=np.cumsum([0, *(len(program) for program, _, _ in rows[:-1])]),
            measured_s=np.array([seconds for _, seconds, _ in rows]),
            group=np.array([model for _, _, model in rows], dtype=object),
            issued="step",
            source=source,
        )
        for (gpu, mode, runtime), rows in sorted(found.items())
    ]


def _joined(programs: Sequence[Program]) -> Program:
    """Programs one after another."""
    table = OpTable.concatenate([program.table for program in programs])
    firsts = np.cumsum([0, *(len(program) for program in programs[:-1])])
    return replace(
        Program.of(table),
        runtime=programs[0].runtime,
        group=np.concatenate([program.group + first for program, first in zip(programs, firsts, strict=True)]),
        **{
            column: np.concatenate([getattr(program, column) for program in programs])
            for column in ("kernels", "issues", "strided")
        },
    )


def _graph(folder: Path, model: str, mode: str, batch: int, tokens: int, where: str) -> Graph:
    """The graph of a named configuration. Raises InputError naming the row, or the configuration."""
    if not _MODEL.fullmatch(model):
        raise InputError(f"model {model[:40]!r} is no name", where, "a name of letters, digits, dots and dashes")
    path = folder / "DLmodel_configs" / f"{model}.json"
    shown = f"neusight/DLmodel_configs/{path.name}"
    repair = "use the configuration as published"
    try:
        config = documents.read_json(path, "configuration")
    except InputError as error:
        raise InputError(f"no configuration of {model!r}: {error.what}", shown, error.repair) from None
    if not isinstance(config, dict):
        raise InputError("is no JSON object", shown, repair)
    if not isinstance(config.get("architectures"), list) or not config["architectures"]:
        raise InputError('lacks "architectures", a list of one name', shown, repair)
    for name, value in config.items():
        if isinstance(value, int | float) and not abs(value) <= _MOST_SIZE:
            raise InputError(f"{name} is {str(value)[:40]}", shown, repair)
    try:
        return graph(config, mode, batch, tokens, model)
    except ForetellError as error:
        raise InputError(error.message, shown, error.hint or repair) from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InputError(f"holds a size that is none: {error}", shown, repair) from error


# --- rows ------------------------------------------------------------------------------------------------------------


def _records(path: Path, source: str, needed: Sequence[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """(line, record) of a CSV file, gzipped or not."""
    opener: Callable[[Path], Any] = gzip.open if path.suffix == ".gz" else open
    try:
        raw = opener(path) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", source, "see SOURCE.md for the files") from error
    with raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"lacks the column {missing[0]!r}", source, "use the table as SOURCE.md describes it")
        for record in reader:
            if None in record.values() or None in record:
                what = "row is cut short" if None in record.values() else "row has more fields than the header"
                raise InputError(what, f"{source}:{reader.line_num}", "use the table as SOURCE.md describes it")
            yield reader.line_num, record


def _number(record: Mapping[str, str], name: str, where: str, most: float) -> float:
    """A positive number. Raises InputError with the row."""
    try:
        value = float(record[name])
    except ValueError:
        raise InputError(f"{name} is {record[name]!r}, not a number", where) from None
    if not (math.isfinite(value) and 0 < value <= most):
        raise InputError(f"{name} is {value:g}, not above 0 and at most {most:g}", where,
                         "times are milliseconds, sizes elements")
    return value


def _whole(record: Mapping[str, str], name: str, where: str, most: float) -> int:
    """A whole number above zero. Raises InputError with the row."""
    value = _number(record, name, where, most)
    if value % 1:
        raise InputError(f"{name} is {value:g}, not a whole number", where, "times are milliseconds, sizes elements")
    return int(value)


def _device(gpu: str, source: str) -> Device:
    try:
        return find_device(gpu.replace("_", " "))
    except UnknownNameError as error:
        repair = "add its data sheet to hardware/devices"
        raise InputError(f"device {gpu!r} is in no catalogue", source, repair) from error
