"""A trial: requests through the simulator, and whether they were served within the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.plan.serving.load import duration_s
from foretell.plan.serving.steady import Iterations
from foretell.simulate.serving import Requests, ServingPlan
from foretell.simulate.serving.metrics import Slo, latencies, percentile

__all__ = ["Trial", "Tried", "largest_factor", "paced", "sampled", "simulated"]

Floats = npt.NDArray[np.float64]

_FAST = 1e15  # bytes/s: as good as no link at all


@dataclass(frozen=True, slots=True)
class Tried:
    """What a simulation of some requests gave: shares and seconds over all requests that were served."""

    #: Share of requests within the objective; those that were refused are not.
    attainment: float
    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


#: Runs requests through a simulator; the last is bytes/s of a device to another replica, for KV that moves.
Trial = Callable[[Iterations, ServingPlan, Requests, Slo, float], Tried]


def paced(requests: Requests, rate: float) -> Requests:
    """The same requests, arriving at `rate` a second on average with the gaps in the same ratios."""
    scale = len(requests) / duration_s(requests) / rate
    arrival = (requests.arrival_s - requests.arrival_s[0]) * scale
    return Requests.of(
        arrival, requests.input_tokens, requests.output_tokens, requests.prefix, requests.prefix_tokens,
        about=requests.about,
    )  # fmt: skip


def sampled(requests: Requests, most: int) -> Requests:
    """At most so many of the requests, evenly over the trace: what one of many equal replicas is sent."""
    if len(requests) <= most:
        return requests
    rows = np.linspace(0, len(requests) - 1, most).round().astype(np.int64)
    return Requests.of(
        requests.arrival_s[rows], requests.input_tokens[rows], requests.output_tokens[rows], requests.prefix[rows],
        requests.prefix_tokens[rows], about=requests.about,
    )  # fmt: skip


def largest_factor(good: Callable[[float], bool], low: float = 0.1, high: float = 1.3, steps: int = 5) -> float:
    """The largest factor on a rate for which `good` holds, by bisection of [`low`, `high`]; 0 where it fails at `low`.

    >>> 0.6 < largest_factor(lambda factor: factor < 0.65, steps=6) < 0.65
    True
    """
    if good(high):
        return high
    held, least = 0.0, low
    for _ in range(steps):
        middle = float(np.sqrt(least * high))
        if good(middle):
            held = least = middle
        else:
            high = middle
    return held or (low if good(low) else 0.0)


def simulated(
    iterations: Iterations, plan: ServingPlan, requests: Requests, slo: Slo, link_bytes_per_s: float
) -> Tried:
    """A trial by the event-driven engine simulator."""
    from foretell.simulate.serving.simulator import Link, serve

    link = Link(min(link_bytes_per_s, _FAST)) if plan.prefill_replicas else None
    served = serve(iterations, plan, requests, kv_link=link)
    done, times = served.served, latencies(served)
    if not done.any():
        never = float("inf")
        return Tried(0.0, len(requests), never, never, never, never, 0.0)
    good = done.copy()
    for name, limit in slo.limits.items():
        good &= ~(times[name] > limit)  # a request of one token has no TPOT, and keeps any limit of it
    (ttft_50, ttft_99), (tpot_50, tpot_99) = (percentile(times[name], (50, 99)) for name in ("ttft", "tpot"))
    busy = float(np.max(served.finished_s[done]) - served.arrival_s[0])
    return Tried(
        float(good.mean()), len(requests), float(ttft_50), float(ttft_99), float(tpot_50), float(tpot_99),
        float(served.output_tokens[done].sum()) / max(busy, 1e-12),
    )  # fmt: skip
