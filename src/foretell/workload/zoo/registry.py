"""The zoo's registry: which architectures there are, and how one is built."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from foretell.errors import ForetellError, unknown

if TYPE_CHECKING:
    from torch import nn

Build = TypeVar("Build", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Entry:
    """One architecture: `build(num_classes)` makes the module, `input_size` is (height, width) of its RGB images."""

    name: str
    build: Callable[[int], nn.Module]
    input_size: tuple[int, int]
    num_classes: int
    source: str


_entries: dict[str, Entry] = {}


def add(
    name: str,
    build: Callable[[int], nn.Module],
    *,
    input_size: tuple[int, int],
    num_classes: int = 1000,
    source: str,
) -> None:
    """Register an architecture under `name` (lower case). `source` says where it was published."""
    if name != name.casefold():
        raise ForetellError(f"zoo model {name!r} is not in lower case", "names are found whatever their case")
    if name in _entries:
        raise ForetellError(
            f"zoo model {name!r} is registered twice: {_entries[name].source} and {source}",
            "give one of them another name",
        )
    _entries[name] = Entry(name, build, input_size, num_classes, source)


@cache
def _discover() -> None:
    """Import every module of the package: a new architecture is a new file, and nothing else touched."""
    package = __name__.rpartition(".")[0]
    path = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(path):
        if module.name != "registry":
            importlib.import_module(f"{package}.{module.name}")


def models() -> tuple[str, ...]:
    """Names of every architecture in the zoo, sorted."""
    _discover()
    return tuple(sorted(_entries))


def entry(name: str) -> Entry:
    """What is known of `name`, whatever its case. Raises UnknownNameError with near names."""
    _discover()
    try:
        return _entries[name.casefold()]
    except KeyError:
        raise unknown("zoo model", name, models()) from None


def build(name: str, num_classes: int | None = None) -> nn.Module:
    """A new module with random weights, in training mode.

    `num_classes` defaults to the architecture's own: 1000 for ImageNet classifiers, the data set's for the others.
    Build it under ``torch.device("meta")`` to allocate nothing.
    """
    found = entry(name)
    return found.build(found.num_classes if num_classes is None else num_classes)


def input_size(name: str) -> tuple[int, int]:
    """(height, width) of the images the architecture was published with; they have three channels."""
    return entry(name).input_size
