"""``foretell kv``: engines side by side, one in full, and what it refuses."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from foretell.hardware import device
from foretell.report import schema
from foretell.simulate.serving import ServingPlan
from foretell.simulate.serving.iteration import Iterations
from foretell.workload import llm

Run = Callable[..., Any]


def test_side_by_side(run: Run) -> None:
    result = run("kv", "llm:gpt-oss-120b", "--tokens", "78384")
    assert result.exit_code == 0
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert lines["vllm"][-3:] == ["5.38", "GiB", "73,728"]
    assert lines["transformers"][-1] == "36,864"
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_one_engine_in_full_with_a_device(run: Run) -> None:
    result = run("kv", "llama-3.1-8b", "--engine", "vllm", "--on", "a100-sxm4-80gb", "--tokens", "4096")
    assert result.exit_code == 0
    assert "holds 111 sequences of 4,096 tokens" in result.stdout
    assert "131,072 B for each further token" in result.stdout


def test_json_is_valid(run: Run) -> None:
    result = run("kv", "gpt-oss-20b", "--on", "h100-sxm", "--json")
    for document in json.loads(result.stdout):
        jsonschema.validate(document, schema("foretell.kv/1"))
        assert document["bytes"] == sum(part["bytes"] for part in document["parts"])


def test_only_engines_that_have_the_format(run: Run) -> None:
    result = run("kv", "llama-3.1-8b", "--dtype", "q8_0")
    assert result.exit_code == 0
    assert "llama.cpp" in result.stdout
    assert "vllm" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama-3.1-8",), "llama-3.1-8b"),
        (("llama-3.1-8b", "--engine", "vlm"), "vllm"),
        (("llama-3.1-8b", "--dtype", "q9"), "known"),
        (("llama-3.1-8b", "--on", "l4", "--weights", "mxfp5"), "did you mean 'mxfp4'"),
        (("llama-3.1-8b", "--tokens", "0"), "tokens is 0"),
        (("llama-3.1-8b", "--share", "0.5"), "give --on DEVICE"),
        (("llama-3.1-8b", "--engine-version", "0.9"), "give --engine"),
        (("gemma-4-31b", "--on", "t4"), "only the cache is known"),
        (("no/such/config.json",), "no such file"),
        (("llama-3.1-8b", "--on", "b200-sxm", "--engine", "vllm", "--weights", "int8"), "--weights int8: engines have"),
        (("mixtral-8x7b", "--on", "v100-sxm2-16gb", "--engine", "sglang", "--experts", "int8"), "--experts int8: v100"),
    ],
)
def test_slips_are_named(run: Run, arguments: tuple[str, ...], said: str) -> None:
    result = run("kv", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_weights_in_int8_take_half(run: Run) -> None:
    """Llama-3.1-8B's 8.03e9 parameters but for embedding and head (128,256 · 4,096 each) in a byte; engines without
    INT8 products for a device have no room there, others do.
    """
    given = ("llama-3.1-8b", "--tokens", "4096", "--json")
    alone = run("kv", *given, "--engine", "vllm", "--on", "a100-sxm4-80gb", "--weights", "int8")
    weights = json.loads(alone.stdout)["budget"]["weights_bytes"]
    assert weights == pytest.approx(8.03e9 + 2 * 128256 * 4096, rel=1e-3)
    every = json.loads(run("kv", *given, "--on", "b200-sxm", "--weights", "int8").stdout)
    room = {one["engine"]: one["budget"] for one in every}
    assert {name for name, budget in room.items() if isinstance(budget, str)} == {"vllm", "sglang", "trtllm"}
    assert "no INT8 products for b200-sxm" in room["vllm"]


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_what_would_help_is_what_it_leaves(run: Run, engine: str) -> None:
    """Scales are divided with the weights they are of."""
    asked = ("kv", "gpt-oss-120b", "--on", "rtx-4090", "--engine", engine)
    said = run(*asked).stderr
    gpus, tokens = re.findall(r"--tp (\d+) leaves [^,]*, ([0-9,]+) tokens", said)[0]
    assert f"{tokens} tokens in all" in run(*asked, "--tp", gpus).stdout
    assert "--weights" not in said  # which would be of all weights, not of the experts alone


def test_no_room_is_infeasible(run: Run) -> None:
    result = run("kv", "llama-3.3-70b", "--on", "t4", "--engine", "vllm")
    assert result.exit_code == 3
    assert "leaves no room" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # 57 GiB of experts in 4 bits and their scales leave room where 218 GiB of bf16 do not.
        (("gpt-oss-120b", "--on", "h100-sxm", "--engine", "vllm"), "weights of the experts in mxfp4, as published"),
        (("deepseek-v3", "--on", "h200", "--engine", "vllm", "--tp", "8"), "weights in fp8, as published"),
        (("deepseek-v3", "--on", "h200", "--tp", "8"), "weights in fp8, as published; in bf16 for llama.cpp"),
    ],
)
def test_weights_are_taken_as_they_are_published(run: Run, arguments: tuple[str, ...], said: str) -> None:
    result = run("kv", *arguments)
    assert result.exit_code == 0, result.stderr
    assert said in " ".join(result.stdout.split())


def test_published_in_what_the_device_does_not_run(run: Run) -> None:
    """671e9 parameters of two bytes on 64 V100 are 21 GB each: as `simulate serve` takes them, and as is said."""
    result = run("kv", "deepseek-v3", "--on", "v100-sxm2-32gb", "--engine", "vllm", "--tp", "64")
    assert "weights in 16 bits where they are published in fp8" in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4", "fp8", "w8a16"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b"])
def test_formats_take_what_they_take_in_simulate_serve(run: Run, name: str, model: str) -> None:
    """Scales too: 16 values of NVFP4 have one of a byte, 32 of MXFP4 also, 128 of INT4 one of two."""
    told = run("kv", model, "--engine", "vllm", "--on", "h100-sxm", "--weights", name, "--json")
    budget = json.loads(told.stdout)["budget"]
    plan = ServingPlan(weight_dtype=name)
    served = Iterations.of(llm.config(model), plan, device("h100-sxm"))
    assert budget["weights_bytes"] == served.budget.weights_bytes
    counted = any("scales" in note for note in budget["notes"])
    assert counted == (name in ("fp8", "w8a16"))


def test_weights_of_two_formats(run: Run) -> None:
    """DeepSeek-V3's 256 experts in 4 bits beside a dense part in 8."""
    told = [
        json.loads(run("kv", "deepseek-v3", "--engine", "vllm", "--on", "b200-sxm", "--tp", "8", "--json",
                       "--weights", "fp8", "--experts", name).stdout)["budget"]["weights_bytes"]
        for name in ("fp8", "fp4", "nvfp4")
    ]  # fmt: skip
    experts = 58 * 256 * 3 * 7168 * 2048 / 8
    assert told[0] - told[1] == pytest.approx(experts / 2)
    assert told[2] - told[1] == pytest.approx(experts / 16)


def test_what_an_engine_does_not_serve_is_not_what_does_not_fit(run: Run) -> None:
    result = run("kv", "llama-3.1-8b", "--on", "b200-sxm", "--weights", "int8")
    vllm = next(line for line in result.stdout.splitlines() if line.startswith("vllm"))
    assert vllm.split()[-3:] == ["–", "–", "–"]
    assert "vllm: not served: engines have no INT8 products for b200-sxm" in result.stdout
    assert "take fp8" in result.stdout
    assert result.stdout.startswith("KV cache of llama-3.1-8b on one GPU, b200-sxm")
    nowhere = run("kv", "llama-3.3-70b", "--on", "t4").stdout
    assert nowhere.startswith("KV cache of llama-3.3-70b on one GPU, t4")
    vllm = next(line for line in nowhere.splitlines() if line.startswith("vllm"))
    assert vllm.split()[-3:] == ["–", "none", "0"]
    short = run("kv", "llama-3.3-70b", "--on", "t4", "--experts", "int8")
    assert short.exit_code == 2
    assert "--experts int8: llama-3.3-70b has no experts; give --weights int8" in short.stderr
