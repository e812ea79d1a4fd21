"""`--lora`, `--quantize` and the optimizers of bitsandbytes on the command line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import foretell
from foretell.cli.app import app

TRAIN = ["llm:qwen2.5-0.5b", "--train", "--seq-len", "64", "--precision", "bf16"]
QLORA = [*TRAIN, "--lora", "rank=8,targets=q_proj,v_proj", "--quantize", "nf4", "--optimizer", "paged-adamw"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)
    return result.exit_code, result.output


def test_a_card_says_what_is_trained_and_how_weights_are_kept() -> None:
    code, output = run("predict", *QLORA, "--on", "rtx-4060")
    assert code == 0, output
    words = " ".join(output.split())
    for setting in ("LoRA rank 8 on q_proj", "nf4", "paged-adamw"):
        assert setting in words
    assert max(map(len, output.splitlines())) <= 80


def test_the_command_and_the_call_agree() -> None:
    code, output = run("predict", *QLORA, "--on", "rtx-4060", "--json")
    assert code == 0, output
    estimate = foretell.predict(
        "llm:qwen2.5-0.5b", on="rtx-4060", train=True, seq_len=64, precision="bf16", lora="rank=8", quantize="nf4",
        optimizer="paged-adamw",
    )  # fmt: skip
    document = json.loads(output)
    assert document["time_s"] == estimate.time_s
    assert document["memory"]["peak_bytes"] == estimate.memory.peak_bytes


@pytest.mark.parametrize("command", [("capture",), ("explain", "--on", "t4"), ("compare", "--on", "t4")], ids=" ".join)
def test_other_commands_take_them(command: tuple[str, ...]) -> None:
    code, output = run(*command, *QLORA)
    assert code == 0, output


def test_unpacking_is_listed_and_explained() -> None:
    code, output = run("capture", *QLORA, "--ops")
    assert code == 0
    assert "dequantize" in output
    graph = foretell.capture("llm:qwen2.5-0.5b", phase="prefill", seq_len=64, quantize="nf4")
    index = next(i for i, op in enumerate(graph.ops) if op.name == "foretell.dequantize.default")
    code, output = run("explain", "llm:qwen2.5-0.5b", "--phase", "prefill", "--seq-len", "64", "--quantize", "nf4",
                       "--on", "t4", "--op", str(index))  # fmt: skip
    assert code == 0
    assert "foretell.dequantize" in output


@pytest.mark.parametrize(("given", "said"), [
    (["llm:qwen2.5-0.5b", "--lora", "rank=8"], "add --train"),
    ([*TRAIN, "--lora", "rank=0"], "from 1 to"),
    ([*TRAIN, "--lora", "rank=1000"], "rank of at most 896"),
    ([*TRAIN, "--lora", "rank=8,targets=q_prj"], "did you mean 'q_proj'"),
    ([*TRAIN, "--lora", "8"], "rank=16,targets="),
    ([*TRAIN, "--quantize", "nf4"], "add --lora"),
    ([*TRAIN, "--quantize", "int4"], "unknown quantization 'int4'"),
    (["llm:mixtral-8x7b", "--quantize", "nf4"], "routed experts"),
    (["timm:resnet18", "--quantize", "nf4"], "llm:"),
    (["timm:resnet18", "--train", "--optimizer", "paged-adamw"], "llm:"),
    (["onnx:none.onnx", "--train", "--lora", "rank=8"], "takes no adapters"),
], ids=lambda value: value if isinstance(value, str) else "_".join(value)[:40])
def test_a_slip_is_one_line_with_the_repair(given: list[str], said: str) -> None:
    code, output = run("predict", *given, "--on", "t4")
    assert code == 2
    assert said in " ".join(output.split())
    assert output.startswith("error: ")
    assert "Traceback" not in output
