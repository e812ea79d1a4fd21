"""The table of microbenchmarks against the data sheets of whole devices, and how it refuses what is malformed."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.errors import InputError, UnknownNameError
from foretell.hardware import device
from foretell.hardware.microbenchmarks import NAMES, figures, microbenchmarks, parse, tensor_peak


@pytest.mark.parametrize(
    ("name", "dtype", "clock_hz", "peak"),
    [
        # Data sheets: dense TFLOP/s, and the clock it is quoted at where that is not the boost clock.
        ("v100-sxm2-16gb", "fp16", None, 125e12),
        ("t4", "fp16", None, 65e12),
        ("t4", "int8", None, 130e12),
        ("a100-sxm4-80gb", "tf32", None, 156e12),
        ("a100-sxm4-80gb", "int8", None, 624e12),
        ("rtx-a6000", "fp16", None, 154.8e12),
        ("l40s", "fp8", None, 733e12),
        ("h100-sxm", "fp16", 1830e6, 989.4e12),
        ("h100-sxm", "fp8", 1830e6, 1978.9e12),
        ("rtx-4090", "fp8", None, 660.6e12),  # with a 16-bit accumulator
        ("rtx-5090", "fp4", None, 1676e12),
    ],
)
def test_figures_make_the_peaks_of_data_sheets(name: str, dtype: str, clock_hz: float | None, peak: float) -> None:
    assert tensor_peak(device(name), dtype, clock_hz) == pytest.approx(peak, rel=0.01)


def test_every_figure_is_plausible_and_ordered() -> None:
    assert set(microbenchmarks()) == {"7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}
    for capability, table in microbenchmarks().items():
        assert set(table) <= set(NAMES)
        levels = [table[f"latency.{level}"].value for level in ("l1", "l2", "memory") if f"latency.{level}" in table]
        assert levels == sorted(levels), capability
        for figure in table.values():
            for other in figure.others:  # studies differ, but not by more than this
                assert 0.5 < other.value / figure.value < 1.7
            assert "20" in figure.source or "GitHub" in figure.source or "Guide" in figure.source


def test_vector_rates_agree_with_the_catalogue() -> None:
    for name in ("v100-sxm2-16gb", "t4", "a100-sxm4-80gb", "rtx-4090", "h100-sxm"):
        gpu = device(name)
        assert gpu.multiprocessors is not None
        assert gpu.boost_clock_hz is not None
        rate = figures(gpu.compute_capability or "")["throughput.fp32"].value
        assert 2 * rate * gpu.multiprocessors * gpu.boost_clock_hz == pytest.approx(
            gpu.peak("fp32", "vector"), rel=0.02
        )


def test_an_architecture_without_figures() -> None:
    with pytest.raises(UnknownNameError, match=r"microbenchmarks '3\.5'"):
        figures("3.5")
    assert tensor_peak(device("k40"), "fp16") is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"latency": {"l1": [0, "s"]}}, "9.0.latency.l1: 0 is not a number above 0"),
        ({"latency": {"l1": [3, "t"]}}, "source 't' is not under"),
        ({"latency": {"l1": 3}}, "3 is no figure"),
        ({"latency": {"l1": [3, "s", "sure"]}}, "is no figure"),
        ({"latency": {"l11": [3, "s"]}}, "did you mean 'latency.l1'"),
        ({}, "source 's' is used by no figure"),
    ],
)
def test_malformed_figures_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse({"sources": {"s": "A study, 2020"}, "9.0": entry}, "t.toml")
    assert message in str(caught.value)
