"""Random arrivals: processes of a mean rate that differ in how bursty they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foretell.errors import ForetellError, InputError, unknown
from foretell.simulate.serving.given import number, text, whole
from foretell.units import parse_time

Floats = npt.NDArray[np.float64]

__all__ = ["Process", "arrivals", "process", "processes"]


class Process(Protocol):
    """Arrivals (count,) from 0 on, `rate` a second on average; `values` are the texts after the process's name."""

    def __call__(self, count: int, rate: float, rng: np.random.Generator, values: list[str], /) -> Floats: ...


@dataclass(frozen=True, slots=True)
class _Member:
    run: Process
    usage: str


_members: dict[str, _Member] = {}


def process(name: str, usage: str) -> Callable[[Process], Process]:
    """Register a process, written as `usage` shows. Refuses a second one of the name."""

    def register(run: Process) -> Process:
        if name in _members:
            raise ForetellError(f"an arrival process {name!r} is registered already", "give it another name")
        _members[name] = _Member(run, usage)
        return run

    return register


def processes() -> tuple[str, ...]:
    """How each process is written: ``('constant', 'gamma:CV', …)``."""
    return tuple(sorted(member.usage for member in _members.values()))


def arrivals(spec: str, rate: float, count: int, rng: np.random.Generator) -> Floats:
    """`count` arrivals at `rate` requests a second, (count,) s, sorted; `spec` is such as ``poisson`` or ``gamma:2``.

    Raises InputError, UnknownNameError.
    """
    name, *values = text(spec, "the process", "--arrivals").strip().split(":")
    whole(count, "count", "arrivals")
    if name not in _members:
        raise unknown("arrival process", name, _members)
    number(rate, "rate", "--rate", above=True, most=1e9)
    member = _members[name]
    if len(values) != member.usage.count(":"):
        raise InputError(f"{spec[:40]!r} is no process", "--arrivals", f"write {member.usage}")
    return member.run(count, rate, rng, values)


@process("poisson", "poisson")
def poisson(count: int, rate: float, rng: np.random.Generator, values: list[str]) -> Floats:
    """Independent users: gaps are exponential."""
    return np.cumsum(rng.exponential(1.0 / rate, count))


@process("constant", "constant")
def constant(count: int, rate: float, rng: np.random.Generator, values: list[str]) -> Floats:
    """Equal gaps."""
    return np.arange(count) / rate


@process("gamma", "gamma:CV")
def gamma(count: int, rate: float, rng: np.random.Generator, values: list[str]) -> Floats:
    """Gaps with coefficient of variation CV: 1 is Poisson, more is burstier."""
    cv = _number(values[0], "CV", 0.01, 100.0)
    shape = cv**-2
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), count))


@process("mmpp", "mmpp:RATIO:TIME")
def mmpp(count: int, rate: float, rng: np.random.Generator, values: list[str]) -> Floats:
    """Markov-modulated Poisson: a busy state of RATIO times the quiet one's rate, each lasting TIME on average."""
    ratio = _number(values[0], "RATIO", 1.0, 1e6)
    stay_s = parse_time(values[1], "--arrivals")
    if not 0 < stay_s < 1e9:
        raise InputError(f"a state of {values[1]}", "--arrivals", "give a time above 0")
    quiet = 2.0 * rate / (1.0 + ratio)
    rates = np.array([quiet, ratio * quiet])
    state = int(rng.integers(2))
    # Unit-rate arrivals on the scale of the expected number so far, which grows by a state's rate times its stay.
    wanted = np.cumsum(rng.exponential(1.0, count))
    stays: list[Floats] = []
    states: list[npt.NDArray[np.int64]] = []
    expected = 0.0
    while not stays or expected < wanted[-1]:
        more = 2 * (int((wanted[-1] - expected) / (2.0 * rate * stay_s)) + 8)
        stays.append(rng.exponential(stay_s, more))
        states.append((state + np.arange(more)) % 2)
        expected += float(stays[-1] @ rates[states[-1]])
    stay, which = np.concatenate(stays), np.concatenate(states)
    times = np.concatenate([[0.0], np.cumsum(stay)])
    numbers = np.concatenate([[0.0], np.cumsum(stay * rates[which])])
    found: Floats = np.interp(wanted, numbers, times)
    return found


def _number(text: str, name: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise InputError(f"{name} is {text[:40]!r}", "--arrivals", f"give a number from {least:g} to {most:g}")
    return value
