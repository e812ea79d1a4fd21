"""Predict measured serving, and judge the predictions by the bars.

    python benchmarks/serving_accuracy.py [SOURCE…] [--data DIR] [--by FIELD] [--rows] [--left-out] [--simulate]
                                          [--constants FILE [--leave-gpu GPU]] [--figure NAME]

Sources are tables of loads at a steady state (one line each, then one a value of ``--by``: family, gpu, engine,
version, precision, tp, moe, …), ``runs`` (vLLM request by request, by the simulator, once with kernels from their
profile and once from the data sheet) and ``budgets`` (memory for the KV cache). Errors are relative: median, mean,
95th percentile and largest of the absolute ones, and the median signed one.

Loads are predicted in closed form (`foretell.accuracy.serving.steady`); with ``--simulate`` those of a closed loop by
the simulator, ten times as many requests as are under way, as InferenceMAX does. ``--rows`` lists every row, worst
first. ``--constants`` takes other constants of serving than those that ship, and ``--leave-gpu`` judges them, fitted
without that GPU, on its rows. Ends with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foretell.accuracy.serving import SOURCES, Row, left_out, rows
from foretell.accuracy.serving.cache_budgets import budgets
from foretell.accuracy.serving.llmservingsim import Run, profiled, runs
from foretell.accuracy.serving.score import FIGURES, Verdict, errors, grouped, verdicts
from foretell.accuracy.serving.steady import Steady, predict
from foretell.accuracy.slices import data_folder
from foretell.cost.calibration import parse
from foretell.errors import ForetellError
from foretell.simulate.serving import Requests
from foretell.simulate.serving.iteration import Constants, Iterations, constants
from foretell.simulate.serving.simulator import Costs, Tabled, serve

#: Requests of a simulated closed loop, as a multiple of those under way.
ROUNDS = 10


def line(name: str, error: np.ndarray) -> str:
    """Statistics of signed errors, one line of at most 80 columns."""
    size = np.abs(error)
    numbers = (np.median(size), size.mean(), np.quantile(size, 0.95), size.max(), np.median(error))
    return f"{name[:34]:34}{len(error):5}" + "".join(f"{100 * v:8.1f}" for v in numbers)


def head() -> str:
    """The line above `line`s."""
    return f"{'source':34}{'n':>5}{'median':>8}{'mean':>8}{'p95':>8}{'max':>8}{'bias':>8}  (%)"


def simulated(row: Row, iterations: Iterations, guess: Steady) -> Steady:
    """The load of a closed loop by the simulator."""
    rng = np.random.default_rng(0)
    count = max(16, int(ROUNDS * row.amount))
    lengths = [rng.integers(int(row.shortest * n), int(n) + 1, count) for n in (row.isl, row.osl)]
    plan, cached = row.plan.replace(prefix_cache=row.cached_isl > 0), np.int64(row.cached_isl)
    prompts, answers = (np.maximum(n, 1) for n in lengths)
    requests = Requests.of(np.zeros(count), prompts, answers, 1, np.minimum(cached, prompts - 1))
    served = serve(Tabled(iterations), plan, requests, concurrency=int(row.amount))
    answered = served.output_tokens > 1
    decode = (served.finished_s - served.first_token_s)[answered] / (served.output_tokens[answered] - 1)
    return dataclasses.replace(
        guess,
        tpot_s=float(decode.mean()),
        ttft_s=float(np.nanmean(served.first_token_s - served.arrival_s)),
        tokens_per_s=float(served.output_tokens.sum() / np.nanmax(served.finished_s)),
    )


def steady_loads(found: Sequence[Row], using: Constants, simulate: bool) -> list[Steady | ForetellError]:
    """Predictions of rows."""

    def iterations_of(row: Row) -> Iterations:
        return Iterations.of(row.config, row.plan, row.cluster, using)

    predicted = predict(found, iterations_of)
    if simulate:
        for i, row in enumerate(found):
            one = predicted[i]
            if row.load == "concurrency" and isinstance(one, Steady):
                try:
                    predicted[i] = simulated(row, iterations_of(row), one)
                except ForetellError as error:
                    print(f"  not simulated: {row.label}: {error}")
    return predicted


def list_rows(found: Sequence[Row], predicted: Sequence[Steady | ForetellError], figure: str) -> None:
    """Every row that states a figure, worst first."""
    error = errors(found, predicted, figure)
    print(f"  {'error':>7} {'measured':>9} {'predicted':>9} {'running':>8} {'decode':>9} {'prompt':>9}  ({figure})")
    for i in np.argsort(-np.abs(error)):
        one = predicted[i]
        if np.isnan(error[i]):
            continue
        if isinstance(one, ForetellError):
            print(f"  no answer: {found[i].label}: {one}")
            continue
        measured, figures = getattr(found[i], figure), (one.running, 1e3 * one.decode_s, 1e3 * one.prompt_s)
        print(f"  {100 * error[i]:+6.1f}% {measured:9.4g} {getattr(one, figure):9.4g} "
              f"{figures[0]:8.4g} {figures[1]:7.3g}ms {figures[2]:7.4g}ms  {found[i].label}")  # fmt: skip


def judge_run(run: Run, costs: Costs, kind: str, limits: tuple[float, float, float]) -> list[Verdict]:
    """A run by the simulator: mean TPOT and TTFT, and the TPOT of each request."""
    served = serve(costs, run.plan, run.requests)
    tpot = (served.finished_s - served.first_token_s) / np.maximum(served.output_tokens - 1, 1)
    ttft = served.first_token_s - served.arrival_s
    signed = [tpot.mean() / run.tpot_s.mean() - 1.0, ttft.mean() / run.ttft_s.mean() - 1.0]
    each = float(np.abs(tpot / run.tpot_s - 1.0).mean())
    print(f"{'runs, ' + kind + ', ' + run.label:52}{100 * signed[0]:+8.1f}{100 * signed[1]:+8.1f}{100 * each:8.1f}")
    values = (abs(signed[0]), abs(signed[1]), each)
    names = ("mean TPOT", "mean TTFT", "TPOT of a request, mean")
    return [
        Verdict(f"runs, {kind}", f"{name}, {run.label[:12]}", float(value), limit, len(run.requests))
        for name, value, limit in zip(names, values, limits, strict=True)
        if limit
    ]


def judge_runs(folder: Path, using: Constants) -> list[Verdict]:
    """The three runs."""
    print(f"{'run':52}{'TPOT':>8}{'TTFT':>8}{'each':>8}  (%)")
    found: list[Verdict] = []
    for run in runs(folder):
        found += judge_run(run, profiled(run), "profiled", (0.03, 0.10, 0.04))
        own = Iterations.of(run.config, run.plan, run.cluster, using)
        found += judge_run(run, own, "data sheet", (0.10, 0.25, 0.0))
    return found


def judge_budgets(using: Constants) -> list[Verdict]:
    """The two budgets."""
    found = []
    for one in budgets():
        iterations = Iterations.of(one.config, one.plan, one.cluster, using)
        tokens = iterations.kv_capacity_tokens
        nbytes = tokens * iterations.kv_bytes_per_token
        print(f"{one.label}: {nbytes / 2**30:.2f} GiB for {one.nbytes / 2**30:.2f}, {tokens} tokens for {one.tokens}")
        found.append(Verdict("budgets", f"bytes, {one.plan.engine}", abs(nbytes / one.nbytes - 1.0), 0.05, 1))
        found.append(Verdict("budgets", f"tokens, {one.plan.engine}", abs(tokens / one.tokens - 1.0), 0.05, 1))
    return found


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = (*SOURCES, "runs", "budgets")
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=f"any of {', '.join(choices)} (default: all)")
    parser.add_argument("--data", help="folder of measurements (default: $FORETELL_DATA)")
    parser.add_argument("--by", metavar="FIELD", action="append", default=[])
    parser.add_argument("--figure", choices=FIGURES, help="list and group this one only")
    parser.add_argument("--constants", metavar="FILE", help="constants of serving, JSON")
    parser.add_argument("--leave-gpu", metavar="GPU", help="judge rows of this GPU only, at 15 %% of median TPOT error")
    for flag in ("--rows", "--left-out", "--simulate"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    using = constants()
    if given.constants:
        using = Constants(parse(Path(given.constants).read_text(encoding="utf-8"), given.constants))
    wanted = given.sources or choices
    if given.leave_gpu:
        wanted = ["silicon-sample"]

    found: list[Verdict] = []
    started, count = time.perf_counter(), 0
    for source in wanted:
        if source == "runs":
            found += judge_runs(data_folder(given.data), using)
            continue
        if source == "budgets":
            found += judge_budgets(using)
            continue
        measured = rows(source, given.data)
        if given.leave_gpu:
            measured = [row for row in measured if row.gpu == given.leave_gpu]
        predicted = steady_loads(measured, using, given.simulate)
        count += len(measured)
        print(head())
        for figure in FIGURES if given.figure is None else (given.figure,):
            error = errors(measured, predicted, figure)
            stated = np.isfinite(error)
            if not stated.any():
                continue
            print(line(f"{source}, {figure}", error[stated]))
            for by in given.by:
                for value, members in grouped(measured, by).items():
                    picked = error[members][stated[members]]
                    if len(picked):
                        print(line(f"  {by} {value}", picked))
            if given.rows:
                list_rows(measured, predicted, figure)
        if given.left_out:
            for reason, n in collections.Counter(item.reason for item in left_out(source, given.data)).items():
                print(f"  left out: {n} ({reason})")
        if given.leave_gpu:
            error = np.abs(errors(measured, predicted, "tpot_s"))
            found.append(Verdict(source, f"TPOT, median, {given.leave_gpu}", float(np.median(error)), 0.15, len(error)))
        else:
            found += verdicts(measured, predicted)
    print(f"{count} rows in {time.perf_counter() - started:.1f} s\n")
    print(f"{'bar':56}{'n':>5}{'value':>9}{'limit':>9}  (%)")
    for bar in found:
        name = f"{bar.source}: {bar.name}"
        print(f"{name[:55]:56}{bar.n:5}{100 * bar.value:9.2f}{100 * bar.limit:9.1f}  {'met' if bar.met else 'MISSED'}")
    return 0 if all(bar.met for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
