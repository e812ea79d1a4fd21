"""`Pipeline` and its schedule: nano-operations of successive layers, started as soon as they may.

A nano-operation starts when those it depends on have ended, no other of its kind runs, and its share of the device is
free. Among those that could start, the earliest layer goes first, and in it the earliest operation, later rows counting
as later (`Pipeline.lag`). Layers follow each other, so that one nano-batch can attend in the next layer while another
is still in the MLP of this one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from foretell.simulate.serving.nanoflow.operations import Operation
from foretell.simulate.serving.nanoflow.sharing import KINDS, TENTHS, Sharing

Floats = npt.NDArray[np.float64]

__all__ = ["Nano", "Pipeline", "Schedule", "durations", "links", "nanos", "replay", "run"]

@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a layer is cut up: `cuts` of the batch (rising shares of its rows), and what each operation makes of them.

    `splits` has for each operation the indices of the cuts it uses, `shares` the tenths of the device of each of its
    nano-operations in turn. `lag` 0 prefers an operation on all rows to the next one; with 1 the last rows of a batch
    count as a whole layer later than the first, and a large one takes a nano-batch through the layer before the next.
    """

    cuts: tuple[float, ...]
    splits: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[int, ...], ...]
    lag: float = 0.0

    @staticmethod
    def sequential(count: int) -> Pipeline:
        """The whole batch, one operation after the other, each with the whole device."""
        return Pipeline((), ((),) * count, ((TENTHS,),) * count)

    @property
    def nano_batches(self) -> int:
        """Parts that the batch is cut into."""
        return len(self.cuts) + 1

    def ranges(self, operation: int) -> tuple[tuple[float, float], ...]:
        """The rows of each nano-operation of an operation."""
        ends = (0.0, *(self.cuts[cut] for cut in self.splits[operation]), 1.0)
        return tuple(pairwise(ends))


@dataclass(frozen=True, slots=True)
class Nano:
    """A nano-operation within a layer: indices of those it follows, in the layer (`after`) and in the one `before`."""

    operation: int
    part: int
    low: float
    high: float
    kind: int
    tenths: int
    #: Its turn within the layer, 0 to 1.
    place: float
    after: tuple[int, ...]
    before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """`layers` layers of nano-operations, those of a layer in a row: when each starts and ends, and in what order."""

    layers: int
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    started: tuple[int, ...]

    @property
    def span_s(self) -> float:
        """Seconds until the last has ended."""
        return max(self.end_s)


def nanos(operations: Sequence[Operation], pipeline: Pipeline) -> tuple[Nano, ...]:
    """The nano-operations of one layer. Two depend on each other where their operations do and their rows meet."""
    index = {operation.name: i for i, operation in enumerate(operations)}
    followed = {name for operation in operations for name in operation.after}
    places: list[list[tuple[int, float, float]]] = []
    at = 0
    for i in range(len(operations)):
        ranges = pipeline.ranges(i)
        places.append([(at + part, low, high) for part, (low, high) in enumerate(ranges)])
        at += len(ranges)
    leaves = [place for i, op in enumerate(operations) if op.name not in followed for place in places[i]]

    def meeting(found: Sequence[tuple[int, float, float]], low: float, high: float) -> tuple[int, ...]:
        return tuple(j for j, a, b in found if min(high, b) - max(low, a) > 1e-12)

    whole = sum(operation.time_s(0.0, 1.0) for operation in operations) or 1.0
    before = 0.0
    made = []
    for i, operation in enumerate(operations):
        sources = [place for name in operation.after for place in places[index[name]]]
        for part, (_, low, high) in enumerate(places[i]):
            made.append(
                Nano(
                    i, part, low, high, KINDS.index(operation.kind), pipeline.shares[i][part],
                    (before / whole + pipeline.lag * low) / (1.0 + pipeline.lag),
                    meeting(sources, low, high), () if operation.after else meeting(leaves, low, high),
                )
            )  # fmt: skip
        before += operation.time_s(0.0, 1.0)
    return tuple(made)


def durations(operations: Sequence[Operation], parts: Sequence[Nano], sharing: Sharing) -> list[float]:
    """Seconds of each nano-operation at its share."""
    return [
        operations[n.operation].time_s(n.low, n.high) / sharing.of(KINDS[n.kind], n.tenths) for n in parts
    ]  # fmt: skip


def run(parts: Sequence[Nano], seconds: Sequence[float], layers: int) -> Schedule:
    """Start nano-operations of so many layers as soon as they may, those at the earliest place first."""
    count = len(parts)
    total = count * layers
    waits = [0] * total
    followers: list[list[int]] = [[] for _ in range(total)]
    for layer in range(layers):
        base = layer * count
        for j, nano in enumerate(parts):
            sources = [base + s for s in nano.after]
            if layer:
                sources += [base - count + s for s in nano.before]
            waits[base + j] = len(sources)
            for source in sources:
                followers[source].append(base + j)
    ready = [(j // count + parts[j % count].place, j) for j in range(total) if not waits[j]]
    heapq.heapify(ready)
    running: list[tuple[float, int]] = []
    busy, free, now = [False] * len(KINDS), TENTHS, 0.0
    start, end = [0.0] * total, [0.0] * total
    started: list[int] = []
    while ready or running:
        held: list[tuple[float, int]] = []
        while ready and free:
            item = heapq.heappop(ready)
            j = item[1]
            nano = parts[j % count]
            if busy[nano.kind] or nano.tenths > free:
                held.append(item)
                continue
            busy[nano.kind] = True
            free -= nano.tenths
            start[j], end[j] = now, now + seconds[j % count]
            started.append(j)
            heapq.heappush(running, (end[j], j))
        for item in held:
            heapq.heappush(ready, item)
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] <= now:
            j = heapq.heappop(running)[1]
            nano = parts[j % count]
            busy[nano.kind] = False
            free += nano.tenths
            for follower in followers[j]:
                waits[follower] -= 1
                if not waits[follower]:
                    heapq.heappush(ready, (follower // count + parts[follower % count].place, follower))
    return Schedule(layers, tuple(start), tuple(end), tuple(started))


def links(parts: Sequence[Nano], schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """For each nano-operation, in the order of starting, those that must have ended: what fixes a schedule in advance.

    Beside dependencies these are the ones whose tenths of the device, and whose turn of their kind, it takes over. With
    other times the same order stays within the device, as the events between streams on a GPU make it.
    """
    count = len(parts)
    tenths: list[int] = [-1] * TENTHS  # who holds, or held, each tenth
    turn: list[int] = [-1] * len(KINDS)
    found: list[tuple[int, ...]] = []
    for j in schedule.started:
        nano, base = parts[j % count], j // count * count
        sources = {base + s for s in nano.after}
        if base:
            sources |= {base - count + s for s in nano.before}
        # Tenths whose holders ended first are free for longest.
        tenths.sort(key=lambda holder: -1.0 if holder < 0 else schedule.end_s[holder])
        sources |= {holder for holder in tenths[: nano.tenths] if holder >= 0}
        tenths[: nano.tenths] = [j] * nano.tenths
        if turn[nano.kind] >= 0:
            sources.add(turn[nano.kind])
        turn[nano.kind] = j
        found.append(tuple(sorted(sources)))
    return tuple(found)


def replay(schedule: Schedule, held: Sequence[tuple[int, ...]], seconds: Sequence[Floats]) -> Floats:
    """Seconds until all have ended in the order of `schedule`, with other times: `seconds` columns (rows,) by place."""
    count = len(seconds)
    if len(seconds[0]) == 1:  # floats by themselves are ten times faster
        one = [float(value[0]) for value in seconds]
        done = [0.0] * len(schedule.started)
        for j, sources in zip(schedule.started, held, strict=True):
            done[j] = max([done[source] for source in sources], default=0.0) + one[j % count]
        return np.array([max(done)])
    ends: list[Floats] = [seconds[0]] * len(schedule.started)
    last: Floats = np.zeros_like(seconds[0])
    for j, sources in zip(schedule.started, held, strict=True):
        begin: Floats | None = None
        for source in sources:
            begin = ends[source] if begin is None else np.maximum(begin, ends[source])
        ends[j] = seconds[j % count] if begin is None else begin + seconds[j % count]
        last = np.maximum(last, ends[j])
    return last
