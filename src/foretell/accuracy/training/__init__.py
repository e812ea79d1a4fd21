"""Published measurements of distributed training, as rows to predict: model, plan, cluster and seconds of a step.

>>> from foretell.accuracy.training import SOURCES
>>> "calculon" in SOURCES
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from foretell.accuracy.slices import data_folder
from foretell.accuracy.training import calculon, llama3, llm_foundry, megatron_bridge, nemo, vtrain
from foretell.accuracy.training.row import LeftOut, Row
from foretell.errors import unknown

__all__ = ["SOURCES", "LeftOut", "Row", "left_out", "rows"]

#: Readers by name; each takes the folder of measurements and gives its rows, and what it left out.
SOURCES: Mapping[str, Callable[[Path], Sequence[Row | LeftOut]]] = MappingProxyType(
    {
        "calculon": calculon.read,
        "vtrain-single": vtrain.read_single,
        "vtrain-multi": vtrain.read_multi,
        "llm-foundry": llm_foundry.read,
        "llama-3": llama3.read,
        "nemo": nemo.read,
        "nemo-long": nemo.read_long,
        "megatron-bridge": megatron_bridge.read,
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
