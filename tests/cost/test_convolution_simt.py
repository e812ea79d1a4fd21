"""fp32 convolutions on ordinary lanes: limits that hold whatever the constants, and cuDNN's choices."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.cost.calibration import load
from foretell.cost.kernels.convolution_simt import convolution
from foretell.hardware import device

CONSTANTS = load("convolution_simt")
PASCAL, TURING = device("titan-xp"), device("titan-rtx")


def times(batch, size, channels, filters, kernel, on, groups=1, stride=1):
    pixels = batch * (size // stride) ** 2
    area, own = kernel * kernel, channels // groups
    columns = (groups, pixels, filters // groups, own * area, area, stride**2, 1)
    read, written = 4 * (batch * channels * size**2 + filters * own * area), 4 * pixels * filters
    return convolution(*(np.array([float(x)]) for x in (*columns, read, written)), on, CONSTANTS)


def test_a_large_pointwise_convolution_runs_near_the_peak_of_the_lanes():
    """64 images of 56×56, 256 → 256: 26.3 GFLOP on 12.15 TFLOP/s takes 2.16 ms at least."""
    found = times(64, 56, 256, 256, 1, PASCAL)
    least = 2 * 64 * 56**2 * 256 * 256 / PASCAL.peak("fp32", "vector")
    assert found.floor_s[0] == pytest.approx(least)
    assert 1.0 < found.time_s[0] / least < 2.0
    assert found.tile_n[0] == 128


def test_winograd_beats_the_count_of_multiplications():
    """A 3×3 convolution of stride 1 takes less than nine pointwise ones; one of stride 2 has no such path."""
    for on in (PASCAL, TURING):
        one, nine = times(64, 56, 256, 256, 1, on), times(64, 56, 256, 256, 3, on)
        assert nine.time_s[0] < 5 * one.time_s[0]
        halved = times(64, 56, 256, 256, 3, on, stride=2)
        assert halved.time_s[0] > 9 / 4 * one.time_s[0] * 0.8
    # Transforms apart move whole maps, which few channels do not repay: Turing multiplies those out.
    multiplied = 2 * 256 * 32**2 * 16 * 16 * 9
    assert times(256, 32, 16, 16, 3, TURING).compute_s[0] > multiplied / TURING.peak("fp32", "vector")


def test_few_filters_leave_tiles_empty():
    eight, thirty_two = (times(64, 32, 64, filters, 3, PASCAL, stride=2) for filters in (8, 32))
    assert eight.compute_s[0] == pytest.approx(thirty_two.compute_s[0])


def test_depthwise_time_grows_with_the_window_and_suffers_from_shared_integer_lanes():
    small, large = (times(64, 32, 144, 144, kernel, PASCAL, groups=144) for kernel in (3, 7))
    assert small.tile_n[0] == 1
    assert 49 / 9 * small.compute_s[0] > large.compute_s[0] > 2 * small.compute_s[0]
    # Lane for lane, Volta and later have integer units beside their floating-point ones.
    ratio = TURING.peak("fp32", "vector") / PASCAL.peak("fp32", "vector")
    modern = times(64, 32, 144, 144, 7, TURING, groups=144)
    assert large.compute_s[0] > 2 * ratio * modern.compute_s[0]


def test_nothing_beats_its_floor():
    random = np.random.default_rng(0)
    rows = 2000
    area = random.choice([1.0, 9.0, 25.0], rows)
    m, n, c = (np.floor(np.exp(random.uniform(0, top, rows))) for top in (14, 7, 7))
    ones = np.ones(rows)
    read, written = 4 * (m * c + n * c * area), 4 * m * n
    for on in (PASCAL, TURING, device("a100-sxm4-40gb")):
        found = convolution(ones, m, n, c * area, area, ones, ones, read, written, on, CONSTANTS)
        assert (found.time_s >= found.floor_s * (1 - 1e-9)).all()
        assert (found.blocks >= 1).all()


def test_no_rows_and_many_rows(within):
    none = np.zeros(0)
    assert len(convolution(*[none] * 9, PASCAL, CONSTANTS).time_s) == 0
    rows = 100_000
    area, m = np.full(rows, 9.0), np.full(rows, 1e4)
    ones, n = np.ones(rows), np.full(rows, 64.0)
    columns = (ones, m, n, 9 * n, area, ones, ones, 4 * m * n, 4 * m * n)
    assert len(within(1.0, lambda: convolution(*columns, PASCAL, CONSTANTS)).time_s) == rows
