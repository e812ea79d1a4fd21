"""The weights of a transformer by name and shape: the one place parameters are counted from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from foretell.workload.llm.config import LayerGroup, LLMConfig
from foretell.workload.lora import LoRA

# "embedding" is only looked up, "matrix" multiplies every token, "experts" those routed to them, "adapter" is one of
# the two matrices of low rank beside a frozen one, "vector" is the rest.
WEIGHT_KINDS: tuple[str, ...] = ("embedding", "matrix", "experts", "adapter", "vector")
# Matrices that choose among experts, or scale them: libraries neither adapt nor quantise them.
GATES: tuple[str, ...] = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor: PyTorch's shape (out, in), or (experts, out, in)."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> list[Weight]:
    weights = [Weight(f"{name}.weight", (outputs, inputs), "matrix")]
    if bias:
        weights.append(Weight(f"{name}.bias", (outputs,), "vector"))
    return weights


def _norm(config: LLMConfig, name: str, size: int) -> list[Weight]:
    weights = [Weight(f"{name}.weight", (size,), "vector")]
    if config.norm == "layer" and config.norm_bias:
        weights.append(Weight(f"{name}.bias", (size,), "vector"))
    return weights


NORM_NAMES: dict[str, tuple[str, ...]] = {
    "pre_norm": ("input_layernorm", "post_attention_layernorm"),
    "post_norm": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "sandwich": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm"),
    "parallel": ("input_layernorm",),
    "parallel_two_norms": ("input_layernorm", "post_attention_layernorm"),
}


def model_weights(config: LLMConfig) -> tuple[Weight, ...]:
    """The weights outside the layers. A tied head is not among them."""
    c = config
    weights = [Weight("embed_tokens.weight", (c.vocab, c.hidden), "embedding")]
    if c.positions == "learned":
        weights.append(Weight("embed_positions.weight", (c.position_rows, c.hidden), "embedding"))
    if c.embedding_norm:
        weights += _norm(c, "embed_layernorm", c.hidden)
    weights += _norm(c, "norm", c.hidden)
    if not c.tied_embeddings:
        weights += _linear("lm_head", c.hidden, c.vocab, c.head_bias)
    elif c.head_bias:
        weights.append(Weight("lm_head.bias", (c.vocab,), "vector"))
    return tuple(weights)


def layer_weights(config: LLMConfig, group: LayerGroup) -> tuple[Weight, ...]:
    """The weights of one layer of `group`."""
    c = config
    weights: list[Weight] = []
    for name in NORM_NAMES[c.block]:
        weights += _norm(c, name, c.hidden)
    weights += _attention(c)
    if group.moe:
        weights += _experts(c)
    else:
        weights += _mlp(c, "mlp", c.intermediate)
    return tuple(weights)


def _attention(c: LLMConfig) -> list[Weight]:
    weights: list[Weight] = []
    at = "self_attn."
    if c.mla is not None:
        m = c.mla
        queries = c.heads * c.query_dim
        if m.q_lora_rank:
            weights += _linear(at + "q_a_proj", c.hidden, m.q_lora_rank, c.qkv_bias)
            weights += _norm(c, at + "q_a_layernorm", m.q_lora_rank)
            weights += _linear(at + "q_b_proj", m.q_lora_rank, queries, False)
        else:
            weights += _linear(at + "q_proj", c.hidden, queries, False)
        weights += _linear(at + "kv_a_proj_with_mqa", c.hidden, m.kv_lora_rank + m.rope_head_dim, c.qkv_bias)
        weights += _norm(c, at + "kv_a_layernorm", m.kv_lora_rank)
        weights += _linear(at + "kv_b_proj", m.kv_lora_rank, c.heads * (m.nope_head_dim + m.v_head_dim), False)
        weights += _linear(at + "o_proj", c.heads * m.v_head_dim, c.hidden, c.o_bias)
        return weights
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    if c.fused_qkv:
        weights += _linear(at + "qkv_proj", c.hidden, queries + 2 * keys, c.qkv_bias)
    else:
        weights += _linear(at + "q_proj", c.hidden, queries, c.qkv_bias)
        weights += _linear(at + "k_proj", c.hidden, keys, c.qkv_bias)
        weights += _linear(at + "v_proj", c.hidden, keys, c.qkv_bias)
    weights += _linear(at + "o_proj", queries, c.hidden, c.o_bias)
    if c.qk_norm != "none":
        sizes = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (queries, keys)
        weights += _norm(c, at + "q_norm", sizes[0]) + _norm(c, at + "k_norm", sizes[1])
    if c.attention_sinks:
        weights.append(Weight(at + "sinks", (c.heads,), "vector"))
    return weights


def _mlp(c: LLMConfig, at: str, width: int) -> list[Weight]:
    if c.gated and c.fused_gate_up:
        up = _linear(f"{at}.gate_up_proj", c.hidden, 2 * width, c.mlp_bias)
    elif c.gated:
        up = _linear(f"{at}.gate_proj", c.hidden, width, c.mlp_bias)
        up += _linear(f"{at}.up_proj", c.hidden, width, c.mlp_bias)
    else:
        up = _linear(f"{at}.up_proj", c.hidden, width, c.mlp_bias)
    return up + _linear(f"{at}.down_proj", width, c.hidden, c.mlp_bias)


def _experts(c: LLMConfig) -> list[Weight]:
    moe = c.moe
    assert moe is not None
    up = 2 * moe.intermediate if c.gated else moe.intermediate
    weights = _linear("mlp.gate", c.hidden, moe.experts, moe.router_bias)
    weights.append(Weight("mlp.experts.gate_up_proj", (moe.experts, up, c.hidden), "experts"))
    weights.append(Weight("mlp.experts.down_proj", (moe.experts, c.hidden, moe.intermediate), "experts"))
    if moe.expert_bias:
        weights.append(Weight("mlp.experts.gate_up_proj_bias", (moe.experts, up), "experts"))
        weights.append(Weight("mlp.experts.down_proj_bias", (moe.experts, c.hidden), "experts"))
    if moe.shared_intermediate:
        weights += _mlp(c, "mlp.shared_experts", moe.shared_intermediate)
        if moe.shared_gate:
            weights += _linear("mlp.shared_expert_gate", c.hidden, 1, False)
    return weights


def adapter_weights(config: LLMConfig, lora: LoRA) -> dict[str, tuple[Weight, ...]]:
    """The adapters of one layer of each group, by the group's name: A (rank, in) and B (out, rank) of each target.

    Raises UnknownNameError for a target that no group has, InputError for a rank above a matrix's own.
    """
    matrices = {group.name: [w for w in layer_weights(config, group) if w.kind == "matrix" and w.name not in GATES]
                for group in config.groups}
    layers = dict.fromkeys(w.name.removesuffix(".weight") for ws in matrices.values() for w in ws)
    chosen = lora.choose(layers, config.name)
    result = {}
    for group, weights in matrices.items():
        adapters: list[Weight] = []
        for weight in weights:
            layer, (outputs, inputs) = weight.name.removesuffix(".weight"), weight.shape
            if layer in chosen:
                lora.check(layer, outputs, inputs)
                adapters.append(Weight(f"{layer}.lora_A.weight", (lora.rank, inputs), "adapter"))
                adapters.append(Weight(f"{layer}.lora_B.weight", (outputs, lora.rank), "adapter"))
        result[group] = tuple(adapters)
    return result


def count_adapters(config: LLMConfig, lora: LoRA) -> int:
    """Elements of all adapters: Σ rank · (in + out)."""
    adapters = adapter_weights(config, lora)
    return sum(g.layers * sum(w.elements for w in adapters[g.name]) for g in config.groups)


@lru_cache(maxsize=256)
def count_parameters(config: LLMConfig, active: bool = False, lookups: bool = True) -> int:
    """Elements of all weights. `active`: of the routed experts only the `top_k` a token meets. ``lookups=False``
    leaves out tables that are looked up and never multiply (a tied embedding multiplies, as the head)."""

    def count(weights: tuple[Weight, ...]) -> int:
        total = 0
        for weight in weights:
            if weight.kind == "experts" and active:
                assert config.moe is not None
                total += weight.elements // config.moe.experts * config.moe.top_k
            elif weight.kind != "embedding" or lookups or (
                config.tied_embeddings and weight.name == "embed_tokens.weight"
            ):
                total += weight.elements
        return total

    return count(model_weights(config)) + sum(g.layers * count(layer_weights(config, g)) for g in config.groups)


def six_n_flops_per_token(config: LLMConfig, seq_len: int) -> int:
    """Training FLOP a token by the 6·N convention: 6 per active weight, norms included and lookups left out, plus
    attention counted in full (arXiv 2204.02311, appendix B, gives the sum for dense models).

    It exceeds `Graph.flops()` a token by 6 per norm and bias weight, which multiply elementwise.
    """
    weights = count_parameters(config, active=True, lookups=False)
    seen = sum(g.layers * min(seq_len, g.window or seq_len) for g in config.groups)
    return 6 * (weights + seen * config.heads * (config.query_dim + config.value_dim))


def kv_cache_bytes_per_token(config: LLMConfig, dtype: str = "bfloat16") -> float:
    """Bytes a cached token takes over all layers: keys and values of the KV heads, or the latent of MLA.

    Sliding layers count too; they stop growing at their window. Raises UnknownNameError for an unknown dtype.
    """
    from foretell.graph import dtype_bytes

    if config.mla is not None:
        elements = config.mla.kv_lora_rank + config.mla.rope_head_dim
    else:
        elements = 2 * config.kv_heads * config.head_dim
    return config.layers * elements * dtype_bytes(dtype)
