"""Ops that a program names as one and PyTorch runs as several: layers, products, attention, norms, pooling.

Each writes down what the dispatcher is given when the op runs eagerly on dense tensors; tests hold them equal to a
capture of the same module. Shapes are PyTorch's: images (N, C, H, W), weights (K, C/groups, …).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretell.workload.pt2.builder import Builder, Meta, Shape, row_major
from foretell.workload.pt2.lowering import Args, Results, attributes, lower, plain
from foretell.workload.pt2.views import channels_last

__all__ = ["broadcast", "linear", "matmul"]

# --- products ---------------------------------------------------------------------------------------------------


def linear(b: Builder, x: int, weight: int, bias: int | None) -> int:
    """x (…, k) · weight (n, k)ᵀ + bias (n)."""
    shape = b.shape(x)
    n, k = b.shape(weight)
    if not shape or shape[-1] != k:
        raise ValueError(f"{shape} cannot be multiplied with a weight of {n}×{k}")
    out = (*shape[:-1], n)
    if bias is not None and len(shape) == 2:
        return b.one("aten.addmm.default", [bias, x, b.t(weight)], b.meta(x, out))
    if bias is not None and b.contiguous(x):
        rows = b.reshape(x, (math.prod(shape[:-1]), k))
        product = b.one("aten.addmm.default", [bias, rows, b.t(weight)], b.meta(x, (math.prod(shape[:-1]), n)))
        return b.view("aten.view.default", product, out, None)
    product = matmul(b, x, b.t(weight), folds=True)
    return product if bias is None else b.one("aten.add.Tensor", [product, bias], b.meta(product))


def matmul(b: Builder, x: int, y: int, folds: bool = False) -> int:
    """Matrix product with batches broadcast. `folds`: the smaller operand is a parameter; the larger is flattened."""
    left, right = b.shape(x), b.shape(y)
    if not left or not right or left[-1] != right[-2 if len(right) > 1 else 0]:
        raise ValueError(f"{left} cannot be multiplied with {right}")
    if len(left) == len(right) == 1:
        return b.one("aten.dot.default", [x, y], b.meta(x, ()))
    if len(left) == 2 and len(right) == 1:
        return b.one("aten.mv.default", [x, y], b.meta(x, left[:1]))
    if len(left) == 1 and len(right) == 2:
        row = b.one("aten.mm.default", [b.unsqueeze(x, 0), y], b.meta(x, (1, right[1])))
        return b.squeeze(row, 0, "aten.squeeze_.dim")
    if len(left) == len(right) == 2:
        return b.one("aten.mm.default", [x, y], b.meta(x, (left[0], right[1])))
    if len(left) >= 3 and len(right) <= 2 and (folds or _rows_follow(b, x)):
        rows = b.reshape(x, (math.prod(left[:-1]), left[-1]))
        if len(right) == 2:
            product = b.one("aten.mm.default", [rows, y], b.meta(x, (math.prod(left[:-1]), right[1])))
            return b.unsafe_view(product, (*left[:-1], right[1]))
        return b.unsafe_view(b.one("aten.mv.default", [rows, y], b.meta(x, (math.prod(left[:-1]),))), left[:-1])
    if len(left) <= 2 and len(right) >= 3:
        b.transpose(y, -2, -1)  # made to see whether it can be flattened
        if folds:
            return _product_from_right(b, x, y)
    return _batched(b, x, y)


def _rows_follow(b: Builder, x: int) -> bool:
    """Whether all dimensions but the last can be merged without a copy."""
    shape, strides = b.shape(x), b.strides(x)
    return all(strides[d] == strides[d + 1] * shape[d + 1] for d in range(len(shape) - 2))


def _product_from_right(b: Builder, x: int, y: int) -> int:
    """A parameter x (m, k) times a batch y (…, k, n): done as yᵀ · xᵀ, then turned back."""
    turned = b.transpose(y, -2, -1)
    lead = b.shape(turned)[:-1]
    if len(b.shape(x)) == 1:
        rows = b.reshape(turned, (math.prod(lead), b.shape(x)[0]))
        return b.unsafe_view(b.one("aten.mv.default", [rows, x], b.meta(y, (math.prod(lead),))), lead)
    m, k = b.shape(x)
    across = b.t(x)
    rows = b.reshape(turned, (math.prod(lead), k))
    product = b.unsafe_view(b.one("aten.mm.default", [rows, across], b.meta(y, (math.prod(lead), m))), (*lead, m))
    back = b.transpose(product, -2, -1)
    return b.one("aten.clone.default", [back], b.meta(back))


def _batched(b: Builder, x: int, y: int) -> int:
    left, right = b.shape(x), b.shape(y)
    m = left[-2] if len(left) > 1 else 1
    k, n = left[-1], right[-1] if len(right) > 1 else 1
    lead = broadcast(left[:-2], right[:-2])
    count = math.prod(lead)
    if len(right) == 1:
        y = b.alias(y, (k, 1), (b.strides(y)[0], 1))
    a_rows = b.reshape(b.expand(x, (*lead, m, k)), (count, m, k))
    b_rows = b.reshape(b.expand(y, (*lead, k, n)), (count, k, n))
    product = b.one("aten.bmm.default", [a_rows, b_rows], b.meta(x, (count, m, n)))
    out = (*lead, *((m,) if len(left) > 1 else ()), *((n,) if len(right) > 1 else ()))
    return b.unsafe_view(product, out)


def broadcast(*shapes: Shape) -> Shape:
    """The shape that all of `shapes` broadcast to."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = []
    for dim in range(-rank, 0):
        sizes = {shape[dim] for shape in shapes if len(shape) >= -dim} - {1}
        if len(sizes) > 1:
            raise ValueError(f"{' and '.join(map(str, shapes))} do not broadcast")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


@lower("aten.linear.default")
def _linear(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    return [linear(b, a.tensor("input"), a.tensor("weight"), a.maybe("bias"))]


@lower("aten.matmul.default")
def _matmul(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x, y = a.tensor("self", "input"), a.tensor("other")
    smaller = y if len(b.shape(x)) >= len(b.shape(y)) else x
    return [matmul(b, x, y, folds=smaller in b.trained)]


@lower("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default")
def _checked_product(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    names = ("self", "mat2") if a.name in ("aten.mm.default", "aten.bmm.default") else ("mat1", "mat2")
    names = ("batch1", "batch2") if "batch1" in a.values else names
    left, right = (b.shape(a.tensor(name)) for name in names)
    if len(left) != len(right) or len(left) < 2 or left[-1] != right[-2] or left[:-2] != right[:-2]:
        raise ValueError(f"{left} cannot be multiplied with {right}")
    if stated[0].shape != (*left[:-1], right[-1]):
        raise ValueError(f"{left} by {right} is stated as {stated[0].shape}")
    return plain(b, a.name, a, stated)


@lower("aten.outer.default", "aten.ger.default")
def _outer(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x, y = a.tensor("self", "input"), a.tensor("vec2")
    column = b.view("aten.view.default", x, (*b.shape(x), 1), (*b.strides(x), 1))
    return [b.one("aten.mul.Tensor", [column, y], stated[0])]


@lower("aten.einsum.default")
def _einsum(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    equation = a.values.get("equation")
    operands = a.tensors("tensors")
    if not isinstance(equation, str) or len(equation) > 200:
        raise ValueError("its equation is missing")
    labels, result = _labels(equation.replace(" ", ""), [len(b.shape(x)) for x in operands])
    order = [*result, *sorted({label for term in labels for label in term} - set(result))]
    aligned = []
    for x, term in zip(operands, labels, strict=True):
        missing = len(order) - len(term)
        for _ in range(missing):
            x = b.unsqueeze(x, -1)
        rest = iter(range(len(term), len(order)))
        aligned.append(b.permute(x, [term.index(label) if label in term else next(rest) for label in order]))
    total = aligned[0]
    last_use = {label: max(i for i, term in enumerate(labels) if label in term) for label in order}
    for index, x in enumerate(aligned[1:], 1):
        summed = [d for d, label in enumerate(order) if label not in result and last_use[label] == index]
        total = _pair(b, total, x, summed)
    kept = len(result)
    if len(operands) == 1 and len(order) > kept:
        shape = b.shape(total)[:kept]
        return [b.one("aten.sum.dim_IntList", [total], b.meta(total, shape), dims=tuple(range(kept, len(order))))]
    if len(order) > kept:
        return [b.reshape(total, b.shape(total)[:kept])]
    return [total]


def _labels(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The labels of each operand and of the result; an ellipsis stands for labels of its own."""
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ValueError(f"its equation has {len(terms)} operands, not {len(ranks)}")
    labels: list[list[str]] = []
    widest = 0
    for term, rank in zip(terms, ranks, strict=True):
        before, dots, after = term.partition("...")
        hidden = rank - len(before) - len(after) if dots else 0
        if hidden < 0 or len(before) + len(after) + hidden != rank:
            raise ValueError(f"{term!r} does not label {rank} dimensions")
        widest = max(widest, hidden)
        labels.append([*before, *(f".{n}" for n in range(hidden, 0, -1)), *after])
    if any(len(set(term)) != len(term) for term in labels):
        raise ValueError("its equation takes a diagonal, which is not known")
    hidden_labels = [f".{n}" for n in range(widest, 0, -1)]
    if not arrow:
        every = [label for term in labels for label in term]
        return labels, [*hidden_labels, *sorted(c for c in set(every) if every.count(c) == 1 and len(c) == 1)]
    before, dots, after = right.partition("...")
    result = [*before, *(hidden_labels if dots else ()), *after]
    if len(set(result)) != len(result) or not set(result) <= {label for term in labels for label in term}:
        raise ValueError(f"its result {right!r} names what no operand has")
    return labels, result


def _pair(b: Builder, x: int, y: int, summed: Sequence[int]) -> int:
    """Product of two tensors of equal rank, summed over some dimensions, as one batched matrix product."""
    left, right = b.shape(x), b.shape(y)
    broadcast(left, right)
    if not summed:
        return b.one("aten.mul.Tensor", [x, y], b.meta(x, broadcast(left, right)))
    both, only_left, only_right, over = [], [], [], []
    for dim in range(len(left)):
        if dim in summed:
            if left[dim] != 1 and right[dim] != 1:
                over.append(dim)
            elif left[dim] != 1:
                x = b.one("aten.sum.dim_IntList", [x], b.meta(x, _with(b.shape(x), dim, 1)), dims=(dim,))
            elif right[dim] != 1:
                y = b.one("aten.sum.dim_IntList", [y], b.meta(y, _with(b.shape(y), dim, 1)), dims=(dim,))
            else:
                over.append(dim)
        elif left[dim] != 1 and right[dim] != 1:
            both.append(dim)
        elif left[dim] != 1:
            only_left.append(dim)
        else:
            only_right.append(dim)
    left, right = b.shape(x), b.shape(y)
    batch, m = math.prod(left[d] for d in both), math.prod(left[d] for d in only_left)
    k, n = math.prod(left[d] for d in over), math.prod(right[d] for d in only_right)
    ones = [d for d in summed if d not in over]
    x_rows = b.reshape(b.permute(x, [*both, *only_left, *over, *ones, *only_right]), (batch, m, k))
    y_rows = b.reshape(b.permute(y, [*both, *over, *ones, *only_right, *only_left]), (batch, k, n))
    product = b.one("aten.bmm.default", [x_rows, y_rows], b.meta(x, (batch, m, n)))
    laid = [*both, *only_left, *summed, *only_right]
    sizes = {d: left[d] for d in (*both, *only_left)} | dict.fromkeys(summed, 1) | {d: right[d] for d in only_right}
    spread = b.reshape(product, tuple(sizes[d] for d in laid))
    return b.permute(spread, [laid.index(d) for d in range(len(laid))])


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


# --- convolutions -----------------------------------------------------------------------------------------------


@lower("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.conv1d.padding",
       "aten.conv2d.padding", "aten.conv3d.padding")
def _conv(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    rank = int(a.name[9])
    x, weight = a.tensor("input"), a.tensor("weight")
    stride, dilation = a.numbers("stride", rank, 1), a.numbers("dilation", rank, 1)
    word = a.values.get("padding")
    output_padding: Shape = (0,) * rank
    padding: Shape
    if word == "valid":
        padding = output_padding = (0,)
    elif word == "same":
        around = [step * (size - 1) for step, size in zip(dilation, b.shape(weight)[2:], strict=True)]
        padding = tuple(n // 2 for n in around)
        if any(n % 2 for n in around):  # one more on one side: padded by itself first
            lead = len(b.shape(x)) - rank
            sizes = [n + extra % 2 for n, extra in zip(b.shape(x)[lead:], around, strict=True)]
            x = b.one("aten.constant_pad_nd.default", [x], b.meta(x, (*b.shape(x)[:lead], *sizes)))
    else:
        padding = a.numbers("padding", rank, 0)
    return [_convolution(b, a, x, stride, padding, dilation, False, output_padding, rank, stated[0])]


@lower("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def _conv_transpose(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    rank = int(a.name[19])
    numbers = {name: a.numbers(name, rank, default) for name, default in
               (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))}
    return [
        _convolution(b, a, a.tensor("input"), numbers["stride"], numbers["padding"], numbers["dilation"], True,
                     numbers["output_padding"], rank, stated[0])
    ]


@lower("aten.convolution.default", "aten._convolution.default", "aten._convolution.deprecated",
       "aten.cudnn_convolution.default", "aten.mkldnn_convolution.default")
def _convolution_itself(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    rank = len(b.shape(a.tensor("weight"))) - 2
    return [
        _convolution(
            b, a, a.tensor("input", "self"), a.numbers("stride"), a.numbers("padding"), a.numbers("dilation"),
            a.flag("transposed"), a.numbers("output_padding", rank, 0), rank, stated[0],
        )
    ]


def _convolution(
    b: Builder, a: Args, x: int, stride: Shape, padding: Shape, dilation: Shape, transposed: bool,
    output_padding: Shape, rank: int, stated: Meta,
) -> int:
    weight, bias, groups = a.tensor("weight"), a.maybe("bias"), a.number("groups", 1)
    window = b.shape(weight)
    batched = len(b.shape(x)) == rank + 2
    if not batched:
        x = b.unsqueeze(x, 0)
    shape = stated.shape if batched else (1, *stated.shape)
    sizes = b.shape(x)
    if len(sizes) != rank + 2 or len(window) != rank + 2 or len(shape) != rank + 2 or groups < 1:
        raise ValueError(f"input {sizes} and weight {window} are no convolution in {rank} dimensions")
    channels = (window[0], window[1] * groups) if transposed else (window[1] * groups, window[0])
    if (sizes[1], shape[1]) != channels or sizes[0] != shape[0]:
        raise ValueError(f"a weight of {window} in {groups} groups does not make {shape} of {sizes}")
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "transposed": transposed,
             "output_padding": output_padding, "groups": groups}
    for n, size in enumerate(shape[2:]):
        step, pad, apart, more = (one[n] if n < len(one) else one[0]
                                  for one in (stride, padding, dilation, output_padding))
        reach = apart * (window[2 + n] - 1)
        made = ((sizes[2 + n] - 1) * step - 2 * pad + reach + more + 1 if transposed
                else (sizes[2 + n] + 2 * pad - reach - 1) // max(step, 1) + 1)
        if step < 1 or size != made:
            raise ValueError(f"its result is stated as {shape}, but size {size} is {made}")
    strides = stated.strides if batched else None
    if "channels_last" in (b.tensors[x].layout, b.tensors[weight].layout):
        strides = channels_last(shape)
    out = b.one("aten.convolution.default", [x, weight, bias], Meta(shape, stated.dtype, strides), **attrs)
    return out if batched else b.squeeze(out, 0)


# --- norms ------------------------------------------------------------------------------------------------------


@lower("aten.batch_norm.default")
def _batch_norm(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    return [_native_batch_norm(b, a.tensor("input"), a, a.flag("training"), stated[0])]


def _native_batch_norm(b: Builder, x: int, a: Args, training: bool, stated: Meta,
                       vectors: Sequence[int | None] | None = None) -> int:
    if vectors is None:
        vectors = [a.maybe(name) for name in ("weight", "bias", "running_mean", "running_var")]
    held = b.one("aten.empty.memory_format", [], Meta((0,), "uint8"))
    saved = Meta((b.shape(x)[1] if training else 0,), "float32" if stated.dtype != "float64" else stated.dtype)
    outputs = b.run(
        "aten.native_batch_norm.default", [x, *vectors], stated, saved, saved,
        training=training, affine=vectors[0] is not None,
    )
    b.hold(held)
    return outputs[0]


@lower("aten.instance_norm.default")
def _instance_norm(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("input")
    n, c, *space = b.shape(x)
    own = a.flag("use_input_stats", True)
    vectors: list[int | None] = []
    for name in ("weight", "bias", "running_mean", "running_var"):
        vector = a.maybe(name)
        vectors.append(None if vector is None else b.one("aten.repeat.default", [vector], b.meta(vector, (n * c,))))
    flat = b.reshape(x, (1, n * c, *space))
    out = _native_batch_norm(b, flat, a, own, b.meta(flat), vectors)
    return [b.reshape(out, (n, c, *space))]


@lower("aten.layer_norm.default")
def _layer_norm(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x, weight = a.tensor("input"), a.maybe("weight")
    normalized = len(a.numbers("normalized_shape"))
    shape = b.shape(x)
    kept = (*shape[: len(shape) - normalized], *(1,) * normalized)
    saved = b.meta(x, kept, "float32" if b.tensors[x].dtype in ("float16", "bfloat16") else None)
    return b.run(
        "aten.native_layer_norm.default", [x, weight, a.maybe("bias")], stated[0], saved, saved,
        affine=weight is not None,
    )[:1]


@lower("aten.group_norm.default")
def _group_norm(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x, weight = a.tensor("input"), a.maybe("weight")
    groups = b.meta(x, (b.shape(x)[0], a.number("num_groups")))
    return b.run(
        "aten.native_group_norm.default", [x, weight, a.maybe("bias")], b.meta(x), groups, groups,
        affine=weight is not None,
    )[:1]


@lower("aten.rms_norm.default")
def _rms_norm(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x, weight = a.tensor("input"), a.maybe("weight")
    half = b.tensors[x].dtype in ("float16", "bfloat16")
    wide = b.one("aten._to_copy.default", [x], b.meta(x, dtype="float32")) if half else x
    normalized = len(a.numbers("normalized_shape"))
    rank = len(b.shape(x))
    dims = tuple(range(rank - normalized, rank))
    squares = b.one("aten.pow.Tensor_Scalar", [wide], b.like(wide))
    kept = (*b.shape(x)[: rank - normalized], *(1,) * normalized)
    mean = b.one("aten.mean.dim", [squares], b.meta(wide, kept), dims=dims)
    scale = b.one("aten.rsqrt.default", [b.write("aten.add_.Scalar", [mean])], b.meta(mean))
    out = b.one("aten.mul.Tensor", [wide, scale], b.like(wide))
    if weight is not None:
        out = b.one("aten.mul.Tensor", [out, weight], b.like(out))
    return [b.one("aten._to_copy.default", [out], Meta(b.shape(out), stated[0].dtype)) if half else out]


@lower("aten.softmax.int", "aten.log_softmax.int", "aten.special_softmax.int", "aten.special_log_softmax.int")
def _softmax(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    if b.tensors[x].dtype != stated[0].dtype:
        like = b.like(x)
        x = b.one("aten._to_copy.default", [x], Meta(like.shape, stated[0].dtype, like.strides))
    name = "aten._log_softmax.default" if "log_" in a.name else "aten._softmax.default"
    return [b.one(name, [x], b.meta(x), dim=a.number("dim"))]


# --- attention --------------------------------------------------------------------------------------------------


@lower("aten.scaled_dot_product_attention.default", "aten._scaled_dot_product_flash_attention_for_cpu.default",
       "aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_efficient_attention.default",
       "aten._scaled_dot_product_cudnn_attention.default", "aten._scaled_dot_product_attention_math.default",
       "aten._scaled_dot_product_fused_attention_overrideable.default")
def _attention(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    q, k, v = (a.tensor(name) for name in ("query", "key", "value"))
    mask = a.maybe("attn_mask", "attn_bias")
    rank = len(b.shape(q))
    if rank < 2 or b.shape(q)[-1] != b.shape(k)[-1] or b.shape(k)[-2] != b.shape(v)[-2]:
        raise ValueError(f"attention of {b.shape(q)} over {b.shape(k)}, {b.shape(v)}")
    if rank >= 4:
        lead = broadcast(*(b.shape(t)[:-3] for t in (q, k, v)))
        q, k, v = (t if b.shape(t)[:-3] == lead else b.expand(t, (*lead, *b.shape(t)[-3:])) for t in (q, k, v))
    shape = (*b.shape(q)[:-1], b.shape(v)[-1])
    out = Meta(shape, b.tensors[q].dtype, _flash_strides(shape) if rank == 4 else None)
    rows = Meta(shape[:-1], "float32")
    made = b.run(
        "foretell.sdpa.default", [q, k, v, mask], out, rows, causal=a.flag("is_causal"), masked=mask is not None
    )
    return [made[0], *([made[1]] if len(stated) > 1 else []), *(b.new(m) for m in stated[2:])]


def _flash_strides(shape: Shape) -> Shape:
    """Strides of (batch, heads, length, depth) as attention kernels write it: (batch, length, heads, depth)."""
    n, h, length, d = shape
    strides = row_major((n, length, h, d))
    return strides[0], strides[2], strides[1], strides[3]


# --- activations, dropout, padding ------------------------------------------------------------------------------


@lower("aten.dropout.default", "aten.dropout_.default", "aten.feature_dropout.default", "aten.alpha_dropout.default",
       "aten.feature_alpha_dropout.default", "aten.native_dropout.default")
def _dropout(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("input", "self")
    if a.name.startswith("aten.native_dropout"):
        return plain(b, a.name, a, stated)
    if not a.flag("train"):
        return [x]
    noise = b.one("aten.empty_like.default", [x], b.like(x))
    noise = b.write("aten.div_.Scalar", [b.write("aten.bernoulli_.float", [noise])])
    return [b.one("aten.mul.Tensor", [x, noise], b.like(x))]


_RENAMED = {
    "relu6": "hardtanh.default", "selu": "elu.default", "multiply": "mul.Tensor", "divide": "div.Tensor",
    "true_divide": "div.Tensor", "subtract": "sub.Tensor", "absolute": "abs.default", "clip": "clamp.default",
    "negative": "neg.default", "square": "pow.Tensor_Scalar", "fix": "trunc.default", "greater": "gt.Tensor",
    "less": "lt.Tensor", "greater_equal": "ge.Tensor", "less_equal": "le.Tensor", "not_equal": "ne.Tensor",
    "special_expit": "sigmoid.default", "arctan": "atan.default", "arcsin": "asin.default",
    "concat": "cat.default", "concatenate": "cat.default", "hstack": "cat.default", "tile": "repeat.default",
    "__and__": "bitwise_and.Tensor", "__or__": "bitwise_or.Tensor", "__xor__": "bitwise_xor.Tensor",
    "upsample_nearest1d": "upsample_nearest1d.default", "upsample_nearest2d": "upsample_nearest2d.default",
    "upsample_nearest3d": "upsample_nearest3d.default", "_upsample_nearest_exact2d":
    "_upsample_nearest_exact2d.default", "upsample_linear1d": "upsample_linear1d.default",
    "upsample_bilinear2d": "upsample_bilinear2d.default", "upsample_bicubic2d": "upsample_bicubic2d.default",
    "upsample_trilinear3d": "upsample_trilinear3d.default",
    "_upsample_bilinear2d_aa": "_upsample_bilinear2d_aa.default",
    "_upsample_bicubic2d_aa": "_upsample_bicubic2d_aa.default",
    "grid_sampler": "grid_sampler_2d.default", "embedding_bag": "_embedding_bag.default",
    "std": "std.correction", "var": "var.correction", "std_mean": "std_mean.correction",
    "var_mean": "var_mean.correction", "norm": "linalg_vector_norm.default",
}


@lower(*(f"aten.{old}{suffix}.*" for old in _RENAMED for suffix in ("", "_")))
def _renamed(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    base = a.name.split(".")[1]
    old = base if base in _RENAMED else base[:-1]
    packet, _, overload = _RENAMED[old].partition(".")
    return plain(b, f"aten.{packet}{'' if base == old else '_'}.{overload}", a, stated)


@lower("aten.softsign.default")
def _softsign(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    size = b.one("aten.abs.default", [x], b.like(x))
    return [b.one("aten.div.Tensor", [x, b.one("aten.add.Tensor", [size], b.like(x))], b.like(x))]


@lower("aten.prelu.default")
def _prelu(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x, weight = a.tensor("self", "input"), a.tensor("weight")
    rank = len(b.shape(x))
    shape = tuple(math.prod(b.shape(weight)) if d == min(1, rank - 1) else 1 for d in range(rank))
    if rank > 1:
        weight = b.view("aten.view.default", weight, shape, None)
    return [b.one("aten._prelu_kernel.default", [x, weight], b.like(x))]


@lower("aten.log_sigmoid.default")
def _log_sigmoid(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    return b.run("aten.log_sigmoid_forward.default", [x], b.like(x), b.like(x))[:1]


@lower("aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def _where(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    condition, inputs = a.tensor("condition"), []
    for name in ("self", "other"):
        if a.name.endswith(("Self", ".Scalar") if name == "self" else ("Other", ".Scalar")):
            inputs.append(b.one("aten.scalar_tensor.default", [], Meta((), stated[0].dtype)))
        else:
            inputs.append(a.tensor(name))
    return [b.one("aten.where.self", [condition, *inputs], stated[0])]


@lower("aten.pad.default")
def _pad(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    pairs = len(a.numbers("pad")) // 2
    mode = a.values.get("mode", "constant")
    names = {"constant": "constant_pad_nd"}
    names |= {"reflect": f"reflection_pad{pairs}d", "replicate": f"replication_pad{pairs}d"}
    base = names.get(mode, "pad") if isinstance(mode, str) else "pad"
    return plain(b, f"aten.{base}.default", a, stated)


@lower("aten.diff.default")
def _diff(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    dim, times = a.dim("dim", len(b.shape(x)), -1), a.number("n", 1)
    around = [t for t in (a.maybe("prepend"), x, a.maybe("append")) if t is not None]
    if len(around) > 1:
        length = sum(b.shape(t)[dim] for t in around)
        x = b.one("aten.cat.default", around, b.meta(x, _with(b.shape(x), dim, length)))
    for _ in range(min(times, b.shape(x)[dim])):
        shape = _with(b.shape(x), dim, max(0, b.shape(x)[dim] - 1))
        later, earlier = (b.view("aten.slice.Tensor", x, shape, b.strides(x)) for _ in range(2))
        name = "aten.logical_xor.default" if b.tensors[x].dtype == "bool" else "aten.sub.Tensor"
        x = b.one(name, [later, earlier], b.meta(x, shape))
    return [x]


@lower("aten.repeat_interleave.self_int")
def _repeat_interleave(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    if a.values.get("dim") is None:
        return plain(b, a.name, a, stated)
    dim, times = a.dim("dim", len(b.shape(x))), a.number("repeats")
    wide = b.unsqueeze(x, dim + 1)
    shape = b.shape(x)
    spread = b.expand(wide, (*shape[: dim + 1], times, *shape[dim + 1 :]))
    return [b.reshape(b.one("aten.clone.default", [spread], b.meta(spread)), stated[0].shape)]


@lower("aten.one_hot.default")
def _one_hot(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x = a.tensor("self", "input")
    classes = b.one("aten.arange.default", [], Meta(stated[0].shape[-1:], "int64"))
    equal = b.one("aten.eq.Tensor", [b.unsqueeze(x, -1), classes], Meta(stated[0].shape, "bool"))
    return [b.one("aten._to_copy.default", [equal], stated[0])]


@lower("aten.cosine_similarity.default")
def _cosine_similarity(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    pair = [a.tensor("x1"), a.tensor("x2")]
    dim = a.dim("dim", len(b.shape(pair[0])), 1)
    norms = []
    for x in pair:
        norm = b.one("aten.linalg_vector_norm.default", [x], b.meta(x, _with(b.shape(x), dim, 1)))
        norms.append(b.one("aten.clone.default", [norm], b.meta(norm)))
    least = b.one("aten.scalar_tensor.default", [], Meta((), stated[0].dtype))
    norms = [b.write("aten.clamp_min_.Tensor", [norm, least]) for norm in norms]
    scaled = [b.one("aten.div.Tensor", [x, norm], b.like(x)) for x, norm in zip(pair, norms, strict=True)]
    product = b.one("aten.mul.Tensor", scaled, b.meta(scaled[0], broadcast(*map(b.shape, scaled))))
    return [b.one("aten.sum.dim_IntList", [product], stated[0], dims=(dim,))]


@lower("aten.cross_entropy_loss.default")
def _cross_entropy(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x, target = a.tensor("self", "input"), a.tensor("target")
    logs = b.one("aten._log_softmax.default", [x], b.meta(x), dim=1 if len(b.shape(x)) > 1 else 0)
    name = "aten.nll_loss_forward.default" if len(b.shape(x)) <= 2 else "aten.nll_loss2d_forward.default"
    return b.run(name, [logs, target, a.maybe("weight")], stated[0], Meta((), stated[0].dtype))[:1]


# --- pooling ----------------------------------------------------------------------------------------------------


@lower("aten.max_pool2d.default", "aten.max_pool3d.default")
def _max_pool(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    name = a.name.replace(".default", "_with_indices.default")
    indices = Meta(stated[0].shape, "int64", stated[0].strides)
    return b.run(name, [a.tensor("self", "input")], stated[0], indices, **attributes(a.name, a))[:1]


@lower("aten.max_pool1d.default", "aten.avg_pool1d.default", "aten.adaptive_avg_pool1d.default",
       "aten.adaptive_max_pool1d.default", "aten.max_pool1d_with_indices.default")
def _pool1d(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    """In one dimension as in two, the first of size 1."""
    kind = a.name.split(".")[1].removesuffix("_with_indices").removesuffix("1d")
    wide = b.unsqueeze(a.tensor("self", "input"), -2)
    window = (1, *a.numbers("output_size" if kind.startswith("adaptive") else "kernel_size"))
    shape = (*stated[0].shape[:-1], 1, stated[0].shape[-1])
    out, indices = b.meta(wide, shape), b.meta(wide, shape, "int64")
    if kind == "max_pool":
        made = b.run("aten.max_pool2d_with_indices.default", [wide], out, indices, window=window)
    elif kind == "adaptive_max_pool":
        made = b.run("aten.adaptive_max_pool2d.default", [wide], out, indices, window=window)
    elif kind == "avg_pool":
        made = b.run("aten.avg_pool2d.default", [wide], out, window=window)
    elif window == (1, 1):
        made = b.run("aten.mean.dim", [wide], out, dims=(-1, -2))
    else:
        made = b.run("aten._adaptive_avg_pool2d.default", [wide], out, window=window)
    return [b.squeeze(one, len(shape) - 2) for one in made][: max(1, len(stated))]


@lower("aten.adaptive_avg_pool2d.default", "aten.adaptive_avg_pool3d.default")
def _adaptive_avg_pool(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    rank = int(a.name[22])
    x = a.tensor("self", "input")
    window = a.numbers("output_size", rank)
    if all(n == 1 for n in window):  # runs as the mean
        out = b.one("aten.mean.dim", [x], b.meta(x, stated[0].shape), dims=tuple(range(-1, -rank - 1, -1)))
        if rank == 2 and b.tensors[x].layout == "channels_last":
            c = stated[0].shape[1]
            last = b.alias(out, stated[0].shape, (c, 1, c, c))
            b.add("aten.as_strided_.default", [out], [last])
            return [last]
        return [out]
    name = f"aten._adaptive_avg_pool{rank}d.default"
    return [b.one(name, [x], Meta(stated[0].shape, stated[0].dtype, stated[0].strides), window=window)]
