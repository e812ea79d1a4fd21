"""Published measurements of serving, as rows to predict: model, plan, devices, load, and what users saw.

>>> from foretell.accuracy.serving import SOURCES
>>> "silicon-sample" in SOURCES
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from foretell.accuracy.serving import ml_energy, silicon_sample, splitwise, tensorrt_llm
from foretell.accuracy.serving.row import LOADS, LeftOut, Row
from foretell.accuracy.slices import data_folder
from foretell.errors import unknown

__all__ = ["LOADS", "SOURCES", "LeftOut", "Row", "left_out", "rows"]

#: Readers by name; each takes the folder of measurements and gives its rows, and what it left out.
SOURCES: Mapping[str, Callable[[Path], Sequence[Row | LeftOut]]] = MappingProxyType(
    {
        "silicon-sample": silicon_sample.read,
        "tensorrt-llm": tensorrt_llm.read,
        "ml-energy": ml_energy.read,
        "splitwise": splitwise.read,
    }
)


def rows(source: str, folder: Path | str | None = None) -> list[Row]:
    """All rows of one of `SOURCES`; `folder` as for `foretell.accuracy.data_folder`.

    Raises UnknownNameError for a source that is none of them, InputError where a table is missing or malformed.
    """
    return [found for found in _read(source, folder) if isinstance(found, Row)]


def left_out(source: str, folder: Path | str | None = None) -> list[LeftOut]:
    """What its tables hold that makes no row, and why; arguments and errors as for `rows`."""
    return [found for found in _read(source, folder) if isinstance(found, LeftOut)]


def _read(source: str, folder: Path | str | None) -> Sequence[Row | LeftOut]:
    if source not in SOURCES:
        raise unknown("source", source, SOURCES)
    return SOURCES[source](data_folder(folder))
