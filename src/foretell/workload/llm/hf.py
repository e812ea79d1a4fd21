"""Read a public ``config.json`` (the format of the `transformers` library) as an `LLMConfig`.

The file is data: nothing in it is run, and `transformers` is not imported. Where a file leaves a field out, the default
is the one that library's configuration class documents for the model type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretell.errors import InputError, unknown
from foretell.workload.llm.config import MLA, LLMConfig, MoE

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_new", "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}
_REQUIRED = object()


class _Reader:
    """A ``config.json`` read key by key; a missing one is an error that names it and the file."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def get(self, *keys: str, default: Any = _REQUIRED) -> Any:
        """The first of `keys` that is present."""
        for key in keys:
            if key in self.data:
                return self.data[key]
        if default is _REQUIRED:
            raise InputError(f"{keys[0]!r} is missing", self.where, "add it to the config")
        return default

    def integer(self, *keys: str, default: Any = _REQUIRED) -> int:
        value = self.get(*keys, default=default)
        if value is None and default is not _REQUIRED:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{keys[0]!r} is {value!r}, want a count", self.where)
        return value

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self.get(key, default=default)
        return bool(default if value is None and default is not _REQUIRED else value)

    def activation(self, *keys: str, default: str) -> str:
        name = self.get(*keys, default=default) or default
        if name not in _ACTIVATIONS:
            raise unknown(f"{keys[0]} in {self.where}:", str(name), _ACTIVATIONS)
        return _ACTIVATIONS[name]

    def unsupported(self, what: str) -> InputError:
        return InputError(what, self.where, "capture it through hf: instead")


def _sizes(r: _Reader) -> dict[str, Any]:
    """The fields most model types share, under the names most of them use."""
    heads = r.integer("num_attention_heads")
    return {
        "layers": r.integer("num_hidden_layers"),
        "hidden": r.integer("hidden_size"),
        "heads": heads,
        "kv_heads": r.integer("num_key_value_heads", default=heads),
        "head_dim": r.integer("head_dim", default=0),
        "intermediate": r.integer("intermediate_size"),
        "vocab": r.integer("vocab_size"),
        "context_length": r.get("max_position_embeddings", default=None),
        "tied_embeddings": r.flag("tie_word_embeddings", False),
    }


def _pattern(r: _Reader, layers: int, default: Sequence[str] = ("full",)) -> dict[str, Any]:
    """The attention window and the pattern of layers it applies to, from ``layer_types`` or the type's own rule."""
    names = {"full_attention": "full", "sliding_attention": "sliding"}
    types = r.get("layer_types", default=None)
    if types is None:
        pattern = tuple(default)
    else:
        for kind in types:
            if kind not in names:
                raise r.unsupported(f"layer type {kind!r} is neither full nor sliding attention")
        pattern = _shortest_cycle(tuple(names[kind] for kind in types))
    if "sliding" not in pattern:
        return {}
    window = r.integer("sliding_window")
    return {"sliding_window": window, "attention_pattern": pattern} if window else {}


def _shortest_cycle(values: tuple[str, ...]) -> tuple[str, ...]:
    for length in range(1, len(values)):
        if all(value == values[i % length] for i, value in enumerate(values)):
            return values[:length]
    return values


def _partial_rotary(r: _Reader, head_dim: int, default: float, *keys: str) -> int | None:
    rope = r.get("rope_parameters", default=None) or {}
    factor = r.get("partial_rotary_factor", *keys, default=None)
    if factor is None:
        factor = rope.get("partial_rotary_factor", default)
    return None if factor == 1 else int(head_dim * factor)


def _llama(r: _Reader) -> dict[str, Any]:
    bias = r.flag("attention_bias", False)
    return _sizes(r) | {
        "qkv_bias": bias, "o_bias": bias, "mlp_bias": r.flag("mlp_bias", False),
        "activation": r.activation("hidden_act", default="silu"),
    }


def _mistral(r: _Reader) -> dict[str, Any]:
    fields = _sizes(r) | {"activation": r.activation("hidden_act", default="silu")}
    window = r.get("sliding_window", default=4096)
    return fields | (_pattern(r, fields["layers"], ("sliding",)) if window else {})


def _mixtral(r: _Reader) -> dict[str, Any]:
    fields = _sizes(r) | {"activation": r.activation("hidden_act", default="silu")}
    fields["moe"] = MoE(r.integer("num_local_experts", "num_experts"), r.integer("num_experts_per_tok"),
                        fields["intermediate"])
    return fields | (_pattern(r, fields["layers"], ("sliding",)) if r.get("sliding_window", default=None) else {})


def _qwen2(r: _Reader) -> dict[str, Any]:
    fields = _sizes(r) | {"qkv_bias": True, "activation": r.activation("hidden_act", default="silu")}
    return fields | _qwen_window(r, fields["layers"])


def _qwen_window(r: _Reader, layers: int) -> dict[str, Any]:
    if not r.flag("use_sliding_window", False):
        return {}
    full = min(layers, r.integer("max_window_layers", default=layers))
    return _pattern(r, layers, ("full",) * full + ("sliding",) * (layers - full))


def _qwen3(r: _Reader) -> dict[str, Any]:
    bias = r.flag("attention_bias", False)
    fields = _sizes(r) | {
        "qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "activation": r.activation("hidden_act", default="silu"),
    }
    fields["head_dim"] = fields["head_dim"] or 128
    return fields | _qwen_window(r, fields["layers"])


def _qwen_moe(r: _Reader, fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    dense = list(r.get("mlp_only_layers", default=None) or [])
    if sorted(dense) != list(range(len(dense))):
        raise r.unsupported(f"mlp_only_layers {dense} are not the first layers")
    fields["moe"] = MoE(
        r.integer("num_experts", "num_local_experts"), r.integer("num_experts_per_tok"),
        r.integer("moe_intermediate_size"), first_dense=len(dense), every=r.integer("decoder_sparse_step", default=1),
        renormalize=r.flag("norm_topk_prob", False), **options,
    )
    return fields


def _qwen3_moe(r: _Reader) -> dict[str, Any]:
    bias = r.flag("attention_bias", False)
    fields = _sizes(r) | {
        "qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "activation": r.activation("hidden_act", default="silu"),
    }
    return _qwen_moe(r, fields | _qwen_window(r, fields["layers"]))


def _qwen2_moe(r: _Reader) -> dict[str, Any]:
    fields = _sizes(r) | {
        "qkv_bias": r.flag("qkv_bias", True), "activation": r.activation("hidden_act", default="silu"),
    }
    fields |= _qwen_window(r, fields["layers"])
    return _qwen_moe(r, fields, shared_intermediate=r.integer("shared_expert_intermediate_size"), shared_gate=True)


def _deepseek(r: _Reader, scoring: str, renormalize: bool) -> dict[str, Any]:
    bias = r.flag("attention_bias", False)
    width = r.integer("moe_intermediate_size")
    return _sizes(r) | {
        "qkv_bias": bias, "o_bias": bias, "head_dim": 0, "activation": r.activation("hidden_act", default="silu"),
        "mla": MLA(
            r.integer("kv_lora_rank"), r.integer("qk_rope_head_dim"), r.integer("qk_nope_head_dim"),
            r.integer("v_head_dim"), r.integer("q_lora_rank", default=0),
        ),
        "moe": MoE(
            r.integer("n_routed_experts", "num_local_experts"), r.integer("num_experts_per_tok"), width,
            shared_intermediate=width * r.integer("n_shared_experts", default=0),
            first_dense=r.integer("first_k_dense_replace", default=0), every=r.integer("moe_layer_freq", default=1),
            router_fp32=True, scoring=r.get("scoring_func", default=scoring),
            renormalize=r.flag("norm_topk_prob", renormalize),
        ),
    }


def _deepseek_v2(r: _Reader) -> dict[str, Any]:
    return _deepseek(r, "softmax", False)


def _deepseek_v3(r: _Reader) -> dict[str, Any]:
    return _deepseek(r, "sigmoid", True)


def _glm4_moe(r: _Reader) -> dict[str, Any]:
    fields = _sizes(r) | {
        "qkv_bias": r.flag("attention_bias", False), "qk_norm": "head" if r.flag("use_qk_norm", False) else "none",
        "activation": r.activation("hidden_act", default="silu"),
    }
    width = r.integer("moe_intermediate_size")
    fields["rotary_dim"] = _partial_rotary(r, fields["head_dim"] or fields["hidden"] // fields["heads"], 0.5)
    fields["moe"] = MoE(
        r.integer("n_routed_experts", "num_local_experts"), r.integer("num_experts_per_tok"), width,
        shared_intermediate=width * r.integer("n_shared_experts", default=0),
        first_dense=r.integer("first_k_dense_replace", default=0), router_fp32=True, scoring="sigmoid",
        renormalize=r.flag("norm_topk_prob", True),
    )
    return fields


def _gpt_oss(r: _Reader) -> dict[str, Any]:
    fields = _sizes(r)
    bias = r.flag("attention_bias", True)
    return fields | {
        "qkv_bias": bias, "o_bias": bias, "attention_sinks": True, "norm_fp32": True, "activation": "swiglu_clamped",
        "moe": MoE(
            r.integer("num_local_experts", "num_experts"), r.integer("num_experts_per_tok"), fields["intermediate"],
            router_bias=True, expert_bias=True, scoring="softmax_after_topk", renormalize=False,
        ),
    } | _pattern(r, fields["layers"], ("sliding", "full"))


def _gemma(r: _Reader) -> dict[str, Any]:
    bias = r.flag("attention_bias", False)
    return _sizes(r) | {
        "qkv_bias": bias, "o_bias": bias, "embedding_scale": True, "norm_fp32": True,
        "tied_embeddings": r.flag("tie_word_embeddings", True),
        "head_dim": r.integer("head_dim", default=256),
        "activation": r.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
    }


def _gemma2(r: _Reader) -> dict[str, Any]:
    fields = _gemma(r) | {
        "block": "sandwich", "final_softcap": r.get("final_logit_softcapping", default=30.0) is not None,
    }
    return fields | _pattern(r, fields["layers"], ("sliding", "full"))


def _gemma3(r: _Reader) -> dict[str, Any]:
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208}
    r = _Reader(defaults | dict(r.data), r.where)
    fields = _gemma(r) | {"block": "sandwich", "qk_norm": "head"}
    every = r.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return fields | _pattern(r, fields["layers"], ("sliding",) * (every - 1) + ("full",))


def _gemma3_multimodal(r: _Reader) -> dict[str, Any]:
    text = r.get("text_config")
    if not isinstance(text, Mapping):
        raise InputError("'text_config' is not a table", r.where)
    return _gemma3(_Reader(text, f"{r.where}: text_config"))


def _phi(r: _Reader) -> dict[str, Any]:
    fields = _sizes(r)
    if r.flag("qk_layernorm", False):
        raise r.unsupported("qk_layernorm is set, and only RMS norms of queries and keys are known")
    return fields | {
        "block": "parallel", "norm": "layer", "norm_bias": True, "gated": False, "qkv_bias": True, "o_bias": True,
        "mlp_bias": True, "head_bias": True, "activation": r.activation("hidden_act", default="gelu_new"),
        "rotary_dim": _partial_rotary(r, fields["hidden"] // fields["heads"], 0.5),
    }


def _phi3(r: _Reader) -> dict[str, Any]:
    fields = _sizes(r) | {
        "fused_qkv": True, "fused_gate_up": True, "activation": r.activation("hidden_act", default="silu"),
    }
    fields["rotary_dim"] = _partial_rotary(r, fields["head_dim"] or fields["hidden"] // fields["heads"], 1.0)
    return fields | (_pattern(r, fields["layers"], ("sliding",)) if r.get("sliding_window", default=None) else {})


def _gpt2(r: _Reader) -> dict[str, Any]:
    hidden = r.integer("n_embd", "hidden_size")
    positions = r.integer("n_positions", "max_position_embeddings")
    return {
        "layers": r.integer("n_layer", "num_hidden_layers"), "hidden": hidden,
        "heads": r.integer("n_head", "num_attention_heads"), "vocab": r.integer("vocab_size"),
        "intermediate": r.integer("n_inner", default=0) or 4 * hidden, "context_length": positions,
        "positions": "learned", "position_rows": positions, "norm": "layer", "norm_bias": True, "gated": False,
        "qkv_bias": True, "o_bias": True, "mlp_bias": True, "fused_qkv": True,
        "tied_embeddings": r.flag("tie_word_embeddings", True),
        "activation": r.activation("activation_function", default="gelu_new"),
    }


def _gptj(r: _Reader) -> dict[str, Any]:
    hidden = r.integer("n_embd", "hidden_size")
    return {
        "layers": r.integer("n_layer", "num_hidden_layers"), "hidden": hidden,
        "heads": r.integer("n_head", "num_attention_heads"), "vocab": r.integer("vocab_size"),
        "intermediate": r.integer("n_inner", default=0) or 4 * hidden,
        "context_length": r.get("n_positions", "max_position_embeddings", default=None),
        "block": "parallel", "rotary_dim": r.integer("rotary_dim"), "norm": "layer", "norm_bias": True, "gated": False,
        "mlp_bias": True, "head_bias": True, "tied_embeddings": r.flag("tie_word_embeddings", False),
        "activation": r.activation("activation_function", default="gelu_new"),
    }


def _gpt_neox(r: _Reader) -> dict[str, Any]:
    fields = _sizes(r)
    bias = r.flag("attention_bias", True)
    return fields | {
        "block": "parallel_two_norms" if r.flag("use_parallel_residual", True) else "pre_norm",
        "norm": "layer", "norm_bias": True, "gated": False, "fused_qkv": True, "qkv_bias": bias, "o_bias": bias,
        "mlp_bias": True, "activation": r.activation("hidden_act", default="gelu"),
        "rotary_dim": _partial_rotary(r, fields["hidden"] // fields["heads"], 0.25, "rotary_pct"),
    }


def _opt(r: _Reader) -> dict[str, Any]:
    hidden = r.integer("hidden_size")
    if not r.flag("do_layer_norm_before", True):
        raise r.unsupported("do_layer_norm_before is false, a layout no block of llm: has")
    if r.integer("word_embed_proj_dim", default=hidden) != hidden:
        raise r.unsupported("word_embed_proj_dim differs from hidden_size")
    positions = r.integer("max_position_embeddings")
    bias = r.flag("enable_bias", True)
    return {
        "layers": r.integer("num_hidden_layers"), "hidden": hidden, "heads": r.integer("num_attention_heads"),
        "intermediate": r.integer("ffn_dim"), "vocab": r.integer("vocab_size"), "context_length": positions,
        "positions": "learned", "position_rows": positions + 2,  # two rows are kept for padding
        "norm": "layer", "norm_bias": r.flag("layer_norm_elementwise_affine", True), "gated": False,
        "qkv_bias": bias, "o_bias": bias, "mlp_bias": bias,
        "tied_embeddings": r.flag("tie_word_embeddings", True),
        "activation": r.activation("activation_function", default="relu"),
    }


def _bloom(r: _Reader) -> dict[str, Any]:
    hidden = r.integer("hidden_size", "n_embed")
    return {
        "layers": r.integer("n_layer", "num_hidden_layers"), "hidden": hidden,
        "heads": r.integer("n_head", "num_attention_heads"), "intermediate": 4 * hidden,
        "vocab": r.integer("vocab_size"), "context_length": r.get("seq_length", default=None), "positions": "alibi",
        "embedding_norm": True, "norm": "layer", "norm_bias": True, "gated": False, "fused_qkv": True,
        "qkv_bias": True, "o_bias": True, "mlp_bias": True, "activation": "gelu_new",
        "tied_embeddings": r.flag("tie_word_embeddings", True),
    }


def _falcon(r: _Reader) -> dict[str, Any]:
    hidden, heads = r.integer("hidden_size"), r.integer("num_attention_heads", "n_head")
    new, bias = r.flag("new_decoder_architecture", False), r.flag("bias", False)
    if new:
        kv_heads = r.integer("num_kv_heads", "n_head_kv", default=heads)
        block = "parallel" if r.get("num_ln_in_parallel_attn", default=None) == 1 else "parallel_two_norms"
    else:
        kv_heads = 1 if r.flag("multi_query", True) else heads
        block = "parallel" if r.flag("parallel_attn", True) else "pre_norm"
    return {
        "layers": r.integer("num_hidden_layers", "n_layer"), "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
        "intermediate": r.integer("ffn_hidden_size", default=0) or 4 * hidden, "vocab": r.integer("vocab_size"),
        "context_length": r.get("max_position_embeddings", default=2048),
        "positions": "alibi" if r.flag("alibi", False) else "rope", "block": block, "norm": "layer",
        "norm_bias": True, "gated": False, "fused_qkv": True, "qkv_bias": bias, "o_bias": bias, "mlp_bias": bias,
        "tied_embeddings": r.flag("tie_word_embeddings", True),
        "activation": r.activation("activation", default="gelu"),
    }


def _mpt(r: _Reader) -> dict[str, Any]:
    hidden, heads = r.integer("d_model", "hidden_size"), r.integer("n_heads", "num_attention_heads")
    attention = r.get("attn_config", default=None) or {}
    if attention.get("attn_type", "multihead_attention") != "multihead_attention" or attention.get("qk_ln"):
        raise r.unsupported(f"attn_config {dict(attention)} is not plain multi-head attention")
    bias = not r.flag("no_bias", True)
    positions = r.get("max_seq_len", default=2048)
    alibi = attention.get("alibi", True)
    return {
        "layers": r.integer("n_layers", "num_hidden_layers"), "hidden": hidden, "heads": heads,
        "intermediate": r.integer("expansion_ratio", default=4) * hidden, "vocab": r.integer("vocab_size"),
        "context_length": positions, "positions": "alibi" if alibi else "learned",
        "position_rows": 0 if alibi else positions, "norm": "layer", "norm_bias": bias, "gated": False,
        "fused_qkv": True, "qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, "activation": "gelu",
        "tied_embeddings": r.flag("tie_word_embeddings", True),
    }


def _olmo2(r: _Reader) -> dict[str, Any]:
    return _llama(r) | {"block": "post_norm", "qk_norm": "full", "mlp_bias": False}


def _starcoder2(r: _Reader) -> dict[str, Any]:
    fields, bias = _sizes(r), r.flag("use_bias", True)
    fields["tied_embeddings"] = r.flag("tie_word_embeddings", True)
    return fields | {
        "norm": "layer", "norm_bias": True, "gated": False, "qkv_bias": bias, "o_bias": bias, "mlp_bias": bias,
        "activation": r.activation("hidden_act", default="gelu_pytorch_tanh"),
    } | (_pattern(r, fields["layers"], ("sliding",)) if r.get("sliding_window", default=None) else {})


_TYPES: dict[str, Callable[[_Reader], dict[str, Any]]] = {
    "bloom": _bloom,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3_multimodal,
    "gemma3_text": _gemma3,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "kimi_k2": _deepseek_v3,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "mpt": _mpt,
    "olmo2": _olmo2,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "starcoder2": _starcoder2,
}

MODEL_TYPES: tuple[str, ...] = tuple(_TYPES)


def from_hf_config(data: Mapping[str, Any], name: str | None = None, where: str = "config.json") -> LLMConfig:
    """The `LLMConfig` of a parsed ``config.json``. Multimodal files give their language model.

    Raises InputError naming a missing or odd field, UnknownNameError for a model type that is not known.

    >>> tiny = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    ...         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    >>> from_hf_config(tiny).parameters
    202048
    """
    if not isinstance(data, Mapping):
        raise InputError("is not a JSON object", where)
    reader = _Reader(data, where)
    model_type = reader.get("model_type")
    if not isinstance(model_type, str) or model_type not in _TYPES:
        raise unknown(f"model_type in {where}:", str(model_type), MODEL_TYPES)
    fields = _TYPES[model_type](reader)
    title = name or data.get("_name_or_path") or model_type
    return LLMConfig(name=str(title), **{"published_weights": _published_weights(data), **fields})


def _published_weights(data: Mapping[str, Any]) -> str:
    """The format that ``quantization_config`` says weights have; "" where it says none, or one that is not known."""
    text = data.get("text_config")
    found = data.get("quantization_config", text.get("quantization_config") if isinstance(text, Mapping) else None)
    if not isinstance(found, Mapping):
        return ""
    method = str(found.get("quant_method"))
    if method in ("fp8", "fbgemm_fp8", "mxfp4"):
        return method.removeprefix("fbgemm_")
    known: dict[Any, str] = {(4, "int"): "int4", (8, "int"): "w8a16", (4, "float"): "nvfp4", (8, "float"): "fp8"}
    if method in ("awq", "gptq"):
        return known.get((found.get("bits"), "int"), "")
    groups = found.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping):
        kinds = set()
        for group in groups.values():
            weights, inputs = (group.get(key) if isinstance(group, Mapping) else None
                               for key in ("weights", "input_activations"))  # fmt: skip
            if isinstance(weights, Mapping):
                kind = known.get((weights.get("num_bits"), weights.get("type")), "")
                eight = isinstance(inputs, Mapping) and (inputs.get("num_bits"), inputs.get("type")) == (8, "int")
                kinds.add("int8" if kind == "w8a16" and eight else kind)
        return kinds.pop() if len(kinds) == 1 else ""
    return ""
