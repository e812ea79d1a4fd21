"""Large graphs load soon. All five are in ``benchmarks/speed_onnx.py``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("onnx")


def _speed() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "speed_onnx.py"
    spec = importlib.util.spec_from_file_location("speed_onnx", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


speed = _speed()


@pytest.mark.parametrize("name", ["transformer", "unrolled"])
def test_five_thousand_nodes_load_in_seconds(name: str, tmp_path: Path, within: Any) -> None:
    path = tmp_path / "m.onnx"
    assert getattr(speed, name)(path) >= speed.LEAST_NODES
    made = within(speed.MOST_SECONDS, lambda: speed.graph(str(path), speed.options()))
    if name == "transformer":  # 50 layers: four products of width² and two of 4·width², and attention over 512 tokens
        assert made.macs() == 50 * (512 * 12 * 1600**2 + 2 * 512 * 512 * 1600)
    else:
        assert made.macs() == 400 * 2 * 512 * 2048


def test_the_smaller_ones_count_by_closed_forms(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    speed.densenet(path, 1)
    made = speed.graph(str(path), speed.options())
    # DenseNet-264 without its classifier and last norm, which speed_onnx leaves out: 130 blocks of two convolutions.
    convolutions = [op for op in made.ops if op.kind == "convolution"]
    assert len(convolutions) == 1 + 2 * (6 + 12 + 64 + 48) + 3
