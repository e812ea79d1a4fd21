"""Calibration files: the shipped one is sourced, a wrong one is refused with its place."""

from __future__ import annotations

import json

import pytest

from foretell.cost.calibration import SCHEMA, load, parse
from foretell.cost.scales import calibrated
from foretell.cost.scales import parse as parse_scales
from foretell.errors import InputError, UnknownNameError
from foretell.hardware import device

GOOD = {
    "schema": SCHEMA,
    "model": "m",
    "constants": {"a.b": 0.5},
    "intervals": {"default": [0.5, 2.0], "host": [0.6, 1.6]},
    "provenance": {"source": "by hand"},
}


def test_a_good_file_is_read():
    calibration = parse(json.dumps(GOOD), "x.json")
    assert calibration["a.b"] == 0.5
    assert calibration.replace({"a.b": 0.25})["a.b"] == 0.25
    assert calibration["a.b"] == 0.5


def test_the_shipped_file_says_where_it_is_from():
    calibration = load("roofline")
    assert {"source", "licence", "rows", "date", "versions"} <= set(calibration.provenance)
    for name, value in calibration.constants.items():
        if name.startswith("compute.") and "tile" not in name and "fetch" not in name:
            assert 0 < value <= 1, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other/1"}, r"x\.json: \"schema\""),
        ({"model": None}, "missing key 'model'"),
        ({"constants": {"a": "fast"}}, "constant 'a' is 'fast'"),
        ({"constants": {"a": -1}}, "constant 'a' is -1"),
        ({"intervals": {"default": [2.0, 0.5], "host": [1, 1]}}, "interval 'default'"),
        ({"intervals": {}}, 'lack "default"'),
        ({"intervals": {"default": [0.5, 2.0]}}, 'lack "host"'),
    ],
)
def test_a_wrong_file_is_refused(change, message):
    data = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        parse(json.dumps(data), "x.json")


def test_text_that_is_no_json_is_refused():
    with pytest.raises(InputError, match="not JSON"):
        parse("{", "x.json")


def test_an_unknown_constant_lists_near_ones():
    with pytest.raises(UnknownNameError, match=r"compute\.matmul"):
        load("roofline")["compute.matmull"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("constants", []),
        ("intervals", []),
        ("provenance", 3),
        ("constants", {"a": 1e308}),
        ("constants", {"a": 10**400}),
        ("intervals", {"default": ["a", "b"], "host": [1, 1]}),
        ("intervals", {"default": [1, 10**400], "host": [1, 1]}),
        ("intervals", {"default": [1.5, 2.0], "host": [1, 1]}),  # not around the prediction
        ("intervals", {"default": [0.5, 0.9], "host": [1, 1]}),
        ("intervals", {"default": [0.5, 1e9], "host": [1, 1]}),
        ("constants", {"a": 1e100}),
        ("constants", {"a": 1e-100}),
    ],
)
def test_a_damaged_calibration_is_refused_by_name(key, value):
    good = {"schema": "foretell.calibration/1", "model": "m", "constants": {"a": 1.0}, "provenance": {}}
    good["intervals"] = {"default": [0.5, 2.0], "host": [0.5, 2.0]}
    assert parse(json.dumps(good), "here")["a"] == 1.0
    with pytest.raises(InputError, match="here"):
        parse(json.dumps({**good, key: value}), "here")


@pytest.fixture
def processor_file(tmp_path):
    """Write the shipped processor calibration with some constants changed (None: left out), and read it for a CPU."""

    def read(**changed):
        shipped = load("cpu")
        constants = {**shipped.constants, **{name.replace("_", "."): value for name, value in changed.items()}}
        intervals = {name: list(pair) for name, pair in shipped.intervals.items()}
        document = {
            "schema": SCHEMA,
            "model": "cpu",
            "constants": {name: value for name, value in constants.items() if value is not None},
            "intervals": intervals,
            "provenance": {},
        }
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(document))
        return calibrated(path, device("epyc-7763"), "cpu")

    return read


def test_a_good_processor_file_is_read(processor_file):
    assert processor_file().name == "cpu"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rate_matmul": 0.0}, "'rate.matmul' is 0"),
        ({"reference_flops": 0}, "'reference.flops' is 0"),
        ({"byte_memory": 1.0}, "'byte.memory' is 1"),
        ({"dispatch_view": None}, "lacks the constant 'dispatch.view'"),
        ({"reference_bandwidth": None}, "lacks the constant 'reference.bandwidth'"),
    ],
)
def test_a_processor_file_of_missing_or_absurd_constants_is_refused_by_name(processor_file, changed, said):
    with pytest.raises(InputError) as caught:
        processor_file(**changed)
    assert "mine.json" in str(caught.value)
    assert said in str(caught.value)
    assert "foretell calibrate --here" in str(caught.value)


SCALES = {
    "schema": "foretell.scales/1",
    "device": "t4",
    "model": "roofline",
    "factors": {"matmul": [0.5, 1.1, 2.0, 7]},
    "provenance": {},
}


def test_good_scales_are_read():
    assert parse_scales(json.dumps(SCALES), "s.json").factors["matmul"].rows == 7


@pytest.mark.parametrize(
    "row",
    [
        [0.5, 1e308, 2.0, 7],
        [0.5, 1e-9, 2.0, 7],
        [1e-9, 1.0, 2.0, 7],
        [0.5, 1.0, 1e308, 7],
        [0.5, 1.0, 2.0, 10**400],
        [0.5, 1.0, 2.0, float("inf")],
        [0.5, 1.0, 2.0, float("nan")],
        [10**400, 1.0, 2.0, 7],
        [0.5, 1.0, 2.0, 0],
    ],
)
def test_absurd_scales_are_refused_by_name(row):
    with pytest.raises(InputError, match=r"s\.json: factor 'matmul' is .*0\.001 to 1000"):
        parse_scales(json.dumps({**SCALES, "factors": {"matmul": row}}), "s.json")
