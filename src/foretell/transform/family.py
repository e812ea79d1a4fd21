"""The family of transforms: one signature, one registry."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from foretell.errors import ForetellError, unknown

if TYPE_CHECKING:
    from torch import nn

_MACHINERY = ("family", "affine", "effect")  # modules of the package that are no transforms


@dataclass(frozen=True, slots=True)
class Change:
    """One place a transform changed: `where` (module path), `what`, and how many parameters it had and has."""

    where: str
    what: str
    parameters_before: int
    parameters_after: int


@dataclass(frozen=True, slots=True)
class Transformed:
    """A transform's result: a new module, what changed, and what was left alone and why.

    `exact` says whether the module means the same as the one given, to rounding. `skipped` maps module paths to the
    reason nothing was done there.
    """

    module: nn.Module
    transform: str
    exact: bool
    changes: tuple[Change, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        places = f"{len(self.changes)} place" + ("" if len(self.changes) == 1 else "s")
        lines = [f"{self.transform} ({'exact' if self.exact else 'approximate'}): {places} changed"]
        lines += [f"  {change.where or '(root)'}: {change.what}" for change in self.changes]
        lines += [f"  {where or '(root)'}: left alone, {reason}" for where, reason in self.skipped]
        return "\n".join(lines)


class Transform(Protocol):
    """What every member of the family is: a callable from a module to a new one; the one given stays as it was."""

    def __call__(self, module: nn.Module, /) -> Transformed: ...


@dataclass(frozen=True, slots=True)
class Member:
    """A registered transform, and what is said about it."""

    name: str
    run: Transform
    exact: bool
    summary: str
    source: str


_members: dict[str, Member] = {}


def transform(name: str, *, exact: bool, source: str) -> Callable[[Transform], Transform]:
    """Register a transform; the first line of its docstring is its summary. Refuses a second one of the name."""

    def register(run: Transform) -> Transform:
        folded = name.casefold().replace("-", "_")
        if folded in _members:
            raise ForetellError(f"transform {name!r} is registered already", "give it another name")
        summary = (run.__doc__ or "").strip().partition("\n")[0]
        _members[folded] = Member(folded, run, exact, summary, source)
        return run

    return register


@cache
def _discover() -> None:
    """Import every module of the package: a new transform is a new file, and nothing else touched."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.name not in _MACHINERY:
            importlib.import_module(f"{package}.{module.name}")


def transforms() -> tuple[str, ...]:
    """Names of all transforms, sorted."""
    _discover()
    return tuple(sorted(_members))


def member(name: str) -> Member:
    """The transform of this name. Raises UnknownNameError with near names."""
    _discover()
    try:
        return _members[name.casefold().replace("-", "_")]
    except KeyError:
        raise unknown("transform", name, transforms()) from None
