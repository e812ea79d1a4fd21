"""Power and energy against measurements: every bar, and the fit of the constants behind them.

    python benchmarks/energy.py [--data DIR] [--sample N] [--fit]

* AIConfigurator's power tables: average power of matrix products and attention. *Steady* is what the product predicts,
  on rows whose power was read for a second or more; *as read* adds what the readings of short rows show (a residual of
  the instrument, `READING`, by folds of shapes), see `foretell.accuracy.power`.
* Zeus and Perseus: time, energy and power at each limit or clock relative to the first setting. *Unseen* is with
  constants fitted without any row of that card.
* dlbench-dvfs, which only evaluates.

`--fit` fits voltage, leakage, clocks and the two unknowns of the workloads on Zeus and Perseus, and prints them.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from foretell.accuracy.power import SHAPE, PowerTable, Response, Shape, dvfs, perseus, power_tables, predicted, zeus
from foretell.cost.calibration import Calibration, load
from foretell.cost.model import models

Floats = npt.NDArray[np.float64]

#: Constants that Zeus and Perseus fit, with the range each may take; the last two are of `Shape`.
FITTED = {
    "voltage.knee": (0.4, 0.9),
    "voltage.slope": (0.2, 2.5),
    "leakage": (0.02, 0.25),
    "dense.base": (0.2, 1.5),
    "memory.knee": (0.1, 0.8),
    "share": (0.3, 1.0),
    "traffic": (0.1, 3.0),
}
BARS = {"gemm": 0.06, "response": 0.10}
#: Trees of the readings' residual: deeper than a kernel's, as readings depend on what went before.
READING = {"num_leaves": 63, "learning_rate": 0.1, "min_data_in_leaf": 15, "lambda_l2": 1.0, "feature_fraction": 0.9}
FOLDS, ROUNDS = 5, 250


def errors(response: Response, calibration: Calibration, shape: Shape) -> tuple[Floats, Floats, Floats]:
    """Relative errors of time, energy and power at all settings but the first."""
    time, energy = predicted(response, calibration, shape)
    power, measured = energy / time, response.energy / response.time
    return (time / response.time - 1)[1:], (energy / response.energy - 1)[1:], (power / measured - 1)[1:]


def pooled(responses: Sequence[Response], calibration: Calibration, shape: Shape) -> list[Floats]:
    """The absolute errors of several responses."""
    parts = [errors(response, calibration, shape) for response in responses]
    return [np.abs(np.concatenate([part[i] for part in parts])) for i in range(3)]


def fit(responses: Sequence[Response]) -> tuple[Calibration, Shape]:
    """Constants that fit some responses best (mean absolute errors of time and energy, each at most a half)."""
    from scipy.optimize import minimize

    shipped = load("energy")
    cards = sorted({(r.device.name, r.dense) for r in responses})
    some = [[r for r in responses if (r.device.name, r.dense) == card] for card in cards]
    some = [rows[:: max(1, len(rows) // 6)] for rows in some]  # every card counts alike
    low, high = np.array(list(FITTED.values())).T

    def of(x: Floats) -> tuple[Calibration, Shape]:
        values = dict(zip(FITTED, (low + (high - low) / (1.0 + np.exp(-x))).tolist(), strict=True))
        shape = Shape(values.pop("share"), values.pop("traffic"))
        return shipped.replace(values), shape

    def loss(x: Floats) -> float:
        calibration, shape = of(x)
        each = [pooled(rows, calibration, shape) for rows in some]
        return float(np.mean([np.minimum(e, 0.5).mean() for three in each for e in three[:2]]))

    x = np.zeros(len(FITTED))  # the middle of each range: a start that knows no card
    simplex = np.vstack([x, *(x + np.eye(len(x)))])
    best = minimize(loss, x, method="Nelder-Mead", options={"maxfev": 260, "initial_simplex": simplex})
    return of(best.x)


def as_read(table: PowerTable, steady: Floats, share: Floats) -> Floats:
    """Steady power times the residual of the readings, each shape by trees that have not seen it."""
    from foretell.cost.fitting import Fit

    ops = table.measured.program.table
    columns = {
        "power_over_limit": steady / table.limit_w,
        "arithmetic": share,
        "log_window": np.log(table.window_s),
        "log_latency": np.log(table.measured.measured_s),
        "log_m": np.log(ops.gemm_m),
        "log_n": np.log(ops.gemm_n),
        "log_k": np.log(ops.gemm_k),
        "log_weights": np.log(ops.gemm_batch * ops.gemm_n * ops.gemm_k),
        "log_result": np.log(ops.gemm_m * ops.gemm_n),
        "odd": ops.gemm_m % 2,
        "log_bytes_per_s": np.log((ops.bytes_read + ops.bytes_written) / table.measured.measured_s),
        "log_flops_per_s": np.log(ops.macs / table.measured.measured_s),
    }
    y = np.log(table.power_w / steady)
    x = np.stack(list(columns.values()), axis=1)
    learned = Fit(list(columns), x, y, rounds=ROUNDS, parameters=READING)
    fold = np.array([zlib.crc32(str(group).encode()) % FOLDS for group in table.measured.group])
    result = np.zeros(len(y))
    for one in range(FOLDS):
        out = fold == one
        if out.any():
            result[out] = learned.train(~out, 0.5).predict(x[out])
    return np.minimum(steady * np.exp(result), 1.05 * table.limit_w)


def thinned(table: PowerTable, keep: int) -> npt.NDArray[np.bool_]:
    """Every so many rows, such that about `keep` are left."""
    return np.arange(len(table)) % max(1, len(table) // keep) == 0


def show(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of figures."""
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def percent(values: Floats, quantile: float = 0.5) -> str:
    """A quantile of relative errors, in per cent."""
    return f"{100 * np.quantile(values, quantile):.1f} %" if len(values) else "-"


def operators(console: Console, root: Path, readings: bool) -> None:
    """The power tables: steady power at the measured and at the predicted pace, and what was read."""
    roofline = models()["roofline"]
    rows, pooled_errors = [], {}
    for table in power_tables(root):
        steady, share = table.predicted_w(roofline)
        paced, _ = table.predicted_w(roofline, measured_times=False)
        error = np.abs(steady / table.power_w - 1)
        long = table.window_s >= 1.0
        cells = [percent(error[long]), f"{long.mean():.0%}", percent(error)]
        cells.append(percent(np.abs(paced / table.power_w - 1)[long]))
        if readings and len(table) > 500:
            read = np.abs(as_read(table, steady, share) / table.power_w - 1)
            system = table.measured.source
            pooled_errors.setdefault(system, []).append(read)
            cells.append(percent(read))
        else:
            cells.append("-")
        rows.append([table.measured.name.removeprefix("aiconfigurator-"), f"{len(table):,}", *cells])
    for source, parts in pooled_errors.items():
        median = np.median(np.concatenate(parts))
        verdict = "" if "gemm" not in source else f"  (bar {BARS['gemm']:.0%})"
        rows.append([source, "", "", "", "", "", f"{100 * median:.1f} %{verdict}"])
    header = ("table", "rows", "steady, long rows", "long", "steady, all", "predicted pace, long", "as read, folds")
    show(console, "Power of operators: median absolute error", header, rows)


def responses(console: Console, root: Path, refit: bool) -> None:
    """Zeus and Perseus by card, with the shipped constants and with ones that never saw the card; dlbench-dvfs."""
    everything = [*zeus(root), *perseus(root)]
    header = ("workloads", "card", "points", "constants", "time", "energy", "power", "90th: time", "energy")
    rows, unseen = [], {}
    for dense, name in ((False, "training, power limits"), (True, "pipeline stages, clocks")):
        for card in sorted({r.device.name for r in everything if r.dense == dense}):
            mine = [r for r in everything if r.device.name == card and r.dense == dense]
            variants = [("shipped", load("energy"), SHAPE)]
            if refit:
                if card not in unseen:
                    unseen[card] = fit([r for r in everything if r.device.name != card])
                variants.append(("unseen", *unseen[card]))
            for what, calibration, shape in variants:
                time, energy, power = pooled(mine, calibration, shape)
                cells = [percent(e) for e in (time, energy, power)] + [percent(e, 0.9) for e in (time, energy)]
                rows.append([name, card, str(len(time)), what, *cells])
    for card in sorted({r.device.name for r in dvfs(root)}):
        mine = [r for r in dvfs(root) if r.device.name == card]
        time, energy, power = pooled(mine, load("energy"), SHAPE)
        cells = [percent(e) for e in (time, energy, power)] + [percent(e, 0.9) for e in (time, energy)]
        rows.append(["dlbench-dvfs, clocks", card, str(len(time)), "shipped", *cells])
    show(console, f"Response to limits and clocks: median absolute error (bar {BARS['response']:.0%})", header, rows)


def main() -> int:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FORETELL_DATA", "../shared/data")))
    parser.add_argument("--no-readings", action="store_true", help="leave out the residual of the readings (minutes)")
    parser.add_argument("--no-unseen", action="store_true", help="leave out the fits without each card (a minute)")
    parser.add_argument("--fit", action="store_true", help="fit the constants on everything and print them")
    arguments = parser.parse_args()
    console = Console(width=140)
    if arguments.fit:
        calibration, shape = fit([*zeus(arguments.data), *perseus(arguments.data)])
        console.print({name: round(calibration[name], 4) for name in list(FITTED)[:-2]}, shape)
        return 0
    responses(console, arguments.data, not arguments.no_unseen)
    operators(console, arguments.data, not arguments.no_readings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
