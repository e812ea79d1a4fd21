"""`Groups`: where the ranks of a collective sit, and what the links between them can carry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "Groups", "Ints"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Groups:
    """One group a row: its shape, and the rates of the links it uses as they are signalled, bytes/s, one direction.

    A group of `size` ranks, `stride` apart, has `local` of them in each of `nodes` nodes; `leaf` of these nodes hang
    off each of `leaves` leaf switches. Rates already hold what a group gets while others like it run.
    """

    size: Floats
    stride: Floats
    local: Floats
    nodes: Floats
    leaf: Floats
    leaves: Floats
    #: What one rank can send to the others of its node along a ring; to all of them at once; to one of them.
    ring_rate: Floats
    mesh_rate: Floats
    pair_rate: Floats
    #: What the group can send out of one node; what one rank of it can; what a message between neighbours gets.
    node_rate: Floats
    rank_rate: Floats
    message_rate: Floats
    #: What the group can send out of one leaf switch, for each of its nodes there; infinite without a spine.
    spine_rate: Floats

    def rows(self, index: Ints) -> Groups:
        """The groups at `index`, in that order."""
        return Groups(*(column[index] for column in self.columns()))

    def columns(self) -> Iterator[Floats]:
        """The fields, in order."""
        for name in self.__slots__:
            yield getattr(self, name)

    @property
    def across(self) -> npt.NDArray[np.bool_]:
        """Whether the group is on more than one node."""
        return self.nodes > 1
