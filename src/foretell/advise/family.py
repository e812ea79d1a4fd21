"""The family of rules: one signature, one registry, one file each in `foretell.advise.checks`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from foretell.advise.finding import Finding
from foretell.cost import Estimate
from foretell.errors import ForetellError, unknown
from foretell.graph import Graph
from foretell.hardware import Device

#: A graph, the device, and what the graph was estimated to take there → findings (none: the rule is obeyed).
Check = Callable[[Graph, Device, Estimate], list[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A member: its name, what it asks for in one line, the paper that found it, and the check."""

    name: str
    asks: str
    source: str
    check: Check


_rules: dict[str, Rule] = {}


def rule(name: str, *, asks: str, source: str) -> Callable[[Check], Check]:
    """Register a check under `name`. Raises ForetellError where the name is taken."""

    def register(check: Check) -> Check:
        if name in _rules:
            raise ForetellError(f"a rule called {name!r} exists already", "give one of them another name")
        _rules[name] = Rule(name, asks, source, check)
        return check

    return register


@cache
def _discover() -> None:
    package = importlib.import_module("foretell.advise.checks")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def rules() -> tuple[str, ...]:
    """Names of all rules, sorted.

    >>> "depthwise" in rules()
    True
    """
    _discover()
    return tuple(sorted(_rules))


def member(name: str) -> Rule:
    """The rule called `name`. Raises UnknownNameError with near names."""
    _discover()
    try:
        return _rules[name]
    except KeyError:
        raise unknown("rule", name, _rules) from None
