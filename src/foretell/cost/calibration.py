"""Calibrations: constants of a cost model with where they come from, as JSON files in ``calibrations/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretell import documents
from foretell.errors import InputError, unknown

SCHEMA = "foretell.calibration/1"
LIMIT_BYTES = 16 * 2**20
_LEAST, _MOST = 1e-18, 1e18  # a constant is zero or between: all are in SI units, or dimensionless
_WIDEST = 1e3  # how far from a prediction an end of its interval may be, as a factor


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants by dotted name, intervals by condition, and their `provenance` (data, rows, licence, date, versions).

    `intervals` maps a condition such as ``inference.eager`` to the factors (low, high) around a prediction between
    which 80 % of the held-out measurements lay; ``default`` is for conditions without any, ``host`` for the time that
    the device waits for the host.
    """

    model: str
    constants: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    provenance: Mapping[str, Any]

    def __getitem__(self, name: str) -> float:
        try:
            return self.constants[name]
        except KeyError:
            raise unknown(f"constant of calibration {self.model!r}", name, self.constants) from None

    def replace(self, constants: Mapping[str, float]) -> Calibration:
        """The same calibration with some constants changed."""
        for name in constants:
            self[name]
        return Calibration(self.model, {**self.constants, **constants}, self.intervals, self.provenance)


@cache
def load(model: str) -> Calibration:
    """The shipped calibration of a cost model."""
    source = files("foretell.cost") / "calibrations" / f"{model}.json"
    return parse(source.read_text(encoding="utf-8"), source.name)


def local_path() -> Path:
    """Where the calibration of this machine is kept."""
    from foretell.hardware.local import CALIBRATION, local_folder

    return local_folder() / CALIBRATION


def local() -> Calibration | None:
    """What ``foretell calibrate --here`` found on this machine, or None before it ran."""
    path = local_path()
    if not path.is_file():
        return None
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> Calibration:
    return parse(documents.read_text(path, "calibration", LIMIT_BYTES), str(path))


def parse(text: str, where: str) -> Calibration:
    """Read a calibration. Raises InputError naming what is wrong and where."""
    repair = f"see the shipped files for schema {SCHEMA}"
    data = documents.read_json_text(text, where, "calibration")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f'"schema" is not {SCHEMA!r}', where, repair)
    for key in ("model", "constants", "intervals", "provenance"):
        if key not in data:
            raise InputError(f"missing key {key!r}", where, repair)
    for key in ("constants", "intervals", "provenance"):
        if not isinstance(data[key], dict):
            raise InputError(f"{key} is no object", where, repair)
    constants = {}
    for name, value in data["constants"].items():
        if not _is_number(value) or not (value == 0 or _LEAST <= value <= _MOST):
            what = f"constant {_short(name)} is {_short(value)}, not 0 or a number from {_LEAST:g} to {_MOST:g}"
            raise InputError(what, where, repair)
        constants[name] = float(value)
    intervals = {}
    for name, pair in data["intervals"].items():
        numbers = isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair))
        if not numbers or not 1 / _WIDEST <= pair[0] <= 1 <= pair[1] <= _WIDEST:
            what = f"interval {_short(name)} is {_short(pair)}, not [low, high] with {1 / _WIDEST:g} ≤ low ≤ 1 ≤ high"
            raise InputError(f"{what} ≤ {_WIDEST:g}", where, repair)
        intervals[name] = (float(pair[0]), float(pair[1]))
    for name in ("default", "host"):
        if name not in intervals:
            raise InputError(f'intervals lack "{name}"', where, repair)
    return Calibration(
        str(data["model"]),
        MappingProxyType(constants),
        MappingProxyType(intervals),
        MappingProxyType(data["provenance"]),
    )


def _is_number(value: Any) -> bool:
    """Whether it is a finite number of a size that arithmetic bears."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e100


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
