"""Matrix products against closed forms: peak, bandwidth, whole tiles."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.cost.calibration import load
from foretell.cost.kernels.gemm import Products, gemm, power_rate, quantize
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.rates import matrix_rate
from foretell.hardware import device

DEVICES = ("a100-sxm4-80gb", "h100-sxm", "l40s", "b200-sxm", "rtx-pro-6000-server", "v100-sxm2-32gb")


def times(name: str, m: object, n: object, k: object, batch: object = 1.0, cold: bool = True) -> KernelTimes:
    gpu = device(name)
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in (batch, m, n, k)))
    ones = np.ones(len(columns[0]))
    peak = matrix_rate(gpu, "fp16").flops_per_s * ones
    far = np.full(len(ones), np.inf) if cold else None
    return gemm(*columns, peak, 2 * ones, 2 * ones, 2 * ones, gpu, load("gemm"), a_distance=far, b_distance=far)


def shapes(count: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    m, n, k = (np.round(2.0 ** random.uniform(low, 14, count)) for low in (0, 4, 4))
    return m, n, k


@pytest.mark.parametrize("name", DEVICES)
def test_no_product_beats_the_peak_or_its_floor(name: str) -> None:
    m, n, k = shapes()
    result = times(name, m, n, k)
    assert (result.time_s >= 2.0 * m * n * k / matrix_rate(device(name), "fp16").flops_per_s).all()
    assert (result.compute_s > 0).all()
    assert (result.memory_s >= 0).all()
    assert (result.latency_s > 0).all()


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("grown", range(3))
def test_doubling_a_dimension_never_saves_time(name: str, grown: int) -> None:
    sides = shapes()
    larger = [side * (2.0 if i == grown else 1.0) for i, side in enumerate(sides)]
    # A wider result may find a better tiling; no more than the imbalance of one round of tiles.
    assert (times(name, *larger).time_s >= 0.93 * times(name, *sides).time_s).all()


@pytest.mark.parametrize("name", DEVICES[:5])
def test_a_huge_square_product_runs_at_the_peak_that_power_allows(name: str) -> None:
    gpu = device(name)
    limit = matrix_rate(gpu, "fp16").flops_per_s * min(1.0, power_rate(gpu, load("gemm")))
    rate = 2.0 * 16384.0**3 / times(name, 16384, 16384, 16384).time_s[0]
    assert 0.75 * limit < rate <= limit


@pytest.mark.parametrize("name", DEVICES[:5])
def test_a_vector_times_a_matrix_takes_what_reading_the_matrix_takes(name: str) -> None:
    ideal = 2.0 * 16384.0**2 / float(device(name).memory_bandwidth_bytes_per_s or 0)
    assert ideal < times(name, 1, 16384, 16384).time_s[0] < 1.45 * ideal


def test_weights_left_in_the_cache_are_not_read_from_memory() -> None:
    cold, kept = (times("l40s", 1, 2048, 2048, cold=cold) for cold in (True, False))  # 8 MB, six times in 96 MB
    assert cold.dram_bytes[0] > 2.0 * 2048.0 * 2048.0
    assert kept.dram_bytes[0] < 0.4 * cold.dram_bytes[0]
    assert kept.time_s[0] < 0.7 * cold.time_s[0]


def test_a_batch_runs_side_by_side_until_the_device_is_full() -> None:
    one, few, full = (times("h100-sxm", 64, 64, 512, batch).time_s[0] for batch in (1, 8, 6400))
    assert few < 1.2 * one
    assert full > 10 * one


def test_launch_covers_the_result() -> None:
    m, n, k = shapes(50)
    result = times("h100-sxm", m, n, k)
    covered = np.ceil(m / result.tile_m) * np.ceil(n / result.tile_n) * result.split
    np.testing.assert_array_equal(result.blocks, covered)


def test_quantising_costs_a_pass_over_the_activations() -> None:
    gpu = device("h100-sxm")
    large = quantize(np.array([65536.0]), np.array([8192.0]), "token", gpu, load("gemm"))[0]
    # 16 bits in and 8 out at least, and no more than half as fast.
    ideal = 3.0 * 65536 * 8192 / float(gpu.memory_bandwidth_bytes_per_s or 0)
    assert ideal < large < 2.5 * ideal
    assert quantize(np.array([1.0]), np.array([64.0]), "token", gpu, load("gemm"))[0] < 10e-6


def test_features_are_finite_and_named() -> None:
    from foretell.accuracy.columns import op_table
    from foretell.cost.kernels.gemm import FEATURES
    from foretell.cost.program import Program

    names = ["aten.mm.default", "foretell.quantized_mm.block", "foretell.quantized_mm.nvfp4"]
    dtypes = ["bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2"]
    table = op_table(names, dtypes, kind="matmul", gemm_batch=1, gemm_m=[1, 128, 4096], gemm_n=4096, gemm_k=4096)
    gpu = device("b200-sxm")
    products = Products.of(Program.of(table), np.arange(3), np.full(3, 2.25e15))
    assert products.scheme.tolist() == [-1, 2, 3]
    assert products.b_bytes.tolist() == [2.0, 1.0, 0.5625]
    x = products.features(products.times(gpu, load("gemm")), gpu)
    assert x.shape == (3, len(FEATURES))
    assert np.isfinite(x).all()


@pytest.mark.parametrize("name", ["t4", "v100-sxm2-16gb", "rtx-2080-ti", "rtx-3090", "a100-sxm4-80gb", "h100-sxm"])
def test_a_block_fits_its_multiprocessor(name: str) -> None:
    most = device(name).shared_bytes_per_block
    assert most is not None
    shared = times(name, *shapes()).shared_bytes
    assert (shared > 0).all()
    assert (shared <= most).all()


def test_a_card_of_70_watts_cannot_keep_its_peak() -> None:
    """T4: 65 TFLOP/s in half precision at full clock. It has no bf16, whose stand-in says nothing of the energy."""
    assert 2 * 8192.0**3 / times("t4", 8192, 8192, 8192).time_s[0] < 0.85 * 65e12


def test_cores_that_are_cut_down_issue_as_fast() -> None:
    """H20 has a quarter of H100's arithmetic a multiprocessor and more bandwidth: few rows wait for memory in both."""
    of_h20, of_h100 = times("h20", 1, 14336, 4096), times("h100-sxm", 1, 14336, 4096)
    assert (of_h20.compute_s < of_h20.memory_s).all()
    weights = 2 * 14336 * 4096
    assert of_h20.time_s[0] < 1.6 * weights / 4e12  # of 4 TB/s
    assert of_h20.time_s[0] < of_h100.time_s[0] * 1.05
    # Full tiles are no faster for it: 148 TFLOP/s.
    large = times("h20", 8192, 8192, 8192)
    assert 1.0 < large.compute_s[0] / (2 * 8192**3 / 148e12) < 1.4
