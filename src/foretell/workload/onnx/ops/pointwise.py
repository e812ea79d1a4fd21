"""Elementwise operations, reductions, softmax: one PyTorch operation each."""

from __future__ import annotations

import math

from foretell.graph import dtype_bytes, is_floating
from foretell.workload.onnx.builder import Builder
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.ops.registry import FUSED, MICROSOFT, translates
from foretell.workload.onnx.values import Shape, Value

_ELEMENTWISE = {
    "Abs": "abs", "Acos": "acos", "Acosh": "acosh", "Asin": "asin", "Asinh": "asinh", "Atan": "atan",
    "Atanh": "atanh", "Ceil": "ceil", "Celu": "celu", "Cos": "cos", "Cosh": "cosh", "Elu": "elu", "Erf": "erf",
    "Exp": "exp", "Floor": "floor", "Gelu": "gelu", "HardSigmoid": "hardsigmoid", "HardSwish": "hardswish",
    "IsInf": "isinf", "IsNaN": "isnan", "LeakyRelu": "leaky_relu", "Log": "log", "Mish": "mish", "Neg": "neg",
    "Not": "logical_not", "PRelu": "_prelu_kernel", "Reciprocal": "reciprocal", "Relu": "relu", "Round": "round",
    "Selu": "selu", "Shrink": "hardshrink", "Sigmoid": "sigmoid", "Sign": "sign", "Sin": "sin", "Sinh": "sinh",
    "Softplus": "softplus", "Softsign": "softsign", "Sqrt": "sqrt", "Swish": "silu", "Tan": "tan", "Tanh": "tanh",
    "ThresholdedRelu": "threshold", "BitwiseNot": "bitwise_not",
    "Add": "add.Tensor", "Sub": "sub.Tensor", "Mul": "mul.Tensor", "Div": "div.Tensor", "Mod": "remainder.Tensor",
    "Pow": "pow.Tensor_Tensor", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "Equal": "eq.Tensor",
    "Greater": "gt.Tensor", "GreaterOrEqual": "ge.Tensor", "Less": "lt.Tensor", "LessOrEqual": "le.Tensor",
    "BitwiseAnd": "bitwise_and.Tensor", "BitwiseOr": "bitwise_or.Tensor", "BitwiseXor": "bitwise_xor.Tensor",
    "BitShift": "bitwise_left_shift.Tensor", "Where": "where.self",
}  # fmt: skip


def full_name(base: str) -> str:
    """``relu`` → ``aten.relu.default``; a name with an overload keeps it."""
    return f"aten.{base}" if "." in base else f"aten.{base}.default"


@translates(*_ELEMENTWISE)
def _elementwise(b: Builder, n: Node) -> list[Value]:
    return [elementwise(b, full_name(_ELEMENTWISE[n.op]), n.inputs, n.out())]


def elementwise(b: Builder, name: str, inputs: list[Value | None], out: tuple[Shape, str]) -> Value:
    """One elementwise op of any operands."""
    return b.emit(name, inputs, [(*out, b.like(out[0], inputs))])[0]


@translates("Clip")
def _clip(b: Builder, n: Node) -> list[Value]:
    low = n.known(1, "min")
    high = n.known(2, "max")
    name = "hardtanh" if low and high else "clamp"
    return [elementwise(b, f"aten.{name}.default", [n.value(0)], n.out())]


@translates("Silu", domain=FUSED)
def _silu(b: Builder, n: Node) -> list[Value]:
    x = n.value(0)
    return [elementwise(b, "aten.silu.default", [x], (n.shape(0), x.dtype))]


@translates("Gelu", domain=FUSED)
@translates("Gelu", "FastGelu", "QuickGelu", "BiasGelu", domain=MICROSOFT)
def _gelu(b: Builder, n: Node) -> list[Value]:
    """`BiasGelu` and `FastGelu` add a bias in the same kernel."""
    x = n.value(0)
    return [elementwise(b, "aten.gelu.default", [x, n.input(1)], (n.shape(0), x.dtype))]


_CHAINED = {"Sum": "add.Tensor", "Mean": "add.Tensor", "Max": "maximum.default", "Min": "minimum.default"}


@translates(*_CHAINED)
def _chained(b: Builder, n: Node) -> list[Value]:
    """Of two operands at a time."""
    shape, dtype = n.out()
    values = [v for v in n.inputs if v is not None]
    total = values[0]
    for position, value in enumerate(values[1:], 2):
        part = shape if position == len(values) or total.shape == shape else _joined(total, value)
        total = elementwise(b, full_name(_CHAINED[n.op]), [total, value], (part, dtype))
    if n.op == "Mean" and len(values) > 1:
        total = elementwise(b, "aten.div.Tensor", [total], (shape, dtype))
    return [total]


def _joined(a: Value, c: Value) -> Shape:
    left, right = a.shape or (), c.shape or ()
    rank = max(len(left), len(right))
    padded = [(1,) * (rank - len(s)) + s for s in (left, right)]
    return tuple(max(x, y) for x, y in zip(*padded, strict=True))


@translates("Cast", "CastLike", "BitCast")
def _cast(b: Builder, n: Node) -> list[Value]:
    shape, dtype = n.out()
    x = n.value(0)
    if b.dtype(x.dtype) == b.dtype(dtype):
        return [x]
    if n.op == "BitCast":
        return [b.view("aten.view.dtype", x, shape, None)] if dtype_bytes(x.dtype) == dtype_bytes(dtype) else []
    return [elementwise(b, "aten._to_copy.default", [x], (shape, dtype))]


# --- over rows --------------------------------------------------------------------------------------------------

_REDUCTIONS = {
    "ReduceMean": "mean.dim", "ReduceSum": "sum.dim_IntList", "ReduceMax": "amax.default", "ReduceMin": "amin.default",
    "ReduceProd": "prod.dim_int", "ReduceL1": "linalg_vector_norm.default", "ReduceL2": "linalg_vector_norm.default",
    "ReduceSumSquare": "linalg_vector_norm.default", "ReduceLogSumExp": "logsumexp.default",
}  # fmt: skip


@translates(*_REDUCTIONS, "ReduceLogSum")
def _reduction(b: Builder, n: Node) -> list[Value]:
    axes = n.known(1, "axes")
    x = n.value(0)
    if not axes and n.number("noop_with_empty_axes", 0):
        return [x]
    dims = tuple(int(a) for a in axes) if axes else tuple(range(len(n.shape(0))))
    name = _REDUCTIONS.get(n.op, "sum.dim_IntList")
    attrs = {"dim": dims[0]} if n.op == "ReduceLogSumExp" else {"dims": dims}
    out = b.emit(f"aten.{name}", [x], [n.out()], attrs)[0]
    return [b.emit("aten.log.default", [out], [n.out()])[0]] if n.op == "ReduceLogSum" else [out]


@translates("ArgMax", "ArgMin")
def _arg(b: Builder, n: Node) -> list[Value]:
    return b.emit(f"aten.{n.op.lower()}.default", [n.value(0)], [n.out()])


@translates("Softmax", "LogSoftmax")
def _softmax(b: Builder, n: Node) -> list[Value]:
    """Before opset 13 all dimensions from the axis on are one row."""
    shape, dtype = n.out()
    axis = n.number("axis", -1 if n.version >= 13 else 1)
    x = n.value(0)
    name = "aten._softmax.default" if n.op == "Softmax" else "aten._log_softmax.default"
    if n.version >= 13 or not shape or axis % len(shape) == len(shape) - 1:
        return b.emit(name, [x], [(shape, dtype, b.like(shape, [x]))], {"dim": axis})
    axis %= len(shape)
    rows = b.reshape(x, (math.prod(shape[:axis]), math.prod(shape[axis:])))
    out = b.emit(name, [rows], [(rows.shape or (), dtype)], {"dim": -1})[0]
    return [b.reshape(out, shape)]


@translates("Hardmax")
def _hardmax(b: Builder, n: Node) -> list[Value]:
    shape, dtype = n.out()
    axis = n.number("axis", -1) % len(shape)
    best = b.emit("aten.argmax.default", [n.value(0)], [((*shape[:axis], *shape[axis + 1 :]), "int64")])[0]
    return b.emit("aten.one_hot.default", [best], [(shape, dtype)])


@translates("CumSum", "CumProd")
def _scan(b: Builder, n: Node) -> list[Value]:
    return b.emit(f"aten.{n.op.lower()}.default", [n.value(0)], [n.out()])


@translates("TopK")
def _topk(b: Builder, n: Node) -> list[Value]:
    k = n.known(1, "k")
    outputs = [n.out(0), (n.out(0)[0], "int64")]
    return b.emit("aten.topk.default", [n.value(0)], outputs, {"k": int(k[0])} if k else None)


@translates("Unique")
def _unique(b: Builder, n: Node) -> list[Value]:
    outputs = [n.out(i) for i in range(len(n.outputs))]
    return b.emit("aten._unique2.default", [n.value(0)], outputs)


@translates("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _loss(b: Builder, n: Node) -> list[Value]:
    outputs = [n.out(i) for i, name in enumerate(n.outputs) if name]
    name = "aten.nll_loss_forward.default" if n.op.startswith("Neg") else "aten.cross_entropy.default"
    return b.emit(name, n.inputs, outputs)


@translates("Dropout")
def _dropout(b: Builder, n: Node) -> list[Value]:
    """At inference it passes its input on, with a mask of ones where one is asked for."""
    x = n.value(0)
    if len(n.outputs) > 1 and n.outputs[1]:
        return [x, *b.emit("aten.ones.default", [], [(n.shape(0), "bool")])]
    return [x]


def is_float(value: Value | None) -> bool:
    """Whether a value holds floating-point numbers."""
    return value is not None and is_floating(value.dtype)
