"""What a step's communication takes on a Clos and on a rail-only fabric.

Links are loaded by every flow that uses them, and a kind's time is that of its fullest link (a fluid model, without
latency). On a Clos any device sends to any other through its own port. On a rail-only fabric a flow to another rail
first goes to the device of its own domain that sits on that rail, and on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.plan.network.flows import KINDS, Traffic

__all__ = ["Comparison", "Wires", "compare", "loads"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FABRICS = ("clos", "rail-only")


@dataclass(frozen=True, slots=True)
class Wires:
    """Bytes/s, one direction, of one device: into its high-bandwidth domain, and its port to the network.

    `pipelined`: a device forwards while it receives, so that domain and port work at the same time; otherwise one phase
    follows the other, as collectives are written.
    """

    domain_bytes_per_s: float
    port_bytes_per_s: float
    pipelined: bool = False

    def __post_init__(self) -> None:
        if not (self.domain_bytes_per_s > 0 and self.port_bytes_per_s > 0):
            raise InputError("bandwidths must be positive", "wires")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of communication in a step by kind, on either fabric, as if nothing hid any of it."""

    clos_s: Mapping[str, float]
    rail_only_s: Mapping[str, float]

    @property
    def extra_s(self) -> float:
        """What rail-only adds to a step at most."""
        return sum(self.rail_only_s.values()) - sum(self.clos_s.values())

    def overhead(self, kind: str) -> float:
        """Share by which a kind takes longer on rail-only."""
        return self.rail_only_s[kind] / self.clos_s[kind] - 1 if self.clos_s[kind] else 0.0

    def slowdown(self, step_s: float) -> float:
        """Share by which a step of `step_s` on the Clos takes longer at most: what is added is not hidden."""
        return self.extra_s / step_s


def compare(traffic: Traffic, wires: Wires) -> Comparison:
    """The communication of a step on both fabrics."""
    return Comparison(*(
        MappingProxyType({kind: _seconds(traffic.of(kind), wires, fabric) for kind in KINDS}) for fabric in FABRICS
    ))  # fmt: skip


def loads(traffic: Traffic, fabric: str) -> tuple[Floats, Floats]:
    """Bytes on each device's links, out and in: (2, ranks) inside the domain, and (2, ranks) at its port."""
    if fabric not in FABRICS:
        raise InputError(f"fabric is {fabric!r}, want {' or '.join(FABRICS)}", "loads")
    ranks, domain = traffic.ranks, traffic.domain
    where, nbytes = traffic.locality, traffic.nbytes
    inside, port = np.zeros((2, ranks)), np.zeros((2, ranks))

    def put(into: Floats, source: Ints, target: Ints, amount: Floats) -> None:
        np.add.at(into[0], source, amount)
        np.add.at(into[1], target, amount)

    near, cross = where == 0, where == 2
    put(inside, traffic.source[near], traffic.target[near], nbytes[near])
    direct = where == 1 if fabric == "rail-only" else ~near
    put(port, traffic.source[direct], traffic.target[direct], nbytes[direct])
    if fabric == "rail-only":
        source, target = traffic.source[cross], traffic.target[cross]
        relay = source // domain * domain + target % domain
        put(inside, source, relay, nbytes[cross])
        put(port, relay, target, nbytes[cross])
    return inside, port


def _seconds(traffic: Traffic, wires: Wires, fabric: str) -> float:
    if not len(traffic.nbytes):
        return 0.0
    inside, port = loads(traffic, fabric)
    times = float(inside.max()) / wires.domain_bytes_per_s, float(port.max()) / wires.port_bytes_per_s
    return max(times) if wires.pipelined else sum(times)
