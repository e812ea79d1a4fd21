"""The benchmark against measured memory, run whole on a table small enough to check by eye."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from foretell.graph import Storage

HEADER = "Filename,Batch Size,Max GPU Memory (MiB),GB after Forward,GB after Backward,Last Numeric Value,,,\n"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "memory_gpumemnet.py"
    spec = importlib.util.spec_from_file_location("memory_gpumemnet", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(folder: Path, rows: str) -> Path:
    (folder / "gpumemnet").mkdir()
    with gzip.open(folder / "gpumemnet" / "timm_training_memory_faketensor.csv.gz", "wt") as file:
        file.write(HEADER)
        for row in rows.split():
            name, batch, mib = row.split(":")
            file.write(f"{name}_{batch}.out,{batch},{mib},0,0,0,,,\n")
    return folder


def test_rows_after_the_memory_ran_out_are_left_out(benchmark: ModuleType, tmp_path: Path) -> None:
    data = table(tmp_path, "a:16:200 a:8:100 a:32:203 a:64:900 b_c:8:39001 d:8:100 d:16:102")
    assert benchmark.measured(data) == {"a": {8: 100.0, 16: 200.0}, "b_c": {}, "d": {8: 100.0, 16: 102.0}}


def test_the_sample_is_always_the_same(benchmark: ModuleType) -> None:
    names = [f"model{i}" for i in range(50)]
    assert benchmark.sample(names, 5) == benchmark.sample(names[::-1], 5)
    assert set(benchmark.sample(names, 5)) < set(benchmark.sample(names, 20))


def test_a_whole_run_is_resumed_and_reported(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    data = table(tmp_path, "resnet18:8:2150 resnet18:16:2470 no_such_model:8:2000")
    out = tmp_path / "results.jsonl"
    arguments = ["--data", str(data), "--out", str(out)]
    assert benchmark.main(arguments) == 0  # within 2 and 7 %
    text = capsys.readouterr().out
    assert "bar (median ≤ 2%, p90 ≤ 7%): met" in text
    assert "skipped no_such_model: unknown timm model 'no_such_model'" in text
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["model"], r.get("batch")) for r in lines] == [
        ("no_such_model", None), ("resnet18", 8), ("resnet18", 16)
    ]  # fmt: skip
    assert sum(lines[1]["breakdown_mib"].values()) == pytest.approx(lines[1]["predicted_mib"], abs=0.5)
    # Everything is there: nothing is computed again, whatever stands in the file is reported; half a line is ignored.
    lines[1]["predicted_mib"] = lines[2]["predicted_mib"] = 4000.0
    out.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"model": "resn')
    monkeypatch.setattr(benchmark, "work", None)
    assert benchmark.main(arguments) == 1
    text = capsys.readouterr().out
    assert "NOT met" in text
    assert "+86.0%" in text
    assert "predicted more" in text
    assert "less 0 cut short" in text


def test_a_missing_folder_is_named(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["--data", str(tmp_path)]) == 2
    assert "no folder gpumemnet" in capsys.readouterr().err


def test_figures(benchmark: ModuleType) -> None:
    results: list[dict[str, Any]] = [
        {"model": "a", "batch": 8, "measured_mib": 100, "predicted_mib": p, "breakdown_mib": {"parameters": p}}
        for p in (90, 100, 120, 104)
    ]
    figures = benchmark.summary([*results, {"model": "b", "skipped": "why"}])
    assert (figures["n"], figures["models"]) == (4, 1)
    assert figures["median"] == pytest.approx(0.07)
    assert figures["mean"] == pytest.approx(0.085)
    assert figures["bias"] == pytest.approx(0.035)
    assert not benchmark.report(results, Console(quiet=True))


@pytest.mark.parametrize(
    ("measured", "breakdown", "says"),
    [
        (2000, {"parameters": 3000}, "ended before"),
        (2000, {"parameters": 2000, "fragmentation": 1000}, "predicted more"),
        (4000, {"parameters": 3000}, "cudnn.benchmark"),
        (3200, {"parameters": 3000}, "not counted"),
    ],
)
def test_causes(benchmark: ModuleType, measured: int, breakdown: dict[str, int], says: str) -> None:
    row = {"measured_mib": measured, "predicted_mib": sum(breakdown.values())}
    row["fake_tensor_mib"] = 400.0 if says == "ended before" else 200.0  # beside a context of 1,703
    assert says in benchmark.likely_cause(row)


def test_what_the_training_script_adds(benchmark: ModuleType) -> None:
    from dataclasses import replace
    from types import MappingProxyType

    from foretell.graph import Graph, Tensor, make_op

    tensors = (Tensor((2, 3, 8, 8), "float32", 0), Tensor((4, 3), "float32", 1), Tensor((4,), "float32", 2))
    ops = tuple(make_op("aten.relu.default", tensors, (), (), phase=phase) for phase in ("forward", "optimizer"))
    storages = (Storage(1536, "input"), Storage(48, "parameter"), Storage(16, "parameter"))
    graph = Graph("g", "train", "fp32", ops, tensors, storages, 16, 16, MappingProxyType({"images": 2}), (0,))
    assert benchmark.as_trained(graph).storages[3:] == (
        Storage(1536, "input"), Storage(1536, "input"), Storage(384, "input"),  # two batches, and one as uint8
        Storage(48, "temporary", 1, 1),  # the gradient that decays
    )  # fmt: skip
    assert len(benchmark.as_trained(replace(graph, ops=ops[:1])).storages) == 6
