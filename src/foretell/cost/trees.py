"""`Forest`: gradient-boosted trees as LightGBM writes them to text, evaluated with NumPy alone.

Training needs LightGBM; predicting needs this page. A test holds the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

_CATEGORICAL, _DEFAULT_LEFT = 1, 2  # bits of LightGBM's `decision_type`; the next two are how missing values count
_NODES = ("split_feature", "threshold", "decision_type", "left_child", "right_child")
_ROWS = 2048  # at a time: rows × trees nodes are held at once


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees side by side: (trees, nodes) arrays. A child below zero is the leaf ``-1 - child``."""

    features: tuple[str, ...]
    feature: Ints
    threshold: Floats
    missing_left: npt.NDArray[np.bool_]
    left: Ints
    right: Ints
    leaf: Floats

    def __len__(self) -> int:
        return len(self.leaf)

    @staticmethod
    def parse(text: str, where: str = "model") -> Forest:
        """Read LightGBM's text format. Raises InputError where it is something else, or has categorical splits."""
        head, *blocks = text.split("\nTree=")
        names = next((line[14:] for line in head.splitlines() if line.startswith("feature_names=")), None)
        if names is None or not blocks:
            raise InputError("no LightGBM text model", where, "write it with Booster.save_model")
        features = tuple(names.split())
        try:
            trees = [_tree(block.split("\n\n")[0]) for block in blocks]
        except (KeyError, ValueError) as error:
            raise InputError(f"damaged LightGBM text model: {error}", where, "write it anew") from error
        if any((tree["decision_type"].astype(int) & _CATEGORICAL).any() for tree in trees):
            raise InputError("categorical splits are not read", where, "train on numeric features")
        nodes = max(len(tree["split_feature"]) for tree in trees)
        leaves = max(len(tree["leaf_value"]) for tree in trees)

        def padded(name: str, width: int, dtype: Any) -> npt.NDArray[Any]:
            result = np.zeros((len(trees), width), dtype=dtype)
            for row, tree in zip(result, trees, strict=True):
                row[: len(tree[name])] = tree[name]
            return result

        forest = Forest(
            features,
            padded("split_feature", nodes, np.int32),
            padded("threshold", nodes, np.float64),
            padded("decision_type", nodes, np.int32) & _DEFAULT_LEFT > 0,
            padded("left_child", nodes, np.int32),
            padded("right_child", nodes, np.int32),
            padded("leaf_value", leaves, np.float64),
        )
        inside = (
            (forest.feature < len(features)).all()
            and (np.maximum(forest.left, forest.right) < nodes).all()
            and (np.minimum(forest.left, forest.right) >= -leaves).all()
        )
        if not inside or not np.isfinite(forest.leaf).all():
            raise InputError("a tree points outside itself", where, "write it anew")
        return forest

    def predict(self, x: Floats) -> Floats:
        """Sum of the trees' leaves for every row of `x` (rows, features); NaN counts as missing."""
        if x.ndim != 2 or x.shape[1] != len(self.features):
            raise ValueError(f"features are {self.features}, got an array of shape {x.shape}")
        if len(x) > _ROWS:
            return np.concatenate([self.predict(x[i : i + _ROWS]) for i in range(0, len(x), _ROWS)])
        tree = np.arange(len(self))[None, :]
        row = np.arange(len(x))[:, None]
        node = np.zeros((len(x), len(self)), dtype=np.int32)
        for _ in range(self.feature.shape[1] + 1):  # no path is longer than a tree has nodes
            at = np.maximum(node, 0)
            value = x[row, self.feature[tree, at]]
            left = np.where(np.isnan(value), self.missing_left[tree, at], value <= self.threshold[tree, at])
            node = np.where(node < 0, node, np.where(left, self.left[tree, at], self.right[tree, at]))
            if (node < 0).all():
                break
        return np.asarray(self.leaf[tree, -1 - np.minimum(node, -1)].sum(axis=1))


def _tree(block: str) -> dict[str, Floats]:
    fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
    leaves = int(fields["num_leaves"])
    if leaves == 1:  # no split: both ways lead to the one leaf
        return {"leaf_value": np.array([float(fields["leaf_value"])])} | {
            name: np.array([-1.0 if name.endswith("child") else 0.0]) for name in _NODES
        }
    return {name: _numbers(fields[name], leaves - 1) for name in _NODES} | {
        "leaf_value": _numbers(fields["leaf_value"], leaves)
    }


def _numbers(text: str, count: int) -> Floats:
    """Numbers parted by spaces. Raises ValueError where there are not `count` of them."""
    numbers = np.array(text.split(), dtype=np.float64)
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers where a tree has {count}")
    return numbers
