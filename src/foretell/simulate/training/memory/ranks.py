"""The ranks of a pipeline that may hold most: how many layers each has, and how many micro-batches of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.simulate.pipeline import named
from foretell.simulate.training.plan import CHOICES, PlanTable
from foretell.simulate.training.stages import layers_of
from foretell.workload.llm.config import LLMConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

__all__ = ["Ranks", "ranks_of"]

# Schedules that hold as many micro-batches as a step has; the others no more than the pipeline is deep.
_GROWING = ("gpipe", "layered")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of some plans' pipelines, one plan's after another's: `row` says of which plan each is, `start` where each
    plan's begin. `layers` and `held` (layers times micro-batches in flight) are (ranks, groups); `heads` is of how many
    micro-batches the last rank holds the head."""

    row: Ints
    start: Ints
    rank: Ints
    layers: Floats
    held: Floats
    first: npt.NDArray[np.bool_]
    last: npt.NDArray[np.bool_]
    heads: Floats


@lru_cache(maxsize=1 << 16)
def _pipeline(
    config: LLMConfig, pp: int, vp: int, first: int, last: int, schedule: str, micro_batches: int, prune: bool
) -> tuple[npt.NDArray[Any], ...]:
    layers = layers_of(config, pp, vp, first, last).astype(np.float64)
    flight = named(schedule, vp).in_flight(pp, vp, micro_batches).astype(np.float64)
    held = (layers * flight[:, :, None]).sum(axis=1)
    total = layers.sum(axis=1)
    ranks = np.arange(pp)
    keep = ranks
    if prune and pp > 2:
        keep = np.array([0, *_fullest(total, held, range(1, pp - 1)), pp - 1])
    # Zero-bubble schedules put off gradients of layers' weights; the head's is made at once, as what it needs is large.
    heads = 1.0 if schedule == "zero-bubble" else flight[-1, -1]
    return keep, total[keep], held[keep], (keep == 0), (keep == pp - 1), np.full(len(keep), heads)


def _fullest(layers: Floats, held: Floats, ranks: range) -> list[int]:
    """Of ranks that differ in nothing else, those that no other exceeds both in layers and in what they hold."""
    kept: list[int] = []
    for rank in ranks:
        if not any((layers[rank] <= layers[k]).all() and (held[rank] <= held[k]).all() for k in kept):
            kept = [k for k in kept if not ((layers[k] <= layers[rank]).all() and (held[k] <= held[rank]).all())]
            kept.append(rank)
    return kept


def ranks_of(config: LLMConfig, table: PlanTable, prune: bool = True) -> Ranks:
    """The pipeline ranks of each plan; with `prune` only those that may be the fullest.

    A plan's ranks depend on few of its fields, so they are found once for each combination of these.
    """
    growing = table.chosen("schedule", *_GROWING)
    micro_batches = np.where(growing, table.micro_batches, np.minimum(table.micro_batches, 3 * table["pp"]))
    keys = np.stack([table["pp"], table["vp"], table["first_layers"], table["last_layers"], table["schedule"],
                     micro_batches])  # fmt: skip
    packed = np.zeros(len(table), dtype=np.int64)
    for column in keys:
        _, index = np.unique(column, return_inverse=True)
        _, packed = np.unique(packed * (int(index.max(initial=0)) + 1) + index, return_inverse=True)
    _, example, group = np.unique(packed, return_index=True, return_inverse=True)
    found = [
        _pipeline(config, *(int(v) for v in keys[:4, i]), CHOICES["schedule"][keys[4, i]], int(keys[5, i]), prune)
        for i in example
    ]
    sizes = np.array([len(pipeline[0]) for pipeline in found], dtype=np.int64)
    offsets = np.cumsum(sizes) - sizes
    count = sizes[group]
    start = np.cumsum(count) - count
    row = np.repeat(np.arange(len(table)), count)
    index = np.arange(len(row)) - start[row] + offsets[group][row]
    columns = [np.concatenate(parts)[index] for parts in zip(*found, strict=True)]
    return Ranks(row, start, *columns)
