"""The smallest batch, and KV memory, that loses no throughput worth keeping; replicas in the memory that is freed.

Throughput of decoding flattens with the batch, as attention reads more cache for each sequence that joins. The advisor
(BCA) takes the smallest batch within a share of the best throughput under a limit on the time between tokens, caps the
KV cache to what it holds, and puts more replicas beside the first on the same GPU. Replicas on one GPU share its
bandwidth and arithmetic, but not their hosts: while one waits for its host, another computes. They are customers of a
closed network with one queue, the device, and a delay, the host; its mean value analysis (Reiser and Lavenberg, Journal
of the ACM, 1980) says how long an iteration of each then takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import InfeasibleError, InputError
from foretell.plan.serving.load import Load
from foretell.plan.serving.steady import Iterations, curve
from foretell.simulate.serving import Batch, ServingPlan
from foretell.units import format_time

__all__ = ["Advice", "advise", "knee", "together_s"]

Floats = npt.NDArray[np.float64]

LOSS = 0.05  # share of the best throughput that may be given up
_WORTH = 0.05  # what a further replica must add


@dataclass(frozen=True, slots=True)
class Advice:
    """What the advisor found for one replica on its device(s); a replica is a copy of weights, cache and process."""

    batch: int
    largest_batch: int
    #: Requests/s of one replica at `batch`, at `largest_batch` and at its best.
    rate: float
    largest_rate: float
    best_rate: float
    #: Seconds between tokens of one replica at `batch` and at `largest_batch`.
    tpot_s: float
    largest_tpot_s: float
    kv_bytes: float
    budget_bytes: float
    #: Replicas with the capped cache that fit on the device, and those that are worth it.
    fitting: int
    replicas: int
    replicated_rate: float
    replicated_tpot_s: float

    @property
    def saved(self) -> float:
        """The share of the KV cache's memory that is freed."""
        return 1.0 - self.kv_bytes / self.budget_bytes

    @property
    def gain(self) -> float:
        """What replicas add to the throughput of one replica with all the memory, as a share of it."""
        return self.replicated_rate / self.largest_rate - 1.0


def knee(batch: npt.ArrayLike, rate: npt.ArrayLike, tpot_s: npt.ArrayLike, loss: float, tpot_limit_s: float) -> int:
    """The index of the smallest batch within `loss` of the best rate that the limit on TPOT allows; -1: none is
    allowed.

    >>> knee([1, 2, 4, 8], [10.0, 18.0, 24.0, 24.5], [1.0, 1.1, 1.6, 3.2], 0.05, 2.0)
    2
    """
    b, rates, times = (np.asarray(c, dtype=np.float64) for c in (batch, rate, tpot_s))
    allowed = (times <= tpot_limit_s) & (rates > 0)
    if not allowed.any():
        return -1
    good = allowed & (rates >= (1.0 - loss) * rates[allowed].max())
    rows = np.flatnonzero(good)
    return int(rows[np.argmin(b[rows])])


def together_s(host_s: float, device_s: float, count: int) -> float:
    """Seconds of an iteration of each of `count` replicas on one device, each `device_s` on it and `host_s` off it.

    >>> together_s(0.006, 0.008, 1)
    0.014
    >>> round(1e3 * together_s(0.0, 0.008, 4), 6)  # with no host to wait for, they only share
    32.0
    """
    waiting = 0.0  # replicas at the device, as one that comes finds them
    seconds = device_s
    for number in range(1, count + 1):
        seconds = device_s * (1.0 + waiting)
        waiting = number * seconds / (host_s + seconds)
    return host_s + seconds


def advise(
    iterations: Iterations,
    plan: ServingPlan,
    load: Load,
    *,
    loss: float = LOSS,
    tpot_s: float = np.inf,
    host_s: Callable[[Batch], Floats] | None = None,
    reserve_bytes: float = 0.0,
    most_replicas: int = 8,
) -> Advice:
    """Batch, KV memory and replicas for a load of one group (its rate does not matter: the server is kept full).

    `host_s` is the part of an iteration in which the device waits (none by default: replicas then gain nothing);
    `reserve_bytes` what each further replica takes besides weights and cache (context, activations).
    Raises InputError for a `loss` that is no share, InfeasibleError where not even one sequence keeps to `tpot_s`.
    """
    if not 0.0 <= loss < 1.0:
        raise InputError(f"a loss of {loss:g} is no share of the throughput", repair="give 0 to 1, e.g. 0.05")
    b = np.unique(np.round(np.geomspace(1, plan.max_num_seqs, 160)))
    all_, _ = curve(iterations, plan, load.take([0]), b)
    rates, times = all_.rate[0], all_.tpot_s[0]
    fits = np.flatnonzero(rates > 0)
    at = knee(b, rates, times, loss, tpot_s)
    if at < 0:
        least = format_time(float(times[0]))
        raise InfeasibleError(
            f"one sequence alone gets a token every {least}, over the limit of {format_time(tpot_s)}"
            if len(fits) else "the KV cache does not hold one request",
            "loosen the limit, or take a faster GPU or more of them",
        )  # fmt: skip
    last = int(fits[-1])
    token = iterations.kv_bytes_per_token
    budget = iterations.kv_capacity_tokens * token
    kv = min(float(np.maximum(b[at] * load.context[0], load.largest[0]) * token), budget)
    each = iterations.weights_bytes + reserve_bytes + kv
    fitting = 1 + int(max(0.0, budget - kv) // each)
    waits = 0.0
    if host_s is not None:
        waits = float(host_s(_mean_step(load, float(b[at])))[0])
    rate, step = float(rates[at]), float(times[at])
    busy = max(step - waits, 0.0)
    best, together = 1, (rate, step)
    for count in range(2, min(fitting, most_replicas) + 1):
        all_s = together_s(waits, busy, count)
        found = count * rate * step / all_s
        if all_s > tpot_s or found < together[0] * (1.0 + _WORTH):
            break
        best, together = count, (found, all_s)
    return Advice(
        int(b[at]), int(b[last]), rate, float(rates[last]), float(rates[times <= tpot_s].max()), step,
        float(times[last]), kv, budget, fitting, best, *together,
    )  # fmt: skip


def _mean_step(load: Load, b: float) -> Batch:
    arrivals = b / load.output_tokens[0]
    return Batch.of(
        decode_seqs=b,
        decode_tokens=b * load.context[0],
        prefill_seqs=arrivals,
        prefill_tokens=arrivals * load.input_tokens[0],
        prefill_pairs=arrivals * load.pairs[0],
        sampled=b + arrivals,
    )
