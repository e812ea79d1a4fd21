"""The parametric graphs against the models of `transformers`: PyTorch's own FLOP counter, and our capture.

The comparison: windows at least as long as the sequence, MLA expanded, experts counted by the rows routed to them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretell.graph import Graph
from foretell.workload import llm
from foretell.workload.lora import LoRA

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, TOKENS, VOCAB = 2, 24, 320
_LLAMA_LIKE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 128, "pad_token_id": 0,
}
_LATENT = _LLAMA_LIKE | {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 1, "topk_group": 1,
}
CONFIGS: dict[str, dict[str, object]] = {
    "bloom": {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    "deepseek_v2": _LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": _LATENT | {"model_type": "deepseek_v3", "q_lora_rank": 48},
    "falcon": {
        "model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": VOCAB, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False,
    },
    "falcon-two-norms": {
        "model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2,
        "vocab_size": VOCAB, "new_decoder_architecture": True,
    },
    "gemma": _LLAMA_LIKE | {"model_type": "gemma", "head_dim": 32},
    "gemma2": _LLAMA_LIKE | {"model_type": "gemma2", "head_dim": 32, "sliding_window": 64},
    "gemma3": _LLAMA_LIKE | {
        "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": _LLAMA_LIKE | {
        "model_type": "glm4_moe", "head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "attention_bias": True, "use_qk_norm": True,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 128},
    "gpt_neox": {
        "model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "vocab_size": VOCAB,
    },
    "gpt_oss": _LLAMA_LIKE | {
        "model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 64,
    },
    "gptj": {
        "model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "rotary_dim": 8,
        "n_positions": 128,
    },
    "llama": _LLAMA_LIKE | {"model_type": "llama"},
    "llama-tied-biased": _LLAMA_LIKE | {
        "model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24,
    },
    "mistral": _LLAMA_LIKE | {"model_type": "mistral", "sliding_window": 64},
    "mixtral": _LLAMA_LIKE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mpt": {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 128},
    "olmo2": _LLAMA_LIKE | {"model_type": "olmo2"},
    "opt": {
        "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96,
        "vocab_size": VOCAB, "max_position_embeddings": 128, "word_embed_proj_dim": 64,
    },
    "phi": _LLAMA_LIKE | {"model_type": "phi", "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": _LLAMA_LIKE | {"model_type": "phi3"},
    "qwen2": _LLAMA_LIKE | {"model_type": "qwen2"},
    "qwen2_moe": _LLAMA_LIKE | {
        "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2,
    },
    "qwen3": _LLAMA_LIKE | {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": _LLAMA_LIKE | {
        "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "mlp_only_layers": [0],
    },
    "starcoder2": _LLAMA_LIKE | {"model_type": "starcoder2"},
}
# One of each kind, for the comparisons that need a capture.
KINDS = ("gpt2", "llama", "qwen3", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3", "falcon", "phi", "gpt_oss")


def library_model(name: str):
    data = dict(CONFIGS[name])
    config = transformers.AutoConfig.for_model(str(data.pop("model_type")), **data)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.device("cpu"):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_and_parameters_equal_those_of_the_library(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model = library_model(name)
    for parameter in model.parameters():  # meaningful routing: no two experts tie
        torch.nn.init.normal_(parameter, std=0.1)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.randint(1, VOCAB, (BATCH, TOKENS)), use_cache=False)
    config = llm.from_hf_config(CONFIGS[name])
    graph = llm.graph(config, phase="inference", batch=BATCH, seq_len=TOKENS, precision="fp32")
    assert config.parameters == graph.parameters == sum(p.numel() for p in model.parameters())
    assert graph.parameter_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert graph.flops() == counter.get_total_flops()
    assert not graph.not_counted


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_the_library_saves_reads_the_same(name: str) -> None:
    """Its own ``to_dict`` has renamed and added fields (rope_parameters, layer_types, …)."""
    data = dict(CONFIGS[name])
    saved = transformers.AutoConfig.for_model(str(data["model_type"]), **{k: v for k, v in data.items()
                                                                          if k != "model_type"}).to_dict()
    read, given = llm.from_hf_config(saved, "x"), llm.from_hf_config(data, "x")
    assert read.replace(context_length=None) == given.replace(context_length=None)


def captured(name: str, **options: object) -> Graph:
    from foretell.workload.hf import capture_config
    from foretell.workload.options import options as make_options

    data = dict(CONFIGS[name]) | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return capture_config(data, make_options(**options))


@pytest.mark.parametrize("name", KINDS)
def test_a_training_step_equals_its_capture(name: str) -> None:
    options = {"phase": "train", "batch": BATCH, "seq_len": TOKENS, "precision": "bf16", "optimizer": "adamw"}
    truth = captured(name, **options)
    graph = llm.graph(llm.from_hf_config(CONFIGS[name]), **options)
    assert graph.parameters == truth.parameters
    assert graph.parameter_bytes == truth.parameter_bytes
    assert dict(graph.items) == dict(truth.items)
    for phase in ("forward", "backward"):
        assert graph.flops(phase=phase) == truth.flops(phase=phase)
    assert held(graph, "gradient") == held(truth, "gradient")
    assert held(graph, "optimizer") == pytest.approx(held(truth, "optimizer"), rel=1e-3)  # step counters
    assert traffic(graph, "optimizer") == pytest.approx(traffic(truth, "optimizer"), rel=1e-3)
    assert peak(graph) == pytest.approx(peak(truth), rel=0.12 if name == "gpt_oss" else 0.03)


@pytest.mark.parametrize("optimizer", llm.OPTIMIZERS)
def test_each_optimizer_moves_what_its_capture_moves(optimizer: str) -> None:
    options = {"phase": "train", "batch": 1, "seq_len": 8, "precision": "amp_bf16", "optimizer": optimizer}
    truth = captured("llama", **options)
    graph = llm.graph(llm.from_hf_config(CONFIGS["llama"]), **options)
    assert held(graph, "optimizer") == pytest.approx(held(truth, "optimizer"), rel=1e-3)
    moved = traffic(truth, "optimizer")
    if optimizer == "adamw-fused":  # its schema marks gradients as written, which the kernel does not do
        moved -= held(truth, "gradient")
    assert traffic(graph, "optimizer") == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize("options", [
    {"checkpointing": True}, {"accumulate": 3}, {"precision": "amp_bf16"}, {"precision": "fp32", "optimizer": "sgd"},
], ids=str)
def test_training_options_equal_their_capture(options: dict[str, object]) -> None:
    full = {"phase": "train", "batch": BATCH, "seq_len": TOKENS, "precision": "bf16", "optimizer": "adamw"} | options
    truth = captured("llama", **full)
    graph = llm.graph(llm.from_hf_config(CONFIGS["llama"]), **full)
    assert dict(graph.items) == dict(truth.items)
    for phase in ("forward", "backward"):
        assert graph.flops(phase=phase) == truth.flops(phase=phase)
    assert peak(graph) == pytest.approx(peak(truth), rel=0.05)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", [*(kind for kind in KINDS if kind != "gpt2"), "phi3", "qwen2_moe"])
def test_training_adapters_equals_its_capture(name: str, checkpointing: bool) -> None:
    """Beside every linear layer; gpt2's are convolutions by class, which take none."""
    options = {"phase": "train", "batch": BATCH, "seq_len": TOKENS, "precision": "bf16", "optimizer": "adamw",
               "checkpointing": checkpointing, "lora": LoRA(4, ("all-linear",))}
    truth = captured(name, **options)
    graph = llm.graph(llm.from_hf_config(CONFIGS[name]), **options)
    assert graph.parameters == truth.parameters
    assert graph.trainable_parameters == truth.trainable_parameters
    assert graph.parameter_bytes == truth.parameter_bytes
    for phase in ("forward", "backward"):
        assert graph.macs(phase=phase) == truth.macs(phase=phase)
    assert held(graph, "gradient") == held(truth, "gradient")
    assert held(graph, "optimizer") == pytest.approx(held(truth, "optimizer"), rel=5e-3)  # step counters
    assert peak(graph) == pytest.approx(peak(truth), rel=0.12)
    for each in (graph, truth):  # no gradient of a frozen norm's weights
        norms = [op for op in each.ops if op.name.startswith("aten.native_layer_norm_backward")]
        assert all(op.bytes_written == BATCH * TOKENS * 64 * 2 for op in norms)
        assert bool(norms) == (name in ("falcon", "phi"))


@pytest.mark.parametrize("name", KINDS)
def test_prefill_and_decode_equal_their_capture(name: str) -> None:
    config = llm.from_hf_config(CONFIGS[name])
    prefill = llm.graph(config, phase="prefill", batch=BATCH, seq_len=TOKENS)
    assert prefill.flops() == captured(name, phase="prefill", batch=BATCH, seq_len=TOKENS, precision="bf16").flops()
    decode = llm.graph(config, phase="decode", batch=BATCH, context=TOKENS, mla="expanded")
    truth = captured(name, phase="decode", batch=BATCH, context=TOKENS, precision="bf16")
    assert dict(decode.items)["tokens"] == dict(truth.items)["tokens"]
    assert decode.flops() == truth.flops()
    found = sum(s.nbytes for s in truth.storages if s.role == "kv_cache" and s.born < 0)  # the step makes it anew
    before = found * (TOKENS + 1) / TOKENS  # sliding caches hold a counter besides
    assert held(decode, "kv_cache") == pytest.approx(before, rel=1e-3)


def held(graph: Graph, role: str) -> int:
    return sum(s.nbytes for s in graph.storages if s.role == role)


def traffic(graph: Graph, phase: str) -> int:
    return sum((op.bytes_read + op.bytes_written) * op.repeat for op in graph.ops if op.phase == phase)


def peak(graph: Graph) -> float:
    """Largest sum of storages alive at once."""
    change = np.zeros(len(graph.ops) + 1)
    for s in graph.storages:
        change[max(s.born, 0)] += s.nbytes
        end = math.inf if s.dies is None else s.dies + 1
        if end < len(change):
            change[int(end)] -= s.nbytes
    return float(np.cumsum(change).max())
