"""Closed forms beside the simulator: equal where they say so, near where they say that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.simulate.pipeline import REGISTRY, Times, named, simulate
from foretell.simulate.pipeline.closed import spread, step_time

NAMES = tuple(REGISTRY) if named("1f1b") else ()


def both(
    name: str, forward: np.ndarray, backward: np.ndarray, vp: int, m: int, p2p: float, overlap: bool, share: float = 0.5
) -> tuple[float, float]:
    """(closed form, simulator) for times by rank."""
    times = Times.of(forward / vp, backward / vp, vp=vp, weights_s=share * backward / vp, p2p_s=p2p)
    simulated = simulate(name, times, m, overlap_p2p=overlap).step_s
    closed = step_time(
        NAMES.index(name), len(forward), vp, m, forward[None], backward[None],
        weights_s=share * backward[None], p2p_s=p2p, overlap_p2p=overlap,
    )  # fmt: skip
    return float(closed[0]), simulated


def uneven(ranks: int, low: float = 0.02) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.floats(low, 1.0), min_size=ranks, max_size=ranks).map(np.array)


@st.composite
def pipelines(draw: st.DrawFn, whole_rounds: bool = False) -> tuple[np.ndarray, np.ndarray, int, int]:
    pp = draw(st.integers(1, 7))
    vp = draw(st.integers(2, 4))
    m = pp * draw(st.integers(1, 5)) if whole_rounds else draw(st.integers(1, 3 * pp + 4))
    return draw(uneven(pp)), draw(uneven(pp)), vp, m


@given(pipelines(), st.sampled_from([0.0, 0.05, 0.7]))
@settings(max_examples=150, deadline=None)
def test_1f1b_is_exact_for_any_ranks_with_blocking_sends(
    case: tuple[np.ndarray, np.ndarray, int, int], p2p: float
) -> None:
    forward, backward, _, m = case
    closed, simulated = both("1f1b", forward, backward, 1, m, p2p, False)
    assert closed == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize(
    ("m", "forward", "backward", "step"),
    [(2, [6, 4, 8], [9, 10, 1], 48), (2, [11, 9, 2, 8, 9, 2], [2, 5, 1, 5, 6, 8], 79)],
)
def test_1f1b_with_few_micro_batches(m: int, forward: list[int], backward: list[int], step: int) -> None:
    """The longest path has all its B, or all its F, on the first ranks."""
    closed, simulated = both("1f1b", np.array(forward, float), np.array(backward, float), 1, m, 0.0, True)
    assert closed == simulated == step


@given(pipelines(), st.sampled_from([0.05, 0.7]))
@settings(max_examples=120, deadline=None)
def test_1f1b_with_flying_messages(case: tuple[np.ndarray, np.ndarray, int, int], p2p: float) -> None:
    forward, backward, _, m = case
    closed, simulated = both("1f1b", forward, backward, 1, m, p2p, True)
    assert closed == pytest.approx(simulated, rel=1e-9 if m <= 2 * len(forward) else 3e-2)


@given(pipelines(), st.sampled_from([0.0, 0.05, 0.7]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_gpipe_and_layered_are_exact(
    case: tuple[np.ndarray, np.ndarray, int, int], p2p: float, overlap: bool
) -> None:
    forward, backward, vp, m = case
    for name, chunks in (("gpipe", 1), ("layered", vp)):
        closed, simulated = both(name, forward, backward, chunks, m, p2p, overlap)
        assert closed == pytest.approx(simulated, rel=1e-9)


@given(
    st.integers(1, 8), st.integers(2, 4), st.integers(1, 5), st.floats(0.02, 1), st.floats(0.02, 1),
    st.floats(0, 0.5), st.booleans(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_interleaved_is_exact_for_equal_ranks(
    pp: int, vp: int, rounds: int, forward: float, backward: float, message: float, overlap: bool
) -> None:
    p2p = message * min(forward, backward) / vp
    closed, simulated = both(
        "interleaved", np.full(pp, forward), np.full(pp, backward), vp, pp * rounds, p2p, overlap
    )
    assert closed == pytest.approx(simulated, rel=1e-9)


@given(st.integers(1, 8), st.integers(0, 9), st.floats(0.02, 1), st.floats(0.02, 1), st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_zero_bubble_is_exact_for_equal_ranks(pp: int, more: int, f: float, b: float, w: float) -> None:
    m = pp + more
    closed, simulated = both("zero-bubble", np.full(pp, f), np.full(pp, b + w), 1, m, 0.0, True, w / (b + w))
    assert closed == pytest.approx(simulated, rel=1e-9)
    assert closed == pytest.approx(m * (f + b + w) + (pp - 1) * max(f + b - w, f, b), rel=1e-9)


@given(st.integers(1, 8), st.integers(1, 30), st.floats(0.02, 1), st.floats(0.02, 1), st.floats(0, 2))
@settings(max_examples=120, deadline=None)
def test_1f1b_with_flying_messages_is_exact_for_equal_ranks(pp: int, m: int, f: float, b: float, share: float) -> None:
    closed, simulated = both("1f1b", np.full(pp, f), np.full(pp, b), 1, m, share * min(f, b), True)
    assert closed == pytest.approx(simulated, rel=1e-9)


@given(pipelines(), st.sampled_from([0.0, 0.1]), st.booleans(), st.floats(0.1, 0.9))
@settings(max_examples=120, deadline=None)
def test_zero_bubble_is_a_lower_bound_for_uneven_ranks(
    case: tuple[np.ndarray, np.ndarray, int, int], p2p: float, overlap: bool, share: float
) -> None:
    forward, backward, _, m = case
    closed, simulated = both("zero-bubble", forward, backward, 1, m, p2p, overlap, share)
    assert closed <= simulated * (1 + 1e-9)


def _near(name: str, variation: float, message: float, overlap: bool, cases: int = 150) -> np.ndarray:
    """Closed form over simulator, less one, for random ranks that differ by up to `variation` from their mean."""
    random = np.random.default_rng(7)
    errors = []
    for _ in range(cases):
        pp, vp = int(random.integers(1, 9)), int(random.integers(2, 5)) if named(name).chunked else 1
        m = pp * int(random.integers(1, 5))
        forward = 1 + variation * random.uniform(-1, 1, pp)
        backward = 2 + 2 * variation * random.uniform(-1, 1, pp)
        closed, simulated = both(name, forward, backward, vp, m, message / vp, overlap)
        errors.append(closed / simulated - 1)
    return np.array(errors)


def test_how_near_interleaved_and_zero_bubble_are_for_uneven_ranks() -> None:
    """What their files say; ranks of a transformer differ by a few per cent, of which 50 % is an extreme."""
    assert np.abs(_near("interleaved", 0.05, 0.0, True)).max() < 1e-9
    assert np.abs(_near("interleaved", 0.05, 0.1, True)).max() < 1e-9
    assert np.abs(_near("interleaved", 0.05, 0.1, False)).max() < 0.005
    assert np.abs(_near("interleaved", 0.5, 0.1, True)).max() < 0.02
    assert np.abs(_near("interleaved", 0.5, 0.1, False)).max() < 0.02
    assert np.abs(_near("zero-bubble", 0.05, 0.1, False)).max() < 0.01
    assert np.abs(_near("zero-bubble", 0.5, 0.1, False)).max() < 0.05
    assert np.abs(_near("zero-bubble", 0.5, 0.1, False)).max() > 1e-3  # so that the above can fail


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_path_may_go_round_once_the_last_rank_is_busy(mirrored: bool) -> None:
    """The slowest rank comes first, and the last one is nearly as slow: the longest path begins on the last."""
    down, up = np.array([1.4, 1.0, 0.7, 1.4]), np.array([2.8, 1.3, 1.4, 2.3])
    closed, simulated = both("interleaved", *((up, down) if mirrored else (down, up)), 2, 12, 0.0, True)
    assert closed == pytest.approx(simulated, rel=1e-12)


def test_many_rows_at_once_are_each_as_one() -> None:
    random = np.random.default_rng(3)
    count = 300
    codes = random.integers(0, 5, count)
    pp = random.integers(1, 9, count)
    vp = np.where(np.isin(codes, [NAMES.index("interleaved"), NAMES.index("layered")]), random.integers(1, 4, count), 1)
    m = pp * random.integers(1, 6, count)
    forward, backward = random.uniform(0.5, 1.5, (2, count, 8))
    p2p, overlap = random.uniform(0, 0.05, count), random.random(count) < 0.5
    every = step_time(codes, pp, vp, m, forward, backward, p2p_s=p2p, overlap_p2p=overlap)
    for row in range(count):
        some = slice(row, row + 1)
        one = step_time(codes[row], pp[row], vp[row], m[row], forward[some], backward[some],
                        p2p_s=p2p[row], overlap_p2p=overlap[row])  # fmt: skip
        assert every[row] == pytest.approx(one[0], rel=1e-12)
    assert np.isfinite(every).all()


def test_the_search_can_afford_it(within: Any) -> None:
    """20,000 rows of 8 ranks, all schedules, well within a second."""
    codes = np.arange(20_000) % 5
    vp = np.where(np.isin(codes, [NAMES.index("interleaved"), NAMES.index("layered")]), 2, 1)
    times = np.ones((20_000, 8))
    overlap = codes % 2 == 0
    steps = within(1.0, lambda: step_time(codes, 8, vp, 64, times, 2 * times, p2p_s=0.01, overlap_p2p=overlap))
    assert np.isfinite(steps).all()


def test_1f1b_with_chunks_is_interleaved() -> None:
    assert step_time(NAMES.index("1f1b"), 4, 2, 8, 1.0, 2.0) == step_time(NAMES.index("interleaved"), 4, 2, 8, 1.0, 2.0)


def test_spread_gives_ranks_their_times() -> None:
    rows = spread([4, 1], [3.0, 5.0], 1.0, 2.0)
    np.testing.assert_array_equal(rows, [[3, 1, 1, 2], [5, 0, 0, 0]])
    with pytest.raises(IndexError):
        step_time(99, 4, 1, 8, 1.0, 2.0)
