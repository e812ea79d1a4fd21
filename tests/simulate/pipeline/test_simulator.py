"""The simulator beside independent oracles: a longest path by networkx, formulas of the papers, figures by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InputError, UnknownNameError
from foretell.simulate.pipeline import REGISTRY, Task, Times, in_flight, named, simulate
from foretell.simulate.pipeline.simulator import peak

NAMES = tuple(REGISTRY) if named("1f1b") else ()


def longest_path(name: str, times: Times, m: int, overlap: bool, scale: np.ndarray) -> float:
    """The step as the longest path through tasks and messages, each a node whose weight is on the edges out of it."""
    schedule = named(name, times.vp)
    graph = networkx.DiGraph()
    stages = [schedule.place(times.pp, times.vp, stage) for stage in range(times.pp * times.vp)]

    def seconds(rank: int, task: Task) -> float:
        return float(times.of_kind(task.kind, schedule.splits)[rank, task.chunk] * scale[task.micro_batch])

    def served(rank: int, task: Task) -> tuple[int, Task] | None:
        stage = stages.index((rank, task.chunk))
        after = stage + 1 if task.kind == "F" else stage - 1
        if task.kind == "W" or not 0 <= after < len(stages):
            return None
        to, chunk = stages[after]
        return to, Task(task.kind, chunk, task.micro_batch)

    for rank, tasks in enumerate(schedule.order(times.pp, times.vp, m)):
        lanes: dict[str, tuple[object, float]] = {}
        for before, after in itertools.pairwise(tasks):
            to = served(rank, before)
            message = 0.0 if to is None else float(times.p2p_s[rank, to[0]]) * (to[0] != rank)
            graph.add_edge((rank, before), (rank, after), weight=seconds(rank, before) + (0 if overlap else message))
        for task in tasks:
            graph.add_edge((rank, task), "end", weight=seconds(rank, task))
            if (to := served(rank, task)) is not None:
                message = float(times.p2p_s[rank, to[0]]) * (to[0] != rank)
                sent = ("sent", rank, task)
                graph.add_edge((rank, task), sent, weight=seconds(rank, task))
                graph.add_edge(sent, to, weight=message)
                if overlap and message:
                    if task.kind in lanes:
                        graph.add_edge(lanes[task.kind][0], sent, weight=lanes[task.kind][1])
                    lanes[task.kind] = (sent, message)
    return float(networkx.dag_longest_path_length(graph))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Times, int, bool, np.ndarray]:
    name = draw(st.sampled_from(NAMES))
    pp = draw(st.integers(1, 4))
    vp = draw(st.integers(1, 3)) if named(name).chunked else 1
    m = pp * draw(st.integers(1, 3)) if named(name, vp).whole_rounds else draw(st.integers(1, 7))

    def table(low: float, *shape: int) -> np.ndarray:
        count = math.prod(shape)
        return np.array(draw(st.lists(st.floats(low, 1), min_size=count, max_size=count))).reshape(shape)

    backward = table(0.01, pp, vp)
    times = Times.of(table(0.01, pp, vp), backward, weights_s=backward * table(0, pp, vp), p2p_s=table(0, pp, pp))
    return name, times, m, draw(st.booleans()), table(0.1, m)


@given(cases())
@settings(max_examples=120, deadline=None)
def test_steps_are_longest_paths(case: tuple[str, Times, int, bool, np.ndarray]) -> None:
    name, times, m, overlap, scale = case
    found = simulate(name, times, m, overlap_p2p=overlap, scale=scale)
    assert found.step_s == pytest.approx(longest_path(name, times, m, overlap, scale), rel=1e-9)
    assert found.p2p_exposed_s >= -1e-12
    np.testing.assert_allclose(found.busy_s + found.send_s + found.bubble_s, found.step_s)
    assert found.bubble_s.min() >= -1e-9
    np.testing.assert_array_equal(found.peak_in_flight, in_flight(name, times.pp, times.vp, m))


@given(cases(), st.floats(0, 0.99))
@settings(max_examples=100, deadline=None)
def test_faster_messages_never_hurt(case: tuple[str, Times, int, bool, np.ndarray], share: float) -> None:
    name, times, m, overlap, scale = case
    fast = Times.of(times.forward_s, times.backward_s, weights_s=times.weights_s, p2p_s=share * times.p2p_s)
    slow_s = simulate(name, times, m, overlap_p2p=overlap, scale=scale).step_s
    assert simulate(name, fast, m, overlap_p2p=overlap, scale=scale).step_s <= slow_s * (1 + 1e-12)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_events_do_not_overlap_in_a_lane_and_counters_peak_where_they_should(
    case: tuple[str, Times, int, bool, np.ndarray],
) -> None:
    name, times, m, overlap, scale = case
    found = simulate(name, times, m, overlap_p2p=overlap, scale=scale)
    timeline = found.timeline()
    assert timeline.end_s == pytest.approx(found.step_s)
    for lane in range(len(timeline.lanes)):
        mine = np.flatnonzero(timeline.lane == lane)
        mine = mine[np.lexsort((timeline.duration_s[mine], timeline.start_s[mine]))]
        ends = timeline.start_s[mine] + timeline.duration_s[mine]
        assert (timeline.start_s[mine][1:] >= ends[:-1] - 1e-9).all(), timeline.lanes[lane]
    for rank, counter in enumerate(timeline.counters):
        assert counter.value.max() == in_flight(name, times.pp, times.vp, m)[rank].sum()
        assert counter.value[-1] == 0
        assert (np.diff(counter.time_s) >= -1e-12).all()


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [8, 16, 40])
def test_bubbles_of_the_papers(pp: int, m: int) -> None:
    """Megatron-LM (SC 2021), section 2.2: of 1F1B (p - 1) / m of the ideal time, interleaved 1 / v of it.

    Zero Bubble (ICLR 2024), Table 2: 1F1B (p - 1)(F + B + W), ZB-H1 (p - 1)(F + B - W).
    """
    f, b, v = 1.0, 2.0, 4
    ideal = m * (f + b)
    for name in ("gpipe", "1f1b"):
        found = simulate(name, Times.of(f, b, pp=pp), m)
        assert found.step_s == pytest.approx(ideal + (pp - 1) * (f + b))
        assert found.bubble == pytest.approx((pp - 1) / (m + pp - 1))
        np.testing.assert_allclose(found.bubble_s, (pp - 1) * (f + b))
    for name in ("interleaved", "layered"):
        found = simulate(name, Times.of(f / v, b / v, pp=pp, vp=v), m)
        assert found.step_s / ideal - 1 == pytest.approx((pp - 1) / (v * m))
    split = simulate("zero-bubble", Times.of(f, b, pp=pp, weights_s=0.9), m)
    assert split.step_s - ideal == pytest.approx((pp - 1) * (f + (b - 0.9) - 0.9))
    assert split.bubble <= simulate("1f1b", Times.of(f, b, pp=pp), m).bubble


def test_1f1b_of_two_ranks_by_hand() -> None:
    """F 1 s, B 2 s, a message 0.5 s: rank 0 F0 0–1, rank 1 F0 1.5–2.5 B0 2.5–4.5, rank 0 B0 5–7 and so on."""
    found = simulate("1f1b", Times.of(1.0, 2.0, pp=2, p2p_s=0.5), 2)
    starts = found.start_s[found.kind < 3]
    assert starts.tolist() == [0.0, 1.0, 5.0, 8.0, 1.5, 2.5, 4.5, 5.5]
    assert found.step_s == 10.0  # B1 on rank 1 ends at 7.5 and is there at 8
    assert found.p2p_exposed_s == 1.0  # 9 s without
    blocking = simulate("1f1b", Times.of(1.0, 2.0, pp=2, p2p_s=0.5), 2, overlap_p2p=False)
    assert blocking.send_s.tolist() == [1.0, 1.0]
    assert blocking.start_s[blocking.kind < 3].tolist() == [0.0, 1.5, 5.0, 8.5, 1.5, 2.5, 5.0, 6.0]
    assert blocking.step_s == 10.5


def test_what_is_held_by_hand() -> None:
    """Held from the beginning of F to the end of B; of two peaks alike the first counts, by weight if one is given."""
    counters = simulate("1f1b", Times.of(1.0, 2.0, pp=2), 2).timeline().counters
    assert counters[0].time_s.tolist() == [0.0, 1.0, 6.0, 9.0]  # F0, F1, end of B0 and of B1
    assert counters[0].value.tolist() == [1.0, 2.0, 1.0, 0.0]
    assert counters[1].time_s.tolist() == [1.0, 4.0, 4.0, 7.0]
    turns = (tuple(Task(kind, chunk, 0) for chunk in (0, 1) for kind in "FB"),)
    assert peak(turns, 2, "B").tolist() == [[1, 0]]
    assert peak(turns, 2, "B", [[1.0, 2.0]]).tolist() == [[0, 1]]


def test_no_pipeline_sends_nothing() -> None:
    for name in NAMES:
        found = simulate(name, Times.of(1.0, 2.0, pp=1, p2p_s=9.0), 4)
        assert found.step_s == 12.0
        assert found.bubble == found.p2p_exposed_s == 0.0
        assert found.timeline().lanes == ("rank 0",)


def test_data_parallel_exchange_by_hand() -> None:
    """Two chunks on one rank, 2 micro-batches: layer by layer the first reduction hides behind the other backward."""
    times = Times.of(1.0, 1.0, pp=1, vp=2, gather_s=0.5, reduce_s=1.5)
    layered = simulate("layered", times, 2)
    # Gathers 0–0.5, 0.5–1.0; F 0.5–4.5; B chunk 1 4.5–6.5, chunk 0 6.5–8.5; reductions 6.5–8 and 8.5–10.
    assert layered.step_s == 10.0
    assert layered.dp_exposed_s == 2.0
    apart = simulate("layered", times, 2, overlap_dp=False)
    assert apart.step_s == 8.0 + 2 * 0.5 + 2 * 1.5
    names = {"gather c0", "gather c1", "reduce c0", "reduce c1"}
    assert names <= set(layered.timeline().names)
    both = simulate("1f1b", Times.of(1.0, 1.0, pp=2, gather_s=0.5, reduce_s=[0.0, 3.0]), 2)
    # Rank 1 ends its last backward at 0.5 + 5, its reduction 3 s later; rank 0 its backward at 6.5.
    assert both.step_s == 8.5


def test_exchange_in_pieces_by_hand() -> None:
    """One rank, one micro-batch, F 4 s, B 8 s, four layers."""
    def step(**exchange: float) -> float:
        return simulate("1f1b", Times.of(4.0, 8.0, pp=1, pieces=4, **exchange), 1).step_s

    # Gradients are complete at 6, 8, 10 and 12; each piece of 1 s is sent at once: the last is left.
    assert step(reduce_s=4.0) == 13.0
    # Pieces of 4 s wait for each other from 6 on.
    assert step(reduce_s=16.0) == 22.0
    # Pieces of 0.5 s come before they are needed, but for the first; of 2 s one by one, the last layer after all.
    assert step(gather_s=2.0) == 12.5
    assert step(gather_s=8.0) == 8.0 + 1.0 + 8.0
    found = simulate("1f1b", Times.of(4.0, 8.0, pp=1, pieces=4, gather_s=8.0), 1)
    assert found.busy_s.tolist() == [12.0]
    assert found.bubble_s.tolist() == [5.0]
    with pytest.raises(InputError, match="less than one piece"):
        Times.of(4.0, 8.0, pieces=0)


def test_uneven_micro_batches() -> None:
    found = simulate("gpipe", Times.of(1.0, 1.0, pp=1), 3, scale=[1.0, 2.0, 0.5])
    assert found.step_s == 7.0


def test_it_is_fast_and_repeatable(within: Any) -> None:
    times = Times.of(1e-3, 2e-3, pp=16, p2p_s=1e-4)
    passes = 2 * 16 * 2048
    first = within(passes / 1e5, lambda: simulate("1f1b", times, 2048).step_s)
    assert simulate("1f1b", times, 2048).step_s == first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"forward_s": -1.0}, "forward_s holds a time that is negative"),
        ({"backward_s": np.inf}, "not finite"),
        ({"weights_s": 3.0}, "weights_s is a part of backward_s"),
        ({"p2p_s": [1.0, 2.0]}, "p2p_s has shape"),
    ],
)
def test_wrong_times_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Times.of(**({"forward_s": 1.0, "backward_s": 2.0, "pp": 4} | change))  # type: ignore[arg-type]


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="gpipe"):
        simulate("gpip", Times.of(1.0, 2.0, pp=2), 2)
    with pytest.raises(InputError, match="multiple"):
        simulate("interleaved", Times.of(1.0, 2.0, pp=2, vp=2), 3)
    with pytest.raises(InputError, match="scale"):
        simulate("1f1b", Times.of(1.0, 2.0, pp=2), 3, scale=[1.0, 1.0])
