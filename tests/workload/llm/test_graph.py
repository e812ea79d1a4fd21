"""Parametric graphs: figures to check by eye, named quantities, and properties."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InputError, UnknownNameError
from foretell.graph import Graph, Op
from foretell.workload import llm

TINY = llm.LLMConfig("tiny", layers=4, hidden=64, heads=4, kv_heads=2, intermediate=96, vocab=1000)
SLIDING = TINY.replace(sliding_window=16, attention_pattern=("sliding", "full"))
EXPERTS = TINY.replace(moe=llm.MoE(8, 2, 24, shared_intermediate=40))
LATENT = llm.LLMConfig(
    "latent", layers=2, hidden=64, heads=4, intermediate=96, vocab=1000,
    mla=llm.MLA(kv_lora_rank=32, rope_head_dim=8, nope_head_dim=16, v_head_dim=12, q_lora_rank=48),
)
CONFIGS = (TINY, SLIDING, EXPERTS, LATENT)


def attention(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.kind == "attention"]


def held(graph: Graph, role: str) -> int:
    return sum(s.nbytes for s in graph.storages if s.role == role)


# --- counts -----------------------------------------------------------------------------------------------------


def test_qwen3_moe_training_flops_under_both_names() -> None:
    config = llm.config("qwen3-30b-a3b")
    graph = llm.graph(config, phase="train", batch=1, seq_len=8192)
    assert graph.flops() == 37_577_293_824 * 8192
    assert llm.six_n_flops_per_token(config, 8192) == 37_578_559_488
    assert graph.flops(phase="backward") == 2 * graph.flops(phase="forward")


def test_forward_flops_by_hand() -> None:
    graph = llm.graph(TINY, phase="inference", batch=2, seq_len=10)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # q, k and v, o, MLP
    weights = 2 * (2 * 10) * (4 * layer + 64 * 1000)
    scores = 4 * (2 * 2) * (2 * 4 * 10 * 10 * 16)  # layers · 2 products · batch · heads · 10² · head
    assert graph.flops() == weights + scores
    assert graph.flops(causal="half") == weights + scores // 2
    last = llm.graph(TINY, phase="prefill", batch=2, seq_len=10)
    assert graph.flops() - last.flops() == 2 * (2 * 9) * 64 * 1000  # no logits but the last


def test_equal_layers_are_one_op() -> None:
    graph = llm.graph(llm.config("llama-3.1-405b"), phase="decode", context=4096)
    assert len(graph.ops) < 80
    assert {op.repeat for op in graph.ops} == {1, 126}
    gemma = llm.graph(llm.config("gemma-3-27b"), phase="decode", context=4096)
    assert [op.repeat for op in attention(gemma)] == [52, 10]


def test_items_and_names() -> None:
    decode, prefill = llm.graph(TINY, phase="decode", batch=3, context=9), llm.graph(TINY, batch=3, seq_len=9)
    assert list(decode.items.items()) == [("tokens", 3), ("sequences", 3)]  # the first is what throughput counts
    assert list(prefill.items.items()) == [("sequences", 3), ("tokens", 27)]
    train = llm.graph(TINY, phase="train", batch=3, seq_len=9, accumulate=4)
    assert dict(train.items) == {"sequences": 12, "tokens": 108}
    assert train.flops() == 4 * llm.graph(TINY, phase="train", batch=3, seq_len=9).flops()
    assert train.provenance["workload"] == "llm:tiny"
    assert train.trainable_parameters == train.parameters == TINY.parameters


# --- caches -----------------------------------------------------------------------------------------------------


def test_a_decode_step_reads_the_cache() -> None:
    graph = llm.graph(TINY, phase="decode", batch=3, context=99)
    (op,) = attention(graph)
    cache = 3 * 100 * 2 * 2 * 16 * 2  # sequences · tokens · (k, v) · heads · elements · bytes
    assert op.bytes_read == cache + 3 * 4 * 16 * 2  # and the query
    assert held(graph, "kv_cache") == 4 * cache == 300 * llm.kv_cache_bytes_per_token(TINY)
    small = llm.graph(TINY, phase="decode", batch=3, context=99, kv_dtype="fp8")
    assert held(small, "kv_cache") == 2 * cache
    assert attention(small)[0].bytes_read == cache // 2 + 3 * 4 * 16 * 2


def test_sliding_layers_see_their_window() -> None:
    sliding, full = attention(llm.graph(SLIDING, phase="decode", batch=1, context=99))
    # 4 query heads share 2 key heads: two rows meet each head's keys
    assert (sliding.gemm, full.gemm) == ((2, 2, 16, 16), (2, 2, 100, 16))
    assert full.bytes_read > 5 * sliding.bytes_read
    graph = llm.graph(SLIDING, phase="prefill", batch=1, seq_len=50)
    sliding, full = attention(graph)
    assert sliding.macs * 50 == full.macs * 16
    assert held(graph, "kv_cache") == 2 * (16 + 50) * 2 * 2 * 16 * 2
    later = llm.graph(SLIDING, phase="prefill", batch=1, seq_len=50, context=100)
    assert [later.tensors[op.inputs[1]].shape[-2] for op in attention(later)] == [16 - 1 + 50, 150]


def test_latent_attention_both_ways() -> None:
    absorbed = llm.graph(LATENT, phase="decode", batch=2, context=99)
    expanded = llm.graph(LATENT, phase="decode", batch=2, context=99, mla="expanded")
    assert absorbed.parameter_bytes == expanded.parameter_bytes
    assert llm.kv_cache_bytes_per_token(LATENT) == 2 * (32 + 8) * 2
    for graph in (absorbed, expanded):
        assert held(graph, "kv_cache") == 200 * llm.kv_cache_bytes_per_token(LATENT)
    (op,) = attention(absorbed)
    assert op.bytes_read == 2 * 100 * 40 * 2 + 2 * 4 * 40 * 2  # the latents once, the queries
    assert op.macs == 2 * 4 * 100 * (40 + 32)
    assert expanded.flops() > 4 * absorbed.flops()  # keys and values of all tokens are rebuilt
    moved = [op for op in absorbed.ops if op.kind == "batched_matmul"]
    weights = 32 * 4 * (16 + 12)
    assert sum(op.macs for op in moved) == 2 * weights
    assert sum(op.bytes_read for op in moved) == 2 * (weights + 2 * 4 * (16 + 32))
    for options in ({"phase": "prefill", "seq_len": 8}, {"phase": "inference", "seq_len": 8}):
        one, other = (llm.graph(LATENT, mla=way, **options) for way in ("absorbed", "expanded"))
        assert one.flops() != other.flops()


# --- experts ----------------------------------------------------------------------------------------------------


def test_distinct_experts_against_drawing_them() -> None:
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(5) for e in rng.choice(16, 2, replace=False)}) for _ in range(4000)]
    assert llm.experts_touched(16, 2, 5) == pytest.approx(np.mean(drawn), rel=0.01)
    assert llm.experts_touched(8, 8, 1) == 8
    assert llm.experts_touched(64, 6, 1) == pytest.approx(6)


def test_few_tokens_read_few_experts() -> None:
    def expert_bytes(batch: int) -> int:
        graph = llm.graph(EXPERTS, phase="decode", batch=batch, context=1)
        rows, middle = batch * 2, 24
        up, down = (op for op in graph.ops if op.kind == "grouped_matmul")
        return up.bytes_read - rows * 64 * 2 + down.bytes_read - rows * middle * 2

    whole = 8 * 3 * 64 * 24 * 2
    assert expert_bytes(1) == pytest.approx(whole * 2 / 8, abs=2)
    assert expert_bytes(3) == pytest.approx(whole * llm.experts_touched(8, 2, 3) / 8, abs=2)
    assert expert_bytes(1000) == pytest.approx(whole, abs=2)


# --- dtypes -----------------------------------------------------------------------------------------------------


def test_quantized_weights() -> None:
    config = llm.config("llama-3-8b")
    plain = llm.graph(config, phase="decode", context=1)
    four = llm.graph(config, phase="decode", context=1, weight_dtype="int4")
    eight = llm.graph(config, phase="decode", context=1, weight_dtype="fp8")
    assert plain.flops() == four.flops() == eight.flops()
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert plain.parameter_bytes - four.parameter_bytes == matrices * 3 // 2
    assert plain.parameter_bytes - eight.parameter_bytes == matrices
    assert {op.dtype for op in four.ops if op.kind == "matmul"} == {"bfloat16"}
    scaled = [op for op in eight.ops if op.name == "aten._scaled_mm.default"]
    assert {op.dtype for op in scaled} == {"float8_e4m3fn"}
    assert sum(op.repeat for op in scaled) == 32 * 7
    both, alone = (llm.graph(config, phase="decode", context=1, weight_dtype=dtype) for dtype in ("int8", "w8a16"))
    assert both.parameter_bytes == alone.parameter_bytes == eight.parameter_bytes
    assert [op.repeat for op in both.ops if op.dtype == "int8" and op.macs] == [op.repeat for op in scaled]
    assert {op.dtype for op in alone.ops if op.kind == "matmul"} == {"bfloat16"}
    moe = llm.config("gpt-oss-20b")
    bytes_of = {dtype: llm.graph(moe, phase="decode", context=1, expert_dtype=dtype).parameter_bytes
                for dtype in (None, "fp8")}
    assert bytes_of[None] - bytes_of["fp8"] == 24 * 32 * 3 * 2880 * 2880


@pytest.mark.parametrize("precision", llm.PRECISIONS)
def test_precisions_change_bytes_and_not_flops(precision: str) -> None:
    graph = llm.graph(TINY, phase="train", batch=2, seq_len=8, precision=precision)
    compute, stored = llm.PRECISIONS[precision]
    assert graph.flops() == llm.graph(TINY, phase="train", batch=2, seq_len=8).flops()
    assert graph.parameter_bytes == TINY.parameters * (4 if stored == "float32" else 2)
    assert held(graph, "gradient") == graph.parameter_bytes
    assert held(graph, "optimizer") == 2 * graph.parameter_bytes
    assert {op.dtype for op in graph.ops if op.kind in ("matmul", "attention")} == {compute}
    wide = llm.graph(TINY, phase="train", batch=2, seq_len=8, precision=precision, optimizer_dtype="fp32")
    assert held(wide, "optimizer") == 8 * TINY.parameters


def test_autocast_keeps_converted_weights_until_the_forward_ends() -> None:
    amp = llm.graph(TINY, phase="inference", batch=1, seq_len=8, precision="amp")
    converted = [s for s in amp.storages if s.role == "temporary" and s.dies == len(amp.ops) - 1 and s.nbytes > 4000]
    matrices = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 64 * 1000
    assert sum(s.nbytes for s in converted) == 2 * matrices


# --- ways to run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("phase", llm.PHASES)
def test_fused_kernels_do_the_same_products(config: llm.LLMConfig, phase: str) -> None:
    options: dict[str, Any] = {"phase": phase, "batch": 2, "seq_len": None if phase == "decode" else 12}
    options["context"] = 20 if phase == "decode" else 0
    eager, fused = llm.graph(config, **options), llm.graph(config, fused=True, **options)
    assert fused.flops() == eager.flops()
    assert fused.parameter_bytes == eager.parameter_bytes
    assert len(fused.ops) < 0.75 * len(eager.ops)
    assert not fused.not_counted
    assert {op.kind for op in (*eager.ops, *fused.ops)}.isdisjoint({"other"})


def test_checkpointing_trades_activations_for_flops() -> None:
    plain = llm.graph(TINY, phase="train", batch=4, seq_len=32)
    again = llm.graph(TINY, phase="train", batch=4, seq_len=32, checkpointing=True)
    assert again.flops(phase="forward") == plain.flops(phase="forward")
    assert plain.flops() < again.flops() < plain.flops() * 4 / 3
    assert held(again, "activation") < held(plain, "activation") / 2
    assert held(again, "gradient") == held(plain, "gradient")
    # each layer keeps what enters it, which is what the embedding or the layer before puts out
    stream = 4 * 32 * 64 * 2
    kept = sorted(s.nbytes for s in again.storages if s.role == "activation" and s.nbytes % stream == 0)
    assert kept.count(4 * stream) >= 1


def test_what_each_equal_layer_keeps_is_one_storage() -> None:
    one = llm.graph(TINY.replace(layers=1), phase="train", batch=4, seq_len=32)
    four = llm.graph(TINY, phase="train", batch=4, seq_len=32)
    seven = llm.graph(TINY.replace(layers=7), phase="train", batch=4, seq_len=32)
    for role in ("parameter", "gradient", "optimizer", "activation"):
        assert held(seven, role) - held(four, role) == held(four, role) - held(one, role) > 0
    assert held(seven, "input") == held(one, "input")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("options", [
    {"phase": "train", "seq_len": 8}, {"phase": "train", "seq_len": 8, "checkpointing": True},
    {"phase": "train", "seq_len": 8, "accumulate": 2, "precision": "amp"}, {"phase": "decode", "context": 8},
    {"phase": "prefill", "seq_len": 8}, {"phase": "inference", "seq_len": 8},
], ids=str)
def test_lifetimes_cover_every_use(config: llm.LLMConfig, options: dict[str, Any]) -> None:
    graph = llm.graph(config, batch=2, **options)
    for index, op in enumerate(graph.ops):
        for value in (*op.inputs, *op.outputs):
            storage = graph.storages[graph.tensors[value].storage]
            assert storage.role == "gradient" or storage.born <= index
            assert storage.dies is None or storage.dies >= index
        assert op.bytes_read >= 0
    backward = [i for i, op in enumerate(graph.ops) if op.phase == "backward"]
    if backward:
        for storage in graph.storages:
            if storage.role == "activation":
                assert storage.born < backward[0] <= (storage.dies or 0) <= backward[-1]
    assert Graph.from_dict(graph.to_dict()).to_dict() == graph.to_dict()


# --- properties -------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(CONFIGS), st.sampled_from(llm.PHASES), st.integers(1, 9), st.integers(1, 40))
def test_flops_are_proportional_to_batch(config: llm.LLMConfig, phase: str, batch: int, length: int) -> None:
    def flops(batch: int) -> int:
        if phase == "decode":
            return llm.graph(config, phase=phase, batch=batch, context=length).flops()
        return llm.graph(config, phase=phase, batch=batch, seq_len=length).flops()

    assert flops(batch) == batch * flops(1)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from((TINY, LATENT)), st.integers(1, 60))
def test_attention_grows_faster_than_length(config: llm.LLMConfig, length: int) -> None:
    short, long = (sum(op.macs for op in attention(llm.graph(config, phase="prefill", seq_len=n)))
                   for n in (length, 2 * length))
    assert long == 4 * short


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30))
def test_a_prefill_in_two_parts_does_the_same_products(first: int, second: int) -> None:
    """Weights meet every token once; the second part's queries see both parts' keys, all counted in full."""
    whole = llm.graph(TINY, phase="inference", seq_len=first + second)
    parts = (llm.graph(TINY, phase="prefill", seq_len=first, logits="all"),
             llm.graph(TINY, phase="prefill", seq_len=second, context=first, logits="all"))
    unseen = 4 * 2 * 2 * 4 * 16 * first * second  # the first part's queries over the second part's keys
    assert whole.flops() == sum(part.flops() for part in parts) + unseen


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ({"phase": "trian", "seq_len": 8}, "unknown phase 'trian'; did you mean 'train'"),
    ({"precision": "bf61", "seq_len": 8}, "did you mean 'bf16'"),
    ({"optimizer": "adam2", "seq_len": 8}, "did you mean.*'adam'"),
    ({"kv_dtype": "float9", "seq_len": 8}, "unknown dtype 'float9'"),
    ({"mla": "absorb", "seq_len": 8}, "did you mean 'absorbed'"),
    ({"logits": "first", "seq_len": 8}, "unknown choice of logits"),
    ({}, "seq_len is missing"),
    ({"seq_len": 0}, "seq_len is 0"),
    ({"seq_len": 8, "batch": 0}, "batch is 0"),
    ({"seq_len": 8, "context": -1}, "context is -1"),
    ({"phase": "train", "seq_len": 8, "weight_dtype": "fp8"}, "are for inference"),
    ({"phase": "train", "seq_len": 8, "context": 8}, "are for inference"),
])
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=message):
        llm.graph(TINY, **options)


def test_learned_positions_end() -> None:
    gpt2 = llm.config("gpt2")
    llm.graph(gpt2, seq_len=1024)
    with pytest.raises(InputError, match="1025 tokens exceed the 1024 learned positions"):
        llm.graph(gpt2, phase="decode", context=1024)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from foretell.workload import llm;"
        "llm.graph(llm.config('deepseek-v3'), phase='train', seq_len=64).table();"
        "loaded = {'torch', 'transformers', 'timm'} & set(sys.modules); sys.exit(', '.join(loaded) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


@pytest.mark.parametrize("precision", llm.PRECISIONS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_products_meet_operands_of_one_dtype(config: llm.LLMConfig, precision: str) -> None:
    for options in ({"phase": "train", "seq_len": 8}, {"phase": "decode", "context": 8}):
        graph = llm.graph(config, precision=precision, **options)
        for op in graph.ops:
            if op.kind in ("matmul", "batched_matmul", "grouped_matmul"):
                assert {graph.tensors[value].dtype for value in op.inputs} == {op.dtype}, op.module
