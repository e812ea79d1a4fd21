"""fp32 products: against brute force over tiles, closed forms of power, and what published runs sustain."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from foretell.cost.calibration import load
from foretell.cost.kernels.simt import gemm_tiles, lanes, simt, sustained_share
from foretell.hardware import device

CONSTANTS = load("simt")
V100, T4, L4, A100 = (device(name) for name in ("v100-pcie-32gb", "t4", "l4", "a100-pcie-40gb"))


def one(gpu, batch, m, n, k):
    return simt(*(np.array([float(x)]) for x in (batch, m, n, k)), gpu, CONSTANTS)


def test_arithmetic_is_that_of_whole_tiles_in_waves():
    """A batched product on an A100 has one tile, 128 × 128: count it by hand."""
    times = one(A100, 192, 196, 96, 196)
    blocks = 192 * 2 * 1  # ceil(196 / 128) · ceil(96 / 128)
    assert (times.tile_m[0], times.tile_n[0], times.blocks[0]) == (128, 128, blocks)
    c = CONSTANTS
    waves = blocks / 108
    lasting = c["tile.tail"] * math.ceil(waves) + (1 - c["tile.tail"]) * waves
    flops = 2 * 128 * 128 * (196 + c["tile.start"])
    peak = 19.5e12 * c["share.narrow"] * sustained_share(A100, c)
    assert times.compute_s[0] == pytest.approx(lasting * 108 * flops / peak, rel=1e-9)


def test_columns_narrower_than_the_tile_cost_as_much_as_full_ones():
    """64 columns in a tile of 128 are half waste: probabilities times values of an attention head."""
    assert one(A100, 64, 1024, 64, 1024).compute_s == one(A100, 64, 1024, 128, 1024).compute_s


@pytest.mark.parametrize("shape", [(1, 512, 512, 768), (1, 128, 128, 8192), (1, 300, 5000, 1000), (96, 100, 100, 64)])
def test_the_choice_of_tile_and_parts_is_the_fastest_on_offer(shape, monkeypatch):
    """Offered one tile at a time, none does better than the choice among all."""
    best = one(V100, *shape).time_s[0]
    alone = []
    for tile in gemm_tiles(V100, shape[0] > 1):
        monkeypatch.setattr("foretell.cost.kernels.simt.gemm_tiles", lambda *_, tile=tile: (tile,))
        alone.append(one(V100, *shape).time_s[0])
    assert best == pytest.approx(min(alone), rel=1e-12)


def test_lanes_follow_from_the_data_sheet():
    """NVIDIA's white papers: 64 fp32 lanes in a Volta, Turing and GA100 multiprocessor, 128 in Ada's and GP104's."""
    assert [round(lanes(gpu) or 0) for gpu in (V100, T4, A100, L4, device("p4"))] == [63, 64, 64, 128, 129]


def test_power_sets_the_clock_where_draw_meets_the_limit():
    """The share solves share · voltage² = allowed / full draw; it is 1 where the limit is not reached."""
    share = sustained_share(T4, CONSTANTS)
    c = CONSTANTS
    full = c["power.joules"] * 8.1e12 * (12 / 16) ** c["power.process"]
    voltage = c["power.voltage_floor"] + (1 - c["power.voltage_floor"]) * share
    assert full * share * voltage**2 == pytest.approx(70 - c["power.others"], rel=1e-6)
    assert sustained_share(replace(T4, tdp_w=1000.0), c) == 1.0
    assert sustained_share(replace(T4, tdp_w=None), c) == 1.0
    assert sustained_share(replace(T4, tdp_w=50.0), c) < share


def test_cards_sustain_what_was_measured():
    """NeuSight's large products: half of its 8.1 TFLOP/s on a T4 (70 W), 13 to 14 of 14 on a V100 (250 W)."""
    for gpu, low, high in ((T4, 3.4e12, 5.2e12), (V100, 11.5e12, 14.0e12)):
        rate = 2 * 8192.0**3 / one(gpu, 1, 8192, 8192, 8192).time_s[0]
        assert low < rate < high


def test_more_work_never_takes_less_time_and_nothing_beats_the_floor():
    rng = np.random.default_rng(0)
    batch, m, n, k = (np.floor(2 ** rng.uniform(0, top, 2000)) for top in (6, 13, 13, 13))
    times = simt(batch, m, n, k, V100, CONSTANTS)
    assert np.all(simt(batch, m, n, 2 * k, V100, CONSTANTS).time_s >= times.time_s * 0.999)
    assert np.all(times.time_s >= times.floor_s)


def test_fast_enough(within):
    columns = [np.full(100_000, x) for x in (1.0, 777.0, 1024.0, 512.0)]
    assert len(within(1.0, lambda: simt(*columns, V100, CONSTANTS)).time_s) == 100_000
