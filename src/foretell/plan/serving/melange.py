"""The cheapest mix of GPU types for a load: a mixed-integer program over buckets of request sizes, as in Mélange.

Each bucket is cut into equal slices; a slice goes to one option (a GPU type with its settings) and fills
rate / capacity of one instance. Slices of a bucket are alike, so how many of them an option gets is one integer, which
spares the solver the symmetry of one variable a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import ForetellError, InfeasibleError

__all__ = ["Mix", "cheapest", "profile", "require_solver", "single"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SLICES = 8
_TIME_LIMIT_S = 20.0
_EPSILON = 1e-6  # a load of 3.0000001 instances is 3; the solver keeps its rows no better


def require_solver() -> None:
    """Raise ForetellError where the solver is not installed: before a search, which would end in it."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        repair = "pip install 'foretell[serve]', or '.[serve]' in a checkout"
        raise ForetellError(f"the mix of GPU types needs scipy ({error})", repair) from error


@dataclass(frozen=True, slots=True)
class Mix:
    """Instances of each option (options,), slices of each bucket by option (buckets, options), and their cost."""

    instances: Ints
    slices: Ints
    #: Instances' worth of work that each option gets, at most `instances`.
    work: Floats
    cost: float
    #: Whether no cheaper mix exists: the solver finished.
    proven: bool

    @property
    def shares(self) -> Floats:
        """The share of each bucket that each option serves, (buckets, options)."""
        return np.asarray(self.slices / self.slices.sum(axis=1, keepdims=True), dtype=np.float64)


def profile(
    capacity: Callable[[str, float, float], float],
    options: Sequence[str],
    input_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
) -> Floats:
    """The most requests/s of each bucket that an instance of each option serves within the SLO, (buckets, options).

    `capacity` (option, tokens in, tokens out) may be anything: a measurement, a simulation, a closed form; 0: never.
    """
    sizes = zip(np.atleast_1d(input_tokens), np.atleast_1d(output_tokens), strict=True)
    return np.array([[capacity(o, float(i), float(j)) for o in options] for i, j in sizes], dtype=np.float64)


def _checked(rate: npt.ArrayLike, capacity: npt.ArrayLike, cost: npt.ArrayLike) -> tuple[Floats, Floats, Floats]:
    rates, most, costs = (np.asarray(c, dtype=np.float64) for c in (rate, capacity, cost))
    if most.shape != (len(rates), len(costs)):
        raise ValueError(f"capacity is {most.shape}, not (buckets, options) = ({len(rates)}, {len(costs)})")
    if not (np.isfinite(rates).all() and (rates > 0).all() and np.isfinite(most).all() and (most >= 0).all()):
        raise ValueError("rates are positive and capacities at least 0")
    if not (np.isfinite(costs).all() and (costs > 0).all()):
        raise ValueError("costs are positive")
    return rates, most, costs


def single(rate: npt.ArrayLike, capacity: npt.ArrayLike, cost: npt.ArrayLike) -> list[Mix | None]:
    """What each option would take by itself; None where it serves some bucket never."""
    rates, most, costs = _checked(rate, capacity, cost)
    found: list[Mix | None] = []
    for j, each in enumerate(costs):
        if (most[:, j] == 0).any():
            found.append(None)
            continue
        slices = np.zeros(most.shape, dtype=np.int64)
        slices[:, j] = 1
        found.append(_mix(rates, most, costs, slices, proven=True))
        assert found[-1] is not None
        assert found[-1].cost >= each
    return found


def _mix(rate: Floats, capacity: Floats, cost: Floats, slices: Ints, proven: bool) -> Mix:
    parts = slices / slices.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(slices > 0, rate[:, None] * parts / capacity, 0.0)
    work = each.sum(axis=0)
    # However little an option gets to do, it takes one instance.
    instances = np.maximum(np.ceil(work - _EPSILON), work > 0).astype(np.int64)
    return Mix(instances, slices, work, float(instances @ cost), proven)


def cheapest(
    rate: npt.ArrayLike,
    capacity: npt.ArrayLike,
    cost: npt.ArrayLike,
    *,
    slices: int = SLICES,
    available: Sequence[int | None] | None = None,
    names: Sequence[str] = (),
    slo: str = "the SLO",
    options: Sequence[str] = (),
    stock: Sequence[str] = (),
) -> Mix:
    """The mix of least cost. `rate` (buckets,) requests/s, `capacity` (buckets, options) as `profile` has it, `cost`
    (options,) of one instance in any unit, `available` instances of each option (None: as many as one likes).

    Never dearer than the cheapest single option. Raises InfeasibleError where no option serves some bucket within
    `slo`, naming the bucket (`names`) and `options`, or where there are too few instances, naming what there is
    (`stock`).
    """
    require_solver()
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    rates, most, costs = _checked(rate, capacity, cost)
    nowhere = np.flatnonzero((most == 0).all(axis=1))
    if len(nowhere):
        raise InfeasibleError(_nowhere(nowhere, rates, names, options, slo), "loosen the SLO, or add a faster GPU type")
    buckets, count = most.shape
    caps = np.array([np.inf if a is None else a for a in available or [None] * count], dtype=np.float64)
    # Variables: slices of each bucket by option, row by row; then instances of each option.
    cells = buckets * count
    i, j = np.divmod(np.arange(cells), count)
    with np.errstate(divide="ignore"):
        fill = np.where(most > 0, rates[:, None] / slices / most, 0.0).ravel()
    each = coo_array((np.ones(cells), (i, np.arange(cells))), (buckets, cells + count))
    whole = LinearConstraint(each, slices, slices)
    rows, columns = np.concatenate([j, np.arange(count)]), np.arange(cells + count)
    values = np.concatenate([fill, -np.ones(count)])
    room = LinearConstraint(coo_array((values, (rows, columns)), (count, cells + count)), -np.inf, 0.0)
    found = milp(
        np.concatenate([np.zeros(cells), costs]),
        constraints=[whole, room],
        bounds=Bounds(0.0, np.concatenate([np.where(most > 0, slices, 0).ravel(), caps])),
        integrality=np.ones(cells + count),
        options={"time_limit": _TIME_LIMIT_S},
    )
    alone = [mix for mix in single(rates, most, costs) if mix is not None and (mix.instances <= caps).all()]
    if found.x is None:
        if found.status == 2:
            raise InfeasibleError(_too_few(rates, stock), "allow more instances, or other GPU types")
        if alone:
            return min(alone, key=lambda mix: mix.cost)
        raise ForetellError(f"the solver found no mix of GPU types within {_TIME_LIMIT_S:g} s ({found.message})")
    placed = np.rint(found.x[:cells]).astype(np.int64).reshape(buckets, count)
    best = _mix(rates, most, costs, placed, proven=found.status == 0)
    # Where the solver ran out of time, or within its tolerance, one type may still be cheaper.
    return min([best, *alone], key=lambda mix: mix.cost)


def _nowhere(rows: Ints, rate: Floats, names: Sequence[str], options: Sequence[str], slo: str) -> str:
    name = names[rows[0]] if names else f"bucket {rows[0]}"
    more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    tried = f" of {', '.join(options)}" if options else ""
    share = rate[rows].sum() / rate.sum()
    return f"requests with {name}{more}, {100.0 * share:.1f} % of all, meet {slo} on none{tried}"


def _too_few(rate: Floats, stock: Sequence[str]) -> str:
    named = f" ({', '.join(stock)})" if stock else ""
    return f"too few instances{named} for {rate.sum():.4g} requests/s"
