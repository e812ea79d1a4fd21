"""Which layers each pipeline stage gets and which activations it keeps, so that a 1F1B step is shortest.

Two dynamic programs, as AdaPipe (Sun et al., ASPLOS 2024) combines them. Inside a stage, the memory that weights leave
is shared by the micro-batches in flight; a knapsack picks the units (operators) whose results are kept, so that what
backward must make again takes least time. Over stages, the layers are cut where the modelled step is shortest. Both
are exact: fronts of non-dominated choices are carried instead of rounded tables.

>>> attention = Unit("attention", seconds=1.0, nbytes=30)
>>> mlp = Unit("mlp", seconds=3.0, nbytes=40)
>>> layer = Layer((attention, mlp), backward_s=8.0, weight_bytes=50)
>>> found = partition([layer] * 4, stages=2, micro_batches=8, memory_bytes=220)
>>> found.layers, [stage.recompute_s for stage in found.stages], found.time_s
((2, 2), [5.0, 1.0], 253.0)
>>> [stage.kept_names for stage in found.stages]
[(('mlp',), ()), (('attention', 'mlp'), ('mlp',))]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import InfeasibleError, InputError
from foretell.units import format_bytes

__all__ = ["Layer", "Partition", "Stage", "Unit", "even", "in_flight", "partition", "step_time"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Points of a front that are carried. A transformer's units are multiples of one size and stay far below it.
MOST_POINTS = 4096
#: Choices of later stages that are carried for each first layer.
MOST_LABELS = 256


@dataclass(frozen=True, slots=True)
class Unit:
    """An operator whose result backward needs: kept (`nbytes` a micro-batch), or made again in `seconds`."""

    name: str
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """What cannot be cut further. Times are of one micro-batch, bytes of one device.

    `backward_s` is without recomputation. `weight_bytes` holds parameters, gradients and optimiser state; `input_bytes`
    what is kept of every micro-batch in any case; `workspace_bytes` what the layer needs while it runs.
    `other_forward_s` is forward time outside the units, which is never made again.
    """

    units: tuple[Unit, ...]
    backward_s: float
    weight_bytes: int = 0
    input_bytes: int = 0
    workspace_bytes: int = 0
    other_forward_s: float = 0.0

    @property
    def forward_s(self) -> float:
        """Forward time of one micro-batch."""
        return self.other_forward_s + sum(unit.seconds for unit in self.units)


@dataclass(frozen=True, slots=True)
class Stage:
    """One rank of the pipeline: layers `first` to `end` (exclusive); `kept` says which units of each it keeps.

    `backward_s` holds `recompute_s`. `memory_bytes` is what the stage needs at most.
    """

    first: int
    end: int
    kept: tuple[tuple[bool, ...], ...]
    kept_names: tuple[tuple[str, ...], ...]
    forward_s: float
    backward_s: float
    recompute_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages in order, and the step they make. `exact`: nothing better exists under the model."""

    stages: tuple[Stage, ...]
    micro_batches: int
    time_s: float
    exact: bool = True

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(stage.end - stage.first for stage in self.stages)


def in_flight(stages: int, micro_batches: int) -> Ints:
    """Micro-batches whose activations each stage holds at most under 1F1B: (stages,)."""
    return np.minimum(micro_batches, stages - np.arange(stages)).astype(np.int64)


def step_time(forward_s: Sequence[float] | Floats, backward_s: Sequence[float] | Floats, micro_batches: int) -> float:
    """Modelled time of a 1F1B step of stages that differ, without communication, in seconds.

    Warm-up lasts until the first stage starts its first backward pass, the ending begins with its last forward pass,
    and in between the slowest stage sets the pace. Equal stages give ``(m + p - 1)(f + b)``.

    >>> step_time([1.0, 1.0], [2.0, 2.0], 4)
    15.0
    """
    warm, end, pace = 0.0, 0.0, 0.0
    stages = len(forward_s)
    held = in_flight(stages, micro_batches)
    for s in range(stages - 1, -1, -1):
        f, b = float(forward_s[s]), float(backward_s[s])
        later = s < stages - 1
        next_f, next_b = (float(forward_s[s + 1]), float(backward_s[s + 1])) if later else (0.0, 0.0)
        warm = f + max(warm + next_b, (int(held[s]) - 1) * f)
        end = b + max(end + next_f, (int(held[s]) - 1) * b)
        pace = max(pace, f + b)
    return _total(warm, end, pace, float(backward_s[0]), stages, micro_batches)


def _total(warm: float, end: float, pace: float, first_b: float, stages: int, micro_batches: int) -> float:
    # With fewer micro-batches than stages there is no steady phase: the first stage gets back one micro-batch at a
    # time, at the pace of the slowest.
    if micro_batches < stages:
        return warm + first_b + (micro_batches - 1) * pace
    return warm + (micro_batches - stages) * pace + end


@dataclass(frozen=True, slots=True)
class _Problem:
    layers: tuple[Layer, ...]
    stages: int
    micro_batches: int
    memory_bytes: int
    held: Ints
    kinds: tuple[int, ...]

    @staticmethod
    def check(layers: Sequence[Layer], stages: int, micro_batches: int, memory_bytes: float) -> _Problem:
        if not 1 <= stages <= len(layers):
            raise InputError(f"{len(layers)} layers on {stages} stages", "partition", "give each stage a layer")
        if micro_batches < 1:
            raise InputError(f"{micro_batches} micro-batches", "partition", "give at least 1")
        for number, layer in enumerate(layers):
            sizes = [layer.weight_bytes, layer.input_bytes, layer.workspace_bytes, *(u.nbytes for u in layer.units)]
            times = [layer.backward_s, layer.other_forward_s, *(u.seconds for u in layer.units)]
            if not all(math.isfinite(v) and v >= 0 for v in (*sizes, *times)):
                raise InputError("times and bytes must be finite and not negative", f"layer {number}")
        if not (math.isfinite(memory_bytes) and memory_bytes > 0):
            raise InputError(f"memory of {memory_bytes} bytes", "partition", "give what a device has for the stage")
        index: dict[Layer, int] = {}
        kinds = tuple(index.setdefault(layer, len(index)) for layer in layers)
        held = in_flight(stages, micro_batches)
        return _Problem(tuple(layers), stages, micro_batches, int(memory_bytes), held, kinds)


def partition(layers: Sequence[Layer], *, stages: int, micro_batches: int, memory_bytes: float) -> Partition:
    """The split into `stages` and the kept units with the shortest modelled step under 1F1B.

    `memory_bytes` is what a device has for weights and activations. Raises InputError for a question that makes no
    sense, InfeasibleError where even recomputing everything needs more memory, saying how much more.
    """
    problem = _Problem.check(layers, stages, micro_batches, memory_bytes)
    recompute, thinned = _recompute_times(problem)
    bounds, capped = _cut(problem, recompute)
    chosen = [
        _fill(problem, stage, first, end)
        for stage, (first, end) in enumerate(itertools.pairwise(bounds))
    ]
    return _partition(problem, chosen, exact=not (thinned or capped))


def even(
    layers: Sequence[Layer], *, stages: int, micro_batches: int, memory_bytes: float, keep: str, ends: bool = False
) -> Partition:
    """What frameworks do by default: equally many layers a stage (earlier ones take the rest), `keep` one of
    ``all``, ``none`` (only the layers' inputs) or ``fit`` (the knapsack of each stage). With `ends` the first and last
    layer are embedding and head, which are not counted.

    Raises InfeasibleError where it does not fit.
    """
    problem = _Problem.check(layers, stages, micro_batches, memory_bytes)
    if keep not in ("all", "none", "fit"):
        raise InputError(f"keep is {keep!r}, want all, none or fit", "even partition")
    counted = len(layers) - 2 * ends
    if counted < stages:
        raise InputError(f"{counted} layers on {stages} stages", "even partition", "give each stage a layer")
    counts = [counted // stages + (s < counted % stages) + ends * ((s == 0) + (s == stages - 1)) for s in range(stages)]
    bounds = np.concatenate([[0], np.cumsum(counts)])
    chosen = []
    for stage in range(stages):
        first, end = int(bounds[stage]), int(bounds[stage + 1])
        if keep == "fit":
            chosen.append(_fill(problem, stage, first, end))
        else:
            kept = tuple((keep == "all",) * len(layer.units) for layer in problem.layers[first:end])
            chosen.append(_stage(problem, stage, first, end, kept))
    over = max(stage.memory_bytes for stage in chosen) - problem.memory_bytes
    if over > 0:
        raise InfeasibleError(
            f"an even split that keeps {keep} needs {format_bytes(over)} more than the device's"
            f" {format_bytes(problem.memory_bytes)}",
            "recompute more, or use more stages",
        )
    return _partition(problem, chosen, exact=False)


def _partition(problem: _Problem, stages: Sequence[Stage], exact: bool) -> Partition:
    time = step_time([s.forward_s for s in stages], [s.backward_s for s in stages], problem.micro_batches)
    return Partition(tuple(stages), problem.micro_batches, time, exact)


# What recomputing costs, by range of layers and stage ----------------------------------------------------------------


class _Front:
    """Non-dominated (bytes, seconds) of what can be kept, in rising order of both; (0, 0) is the first."""

    __slots__ = ("nbytes", "seconds", "thinned")

    def __init__(self, nbytes: Ints, seconds: Floats, thinned: bool = False) -> None:
        self.nbytes, self.seconds, self.thinned = nbytes, seconds, thinned

    @staticmethod
    def empty() -> _Front:
        return _Front(np.zeros(1, np.int64), np.zeros(1))

    def add(self, unit: Unit, most: int) -> tuple[_Front, Ints]:
        """The front with one more unit to choose; and for each point where it came from: an index into this front,
        plus its length where the unit is kept."""
        fits = self.nbytes <= most - unit.nbytes
        nbytes = np.concatenate([self.nbytes, self.nbytes[fits] + unit.nbytes])
        seconds = np.concatenate([self.seconds, self.seconds[fits] + unit.seconds])
        origin = np.concatenate([np.arange(len(fits)), len(fits) + np.flatnonzero(fits)])
        order = np.lexsort((-seconds, nbytes))
        nbytes, seconds, origin = nbytes[order], seconds[order], origin[order]
        best = np.maximum.accumulate(seconds)
        better = np.concatenate([[True], seconds[1:] > best[:-1]])
        nbytes, seconds, origin = nbytes[better], seconds[better], origin[better]
        thinned = len(nbytes) > MOST_POINTS
        if thinned:  # every point left is a real choice: nothing is rounded, only choices are forgotten
            some = np.unique(np.linspace(0, len(nbytes) - 1, MOST_POINTS).astype(np.int64))
            nbytes, seconds, origin = nbytes[some], seconds[some], origin[some]
        return _Front(nbytes, seconds, self.thinned or thinned), origin

    def best(self, capacity: Ints) -> Floats:
        """Most seconds that fit into each capacity (which is not negative)."""
        return np.asarray(self.seconds[np.searchsorted(self.nbytes, capacity, side="right") - 1])


def _recompute_times(problem: _Problem) -> tuple[Floats, bool]:
    """Seconds a micro-batch that layers ``first`` to ``end`` recompute as a stage: (stages, first, end), infinite where
    they do not fit. Ranges with the same layers, in whatever order, share one knapsack."""
    count = len(problem.layers)
    result = np.full((problem.stages, count + 1, count + 1), math.inf)
    longest = count - problem.stages + 1
    known: dict[tuple[int, ...], Floats] = {}
    fronts: dict[tuple[int, ...], _Front] = {}
    thinned = False
    for first in range(count):
        key = [0] * (max(problem.kinds) + 1)
        static, fixed, work = 0, 0, 0
        every = 0.0
        front: _Front | None = _Front.empty()
        for end in range(first + 1, min(count, first + longest) + 1):
            layer = problem.layers[end - 1]
            key[problem.kinds[end - 1]] += 1
            static += layer.weight_bytes
            fixed += layer.input_bytes
            work = max(work, layer.workspace_bytes)
            every += sum(unit.seconds for unit in layer.units)
            name = tuple(key)
            if name in known:
                front = fronts.get(name)
                result[:, first, end] = known[name]
                continue
            free = (problem.memory_bytes - static - work) // problem.held - fixed
            if free.max() < 0:
                break  # longer ranges do not fit either
            if front is None:
                front = _front(problem.layers[first : end - 1], problem.memory_bytes)
            for unit in layer.units:
                front, _ = front.add(unit, problem.memory_bytes)
            thinned |= front.thinned
            fronts[name] = front
            if sum(len(f.nbytes) for f in fronts.values()) > 4_000_000:
                fronts.clear()
            saved = front.best(np.maximum(free, 0))
            known[name] = np.where(free >= 0, np.maximum(every - saved, 0.0), math.inf)
            result[:, first, end] = known[name]
    return result, thinned


def _front(layers: Sequence[Layer], most: int) -> _Front:
    front = _Front.empty()
    for layer in layers:
        for unit in layer.units:
            front, _ = front.add(unit, most)
    return front


def _needs(problem: _Problem, stage: int, first: int, end: int) -> tuple[int, int]:
    """Bytes a stage needs without any unit kept, and bytes left for kept units of one micro-batch."""
    layers = problem.layers[first:end]
    held = int(problem.held[stage])
    static = sum(layer.weight_bytes for layer in layers) + max(layer.workspace_bytes for layer in layers)
    fixed = sum(layer.input_bytes for layer in layers)
    return static + held * fixed, (problem.memory_bytes - static) // held - fixed


def _fill(problem: _Problem, stage: int, first: int, end: int) -> Stage:
    """The stage with the units kept that save most."""
    layers = problem.layers[first:end]
    _, free = _needs(problem, stage, first, end)
    front, steps = _Front.empty(), []
    for layer in layers:
        for unit in layer.units:
            before = len(front.nbytes)
            front, origin = front.add(unit, free)
            steps.append((before, origin))
    at = len(front.nbytes) - 1
    taken: list[bool] = []
    for before, origin in reversed(steps):
        source = int(origin[at])
        taken.append(source >= before)
        at = source % before
    taken.reverse()
    kept, position = [], 0
    for layer in layers:
        kept.append(tuple(taken[position : position + len(layer.units)]))
        position += len(layer.units)
    return _stage(problem, stage, first, end, tuple(kept))


def _stage(problem: _Problem, stage: int, first: int, end: int, kept: tuple[tuple[bool, ...], ...]) -> Stage:
    layers = problem.layers[first:end]
    pairs = [(u, k) for layer, flags in zip(layers, kept, strict=True) for u, k in zip(layer.units, flags, strict=True)]
    recompute = sum(unit.seconds for unit, keep in pairs if not keep)
    least, _ = _needs(problem, stage, first, end)
    return Stage(
        first=first,
        end=end,
        kept=kept,
        kept_names=tuple(
            tuple(unit.name for unit, keep in zip(layer.units, flags, strict=True) if keep)
            for layer, flags in zip(layers, kept, strict=True)
        ),
        forward_s=sum(layer.forward_s for layer in layers),
        backward_s=sum(layer.backward_s for layer in layers) + recompute,
        recompute_s=recompute,
        memory_bytes=least + int(problem.held[stage]) * sum(unit.nbytes for unit, keep in pairs if keep),
    )


# Where the layers are cut ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Labels:
    """Choices for stages from one on, whose first layer is given: none is better than another in all three times.

    `warm` and `end` are the phases as the stage before sees them (with this stage's pass on the way), `pace` the
    slowest stage; `cut` the end of the first stage and `origin` the choice for the stages after it.
    """

    warm: Floats
    end: Floats
    pace: Floats
    cut: Ints
    origin: Ints


def _cut(problem: _Problem, recompute: Floats) -> tuple[list[int], bool]:
    """Bounds of the stages of the shortest step, and whether choices had to be forgotten on the way."""
    count, stages, m = len(problem.layers), problem.stages, problem.micro_batches
    forward = np.concatenate([[0.0], np.cumsum([layer.forward_s for layer in problem.layers])])
    backward = np.concatenate([[0.0], np.cumsum([layer.backward_s for layer in problem.layers])])
    both = forward + backward
    steady = max(m - stages, 0) if m >= stages else m - 1
    incumbent = _first_guess(problem, recompute, forward, backward)
    tables: list[dict[int, _Labels]] = [{} for _ in range(stages)]
    capped = False
    for s in range(stages - 1, -1, -1):
        starts = [0] if s == 0 else range(s, count - (stages - 1 - s))
        for first in starts:
            ends = [count] if s == stages - 1 else list(range(first + 1, count - (stages - 2 - s)))
            rows = []
            for end in ends:
                again = recompute[s, first, end]
                if not math.isfinite(again):
                    continue
                f = forward[end] - forward[first]
                b = backward[end] - backward[first] + again
                more = int(problem.held[s]) - 1
                if s == stages - 1:
                    warm, tail, pace = np.array([f]), np.array([b]), np.array([f + b])
                else:
                    after = tables[s + 1].get(end)
                    if after is None:
                        continue
                    warm = f + np.maximum(after.warm, more * f)
                    tail = b + np.maximum(after.end, more * b)
                    pace = np.maximum(after.pace, f + b)
                if m < stages:
                    # Only the first stage's own backward pass counts at the end.
                    tail = np.full_like(warm, b) if s == 0 else np.zeros_like(warm)
                if s > 0:
                    warm = warm + b
                    tail = tail + f if m >= stages else tail
                rows.append((warm, tail, pace, np.full(len(warm), end), np.arange(len(warm))))
            if not rows:
                continue
            warm, tail, pace, cut, origin = (np.concatenate(column) for column in zip(*rows, strict=True))
            # What the layers before will add at least: each once down and up, and none of their stages can be faster
            # than their mean.
            rest = float(both[first])
            mean = rest / s if s else 0.0
            least = warm + tail + rest + steady * np.maximum(pace, mean)
            good = np.flatnonzero(least <= incumbent * (1 + 1e-12))
            good = good[_undominated(warm[good], tail[good], pace[good])]
            if len(good) > MOST_LABELS:
                capped = True
                good = good[np.argsort(least[good], kind="stable")[:MOST_LABELS]]
            if len(good):
                tables[s][first] = _Labels(warm[good], tail[good], pace[good], cut[good], origin[good])
    last = tables[0].get(0)
    if last is None:
        raise _too_little(problem)
    totals = last.warm + last.end + steady * last.pace
    at = int(np.argmin(totals))
    bounds, first = [0], 0
    for s in range(stages):
        labels = tables[s][first]
        first, at = int(labels.cut[at]), int(labels.origin[at])
        bounds.append(first)
    return bounds, capped


def _undominated(a: Floats, b: Floats, c: Floats) -> Ints:
    """Indices of the points that no other point beats or equals in all three, in rising order of the first."""
    order = np.lexsort((c, b, a))
    kept_b: list[float] = []
    kept_c: list[float] = []
    result = []
    for i in order:
        # What is kept has a smaller or equal first value; its (b, c) form a staircase: b rises, c falls.
        x, y = float(b[i]), float(c[i])
        low, high = 0, len(kept_b)
        while low < high:
            middle = (low + high) // 2
            if kept_b[middle] <= x:
                low = middle + 1
            else:
                high = middle
        if low and kept_c[low - 1] <= y:
            continue
        result.append(int(i))
        stop = low
        while stop < len(kept_b) and kept_c[stop] >= y:
            stop += 1
        if low and kept_b[low - 1] == x:
            low -= 1
        kept_b[low:stop] = [x]
        kept_c[low:stop] = [y]
    return np.array(result, dtype=np.int64)


def _first_guess(problem: _Problem, recompute: Floats, forward: Floats, backward: Floats) -> float:
    """A step that can be had: the split whose slowest stage is fastest. Later choices must not be worse."""
    count, stages = len(problem.layers), problem.stages
    best = np.full((stages + 1, count + 1), math.inf)
    best[stages, count] = 0.0
    choice = np.zeros((stages, count + 1), dtype=np.int64)
    pace = (forward + backward)[None, :] - (forward + backward)[:, None]
    for s in range(stages - 1, -1, -1):
        total = np.maximum(pace + recompute[s], best[s + 1][None, :])
        choice[s] = np.argmin(total, axis=1)
        best[s] = np.min(total, axis=1)
    if not math.isfinite(best[0, 0]):
        raise _too_little(problem)
    f, b, first = [], [], 0
    for s in range(stages):
        end = int(choice[s, first])
        f.append(float(forward[end] - forward[first]))
        b.append(float(backward[end] - backward[first] + recompute[s, first, end]))
        first = end
    return step_time(f, b, problem.micro_batches)


def _too_little(problem: _Problem) -> InfeasibleError:
    """How much memory the best split needs when everything is recomputed."""
    count, stages = len(problem.layers), problem.stages
    weights = np.concatenate([[0], np.cumsum([layer.weight_bytes for layer in problem.layers])])
    inputs = np.concatenate([[0], np.cumsum([layer.input_bytes for layer in problem.layers])])
    work = np.zeros((count + 1, count + 1))
    for first in range(count):
        work[first, first + 1 :] = np.maximum.accumulate([la.workspace_bytes for la in problem.layers[first:]])
    needs = np.full(count + 1, math.inf)
    needs[count] = 0.0
    later = np.arange(count + 1)[None, :] > np.arange(count + 1)[:, None]
    for s in range(stages - 1, -1, -1):
        held = int(problem.held[s])
        own = (weights[None, :] - weights[:, None]) + held * (inputs[None, :] - inputs[:, None]) + work
        needs = np.min(np.where(later, np.maximum(own, needs[None, :]), math.inf), axis=1)
    least = int(needs[0])
    return InfeasibleError(
        f"{count} layers on {stages} stages need at least {format_bytes(least)} a device with everything recomputed,"
        f" {format_bytes(least - problem.memory_bytes)} more than {format_bytes(problem.memory_bytes)}",
        "use more stages, more tensor parallelism, a smaller micro-batch, or devices with more memory",
    )
