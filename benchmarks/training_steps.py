"""Predict published steps of distributed training, and judge them by the bars.

    python benchmarks/training_steps.py [SOURCE…] [--data DIR] [--by FIELD] [--rows] [--choices] [--left-out]

One line a source, then one a value of ``--by`` (a field of the row, its plan or its shape: family, container, device,
task, gpus, moe, split, tp, micro_batch, hidden, …): mean, median, 95th percentile and largest absolute relative error
and the median signed one, of tokens per second, or of a step's time where that is what the source states.

``--rows`` lists every row with the parts of its predicted time, ``--choices`` the plans picked among measured
alternatives, ``--left-out`` what the tables hold that is not predicted, ``--ran`` what is held impossible of the rows,
all of which ran: rules broken, memory exceeded. Ends with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Sequence

import numpy as np

from foretell.accuracy.training import SOURCES, Row, left_out, rows
from foretell.accuracy.training.score import Verdict, choices, errors, grouped, predict, verdicts
from foretell.simulate.training import PlanTable
from foretell.simulate.training.step import PARTS, step, steps


def line(name: str, error: np.ndarray) -> str:
    """Statistics of signed errors, one line of at most 80 columns."""
    size = np.abs(error)
    numbers = (size.mean(), np.median(size), np.quantile(size, 0.95), size.max())
    return f"{name[:34]:34}{len(error):5}" + "".join(f"{100 * v:8.1f}" for v in numbers) + (
        f"{100 * np.median(error):+8.1f}"
    )


def head(name: str) -> str:
    """The line above `line`s."""
    return f"{name:34}{'n':>5}{'mean':>8}{'median':>8}{'p95':>8}{'max':>8}{'bias':>8}   (%)"


def list_rows(found: Sequence[Row], seconds: np.ndarray) -> None:
    """Every row, worst first: error, seconds measured and predicted, and the parts of the predicted time in percent."""
    error = errors(found, seconds)
    names = " ".join(f"{part.removesuffix('_s')[:6]:>6}" for part in PARTS)
    print(f"  {'error':>7} {'measured':>9} {'predicted':>9}  {names}  (s; parts in % of predicted)")
    for i in np.argsort(-np.abs(error)):
        row = found[i]
        parts = step(row.config, row.plan, row.cluster).parts()
        shares = " ".join(f"{100 * parts[part] / seconds[i]:6.1f}" for part in PARTS)
        print(f"  {100 * error[i]:+6.1f}% {row.step_s:9.4g} {seconds[i]:9.4g}  {shares}  {row.label}")


def list_choices(found: Sequence[Row], seconds: np.ndarray) -> None:
    """Every choice that costs anything, dearest first."""
    for choice in sorted(choices(found, seconds), key=lambda c: -c.regret):
        if choice.chosen is not choice.fastest:
            print(f"  {100 * choice.regret:+6.1f}% of {choice.of:2}: {choice.chosen.label}; best {choice.fastest.plan}")


def list_impossible(found: Sequence[Row]) -> None:
    """Rows that ran although rules or memory speak against it, counted by reason, with the worst of each."""
    from foretell.simulate.training.legality import explain
    from foretell.simulate.training.memory import memory

    against: dict[str, list[tuple[float, str]]] = {}
    for row in found:
        for broken in explain(row.config, row.plan, row.cluster):
            against.setdefault(broken.rule, []).append((0.0, f"{row.label} ({broken.reason})"))
        device = row.cluster.groups[0][1].device
        if device.memory_bytes:
            held = float(memory(row.config, PlanTable.of([row.plan]), device).reserved_bytes[0])
            if held > device.memory_bytes:
                share = held / device.memory_bytes
                against.setdefault("memory", []).append((share, f"{row.label} ({100 * share:.0f} % of the device's)"))
    for name, rows_of in against.items():
        print(f"  ran, but {name}: {len(rows_of)} rows, such as {max(rows_of)[1]}")


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=f"any of {', '.join(SOURCES)} (default: all)")
    parser.add_argument("--data", help="folder of measurements (default: $FORETELL_DATA)")
    parser.add_argument("--by", metavar="FIELD", action="append", default=[])
    for flag in ("--rows", "--choices", "--left-out", "--ran"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()

    found: list[Verdict] = []
    started, count = time.perf_counter(), 0
    print(head("source"))
    for source in given.sources or SOURCES:
        measured = rows(source, given.data)
        seconds = predict(measured, steps)
        error, count = errors(measured, seconds), count + len(measured)
        print(line(source, error))
        for by in given.by:
            for value, members in grouped(measured, by).items():
                print(line(f"  {by} {value}", error[members]))
        if given.rows:
            list_rows(measured, seconds)
        if given.choices and source.startswith("vtrain"):
            list_choices(measured, seconds)
        if given.ran:
            list_impossible(measured)
        if given.left_out:
            for reason, n in collections.Counter(item.reason for item in left_out(source, given.data)).items():
                print(f"  left out: {n} ({reason})")
        found += verdicts(measured, seconds)
    print(f"{count} rows in {time.perf_counter() - started:.1f} s\n")
    print(f"{'bar':46}{'n':>5}{'value':>9}{'limit':>9}   (%)")
    for bar in found:
        name = f"{bar.source}: {bar.name}"
        print(f"{name:46}{bar.n:5}{100 * bar.value:9.2f}{100 * bar.limit:9.1f}   {'met' if bar.met else 'MISSED'}")
    return 0 if all(bar.met for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
