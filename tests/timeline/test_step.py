"""The timeline of a predicted step says what the estimate says, and its trace can be opened."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import foretell
from foretell.cost import Estimate, estimate, lower
from foretell.graph import Graph
from foretell.hardware import device
from foretell.timeline import Timeline, step_timeline, write_chrome
from foretell.timeline.step import DEVICE_LANE, HOST_LANE, WAIT

CASES = {
    "decode, host bound": ("llm:llama-3.1-8b", "h100-sxm", "eager", {"phase": "decode", "context": 512}),
    "training": ("llm:gpt2", "t4", "eager", {"train": True, "seq_len": 256, "batch": 4}),
    "compiled": ("llm:gpt2", "a100-sxm4-80gb", "compiled", {"train": True, "seq_len": 256}),
    "no host is modelled": ("llm:gpt2", "epyc-7742", "eager", {"seq_len": 64}),
}
Case = tuple[Graph, Estimate, Timeline]


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    workload, on, runtime, settings = CASES[request.param]
    graph = foretell.capture(workload, **settings)
    program = lower(graph, runtime)
    predicted = estimate(graph, device(on), runtime=runtime, program=program)
    return graph, predicted, step_timeline(graph, predicted, program)


def lane(timeline: Timeline, name: str) -> np.ndarray:
    return np.flatnonzero(timeline.lane == timeline.lanes.index(name))


def test_the_device_lane_fills_the_estimate(case: Case) -> None:
    _, predicted, timeline = case
    assert timeline.busy_s(DEVICE_LANE) == pytest.approx(predicted.time_s, rel=1e-12)
    rows = lane(timeline, DEVICE_LANE)
    order = rows[np.argsort(timeline.start_s[rows], kind="stable")]
    ends = timeline.start_s[order] + timeline.duration_s[order]
    assert np.allclose(timeline.start_s[order][1:], ends[:-1], rtol=0, atol=1e-12)  # nothing overlaps, nothing is left
    assert timeline.start_s[order][0] == 0.0
    waits = predicted.time_s - timeline.busy_s(DEVICE_LANE, without=(WAIT,))
    assert waits == pytest.approx(0.0 if predicted.ops.gap_s is None else predicted.ops.gap_s.sum(), abs=1e-12)


def test_the_host_lane_is_what_the_host_spends(case: Case) -> None:
    _, predicted, timeline = case
    assert timeline.busy_s(HOST_LANE) == pytest.approx(predicted.host_s, rel=1e-12)


def test_no_op_runs_before_the_host_has_issued_it(case: Case) -> None:
    graph, _, timeline = case
    issued = {}
    for row in lane(timeline, HOST_LANE):
        if not math.isnan(op := timeline.args["op"][row]):
            # the first of an op's equal runs is issued long before the last
            runs = graph.ops[int(op)].repeat
            issued[int(op)] = timeline.start_s[row] + timeline.duration_s[row] / runs
    for row in lane(timeline, DEVICE_LANE):
        if not math.isnan(op := timeline.args["op"][row]) and int(op) in issued:
            assert timeline.start_s[row] >= issued[int(op)] - 1e-9


def test_events_carry_the_ops(case: Case) -> None:
    graph, _, timeline = case
    rows = [row for row in lane(timeline, DEVICE_LANE) if timeline.args["op"][row] >= 0]
    assert sum(timeline.args["flops"][row] for row in rows) == graph.flops()
    for row in rows:
        op = graph.ops[int(timeline.args["op"][row])]
        assert timeline.args["module"][row] == op.module
        assert timeline.args["runs"][row] == op.repeat
        assert timeline.kinds[timeline.kind[row]] == op.kind


def test_the_memory_track_peaks_where_the_estimate_does(case: Case) -> None:
    _, predicted, timeline = case
    (memory,) = timeline.counters
    assert memory.value.max() == predicted.memory.allocated_bytes
    assert memory.unit == "bytes"


def test_the_written_trace(case: Case, tmp_path: Path) -> None:
    graph, predicted, timeline = case
    path = tmp_path / "trace.json"
    write_chrome(timeline, path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(names.values()) == sorted([DEVICE_LANE, HOST_LANE])
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(timeline)
    on_device = [e for e in complete if names[e["tid"]] == DEVICE_LANE]
    assert math.fsum(e["dur"] for e in on_device) == pytest.approx(1e6 * predicted.time_s, rel=1e-9)  # microseconds
    named = next(e for e in on_device if e["cat"] == "matmul")
    assert "→" in named["args"]["shapes"]
    assert named["args"]["limited by"] in ("compute", "memory", "launch")
    assert "module" not in next(e for e in complete if not e["args"].get("module"))["args"]
    counters = [e for e in events if e["ph"] == "C"]
    assert max(e["args"]["bytes"] for e in counters) == predicted.memory.allocated_bytes
    assert trace["otherData"]["workload"] == graph.name


def test_an_estimate_of_another_graph_is_refused() -> None:
    short, long = (foretell.capture("llm:gpt2", seq_len=8, train=train) for train in (False, True))
    with pytest.raises(ValueError, match="the estimate has"):
        step_timeline(long, estimate(short, device("t4")))


def test_fused_traffic_is_what_is_left_of_it(run_of: Callable[..., float]) -> None:
    assert run_of("compiled") < run_of("eager")


@pytest.fixture
def run_of() -> Callable[..., float]:
    graph = foretell.capture("llm:gpt2", seq_len=64)

    def traffic(runtime: str) -> float:
        program = lower(graph, runtime)
        timeline = step_timeline(graph, estimate(graph, device("t4"), runtime=runtime, program=program), program)
        return float(np.nansum(timeline.args["bytes"]))

    return traffic
