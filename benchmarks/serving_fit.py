"""Fit the constants of serving on openly licensed measurements: ``python benchmarks/serving_fit.py [--write]``.

Rows and the closed form of a steady load are those of `foretell.accuracy.serving`:

    silicon-sample     time of an output token (ai-dynamo/aiconfigurator, Apache-2.0)
    splitwise          time of a token, and of a prompt (MIT)
    tensorrt-llm       tokens a second (Apache-2.0)

The logarithm of each prediction is taken to be linear in the logarithms of the constants; two or three rounds do. All
constants are held near where they start, and those of hosts near one another, so that what no row shows stays put.
Nothing is fitted on ML.ENERGY's rows, which have no licence. ``--leave`` judges by leaving one GPU, or one model, of
``silicon-sample`` out after the other.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

import foretell
from foretell.accuracy.serving import Row, rows
from foretell.accuracy.serving.steady import Steady, predict
from foretell.simulate import serving
from foretell.simulate.serving.iteration import Iterations, constants
from foretell.simulate.serving.iteration.constants import host_of
from foretell.simulate.training.constants import generation

CALIBRATION = Path(serving.__file__).with_name("calibration.json")
#: What is fitted, the weight of a row, and the share of rows taken.
FITTED = (
    ("silicon-sample", "tpot_s", 1.0, 0.5),
    ("splitwise", "tpot_s", 3.0, 1.0),
    ("splitwise", "ttft_s", 3.0, 1.0),
    ("tensorrt-llm", "tokens_per_s", 0.35, 0.25),
)
#: How far a constant is let go from its start, as a factor's logarithm, by how its name begins.
WIDTHS = {
    "product.": 0.12, "experts.": 0.12, "product.weight_only": 0.35, "experts.weight_only": 0.35, "stream.": 0.12,
    "attention.": 0.12, "latency.": 0.6, "kernel_s": 0.6, "routing_s": 0.6, "host.": 1.0, "experts.uneven": 0.35,
    "experts.fp8.vllm-v1": 0.35,
}  # fmt: skip
#: Shares of bandwidth that would be more than a device has.
MOST = {
    "product.memory": 1.18, "experts.memory": 1.18, "attention.decode": 1.25, "attention.prefill": 1.2,
    "attention.latent": 1.2, "stream.share": 0.95, "experts.fp8.vllm-v1": 1.0, "experts.uneven": 1.2,
}  # fmt: skip
#: What no row of these tables shows.
FIXED = ("power.", "experts.fp8.vllm", "experts.fp8.sglang", "experts.fp8.trtllm", "experts.fp8.static")
_ROBUST, _STEP, _TRUST = 0.08, 1.25, 1.2

Item = tuple[Row, str, float]


def items() -> list[Item]:
    """(row, what is compared, weight), the same for the same tables.

    SGLang processes all waiting prompts before it decodes on: in a closed loop of equal requests they then stay in
    step, and no prompt falls between tokens. The closed form does not know that, so rows of long prompts are left out;
    so are vLLM's with data-parallel ranks, whose hosts must agree on each iteration.
    """
    draw, found = random.Random(0), []
    for source, measured, weight, share in FITTED:
        for row in rows(source):
            in_step = row.engine == "sglang" and row.isl >= 4 * row.osl
            agreed = row.engine == "vllm" and row.plan.dp > 1
            wanted = row.split == "fit" and getattr(row, measured) > 0 and not in_step and not agreed
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
        elif parts[-1] in ("registers", "shared", "tensor_memory"):
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
    return least_squares(errors, np.zeros(len(names)), bounds=bounds, loss="soft_l1", f_scale=_ROBUST).x


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
    measured = np.log([getattr(row, what) for row, what, _ in chosen])
    everything = np.ones(len(chosen), dtype=bool)
    for turn in range(options.rounds):
        base = predicted(start)
        for source, what, _, _ in FITTED:
            mine = np.array([row.source == source and w == what for row, w, _ in chosen])
            print(f"round {turn}: {source} {what}: {said((base - measured)[mine])}")
        names, slope = slopes(start, base, chosen)
        if options.leave and turn == options.rounds - 1:
            _leave(names, slope, base, chosen, start, lambda row: row.gpu)
            _leave(names, slope, base, chosen, start, lambda row: row.family)
        change = fitted(names, slope, base, chosen, start, everything)
        start.update({name: float(f"{start[name] * np.exp(z):.4g}") for name, z in zip(names, change, strict=True)})
    print(f"after: {said(predicted(start) - measured)}")
    if options.write:
        write(start, len(chosen))


def _leave(
    names: Sequence[str], slope: np.ndarray, base: np.ndarray, chosen: Sequence[Item], start: dict[str, float],
    of: Callable[[Row], str],
) -> None:  # fmt: skip
    measured = np.log([getattr(row, what) for row, what, _ in chosen])
    silicon = np.array([row.source == "silicon-sample" for row, _, _ in chosen])
    kinds = np.array([of(row) for row, _, _ in chosen])
    left = np.full(len(chosen), np.nan)
    for kind in sorted(set(kinds[silicon])):
        out = silicon & (kinds == kind)
        change = fitted(names, slope, base, chosen, start, ~out)
        left[out] = (base + slope @ change - measured)[out]
        print(f"without {kind:<28}{said(left[out])}")
    print(f"left out one after the other: {said(left)}")


def write(found: dict[str, float], count: int) -> None:
    """Keep the constants, and where they come from."""
    data = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    data["constants"] = found
    data["provenance"] = {
        **data["provenance"],
        "source": "ai-dynamo/aiconfigurator silicon_sample.csv (commit 095f58a), Mutinifni/splitwise-sim"
        " perf_model.csv (commit 8f99e7d), NVIDIA/TensorRT-LLM perf-overview.md (v1.0, v0.14)",
        "licence": "Apache-2.0, MIT",
        "rows": count,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"foretell": foretell.__version__, "numpy": np.__version__},
        "method": "benchmarks/serving_fit.py --write",
    }
    CALIBRATION.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {CALIBRATION.name}")


if __name__ == "__main__":
    main()
