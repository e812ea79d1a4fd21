"""Fused attention against closed forms: peak, bandwidth of the cache, causal half, shared key heads."""

from __future__ import annotations

import numpy as np
import pytest

from foretell import capture, predict
from foretell.cost import Settings, lower, models
from foretell.cost.calibration import load
from foretell.cost.kernels.attention import attention
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.rates import matrix_rate
from foretell.graph import KINDS
from foretell.hardware import device

DEVICES = ("a100-sxm4-80gb", "h100-sxm", "l40s", "b200-sxm", "rtx-pro-6000-server", "v100-sxm2-32gb")


def times(
    name: str,
    batch: object,
    rows: object,
    keys: object,
    depth: float = 128.0,
    *,
    causal: bool = False,
    backward: bool = False,
    kv_bytes: float = 2.0,
) -> KernelTimes:
    gpu = device(name)
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in (batch, rows, keys, depth)))
    ones = np.ones(len(columns[0]))
    peak = matrix_rate(gpu, "fp16").flops_per_s * ones
    masks = np.full(len(ones), causal), np.full(len(ones), backward)
    far = np.full(len(ones), np.inf)
    return attention(*columns, peak, 2 * ones, kv_bytes * ones, *masks, gpu, load("attention"), kv_distance=far)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_no_attention_beats_the_peak(name: str, causal: bool) -> None:
    random = np.random.default_rng(0)
    batch, keys = (np.round(2.0 ** random.uniform(0, top, 200)) for top in (10, 14))
    flops = 4.0 * batch * keys * keys * 128.0 * (0.5 if causal else 1.0)
    result = times(name, batch, keys, keys, causal=causal)
    assert (result.time_s >= flops / matrix_rate(device(name), "fp16").flops_per_s).all()
    assert (result.time_s >= result.floor_s).all()


@pytest.mark.parametrize("name", DEVICES)
def test_more_sequences_queries_or_keys_take_no_less(name: str) -> None:
    random = np.random.default_rng(1)
    sides = [np.round(2.0 ** random.uniform(0, top, 200)) for top in (10, 13, 14)]
    for grown in range(3):
        larger = [side * (2.0 if i == grown else 1.0) for i, side in enumerate(sides)]
        # Dividing the keys of few tiles has a cost that more tiles save.
        assert (times(name, *larger).time_s >= 0.93 * times(name, *sides).time_s).all()


@pytest.mark.parametrize("name", DEVICES[:5])
def test_decoding_takes_what_reading_the_cache_takes(name: str) -> None:
    cache = 2.0 * 512 * 8192 * 128 * 2.0
    ideal = cache / float(device(name).memory_bandwidth_bytes_per_s or 0)
    assert ideal < times(name, 512, 8, 8192).time_s[0] < 1.4 * ideal
    narrow = times(name, 512, 8, 8192, kv_bytes=1.0).time_s[0]
    assert 0.5 * ideal < narrow < 0.8 * ideal


@pytest.mark.parametrize("name", DEVICES[:5])
def test_a_causal_mask_saves_half_of_a_long_sequence(name: str) -> None:
    whole, half = (times(name, 64, 16384, 16384, causal=causal).time_s[0] for causal in (False, True))
    assert 0.48 * whole < half < 0.58 * whole


def test_heads_that_share_keys_read_them_once() -> None:
    shared, apart = times("h100-sxm", 512, 8, 8192).time_s[0], times("h100-sxm", 4096, 1, 8192).time_s[0]
    assert shared < 0.2 * apart


def test_backward_is_five_products_for_two() -> None:
    forward, backward = (times("a100-sxm4-80gb", 128, 8192, 8192, backward=b).time_s[0] for b in (False, True))
    assert 2.2 * forward < backward < 2.7 * forward


def test_one_long_sequence_divides_its_keys_over_the_device() -> None:
    result = times("h100-sxm", 8, 8, 65536)
    assert result.split[0] > 8
    assert result.blocks[0] >= 100


def test_a_decoding_step_reads_its_cache_from_device_memory() -> None:
    """Between two uses of a layer's cache all the weights pass through L2: it is never still there."""
    l40s = device("l40s")
    ask = {"on": l40s, "phase": "decode", "precision": "bf16", "runtime": "compiled", "model": "kernel"}
    short, long = (predict("llm:llama-3.1-8b", context=context, **ask).time_s for context in (128, 16_384))
    cached = (16_384 - 128) * 131_072
    assert long - short >= cached / l40s.memory_bandwidth_bytes_per_s


def test_rows_of_a_table_make_no_step_together() -> None:
    """A table's rows know nothing of each other; ops of a step push each other's caches out of L2."""
    program = lower(capture("llm:llama-3.1-8b", phase="decode", context=4096, precision="bf16"))
    rows = np.flatnonzero(program.table.kind == KINDS.index("attention"))
    for model in (models()["kernel"], models()["learned"]):
        alone = model.operator_times(program, device("l40s"), Settings()).busy_s[rows]
        together = model.op_times(program, device("l40s"), Settings()).busy_s[rows]
        assert (together > 1.05 * alone).all()
