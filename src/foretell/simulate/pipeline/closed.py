"""Step times in closed form, for many pipelines at once; each schedule's own form stands in its file.

A step's length is the longest path through tasks that wait for each other. Where ranks differ, a path can win time by
going down the pipeline and back up at the right moments; the forms below take the best of a few families of paths.
None is ever above the simulator but by the little that its file states, and each is equal to it where its file says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Rows", "spread", "step_time"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


#: Rows looked at together: so many fit a core's cache.
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """Pipelines, one a row. Seconds of one micro-batch on each rank, all its chunks together: (rows, ranks).

    Ranks at and beyond a row's `pp` count as absent and hold zeros. `backward_s` is the whole backward pass,
    `weights_s` its part that makes gradients of weights. `p2p_s` is the time of one message, (rows,); where
    `overlap`, (rows,), the sender computes on meanwhile.
    """

    pp: Ints
    vp: Ints
    micro_batches: Ints
    forward_s: Floats
    backward_s: Floats
    weights_s: Floats
    p2p_s: Floats
    overlap: Bools

    @property
    def rank(self) -> Ints:
        """The ranks, (1, ranks)."""
        return np.arange(self.forward_s.shape[1])[None, :]

    @property
    def present(self) -> Bools:
        """Which ranks a row has, (rows, ranks)."""
        return self.rank < self.pp[:, None]

    @property
    def latency_s(self) -> Floats:
        """What a message takes beside the sender's work, (rows,)."""
        return np.where(self.overlap, self.p2p_s, 0.0)

    @property
    def blocking_s(self) -> Floats:
        """What a message keeps the sender from working, (rows,)."""
        return np.where(self.overlap, 0.0, self.p2p_s)

    def take(self, which: Bools | Ints) -> Rows:
        """Some of the rows, and no more ranks than they have."""
        pp = self.pp[which]
        most = int(pp.max()) if len(pp) else 1
        return Rows(
            pp, self.vp[which], self.micro_batches[which], self.forward_s[which, :most],
            self.backward_s[which, :most], self.weights_s[which, :most], self.p2p_s[which], self.overlap[which],
        )  # fmt: skip


def step_time(
    codes: npt.ArrayLike,
    pp: npt.ArrayLike,
    vp: npt.ArrayLike,
    micro_batches: npt.ArrayLike,
    forward_s: npt.ArrayLike,
    backward_s: npt.ArrayLike,
    *,
    weights_s: npt.ArrayLike | None = None,
    p2p_s: npt.ArrayLike = 0.0,
    overlap_p2p: npt.ArrayLike = True,
) -> Floats:
    """Seconds of a step of each row, (rows,); single values stand for all rows.

    `codes` are indices into `foretell.simulate.training.CHOICES["schedule"]`; 1F1B with several chunks is interleaved.
    `forward_s` and `backward_s` are of one micro-batch: (rows, ranks), a rank's chunks together, or (rows,) where
    ranks are alike. `weights_s` is half of `backward_s` by default. Raises IndexError for a code that is none. What a
    schedule does not allow is not looked for here: such rows get a number without meaning.

    >>> step_time(0, [4, 8], 1, [8, 32], [1.0, 0.5], [2.0, 1.0]).tolist()  # (m + p - 1)(f + b)
    [33.0, 58.5]
    """
    from foretell.simulate.pipeline.schedule import REGISTRY, named

    named("1f1b")
    names = tuple(REGISTRY)
    interleaved = names.index("interleaved")
    whole = [np.atleast_1d(np.asarray(a, dtype=np.int64)) for a in (codes, pp, vp, micro_batches)]
    forward, backward = (np.atleast_1d(np.asarray(a, dtype=np.float64)) for a in (forward_s, backward_s))
    p2p = np.atleast_1d(np.asarray(p2p_s, dtype=np.float64))
    overlap = np.atleast_1d(np.asarray(overlap_p2p, dtype=np.bool_))
    count = max(len(a) for a in (*whole, forward, backward, p2p, overlap))
    code, ranks, chunks, number = (np.broadcast_to(a, (count,)) for a in whole)
    most = int(ranks.max(initial=1))
    present = np.arange(most)[None, :] < ranks[:, None]

    def table(values: Floats) -> Floats:
        columns = values[:, None] if values.ndim == 1 else values[:, :most]
        return np.where(present, np.broadcast_to(columns, (count, most)), 0.0)

    rows = Rows(
        pp=ranks, vp=chunks, micro_batches=number, forward_s=table(forward), backward_s=table(backward),
        weights_s=table(backward) / 2 if weights_s is None
        else table(np.atleast_1d(np.asarray(weights_s, dtype=np.float64))),
        p2p_s=np.where(ranks > 1, np.broadcast_to(p2p, (count,)), 0.0), overlap=np.broadcast_to(overlap, (count,)),
    )  # fmt: skip
    code = np.where((code == names.index("1f1b")) & (chunks > 1), interleaved, code)
    result = np.empty(count)
    for one in np.unique(code).tolist():
        which = np.flatnonzero(code == one)
        for start in range(0, len(which), _BLOCK):
            some = which[start : start + _BLOCK]
            result[some] = REGISTRY[names[one]].step_time(rows.take(some))
    return result


def spread(pp: npt.ArrayLike, first: npt.ArrayLike, middle: npt.ArrayLike, last: npt.ArrayLike) -> Floats:
    """Values by rank, (rows, ranks), where all ranks between the first and the last are alike; `first` if only one.

    >>> spread([1, 2, 4], 3.0, 1.0, 2.0).tolist()
    [[3.0, 0.0, 0.0, 0.0], [3.0, 2.0, 0.0, 0.0], [3.0, 1.0, 1.0, 2.0]]
    """
    ranks = np.atleast_1d(np.asarray(pp, dtype=np.int64))[:, None]
    ends = [np.atleast_1d(np.asarray(a, dtype=np.float64))[:, None] for a in (first, middle, last)]
    rank = np.arange(int(ranks.max(initial=1)))[None, :]
    inner = np.where(rank == ranks - 1, ends[2], ends[1])
    return np.where(rank == 0, ends[0], np.where(rank < ranks, inner, 0.0))


def cumulated(values: Floats, present: Bools) -> Floats:
    """Sums over the ranks up to each, (rows, ranks)."""
    return np.cumsum(np.where(present, values, 0.0), axis=1)


def longest_from(values: Floats, present: Bools) -> Floats:
    """The largest value at each rank or any after it, (rows, ranks)."""
    masked = np.where(present, values, -np.inf)
    return np.asarray(np.maximum.accumulate(masked[:, ::-1], axis=1)[:, ::-1])


def at(values: Floats, rank: Ints) -> Floats:
    """The value of one rank of each row, (rows,)."""
    return np.take_along_axis(values, rank[:, None], axis=1)[:, 0]


def sweep(rows: Rows, values: Floats, final: Ints) -> Floats:
    """Seconds in which all micro-batches pass all chunks one way, all through one before the next: (rows,).

    `values` are those of a chunk, (rows, ranks); the last chunk on rank `final` (rows,) sends no more. A flow shop
    whose machines are ranks and the lanes between them: where every rank takes the same from each job, its length is
    one job's plus the slowest machine's for each further job. With several chunks it runs round and round, each time
    as long as the slowest machine needs for all jobs, or one job needs for the round.
    """
    m, v, latency, blocking = (a[:, None] for a in (rows.micro_batches, rows.vp, rows.latency_s, rows.blocking_s))
    many = rows.pp[:, None] > 1
    values = np.where(rows.present, values + blocking, 0.0)
    one = values.sum(axis=1, keepdims=True)
    around = one + np.where(many, rows.pp[:, None] * latency, 0.0)
    is_final = rows.rank == final[:, None]
    others = np.maximum(np.where(is_final, 0.0, values).max(axis=1, keepdims=True), latency)
    last = at(values, final)[:, None]
    free = last - blocking  # the final rank's, where it sends no more
    rest = np.where(m > 1, m - 1, 0)
    stay = (v - 1) * m * others + rest * others
    stay = np.maximum(stay, (v - 1) * np.maximum(around, m * last) + rest * free)
    leave = np.maximum(v - 2, 0) * np.maximum(around, m * last) + around + rest * np.maximum(others, last)
    hops = np.where(many, (rows.pp[:, None] - 1) * latency, 0.0)
    return np.asarray((one - blocking + hops + np.where(v > 1, np.maximum(stay, leave), stay))[:, 0])
