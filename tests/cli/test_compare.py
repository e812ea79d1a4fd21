"""Comparisons: every combination once, the front by brute force, rows that go on after a kill."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell import predict
from foretell.compare import AXES, COLUMNS, Row, compare, pareto
from foretell.errors import InputError, UnknownNameError
from foretell.report import schema

Run = Callable[..., Any]
FORETELL = str(Path(sys.executable).with_name("foretell"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))


def test_rows_are_predictions() -> None:
    result = compare(["llm:gpt2"], ["t4", "l4"], precisions=["fp16", "bf16"], batches=[1, 4], seq_len=64)
    assert [(r.precision, r.batch, r.device) for r in result.rows] == [
        (p, b, d) for p in ("fp16", "bf16") for b in (1, 4) for d in ("t4", "l4")
    ]
    for row in result.rows:
        own = predict("llm:gpt2", on=row.device, precision=row.precision, batch=row.batch, seq_len=64)
        assert (row.time_s, row.memory_bytes, row.fits) == (own.time_s, own.memory.peak_bytes, own.memory.fits)
        assert row.energy_j_per_item == pytest.approx(own.energy_j / row.batch)
        assert row.usd_per_million == pytest.approx(1e6 * own.cost_usd / row.batch)
        assert row.item == "sequences"


def _dominates(a: Row, b: Row, axes: list[str]) -> bool:
    def gain(name: str) -> float:
        column, more = AXES[name]
        return (getattr(a, column) - getattr(b, column)) * (1 if more else -1)

    gains = [gain(axis) for axis in axes]
    return min(gains) >= 0 and max(gains) > 0


_SMALL = st.integers(1, 4).map(float)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), _SMALL, _SMALL, _SMALL, st.booleans()), min_size=1, max_size=12),
    st.lists(st.sampled_from(["speed", "memory", "energy"]), min_size=1, unique=True),
    st.booleans(),
)
def test_the_front_by_brute_force(points: list[tuple[Any, ...]], axes: list[str], across: bool) -> None:
    rows = [
        Row(w, "d", "fp32", 1, "", "", throughput_per_s=a, memory_bytes=int(b), energy_j_per_item=c, fits=fits)
        for w, a, b, c, fits in points
    ]
    able = [r for r in rows if r.fits]
    for row, marked in zip(rows, pareto(rows, axes, across=across), strict=True):
        rivals = [r for r in able if across or r.workload == row.workload]
        expected = bool(row.fits) and not any(_dominates(rival, row, axes) for rival in rivals)
        assert marked == replace(row, pareto=expected)


def test_a_row_without_an_axis_is_off_the_front_unless_none_has_it() -> None:
    def row(device: str, price: float | None) -> Row:
        return Row("w", device, "fp32", 1, "inference", "images", throughput_per_s=1.0, usd_per_million=price)

    assert [r.pareto for r in pareto([row("a", 1.0), row("b", None)], ["speed", "price"])] == [True, False]
    assert [r.pareto for r in pareto([row("a", None), row("b", None)], ["speed", "price"])] == [True, True]


def test_what_cannot_be_predicted_is_a_row(run: Run) -> None:
    result = compare(["llm:gpt2", "llm:opt-125m"], ["t4"], seq_len=1500)
    assert [bool(row.problem) for row in result.rows] == [True, False]
    assert "learned positions" in result.rows[0].problem
    shown = run("compare", "llm:gpt2", "llm:opt-125m", "--seq-len", "1500", "--on", "t4")
    assert shown.exit_code == 0
    assert "learned positions" in " ".join(shown.stdout.split())
    assert compare(["llm:gpt2"], ["t4"], seq_len=1500).reused == 0  # a problem may be mended


def test_rows_are_kept_and_depend_on_the_question() -> None:
    ask: dict[str, Any] = {"precisions": ["fp16"], "seq_len": 64}
    first = compare(["llm:gpt2"], ["t4"], **ask)
    again = compare(["llm:gpt2"], ["t4", "l4"], **ask)
    assert (first.reused, again.reused) == (0, 1)
    assert again.rows[0] == replace(first.rows[0], pareto=again.rows[0].pareto)
    assert compare(["llm:gpt2"], ["t4"], **{**ask, "seq_len": 65}).reused == 0
    assert compare(["llm:gpt2"], ["t4"], model="roofline", **ask).reused == 0
    assert compare(["llm:gpt2"], ["t4"], keep=False, **ask).reused == 0


def test_damaged_rows_are_made_anew(tmp_path: Path) -> None:
    whole = compare(["llm:gpt2"], ["t4", "l4"], seq_len=64)
    (file,) = (tmp_path / "cache" / "compare").glob("*.jsonl")
    text = file.read_text()
    file.write_text(text[: len(text) - 30] + '\n[1]\n{"key": 3}\n' + "[" * 5000)
    again = compare(["llm:gpt2"], ["t4", "l4"], seq_len=64)
    assert (again.rows, again.reused) == (whole.rows, 1)


def test_kept_rows_of_wrong_types_are_dropped(tmp_path: Path) -> None:
    whole = compare(["llm:gpt2"], ["t4"], seq_len=64)
    (file,) = (tmp_path / "cache" / "compare").glob("*.jsonl")
    entry = json.loads(file.read_text().split("\n")[1])
    for change in ({"time_s": "fast"}, {"item": ["a"]}, {"batch": 1.5}, {"fits": "yes"}, {"memory_bytes": True}):
        file.write_text(json.dumps({**entry, "row": {**entry["row"], **change}}) + "\n")
        again = compare(["llm:gpt2"], ["t4"], seq_len=64)
        assert (again.rows, again.reused) == (whole.rows, 0)


def test_one_failure_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import foretell.api

    real = foretell.api.capture

    def capture(workload: str, **settings: Any) -> Any:
        if workload == "llm:opt-125m":
            raise ZeroDivisionError("inside")
        return real(workload, **settings)

    monkeypatch.setattr(foretell.api, "capture", capture)
    rows = compare(["llm:opt-125m", "llm:gpt2"], ["t4"], seq_len=64).rows
    assert "ZeroDivisionError: inside" in rows[0].problem
    assert rows[1].problem == ""


def test_memory_without_the_frameworks_own_is_said(run: Run) -> None:
    shown = run("compare", "llm:gpt2", "--seq-len", "64", "--on", "mi300x,t4")
    assert "memory of mi300x is without the framework's own" in " ".join(shown.stdout.split())
    assert "framework's own" not in run("compare", "llm:gpt2", "--seq-len", "64", "--on", "t4,l4").stdout


def test_goes_on_after_a_kill(tmp_path: Path) -> None:
    batches = ",".join(str(n) for n in range(1, 400))
    command = [FORETELL, "compare", "llm:llama-3.1-8b", "--seq-len", "64", "--on", "t4", "--batch", batches, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "cache" / "compare"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
        for _ in range(600):
            if folder.is_dir() and any(f.read_text().count("\n") > 20 for f in folder.iterdir()):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    result = compare(["llm:llama-3.1-8b"], ["t4"], batches=range(1, 30), seq_len=64)
    assert result.reused >= 19
    fresh = compare(["llm:llama-3.1-8b"], ["t4"], batches=range(1, 30), seq_len=64, keep=False)
    assert result.rows == fresh.rows


def test_tables_for_other_programs(run: Run, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    rows = {}
    for ending in ("csv", "json", "parquet"):
        file = tmp_path / f"t.{ending}"
        made = run("compare", "llm:gpt2", "--seq-len", "64", "--on", "t4,rtx-3090", "--out", file)
        assert made.exit_code == 0
        if ending == "csv":
            with file.open(newline="") as text:
                rows[ending] = list(csv.DictReader(text))
        else:
            rows[ending] = (
                json.loads(file.read_text())["rows"] if ending == "json" else arrow.read_table(file).to_pylist()
            )
    assert list(rows["csv"][0]) == list(rows["json"][0]) == list(COLUMNS)
    assert rows["json"] == rows["parquet"]
    assert [float(row["time_s"]) for row in rows["csv"]] == [row["time_s"] for row in rows["json"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--on", "t4,"), "empty entry"),
        (("--on", "t4,t4"), "given twice"),
        (("--on", "t5"), "unknown device"),
        (("--batch", "1,x"), "no batch"),
        (("--batch", "0"), "no batch"),
        (("--batch", "9" * 30), "no batch"),
        (("--precision", "fp23"), "fp32"),
        (("--pareto", "sped"), "speed"),
        (("--pareto", "speed,speed"), "given twice"),
        (("--out", ".csv"), "end it in .csv"),
        (("--sort", "tim"), "time"),
        (("--out", "x.xlsx"), ".csv"),
        (("--out", "nowhere/x.csv"), "cannot be written"),
        (("--batch", ",".join(map(str, range(1, 100_003)))), "combinations"),
    ],
)
def test_slips_are_named(run: Run, arguments: tuple[str, ...], said: str) -> None:
    given = {"--on": "t4", arguments[0]: arguments[1]}
    result = run("compare", "llm:gpt2", *(word for pair in given.items() for word in pair))
    assert result.exit_code == 2
    assert said in result.stderr


def test_json_is_valid(run: Run) -> None:
    document = json.loads(run("compare", "llm:gpt2", "--seq-len", "64", "--on", "t4", "--json").stdout)
    jsonschema.validate(document, schema("foretell.comparison/1"))
    assert list(document["rows"][0]) == list(COLUMNS)


def test_nothing_to_compare() -> None:
    with pytest.raises(InputError, match="no workload"):
        compare([], ["t4"])
    with pytest.raises(UnknownNameError, match="speed"):
        compare(["llm:gpt2"], ["t4"], axes=["spead"])


def test_a_formula_stays_text(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    run("compare", "=1+1", "--on", "t4", "--out", file)
    assert "'=1+1" in file.read_text()


def test_a_file_keeps_its_own_batch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    program = torch.export.export(torch.nn.Linear(8, 8), (torch.ones(3, 8),))
    torch.export.save(program, str(tmp_path / "net.pt2"))
    name = f"pt2:{tmp_path / 'net.pt2'}"
    assert [row.batch for row in compare([name], ["t4"]).rows] == [3]
    rows = compare([name], ["t4"], batches=[1, 3]).rows
    assert "exported for a batch of 3" in rows[0].problem
    assert rows[1].problem == ""
