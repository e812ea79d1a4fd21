"""Normalisations."""

from __future__ import annotations

from foretell.workload.onnx.builder import Builder, Output
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.ops.pointwise import elementwise
from foretell.workload.onnx.ops.registry import FUSED, MICROSOFT, translates
from foretell.workload.onnx.values import Shape, Value


@translates("BatchNormalization")
def _batch_norm(b: Builder, n: Node) -> list[Value]:
    x, shape = n.value(0), n.shape(0)
    training = bool(n.number("training_mode", 0))
    outputs = batch_norm(b, x, n.inputs[1:5], shape, training)
    return [outputs[0], n.value(3), n.value(4)] if training else outputs[:1]


def batch_norm(b: Builder, x: Value, rest: list[Value | None], shape: Shape, training: bool) -> list[Value]:
    """Result and saved statistics, which are empty where the statistics are given."""
    if not training:
        b.emit("aten.empty.memory_format", [], [((0,), "uint8")])  # the reserve that the dispatcher allocates
    saved = ((shape[1],) if training else (0,), "float32")
    attrs = {"training": training, "affine": bool(rest) and rest[0] is not None}
    outputs: list[Output] = [(shape, x.dtype, b.like(shape, [x])), saved, saved]
    return b.emit("aten.native_batch_norm.default", [x, *rest], outputs, attrs)


@translates("InstanceNormalization")
def _instance_norm(b: Builder, n: Node) -> list[Value]:
    """PyTorch runs it as a batch norm over one image of as many channels as there are planes."""
    x, shape = n.value(0), n.shape(0)
    planes = shape[0] * shape[1]
    flat = b.reshape(x, (1, planes, *shape[2:]))
    vectors: list[Value | None] = []
    for value in n.inputs[1:3]:
        if value is None or value.known is not None:
            vectors.append(value)
            continue
        wide = b.emit("aten.repeat.default", [value], [((planes,), value.dtype)])[0] if shape[0] > 1 else value
        vectors.append(wide)
    out = batch_norm(b, flat, vectors, (1, planes, *shape[2:]), training=True)[0]
    return [b.reshape(out, shape)]


@translates("LayerNormalization")
@translates("LayerNormalization", domain=MICROSOFT)
@translates("LayerNormalization", domain=FUSED)
def _layer_norm(b: Builder, n: Node) -> list[Value]:
    return layer_norm(b, n.value(0), n.input(1), n.input(2), n.number("axis", -1))


def layer_norm(b: Builder, x: Value, scale: Value | None, bias: Value | None, axis: int) -> list[Value]:
    """Result, mean and reciprocal standard deviation."""
    assert x.shape is not None
    axis %= len(x.shape)
    rows = ((*x.shape[:axis], *(1,) * (len(x.shape) - axis)), "float32")
    attrs = {"affine": scale is not None}
    return b.emit("aten.native_layer_norm.default", [x, scale, bias], [(x.shape, x.dtype), rows, rows], attrs)


@translates("RMSNormalization", "SimplifiedLayerNormalization")
@translates("SimplifiedLayerNormalization", domain=MICROSOFT)
def _rms_norm(b: Builder, n: Node) -> list[Value]:
    return rms_norm(b, n.value(0), n.input(1), n.number("axis", -1))


def rms_norm(b: Builder, x: Value, scale: Value | None, axis: int = -1) -> list[Value]:
    """Result and reciprocal root mean square."""
    assert x.shape is not None
    axis %= len(x.shape)
    rows = ((*x.shape[:axis], *(1,) * (len(x.shape) - axis)), "float32")
    return b.emit("aten._fused_rms_norm.default", [x, scale], [(x.shape, x.dtype), rows])


@translates("GroupNormalization")
def _group_norm(b: Builder, n: Node) -> list[Value]:
    return [group_norm(b, n.value(0), n.input(1), n.input(2), n.number("num_groups", 1))]


@translates("GroupNormalization", domain=FUSED)
def _fused_group_norm(b: Builder, n: Node) -> list[Value]:
    """Scale and bias come shaped to broadcast: (channels, 1, …)."""
    x, groups = n.value(0), n.shape(1)[0]
    scale, bias = (b.reshape(n.value(i), (n.value(i).elements,)) for i in (2, 3))
    return [group_norm(b, x, scale, bias, groups)]


def group_norm(b: Builder, x: Value, scale: Value | None, bias: Value | None, groups: int) -> Value:
    """One group norm."""
    assert x.shape is not None
    rows = ((x.shape[0], groups), "float32")
    outputs: list[Output] = [(x.shape, x.dtype, b.like(x.shape, [x])), rows, rows]
    return b.emit("aten.native_group_norm.default", [x, scale, bias], outputs, {"affine": scale is not None})[0]


@translates("LpNormalization")
def _lp_norm(b: Builder, n: Node) -> list[Value]:
    shape, dtype = n.out()
    axis = n.number("axis", -1) % len(shape)
    norm = (*shape[:axis], 1, *shape[axis + 1 :])
    length = b.emit("aten.linalg_vector_norm.default", [n.value(0)], [(norm, dtype)], {"dims": (axis,)})[0]
    return [elementwise(b, "aten.div.Tensor", [n.value(0), length], (shape, dtype))]


@translates("MeanVarianceNormalization")
def _mean_variance(b: Builder, n: Node) -> list[Value]:
    shape, dtype = n.out()
    axes = tuple(a % len(shape) for a in n.ints("axes") or [0, 2, 3])
    rows = tuple(1 if i in axes else s for i, s in enumerate(shape))
    variance, mean = b.emit("aten.var_mean.correction", [n.value(0)], [(rows, dtype), (rows, dtype)], {"dims": axes})
    centred = elementwise(b, "aten.sub.Tensor", [n.value(0), mean], (shape, dtype))
    deviation = elementwise(b, "aten.sqrt.default", [variance], (rows, dtype))
    return [elementwise(b, "aten.div.Tensor", [centred, deviation], (shape, dtype))]


@translates("LRN")
def _local_response(b: Builder, n: Node) -> list[Value]:
    """As PyTorch writes it: squares averaged over neighbouring channels, then scaled, raised and divided by."""
    shape, dtype = n.out()
    x = n.value(0)
    square = elementwise(b, "aten.mul.Tensor", [x, x], (shape, dtype))
    window = (n.number("size", 1), *(1,) * (len(shape) - 2))
    mean = b.emit("aten.avg_pool3d.default", [square], [(shape, dtype)], {"window": window})[0]
    for name in ("aten.mul.Tensor", "aten.add.Tensor", "aten.pow.Tensor_Scalar"):
        mean = elementwise(b, name, [mean], (shape, dtype))
    return [elementwise(b, "aten.div.Tensor", [x, mean], (shape, dtype))]


# --- contributed ------------------------------------------------------------------------------------------------


@translates("SkipLayerNormalization", domain=MICROSOFT)
def _skip_layer_norm(b: Builder, n: Node) -> list[Value]:
    """Inputs (x, skip, gamma, beta, bias): one kernel that adds and normalises; the sum is its last output."""
    return _skip_norm(b, n, [n.input(2), n.input(3)], n.input(4), "aten.native_layer_norm.default")


@translates("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_rms_norm(b: Builder, n: Node) -> list[Value]:
    return _skip_norm(b, n, [n.input(2)], n.input(3), "aten._fused_rms_norm.default")


def _skip_norm(b: Builder, n: Node, affine: list[Value | None], bias: Value | None, name: str) -> list[Value]:
    x, shape = n.value(0), n.shape(0)
    rows = ((*shape[:-1], 1), "float32")
    keeps_sum = len(n.outputs) > 3 and bool(n.outputs[3])
    outputs = [(shape, x.dtype), rows, rows] + ([(shape, x.dtype)] if keeps_sum else [])
    attrs = {"affine": True} if name == "aten.native_layer_norm.default" else None
    return b.emit(name, [x, n.value(1), *affine, bias], outputs, attrs)


@translates("EmbedLayerNormalization", domain=MICROSOFT)
def _embed_layer_norm(b: Builder, n: Node) -> list[Value]:
    """Inputs (ids, segments, word, position, segment tables, gamma, beta): lookups, their sum, a layer norm."""
    ids = n.value(0)
    out = ((*n.shape(0), n.shape(2)[1]), n.value(2).dtype)
    total = b.emit("aten.embedding.default", [n.value(2), ids], [out])[0]
    for table in (n.value(3), n.input(4)):
        if table is not None:
            part = b.emit("aten.embedding.default", [table, ids], [out])[0]
            total = elementwise(b, "aten.add.Tensor", [total, part], out)
    return [layer_norm(b, total, n.input(5), n.input(6), -1)[0], b.emit(
        "aten.sum.dim_IntList", [ids], [((n.shape(0)[0],), "int32")], {"dims": (1,)})[0]]


@translates("GroupNorm", "SkipGroupNorm", domain=MICROSOFT)
def _nhwc_group_norm(b: Builder, n: Node) -> list[Value]:
    """Channels come last: (N, H, W, C)."""
    x, shape = n.value(0), n.shape(0)
    rows = ((shape[0], n.number("groups", 1)), "float32")
    extra = n.inputs[1:] if n.op == "GroupNorm" else n.inputs[1:5]
    sums = [(shape, x.dtype)] if n.op == "SkipGroupNorm" and len(n.outputs) > 1 else []
    out = b.emit("aten.native_group_norm.default", [x, *extra], [(shape, x.dtype), rows, rows, *sums], {"affine": True})
    return [out[0], *out[3:]]


