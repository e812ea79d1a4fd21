"""Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking."""

from __future__ import annotations

import csv
import gzip
from typing import Any

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.data import measurements
from foretell.claims.rules import AtMost, Equal, Gain

SYSTEM = "hopper-microbench"
# Products that fill any of these devices many times over, so that their rate is the pipes'.
_LEAST = 4096
_WIDEST = 65536


def _source(place: str) -> Source:
    authors = "Luo, Fan, Li, Du, Wang, Chu"
    title = "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking"
    return Source(f"{authors}: {title}", 2024, "IPDPS", place)


def _peak(name: str, dtype: str, clock_hz: float | None = None, share: float = 1.0) -> Obtained:
    """What the table of microbenchmarks makes of a device: rate × multiprocessors × clock."""
    from foretell.hardware import device
    from foretell.hardware.microbenchmarks import tensor_peak

    peak = tensor_peak(device(name), dtype, clock_hz)
    assert peak is not None
    return Obtained(f"{share * peak / 1e12:.1f} TFLOP/s", share * peak)


def _rates(system: str, dtype: str) -> dict[tuple[int, int, int], float]:
    """Measured FLOP/s of large matrix products by (m, n, k)."""
    rates: dict[tuple[int, int, int], float] = {}
    path = measurements("aiconfigurator", f"{system}__gemm.csv.gz")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
            if row["gemm_dtype"] == dtype and min(m, n, k) >= _LEAST:
                rates[m, n, k] = 2.0 * m * n * k / (float(row["latency"]) * 1e-3)
    return rates


def _fp8_gain() -> Obtained:
    """Measured on an H100: how much faster the same large product is in fp8.

    A layer quantises its input (m, k) first, which takes a smaller part of the time the wider the output is.
    """
    import statistics

    half, eighth = (_rates("h100_sxm__vllm-0.14.0", dtype) for dtype in ("bfloat16", "fp8"))
    gains = {shape: eighth[shape] / half[shape] - 1 for shape in half.keys() & eighth.keys()}
    widest = [gain for (_, n, _), gain in gains.items() if n >= _WIDEST]
    gain, all_of_them = statistics.median(widest), statistics.median(gains.values())
    return Obtained(
        f"{gain:+.0%} for outputs {_WIDEST:,} wide ({len(widest)} products); {all_of_them:+.0%} for all {len(gains)}",
        gain,
        {"widest": gain, "all": all_of_them},
    )


# System of the measurements, device, and the clock of its tensor peaks where that is not the boost clock.
_MEASURED = (
    ("a100_sxm__vllm-0.14.0", "a100-sxm4-80gb", None),
    ("h100_sxm__vllm-0.14.0", "h100-sxm", 1830e6),
    ("l40s__vllm-0.14.0", "l40s", None),
)


def _tile_model() -> Obtained:
    """Measured large products against a tile model of the table: tiles of 128×256 in waves over the multiprocessors.

    One efficiency, of the A100's products, is carried to the other devices: the error is what the table leaves.
    """
    import math
    import statistics

    from foretell.hardware import device
    from foretell.hardware.microbenchmarks import tensor_peak

    ratios: dict[str, list[float]] = {}
    for system, name, clock_hz in _MEASURED:
        gpu = device(name)
        peak = tensor_peak(gpu, "bf16", clock_hz)
        assert peak is not None
        assert gpu.multiprocessors is not None
        for (m, n, _), rate in _rates(system, "bfloat16").items():
            tiles = math.ceil(m / 128) * math.ceil(n / 256)
            filled = tiles / (math.ceil(tiles / gpu.multiprocessors) * gpu.multiprocessors)
            ratios.setdefault(name, []).append(rate / (peak * filled))
    medians = {key: statistics.median(values) for key, values in ratios.items()}
    reference = medians.pop("a100-sxm4-80gb")
    errors = [abs(reference / value - 1) for key, values in ratios.items() if key in medians for value in values]
    error = statistics.median(errors)
    details: dict[str, Any] = {f"share_of_peak_{key}": value for key, value in medians.items()}
    details["share_of_peak_a100-sxm4-80gb"] = reference
    return Obtained(f"{error:.0%} median error of {len(errors)} products", error, details)


_TABLE = "foretell.hardware.microbenchmarks, by multiprocessors and the clock of the data sheet"

CLAIMS = (
    *(
        Claim(
            id=f"{SYSTEM}/peak-{slug}",
            system=SYSTEM,
            title=f"Tensor-core rate of {title} from its rate per multiprocessor and cycle",
            source=_source("table of devices and its tensor-core sections"),
            metric="dense FLOP/s",
            claimed=Claimed(f"{peak / 1e12:g} TFLOP/s (data sheet)", peak),
            setting=_TABLE,
            rule=Equal(0.01),
            how="modelled",
            run=lambda name=name, dtype=dtype, clock=clock, share=share: _peak(name, dtype, clock, share),  # type: ignore[misc]
            cheap=True,
        )
        for slug, title, name, dtype, clock, share, peak in (
            ("a100-fp16", "an A100 in fp16", "a100-pcie-40gb", "fp16", None, 1.0, 312e12),
            ("rtx4090-fp16", "an RTX 4090 in fp16, fp32 accumulation", "rtx-4090", "fp16", None, 0.5, 165.2e12),
            ("rtx4090-fp8", "an RTX 4090 in fp8, fp32 accumulation", "rtx-4090", "fp8", None, 0.5, 330.3e12),
            ("h100-fp16", "an H100 PCIe in fp16", "h100-pcie", "fp16", 1620e6, 1.0, 756e12),
            ("h100-fp8", "an H100 PCIe in fp8", "h100-pcie", "fp8", 1620e6, 1.0, 1513e12),
        )
    ),
    Claim(
        id=f"{SYSTEM}/fp8-over-fp16",
        system=SYSTEM,
        title="FP8 nearly doubles the throughput of FP16 on Hopper",
        source=_source("tensor-core section; so also the abstract of the longer arXiv 2501.12084"),
        metric="throughput gain (share)",
        claimed=Claimed("nearly double", 1.0),
        setting="the paper's: wgmma on an H800; ours: linear layers on an H100 over bf16, input quantised in the time",
        rule=Gain(),
        how="public data",
        run=_fp8_gain,
        note="Measurements of AIConfigurator (vLLM 0.14). Where outputs are narrow, quantising inputs undoes the gain.",
    ),
    Claim(
        id=f"{SYSTEM}/table-predicts-gemm",
        system=SYSTEM,
        title="The measured parameters serve to model performance: large products on three devices",
        source=_source("abstract: expected to facilitate modeling efforts"),
        metric="median error of large products (share)",
        claimed=Claimed("no number; held here to 15 %", 0.15),
        setting="bf16; tiles of 128×256 in waves; the efficiency of an A100 carried to an H100 and an L40S",
        rule=AtMost(),
        how="public data",
        run=_tile_model,
        note="Measurements of AIConfigurator, from 4096 up; the bound is ours. Under such load clocks fall.",
    ),
    Claim(
        id=f"{SYSTEM}/dpx-and-distributed-shared-memory",
        system=SYSTEM,
        title="First measurements of DPX instructions and distributed shared memory",
        source=_source("abstract"),
        metric="latency and throughput of the instructions",
        claimed=Claimed("first measurements"),
        setting="H800 PCIe",
        rule=AtMost(),
        note="Needs a Hopper GPU to run the instructions on; no public table of them is at hand.",
    ),
)
