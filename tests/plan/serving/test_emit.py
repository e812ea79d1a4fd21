"""Launch commands of vLLM and SGLang: written, read back, and refused where they say something else."""

from __future__ import annotations

import random
import shlex

import pytest

from foretell.errors import InputError, UnknownNameError
from foretell.plan.serving.emit import FORMATS, emit, launches, read
from foretell.simulate.serving import ServingPlan

#: Options that may be written, and where each engine says so. vLLM: arg_utils.py is vllm/engine/arg_utils.py (its
#: ``add_cli_args``), cache.py is vllm/config/cache.py, both as in 0.12 and since. SGLang: the tables of
#: docs/advanced_features/server_arguments.md as in 0.5.
OPTIONS = {
    "vllm": {
        "--tensor-parallel-size": "arg_utils.py, ParallelConfig",
        "--pipeline-parallel-size": "arg_utils.py, ParallelConfig",
        "--data-parallel-size": "arg_utils.py, ParallelConfig",
        "--enable-expert-parallel": "arg_utils.py, ParallelConfig",
        "--dtype": "arg_utils.py, ModelConfig",
        "--quantization": "arg_utils.py, ModelConfig",
        "--max-model-len": "arg_utils.py, ModelConfig",
        "--enforce-eager": "arg_utils.py, ModelConfig",
        "--kv-cache-dtype": "arg_utils.py, CacheConfig",
        "--block-size": "arg_utils.py, CacheConfig",
        "--gpu-memory-utilization": "arg_utils.py, CacheConfig",
        "--enable-prefix-caching": "arg_utils.py, CacheConfig",
        "--no-enable-prefix-caching": "arg_utils.py, CacheConfig (BooleanOptionalAction)",
        "--kv-offloading-size": "arg_utils.py, CacheConfig",
        "--kv-offloading-backend": "arg_utils.py, CacheConfig",
        "--max-num-batched-tokens": "arg_utils.py, SchedulerConfig",
        "--max-num-seqs": "arg_utils.py, SchedulerConfig",
        "--enable-chunked-prefill": "arg_utils.py, SchedulerConfig",
        "--no-enable-chunked-prefill": "arg_utils.py, SchedulerConfig (BooleanOptionalAction)",
        "--kv-transfer-config": "arg_utils.py, VllmConfig",
    },
    "sglang": {
        "--model-path": "Model and tokenizer",
        "--context-length": "Model and tokenizer",
        "--dtype": "Quantization and data type",
        "--quantization": "Quantization and data type",
        "--kv-cache-dtype": "Quantization and data type",
        "--mem-fraction-static": "Memory and scheduling",
        "--max-running-requests": "Memory and scheduling",
        "--chunked-prefill-size": "Memory and scheduling",
        "--max-prefill-tokens": "Memory and scheduling",
        "--page-size": "Memory and scheduling",
        "--tp-size": "Runtime options",
        "--pp-size": "Runtime options",
        "--dp-size": "Data parallelism",
        "--ep-size": "Expert parallelism",
        "--enable-hierarchical-cache": "Hierarchical cache",
        "--hicache-size": "Hierarchical cache",
        "--disable-radix-cache": "Optimization/debug options",
        "--disable-cuda-graph": "Optimization/debug options",
        "--enable-dp-attention": "Optimization/debug options",
        "--disaggregation-mode": "PD disaggregation",
    },
}
#: Values that the engines choose from, from the same places (vLLM's formats of the cache from cache.py, its methods of
#: quantisation from vllm/model_executor/layers/quantization).
VALUES = {
    "vllm": {
        "--dtype": {"auto", "half", "float16", "bfloat16", "float", "float32"},
        "--quantization": {"awq", "compressed-tensors", "fp8", "gptq", "modelopt_fp4", "mxfp4"},
        "--kv-cache-dtype": {"auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"},
        "--kv-offloading-backend": {"native", "lmcache"},
    },
    "sglang": {
        "--dtype": {"auto", "half", "float16", "bfloat16", "float", "float32"},
        "--quantization": {"awq", "compressed-tensors", "fp8", "gptq", "modelopt_fp4", "mxfp4", "w8a8_int8"},
        "--kv-cache-dtype": {"auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"},
        "--disaggregation-mode": {"prefill", "decode", "null"},
    },
}  # fmt: skip


def drawn(rng: random.Random, engine: str) -> ServingPlan:
    """A plan that the engine can be told."""
    tp, dp = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 4))
    p, d = rng.choice(((0, 0), (0, 0), (1, 2), (3, 1)))
    weights = rng.choice(("bf16", "fp16", "fp8", "int8", "w8a16", "int4", "mxfp4", "nvfp4"))
    half = weights if weights in ("bf16", "fp16") else rng.choice(("bf16", "fp16"))
    chunked, length = rng.random() < 0.7, rng.choice((0, 4096))
    tokens = rng.choice((512, 2048, 8192)) if chunked or not length else 8192
    return ServingPlan(
        engine=engine, tp=tp, dp=dp, pp=rng.choice((1, 2)), ep=rng.choice((1, tp * dp)), prefill_replicas=p,
        decode_replicas=d, replicas=p + d or rng.randint(1, 30), weight_dtype=weights,
        kv_dtype=rng.choice(("fp8", half)),
        max_num_batched_tokens=tokens, max_num_seqs=rng.choice((64, 100, 1024)),
        max_model_len=length, block_size=rng.choice((1, 16, 64)),
        gpu_memory_percent=rng.choice((85, 90, 57, 29)), chunked_prefill=chunked,
        prefix_cache=rng.random() < 0.5, cuda_graph=rng.random() < 0.8,
        host_kv_bytes=rng.choice((0, 0, 40 * (2**30 if engine == "vllm" else 10**9))),
    )  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_written_is_read_back(format: str) -> None:
    rng = random.Random(0)
    for _ in range(400):
        plan = drawn(rng, format)
        text = emit(format, plan, "meta-llama/Llama-3.1-8B", "8x h100-sxm")
        assert read(format, text) == (plan, "meta-llama/Llama-3.1-8B"), text


@pytest.mark.parametrize("format", FORMATS)
def test_every_option_and_value_is_one_of_the_engine(format: str) -> None:
    rng, seen = random.Random(1), set()
    for _ in range(400):
        for one in launches(format, drawn(rng, format), "m"):
            seen |= {word for word in one.arguments if word.startswith("--")}
            for option, value in zip(one.arguments, one.arguments[1:], strict=False):
                assert value in VALUES[format].get(option, {value}), (option, value)
    assert seen == set(OPTIONS[format])


def test_a_vllm_command_by_eye() -> None:
    plan = ServingPlan(tp=2, max_num_batched_tokens=2048, max_num_seqs=64, replicas=3)
    assert emit("vllm", plan, "my/model", "2x l4") == (
        "# 3 servers, each on 2x l4\n"
        "# without a prefix cache, as planned: with it, prompts that share a beginning take less\n"
        "vllm serve my/model \\\n  --tensor-parallel-size 2 \\\n  --pipeline-parallel-size 1 \\\n"
        "  --dtype bfloat16 \\\n  --max-num-batched-tokens 2048 \\\n  --max-num-seqs 64 \\\n"
        "  --block-size 16 \\\n  --gpu-memory-utilization 0.9 \\\n"
        "  --enable-chunked-prefill \\\n  --no-enable-prefix-caching\n"
        "\n# before them:\n# vllm-router --policy round_robin --worker-urls URL URL …\n"
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


def test_formats_of_a_checkpoint_are_left_to_it() -> None:
    # vLLM takes slower kernels where awq is named, and refuses a method that the checkpoint does not have.
    for format in FORMATS:
        text = emit(format, ServingPlan(engine=format, weight_dtype="int4"), "m")
        assert "--quantization" not in text
        assert "# weights in int4 from a checkpoint" in text
        assert "--quantization fp8" in emit(format, ServingPlan(engine=format, weight_dtype="fp8"), "m")


def test_int8_is_found_in_the_checkpoint_and_named_for_the_kernels_of_sglang() -> None:
    """docs/advanced_features/quantization.md of SGLang; vLLM's docs/features/quantization (INT8 W8A8) give no option.

    In 16 bits of its own is what the plan's cache says: fp16 where a GPU has no bf16.
    """
    plan = ServingPlan(weight_dtype="int8", kv_dtype="fp16")
    vllm, sglang = (emit(engine, plan.replace(engine=engine), "m") for engine in FORMATS)
    assert "--quantization" not in vllm
    assert "--quantization w8a8_int8" in sglang
    for text in (vllm, sglang):
        assert "# weights in int8 from a checkpoint" in text
        assert "--dtype float16" in text
    assert "--quantization" not in emit("sglang", plan.replace(engine="sglang", weight_dtype="w8a16"), "m")
    assert "--dtype" not in emit("vllm", plan.replace(kv_dtype="bf16"), "m")


def test_host_memory_is_counted_as_each_engine_counts_it() -> None:
    # vLLM: GiB of all ranks of tensor and pipeline parallelism; SGLang: GB (1e9) of each.
    (one,) = launches("vllm", ServingPlan(tp=4, pp=2, host_kv_bytes=10 * 2**30), "m")
    assert shlex.join(one.arguments).endswith("--kv-offloading-backend native --kv-offloading-size 80")
    (one,) = launches("sglang", ServingPlan(engine="sglang", tp=4, host_kv_bytes=10 * 10**9), "m")
    assert one.arguments[-2:] == ("--hicache-size", "10")


def test_without_chunks_a_prompt_fits_an_iteration() -> None:
    plan = ServingPlan(chunked_prefill=False, max_model_len=4096, max_num_batched_tokens=2048)
    with pytest.raises(InputError, match="4096 tokens in iterations of 2048"):
        emit("vllm", plan, "m")
    assert "--no-enable-chunked-prefill" in emit("vllm", plan.replace(max_num_batched_tokens=4096), "m")


def test_several_servers_have_a_router_before_them() -> None:
    two = ServingPlan(replicas=2, router="prefix-aware")
    assert "# vllm-router --policy cache_aware --worker-urls" in emit("vllm", two, "m")
    assert "sglang_router.launch_router --policy cache_aware" in emit("sglang", two.replace(engine="sglang"), "m")
    apart = ServingPlan(prefill_replicas=1, decode_replicas=2, replicas=3)
    assert "--vllm-pd-disaggregation --prefill URL" in emit("vllm", apart, "m")
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in emit("vllm", apart, "m")
    assert "launch_router --pd-disaggregation" in emit("sglang", apart.replace(engine="sglang"), "m")
    assert "router" not in emit("vllm", ServingPlan(), "m")


def test_a_server_of_several_machines_says_what_each_is_told() -> None:
    assert "--nnodes 2 --node-rank K --master-addr HEAD" in emit("vllm", ServingPlan(tp=8, pp=2), "m", nodes=2)
    wide = ServingPlan(dp=16, ep=16)
    text = emit("vllm", wide, "m", nodes=2)
    assert "--data-parallel-size-local 8 --data-parallel-address HEAD" in text
    assert "--headless --data-parallel-start-rank K, which is 8\n" in text
    assert read("vllm", text) == (wide, "m")
    text = emit("sglang", wide.replace(engine="sglang"), "m", nodes=2)
    assert "--nnodes 2 --node-rank K --dist-init-addr HEAD:PORT" in text
    assert "nnodes" not in emit("vllm", ServingPlan(tp=8), "m", nodes=1)


def test_model_names_are_quoted() -> None:
    text = emit("vllm", ServingPlan(), "a b; rm -rf $(x)")
    assert "'a b; rm -rf $(x)'" in text
    assert read("vllm", text)[1] == "a b; rm -rf $(x)"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("changes", "said"), [
    ({"preemption": "swap"}, "recompute"), ({"host_kv_bytes": 1}, "whole G"), ({"kv_dtype": "int8"}, "int8"),
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
    with pytest.raises(UnknownNameError, match="known: native"):
        read("vllm", "vllm serve m --kv-offloading-size 8 --kv-offloading-backend lmcache")


def test_options_that_change_no_plan_are_passed_over() -> None:
    plan, _ = read("vllm", "vllm serve m --port 8000 --trust-remote-code --tensor-parallel-size=4")
    assert plan == ServingPlan(tp=4)
