"""The contributed operations of ONNX Runtime (domain ``com.microsoft``) that do real work.

Their schemas: onnxruntime, docs/ContribOperators.md.
"""

from __future__ import annotations

from foretell.workload.onnx.builder import Builder
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.ops.attention import extended, heads, joined, sdpa, split_last
from foretell.workload.onnx.ops.pointwise import elementwise
from foretell.workload.onnx.ops.products import convolution, matmul, matrix
from foretell.workload.onnx.ops.registry import MICROSOFT, translates
from foretell.workload.onnx.values import Shape, Value


@translates("Attention", "QAttention", domain=MICROSOFT)
def _attention(b: Builder, n: Node) -> list[Value]:
    """Inputs (x, weights, bias, mask, past): projection, then attention; past and present hold keys and values."""
    quantized = n.op == "QAttention"
    x, w, bias = n.value(0), n.value(1), n.input(2)
    mask, past = (n.input(5), n.input(8)) if quantized else (n.input(3), n.input(4))
    count = n.number("num_heads", 1)
    dtype = n.value(3).dtype if quantized else x.dtype
    width = n.shape(1)[1]
    sizes = [int(s) for s in n.ints("qkv_hidden_sizes") or [width // 3] * 3]
    projected = matmul(b, x, w, dtype, bias)
    q, k, v = (heads(b, part, count) for part in split_last(b, projected, sizes))
    if past is not None and past.shape is not None:
        shape = past.shape[1:]
        k, v = (extended(b, b.view("aten.select.int", past, shape, None), part) for part in (k, v))
    out = joined(b, sdpa(b, q, k, v, _real(mask), bool(n.number("unidirectional", 0)))[0])
    if len(n.outputs) > 1 and n.outputs[1]:
        assert k.shape is not None
        return [out, b.emit("aten.stack.default", [k, v], [((2, *k.shape), k.dtype)])[0]]
    return [out]


def _real(mask: Value | None) -> Value | None:
    """A mask of two or more dimensions; lengths (one dimension) cost nothing."""
    return mask if mask is not None and mask.shape is not None and len(mask.shape) > 1 else None


@translates("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def _multi_head(b: Builder, n: Node) -> list[Value]:
    """Inputs (query, key, value, bias, mask, attention bias, past key, past value)."""
    if n.op == "MultiHeadAttention":
        bias, mask, past = n.input(3), n.input(5) or _real(n.input(4)), (n.input(6), n.input(7))
    else:
        bias, mask, past = n.input(10), n.input(4) or _real(n.input(3)), (n.input(5), n.input(6))
    count = n.number("num_heads", 1)
    x = n.value(0)
    if bias is not None:
        x = elementwise(b, "aten.add.Tensor", [x, bias], (n.shape(0), x.dtype))
    if n.input(1) is None:  # packed: (B, L, H, 3, D)
        shape = n.shape(0)
        if len(shape) != 5:
            raise ValueError("without keys the query must hold all three")
        batch, length, have, _, depth = shape
        each: Shape = (batch, have, length, depth)
        strides = (length * have * 3 * depth, 3 * depth, have * 3 * depth, 1)
        q, k, v = b.views("aten.unbind.int", x, [(each, strides)] * 3)
    elif n.input(2) is None:  # keys and values packed: (B, S, H, 2, D)
        q = heads(b, x, count)
        batch, length, have, _, depth = n.shape(1)
        strides = (length * have * 2 * depth, 2 * depth, have * 2 * depth, 1)
        k, v = b.views("aten.unbind.int", n.value(1), [((batch, have, length, depth), strides)] * 2)
    else:
        q, k, v = heads(b, x, count), heads(b, n.value(1), count), heads(b, n.value(2), count)
    k, v = extended(b, past[0], k), extended(b, past[1], v)
    out = joined(b, sdpa(b, q, k, v, mask, bool(n.number("unidirectional", 0)))[0])
    return [out, k, v]


@translates("GroupQueryAttention", domain=MICROSOFT)
def _group_query(b: Builder, n: Node) -> list[Value]:
    """Inputs (query, key, value, past key, past value, lengths, total length, cos, sin); packed where key is left out.

    A past as long as the known total is a buffer that new keys are written into; else they are appended.
    """
    count, kv_count = n.number("num_heads", 1), n.number("kv_num_heads", 1)
    query = n.value(0)
    width = n.shape(0)[-1]
    if n.input(1) is None:
        depth = width // (count + 2 * kv_count)
        parts = split_last(b, query, [count * depth, kv_count * depth, kv_count * depth])
    else:
        parts = [query, n.value(1), n.value(2)]
    if n.number("do_rotary", 0):
        tables = [n.input(7), n.input(8)]
        parts[:2] = [
            elementwise(b, "foretell.rotary.default", [x, *tables], (x.shape or (), x.dtype)) for x in parts[:2]
        ]
    q, k, v = heads(b, parts[0], count), heads(b, parts[1], kv_count), heads(b, parts[2], kv_count)
    k, v = (_cached(b, n, past, new) for past, new in ((n.input(3), k), (n.input(4), v)))
    out, _ = sdpa(b, q, k, v, None, True, max(0, n.number("local_window_size", -1)))
    return [joined(b, out), k, v]


def _cached(b: Builder, n: Node, past: Value | None, new: Value) -> Value:
    total = n.known(6)
    if past is not None and past.shape is not None and total and past.shape[2] >= int(total[0]):
        return b.into("aten.slice_scatter_.default", past, [new])[0]
    return extended(b, past, new)


@translates("RotaryEmbedding", domain=MICROSOFT)
def _rotary(b: Builder, n: Node) -> list[Value]:
    """Inputs (x, positions, cos, sin)."""
    inputs = [n.value(0), n.input(2), n.input(3), n.input(1)]
    return [elementwise(b, "foretell.rotary.default", inputs, (n.shape(0), n.value(0).dtype))]


# --- products ---------------------------------------------------------------------------------------------------


@translates("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def _fused_matmul(b: Builder, n: Node) -> list[Value]:
    x, w = n.value(0), n.value(1)
    for side, batch in (("A", "transBatchA"), ("B", "transBatchB")):
        value = x if side == "A" else w
        assert value.shape is not None
        rank = len(value.shape)
        if n.number(batch, 0):
            value = b.permute(value, (*range(1, rank - 1), 0, rank - 1))
        if n.number(f"trans{side}", 0):
            value = b.transpose(value)
        x, w = (value, w) if side == "A" else (x, value)
    return [matmul(b, x, w, x.dtype)]


@translates("FusedGemm", domain=MICROSOFT)
def _fused_gemm(b: Builder, n: Node) -> list[Value]:
    x = b.transpose(n.value(0)) if n.number("transA", 0) else n.value(0)
    w = b.transpose(n.value(1)) if n.number("transB", 0) else n.value(1)
    return [matrix(b, x, w, n.input(2), x.dtype)]


@translates("FusedConv", domain=MICROSOFT)
def _fused_conv(b: Builder, n: Node) -> list[Value]:
    """A convolution whose activation, and sum with a fourth input, cost no kernel of their own."""
    return [convolution(b, n, n.value(0), n.value(1), n.input(2), (conv_shape(n, n.shape(0), n.shape(1)),
                                                                   n.value(0).dtype))]


def conv_shape(n: Node, x: Shape, w: Shape) -> Shape:
    """Shape of a convolution's output where the ``onnx`` library does not infer it."""
    spatial = len(w) - 2
    one = [1] * spatial
    stride, dilation = n.ints("strides") or one, n.ints("dilations") or one
    pads = n.ints("pads") or [0] * (2 * spatial)
    sizes = []
    for i in range(spatial):
        if stride[i] < 1 or dilation[i] < 1:
            raise ValueError("strides and dilations must be positive")
        if n.text("auto_pad", "NOTSET").startswith("SAME"):
            sizes.append(-(-x[2 + i] // stride[i]))
        else:
            reach = (w[2 + i] - 1) * dilation[i] + 1
            sizes.append((x[2 + i] + pads[i] + pads[i + spatial] - reach) // stride[i] + 1)
    return (x[0], w[0], *sizes)


@translates("MatMulNBits", "MatMulBnb4", domain=MICROSOFT)
def _matmul_nbits(b: Builder, n: Node) -> list[Value]:
    """x (…, K) times a weight of N columns packed into few bits, dequantised within the kernel."""
    x, k, columns = n.value(0), n.number("K", 0), n.number("N", 0)
    if k != n.shape(0)[-1] or columns < 1:
        raise ValueError(f"K is {k} and N is {columns} for an input of {n.shape(0)}")
    packed = n.value(1)
    dtype = "int4" if n.number("bits", 4) <= 4 else "int8"
    weight = Value((k, columns), dtype, fixed=True, role=packed.role, nbytes=_bytes(packed))
    if "weight" in packed.protos:
        weight = packed.protos["weight"]
    packed.protos["weight"] = weight
    out = (*n.shape(0)[:-1], columns)
    rows = x if len(n.shape(0)) == 2 else b.reshape(x, (x.elements // max(k, 1), k))
    extras = [v for v in n.inputs[2:] if v is not None and v.shape is not None]
    result = b.emit("aten.mm.default", [rows, weight, *extras], [((*(rows.shape or (0,))[:1], columns), x.dtype)])[0]
    return [result if result.shape == out else b.reshape(result, out)]


def _bytes(value: Value) -> int:
    return value.elements if value.nbytes is None else value.nbytes


@translates("BiasAdd", "BiasSplitGelu", "BiasDropout", domain=MICROSOFT)
def _bias(b: Builder, n: Node) -> list[Value]:
    x, shape = n.value(0), n.shape(0)
    if n.op == "BiasSplitGelu":
        shape = (*shape[:-1], shape[-1] // 2)
        return [elementwise(b, "foretell.geglu.default", n.inputs[:2], (shape, x.dtype))]
    return [elementwise(b, "aten.add.Tensor", n.inputs[:3], (shape, x.dtype))]


@translates("BiasSoftmax", domain=MICROSOFT)
def _bias_softmax(b: Builder, n: Node) -> list[Value]:
    x = n.value(0)
    return b.emit("aten._softmax.default", [x, n.value(1)], [(n.shape(0), x.dtype)], {"dim": -1})
