"""`search`: nano-batches, splits, shares and lag that make a layer short.

NanoFlow's authors solve two mixed-integer programs, the structure first and the shares after it. Here one descent
changes everything in turn and keeps what helps: a schedule costs a millisecond, so that structure is judged with
interference counted. `exhaustive` tries everything there is, for layers small enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from foretell.errors import InputError
from foretell.simulate.serving.nanoflow.operations import Operation, check, lower_bound_s, sequential_s
from foretell.simulate.serving.nanoflow.schedule import Pipeline, durations, nanos, run
from foretell.simulate.serving.nanoflow.sharing import A100, KINDS, TENTHS, Sharing

__all__ = ["Found", "exhaustive", "layer_s", "search"]

#: Layers between which a layer's time is measured: what the first and the last do alone cancels.
UNROLLED = 2
#: The batch is cut at sixteenths: 128 rows of 2,048, the granularity the authors profile at.
GRID = 16
#: How far later rows give way to earlier ones (`Pipeline.lag`).
LAGS = (0.0, 0.5, 1.0, 2.0, 8.0)
#: Best starts that are descended from.
_DESCENTS = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A pipeline, seconds of a layer by it, and what bounds them: a layer in sequence, and the least there could be."""

    pipeline: Pipeline
    layer_s: float
    sequential_s: float
    lower_bound_s: float
    interference_bound_s: float
    tried: int

    @property
    def speedup(self) -> float:
        """How much faster than the same operations in sequence."""
        return self.sequential_s / self.layer_s if self.layer_s > 0 else 1.0


def layer_s(operations: Sequence[Operation], pipeline: Pipeline, sharing: Sharing = A100) -> float:
    """Seconds that one more layer takes in a long row of layers."""
    parts = nanos(operations, pipeline)
    seconds = durations(operations, parts, sharing)
    few = run(parts, seconds, UNROLLED).span_s
    many = run(parts, seconds, 2 * UNROLLED).span_s
    # Schedules by rule have anomalies of their own; none is shorter than what the device can do.
    return max((many - few) / UNROLLED, lower_bound_s(operations, sharing))


def search(operations: Sequence[Operation], *, sharing: Sharing = A100, most: int = 4, grid: int = GRID) -> Found:
    """The shortest layer found with up to `most` nano-batches, cut at multiples of 1 / `grid` of the batch.

    Never slower than the operations in sequence. Raises InputError for operations that make no layer.
    """
    check(operations)
    if not 1 <= most <= grid:
        raise InputError(f"{most} nano-batches of a batch cut at {grid} places", "nanoflow", "ask for 1 to grid")
    count, tried = len(operations), 0

    def cost(pipeline: Pipeline) -> float:
        nonlocal tried
        tried += 1
        return layer_s(operations, pipeline, sharing)

    best = Pipeline.sequential(count)
    least = sequential_s(operations)
    for parts in range(1, most + 1):
        starts: dict[tuple[tuple[int, ...], ...], tuple[float, Pipeline]] = {}
        for start in _starts(operations, parts, grid):
            value = cost(start)
            if start.shares not in starts or value < starts[start.shares][0]:
                starts[start.shares] = (value, start)
        chosen = sorted(starts.values(), key=lambda pair: pair[0])[:_DESCENTS]
        found, seconds = min((_descend(p, value, cost, grid) for value, p in chosen), key=lambda pair: pair[1])
        if seconds < least * (1.0 - 1e-9):
            best, least = found, seconds
        elif parts > 2:
            break  # each further cut costs more than it lets overlap
    return Found(
        best, least, sequential_s(operations), lower_bound_s(operations), lower_bound_s(operations, sharing), tried
    )


def _starts(operations: Sequence[Operation], parts: int, grid: int) -> Iterator[Pipeline]:
    """Equal nano-batches; one share for each kind, in all ways that fill the device; every lag."""
    cuts = tuple(round(grid * i / parts) / grid for i in range(1, parts))
    every = tuple(range(parts - 1))
    kinds = [kind for kind in KINDS if any(op.kind == kind for op in operations)]
    for tenths in product(range(1, TENTHS + 1), repeat=len(kinds)):
        if sum(tenths) != TENTHS:
            continue
        by_kind = dict(zip(kinds, tenths, strict=True))
        shares = tuple((by_kind[op.kind],) * parts for op in operations)
        for lag in LAGS:
            yield Pipeline(cuts, (every,) * len(operations), shares, lag)


def _descend(
    pipeline: Pipeline, seconds: float, cost: Callable[[Pipeline], float], grid: int
) -> tuple[Pipeline, float]:
    """Take any change that helps until none does."""
    while True:
        before = seconds
        for moves in (_lags, _whole_shares, _splits, _cuts, _single_shares):
            for change in list(moves(pipeline, grid)):
                # Changes were listed for an earlier pipeline; one that no longer fits is skipped.
                changed = change(pipeline)
                if changed is None or changed == pipeline:
                    continue
                value = cost(changed)
                if value < seconds * (1.0 - 1e-9):
                    pipeline, seconds = changed, value
        if seconds >= before * (1.0 - 1e-4):
            return pipeline, seconds


_Change = Callable[[Pipeline], Pipeline | None]


def _lags(pipeline: Pipeline, grid: int) -> Iterator[_Change]:
    for lag in LAGS:
        yield lambda p, lag=lag: replace(p, lag=lag)  # type: ignore[misc]


def _whole_shares(pipeline: Pipeline, grid: int) -> Iterator[_Change]:
    for i in range(len(pipeline.shares)):
        for tenths in range(1, TENTHS + 1):
            yield lambda p, i=i, tenths=tenths: _put(p, i, (tenths,) * len(p.shares[i]))  # type: ignore[misc]


def _single_shares(pipeline: Pipeline, grid: int) -> Iterator[_Change]:
    for i, shares in enumerate(pipeline.shares):
        for part in range(len(shares)):
            for step in (-3, -2, -1, 1, 2, 3):

                def change(p: Pipeline, i: int = i, part: int = part, step: int = step) -> Pipeline | None:
                    tenths = p.shares[i][part] + step
                    if not 1 <= tenths <= TENTHS:
                        return None
                    return _put(p, i, (*p.shares[i][:part], tenths, *p.shares[i][part + 1 :]))

                yield change


def _splits(pipeline: Pipeline, grid: int) -> Iterator[_Change]:
    """An operation joins the nano-batches beside a cut, or keeps them apart."""
    for i, cut in product(range(len(pipeline.splits)), range(len(pipeline.cuts))):

        def change(p: Pipeline, i: int = i, cut: int = cut) -> Pipeline:
            used = p.splits[i]
            at = sum(other < cut for other in used)
            shares = p.shares[i]
            if cut in used:
                splits, shares = tuple(c for c in used if c != cut), (*shares[:at], *shares[at + 1 :])
            else:
                splits, shares = tuple(sorted((*used, cut))), (*shares[:at], shares[at], *shares[at:])
            return _put(replace(p, splits=(*p.splits[:i], splits, *p.splits[i + 1 :])), i, shares)

        yield change


def _cuts(pipeline: Pipeline, grid: int) -> Iterator[_Change]:
    for cut, step in product(range(len(pipeline.cuts)), (-2, -1, 1, 2)):

        def change(p: Pipeline, cut: int = cut, step: int = step) -> Pipeline | None:
            moved = p.cuts[cut] + step / grid
            ends = (0.0, *p.cuts, 1.0)
            if not ends[cut] + 1e-9 < moved < ends[cut + 2] - 1e-9:
                return None
            return replace(p, cuts=(*p.cuts[:cut], moved, *p.cuts[cut + 1 :]))

        yield change


def _put(pipeline: Pipeline, operation: int, shares: tuple[int, ...]) -> Pipeline:
    return replace(pipeline, shares=(*pipeline.shares[:operation], shares, *pipeline.shares[operation + 1 :]))


def exhaustive(
    operations: Sequence[Operation],
    *,
    sharing: Sharing = A100,
    most: int = 2,
    grid: int = 4,
    tenths: Sequence[int] = tuple(range(1, TENTHS + 1)),
) -> Found:
    """The shortest of all pipelines: every cut, split, lag, and every share of `tenths` for each operation.

    Shares are an operation's, the same for its nano-operations. For two or three operations.
    """
    check(operations)
    best, least, tried = Pipeline.sequential(len(operations)), sequential_s(operations), 0
    for parts in range(1, most + 1):
        for cuts in combinations([i / grid for i in range(1, grid)], parts - 1):
            subsets = [c for size in range(parts) for c in combinations(range(parts - 1), size)]
            for splits in product(subsets, repeat=len(operations)):
                for given, lag in product(product(tenths, repeat=len(operations)), LAGS):
                    shares = tuple((share,) * (len(s) + 1) for share, s in zip(given, splits, strict=True))
                    pipeline = Pipeline(cuts, splits, shares, lag)
                    tried += 1
                    value = layer_s(operations, pipeline, sharing)
                    if value < least:
                        best, least = pipeline, value
    return Found(
        best, least, sequential_s(operations), lower_bound_s(operations), lower_bound_s(operations, sharing), tried
    )
