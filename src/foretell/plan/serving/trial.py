"""A trial: requests through the simulator, and whether they were served within the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.plan.serving.interval import independent
from foretell.plan.serving.load import duration_s
from foretell.plan.serving.steady import Iterations
from foretell.simulate.serving import Requests, ServingPlan
from foretell.simulate.serving.metrics import Slo, latencies, percentile

__all__ = ["Trial", "Tried", "largest_factor", "paced", "sampled", "simulated"]

Floats = npt.NDArray[np.float64]

_FAST = 1e15  # bytes/s: as good as no link at all
_STRETCH = 200  # requests of a stretch of a trace at least
_STRETCHES = 8
_GROWN = 0.05  # of the requests that come, what may be left over without a limit on how long they wait


@dataclass(frozen=True, slots=True)
class Tried:
    """What a simulation of some requests gave: shares and seconds over all requests that were served."""

    #: Share of requests within the objective; those that were refused are not.
    attainment: float
    requests: int
    #: As how many independent requests they count for this share (`interval.independent`).
    independent: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    tokens_per_s: float
    #: Whether they leave as fast as they come: else each would wait longer than the one before, which no limit on the
    #: time between tokens shows.
    keeps_up: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


#: Runs requests through a simulator; the last are bytes/s of a device to another replica, for KV that moves, and how
#: many of the first requests only fill the server and are not counted.
Trial = Callable[[Iterations, ServingPlan, Requests, Slo, float, int], Tried]


def paced(requests: Requests, rate: float) -> Requests:
    """The same requests, arriving at `rate` a second on average with the gaps in the same ratios."""
    scale = len(requests) / duration_s(requests) / rate
    arrival = (requests.arrival_s - requests.arrival_s[0]) * scale
    return Requests.of(
        arrival, requests.input_tokens, requests.output_tokens, requests.prefix, requests.prefix_tokens,
        about=requests.about,
    )  # fmt: skip


def sampled(requests: Requests, count: int, every: float = 1.0, warm: int = 0) -> Requests:
    """So many requests as one of some equal replicas is sent them, after `warm` that come before.

    Such a replica gets one request of `every` in turn: leaving out more would make arrivals more even than they are. Of
    many requests, stretches that lie evenly over them are taken, a mean gap apart; of few, all, over and over. Those
    before are the last again, so that the server is as full as it would be.
    """
    # Of few requests at least two are taken, as one has no rate.
    rows = np.arange(0.0, len(requests), min(max(every, 1.0), max(1.0, len(requests) / 2.0))).astype(np.int64)
    if len(rows) > count:
        parts = int(np.clip(count // _STRETCH, 1, _STRETCHES))
        size = count // parts
        first = np.linspace(0, len(rows) - size, parts).round().astype(np.int64)
        rows = rows[(first[:, None] + np.arange(size)).ravel()]
    else:
        rows = np.resize(rows, count)
    if warm:
        rows = np.concatenate([np.resize(rows[::-1], warm)[::-1], rows])
    gaps = np.diff(requests.arrival_s[rows])
    steps = np.diff(rows)
    # Rows that follow each other here and there have their own gap between them.
    near = (steps >= 0) & (steps <= np.ceil(max(every, 1.0)))
    gaps[~near] = gaps[near].mean() if near.any() else 1.0
    return Requests.of(
        np.concatenate([[0.0], np.cumsum(gaps)]), requests.input_tokens[rows], requests.output_tokens[rows],
        requests.prefix[rows], requests.prefix_tokens[rows], about=requests.about,
    )  # fmt: skip


def largest_factor(good: Callable[[float], bool], low: float = 0.1, high: float = 2.0, within: float = 1.025) -> float:
    """The largest factor on a rate from `low` to `high` for which `good` holds, to a ratio of `within`, searched from 1
    outwards; 0 where it fails at `low`.

    >>> 0.63 < largest_factor(lambda factor: factor < 0.65) < 0.65
    True
    """
    step = 1.15
    held, fails = (1.0, 0.0) if good(1.0) else (0.0, 1.0)
    while not fails:
        if held >= high:
            return held
        tried = min(high, held * step)
        held, fails, step = (tried, fails, step * step) if good(tried) else (held, tried, step)
    while not held:
        if fails <= low:
            return 0.0
        tried = max(low, fails / step)
        held, fails, step = (tried, fails, step) if good(tried) else (held, tried, step * step)
    while fails / held > within:
        middle = float(np.sqrt(held * fails))
        held, fails = (middle, fails) if good(middle) else (held, middle)
    return held


def simulated(
    iterations: Iterations, plan: ServingPlan, requests: Requests, slo: Slo, link_bytes_per_s: float, warm: int = 0
) -> Tried:
    """A trial by the event-driven engine simulator."""
    from foretell.simulate.serving.simulator import Link, serve

    link = Link(min(link_bytes_per_s, _FAST)) if plan.prefill_replicas else None
    served = serve(iterations, plan, requests, kv_link=link)
    done = served.served[warm:]
    came, left = served.arrival_s[warm:][done], served.finished_s[warm:][done]
    times = {name: all_[warm:] for name, all_ in latencies(served).items()}
    if not done.any():
        never = float("inf")
        return Tried(0.0, len(done), independent(done), never, never, never, never, 0.0, keeps_up=False)
    good = done.copy()
    for name, limit in slo.limits.items():
        good &= ~(times[name] > limit)  # a request of one token has no TPOT, and keeps any limit of it
    (ttft_50, ttft_99), (tpot_50, tpot_99) = (percentile(times[name], (50, 99)) for name in ("ttft", "tpot"))
    busy = float(np.max(left) - served.arrival_s[warm])
    return Tried(
        float(good.mean()), len(done), independent(good),
        float(ttft_50), float(ttft_99), float(tpot_50), float(tpot_99),
        float(served.output_tokens[warm:][done].sum()) / max(busy, 1e-12),
        bool({"ttft", "e2e"} & set(slo.limits)) or _keeps_up(came, left),
    )  # fmt: skip


def _keeps_up(arrival_s: Floats, finished_s: Floats) -> bool:
    """Whether no more requests are there in the last third of the time that they come in than in the first, but for
    chance.
    """
    edges = np.linspace(arrival_s[0], arrival_s[-1], 4)
    there = [
        np.clip(np.minimum(finished_s, end) - np.maximum(arrival_s, start), 0.0, None).sum() / max(end - start, 1e-12)
        for start, end in ((edges[0], edges[1]), (edges[2], edges[3]))
    ]
    grown = 1.5 * (there[1] - there[0])  # from the middle of a third to that of another is two thirds of the time
    return bool(grown <= _GROWN * len(arrival_s) + 2.0 * np.sqrt(there[0]))
