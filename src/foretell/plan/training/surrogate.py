"""Search by a surrogate: a Gaussian process learns an objective from few evaluations and says what to try next.

Dash et al. tune tensor and pipeline parallelism, micro-batch, accumulation, ZeRO stage and node count on Frontier so
(arXiv 2312.12705, with DeepHyper), where an evaluation is a job: configurations that run out of memory count as
penalties, and knobs are ranked by what they matter. Any callable is an objective: a model, or real runs.

>>> space = Space({"tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8), "micro_batch": (1, 2, 4, 8)})
>>> def speed(at):
...     if at["micro_batch"] > at["tp"] * at["pp"]:
...         return None                                   # out of memory
...     return at["micro_batch"] ** 0.5 / (1 + 0.1 * at["tp"]) / (1 + 0.02 * at["pp"])
>>> found = search(speed, space, budget=25, seed=0)
>>> found.best, len(found.trials)
({'tp': 1, 'pp': 8, 'micro_batch': 8}, 25)
>>> [name for name, share in found.importance().items()]
['pp', 'micro_batch', 'tp']
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InfeasibleError, InputError

__all__ = ["Objective", "Search", "Space", "Trial", "random_search", "search", "shapley"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Gets one value for each knob; more is better. None, or InfeasibleError, where the configuration cannot run.
Objective = Callable[[dict[str, Any]], float | None]

#: Points of a space that are looked at each round; of a larger space as many at random.
MOST_CANDIDATES = 20_000
MOST_TRIALS = 1000
#: Knobs whose Shapley values are computed exactly, over all their subsets.
MOST_KNOBS = 10

#: Power of the chance to run in the choice of what to try next. 4 found most on configurations of pipelined training
#: whose optimum lies next to what runs out of memory (1, 2 and 4 were tried).
CAUTION = 4

_LENGTHS = (0.15, 0.3, 0.6, 1.2, 4.0)
_NOISES = (1e-6, 1e-3, 3e-2)


@dataclass(frozen=True, slots=True)
class Space:
    """Knobs and the values each may take, in their natural order (a knob's neighbours are alike)."""

    knobs: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        if not self.knobs:
            raise InputError("no knobs", "search space")
        for name, values in self.knobs.items():
            if not values or len(set(values)) != len(values):
                raise InputError(f"{name} has values {values!r}", "search space", "give each once, at least one")

    @property
    def size(self) -> int:
        """Configurations in all."""
        return math.prod(len(values) for values in self.knobs.values())

    def at(self, point: Ints) -> dict[str, Any]:
        """The configuration of a point, whose entries are indices into the knobs' values."""
        return {name: values[int(i)] for (name, values), i in zip(self.knobs.items(), point, strict=True)}

    def points(self, rng: np.random.Generator) -> Ints:
        """All points, or `MOST_CANDIDATES` different ones at random: (points, knobs)."""
        counts = [len(values) for values in self.knobs.values()]
        if self.size <= MOST_CANDIDATES:
            return np.indices(counts).reshape(len(counts), -1).T
        drawn = np.stack([rng.integers(0, n, MOST_CANDIDATES) for n in counts], axis=1)
        return np.asarray(np.unique(drawn, axis=0))

    def scaled(self, points: Ints) -> Floats:
        """Points in the unit cube, a knob's values at equal distances."""
        spans = np.array([max(1, len(values) - 1) for values in self.knobs.values()])
        return np.asarray(points / spans)


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluation; `value` is None where the configuration cannot run."""

    point: tuple[int, ...]
    at: Mapping[str, Any]
    value: float | None


@dataclass(frozen=True, slots=True)
class Search:
    """What was tried, in order."""

    space: Space
    trials: tuple[Trial, ...]
    seed: int

    @property
    def _best(self) -> Trial:
        feasible = [trial for trial in self.trials if trial.value is not None]
        if not feasible:
            raise InfeasibleError(
                f"none of {len(self.trials)} configurations tried can run", "allow more devices or smaller batches"
            )
        return max(feasible, key=lambda trial: trial.value or -math.inf)

    @property
    def best(self) -> dict[str, Any]:
        """The best configuration. Raises InfeasibleError if none could run."""
        return dict(self._best.at)

    @property
    def value(self) -> float:
        """Its objective."""
        value = self._best.value
        assert value is not None
        return value

    @property
    def failed(self) -> int:
        """Trials that could not run."""
        return sum(trial.value is None for trial in self.trials)

    def importance(self, samples: int = 256) -> Mapping[str, float]:
        """Share of each knob in what the surrogate says configurations differ by, largest first: mean absolute Shapley
        values over the space, failures counting as penalties."""
        rng = np.random.default_rng(self.seed)
        process = _Process.fit(self.space.scaled(_points(self.trials)), _penalised(self.trials))
        points = self.space.points(rng)
        some = points[rng.permutation(len(points))[:samples]]
        background = points[rng.permutation(len(points))[: min(64, len(points))]]
        values = shapley(lambda x: process.predict(x)[0], self.space.scaled(some), self.space.scaled(background))
        mean = np.abs(values).mean(axis=0)
        total = float(mean.sum())
        shares = {
            name: float(m) / total if total > 0 else 0.0 for name, m in zip(self.space.knobs, mean, strict=True)
        }
        return MappingProxyType(dict(sorted(shares.items(), key=lambda item: -item[1])))


def search(
    objective: Objective, space: Space, *, budget: int, initial: int | None = None, batch: int = 1, seed: int = 0
) -> Search:
    """Evaluate `budget` configurations: `initial` at random, then `batch` by `batch` those expected to improve most.

    No configuration is evaluated twice; a space smaller than the budget is evaluated whole. Deterministic by `seed`.
    """
    rng, points = _begin(space, budget, seed)
    if batch < 1:
        raise InputError(f"batches of {batch}", "search")
    budget = min(budget, len(points))
    start = min(budget, initial if initial is not None else max(4, 2 * len(space.knobs), budget // 5))
    order = rng.permutation(len(points))[:start]
    trials = [_try(objective, space, points[i]) for i in order]
    left = np.ones(len(points), dtype=np.bool_)
    left[order] = False
    while len(trials) < budget:
        for i in _next(trials, points, left, space, min(batch, budget - len(trials))):
            trials.append(_try(objective, space, points[i]))
            left[i] = False
    return Search(space, tuple(trials), seed)


def random_search(objective: Objective, space: Space, *, budget: int, seed: int = 0) -> Search:
    """Evaluate `budget` configurations at random, none twice: what a search must beat."""
    rng, points = _begin(space, budget, seed)
    order = rng.permutation(len(points))[:budget]
    return Search(space, tuple(_try(objective, space, points[i]) for i in order), seed)


def shapley(predict: Callable[[Floats], Floats], points: Floats, background: Floats) -> Floats:
    """Exact Shapley values of `predict` at `points` (rows, knobs) against `background` (rows, knobs): (rows, knobs).

    A knob outside a coalition takes the background's values. Rows sum to the prediction less the background's mean.

    >>> x = np.array([[1.0, 1.0], [0.0, 1.0]])
    >>> shapley(lambda x: 3 * x[:, 0] + x[:, 1], x, np.array([[0.0, 0.0]])).tolist()
    [[3.0, 1.0], [0.0, 1.0]]
    """
    rows, knobs = points.shape
    if knobs > MOST_KNOBS:
        raise InputError(f"{knobs} knobs, Shapley values are exact for up to {MOST_KNOBS}", "shapley")
    means: dict[tuple[int, ...], Floats] = {}
    for size in range(knobs + 1):
        for inside in itertools.combinations(range(knobs), size):
            mixed = np.repeat(background[None], rows, axis=0)
            mixed[:, :, list(inside)] = points[:, None, list(inside)]
            means[inside] = predict(mixed.reshape(-1, knobs)).reshape(rows, -1).mean(axis=1)
    values = np.zeros((rows, knobs))
    for inside, mean in means.items():
        if len(inside) == knobs:
            continue
        weight = math.factorial(len(inside)) * math.factorial(knobs - len(inside) - 1) / math.factorial(knobs)
        for knob in set(range(knobs)) - set(inside):
            values[:, knob] += weight * (means[tuple(sorted((*inside, knob)))] - mean)
    return values


def _begin(space: Space, budget: int, seed: int) -> tuple[np.random.Generator, Ints]:
    if not 1 <= budget <= MOST_TRIALS:
        raise InputError(f"a budget of {budget}, want 1 to {MOST_TRIALS}", "search")
    rng = np.random.default_rng(seed)
    return rng, space.points(rng)


def _try(objective: Objective, space: Space, point: Ints) -> Trial:
    at = space.at(point)
    try:
        value = objective(dict(at))
    except InfeasibleError:
        value = None
    if value is not None and not math.isfinite(value):
        raise InputError(f"the objective is {value} at {at}", "search", "return None where a configuration cannot run")
    return Trial(tuple(int(i) for i in point), MappingProxyType(at), value)


def _points(trials: list[Trial] | tuple[Trial, ...]) -> Ints:
    return np.array([trial.point for trial in trials], dtype=np.int64)


def _penalised(trials: list[Trial] | tuple[Trial, ...]) -> Floats:
    """Objectives; a failure counts as the worst success."""
    seen = [trial.value for trial in trials if trial.value is not None]
    worst = min(seen, default=0.0)
    return np.array([worst if trial.value is None else trial.value for trial in trials])


def _next(trials: list[Trial], points: Ints, left: npt.NDArray[np.bool_], space: Space, count: int) -> list[int]:
    """Candidates with most expected improvement, times the chance that they run at all.

    A cliff of failures would bend one surrogate of both: what runs has a surrogate of its own. After each candidate of
    a batch its expected value stands in for a measured one.
    """
    x = space.scaled(_points(trials))
    ran = np.array([trial.value is not None for trial in trials])
    free = np.flatnonzero(left)
    if not ran.any():  # away from all failures
        runs = _Process.fit(x, ran.astype(np.float64)).predict(space.scaled(points[free]))[1]
        return [int(i) for i in free[np.argsort(-runs, kind="stable")[:count]]]
    x_ran, y = x[ran], _penalised(trials)[ran]
    value = _Process.fit(x_ran, y)
    chance = np.ones(len(free))
    if not ran.all():
        mean, _ = _Process.fit(x, ran.astype(np.float64)).predict(space.scaled(points[free]))
        chance = np.clip(mean, 0.01, 1.0) ** CAUTION
    chosen: list[int] = []
    for _ in range(count):
        mean, spread = value.predict(space.scaled(points[free]))
        at = int(np.argmax(_improvement(mean, spread, float(y.max())) * chance))
        chosen.append(int(free[at]))
        x_ran, y = np.vstack([x_ran, space.scaled(points[free[at : at + 1]])]), np.append(y, mean[at])
        value = value.with_data(x_ran, y)
        free, chance = np.delete(free, at), np.delete(chance, at)
    return chosen


def _improvement(mean: Floats, spread: Floats, best: float) -> Floats:
    spread = np.maximum(spread, 1e-12)
    z = (mean - best) / spread
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return np.asarray((mean - best) * _below(z) + spread * density)


def _below(z: Floats) -> Floats:
    """The normal distribution function."""
    return np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in z])


@dataclass(frozen=True, slots=True)
class _Process:
    """A Gaussian process with a Matérn 5/2 kernel, one length for each knob, on standardised values."""

    lengths: Floats
    noise: float
    x: Floats
    mean: float
    scale: float
    factor: Floats
    weights: Floats

    @staticmethod
    def fit(x: Floats, y: Floats) -> _Process:
        """Lengths and noise of most marginal likelihood, one after the other from a grid."""
        lengths, noise = np.full(x.shape[1], 0.6), _NOISES[1]
        best = _Process._likelihood(x, y, lengths, noise)
        for _ in range(2):
            before = best
            for knob in range(x.shape[1]):
                for length in _LENGTHS:
                    tried = lengths.copy()
                    tried[knob] = length
                    value = _Process._likelihood(x, y, tried, noise)
                    if value > best:
                        best, lengths = value, tried
            for other in _NOISES:
                value = _Process._likelihood(x, y, lengths, other)
                if value > best:
                    best, noise = value, other
            if best == before:
                break
        return _Process._make(x, y, lengths, noise)

    def with_data(self, x: Floats, y: Floats) -> _Process:
        """The same kernel on other data."""
        return _Process._make(x, y, self.lengths, self.noise)

    def predict(self, x: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation at each row."""
        cross = _kernel(x, self.x, self.lengths)
        mean = cross @ self.weights
        half = np.linalg.solve(self.factor, cross.T)
        spread = np.sqrt(np.maximum(1.0 - np.einsum("ij,ij->j", half, half), 0.0))
        return self.mean + self.scale * mean, self.scale * spread

    @staticmethod
    def _make(x: Floats, y: Floats, lengths: Floats, noise: float) -> _Process:
        mean, scale = float(y.mean()), float(y.std()) or 1.0
        covariance = _kernel(x, x, lengths) + (noise + 1e-9) * np.eye(len(x))
        factor = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        weights = np.asarray(np.linalg.solve(factor.T, np.linalg.solve(factor, (y - mean) / scale)), dtype=np.float64)
        return _Process(lengths, noise, x, mean, scale, factor, weights)

    @staticmethod
    def _likelihood(x: Floats, y: Floats, lengths: Floats, noise: float) -> float:
        made = _Process._make(x, y, lengths, noise)
        residual = (y - made.mean) / made.scale
        return float(-0.5 * residual @ made.weights - np.log(np.diag(made.factor)).sum())


def _kernel(a: Floats, b: Floats, lengths: Floats) -> Floats:
    left, right = a / lengths, b / lengths
    square = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2 * left @ right.T
    distance = np.sqrt(5.0 * np.maximum(square, 0.0))
    return np.asarray((1 + distance + distance**2 / 3) * np.exp(-distance))
