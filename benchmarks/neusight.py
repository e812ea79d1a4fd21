"""How well the fp32 kernels agree with NeuSight's operators and whole transformers, GPUs seen and unseen.

    python benchmarks/neusight.py [--full]

prints, beside the figures of NeuSight's paper, errors with the shipped calibrations (`simt.json`, `stream.json`) and
with calibrations fitted without the GPU group in question: A100s are one group, MI210 and MI250 one. ``--full`` scores
every operator row instead of a sample. Needs ``FORETELL_DATA`` (default ``../shared/data``).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from foretell.accuracy.measured import Measured
from foretell.accuracy.neusight import read_models, read_operators
from foretell.cost.calibration import Calibration, load
from foretell.cost.kernels.simt import simt
from foretell.cost.kernels.stream import stream, variant
from foretell.graph import KINDS
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]
Constants = Mapping[str, float]

FOLDER = Path(os.environ.get("FORETELL_DATA", "../shared/data")) / "neusight"
#: Two training runs of gpt2_large at batch 4 whose forward took 2.4 times what its operators add up to.
ODD = (("mi210", "gpt2_large"), ("mi250", "gpt2_large"))
_MATRIX = [KINDS.index(kind) for kind in ("matmul", "batched_matmul")]
_FREE = [KINDS.index(kind) for kind in ("view", "scalar_read")]


def group_of(device: Device) -> str:
    """The GPUs left out together."""
    name = device.name
    return "a100" if name.startswith("a100") else "mi2xx" if name in ("mi210", "mi250") else name


@dataclass(frozen=True)
class Work:
    """Rows of several tables on one device, gathered so that each kernel family runs once."""

    device: Device
    gemm: npt.NDArray[np.bool_]  # rows that are products; the others stream
    columns: Mapping[str, Floats]
    shares: Sequence[str]  # names of bandwidth shares, indexed by columns["share"]
    starts: npt.NDArray[np.int64]
    call: npt.NDArray[np.bool_]  # measurements that hold a launch gap
    measured_s: Floats
    label: npt.NDArray[np.object_]  # table or mode of each measurement
    group: npt.NDArray[np.object_]


def gather(tables: Sequence[Measured], most: int | None = None) -> list[Work]:
    """`tables` by device; at most `most` rows of each operator table, drawn with a fixed seed."""
    rng = np.random.default_rng(0)
    by_device: dict[str, list[Measured]] = {}
    for table in tables:
        by_device.setdefault(table.device.name, []).append(table)
    return [_work(group, most, rng) for group in by_device.values()]


def _work(tables: Sequence[Measured], most: int | None, rng: np.random.Generator) -> Work:
    parts: list[dict[str, Floats]] = []
    starts, call, measured, labels, groups, shares = [], [], [], [], [], {"pointwise": 0}
    offset = 0
    for one in tables:
        table, program = one.program.table, one.program
        moved = {"read": table.bytes_read, "written": table.bytes_written}
        # An operand smaller than the result is broadcast.
        broadcasts = (table.operands > 2) & (table.bytes_read < (table.operands - 1.5) * 4.0 * table.elements)
        kinds = [variant(name, bool(b)) for name, b in zip(table.name, broadcasts, strict=True)]
        code = np.array([shares.setdefault(kind.name, len(shares)) for kind in kinds], dtype=np.float64)
        again, operations, block = (
            np.array([float(getattr(kind, f)) for kind in kinds]) for f in ("again", "operations", "block")
        )
        kernels, elements = program.kernels, table.elements
        if program.runtime == "compiled":  # a chain runs as the kernel of its first op
            chain = program.group
            size = int(chain.max()) + 1
            moved = {key: np.bincount(chain, column, size)[chain] for key, column in moved.items()}
            operations = np.bincount(chain, operations, size)[chain]
            deepest = np.zeros(size)
            np.maximum.at(deepest, chain, again)
            again = deepest[chain] * 0.5  # the compiler keeps a row in registers up to longer ones
            code = np.zeros(len(table))
        columns = {
            "batch": table.gemm_batch, "m": table.gemm_m, "n": table.gemm_n, "k": table.gemm_k,
            "elements": elements, "reduced": table.reduced, "share": code, "again": again, "operations": operations,
            "block": block,
            "kernels": kernels, "repeat": table.repeat, **moved,
            "matrix": np.isin(table.kind, _MATRIX).astype(np.float64),
            "free": (np.isin(table.kind, _FREE) | (kernels <= 0)).astype(np.float64),
        }
        chosen = np.arange(len(one))
        if one.issued == "call" and most is not None and len(one) > most:
            chosen = np.sort(rng.permutation(len(one))[:most])
        ends = np.append(one.starts[1:], len(table))
        rows = np.concatenate([np.arange(one.starts[i], ends[i]) for i in chosen])
        parts.append({key: column[rows] for key, column in columns.items()})
        lengths = (ends - one.starts)[chosen]
        starts.append(offset + np.cumsum(lengths) - lengths)
        offset += len(rows)
        call.append(np.full(len(chosen), one.issued == "call"))
        measured.append(one.measured_s[chosen])
        labels.append(np.full(len(chosen), one.name.replace("neusight-", ""), dtype=object))
        groups.append(one.group[chosen])
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return Work(tables[0].device, columns["matrix"] > 0, columns, tuple(shares), np.concatenate(starts),
                np.concatenate(call), np.concatenate(measured), np.concatenate(labels), np.concatenate(groups))


def predict(work: Work, constants: Constants) -> Floats:
    """Seconds of every measurement."""
    calibration = Calibration("neusight", MappingProxyType(dict(constants)), {}, {})
    c, gemm = work.columns, work.gemm
    time = np.zeros(len(gemm))
    if gemm.any():
        at = [c[name][gemm] for name in ("batch", "m", "n", "k")]
        time[gemm] = simt(*at, work.device, calibration).time_s
    rest = ~gemm & (c["free"] == 0)
    share = memory_share(work.device, calibration) * np.array([constants[f"share.{name}"] for name in work.shares])
    time[rest] = stream(
        *(c[name][rest] for name in ("read", "written", "elements", "reduced")),
        np.minimum(share, 1.0)[c["share"][rest].astype(int)],
        work.device, calibration, again=c["again"][rest], operations=c["operations"][rest], block=c["block"][rest],
    ).time_s
    time += np.maximum(0.0, c["kernels"] - 1.0) * constants["latency.kernel"]
    return np.add.reduceat(time * c["repeat"], work.starts) + work.call * constants["call.gap"]


def memory_share(device: Device, constants: Calibration) -> float:
    """Share of its bandwidth that the device's kind of memory gives to plain streaming."""
    return constants["memory.stacked" if (device.memory_type or "HBM").startswith("HBM") else "memory.graphics"]


def shipped() -> dict[str, float]:
    """The shipped constants of both families."""
    return {**load("simt").constants, **load("stream").constants}


# --- report ----------------------------------------------------------------------------------------------------------

Scores = dict[tuple[str, str], list[float]]


def odd(work: Work, index: int) -> bool:
    """Whether a measurement is one of those whose table says 2.4 times what its operators say."""
    device, model, longer_s = work.device.name, work.group[index], 1.5
    training = work.label[index].startswith("models-train")
    return training and (device, model) in ODD and work.measured_s[index] > longer_s


def report(title: str, works: Sequence[Work], constants: Callable[[Work], Constants]) -> None:
    """Errors by GPU and mode, and of the operator tables."""
    models: dict[tuple[str, str], list[float]] = {}
    operators: dict[str, list[float]] = {}
    for work in works:
        error = np.abs(predict(work, constants(work)) / work.measured_s - 1.0)
        for i, label in enumerate(work.label):
            if label.startswith("models"):
                if not odd(work, i):
                    mode = "training" if "train" in label else "inference"
                    models.setdefault((work.device.name, mode), []).append(float(error[i]))
            else:
                operators.setdefault(label, []).append(float(error[i]))
    print(f"\n{title}\n  {'device':16s} {'inference':>12s} {'training':>12s} {'both':>8s}   mean abs. error, % (rows)")
    for name in dict.fromkeys(device for device, _ in models):
        cells = [models.get((name, mode), []) for mode in ("inference", "training")]
        texts = [f"{100 * np.mean(cell):6.1f} ({len(cell):2d})" if cell else "-" for cell in cells]
        print(f"  {name:16s} {texts[0]:>12s} {texts[1]:>12s} {100 * np.mean([e for cell in cells for e in cell]):8.1f}")
    for mode, bar, paper in (("inference", 9, 9.65), ("training", 8, 7.31)):
        every = [e for (_, m), cell in models.items() if m == mode for e in cell]
        if every:
            print(f"  all, {mode}: {100 * np.mean(every):.1f} %  (bar {bar} %, NeuSight {paper} %; {len(every)} rows)")
    print("  operators, median / mean abs. error, %:  "
          + "  ".join(f"{k} {100 * np.median(v):.1f}/{100 * np.mean(v):.1f}" for k, v in sorted(operators.items())))


PAPER = """\
NeuSight's paper, mean abs. error %, seen GPUs / unseen: BMM 26.0/13.8  FC 20.0/13.9  EW 14.0/19.3
Softmax 19.3/13.9  LN 20.1/56.7; whole transformers 9.65 inference, 7.31 training (P4 27, T4 18.5, L4 14.6)"""


def main() -> None:
    from calibrate_neusight import fit

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="score every operator row")
    arguments = parser.parse_args()
    tables = [*read_operators(FOLDER), *read_models(FOLDER)]
    works = gather(tables, None if arguments.full else 300)
    sample = gather(tables, 40)
    start = shipped()
    print(PAPER)
    report("shipped calibration, in sample", works, lambda _: start)
    without = {
        left_out: fit([w for w in sample if group_of(w.device) != left_out], start, evaluations=20)
        for left_out in sorted({group_of(w.device) for w in works})
    }
    report("leave one GPU group out", works, lambda work: without[group_of(work.device)])


if __name__ == "__main__":
    main()
