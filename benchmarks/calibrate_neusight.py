"""Fit the constants of fp32 products and streaming kernels on NeuSight's measurements (MIT), and ship them.

    python benchmarks/calibrate_neusight.py

writes ``simt.json`` and ``stream.json``. Operators and whole transformers are fitted together, in logarithms, with a
loss that grows linearly for outliers; constants that the data leave open are held near a start that comes from data
sheets and published microbenchmarks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from foretell.accuracy.neusight import read_models, read_operators
from neusight import FOLDER, Work, gather, odd, predict

CALIBRATIONS = Path(__file__).parents[1] / "src/foretell/cost/calibrations"

#: Constant → (start, what it may be off by, as a factor's logarithm; 0: fixed).
START: Mapping[str, tuple[float, float]] = {
    "share.narrow": (0.95, 0.1),
    "share.wide": (0.9, 0.1),
    "share.matrix": (0.75, 0.5),
    "tile.reuse": (5.0, 0.5),
    "tile.start": (4.0, 0.7),
    "tile.tail": (0.95, 0.0),
    "power.joules": (24e-12, 0.3),
    "power.joules_matrix": (8e-12, 0.5),
    "power.process": (1.0, 0.1),  # energy of a gate is in proportion to its feature size, at a given voltage
    "power.voltage_floor": (0.8, 0.0),
    "power.others": (10.0, 0.0),
    "memory.resident": (2.0, 0.0),
    "memory.l2_fraction": (0.5, 0.0),
    "memory.share": (0.65, 0.2),
    "latency.split": (8e-6, 0.5),
    "latency.kernel": (2e-6, 0.3),
    "latency.memory": (1.5e-6, 0.3),
    "rows.in_registers": (1024.0, 0.0),
    "rows.resident": (8.0, 0.5),
    "rows.sharpness": (2.0, 0.0),
    "rows.l2_fraction": (1.0, 0.7),
    "rows.chain": (3e-6, 0.5),
    "l2.fraction": (0.3, 0.0),
    "l2.bytes_per_cycle": (32.0, 0.2),
    "operations.share": (0.6, 0.4),
    "memory.graphics": (0.78, 0.3),
    "memory.stacked": (0.88, 0.3),
    "share.pointwise": (1.0, 0.0),
    "share.broadcast": (0.85, 0.2),
    "share.permute": (0.8, 0.2),
    "share.dropout": (0.9, 0.2),
    "share.softmax": (0.95, 0.2),
    "share.softmax_backward": (0.9, 0.2),
    "share.layer_norm": (0.9, 0.2),
    "share.layer_norm_backward": (0.7, 0.2),
    "share.reduction": (0.85, 0.2),
    "share.embedding": (0.7, 0.2),
    "share.embedding_backward": (0.4, 0.4),
    "call.gap": (15e-6, 0.5),
}
_AT_MOST_ONE = ("share.narrow", "share.wide", "share.matrix", "memory.share", "memory.graphics", "memory.stacked")
_SIMT = ("share.narrow", "share.wide", "share.matrix", "tile.", "power.", "memory.resident", "memory.l2_fraction",
         "memory.share", "latency.split", "latency.kernel")
# Weights: every operator table counts as so many rows, a whole transformer as so many. Tables are bursts of 25 calls;
# transformers run for seconds, as users' work does, and at another clock where the power limit sets it: an L4 does 9
# TFLOP/s in the tables of products and 12 to 13 in transformers, a P4 4.6 and 2.4.
TABLE_WEIGHT, PRODUCT_WEIGHT, MODEL_WEIGHT = 15.0, 8.0, 8.0


def weights(work: Work) -> np.ndarray:
    """Weight of every measurement of a device."""
    _, table, count = np.unique(work.label.astype(str), return_inverse=True, return_counts=True)
    each = np.where(work.gemm[work.starts], PRODUCT_WEIGHT, TABLE_WEIGHT)
    return np.where(work.call, each / count[table], MODEL_WEIGHT)


def fit(works: Sequence[Work], start: Mapping[str, float] | None = None, evaluations: int = 15) -> dict[str, float]:
    """Constants that fit these devices' measurements; `start` warms the search up, priors stay those of `START`."""
    free = [name for name, (_, spread) in START.items() if spread > 0]
    prior = np.array([np.log(START[name][0]) for name in free])
    spread = np.array([START[name][1] for name in free])
    fixed = {name: value for name, (value, one) in START.items() if one == 0}

    def constants(x: np.ndarray) -> dict[str, float]:
        values = {**fixed, **dict(zip(free, np.exp(x).tolist(), strict=True))}
        return {name: min(v, 1.0) if name in _AT_MOST_ONE else v for name, v in values.items()}

    def residuals(x: np.ndarray) -> np.ndarray:
        chosen = constants(x)
        parts = [(x - prior) / spread * 0.1]
        for work in works:
            error = np.log(predict(work, chosen) / work.measured_s)
            whole = ~work.call
            keep = np.array([not (w and odd(work, i)) for i, w in enumerate(whole)])
            parts.append((np.sqrt(weights(work)) * error)[keep])
        return np.concatenate(parts)

    x0 = prior if start is None else np.log([start[name] for name in free])
    result = least_squares(residuals, x0, loss="soft_l1", f_scale=0.1, diff_step=0.01, max_nfev=evaluations)
    return constants(result.x)


def main() -> None:
    works = gather([*read_operators(FOLDER), *read_models(FOLDER)], 60)
    fitted = {name: float(f"{value:.4g}") for name, value in fit(works).items()}
    rows = int(sum(len(work.measured_s) for work in works))
    error = np.concatenate([np.log(w.measured_s / predict(w, fitted)) for w in works])
    low, high = (float(f"{np.exp(q):.3g}") for q in np.quantile(error, (0.1, 0.9)))
    for name in ("simt", "stream"):
        own = {k: v for k, v in fitted.items() if k.startswith(_SIMT) == (name == "simt")}
        if name == "stream":
            own["latency.kernel"] = fitted["latency.kernel"]
        data = {
            "schema": "foretell.calibration/1",
            "model": name,
            "constants": own,
            "intervals": {"default": [low, high], "host": [0.7, 1.4]},
            "provenance": {
                "source": "NeuSight (ASPLOS 2025), github.com/sitar-lab/NeuSight, scripts/asplos, commit 6945927",
                "licence": "MIT",
                "rows": rows,
                "what": "fp32 operators of PyTorch 2.1 (60 rows of each device and operator) and whole transformers, "
                "P4, P100, T4, V100, A100, L4, MI100, MI210, MI250; constants of unfitted kinds from published "
                "microbenchmarks and data sheets",
                "method": "least squares on log(predicted / measured), soft L1 at 0.15, priors; "
                "benchmarks/calibrate_neusight.py",
                "date": date.today().isoformat(),
            },
        }
        (CALIBRATIONS / f"{name}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(json.dumps(fitted, indent=1))


if __name__ == "__main__":
    main()
