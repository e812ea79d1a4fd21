"""What the plots of a report show, as plain data of bounded size: the drawing is done in the reader's browser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost import BOUNDS, Estimate, Program
from foretell.cost.rates import matrix_rate, vector_rate
from foretell.errors import InputError
from foretell.graph import KINDS, Graph
from foretell.hardware.device import Device
from foretell.report.graphs import shape_text, short_name

__all__ = ["FAMILIES", "Texts", "alive_at_peak", "icicle", "memory_curve", "roofline", "roofs"]

Floats = npt.NDArray[np.float64]

#: Kinds of op drawn in one colour, and what they are called. The last takes what is in no other.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "matrix products": ("matmul", "batched_matmul", "grouped_matmul", "recurrent", "linear_algebra"),
    "convolution": ("convolution",),
    "attention": ("attention",),
    "normalisation": ("normalization",),
    "pointwise": ("pointwise", "random", "fill"),
    "reductions": ("reduction", "softmax", "loss", "pooling", "sort", "scan"),
    "copies and look-ups": ("copy", "indexing", "embedding", "resample"),
    "optimiser": ("optimizer",),
    "other": (),
}
_OTHER = len(FAMILIES) - 1
_FAMILY_OF_KIND = np.array(
    [next((i for i, kinds in enumerate(FAMILIES.values()) if kind in kinds), _OTHER) for kind in KINDS]
)

# Decades that marks of one family must lie within to become one, ever wider until few enough are left.
_GRIDS = (1e-6, 0.01, 0.03, 0.1, 0.3, 1.0)
_FORMAT = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float4_e2m1fn": "fp4", "float4_e2m1fn_x2": "fp4",
}


class Texts:
    """Texts by number, each held once: module paths and shapes repeat a lot."""

    def __init__(self) -> None:
        self._code: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._code.setdefault(text, len(self._code))

    def all(self) -> list[str]:
        """The texts in the order of their numbers."""
        return list(self._code)


def digits(values: Iterable[float], places: int = 4) -> list[float]:
    """Numbers with as many significant digits as can be seen."""
    return [float(f"{value:.{places}g}") for value in values]


# --- roofline ------------------------------------------------------------------------------------------------------


def roofs(graph: Graph, device: Device) -> list[dict[str, Any]]:
    """The horizontal lines that ops of this graph can come up to, highest first: name and FLOP/s."""
    used = {op.dtype for op in graph.ops if op.macs}
    lines: dict[str, float] = {}
    for dtype in used:
        name = _FORMAT.get(dtype)
        formats = [name] if name else []
        convolves = any(op.kind == "convolution" and op.dtype == dtype for op in graph.ops)
        if name == "fp32" and (graph.precision == "tf32" or convolves):
            formats.append("tf32")
        for number_format in formats:
            try:
                rate = matrix_rate(device, number_format)
            except InputError:  # nothing is known: no line
                continue
            lines.setdefault(f"{rate.runs_as} {rate.unit}", rate.flops_per_s)
    if not lines:
        rate = vector_rate(device)
        lines[f"{rate.runs_as} {rate.unit}"] = rate.flops_per_s
    return [{"name": name, "flops_per_s": peak} for name, peak in sorted(lines.items(), key=lambda item: -item[1])]


def roofline(
    graph: Graph, estimate: Estimate, program: Program, device: Device, texts: Texts, limit: int = 1200
) -> dict[str, Any]:
    """Marks of the ops that take time: FLOP a byte and FLOP/s, or, where no arithmetic is counted, bytes/s alone.

    Ops that would be drawn on one spot are one mark, with how many they are; further ones are joined until at most
    `limit` marks are left. The text of a mark is that of its dearest op. `undrawn` is the time of ops that move nothing
    themselves, having been joined to others.
    """
    table = program.table
    busy = estimate.ops.time_s - (0.0 if estimate.ops.gap_s is None else estimate.ops.gap_s)
    flops = 2.0 * table.macs * table.repeat * np.where(table.causal, 0.5, 1.0)  # what a causal mask leaves
    moved = (table.bytes_read + table.bytes_written) * table.repeat
    family = _FAMILY_OF_KIND[table.kind]
    counted = (busy > 0.0) & (flops > 0.0) & (moved > 0.0)
    uncounted = (busy > 0.0) & ~counted & (moved > 0.0)
    safe = np.where(busy > 0.0, busy, 1.0)
    share = counted.sum() / max(1, counted.sum() + uncounted.sum())
    room = max(1, round(limit * min(0.9, max(0.1, float(share)))))

    def marks(rows: npt.NDArray[np.bool_], x: Floats, y: Floats | None, most: int) -> dict[str, Any]:
        index = np.flatnonzero(rows)
        return _marks(graph, estimate, busy, family, index, x, y, most, texts)

    bandwidth = device.memory_bandwidth_bytes_per_s
    lines = roofs(graph, device)
    return {
        "roofs": lines,
        "bandwidth": bandwidth,
        "ridge": lines[0]["flops_per_s"] / bandwidth if bandwidth and lines else None,
        "undrawn": float(busy[(busy > 0.0) & ~counted & ~uncounted].sum()),
        "counted": marks(counted, flops / np.maximum(moved, 1.0), flops / safe, room),
        "uncounted": marks(uncounted, moved / safe, None, max(1, limit - room)),
    }


def _marks(
    graph: Graph,
    estimate: Estimate,
    busy: Floats,
    family: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64],
    x: Floats,
    y: Floats | None,
    most: int,
    texts: Texts,
) -> dict[str, Any]:
    """Columns of marks, dearest first: position, family, time, number of ops, and the dearest op's text."""
    columns = ("x", "y", "family", "time", "ops", "op", "name", "module", "shape")
    empty: dict[str, Any] = {key: [] for key in columns}
    if not len(index):
        return empty
    position = [np.log10(x[index])] + ([] if y is None else [np.log10(y[index])])
    groups = inverse = np.arange(0)
    for grid in _GRIDS:
        keys = np.stack([family[index], *(np.round(p / grid) for p in position)], axis=1)
        groups, inverse = np.unique(keys, axis=0, return_inverse=True)
        if len(groups) <= most:
            break
    inverse = inverse.reshape(-1)
    count = len(groups)
    time = np.bincount(inverse, weights=busy[index], minlength=count)
    ops = np.bincount(inverse, weights=np.array([graph.ops[i].repeat for i in index]), minlength=count)
    by_time = np.argsort(busy[index], kind="stable")
    dearest = np.zeros(count, dtype=np.int64)
    dearest[inverse[by_time]] = index[by_time]  # the last written is the dearest
    order = np.argsort(-time, kind="stable")[: max(most, 1)]

    def centre(values: Floats) -> list[float]:
        """Mean of a mark's logarithms, weighted by time."""
        weights = np.maximum(busy[index], 1e-30)
        total = np.bincount(inverse, weights=weights, minlength=count)
        return digits(10.0 ** (np.bincount(inverse, weights=weights * values, minlength=count) / total)[order])

    chosen = [graph.ops[i] for i in dearest[order]]
    return {
        "x": centre(position[0]),
        "y": [] if y is None else centre(position[1]),
        "family": family[dearest[order]].tolist(),
        "time": digits(time[order]),
        "ops": [int(n) for n in ops[order]],
        "op": dearest[order].tolist(),
        "name": [texts(short_name(op.name)) for op in chosen],
        "module": [texts(op.module or "outside modules") for op in chosen],
        "shape": [texts(shape_text(graph, op)) for op in chosen],
    }


# --- memory --------------------------------------------------------------------------------------------------------


def memory_curve(graph: Graph, estimate: Estimate, texts: Texts, limit: int = 800) -> dict[str, Any] | None:
    """Allocated bytes over the step at most `limit` times, the peak among them; None where lifetimes are unknown."""
    levels = estimate.memory.timeline_bytes
    if levels is None or not len(levels):
        return None
    ends = np.cumsum(estimate.ops.time_s)
    starts = ends - estimate.ops.time_s
    # Of the ops in each slice of the axis the highest level is shown; a slice may hold ops that take no time.
    slices = np.minimum((np.arange(len(levels)) * limit) // max(len(levels), limit), limit - 1)
    order = np.lexsort((-np.arange(len(levels)), levels, slices))
    last = np.append(np.flatnonzero(np.diff(slices[order])), len(levels) - 1)
    kept = np.sort(order[last])
    peak = int(np.argmax(levels))
    return {
        "time": digits(starts[kept], 6),
        "bytes": [int(v) for v in levels[kept]],
        "op": kept.tolist(),
        "name": [texts(short_name(graph.ops[i].name)) for i in kept],
        "module": [texts(graph.ops[i].module or "outside modules") for i in kept],
        "end": float(ends[-1]),
        "peak": int(np.searchsorted(kept, peak)),
        "capacity": estimate.memory.capacity_bytes,
        "phases": _phases(graph, starts),
    }


def _phases(graph: Graph, starts: Floats) -> list[dict[str, Any]]:
    """Where each run of one phase begins, if the step has several and few runs."""
    runs = [(float(starts[0]), graph.ops[0].phase)]
    for i, op in enumerate(graph.ops):
        if op.phase != runs[-1][1]:
            runs.append((float(starts[i]), op.phase))
    return [{"time": time, "phase": phase} for time, phase in runs] if 1 < len(runs) <= 6 else []


@dataclass(frozen=True, slots=True)
class Block:
    """Memory that is held at the peak: what it is, of which module, in which shape, how much."""

    role: str
    module: str
    shape: str
    nbytes: int


def alive_at_peak(graph: Graph, estimate: Estimate, most: int = 8) -> list[Block]:
    """The largest blocks of memory that the graph itself holds while the peak's op runs."""
    peak = estimate.memory.peak_op
    alive = [
        index
        for index, storage in enumerate(graph.storages)
        if storage.nbytes and storage.born <= peak and (storage.dies is None or storage.dies >= peak)
    ]
    alive.sort(key=lambda index: (-graph.storages[index].nbytes, index))
    chosen = alive[:most]
    wanted = set(chosen)
    tensor_of: dict[int, int] = {}
    for index, tensor in enumerate(graph.tensors):
        if tensor.storage in wanted:
            tensor_of.setdefault(tensor.storage, index)
    module_of: dict[int, str] = {}
    for op in graph.ops:  # a block belongs to the module that makes it, or uses it first
        for t in (*op.outputs, *op.inputs):
            held = graph.tensors[t].storage
            if held in wanted:
                module_of.setdefault(held, op.module)
    result = []
    for index in chosen:
        storage = graph.storages[index]
        first = tensor_of.get(index)
        shape = ""
        if first is not None:
            tensor = graph.tensors[first]
            shape = f"{'×'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"
            if (layers := storage.nbytes // max(tensor.nbytes, 1)) > 1:
                shape = f"{layers} of {shape}"  # equal layers share a block
        result.append(Block(storage.role.replace("_", " "), module_of.get(index, ""), shape, storage.nbytes))
    return result


# --- time by module ------------------------------------------------------------------------------------------------


def icicle(graph: Graph, estimate: Estimate, texts: Texts, limit: int = 1500) -> dict[str, Any]:
    """The tree of modules as columns: name, parent (−1: none), time, ops, and what limits most of the time.

    Siblings are in the order they first run. Training has its phases first. The leaves below modules are their ops by
    name. What is too small for `limit` nodes stands as one node among its siblings.
    """
    phased = len({op.phase for op in graph.ops}) > 1
    node: dict[tuple[str, ...], int] = {(): 0}
    paths: list[tuple[str, ...]] = [()]
    limits = [[0.0] * len(BOUNDS)]
    ops = [0]
    times, bounds = estimate.ops.time_s.tolist(), estimate.ops.bound.tolist()
    for i, op in enumerate(graph.ops):
        if times[i] <= 0.0:
            continue
        steps = op.module.split(".") if op.module else ["outside modules"]
        path = (*((op.phase,) if phased else ()), *steps, short_name(op.name) + "()")
        for depth in range(len(path) + 1):
            part = path[:depth]
            at = node.get(part)
            if at is None:
                at = node[part] = len(paths)
                paths.append(part)
                limits.append([0.0] * len(BOUNDS))
                ops.append(0)
            limits[at][bounds[i]] += times[i]
            ops[at] += op.repeat
    total = [math.fsum(parts) for parts in limits]
    threshold = 0.0
    order = sorted(total, reverse=True)
    if len(order) > limit:
        threshold = order[limit - 1]
    result: dict[str, list[Any]] = {key: [] for key in ("name", "parent", "time", "ops", "bound")}
    number: dict[tuple[str, ...], int] = {}
    small: dict[tuple[str, ...], list[int]] = {}

    def put(name: str, parent: int, at: Sequence[int]) -> int:
        merged = [math.fsum(limits[i][b] for i in at) for b in range(len(BOUNDS))]
        result["name"].append(texts(name))
        result["parent"].append(parent)
        result["time"].append(float(f"{math.fsum(merged):.5g}"))
        result["ops"].append(sum(ops[i] for i in at))
        result["bound"].append(merged.index(max(merged)))
        return len(result["name"]) - 1

    for at, path in enumerate(paths):  # parents come before their children
        if not path:
            number[path] = put("step", -1, [at])
        elif path[:-1] in number:
            if total[at] >= threshold:
                number[path] = put(path[-1], number[path[:-1]], [at])
            else:
                small.setdefault(path[:-1], []).append(at)
    for path, members in small.items():
        put(f"{len(members):,} smaller" if len(members) > 1 else paths[members[0]][-1], number[path], members)
    return result
