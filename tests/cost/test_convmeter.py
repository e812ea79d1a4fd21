"""ConvMeter: least squares, the formula's shape in the batch, and shares that add up."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foretell.accuracy.spaces import fbnet, rows
from foretell.cost.calibration import parse
from foretell.cost.convmeter import ConvMeter, features, least_squares, update_s
from foretell.cost.model import Settings, models
from foretell.cost.program import Program
from foretell.errors import InputError
from foretell.hardware import device

CHOICES = [2, 3, 6, 7] * 5 + [0, 4]
SETTINGS = Settings(conv_tf32=False)


def program(batch):
    return Program.of(rows.table(fbnet.rows(CHOICES, batch)))


def model(**constants):
    data = {
        "schema": "foretell.calibration/1",
        "model": "convmeter",
        "constants": {name.replace("__", "."): value for name, value in constants.items()},
        "intervals": {"default": [0.5, 2.0], "host": [0.5, 2.0]},
        "provenance": {},
    }
    return ConvMeter(parse(json.dumps(data), "test"))


PLAIN = {
    "inference__eager__forward__compute": 2.0,
    "inference__eager__forward__inputs": 3.0,
    "inference__eager__forward__outputs": 5.0,
    "inference__eager__forward__constant": 1e-3,
}


def test_least_squares_recovers_known_coefficients():
    """Also where one of them is zero and another, unbounded, would come out below."""
    columns = np.random.default_rng(0).uniform(0.1, 1.0, (60, 4)) * (1e-3, 1e-4, 1.0, 1.0)
    known = np.array([2.0, 0.5, 0.0, 0.7])
    assert least_squares(columns, columns @ known) == pytest.approx(known, abs=1e-9)
    # Against scipy's independent solver, with noise.
    optimize = pytest.importorskip("scipy.optimize")
    measured = (columns @ known) * np.random.default_rng(1).normal(1.0, 0.3, 60).clip(0.2)
    expected, _ = optimize.nnls(columns / measured[:, None], np.ones(60))
    assert least_squares(columns, measured) == pytest.approx(expected, abs=1e-8)


def test_fewer_measurements_than_coefficients_are_refused():
    with pytest.raises(InputError, match="3 measurements for 4 coefficients"):
        least_squares(np.ones((3, 4)), np.ones(3))


def test_a_convolution_by_hand():
    """16 → 24 channels, 1×1, batch 2 of 32×32, fp32 on a GTX 1080 Ti (11.34 TFLOP/s, 484 GB/s)."""
    _, conv = rows.convolution(rows.Map(2, 16, 32), 24)
    of = features(Program.of(rows.table(conv)), device("gtx-1080-ti"), SETTINGS)
    pixels = 2 * 32 * 32
    assert of.compute[0] == pytest.approx(2 * pixels * 16 * 24 / 11.34e12)
    assert of.inputs[0] == pytest.approx(4 * pixels * 16 / 484e9)
    assert of.outputs[0] == pytest.approx(4 * pixels * 24 / 484e9)
    times = model(**PLAIN).op_times(Program.of(rows.table(conv)), device("gtx-1080-ti"), SETTINGS)
    assert times.busy_s[0] == pytest.approx(2 * of.compute[0] + 3 * of.inputs[0] + 5 * of.outputs[0] + 1e-3)


def test_time_is_affine_in_the_batch_and_shares_add_up():
    meter, on = model(**PLAIN), device("rtx-2080-ti")

    def step(batch):
        lowered = program(batch)
        return meter.step(lowered, meter.op_times(lowered, on, SETTINGS), SETTINGS)

    one, two, nine = step(1), step(2), step(9)
    # Only the classifier's weights, read once whatever the batch, are no image's.
    assert nine.time_s - one.time_s == pytest.approx(8 * (two.time_s - one.time_s), rel=1e-9)
    assert nine.time_s == pytest.approx(nine.busy_s.sum() + nine.gap_s.sum())
    assert one.time_s > 1e-3


def test_a_device_has_its_own_coefficients_or_those_of_all():
    own = {f"rtx-2080-ti__{name}": 2 * value for name, value in PLAIN.items()}
    meter, lowered = model(**PLAIN, **own), program(4)
    for name, factor in (("rtx-2080-ti", 2.0), ("gtx-1080-ti", 1.0)):
        found, alone = (m.op_times(lowered, device(name), SETTINGS) for m in (meter, model(**PLAIN)))
        assert found.busy_s == pytest.approx(factor * alone.busy_s)
        assert bool(found.notes) == (name == "gtx-1080-ti")


def test_the_shipped_model_is_registered_and_scales_with_the_data_sheet():
    meter, lowered = models()["convmeter"], program(64)
    slow, fast = (meter.op_times(lowered, device(name), SETTINGS).busy_s.sum() for name in ("p4", "a100-sxm4-80gb"))
    assert slow > 2 * fast > 0


def test_the_interval_says_whether_the_device_was_measured():
    meter, lowered, settings = models()["convmeter"], program(8), Settings()
    for name, words in (("rtx-3090", "families"), ("v100-sxm2-16gb", "GPUs")):
        times = meter.op_times(lowered, device(name), settings)
        step = meter.step(lowered, times, settings)
        low, high, basis = meter.interval(lowered, times, step, device(name), settings)
        assert low < 1 < high
        assert words in basis


def test_an_update_on_several_nodes_adds_a_term():
    assert update_s(10, 1000, 1, (1e-6, 1e-9, 1e-3)) == pytest.approx(1.1e-5)
    assert update_s(10, 1000, 8, (1e-6, 1e-9, 1e-3)) == pytest.approx(1.1e-5 + 8e-3)
