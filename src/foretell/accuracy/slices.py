"""`Slice`: one set of public measurements taken under one set of conditions, and the registry of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.errors import InputError, unknown


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `options` are those of `foretell.capture`, without the batch; `source` is file and line.

    `parameters` is the count that the table states (low and high, by its rounding), None where it states none. Where
    the workload has another count, the table measured something else, as a network whose branches were merged first.
    """

    workload: str
    options: Mapping[str, Any]
    batch: int
    measured_s: float
    source: str
    parameters: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """Measurements of one kind on one device. `read(folder)` gives its rows from the data folder.

    `files` are what it reads, relative to the data folder; a slice whose files are not there is *absent*.
    """

    name: str
    device: str
    runtime: str
    files: tuple[str, ...]
    read: Callable[[Path], list[Row]]
    conditions: Mapping[str, str] = field(default_factory=dict)  # for the reader: framework version, method

    def present(self, folder: Path) -> bool:
        """Whether its files are in this data folder."""
        return all((folder / file).is_file() for file in self.files)


class Slices(Mapping[str, Slice]):
    """Slices by name; refuses duplicates, gives near names on a miss."""

    def __init__(self) -> None:
        self._slices: dict[str, Slice] = {}

    def register(self, entry: Slice) -> Slice:
        """Add a slice. Raises ValueError where the name is taken."""
        if entry.name in self._slices:
            raise ValueError(f"a slice named {entry.name!r} exists already")
        self._slices[entry.name] = entry
        return entry

    def __getitem__(self, name: str) -> Slice:
        try:
            return self._slices[name]
        except KeyError:
            raise unknown("accuracy slice", name, self._slices) from None

    def __contains__(self, name: object) -> bool:
        return name in self._slices

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


REGISTRY = Slices()


def slices() -> Slices:
    """All slices by name."""
    from foretell.accuracy import timm  # noqa: F401  (registers its slices)

    return REGISTRY


def data_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder of measurements: the one given, else ``$FORETELL_DATA``, else ``../shared/data``.

    Raises InputError where there is none.
    """
    folder = Path(given or os.environ.get("FORETELL_DATA") or Path("..") / "shared" / "data")
    if not folder.is_dir():
        raise InputError(
            "no such folder of measurements",
            str(folder),
            "set FORETELL_DATA or pass --data DIR; docs/accuracy.md lists the folders and files it holds",
        )
    return folder
