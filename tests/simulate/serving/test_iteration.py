"""Iterations of a serving engine: closed forms, monotony, parts, and another way to the same figure."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from foretell.cost import estimate
from foretell.cost.energy import power_of
from foretell.cost.rates import matrix_rate
from foretell.errors import InfeasibleError, InputError
from foretell.hardware import cluster, device
from foretell.simulate.serving import Batch, ServingPlan
from foretell.simulate.serving.iteration import BOUNDS, Iterations, kernels
from foretell.simulate.serving.iteration.constants import constants
from foretell.simulate.serving.iteration.kernels import COLUMNS, attended
from foretell.simulate.serving.iteration.sizes import _busiest, touched
from foretell.workload import llm

H100 = device("h100-sxm")
LLAMA = llm.config("llama-3.1-8b")
MODELS = {
    "dense": (LLAMA, ServingPlan()),
    "tensor parallel": (llm.config("llama-3.1-70b"), ServingPlan(tp=4, weight_dtype="fp8", kv_dtype="fp8")),
    "sliding windows": (llm.config("gemma-3-27b"), ServingPlan(engine="sglang")),
    "latent attention": (llm.config("deepseek-v2-lite"), ServingPlan(engine="trtllm")),
    "experts": (llm.config("qwen3-30b-a3b"), ServingPlan(tp=2, ep=2)),
    "data attention": (llm.config("qwen3-30b-a3b"), ServingPlan(dp=4, ep=4, engine="sglang")),
    "mxfp4": (llm.config("gpt-oss-20b"), ServingPlan(weight_dtype="mxfp4")),
    "pipeline": (LLAMA, ServingPlan(pp=2)),
    "int4": (LLAMA, ServingPlan(weight_dtype="int4", engine="static")),
    "int8": (llm.config("qwen3-30b-a3b"), ServingPlan(weight_dtype="int8")),
}


@pytest.fixture(scope="module", params=MODELS)
def iterations(request: pytest.FixtureRequest) -> Iterations:
    config, plan = MODELS[request.param]
    return Iterations.of(config, plan, H100)


def _mixed(seed: int = 0, count: int = 64) -> Batch:
    r = np.random.default_rng(seed)
    seqs, prompts = r.integers(0, 300, count), r.integers(0, 3, count)
    tokens = np.where(prompts > 0, r.integers(1, 8192, count), 0)
    return Batch.of(
        decode_seqs=seqs, decode_tokens=seqs * r.integers(1, 8000, count), prefill_seqs=prompts, prefill_tokens=tokens
    )


def test_decoding_one_sequence_reads_all_weights() -> None:
    it = Iterations.of(LLAMA, ServingPlan(), H100)
    assert H100.memory_bandwidth_bytes_per_s is not None
    embedding = 2 * LLAMA.vocab * LLAMA.hidden  # looked up, not read
    least = (it.weights_bytes - embedding) / H100.memory_bandwidth_bytes_per_s
    seconds = it.time_s(Batch.of(decode_seqs=1, decode_tokens=1))[0]
    assert least <= seconds <= 1.6 * least


def test_a_prompt_takes_at_least_its_arithmetic() -> None:
    it = Iterations.of(LLAMA, ServingPlan(), H100)
    peak = H100.peak("bf16", "tensor")
    assert peak is not None
    n = 8192
    matrices = LLAMA.parameters - 2 * LLAMA.vocab * LLAMA.hidden
    least = (2 * matrices * n + 4 * n * n / 2 * LLAMA.heads * LLAMA.head_dim * LLAMA.layers) / peak
    seconds = it.time_s(Batch.of(prefill_seqs=1, prefill_tokens=n))[0]
    assert least <= seconds <= 2.2 * least


def test_parts_sum_to_the_time(iterations: Iterations) -> None:
    batch = _mixed()
    parts = iterations.parts(batch)
    np.testing.assert_allclose(sum(parts.values()), iterations.time_s(batch), rtol=1e-12)
    assert all((part >= 0).all() for part in parts.values())


def test_nothing_to_do_takes_no_time(iterations: Iterations) -> None:
    assert iterations.time_s(Batch.of(decode_seqs=0)).tolist() == [0.0]


def test_time_grows_with_sequences_context_and_prompt(iterations: Iterations) -> None:
    n = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    slack = 1.03  # kernels of another size can be a little faster
    for seconds in (
        iterations.time_s(Batch.of(decode_seqs=n, decode_tokens=n * 1000)),
        iterations.time_s(Batch.of(decode_seqs=8, decode_tokens=8 * n * 100)),
        iterations.time_s(Batch.of(decode_seqs=8, decode_tokens=8000, prefill_seqs=1, prefill_tokens=n * 16)),
        iterations.time_s(Batch.of(prefill_seqs=1, prefill_tokens=512, prefill_pairs=512 * n * 100,
                                   prefill_cached=n * 100)),
    ):  # fmt: skip
        assert (seconds[1:] * slack >= seconds[:-1]).all()
        assert seconds[-1] > seconds[0]


def test_no_communication_without_parallelism() -> None:
    assert not Iterations.of(LLAMA, ServingPlan(), H100).parts(_mixed())["communication"].any()
    for degree in ("tp", "pp"):
        it = Iterations.of(LLAMA, ServingPlan(**{degree: 2}), H100)
        assert it.parts(Batch.of(decode_seqs=8, decode_tokens=800))["communication"][0] > 0


def test_tensor_parallel_ranks_split_weights_and_time() -> None:
    batch = Batch.of(decode_seqs=[8, 0], decode_tokens=[8000, 0], prefill_seqs=[0, 1], prefill_tokens=[0, 8192])
    one, two, four = (Iterations.of(llm.config("llama-3.1-70b"), ServingPlan(tp=tp, weight_dtype="fp8"), H100)
                      for tp in (1, 2, 4))  # fmt: skip
    assert two.weights_bytes == pytest.approx(one.weights_bytes / 2, rel=1e-3)
    assert four.kv_bytes_per_token == one.kv_bytes_per_token / 4
    products = [it.parts(batch)["products"] for it in (one, two, four)]
    assert (products[1] < 0.75 * products[0]).all()
    assert (products[2] < 0.75 * products[1]).all()
    assert (four.time_s(batch) < one.time_s(batch)).all()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b", "gemma-3-27b"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_agrees_with_the_cost_of_the_whole_graph(name: str, phase: str) -> None:
    """The parametric graph, costed op by op, is another way to the same kernels: within 30 %, host left out.

    Experts' grouped products, which the graph's cost knows no measurements of, are within 35 %.
    """
    config = llm.config(name)
    h200 = device("h200-sxm")
    it = Iterations.of(config, ServingPlan(), h200)
    if phase == "decode":
        graph = llm.graph(config, phase="decode", batch=32, context=2048, fused=True)
        batch = Batch.of(decode_seqs=32, decode_tokens=32 * 2048)
    else:
        graph = llm.graph(config, phase="prefill", batch=2, seq_len=2048, fused=True, logits="last")
        batch = Batch.of(prefill_seqs=2, prefill_tokens=4096)
    other = estimate(graph, h200, runtime="compiled")
    ours = it.time_s(batch)[0] - it.parts(batch)["host"][0]
    assert ours == pytest.approx(float(other.ops.time_s.sum()), rel=0.35 if config.moe else 0.3)


def test_between_grid_points_as_costed_directly() -> None:
    """Tables against kernels costed at the very sizes."""
    config, plan = MODELS["experts"]
    it = Iterations.of(config, plan, H100)
    from foretell.simulate.serving.iteration import sizes

    m = np.array([37.0, 77.0, 203.0, 411.0, 1111.0, 3333.0, 7777.0])
    direct = it.costs.of(sizes.embedding(config, plan, m), len(m))
    for group in config.groups:
        layer = sizes.rows(config, group, plan, m, 2.0)
        experts = sizes.together(config, plan, m, it.costs.constants["experts.uneven"])
        direct += group.layers * (it.costs.of(layer, len(m)) + it.costs.of(experts, len(m)))
    assert it.together is not None
    tabled = it.rows.rows(slice(0, 7), m) + it.together.rows(slice(0, 7), m)
    np.testing.assert_allclose(tabled.sum(axis=0), direct[:7].sum(axis=0), rtol=0.03)
    n, k = np.array([3.0, 19.0, 77.0, 300.0]), np.array([700.0, 3333.0, 1500.0, 9000.0])
    heads, kv_heads = sizes.heads_of(config, plan)
    exact = config.layers * it.costs.attention(
        n * kv_heads, np.full(4, heads / kv_heads), k, config.head_dim, 2.0, "decode", it.weights_bytes,
    )  # fmt: skip
    found = it.decode_attention[0][1].rows(slice(0, 7), n, k)
    np.testing.assert_allclose(found.sum(axis=0), exact[:7].sum(axis=0), rtol=0.06)


def test_sliding_windows_bound_what_is_read() -> None:
    gemma = llm.config("gemma-3-27b")
    full = gemma.replace(attention_pattern=("full",), sliding_window=None)
    batch = Batch.of(decode_seqs=16, decode_tokens=16 * 32768)
    windowed, whole = (Iterations.of(c, ServingPlan(), H100).parts(batch)["attention"][0] for c in (gemma, full))
    assert windowed < 0.35 * whole


def test_quantised_weights_and_cache_take_fewer_bytes() -> None:
    plain, fp8, int4 = (Iterations.of(LLAMA, ServingPlan(weight_dtype=d), H100) for d in ("bf16", "fp8", "int4"))
    assert plain.weights_bytes > 1.6 * fp8.weights_bytes > 1.8 * int4.weights_bytes * 0.8
    cached = Iterations.of(LLAMA, ServingPlan(kv_dtype="fp8"), H100)
    assert cached.kv_bytes_per_token == plain.kv_bytes_per_token / 2 == 65536
    assert cached.kv_capacity_tokens == pytest.approx(2 * plain.kv_capacity_tokens, rel=0.01)
    batch = Batch.of(decode_seqs=64, decode_tokens=64 * 8192)
    assert cached.parts(batch)["attention"][0] < 0.75 * plain.parts(batch)["attention"][0]
    one = Batch.of(decode_seqs=1, decode_tokens=100)
    assert fp8.parts(one)["products"][0] < 0.75 * plain.parts(one)["products"][0]


def test_weights_of_four_bits_are_read_by_one_sequence_and_multiplied_by_many() -> None:
    """Marlin's kernels come near the bytes they read at one row; a prompt gets no more than a share of the peak."""
    config, device_, one = llm.config("llama-3.1-8b"), device("h100-sxm"), Batch.of(decode_seqs=1, decode_tokens=512)
    found = {f: Iterations.of(config, ServingPlan(weight_dtype=f), device_) for f in ("bf16", "fp8", "int4")}
    seconds = {f: float(it.time_s(one)[0]) for f, it in found.items()}
    assert seconds["int4"] < 0.8 * seconds["fp8"] < 0.7 * seconds["bf16"]
    assert found["int4"].bound(one) == ["bandwidth"]
    prompt = Batch.of(prefill_seqs=1, prefill_tokens=8192)
    assert found["int4"].time_s(prompt)[0] > 1.2 * found["bf16"].time_s(prompt)[0]


#: Bytes of Llama-3.1-8B by hand, in INT8 but for embeddings, head and norms: 32 layers of queries and outputs (4096²),
#: keys and values (4096 · 1024), and three matrices of the MLP (4096 · 14336).
INT8_MATRICES = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
INT8_OUTSIDE = 2 * 128256 * 4096  # the embedding, and the head, in 16 bits
PROMPT = Batch.of(prefill_seqs=1, prefill_tokens=8192)


@pytest.mark.parametrize("form", ["int8", "w8a16"])
def test_weights_in_int8_by_hand(form: str) -> None:
    norms = 2 * 65 * 4096
    it = Iterations.of(LLAMA, ServingPlan(weight_dtype=form), H100)
    assert it.weights_bytes == INT8_MATRICES + 2 * INT8_OUTSIDE + norms
    assert it.budget.weights_bytes == pytest.approx(it.weights_bytes, rel=1e-3)
    assert it.budget.notes[-1] == "scales of quantised weights are not counted"


def test_scales_take_room_from_the_cache() -> None:
    """NVFP4 has a scale of 8 bits for 16 values, int4 one of 16 bits for 128: the budgets differ by what these take."""
    budgets = {form: Iterations.of(LLAMA, ServingPlan(weight_dtype=form), H100).budget for form in ("nvfp4", "int4")}
    more = INT8_MATRICES * (1 / 16 - 2 / 128)
    assert budgets["nvfp4"].weights_bytes - budgets["int4"].weights_bytes == pytest.approx(more, abs=2)
    assert budgets["int4"].kv_bytes - budgets["nvfp4"].kv_bytes == pytest.approx(more, abs=2)
    assert "scales of quantised weights are not counted" not in budgets["int4"].notes


@pytest.mark.parametrize("name", ["tpu-v5e", "tpu-v5p", "tpu-v6e", "gaudi-3", "inferentia2"])
def test_accelerators_go_by_their_peaks(name: str) -> None:
    """One sequence takes what weights and bandwidth say, a long prompt what arithmetic does, whatever their cores."""
    where = device(name)
    assert where.memory_bandwidth_bytes_per_s is not None
    it = Iterations.of(llm.config("llama-3.2-1b"), ServingPlan(tp=1), where)
    one = {part: s[0] for part, s in it.parts(Batch.of(decode_seqs=1, decode_tokens=1)).items()}
    least = it.weights_bytes / where.memory_bandwidth_bytes_per_s
    assert least < one["products"] + one["logits"] + one["attention"] < 1.6 * least
    flops = 2.0 * 4096 * (16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192))
    prompt = it.parts(Batch.of(prefill_seqs=1, prefill_tokens=4096))["products"][0]
    peak = matrix_rate(where, "bf16").flops_per_s
    assert 1.0 <= prompt / (flops / peak) < 1.3


def test_mxfp4_is_widened_where_engines_have_no_kernel_for_it() -> None:
    """vLLM takes Marlin for MXFP4 on compute capability 12.x: few sequences take what int4's weights do."""
    config, one = llm.config("gpt-oss-20b"), Batch.of(decode_seqs=1, decode_tokens=500)
    times = {
        form: Iterations.of(config, ServingPlan(weight_dtype=form), device("rtx-5090")).parts(one)["experts"][0]
        for form in ("mxfp4", "int4")
    }
    assert times["mxfp4"] == pytest.approx(times["int4"], rel=0.1)


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "a10g", "l4", "t4", "h100-sxm"])
def test_decoding_in_int8_reads_weights_of_half_the_bytes(name: str) -> None:
    """One sequence takes what its weights do from memory, and a little for 128 products and quantising before each."""
    where, one = device(name), Batch.of(decode_seqs=1, decode_tokens=1)
    assert where.memory_bandwidth_bytes_per_s is not None
    least = (INT8_MATRICES + INT8_OUTSIDE) / where.memory_bandwidth_bytes_per_s
    it = Iterations.of(LLAMA, ServingPlan(weight_dtype="int8"), where)
    assert least <= it.time_s(one)[0] <= 1.3 * least + 128 * 20e-6
    plain = Iterations.of(LLAMA, ServingPlan(weight_dtype="fp16"), where)
    assert it.parts(one)["products"][0] < 0.75 * plain.parts(one)["products"][0]
    assert it.parts(one)["logits"][0] == pytest.approx(plain.parts(one)["logits"][0], rel=0.01)
    assert it.kv_bytes_per_token == plain.kv_bytes_per_token


def test_prompts_in_int8_go_at_the_rate_of_int8() -> None:
    """On Hopper and Ada it is fp8's; on Ampere and Turing, which have no fp8, twice that of 16 bits."""
    for name in ("h100-sxm", "l4"):
        int8, fp8 = (Iterations.of(LLAMA, ServingPlan(weight_dtype=d), device(name)) for d in ("int8", "fp8"))
        assert int8.time_s(PROMPT)[0] == pytest.approx(fp8.time_s(PROMPT)[0], rel=0.02)
    for name in ("a100-sxm4-80gb", "a10g", "t4"):
        where = device(name)
        peak = where.peak("int8")
        assert peak is not None
        int8, alone, plain = (Iterations.of(LLAMA, ServingPlan(weight_dtype=d), where)
                              for d in ("int8", "w8a16", "fp16"))  # fmt: skip
        products = int8.parts(PROMPT)["products"][0]
        least = 2 * 8192 * INT8_MATRICES / peak
        assert least < products < 2.5 * least
        assert products < 0.7 * plain.parts(PROMPT)["products"][0]
        assert int8.parts(PROMPT)["attention"][0] == plain.parts(PROMPT)["attention"][0]
        large = Batch.of(prefill_seqs=[1] * 5, prefill_tokens=[256, 1024, 2048, 4096, 16384])
        assert (int8.time_s(large) < plain.time_s(large)).all()
        assert (plain.time_s(large) < alone.time_s(large))[1:].all()


def test_experts_in_int8_go_by_the_kernels_of_16_bits() -> None:
    """One Triton kernel serves both: at the rate of INT8, so no slower where prompts fill the experts."""
    config, where = llm.config("qwen3-30b-a3b"), device("a100-sxm4-80gb")
    int8, plain = (Iterations.of(config, ServingPlan(weight_dtype=d), where) for d in ("int8", "bf16"))
    experts, half = (it.parts(PROMPT)["experts"][0] for it in (int8, plain))
    assert 0.4 * half < experts < 0.75 * half
    slower = constants().replace({"experts.half.registers": 0.242, "product.fp8.registers": 0.4})
    changed = Iterations.of(config, ServingPlan(weight_dtype="int8"), where, slower).parts(PROMPT)
    assert changed["experts"][0] > 1.3 * experts
    assert changed["products"][0] > 1.3 * int8.parts(PROMPT)["products"][0]


@pytest.mark.parametrize(("name", "said"), [
    ("v100-sxm2-16gb", r"v100-sxm2-16gb has no INT8 tensor cores; take w8a16 \(weights alone in 8 bits\) or fp16"),
    ("p40", "p40 has no INT8 tensor cores"),  # products of four bytes on ordinary units (dp4a), which no engine takes
    ("b200-sxm", r"engines have no INT8 products for b200-sxm \(compute capability 10.0\); take fp8 or bf16"),
    ("rtx-5090", r"compute capability 12.0\); take fp8 or bf16"),
])  # fmt: skip
def test_int8_where_it_cannot_be_served(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Iterations.of(llm.config("opt-125m"), ServingPlan(weight_dtype="int8"), device(name))
    assert Iterations.of(llm.config("opt-125m"), ServingPlan(weight_dtype="w8a16"), device(name)).weights_bytes


def test_int8_is_not_nvidias_alone() -> None:
    """vLLM has INT8 products for AMD's GPUs (Triton, AITER)."""
    int8, plain = (Iterations.of(LLAMA, ServingPlan(weight_dtype=d), device("mi300x")) for d in ("int8", "bf16"))
    assert int8.time_s(PROMPT)[0] < 0.8 * plain.time_s(PROMPT)[0]


def test_gpus_without_bf16_are_served_in_fp16() -> None:
    """Engines refuse bf16 below 8.0: T4 has 65 TFLOP/s in fp16, 8 in fp32."""
    t4, small = device("t4"), llm.config("opt-1.3b")
    bf16, fp16 = (Iterations.of(small, ServingPlan(weight_dtype=d), t4) for d in ("bf16", "fp16"))
    assert bf16.time_s(PROMPT)[0] == fp16.time_s(PROMPT)[0]
    assert 2 * 8192 * small.parameters / 65e12 < fp16.time_s(PROMPT)[0] < 4 * 2 * 8192 * small.parameters / 65e12


def test_experts_have_kernels_of_their_own_bandwidth() -> None:
    """FlashInfer's for NVFP4 on Blackwell reach more of it than Triton's for 16 bits."""
    assert "experts.memory.fp4.tensor_memory" in constants()
    assert "experts.memory.fp4.shared" not in constants()
    config, one = llm.config("qwen3-30b-a3b"), Batch.of(decode_seqs=16, decode_tokens=16 * 512)
    changed = constants().replace({"experts.memory.fp4.tensor_memory": 0.1})
    plan = ServingPlan(weight_dtype="nvfp4")
    slow, fast = (Iterations.of(config, plan, device("b200-sxm"), using).time_s(one)[0] for using in (changed, None))
    assert slow > 2.0 * fast


def test_without_graphs_the_host_is_waited_for() -> None:
    config, one = llm.config("llama-3.1-8b"), Batch.of(decode_seqs=1, decode_tokens=512)
    with_, without = (Iterations.of(config, ServingPlan(cuda_graph=g), device("h100-sxm")) for g in (True, False))
    assert without.time_s(one)[0] > 1.3 * with_.time_s(one)[0]
    assert without.parts(one)["host"][0] > 3.0 * with_.parts(one)["host"][0]
    shares = dict(zip(BOUNDS, without.bound_shares(one)[:, 0].tolist(), strict=True))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["host"] == pytest.approx(without.parts(one)["host"][0] / without.time_s(one)[0], rel=0.05)
    assert max(shares, key=lambda name: shares[name]) == without.bound(one)[0]


def test_experts_are_read_as_tokens_reach_them() -> None:
    assert touched(128, 8, np.array([1.0, 50.0]))[1] == pytest.approx(llm.experts_touched(128, 8, 50))
    it = Iterations.of(llm.config("qwen3-30b-a3b"), ServingPlan(), H100)
    experts = it.parts(Batch.of(decode_seqs=[1, 16, 256], decode_tokens=[100, 1600, 25600]))["experts"]
    assert experts[1] > 3 * experts[0]  # 16 tokens reach ten times as many
    assert experts[2] < 3 * experts[1]  # all are reached by then


def test_attended_keys() -> None:
    for q, c, w in ((5, 0, None), (5, 3, None), (5, 3, 4), (5, 3, 6), (9, 0, 4), (3, 10, 4)):
        seen = [min(c + i, w or 10**9) for i in range(1, q + 1)]
        assert attended(np.array([float(q)]), np.array([float(c)]), w)[0] == pytest.approx(np.mean(seen))


def test_power_is_between_idle_and_limit(iterations: Iterations) -> None:
    watts = iterations.power_w(_mixed())
    assert H100.idle_w is not None
    assert H100.tdp_w is not None
    assert (watts > H100.idle_w).all()
    assert (watts <= H100.tdp_w).all()
    prompt = iterations.power_w(Batch.of(prefill_seqs=1, prefill_tokens=8192))
    assert prompt[0] > iterations.power_w(Batch.of(decode_seqs=1, decode_tokens=100))[0]


def test_power_as_splitwise_measured() -> None:
    """Llama-2-70B in fp16 on A100 SXM: mean power of 400 W each, over answers of 128 tokens (its `perf_model.csv`)."""
    a100, batch = device("a100-sxm4-80gb"), Batch.of(decode_seqs=1, decode_tokens=576)
    for tp, share in ((2, 0.736), (4, 0.599), (8, 0.435)):
        plan = ServingPlan(version="0.2", weight_dtype="fp16", kv_dtype="fp16", tp=tp)
        watts = Iterations.of(llm.config("llama-2-70b"), plan, a100).power_w(batch)[0]
        assert watts == pytest.approx(400 * share, rel=0.05)


@pytest.mark.parametrize("changes", [{"multiprocessors": 66}, {"multiprocessors": None}, {"vendor": "other"}])
def test_running_kernels_draw_by_multiprocessor(changes: dict[str, Any]) -> None:
    """Watts beyond idle power, FLOP and bytes go with multiprocessors; where those say nothing, with TDP."""
    constant, one = constants(), dataclasses.replace(H100, **changes)
    power, batch = power_of(one), Batch.of(decode_seqs=1, decode_tokens=1000)
    assert power is not None
    without = constant.replace({"power.active_w.shared": 0.0, "power.active": 0.0})
    made = Iterations.of(LLAMA, ServingPlan(), H100)
    drawn, rest = (
        dataclasses.replace(made, costs=dataclasses.replace(made.costs, device=one, constants=c))
        for c in (constant, without)
    )
    kernels = sum(seconds[0] for name, seconds in drawn.parts(batch).items() if name not in ("host", "communication"))
    by_count = 66 * constant["power.active_w.shared"]
    want = by_count if changes == {"multiprocessors": 66} else constant["power.active"] * power.limit_w
    joules = (drawn.power_w(batch)[0] - rest.power_w(batch)[0]) * drawn.time_s(batch)[0]
    assert joules == pytest.approx(want * kernels, rel=0.02)  # choosing the token besides


def test_widening_weights_draws_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 weights of Llama-3.1-8B take 1.5 lane instructions each, again for every 64 rows."""
    power, sequences = power_of(H100), (1, 64, 128)
    assert power is not None

    def core_j(rows: int) -> float:
        made = Iterations.of(LLAMA, ServingPlan(weight_dtype="int4"), H100)
        return float(made.columns(Batch.of(decode_seqs=rows, decode_tokens=rows))[COLUMNS.index("core_j")][0])

    drawn = [core_j(rows) for rows in sequences]
    monkeypatch.setattr(kernels, "_WIDENING", 0.0)
    widened = [one - core_j(rows) for one, rows in zip(drawn, sequences, strict=True)]
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    each = 2.0 * power.vector_w / H100.peaks["fp32.vector"]
    assert 5e-12 < each < 5e-11  # joules of a multiply-add with its operands from registers
    assert widened == pytest.approx([1.5 * each * weights * passes for passes in (1, 1, 2)], rel=1e-3)


def test_cards_of_low_power_do_not_draw_by_multiprocessor() -> None:
    """142 multiprocessors of an L40S would draw 149 of its 350 W by A100's count: it is the share of TDP instead."""
    where = device("l40s")
    assert where.tdp_w is not None
    made = Iterations.of(llm.config("llama-3.2-1b"), ServingPlan(), where)
    assert where.tdp_w / 4 < made.power_w(Batch.of(decode_seqs=1, decode_tokens=100))[0] < 0.95 * where.tdp_w


def test_older_engines_wait_longer_for_their_hosts() -> None:
    batch = Batch.of(decode_seqs=64, decode_tokens=64000)
    waits = [Iterations.of(LLAMA, ServingPlan(version=v), H100).parts(batch)["host"][0]
             for v in ("0.18.0", "0.11.2", "0.6.1", "0.2.0")]  # fmt: skip
    assert waits == sorted(waits)
    assert waits[-1] > 5 * waits[0]


def test_decoding_beside_prompts_reads_the_cache_again() -> None:
    """LLMServingSim's profile of an RTX PRO 6000: 64 to 256 sequences of 4,096 to 16,384 tokens take 2.5 times as long
    beside 16 tokens of a prompt with four heads a key head, 4.5 times with eight; 8 to 32 of 1,024 or 2,048 take 1.3
    and 2.2 times as long (medians)."""
    card = device("rtx-pro-6000-server")
    n, tokens = [128, 16], [128 * 8192, 16 * 1448]
    alone = Batch.of(decode_seqs=n, decode_tokens=tokens)
    beside = Batch.of(decode_seqs=n, decode_tokens=tokens, prefill_seqs=1, prefill_tokens=16)
    for name, longer in (("llama-3.1-8b", (2.5, 1.3)), ("qwen3-32b", (4.5, 2.2))):
        it = Iterations.of(llm.config(name), ServingPlan(), card)
        ratio = it.parts(beside)["attention"] / it.parts(alone)["attention"]
        np.testing.assert_allclose(ratio, longer, rtol=0.45)
        assert ratio[0] == pytest.approx(longer[0], rel=0.15)
        sglang = Iterations.of(llm.config(name), ServingPlan(engine="sglang"), card)
        assert sglang.parts(beside)["attention"][0] < 1.1 * sglang.parts(alone)["attention"][0]


def test_the_busiest_rank_has_more_than_its_share() -> None:
    mean = touched(128, 8, np.array([8.0])) / 8
    even, busiest = (_busiest(128, 8, 8, np.array([8.0]), uneven)[0] for uneven in (0.0, 1.0))
    assert even == pytest.approx(mean)
    # Each of the 16 experts of a rank is reached with probability 0.4: 6.45 ± 1.96, and the largest of eight.
    assert busiest == pytest.approx(6.45 + 1.424 * 1.96, rel=0.01)
    draws = np.random.default_rng(0).random((2000, 8, 128)).argsort(axis=2)[:, :, :8]
    reached = np.zeros((2000, 128), dtype=bool)
    np.put_along_axis(reached, draws.reshape(2000, 64), True, axis=1)
    assert busiest == pytest.approx(reached.reshape(2000, 8, 16).sum(axis=2).max(axis=1).mean(), rel=0.05)


def test_what_binds() -> None:
    it = Iterations.of(LLAMA, ServingPlan(), H100)
    decode, prompt = Batch.of(decode_seqs=8, decode_tokens=8000), Batch.of(prefill_seqs=1, prefill_tokens=8192)
    assert it.bound(decode) == ["bandwidth"]
    assert it.bound(prompt) == ["compute"]
    slow = Iterations.of(LLAMA, ServingPlan(tp=8), cluster("8x rtx-pro-6000-server"))
    assert slow.bound(prompt) == ["network"]
    eager = Iterations.of(llm.config("llama-3.2-1b"), ServingPlan(version="0.2.0"), H100)
    assert eager.bound(Batch.of(decode_seqs=1, decode_tokens=100)) == ["host"]
    assert set(it.bound(_mixed())) <= set(BOUNDS)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ServingPlan(tp=3), "32 heads cannot be split 3 ways"),
        (ServingPlan(pp=40), "32 layers cannot be 40 stages"),
        (ServingPlan(tp=2, ep=2), "no 2 ranks can share its experts"),
        (ServingPlan(tp=2, ep=4), "ep 4 does not divide"),
    ],
)
def test_infeasible_plans(plan: ServingPlan, said: str) -> None:
    with pytest.raises(InfeasibleError, match=said):
        Iterations.of(LLAMA, plan, cluster("8x dgx-h100"))


def test_too_few_devices() -> None:
    with pytest.raises(InfeasibleError, match="takes 4 devices"):
        Iterations.of(LLAMA, ServingPlan(tp=4), cluster("2x h100-sxm"))


def test_no_room_for_a_cache() -> None:
    it = Iterations.of(llm.config("llama-3.1-70b"), ServingPlan(), H100)
    with pytest.raises(InfeasibleError, match="no room for a cache"):
        _ = it.kv_capacity_tokens


def test_twenty_thousand_iterations_a_second(within: Any) -> None:
    it = Iterations.of(*MODELS["experts"], H100)
    batch = _mixed(1, 20000)
    assert len(within(1.0, lambda: it.time_s(batch))) == 20000


def test_a_rank_beside_one_with_a_prompt_does_its_own_attention_and_all_ranks_experts() -> None:
    config, plan = llm.config("qwen3-30b-a3b"), ServingPlan(dp=2, ep=2)
    it = Iterations.of(config, plan, H100)
    small = {"decode_seqs": 16, "decode_tokens": 16_000}
    alone, beside = it.parts(Batch.of(**small)), it.parts(Batch.of(**small, rank_tokens=(16 + 4096) / 2))
    for part in ("attention", "products", "logits", "sampling"):
        assert beside[part] == pytest.approx(alone[part]), part
    assert beside["experts"] > 2 * alone["experts"]
    assert beside["communication"] > 10 * alone["communication"]  # vLLM's ranks get the tokens of all
    # Experts of both ranks' tokens, however they are divided: half of those of a rank with as many to itself.
    even = it.parts(Batch.of(decode_seqs=2056, decode_tokens=2056))
    prompt = it.parts(Batch.of(prefill_seqs=1, prefill_tokens=4096, rank_tokens=2056))
    whole = it.parts(Batch.of(prefill_seqs=1, prefill_tokens=4096))
    assert prompt["experts"] == pytest.approx(even["experts"], rel=0.05)
    assert prompt["experts"] < 0.7 * whole["experts"]
    # Both wait for each other, so that what either takes is the longer of them.
    times = it.time_s(Batch.of(
        decode_seqs=[16, 0], decode_tokens=[16_000, 0], prefill_seqs=[0, 1], prefill_tokens=[0, 4096], rank_tokens=2056
    ))  # fmt: skip
    assert times[0] < times[1] < it.time_s(Batch.of(prefill_seqs=1, prefill_tokens=4096))[0]
