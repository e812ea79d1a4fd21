"""``foretell kv``: engines side by side, one in full, and what it refuses."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from foretell.report import schema

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
        (("llama-3.1-8b", "--tokens", "0"), "tokens is 0"),
        (("llama-3.1-8b", "--share", "0.5"), "give --on DEVICE"),
        (("llama-3.1-8b", "--engine-version", "0.9"), "give --engine"),
        (("gemma-4-31b", "--on", "t4"), "only the cache is known"),
        (("no/such/config.json",), "no such file"),
        (("llama-3.1-8b", "--on", "b200-sxm", "--engine", "vllm", "--weights", "int8"), "--weights int8: engines have"),
        (("llama-3.1-8b", "--on", "v100-sxm2-16gb", "--engine", "sglang", "--experts", "int8"), "--experts int8: v100"),
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


def test_no_room_is_infeasible(run: Run) -> None:
    result = run("kv", "llama-3.3-70b", "--on", "t4", "--engine", "vllm")
    assert result.exit_code == 3
    assert "leaves no room" in result.stderr
