"""Streaming kernels: closed forms, and one measured softmax."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.cost.calibration import load
from foretell.cost.kernels.stream import stream, variant
from foretell.hardware import device

CONSTANTS = load("stream")
V100, A100, L4 = (device(name) for name in ("v100-pcie-32gb", "a100-pcie-40gb", "l4"))


def one(gpu, elements, reduced=0.0, share=0.9, reads=1.0, **options):
    columns = (np.array([float(x)]) for x in (4 * reads * elements, 4 * elements, elements, reduced, share))
    return stream(*columns, gpu, CONSTANTS, **options)


def test_a_large_copy_runs_at_its_share_of_the_bandwidth():
    """1 GiB read and 1 GiB written by a V100 at 0.9 · 900 GB/s: 2.65 ms, and a few microseconds to start."""
    times = one(V100, 2**28)
    assert times.time_s[0] == pytest.approx(2 * 2**30 / 810e9, rel=0.01)
    assert times.dram_bytes[0] == pytest.approx(2 * 2**30, rel=1e-3)


def test_time_of_small_tensors_is_latency_that_bytes_hide():
    """Little's law: below bandwidth · latency in flight, size hardly matters; ten times more, it is all that does."""
    tiny, small = one(V100, 1000).time_s[0], one(V100, 10_000).time_s[0]
    assert tiny < small < 1.2 * tiny
    assert one(V100, 2**27).time_s[0] == pytest.approx(10 * one(V100, 2**27 / 10).time_s[0], rel=0.05)


def test_what_fits_l2_is_faster_than_memory():
    """8 MB fit an A100's 40 MB and not a V100's 6 MB."""
    a100, v100 = (one(gpu, 1e6).memory_s[0] * gpu.memory_bandwidth_bytes_per_s / 8e6 for gpu in (A100, V100))
    assert a100 < 0.75 * v100


def test_long_rows_are_read_again_where_they_do_not_fit_l2():
    """Softmax in PyTorch reads a row of up to 1024 once, a longer one three times (max, sum, result)."""
    softmax = variant("aten._softmax.default")
    assert softmax.again == 2
    long = one(V100, 2**15 * 16384, 16384, again=softmax.again)
    short = one(V100, 2**15 * 16384, 1024, again=softmax.again)
    assert short.dram_bytes[0] == pytest.approx(2 * 4 * 2**29, rel=0.01)
    assert 1.2 < long.dram_bytes[0] / short.dram_bytes[0] <= 2.0
    # An L4's 48 MB hold the rows of all resident blocks, so memory is asked once.
    assert one(L4, 2**15 * 4096, 4096, again=2).dram_bytes[0] == pytest.approx(2 * 4 * 2**27, rel=0.05)


def test_a_long_softmax_takes_what_was_measured():
    """NeuSight's table: 32768 rows of 10240 take a V100 6.85 ms, two thirds more than their bytes at full speed."""
    softmax, share = variant("aten._softmax.default"), CONSTANTS["share.softmax"] * CONSTANTS["memory.stacked"]
    times = one(V100, 32768 * 10240, 10240, share, again=softmax.again, operations=softmax.operations)
    assert times.time_s[0] == pytest.approx(6.85e-3, rel=0.2)


def test_operations_bind_where_there_are_many_of_them():
    slow, fast = (one(V100, 2**24, operations=n).compute_s[0] for n in (1000.0, 10.0))
    assert slow == pytest.approx(100 * fast)
    assert slow == pytest.approx(1000 * 2**24 / (14e12 * CONSTANTS["operations.share"]))


def test_nothing_beats_the_floor_and_more_never_takes_less():
    elements = np.geomspace(1, 1e9, 200)
    columns = (4 * elements, 4 * elements, elements, np.zeros(200), np.full(200, 0.9))
    times = stream(*columns, A100, CONSTANTS)
    assert np.all(times.time_s >= times.floor_s)
    assert np.all(np.diff(times.time_s) > 0)


def test_operations_are_known_by_name():
    assert variant("aten.add.Tensor").name == "pointwise"
    assert variant("aten.add.Tensor", broadcasts=True).name == "broadcast"
    assert variant("aten.pow.Tensor_Tensor").operations > variant("aten.pow.Tensor_Scalar").operations
    assert variant("aten.native_layer_norm.default").block
    assert not variant("aten._softmax.default").block
