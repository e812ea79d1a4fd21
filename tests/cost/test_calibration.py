"""Calibration files: the shipped one is sourced, a wrong one is refused with its place."""

from __future__ import annotations

import json

import pytest

from foretell.cost.calibration import SCHEMA, load, parse
from foretell.errors import InputError, UnknownNameError

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
    ],
)
def test_a_damaged_calibration_is_refused_by_name(key, value):
    good = {"schema": "foretell.calibration/1", "model": "m", "constants": {"a": 1.0}, "provenance": {}}
    good["intervals"] = {"default": [0.5, 2.0], "host": [0.5, 2.0]}
    assert parse(json.dumps(good), "here")["a"] == 1.0
    with pytest.raises(InputError, match="here"):
        parse(json.dumps({**good, key: value}), "here")
