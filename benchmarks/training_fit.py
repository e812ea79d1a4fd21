"""Fit the constants of training steps on openly licensed measurements: ``python benchmarks/training_fit.py [--write]``.

Constants are fitted in four stages, each on the measurements that show them, starting from (and held near) what the
kernels' own calibrations say, which is a factor of one. None is of a model; no row has a constant of its own.

    registers   A100: Korthikanti's Table 5 and llm-foundry's FSDP tables
    host        vTrain's rows of up to four GPUs: four constants of Megatron-DeepSpeed's host
    shared      H100 and B200: NeMo's and Megatron-Bridge's dense models, Llama 3's two published runs
    experts     Megatron-Bridge's mixtures of experts, containers from 26.02.01 on

``--leave SOURCE`` fits without a source and judges it alone; ``--leave-families SOURCE`` leaves out one model of a
source after the other. ``--write`` keeps the constants in ``simulate/training/calibration.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

import foretell
from foretell.accuracy.training import SOURCES, Row, rows
from foretell.accuracy.training.score import predict
from foretell.simulate import training
from foretell.simulate.training.constants import Constants, constants
from foretell.simulate.training.step import steps

CALIBRATION = Path(training.__file__).with_name("calibration.json")

#: Where each fit starts; efficiencies are shares of what kernels do alone (`foretell.cost.kernels`).
START = {
    **{f"product.half.{how}": 0.85 for how in ("registers", "shared", "tensor_memory")},
    **{f"product.fp8.{how}": 0.75 for how in ("registers", "shared", "tensor_memory")},
    **{f"product.mxfp8.{how}": 0.75 for how in ("registers", "shared", "tensor_memory")},
    **{f"product.nvfp4.{how}": 0.60 for how in ("registers", "shared", "tensor_memory")},
    **{f"flash.{way}.{how}": start for how in ("registers", "shared", "tensor_memory")
       for way, start in (("forward", 0.9), ("backward", 0.7))},
    **{f"flash2.{way}.{how}": start for how in ("registers", "shared", "tensor_memory")
       for way, start in (("forward", 0.9), ("backward", 0.5))},
    "stream_share": 0.85,
    "eager.fsdp2": 1.2,
    "kernel_s": 1.5e-6,
    "tp.hidden": 0.6,
    "cp.hidden": 0.8,
    "ep.hidden": 0.6,
    "dp.hidden": 0.9,
    "overlap.slowdown": 0.2,
    "moe.sync_s": 1.5e-3,
    "moe.graph_s": 2e-4,
    **{f"host.{framework}.{name}": start for framework in ("megatron", "deepspeed", "fsdp2")
       for name, start in (("kernel_s", 1e-5), ("collective_s", 5e-5), ("micro_batch_s", 1e-3), ("step_s", 1e-2))},
    "host.deepspeed.kernel_s": 5e-5,  # what does not limit any row cannot be fitted: start where it does
}  # fmt: skip

STAGES = {
    "registers": (
        *("product.half.registers", "flash2.forward.registers", "flash2.backward.registers", "stream_share"),
        *("kernel_s", "eager.fsdp2", "overlap.slowdown", "host.fsdp2.micro_batch_s"),
    ),
    "host": tuple(f"host.deepspeed.{name}" for name in ("kernel_s", "collective_s", "micro_batch_s", "step_s")),
    "shared": (
        *("product.half.shared", "product.fp8.shared", "product.fp8.tensor_memory", "product.mxfp8.tensor_memory"),
        *(f"flash2.{way}.shared" for way in ("forward", "backward")),
        *(f"flash.{way}.{how}" for way in ("forward", "backward") for how in ("shared", "tensor_memory")),
        *("tp.hidden", "cp.hidden", "host.megatron.micro_batch_s", "host.megatron.step_s"),
    ),
    "experts": ("moe.sync_s", "moe.graph_s", "ep.hidden", "product.half.tensor_memory"),
}

# How far a constant is let go from its start, as a factor's logarithm: efficiencies near, times of hosts freely.
_NEAR, _FREE = 0.25, 2.0
_MOST = {
    "stream_share": 0.93, "eager.fsdp2": 1.8, "overlap.slowdown": 0.35, "tp.hidden": 0.95, "cp.hidden": 0.98,
    "ep.hidden": 0.95, "flash.backward.shared": 0.85, "flash.backward.tensor_memory": 0.85,
}  # fmt: skip
_SHARES = ("product.", "flash", "stream_share")
# Errors beyond this are taken to be of the measurement.
_ROBUST = 0.05


def stage_rows(stage: str, every: Sequence[Row]) -> list[tuple[Row, float]]:
    """The rows a stage is fitted on, with their weights: a table of few rows counts as much as one of many."""
    chosen: list[tuple[Row, float]] = []
    for row in every:
        shows = {
            "registers": row.device.startswith("a100") and row.source in ("calculon", "llm-foundry"),
            "host": row.source == "vtrain-single" and row.split == "fit",
            "shared": row.source in ("llama-3", "nemo", "nemo-long", "megatron-bridge") and not row.moe,
            "experts": row.source == "megatron-bridge" and row.moe and row.split != "older",
        }
        if shows[stage]:
            few = {"calculon": 8.0, "llama-3": 2.0, "megatron-bridge": 4.0}.get(row.source, 1.0)
            chosen.append((row, 0.3 if row.split == "older" else few))  # software that is no longer run
    return chosen


def fit(every: Sequence[Row], stages: Iterable[str] = tuple(STAGES), start: Constants | None = None) -> Constants:
    """Constants fitted on those of the rows that each stage is for; a stage without rows keeps its start."""
    found = start or Constants(constants().calibration.replace(START))
    for stage in stages:
        chosen = stage_rows(stage, every)
        if chosen:
            found = _fit(STAGES[stage], [row for row, _ in chosen], np.array([w for _, w in chosen]), found)
            print(f"fitted {stage} on {len(chosen)} rows", file=sys.stderr, flush=True)
    return found


def fit_without(left: Sequence[Row], every: Sequence[Row]) -> Constants:
    """Constants fitted without some rows: stages that these are in start anew, the others are as shipped."""
    gone = {id(row) for row in left}
    kept = [row for row in every if id(row) not in gone]
    found = constants()
    for stage, names in STAGES.items():
        if stage_rows(stage, left):
            anew = Constants(found.calibration.replace({name: START[name] for name in names}))
            found = fit(kept, [stage], anew)
    return found


def _fit(names: Sequence[str], chosen: Sequence[Row], weights: np.ndarray, start: Constants) -> Constants:
    measured = np.log([row.step_s for row in chosen])
    first = np.log([start[name] for name in names])
    width = np.array([_NEAR if name.startswith(_SHARES) or name in _MOST else _FREE for name in names])
    most = np.log([_MOST.get(name, 1.05 if name.startswith(_SHARES) else 1e3) for name in names])
    pull = _ROBUST * np.sqrt(weights.sum()) / 5.0

    def at(x: np.ndarray) -> Constants:
        return Constants(start.calibration.replace(dict(zip(names, np.exp(x).tolist(), strict=True))))

    def errors(x: np.ndarray) -> np.ndarray:
        using = at(x)
        said = np.log(predict(chosen, lambda *a: steps(*a, using=using)))
        return np.concatenate([np.sqrt(weights) * (said - measured), pull * (x - first) / width])

    solved = least_squares(
        errors, np.minimum(first, most - 1e-6), bounds=(-np.inf, most), loss="soft_l1", f_scale=_ROBUST, diff_step=1e-3,
        max_nfev=12, ftol=1e-4,
    )  # fmt: skip
    return at(solved.x)


def errors_of(chosen: Sequence[Row], using: Constants) -> np.ndarray:
    """Relative errors of what a source states: tokens a second, or for vTrain and Table 5 the seconds of a step."""
    said = predict(chosen, lambda *a: steps(*a, using=using))
    measured = np.array([row.step_s for row in chosen])
    rate = np.array([row.source in ("llm-foundry", "nemo", "nemo-long", "megatron-bridge") for row in chosen])
    return np.where(rate, measured / said, said / measured) - 1.0


def told(label: str, error: np.ndarray) -> str:
    size = 100 * np.abs(error)
    return (
        f"{label:34} {len(size):5} rows  mean {size.mean():6.2f}  median {np.median(size):6.2f}"
        f"  95th {np.percentile(size, 95):6.2f}  largest {size.max():6.1f}  bias {100 * error.mean():+6.2f} %"
    )


def groups(every: Sequence[Row]) -> dict[str, list[Row]]:
    bridge = [row for row in every if row.source == "megatron-bridge" and row.split != "older"]
    return {
        "calculon": [row for row in every if row.source == "calculon"],
        "vtrain 8 GPUs of a node": [row for row in every if row.source == "vtrain-single" and row.split != "fit"],
        "vtrain several nodes": [row for row in every if row.source == "vtrain-multi"],
        "llm-foundry A100": [r for r in every if r.source == "llm-foundry" and r.device.startswith("a100")],
        "llama-3": [row for row in every if row.source == "llama-3"],
        "nemo": [row for row in every if row.source == "nemo"],
        "nemo long sequences": [row for row in every if row.source == "nemo-long"],
        "megatron-bridge dense": [row for row in bridge if not row.moe],
        "megatron-bridge experts": [row for row in bridge if row.moe],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--leave", nargs="*", default=[], help="judge these sources by constants fitted without them")
    parser.add_argument("--leave-families", nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    every = [row for source in SOURCES for row in rows(source, given.data)]
    for source in given.leave:
        using = fit_without([row for row in every if row.source == source], every)
        for label, chosen in groups([row for row in every if row.source == source]).items():
            if chosen:
                print(told(f"without its source: {label}", errors_of(chosen, using)), flush=True)
    for source in given.leave_families:
        held: dict[str, list[float]] = {}
        for family in sorted({row.family for row in every if row.source == source}):
            mine = [row for row in every if (row.source, row.family) == (source, family)]
            using = fit_without(mine, every)
            for label, chosen in groups(mine).items():
                if chosen:
                    held.setdefault(label, []).extend(errors_of(chosen, using).tolist())
        for label, errors in held.items():
            print(told(f"without its model: {label}", np.array(errors)), flush=True)
    if given.leave or given.leave_families:
        return
    using = fit(every)
    for names in STAGES.values():
        print("  ".join(f"{name} {using[name]:.4g}" for name in names))
    for label, chosen in groups(every).items():
        if chosen:
            print(told(label, errors_of(chosen, using)), flush=True)
    if given.write:
        _write(using, every)


def _write(using: Constants, every: Sequence[Row]) -> None:
    counts = {stage: len(stage_rows(stage, every)) for stage in STAGES}
    judged = np.concatenate([errors_of(chosen, using) for chosen in groups(every).values() if chosen])
    low, high = (float(np.exp(-np.quantile(np.log1p(judged), q))) for q in (0.9, 0.1))
    data = {
        "schema": "foretell.calibration/1",
        "model": "training",
        "constants": {name: float(f"{value:.4g}") for name, value in using.calibration.constants.items()},
        "intervals": {"default": [round(min(low, 1.0), 3), round(max(high, 1.0), 3)], "host": [1.0, 1.0]},
        "provenance": {
            "source": "calculon-ai/calculon (Korthikanti et al., Table 5), VIA-Research/vTrain, mosaicml/llm-foundry,"
            " NVIDIA/NeMo, NVIDIA-NeMo/Megatron-Bridge: published training throughput",
            "licence": "Apache-2.0, MIT",
            "rows": counts,
            "devices": sorted({row.device for row in every}),
            "not_fitted": "constants that no row shows keep their start: low precisions in registers, nvfp4, dp.hidden",
            "date": datetime.now(tz=UTC).date().isoformat(),
            "versions": {"foretell": foretell.__version__, "numpy": np.__version__},
            "method": "benchmarks/training_fit.py",
        },
    }
    CALIBRATION.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {CALIBRATION}")


if __name__ == "__main__":
    main()
