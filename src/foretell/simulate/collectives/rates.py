"""What each kind of link makes of its signalled rate: efficiencies and latencies, by kind of link and algorithm.

`calibration.json` holds them with where they came from; `benchmarks/collectives.py --fit` writes it. A kind of link
that nobody measured takes the constants of the nearest kind that somebody did, and `Link` says which (`measured_on`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from foretell.errors import InputError

__all__ = ["Curve", "LinkRates", "Protocol", "link_rates", "measured_kinds", "section"]

#: Kinds to fall back on, for links that were not measured: the first that is in the calibration is taken.
NEAREST: Mapping[str, tuple[str, ...]] = {
    "nvlink-1-mesh": ("nvlink-2-mesh",),
    "nvlink-2-bridge": ("nvlink-2-mesh",),
    "nvlink-2-nvswitch": ("nvlink-3-nvswitch",),
    "nvlink-3-bridge": ("nvlink-3-nvswitch",),
    "nvlink-4-bridge": ("nvlink-4-nvswitch",),
    "nvlink-6-nvswitch": ("nvlink-5-nvswitch",),
    "pcie-3": ("pcie-4",),
    "pcie-6": ("pcie-5",),
    "pcie-3-host": ("pcie-4-host",),
    "pcie-5-host": ("pcie-4-host",),
    "pcie-6-host": ("pcie-5-host", "pcie-4-host"),
    "roce": ("infiniband",),
    "efa": ("infiniband",),
    "ethernet": ("infiniband",),
}
#: What any other link inside a machine is taken for: a mesh of links that NCCL's kind of library drives.
NEAREST_INSIDE = ("nvlink-2-mesh", "nvlink-3-nvswitch")
NEAREST_OUTSIDE = ("infiniband",)


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to move data over a link, as NCCL's LL, LL128 and Simple: latency bought with bandwidth.

    `base_s` once a call, `step_s` for each hop that has to wait for the one before, and `slowdown` (1 or more) on
    the time of the bytes.
    """

    base_s: float
    step_s: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Time of one algorithm on one kind of link: the best of its protocols.

    ``min over p of base_p + steps · step_p + slowdown_p · (wire · sent + copy · buffer) / rate``: `wire` (1 or more)
    is one over the efficiency of the link, `copy` the extra time of moving the buffer through the device's memory, as
    a share of the link's rate.
    """

    protocols: tuple[Protocol, ...]
    wire: float
    copy: float


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Curves of one kind of link by algorithm and kind of collective, and the kind they were measured on."""

    kind: str
    measured_on: str
    curves: Mapping[str, Curve]

    def curve(self, algorithm: str, kind: str) -> Curve:
        """The curve of `algorithm` doing `kind`; else of `algorithm`, else of `kind` by ring, else the link's own."""
        for key in (f"{algorithm}.{kind}", algorithm, f"ring.{kind}", "any"):
            if key in self.curves:
                return self.curves[key]
        raise InputError(f"no rate of {algorithm} over {self.kind}", "collectives/calibration.json", "fit it again")


@cache
def _calibration() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("calibration.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def section(name: str) -> dict[str, Any]:
    """A part of the calibration file other than ``links``, as it stands."""
    found: dict[str, Any] = _calibration()[name]
    return found


def measured_kinds() -> tuple[str, ...]:
    """Kinds of link that have a calibration, sorted."""
    return tuple(sorted(_calibration()["links"]))


def link_rates(kind: str, inside: bool) -> LinkRates:
    """The constants of a `kind` of link; `inside` a machine or between machines."""
    return _link_rates(kind, inside)


@cache
def _link_rates(kind: str, inside: bool) -> LinkRates:
    known = _calibration()["links"]
    first, _, last = kind.partition("-")
    whole = f"{first}-{last.rpartition('-')[2]}" if last else kind  # without its generation: roce-100GbE-full
    for name in (kind, *NEAREST.get(kind, ()), whole, *(NEAREST_INSIDE if inside else NEAREST_OUTSIDE)):
        if name in known:
            return read_link(kind, name, known[name])
    raise InputError(f"no constants for {kind!r}", "collectives/calibration.json", "fit it again")


def read_link(kind: str, measured_on: str, entry: Mapping[str, Any]) -> LinkRates:
    """`entry` of the calibration as values."""
    curves = {
        name: Curve(
            tuple(Protocol(*(float(v) for v in p)) for p in curve["protocols"]),
            float(curve["wire"]),
            float(curve["copy"]),
        )
        for name, curve in entry["curves"].items()
    }
    return LinkRates(kind, measured_on, curves)
