"""Pooling and resampling."""

from __future__ import annotations

from foretell.workload.onnx.builder import Builder
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.ops.registry import translates
from foretell.workload.onnx.values import Value


@translates("MaxPool")
def _max_pool(b: Builder, n: Node) -> list[Value]:
    """PyTorch's kernel puts out the indices as well; one over a single dimension is the two-dimensional one."""
    x = n.value(0)
    out = (*n.out(), b.like(n.out()[0], [x]) if x.shape == n.out()[0] else _order(b, x, n))
    window = tuple(n.ints("kernel_shape") or ())
    name = f"aten.max_pool{max(2, len(window))}d_with_indices.default"
    indices = [(out[0], "int64", out[2])] if n.value(0).dtype not in ("int8", "uint8") else []
    return b.emit(name, [x], [out, *indices], {"window": window})


@translates("AveragePool", "LpPool")
def _average_pool(b: Builder, n: Node) -> list[Value]:
    window = tuple(n.ints("kernel_shape") or ())
    name = f"aten.avg_pool{max(2, len(window))}d.default"
    return b.emit(name, [n.value(0)], [(*n.out(), _order(b, n.value(0), n))], {"window": window})


def _order(b: Builder, x: Value, n: Node) -> tuple[int, ...] | None:
    """Strides of a smaller result whose dimensions lie as its input's."""
    shape = n.out()[0]
    return b.like(shape, [Value(shape, x.dtype, strides=x.strides)]) if x.strides is not None else None


@translates("GlobalAveragePool", "GlobalLpPool")
def _global_average(b: Builder, n: Node) -> list[Value]:
    """PyTorch pools to one pixel by a mean."""
    dims = tuple(-1 - i for i in range(len(n.shape(0)) - 2))
    name = "aten.mean.dim" if n.op == "GlobalAveragePool" else "aten.linalg_vector_norm.default"
    return b.emit(name, [n.value(0)], [n.out()], {"dims": dims})


@translates("GlobalMaxPool")
def _global_max(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.adaptive_max_pool2d.default", [n.value(0)], [n.out(), (n.out()[0], "int64")])[:1]


@translates("MaxUnpool")
def _max_unpool(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.max_unpool2d.default", [n.value(0), n.value(1)], [n.out()])


@translates("Resize", "Upsample")
def _resize(b: Builder, n: Node) -> list[Value]:
    shape = n.out()[0]
    moved = sum(x != y for x, y in zip(shape, n.shape(0), strict=True))
    rank = max(len(shape) - 2, moved, 1)
    mode = n.text("mode", "nearest")
    names = {"linear": {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}, "cubic": {2: "bicubic2d"}}
    suffix = names.get(mode, {}).get(rank, "bicubic2d" if mode == "cubic" else f"nearest{min(rank, 3)}d")
    return b.emit(f"aten.upsample_{suffix}.default", [n.value(0)], [(*n.out(), _order(b, n.value(0), n))])


@translates("GridSample")
def _grid_sample(b: Builder, n: Node) -> list[Value]:
    name = "aten.grid_sampler_3d.default" if len(n.shape(0)) == 5 else "aten.grid_sampler_2d.default"
    return b.emit(name, [n.value(0), n.value(1)], [n.out()])


@translates("RoiAlign", "MaxRoiPool")
def _roi_align(b: Builder, n: Node) -> list[Value]:
    return b.emit("torchvision.roi_align.default", n.inputs, [n.out()])


@translates("Col2Im")
def _col2im(b: Builder, n: Node) -> list[Value]:
    return b.emit("aten.col2im.default", [n.value(0)], [n.out()])


@translates("NonMaxSuppression")
def _nms(b: Builder, n: Node) -> list[Value]:
    """Sorted by score, then compared: work that depends on the boxes, and no products."""
    return b.emit("torchvision.nms.default", [n.value(0), n.value(1)], [n.out()], kind="sort")
