"""The value itself: what it holds, and what it refuses."""

import numpy as np
import pytest

from foretell.timeline import Counter, Timeline


def three() -> Timeline:
    return Timeline.of(
        lanes=("gpu", "host"),
        lane=["host", "gpu", "gpu"],
        start_s=[0.0, 1.0, 4.0],
        duration_s=[0.5, 2.0, 1.0],
        name=["issue", "mm", "mm"],
        kind=["launch", "matmul", "matmul"],
        args={"flops": [np.nan, 8.0, 16.0], "module": ["", "fc", "fc"]},
    )


def test_texts_are_held_once_and_lanes_keep_the_order_given() -> None:
    timeline = three()
    assert timeline.lanes == ("gpu", "host")
    assert timeline.names == ("issue", "mm")
    assert timeline.kinds == ("launch", "matmul")
    assert timeline.lane.tolist() == [1, 0, 0]
    assert [timeline.names[code] for code in timeline.name] == ["issue", "mm", "mm"]
    assert len(timeline) == 3


def test_durations_of_a_lane_and_the_end() -> None:
    timeline = three()
    assert timeline.end_s == 5.0  # the last begins at 4 and takes 1
    assert timeline.busy_s("gpu") == 3.0
    assert timeline.busy_s("host") == 0.5
    assert timeline.busy_s("gpu", without=("matmul", "no such kind")) == 0.0


def test_no_events() -> None:
    empty = Timeline.of(lane=[], start_s=[], duration_s=[], name=[])
    assert (len(empty), empty.end_s) == (0, 0.0)


def test_nobody_can_change_it() -> None:
    given = np.array([1.0])
    timeline = Timeline.of(lane=["a"], start_s=given, duration_s=[1.0], name=["x"], args={"n": [1.0]})
    given[0] = 2.0
    assert timeline.start_s[0] == 1.0
    for column in (timeline.start_s, timeline.lane, timeline.args["n"]):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"duration_s": [1.0, 2.0]}, "duration_s has shape"),
        ({"duration_s": [-1.0]}, "duration is negative"),
        ({"start_s": [np.nan]}, "start_s is not finite"),
        ({"duration_s": [np.inf]}, "duration_s is not finite"),
        ({"args": {"flops": [1.0, 2.0]}}, "flops has shape"),
    ],
)
def test_what_makes_no_timeline(change: dict[str, object], says: str) -> None:
    good: dict[str, object] = {"lane": ["a"], "start_s": [0.0], "duration_s": [1.0], "name": ["x"]}
    Timeline.of(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        Timeline.of(**good | change)  # type: ignore[arg-type]


def test_codes_must_name_something() -> None:
    one = np.zeros(1, dtype=np.int32)
    with pytest.raises(ValueError, match="a kind is none of the 1 kinds"):
        Timeline(("a",), ("x",), ("k",), one.copy(), np.zeros(1), np.zeros(1), one.copy(), one + 1)


def test_a_counter_has_a_value_for_each_time() -> None:
    with pytest.raises(ValueError, match="counter 'memory': value has shape"):
        Counter("memory", "bytes", np.zeros(2), np.zeros(3))
