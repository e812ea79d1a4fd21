"""``foretell … onnx:FILE`` from the command line, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402

_WITHOUT_TORCH = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ImportError(f"{{name}} was imported")

sys.meta_path.insert(0, Forbidden())
sys.argv = ["foretell", *{arguments!r}]
from foretell.cli import main
main()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One product of a batch left open."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 5], [0.0] * 15)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    made = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, producer_name="acme", opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


def run(*arguments: str, forbidden: tuple[str, ...] = ("torch", "torchvision")) -> subprocess.CompletedProcess[str]:
    code = _WITHOUT_TORCH.format(forbidden=forbidden, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_predict_and_capture(model: Path) -> None:
    result = run("predict", f"onnx:{model}", "--on", "t4", "--batch", "8", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)
    result = run("capture", f"onnx:{model}", "--batch", "8", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    graph = json.loads(result.stdout)
    assert '"source": "onnx"' in json.dumps(graph)
    assert '"producer": "acme"' in json.dumps(graph)


def test_a_training_step_is_refused_with_the_repair(model: Path) -> None:
    result = run("predict", f"onnx:{model}", "--on", "t4", "--train")
    assert result.returncode == 2
    assert "py:FILE.py:FACTORY" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_path_without_its_prefix_says_which(model: Path) -> None:
    result = run("predict", str(model), "--on", "t4")
    assert result.returncode == 2
    assert "write onnx:" in result.stderr


def test_without_the_library_the_extra_is_named(model: Path) -> None:
    result = run("predict", f"onnx:{model}", "--on", "t4", forbidden=("onnx",))
    assert result.returncode == 2
    assert "pip install 'foretell[onnx]'" in result.stderr
