"""One contract for every schedule: whole, ordered, free of deadlock, and holding what its closed form says."""

from __future__ import annotations

import itertools

import networkx
import numpy as np
import pytest

from foretell.errors import InputError, UnknownNameError
from foretell.simulate.pipeline import REGISTRY, Order, Schedule, Task, in_flight, named
from foretell.simulate.pipeline.schedule import Registry
from foretell.simulate.training.plan import SCHEDULES

NAMES = tuple(REGISTRY) if named("1f1b") else ()
SHAPES = [(1, 1, 1), (1, 1, 3), (2, 1, 1), (2, 1, 5), (4, 1, 3), (4, 1, 8), (3, 1, 10), (8, 1, 8)]
CHUNKED = [(1, 2, 3), (2, 2, 2), (2, 2, 8), (4, 2, 4), (4, 3, 12), (3, 5, 6)]


def cases() -> list[tuple[str, int, int, int]]:
    return [(name, *shape) for name in NAMES for shape in SHAPES + (CHUNKED if named(name).chunked else [])]


def dependencies(schedule: Schedule, pp: int, vp: int, micro_batches: int) -> networkx.DiGraph:
    """What must precede what, written down independently of the simulator: nodes (rank, task)."""
    graph = networkx.DiGraph()
    for rank, tasks in enumerate(schedule.order(pp, vp, micro_batches)):
        networkx.add_path(graph, [(rank, task) for task in tasks])
    stages = [schedule.place(pp, vp, stage) for stage in range(pp * vp)]
    for k in range(micro_batches):
        for (rank, chunk), (after, later) in itertools.pairwise(stages):
            graph.add_edge((rank, Task("F", chunk, k)), (after, Task("F", later, k)))
            graph.add_edge((after, Task("B", later, k)), (rank, Task("B", chunk, k)))
        for rank, chunk in stages:
            graph.add_edge((rank, Task("F", chunk, k)), (rank, Task("B", chunk, k)))
            if schedule.splits:
                graph.add_edge((rank, Task("B", chunk, k)), (rank, Task("W", chunk, k)))
    return graph


def held(order: Order, vp: int, last: str) -> np.ndarray:
    """Counted along the order: what each rank holds by chunk when it first holds most."""
    result = np.zeros((len(order), vp), dtype=int)
    for rank, tasks in enumerate(order):
        now = np.zeros(vp, dtype=int)
        for task in tasks:
            now[task.chunk] += {"F": 1, last: -1}.get(task.kind, 0)
            if now.sum() > result[rank].sum():
                result[rank] = now
    return result


@pytest.mark.parametrize(("name", "pp", "vp", "micro_batches"), cases())
def test_contract(name: str, pp: int, vp: int, micro_batches: int) -> None:
    schedule = named(name)
    schedule.check(pp, vp, micro_batches)
    order = schedule.order(pp, vp, micro_batches)
    wanted = {Task(kind, c, k) for kind in schedule.kinds for c in range(vp) for k in range(micro_batches)}
    assert len(order) == pp
    for tasks in order:
        assert len(tasks) == len(wanted)
        assert set(tasks) == wanted
    assert sorted(schedule.place(pp, vp, s) for s in range(pp * vp)) == [(r, c) for r in range(pp) for c in range(vp)]
    graph = dependencies(schedule, pp, vp, micro_batches)
    assert len(graph) == pp * len(wanted)
    assert networkx.is_directed_acyclic_graph(graph)
    counts = in_flight(name, pp, vp, micro_batches)
    assert counts.shape == (pp, vp)
    np.testing.assert_array_equal(counts, held(order, vp, schedule.kinds[-1]))


def test_plans_know_the_same_schedules() -> None:
    assert NAMES[: len(SCHEDULES)] == SCHEDULES


def test_1f1b_by_hand() -> None:
    rows = [" ".join(f"{t.kind}{t.micro_batch}" for t in tasks) for tasks in named("1f1b").order(3, 1, 4)]
    assert rows == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_interleaved_is_figure_4_of_megatron() -> None:
    """Narayanan et al. 2021, Figure 4, below: 4 devices, 8 micro-batches (numbered from 1), 2 chunks each.

    The forwards of device 1 before its first backward, and the first tasks of device 4.
    """
    order = named("interleaved").order(4, 2, 8)
    first = [(t.kind, t.chunk, t.micro_batch + 1) for t in order[0]]
    assert first[:11] == [
        *(("F", 0, k) for k in (1, 2, 3, 4)),
        *(("F", 1, k) for k in (1, 2, 3, 4)),
        *(("F", 0, k) for k in (5, 6, 7)),
    ]
    assert first[11] == ("B", 1, 1)
    last = [(t.kind, t.chunk, t.micro_batch + 1) for t in order[3]]
    assert last[:8] == [*(("F", 0, k) for k in (1, 2, 3, 4)), ("F", 1, 1), ("B", 1, 1), ("F", 1, 2), ("B", 1, 2)]


def test_zero_bubble_keeps_every_rank_at_the_memory_of_the_first() -> None:
    np.testing.assert_array_equal(in_flight("zero-bubble", 4, 1, 8), 4)
    assert in_flight("1f1b", 4, 1, 8).max() == 4


def test_1f1b_with_chunks_is_interleaved() -> None:
    assert named("1f1b", vp=2) is named("interleaved")
    np.testing.assert_array_equal(in_flight("1f1b", 4, 2, 8), in_flight("interleaved", 4, 2, 8))


@pytest.mark.parametrize(
    ("name", "pp", "vp", "micro_batches", "said"),
    [
        ("1f1b", 0, 1, 4, "pp is 0"),
        ("gpipe", 4, 1, 0, "micro-batches is 0"),
        ("gpipe", 4, 2, 4, "vp 1"),
        ("interleaved", 4, 2, 6, "take 4 or 8 micro-batches"),
        ("interleaved", 4, 2, 3, "take 4 micro-batches"),
        ("layered", 1000, 100, 1000, "fewer micro-batches"),
    ],
)
def test_what_cannot_be_had_is_refused(name: str, pp: int, vp: int, micro_batches: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        in_flight(name, pp, vp, micro_batches)


def test_the_registry_refuses_duplicates_and_names_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="interleaved"):
        named("interleave")
    registry = Registry()
    registry.register(named("gpipe"))
    with pytest.raises(ValueError, match="exists already"):
        registry.register(named("gpipe"))
    with pytest.raises(TypeError, match="no Schedule"):
        registry.register("gpipe")  # type: ignore[arg-type]
