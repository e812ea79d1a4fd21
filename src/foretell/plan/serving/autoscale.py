"""Replicas over a day: how many, when to start and stop them, and what that costs beside a fixed number.

A replica serves only `start_s` after it was asked for, and is paid for from then on. Two ways: ``ahead`` knows the day
(a schedule made from yesterday's) and starts early enough; ``reactive`` sees what arrived and asks for what that
needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InfeasibleError, InputError
from foretell.simulate.serving import Requests

__all__ = ["POLICIES", "Scaling", "rates_over_time", "scale"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

POLICIES = ("ahead", "reactive")
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Replicas in each window of `window_s`, (windows,): `needed` to serve the rate, `serving`, and `paid` for (with
    those that start). `replica_hours` and those of a fixed number that serves the busiest window.
    """

    policy: str
    window_s: float
    rate: Floats
    needed: Ints
    serving: Ints
    paid: Floats
    #: Share of all requests that arrive beyond what serves at the time.
    beyond: float
    replica_hours: float
    fixed_hours: float
    usd_per_h: float | None

    @property
    def saved(self) -> float:
        """What scaling saves of the cost of a fixed number, as a share."""
        return 1.0 - self.replica_hours / self.fixed_hours

    def hourly(self) -> list[dict[str, Any]]:
        """Each hour from the start: mean rate, fewest and most replicas serving, replica-hours and dollars paid."""
        hour = np.floor(np.arange(len(self.rate)) * self.window_s / 3600.0).astype(np.int64)
        rows = []
        for h in range(int(hour[-1]) + 1):
            of = hour == h
            hours = float(self.paid[of].sum()) * self.window_s / 3600.0
            rows.append({
                "hour": h, "requests_per_s": float(self.rate[of].mean()), "fewest": int(self.serving[of].min()),
                "most": int(self.serving[of].max()), "replica_hours": hours,
                "cost_usd": None if self.usd_per_h is None else hours * self.usd_per_h,
            })  # fmt: skip
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        cost = self.usd_per_h
        return {
            "policy": self.policy,
            "window_s": self.window_s,
            "hours": self.hourly(),
            "beyond": self.beyond,
            "replica_hours": self.replica_hours,
            "fixed_replicas": int(self.needed.max()),
            "fixed_replica_hours": self.fixed_hours,
            "cost_usd": None if cost is None else cost * self.replica_hours,
            "fixed_cost_usd": None if cost is None else cost * self.fixed_hours,
            "saved": self.saved,
        }


def rates_over_time(requests: Requests, window_s: float) -> Floats:
    """Arrivals a second in each window from time 0 to the last arrival, (windows,); a last part-window counts whole."""
    if not 0 < window_s < np.inf:
        raise InputError(f"a window of {window_s:g} s", "rates over time", "give a time above 0")
    count = int(min(requests.arrival_s[-1] / window_s, 1e12)) + 1
    if count > 1_000_000:
        raise InputError(f"{count:,} windows of {window_s:g} s are too many", "requests", "give longer windows")
    return np.bincount((requests.arrival_s // window_s).astype(np.int64), minlength=count) / window_s


def scale(
    rate: npt.ArrayLike,
    window_s: float,
    capacity: float,
    *,
    start_s: float,
    policy: str = "ahead",
    fewest: int = 1,
    headroom: float = 0.0,
    usd_per_h: float | None = None,
) -> Scaling:
    """Replicas by window for `rate` requests/s (windows,), each serving `capacity` of them, `headroom` (0.2: a fifth
    more than needed) kept free. Raises InputError for what makes no sense, InfeasibleError where a replica serves
    nothing.
    """
    rates = np.asarray(rate, dtype=np.float64)
    if policy not in POLICIES:
        raise InputError(f"policy is {policy!r}", repair=f"give one of {', '.join(POLICIES)}")
    if not len(rates) or not (np.isfinite(rates).all() and (rates >= 0).all() and rates.max() > 0):
        raise InputError("rates over time are numbers from 0 on, one of them above 0")
    if not (window_s > 0 and start_s >= 0 and headroom >= 0 and fewest >= 0):
        raise InputError("window, start-up time, headroom and the fewest replicas are not negative")
    if not capacity > 0:
        raise InfeasibleError("a replica serves no request within the SLO", "loosen it, or take other GPUs")
    needed = np.maximum(np.ceil(rates * (1 + headroom) / capacity - 1e-9).astype(np.int64), fewest)
    delay = int(np.ceil(start_s / window_s))  # whole windows in which a new replica is paid for and does not serve
    serving, paid = (_ahead if policy == "ahead" else _reactive)(needed, delay)
    served = np.minimum(rates, serving * capacity)
    return Scaling(
        policy, window_s, rates, needed, serving, paid, float(1 - served.sum() / rates.sum()),
        float(paid.sum()) * window_s / 3600.0, float(needed.max()) * len(rates) * window_s / 3600.0, usd_per_h,
    )  # fmt: skip


def _ahead(needed: Ints, delay: int) -> tuple[Ints, Floats]:
    """The cheapest schedule that always serves enough: the k-th replica runs whenever k are needed, and through gaps
    that are no longer than starting anew takes. Levels do not depend on each other, so each by itself is the best.
    """
    windows = len(needed)
    serving, paid = np.zeros(windows, dtype=np.int64), np.zeros(windows)
    for level in range(1, int(needed.max()) + 1):
        on = needed >= level
        edges = np.flatnonzero(np.diff(np.concatenate([[0], on.astype(np.int64), [0]])))
        starts, stops = edges[::2], edges[1::2]
        runs: list[list[int]] = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            if runs and start - runs[-1][1] <= delay:
                runs[-1][1] = stop
            else:
                runs.append([start, stop])
        for start, stop in runs:
            serving[start:stop] += 1
            paid[max(0, start - delay) : stop] += 1
    return serving, paid


def _reactive(needed: Ints, delay: int) -> tuple[Ints, Floats]:
    """At the end of a window, ask for what it needed, or stop what it did not; new replicas serve `delay` windows
    later.
    """
    windows = len(needed)
    serving, paid = np.zeros(windows, dtype=np.int64), np.zeros(windows)
    up, coming = int(needed[0]), [0] * (windows + delay + 2)
    for w in range(windows):
        up += coming[w]
        serving[w] = up
        paid[w] = up + sum(coming[w + 1 : w + 1 + delay])
        ask = int(needed[w]) - int(paid[w])
        if ask > 0:
            coming[w + 1 + delay] += ask
        elif ask < 0:
            stop = min(up, -ask)
            up -= stop
    return serving, paid
