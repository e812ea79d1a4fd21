"""Predict HELP's latencies of NAS networks, one GPU left out at a time.

    python benchmarks/help_nas.py [--model roofline|kernel|…] [--refit] [--every N] [--only GPU]

What a host needs to issue an op of each kind is read off the other GPUs' tables of the same space at batch 1, where
every GPU waits for its host. How fast the left-out GPU's host is, is taken from the others of its architecture, else
from all others: in these tables hosts of one architecture differ by up to 1.2, those of all by up to 2.

``--refit`` fits the constants of fp32 convolutions, and a factor for each other kind, anew without the left-out GPU;
otherwise ``--model`` says what the device needs, with the constants it ships.

A network takes the longer of all its host and all its device time, but for FBNet, which is added op by op, the longer
of host and device each: there the time of every layer at batch 64 adds to the others' whatever precedes it (a sum over
layers explains 0.99 of the ranks, although the first layers keep the device busy for longer than the host needs for
half the network), so host and device cannot have run ahead of one another.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretell.accuracy import data_folder
from foretell.accuracy.help_nas import SPACES, read
from foretell.accuracy.measured import Measured
from foretell.accuracy.spaces.rows import select
from foretell.cost.model import models
from foretell.cost.program import Program
from foretell.graph import KINDS, OpTable
from foretell.hardware.device import Device

OP_BY_OP = ("fbnet",)
SOFT = 0.02  # how much a host time equal to its prior counts, beside all measurements
BARS = {  # (space, batch): least Spearman correlation, largest median error
    ("nasbench201", 1): (0.95, None),
    ("fbnet", 1): (0.93, None),
    ("fbnet", 64): (0.95, 0.15),
    ("ofa", 64): (0.95, 0.15),
}


@dataclass(frozen=True, slots=True)
class Table:
    """One (space, GPU, batch): distinct ops, and how often each network has each (entry: network, op, count)."""

    space: str
    device: Device
    batch: int
    measured_s: np.ndarray
    ops: OpTable
    kind: np.ndarray
    entry_op: np.ndarray
    count: np.ndarray
    starts: np.ndarray
    roofline_s: np.ndarray
    host_s: np.ndarray
    measured: Measured

    def summed(self, per_op: np.ndarray) -> np.ndarray:
        """A column of ops, added over each network."""
        return np.add.reduceat(per_op[self.entry_op] * self.count, self.starts)

    def times(self, device_s: np.ndarray, host_s: np.ndarray) -> np.ndarray:
        """Seconds of each network, from those of its ops."""
        if self.space in OP_BY_OP:
            return self.summed(np.maximum(device_s, host_s))
        return np.maximum(self.summed(device_s), self.summed(host_s))

    def op_times(self, model: str) -> np.ndarray:
        """Device seconds of every distinct op, as a cost model has them."""
        return models()[model].op_times(Program.of(self.ops), self.device, self.measured.settings).busy_s


def tables(folder: Path, every: Mapping[str, int]) -> list[Table]:
    """All of HELP's tables, every so-many-th network of each space."""
    result = []
    for space, step in every.items():
        known: dict[int, tuple[OpTable, np.ndarray]] = {}
        for measured in read(folder, spaces=(space,), every=step):
            whole = measured.program.table
            if id(whole) not in known:
                fields = (measured.program.name_code, whole.macs, whole.bytes_read, whole.bytes_written, whole.elements)
                more = (whole.gemm_batch, whole.gemm_k, whole.kernel_area, whole.stride, whole.reduced)
                rows = np.stack([np.asarray(x, dtype=np.float64) for x in (*fields, *more)], axis=1)
                _, first, entry = np.unique(rows, axis=0, return_index=True, return_inverse=True)
                known[id(whole)] = select(whole, first, np.ones(len(first))), entry.ravel()
            ops, entry = known[id(whole)]
            kind = np.array(KINDS, dtype=object)[ops.kind]
            times = models()["roofline"].op_times(Program.of(ops), measured.device, measured.settings)
            result.append(
                Table(
                    space=space,
                    device=measured.device,
                    batch=int(measured.name.rsplit("-", 1)[1]),
                    measured_s=measured.measured_s,
                    ops=ops,
                    kind=kind,
                    entry_op=entry,
                    count=whole.repeat,
                    starts=measured.starts,
                    roofline_s=np.where(kind == "view", 0.0, times.busy_s),
                    host_s=times.host_s,
                    measured=measured,
                )
            )
    return result


def host_times(networks: Sequence[Table], of: Table, without: str = "") -> np.ndarray:
    """Seconds to issue each op of a table, from tables of its space at batch 1 on all GPUs but `without`."""
    from scipy.optimize import nnls

    others = [t for t in networks if t.space == of.space and t.batch == 1 and t.device.name != without]
    kinds = sorted({kind for t in others for kind in t.kind})
    speed = {t.device.name: float(np.median(t.measured_s)) for t in others}
    counts = np.concatenate([np.stack([t.summed((t.kind == kind) * 1.0) for kind in kinds], axis=1) for t in others])
    relative = np.concatenate([t.measured_s / speed[t.device.name] for t in others])
    # A normalisation follows nearly every convolution, so their sum is known and their shares are not: the roofline's
    # constants say those, softly.
    ratio = counts / relative[:, None]
    prior = np.array([next(t.host_s[t.kind == kind][0] for t in others if (t.kind == kind).any()) for kind in kinds])
    prior = prior / np.median(ratio @ prior)
    weight = SOFT * len(ratio) ** 0.5
    rows = np.concatenate([ratio, weight * np.diag(1.0 / prior)])
    shares, _ = nnls(rows, np.concatenate([np.ones(len(ratio)), np.full(len(kinds), weight)]))
    if of.device.name in speed:
        scale = speed[of.device.name]
    else:
        alike = [t.device.name for t in others if t.device.architecture == of.device.architecture] or list(speed)
        scale = float(np.exp(np.mean([np.log(speed[name]) for name in alike])))
    by_kind = dict(zip(kinds, scale * shares, strict=True))
    return np.array([by_kind.get(kind, 0.0) for kind in of.kind])


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of ranks."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b)[0])


def main() -> None:
    """Leave each GPU out and print how its tables were predicted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="roofline")
    parser.add_argument("--refit", action="store_true")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    folder = data_folder()
    networks = tables(folder, dict.fromkeys(SPACES, options.every))
    few = tables(folder, {"nasbench201": 780, "fbnet": 250, "ofa": 500}) if options.refit else []
    scores: dict[tuple[str, int], list[tuple[float, float]]] = {}
    print(f"device times: {'refitted' if options.refit else options.model}; every {options.every}th network")
    print(f"{'space':12} {'batch':>5} {'left out':16} {'n':>5} {'rank':>6} {'error':>6} {'bias':>6}")
    for left in dict.fromkeys(t.device.name for t in networks):
        if options.only and left != options.only:
            continue
        if options.refit:
            from calibrate_convolution_simt import Problem, device_times
            from foretell.cost.calibration import Calibration

            values = Problem([t for t in few if t.device.name != left], folder, without=left).solve(8)
            constants = Calibration("convolution_simt", values, {}, {})
        for table in (t for t in networks if t.device.name == left):
            device_s = device_times(table, constants, values) if options.refit else table.op_times(options.model)
            predicted = table.times(device_s, host_times(networks, table, without=left))
            rank, error = spearman(predicted, table.measured_s), predicted / table.measured_s - 1.0
            scores.setdefault((table.space, table.batch), []).append((rank, float(np.median(abs(error)))))
            print(
                f"{table.space:12} {table.batch:5} {left:16} {len(error):5} {rank:6.3f}"
                f" {np.median(abs(error)):6.1%} {np.median(error):+6.1%}"
            )
    print("\nmeans over GPUs, and the bars")
    for (space, batch), pairs in scores.items():
        rank, error = (float(np.mean(x)) for x in zip(*pairs, strict=True))
        bar = BARS.get((space, batch))
        verdict = ""
        if bar:
            least, most = bar
            met = rank >= least and (most is None or error <= most)
            verdict = f"bar {least}" + (f", {most:.0%}" if most else "") + (": met" if met else ": MISSED")
        print(f"{space:12} {batch:5} rank {rank:.3f} median error {error:.1%}  {verdict}")


if __name__ == "__main__":
    main()
