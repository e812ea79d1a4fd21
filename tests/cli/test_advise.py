"""``foretell advise``: what it prints, what it writes, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.report import schema

Run = Callable[..., Any]

NETWORK = """
import torch
from torch import nn


def make():
    blocks = [nn.Sequential(nn.Conv2d(c, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for c in (3, 64)]
    return nn.Sequential(*blocks), torch.empty(8, 3, 64, 64)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NETWORK, encoding="utf-8")
    return f"py:{tmp_path / 'net.py'}:make"


def test_architecture_of_a_users_module(run: Run, model: str) -> None:
    result = run("advise", "architecture", model, "--on", "t4", "--most", "1")
    assert result.exit_code == 0, result.output
    assert "2 batch norms apart from their convolutions" in result.stdout
    assert "rule " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_architecture_as_json(run: Run, model: str) -> None:
    result = run("advise", "architecture", model, "--on", "t4", "--json")
    document = json.loads(result.stdout)
    jsonschema.validate(document, schema("foretell.advice/1"))
    assert document["findings"]
    gains = [finding["gain_s"] for finding in document["findings"]]
    assert gains == sorted(gains, reverse=True)


def test_a_captured_graph_gives_the_same_advice(run: Run, model: str, tmp_path: Path) -> None:
    kept = tmp_path / "graph.json"
    assert run("capture", model, "--out", kept).exit_code == 0
    direct, from_file = (
        json.loads(run("advise", "architecture", what, "--on", "t4", "--json").stdout) for what in (model, kept)
    )
    assert direct["findings"] == from_file["findings"]


def test_nothing_to_advise_is_said(run: Run, model: str) -> None:
    result = run("advise", "architecture", model, "--on", "t4", "--rule", "stem", "--rule", "attention")
    assert result.exit_code == 0
    assert "2 rules checked; none would make it faster" in " ".join(result.stdout.split())


def test_transformer(run: Run) -> None:
    result = run("advise", "transformer", "llm:opt-2.7b", "--on", "a100-sxm4-40gb")
    assert result.exit_code == 0, result.output
    assert "size of a head is 80, want a multiple of 64" in result.stdout
    assert "Better shapes" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_transformer_as_json(run: Run) -> None:
    result = run("advise", "transformer", "gpt2", "--on", "t4", "--seq-len", "512", "--precision", "fp16", "--json")
    document = json.loads(result.stdout)
    jsonschema.validate(document, schema("foretell.shapes/1"))
    assert document["violations"][0]["size"] == "vocabulary"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("architecture", "llm:gpt2", "--on", "t4"), "advise transformer llm:gpt2"),
        (("architecture", "timm:resnet18", "--on", "t4", "--train"), "--train is given"),
        (("architecture", "timm:resnet18", "--on", "t4", "--phase", "decode"), "--phase decode"),
        (("architecture", "timm:resnet18", "--on", "t4,l4"), "ask for one"),
        (("architecture", "timm:resnet18", "--on", "t44"), "t4"),
        (("architecture", "timm:resnet18", "--on", "t4", "--rule", "stemm"), "'stem'"),
        (("architecture", "timm:resnet18", "--on", "t4", "--most", "0"), "at least 1"),
        (("transformer", "timm:resnet18", "--on", "t4"), "advise architecture"),
        (("transformer", "gpt3", "--on", "t4"), "gpt2"),
        (("transformer", "gpt2", "--on", "t4", "--tp", "5"), "heads 12"),
        (("transformer", "gpt2", "--on", "t4", "--tp", "0"), "at least 1"),
        (("transformer", "gpt2", "--on", "xeon-8480-plus"), "is no GPU"),
        (("transformer", "no/such/config.json", "--on", "t4"), "no such file"),
    ],
)
def test_slips_are_named(run: Run, arguments: tuple[str, ...], said: str) -> None:
    result = run("advise", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_a_decode_step_from_a_file_is_refused(run: Run, tmp_path: Path) -> None:
    kept = tmp_path / "graph.json"
    assert run("capture", "llm:gpt2", "--phase", "decode", "--context", "64", "--out", kept).exit_code == 0
    result = run("advise", "architecture", kept, "--on", "t4")
    assert result.exit_code == 2
    assert "decode of a language model" in result.stderr
