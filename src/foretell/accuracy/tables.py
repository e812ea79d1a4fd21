"""Sources whose tables need no capture: single operators, and networks composed from their descriptions.

>>> from foretell.accuracy.tables import sources
>>> "aiconfigurator" in sources()
True
"""

from __future__ import annotations

import csv
import textwrap
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foretell.accuracy.measured import Measured
from foretell.accuracy.metrics import Score, score
from foretell.cost.model import CostModel
from foretell.errors import ForetellError, InputError

# HELP's spaces hold 25,000 networks on five GPUs: every so-many-th is as good a sample.
_EVERY = 25


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of tables. `read(data)` gives those that are there; `about` says what they hold."""

    name: str
    folder: str
    read: Callable[[Path], list[Measured]]
    about: str

    def present(self, folder: Path) -> bool:
        """Whether the data folder has it."""
        return (folder / self.folder).is_dir()

    def tables(self, folder: Path) -> list[Measured]:
        """Its tables. Raises InputError where one is damaged, or there is none."""
        where, repair = str(folder / self.folder), "place the files that its SOURCE.md lists"
        try:
            found = self.read(folder)
        except (EOFError, OSError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"a table is damaged: {error}", where, repair) from error
        if not found:
            raise InputError("holds no table", where, repair)
        return found


@dataclass(frozen=True, slots=True)
class TableResult:
    """How predictions did on one table; `failures` says why it could not be predicted, if so."""

    name: str
    device: str
    runtime: str
    total: int
    score: Score | None
    conditions: Mapping[str, str]
    failures: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True


def sources() -> dict[str, Source]:
    """All sources by name."""
    from foretell.accuracy import aiconfigurator, help_nas, neusight

    found = (
        Source(
            "aiconfigurator",
            "aiconfigurator",
            lambda data: aiconfigurator.read(data / "aiconfigurator"),
            "matrix products and attention, CUDA graphs",
        ),
        Source(
            "neusight-operators",
            "neusight",
            lambda data: neusight.read_operators(data / "neusight"),
            "fp32 operators, called one by one",
        ),
        Source(
            "neusight-models",
            "neusight",
            lambda data: neusight.read_models(data / "neusight"),
            "fp32 transformers, inference and training",
        ),
        Source(
            "help-nas",
            "help-nas",
            lambda data: help_nas.read(data, every=_EVERY),
            f"fp32 networks of three NAS spaces, every {_EVERY}th",
        ),
    )
    return {source.name: source for source in found}


def judge(table: Measured, model: CostModel) -> TableResult:
    """Predict a table and score it."""
    of = {"issued": table.issued, "mode": table.settings.mode}
    name = table.name if table.device.name in table.name else f"{table.name} on {table.device.name}"
    try:
        seconds, low, high = table.predict(model)
    except ForetellError as error:
        reason = textwrap.shorten(str(error), 300, placeholder=" …")
        failures = {reason: len(table)}
        return TableResult(name, table.device.name, table.settings.runtime, len(table), None, of, failures)
    found = score(table.measured_s.tolist(), seconds.tolist(), low.tolist(), high.tolist())
    return TableResult(name, table.device.name, table.settings.runtime, len(table), found, of)
