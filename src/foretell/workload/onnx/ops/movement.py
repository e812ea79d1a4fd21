"""Views, copies, indexing: what moves values without computing on them."""

from __future__ import annotations

import math

from foretell.graph import is_floating
from foretell.workload.onnx.builder import Builder, row_major
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.ops.registry import translates
from foretell.workload.onnx.values import Shape, Value, slice_bounds


@translates("Identity")
def _identity(b: Builder, n: Node) -> list[Value]:
    return [n.value(0)]


@translates("Reshape", "Flatten")
def _reshape(b: Builder, n: Node) -> list[Value]:
    return [b.reshape(n.value(0), n.out()[0])]


@translates("Squeeze", "Unsqueeze")
def _squeeze(b: Builder, n: Node) -> list[Value]:
    """Strides of the dimensions that stay are kept: no copy, whatever the layout."""
    x, have, want = n.value(0), n.shape(0), n.out()[0]
    strides = x.strides or row_major(have)
    rank = max(len(have), len(want))
    axes = n.known(1, "axes")
    gone = {int(a) % rank for a in axes} if axes else {i for i, s in enumerate(have) if s == 1}
    if n.op == "Squeeze":
        kept = tuple(s for i, s in enumerate(strides) if i not in gone)
        return [b.view("aten.squeeze.dims", x, want, kept)]
    left = iter(strides)
    new = [0 if i in gone else next(left) for i in range(len(want))]
    for i in reversed(range(len(want))):
        if i in gone:
            new[i] = want[i + 1] * new[i + 1] if i + 1 < len(want) else 1
    return [b.view("aten.unsqueeze.default", x, want, tuple(new))]


@translates("Transpose")
def _transpose(b: Builder, n: Node) -> list[Value]:
    rank = len(n.shape(0))
    order = [int(d) for d in n.ints("perm") or reversed(range(rank))]
    if sorted(order) != list(range(rank)):
        raise ValueError(f"{order[:8]} is no order of {rank} dimensions")
    moved = sum(d != i for i, d in enumerate(order))
    name = "aten.t.default" if rank == 2 else "aten.transpose.int" if moved == 2 else "aten.permute.default"
    return [b.permute(n.value(0), order, name)]


@translates("Expand")
def _expand(b: Builder, n: Node) -> list[Value]:
    x, shape = n.value(0), n.out()[0]
    return [x if x.shape == shape else b.expand(x, shape)]


@translates("Slice")
def _slice(b: Builder, n: Node) -> list[Value]:
    """A view; a negative step copies, as PyTorch's flip does."""
    x, shape, out = n.value(0), n.shape(0), n.out()[0]
    arrays = [None if v is None else v.known for v in n.inputs]
    pairs = zip(arrays[1:], n.inputs[1:], strict=True)
    if "starts" not in n.attrs and any(array is None and value is not None for array, value in pairs):
        return [b.view("aten.slice.Tensor", x, out, x.strides or row_major(shape))]
    if out == shape and all(step > 0 for step in slice_bounds(arrays, n.attrs, len(shape))[3]):
        return [x]
    strides = list(x.strides or row_major(shape))
    flipped = []
    for _, _, axis, step in zip(*slice_bounds(arrays, n.attrs, len(shape)), strict=True):
        strides[axis] *= abs(step)
        if step < 0:
            flipped.append(axis)
    if not flipped:
        return [b.view("aten.slice.Tensor", x, out, tuple(strides))]
    part = b.view("aten.slice.Tensor", x, out, tuple(strides))
    return b.emit("aten.flip.default", [part], [(out, x.dtype)])


@translates("Split")
def _split(b: Builder, n: Node) -> list[Value]:
    x = n.value(0)
    strides = x.strides or row_major(n.shape(0))
    return b.views("aten.split_with_sizes.default", x, [(n.out(i)[0], strides) for i in range(len(n.outputs))])


@translates("Concat")
def _concat(b: Builder, n: Node) -> list[Value]:
    shape, dtype = n.out()
    parts = [v for v in n.inputs if v is not None]
    if len(parts) == 1:
        return [parts[0]]
    axis = n.number("axis", 0) % len(shape)
    return [concatenate(b, parts, shape, dtype, axis)]


def concatenate(b: Builder, parts: list[Value], shape: Shape, dtype: str, axis: int) -> Value:
    """One copy of all parts, whose dimensions lie as the first part's."""
    first = parts[0]
    strides = b.like(shape, [Value(shape, dtype, strides=first.strides)]) if first.strides is not None else None
    return b.emit("aten.cat.default", parts, [(shape, dtype, strides)])[0]


@translates("Tile")
def _tile(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.repeat.default", [n.value(0)], [n.out()])


@translates("Pad")
def _pad(b: Builder, n: Node) -> list[Value]:
    if n.out()[0] == n.shape(0):
        return [n.value(0)]
    spatial = min(max(len(n.shape(0)) - 2, 1), 3)
    names = {"reflect": f"reflection_pad{min(spatial, 2)}d", "edge": f"replication_pad{spatial}d", "wrap": "pad"}
    name = names.get(n.text("mode", "constant"), "constant_pad_nd")
    return b.emit(f"aten.{name}.default", [n.value(0)], [n.out()])


@translates("DepthToSpace", "SpaceToDepth")
def _depth_to_space(b: Builder, n: Node) -> list[Value]:
    name = "pixel_shuffle" if n.op == "DepthToSpace" else "pixel_unshuffle"
    return b.emit(f"aten.{name}.default", [n.value(0)], [n.out()])


@translates("Trilu")
def _trilu(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.triu.default" if n.number("upper", 1) else "aten.tril.default", [n.value(0)], [n.out()])


@translates("ReverseSequence")
def _reverse(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.flip.default", [n.value(0)], [n.out()])


@translates("CenterCropPad")
def _crop_pad(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.constant_pad_nd.default", [n.value(0)], [n.out()])


# --- indexing ---------------------------------------------------------------------------------------------------


@translates("Gather")
def _gather(b: Builder, n: Node) -> list[Value]:
    """One known number selects a view; rows of a table of weights are an embedding; else indices pick copies."""
    table, index, (shape, dtype) = n.value(0), n.value(1), n.out()
    axis = n.number("axis", 0) % max(len(n.shape(0)), 1)
    if index.known is not None and index.shape == ():
        strides = list(table.strides or row_major(n.shape(0)))
        del strides[axis]
        return [b.view("aten.select.int", table, shape, tuple(strides))]
    if index.known is not None and index.known.ndim == 1 and index.known.size > 1:
        steps = set((index.known[1:] - index.known[:-1]).tolist())
        if steps == {1}:  # neighbours: a slice
            return [b.view("aten.slice.Tensor", table, shape, table.strides or row_major(n.shape(0)))]
    if axis == 0 and len(n.shape(0)) == 2 and is_floating(table.dtype) and table.fixed:
        return b.emit("aten.embedding.default", [table, index], [(shape, dtype)])
    return b.emit("aten.index.Tensor", [table, index], [(shape, dtype)])


@translates("GatherElements")
def _gather_elements(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.gather.default", [n.value(0), n.value(1)], [n.out()])


@translates("GatherND")
def _gather_nd(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.index.Tensor", [n.value(0), n.value(1)], [n.out()])


@translates("ScatterND", "Scatter", "ScatterElements", "TensorScatter")
def _scatter(b: Builder, n: Node) -> list[Value]:
    """Out of place: a copy, then the written elements in it."""
    x = n.value(0)
    whole = b.emit("aten.clone.default", [x], [(n.shape(0), x.dtype)])[0]
    name = "aten.index_put_.default" if n.op == "ScatterND" else "aten.scatter_.src"
    rest = [n.input(2), n.value(1)] if n.op == "TensorScatter" else [n.value(1), n.input(2)]
    return b.into(name, whole, rest)


@translates("NonZero")
def _nonzero(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.nonzero.default", [n.value(0)], [n.out()])


@translates("Compress")
def _compress(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.masked_select.default", [n.value(0), n.value(1)], [n.out()])


@translates("OneHot")
def _one_hot(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.one_hot.default", [n.value(0)], [n.out()])


# --- made from nothing ------------------------------------------------------------------------------------------

_FILLS = {
    "ConstantOfShape": "full", "Range": "arange", "EyeLike": "eye", "BlackmanWindow": "full", "HannWindow": "full",
    "HammingWindow": "full", "RandomNormal": "randn", "RandomUniform": "rand", "RandomNormalLike": "randn_like",
    "RandomUniformLike": "rand_like", "Bernoulli": "bernoulli", "Multinomial": "multinomial",
}  # fmt: skip


@translates(*_FILLS)
def _fill(b: Builder, n: Node) -> list[Value]:
    reads = [n.value(0)] if n.op in ("Bernoulli", "Multinomial") else []
    return b.emit(f"aten.{_FILLS[n.op]}.default", reads, [n.out()])


# --- sequences of tensors, which exist on the host only ----------------------------------------------------------


@translates("SequenceEmpty", "SequenceConstruct")
def _sequence(b: Builder, n: Node) -> list[Value]:
    return [_of([v for v in n.inputs if v is not None])]


@translates("SequenceInsert")
def _insert(b: Builder, n: Node) -> list[Value]:
    items = list(_items(n))
    items.insert(_position(n, 2, len(items)), n.value(1))
    return [_of(items)]


@translates("SequenceErase")
def _erase(b: Builder, n: Node) -> list[Value]:
    items = list(_items(n))
    del items[_position(n, 1, len(items) - 1)]
    return [_of(items)]


@translates("SequenceAt")
def _at(b: Builder, n: Node) -> list[Value]:
    return [_items(n)[_position(n, 1, 0)]]


@translates("SplitToSequence")
def _split_to_sequence(b: Builder, n: Node) -> list[Value]:
    x, shape = n.value(0), n.shape(0)
    axis = n.number("axis", 0) % len(shape)
    length, sizes = shape[axis], n.known(1)
    if n.input(1) is None:
        sizes = [1] * length
    elif sizes is None:
        raise ValueError("its sizes depend on values")
    elif n.shape(1) == ():
        size = max(int(sizes[0]), 1)
        sizes = [min(size, length - at) for at in range(0, length, size)]
    if len(sizes) > _MOST_ITEMS:
        raise ValueError(f"makes {len(sizes):,} parts")
    strides = x.strides or row_major(shape)
    parts = [((*shape[:axis], int(size), *shape[axis + 1 :]), strides) for size in sizes]
    items = b.views("aten.split_with_sizes.default", x, parts)
    if n.input(1) is None and not n.number("keepdims", 1):
        items = [b.reshape(item, (*shape[:axis], *shape[axis + 1 :])) for item in items]
    return [_of(items)]


_MOST_ITEMS = 4096


@translates("ConcatFromSequence")
def _concat_sequence(b: Builder, n: Node) -> list[Value]:
    items, axis = _items(n), n.number("axis", 0)
    first = items[0]
    assert first.shape is not None
    if n.number("new_axis", 0):
        axis %= len(first.shape) + 1
        shape = (*first.shape[:axis], len(items), *first.shape[axis:])
        return b.emit("aten.stack.default", items, [(shape, first.dtype)])
    axis %= len(first.shape)
    length = sum(v.shape[axis] for v in items if v.shape is not None)
    return [concatenate(b, items, (*first.shape[:axis], length, *first.shape[axis + 1 :]), first.dtype, axis)]


def _of(items: list[Value]) -> Value:
    if len(items) > _MOST_ITEMS:
        raise ValueError(f"a sequence of {len(items):,} tensors")
    return Value(None, "int64", items=items)


def _items(n: Node) -> list[Value]:
    items = n.value(0).items
    if items is None:
        raise ValueError("its input is not a known sequence")
    return items


def _position(n: Node, index: int, default: int) -> int:
    known = n.known(index)
    if known is None and n.input(index) is not None:
        raise ValueError("its position depends on values")
    return int(known[0]) if known else default


def stacked(b: Builder, values: list[Value], axis: int) -> Value:
    """Values of one shape along a new dimension."""
    first = values[0]
    assert first.shape is not None
    shape = (*first.shape[:axis], len(values), *first.shape[axis:])
    if len(values) == 1:
        strides = list(first.strides or row_major(first.shape))
        strides.insert(axis, math.prod(first.shape[axis:]))
        return b.view("aten.unsqueeze.default", first, shape, tuple(strides))
    return b.emit("aten.stack.default", values, [(shape, first.dtype)])[0]


