"""Fit the constants of serving on openly licensed measurements: ``python benchmarks/serving_fit.py [--write]``.

Rows and the closed form of a steady load are those of `foretell.accuracy.serving`:

    silicon-sample     time of an output token, and at low load of the first (ai-dynamo/aiconfigurator, Apache-2.0)
    splitwise          time of a token, and of a prompt (MIT)
    tensorrt-llm       tokens a second (Apache-2.0)

The logarithm of each prediction is taken to be linear in the logarithms of the constants; two or three rounds do. All
constants are held near where they start, and those of hosts near one another, so that what no row shows stays put.
Those of experts' kernels are measured by themselves (``benchmarks/serving_experts.py``, to be run before) and stay.
Nothing is fitted on ML.ENERGY's rows, which have no licence. What no row shows of a generation of GPUs is the mean of
those that rows do show.

``--leave`` judges by leaving one GPU out after the other, with its rows of all sources: constants are fitted anew from
`NEUTRAL` ones, which have seen no row, and judged on all rows of ``silicon-sample`` that the GPU has. Models are left
out by one linear step from the constants that ship.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

import foretell
from foretell.accuracy.serving import Row, rows
from foretell.accuracy.serving.steady import Steady, predict
from foretell.simulate import serving
from foretell.simulate.serving.iteration import Constants, Iterations, constants
from foretell.simulate.serving.iteration.constants import host_of
from foretell.simulate.training.constants import generation

CALIBRATION = Path(serving.__file__).with_name("calibration.json")
#: What is fitted, the weight of a row, and the share of rows taken.
FITTED = (
    ("silicon-sample", "tpot_s", 1.0, 0.5),
    ("silicon-sample", "ttft_s", 0.25, 0.6),
    ("splitwise", "tpot_s", 3.0, 1.0),
    ("splitwise", "ttft_s", 3.0, 1.0),
    ("tensorrt-llm", "tokens_per_s", 0.35, 0.25),
)
#: First tokens say what prompts take: at up to so many requests, which do not come in step.
LOW_LOAD, LONG = 8, 1000
#: How far a constant is let go from its start, as a factor's logarithm, by how its name begins.
WIDTHS = {
    "product.": 0.08, "product.weight_only": 0.35, "experts.weight_only": 1.0, "experts.fp8.": 0.25,
    "experts.uneven": 0.35, "stream.": 0.06, "attention.": 0.08, "latency.": 0.4, "kernel_s": 0.3, "routing_s": 0.6,
    "host.": 1.0,
}  # fmt: skip
#: Where constants start that have seen no row: kernels as they are alone, hosts of a millisecond.
NEUTRAL = {
    "product.": 0.9, "product.memory": 1.0, "product.weight_only": 0.5, "experts.weight_only": 0.4,
    "experts.uneven": 0.2, "experts.fp8.vllm": 0.8, "experts.fp8.sglang": 0.8, "experts.fp8.trtllm": 0.8,
    "latency.": 0.7, "attention.decode": 0.95, "attention.prefill": 0.95, "attention.latent": 0.95,
    "kernel_s": 2e-6, "routing_s": 2e-5, "stream.share": 0.8,
    **{f"host.{engine}.step_s": 1e-3 for engine in ("vllm", "vllm-v1", "sglang", "trtllm")},
    **{f"host.{engine}.sequence_s": 2e-5 for engine in ("vllm", "vllm-v1", "sglang", "trtllm")},
}  # fmt: skip
#: Shares of bandwidth that would be more than a device has.
MOST = {
    "product.memory": 1.18, "attention.decode": 1.25, "attention.prefill": 1.2, "attention.latent": 1.2,
    "stream.share": 0.95, "experts.fp8.": 1.2, "experts.weight_only": 0.9, "experts.uneven": 1.2,
}  # fmt: skip
#: What no row of these tables shows, and what is measured elsewhere.
FIXED = (
    "power.", "attention.unpacked", "attention.filled", "experts.half", "experts.fp4", "experts.memory",
    "experts.fp8.registers", "experts.fp8.shared", "experts.fp8.tensor_memory", "experts.fp8.static",
    "experts.fp8.vllm-eager", "experts.fp8.vllm-v0",
)  # fmt: skip
#: Of GPUs, as `foretell.simulate.training.constants.generation` names them.
GENERATIONS = ("registers", "shared", "tensor_memory")
_ROBUST, _STEP, _TRUST = 0.08, 1.25, 1.2

Item = tuple[Row, str, float]


def items() -> list[Item]:
    """(row, what is compared, weight), the same for the same tables.

    Left out are vLLM's with data-parallel ranks, whose hosts must agree on each iteration, and those whose prompts are
    only taken to have been cached.
    """
    draw, found = random.Random(0), []
    for source, measured, weight, share in FITTED:
        for row in rows(source):
            agreed = row.engine == "vllm" and row.plan.dp > 1
            wanted = row.split == "fit" and getattr(row, measured) > 0 and not agreed and not row.cached_isl
            if measured == "ttft_s" and row.load == "concurrency":
                wanted &= row.amount <= LOW_LOAD and row.plan.dp == 1 and row.isl >= LONG and row.shortest < 1.0
            if wanted and draw.random() < share:
                found.append((row, measured, weight))
    return found


def predicted(changes: dict[str, float]) -> np.ndarray:
    """Logarithms of what each item is predicted with some constants changed; nan where nothing can be."""
    using = constants().replace(changes)
    chosen = items()
    said = predict([row for row, _, _ in chosen], lambda row: Iterations.of(row.config, row.plan, row.cluster, using))
    return np.array([
        np.log(getattr(one, measured)) if isinstance(one, Steady) and getattr(one, measured) > 0 else np.nan
        for one, (_, measured, _) in zip(said, chosen, strict=True)
    ])  # fmt: skip


def _longest(name: str, table: dict[str, float], default: float) -> float:
    keys = [key for key in table if name.startswith(key)]
    return table[max(keys, key=len)] if keys else default


def _groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Constants that no row shares, by what they have in common, to be varied at once: of generations, of hosts."""
    found: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        if parts[0] == "host":
            key = f"host.*.{parts[2]}"
        elif parts[-1] in GENERATIONS:
            key = ".".join([*parts[:-1], "*"])
        else:
            key = name
        found.setdefault(key, []).append(name)
    return found


def slopes(start: dict[str, float], base: np.ndarray, chosen: Sequence[Item]) -> tuple[list[str], np.ndarray]:
    """Names, and d log prediction / d log constant (items, names)."""
    names = [n for n, value in start.items() if value > 0 and (n in WIDTHS or not n.startswith(FIXED))]
    traits = [{generation(row.cluster.nodes[0].device), host_of(row.plan)} for row, _, _ in chosen]
    columns: dict[str, np.ndarray] = {}
    groups = _groups(names)
    with ProcessPoolExecutor(2) as pool:
        runs = {key: pool.submit(predicted, {**start, **{n: start[n] * _STEP for n in group}})
                for key, group in groups.items()}  # fmt: skip
        for key, group in groups.items():
            slope = np.nan_to_num((runs[key].result() - base) / np.log(_STEP))
            print(f"{key:<28}{np.abs(slope).mean():8.4f}", flush=True)
            for name in group:
                parts = name.split(".")
                trait = parts[1] if parts[0] == "host" else parts[-1] if key.endswith("*") else None
                mine = np.array([trait is None or trait in found for found in traits])
                if np.abs(slope * mine).max() > 1e-4:
                    columns[name] = slope * mine
    return list(columns), np.stack(list(columns.values()), axis=1)


def fitted(
    names: Sequence[str], slope: np.ndarray, base: np.ndarray, chosen: Sequence[Item], start: dict[str, float],
    kept: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Changes of the constants' logarithms that suit the `kept` items."""
    measured = np.log([getattr(row, what) for row, what, _ in chosen])
    weights = np.sqrt([weight for _, _, weight in chosen])
    widths = np.array([_longest(name, WIDTHS, 0.3) for name in names])
    most = np.array([
        min(_TRUST, np.log(max(_longest(n, MOST, 1e6) / start[n], 1.0 + 1e-6))) for n in names
    ])  # fmt: skip
    kept = kept & np.isfinite(base)
    pull = _ROBUST * np.sqrt(np.square(weights[kept]).sum()) / 15.0
    hosts: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        if name.startswith(("host.vllm.", "host.sglang.", "host.trtllm.")):
            hosts.setdefault(name.split(".")[2], []).append(i)

    def errors(z: np.ndarray) -> np.ndarray:
        found = [weights[kept] * (base + slope @ z - measured)[kept], pull * z / widths]
        found += [pull * (z[alike] - z[alike].mean()) / 0.3 for alike in hosts.values()]
        return np.concatenate(found)

    bounds = (np.full(len(names), -_TRUST), most)
    return np.asarray(least_squares(errors, np.zeros(len(names)), bounds=bounds, loss="cauchy", f_scale=_ROBUST).x)


def said(errors: np.ndarray) -> str:
    """Median and mean of relative errors."""
    errors = np.abs(np.expm1(errors[np.isfinite(errors)]))
    return f"median {np.median(errors):6.1%}  mean {errors.mean():6.1%}  rows {len(errors)}"


def main() -> None:
    """Fit, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--leave", action="store_true", help="leave GPUs and models out, one after the other")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chosen, start = items(), dict(constants().calibration.constants)
    if options.leave:
        leave_gpus(chosen)
    measured = np.log([getattr(row, what) for row, what, _ in chosen])
    everything = np.ones(len(chosen), dtype=bool)
    for turn in range(options.rounds):
        base = predicted(start)
        for source, what, _, _ in FITTED:
            mine = np.array([row.source == source and w == what for row, w, _ in chosen])
            print(f"round {turn}: {source} {what}: {said((base - measured)[mine])}")
        names, slope = slopes(start, base, chosen)
        if options.leave and turn == options.rounds - 1:
            leave_models(names, slope, base, chosen, start)
        change = fitted(names, slope, base, chosen, start, everything)
        start = changed(start, names, change)
    print(f"after: {said(predicted(start) - measured)}")
    if options.write:
        write(start, len(chosen))


def changed(start: dict[str, float], names: Sequence[str], change: np.ndarray) -> dict[str, float]:
    """The constants after a step, to four digits; what no row shows of a generation is the others' mean."""
    found = {**start, **{name: float(f"{start[name] * np.exp(z):.4g}") for name, z in zip(names, change, strict=True)}}
    for name in found:
        what, _, how = name.rpartition(".")
        # Hopper multiplies widened weights with older instructions than its own, others do not.
        alike = what != "attention.unpacked" and not what.endswith("weight_only")
        if how in GENERATIONS and name not in names and alike:
            shown = [found[f"{what}.{other}"] for other in GENERATIONS if f"{what}.{other}" in names]
            if shown:
                found[name] = float(f"{np.exp(np.log(shown).mean()):.4g}")
    return found


def leave_gpus(chosen: Sequence[Item]) -> None:
    """Fit without each GPU of ``silicon-sample``, from neutral constants, and judge on all its rows."""
    shipped = constants().calibration.constants
    neutral = {name: _longest(name, NEUTRAL, value) if not name.startswith(FIXED) or name in NEUTRAL else value
               for name, value in shipped.items()}  # fmt: skip
    base = predicted(neutral)
    names, slope = slopes(neutral, base, chosen)
    gpus = np.array([row.gpu for row, _, _ in chosen])
    measured = [row for row in rows("silicon-sample") if row.tpot_s > 0]
    left = []
    for gpu in sorted({row.gpu for row in measured}):
        kept = gpus != gpu
        found = changed(neutral, *_shown(names, slope, kept, fitted(names, slope, base, chosen, neutral, kept)))
        again = predicted(found)
        steps, turned = slopes(found, again, chosen)
        found = changed(found, *_shown(steps, turned, kept, fitted(steps, turned, again, chosen, found, kept)))
        using, out = constants().replace(found), [row for row in measured if row.gpu == gpu]
        what = predict(out, partial(_iterations, using))
        errors = [np.log(one.tpot_s / row.tpot_s) if isinstance(one, Steady) else np.log(2.0)
                  for one, row in zip(what, out, strict=True)]  # fmt: skip
        left.append(np.array(errors))
        print(f"without {gpu:<28}{said(left[-1])}", flush=True)
    print(f"GPUs left out one after the other: {said(np.concatenate(left))}", flush=True)


def _iterations(using: Constants, row: Row) -> Iterations:
    return Iterations.of(row.config, row.plan, row.cluster, using)


def _shown(
    names: Sequence[str], slope: np.ndarray, kept: np.ndarray, change: np.ndarray
) -> tuple[list[str], np.ndarray]:
    """The constants that the `kept` items depend on, and their changes."""
    moved = np.abs(slope[kept]).max(axis=0) > 1e-4
    return [name for name, there in zip(names, moved, strict=True) if there], change[moved]


def leave_models(
    names: Sequence[str], slope: np.ndarray, base: np.ndarray, chosen: Sequence[Item], start: dict[str, float]
) -> None:
    """Fit without each model of ``silicon-sample`` by one linear step from `start`, and judge it likewise."""
    measured = np.log([getattr(row, what) for row, what, _ in chosen])
    silicon = np.array([row.source == "silicon-sample" for row, _, _ in chosen])
    kinds = np.array([row.family for row, _, _ in chosen])
    left = np.full(len(chosen), np.nan)
    for kind in sorted(set(kinds[silicon])):
        out = silicon & (kinds == kind)
        change = fitted(names, slope, base, chosen, start, ~out)
        left[out] = (base + slope @ change - measured)[out]
        print(f"without {kind:<28}{said(left[out])}")
    print(f"models left out one after the other: {said(left)}")


def write(found: dict[str, float], count: int) -> None:
    """Keep the constants, and where they come from."""
    data = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    # Power is fitted elsewhere: its constants stay as the file has them by now.
    data["constants"] = {**data["constants"], **{n: v for n, v in found.items() if not n.startswith("power.")}}
    data["provenance"] = {
        **data["provenance"],
        "source": "ai-dynamo/aiconfigurator silicon_sample.csv and kernels/*__moe.csv.gz (commit 095f58a),"
        " Mutinifni/splitwise-sim perf_model.csv (commit 8f99e7d), NVIDIA/TensorRT-LLM perf-overview.md (v1.0, v0.14)",
        "licence": "Apache-2.0, MIT",
        "rows": count,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"foretell": foretell.__version__, "numpy": np.__version__},
    }
    CALIBRATION.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {CALIBRATION.name}")


if __name__ == "__main__":
    main()
