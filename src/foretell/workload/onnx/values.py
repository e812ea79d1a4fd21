"""`Value`: what a name in an ONNX graph stands for, and arithmetic on the small ones whose content is known.

Exporters write shapes as graphs: ``Shape → Gather → Concat → Reshape``. With every input's shape known these are
numbers, which PyTorch would hold on the host; here they are folded with NumPy, within `MOST_KNOWN` elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]

MOST_KNOWN = 4096


@dataclass(slots=True)
class Value:
    """One value of an ONNX graph.

    `shape` is None where it cannot be known before the run. `tensor` is the graph's tensor, once an op has used or made
    it. `known` is the content of a small constant. `fixed` values do not change between runs: weights, and what is
    computed from weights alone. `role` is that of a fixed value's storage. `later` makes the tensor when something asks
    for it: a dequantised value exists only where no int8 kernel takes `source`, the integers under it.
    """

    shape: Shape | None
    dtype: str
    tensor: int | None = None
    strides: Shape | None = None
    known: Array | None = None
    fixed: bool = False
    role: str = "buffer"
    items: list[Value] | None = None  # of a sequence
    source: Value | None = None
    later: Callable[[], int] | None = None
    packed: bool = False  # a stored tensor whose bytes are not its shape's: sparse
    nbytes: int | None = None
    protos: dict[str, Any] = field(default_factory=dict)  # its type, and its content, as onnx takes them

    @property
    def elements(self) -> int:
        """Number of elements; 0 where the shape is not known."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def is_number(self) -> bool:
        """Whether it is one known number, which a framework passes to a kernel by value."""
        return self.known is not None and self.known.size <= 1 and self.role != "parameter"


def constant(array: Array) -> Value:
    """A known value."""
    return Value(array.shape, str(array.dtype), known=array, fixed=True)


# --- folding ----------------------------------------------------------------------------------------------------

Fold = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def _division(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.asarray(np.trunc(a / b), dtype=a.dtype)  # ONNX divides integers towards zero
    return np.asarray(a / b)


def _axes(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[int, ...] | None:
    axes = attrs.get("axes")
    if axes is None and len(inputs) > 1 and inputs[1] is not None:
        axes = inputs[1].reshape(-1).tolist()
    return None if axes is None else tuple(int(a) for a in axes)


def _slice(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    x = inputs[0]
    starts, ends, axes, steps = slice_bounds(inputs, attrs, x.ndim)
    index = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0 and end < -x.shape[axis]:
            index[axis] = slice(start, None, step)
        else:
            index[axis] = slice(start, end, step)
    return x[tuple(index)]


def slice_bounds(
    inputs: Sequence[Any], attrs: Mapping[str, Any], rank: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Starts, ends, axes and steps of a Slice, whose first input's content is not looked at."""
    if "starts" in attrs:
        starts, ends = list(attrs["starts"]), list(attrs["ends"])
        axes, steps = list(attrs.get("axes", range(len(starts)))), [1] * len(starts)
    else:
        parts = [None if x is None else [int(v) for v in x.reshape(-1)] for x in inputs[1:5]]
        parts += [None] * (4 - len(parts))
        starts, ends = parts[0] or [], parts[1] or []
        axes = parts[2] if parts[2] is not None else list(range(len(starts)))
        steps = parts[3] if parts[3] is not None else [1] * len(starts)
    return starts, ends, [a % rank if rank else a for a in axes], steps


def _reshape(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    x, target = inputs[0], [int(d) for d in inputs[1].reshape(-1)]
    if not attrs.get("allowzero"):
        target = [x.shape[i] if d == 0 else d for i, d in enumerate(target)]
    return x.reshape(target)


def _range(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Array | None:
    start, limit, delta = (x.item() for x in inputs)
    if not delta or abs((limit - start) / delta) > MOST_KNOWN:
        return None
    return np.arange(start, limit, delta, dtype=inputs[0].dtype)


def _split(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> list[Array]:
    x, axis = inputs[0], int(attrs.get("axis", 0))
    sizes = attrs.get("split")
    if sizes is None and len(inputs) > 1 and inputs[1] is not None:
        sizes = inputs[1].tolist()
    if sizes is None:
        count = int(attrs["_outputs"])
        size = math.ceil(x.shape[axis] / count)
        sizes = [min(size, x.shape[axis] - i * size) for i in range(count)]
    return np.split(x, np.cumsum(sizes)[:-1].tolist(), axis)


def _scatter_nd(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    x, index, updates = inputs
    if attrs.get("reduction", b"none") not in (b"none", "none"):
        return None
    out = x.copy()
    out[tuple(np.moveaxis(index, -1, 0))] = updates
    return out


def _resized(shape: Sequence[int]) -> bool:
    return math.prod(max(int(d), 0) for d in shape) <= MOST_KNOWN


def _expand(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Array | None:
    shape = np.broadcast_shapes(inputs[0].shape, tuple(int(d) for d in inputs[1].reshape(-1)))
    return np.broadcast_to(inputs[0], shape) if _resized(shape) else None


def _filled(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Array | None:
    shape = tuple(int(d) for d in inputs[0].reshape(-1))
    value = attrs.get("value")
    fill = np.zeros(1, np.float32) if value is None else value
    return np.full(shape, fill.reshape(-1)[0], fill.dtype) if _resized(shape) else None


def _tile(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Array | None:
    repeats = [int(r) for r in inputs[1].reshape(-1)]
    return np.tile(inputs[0], repeats) if _resized([*inputs[0].shape, *repeats]) else None


def _reduced(function: Callable[..., Any]) -> Fold:
    def fold(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        keep = bool(attrs.get("keepdims", 1))
        return function(inputs[0], axis=_axes(inputs, attrs), keepdims=keep).astype(inputs[0].dtype)

    return fold


def _each(function: Callable[..., Any]) -> Fold:
    """Elementwise with broadcasting."""

    def fold(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        return function(*inputs) if _resized(np.broadcast_shapes(*(x.shape for x in inputs))) else None

    return fold


def _same_type(function: Callable[..., Any]) -> Fold:
    each = _each(function)

    def fold(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        result = each(inputs, attrs)
        return None if result is None else np.asarray(result).astype(inputs[0].dtype)

    return fold


def _gather(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    x, index = inputs
    axis = int(attrs.get("axis", 0))
    size = x.size // max(x.shape[axis], 1) * index.size
    return np.take(x, index, axis=axis) if size <= MOST_KNOWN else None


def _extreme(function: Any) -> Fold:
    return _each(lambda *inputs: function.reduce(np.broadcast_arrays(*inputs)))


def _squeezed(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    return np.squeeze(inputs[0], _axes(inputs, attrs))


FOLDS: dict[str, Fold] = {
    "Identity": lambda i, a: i[0],
    "Gather": _gather,
    "Concat": lambda i, a: np.concatenate(i, axis=int(a.get("axis", 0))),
    "Unsqueeze": lambda i, a: np.expand_dims(i[0], _axes(i, a) or ()),
    "Squeeze": _squeezed,
    "Slice": _slice,
    "Reshape": _reshape,
    "Flatten": lambda i, a: i[0].reshape(math.prod(i[0].shape[: int(a.get("axis", 1))]), -1),
    "Transpose": lambda i, a: np.transpose(i[0], a.get("perm")),
    "Range": _range,
    "Split": _split,
    "Expand": _expand,
    "ConstantOfShape": _filled,
    "Tile": _tile,
    "ScatterND": _scatter_nd,
    "CastLike": lambda i, a: i[0].astype(i[1].dtype),
    "Add": _each(np.add),
    "Sub": _each(np.subtract),
    "Mul": _each(np.multiply),
    "Div": _each(_division),
    "Mod": lambda i, a: _each(np.fmod if a.get("fmod") else np.mod)(i, a),
    "Pow": _same_type(np.power),
    "Neg": _each(np.negative),
    "Abs": _each(np.abs),
    "Floor": _each(np.floor),
    "Ceil": _each(np.ceil),
    "Round": _each(np.round),
    "Sqrt": _each(np.sqrt),
    "Reciprocal": _each(np.reciprocal),
    "Exp": _each(np.exp),
    "Log": _each(np.log),
    "Sign": _each(np.sign),
    "Min": _extreme(np.minimum),
    "Max": _extreme(np.maximum),
    "Equal": _each(np.equal),
    "Greater": _each(np.greater),
    "GreaterOrEqual": _each(np.greater_equal),
    "Less": _each(np.less),
    "LessOrEqual": _each(np.less_equal),
    "And": _each(np.logical_and),
    "Or": _each(np.logical_or),
    "Xor": _each(np.logical_xor),
    "Not": _each(np.logical_not),
    "Where": _each(np.where),
    "ReduceProd": _reduced(np.prod),
    "ReduceSum": _reduced(np.sum),
    "ReduceMax": _reduced(np.max),
    "ReduceMin": _reduced(np.min),
    "NonZero": lambda i, a: np.array(np.nonzero(i[0]), dtype=np.int64),
}


def fold(name: str, inputs: Sequence[Array | None], attrs: Mapping[str, Any]) -> list[Array] | None:
    """What an op gives on known inputs; None where it is not folded, or fails, or gives more than `MOST_KNOWN`."""
    function = FOLDS.get(name)
    if function is None or not inputs or sum(x.size for x in inputs if x is not None) > 4 * MOST_KNOWN:
        return None
    try:
        with np.errstate(all="ignore"):
            result = function(inputs, attrs)
    except (ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, OverflowError, AttributeError):
        return None
    if result is None:
        return None
    arrays = [np.asarray(r) for r in (result if isinstance(result, list) else [result])]
    return arrays if all(a.size <= MOST_KNOWN and a.ndim <= 64 for a in arrays) else None
