"""How much arithmetic and memory traffic one operation is: functions of shapes and attributes alone.

Attributes the rules read (set by capture, the parametric transformers and the readers):

===================  ============================================================================
``transposed``       convolution: is it a transposed one
``groups``           convolution: number of groups
``grad_mask``        backward ops: which of (input, weight, bias) gradients are wanted
``causal``           attention: is the mask causal (counted in full all the same)
``affine``           normalisation: has it a scale (yes, unless said otherwise)
``training``         batch norm: does it take the statistics of its own input
``dims``             reductions: the dimensions reduced over
``read_elements``    indexing and embedding: elements gathered, where they are not the output's
===================  ============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.graph.dtypes import dtype_bytes, is_floating
from foretell.graph.kinds import base_name
from foretell.graph.op import Tensor

Gemm = tuple[int, int, int, int]
Arithmetic = tuple[int, Gemm | None]  # multiply-adds, (batch, m, n, k)
Rule = Callable[[Sequence[Tensor], Sequence[Tensor], Mapping[str, Any]], Arithmetic]


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and traffic of one run of an op. `macs` is the "matmul" convention, `norm_macs` fvcore's extra."""

    macs: int
    norm_macs: int
    bytes_read: int
    bytes_written: int
    gemm: Gemm | None
    dtype: str
    counted: bool


_RULES: dict[str, Rule] = {}


def rule(*bases: str) -> Callable[[Rule], Rule]:
    """Register the arithmetic of the ops with these base names; refuses a second rule for one of them."""

    def register(function: Rule) -> Rule:
        for base in bases:
            if base in _RULES:
                raise ValueError(f"a FLOP rule for {base!r} exists already")
            _RULES[base] = function
        return function

    return register


def _matmul(a: Tensor, b: Tensor) -> Arithmetic:
    *batch, m, k = a.shape
    n = b.shape[-1]
    count = math.prod(batch)
    return count * m * n * k, (count, m, n, k)


@rule("mm", "bmm", "_int_mm")
def _mm(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    return _matmul(ins[0], ins[1])


@rule("_scaled_mm")
def _scaled_mm(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    return _matmul(ins[0], ins[1])


@rule("addmm", "baddbmm")
def _addmm(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    return _matmul(ins[1], ins[2])


@rule("addbmm")
def _addbmm(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    return _matmul(ins[1], ins[2])


@rule("mv")
def _mv(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    m, k = ins[0].shape
    return m * k, (1, m, 1, k)


@rule("addmv")
def _addmv(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    return _mv(ins[1:], outs, attrs)


@rule("addr")
def _addr(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    m, n = outs[0].shape
    return m * n, (1, m, n, 1)


@rule("dot", "vdot")
def _dot(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    k = ins[0].elements
    return k, (1, 1, 1, k)


@rule("linear")
def _linear(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    """x (…, k), weight (n, k)."""
    n, k = ins[1].shape
    m = math.prod(ins[0].shape[:-1])
    return m * n * k, (1, m, n, k)


@rule("grouped_mm", "grouped_mm_weight", "_grouped_mm", "_scaled_grouped_mm")
def _grouped_mm(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    """Rows (m, k) sorted by group against weights (g, k, n); or, for weight gradients,
    rows (r, m) against rows (r, n) summed within each group.

    Every row belongs to one group, so the arithmetic does not depend on how rows fall into groups.
    """
    a, b = ins[0], ins[1]
    if len(a.shape) == 2 and len(b.shape) == 3:
        m, k = a.shape
        groups, _, n = b.shape
        return m * n * k, (groups, max(1, m // groups), n, k)
    if len(a.shape) == 2 and len(b.shape) == 2:  # the rows, reduced over, are the grouped dimension
        rows, m = a.shape
        n = b.shape[1]
        groups = outs[0].shape[0]
        return rows * m * n, (groups, m, n, max(1, rows // groups))
    return _matmul(a, b)


@rule("convolution")
def _convolution(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    """Input (N, C, *spatial), weight (K, C/groups, *window); transposed: weight (C, K/groups, *window).

    Implicit product of one group: m = N·output positions, n = K/groups, k = C/groups·window.
    """
    return _convolution_arithmetic(ins[0], ins[1], outs[0], attrs)


def _convolution_arithmetic(x: Tensor, w: Tensor, y: Tensor, attrs: Mapping[str, Any]) -> Arithmetic:
    groups = int(attrs.get("groups", 1))
    window = math.prod(w.shape[2:])
    if attrs.get("transposed", False):  # every input position meets the whole window
        positions = x.shape[0] * math.prod(x.shape[2:])
        macs = positions * w.shape[0] * w.shape[1] * window
        return macs, (groups, positions, w.shape[1] * window, w.shape[0] // groups)
    positions = y.shape[0] * math.prod(y.shape[2:])
    macs = positions * w.shape[0] * w.shape[1] * window
    return macs, (groups, positions, w.shape[0] // groups, w.shape[1] * window)


@rule("convolution_backward")
def _convolution_backward(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    """Inputs (grad_output, input, weight); each wanted gradient of input or weight costs one forward."""
    macs, gemm = _convolution_arithmetic(ins[1], ins[2], ins[0], attrs)
    wanted = sum(bool(flag) for flag in attrs.get("grad_mask", (True, True))[:2])
    return macs * wanted, gemm


@rule("sdpa")
def _sdpa(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    """q (…, heads, queries, d), k (…, kv_heads, keys, d), v (…, kv_heads, keys, d_v): two products, counted in full.

    `attrs["window"]` (keys a query may see) shortens the keys counted. The product's rows are the queries of all heads
    that share one key head, as kernels for grouped queries pack them.
    """
    q, k, v = ins[:3]
    *lead, queries, depth = q.shape
    keys = k.shape[-2]
    window = int(attrs.get("window", 0) or 0)
    if window:
        keys = min(keys, window)
    batch = math.prod(lead)
    shared = max(1, lead[-1] // k.shape[-3]) if lead and len(k.shape) > 2 else 1
    return batch * queries * keys * (depth + v.shape[-1]), (batch // shared, queries * shared, keys, depth)


@rule("sdpa_backward")
def _sdpa_backward(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    """Inputs (grad_out, q, k, v, …): the four gradient products; scores that a kernel recomputes are not counted."""
    macs, gemm = _sdpa(ins[1:4], outs, attrs)
    return 2 * macs, gemm


@rule("mkldnn_rnn_layer")
def _recurrent(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    """Input (steps, batch, features), then input and hidden weights: each meets every step of every sequence."""
    positions = math.prod(ins[0].shape[:-1])
    return positions * (ins[1].elements + ins[2].elements), None


@rule("mkldnn_rnn_layer_backward")
def _recurrent_backward(ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Arithmetic:
    macs, _ = _recurrent(ins, outs, attrs)
    return 2 * macs, None


_BATCH_NORMS = frozenset({
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "batch_norm_with_update",
    "cudnn_batch_norm",
})
_OTHER_NORMS = frozenset({"native_layer_norm", "native_group_norm"})
_PER_OUTPUT = {  # resampling: what fvcore counts per element of the output
    "upsample_nearest2d": 1,
    "upsample_bilinear2d": 4,
    "grid_sampler_2d": 4,
}


def _fvcore_extra(base: str, ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]) -> int:
    """What fvcore 0.1.5 counts besides products (its `nn/jit_handles.py`, `nn/flop_count.py`), forward only.

    A batch norm with known statistics is one multiply-add per element to scale and one to shift; every other
    normalisation 5 with scale and shift, 4 without: so is a batch norm that takes statistics of its own input, as
    weight standardisation does.
    """
    if base in _BATCH_NORMS:
        affine = bool(attrs.get("affine", True))
        per_element = (4 if attrs.get("training", False) else 1) + affine
        return per_element * ins[0].elements
    if base in _OTHER_NORMS:
        return (5 if attrs.get("affine", True) else 4) * ins[0].elements
    if base in _PER_OUTPUT:
        return _PER_OUTPUT[base] * outs[0].elements
    pools = base == "_adaptive_avg_pool2d" or (  # pooling to one pixel runs as this mean
        base == "mean" and attrs.get("dims") == (-1, -2) and len(outs[0].shape) == len(ins[0].shape)
    )
    return ins[0].elements if pools else 0


# Kinds whose arithmetic the "matmul" convention counts as nothing, on purpose.
_FREE_OF_MACS = frozenset({
    "normalization", "softmax", "reduction", "pooling", "resample", "embedding", "indexing", "sort", "scan", "copy",
    "random", "fill", "loss", "optimizer", "scalar_read", "view", "pointwise", "communication",
})
_OUTPUT_SIZED = frozenset({"embedding", "index", "index_select", "_unsafe_index", "gather", "take", "nonzero"})
_WRITE_SOURCE_SIZED = frozenset({"index_put", "_unsafe_index_put", "scatter", "scatter_add", "index_add",
                                 "index_copy", "scatter_reduce"})
_WRITE_ONLY = frozenset({"copy", "fill", "zero", "_foreach_zero", "_foreach_copy"})
_DISPATCHED = frozenset({"matmul", "batched_matmul", "grouped_matmul", "convolution", "attention", "recurrent"})


def work_of(
    name: str, kind: str, ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Work:
    """Arithmetic and traffic of one op from its name, kind, tensors and attributes."""
    base = base_name(name)
    macs, gemm = 0, None
    counted = True
    arithmetic = _RULES.get(base)
    if arithmetic is not None:
        macs, gemm = arithmetic(ins, outs, attrs)
    elif kind not in _FREE_OF_MACS:
        counted = False
    norm_macs = _fvcore_extra(base, ins, outs, attrs)
    read, written = _traffic(base, kind, ins, outs, attrs)
    return Work(macs, norm_macs, read, written, gemm, _compute_dtype(kind, ins, outs), counted)


def _traffic(
    base: str, kind: str, ins: Sequence[Tensor], outs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> tuple[int, int]:
    """Bytes read and written: each distinct tensor once, with the exceptions named above."""
    if kind in ("view", "scalar_read"):
        return 0, 0
    written = sum(t.nbytes for t in outs)
    if "read_elements" in attrs:
        table = ins[0]
        rows = math.ceil(attrs["read_elements"] * dtype_bytes(table.dtype))
        return rows + sum(t.nbytes for t in ins[1:]), written
    if base in _OUTPUT_SIZED:  # only the picked elements of the table are touched
        return sum(t.nbytes for t in outs) + sum(t.nbytes for t in ins[1:]), written
    if base in _WRITE_SOURCE_SIZED and len(ins) > 1:
        source = ins[-1].nbytes
        return sum(t.nbytes for t in ins[1:]) + source, source
    if base in _WRITE_ONLY:  # the old contents are not read
        skip = len(outs) if base.startswith("_foreach") else 1
        return sum(t.nbytes for t in ins[skip:]), written
    return sum(t.nbytes for t in ins), written


def _compute_dtype(kind: str, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> str:
    """The element type the arithmetic runs in: the widest-read floating operand, else the output's."""
    candidates = ins if kind in _DISPATCHED else (*outs, *ins)
    for t in candidates:
        if is_floating(t.dtype) or t.dtype.startswith("complex"):
            return t.dtype
    return candidates[0].dtype if candidates else "float32"
