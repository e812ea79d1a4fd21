"""The parts of a transformer, written with a `Recorder`.

Shapes are named B (sequences), S (new tokens of each), T (tokens a query may see), H (heads), D (elements of a head).
Op names and order are those of the `transformers` library run eagerly: an RMS norm is eight small ops, a rotation
five. ``fused`` writes them as the single kernels that serving engines run. Views are left out: they cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.workload.llm.config import LayerGroup, LLMConfig
from foretell.workload.llm.recorder import Gradients, Recorder

Weights = Mapping[str, int]


@dataclass(slots=True)
class Run:
    """What the parts of one graph share. `cos` and `sin` are the rotary tables (1, S, 1, d)."""

    rec: Recorder
    config: LLMConfig
    batch: int
    tokens: int
    context: int
    cached: bool  # keys and values are written to a cache
    kv_dtype: str
    absorbed: bool  # MLA attends to latents instead of expanding them
    fused: bool
    cos: int | None = None
    sin: int | None = None


# --- norms and activations --------------------------------------------------------------------------------------


def norm(run: Run, x: int, weights: Weights, name: str) -> int:
    """RMS or layer norm over the last dimension."""
    rec, weight, bias = run.rec, weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if run.config.norm == "layer":
        return _layer_norm(rec, x, weight, bias)
    if run.fused:
        return _fused_rms_norm(rec, x, weight)
    dtype = rec.dtype(x)
    wide = rec.cast(x, "float32")
    shape = rec.shape(wide)

    def square_backward(grad: int) -> int:
        power = rec.like("aten.pow.Tensor_Scalar", wide)
        return rec.like("aten.mul.Tensor", grad, rec.like("aten.mul.Scalar", power))

    squared = rec.unary("aten.pow.Tensor_Scalar", wide, square_backward)
    mean = rec.op("aten.mean.dim", (squared,), ((*shape[:-1], 1), "float32"))
    rec.node((squared,), (mean,), lambda g: (None if g[0] is None else rec.op(
        "aten.div.Scalar", (g[0],), (shape, "float32")),))
    shifted = rec.shift(mean)
    root = rec.like("aten.rsqrt.default", shifted)

    def root_backward(g: Gradients) -> Gradients:
        assert g[0] is not None
        cube = rec.like("aten.pow.Tensor_Scalar", root)
        return (rec.like("aten.mul.Tensor", rec.like("aten.mul.Scalar", g[0]), cube),)

    rec.node((shifted,), (root,), root_backward)
    scaled = rec.mul(wide, root)
    if run.config.norm_fp32:
        return rec.cast(rec.mul(weight, scaled), dtype)
    return rec.mul(weight, rec.cast(scaled, dtype))


def _fused_rms_norm(rec: Recorder, x: int, weight: int) -> int:
    shape, dtype = rec.shape(x), rec.dtype(x)
    out, rstd = rec.emit("aten._fused_rms_norm.default", (x, weight),
                         ((shape, dtype), ((*shape[:-1], 1), "float32")))

    def backward(g: Gradients) -> Gradients:
        assert g[0] is not None
        return _norm_backward(rec, "aten._fused_rms_norm_backward.default", (g[0], x, rstd), (weight,))

    rec.node((x, weight), (out,), backward)
    return out


def _layer_norm(rec: Recorder, x: int, weight: int, bias: int | None) -> int:
    x = rec.cast(x, rec.dtype(weight))  # autocast norms in fp32
    shape, dtype = rec.shape(x), rec.dtype(x)
    affine = (weight,) if bias is None else (weight, bias)
    statistics = ((*shape[:-1], 1), "float32")
    out, mean, rstd = rec.emit("aten.native_layer_norm.default", (x, *affine), ((shape, dtype), statistics, statistics))

    def backward(g: Gradients) -> Gradients:
        assert g[0] is not None
        return _norm_backward(rec, "aten.native_layer_norm_backward.default", (g[0], x, mean, rstd), affine)

    rec.node((x, *affine), (out,), backward)
    return out


def _norm_backward(rec: Recorder, name: str, operands: tuple[int, ...], affine: tuple[int, ...]) -> Gradients:
    """Gradients of a norm's input (`operands`: that of its output, its input, its statistics) and, where they are
    trained, of its weights."""
    trained = [weight for weight in affine if rec.requires_gradient(weight)]
    like = (operands[1], *trained)
    grads = rec.emit(name, (*operands, *affine), [(rec.shape(value), rec.dtype(value)) for value in like])
    of_weight = dict(zip(trained, grads[1:], strict=True))
    return grads[0], *(of_weight.get(weight) for weight in affine)


def activation(run: Run, x: int) -> int:
    """The nonlinearity of the config."""
    rec, kind = run.rec, run.config.activation
    if kind == "gelu_new" and not run.fused:  # 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), op by op
        wide = rec.cast(x, "float32") if rec.autocast else x  # autocast takes powers in fp32

        def cube_backward(grad: int) -> int:
            square = rec.like("aten.pow.Tensor_Scalar", wide)
            return rec.like("aten.mul.Tensor", grad, rec.like("aten.mul.Scalar", square))

        cube = rec.unary("aten.pow.Tensor_Scalar", wide, cube_backward)
        inner = rec.scale(rec.add(x, rec.scale(cube)))
        tanh = rec.like("aten.tanh.default", inner)
        rec.node((inner,), (tanh,), lambda g: (
            None if g[0] is None else rec.like("aten.tanh_backward.default", g[0], tanh),))
        return rec.mul(rec.scale(x), rec.shift(tanh))
    name = "gelu" if kind.startswith("gelu") else "silu" if kind == "swiglu_clamped" else kind
    backward = "threshold_backward" if name == "relu" else f"{name}_backward"
    return rec.unary(f"aten.{name}.default", x, lambda g: rec.like(f"aten.{backward}.default", g, x))


def gate(run: Run, gated: int, up: int) -> int:
    """activation(gated) · up."""
    rec = run.rec
    if run.fused:
        result = rec.like("foretell.swiglu.default", gated, up)

        def backward(g: Gradients) -> Gradients:
            assert g[0] is not None
            spec = (rec.shape(up), rec.dtype(up))
            return rec.emit("foretell.swiglu.backward", (g[0], gated, up), (spec, spec))

        rec.node((gated, up), (result,), backward)
        return result
    if run.config.activation == "swiglu_clamped":  # gpt-oss: (clamp(up) + 1) · clamp(gate) · sigmoid(α clamp(gate))
        gated, up = _clamp(rec, gated), _clamp(rec, up)
        scaled = rec.scale(gated)
        sigmoid = rec.like("aten.sigmoid.default", scaled)
        rec.node((scaled,), (sigmoid,), lambda g: (
            None if g[0] is None else rec.like("aten.sigmoid_backward.default", g[0], sigmoid),))
        return rec.mul(rec.shift(up), rec.mul(gated, sigmoid))
    return rec.mul(activation(run, gated), up)


def _clamp(rec: Recorder, x: int) -> int:
    def backward(grad: int) -> int:
        inside = rec.op("aten.ge.Scalar", (x,), (rec.shape(x), "bool"))
        return rec.like("aten.mul.Tensor", grad, inside)

    return rec.unary("aten.clamp.default", x, backward)


# --- attention --------------------------------------------------------------------------------------------------


def rotary_tables(run: Run, dim: int, dtype: str) -> None:
    """Compute cos and sin of every position, once a step."""
    rec, length = run.rec, run.tokens
    with rec.at("rotary_emb"):
        inverse = rec.new((dim // 2,), "float32", "buffer")
        if run.fused:  # engines keep the tables and pick rows
            rows = run.context + length
            tables = (rec.new((rows, dim), dtype, "buffer"), rec.new((rows, dim), dtype, "buffer"))
            run.cos, run.sin = (
                rec.op("aten.index_select.default", (table,), ((1, length, 1, dim), dtype)) for table in tables
            )
            return
        angles = rec.op("aten.mul.Tensor", (inverse,), ((1, length, dim // 2), "float32"))
        both = rec.op("aten.cat.default", (angles, angles), ((1, length, 1, dim), "float32"))
        run.cos, run.sin = (
            rec.cast_value(rec.like("aten.mul.Tensor", rec.like(f"aten.{name}.default", both)), dtype)
            for name in ("cos", "sin")
        )


def rotate(run: Run, x: int) -> int:
    """Rotate x (B, S, H, D), or the first `rotary_dim` of D, by position."""
    rec, cos, sin = run.rec, run.cos, run.sin
    assert cos is not None
    assert sin is not None
    size, dim = rec.shape(x)[-1], rec.shape(cos)[-1]
    if run.fused:
        result = rec.like("foretell.rotary.default", x, cos, sin)
        rec.node((x,), (result,), lambda g: (
            None if g[0] is None else rec.like("foretell.rotary.backward", g[0], cos, sin),))
        return result
    if dim < size:
        rotated, kept = rec.split(x, (dim, size - dim))
        return rec.concatenate((_rotate_half(rec, rotated, cos, sin), kept))
    return _rotate_half(rec, x, cos, sin)


def _rotate_half(rec: Recorder, x: int, cos: int, sin: int) -> int:
    half = rec.shape(x)[-1] // 2
    first, second = rec.slices(x, (half, half))
    turned = rec.concatenate((rec.unary("aten.neg.default", second, lambda g: rec.like("aten.neg.default", g)), first))
    return rec.add(rec.mul(x, cos), rec.mul(turned, sin))


def _write_cache(run: Run, values: tuple[int, ...], visible: int, kept: int) -> tuple[int, ...]:
    """Append values (B, heads, S, D) to a cache each, of which later steps keep `kept` tokens; the caches as read."""
    rec = run.rec
    results = []
    for value in values:
        batch, heads, tokens, size = rec.shape(value)
        new = rec.cast_value(value, run.kv_dtype)
        held = kept if run.context == 0 else visible
        cache = rec.new((batch, heads, held, size), run.kv_dtype, "kv_cache")
        fresh = rec.narrowed(new, (batch, heads, min(tokens, held), size))
        rec.emit("aten.index_copy_.default", (cache, fresh), (rec.written(cache),),
                 read_less=rec.tensors[fresh].nbytes)
        results.append(cache)
    return tuple(results)


def attention(run: Run, x: int, w: Weights, group: LayerGroup) -> int:
    """Self-attention of x (B, S, hidden), output projection included."""
    if run.config.mla is not None:
        return _latent_attention(run, x, w)
    rec, c = run.rec, run.config
    b, s, d = run.batch, run.tokens, c.head_dim
    if c.fused_qkv:
        fused = linear(run, x, w, "qkv_proj")
        q, k, v = rec.split(fused, (c.heads * d, c.kv_heads * d, c.kv_heads * d))
    else:
        q, k, v = (linear(run, x, w, f"{name}_proj") for name in "qkv")
    if c.qk_norm == "full":
        q, k = norm(run, q, w, "q_norm"), norm(run, k, w, "k_norm")
    q, k, v = rec.alias(q, (b, s, c.heads, d)), rec.alias(k, (b, s, c.kv_heads, d)), rec.alias(v, (b, s, c.kv_heads, d))
    if c.qk_norm == "head":
        q, k = norm(run, q, w, "q_norm"), norm(run, k, w, "k_norm")
    if c.positions == "rope":
        q, k = rotate(run, q), rotate(run, k)
    q, k, v = rec.alias(q, (b, c.heads, s, d)), rec.alias(k, (b, c.kv_heads, s, d)), rec.alias(v, (b, c.kv_heads, s, d))
    if run.cached:
        everything = run.context + s
        window = group.window or everything
        visible = min(run.context, window - 1) + s
        caches = _write_cache(run, (rec.half(k), rec.half(v)), visible, min(everything, window))
        if run.context:
            k, v = caches
    out = rec.attention(q, k, v, s > 1, group.window, w.get("sinks"))
    return linear(run, rec.alias(out, (b, s, c.heads * d)), w, "o_proj")


def _latent_attention(run: Run, x: int, w: Weights) -> int:
    """MLA: keys and values are rebuilt from the latents of all tokens, or (absorbed) queries go to the latents."""
    rec, c, m = run.rec, run.config, run.config.mla
    assert m is not None
    b, s, h = run.batch, run.tokens, c.heads
    if m.q_lora_rank:
        q = linear(run, norm(run, linear(run, x, w, "q_a_proj"), w, "q_a_layernorm"), w, "q_b_proj")
    else:
        q = linear(run, x, w, "q_proj")
    q_nope, q_rope = rec.split(rec.alias(q, (b, s, h, c.query_dim)), (m.nope_head_dim, m.rope_head_dim))
    compressed = linear(run, x, w, "kv_a_proj_with_mqa")
    latent, k_rope = rec.split(compressed, (m.kv_lora_rank, m.rope_head_dim))
    latent = norm(run, latent, w, "kv_a_layernorm")
    q_rope, k_rope = rotate(run, q_rope), rotate(run, rec.alias(k_rope, (b, s, 1, m.rope_head_dim)))
    total = run.context + s
    if run.cached:
        width = m.kv_lora_rank + m.rope_head_dim
        joined = rec.concatenate((rec.alias(rec.half(latent), (b, s, 1, m.kv_lora_rank)), rec.half(k_rope)))
        cache = _write_cache(run, (rec.alias(joined, (b, 1, s, width)),), total, total)[0]
        if run.context or run.absorbed:
            latent, k_rope = rec.split(rec.alias(cache, (b, total, 1, width)), (m.kv_lora_rank, m.rope_head_dim))
    else:
        cache = None
    if run.absorbed:
        out = _absorbed(run, q_nope, q_rope, latent, k_rope, cache, w)
    else:
        latent = rec.cast(latent, rec.compute_dtype)
        kv = linear(run, rec.alias(latent, (b, total, m.kv_lora_rank)), w, "kv_b_proj")
        per_head = rec.alias(kv, (b, total, h, m.nope_head_dim + m.v_head_dim))
        k_nope, v = rec.split(per_head, (m.nope_head_dim, m.v_head_dim))
        keys = rec.concatenate((k_nope, rec.expand_heads(rec.half(k_rope), h)))
        queries = rec.concatenate((q_nope, q_rope))
        out = rec.attention(
            rec.alias(queries, (b, h, s, c.query_dim)), rec.alias(keys, (b, h, total, c.query_dim)),
            rec.alias(v, (b, h, total, m.v_head_dim)), s > 1,
        )
    return linear(run, rec.alias(out, (b, s, h * m.v_head_dim)), w, "o_proj")


def _absorbed(
    run: Run, q_nope: int, q_rope: int, latent: int, k_rope: int, cache: int | None, w: Weights
) -> int:
    """Attend to latents as one shared head: the up-projections multiply queries and outputs instead."""
    rec, c, m = run.rec, run.config, run.config.mla
    assert m is not None
    b, s, h = run.batch, run.tokens, c.heads
    total, rank = run.context + s, m.kv_lora_rank
    width = rank + m.rope_head_dim
    with rec.at("kv_b_proj"):
        weight = w["kv_b_proj.weight"]
        if rec.dtype(weight) == rec.param_dtype or weight in rec.packed:  # the rest are kept as `weight_dtype` says
            weight = rec.half(weight)
        up_key = rec.narrowed(weight, (h, m.nope_head_dim, rank))
        up_value = rec.narrowed(weight, (h, rank, m.v_head_dim))
        moved = rec.batched_matmul(rec.alias(q_nope, (h, b * s, m.nope_head_dim)), up_key)
    queries = rec.concatenate((rec.alias(moved, (b, s, h, rank)), q_rope))
    if cache is None:
        cache = rec.concatenate((rec.alias(latent, (b, total, 1, rank)), k_rope))
    keys = rec.alias(cache, (b, 1, total, width))
    values = rec.narrowed(keys, (b, 1, total, rank))
    out = rec.attention(rec.alias(queries, (b, h, s, width)), keys, values, s > 1,
                        read_less=rec.tensors[values].nbytes)  # the values are the keys' first part
    with rec.at("kv_b_proj"):
        return rec.batched_matmul(rec.alias(out, (h, b * s, rank)), up_value)


# --- MLP and experts --------------------------------------------------------------------------------------------


def linear(run: Run, x: int, weights: Weights, name: str, fp32: bool = False) -> int:
    """The linear layer `name`, with its bias and its low-rank adapter if it has them."""
    rec, weight = run.rec, weights[f"{name}.weight"]
    with rec.at(name):
        result = rec.linear(x, weight, weights.get(f"{name}.bias"), fp32)
        if f"{name}.lora_A.weight" not in weights:
            return result
        if weight in rec.packed:  # peft takes no chances with what bitsandbytes returns
            result = rec.unary("aten.clone.default", result, lambda g: g)
        with rec.at("lora_A"):
            low = rec.linear(x, weights[f"{name}.lora_A.weight"])
        with rec.at("lora_B"):
            update = rec.linear(low, weights[f"{name}.lora_B.weight"])
        return rec.add(result, rec.scale(update))


def mlp(run: Run, x: int, w: Weights) -> int:
    """Gated or plain two-layer perceptron."""
    if not run.config.gated:
        return linear(run, activation(run, linear(run, x, w, "up_proj")), w, "down_proj")
    if run.config.fused_gate_up:
        both = linear(run, x, w, "gate_up_proj")
        half = run.rec.shape(both)[-1] // 2
        gated, up = run.rec.split(both, (half, half))
    else:
        gated, up = linear(run, x, w, "gate_proj"), linear(run, x, w, "up_proj")
    return linear(run, gate(run, gated, up), w, "down_proj")


def experts_touched(experts: int, top_k: int, tokens: int) -> float:
    """Expected number of distinct experts that `tokens` tokens reach when each picks `top_k` of `experts` evenly:
    E·(1 − (1 − k/E)^tokens). Real routers are less even, so they reach fewer.

    >>> round(experts_touched(128, 8, 1), 6), round(experts_touched(128, 8, 64), 2)
    (8.0, 125.94)
    """
    return float(experts * (1.0 - (1.0 - top_k / experts) ** tokens))


def experts(run: Run, x: int, w: Weights) -> int:
    """Routed experts (one grouped product each way) plus the shared ones."""
    rec, c, moe = run.rec, run.config, run.config.moe
    assert moe is not None
    tokens = run.batch * run.tokens
    rows = tokens * moe.top_k
    flat = rec.alias(x, (tokens, c.hidden))
    scores, chosen = _route(run, flat, w)
    with rec.at("experts"):
        order = _sort_by_expert(run, rec.alias(chosen, (rows,)))
        sorted_tokens = _gather(rec, flat, order, (rows, c.hidden))
        sorted_scores = _gather(rec, rec.alias(scores, (rows, 1)), order, (rows, 1))
        touched = experts_touched(moe.experts, moe.top_k, tokens)
        both = rec.grouped_linear(sorted_tokens, w["experts.gate_up_proj"], touched)
        both = _expert_bias(run, both, w.get("experts.gate_up_proj_bias"), chosen)
        if c.gated:
            gated, up = rec.split(both, (moe.intermediate, moe.intermediate))
            middle = gate(run, gated, up)
        else:
            middle = activation(run, both)
        out = rec.grouped_linear(middle, w["experts.down_proj"], touched)
        out = _expert_bias(run, out, w.get("experts.down_proj_bias"), chosen)
        out = _gather(rec, rec.mul(out, sorted_scores), order, (rows, c.hidden))
        summed = rec.op("aten.sum.dim_IntList", (out,), ((tokens, c.hidden), rec.dtype(out)))
        rec.node((out,), (summed,), lambda g: (
            None if g[0] is None else rec.spread(g[0], (tokens, moe.top_k, c.hidden), 1),))
        total = rec.alias(rec.cast(summed, rec.dtype(x)), rec.shape(x))
    if moe.shared_intermediate:
        with rec.at("shared_experts"):
            shared = mlp(run, x, within(w, "shared_experts"))
        if moe.shared_gate:
            opened = linear(run, x, w, "shared_expert_gate")
            sigmoid = rec.like("aten.sigmoid.default", opened)
            rec.node((opened,), (sigmoid,), lambda g: (
                None if g[0] is None else rec.like("aten.sigmoid_backward.default", g[0], sigmoid),))
            shared = rec.mul(shared, sigmoid)
        total = rec.add(total, shared)
    return total


def _route(run: Run, flat: int, w: Weights) -> tuple[int, int]:
    """Scores (tokens, k) and experts (tokens, k) of each token."""
    rec, moe = run.rec, run.config.moe
    assert moe is not None
    tokens = rec.shape(flat)[0]
    with rec.at("gate"):
        logits = rec.linear(flat, w["gate.weight"], w.get("gate.bias"), fp32=moe.router_fp32)
        dtype = rec.dtype(logits)
        if moe.scoring == "softmax":
            logits = _softmax(rec, rec.cast(logits, "float32"))
        elif moe.scoring == "sigmoid":
            scores = rec.like("aten.sigmoid.default", logits)
            rec.node((logits,), (scores,), lambda g: (
                None if g[0] is None else rec.like("aten.sigmoid_backward.default", g[0], scores),))
            logits = scores
        spec = (rec.shape(logits), rec.dtype(logits))
        picked, chosen = rec.emit("aten.topk.default", (logits,), (
            ((tokens, moe.top_k), rec.dtype(logits)), ((tokens, moe.top_k), "int64")))
        rec.node((logits,), (picked,), lambda g: (None if g[0] is None else rec.op(
            "aten.scatter.src", (chosen, g[0]), spec),))
        if moe.renormalize:
            total = rec.op("aten.sum.dim_IntList", (picked,), ((tokens, 1), rec.dtype(picked)))
            kept, scores_shape = picked, rec.shape(picked)
            rec.node((kept,), (total,), lambda g: (None if g[0] is None else rec.spread(g[0], scores_shape, 1),))
            picked = rec.mul(kept, total)
        if moe.scoring == "softmax_after_topk":
            picked = _softmax(rec, picked)
        return rec.cast(picked, dtype), chosen


def _softmax(rec: Recorder, x: int) -> int:
    result = rec.like("aten._softmax.default", x)
    rec.node((x,), (result,), lambda g: (
        None if g[0] is None else rec.like("aten._softmax_backward_data.default", g[0], result),))
    return result


def _sort_by_expert(run: Run, chosen: int) -> int:
    """The order that brings rows of one expert together, and how many each has."""
    rec, moe = run.rec, run.config.moe
    assert moe is not None
    rows = rec.shape(chosen)
    ranked, order = rec.emit("aten.sort.default", (chosen,), ((rows, "int64"), (rows, "int64")))
    counts = rec.op("aten.histc.default", (ranked,), ((moe.experts,), "int32"))
    rec.op("aten.cumsum.default", (counts,), ((moe.experts,), "int32"))
    return order


def _gather(rec: Recorder, x: int, order: int, shape: tuple[int, ...]) -> int:
    """Rows of x in another order, a row perhaps more than once."""
    dtype, source = rec.dtype(x), rec.shape(x)
    result = rec.op("aten.index.Tensor", (x, order), (shape, dtype))

    def backward(g: Gradients) -> Gradients:
        assert g[0] is not None
        zeros = rec.op("aten.new_zeros.default", (), (source, dtype))
        return (rec.op("aten.index_put_.default", (zeros, order, g[0]), zeros),)

    rec.node((x,), (result,), backward)
    return result


def _expert_bias(run: Run, x: int, bias: int | None, chosen: int) -> int:
    """Add each row its expert's bias."""
    if bias is None:
        return x
    rec = run.rec
    return rec.add(x, _gather(rec, rec.half(bias), chosen, rec.shape(x)))


# --- the layer --------------------------------------------------------------------------------------------------


def within(weights: Weights, prefix: str) -> dict[str, int]:
    """The weights of a submodule, by their names in it."""
    return {name[len(prefix) + 1:]: value for name, value in weights.items() if name.startswith(prefix + ".")}


def layer(run: Run, x: int, w: Weights, group: LayerGroup) -> int:
    """One decoder layer of x (B, S, hidden)."""
    rec, block = run.rec, run.config.block

    def normed(value: int, name: str) -> int:
        with rec.at(name):
            return norm(run, value, w, name)

    def attend(value: int) -> int:
        with rec.at("self_attn"):
            return attention(run, value, within(w, "self_attn"), group)

    def feed(value: int) -> int:
        with rec.at("mlp"):
            return (experts if group.moe else mlp)(run, value, within(w, "mlp"))

    if block in ("parallel", "parallel_two_norms"):
        first = normed(x, "input_layernorm")
        second = first if block == "parallel" else normed(x, "post_attention_layernorm")
        return rec.add(x, rec.add(attend(first), feed(second)))
    if block == "post_norm":
        x = rec.add(x, normed(attend(x), "post_attention_layernorm"))
        return rec.add(x, normed(feed(x), "post_feedforward_layernorm"))
    if block == "sandwich":
        x = rec.add(x, normed(attend(normed(x, "input_layernorm")), "post_attention_layernorm"))
        return rec.add(x, normed(feed(normed(x, "pre_feedforward_layernorm")), "post_feedforward_layernorm"))
    x = rec.add(x, attend(normed(x, "input_layernorm")))
    return rec.add(x, feed(normed(x, "post_attention_layernorm")))
