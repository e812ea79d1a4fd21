"""What microbenchmarks say of NVIDIA's architectures: latencies in cycles, throughputs per multiprocessor and cycle.

``microbenchmarks.toml`` holds the figures, each with its study. They are of an architecture, so that a device is
reckoned from its compute capability, its multiprocessors and its clock; what no study gives is absent, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from foretell.errors import InputError, near_names, unknown
from foretell.hardware.device import Device, FrozenMap
from foretell.hardware.loader import DATA, read_toml

__all__ = ["NAMES", "Figure", "figures", "microbenchmarks", "tensor_peak"]

#: Every figure there may be, and what it is in.
NAMES: Mapping[str, str] = {
    **{f"latency.{level}": "cycles" for level in ("l1", "shared", "l2", "memory", "fma", "mufu")},
    **{f"throughput.{kind}": "results per multiprocessor and cycle" for kind in ("fp64", "fp32", "fp16", "mufu")},
    "throughput.shared_bytes": "bytes per multiprocessor and cycle",
    "throughput.l2_bytes": "bytes per cycle, the whole device",
    **{
        f"tensor.{dtype}": "multiply-adds per multiprocessor and cycle"
        for dtype in ("fp64", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8")
    },
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, the study it is from, and whether it was checked there; `others` are what other studies found."""

    value: float
    source: str
    sure: bool = True
    others: tuple[Figure, ...] = ()


@cache
def microbenchmarks() -> Mapping[str, Mapping[str, Figure]]:
    """Compute capability → name of `NAMES` → figure."""
    return parse(read_toml(DATA / "microbenchmarks.toml"), "microbenchmarks.toml")


def parse(data: Mapping[str, Any], where: str) -> Mapping[str, Mapping[str, Figure]]:
    """Read such a table. Raises InputError naming the figure that is malformed."""
    sources = data.get("sources", {})
    used: set[str] = set()
    found: dict[str, Mapping[str, Figure]] = {}
    for capability, groups in data.items():
        if capability == "sources":
            continue
        table: dict[str, Figure] = {}
        for group, entries in groups.items():
            for key, entry in entries.items():
                name = f"{group}.{key}"
                at = f"{where}: {capability}.{name}"
                if name not in NAMES:
                    near = near_names(name, NAMES)
                    raise InputError("no such figure", at, f"did you mean {near[0]!r}?" if near else None)
                several = entry if isinstance(entry, list) and entry and isinstance(entry[0], list) else [entry]
                first, *others = (_figure(one, sources, at, used) for one in several)
                table[name] = Figure(first.value, first.source, first.sure, tuple(others))
        found[capability] = FrozenMap(table)
    if unused := set(sources) - used:
        raise InputError(f"source {min(unused)!r} is used by no figure", where, "remove or use it")
    return FrozenMap(found)


def _figure(entry: Any, sources: Mapping[str, str], where: str, used: set[str]) -> Figure:
    repair = 'write [value, "source"] or [value, "source", "unsure"]'
    if not isinstance(entry, list) or len(entry) not in (2, 3) or (len(entry) == 3 and entry[2] != "unsure"):
        raise InputError(f"{entry!r} is no figure", where, repair)
    value, source = entry[:2]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{value!r} is not a number above 0", where, repair)
    if source not in sources:
        raise InputError(f"source {source!r} is not under [sources]", where, repair)
    used.add(source)
    return Figure(float(value), sources[source], len(entry) == 2)


def figures(capability: str) -> Mapping[str, Figure]:
    """The figures of one compute capability. Raises UnknownNameError where there are none."""
    table = microbenchmarks()
    if capability not in table:
        raise unknown("compute capability with microbenchmarks", capability, table)
    return table[capability]


def tensor_peak(device: Device, dtype: str, clock_hz: float | None = None) -> float | None:
    """Dense FLOP/s that the table gives a device at a clock (its boost clock): two per multiply-add.

    None where the table, the multiprocessors or the clock are unknown. GeForce boards are not told apart: theirs is
    the rate of a 16-bit accumulator.

    >>> from foretell.hardware import device
    >>> round(tensor_peak(device("a100-sxm4-80gb"), "fp16") / 1e12)
    312
    """
    clock = clock_hz or device.boost_clock_hz
    figure = microbenchmarks().get(device.compute_capability or "", {}).get(f"tensor.{dtype}")
    if figure is None or device.multiprocessors is None or clock is None:
        return None
    return 2.0 * figure.value * device.multiprocessors * clock
