"""`Replica`: ranks in lock step, and the run of iterations they are in."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.simulate.serving.batch import Batch
from foretell.simulate.serving.engine.rank import Rank, Row
from foretell.simulate.serving.engine.sequence import Seq
from foretell.simulate.serving.engine.served import RunsWriter

__all__ = ["Costs", "Replica"]

Floats = npt.NDArray[np.float64]

#: Iterations costed at once: at first, and at most. A run that is cut short halves what the next one tries.
FEWEST, MOST = 8, 512
_COUNT = np.arange(MOST, dtype=np.float64)


class Costs(Protocol):
    """What the simulator asks of `foretell.simulate.serving.Iterations`."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose keys and values fit on one rank."""

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of a token's keys and values on one device."""

    def time_s(self, batch: Batch, /) -> Floats:
        """Seconds of each iteration (iterations,)."""


class Replica:
    """`ranks` (by number) that iterate together: an iteration of all is as long as the longest of any.

    Of a replica with a pipeline this is one of the batches on their way through it; `lane` numbers these over all.

    Between events a replica is in a run of iterations that were formed once; `end_s` is when it ends as far as is
    known, and somebody who comes may shorten it.
    """

    def __init__(
        self, index: int, lane: int, ranks: dict[int, Rank], costs: Costs, *, overlap: bool, writer: RunsWriter
    ) -> None:
        self.index = index
        self.lane = lane
        self._numbers = list(ranks)
        self.ranks = list(ranks.values())
        #: Other batches on their way through the pipeline take from the same blocks: those of a run are taken ahead.
        self.shared = any(len(rank.peers) > 1 for rank in self.ranks)
        self._costs = costs
        #: The next iteration is formed while one runs, so that it misses who comes meanwhile.
        self._overlap = overlap
        self._writer = writer
        self.busy = False
        #: Grows with every change of `end_s`: events of older numbers are void.
        self.serial = 0
        self._start_s = 0.0
        self._ends: Floats = np.empty(0)
        self._steps = 0
        #: When the last iteration began, and whether another follows at once.
        self._last_s = -1.0
        self._try = FEWEST

    @property
    def end_s(self) -> float:
        """When the run of iterations ends."""
        return float(self._ends[self._steps - 1])

    @property
    def waits(self) -> bool:
        """Whether somebody waits, and nothing runs."""
        return not self.busy and any(rank.waiting or rank.inbox for rank in self.ranks)

    @property
    def count(self) -> int:
        """Sequences that are here, in whatever state."""
        return sum(rank.count for rank in self.ranks)

    def place(self) -> Rank:
        """The rank that a new request goes to: a waiting one counts as four that run, as vLLM weighs them."""
        if len(self.ranks) == 1:
            return self.ranks[0]
        return min(self.ranks, key=lambda rank: 4 * (len(rank.waiting) + len(rank.inbox)) + len(rank.running))

    def arrive(self, seq: Seq, now_s: float) -> bool:
        """Take a sequence; whether that changes when the run ends, or wakes the replica."""
        return self.back(self.place(), seq, now_s)

    def back(self, rank: Rank, seq: Seq, now_s: float) -> bool:
        """As `arrive`, on a rank: one whose cache has been loaded is there already."""
        seq.seen_s = now_s
        rank.inbox.append(seq)
        if not self.busy:
            return True
        # Blocks are kept for what was loaded: it may come in where the first in line cannot.
        if self._steps == 1 or (rank.deaf and not seq.loaded):
            return False
        at = 1
        if now_s > self._start_s:
            at += int(np.searchsorted(self._ends[: self._steps], now_s)) + self._overlap
        if at >= self._steps:
            return False
        self._steps = at
        return True

    def begin(self, now_s: float) -> bool:
        """Form the next iterations; whether there are any."""
        ranks = self.ranks
        limit = self._last_s if self._overlap and self._last_s >= 0.0 else now_s
        active = [rank.form(limit, now_s) for rank in ranks]
        if not any(active) and limit < now_s:
            active = [rank.form(now_s, now_s) for rank in ranks]
        self.busy = any(active)
        if not self.busy:
            self._last_s = -1.0
            return False
        self._start_s = now_s
        steps, stall = self._try, 0.0
        for rank in ranks:
            steps = rank.steps(steps)
            stall = max(stall, rank.stall_s)
            if rank.inbox and (not rank.deaf or any(seq.loaded for seq in rank.inbox)):  # seen by the next iteration
                steps = 1
        rows = [rank.row() for rank, works in zip(ranks, active, strict=True) if works]
        if steps == 1:
            mean = sum(row[0] + row[3] for row in rows) / len(ranks)  # the others have nothing to do
            times = self._costs.time_s(Batch(*np.array([(*row, mean) for row in rows], dtype=np.float64).T))
            longest = float(times[0]) if len(rows) == 1 else float(times.max())
            self._ends = np.array((now_s + (longest + stall),))
        else:
            ends = np.empty(steps + 1)
            ends[0] = now_s
            ends[1:] = self._run(rows, steps)
            self._ends = np.cumsum(ends)[1:]
        if not now_s < self._ends[-1] < np.inf:
            raise InputError(f"an iteration of {rows[0]} takes {self._ends[-1] - now_s} s", "iterations")
        self._steps = steps
        if self.shared and steps > 1:
            for rank in ranks:
                if rank.decode:
                    rank.grow(steps)
        return True

    def _run(self, rows: list[Row], steps: int) -> Floats:
        """Seconds of each of `steps` iterations of decoding sequences alone."""
        columns = np.zeros((8, len(rows), steps))
        mean = sum(row[0] for row in rows) / len(self.ranks)
        for at, row in enumerate(rows):
            columns[0, at] = columns[6, at] = row[0]
            columns[1, at] = row[1] + row[0] * _COUNT[:steps]
            columns[7, at] = mean
        times = self._costs.time_s(Batch(*columns.reshape(8, -1)))
        return times if len(rows) == 1 else np.asarray(times.reshape(len(rows), steps).max(axis=0))

    def end(self) -> tuple[list[tuple[Rank, Seq]], list[tuple[Rank, Seq]]]:
        """End the run: sequences that got their first token, and those that are done, with their ranks."""
        steps = self._steps
        end = self.end_s
        first: list[tuple[Rank, Seq]] = []
        done: list[tuple[Rank, Seq]] = []
        floats, ints = self._writer.floats, self._writer.ints
        for number, rank in zip(self._numbers, self.ranks, strict=True):
            rows, cached, seqs, tokens, pairs, behind, sampled = rank.row()
            running, waiting = len(rank.running), len(rank.waiting)
            if rank.decode and self.shared:
                rank.shrink(len(self._ends), steps)
            elif rank.decode and steps > 1:
                rank.grow(steps)
            used = rank.blocks.used
            late = rank.late(self._start_s, float(self._ends[0]))
            began, ended, again = rank.advance(steps, end) if rank.decode or rank.chunks else ((), (), ())
            for times in (*late, *again):
                self._writer.breaks.extend(times)
            floats.extend((self._start_s, end, cached, pairs, behind))
            ints.extend((self.index, number, steps, rows, seqs, tokens, sampled, used, running, waiting, len(late)))
            for seq in began:
                first.append((rank, seq))
            for seq in ended:
                done.append((rank, seq))
        self._last_s = float(self._ends[steps - 2]) if steps > 1 else self._start_s
        full = steps == len(self._ends)
        if len(self._ends) > 1:
            self._try = min(2 * self._try, MOST) if full and steps == self._try else max(steps, FEWEST)
        self.busy = False
        return first, done
