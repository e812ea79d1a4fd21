"""The benchmark of re-parametrisation runs, prints a row and writes its figures."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "repvgg_reparam.py"


def test_the_benchmark_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    arguments = ["repvgg_a0", "--batch", "1", "--image-size", "64", "--repeats", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (row,) = json.loads(out.read_text())
    assert row["error"] < 1e-4
    assert row["predicted_speedup_gtx-1080-ti"] > 1
    assert row["speedup_over_trained"] == pytest.approx(row["trained_s"] / row["plain_s"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("repvgg_a0")
