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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from foretell.accuracy.collectives import (
    Exchanged,
    Timed,
    cluster01,
    custom_all_reduce,
    read,
    read_exchanges,
    vidur_bridges,
)
from foretell.simulate.collectives import Fabric
from foretell.simulate.collectives import rates as rates_module
from foretell.simulate.collectives.methods.nvls import has_nvls
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
#: The same for one message: no hop waits for another, and less is set up.
SEND_START = Curve((Protocol(7e-6, 7e-7, 5.0), Protocol(9e-6, 1e-6, 1.5), Protocol(1.2e-5, 1.5e-6, 1.0)), 1.1, 0.1)
#: The same for NVLink SHARP, which does not pass the buffer through the device's memory hop by hop.
NVLS_START = Curve((Protocol(2e-5, 1e-6, 1.5), Protocol(4e-5, 1e-6, 1.0)), 1.5, 0.01)

TUNING = "NVIDIA, NCCL 2.28, src/graph/tuning.cc: latencies of LL, LL128 and Simple"


def curve(wire: float, *protocols: tuple[float, float, float], scale: float = 1.0) -> Curve:
    """A curve from protocols as (base in us, step in us, slowdown), both latencies times `scale`."""
    made = tuple(Protocol(b * scale * 1e-6, s * scale * 1e-6, w) for b, s, w in protocols)
    return Curve(made, wire, 0.0)


def network(ring: float, send: float, scale: float = 1.0, pairs: float | None = None) -> dict[str, Curve]:
    """Curves between nodes: `ring` and `send` are one over a port's efficiency, full of rings or of one message.

    `pairs` is that of an all-to-all, as `ring` unless given.
    """
    around = curve(ring, (6.6, 2.7, 2.0), (14, 4.0, 1.09), (8.4, 14, 1.0), scale=scale)
    return {
        "any": around,
        "ring": around,
        # NCCL takes trees to reach 0.92 of what rings do.
        "tree": curve(ring / 0.92, (6.8, 5.0, 2.0), (14, 8.5, 1.09), (8.4, 14, 1.0), scale=scale),
        "pairwise": curve(pairs or ring, (14, 2, 1.0), scale=scale),
        "direct-send": curve(send, (12, 4, 1.0), scale=scale),
        "sharp": curve(ring * 1.05, (14, 5, 1.0), scale=scale),
    }


PCIE = ((6, 1.0, 2.0), (14, 2.5, 1.09), (8.4, 5.7, 1.0))
#: What is known of links that no table here covers, and of latencies between nodes. One number each, and a source.
STATED: dict[str, tuple[str, dict[str, Curve]]] = {
    "infiniband": (TUNING + "; a port reaches 97 %, of one message 85 %", network(1.03, 1.17)),
    "roce": (TUNING + "; assumed: 3 % below InfiniBand, for Ethernet's and UDP's headers", network(1.06, 1.2, 1.1)),
    "efa": (
        TUNING + ", 1.8 times (assumed: packets are put in order in software); assumed: 92 % of a port",
        network(1.09, 1.25, 1.8),
    ),
    "ethernet": (TUNING + ", four times (assumed: sockets go through the kernel)", network(1.12, 1.3, 4.0)),
    "xgmi-full": (
        "AMD, Understanding RCCL bandwidth and xGMI performance on MI300X, 2025: 48 of 64 GB/s a link are usable",
        {"any": curve(1.4, (5, 1.0, 2.0), (8, 1.9, 1.09), (8.4, 3.4, 1.0))},
    ),
    "roce-full": (
        "Intel Gaudi documentation, Collectives performance: 513 of 525 GB/s in an all-reduce of 8 Gaudi 3",
        {"any": curve(1.024, (8, 2, 1.0))},
    ),
    "ici-torus": ("assumed: nine tenths of the signalled rate", {"any": curve(1.1, (5, 1, 1.0))}),
    "pcie-4": (
        TUNING + "; assumed: 70 % of the signalled rate between peers; one way, see pcie-5",
        {"any": curve(1.4, *PCIE), "bridged-ring": curve(1.3, *PCIE)},
    ),
    "pcie-5": (
        TUNING + "; one way, 77 % of the signalled rate: vidur h100_pairwise_nvlink, four ranks, 64 MiB",
        {"bridged-ring": curve(1.3, *PCIE)},
    ),
}


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

    def where(self, rows: npt.NDArray[np.bool_]) -> Part:
        """Only the `rows` that are true."""
        return Part(self.table.where(rows), self.fabric, self.weight[rows])


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
    """Curves of `names` fitted on `parts`, all of one kind of link within a node.

    Rings and NVLink SHARP are fitted apart first, on groups of up to four and of more, which is where NCCL takes
    either; then together, each row at the faster.
    """
    starts = {name: {"nvls": NVLS_START, "direct-send": SEND_START}.get(name, START) for name in names}
    if "nvls" in names:
        few = [part.where(part.table.size <= 4) for part in parts]
        many = [part.where(part.table.size > 4) for part in parts]
        ring = names[0]
        starts[ring] = solve(few, {ring: START}, kind, "ring")[ring]
        starts["nvls"] = solve(many, {"nvls": NVLS_START}, kind, "nvls")["nvls"]
    return solve(parts, starts, kind)


def solve(
    parts: Sequence[Part], starts: Mapping[str, Curve], kind: str, algorithm: str | None = None
) -> dict[str, Curve]:
    """Least squares over the logarithms of times, from `starts`; by `algorithm`, or as each table says."""
    packed = [pack(curve) for curve in starts.values()]
    ends = np.cumsum([len(numbers) for numbers in packed])
    begin = np.concatenate(packed)

    def curves(numbers: Floats) -> dict[str, Curve]:
        pieces = np.split(numbers, ends[:-1])
        return {name: unpack(piece) for name, piece in zip(starts, pieces, strict=True)}

    def residuals(numbers: Floats) -> Floats:
        found = curves(numbers)
        out = [0.03 * (numbers - begin)]
        for part in parts:
            fabric, table = with_curves(part.fabric, found, {}), part.table
            predicted = fabric.time_s(kind, table.nbytes, table.size, algorithm=algorithm or table.algorithm)
            out.append(np.log(predicted / table.time_s) * part.weight * 3)
        return np.concatenate(out)

    return curves(least_squares(residuals, begin, loss="soft_l1", f_scale=0.1, max_nfev=150).x)


def fit_network(tables: Iterable[Timed]) -> dict[str, Curve]:
    """Curves of InfiniBand: efficiencies from exchanges between two nodes, latencies as stated.

    Of an all-to-all with several peers outside and of one message from node to node: those that ports alone limit. With
    eight peers a port is as full as rings get it, of which there are no open measurements.
    """
    ratios: dict[str, list[Floats]] = defaultdict(list)
    full: list[Floats] = []
    for table in tables:
        fabric = table.fabric()
        if table.clear and fabric.network_kind == "infiniband" and fabric.port_rate:
            sent = table.nbytes / 2 if table.kind == "all_to_all" else table.nbytes
            if table.kind == "send_recv" or (table.kind == "all_to_all" and fabric.local > 1):
                ratios[table.kind].append(table.time_s * fabric.port_rate / sent)
                if table.kind == "all_to_all" and fabric.local == 8:
                    full.append(ratios[table.kind][-1])
    if len(ratios) < 2 or not full:
        return STATED["infiniband"][1]
    ring, pairs, send = (float(np.median(np.concatenate(r))) for r in (full, ratios["all_to_all"], ratios["send_recv"]))
    return network(ring, send, pairs=pairs)


def fit(tables: Iterable[Timed]) -> dict[str, dict[str, Curve]]:
    """Curves by kind of link, from tables of one node; between nodes see `fit_network`."""
    known = list(tables)
    parts: dict[tuple[str, str, str], list[Part]] = defaultdict(list)
    for table in known:
        fabric = table.fabric()
        if table.clear and fabric.network_kind is None and fabric.node_kind:
            if (table.source, table.kind) == ("nccl-tests-cluster", "send_recv"):
                # Below 256 MiB NCCL 2.28 gives each pair few channels here: 80 to 160 GB/s, and then 300 and more.
                table = table.where(table.nbytes >= 2**28)
            parts[fabric.node_kind, table.kind, table.algorithm].append(Part.of(table))
    found: dict[str, dict[str, Curve]] = defaultdict(dict)
    for (link, kind, algorithm), group in sorted(parts.items()):
        names = ("one-shot", "two-shot") if algorithm == "direct" else FITTED[kind]
        names = tuple(n for n in names if n != "nvls" or has_nvls(link))
        found[link].update(fit_curves(group, names, kind))
    for curves in found.values():
        curves["any"] = curves.get("ring.all_gather") or next(iter(curves.values()))
    found["infiniband"] = fit_network(known)
    return dict(found)


#: Constants of an exchange, and where their fit begins.
NEAR = {
    "base_s": 3e-5, "wire": 1.3, "sm_bytes_per_s": 22e9, "far_sm_bytes_per_s": 14e9, "token_s": 2e-7,
    "token_bytes_per_s": 8e9, "fast_base_s": 1.5e-5, "fast_expert_s": 2e-8, "fast_wire": 1.6, "pair_bytes_per_s": 4e9,
}  # fmt: skip
FAR = {"base_s": 1e-5, "step_s": 2e-6, "wire": 1.06}
WIRES = [at for at, name in enumerate([*NEAR, *FAR]) if name.endswith("wire")]


def as_section(numbers: Floats, link: str, phase: str) -> dict[str, dict[str, dict[str, float]]]:
    """Unbounded numbers as a ``deepep`` part of the calibration; efficiencies stay below 1."""
    values = np.exp(numbers)
    values[WIRES] += 1
    inside = {name: float(value) for name, value in zip(NEAR, values[: len(NEAR)], strict=True)}
    outside = {name: float(value) for name, value in zip(FAR, values[len(NEAR) :], strict=True)}
    return {"inside": {f"{link}.{phase}": inside}, "outside": {f"infiniband.{phase}": outside}}


def fit_exchange(link: str, phase: str, tables: Sequence[Exchanged]) -> dict[str, dict[str, dict[str, float]]]:
    """The constants of one phase over one kind of link."""
    start = np.array([*NEAR.values(), *FAR.values()])
    start[WIRES] -= 1
    start = np.log(start)
    held = np.full(len(start), 0.05)
    held[WIRES] = 1.0  # links are known to give three quarters and more; the rest is free

    def residuals(numbers: Floats) -> Floats:
        out = [held * (numbers - start)]
        for table in tables:
            with shipped("deepep", as_section(numbers, link, phase)):
                predicted = table.predicted_s()
            out.append(np.log(predicted / table.time_s) * 10 / np.sqrt(len(table.time_s)))
        return np.concatenate(out)

    return as_section(least_squares(residuals, start, loss="soft_l1", f_scale=0.1, max_nfev=60).x, link, phase)


def fit_exchanges(tables: Iterable[Exchanged]) -> dict[str, dict[str, dict[str, float]]]:
    """The ``deepep`` part of the calibration, from tables of one to four nodes.

    Those of eight are left out: there, a dispatch takes three times what one over four nodes does, for the same bytes.
    """
    found: dict[str, dict[str, dict[str, float]]] = {"inside": {}, "outside": {}}
    groups: dict[tuple[str, str], list[Exchanged]] = defaultdict(list)
    for table in tables:
        if table.size.max() <= 32:
            groups[str(table.fabric().node_kind), table.phase].append(table)
    for (link, phase), members in sorted(groups.items()):
        best = fit_exchange(link, phase, members)
        found["inside"].update(best["inside"])
        if any(table.fabric().network_kind for table in members):
            found["outside"].update(best["outside"])
    return found


@contextmanager
def shipped(name: str, value: Any) -> Iterator[None]:
    """As if `value` were in the calibration file under `name`."""
    kept = rates_module._calibration()[name]
    rates_module._calibration()[name] = value
    try:
        yield
    finally:
        rates_module._calibration()[name] = kept


def exchange_errors(tables: Sequence[Exchanged]) -> list[Floats]:
    """Relative errors of the shipped constants."""
    return [table.predicted_s() / table.time_s - 1 for table in tables]


def leave_out_exchanges(tables: Sequence[Exchanged]) -> list[Floats]:
    """Errors on each system of the tables with constants fitted without it; on DeepEP's figures, without those."""
    errors: dict[int, Floats] = {}
    for held in sorted({held_out(t) for t in tables}):
        constants = fit_exchanges(t for t in tables if held_out(t) != held)
        for phase in ("dispatch", "combine"):
            constants["outside"].setdefault(f"infiniband.{phase}", FAR)
        with shipped("deepep", constants):
            for at, table in enumerate(tables):
                if held_out(table) == held:
                    errors[at] = table.predicted_s() / table.time_s - 1
    return [errors[at] for at in range(len(tables))]


def held_out(table: Exchanged) -> str:
    """What is left out together."""
    return f"{table.source}: {table.system.split(',')[0]}"


def report_exchanges(tables: Sequence[Exchanged], errors: Sequence[Floats], title: str) -> None:
    """Print medians by system and kernel, of dispatch and combine, and of each source."""
    print(f"\n{title}")
    groups: dict[str, list[Floats]] = defaultdict(list)
    for table, error in zip(tables, errors, strict=True):
        kernel = "low latency" if table.low_latency else "normal"
        for key in (f"{table.source}: {table.system}, {kernel}", f"{table.source}: all", "every row"):
            groups[key].append(np.abs(error))
    for key, found in sorted(groups.items()):
        rows = np.concatenate(found)
        print(f"{key:58s} {len(rows):6d} {np.median(rows):7.1%} {rows.mean():7.1%} {np.quantile(rows, 0.9):7.1%}")


def judged(table: Timed, curves: Mapping[str, Mapping[str, Curve]] | None = None) -> Floats:
    """Relative errors of the predictions for a table, with `curves` in the place of the shipped ones."""
    fabric = table.fabric()
    if curves is not None:
        fabric = with_curves(fabric, curves.get(str(fabric.node_kind), {}), curves.get(str(fabric.network_kind), {}))
    return fabric.time_s(table.kind, table.nbytes, table.size, algorithm=table.algorithm) / table.time_s - 1


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
    kept = [p for p in curve.protocols if not any(q is not p and beats(q, p) for q in curve.protocols)]
    return {
        "protocols": [[digits(p.base_s), digits(p.step_s), digits(p.slowdown)] for p in kept],
        "wire": digits(curve.wire),
        "copy": digits(curve.copy) if curve.copy > 1e-4 else 0.0,
    }


def beats(one: Protocol, other: Protocol) -> bool:
    """Whether `one` is at least as good in all."""
    return one.base_s <= other.base_s and one.step_s <= other.step_s and one.slowdown <= other.slowdown


def digits(value: float) -> float:
    """Four significant ones."""
    return float(f"{value:.4g}")


def write(tables: Sequence[Timed], exchanges: Sequence[Exchanged]) -> None:
    """Fit everything and write the calibration file."""
    sources: dict[str, set[str]] = defaultdict(set)
    for table in tables:
        fabric = table.fabric()
        if table.clear:
            kind = fabric.network_kind or fabric.node_kind
            sources[str(kind)].add(f"{table.source} {table.system}")
    links: dict[str, Any] = {
        kind: {"source": source, "curves": {name: as_entry(c) for name, c in sorted(curves.items())}}
        for kind, (source, curves) in STATED.items()
    }
    for kind, curves in fit(tables).items():
        said = "fitted on " + ", ".join(sorted(sources[kind]))
        if kind in STATED:
            said += "; stated: " + STATED[kind][0]
            curves = {**STATED[kind][1], **curves}
        links[kind] = {"source": said, "curves": {name: as_entry(c) for name, c in sorted(curves.items())}}
    deepep = fit_exchanges(t for t in exchanges if t.source.startswith("aiconfigurator"))
    rounded = {
        place: {key: {name: digits(value) for name, value in entry.items()} for key, entry in entries.items()}
        for place, entries in deepep.items()
    }
    written = {
        "format": 1,
        "provenance": {
            "written_by": "benchmarks/collectives.py --fit",
            "aiconfigurator, custom-all-reduce, deepep": "ai-dynamo/aiconfigurator, commit 095f58a, Apache-2.0",
            "nccl-tests-cluster": "xxrjun/nccl-tests-cluster, commit 455de4f, Apache-2.0",
            "vtrain": "VIA-Research/vTrain, commit f8dda84, MIT",
            "vidur": "microsoft/vidur, commit 7d47513, MIT",
        },
        "links": dict(sorted(links.items())),
        "deepep": {"source": "fitted on aiconfigurator's tables of DeepEP, one to four nodes", **rounded},
    }
    WRITTEN.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    rates_module._calibration.cache_clear()
    rates_module._link_rates.cache_clear()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--all", action="store_true")
    chosen = parser.parse_args(arguments)
    tables, custom, exchanges = read(DATA), custom_all_reduce(DATA), read_exchanges(DATA)
    if chosen.fit:
        write([*tables, *custom], exchanges)
    barred = [t for t in tables if t.clear and t.nvswitch_or_infiniband]
    rest = [t for t in tables if not (t.clear and t.nvswitch_or_infiniband)]
    results = [("shipped constants", [judged(t) for t in barred])]
    if chosen.leave_out:
        results.append(("leave-system-out", leave_out(barred)))
    for said, errors in results:
        report(barred, errors, system_of, f"NVSwitch and InfiniBand, {said}, by system")
        report(barred, errors, lambda t: t.kind, "the same, by collective")
        report(barred, errors, lambda t: t.source, "the same, by source")
    report_exchanges(exchanges, exchange_errors(exchanges), "DeepEP, shipped constants: rows, median, mean, 90 %")
    if chosen.leave_out:
        title = "DeepEP, leave-system-out: rows, median, mean, 90 %"
        report_exchanges(exchanges, leave_out_exchanges(exchanges), title)
    report(custom, [judged(t) for t in custom], system_of, "All-reduce kernels of serving engines, shipped constants")
    if chosen.all:
        rest += vidur_bridges(DATA)
        report(rest, [judged(t) for t in rest], lambda t: f"{system_of(t)} {t.kind}", "Other links, unstated networks")
        other = cluster01(DATA, "example-cluster00")
        report(other, [judged(t) for t in other], lambda t: t.kind, "cluster00, whose ports are not stated")


if __name__ == "__main__":
    main()
