"""Launch commands of vLLM and SGLang: written, read back, and refused where they say something else."""

from __future__ import annotations

import random
import shlex

import pytest

from foretell.errors import InputError, UnknownNameError
from foretell.plan.serving.emit import FORMATS, emit, launches, read
from foretell.simulate.serving import ServingPlan

#: Options of the two engines, from vllm/engine/arg_utils.py, vllm/config and sglang/srt/server_args.py.
OPTIONS = {
    "vllm": {
        "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--enable-expert-parallel",
        "--dtype", "--quantization", "--kv-cache-dtype", "--max-num-batched-tokens", "--max-num-seqs", "--block-size",
        "--gpu-memory-utilization", "--max-model-len", "--enable-chunked-prefill", "--no-enable-chunked-prefill",
        "--enable-prefix-caching", "--no-enable-prefix-caching", "--enforce-eager", "--kv-offloading-size",
        "--kv-transfer-config",
    },
    "sglang": {
        "--model-path", "--tp-size", "--pp-size", "--dp-size", "--enable-dp-attention", "--ep-size", "--dtype",
        "--quantization", "--kv-cache-dtype", "--chunked-prefill-size", "--max-prefill-tokens",
        "--max-running-requests", "--page-size", "--mem-fraction-static", "--context-length", "--disable-radix-cache",
        "--disable-cuda-graph", "--enable-hierarchical-cache", "--hicache-size", "--disaggregation-mode",
    },
}  # fmt: skip


def drawn(rng: random.Random, engine: str) -> ServingPlan:
    """A plan that the engine can be told."""
    tp, dp = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 4))
    p, d = rng.choice(((0, 0), (0, 0), (1, 2), (3, 1)))
    weights = rng.choice(("bf16", "fp16", "fp8", "int8", "int4", "mxfp4", "nvfp4"))
    return ServingPlan(
        engine=engine, tp=tp, dp=dp, pp=rng.choice((1, 2)), ep=rng.choice((1, tp * dp)), prefill_replicas=p,
        decode_replicas=d, replicas=p + d or rng.randint(1, 30), weight_dtype=weights,
        kv_dtype=rng.choice(("fp8", "fp16" if weights == "fp16" else "bf16")),
        max_num_batched_tokens=rng.choice((512, 2048, 8192)), max_num_seqs=rng.choice((64, 100, 1024)),
        max_model_len=rng.choice((0, 4096)), block_size=rng.choice((1, 16, 64)),
        gpu_memory_percent=rng.choice((85, 90, 57, 29)), chunked_prefill=rng.random() < 0.7,
        prefix_cache=rng.random() < 0.5, cuda_graph=rng.random() < 0.8,
        host_kv_bytes=rng.choice((0, 0, 40 * 2**30)),
    )  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_written_is_read_back(format: str) -> None:
    rng = random.Random(0)
    for _ in range(400):
        plan = drawn(rng, format)
        text = emit(format, plan, "meta-llama/Llama-3.1-8B", "8x h100-sxm")
        assert read(format, text) == (plan, "meta-llama/Llama-3.1-8B"), text


@pytest.mark.parametrize("format", FORMATS)
def test_every_option_is_one_of_the_engine(format: str) -> None:
    rng, seen = random.Random(1), set()
    for _ in range(400):
        for one in launches(format, drawn(rng, format), "m"):
            seen |= {word for word in one.arguments if word.startswith("--")}
    assert seen == OPTIONS[format]


def test_a_vllm_command_by_eye() -> None:
    plan = ServingPlan(tp=2, max_num_batched_tokens=2048, max_num_seqs=64, replicas=3)
    assert emit("vllm", plan, "my/model", "2x l4") == (
        "# 3 servers, each on 2x l4\n"
        "vllm serve my/model \\\n  --tensor-parallel-size 2 \\\n  --pipeline-parallel-size 1 \\\n"
        "  --dtype bfloat16 \\\n  --max-num-batched-tokens 2048 \\\n  --max-num-seqs 64 \\\n"
        "  --block-size 16 \\\n  --gpu-memory-utilization 0.90 \\\n"
        "  --enable-chunked-prefill \\\n  --no-enable-prefix-caching\n"
    )


def test_sglang_counts_all_ranks() -> None:
    plan = ServingPlan(engine="sglang", tp=1, dp=8, ep=8, max_num_seqs=32, max_num_batched_tokens=1024)
    (one,) = launches("sglang", plan, "m")
    said = shlex.join(one.arguments)
    # Attention data parallelism divides tp, and the engine divides chunk and running requests among its ranks.
    assert "--tp-size 8 --pp-size 1 --dp-size 8 --enable-dp-attention --ep-size 8" in said
    assert "--chunked-prefill-size 8192" in said
    assert "--max-running-requests 256" in said


def test_prefill_and_decode_are_two_servers() -> None:
    plan = ServingPlan(prefill_replicas=2, decode_replicas=1, replicas=3)
    prefill, decode = launches("vllm", plan, "m")
    assert (prefill.role, prefill.count, decode.role, decode.count) == ("prefill", 2, "decode", 1)
    assert '"kv_role": "kv_producer"' in prefill.arguments[-1]
    assert '"kv_role": "kv_consumer"' in decode.arguments[-1]
    assert "# 2 servers for prefill" in emit("vllm", plan, "m")
    _, second = launches("sglang", plan.replace(engine="sglang"), "m")
    assert second.arguments[-2:] == ("--disaggregation-mode", "decode")


def test_model_names_are_quoted() -> None:
    text = emit("vllm", ServingPlan(), "a b; rm -rf $(x)")
    assert "'a b; rm -rf $(x)'" in text
    assert read("vllm", text)[1] == "a b; rm -rf $(x)"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("changes", "said"), [
    ({"preemption": "swap"}, "recompute"), ({"host_kv_bytes": 1}, "GiB"), ({"kv_dtype": "int8"}, "int8"),
])  # fmt: skip
def test_what_an_engine_cannot_be_told(format: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        emit(format, ServingPlan(engine=format, **changes), "m")  # type: ignore[arg-type]


def test_vllm_spreads_experts_over_all_ranks() -> None:
    with pytest.raises(InputError, match="take ep 8"):
        emit("vllm", ServingPlan(tp=8, ep=4), "m")


@pytest.mark.parametrize(("format", "text", "error"), [
    ("vllm", "", "holds no command"),
    ("vllm", "python -m sglang.launch_server --model-path m", "does not begin with 'vllm serve'"),
    ("vllm", "vllm serve", "names no model"),
    ("vllm", "vllm serve m --max-num-seqs", "has no value"),
    ("vllm", "vllm serve m --max-num-seqs many", "no whole number"),
    ("vllm", "vllm serve m --gpu-memory-utilization much", "no share"),
    ("vllm", "vllm serve m --max-num-seqs 0", "want 1"),
    ("vllm", "vllm serve m 7", "is no option"),
    ("vllm", "vllm serve 'm", "no shell command"),
    ("vllm", "vllm serve m --kv-transfer-config {}", "has no kv_role"),
    ("vllm", "vllm serve m\nvllm serve m", "neither one server nor"),
    ("sglang", "python -m sglang.launch_server --tp-size 2", "names no model"),
    ("sglang", "python -m sglang.launch_server --model-path m --tp-size 3 --dp-size 2", "cannot be divided by dp 2"),
])  # fmt: skip
def test_what_is_no_such_command(format: str, text: str, error: str) -> None:
    with pytest.raises(InputError, match=error):
        read(format, text)


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="--max-num-seqs"):
        read("vllm", "vllm serve m --max-num-seq 8")
    with pytest.raises(UnknownNameError, match="sglang"):
        emit("sgl", ServingPlan(), "m")
    with pytest.raises(UnknownNameError, match="--quantization"):
        read("vllm", "vllm serve m --quantization fp7")


def test_options_that_change_no_plan_are_passed_over() -> None:
    plan, _ = read("vllm", "vllm serve m --port 8000 --trust-remote-code --tensor-parallel-size=4")
    assert plan == ServingPlan(tp=4)
