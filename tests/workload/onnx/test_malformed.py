"""Hundreds of malformed files: each is refused by name, soon. The whole run is ``benchmarks/fuzz_onnx.py``."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("onnx")

COUNT = 400


def _fuzz() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "fuzz_onnx.py"
    spec = importlib.util.spec_from_file_location("fuzz_onnx", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fuzz = _fuzz()


def test_malformed_files_are_refused_by_name(tmp_path: Path, within: Any) -> None:
    verdicts: dict[str, int] = {}
    for index, (name, data) in enumerate(fuzz.cases(COUNT, 7)):
        verdict = within(fuzz.MOST_SECONDS, partial(fuzz.judge, tmp_path / "m.onnx", data))
        assert verdict in ("graph", "refused"), f"case {index} ({name})"
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
    assert verdicts["refused"] > COUNT / 2
    assert verdicts["graph"] > COUNT / 20


def test_the_judge_sees_a_traceback_and_a_missing_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell.errors import InputError

    def broken(*_: object) -> None:
        raise KeyError("x")

    def curt(*_: object) -> None:
        raise InputError("no")

    for function, said in ((broken, "traceback: KeyError"), (curt, "no repair")):
        monkeypatch.setattr(fuzz, "graph", function)
        assert fuzz.judge(tmp_path / "m.onnx", b"").startswith(said)


@pytest.mark.parametrize("name", ["convolutional", "attentive"])
def test_what_is_mutated_is_sound(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(getattr(fuzz, name)().SerializeToString())
    assert fuzz.graph(str(path), fuzz.options()).macs() > 0
