"""Families of policies: plain callables by name, in registries that refuse a second one of a name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from foretell.errors import ForetellError, unknown

__all__ = ["Member", "Registry"]

Policy = TypeVar("Policy", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Member(Generic[Policy]):
    """A registered policy; `summary` is the first line of its docstring, `source` where its rules are from."""

    name: str
    run: Policy
    source: str
    summary: str


class Registry(Generic[Policy]):
    """Policies of one signature. `package` holds a module for each, loaded when a name is first asked for."""

    def __init__(self, what: str, package: str) -> None:
        self.what = what
        self._package = package
        self._members: dict[str, Member[Policy]] = {}
        self._loaded = False

    def add(self, name: str, *, source: str) -> Callable[[Policy], Policy]:
        """Register a policy under `name`. Raises ForetellError where the name is taken."""

        def register(run: Policy) -> Policy:
            if name.casefold() in {known.casefold() for known in self._members}:
                raise ForetellError(f"a {self.what} {name!r} is registered already", "give it another name")
            summary = (run.__doc__ or "").strip().partition("\n")[0]
            self._members[name] = Member(name, run, source, summary)
            return run

        return register

    def _discover(self) -> None:
        if not self._loaded:
            self._loaded = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__, f"{self._package}."):
                importlib.import_module(module.name)

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        self._discover()
        return tuple(sorted(self._members))

    def named(self, name: str) -> Member[Policy]:
        """The policy called `name`. Raises UnknownNameError, with near names, where there is none."""
        self._discover()
        if name not in self._members:
            raise unknown(self.what, str(name), self.names())
        return self._members[name]
