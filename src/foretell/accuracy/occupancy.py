"""Occupancy against a profiler: the kernels of ``ncu-a100-operators`` that come with their launch configuration.

Nsight Compute prints theoretical occupancy, which has to agree to its half point, and the achieved one, which the
constants of `foretell.cost.occupancy.achieved` are fitted on. They are judged by leaving out every kernel in turn (its
name, all its rows); each kernel counts by the root of its rows in the fit, as a few have most of them.

``python -m foretell.accuracy.occupancy`` prints the figures; ``--write`` fits anew and writes the calibration.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretell.accuracy.slices import data_folder
from foretell.cost import occupancy as oc
from foretell.cost.calibration import SCHEMA, Calibration, load
from foretell.errors import InputError
from foretell.hardware import device

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SOURCE = "ncu-a100-operators"
FILE = "ncu_kernels_wide.csv.gz"
DEVICE = "a100-sxm4-40gb"
_COLUMNS = {
    "grid": "Grid Size []",
    "block": "Block Size []",
    "registers": "Registers Per Thread [register/thread]",
    "static": "Static Shared Memory Per Block [byte/block]",
    "dynamic": "Dynamic Shared Memory Per Block [byte/block]",
    "threads": "Threads [thread]",
    "theoretical": "Theoretical Occupancy [%]",
    "achieved": "Achieved Occupancy [%]",
}
_CONFIGURATION = ("grid", "block", "registers", "static", "dynamic", "theoretical", "achieved")
NAMES = ("skew", "launch", "relaunch", "drain")
_START = (0.2, 0.0012, 0.09, 0.4)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Profiled kernels, a row each: launch configuration, what Nsight Compute printed as shares, line of the file.

    NaN is a number that the row lacks.
    """

    kernel: tuple[str, ...]
    line: Ints
    values: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.line)

    def __getitem__(self, name: str) -> Floats:
        return self.values[name]

    def where(self, rows: npt.NDArray[np.bool_]) -> Kernels:
        """Some of the rows."""
        kept = np.flatnonzero(rows)
        return Kernels(
            tuple(self.kernel[i] for i in kept), self.line[kept], {k: v[kept] for k, v in self.values.items()}
        )


def read(folder: Path | None = None) -> Kernels:
    """Every profiled kernel of the table. Raises InputError naming file and line of what is malformed."""
    path = (data_folder() if folder is None else folder) / SOURCE / FILE
    try:
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", str(path), "see SOURCE.md of the folder") from error
    return parse(text, str(path))


def parse(text: str, where: str) -> Kernels:
    """Kernels of the table's text."""
    rows = csv.DictReader(io.StringIO(text))
    for column in ("kernel", *_COLUMNS.values()):
        if column not in (rows.fieldnames or ()):
            raise InputError(f"lacks the column {column!r}", where, "give the table as it was published")
    kernels: list[str] = []
    lines: list[int] = []
    values: dict[str, list[float]] = {name: [] for name in _COLUMNS}
    for row in rows:
        at = f"{where}:{rows.line_num}"
        kernels.append(row["kernel"])
        lines.append(rows.line_num)
        for name, column in _COLUMNS.items():
            try:
                value = float(row[column]) if row[column] else float("nan")
            except ValueError:
                raise InputError(f"{column} is {row[column]!r}, not a number", at, "mend the row") from None
            if value < 0 or (value == 0 and name in ("grid", "block", "registers")):
                raise InputError(f"{column} is {value:g}", at, "mend the row")
            values[name].append(value)
    found = {name: np.array(column) for name, column in values.items()}
    for name in ("theoretical", "achieved"):
        found[name] /= 100.0
        if (beyond := np.flatnonzero(found[name] > 1.0 + 1e-9)).size:
            raise InputError(
                f"{_COLUMNS[name]} is above 100", f"{where}:{lines[beyond[0]]}", "give occupancy in percent"
            )
    return Kernels(tuple(kernels), np.array(lines), found)


def configured(kernels: Kernels) -> Kernels:
    """The rows that have a launch configuration and both occupancies."""
    return kernels.where(~np.any([np.isnan(kernels[name]) for name in _CONFIGURATION], axis=0))


def theoretical(kernels: Kernels) -> oc.Columns:
    """Our theoretical occupancy of each row."""
    return oc.occupancy(
        oc.limits_of(device(DEVICE)),
        kernels["registers"].astype(np.int64),
        (kernels["static"] + kernels["dynamic"]).astype(np.int64),
        kernels["block"].astype(np.int64),
    )


def achieved(kernels: Kernels, constants: Sequence[float] | Floats | None = None, blocks: Ints | None = None) -> Floats:
    """Our achieved occupancy of each row, by the shipped constants or those given in the order of `NAMES`.

    `blocks` are those resident by theory, where they are known already.
    """
    calibration = None
    if constants is not None:
        values = dict(zip(NAMES, (float(c) for c in constants), strict=True))
        calibration = Calibration("occupancy", values, {"default": (1.0, 1.0), "host": (1.0, 1.0)}, {})
    gpu = device(DEVICE)
    assert gpu.multiprocessors is not None
    return oc.achieved(
        oc.limits_of(gpu),
        kernels["grid"],
        kernels["block"],
        theoretical(kernels).blocks if blocks is None else blocks,
        gpu.multiprocessors,
        calibration,
    )


def fit(kernels: Kernels) -> tuple[float, ...]:
    """The constants of least mean absolute error, every kernel counted by the root of its rows."""
    _, index, counts = np.unique(np.array(kernels.kernel), return_inverse=True, return_counts=True)
    weights = 1.0 / np.sqrt(counts[index])
    weights /= weights.sum()
    blocks = theoretical(kernels).blocks

    def loss(point: Floats) -> float:
        return float(weights @ np.abs(achieved(kernels, point, blocks) - kernels["achieved"]))

    # Compass search: the loss has kinks, four dimensions and no need of more than three digits.
    point, step = np.array(_START), np.array(_START) / 2
    least = loss(point)
    while (step > np.array(_START) / 500).any():
        moved = False
        for i in range(len(point)):
            for sign in (1.0, -1.0):
                other = point.copy()
                other[i] = max(0.0, other[i] + sign * step[i])
                if (found := loss(other)) < least - 1e-9:
                    point, least, moved = other, found, True
        if not moved:
            step = step / 2
    return tuple(float(x) for x in point)


def held_out(kernels: Kernels) -> Floats:
    """Achieved occupancy of each row by constants fitted without its kernel."""
    result = np.zeros(len(kernels))
    names = np.array(kernels.kernel)
    for name in np.unique(names):
        out = names == name
        result[out] = achieved(kernels.where(out), fit(kernels.where(~out)))
    return result


@dataclass(frozen=True, slots=True)
class Figures:
    """How occupancy agrees with the profiler: errors in points of occupancy (share of 1).

    `exact` of `rows` theoretical occupancies agree to half a point, `disagreeing` are the lines that do not;
    `error` is the mean absolute error of the achieved one with the shipped constants. Of the `registers_only` rows
    with registers and achieved occupancy, `bounded` keep below the theoretical occupancy of the best block, and
    `guessed_error` is the error where blocks of 256 threads and no shared memory are supposed.
    """

    rows: int
    exact: int
    disagreeing: tuple[int, ...]
    error: float
    by_kernel: dict[str, tuple[int, float]]
    registers_only: int
    bounded: int
    guessed_error: float


def figures(folder: Path | None = None) -> Figures:
    """Compare with the table as it is shipped."""
    everything = read(folder)
    kernels = configured(everything)
    differs = np.abs(theoretical(kernels).occupancy - kernels["theoretical"]) > 0.005
    errors = np.abs(achieved(kernels) - kernels["achieved"])
    names = np.array(kernels.kernel)
    some = everything.where(~np.isnan(everything["registers"]) & ~np.isnan(everything["achieved"]))
    bound = best_by_registers(some["registers"])
    return Figures(
        rows=len(kernels),
        exact=int((~differs).sum()),
        disagreeing=tuple(int(line) for line in kernels.line[differs]),
        error=float(errors.mean()),
        by_kernel={
            name: (int((names == name).sum()), float(errors[names == name].mean())) for name in np.unique(names)
        },
        registers_only=len(some),
        bounded=int((some["achieved"] <= bound + 0.005).sum()),
        guessed_error=float(np.nanmean(np.abs(_guessed(some) - some["achieved"]))),
    )


def _guessed(kernels: Kernels) -> Floats:
    """Achieved occupancy by registers and the number of threads alone."""
    block = np.full(len(kernels), 256.0)
    zero = np.zeros(len(kernels))
    supposed = {"block": block, "grid": np.ceil(kernels["threads"] / block), "static": zero, "dynamic": zero}
    return achieved(Kernels(kernels.kernel, kernels.line, {**kernels.values, **supposed}))


def best_by_registers(registers: Floats) -> Floats:
    """Theoretical occupancy of the best block, where only registers are known: a bound on the achieved one."""
    limits = oc.limits_of(device(DEVICE))
    blocks = np.arange(32, 1025, 32)
    found = oc.occupancy(limits, registers.astype(np.int64)[:, None], 0, blocks[None, :])
    return np.asarray(found.occupancy.max(axis=1))


def write(path: Path, kernels: Kernels) -> None:
    """Fit and write the calibration, its interval from kernels held out."""
    constants = fit(kernels)
    predicted = held_out(kernels)
    ratio = kernels["achieved"] / predicted
    low, high = np.quantile(ratio, (0.1, 0.9))
    data = {
        "schema": SCHEMA,
        "model": "occupancy",
        "constants": {name: float(f"{value:.4g}") for name, value in zip(NAMES, constants, strict=True)},
        "intervals": {
            "default": [float(f"{low:.4g}"), float(f"{max(high, 1.0):.4g}")],
            "host": [1.0, 1.0],
        },
        "provenance": {
            "data": f"{SOURCE}/{FILE}: kernels with launch configuration on an A100 40 GB, Nsight Compute of CUDA 11.4",
            "repository": "leleucas/Actual-Parameter-Collection-for-Machine-Learning-Operators 5c4015a (2023-05-31)",
            "licence": "Apache-2.0",
            "rows": len(kernels),
            "kernels": len(set(kernels.kernel)),
            "held_out_error": float(f"{np.abs(predicted - kernels['achieved']).mean():.4g}"),
            "method": "least mean absolute error, kernels weighted by the root of their rows; interval and error from "
            "leaving each kernel out",
            "date": date.today().isoformat(),
        },
    }
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def lines(folder: Path | None = None) -> Iterator[str]:
    """The figures in words."""
    found = figures(folder)
    yield f"theoretical occupancy: {found.exact} of {found.rows} rows exact; not lines {list(found.disagreeing)}"
    yield f"achieved occupancy, shipped constants: {100 * found.error:.2f} points mean absolute error"
    worst = sorted(found.by_kernel.items(), key=lambda item: -item[1][0] * item[1][1])[:5]
    for name, (rows, error) in worst:
        yield f"  {name[:60]:60s} {rows:4d} rows {100 * error:5.1f} points"
    yield f"registers only: {found.bounded} of {found.registers_only} rows below the bound of their registers"
    yield f"  and blocks of 256 threads supposed: {100 * found.guessed_error:.2f} points mean absolute error"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        target = Path(oc.__file__).parent / "calibrations" / "occupancy.json"
        write(target, configured(read()))
        load.cache_clear()
        print(target.read_text(encoding="utf-8"))
    print("\n".join(lines()))
