"""`benchmarks/parity_timm.py`: its reading, judging and resuming, and some rows of the real tables."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foretell.accuracy.slices import data_folder
from foretell.errors import InputError
from foretell.workload.options import options
from foretell.workload.resolve import resolve

pytest.importorskip("timm")


def load() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "parity_timm.py"
    spec = importlib.util.spec_from_file_location("parity_timm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


parity = load()
Row = parity.Row


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))


def table(folder: Path, name: str, rows: list[tuple[Any, ...]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["model,infer_img_size,param_count,infer_gmacs", *(",".join(map(str, row)) for row in rows)]
    path = folder / f"benchmark-infer-{name}.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# --- against fvcore and the tables ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        "test_resnet",  # batch norm
        "test_vit",  # attention, layer norm
        "test_nfnet",  # batch norm over weights, with a scale
        "test_byobnet",
        "resnetv2_50x1_bit",  # batch norm over weights, without one; group norm
        "hrnet_w18_small",  # resampling
    ],
)
def test_counts_are_fvcores_own(model: str) -> None:
    """To the last multiply-add."""
    pytest.importorskip("fvcore")
    size = 160 if model == "test_vit" else 64
    theirs = parity.fvcore_counts(Row(model, size, 0.0, 0.0), False)
    graph = resolve(f"timm:{model}", options(batch=1, image_size=size))
    assert theirs["left_out"] == {}
    assert parity._by_group(graph) == theirs["by"]
    assert graph.macs("fvcore") == theirs["total"]


def test_rows_of_the_tables() -> None:
    """Ten small rows, drawn from all, and one measured after re-parametrisation."""
    try:
        folder = data_folder() / "timm"
    except InputError as error:
        pytest.skip(str(error))
    rows = parity.read_rows(parity.newest_tables(folder))
    if not rows:
        pytest.skip(f"no inference tables in {folder}")
    chosen = parity.sample([row for row in rows if row.gmacs < 2], 10)
    chosen += [row for row in rows if row.model == "mobileone_s0"][:1]
    outcome = parity.Outcome(tuple(parity.run(chosen)))
    assert [parity.causes(row, record) for row, record in outcome.rows] == [[]] * len(chosen)
    assert outcome.passes
    assert "re-parametrised" in {record["form"] for _, record in outcome.rows}


def test_what_fvcore_leaves_out_is_named() -> None:
    """Convolutions with padding given as a word run under an operation fvcore has no rule for."""
    pytest.importorskip("fvcore")
    model, size = "convmixer_1024_20_ks9_p14", 56
    theirs = parity.fvcore_counts(Row(model, size, 0.0, 0.0), False)
    row = Row(model, size, 24.38, theirs["total"] / 1e9)
    record = parity.measure(row)
    [cause] = parity.causes(row, record)
    assert "fvcore has no rule for aten::_convolution_mode ×20 (convolutions " in cause
    other = Row(model, size, 99.0, 2 * theirs["total"] / 1e9)
    about_parameters, about_macs = parity.causes(other, record)
    assert "the architecture is not the one measured" in about_parameters
    assert "unexplained" in about_macs


# --- reading and judging ----------------------------------------------------------------------------------------


def test_the_newest_tables_are_read(tmp_path: Path) -> None:
    table(tmp_path, "amp-nchw-pt113-cu117-a", [("old", 224, 1.0, 1.0)])
    table(tmp_path, "amp-nchw-pt210-cu121-a", [("new", 224, 1.0, 1.0), ("blank", 224, 1.0, "")])
    table(tmp_path, "amp-nhwc-pt210-cu121-b", [("new", 224, 1.0, 1.0), ("new", 96, 1.0, 0.2)])
    rows = parity.read_rows(parity.newest_tables(tmp_path))
    assert rows == [Row("new", 96, 1.0, 0.2), Row("new", 224, 1.0, 1.0)]


def test_a_malformed_table_says_where(tmp_path: Path) -> None:
    path = table(tmp_path, "amp-nchw-pt210-cu121-a", [("fine", 224, 1.0, 1.0), ("broken", "wide", 1.0, 1.0)])
    with pytest.raises(InputError, match=r"pt210-cu121-a\.csv:3"):
        parity.read_rows([path])


def test_what_counts_as_equal() -> None:
    row = Row("m", 224, 1.23, 10.0)
    assert row.same_parameters(1_234_999)
    assert not row.same_parameters(1_235_100)
    assert row.same_macs(10.1e9)
    assert not row.same_macs(10.11e9)
    assert Row("m", 224, 1.0, 0.05).same_macs(0.0549e9)  # 10 % off, but equal after rounding
    assert not Row("m", 224, 1.0, 0.05).same_macs(0.0560e9)


def test_causes_come_from_fvcore_and_plain_attention() -> None:
    row = Row("m", 224, 1.0, 1.0)
    by = {"convolutions": 0, "products": 2e9, "the rest": 0}
    half = {"convolutions": 0, "products": 1e9, "the rest": 0}
    record = {"form": "as built", "parameters": 1_000_000, "macs": 2e9, "plain": 2e9, "by": by}

    def cause(**changes: Any) -> str:
        [found] = parity.causes(row, record | changes)
        return str(found)

    assert "in fused form it multiplies more" in cause(plain=1e9, fvcore={"error": "not installed"})
    assert "unexplained (not installed)" in cause(fvcore={"error": "not installed"})
    left_out = {"total": 1e9, "by": half, "left_out": {"aten::lstm": 3}}
    assert "fvcore has no rule for aten::lstm ×3 (products 2.00 G, fvcore 1.00 G)" in cause(fvcore=left_out)
    assert "fvcore's own rules differ" in cause(fvcore=left_out | {"left_out": {}})
    assert "the network is not the one measured" in cause(fvcore={"total": 2e9, "by": by, "left_out": {}})
    assert "fvcore run here gives 5.00 G" in cause(fvcore={"total": 5e9, "by": by, "left_out": {}})


def test_a_row_with_the_same_figures_is_named() -> None:
    rows = [Row("renamed", 224, 1.0, 1.0), Row("smaller", 224, 1.0, 1.0), Row("smaller", 96, 1.0, 1.0)]
    record = {"form": "as built", "parameters": 2_000_000, "macs": 1e9}
    [cause] = parity.causes(rows[0], record, rows)
    assert cause.endswith("(the tables have the same figures for smaller)")


def test_a_sample_is_the_same_every_time() -> None:
    rows = [Row(f"m{i}", 224, 1.0, 1.0) for i in range(50)]
    drawn = parity.sample(rows, 10)
    assert len(drawn) == 10
    assert drawn == sorted(drawn, key=rows.index)
    assert drawn == [row for row in rows if row in set(parity.sample(rows[::-1], 10))]
    assert parity.sample(rows, None) == rows


def test_bars() -> None:
    def outcome(wrong_parameters: int, wrong_macs: int) -> Any:
        records = []
        for i in range(1000):
            macs = 2e9 if i < wrong_macs else 1e9
            record = {"form": "as built", "parameters": 2_000_000 if i < wrong_parameters else 1_000_000, "macs": macs}
            records.append((Row(f"m{i}", 224, 1.0, 1.0), record))
        return parity.Outcome(tuple(records))

    assert outcome(5, 10).passes
    assert not outcome(6, 10).passes
    assert not outcome(5, 11).passes
    failed = ((Row("m", 224, 1.0, 1.0), {"form": "as built", "error": "no such model"}),)
    assert not parity.Outcome(failed).passes
    assert not parity.Outcome(()).passes


# --- running ----------------------------------------------------------------------------------------------------


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(f"m{i}", 224, 1.0, 1.0) for i in range(4)]
    measured = []

    def measure(row: Any) -> dict[str, Any]:
        measured.append(row.model)
        return {"model": row.model, "form": "as built", "parameters": 1_000_000, "macs": 1e9}

    monkeypatch.setattr(parity, "measure", measure)
    first = parity.run(rows, home=tmp_path)
    assert [next(first)[1]["model"] for _ in range(3)] == ["m0", "m1", "m2"]
    first.close()
    [kept] = tmp_path.glob("parity-timm-*.jsonl")
    lines = kept.read_text(encoding="utf-8").splitlines()
    kept.write_text("\n".join([*lines[:2], lines[2][:20]]) + "\n", encoding="utf-8")  # cut short while writing
    measured.clear()
    assert [record["model"] for _, record in parity.run(rows, home=tmp_path)] == ["m0", "m1", "m2", "m3"]
    assert measured == ["m2", "m3"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timm = tmp_path / "data" / "timm"
    table(timm, "amp-nchw-pt210-cu121-a", [("test_vit", 160, 0.37, 0.04)])
    assert parity.main(["--data", str(timm.parent)]) == 0
    assert "100.00%" in capsys.readouterr().out
    table(timm, "amp-nchw-pt210-cu121-a", [("test_vit", 160, 0.41, 0.04), ("no_such_model", 160, 0.37, 0.04)])
    assert parity.main(["--data", str(timm.parent), "--limit", "5"]) == 1
    printed = capsys.readouterr().out
    assert "the architecture is not the one measured" in printed
    assert "not captured" in printed
    [kept] = (tmp_path / "cache").glob("parity-timm-*.jsonl")
    assert [json.loads(line)["model"] for line in kept.read_text(encoding="utf-8").splitlines()] == [
        "test_vit",
        "no_such_model",
        "test_vit",
    ]


def test_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["--data", str(tmp_path / "nowhere")]) == 2
    assert "FORETELL_DATA" in capsys.readouterr().out
    assert parity.main(["--data", str(tmp_path)]) == 2
    assert "no inference tables" in capsys.readouterr().out
