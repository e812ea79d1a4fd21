"""``foretell checkpoint`` from what is typed to what is printed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def _safetensors(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    header, at = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {f"model.layers.{n}.mlp.down_proj.weight": ("BF16", [64, 256], 2 * 64 * 256) for n in range(3)}
    tensors["a" * 120] = ("F32", [10], 40)
    path.write_bytes(_safetensors(tensors))
    return path


def printed(result: Any) -> str:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80
    return str(result.stdout)


def test_a_checkpoint_is_summed_up(run: Run, checkpoint: Path) -> None:
    text = printed(run("checkpoint", checkpoint))
    assert "safetensors checkpoint" in text
    assert "4 tensors · 49.2 k parameters · 96 KiB · 16 bits each" in text
    assert "1 file of 96.5 KiB" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["BF16", "3", "49.2", "k", "96", "KiB"] in [row[:6] for row in rows]
    assert "64×256" in text
    assert "rtx-4090" in text
    assert "holds them" in text


def test_devices_and_tensors_are_chosen(run: Run, checkpoint: Path) -> None:
    text = printed(run("checkpoint", checkpoint, "--on", "h200", "--largest", 0))
    assert "h200-sxm" in text
    assert "t4" not in text
    assert "64×256" not in text


def test_weights_too_large_for_a_card_are_told_apart(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2**17, 2**17], "data_offsets": [0, 2**35]}}).encode()
    with path.open("wb") as file:  # a file of zeros that takes no room on the disk
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2**35)
    text = printed(run("checkpoint", path, "--on", "t4,h200"))
    assert "32 GiB" in text
    assert "213 %  takes 3 or more" in text
    assert "holds them" in text


def test_json_has_every_tensor(run: Run, checkpoint: Path) -> None:
    result = run("checkpoint", checkpoint, "--json")
    document = json.loads(result.stdout)
    assert document["schema"] == "foretell.checkpoint/1"
    assert document["bytes"] == 3 * 2 * 64 * 256 + 40
    assert len(document["tensors"]) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "error: nowhere: no such file; give a safetensors or GGUF file"),
        (("{path}", "--on", "t44"), "unknown device 't44'"),
        (("{path}", "--largest", "-1"), "--largest: -1 tensors"),
    ],
)
def test_slips_are_one_line(shell: Any, failed: Any, checkpoint: Path, arguments: tuple[str, ...], said: str) -> None:
    result = shell("checkpoint", *(argument.format(path=checkpoint) for argument in arguments))
    assert said in failed(result)
    assert result.returncode == 2
