"""How well predicted collectives agree with published ones, system by system, and the fit of their constants.

    python benchmarks/collectives.py [--fit] [--leave-out] [--all]

prints median absolute relative errors with the shipped constants (`simulate/collectives/calibration.json`): from 1 MiB
up, and below. ``--leave-out`` fits again without each system in turn and judges on it. ``--fit`` fits on all of them
and writes the constants. ``--all`` also judges what is outside the bar: other links, and networks that the source does
not state. Needs ``FORETELL_DATA`` (default ``../shared/data``).
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from foretell.accuracy.collectives import Timed, read
from foretell.simulate.collectives import Fabric, algorithms
from foretell.simulate.collectives import rates as rates_module
from foretell.simulate.collectives.rates import Curve, LinkRates, Protocol

Floats = npt.NDArray[np.float64]

DATA = Path(os.environ.get("FORETELL_DATA", "../shared/data"))
WRITTEN = Path(rates_module.__file__).parent / "calibration.json"
MIB = float(2**20)
#: Sizes of one table that a fit looks at: a table of a thousand sizes says no more than forty of them do.
SIZES = 40
#: What below 1 MiB weighs in a fit, beside 1 above.
SMALL = 0.3

#: Curves fitted for each kind of collective, together: `auto` takes the faster of them.
FITTED = {
    "all_reduce": ("ring.all_reduce", "nvls"),
    "all_gather": ("ring.all_gather",),
    "reduce_scatter": ("ring.reduce_scatter",),
    "all_to_all": ("pairwise",),
    "send_recv": ("direct-send",),
}
#: Where a fit begins, and what holds it where data do not: base and step in seconds and slowdown for each protocol.
START = Curve((Protocol(6e-6, 7e-7, 5.0), Protocol(1e-5, 1e-6, 1.5), Protocol(2e-5, 2e-6, 1.0)), 1.2, 0.2)


def pack(curve: Curve) -> Floats:
    """A curve as unbounded numbers: logarithms of what is positive."""
    slow = [p.slowdown for p in curve.protocols]
    gaps = [a / b - 1 for a, b in pairwise(slow)]
    flat = [v for p in curve.protocols for v in (p.base_s * 1e6, p.step_s * 1e6)]
    return np.log(np.maximum([*flat, *gaps, curve.wire - 1, curve.copy], 1e-3))


def unpack(numbers: Floats) -> Curve:
    """The inverse of `pack`."""
    values = np.exp(np.clip(numbers, -12, 8))
    count = (len(numbers) - 1) // 3
    slow = [1.0]
    for gap in values[2 * count : 3 * count - 1][::-1]:
        slow.insert(0, slow[0] * (1 + gap))
    pairs = values[: 2 * count].reshape(count, 2) * 1e-6
    protocols = tuple(Protocol(float(b), float(s), float(w)) for (b, s), w in zip(pairs, slow, strict=True))
    return Curve(protocols, 1 + float(values[-2]), float(values[-1]))


def thinned(table: Timed) -> Timed:
    """`table` at about `SIZES` sizes for each number of ranks, rows of one size as their median."""
    keep: dict[tuple[int, int], list[int]] = defaultdict(list)
    low, high = np.log2(table.nbytes.min()), np.log2(table.nbytes.max() + 1)
    bins = np.floor((np.log2(table.nbytes) - low) / max(high - low, 1e-9) * SIZES).astype(int)
    for row, (size, bin_) in enumerate(zip(table.size, bins, strict=True)):
        keep[int(size), int(bin_)].append(row)
    nbytes, size, time_s = [], [], []
    for rows in keep.values():
        middle = np.median(table.nbytes[rows])
        nbytes.append(middle)
        size.append(table.size[rows[0]])
        time_s.append(np.exp(np.median(np.log(table.time_s[rows] / table.nbytes[rows]))) * middle)
    return replace(table, nbytes=np.array(nbytes), size=np.array(size), time_s=np.array(time_s))


@dataclass(frozen=True)
class Part:
    """One table made ready: its fabric, thinned rows, and their weights."""

    table: Timed
    fabric: Fabric
    weight: Floats

    @classmethod
    def of(cls, table: Timed) -> Part:
        """`table` thinned; every number of ranks weighs the same."""
        thin = thinned(table)
        counts = {int(n): int((thin.size == n).sum()) for n in np.unique(thin.size)}
        weight = np.array([1 / counts[int(n)] for n in thin.size])
        return cls(thin, table.fabric(), np.sqrt(weight * np.where(thin.nbytes >= MIB, 1.0, SMALL)))


def with_curves(fabric: Fabric, inside: Mapping[str, Curve], outside: Mapping[str, Curve]) -> Fabric:
    """`fabric` with some curves put in the place of its own."""

    def changed(rates: LinkRates | None, curves: Mapping[str, Curve]) -> LinkRates | None:
        return None if rates is None else replace(rates, curves={**rates.curves, **curves})

    return replace(
        fabric,
        node_rates=changed(fabric.node_rates, inside),
        network_rates=changed(fabric.network_rates, outside),
        _geometry={},
    )


def fit_curves(parts: Sequence[Part], names: Sequence[str], kind: str) -> dict[str, Curve]:
    """Curves of `names` fitted together on `parts`, all of one kind of link within a node."""
    start = np.concatenate([pack(START) for _ in names])
    width = len(start) // len(names)

    def curves(numbers: Floats) -> dict[str, Curve]:
        return {name: unpack(numbers[i * width : (i + 1) * width]) for i, name in enumerate(names)}

    def residuals(numbers: Floats) -> Floats:
        found = curves(numbers)
        out = [0.02 * (numbers - start)]
        for part in parts:
            fabric = with_curves(part.fabric, found, {})
            predicted = fabric.time_s(kind, part.table.nbytes, part.table.size)
            out.append(np.log(predicted / part.table.time_s) * part.weight * 3)
        return np.concatenate(out)

    result = least_squares(residuals, start, loss="soft_l1", f_scale=0.05, max_nfev=150)
    return curves(result.x)


def fit(tables: Iterable[Timed]) -> dict[str, dict[str, Curve]]:
    """Curves by kind of link, from tables of one node."""
    parts: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for table in tables:
        fabric = table.fabric()
        if table.clear and fabric.network_kind is None and fabric.node_kind:
            parts[fabric.node_kind, table.kind].append(Part.of(table))
    found: dict[str, dict[str, Curve]] = defaultdict(dict)
    for (link, kind), group in sorted(parts.items()):
        names = [n for n in FITTED[kind] if n != "nvls" or rates_nvls(link)]
        found[link].update(fit_curves(group, names, kind))
    for curves in found.values():
        if "ring.all_gather" in curves:
            curves["any"] = curves["ring.all_gather"]
        elif "ring.all_reduce" in curves:
            curves["any"] = curves["ring.all_reduce"]
    return dict(found)


def rates_nvls(link: str) -> bool:
    """Whether switches of this kind reduce."""
    from foretell.simulate.collectives.algorithms.nvls import has_nvls

    return has_nvls(link)


def judged(table: Timed, curves: Mapping[str, Mapping[str, Curve]] | None = None) -> Floats:
    """Relative errors of the predictions for a table, with `curves` in the place of the shipped ones."""
    fabric = table.fabric()
    if curves is not None:
        fabric = with_curves(fabric, curves.get(str(fabric.node_kind), {}), curves.get(str(fabric.network_kind), {}))
    return fabric.time_s(table.kind, table.nbytes, table.size) / table.time_s - 1


def line(label: str, errors: Floats, nbytes: Floats) -> str:
    """Median, mean and 90th percentile from 1 MiB, and the median below."""
    big, small = np.abs(errors[nbytes >= MIB]), np.abs(errors[nbytes < MIB])
    text = f"{label:58s} {len(big):6d}"
    text += f" {np.median(big):7.1%} {big.mean():7.1%} {np.quantile(big, 0.9):7.1%}" if len(big) else " " * 24
    return text + (f"   {len(small):5d} {np.median(small):7.1%}" if len(small) else "")


HEADER = f"{'from 1 MiB: rows, median, mean, 90 %; below: rows, median':58s}"


def report(
    tables: Sequence[Timed], errors: Sequence[Floats], by: Callable[[Timed], str], title: str
) -> dict[str, float]:
    """Print errors gathered by what `by` says; the medians from 1 MiB."""
    print(f"\n{title}\n{HEADER}")
    groups: dict[str, list[int]] = defaultdict(list)
    for at, table in enumerate(tables):
        groups[by(table)].append(at)
    medians = {}
    for name, members in [*sorted(groups.items()), ("all", list(range(len(tables))))]:
        all_errors = np.concatenate([errors[i] for i in members])
        sizes = np.concatenate([tables[i].nbytes for i in members])
        print(line(name, all_errors, sizes))
        if (sizes >= MIB).any():
            medians[name] = float(np.median(np.abs(all_errors[sizes >= MIB])))
    return medians


def system_of(table: Timed) -> str:
    """What is left out together: one source's one system."""
    return f"{table.source}: {table.system.split(',')[0]}"


def leave_out(tables: Sequence[Timed]) -> list[Floats]:
    """Errors on each system with constants fitted without it."""
    errors: dict[int, Floats] = {}
    for held in sorted({system_of(t) for t in tables}):
        curves = fit(t for t in tables if system_of(t) != held)
        for at, table in enumerate(tables):
            if system_of(table) == held:
                errors[at] = judged(table, curves)
    return [errors[at] for at in range(len(tables))]


def as_entry(curve: Curve) -> dict[str, Any]:
    """A curve as the calibration file has it, to four digits."""

    def short(value: float) -> float:
        return float(f"{value:.4g}")

    return {
        "protocols": [[short(p.base_s), short(p.step_s), short(p.slowdown)] for p in curve.protocols],
        "wire": short(curve.wire),
        "copy": short(curve.copy) if curve.copy > 1e-4 else 0.0,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--all", action="store_true")
    chosen = parser.parse_args(arguments)
    tables = read(DATA)
    if chosen.fit:
        write(fit(tables))
        rates_module._calibration.cache_clear()
        rates_module._link_rates.cache_clear()
    barred = [t for t in tables if t.clear and t.nvswitch_or_infiniband]
    rest = [t for t in tables if not (t.clear and t.nvswitch_or_infiniband)]
    errors = [judged(t) for t in barred]
    report(barred, errors, system_of, "NVSwitch and InfiniBand, shipped constants, by system")
    report(barred, errors, lambda t: t.kind, "the same, by collective")
    report(barred, errors, lambda t: t.source, "the same, by source")
    if chosen.leave_out:
        errors = leave_out(barred)
        report(barred, errors, system_of, "Leave-system-out, by system")
        report(barred, errors, lambda t: t.kind, "the same, by collective")
        report(barred, errors, lambda t: t.source, "the same, by source")
    if chosen.all:
        report(rest, [judged(t) for t in rest], lambda t: f"{system_of(t)} {t.kind}", "Other links")
    assert algorithms()


def write(curves: Mapping[str, Mapping[str, Curve]]) -> None:
    """Put fitted curves into the calibration file; kinds of link without measurements stay as they are."""
    found = json.loads(WRITTEN.read_text(encoding="utf-8"))
    for link, fitted in curves.items():
        entry = found["links"].setdefault(link, {"curves": {}})
        entry["curves"].update({name: as_entry(curve) for name, curve in sorted(fitted.items())})
    WRITTEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
