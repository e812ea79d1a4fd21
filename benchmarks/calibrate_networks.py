"""Fit the constants of the roofline or kernel model to timm's tables, and hold families and GPUs out.

    python benchmarks/calibrate_networks.py --data ../shared/data [--model kernel] [--write]

The constants are global: no model, GPU or family has any of its own. The fit minimises a robust square of
log(predicted / measured) over whole steps, each slice weighing the same, drawn towards the starting values. It prints
errors in the sample, by family (folds over the timm modules that define the models, each held out on every GPU, layout
and runtime at once) and by GPU (one left out), and writes the calibration with the held-out residuals' quantiles.
"""

from __future__ import annotations

import argparse
import datetime
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

import foretell
from calibrate_steps import timm_tables
from foretell.accuracy.measured import Measured
from foretell.accuracy.runner import home
from foretell.accuracy.slices import data_folder
from foretell.cost.calibration import SCHEMA, Calibration, load
from foretell.cost.kernel import Kernel
from foretell.cost.model import CostModel, models
from foretell.cost.program import Program
from foretell.cost.roofline import Roofline

FOLDS = 5
FULL_SLICE = 60  # rows from which a slice weighs in full
HUBER = 0.15  # residuals beyond this weigh linearly
PRIOR = 0.02  # of a constant's free parameter: weak, but it holds those that few rows tell of

# Where the fit starts, and what it is drawn to: round figures typical of vendor libraries on tensor-core GPUs.
# Constants not named here are not fitted, as these tables cannot tell them.
START = {
    "compute.matmul": 0.8,
    "compute.batched_matmul": 0.65,
    "compute.convolution": 0.6,
    "compute.convolution.channels_last": 0.75,
    "compute.convolution.backward": 0.8,
    "compute.convolution.backward.channels_last": 0.8,
    "compute.depthwise": 0.2,
    "compute.depthwise.channels_last": 0.2,
    "compute.depthwise.backward": 0.5,
    "compute.grouped": 0.8,
    "compute.grouped.channels_last": 0.8,
    "compute.grouped.backward": 0.7,
    "compute.grouped.backward.channels_last": 0.5,
    "compute.grouped.backward.channels_last.wide": 0.15,
    "compute.attention": 0.55,
    "compute.attention.backward": 0.75,
    "compute.fetch": 1200.0,
    "compute.fetch_growth": 0.7,
    "compute.tile_reuse": 12.0,
    "compute.tile_start": 96.0,
    "compute.wave_tail": 0.7,
    "memory.matmul": 0.8,
    "memory.convolution": 0.8,
    "memory.convolution.channels_last": 0.8,
    "memory.convolution.conversion": 0.8,
    "memory.depthwise": 0.6,
    "memory.depthwise.channels_last": 0.6,
    "memory.depthwise.backward": 0.7,
    "memory.attention": 0.7,
    "memory.pointwise": 0.85,
    "memory.pointwise.strided": 0.6,
    "memory.batch_norm": 0.8,
    "memory.batch_norm.channels_last": 0.8,
    "memory.batch_norm.training": 0.7,
    "memory.batch_norm.backward": 0.6,
    "memory.layer_norm": 0.8,
    "memory.layer_norm.backward": 0.6,
    "memory.group_norm": 0.6,
    "memory.group_norm.backward": 0.6,
    "memory.softmax": 0.8,
    "memory.softmax.backward": 0.9,
    "memory.reduction": 0.75,
    "memory.pooling": 0.5,
    "memory.pooling.channels_last": 0.6,
    "memory.pooling.backward": 0.8,
    "memory.resample": 0.4,
    "memory.indexing": 0.4,
    "memory.copy": 0.8,
    "memory.copy.strided": 0.55,
    "memory.other": 0.5,
    "memory.l2_fraction": 0.5,
    "memory.l2_speedup": 2.5,
    "compute.depthwise.general": 0.7,
    "latency.plane": 2.5e-07,
    "launch.kernel": 2.5e-06,
    "power.compute": 0.8,
    "power.memory": 0.2,
}


class Kept(Kernel):
    """The kernel model, remembering what does not depend on the constants fitted here."""

    known: ClassVar[dict[tuple[int, str], Any]] = {}

    def _time(self, family: str, rows: Any, program: Program, *rest: Any) -> Any:
        if family == "stream":  # its shares of bandwidth are fitted here
            return super()._time(family, rows, program, *rest)
        key = (id(program), family)
        if key not in self.known:
            self.known[key] = super()._time(family, rows, program, *rest)
        return self.known[key]

    def _occupancy(self, columns: Any, device: Any) -> dict[str, Any]:
        return {}


MODELS: dict[str, Callable[[Calibration], CostModel]] = {
    "roofline": Roofline,
    "kernel": lambda calibration: Kept(calibration, cast(Kernel, models()["kernel"]).families),
}


def predict(sample: Measured, calibration: Calibration) -> np.ndarray:
    """Step times of the sample's measurements: device time alone, as the host is far ahead at these batches."""
    times = sample.op_times(MODELS[calibration.model](calibration))
    return np.add.reduceat(times.busy_s * sample.program.table.repeat, sample.starts)


# --- parameters: efficiencies through a logistic, the rest through a logarithm ----------------------------------------


def _is_share(name: str) -> bool:
    return name.startswith(("compute.", "memory.")) and not name.endswith(
        ("tile_reuse", "tile_start", "fetch", "fetch_growth", "l2_fraction", "l2_speedup", "conversion")
    )


def to_free(name: str, value: float) -> float:
    """Unbounded parameter of a constant."""
    if _is_share(name):
        value = min(max(value, 0.01), 0.985)
        return float(np.log(value / (1 - value)))
    return float(np.log(max(value, 1e-9)))


def from_free(name: str, free: float) -> float:
    """Constant of an unbounded parameter."""
    if _is_share(name):
        return float(1 / (1 + np.exp(-free)))
    if name.endswith("l2_speedup"):
        return float(max(1.0, np.exp(free)))
    return float(np.exp(free))


class Problem:
    """Constants against measurements: robust squares of log(predicted / measured), each slice weighing the same, with a
    Gaussian prior around `start`."""

    def __init__(self, samples: Sequence[Measured], start: Calibration, names: Sequence[str]) -> None:
        self.samples, self.start, self.names = samples, start, names
        self.origin = np.array([to_free(n, start[n]) for n in names])
        self.slice_of = np.concatenate([np.full(len(s), i) for i, s in enumerate(samples)])
        self.family = np.concatenate([s.group for s in samples])

    def calibration(self, free: np.ndarray) -> Calibration:
        """The constants of these parameters."""
        return self.start.replace({n: from_free(n, v) for n, v in zip(self.names, free, strict=True)})

    def residuals(self, free: np.ndarray) -> np.ndarray:
        """log(predicted / measured) of every row."""
        calibration = self.calibration(free)
        return np.concatenate([np.log(predict(s, calibration) / s.measured_s) for s in self.samples])

    def jacobian(self, free: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Its derivatives, by forward differences."""
        columns = []
        for i in range(len(free)):
            moved = free.copy()
            moved[i] += 0.05
            columns.append((self.residuals(moved) - at) / 0.05)
        return np.stack(columns, axis=1)

    def weights(self, rows: np.ndarray) -> np.ndarray:
        """Square root of each row's weight, 0 outside `rows`."""
        counts = np.bincount(self.slice_of[rows], minlength=len(self.samples)).astype(float)
        shares = np.minimum(1.0, counts / FULL_SLICE)
        return np.where(rows, np.sqrt((shares / np.maximum(counts, 1.0))[self.slice_of] / shares.sum()), 0.0)

    def loss(self, residuals: np.ndarray, free: np.ndarray, weights: np.ndarray) -> float:
        """What is minimised."""
        a = np.abs(residuals)
        huber = np.where(a <= HUBER, a**2, 2 * HUBER * a - HUBER**2)
        return float((weights**2 * huber).sum() + (PRIOR**2 * (free - self.origin) ** 2).sum())

    def step(
        self, free: np.ndarray, residuals: np.ndarray, jacobian: np.ndarray, weights: np.ndarray, damping: float
    ) -> np.ndarray:
        """A damped Gauss–Newton step."""
        w = weights * np.sqrt(np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-9)))
        a = np.vstack([jacobian * w[:, None], np.eye(len(free)) * PRIOR])
        b = np.concatenate([-residuals * w, PRIOR * (self.origin - free)])
        normal = a.T @ a
        return np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), a.T @ b), -0.7, 0.7)


def fit(problem: Problem, rounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levenberg–Marquardt on all rows: parameters, residuals and derivatives there."""
    weights = problem.weights(np.ones(len(problem.slice_of), dtype=bool))
    free, damping = problem.origin.copy(), 1e-3
    residuals = problem.residuals(free)
    best = problem.loss(residuals, free, weights)
    for round_ in range(rounds):
        jacobian = problem.jacobian(free, residuals)
        before = best
        for _ in range(5):
            trial = free + problem.step(free, residuals, jacobian, weights, damping)
            at_trial = problem.residuals(trial)
            value = problem.loss(at_trial, trial, weights)
            if value < best:
                best, free, residuals, damping = value, trial, at_trial, damping / 4
                break
            damping = max(damping * 8, 1e-3)
        error = np.median(np.abs(np.expm1(residuals)))
        print(f"  round {round_ + 1}: loss {best:.5f}, median error {error:.3f}", flush=True)
        if before - best < 2e-3 * best:
            break
    return free, residuals, problem.jacobian(free, residuals)


def refit(
    problem: Problem, free: np.ndarray, residuals: np.ndarray, jacobian: np.ndarray, rows: np.ndarray
) -> Calibration:
    """The fit on `rows` alone, linearised around the fit on all: what leaving some out changes is small."""
    weights, moved = problem.weights(rows), free.copy()
    for _ in range(20):
        moved = moved + problem.step(moved, residuals + jacobian @ (moved - free), jacobian, weights, 0.0)
    return problem.calibration(moved)


# --- holding out -----------------------------------------------------------------------------------------------------


def fold_of(family: str) -> int:
    """Which fold a family is held out in: the same on every slice."""
    return zlib.crc32(family.encode()) % FOLDS


Residuals = dict[str, np.ndarray]  # by slice: log(measured / predicted)


def residuals_of(samples: Sequence[Measured], calibration: Calibration) -> Residuals:
    """What the constants leave unexplained."""
    return {s.name: np.log(s.measured_s / predict(s, calibration)) for s in samples}


def without_families(problem: Problem, solution: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[str, Calibration]:
    """For each fold of families, the constants fitted without it, on any slice."""
    fold = np.array([fold_of(f) for f in problem.family])
    return {str(k): refit(problem, *solution, fold != k) for k in range(FOLDS)}


def without_gpus(
    samples: Sequence[Measured], start: Calibration, names: Sequence[str], rounds: int
) -> dict[str, Calibration]:
    """For each GPU, the constants fitted anew on the others."""
    held = {}
    for gpu in dict.fromkeys(s.device.name for s in samples):
        problem = Problem([s for s in samples if s.device.name != gpu], start, names)
        held[gpu] = problem.calibration(fit(problem, rounds)[0])
    return held


def by_family(samples: Sequence[Measured], without: dict[str, Calibration]) -> Residuals:
    """Each family predicted by constants fitted without it."""
    left = {fold: residuals_of(samples, calibration) for fold, calibration in without.items()}
    return {
        s.name: np.array([left[str(fold_of(family))][s.name][i] for i, family in enumerate(s.group)]) for s in samples
    }


def by_gpu(samples: Sequence[Measured], without: dict[str, Calibration]) -> Residuals:
    """Each GPU predicted by constants fitted without it."""
    return {s.name: residuals_of([s], without[s.device.name])[s.name] for s in samples}


def show(title: str, residuals: Residuals) -> None:
    """Errors by slice, and their mean over slices."""
    print(f"\n{title}")
    rows = []
    for name, r in residuals.items():
        error = np.abs(np.expm1(-r))
        rows.append((np.median(error), error.mean(), np.quantile(error, 0.9), np.median(np.expm1(-r))))
        print(
            f"  {name:50s} n {len(r):5d}  median {rows[-1][0]:6.1%}  mean {rows[-1][1]:6.1%}  "
            f"p90 {rows[-1][2]:6.1%}  bias {rows[-1][3]:+6.1%}"
        )
    median, mean, p90, bias = np.mean(rows, axis=0)
    print(
        f"  {'mean of slices':50s} {'':7s}  median {median:6.1%}  mean {mean:6.1%}  p90 {p90:6.1%}  bias {bias:+6.1%}"
    )


def quantiles(samples: Sequence[Measured], residuals: Residuals, suffix: str) -> dict[str, list[float]]:
    """The factors between which 80 % of measured / predicted lie, by mode and runtime."""
    pooled: dict[str, list[np.ndarray]] = {}
    for s in samples:
        pooled.setdefault(f"{s.settings.mode}.{s.settings.runtime}{suffix}", []).append(residuals[s.name])
    result = {}
    for key, parts in pooled.items():
        low, high = np.exp(np.quantile(np.concatenate(parts), (0.1, 0.9)))
        result[key] = [round(float(min(low, 0.98)), 3), round(float(max(high, 1.02)), 3)]
    return result


def calibrate(
    samples: Sequence[Measured], start: Calibration, rounds: int = 6, round_start: bool = True
) -> tuple[dict[str, object], dict[str, object]]:
    """Fit, hold out, print; the calibration as the data of its file, and the constants of every hold-out."""
    names = [name for name in START if name in start.constants]
    if round_start:
        start = start.replace({name: START[name] for name in names})
    problem = Problem(samples, start, names)
    solution = fit(problem, rounds)
    fitted = problem.calibration(solution[0])
    show("in the sample", residuals_of(samples, fitted))
    without = without_families(problem, solution)
    families = by_family(samples, without)
    show("by family (held out)", families)
    inference = [s for s in samples if s.settings.mode == "inference"]
    without_gpu = without_gpus(inference, start, names, max(2, rounds - 2))
    gpus = by_gpu(inference, without_gpu)
    show("by GPU (one held out)", gpus)
    seen = quantiles(samples, families, "")
    between = quantiles(inference, gpus, "")
    unseen = {}
    for key, (low, high) in seen.items():
        # An unseen GPU runs unseen families too: both errors, taken as independent. Training was measured on one GPU.
        gpu_low, gpu_high = between.get(key) or between[key.replace("train", "inference")]
        unseen[f"{key}.unseen"] = [
            round(float(np.exp(-np.hypot(np.log(low), np.log(gpu_low)))), 3),
            round(float(np.exp(np.hypot(np.log(high), np.log(gpu_high)))), 3),
        ]
    # Language models, say, were not measured: at least a factor of two each way.
    widest = [min(0.5, *(low for low, _ in unseen.values())), max(2.0, *(high for _, high in unseen.values()))]
    held_out = {
        "family": {fold: dict(c.constants) for fold, c in without.items()},
        "gpu": {gpu: dict(c.constants) for gpu, c in without_gpu.items()},
    }
    data = {
        "schema": SCHEMA,
        "model": start.model,
        "constants": {name: float(f"{value:.4g}") for name, value in fitted.constants.items()},
        "intervals": {
            "default": [round(w, 3) for w in widest],
            "host": list(start.intervals["host"]),
            **seen,
            **unseen,
        },
        "provenance": {
            "source": "huggingface/pytorch-image-models, results/benchmark-*.csv (whole-model step times)",
            "licence": "Apache-2.0",
            "slices": [s.name for s in samples],
            "rows": int(sum(len(s) for s in samples)),
            "workloads": len({w for s in samples for w in s.label}),
            "architectures": sorted({s.device.compute_capability or "" for s in samples}),
            "date": datetime.date.today().isoformat(),
            "versions": {"foretell": foretell.__version__, "numpy": np.__version__},
            "method": "benchmarks/calibrate_networks.py: one set of constants for all GPUs and networks; intervals are "
            "10 and 90 % quantiles of measured / predicted, families held out (seen) or GPUs held out (unseen)",
            "host": "constants and interval by eye from launch-bound rows of ScalingIntelligence/KernelBench's level 3 "
            "(MIT): ResNet18, ResNet101, EfficientNetB0 and MobileNetV2 take 2.2 times as long on the slowest of its "
            "hosts as on the fastest, whatever the GPU",
            "not_fitted": "memory.sort, memory.optimizer, memory.embedding, memory.random, compute.recurrent, "
            "compute.vector: round figures. power.<compute capability>: joules of one "
            "multiprocessor cycle, from the highest sustained GEMM rates in ai-dynamo/aiconfigurator's tables "
            "(Apache-2.0) for 8.0, 8.9, 9.0, 10.0 and 12.0, and from TDP and clocks for 7.0, 7.5 and 8.6",
        },
    }
    return data, held_out


def main() -> None:
    """Read the tables, capture what they measured, fit, print, and with ``--write`` ship."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of measurements [$FORETELL_DATA]")
    parser.add_argument("--cache-dir", type=Path, default=None, help="where captures are kept")
    parser.add_argument("--limit", type=int, default=250, help="workloads to fit on (a sample by hash)")
    parser.add_argument("--cached-only", action="store_true", help="only workloads whose captures are there already")
    parser.add_argument("--go-on", action="store_true", help="start from the shipped constants, not from round figures")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", choices=tuple(MODELS), default="roofline", help="whose constants")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="keep the constants of every hold-out here")
    parser.add_argument("--write", action="store_true", help="replace the shipped calibration")
    arguments = parser.parse_args()
    cache = (arguments.cache_dir or home(None) or Path(".cache")) / "programs"
    samples = timm_tables(data_folder(arguments.data), arguments.limit, arguments.cached_only, cache)
    data, held_out = calibrate(samples, load(arguments.model), arguments.rounds, not arguments.go_on)
    if arguments.held_out:
        arguments.held_out.write_text(json.dumps(held_out), encoding="utf-8")
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    if arguments.write:
        folder = Path(foretell.__file__).parent / "cost" / "calibrations"
        (folder / f"{arguments.model}.json").write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
