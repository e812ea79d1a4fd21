"""Fit the residual of whole steps that the `learned` model applies, and hold families and GPUs out.

    python benchmarks/calibrate_steps.py --data ../shared/data [--held-out FILE] [--write]

Rows are the whole steps of timm's tables (Apache-2.0), all on tensor cores. The target is log(measured / time of the
kernel model with its residuals of operations). Steps in fp32 (NeuSight's transformers, HELP's networks: MIT) are not
fitted, as that did not help on GPUs left out; how far physics is off on them gives the interval of foreign steps.
Three splits are printed, table by table: seen GPU and unseen family, unseen GPU, both unseen. With ``--held-out``
(which `calibrate_networks.py` writes) the constants of the kernel model are those of the same hold-out, so that no part
of a prediction has seen what it is judged on. Steps that wait for the host are not fitted: their time says nothing of
the device.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

import foretell
from foretell.accuracy.measured import Measured, measured
from foretell.accuracy.programs import Programs, Store
from foretell.accuracy.runner import home, sample_names
from foretell.accuracy.slices import Row, data_folder, slices
from foretell.cost import residual
from foretell.cost.features import FEATURES, step_features
from foretell.cost.fitting import Fit
from foretell.cost.kernel import Kernel
from foretell.cost.learned import Learned
from foretell.cost.model import models

FOLDS = 5
TREES = {"num_leaves": 48, "min_data_in_leaf": 8, "lambda_l2": 2.0}
WAITS = 0.4  # of the device's time: where the host takes more, it may set the pace, as hosts differ twofold


@dataclass(frozen=True)
class Steps:
    """Features and targets of all rows, and what they are held out by. `table` indexes `names`."""

    x: np.ndarray
    y: np.ndarray
    table: np.ndarray
    family: np.ndarray
    label: np.ndarray
    gpu: np.ndarray
    measured_s: np.ndarray
    names: list[str]
    kept: list[np.ndarray]  # which measurements of each table the rows are

    @property
    def weights(self) -> np.ndarray:
        """Every table weighs the same; a small one less."""
        counts = np.bincount(self.table, minlength=len(self.names))
        weight = np.minimum(1.0, counts / 60.0) / np.maximum(counts, 1)
        return weight[self.table] / weight[self.table].mean()


def tabulate(tables: Sequence[Measured], model: Learned, only: Sequence[np.ndarray] | None = None) -> Steps:
    """Features and targets of every step that the device, not the host, determines (or of those in `only`)."""
    picked: list[np.ndarray] = []
    xs, ys, which, families, labels, gpus, seconds = [], [], [], [], [], [], []
    for i, table in enumerate(tables):
        times = model.operator_times(table.program, table.device, table.settings)
        repeat = table.program.table.repeat
        busy = np.add.reduceat(times.busy_s * repeat, table.starts)
        host = np.add.reduceat(times.host_s * repeat, table.starts)
        kept = np.flatnonzero(host < WAITS * busy) if only is None else only[i]
        picked.append(kept)
        x = step_features(table.program, times, table.device, table.settings, table.starts)
        xs.append(x[kept])
        ys.append(np.log(table.measured_s / busy)[kept])
        which += [i] * len(kept)
        families += list(table.group[kept])
        labels += [table.label[j] if table.label else f"{table.name} {j}" for j in kept]
        gpus += [table.device.name] * len(kept)
        seconds.append(table.measured_s[kept])
    return Steps(
        np.concatenate(xs),
        np.concatenate(ys),
        np.array(which),
        np.array(families, dtype=object),
        np.array(labels, dtype=object),
        np.array(gpus, dtype=object),
        np.concatenate(seconds),
        [table.name for table in tables],
        picked,
    )


Quantiles = dict[str, np.ndarray]


def held_out(
    tables: Sequence[Measured], model: Learned, constants: Mapping[str, Mapping[str, dict[str, float]]]
) -> dict[str, tuple[Steps, Quantiles]]:
    """Predictions of the residual by split: ``family``, ``gpu``, ``both`` (timm only) and ``name``."""
    plain = tabulate(tables, model)
    fold = np.array([zlib.crc32(str(f).encode()) % FOLDS for f in plain.family])
    result: dict[str, tuple[Steps, Quantiles]] = {"name": (plain, fit_of(plain).held_out(plain.label, FOLDS))}

    def under(kind: str, key: str) -> Steps:
        own = constants.get(kind, {}).get(key)
        if own is None:
            return plain
        calibration = model.kernel.calibration.replace(own)
        return tabulate(tables, replace(model, kernel=replace(model.kernel, calibration=calibration)), plain.kept)

    def empty() -> Quantiles:
        return {name: np.full(len(plain.y), np.nan) for name in ("low", "mid", "high")}

    for split in ("family", "gpu", "both"):
        y, quantiles = plain.y.copy(), empty()
        outs: list[tuple[str, str, np.ndarray, np.ndarray]] = []
        if split == "family":
            outs = [("family", str(k), fold == k, fold != k) for k in range(FOLDS)]
        elif split == "gpu":
            outs = [("gpu", gpu, plain.gpu == gpu, plain.gpu != gpu) for gpu in np.unique(plain.gpu)]
        else:
            inference = np.array([name.startswith("timm-inference") for name in plain.names])[plain.table]
            for gpu in np.unique(plain.gpu[inference]):
                outs += [
                    ("gpu", gpu, inference & (plain.gpu == gpu) & (fold == k), (plain.gpu != gpu) & (fold != k))
                    for k in range(FOLDS)
                ]
        cache: dict[str, Steps] = {}
        for kind, key, out, rest in outs:
            steps = cache.setdefault(key, under(kind, key))
            fit = fit_of(steps)
            for name, quantile in (("low", 0.1), ("mid", 0.5), ("high", 0.9)):
                quantiles[name][out] = fit.train(rest, quantile).predict(steps.x[out])
            y[out] = steps.y[out]
        result[split] = (replace(plain, y=y), quantiles)
    return result


def fit_of(steps: Steps) -> Fit:
    """The problem LightGBM is given."""
    return Fit(FEATURES, steps.x, steps.y, weights=steps.weights, rounds=500, parameters=TREES)


def show(title: str, steps: Steps, quantiles: Quantiles, margins: tuple[float, float]) -> None:
    """Errors and intervals by table."""
    print(f"\n{title}")
    rows = []
    low = np.minimum(quantiles["low"] - margins[0], quantiles["mid"])
    high = np.maximum(quantiles["high"] + margins[1], quantiles["mid"])
    for i, name in enumerate(steps.names):
        rows_of = (steps.table == i) & np.isfinite(quantiles["mid"])
        if not rows_of.any():
            continue
        r = (steps.y - quantiles["mid"])[rows_of]
        error = np.abs(np.expm1(-r))
        inside = ((low <= steps.y) & (steps.y <= high))[rows_of].mean()
        width = np.median(np.exp(high - low)[rows_of])
        rows.append((name, error.mean(), np.median(error), np.quantile(error, 0.9), np.median(-r), inside, width))
        print(
            f"  {name:50s} n {len(r):5d}  mean {rows[-1][1]:6.1%}  median {rows[-1][2]:6.1%}  p90 {rows[-1][3]:6.1%}  "
            f"bias {rows[-1][4]:+6.1%}  covered {inside:4.0%}  width {width:.2f}"
        )
    for prefix in ("timm-inference", "timm-train"):
        group = [row[1:] for row in rows if row[0].startswith(prefix)]
        if group:
            mean, median, p90, bias, inside, width = np.mean(group, axis=0)
            print(
                f"  mean of {len(group):2d} {prefix:39s} {'':7s}  mean {mean:6.1%}  median {median:6.1%}"
                f"  p90 {p90:6.1%}  bias {bias:+6.1%}  covered {inside:4.0%}  width {width:.2f}"
            )


def keep(path: Path, steps: Steps, quantiles: Quantiles, margins: tuple[float, float]) -> None:
    """Write held-out predictions: measured and predicted seconds, the interval's ends, and each row's table."""
    rows = np.isfinite(quantiles["mid"])
    scale = steps.measured_s * np.exp(-steps.y)  # what physics alone predicts
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        measured=steps.measured_s[rows],
        predicted=(scale * np.exp(quantiles["mid"]))[rows],
        low=(scale * np.exp(np.minimum(quantiles["low"] - margins[0], quantiles["mid"])))[rows],
        high=(scale * np.exp(np.maximum(quantiles["high"] + margins[1], quantiles["mid"])))[rows],
        table=np.array(steps.names)[steps.table[rows]],
    )


def timm_tables(folder: Path, limit: int | None, cached_only: bool, cache: Path) -> list[Measured]:
    """timm's tables as `Measured`; with `cached_only`, of the workloads whose captures are there already."""
    from foretell.accuracy.programs import _key, load
    from foretell.errors import CaptureError

    store = Store(cache)
    known: dict[str, Programs | CaptureError] = {}

    def get(row: Row) -> Programs:
        key = _key(row.workload, row.options)
        if key not in known:
            path = cache / f"{key}.npz"
            try:
                if path.exists():
                    known[key] = load(path.read_bytes())
                elif cached_only:
                    known[key] = CaptureError("not captured yet")
                else:
                    known[key] = store.get(row.workload, **row.options)
            except CaptureError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, CaptureError):
            raise found
        return found

    present = [entry for entry in slices().values() if entry.present(folder)]
    rows = {entry.name: entry.read(folder) for entry in present}
    if limit is not None:
        kept = set(sample_names({row.workload for part in rows.values() for row in part}, limit))
        rows = {name: [row for row in part if row.workload in kept] for name, part in rows.items()}
    found = [measured(entry, rows[entry.name], get) for entry in present]
    return [table for table in found if table is not None]


# How much larger errors of steps in fp32 are on GPUs left out of the fit: 7.2 / 5.1 % (`benchmarks/neusight.py`).
UNSEEN = 1.4


def other_intervals(folder: Path, model: Learned) -> dict[str, list[float]]:
    """Factors that hold 80 % of measured / predicted, for steps in fp32 and for other steps left alone.

    NeuSight's transformers and HELP's larger batches are predicted by physics alone; each table weighs the same. Its
    constants were fitted on these devices' operators, so quantiles are widened by what leaving a GPU out costs; by
    twice that for steps that are like nothing measured.
    """
    from foretell.accuracy import help_nas, neusight

    tables = neusight.read_models(folder / "neusight") + help_nas.read(folder, spaces=("ofa",), every=25)
    tables = [table for table in tables if not table.name.endswith("-1")]  # batch one waits for the host
    ratios = np.concatenate([np.log(table.measured_s / table.times(model)) for table in tables])
    weights = np.concatenate([np.full(len(table), 1.0 / len(table)) for table in tables])
    low, high = (_weighted(ratios, weights, quantile) for quantile in (0.1, 0.9))
    return {
        name: [round(float(np.exp(times * UNSEEN * edge)), 3) for edge in (min(low, -0.05), max(high, 0.05))]
        for name, times in (("vector_interval", 1.0), ("foreign_interval", 2.0))
    }


def main() -> None:
    """Read, fit, hold out, print, and with ``--write`` ship."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of measurements [$FORETELL_DATA]")
    parser.add_argument("--limit", type=int, help="workloads of timm's tables (a sample by hash; all)")
    parser.add_argument("--cached-only", action="store_true", help="only workloads whose captures are there already")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="constants that calibrate_networks.py kept")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="keep the tables here between runs")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep held-out predictions here, for accuracy_page.py")
    parser.add_argument("--write", action="store_true", help="replace the shipped residual")
    arguments = parser.parse_args()
    folder = data_folder(arguments.data)
    if arguments.tables and arguments.tables.exists():
        tables = pickle.loads(arguments.tables.read_bytes())  # this script's own file
    else:
        cache = (home(None) or Path(".cache")) / "programs"
        tables = timm_tables(folder, arguments.limit, arguments.cached_only, cache)
        if arguments.tables:
            arguments.tables.write_bytes(pickle.dumps(tables))
    operations = {family: residual.load(family) for family in ("gemm", "attention")}
    model = Learned(cast(Kernel, models()["kernel"]), operations, None)
    constants = json.loads(arguments.held_out.read_text()) if arguments.held_out else {}
    splits = held_out(tables, model, constants)
    titles = {
        "name": "seen GPU, unseen network (folds by name)",
        "family": "seen GPU, unseen family",
        "gpu": "unseen GPU",
        "both": "unseen GPU and family",
    }
    margins = {}
    for split, (steps, quantiles) in splits.items():
        rows = np.isfinite(quantiles["mid"])
        weights = steps.weights[rows]
        margins[split] = (
            _weighted(quantiles["low"][rows] - steps.y[rows], weights),
            _weighted(steps.y[rows] - quantiles["high"][rows], weights),
        )
        show(titles[split], steps, quantiles, margins[split])
        if arguments.keep:
            keep(arguments.keep / f"steps-{split}.npz", steps, quantiles, margins[split])
    if not arguments.write:
        return
    steps = tabulate(tables, model)
    fit = fit_of(steps)
    low, high = np.quantile(steps.x, (0.002, 0.998), axis=0)
    fit.write(
        Path(foretell.__file__).parent / "cost" / "calibrations",
        "steps",
        {"seen": margins["family"], "unseen": margins["gpu"]},
        {
            "source": "huggingface/pytorch-image-models, results/benchmark-*.csv (whole-model step times)",
            "licence": "Apache-2.0",
            "rows": len(steps.y),
            "tables": steps.names,
            "devices": sorted({table.device.name for table in tables}),
            "ranges": {
                name: [float(f"{a:.4g}"), float(f"{b:.4g}")] for name, a, b in zip(FEATURES, low, high, strict=True)
            },
            **other_intervals(folder, model),
            "method": "benchmarks/calibrate_steps.py",
            "date": datetime.date.today().isoformat(),
        },
    )


def _weighted(values: np.ndarray, weights: np.ndarray, quantile: float = 0.9) -> float:
    """A quantile of weighted values."""
    order = np.argsort(values)
    share = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(share, quantile)])


if __name__ == "__main__":
    main()
