"""Fit the constants of fp32 convolutions and write ``cost/calibrations/convolution_simt.json``.

    python benchmarks/calibrate_convolution_simt.py

On three open sources together: cuDNN's algorithm times on an A100 (`ncu-a100-operators`, Apache-2.0; the fastest of
implicit GEMM, with precomputed indices or without, and Winograd), DeepBench's fp32 convolutions on eight NVIDIA GPUs
(Apache-2.0), and HELP's latencies of networks (`help-nas`, MIT), in which a network's time is the sum of its ops'.
Other kinds of ops are the roofline's times a factor that is fitted with the rest and forgotten; so is what a call that
is timed by itself costs. Relative errors count, tables alike; every constant is held near its start by a weak prior.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

import foretell.cost as cost
from foretell.accuracy import data_folder
from foretell.cost.calibration import Calibration
from foretell.cost.kernels.convolution_simt import convolution
from foretell.hardware import device
from foretell.hardware.device import Device
from help_nas import Table, host_times, tables

OUTPUT = Path(str(cost.__file__)).parent / "calibrations" / "convolution_simt.json"

# Where the search starts, and what is not fitted: arithmetic of the algorithms, and what nothing here can tell apart
# from what a call costs (the roofline model's L2; launch and drain of a kernel).
START = {
    "gemm.reuse": 30.0,
    "gemm.start": 17.0,
    "gemm.pipe": 0.88,
    "gemm.pointwise": 0.86,
    "gemm.addresses": 0.1,
    "tail": 0.65,
    "winograd.pipe": 0.75,
    "winograd.start": 8.0,
    "winograd.reuse": 20.0,
    "depthwise.output": 20.0,
    "depthwise.tap": 6.5,
    "depthwise.addresses": 4.8,
    "memory.gemm": 0.63,
    "memory.depthwise": 0.9,
}
FIXED = {
    "winograd.products": 2.25,
    "winograd.apart.products": 4.0,
    "l2.share": 0.68,
    "l2.speedup": 2.5,
    "latency": 4.0e-6,
}
SHARES = ("tail", "gemm.pipe", "winograd.pipe", "memory.gemm", "memory.depthwise")  # never above 1
# The roofline's other kinds, each with a factor; pooling's addresses are integer work, as depthwise's are.
FACTORS = {"pointwise": 1.2, "normalization": 1.4, "pooling": 1.5, "pooling.shared": 3.0, "reduction": 1.5, "copy": 1.5}
CALLS = {"call.ncu": 8e-6, "call.deepbench": 7e-6}

DEEPBENCH = {
    "NV_1080Ti": "gtx-1080-ti",
    "NV_M40": "m40",
    "NV_P100": "p100-pcie-16gb",
    "NV_T4": "t4",
    "NV_TitanX_Pascal": "titan-x-pascal",
    "NV_TitanX": "titan-x-maxwell",
    "NV_TitanXp": "titan-xp",
    "NV_V100": "v100-sxm2-16gb",
}


def columns(x: Mapping[str, int]) -> tuple[float, ...]:
    """`convolution`'s columns of one convolution of a table."""
    p, q = (x["H"] + 2 * x["pad_h"] - x["R"]) // x["u"] + 1, (x["W"] + 2 * x["pad_w"] - x["S"]) // x["v"] + 1
    area, weights = x["R"] * x["S"], x["K"] * x["C"] * x["R"] * x["S"]
    read, written = 4 * (x["N"] * x["C"] * x["H"] * x["W"] + weights), 4 * x["N"] * x["K"] * p * q
    return (1, x["N"] * p * q, x["K"], x["C"] * area, area, x["u"] * x["v"], 1, read, written)


def ncu(folder: Path, every: int = 18) -> np.ndarray:
    """(rows, 10): columns and seconds of the fastest algorithm, on an A100."""
    keys = dict(zip(("N", "C", "H", "W", "K", "R", "S", "u", "v", "pad_h", "pad_w"), range(11), strict=True))
    result = []
    with gzip.open(folder / "ncu-a100-operators" / "conv2d_cudnn_algo_times_13051.csv.gz", "rt") as file:
        for line in list(csv.reader(file))[1::every]:
            times = [float(line[11 + a]) * 1e-3 for a in (0, 1, 6) if line[11 + a][:1].isdigit()]
            shape = columns({key: int(float(line[i])) for key, i in keys.items()})
            if times and min(shape) >= 1:
                result.append((*shape, min(times)))
    return np.array(result)


def deepbench(folder: Path) -> dict[str, np.ndarray]:
    """By catalogue name: (rows, 10), columns and seconds of the forward pass in fp32."""
    keys = {"W": "W", "H": "H", "C": "C", "N": "N_batch", "K": "K_filters", "R": "R_filter_height"}
    keys |= {"S": "S_filter_width", "pad_h": "pad_h", "pad_w": "pad_w", "u": "stride_v", "v": "stride_h"}
    result: dict[str, list[tuple[float, ...]]] = {}
    with gzip.open(folder / "deepbench" / "conv.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["precision_note"] == "Float" and row["device"] in DEEPBENCH and row["fwd_ms"]:
                shape = columns({key: int(float(row[name])) for key, name in keys.items()})
                result.setdefault(DEEPBENCH[row["device"]], []).append((*shape, float(row["fwd_ms"]) * 1e-3))
    return {name: np.array(rows) for name, rows in result.items()}


class Problem:
    """Residuals of everything that is to be explained, as a function of logarithms of constants over their start."""

    def __init__(self, networks: Sequence[Table], folder: Path, without: str = "") -> None:
        self.networks = [t for t in networks if t.batch > 1]
        self.hosts = [host_times(networks, t) for t in self.networks]
        self.a100, self.singles = ncu(folder), {k: v for k, v in deepbench(folder).items() if k != without}
        self.names = (*START, *FACTORS, *CALLS)
        self.start = np.array([*START.values(), *FACTORS.values(), *CALLS.values()])

    def values(self, v: np.ndarray) -> dict[str, float]:
        """All constants by name."""
        found = dict(zip(self.names, (self.start * np.exp(v)).tolist(), strict=True)) | FIXED
        return found | {name: min(found[name], 1.0) for name in SHARES}

    def residuals(self, v: np.ndarray) -> np.ndarray:
        """log(predicted / measured) of all tables, weighed, and the prior."""
        values = self.values(v)
        constants = Calibration("convolution_simt", values, {}, {})
        parts = []
        for table, host in zip(self.networks, self.hosts, strict=True):
            predicted = table.times(device_times(table, constants, values), host)
            parts.append(np.log(predicted / table.measured_s) / len(predicted) ** 0.5)
        parts.append(0.7 * self._single(self.a100, device("a100-sxm4-40gb"), constants, values["call.ncu"]))
        for name, rows in self.singles.items():
            parts.append(0.4 * self._single(rows, device(name), constants, values["call.deepbench"]))
        return np.concatenate([*parts, 0.08 * v])

    @staticmethod
    def _single(rows: np.ndarray, on: Device, constants: Calibration, call_s: float) -> np.ndarray:
        predicted = convolution(*rows[:, :9].T, on, constants).time_s + call_s
        return np.log(predicted / rows[:, 9]) / len(rows) ** 0.5

    def solve(self, evaluations: int = 10) -> dict[str, float]:
        """The constants, by robust least squares."""
        found = least_squares(
            self.residuals, np.zeros(len(self.start)), loss="soft_l1", f_scale=0.006, max_nfev=evaluations
        )
        return self.values(found.x)


def device_times(table: Table, constants: Calibration, values: Mapping[str, float]) -> np.ndarray:
    """Seconds of every distinct op: convolutions by their model, the others by the roofline's and a factor."""
    launch = np.minimum(table.roofline_s, values["latency"])
    seconds = np.maximum(table.roofline_s - launch, 0.0)
    shared = float(table.device.compute_capability or 7) < 7.0
    for kind in ("pointwise", "normalization", "pooling", "reduction", "copy"):
        seconds[table.kind == kind] *= values["pooling.shared" if kind == "pooling" and shared else kind]
    seconds += launch
    rows, ops = table.kind == "convolution", table.ops
    names = ("gemm_batch", "gemm_m", "gemm_n", "gemm_k", "kernel_area", "stride", "dilation")
    own = [getattr(ops, name)[rows] for name in (*names, "bytes_read", "bytes_written")]
    seconds[rows] = convolution(*own, table.device, constants).time_s
    return seconds


def main() -> None:
    """Fit, print, write."""
    folder = data_folder()
    networks = tables(folder, every={"nasbench201": 780, "fbnet": 250, "ofa": 500})
    problem = Problem(networks, folder)
    values = problem.solve()
    kept: dict[str, Any] = {name: float(f"{values[name]:.4g}") for name in (*START, *FIXED)}
    print({name: float(f"{value:.4g}") for name, value in values.items()})
    constants = Calibration("convolution_simt", values, {}, {})
    singles = {"a100-sxm4-40gb (ncu)": (problem.a100, "a100-sxm4-40gb", values["call.ncu"])}
    singles |= {f"{name} (DeepBench)": (rows, name, values["call.deepbench"]) for name, rows in problem.singles.items()}
    for label, (rows, name, call_s) in singles.items():
        ratio = (convolution(*rows[:, :9].T, device(name), constants).time_s + call_s) / rows[:, 9]
        error, bias = np.median(abs(ratio - 1.0)), np.median(ratio) - 1.0
        print(f"{label:32} {len(rows):5} convolutions, median error {error:.3f}, bias {bias:+.3f}")
    data = {
        "schema": "foretell.calibration/1",
        "model": "convolution_simt",
        "constants": kept,
        "intervals": {"default": [0.65, 1.5], "host": [0.65, 1.6]},
        "provenance": {
            "source": "leleucas/Actual-Parameter-Collection-for-Machine-Learning-Operators (cuDNN algorithm times),"
            " baidu-research/DeepBench (fp32 convolutions), HayeonLee/HELP (network latencies)",
            "licence": "Apache-2.0; Apache-2.0; MIT",
            "rows": {
                "ncu": len(problem.a100),
                "deepbench": sum(map(len, problem.singles.values())),
                "help": sum(len(t.measured_s) for t in problem.networks),
            },
            "date": date.today().isoformat(),
            "method": "benchmarks/calibrate_convolution_simt.py",
            "not_fitted": "winograd.products and winograd.apart.products: multiplications saved by F(2×2, 3×3) and"
            " F(4×4, 3×3); l2: the roofline model's; latency: a round figure",
        },
    }
    OUTPUT.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
