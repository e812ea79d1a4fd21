"""The transformers NeuSight measured, as graphs: what `transformers` 4.36 runs for them in eager mode, op by op.

Shapes are named B (sequences), S (tokens of each), H (heads), D (elements of a head). Attention is not fused: products,
scaling, mask, softmax, dropout and product are ops of their own, and ``torch.matmul`` copies permuted operands of more
than one sequence, as a batched product takes a single batch dimension. ``gelu_new`` is eight ops. In training, dropout
draws its mask and gradients are added to those of the step before (nobody clears them); the loss is computed between
the two timed parts, so only its backward is counted. There is no optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from foretell.errors import InputError, unknown
from foretell.graph import Graph
from foretell.workload.llm.recorder import Gradients, Recorder, Shape

_FLOAT = "float32"


class _Eager(Recorder):
    """A `Recorder` of the ops that unfused attention and training with dropout take."""

    def __init__(self, training: bool, dropout: float) -> None:
        super().__init__(_FLOAT, _FLOAT, training)
        self.p = dropout

    def _parameter_gradient(self, parameter: int, grad: int) -> int:
        """Add to the gradient that the step before left."""
        held = self.gradients.get(parameter)
        if held is None:
            held = self.gradients[parameter] = self.new(self.shape(grad), _FLOAT, "gradient")
        self.op("aten.add_.Tensor", (held, grad), held)
        return held

    def heads(self, value: int, heads: int, transpose: bool = False) -> int:
        """(B, S, H·D), or a part of a wider row, as one product operand a head: (B·H, S, D) or (B·H, D, S)."""
        t = self.tensors[value]
        batch, tokens, width = t.shape
        depth = width // heads
        row = width if t.strides is None else t.strides[1]
        shape = (batch, heads, depth, tokens) if transpose else (batch, heads, tokens, depth)
        inner = (1, row) if transpose else (row, 1)
        view = self._tensor(shape, _FLOAT, t.storage, (tokens * row, depth, *inner))
        folded: Shape = (batch * heads, *shape[2:])
        if batch == 1:  # leading dimensions fold without a copy
            result = self._tensor(folded, _FLOAT, t.storage, (depth, *inner))
        else:
            result = self.op("aten.clone.default", (view,), (folded, _FLOAT))

        def backward(g: Gradients) -> Gradients:
            grad = g[0]
            if grad is None:
                return (None,)
            if t.strides is not None:  # a part of a joint projection: the concatenation of gradients will move it
                return (self._tensor(t.shape, _FLOAT, self.tensors[grad].storage),)
            turned = self._tensor(t.shape, _FLOAT, self.tensors[grad].storage, (tokens * width, 1, tokens))
            return (self.op("aten.clone.default", (turned,), (t.shape, _FLOAT)),)

        self.node((value,), (result,), backward)
        return result

    def merged(self, value: int, batch: int) -> int:
        """(B·H, S, D) back to (B, S, H·D): a copy."""
        folded, tokens, depth = self.shape(value)
        heads = folded // batch
        source = self._tensor((batch, tokens, heads, depth), _FLOAT, self.tensors[value].storage,
                              (heads * tokens * depth, depth, tokens * depth, 1))
        result = self.op("aten.clone.default", (source,), ((batch, tokens, heads * depth), _FLOAT))

        def backward(g: Gradients) -> Gradients:
            if g[0] is None:
                return (None,)
            back = self._tensor((batch, heads, tokens, depth), _FLOAT, self.tensors[g[0]].storage,
                                (heads * tokens * depth, depth, heads * depth, 1))
            if batch == 1:
                return (self.narrowed(back, (folded, tokens, depth)),)
            return (self.op("aten.clone.default", (back,), ((folded, tokens, depth), _FLOAT)),)

        self.node((value,), (result,), backward)
        return result

    def bmm(self, a: int, b: int) -> int:
        """a (g, m, k) times b (g, k, n)."""
        result = self.batched_matmul(a, b)

        def backward(g: Gradients) -> Gradients:
            assert g[0] is not None
            left = self.batched_matmul(g[0], self._transposed(b))
            return left, self.batched_matmul(self._transposed(a), g[0])

        self.node((a, b), (result,), backward)
        return result

    def softmax(self, x: int) -> int:
        result = self.like("aten._softmax.default", x)

        def backward(g: Gradients) -> Gradients:
            assert g[0] is not None  # CUDA multiplies gradient and result in a kernel of its own first
            product = self.like("aten.mul.Tensor", g[0], result)
            return (self.like("aten._softmax_backward_data.default", product, result),)

        self.node((x,), (result,), backward)
        return result

    def dropout(self, x: int, p: float | None = None) -> int:
        if not self.training or not (self.p if p is None else p):
            return x
        shape = self.shape(x)
        result, mask = self.emit("aten.native_dropout.default", (x,), ((shape, _FLOAT), (shape, "bool")))
        self.node((x,), (result,), lambda g: (
            None if g[0] is None else self.like("aten.native_dropout_backward.default", g[0], mask),))
        return result

    def layer_norm(self, x: int, name: str) -> int:
        shape = self.shape(x)
        with self.at(name):
            affine = (self.parameter(shape[-1:]), self.parameter(shape[-1:]))
            statistics = ((*shape[:-1], 1), _FLOAT)
            out, mean, rstd = self.emit("aten.native_layer_norm.default", (x, *affine),
                                        ((shape, _FLOAT), statistics, statistics))

        def backward(g: Gradients) -> Gradients:
            assert g[0] is not None
            results = [(shape, _FLOAT), *((shape[-1:], _FLOAT) for _ in affine)]
            return self.emit("aten.native_layer_norm_backward.default", (g[0], x, mean, rstd, *affine), results)

        self.node((x, *affine), (out,), backward)
        return out

    def dense(self, x: int, width: int, name: str, bias: bool = True) -> int:
        with self.at(name):
            weight = self.parameter((width, self.shape(x)[-1]))
            return self.linear(x, weight, self.parameter((width,)) if bias else None)

    def embedding(self, ids: int, rows: int, width: int, name: str, shape: Shape) -> tuple[int, int]:
        """(result, table)."""
        with self.at(name):
            table = self.parameter((rows, width))
            result = self.op("aten.embedding.default", (table, ids), (shape, _FLOAT))
        self.node((table,), (result,), lambda g: (
            None if g[0] is None else self.op("aten.embedding_dense_backward.default", (g[0], ids),
                                              ((rows, width), _FLOAT)),))
        return result, table

    def gelu(self, x: int) -> int:
        return self.unary("aten.gelu.default", x, lambda g: self.like("aten.gelu_backward.default", g, x))

    def relu(self, x: int) -> int:
        result = self.like("aten.relu.default", x)
        self.node((x,), (result,), lambda g: (
            None if g[0] is None else self.like("aten.threshold_backward.default", g[0], result),))
        return result

    def gelu_new(self, x: int) -> int:
        """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), op by op."""

        def cube_backward(grad: int) -> int:
            square = self.like("aten.mul.Tensor", self.like("aten.pow.Tensor_Scalar", x))
            return self.like("aten.mul.Tensor", grad, square)

        half = self.scale(x)
        cube = self.unary("aten.pow.Tensor_Scalar", x, cube_backward)
        inner = self.scale(self.add(x, self.scale(cube)))
        tanh = self.like("aten.tanh.default", inner)
        self.node((inner,), (tanh,), lambda g: (
            None if g[0] is None else self.like("aten.tanh_backward.default", g[0], tanh),))
        return self.mul(half, self.shift(tanh))


def graph(config: Mapping[str, Any], mode: str, batch: int, tokens: int, name: str) -> Graph:
    """One forward (`mode` ``inference``) or forward and backward (``train``) of a ``config.json``'s model.

    BERT classifies sequences in inference and predicts words in training, as measured. Raises UnknownNameError for
    another architecture, InputError for a configuration that lacks a size.
    """
    family = str((config.get("architectures") or ["?"])[0])
    builders = {"BertLMHeadModel": _bert, "GPT2LMHeadModel": _gpt2, "OPTForCausalLM": _opt}
    if family not in builders:
        raise unknown("architecture", family, builders)
    rates = ("resid_pdrop", "hidden_dropout_prob", "dropout")
    rec = _Eager(mode == "train", float(next((config[r] for r in rates if r in config), 0.0)))
    ids = rec.new((batch, tokens), "int64", "input")
    try:
        segments, logits = builders[family](rec, config, ids, batch, tokens)
    except KeyError as error:
        raise InputError(f"lacks {error.args[0]!r}", f"configuration of {name}") from error
    if rec.training:
        _backward(rec, segments, logits)
    else:
        rec.keep(logits, "output")
    return Graph(
        name=name,
        mode=mode,
        precision="fp32",
        ops=tuple(rec.ops),
        tensors=tuple(rec.tensors),
        storages=rec.storages(),
        parameters=sum(math.prod(rec.shape(p)) * n for p, n in rec.parameter_layers.items()),
        trainable_parameters=0,
        items={"sequences": batch, "tokens": batch * tokens},
        inputs=(ids,),
        outputs=() if rec.training else (logits,),
    )


_Segments = list[tuple[str, int, list[Any]]]  # (name, layers, nodes)


def _stack(rec: _Eager, x: int, layers: int, layer: Callable[[int], int], segments: _Segments) -> int:
    """`layers` equal layers after what has been recorded."""
    segments.append(("", 1, rec.take_tape()))
    with rec.group("layer", layers):
        out = layer(x)
        rec.carry(x, out)
    segments.append(("layer", layers, rec.take_tape()))
    return out


def _backward(rec: _Eager, segments: _Segments, logits: int) -> None:
    """Cross entropy's backward, then that of every segment in reverse."""
    segments.append(("", 1, rec.take_tape()))
    rec.phase = "backward"
    shape = rec.shape(logits)
    rows = math.prod(shape[:-1])
    logp = rec.new((rows, shape[-1]), _FLOAT)
    labels = rec.new((rows,), "int64", "input")
    spec = ((rows, shape[-1]), _FLOAT)
    grad = rec.op("aten.ones_like.default", (), ((), _FLOAT))
    grad = rec.op("aten.nll_loss_backward.default", (grad, labels), spec)
    grad = rec.op("aten._log_softmax_backward_data.default", (grad, logp), spec)
    grads = {logits: rec.narrowed(grad, shape)}
    for name, layers, nodes in reversed(segments):
        with rec.group(name, layers) if name else rec.at(""):
            rec.backward(nodes, grads)


def _bert(rec: _Eager, c: Mapping[str, Any], ids: int, batch: int, tokens: int) -> tuple[_Segments, int]:
    width, heads, shape = c["hidden_size"], c["num_attention_heads"], (batch, tokens, c["hidden_size"])
    segments: _Segments = []
    with rec.at("embeddings"):
        mask = rec.op("aten.ones.default", (), ((batch, tokens), _FLOAT))
        mask = rec.like("aten.mul.Tensor", rec.like("aten.rsub.Scalar", mask))
        mask = rec.narrowed(mask, (batch, 1, 1, tokens))
        x, words = rec.embedding(ids, c["vocab_size"], width, "word_embeddings", shape)
        x = rec.add(x, rec.embedding(ids, c["type_vocab_size"], width, "token_type_embeddings", shape)[0])
        positions = rec.new((1, tokens), "int64", "buffer")
        x = rec.add(x, rec.embedding(positions, c["max_position_embeddings"], width, "position_embeddings",
                                     (1, tokens, width))[0])
        x = rec.dropout(rec.layer_norm(x, "norm"))

    def layer(x: int) -> int:
        with rec.at("attention"):
            q, k, v = (rec.dense(x, width, name) for name in ("query", "key", "value"))
            scores = rec.scale(rec.bmm(rec.heads(q, heads), rec.heads(k, heads, transpose=True)), "aten.div.Tensor")
            scores = rec.alias(scores, (batch, heads, tokens, tokens))
            weights = rec.dropout(rec.softmax(rec.add(scores, mask)), c["attention_probs_dropout_prob"])
            weights = rec.alias(weights, (batch * heads, tokens, tokens))
            context = rec.merged(rec.bmm(weights, rec.heads(v, heads)), batch)
            x = rec.layer_norm(rec.add(rec.dropout(rec.dense(context, width, "output")), x), "norm")
        with rec.at("mlp"):
            inner = rec.gelu(rec.dense(x, c["intermediate_size"], "intermediate"))
            return rec.layer_norm(rec.add(rec.dropout(rec.dense(inner, width, "output")), x), "norm")

    x = _stack(rec, x, c["num_hidden_layers"], layer, segments)
    first = rec.narrowed(x, (batch, width))
    pooled = rec.like("aten.tanh.default", _untaped_dense(rec, first, width, "pooler"))
    if not rec.training:
        return segments, rec.dense(pooled, 2, "classifier")
    with rec.at("predictions"):
        y = rec.layer_norm(rec.gelu(rec.dense(x, width, "transform")), "norm")
        logits = rec.linear(y, words, rec.parameter((c["vocab_size"],)))
    _untaped_dense(rec, pooled, 2, "seq_relationship")
    return segments, logits


def _untaped_dense(rec: _Eager, x: int, width: int, name: str) -> int:
    """A projection that the loss does not depend on."""
    with rec.untaped():
        return rec.dense(x, width, name)


def _gpt2(rec: _Eager, c: Mapping[str, Any], ids: int, batch: int, tokens: int) -> tuple[_Segments, int]:
    width, heads, shape = c["n_embd"], c["n_head"], (batch, tokens, c["n_embd"])
    segments: _Segments = []
    positions = rec.op("aten.arange.start", (), ((1, tokens), "int64"))
    x, words = rec.embedding(ids, c["vocab_size"], width, "wte", shape)
    x = rec.add(x, rec.embedding(positions, c["n_positions"], width, "wpe", (1, tokens, width))[0])
    x = rec.dropout(x, c["embd_pdrop"])
    causal = rec.new((1, 1, tokens, tokens), "bool", "buffer")

    def attention(x: int) -> int:
        qkv = rec.dense(x, 3 * width, "c_attn")
        q, k, v = rec.split(qkv, (width, width, width))
        scores = rec.bmm(rec.heads(q, heads), rec.heads(k, heads, transpose=True))
        rec.op("aten.full.default", (), ((1,), _FLOAT))
        scores = rec.alias(rec.scale(scores, "aten.div.Tensor"), (batch, heads, tokens, tokens))
        lowest = rec.op("aten.full.default", (), ((1,), _FLOAT))
        masked = rec.op("aten.where.self", (causal, scores, lowest), (rec.shape(scores), _FLOAT))
        rec.node((scores,), (masked,), lambda g: (
            None if g[0] is None else rec.op("aten.where.self", (causal, g[0], lowest), (rec.shape(g[0]), _FLOAT)),))
        weights = rec.alias(rec.dropout(rec.softmax(masked), c["attn_pdrop"]), (batch * heads, tokens, tokens))
        context = rec.merged(rec.bmm(weights, rec.heads(v, heads)), batch)
        return rec.dropout(rec.dense(context, width, "c_proj"))

    def layer(x: int) -> int:
        with rec.at("attn"):
            x = rec.add(attention(rec.layer_norm(x, "ln_1")), x)
        with rec.at("mlp"):
            inner = rec.gelu_new(rec.dense(rec.layer_norm(x, "ln_2"), c.get("n_inner") or 4 * width, "c_fc"))
            return rec.add(x, rec.dropout(rec.dense(inner, width, "c_proj")))

    x = _stack(rec, x, c["n_layer"], layer, segments)
    with rec.at("lm_head"):
        return segments, rec.linear(rec.layer_norm(x, "ln_f"), words)


def _opt(rec: _Eager, c: Mapping[str, Any], ids: int, batch: int, tokens: int) -> tuple[_Segments, int]:
    width, heads = c["hidden_size"], c["num_attention_heads"]
    shape, square = (batch, tokens, width), (batch, 1, tokens, tokens)
    segments: _Segments = []
    x, words = rec.embedding(ids, c["vocab_size"], width, "embed_tokens", shape)
    with rec.at("mask"):  # a causal mask and one of padding, expanded and inverted for every sequence
        ones = rec.op("aten.ones.default", (), ((batch, tokens), _FLOAT))
        full = rec.op("aten.full.default", (), ((tokens, tokens), _FLOAT))
        places = rec.op("aten.arange.default", (), ((tokens,), "int64"))
        upper = rec.op("aten.lt.Tensor", (places,), ((tokens, tokens), "bool"))
        rec.op("aten.masked_fill_.Scalar", (full, upper), full)
        inverted = rec.op("aten.rsub.Scalar", (ones,), (square, _FLOAT))
        as_bool = rec.op("aten._to_copy.default", (inverted,), (square, "bool"))
        expanded = rec.op("aten.masked_fill.Scalar", (inverted, as_bool), (square, _FLOAT))
        as_bool = rec.op("aten._to_copy.default", (expanded,), (square, "bool"))
        mask = rec.op("aten.masked_fill.Scalar", (full, as_bool), (square, _FLOAT))
        longs = rec.op("aten._to_copy.default", (ones,), ((batch, tokens), "int64"))
        positions = rec.like("aten.mul.Tensor", rec.like("aten.cumsum.default", longs), longs)
        positions = rec.like("aten.add.Scalar", rec.like("aten.sub.Scalar", positions))
    x = rec.add(x, rec.embedding(positions, c["max_position_embeddings"] + 2, width, "embed_positions", shape)[0])

    def attention(x: int) -> int:
        q = rec.scale(rec.dense(x, width, "q_proj"))
        k, v = rec.dense(x, width, "k_proj"), rec.dense(x, width, "v_proj")
        k, v, q = (_contiguous_heads(rec, value, heads) for value in (k, v, q))
        scores = rec.bmm(q, _turned(rec, k))
        scores = rec.add(rec.alias(scores, (batch, heads, tokens, tokens)), mask)
        lowest = rec.op("aten.full.default", (), ((1,), _FLOAT))
        floored = rec.like("aten.maximum.default", scores, lowest)

        def floor_backward(g: Gradients) -> Gradients:  # half the gradient where both are equal, none below
            grad = g[0]
            assert grad is not None
            shape = rec.shape(grad)
            equal = rec.op("aten.eq.Tensor", (scores, lowest), (shape, "bool"))
            halved = rec.op("aten.where.self", (equal, rec.like("aten.div.Tensor", grad), grad), (shape, _FLOAT))
            below = rec.op("aten.lt.Tensor", (scores, lowest), (shape, "bool"))
            return (rec.op("aten.masked_fill_.Scalar", (halved, below), halved),)

        rec.node((scores,), (floored,), floor_backward)
        weights = rec.softmax(rec.alias(floored, (batch * heads, tokens, tokens)))
        weights = rec.dropout(weights, c["attention_dropout"])
        context = rec.merged(rec.bmm(weights, v), batch)
        return rec.dropout(rec.dense(context, width, "out_proj"))

    def layer(x: int) -> int:
        with rec.at("attn"):
            x = rec.add(x, attention(rec.layer_norm(x, "norm")))
        with rec.at("mlp"):
            inner = rec.relu(rec.dense(rec.layer_norm(x, "norm"), c["ffn_dim"], "fc1"))
            return rec.add(x, rec.dropout(rec.dense(inner, width, "fc2")))

    x = _stack(rec, x, c["num_hidden_layers"], layer, segments)
    with rec.at("lm_head"):
        return segments, rec.linear(rec.layer_norm(x, "final_layer_norm"), words)


def _contiguous_heads(rec: _Eager, value: int, heads: int) -> int:
    """(B, S, H·D) copied to (B·H, S, D), whatever the batch."""
    batch, tokens, width = rec.shape(value)
    depth = width // heads
    storage = rec.tensors[value].storage
    view = rec._tensor((batch, heads, tokens, depth), _FLOAT, storage, (tokens * width, depth, width, 1))
    result = rec.op("aten.clone.default", (view,), ((batch * heads, tokens, depth), _FLOAT))

    def backward(g: Gradients) -> Gradients:
        if g[0] is None:
            return (None,)
        turned = rec._tensor(rec.shape(value), _FLOAT, rec.tensors[g[0]].storage, (tokens * width, 1, tokens))
        return (rec.op("aten.clone.default", (turned,), (rec.shape(value), _FLOAT)),)

    rec.node((value,), (result,), backward)
    return result


def _turned(rec: _Eager, value: int) -> int:
    """(g, m, k) as (g, k, m), without a copy; gradients pass through."""
    result = rec._transposed(value)
    rec.node((value,), (result,), lambda g: (None if g[0] is None else rec._transposed(g[0]),))
    return result
