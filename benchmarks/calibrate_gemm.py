"""Fit constants and residuals of matrix products and attention on AIConfigurator's tables, and print how far they hold.

    python benchmarks/calibrate_gemm.py {gemm,attention} [--data DIR] [--write]

1. *Constants* of `cost/kernels/gemm.py` and `attention.py`: least squares of log(predicted / measured), robust (soft L1
   beyond 10 %), every device and format counting the same.
2. *Residual* on features of each kernel, by `cost/fitting.py`.
3. *Leave one GPU out*: both steps without it, then predict it. *Seen GPU*: shapes held out, (n, k) or heads.

Rows come from `aiconfigurator` and from the newer tables of the same project in `aiconfigurator-serving/kernels`, where
other devices' tables than H200's are used: that one is never fitted on and is predicted as a GPU nobody has seen.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

import foretell
from foretell.accuracy.aiconfigurator import read_table
from foretell.accuracy.measured import Measured
from foretell.cost.calibration import SCHEMA, Calibration
from foretell.cost.fitting import Fit
from foretell.cost.kernels import attention, gemm
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.rates import FORMATS, matrix_rate

Floats = npt.NDArray[np.float64]
Constants = dict[str, float]

CALIBRATIONS = Path(foretell.__file__).parent / "cost" / "calibrations"
NEVER_FITTED = "h200-sxm"
FITTED_ROWS, TRAINED_ROWS = 500, 1300  # of one table
ROUNDS = 150

# What each family starts from, which constants stay (published, or without effect on these tables), and bounds.
GEMM_START: Constants = {
    "pipe": 0.9,
    "pipe.block": 0.7,
    "issue": 50.0,
    "step.cycles": 45.0,
    "resident": 5.0,
    "tail": 0.5,
    "split.least_bytes": 800.0,
    "split.fill": 1.2,
    "split_s": 2e-6,
    "split.each_s": 2e-8,
    "again": 0.1,
    "rotation": 6.0,
    "l2.share": 0.73,
    "l2.write": 0.25,
    "l2.bytes_per_cycle": 64.0,
    "dram.efficiency": 0.81,
    "dram.sm_bytes_per_cycle": 32.0,
    "start_s": 1e-7,
    "start.cycles": 1800.0,
    "round.cycles": 3000.0,
    "power.shared_operands": 0.66e-12,
    "power.register_operands": 1.38e-12,
    "quantize.tensor.bytes": 33.0,
    "quantize.tensor.cycles": 2.9,
    "quantize.token.bytes": 4.0,
    "quantize.token.cycles": 0.2,
    "quantize.chain_cycles": 0.02,
    "quantize.tensor.start_s": 9e-6,
    "quantize.token.start_s": 3.6e-6,
    "quantize.block.start_s": 15e-6,
    "quantize.nvfp4.start_s": 3.5e-6,
}
ATTENTION_START: Constants = {
    "pipe.shared_operands": 0.75,
    "pipe.register_operands": 0.68,
    "pipe.odd_depth": 0.3,
    "issue": 30.0,
    "softmax.cycles": 0.01,
    "step.cycles": 30.0,
    "resident": 1.4,
    "tail": 0.8,
    "overlap": 4.4,
    "split.least_keys": 400.0,
    "split.fill": 2.0,
    "split_s": 6e-7,
    "narrow_s": 1e-7,
    "l2.share": 0.82,
    "l2.bytes_per_cycle": 24.0,
    "dram.efficiency": 0.86,
    "start_s": 4e-6,
    "start.cycles": 4500.0,
    "round_s": 2e-6,
    "round.cycles": 4000.0,
    "latency.tensor_memory": 0.7,
    "power.shared_operands": 0.4e-12,
    "power.register_operands": 2.1e-12,
}
FIXED = {
    "gemm": ("rotation", "l2.bytes_per_cycle", "dram.sm_bytes_per_cycle", "power.shared_operands"),
    "attention": ("power.shared_operands",),
}
BOUNDS: Mapping[str, tuple[float, float]] = {
    "overlap": (1.2, 12.0),
    "tail": (0.0, 1.0),
    "again": (0.0, 1.0),
    "l2.write": (0.0, 1.0),
    "l2.share": (0.3, 1.2),
    "l2.bytes_per_cycle": (8.0, 64.0),
    "pipe": (0.5, 1.0),
    "pipe.block": (0.3, 1.0),
    "pipe.shared_operands": (0.3, 1.0),
    "pipe.register_operands": (0.3, 1.0),
    "pipe.odd_depth": (0.1, 1.0),
    "dram.efficiency": (0.5, 0.98),
    "resident": (1.0, 20.0),
    "softmax.cycles": (0.0, 1.0),
    "power.shared_operands": (0.4e-12, 2e-12),
    "power.register_operands": (0.8e-12, 4e-12),
}
# Tables whose times are not those of the kernel, by what their name holds, with the reason.
NOT_FITTED = {
    "gemm-fp8_block-b200_sxm-vllm-0.22": "155 µs whatever the size",
    "gemm-fp8_block-rtx": "120 µs whatever the size",
    "encoder_attention-bfloat16-h100": "slows threefold in the order it was measured in",
    "encoder_attention-bfloat16-l40s": "slows fourfold in the order it was measured in",
    "context_attention-fp8-l40s": "a quarter of the rows beat the peak of the device",
    "context_attention-fp8-rtx": "a third of the rows beat the peak of the device",
}


@dataclass(frozen=True)
class Table:
    """Rows of one `Measured`, as the kernel family takes them."""

    measured: Measured
    ops: Any
    measured_s: Floats
    group: npt.NDArray[np.object_]

    @property
    def fitted(self) -> bool:
        """Whether constants and residuals may be fitted on this table."""
        name = self.measured.name
        return self.device != NEVER_FITTED and not any(part in name for part in NOT_FITTED)

    @property
    def device(self) -> str:
        return self.measured.device.name

    @property
    def format(self) -> str:
        """``bfloat16`` for products, ``context-fp8`` for attention."""
        _, table, number_format, *_ = self.measured.name.split("-")
        return number_format if table == "gemm" else f"{table.split('_')[0]}-{number_format}"

    def times(self, constants: Mapping[str, float]) -> KernelTimes:
        return self.ops.times(self.measured.device, calibration(constants))


def calibration(constants: Mapping[str, float]) -> Calibration:
    return Calibration("", MappingProxyType(dict(constants)), MappingProxyType({}), MappingProxyType({}))


def tables(family: str, data: Path, rows: int, seed: int) -> list[Table]:
    """A sample of every table of a family."""
    endings = ("gemm",) if family == "gemm" else ("context_attention", "generation_attention", "encoder_attention")
    result, seen = [], set()
    for folder in ("aiconfigurator", "aiconfigurator/power", "aiconfigurator-serving/kernels"):
        for path in sorted((data / folder).glob("*.csv.gz")):
            if path.name in seen or path.name.removesuffix(".csv.gz").split("__")[-1] not in endings:
                continue
            seen.add(path.name)
            for measured in read_table(path):
                part = np.sort(np.random.default_rng(seed).permutation(len(measured))[:rows])
                code = int(measured.program.table.dtype[0])
                peak = np.full(len(part), matrix_rate(measured.device, FORMATS[code]).flops_per_s)
                ops = (gemm.Products if family == "gemm" else attention.Attentions).of(measured.program, part, peak)
                result.append(Table(measured, ops, measured.measured_s[part], measured.group[part]))
    return result


def fit_constants(used: Sequence[Table], start: Constants, free: Sequence[str], evaluations: int = 20) -> Constants:
    """Constants that minimise a robust sum of squares of log(predicted / measured)."""
    low, high = (
        np.array([BOUNDS.get(name, (start[name] / 20, start[name] * 20))[side] for name in free]) for side in (0, 1)
    )
    scale = np.array([max(start[name], 1e-3 * h) for name, h in zip(free, high, strict=True)])
    balance = 1.0 / np.sqrt(np.mean([len(table.measured_s) for table in used]))

    def residuals(x: Floats) -> Floats:
        constants = {**start, **dict(zip(free, (x * scale).tolist(), strict=True))}
        parts = (np.log(t.times(constants).time_s / t.measured_s) / np.sqrt(len(t.measured_s)) for t in used)
        return np.concatenate(list(parts))

    first = np.clip([start[name] for name in free], low * 1.001, high * 0.999) / scale
    bounds = (low / scale, high / scale)
    found = least_squares(
        residuals, first, bounds=bounds, loss="soft_l1", f_scale=0.1 * balance, max_nfev=evaluations, diff_step=0.01
    )
    return {**start, **dict(zip(free, (found.x * scale).tolist(), strict=True))}


def fit_family(family: str, all_tables: Sequence[Table], without: str | None = None) -> Constants:
    """Constants from every fitted table but those of one device: for products 16 bits, then what narrower ones add."""
    used = [table for table in all_tables if table.fitted and table.device != without]
    start = GEMM_START if family == "gemm" else ATTENTION_START
    free = [name for name in start if name not in FIXED[family]]
    if family == "attention":
        if not any(table.measured.device.compute_capability == "10.0" for table in used):
            start, free = {**start, "latency.tensor_memory": 1.0}, [x for x in free if x != "latency.tensor_memory"]
        return fit_constants(used, start, free)
    narrow = [name for name in free if name.startswith("quantize") or name == "pipe.block"]
    wide = {table.device: table for table in reversed(used) if table.format == "bfloat16"}  # one table a device
    constants = fit_constants(list(wide.values()), start, [name for name in free if name not in narrow])
    return fit_constants([t for t in used if t.format != "bfloat16"], constants, narrow, 10)


@dataclass(frozen=True)
class Rows:
    """All rows of all tables side by side, under one set of constants."""

    x: Floats
    y: Floats
    floor: Floats
    weights: Floats
    device: npt.NDArray[np.str_]
    format: npt.NDArray[np.str_]
    table: npt.NDArray[np.str_]
    group: npt.NDArray[np.str_]

    @staticmethod
    def of(used: Sequence[Table], constants: Constants) -> Rows:
        parts = []
        for table in used:
            times = table.times(constants)
            n = len(table.measured_s)
            parts.append(
                (
                    table.ops.features(times, table.measured.device),
                    np.log(table.measured_s / times.time_s),
                    np.log(times.floor_s / times.time_s),
                    np.full(n, 1.0 if table.fitted else 0.0),
                    *(np.full(n, text) for text in (table.device, table.format, table.measured.name)),
                    np.array([f"{table.format}:{group}" for group in table.group]),
                )
            )
        x, y, floor, weights, device, number_format, name, group = (np.concatenate(p) for p in zip(*parts, strict=True))
        for one in np.unique(device):  # every device the same, and every format of it
            formats = np.unique(number_format[(device == one) & (weights > 0)])
            for other in formats:
                rows = (device == one) & (number_format == other) & (weights > 0)
                weights[rows] = len(y) / rows.sum() / len(formats)
        return Rows(x, y, floor, weights / weights.mean(), device, number_format, name, group)


QUANTILES = (("low", 0.1), ("mid", 0.5), ("high", 0.9))


def trained(fit: Fit, rows: npt.NDArray[np.bool_], wanted: npt.NDArray[np.bool_]) -> dict[str, Floats]:
    """Quantiles of the wanted rows by trees of other rows."""
    return {name: fit.train(rows, q).predict(fit.x[wanted]) for name, q in QUANTILES}


def show(title: str, rows: Rows, predicted: Mapping[str, Floats], margins: tuple[float, float]) -> dict[str, float]:
    """Print errors and intervals by device and format, and give medians by format over devices' rows."""
    mid = np.maximum(predicted["mid"], rows.floor)
    error = np.abs(np.expm1(mid - rows.y))
    physics = np.abs(np.expm1(-rows.y))
    low = np.minimum(predicted["low"] - margins[0], mid)
    high = np.maximum(predicted["high"] + margins[1], mid)
    inside = (rows.y >= low) & (rows.y <= high)
    print(f"\n{title}\n{'device':22} {'format':22} {'rows':>6} {'physics':>8} {'median':>7} {'mean':>7} "
          f"{'p90':>7} {'bias':>6} {'inside':>7} {'width':>6}")
    for device in np.unique(rows.device):
        for number_format in np.unique(rows.format[rows.device == device]):
            at = (rows.device == device) & (rows.format == number_format)
            mark = "" if rows.weights[at].any() else " *"
            print(
                f"{device:22} {number_format + mark:22} {at.sum():6} {np.median(physics[at]):8.1%} "
                f"{np.median(error[at]):7.1%} {error[at].mean():7.1%} {np.quantile(error[at], 0.9):7.1%} "
                f"{np.median(mid[at] - rows.y[at]):+6.2f} {inside[at].mean():7.1%} "
                f"{np.exp(np.median((high - low)[at])):6.2f}"
            )
    print("* not fitted on")
    fitted = rows.weights > 0
    summary = {f: float(np.median(error[fitted & (rows.format == f)])) for f in np.unique(rows.format[fitted])}
    print("  ".join(f"{name} {value:.1%}" for name, value in summary.items()))
    print(f"all fitted: median {np.median(error[fitted]):.1%}, inside {inside[fitted].mean():.1%}, "
          f"median high/low {np.exp(np.median((high - low)[fitted])):.2f}")
    return summary


def by_size(rows: Rows, error: Floats, names: Sequence[str], features: Sequence[str]) -> None:
    """Where the error is, by some features in quarters."""
    for name in names:
        column = rows.x[:, features.index(name)]
        edges = np.quantile(column, np.linspace(0, 1, 7))
        cells = []
        for a, b in itertools.pairwise(edges):
            at = (column >= a) & (column <= b)
            if at.any():
                cells.append(f"{a:.1f}: {np.median(error[at]):.0%}")
        print(f"  {name:28} {'  '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=("gemm", "attention"))
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FORETELL_DATA", "../shared/data")))
    parser.add_argument("--write", action="store_true", help="write the shipped calibration and residual")
    arguments = parser.parse_args()
    family: str = arguments.family
    began = time.time()
    module: Any = gemm if family == "gemm" else attention
    features = module.FEATURES
    small = tables(family, arguments.data, FITTED_ROWS, seed=0)
    large = tables(family, arguments.data, TRAINED_ROWS, seed=1)
    print(f"read {sum(len(t.measured) for t in small)} rows of {len(small)} tables, {time.time() - began:.0f} s")
    constants = {name: float(f"{value:.4g}") for name, value in fit_family(family, small).items()}
    print(f"constants, {time.time() - began:.0f} s\n" + "\n".join(f"  {k:26} {v:.4g}" for k, v in constants.items()))

    # Unseen: a device's rows by constants and trees that never met it.
    devices = sorted({table.device for table in large if table.device != NEVER_FITTED})
    parts = []
    for device in devices:
        rows = Rows.of(large, fit_family(family, small, without=device))
        fit = Fit(features, rows.x, rows.y, weights=rows.weights, rounds=ROUNDS)
        out = rows.device == device
        parts.append((rows, out, trained(fit, ~out & (rows.weights > 0), out)))
        print(f"  without {device}, {time.time() - began:.0f} s", flush=True)
    names = Rows.__dataclass_fields__
    unseen = Rows(*(np.concatenate([getattr(rows, f)[out] for rows, out, _ in parts]) for f in names))
    unseen_q = {name: np.concatenate([q[name] for _, _, q in parts]) for name, _ in QUANTILES}
    margins = {"unseen": conformal(unseen, unseen_q)}
    show("leave one GPU out", unseen, unseen_q, margins["unseen"])
    without_own(unseen, unseen_q)
    error = np.abs(np.expm1(np.maximum(unseen_q["mid"], unseen.floor) - unseen.y))
    shown = ["log2_rounds", "latency_share", "memory_share", "log2_split", features[0], features[1], features[2]]
    by_size(unseen, error, shown, features)

    # Seen: shapes held out, four folds.
    rows = Rows.of(large, constants)
    fit = Fit(features, rows.x, rows.y, weights=rows.weights, rounds=ROUNDS)
    fold = np.array([hash_of(group) % 4 for group in rows.group])
    seen_q = {name: np.zeros(len(rows.y)) for name, _ in QUANTILES}
    for one in range(4):
        for name, values in trained(fit, (fold != one) & (rows.weights > 0), fold == one).items():
            seen_q[name][fold == one] = values
    margins["seen"] = conformal(rows, seen_q)
    show("shapes held out, GPUs seen", rows, seen_q, margins["seen"])
    never = rows.device == NEVER_FITTED
    if never.any():
        tested = Rows(*(getattr(rows, f)[never] for f in names))
        final = trained(fit, rows.weights > 0, never)
        show(f"{NEVER_FITTED}, never fitted on", tested, final, margins["unseen"])

    used = rows.weights > 0
    provenance = {
        "source": "ai-dynamo/aiconfigurator, systems/data (commit 095f58a): "
        + ", ".join(sorted({t.measured.source for t in large if t.fitted})),
        "licence": "Apache-2.0",
        "rows": int(sum(min(len(t.measured), TRAINED_ROWS) for t in large if t.fitted)),
        "devices": sorted({t.device for t in large if t.fitted}),
        "architectures": sorted({str(t.measured.device.compute_capability) for t in large if t.fitted}),
        "not_fitted": NOT_FITTED,
        "date": datetime.date.today().isoformat(),
        "versions": {"foretell": foretell.__version__, "numpy": np.__version__},
        "method": f"benchmarks/calibrate_gemm.py {family}",
    }
    if arguments.write:
        quantiles = {
            "seen": np.exp(np.quantile(rows.y[used], (0.1, 0.9))),
            "unseen": np.exp(np.quantile(unseen.y[unseen.weights > 0], (0.1, 0.9))),
        }
        pairs = {name: [float(f"{v:.3g}") for v in pair] for name, pair in quantiles.items()}
        document = {
            "schema": SCHEMA,
            "model": family,
            "constants": constants,
            "intervals": {"default": pairs["unseen"], "host": [1.0, 1.0], **pairs},
            "provenance": provenance,
        }
        path = CALIBRATIONS / f"{family}.json"
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
        kept = Fit(features, rows.x[used], rows.y[used], weights=rows.weights[used], rounds=ROUNDS)
        kept.write(CALIBRATIONS, family, margins, provenance)
    print(f"\n{time.time() - began:.0f} s")


def conformal(rows: Rows, predicted: Mapping[str, Floats]) -> tuple[float, float]:
    """What widens quantiles to hold 80 % of each device's share of the fitted rows."""
    used = rows.weights > 0
    down, up = predicted["low"] - rows.y, rows.y - predicted["high"]
    return weighted_quantile(down[used], rows.weights[used], 0.9), weighted_quantile(up[used], rows.weights[used], 0.9)


def without_own(rows: Rows, predicted: Mapping[str, Floats]) -> None:
    """Print how much intervals hold whose margins, too, come from the other devices only, as a new one's must."""
    mid = np.maximum(predicted["mid"], rows.floor)
    used = rows.weights > 0
    low, high = np.zeros(len(mid)), np.zeros(len(mid))
    for device in np.unique(rows.device):
        at = rows.device == device
        others = Rows(*(getattr(rows, f)[~at] for f in Rows.__dataclass_fields__))
        down, up = conformal(others, {name: values[~at] for name, values in predicted.items()})
        low[at], high[at] = predicted["low"][at] - down, predicted["high"][at] + up
    low, high = np.minimum(low, mid), np.maximum(high, mid)
    inside = (rows.y >= low) & (rows.y <= high)
    each = "  ".join(f"{d} {inside[used & (rows.device == d)].mean():.0%}" for d in np.unique(rows.device[used]))
    print(f"margins of the other GPUs: inside {inside[used].mean():.1%}, "
          f"median high/low {np.exp(np.median((high - low)[used])):.2f}\n  {each}")


def weighted_quantile(values: Floats, weights: Floats, q: float) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, q * total[-1])])


def hash_of(text: str) -> int:
    return zlib.crc32(text.encode())


if __name__ == "__main__":
    main()
