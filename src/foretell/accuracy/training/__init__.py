"""Published measurements of distributed training, as rows to predict: model, plan, cluster and seconds of a step.

>>> from foretell.accuracy.training import SOURCES
>>> "calculon" in SOURCES
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from foretell.accuracy.slices import data_folder
from foretell.accuracy.training import calculon, vtrain
from foretell.accuracy.training.row import Row
from foretell.errors import unknown

__all__ = ["SOURCES", "Row", "rows"]

#: Readers by name; each takes the folder of measurements and gives its rows.
SOURCES: Mapping[str, Callable[[Path], list[Row]]] = MappingProxyType(
    {
        "calculon": calculon.read,
        "vtrain-single": vtrain.read_single,
        "vtrain-multi": vtrain.read_multi,
    }
)


def rows(source: str, folder: Path | str | None = None) -> list[Row]:
    """All rows of one of `SOURCES`; `folder` as for `foretell.accuracy.data_folder`.

    Raises UnknownNameError for a source that is none of them, InputError where a table is missing or malformed.
    """
    if source not in SOURCES:
        raise unknown("source", source, SOURCES)
    return SOURCES[source](data_folder(folder))
