"""Quantisation, and operations on quantised tensors.

A dequantised value is made only where something needs it in floating point: between a DequantizeLinear and a
QuantizeLinear the core runs operations on the integers themselves (`core`).
"""

from __future__ import annotations

from foretell.workload.onnx.builder import Builder
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.ops.microsoft import conv_shape
from foretell.workload.onnx.ops.movement import concatenate
from foretell.workload.onnx.ops.pointwise import elementwise
from foretell.workload.onnx.ops.products import convolution, matmul, matrix
from foretell.workload.onnx.ops.registry import MICROSOFT, translates
from foretell.workload.onnx.values import Shape, Value

_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
INTEGERS = ("int8", "uint8", "int4", "int16", "uint16", "int32")


@translates("QuantizeLinear")
@translates("QuantizeLinear", domain=MICROSOFT)
def _quantize(b: Builder, n: Node) -> list[Value]:
    x = n.value(0)
    if x.source is not None and x.source.dtype == quantized_dtype(n):
        return [x.source]  # the operation before it wrote integers
    return [elementwise(b, _QUANTIZE, [x, *_arrays(n.inputs[1:3])], (n.shape(0), quantized_dtype(n)))]


def quantized_dtype(n: Node) -> str:
    """What a QuantizeLinear gives: its zero point's type, or what it declares, or uint8."""
    zero = n.input(2)
    if zero is not None:
        return zero.dtype
    kind = n.types[0]
    return kind[1] if kind is not None else "uint8"


@translates("DequantizeLinear")
@translates("DequantizeLinear", domain=MICROSOFT)
def _dequantize(b: Builder, n: Node) -> list[Value]:
    """Nothing is recorded before something needs the floating-point tensor."""
    x, dtype = n.value(0), n.value(1).dtype
    extras = _arrays(n.inputs[1:3])
    made = Value(n.shape(0), dtype, fixed=x.fixed, source=x)

    def later() -> int:
        out = elementwise(b, _DEQUANTIZE, [x, *extras], (n.shape(0), dtype))
        assert out.tensor is not None
        return out.tensor

    made.later = later
    return [made]


def _arrays(values: list[Value | None]) -> list[Value | None]:
    return [v for v in values if v is not None and v.elements > 1]


@translates("DynamicQuantizeLinear")
def _dynamic(b: Builder, n: Node) -> list[Value]:
    """The range of the tensor itself, then its integers."""
    x, shape = n.value(0), n.shape(0)
    low, _ = b.emit("aten.aminmax.default", [x], [((), x.dtype), ((), x.dtype)])
    scale = b.emit("aten.div.Tensor", [low], [((), x.dtype)])[0]
    zero = b.emit("aten.round.default", [low], [((), "uint8")])[0]
    return [elementwise(b, _QUANTIZE, [x, scale, zero], (shape, "uint8")), scale, zero]


# --- operations with scales among their inputs --------------------------------------------------------------------


@translates("QLinearConv")
@translates("QLinearConv", domain=MICROSOFT)
def _qlinear_conv(b: Builder, n: Node) -> list[Value]:
    """Inputs (x, scale, zero, w, scale, zero, y scale, y zero, bias)."""
    x, w = n.value(0), n.value(3)
    shape = conv_shape(n, n.shape(0), n.shape(3))
    return [convolution(b, n, x, w, n.input(8), (shape, n.value(7).dtype))]


@translates("QLinearMatMul")
def _qlinear_matmul(b: Builder, n: Node) -> list[Value]:
    """Inputs (a, scale, zero, b, scale, zero, y scale, y zero)."""
    return [matmul(b, n.value(0), n.value(3), n.value(7).dtype)]


@translates("QGemm", domain=MICROSOFT)
def _qgemm(b: Builder, n: Node) -> list[Value]:
    """Inputs (a, scale, zero, b, scale, zero, c, y scale, y zero)."""
    x = b.transpose(n.value(0)) if n.number("transA", 0) else n.value(0)
    w = b.transpose(n.value(3)) if n.number("transB", 0) else n.value(3)
    zero = n.input(8)
    return [matrix(b, x, w, n.input(6), "float32" if zero is None else zero.dtype)]


@translates("MatMulIntegerToFloat", "DynamicQuantizeMatMul", domain=MICROSOFT)
def _integer_to_float(b: Builder, n: Node) -> list[Value]:
    """The first takes both operands quantised; the second quantises its first operand on the way in."""
    x, w = n.value(0), n.value(1)
    if n.op == "DynamicQuantizeMatMul":
        x = elementwise(b, _QUANTIZE, [x], (n.shape(0), "uint8"))
    return [matmul(b, x, w, "float32")]


_LIKE = {"QLinearAdd": "aten.add.Tensor", "QLinearMul": "aten.mul.Tensor", "QLinearWhere": "aten.where.self",
         "QLinearSigmoid": "aten.sigmoid.default", "QLinearLeakyRelu": "aten.leaky_relu.default"}  # fmt: skip


@translates(*_LIKE, domain=MICROSOFT)
def _qlinear_elementwise(b: Builder, n: Node) -> list[Value]:
    """Scales and zero points between the tensors are numbers."""
    tensors = [v for v in n.inputs if v is not None and v.elements > 1] or [n.value(0)]
    shape: Shape = ()
    for value in tensors:
        shape = _wider(shape, value.shape or ())
    return [elementwise(b, _LIKE[n.op], list(tensors), (shape, n.value(0).dtype))]


def _wider(a: Shape, c: Shape) -> Shape:
    rank = max(len(a), len(c))
    left, right = ((1,) * (rank - len(s)) + s for s in (a, c))
    return tuple(y if x == 1 else x for x, y in zip(left, right, strict=True))


@translates("QLinearSoftmax", domain=MICROSOFT)
def _qlinear_softmax(b: Builder, n: Node) -> list[Value]:
    x = n.value(0)
    return b.emit("aten._softmax.default", [x], [(n.shape(0), x.dtype)], {"dim": n.number("axis", -1)})


@translates("QLinearGlobalAveragePool", domain=MICROSOFT)
def _qlinear_pool(b: Builder, n: Node) -> list[Value]:
    shape = n.shape(0)
    if n.number("channels_last", 0):
        out = (shape[0], *(1,) * (len(shape) - 2), shape[-1])
    else:
        out = (*shape[:2], *(1,) * (len(shape) - 2))
    dims = tuple(-1 - i for i in range(len(shape) - 2))
    return b.emit("aten.mean.dim", [n.value(0)], [(out, n.value(0).dtype)], {"dims": dims})


@translates("QLinearConcat", domain=MICROSOFT)
def _qlinear_concat(b: Builder, n: Node) -> list[Value]:
    """Inputs (y scale, y zero, then x, scale, zero for each part)."""
    parts = [v for v in n.inputs[2::3] if v is not None and v.shape is not None]
    first = parts[0].shape or ()
    axis = n.number("axis", 0) % len(first)
    length = sum((v.shape or ())[axis] for v in parts)
    return [concatenate(b, parts, (*first[:axis], length, *first[axis + 1 :]), parts[0].dtype, axis)]
