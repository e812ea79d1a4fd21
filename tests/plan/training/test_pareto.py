from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretell.plan.training.pareto import front

_POINTS = st.lists(st.lists(st.integers(1, 5).map(float), min_size=3, max_size=3), min_size=1, max_size=25)


@given(_POINTS)
def test_the_front_by_brute_force(rows: list[list[float]]) -> None:
    points = np.array(rows)
    found = front(points)
    kept = {tuple(points[i]) for i in found}
    assert len(kept) == len(found)  # equal rows once
    for row in points:
        dominated = any((other <= row).all() and (other < row).any() for other in points)
        assert dominated == (tuple(row) not in kept)
    assert (np.diff(points[found, 0]) >= 0).all()


@given(_POINTS)
def test_with_a_step_no_two_are_closer_and_none_is_left_far_behind(rows: list[list[float]]) -> None:
    points = np.array(rows) + np.random.default_rng(0).random((len(rows), 3)) / 50
    found = points[front(points, 0.1)]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert (np.abs(np.log(one / other)) > 0).any()
            assert not (np.abs(np.log(one / other)) < 1e-12).all()
    for row in points:
        assert any((one <= 1.1 * row).all() for one in found)


def test_an_axis_that_is_not_known_is_left_out() -> None:
    points = np.array([[1.0, np.nan, 3.0], [2.0, 1.0, 2.0], [3.0, 1.0, 3.0]])
    assert front(points).tolist() == [0, 1]
    assert front(np.full((3, 2), np.nan)).tolist() == [0]
    assert front(np.zeros((0, 2))).tolist() == []
