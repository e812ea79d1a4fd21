"""Our evaluation of boosted trees against LightGBM's own."""

import json
from pathlib import Path

import numpy as np
import pytest

from foretell.cost.fitting import Fit, slim
from foretell.cost.residual import read
from foretell.cost.trees import Forest
from foretell.errors import InputError

lightgbm = pytest.importorskip("lightgbm")


def problem(rows: int = 600) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, 4))
    x[rng.random(x.shape) < 0.1] = np.nan
    y = np.nan_to_num(x[:, 0]) ** 2 - np.nan_to_num(x[:, 1]) + 0.1 * rng.normal(size=rows)
    return x, y


def test_a_forest_predicts_as_lightgbm_does_missing_values_included() -> None:
    x, y = problem()
    booster = Fit("abcd", x, y).train(np.ones(len(y), dtype=bool), 0.5)
    forest = Forest.parse(booster.model_to_string())
    np.testing.assert_allclose(forest.predict(x), booster.predict(x), rtol=1e-12, atol=1e-12)


def test_a_tree_without_splits_is_its_one_leaf() -> None:
    x = np.zeros((50, 1))
    data = lightgbm.Dataset(x, np.full(50, 2.0), feature_name=["a"])
    booster = lightgbm.train({"verbosity": -1, "num_threads": 1}, data, num_boost_round=3)
    forest = Forest.parse(booster.model_to_string())
    np.testing.assert_allclose(forest.predict(x), booster.predict(x))


def test_a_written_residual_reads_back_and_its_interval_covers(tmp_path: Path) -> None:
    x, y = problem(2000)
    groups = np.array([f"g{i % 20}" for i in range(len(y))], dtype=object)
    fit = Fit("abcd", x, y)
    margins = fit.margins(fit.held_out(groups, folds=4))
    fit.write(tmp_path, "toy", {"seen": margins, "unseen": (0.5, 0.5)}, {"source": "a test"})
    residual = read(tmp_path, "toy")
    low, mid, high = residual.factors(x)
    assert (low <= mid).all()
    assert (mid <= high).all()
    assert 0.75 < np.mean((np.log(low) <= y) & (y <= np.log(high))) < 0.97
    wide_low, _, wide_high = residual.factors(x, seen=False)
    assert np.median(wide_high / wide_low) > np.median(high / low)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("clip", [2.0, 1.0], "clip is .*larger first"),
        ("clip", [-1e9, 1e9], "clip is"),
        ("clip", [0.0, 10**400], "clip is"),
        ("margins", [1], "margins is no object"),
        ("margins", {"seen": [0.1, 0.1]}, "margins.unseen is None"),
        ("margins", {"seen": [0.1, 0.1], "unseen": [0.1, 0.1], "more": 3}, "margins.more is 3"),
        ("provenance", 3, "provenance is no object"),
        ("features", "abcd", "features is no list"),
        ("features", [["a"]], "features is no list"),
        ("features", ["a"], "features differ"),
    ],
)
def test_a_damaged_residual_is_refused_by_name(tmp_path: Path, key: str, value: object, said: str) -> None:
    x, y = problem()
    Fit("abcd", x, y).write(tmp_path, "toy", {"seen": (0.1, 0.1), "unseen": (0.5, 0.5)}, {"source": "a test"})
    path = tmp_path / "toy.residual.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(InputError, match=rf"toy\..*{said}"):
        read(tmp_path, "toy")


def test_a_residual_without_its_forests_is_refused_by_name(tmp_path: Path) -> None:
    x, y = problem()
    Fit("abcd", x, y).write(tmp_path, "toy", {"seen": (0.1, 0.1), "unseen": (0.5, 0.5)}, {"source": "a test"})
    (tmp_path / "toy.mid.txt").unlink()
    with pytest.raises(InputError, match=r"toy\.mid\.txt: no forest"):
        read(tmp_path, "toy")


def test_a_slimmed_model_is_read_by_both_and_predicts_the_same() -> None:
    x, y = problem()
    booster = Fit("abcd", x, y).train(np.ones(len(y), dtype=bool), 0.5)
    text = slim(booster.model_to_string())
    assert len(text) < 0.6 * len(booster.model_to_string())
    again = lightgbm.Booster(model_str=text)
    np.testing.assert_allclose(again.predict(x), Forest.parse(text).predict(x), rtol=1e-9, atol=1e-9)
    # Six digits move a threshold, and with it the few rows beside it.
    assert np.mean(np.abs(again.predict(x) - booster.predict(x)) < 1e-4) > 0.99


def test_nothing_but_a_lightgbm_model_is_read() -> None:
    with pytest.raises(InputError, match="no LightGBM text model"):
        Forest.parse("hello")
