"""Adapters, 4-bit weights and the optimizers of bitsandbytes: closed forms, published figures, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

import foretell
from foretell.cost.memory import peak_memory
from foretell.errors import ForetellError, InputError, UnknownNameError
from foretell.graph import Graph
from foretell.hardware import device
from foretell.workload import llm
from foretell.workload.lora import LoRA, packed_bytes, parse_lora
from foretell.workload.options import options

QWEN = llm.config("qwen2.5-1.5b")
EVERYWHERE = ("all-linear",)


def llama(hidden: int, layers: int, heads: int, intermediate: int) -> llm.LLMConfig:
    """The first LLaMA (arXiv 2302.13971, table 2, and its released widths)."""
    return llm.from_hf_config({
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": intermediate, "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }, "llama")


LLAMA_33B = llama(6656, 60, 52, 17920)
LLAMA_65B = llama(8192, 80, 64, 22016)


def train(config: llm.LLMConfig = QWEN, **settings: Any) -> Graph:
    return llm.graph(config, **({"phase": "train", "batch": 1, "seq_len": 64} | settings))


def held(graph: Graph, role: str) -> int:
    return sum(s.nbytes for s in graph.storages if s.role == role)


# --- adapters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "expected"), [
    ("rank=8", LoRA(8)),
    ("rank=16,targets=q_proj,v_proj", LoRA(16, ("q_proj", "v_proj"))),
    ("targets=q_proj, k_proj,rank = 4", LoRA(4, ("q_proj", "k_proj"))),
    (LoRA(2), LoRA(2)),
])
def test_settings_are_read(text: object, expected: LoRA) -> None:
    assert parse_lora(text) == expected
    assert options(train=True, lora=text).lora == expected


@pytest.mark.parametrize(("text", "reason"), [
    ("", "belongs to no setting"), ("rank", "belongs to no setting"), ("targets=q_proj", "rank is missing"),
    ("rank=0", "rank is 0"), ("rank=-1", "rank is '-1'"), ("rank=1.5", "rank is '1.5'"), ("rank=²", "rank is '²'"),
    ("rank=9999999999", "rank is"), ("rank=4,rank=8", "given twice"), ("rank=4,targets=", "names no layer"),
    ("rnk=4", "did you mean 'rank'"), ("rank=4,8", "belongs to no setting"),
])
def test_what_is_no_setting_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ForetellError, match=reason):
        parse_lora(text)


def test_trained_parameters_are_rank_times_inputs_and_outputs() -> None:
    """A (rank, in) and B (out, rank): hidden 1536, 2 KV heads of 128, MLP 8960, 28 layers."""
    q_and_v = 28 * 16 * ((1536 + 1536) + (1536 + 256))
    graph = train(lora=LoRA(16))
    assert graph.trainable_parameters == llm.count_adapters(QWEN, LoRA(16)) == q_and_v
    assert graph.parameters == QWEN.parameters + q_and_v
    everywhere = 28 * 16 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960))
    assert train(lora=LoRA(16, EVERYWHERE)).trainable_parameters == everywhere


def test_adapters_do_twice_their_share_of_work_and_the_frozen_model_two_thirds() -> None:
    """Forward as before plus the adapters'; backward: input gradients of all, weight gradients of adapters alone."""
    full, adapted = train(), train(lora=LoRA(16))
    adapters = 64 * llm.count_adapters(QWEN, LoRA(16))  # multiply-adds of 64 tokens
    assert adapted.macs(phase="forward") == full.macs(phase="forward") + adapters
    weights = 64 * sum(math.prod(w.shape) for w in llm.layer_weights(QWEN, QWEN.groups[0]) if w.kind == "matrix") * 28
    head = 64 * QWEN.hidden * QWEN.vocab
    assert adapted.macs(phase="backward") == full.macs(phase="backward") - weights - head + 2 * adapters


def test_only_adapters_have_gradients_and_state() -> None:
    """fp32 adapters with Adam: 4 bytes of gradient and 8 of state each, against 2 and 4 of bf16 weights all over."""
    trained = llm.count_adapters(QWEN, LoRA(16))
    adapted, full = train(lora=LoRA(16)), train()
    assert (held(adapted, "gradient"), held(adapted, "optimizer")) == (4 * trained, 8 * trained)
    assert (held(full, "gradient"), held(full, "optimizer")) == (2 * QWEN.parameters, 4 * QWEN.parameters)
    gpu = device("a100-sxm4-80gb")
    saved = peak_memory(full, gpu).peak_bytes - peak_memory(adapted, gpu).peak_bytes
    # Also gone: inputs kept for weight gradients; come: adapters themselves.
    assert saved > 6 * QWEN.parameters - 16 * trained


def test_lora_with_accumulation_and_checkpointing_trains_the_same_adapters() -> None:
    once, thrice = train(lora=LoRA(8)), train(lora=LoRA(8), accumulate=3)
    assert thrice.macs() == 3 * once.macs()
    assert held(thrice, "gradient") == held(once, "gradient")
    again = train(lora=LoRA(8), checkpointing=True)
    assert again.trainable_parameters == once.trainable_parameters
    assert again.macs(phase="forward") == once.macs(phase="forward")
    assert again.macs() > once.macs()


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "mixtral-8x7b", "gpt2", "bloom-7b1", "gemma-3-4b"])
def test_every_kind_of_model_takes_adapters_on_all_linear_layers(name: str) -> None:
    config = llm.config(name)
    graph = train(config, lora=LoRA(4, EVERYWHERE))
    gates = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
    shapes = [(g.layers, w.shape) for g in config.groups for w in llm.layer_weights(config, g)
              if w.kind == "matrix" and w.name not in gates]
    assert graph.trainable_parameters == sum(layers * 4 * sum(shape) for layers, shape in shapes)
    assert held(graph, "gradient") == 4 * graph.trainable_parameters


def test_targets_are_ends_of_paths_and_unknown_ones_list_the_near() -> None:
    assert train(lora=LoRA(4, ("self_attn.o_proj",))).trainable_parameters == 28 * 4 * 2 * 1536
    with pytest.raises(UnknownNameError, match="did you mean 'q_proj'"):
        train(lora=LoRA(4, ("q_prj",)))
    with pytest.raises(UnknownNameError):
        train(lora=LoRA(4, ("proj",)))  # the end of a word, not of a path
    with pytest.raises(UnknownNameError):
        train(llm.config("mixtral-8x7b"), lora=LoRA(4, ("gate",)))  # the router
    with pytest.raises(InputError, match=r"rank 300 exceeds that of self_attn.v_proj, a matrix of 256×1536"):
        train(lora=LoRA(300))


# --- 4-bit weights ------------------------------------------------------------------------------------------------


def test_packed_weights_take_what_the_paper_says() -> None:
    """QLoRA, section 3: double quantization takes 8/64 + 32/(64·256) = 0.127 bits a parameter for scales."""
    assert packed_bytes(1 << 24) * 8 == (4 + 8 / 64 + 32 / (64 * 256)) * (1 << 24)
    assert packed_bytes(1) == 1 + 1 + 4
    linear = sum(g.layers * w.elements for g in QWEN.groups for w in llm.layer_weights(QWEN, g) if w.kind == "matrix")
    graph = llm.graph(QWEN, phase="prefill", seq_len=8, quantize="nf4")
    expected = (0.5 + 1 / 64 + 4 / (64 * 256)) * linear + 2 * (QWEN.parameters - linear)
    assert graph.parameter_bytes == expected
    assert graph.parameters == QWEN.parameters


def test_each_product_unpacks_its_matrix_and_one_row_does_not() -> None:
    half, packed = (llm.graph(QWEN, phase="prefill", seq_len=8, quantize=q) for q in (None, "nf4"))
    assert packed.flops() == half.flops()
    unpacking = [op for op in packed.ops if op.name == "foretell.dequantize.default"]
    matrices = [w for w in llm.layer_weights(QWEN, QWEN.groups[0]) if w.kind == "matrix"]
    assert sorted(op.bytes_written for op in unpacking) == sorted(2 * w.elements for w in matrices)
    assert sum(op.repeat for op in unpacking) == 28 * len(matrices)
    assert not packed.not_counted
    decode = llm.graph(QWEN, phase="decode", context=8, quantize="nf4")
    assert not [op for op in decode.ops if "dequantize" in op.name]
    assert decode.flops() == llm.graph(QWEN, phase="decode", context=8).flops()
    down = next(op for op in decode.ops if op.module == "layers.mlp.down_proj" and op.kind == "matmul")
    assert down.bytes_read == packed_bytes(8960 * 1536) + 2 * 8960
    two = llm.graph(QWEN, phase="decode", context=8, batch=2, quantize="nf4")
    assert [op for op in two.ops if "dequantize" in op.name]


def test_training_unpacks_in_both_directions_and_recomputation_once_more() -> None:
    def unpacked(**settings: Any) -> dict[str, int]:
        graph = train(lora=LoRA(4), quantize="nf4", **settings)
        names = ((op.phase, op.repeat) for op in graph.ops if op.name == "foretell.dequantize.default")
        counts: dict[str, int] = {}
        for phase, repeat in names:
            counts[phase] = counts.get(phase, 0) + repeat
        return counts

    assert unpacked() == {"forward": 7 * 28, "backward": 7 * 28}
    assert unpacked(checkpointing=True)["forward"] == 7 * 28
    assert 13 * 28 <= unpacked(checkpointing=True)["backward"] <= 14 * 28  # the last product need not be recomputed
    assert held(train(lora=LoRA(4), quantize="nf4"), "gradient") == held(train(lora=LoRA(4)), "gradient")


def test_both_formats_weigh_the_same_and_absorbed_attention_unpacks_too() -> None:
    assert train(lora=LoRA(4), quantize="fp4").parameter_bytes == train(lora=LoRA(4), quantize="nf4").parameter_bytes
    latent = llm.from_hf_config({
        "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 320, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 2, "kv_lora_rank": 32,
        "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1,
    }, "latent").replace(moe=None)
    decode = llm.graph(latent, phase="decode", context=8, quantize="nf4")
    assert [op.module for op in decode.ops if op.name == "foretell.dequantize.default"] == [
        "layers.self_attn.kv_b_proj"]


@pytest.mark.parametrize(("settings", "reason"), [
    ({"quantize": "nf4"}, "cannot be trained"),
    ({"quantize": "nf5", "lora": LoRA(4)}, "did you mean 'nf4'"),
    ({"phase": "prefill", "lora": LoRA(4)}, "training only"),
    ({"phase": "prefill", "quantize": "nf4", "weight_dtype": "fp8"}, "both say how weights are kept"),
])
def test_contradictions_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ForetellError, match=reason):
        train(**settings)


def test_quantised_experts_are_refused() -> None:
    with pytest.raises(InputError, match="routed experts"):
        llm.graph(llm.config("mixtral-8x7b"), seq_len=8, quantize="nf4")


@pytest.mark.parametrize(("settings", "reason"), [
    ({"lora": "rank=4"}, "training only"), ({"train": True, "quantize": "nf4"}, "cannot be trained"),
    ({"quantize": "int3"}, "unknown quantization"),
])
def test_options_refuse_them_early(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ForetellError, match=reason):
        options(**settings)


# --- optimizers of bitsandbytes -----------------------------------------------------------------------------------


def test_eight_bit_state_is_a_byte_and_a_share_of_a_scale() -> None:
    eight, full = train(optimizer="adamw-8bit"), train(optimizer="paged-adamw")
    large = [w for g in QWEN.groups for w in llm.layer_weights(QWEN, g) if w.elements >= 4096]
    small = [w for g in QWEN.groups for w in llm.layer_weights(QWEN, g) if w.elements < 4096]

    def state_bytes(weight: llm.Weight) -> int:
        n = weight.elements
        return 2 * n + 2 * 4 * math.ceil(n / 256) if n >= 4096 else 8 * n

    layer = sum(map(state_bytes, (*large, *small)))
    outside = sum(map(state_bytes, llm.model_weights(QWEN)))
    assert held(eight, "optimizer") == 28 * layer + outside
    assert held(full, "optimizer") == 8 * QWEN.parameters
    assert "pageable_bytes" not in eight.provenance
    for graph in (eight, full):  # one kernel a parameter
        steps = [op for op in graph.ops if op.phase == "optimizer"]
        assert sum(op.repeat for op in steps) == 28 * (len(large) + len(small)) + len(llm.model_weights(QWEN))
        state, weights = held(graph, "optimizer"), 2 * QWEN.parameters
        assert sum(op.bytes_read * op.repeat for op in steps) == 2 * weights + state
        assert sum(op.bytes_written * op.repeat for op in steps) == weights + state


def test_state_of_large_parameters_alone_is_paged() -> None:
    """bitsandbytes pages from 100,000 values on: no adapter of rank 16 in a model of 1.5 G reaches that."""
    graph = train(optimizer="paged-adamw")
    large = sum(28 * w.elements for w in llm.layer_weights(QWEN, QWEN.groups[0]) if w.elements >= 100_000)
    assert int(graph.provenance["pageable_bytes"]) == 8 * (large + QWEN.vocab * QWEN.hidden)
    assert "pageable_bytes" not in train(optimizer="paged-adamw", lora=LoRA(16)).provenance
    some = train(optimizer="paged-adamw-8bit", lora=LoRA(16, ("up_proj",)))  # B (8960, 16) is, A (16, 1536) is not
    assert int(some.provenance["pageable_bytes"]) == 2 * 28 * 8960 * 16


# --- published figures --------------------------------------------------------------------------------------------


def test_full_fine_tuning_of_65b_takes_more_than_780_gb() -> None:
    """QLoRA, section 1: regular 16-bit fine-tuning of LLaMA 65B takes more than 780 GB (2 + 2 + 8 bytes a weight)."""
    graph = train(LLAMA_65B, optimizer="paged-adamw")
    fixed = sum(held(graph, role) for role in ("parameter", "gradient", "optimizer"))
    assert fixed == 12 * LLAMA_65B.parameters
    assert 780e9 < fixed < 800e9


def qlora(config: llm.LLMConfig, optimizer: str = "paged-adamw") -> Graph:
    """The paper's setting: rank 64 on all linear layers, batch 1, 512 tokens, checkpointing."""
    return train(config, seq_len=512, lora=LoRA(64, EVERYWHERE), quantize="nf4", optimizer=optimizer,
                 checkpointing=True)


def test_65b_fits_48_gb() -> None:
    """QLoRA, abstract."""
    memory = peak_memory(qlora(LLAMA_65B), device("rtx-6000-ada"))
    assert memory.fits
    assert memory.paged_out_bytes == 0
    assert memory.peak_bytes > 40 << 30  # and no smaller card


def test_33b_fits_24_gb_by_paging_alone() -> None:
    """QLoRA, appendix G: 33B does not quite fit 24 GB, and paged optimizers make it fit."""
    memory = peak_memory(qlora(LLAMA_33B), device("rtx-4090"))
    assert memory.fits
    assert 0 < memory.paged_out_bytes < memory.pageable_bytes
    assert not peak_memory(qlora(LLAMA_33B, "adamw"), device("rtx-4090")).fits


def test_default_targets_that_do_not_exist_say_what_does() -> None:
    with pytest.raises(InputError, match=r"gpt2 has no q_proj.*give targets= one or more of .*qkv_proj"):
        foretell.capture("llm:gpt2", train=True, seq_len=16, lora="rank=4")
