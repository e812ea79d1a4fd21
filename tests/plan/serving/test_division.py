"""Who serves which sizes, in few rows and columns: that nothing is lost, and that plain rules are short."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.plan.serving.division import Division, division
from foretell.plan.serving.load import INPUT_EDGES, OUTPUT_EDGES, Load


def read(found: Division, tokens_in: float, tokens_out: float) -> float:
    """The share of requests of a size, as one would look it up."""
    row = next(i for i, end in enumerate(found.inputs) if tokens_in <= end)
    column = next(j for j, end in enumerate(found.outputs) if tokens_out <= end)
    return float(found.shares[row, column])


@pytest.mark.parametrize("seed", range(20))
def test_each_size_is_found_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells = [(i, o) for i in (*INPUT_EDGES, 100_000) for o in (*OUTPUT_EDGES, 10_000) if rng.random() < 0.5]
    inputs, outputs = np.array(cells, dtype=float).T
    shares = rng.integers(0, 3, len(cells)) / 2  # few values, so that neighbours are often alike
    found = division(Load.of(inputs, outputs), shares)
    assert found.shares.shape == (len(found.inputs), len(found.outputs))
    assert [read(found, i, o) for i, o in cells] == shares.tolist()


def test_plain_rules_are_short() -> None:
    inputs, outputs = (axis.ravel() for axis in np.meshgrid([50, 200, 600, 3000, 9000], [20, 100, 700]))
    load = Load.of(inputs, outputs)
    same = division(load, np.full(15, 0.25))
    assert (same.inputs, same.outputs, same.shares.tolist()) == ((np.inf,), (np.inf,), [[0.25]])
    short = division(load, np.where(inputs <= 600, 1.0, 0.0))
    # 600 tokens are in the sizes up to 1,024; nobody asks for 1,025 to 2,048, which go with them.
    assert (short.inputs, short.outputs, short.shares.tolist()) == ((2048, np.inf), (np.inf,), [[1.0], [0.0]])
    brief = division(load, np.where(outputs <= 100, 1.0, 0.0))
    assert (brief.inputs, brief.outputs, brief.shares.tolist()) == ((np.inf,), (512, np.inf), [[1.0, 0.0]])
