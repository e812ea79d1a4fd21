"""`Schedule`: an order in which the ranks of a pipeline work through their micro-batches; the registry of them.

Words used in this folder. A model's layers are cut into *stages* that follow each other; each of the `pp` ranks holds
`vp` of them, its *chunks*. A step sends `micro_batches` micro-batches through all stages and back. The work of one
chunk on one micro-batch is a `Task`: ``F`` forward, ``B`` backward (with respect to inputs alone where the schedule
splits it), ``W`` backward with respect to weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from foretell.errors import InputError, unknown
from foretell.simulate.pipeline.closed import Floats, Ints, Rows

__all__ = ["REGISTRY", "Order", "Registry", "Schedule", "Task", "dealt", "in_flight"]

#: Largest number of tasks a pipeline may have: about 20 s and 2 GB in the simulator.
MOST_TASKS = 1_000_000


class Task(NamedTuple):
    """One piece of work of a rank: its kind (``F``, ``B`` or ``W``), its chunk there, and the micro-batch."""

    kind: str
    chunk: int
    micro_batch: int


#: For each rank its tasks in the order in which it runs them.
Order = tuple[tuple[Task, ...], ...]


def dealt(pp: int, vp: int, stage: int) -> tuple[int, int]:
    """Rank and chunk of a stage where stages are dealt to the ranks in turn, as Megatron-LM's virtual stages are."""
    return stage % pp, stage // pp


@dataclass(frozen=True, slots=True)
class Schedule:
    """One member of the family.

    `order` and `in_flight` are called with (pp, vp, micro_batches) that `check` has let pass. `in_flight` gives
    (pp, vp) counts; see the function of that name. `step_time` gives the step times of `Rows`. `splits` says whether
    the backward pass is in two (``B``, ``W``), `chunked` whether a rank may hold several chunks, `whole_rounds`
    whether micro-batches must be a multiple of `pp` if it does. `place` gives (rank, chunk) of a stage.
    """

    name: str
    title: str
    source: str
    order: Callable[[int, int, int], Order]
    in_flight: Callable[[int, int, int], Ints]
    step_time: Callable[[Rows], Floats]
    splits: bool = False
    chunked: bool = False
    whole_rounds: bool = False
    place: Callable[[int, int, int], tuple[int, int]] = dealt

    @property
    def kinds(self) -> str:
        """The kinds of its tasks."""
        return "FBW" if self.splits else "FB"

    def check(self, pp: int, vp: int, micro_batches: int) -> None:
        """Raise InputError where the schedule cannot be had for these numbers."""
        where = f"schedule {self.name}"
        for what, value in (("pp", pp), ("vp", vp), ("micro-batches", micro_batches)):
            if value < 1:
                raise InputError(f"{what} is {value}", where, "give 1 or more")
        if vp > 1 and not self.chunked:
            raise InputError(f"vp is {vp}, and a rank holds one chunk", where, "take vp 1 or --schedule interleaved")
        if vp > 1 and self.whole_rounds and micro_batches % pp:
            near = sorted({micro_batches // pp * pp, -(-micro_batches // pp) * pp} - {0})
            raise InputError(
                f"{micro_batches} micro-batches are no multiple of the {pp} ranks",
                where,
                f"take {' or '.join(map(str, near))} micro-batches, or vp 1",
            )
        tasks = len(self.kinds) * pp * vp * micro_batches
        if tasks > MOST_TASKS:
            raise InputError(
                f"{tasks:,} tasks are too many to simulate (at most {MOST_TASKS:,})", where, "take fewer micro-batches"
            )


class Registry(Mapping[str, Schedule]):
    """Schedules by name. Looking up an unknown name raises an error with the near ones."""

    def __init__(self) -> None:
        self._members: dict[str, Schedule] = {}

    def register(self, schedule: Schedule) -> Schedule:
        """Add a schedule. Raises ValueError where the name is taken, TypeError where it is no `Schedule`."""
        if not isinstance(schedule, Schedule):
            raise TypeError(f"{schedule!r} is no Schedule")
        if schedule.name.casefold() in (name.casefold() for name in self._members):
            raise ValueError(f"a schedule named {schedule.name!r} exists already")
        self._members[schedule.name] = schedule
        return schedule

    def __getitem__(self, name: str) -> Schedule:
        try:
            return self._members[name]
        except KeyError:
            raise unknown("schedule", name, self._members) from None

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


REGISTRY = Registry()


def in_flight(schedule: str, pp: int, vp: int, micro_batches: int) -> Ints:
    """Micro-batches whose activations each rank holds, by chunk, when it holds most in all: (pp, vp).

    A chunk's activations are held from the beginning of ``F`` to the end of the micro-batch's last backward task. The
    sum over chunks is thus the rank's peak, in chunks times micro-batches; of several such moments it is the first.
    Raises UnknownNameError, and InputError where the schedule cannot be had for these numbers.

    >>> in_flight("1f1b", 4, 1, 8).tolist(), in_flight("interleaved", 2, 2, 4).tolist()
    ([[4], [3], [2], [1]], [[3, 2], [2, 1]])
    """
    member = named(schedule, vp)
    member.check(pp, vp, micro_batches)
    return member.in_flight(pp, vp, micro_batches)


def named(name: str, vp: int = 1) -> Schedule:
    """The schedule of this name; with several chunks a rank, 1F1B is the interleaved one, as in Megatron-LM."""
    from foretell.simulate.pipeline import members  # noqa: F401  (they register themselves)

    return REGISTRY["interleaved" if name == "1f1b" and vp > 1 else name]
