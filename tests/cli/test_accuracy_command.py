import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import foretell
from foretell.accuracy import Report, TableResult, slices, sources
from foretell.report.accuracy import accuracy_view

Run = Callable[..., Any]

NAME = "timm-train-3090-amp-nhwc-pt112"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with one table of one row: resnet18, said to take 1 s a step."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    (file,) = slices()[NAME].files
    path = tmp_path / "data" / file
    path.parent.mkdir(parents=True)
    path.write_text("model,train_step_time,train_batch_size,train_img_size,param_count\nresnet18,1000,32,224,11.69\n")
    return tmp_path / "data"


def test_a_table_is_predicted_and_scored(run: Run, data: Path) -> None:
    result = run("accuracy", "--slice", NAME, "--data", data, "--json")
    assert result.exit_code == 0, result.output
    (scored,) = json.loads(result.stdout)["results"]
    predicted = foretell.predict(
        "timm:resnet18", on="rtx-3090", batch=32, image_size=224, train=True, precision="amp", layout="nhwc"
    )
    assert scored["score"]["n"] == 1
    assert scored["score"]["median"] == pytest.approx(1.0 - predicted.time_s, rel=1e-6)  # |predicted / 1 s - 1|
    shown = run("accuracy", "--slice", NAME, "--data", data)
    assert shown.exit_code == 0, shown.output
    assert f"\n{NAME}\n" in shown.stdout
    assert f"{scored['score']['median']:.1%}" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_an_interruption_leaves_a_partial_report(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    from importlib import import_module

    monkeypatch.setattr(import_module("foretell.accuracy.runner"), "predict", interrupt)
    result = run("accuracy", "--slice", NAME, "--data", data)
    assert result.exit_code == 130
    assert f"{NAME} (stopped)" in result.stdout
    assert "Interrupted" in result.stdout


def test_each_slice_says_a_line_where_there_is_no_terminal(run: Run, data: Path) -> None:
    result = run("accuracy", "--slice", NAME, "--data", data, "--json")
    assert result.stderr == f"{NAME}: 1\n"


def test_the_slices_that_are_there_can_be_listed(run: Run, data: Path) -> None:
    listed = run("accuracy", "--slice", "list", "--data", data)
    assert (listed.exit_code, listed.stdout) == (0, f"{NAME}\n")
    absent = run("accuracy", "--slice", "timm-train-3090-amp-nchw-pt11", "--data", data)  # nearest is not there
    assert "timm-train-3090-amp-nchw-pt112" not in absent.stderr
    assert f"did you mean '{NAME}'?; --slice list names all that the data folder has" in absent.stderr
    far = run("accuracy", "--slice", "zzz", "--data", data)
    assert "unknown slice or source 'zzz'; --slice list names all" in far.stderr


def test_without_data_the_page_that_lists_the_files_is_named(run: Run, tmp_path: Path) -> None:
    result = run("accuracy", "--data", tmp_path / "none")
    assert "docs/accuracy.md lists the folders and files" in result.stderr
    page = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for source in {entry.folder for entry in sources().values()} | {Path(f).parts[0] for f in slices()[NAME].files}:
        assert f"| `{source}/` |" in page


def test_reasons_are_cut_between_words(run: Run, data: Path) -> None:
    reason = " ".join(f"word{n}" for n in range(90))
    report = Report((TableResult("a", "t4", "eager", 1, None, {}, {reason: 1}),))
    out = io.StringIO()
    Console(file=out, width=400).print(accuracy_view(report))
    (shown,) = (line for line in out.getvalue().splitlines() if "word0" in line)
    assert shown.rstrip().endswith(" …")
    assert shown.split()[-2] in reason.split()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--slice", "timm-trian-3090-amp-nhwc-pt112"), f"'{NAME}'"),
        (("--data", "no/such/folder"), "no/such/folder: no such folder of measurements"),
        (("--model", "rooflin"), "'roofline'"),
        (("--limit", "0"), "limit is 0"),
    ],
)
def test_wrong_input(run: Run, data: Path, arguments: tuple[str, ...], says: str) -> None:
    result = run("accuracy", *arguments, *(() if "--data" in arguments else ("--data", data)))
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
