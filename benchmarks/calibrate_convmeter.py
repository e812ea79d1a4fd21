"""Fit ConvMeter's coefficients on timm's tables and write ``cost/calibrations/convmeter.json``.

    python benchmarks/calibrate_convmeter.py [--share N] [--cached]

Each GPU has coefficients of its own under each condition (mode, runtime, layout) measured on it; those of all GPUs
together stand in for others. Intervals are of families held out, and of GPUs held out. ``--share N`` takes every N-th
workload; ``--cached`` only those captured before, for a machine that should not capture a thousand networks.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import foretell.cost as cost
from foretell.accuracy import programs
from foretell.claims.cost.convmeter import Case, cases, held_out
from foretell.cost.convmeter import TERMS, least_squares
from foretell.errors import CaptureError
from foretell.workload.cache import folder as cache_folder

OUTPUT = Path(str(cost.__file__)).parent / "calibrations" / "convmeter.json"


class CachedStore(programs.Store):
    """Captures made before; anything else counts as one that failed."""

    def get(self, workload: str, **options: Any) -> programs.Programs:
        assert self._folder is not None
        path = self._folder / f"{programs._key(workload, options)}.npz"
        if not path.exists():
            raise CaptureError("not captured yet")
        return programs.load(path.read_bytes())


def named(x: np.ndarray, prefix: str, train: bool) -> dict[str, float]:
    """Coefficients under their names, rounded."""
    values = {f"forward.{term}": value for term, value in zip(TERMS, x, strict=False)}
    if train:  # a step's time alone does not tell its passes apart
        values |= {f"backward.{term}": values[f"forward.{term}"] for term in TERMS[:-1]}
        values["update.weights"] = x[len(TERMS)]
    return {f"{prefix}.{name}": float(f"{value:.4g}") for name, value in values.items()}


def solve(found: list[Case]) -> np.ndarray:
    """Coefficients of these cases."""
    return least_squares(np.array([c.columns for c in found]), np.array([c.measured_s for c in found]))


def quantiles(pairs: list[tuple[Case, float]]) -> list[float]:
    """10 and 90 % quantiles of measured / predicted."""
    ratio = np.array([case.measured_s / predicted for case, predicted in pairs])
    return [float(f"{q:.3g}") for q in np.quantile(ratio, (0.1, 0.9))]


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--cached", action="store_true")
    options = parser.parse_args()
    kept = cache_folder()
    folder = None if kept is None else kept / "programs"
    store = (CachedStore if options.cached else programs.Store)(folder)

    constants: dict[str, float] = {}
    intervals: dict[str, list[float]] = {"default": [0.5, 2.0], "host": [0.65, 1.6]}
    rows: dict[str, int] = {}
    for mode in ("inference", "train"):
        found = list(cases(mode, options.share, store))
        print(f"{mode}: {len(found)} rows of {len({c.workload for c in found})} networks")
        for condition in dict.fromkeys(c.condition for c in found):
            own = [c for c in found if c.condition == condition]
            train = mode == "train"
            if len(own) < 2 * len(own[0].columns):
                continue
            rows[condition] = len(own)
            constants |= named(solve(own), condition, train)
            devices = list(dict.fromkeys(c.device for c in own))
            for name in devices:
                constants |= named(solve([c for c in own if c.device == name]), f"{name}.{condition}", train)
            apart = []
            for name in devices if len(devices) > 1 else []:
                rest, out = [c for c in own if c.device != name], [c for c in own if c.device == name]
                apart += list(zip(out, (np.array([c.columns for c in out]) @ solve(rest)).tolist(), strict=True))
            for label, pairs in (("", held_out(own)), (".unseen", apart)):
                if pairs:
                    runtime = condition.removesuffix(".channels_last")
                    intervals[f"{runtime}{label}"] = quantiles(pairs)
                    error = np.array([abs(p / c.measured_s - 1.0) for c, p in pairs])
                    mean, median = error.mean(), np.median(error)
                    print(f"  {condition}{label}: {len(pairs)} rows, mean {mean:.3f}, median {median:.3f}")
    note = ""
    if not any(name.startswith("train.") for name in constants):
        note = "no training rows were captured: passes of a training step have the coefficients of inference"
        for layout in ("", ".channels_last"):
            for term in TERMS:
                value = constants[f"inference.eager{layout}.forward.{term}"]
                constants |= {f"train.eager{layout}.{one}.{term}": value for one in ("forward", "backward")}
            constants[f"train.eager{layout}.update.weights"] = 1.0
    data = {
        "schema": "foretell.calibration/1",
        "model": "convmeter",
        "constants": constants,
        "intervals": intervals,
        "provenance": {
            "source": "huggingface/pytorch-image-models, results/benchmark-*.csv (whole-model step times)",
            "licence": "Apache-2.0",
            "rows": rows,
            "date": date.today().isoformat(),
            "method": "benchmarks/calibrate_convmeter.py: least squares of relative errors, coefficients ≥ 0;"
            " intervals are 10 and 90 % quantiles of measured / predicted, families held out (seen) or GPUs held out",
            "note": note,
        },
    }
    OUTPUT.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
