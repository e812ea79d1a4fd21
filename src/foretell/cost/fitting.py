"""Fit a `Residual`: boosted trees on log(measured / physical), held out by whole groups. Needs LightGBM."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost.residual import QUANTILES, SCHEMA
from foretell.errors import InputError

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.object_]

# Small, strongly regularised trees: a residual corrects physics, it does not replace it.
PARAMETERS: Mapping[str, Any] = {
    "num_leaves": 15,
    "learning_rate": 0.06,
    "min_data_in_leaf": 20,
    "lambda_l2": 5.0,
    "feature_fraction": 0.7,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "max_bin": 127,
}
ROUNDS = 200
# The ends of an interval are corrected by margins afterwards, and need less than its middle.
OUTER: Mapping[str, Any] = {"num_leaves": 15}
OUTER_ROUNDS = 150


class Fit:
    """A problem: features `x` (rows, features), targets `y` = log(measured / physical), and how trees are grown.

    LightGBM has no monotone quantile objective, so directions that physics knows are kept by what bounds a residual
    (its clip, the floor under a corrected time), not by its trees.
    """

    def __init__(
        self,
        features: Sequence[str],
        x: Floats,
        y: Floats,
        *,
        weights: Floats | None = None,
        rounds: int = ROUNDS,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if x.shape != (len(y), len(features)):
            raise ValueError(f"x has shape {x.shape}, y {y.shape}, for {len(features)} features")
        if not np.isfinite(y).all():
            raise ValueError("targets must be finite")
        self.features, self.x, self.y, self.weights, self.rounds = tuple(features), x, y, weights, rounds
        # One thread: the tables are small, and OpenMP's spinning threads starve one another on a busy machine.
        fixed = {"verbosity": -1, "seed": 0, "deterministic": True, "num_threads": 1}
        self.parameters = {**PARAMETERS, **(parameters or {}), **fixed}

    def train(self, rows: npt.NDArray[np.bool_], quantile: float) -> Any:
        """A LightGBM booster of one quantile on some rows."""
        try:
            import lightgbm
        except ImportError as error:
            raise InputError("LightGBM is not installed", repair="pip install 'foretell[calibrate]'") from error
        data = lightgbm.Dataset(
            self.x[rows],
            self.y[rows],
            weight=None if self.weights is None else self.weights[rows],
            feature_name=list(self.features),
        )
        settings = {**self.parameters, "objective": "quantile", "alpha": quantile}
        if quantile == 0.5:
            return lightgbm.train(settings, data, num_boost_round=self.rounds)
        return lightgbm.train({**settings, **OUTER}, data, num_boost_round=min(self.rounds, OUTER_ROUNDS))

    def held_out(self, groups: Labels, folds: int | None = None) -> dict[str, Floats]:
        """Each row's quantiles by trees that saw no row of its group: one group a fold, or `folds` folds of groups."""
        fold = np.array([zlib.crc32(str(g).encode()) % folds for g in groups]) if folds else groups
        result = {name: np.zeros(len(self.y)) for name, _ in QUANTILES}
        for one in np.unique(fold):
            out = fold == one
            if out.all():
                raise InputError("all rows are of one group, so none can be held out", repair="give more groups")
            for name, quantile in QUANTILES:
                result[name][out] = self.train(~out, quantile).predict(self.x[out])
        return result

    def margins(self, held_out: Mapping[str, Floats]) -> tuple[float, float]:
        """Conformal margins: what widens held-out quantiles to hold all but a tenth on either side."""
        down = np.quantile(held_out["low"] - self.y, 0.9)
        up = np.quantile(self.y - held_out["high"], 0.9)
        return float(down), float(up)

    def write(
        self,
        folder: Path,
        name: str,
        margins: Mapping[str, tuple[float, float]],
        provenance: Mapping[str, Any],
    ) -> None:
        """Train on all rows and write ``NAME.residual.json`` with its three text models."""
        everything = np.ones(len(self.y), dtype=np.bool_)
        for quantile_name, quantile in QUANTILES:
            text = slim(self.train(everything, quantile).model_to_string())
            (folder / f"{name}.{quantile_name}.txt").write_text(text, encoding="utf-8")
        clip = [float(f"{edge:.4g}") for edge in np.quantile(self.y, (0.001, 0.999))]
        data = {
            "schema": SCHEMA,
            "features": list(self.features),
            "clip": clip,
            "margins": {key: [float(f"{m:.4g}") for m in pair] for key, pair in margins.items()},
            "provenance": dict(provenance),
        }
        (folder / f"{name}.residual.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")


# What a tree is evaluated by, and what LightGBM wants to see to read it.
_NEEDED = (
    *("tree", "version", "num_class", "num_tree_per_iteration", "label_index", "max_feature_idx", "objective"),
    *("feature_names", "feature_infos", "Tree", "num_leaves", "num_cat", "split_feature", "threshold"),
    *("decision_type", "left_child", "right_child", "leaf_value", "is_linear", "shrinkage"),
)


def slim(text: str) -> str:
    """A LightGBM text model without what only training needs: gains, counts, weights, and the dump of parameters.

    Thresholds and leaves are kept to six digits. LightGBM reads the result as well.
    """
    lines = []
    for line in text.split("\nend of trees")[0].splitlines():
        key, _, value = line.partition("=")
        if key in ("threshold", "leaf_value"):
            lines.append(f"{key}=" + " ".join(f"{float(number):.6g}" for number in value.split()))
        elif not key or key in _NEEDED:
            lines.append(line)
    return "\n".join(lines) + "\n\nend of trees\n"
