import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.accuracy import slices

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
