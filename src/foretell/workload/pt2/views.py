"""Views: ops that move nothing, and those that copy only where a view will not do.

Strides are worked out here and not taken from the archive: whether a later reshape copies depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from foretell.graph.kinds import base_name
from foretell.workload.pt2.builder import Builder, Meta, Shape, row_major, view_strides
from foretell.workload.pt2.lowering import Args, Results, lower

__all__ = ["channels_last"]

_CHANNELS_LAST = (2, 3)  # enum MemoryFormat of the archive's schema
_Maker = Callable[[Builder, str, Args, int, Sequence[Meta]], Results]


def _view(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    if name == "aten.view.dtype":
        return [b.view(name, x, stated[0].shape, stated[0].strides, stated[0].dtype)]
    shape = _sized(b, x, a.numbers("size", default=0) if "size" in a.values else stated[0].shape)
    strides = view_strides(b.shape(x), b.strides(x), shape)
    if strides is not None:
        return [b.view(name, x, shape, strides)]
    # A fused kernel laid the operand out otherwise than the program says: what was a view there is a copy here.
    return [b.reshape(x, shape)]


def _sized(b: Builder, x: int, size: Shape) -> Shape:
    """A shape in which one size may be left open as -1."""
    total = math.prod(b.shape(x))
    if -1 in size:
        known = math.prod(n for n in size if n != -1)
        size = tuple(total // known if n == -1 and known else max(n, 0) for n in size)
    if math.prod(size) != total:
        raise ValueError(f"{b.shape(x)} has not the elements of {size}")
    return size


def _expand(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    return [b.expand(x, stated[0].shape)]


def _permute(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    rank = len(b.shape(x))
    dims = [d + rank if d < 0 else d for d in (a.numbers("dims") if rank else ())]
    if sorted(dims) != list(range(rank)):
        raise ValueError(f"{dims} is no order of {rank} dimensions")
    return [b.permute(x, dims, name)]


def _transpose(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    rank = len(b.shape(x))
    dims = [a.dim(key, rank) for key in ("dim0", "dim1")]
    return [b.transpose(x, dims[0], dims[1], name) if rank else b.view(name, x, (), ())]


def _t(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    rank = len(b.shape(x))
    return [b.transpose(x, 0, 1, name) if rank == 2 else b.view(name, x, b.shape(x), b.strides(x))]


def _squeeze(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    shape, strides = b.shape(x), b.strides(x)
    rank = len(shape)
    given = a.values.get("dim")
    wanted = range(rank) if given is None else [d + rank if d < 0 else d for d in a.numbers("dim")]
    kept = [d for d in range(rank) if d not in wanted or shape[d] != 1]
    return [b.view(name, x, tuple(shape[d] for d in kept), tuple(strides[d] for d in kept))]


def _unsqueeze(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    return [b.unsqueeze(x, a.dim("dim", len(b.shape(x)) + 1))]


def _slice(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    shape, strides = list(b.shape(x)), list(b.strides(x))
    dim, step = a.dim("dim", len(shape), 0), a.number("step", 1)
    size = shape[dim]
    if step < 1:
        raise ValueError(f"it steps by {step}")
    start, end = (_clamped(a.number(key, other), size) for key, other in (("start", 0), ("end", size)))
    if start == 0 and end == size and step == 1:
        return [x]  # indexing with a bare colon makes nothing
    shape[dim] = max(0, -((start - end) // step))
    strides[dim] *= step
    return [b.view(name, x, tuple(shape), tuple(strides))]


def _clamped(at: int, size: int) -> int:
    return min(max(at + size if at < 0 else at, 0), size)


def _select(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    shape, strides = list(b.shape(x)), list(b.strides(x))
    dim = a.dim("dim", len(shape))
    del shape[dim], strides[dim]
    return [b.view(name, x, tuple(shape), tuple(strides))]


def _pieces(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    """Parts along one dimension, of the sizes the archive says."""
    dim = a.dim("dim", len(b.shape(x)), 0)
    return _parts(b, name, x, dim, [meta.shape[dim] for meta in stated])


def _parts(b: Builder, name: str, x: int, dim: int, sizes: Sequence[int]) -> Results:
    shape, strides = b.shape(x), b.strides(x)
    if sum(sizes) != shape[dim]:
        raise ValueError(f"parts of {list(sizes)[:8]} do not make up {shape[dim]}")
    outputs = [b.alias(x, (*shape[:dim], size, *shape[dim + 1 :]), strides) for size in sizes]
    b.add(name, [x], outputs)
    return outputs


def _unbind(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    shape, strides = list(b.shape(x)), list(b.strides(x))
    dim = a.dim("dim", len(shape), 0)
    if shape[dim] != len(stated):
        raise ValueError(f"{shape[dim]} parts are stated as {len(stated)}")
    del shape[dim], strides[dim]
    outputs = [b.alias(x, tuple(shape), tuple(strides)) for _ in stated]
    b.add(name, [x], outputs)
    return outputs


def _stated(b: Builder, name: str, a: Args, x: int, stated: Sequence[Meta]) -> Results:
    """Views whose strides are as the archive has them."""
    outputs = [b.alias(x, meta.shape, meta.strides, meta.dtype) for meta in stated]
    b.add(name, [x], outputs)
    return outputs


_MAKERS: dict[str, _Maker] = {
    "view": _view,
    "_unsafe_view": _view,
    "_reshape_alias": _view,
    "expand": _expand,
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "slice": _slice,
    "select": _select,
    "split": _pieces,
    "split_with_sizes": _pieces,
    "unsafe_split": _pieces,
    "unsafe_split_with_sizes": _pieces,
    "unbind": _unbind,
    "as_strided": _stated,
    "diagonal": _stated,
    "unfold": _stated,
    "view_as_real": _stated,
    "view_as_complex": _stated,
    "real": _stated,
    "imag": _stated,
    "_conj": _stated,
    "_neg_view": _stated,
}


@lower(*(f"aten.{base}.*" for base in _MAKERS))
def _viewed(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    return _MAKERS[base_name(a.name)](b, a.name, a, a.tensor("self", "input"), stated)


# --- ops that PyTorch makes of these ----------------------------------------------------------------------------


@lower("aten.reshape.default", "aten.view_as.default", "aten.unflatten.int", "aten.reshape_as.default")
def _reshape(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    return [b.reshape(x, _sized(b, x, stated[0].shape))]


@lower("aten.flatten.using_ints")
def _flatten(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    if len(stated[0].shape) == len(b.shape(x)):
        return [x]
    return [b.reshape(x, _sized(b, x, stated[0].shape))]


@lower("aten.contiguous.default")
def _contiguous(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    if a.values.get("memory_format") in _CHANNELS_LAST:
        strides = channels_last(b.shape(x))
        same = _equal(b.shape(x), b.strides(x), strides)
        return [x] if same else [b.one("aten.clone.default", [x], Meta(b.shape(x), stated[0].dtype, strides))]
    return [x] if b.contiguous(x) else [b.one("aten.clone.default", [x], b.meta(x))]


def channels_last(shape: Shape) -> Shape:
    """Strides of images whose channels lie innermost."""
    order = (0, *range(2, len(shape)), 1)
    strides = dict(zip(order, row_major([shape[d] for d in order]), strict=True))
    return tuple(strides[d] for d in range(len(shape)))


def _equal(shape: Shape, strides: Shape, others: Shape) -> bool:
    return all(n == 1 or s == o for n, s, o in zip(shape, strides, others, strict=True))


@lower("aten.to.*", "aten.type_as.default", "aten.float.default", "aten.half.default", "aten.bfloat16.default",
       "aten.double.default", "aten.long.default", "aten.int.default", "aten.bool.default")
def _to(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    wanted = stated[0]
    if a.values.get("memory_format") in _CHANNELS_LAST:
        strides = channels_last(b.shape(x))
        if not _equal(b.shape(x), b.strides(x), strides):
            return [b.one("aten._to_copy.default", [x], Meta(wanted.shape, wanted.dtype, strides))]
    if wanted.dtype == b.tensors[x].dtype and not a.flag("copy"):
        return [x]
    like = b.like(x)
    return [b.one("aten._to_copy.default", [x], Meta(like.shape, wanted.dtype, like.strides))]


@lower("aten.chunk.default")
def _chunk(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    return _pieces(b, "aten.split.Tensor", a, a.tensor("self", "input"), stated)


@lower("aten.split.sizes")
def _split_sizes(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    return _pieces(b, "aten.split_with_sizes.default", a, a.tensor("self", "input"), stated)


@lower("aten.tensor_split.*", "aten.hsplit.*", "aten.vsplit.*")
def _tensor_split(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    return [b.view("aten.slice.Tensor", x, meta.shape, b.strides(x)) for meta in stated]


@lower("aten.narrow.*")
def _narrow(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    return [b.view("aten.slice.Tensor", x, stated[0].shape, b.strides(x))]


@lower("aten.numpy_T.default")
def _numpy_t(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    return [b.permute(x, range(len(b.shape(x)) - 1, -1, -1))]


@lower("aten.mT.default", "aten.adjoint.default")
def _mt(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    return [b.transpose(a.tensor("self", "input"), -2, -1)]


@lower("aten.swapaxes.default", "aten.swapdims.default")
def _swapaxes(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    rank = len(b.shape(x))
    names = ("axis0", "axis1") if "axis0" in a.values else ("dim0", "dim1")
    return [b.transpose(x, a.dim(names[0], rank), a.dim(names[1], rank))]


@lower("aten.movedim.*", "aten.moveaxis.*")
def _movedim(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    rank = len(b.shape(x))
    source, target = (
        [d + rank if d < 0 else d for d in a.numbers(name)] for name in ("source", "destination")
    )
    if len(source) != len(target) or not {*source, *target} <= set(range(rank)):
        raise ValueError(f"{source} cannot be moved to {target} among {rank} dimensions")
    moved = dict(zip(target, source, strict=True))
    rest = iter(d for d in range(rank) if d not in source)
    return [b.permute(x, [moved[d] if d in moved else next(rest) for d in range(rank)])]


@lower("aten.expand_as.default", "aten.broadcast_to.default")
def _expand_as(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    return [b.expand(a.tensor("self", "input"), stated[0].shape)]


@lower("aten.broadcast_tensors.default")
def _broadcast_tensors(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    return [b.expand(x, meta.shape) for x, meta in zip(a.tensors("tensors"), stated, strict=True)]


@lower("aten.meshgrid.*")
def _meshgrid(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    tensors = a.tensors("tensors")
    outputs = []
    for x, meta in zip(tensors, stated, strict=True):
        size = math.prod(b.shape(x))
        # The axis of each: where the archive's strides are not 0, or the only one of its size.
        axis = next((d for d, step in enumerate(meta.strides or row_major(meta.shape)) if step), 0)
        shape = tuple(size if d == axis else 1 for d in range(len(meta.shape)))
        outputs.append(b.expand(b.view("aten.view.default", x, shape, row_major(shape)), meta.shape))
    return outputs


@lower("aten.unsafe_chunk.default")
def _unsafe_chunk(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    return _pieces(b, "aten.unsafe_split.Tensor", a, a.tensor("self", "input"), stated)

