"""Convolutions and matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretell.workload.onnx.builder import CHANNELS_LAST, Builder, dense, is_channels_last
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.ops.registry import FUSED, translates
from foretell.workload.onnx.values import Shape, Value

_INTEGERS = ("int8", "uint8", "int4")


@translates("Conv", "ConvInteger")
def _conv(b: Builder, n: Node) -> list[Value]:
    bias = n.input(2) if n.op == "Conv" else None
    return [convolution(b, n, n.value(0), n.value(1), bias, n.out())]


@translates("ConvTranspose")
def _conv_transpose(b: Builder, n: Node) -> list[Value]:
    return [convolution(b, n, n.value(0), n.value(1), n.input(2), n.out(), transposed=True)]


def convolution(
    b: Builder, n: Node, x: Value, w: Value, bias: Value | None, out: tuple[Shape, str], *, transposed: bool = False
) -> Value:
    """One convolution; a bias of known zeros, which some exporters add, is left out."""
    assert x.shape is not None
    assert w.shape is not None
    if len(x.shape) < 3 or len(w.shape) != len(x.shape) or len(out[0]) != len(x.shape):
        raise ValueError(f"no convolution of {x.shape} by {w.shape}")
    if bias is not None and bias.known is not None and bias.role != "parameter" and not bias.known.any():
        bias = None
    spatial = len(w.shape) - 2
    one = [1] * spatial
    stride = tuple(n.ints("strides") or one)
    dilation = tuple(n.ints("dilations") or one)
    attrs = {
        "stride": stride,
        "padding": _padding(n, x.shape[2:], w.shape[2:], out[0][2:], stride, dilation),
        "dilation": dilation,
        "transposed": transposed,
        "output_padding": tuple(n.ints("output_padding") or [0] * spatial),
        "groups": n.number("group", 1),
    }
    last = len(out[0]) == 4 and (is_channels_last(x) or is_channels_last(w))
    strides = dense(out[0], CHANNELS_LAST) if last else None
    return b.emit("aten.convolution.default", [x, w, bias], [(*out, strides)], attrs)[0]


def _padding(n: Node, size: Shape, window: Shape, out: Shape, stride: Shape, dilation: Shape) -> Shape:
    """Padding before each spatial dimension; for ``auto_pad`` what makes the output's size come out."""
    pads = n.ints("pads")
    mode = n.text("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID") or not out:
        return tuple(pads[: len(window)]) if pads and mode == "NOTSET" else (0,) * len(window)
    begin = []
    for have, k, want, s, d in zip(size, window, out, stride, dilation, strict=True):
        total = max((want - 1) * s + (k - 1) * d + 1 - have, 0)
        begin.append(total // 2 if mode == "SAME_UPPER" else math.ceil(total / 2))
    return tuple(begin)


# --- matrix products --------------------------------------------------------------------------------------------


@translates("Gemm")
def _gemm(b: Builder, n: Node) -> list[Value]:
    x = b.transpose(n.value(0)) if n.number("transA", 0) else n.value(0)
    w = b.transpose(n.value(1)) if n.number("transB", 0) else n.value(1)
    return [matrix(b, x, w, n.input(2), n.out()[1])]


@translates("MatMul", "MatMulInteger")
def _matmul(b: Builder, n: Node) -> list[Value]:
    return [matmul(b, n.value(0), n.value(1), n.out()[1])]


@translates("Linear", domain=FUSED)
def _linear(b: Builder, n: Node) -> list[Value]:
    dtype = n.value(0).dtype
    return [matmul(b, n.value(0), n.value(1), "float32" if dtype in _INTEGERS else dtype, n.value(2))]


def matrix(b: Builder, x: Value, w: Value, bias: Value | None, dtype: str) -> Value:
    """x (m, k) times w (k, n), plus a bias that broadcasts."""
    assert x.shape is not None
    assert w.shape is not None
    if x.shape[1] != w.shape[0]:
        raise ValueError(f"{x.shape[1]} columns meet {w.shape[0]} rows")
    out = ((x.shape[0], w.shape[1]), dtype)
    if x.dtype in _INTEGERS and w.dtype in _INTEGERS:
        return b.emit("aten._int_mm.default", [x, w, bias], [out])[0]
    if bias is None or bias.is_number:
        return b.emit("aten.mm.default", [x, w], [out])[0]
    return b.emit("aten.addmm.default", [bias, x, w], [out])[0]


def matmul(b: Builder, x: Value, w: Value, dtype: str, bias: Value | None = None) -> Value:
    """``torch.matmul``, and with a bias ``nn.Linear``: rows of more dimensions are folded into one product."""
    assert x.shape is not None
    assert w.shape is not None
    if len(x.shape) == 1 and len(w.shape) == 1:
        return b.emit("aten.dot.default", [x, w], [((), dtype)])[0]
    if len(x.shape) == 1:
        row = b.reshape(x, (1, *x.shape))
        out = matmul(b, row, w, dtype)
        assert out.shape is not None
        return b.reshape(out, (*out.shape[:-2], out.shape[-1]))
    if len(w.shape) == 1:
        rows = x if len(x.shape) == 2 else b.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        assert rows.shape is not None
        out = b.emit("aten.mv.default", [rows, w], [((rows.shape[0],), dtype)])[0]
        return out if rows is x else b.reshape(out, x.shape[:-1])
    if len(w.shape) == 2:
        return _rows_times_matrix(b, x, w, dtype, bias)
    if len(x.shape) == 2 and len(w.shape) > 2:
        x = b.expand(x, (*w.shape[:-2], *x.shape))
    out = _batched(b, x, w, dtype)
    return out if bias is None else b.emit("aten.add.Tensor", [out, bias], [(out.shape or (), dtype)])[0]


def _rows_times_matrix(b: Builder, x: Value, w: Value, dtype: str, bias: Value | None) -> Value:
    assert x.shape is not None
    assert w.shape is not None
    if len(x.shape) == 2:
        return matrix(b, x, w, bias, dtype)
    out_shape = (*x.shape[:-1], w.shape[1])
    # A linear layer adds its bias within the product where the rows lie one after another, else after it.
    inside = bias if x.strides is None else None
    rows = b.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    out = b.reshape(matrix(b, rows, w, inside, dtype), out_shape, of_result=inside is None)
    if bias is not None and inside is None:
        out = b.emit("aten.add.Tensor", [out, bias], [(out_shape, dtype)])[0]
    return out


def _batched(b: Builder, x: Value, w: Value, dtype: str) -> Value:
    assert x.shape is not None
    assert w.shape is not None
    lead = _broadcast(x.shape[:-2], w.shape[:-2])
    count = math.prod(lead)
    operands = []
    for value in (x, w):
        assert value.shape is not None
        wide = b.expand(value, (*lead, *value.shape[-2:]))
        operands.append(wide if len(lead) == 1 else b.reshape(wide, (count, *value.shape[-2:])))
    out = b.emit("aten.bmm.default", operands, [((count, x.shape[-2], w.shape[-1]), dtype)])[0]
    if x.shape[-1] != w.shape[-2]:
        raise ValueError(f"{x.shape[-1]} columns meet {w.shape[-2]} rows")
    return b.reshape(out, (*lead, x.shape[-2], w.shape[-1]), of_result=True)


def _broadcast(a: Shape, c: Shape) -> Shape:
    rank = max(len(a), len(c))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(c)) + c, strict=True)
    shape = []
    for left, right in pairs:
        if left != right and 1 not in (left, right):
            raise ValueError(f"shapes {a} and {c} do not broadcast")
        shape.append(right if left == 1 else left)
    return tuple(shape)


# --- einsum -----------------------------------------------------------------------------------------------------

Labels = tuple[str, ...]


@translates("Einsum")
def _einsum(b: Builder, n: Node) -> list[Value]:
    """Operands are contracted from left to right, each pair by a batched product, as PyTorch does by default."""
    values = [v for v in n.inputs if v is not None]
    terms, wanted = _equation(n.text("equation", ""), [v.shape or () for v in values])
    dtype = values[0].dtype
    operands = [_merge_repeated(b, v, labels) for v, labels in zip(values, terms, strict=True)]
    value, labels = operands[0]
    for position, (other, theirs) in enumerate(operands[1:], 2):
        needed = {label for _, later in operands[position:] for label in later} | set(wanted)
        value, labels = _contract(b, value, labels, other, theirs, needed, dtype)
    value, labels = _sum_out(b, value, labels, set(wanted))
    order = [labels.index(label) for label in wanted]
    if order != list(range(len(order))):
        value = b.permute(value, order)
    return [value]


def _equation(equation: str, shapes: Sequence[Shape]) -> tuple[list[Labels], Labels]:
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(shapes):
        raise ValueError(f"the equation has {len(texts)} terms for {len(shapes)} operands")
    deepest = 0
    for text, shape in zip(texts, shapes, strict=True):
        spare = len(shape) - len(text.replace("...", ""))
        if spare < 0 or (spare > 0 and "..." not in text):
            raise ValueError(f"term {text[:20]!r} does not fit an operand of {len(shape)} dimensions")
        deepest = max(deepest, spare)

    def labels(text: str, spare: int) -> Labels:
        before, dots, after = text.partition("...")
        hidden = tuple(f"...{i}" for i in range(deepest - spare, deepest)) if dots else ()
        return (*before, *hidden, *after)

    terms = [labels(t, len(s) - len(t.replace("...", ""))) for t, s in zip(texts, shapes, strict=True)]
    if arrow:
        return terms, labels(right, deepest)
    every = [label for term in terms for label in term]
    hidden = tuple(f"...{i}" for i in range(deepest))
    return terms, (*hidden, *sorted({x for x in every if every.count(x) == 1 and not x.startswith("...")}))


def _merge_repeated(b: Builder, value: Value, labels: Labels) -> tuple[Value, Labels]:
    """A label that a term has twice takes the diagonal."""
    assert value.shape is not None
    if len(set(labels)) == len(labels):
        return value, labels
    kept = tuple(dict.fromkeys(labels))
    return b.view("aten.diagonal.default", value, tuple(value.shape[labels.index(x)] for x in kept), None), kept


def _sum_out(b: Builder, value: Value, labels: Labels, needed: set[str]) -> tuple[Value, Labels]:
    """Sum over the labels that nothing needs any more."""
    assert value.shape is not None
    gone = tuple(i for i, label in enumerate(labels) if label not in needed)
    if not gone:
        return value, labels
    kept = tuple(i for i in range(len(labels)) if i not in gone)
    out = b.emit("aten.sum.dim_IntList", [value], [(tuple(value.shape[i] for i in kept), value.dtype)],
                 {"dims": gone})[0]
    return out, tuple(labels[i] for i in kept)


def _contract(
    b: Builder, x: Value, left: Labels, y: Value, right: Labels, needed: set[str], dtype: str
) -> tuple[Value, Labels]:
    x, left = _sum_out(b, x, left, needed | set(right))
    y, right = _sum_out(b, y, right, needed | set(left))
    assert x.shape is not None
    assert y.shape is not None
    size: dict[str, int] = {}
    for label, extent in (*zip(left, x.shape, strict=True), *zip(right, y.shape, strict=True)):
        if size.get(label, 1) != 1 and extent not in (1, size[label]):
            raise ValueError(f"label {label!r} is both {size[label]} and {extent}")
        size[label] = max(size.get(label, 1), extent)
    batch = tuple(label for label in left if label in right and label in needed)
    reduced = tuple(label for label in left if label in right and label not in needed)
    rows = tuple(label for label in left if label not in right)
    columns = tuple(label for label in right if label not in left)
    if not reduced:
        labels: Labels = (*left, *columns)
        out = b.emit("aten.mul.Tensor", [x, y], [(tuple(size[i] for i in labels), dtype)])[0]
        return out, labels

    def arranged(value: Value, have: Labels, first: Labels, second: Labels) -> Value:
        order = [have.index(label) for label in (*batch, *first, *second)]
        value = b.permute(value, order)
        shape = tuple(size[label] for label in (*batch, *first, *second))
        if value.shape != shape:
            value = b.expand(value, shape)
        product = [math.prod(size[i] for i in group) for group in (batch, first, second)]
        return b.reshape(value, tuple(product))

    a, c = arranged(x, left, rows, reduced), arranged(y, right, reduced, columns)
    assert a.shape is not None
    assert c.shape is not None
    out = b.emit("aten.bmm.default", [a, c], [((a.shape[0], a.shape[1], c.shape[2]), dtype)])[0]
    labels = (*batch, *rows, *columns)
    return b.reshape(out, tuple(size[label] for label in labels)), labels


