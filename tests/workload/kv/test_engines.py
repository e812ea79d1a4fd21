"""What each engine's cache takes: published figures, closed forms, and what holds for any model."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InputError, UnknownNameError
from foretell.workload import kv
from foretell.workload.kv import CacheLayer, CacheShape, State

MIB, GIB = 2**20, 2**30


# --- published figures -----------------------------------------------------------------------------------------------


def test_gpt_oss_on_vllm() -> None:
    """vLLM logs 78,384 tokens for 5.38 GiB: all 36 layers count full pages."""
    cache = kv.kv_cache("llm:gpt-oss-120b", tokens=78_384, engine="vllm")
    assert cache.bytes_per_token == 73_728
    assert cache.nbytes == 78_384 * 73_728
    assert round(cache.nbytes / GIB, 2) == 5.38


def test_gemma_4_on_vllm() -> None:
    """Its capacity fell to a token in 983,040 bytes; issue 43308 saw some 55 thousand tokens in about 50 GiB."""
    cache = kv.kv_cache("gemma-4-31b", tokens=32_768, engine="vllm", version="0.20.0")
    assert (cache.bytes_per_token, cache.nbytes) == (983_040, 32_768 * 983_040)
    assert 50 * GIB / cache.bytes_per_token == pytest.approx(55_000, rel=0.01)


def test_deepseek_v2_lite_on_llama_cpp() -> None:
    sizes = {
        version: kv.kv_cache_bytes("deepseek-v2-lite", tokens=32_768, engine="llama.cpp", version=version) / MIB
        for version in ("b4500", "2025-04-14", "2025-04-15", "2026-01-24", "2026-01-25", "b8000")
    }
    both = 27 * (576 + 512) * 2 * 32_768 / MIB  # a latent as key, its first part once more as value
    assert sizes == {
        "b4500": 8640,
        "2025-04-14": 8640,
        "2025-04-15": both,
        "2026-01-24": both,
        "2026-01-25": 972,
        "b8000": 972,
    }


def test_gemma_3_on_llama_cpp() -> None:
    """Logs of pull request 18720: 624 MiB for the sliding layers, 10,240 MiB for the others at 131,072 tokens."""
    parts = {p.tokens: p.nbytes / MIB for p in kv.kv_cache("gemma-3-27b", tokens=131_072, engine="llama.cpp").parts}
    assert parts == {1536: 624, 131_072: 10_240}


def test_nemotron_pages_on_vllm() -> None:
    """vLLM issue 24280: a page of Nemotron-Nano-9B-v2 is 672 tokens, for a recurrent state to fit it."""
    attention = CacheLayer(4, "full", 8, 128, 128)
    mamba = CacheLayer(27, "recurrent", state=State(128 * 80 + 2 * 8 * 128, 4, 128 * 80 * 128, 128))
    cache = kv.kv_cache(CacheShape("nemotron", (attention, mamba)), tokens=1000, engine="vllm")
    assert cache.block == 672
    page = 672 * 2 * 8 * 128 * 2
    assert cache.nbytes == (4 * 2 + 28) * page  # two pages of attention, and mamba's 27 layers in 7 groups of 4


def test_qwen3_235b_with_four_gpus() -> None:
    """vLLM issue 21348, Qwen3-235B on 4 GPUs: SGLang has 367,404 tokens in 8.23 GB of keys and as much of values.

    vLLM has 178,880 in the 8.11 GiB of one GPU; it takes the least number of pages of the four, so a little less.
    """
    ask = {"tokens": 16, "tensor_parallel": 4}
    per_token = kv.kv_cache("qwen3-235b-a22b", engine="sglang", **ask).bytes_per_token
    assert 2 * 8.23 * GIB / per_token == pytest.approx(367_404, rel=1e-3)
    per_token = kv.kv_cache("qwen3-235b-a22b", engine="vllm", **ask).bytes_per_token
    assert 178_880 <= 8.11 * GIB / per_token <= 1.02 * 178_880


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bytes_per_block"),
    [("fp32", 128), ("fp16", 64), ("q8_0", 34), ("q5_1", 24), ("q5_0", 22), ("q4_1", 20), ("q4_0", 18)],
)
def test_block_formats(dtype: str, bytes_per_block: int) -> None:
    elements = 32 * 2 * 8 * 128  # of llama-3.1-8b
    nbytes = kv.kv_cache_bytes("llama-3.1-8b", tokens=256, engine="llama.cpp", dtype=dtype)
    assert nbytes == 256 * elements // 32 * bytes_per_block


def test_keys_and_values_apart() -> None:
    ask = {"tokens": 512, "engine": "llama.cpp"}
    half = [kv.kv_cache_bytes("llama-3.1-8b", dtype=dtype, **ask) for dtype in ("q8_0", "q4_0", "q8_0/q4_0")]
    assert half[2] == (half[0] + half[1]) // 2


def test_heads_are_replicated_beyond_their_number() -> None:
    sizes = [kv.kv_cache_bytes("llama-3.1-8b", tokens=1024, tensor_parallel=n) for n in (1, 2, 8, 16)]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 8, sizes[0] // 8]
    latent = [kv.kv_cache_bytes("deepseek-v3", tokens=1024, tensor_parallel=n) for n in (1, 8)]
    assert latent[0] == latent[1]


def test_latents_by_version_on_vllm() -> None:
    """Heads padded to 256, then to those of keys, then the latent."""
    per_token = [
        kv.kv_cache("deepseek-v2-lite", tokens=64, engine="vllm", version=v).bytes_per_token // 27
        for v in ("0.6.6", "0.7.0", "0.7.1")
    ]
    assert per_token == [2 * 16 * 256 * 2, 2 * 16 * 192 * 2, 576 * 2]


def test_latents_by_version_on_transformers() -> None:
    old, new = (kv.kv_cache("deepseek-v2-lite", tokens=1, engine="transformers", version=v) for v in ("5.0", "5.24"))
    assert (old.nbytes, new.nbytes) == (27 * 16 * (192 + 128) * 2, 27 * 576 * 2)


def test_windowed_layers_by_version_on_vllm() -> None:
    ask = {"tokens": 32_768, "engine": "vllm"}
    old, new = (kv.kv_cache("gpt-oss-120b", version=v, **ask) for v in ("0.20.2", "0.21.0"))
    assert old.nbytes == 32_768 * 73_728
    assert new.nbytes == 18 * 2048 * (32_768 + 16 * (128 // 16 + 1))
    # Layers of two widths share pages: full attention of half the bytes holds twice the tokens.
    wide = kv.kv_cache("gemma-4-31b", version="0.21.0", **ask)
    page = 16 * 16_384
    assert wide.nbytes == 10 * page * (32_768 // 32) + 50 * page * (1024 // 16 + 1)


def test_short_groups_are_padded_on_vllm() -> None:
    """52 sliding and 10 full layers: 6 groups of 10 and one of 10 (design document, "Hybrid KV Cache Manager")."""
    cache = kv.kv_cache("gemma-3-27b", tokens=16, engine="vllm")
    assert cache.nbytes == 7 * 10 * 16 * 2 * 16 * 128 * 2
    assert "8 layers of padding" in cache.notes[0]


def test_two_pools_on_sglang() -> None:
    """Pull request 22389: full layers' tokens, and 0.8 of them for sliding layers; one slot of padding each."""
    cache = kv.kv_cache("gpt-oss-20b", tokens=10_000, engine="sglang")
    assert cache.nbytes == 12 * 2048 * (10_000 + 1) + 12 * 2048 * (8_000 + 1)
    old = kv.kv_cache("gpt-oss-20b", tokens=10_000, engine="sglang", version="0.4.9")
    assert old.nbytes == 24 * 2048 * (10_000 + 1)


def test_blocks_by_version_on_trtllm() -> None:
    ask = {"tokens": 1, "engine": "trtllm"}
    assert kv.kv_cache_bytes("llama-3.1-8b", version="1.0.0", **ask) == 32 * 131_072
    assert kv.kv_cache_bytes("llama-3.1-8b", version="0.21.0", **ask) == 64 * 131_072
    assert kv.kv_cache_bytes("llama-3.1-8b", block=128, **ask) == 128 * 131_072


def test_llama_cpp_splits_layers() -> None:
    one, three = (
        kv.kv_cache_bytes("llama-3.1-8b", tokens=256, engine="llama.cpp", tensor_parallel=n) for n in (1, 3)
    )
    assert three == one // 32 * 11


# --- what holds for any model -----------------------------------------------------------------------------------------

_DIMS = st.sampled_from([32, 64, 128, 256])


@st.composite
def _shapes(draw: st.DrawFn) -> CacheShape:
    heads, dim = draw(st.sampled_from([1, 2, 4, 8, 16])), draw(_DIMS)
    layers = [CacheLayer(draw(st.integers(1, 40)), "full", heads, dim, dim)]
    if draw(st.booleans()):
        layers.append(CacheLayer(draw(st.integers(1, 40)), "sliding", heads, dim, dim, draw(st.integers(1, 5000))))
    if draw(st.booleans()):
        layers.append(CacheLayer(draw(st.integers(1, 40)), "recurrent", state=State(64 * heads, 4, 4096, 8)))
    return CacheShape("drawn", tuple(layers))


@given(_shapes(), st.sampled_from(kv.engines()), st.integers(1, 60), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_never_less_than_the_window_formula(model: CacheShape, engine: str, hundreds: int, batch: int) -> None:
    tokens = 97 * hundreds
    least = batch * sum(
        layer.layers * 2 * layer.kv_heads * layer.key_dim * 2 * min(tokens, layer.window or tokens)
        for layer in model.of("full", "sliding")
    )
    assert kv.kv_cache_bytes(model, tokens=tokens, batch=batch, engine=engine) >= least


@given(_shapes(), st.sampled_from(kv.engines()), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_linear_in_tokens_beyond_rounding(model: CacheShape, engine: str, steps: int) -> None:
    """Once every window is full, equal numbers of whole pages add equal bytes."""
    block = kv.kv_cache(model, tokens=1, engine=engine).block
    stride, start = 5 * block, block * math.ceil(8192 / block) * 5
    sizes = [kv.kv_cache_bytes(model, tokens=start + i * stride, engine=engine) for i in (0, steps, 2 * steps)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] > 0
    per_token = kv.kv_cache(model, tokens=start, engine=engine).bytes_per_token
    assert sizes[1] - sizes[0] == pytest.approx(per_token * steps * stride, rel=1e-6, abs=model.layers[0].layers * 8192)


@given(_shapes(), st.sampled_from(kv.engines()), st.integers(1, 4000), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_parts_sum_and_sequences_add(model: CacheShape, engine: str, tokens: int, batch: int) -> None:
    one = kv.kv_cache(model, tokens=tokens, engine=engine)
    many = kv.kv_cache(model, tokens=tokens, batch=batch, engine=engine)
    assert many.nbytes == sum(part.nbytes for part in many.parts)
    # SGLang's pools have a slot of padding once, and round up their slots once.
    slot = sum(layer.layers * layer.kv_heads * (layer.key_dim + layer.value_dim) * 2 for layer in model.layers)
    padding = 2 * slot if engine == "sglang" else 0
    assert batch * one.nbytes - (batch + 1) * padding <= many.nbytes <= batch * one.nbytes


@given(st.sampled_from(kv.engines()), st.sampled_from(kv.engines()), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_engines_agree_where_their_rules_do(first: str, second: str, pages: int) -> None:
    """A model of full attention alone, at whole pages: no rule of any engine sets it apart but SGLang's padding."""
    sizes = [kv.kv_cache_bytes("llama-3.1-8b", tokens=256 * pages, engine=engine) for engine in (first, second)]
    padding = [131_072 * (engine == "sglang") for engine in (first, second)]
    assert sizes[0] - padding[0] == sizes[1] - padding[1] == 256 * pages * 131_072


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        {"tokens": 0},
        {"tokens": 2**60},
        {"tokens": True},
        {"tokens": 1, "batch": -1},
        {"tokens": 1, "tensor_parallel": 0},
        {"tokens": 1, "version": "latest"},
        {"tokens": 1, "version": "b12", "engine": "vllm"},
        {"tokens": 1, "version": "0.11.0", "engine": "llama.cpp"},
        {"tokens": 1, "version": "2025-13-01", "engine": "llama.cpp"},
        {"tokens": 1, "dtype": "q8_0/q4_0"},
        {"tokens": 1, "dtype": "/", "engine": "llama.cpp"},
        {"tokens": 1, "dtype": "q8_0/", "engine": "llama.cpp"},
        {"tokens": 1, "dtype": None},
        {"tokens": 1, "engine": 5},
        {"tokens": 1, "version": 0.9},
        {"tokens": 1, "version": "2025-06-01"},
        {"tokens": 1, "tensor_parallel": 3},
    ],
)
def test_refused(ask: dict[str, object]) -> None:
    with pytest.raises(InputError):
        kv.kv_cache("llama-3.1-8b", **ask)


@pytest.mark.parametrize(
    ("model", "ask", "near"),
    [
        ("llama-3.1-8", {}, "llama-3.1-8b"),
        ("llama-3.1-8b", {"engine": "vlm"}, "vllm"),
        ("llama-3.1-8b", {"engine": "llama.cpp", "dtype": "q8_1"}, "q8_0"),
    ],
)
def test_near_names(model: str, ask: dict[str, str], near: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        kv.kv_cache(model, tokens=1, **ask)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="dict"):
        kv.kv_cache({}, tokens=1)
    with pytest.raises(InputError, match="heads cannot be shared"):
        kv.kv_cache("deepseek-v3", tokens=1, tensor_parallel=3)


def test_a_format_that_breaks_pages_is_refused() -> None:
    """vLLM needs one layer's token to take a multiple of the other's."""
    odd = CacheShape("odd", (CacheLayer(4, "full", 3, 64, 64), CacheLayer(4, "sliding", 2, 64, 64, 128)))
    with pytest.raises(InputError, match="cannot share pages"):
        kv.kv_cache(odd, tokens=1, engine="vllm", version="0.21.0")
