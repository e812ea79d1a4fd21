"""`Graph`: one step of a workload, as an immutable value."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretell import documents
from foretell.errors import InputError, unknown
from foretell.graph.dtypes import DTYPES
from foretell.graph.kinds import KINDS
from foretell.graph.op import NO_ATTRS, PHASES, ROLES, Op, Storage, Tensor
from foretell.graph.table import OpTable

CONVENTIONS: tuple[str, ...] = ("matmul", "fvcore")
MODES: tuple[str, ...] = ("inference", "train", "prefill", "decode")
SCHEMA = "foretell.graph/1"


_latest: list[Any] = []  # the ops tabulated last, and their table


@dataclass(frozen=True, slots=True)
class Graph:
    """One step: its operations in the order they run, the tensors between them, the memory under those.

    `items` says what one step processes, e.g. ``{"images": 64}`` or ``{"sequences": 8, "tokens": 65536}``; its first
    entry is what throughput is counted in. `precision` is the one asked for. `context` is the length already cached
    before a decode step. `parameters` counts elements, a shared tensor once.
    """

    name: str
    mode: str
    precision: str
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    parameters: int
    trainable_parameters: int
    items: Mapping[str, int]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def batch(self) -> int:
        """Samples in one step (the first of `items`)."""
        return next(iter(self.items.values()))

    def macs(self, convention: str = "matmul", phase: str | None = None) -> int:
        """Multiply-adds of the step (or one phase of it) under a named convention; see the package docstring."""
        if convention not in CONVENTIONS:
            raise unknown("FLOP convention", convention, CONVENTIONS)
        total = 0
        for op in self.ops:
            if phase is None or op.phase == phase:
                total += op.macs * op.repeat
                if convention == "fvcore":
                    total += op.norm_macs * op.repeat
        return total

    def flops(self, convention: str = "matmul", phase: str | None = None, causal: str = "full") -> int:
        """FLOP of the step: 2 per multiply-add. ``causal="half"`` counts half of causal attention's products."""
        if causal not in ("full", "half"):
            raise unknown("way to count causal attention", causal, ("full", "half"))
        total = 2 * self.macs(convention, phase)
        if causal == "half":
            total -= sum(
                op.macs * op.repeat
                for op in self.ops
                if op.attrs.get("causal") and (phase is None or op.phase == phase)
            )
        return total

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters as stored."""
        return sum(s.nbytes for s in self.storages if s.role == "parameter")

    @property
    def not_counted(self) -> Mapping[str, int]:
        """Ops that no FLOP rule covers, by name, with how often each runs. A total that leaves these out is partial."""
        missing: dict[str, int] = {}
        for op in self.ops:
            if not op.counted:
                missing[op.name] = missing.get(op.name, 0) + op.repeat
        return MappingProxyType(dict(sorted(missing.items())))

    def table(self) -> OpTable:
        """The ops as NumPy columns, for vectorised costing."""
        # A graph is often costed on many devices in a row.
        if not _latest or _latest[0] is not self.ops:
            _latest[:] = [self.ops, OpTable.from_ops(self.ops, self.tensors)]
        table: OpTable = _latest[1]
        return table

    def producers(self) -> Iterator[tuple[int, ...]]:
        """For each op in turn, the earlier ops whose writes it reads (through shared storages too)."""
        last_writer: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            storages = {self.tensors[t].storage for t in op.inputs}
            yield tuple(sorted({last_writer[s] for s in storages if s in last_writer}))
            if op.kind == "view":
                continue
            for t in op.outputs:
                last_writer[self.tensors[t].storage] = index

    def renamed(self, name: str) -> Graph:
        """The same graph under another name."""
        return replace(self, name=name)

    # --- JSON ---------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data, schema ``foretell.graph/1``: equal graphs give equal data."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "mode": self.mode,
            "precision": self.precision,
            "parameters": self.parameters,
            "trainable_parameters": self.trainable_parameters,
            "items": dict(self.items),
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "provenance": dict(self.provenance),
            "tensors": [
                [list(t.shape), t.dtype, t.storage, None if t.strides is None else list(t.strides)]
                for t in self.tensors
            ],
            "storages": [[s.nbytes, s.role, s.born, s.dies] for s in self.storages],
            "ops": [
                {
                    "name": op.name,
                    "kind": op.kind,
                    "phase": op.phase,
                    "module": op.module,
                    "inputs": list(op.inputs),
                    "outputs": list(op.outputs),
                    "attrs": {k: list(v) if isinstance(v, tuple) else v for k, v in op.attrs.items()},
                    "macs": op.macs,
                    "norm_macs": op.norm_macs,
                    "bytes_read": op.bytes_read,
                    "bytes_written": op.bytes_written,
                    "gemm": None if op.gemm is None else list(op.gemm),
                    "dtype": op.dtype,
                    "repeat": op.repeat,
                    "counted": op.counted,
                }
                for op in self.ops
            ],
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The graph as JSON text; also written to `path` when one is given."""
        text = json.dumps(self.to_dict(), separators=(",", ":"))
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @staticmethod
    def from_dict(data: Any, where: str = "graph") -> Graph:
        """Read what `to_dict` wrote. Raises InputError naming the place that is wrong; nothing is executed."""
        try:
            return _from_dict(data, where)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(
                f"not a {SCHEMA} document: {reason}",
                where,
                "write one with `foretell capture WORKLOAD --out graph.json`",
            ) from error

    @staticmethod
    def from_json(source: str | os.PathLike[str]) -> Graph:
        """Read a graph from JSON text, or from the file at a path."""
        if isinstance(source, str) and source.lstrip().startswith("{"):
            where, text = "graph JSON", source
        else:
            where = os.fspath(source)
            text = documents.read_text(Path(source), "graph JSON file", documents.JSON_LIMIT_BYTES)
        data = documents.read_json_text(text, where, "graph; write one with `foretell capture … --out F`")
        return Graph.from_dict(data, where)


def _from_dict(data: Any, where: str) -> Graph:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"\"schema\" is {data.get('schema') if isinstance(data, dict) else data!r}")
    if data["mode"] not in MODES:
        raise ValueError(str(unknown("mode", str(data["mode"]), MODES)))
    storages = tuple(_storages(data["storages"]))
    tensors = tuple(_tensors(data["tensors"], len(storages)))
    count = len(tensors)
    ops = tuple(_ops(data["ops"], tensors))
    if not ops:
        raise ValueError("there are no ops")
    for storage in storages:
        if max(storage.born, storage.dies or 0) >= len(ops):
            raise ValueError(f"a storage lives beyond the {len(ops)} ops: {storage}")
    items = {str(k): _natural(v) for k, v in data["items"].items()}
    if not items or min(items.values()) < 1:
        raise ValueError("\"items\" must name what one step processes, each at least 1")
    return Graph(
        name=_text(data["name"]),
        mode=data["mode"],
        precision=_text(data["precision"]),
        ops=ops,
        tensors=tensors,
        storages=storages,
        parameters=_natural(data["parameters"]),
        trainable_parameters=_natural(data["trainable_parameters"]),
        items=MappingProxyType(items),
        inputs=tuple(_index(t, count, "tensor") for t in data["inputs"]),
        outputs=tuple(_index(t, count, "tensor") for t in data["outputs"]),
        provenance=MappingProxyType({str(k): str(v) for k, v in data["provenance"].items()}),
    )


def _storages(rows: Any) -> Iterator[Storage]:
    """Each storage. Raises ValueError naming the index of the one that is wrong."""
    for index, row in enumerate(rows):
        try:
            nbytes, role, born, dies = row
            yield Storage(_natural(nbytes), _one_of(role, ROLES), _op(born), None if dies is None else _op(dies))
        except (TypeError, ValueError) as error:
            raise ValueError(f"storage {index}: {error}") from error


def _tensors(rows: Any, storages: int) -> Iterator[Tensor]:
    """Each tensor. Raises ValueError naming the index of the one that is wrong."""
    for index, row in enumerate(rows):
        try:
            shape, dtype, storage, strides = row
            yield Tensor(
                _shape(shape),
                _one_of(dtype, DTYPES),
                _index(storage, storages, "storage"),
                None if strides is None else _strides(strides, shape),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"tensor {index}: {error}") from error


def _ops(rows: Any, tensors: tuple[Tensor, ...]) -> Iterator[Op]:
    """Each op, read and checked. Raises ValueError naming the index and the name of the one that is wrong."""
    count = len(tensors)
    for index, row in enumerate(rows):
        try:
            op = Op(
                name=_text(row["name"]),
                kind=_one_of(row["kind"], KINDS),
                phase=_one_of(row["phase"], PHASES),
                module=_text(row["module"]),
                inputs=tuple(_index(t, count, "tensor") for t in row["inputs"]),
                outputs=tuple(_index(t, count, "tensor") for t in row["outputs"]),
                attrs=MappingProxyType({k: tuple(v) if isinstance(v, list) else v for k, v in row["attrs"].items()})
                if row["attrs"]
                else NO_ATTRS,
                macs=_natural(row["macs"]),
                norm_macs=_natural(row["norm_macs"]),
                bytes_read=_natural(row["bytes_read"]),
                bytes_written=_natural(row["bytes_written"]),
                gemm=None if row["gemm"] is None else _gemm(row["gemm"]),
                dtype=_one_of(row["dtype"], DTYPES),
                repeat=_repeat(row["repeat"]),
                counted=bool(row["counted"]),
            )
            _check(op, tensors)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            name = row.get("name") if isinstance(row, dict) else None
            raise ValueError(f"op {index} ({str(name)[:40]}): {reason}") from error
        yield op


def _check(op: Op, tensors: tuple[Tensor, ...]) -> None:
    """What the counting and cost rules take for granted of an op: its operands, attributes and matrix product."""
    least_in, least_out = _OPERANDS.get(op.kind, (0, 0))
    if len(op.inputs) < least_in or len(op.outputs) < least_out:
        raise ValueError(f"is of kind {op.kind} and has too few operands")
    if op.attrs:
        for name, value in op.attrs.items():
            wanted = _ATTRS.get(name)
            if wanted is not None and not wanted[0](value):
                raise ValueError(f"attribute {name!r} is {str(value)[:40]!r}, not {wanted[1]}")
    if op.kind == "convolution":
        _check_convolution(op, tensors)
    elif op.kind == "softmax" and op.inputs and "dim" in op.attrs:
        rank = max(1, len(tensors[op.inputs[0]].shape))
        if not -rank <= op.attrs["dim"] < rank:
            raise ValueError(f"attribute 'dim' is {op.attrs['dim']} for a tensor of {rank} dimensions")
    elif op.kind == "pooling" and "window" in op.attrs and type(op.attrs["window"]) is not tuple:
        raise ValueError(f"attribute 'window' is {str(op.attrs['window'])[:40]!r}, not a list of whole numbers")
    if op.macs and op.kind in _PRODUCTS and (op.gemm is None or min(op.gemm) < 1):
        raise ValueError(f"gemm is {op.gemm and list(op.gemm)}, though macs is {op.macs}")
    if op.gemm is not None and op.macs:
        # Groups of a grouped product have at least a row each, though there may be fewer rows.
        most = _PASSES * op.macs * (op.gemm[0] if op.kind == "grouped_matmul" else 1)
        if math.prod(op.gemm) > most:
            raise ValueError(f"gemm {list(op.gemm)} is more arithmetic than macs {op.macs}")


def _check_convolution(op: Op, tensors: tuple[Tensor, ...]) -> None:
    backward = op.name.startswith("aten.convolution_backward")
    if backward and len(op.inputs) < 3:
        raise ValueError("lacks operands: a gradient, an input and a weight")
    x, w, y = (op.inputs[1], op.inputs[2], op.inputs[0]) if backward else (*op.inputs[:2], op.outputs[0])
    shapes = [tensors[t].shape for t in (x, w, y)]
    if min(map(len, shapes)) < 3 or min(shapes[0][1], *shapes[1], shapes[2][1]) < 1:
        raise ValueError("its operands are no images and windows with channels")
    if op.gemm is None or min(op.gemm[0], *op.gemm[2:]) < 1:
        raise ValueError(f"gemm is {op.gemm and list(op.gemm)} of a convolution")
    groups = op.attrs.get("groups", 1)
    if shapes[0][1] % groups or shapes[2][1] % groups:
        raise ValueError(f"attribute 'groups' is {groups}, which divides not both {shapes[0][1]} and {shapes[2][1]}")


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= _LARGEST


def _wholes(least: int) -> Callable[[Any], bool]:
    each = _whole(least)
    return lambda value: type(value) is tuple and len(value) <= _DIMENSIONS and all(map(each, value))


def _flag(value: Any) -> bool:
    return value in (True, False, None)


def _window(value: Any) -> bool:  # of a pooling its sides, of an attention the keys that a query sees
    return value is None or _whole(0)(value) or (_wholes(1)(value) and math.prod(value) <= _LARGEST)


_LARGEST = 2**50  # a side of a product or window, a count of elements
_DIMENSIONS = 16
_MOST_REPEATS = 10**7
_PASSES = 4  # a backward op's macs may count one product, and gemm say one
# Attributes that rules and cost models read: what they may be, in code and in words.
_ATTRS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stride": (_wholes(1), "whole numbers above zero"),
    "dilation": (_wholes(1), "whole numbers above zero"),
    "groups": (_whole(1), "a whole number above zero"),
    "window": (_window, "whole numbers above zero"),
    "dim": (_whole(-_DIMENSIONS), "a dimension's number"),
    "transposed": (_flag, "true or false"),
    "causal": (_flag, "true or false"),
    "training": (_flag, "true or false"),
    "affine": (_flag, "true or false"),
    "grad_mask": (lambda value: type(value) is tuple and all(map(_flag, value)), "a list of true and false"),
    "read_elements": (_whole(0), "a whole number"),
}
# Tensors that the counting and cost rules take for granted: (inputs, outputs) at least.
_OPERANDS = {"convolution": (2, 1), "attention": (3, 1), "matmul": (2, 1), "batched_matmul": (2, 1),
             "grouped_matmul": (2, 1), "normalization": (1, 1)}
_PRODUCTS = frozenset({"convolution", "attention", "matmul", "batched_matmul", "grouped_matmul"})
_MOST = 2**63 - 1  # what 64-bit columns hold


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:  # a bool is none
        raise ValueError(f"{str(value)[:40]} is not a whole number from 0 to 2**63 - 1")
    return value


def _shape(values: Any) -> tuple[int, ...]:
    shape = _naturals(values)
    if math.prod(shape) > _MOST // 16:
        raise ValueError(f"a tensor of shape {str(shape)[:80]} is too large")
    return shape


def _strides(values: Any, shape: Any) -> tuple[int, ...]:
    strides = _naturals(values)
    if len(strides) != len(shape):
        raise ValueError(f"{len(strides)} strides for {len(shape)} dimensions")
    return strides


def _naturals(values: Any) -> tuple[int, ...]:
    return tuple(_natural(v) for v in values)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{str(value)[:40]!r} is not a printable text")
    return value


def _repeat(value: Any) -> int:
    if not 1 <= _natural(value) <= _MOST_REPEATS:
        raise ValueError(f"repeat is {value}, not from 1 to {_MOST_REPEATS:,}")
    return int(value)


def _op(value: Any) -> int:
    """An op's index, or -1 for what is before the first."""
    return _natural(value + 1) - 1


def _gemm(values: Any) -> tuple[int, int, int, int]:
    batch, m, n, k = _naturals(values)
    if max(batch, m, n, k) > _LARGEST:
        raise ValueError(f"gemm {list(values)} has a side above 2**50")
    return batch, m, n, k


def _index(value: Any, count: int, what: str) -> int:
    if _natural(value) >= count:
        raise ValueError(f"{what} {value} does not exist (there are {count})")
    return int(value)


def _one_of(value: Any, known: tuple[str, ...]) -> str:
    if type(value) is not str or value not in known:
        raise ValueError(f"{str(value)[:40]!r} is none of {', '.join(known)}")
    return value
