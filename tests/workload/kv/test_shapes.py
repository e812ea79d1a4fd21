"""Cache shapes from configurations, against the caches that `transformers` really fills."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import InputError, UnknownNameError
from foretell.workload import kv
from foretell.workload.kv.hf import from_config

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_NAMED_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "num_hidden_layers": 3},
    "gemma3_text": {**_BASE, "num_hidden_layers": 7, "sliding_window": 12, "query_pre_attn_scalar": 16},
    "gpt_oss": {
        **_BASE,
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma4_text": {
        **_BASE,
        "num_hidden_layers": 7,
        "sliding_window": 12,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 128,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
    },
    "qwen3_next": {**_BASE, **_LINEAR, **_EXPERTS, "num_hidden_layers": 8, "shared_expert_intermediate_size": 32},
    "jamba": {
        **_BASE,
        "head_dim": None,
        "num_hidden_layers": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "use_mamba_kernels": False,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "mamba": {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 128, "state_size": 8},
    "mamba2": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": 128,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 16,
    },
    "bamba": {**_BASE, **_NAMED_MAMBA2, "num_hidden_layers": 4, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_BASE,
        **_NAMED_MAMBA2,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**_BASE, **_NAMED_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 128},
    "lfm2": {**_BASE, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "llama4_text": {
        **_BASE,
        "num_hidden_layers": 4,
        "attention_chunk_size": 12,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
    },
    "deepseek_v3": {
        **_BASE,
        "head_dim": None,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    },
    "nemotron_h": {
        **_BASE,
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "use_mamba_kernels": False,
    },
    "minimax_m2": {**_BASE, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def _tensors(value: Any, seen: set[int]) -> list[Any]:
    """Every tensor a cache holds, once."""
    import torch

    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item, seen)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item, seen)]
    if type(value).__module__.startswith("transformers"):
        return [t for item in vars(value).values() for t in _tensors(item, seen)]
    return []


def _filled(config: dict[str, Any], model_type: str, tokens: int) -> int:
    """Bytes of the cache after `tokens` tokens of two sequences, as `transformers` fills it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    given = {key: value for key, value in config.items() if value is not None}
    made = transformers.AutoConfig.for_model(model_type, **given)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(torch.zeros(2, tokens, dtype=torch.long), use_cache=True)
    cache = getattr(out, "past_key_values", None)
    if cache is None:
        cache = out.cache_params
    tensors = [t for t in _tensors(cache, set()) if t.is_floating_point() and t.numel() > 1]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
@pytest.mark.parametrize("tokens", [5, 40])
def test_as_transformers_fills_it(model_type: str, tokens: int) -> None:
    config = {key: value for key, value in CONFIGS[model_type].items() if value is not None}
    shape = from_config({**config, "model_type": model_type}, "tiny", "config.json")
    cache = kv.kv_cache(shape, tokens=tokens, batch=2, dtype="fp32", engine="transformers")
    # Between steps a full window has room for the step's own token, which is not there yet.
    open_slots = sum(
        2 * layer.layers * layer.kv_heads * (layer.key_dim + layer.value_dim) * 4
        for layer in shape.of("sliding", "chunked")
        if tokens >= (layer.window or 0)
    )
    assert cache.nbytes - open_slots == _filled(CONFIGS[model_type], model_type, tokens)


def test_shared_layers_keep_nothing() -> None:
    config = {**CONFIGS["gemma4_text"], "model_type": "gemma4_text"}
    whole, shared = (from_config({**config, "num_kv_shared_layers": n}, "m", "c").layers for n in (0, 3))
    assert sum(layer.layers for layer in whole) - sum(layer.layers for layer in shared) == 3


def test_a_config_file_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"], "model_type": "llama"}))
    for name in (str(tmp_path / "config.json"), f"{tmp_path}/"):
        assert kv.kv_cache_bytes(name, tokens=16, engine="vllm") == 3 * 16 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"linear_num_value_heads": "4"}, "linear_num_value_heads"),
        ({"layer_types": ["full_attention", 3]}, "layer_types"),
        ({"layer_types": "full"}, "layer_types"),
        ({"layer_types": ["ful_attention"] * 8}, "full_attention"),
        ({"head_dim": 2**40}, "head_dim"),
        ({"model_type": "qwen3_nxt"}, "qwen3_next"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["x"]}, "model_type"),
    ],
)
def test_odd_configs_are_named(change: dict[str, Any], what: str) -> None:
    config = {**CONFIGS["qwen3_next"], "model_type": "qwen3_next", **change}
    with pytest.raises((InputError, UnknownNameError), match=what):
        from_config(config, "odd", "config.json")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("jamba", {"attn_layer_period": 0}),
        ("nemotron_h", {"num_hidden_layers": 4, "hybrid_override_pattern": "M" * 1000}),
        ("lfm2", {"num_hidden_layers": 5}),
    ],
)
def test_patterns_that_do_not_fit_are_refused(kind: str, change: dict[str, Any]) -> None:
    config = {key: value for key, value in CONFIGS[kind].items() if value is not None}
    with pytest.raises(InputError):
        from_config({**config, "model_type": kind, **change}, "odd", "config.json")


@pytest.mark.parametrize("data", [None, [], "x", 3, {}])
def test_not_a_config(data: Any) -> None:
    with pytest.raises((InputError, UnknownNameError)):
        from_config(data, "odd", "config.json")
