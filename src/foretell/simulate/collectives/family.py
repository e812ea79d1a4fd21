"""The family of collective algorithms: one signature, one registry, one file each in `methods`.

An algorithm is told the kind of collective, the bytes, the groups and the links, all a row of an array, and answers
with seconds; infinity where it cannot run.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from foretell.errors import ForetellError, unknown
from foretell.simulate.collectives.groups import Floats, Groups
from foretell.simulate.collectives.rates import Curve

if TYPE_CHECKING:
    from foretell.simulate.collectives.fabric import Fabric

__all__ = ["KINDS", "Algorithm", "Leg", "Member", "algorithm", "algorithms", "levels", "member", "seconds"]

#: What can be asked for. `nbytes` is, in this order: the buffer; the result each rank ends with; the input each rank
#: begins with; what a rank holds, its own part included; the buffer; the message.
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
#: Channels, a thread block each, that NCCL 2.2x says on start-up it uses for rings and trees within a node of eight
#: A100 or H100; it uses 16 with NVLink SHARP and 32 for sends between pairs.
CHANNELS = 24
#: How often the data goes round a ring: reduced and then gathered, or only one of them.
PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


class Algorithm(Protocol):
    """Seconds of `kind` on `nbytes` (rows,) over `groups` (rows,) of `fabric`; infinite where it does not apply."""

    def __call__(self, kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Member:
    """A registered algorithm: the kinds it does, its source, and whether ``auto`` may choose it.

    `multiprocessors` are what the library's kernel takes from compute that runs meanwhile.
    """

    name: str
    run: Algorithm
    kinds: tuple[str, ...]
    source: str
    summary: str
    multiprocessors: int
    auto: bool


_members: dict[str, Member] = {}


def algorithm(
    name: str, *, kinds: tuple[str, ...], source: str, multiprocessors: int = CHANNELS, auto: bool = True
) -> Callable[[Algorithm], Algorithm]:
    """Register an algorithm; the first line of its docstring is its summary. Refuses a second one of the name."""

    def register(run: Algorithm) -> Algorithm:
        if name.casefold() in {known.casefold() for known in _members}:
            raise ForetellError(f"a collective algorithm {name!r} is registered already", "give it another name")
        for kind in kinds:
            check_kind(kind)
        summary = (run.__doc__ or "").strip().partition("\n")[0]
        _members[name] = Member(name, run, kinds, source, summary, multiprocessors, auto)
        return run

    return register


def check_kind(kind: str) -> None:
    """Raises UnknownNameError for a `kind` outside `KINDS`."""
    if kind not in KINDS:
        raise unknown("collective", kind, KINDS)


@cache
def _discover() -> None:
    package = importlib.import_module("foretell.simulate.collectives.methods")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def algorithms(kind: str | None = None) -> tuple[str, ...]:
    """Names of all algorithms, sorted; with `kind`, of those that do it.

    >>> "ring" in algorithms("all_reduce")
    True
    """
    _discover()
    if kind is not None:
        check_kind(kind)
    return tuple(sorted(name for name, found in _members.items() if kind is None or kind in found.kinds))


def member(name: str) -> Member:
    """The algorithm called `name`. Raises UnknownNameError, with near names, where there is none."""
    _discover()
    if name not in _members:
        raise unknown("collective algorithm", name, algorithms())
    return _members[name]


@dataclass(frozen=True, slots=True)
class Leg:
    """What one level of links has to do: `steps` hops that wait for each other, `sent` bytes through a port.

    `buffer` are the bytes of the collective, which pass through the device's memory; `rate` is the port's, bytes/s.
    """

    curve: Curve
    steps: Floats
    sent: Floats
    buffer: Floats
    rate: Floats

    @property
    def moved_s(self) -> Floats:
        """Time of the bytes, at the best protocol."""
        time: Floats = (self.curve.wire * self.sent + self.curve.copy * self.buffer) / self.rate
        return time


def seconds(near: Leg, far: Leg | None = None) -> Floats:
    """The best protocol's time over one level, or over two that work at once: all hops, and the slower's bytes."""
    best: Floats = np.full(np.shape(near.sent), np.inf)
    moved = near.moved_s
    moved_far = None if far is None else far.moved_s
    for at, protocol in enumerate(near.curve.protocols, -len(near.curve.protocols)):
        start, hops, time = protocol.base_s, near.steps * protocol.step_s, protocol.slowdown * moved
        if far is not None and moved_far is not None:
            other = far.curve.protocols[max(at, -len(far.curve.protocols))]  # both use the same: the last is Simple
            start = max(start, other.base_s)
            hops = hops + far.steps * other.step_s
            time = np.maximum(time, other.slowdown * moved_far)
        best = np.minimum(best, start + hops + time)
    return best


def levels(near: Leg | None, far: Leg | None, groups: Groups) -> Floats:
    """`seconds` over the levels that each group uses: its node's links, the network, or both at once."""
    time: Floats = np.zeros(np.shape(groups.size))
    if near is not None and not groups.across.all():
        time = np.where(groups.across, time, seconds(near))
    if far is not None and groups.across.any():
        wide = seconds(far) if near is None else np.where(groups.local > 1, seconds(near, far), seconds(far))
        time = np.where(groups.across, wide, time)
    return time
