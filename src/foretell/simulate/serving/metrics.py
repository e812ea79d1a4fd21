"""What users and owners see of a simulated service: latencies, throughput, attainment, memory, energy, cost, and why.

TTFT is from arrival to the first token; TPOT the mean time of the output tokens after the first; ITL the time between
two tokens of a request that follow each other; E2E from arrival to the last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError, unknown
from foretell.simulate.serving.batch import Batch
from foretell.simulate.serving.engine.served import Runs, Served
from foretell.simulate.serving.given import instance, number
from foretell.simulate.serving.iteration import BOUNDS, Iterations
from foretell.simulate.serving.plan import ServingPlan
from foretell.units import parse_time

Floats = npt.NDArray[np.float64]

__all__ = [
    "LATENCIES", "Costed", "Metrics", "Series", "Slo", "gaps", "latencies", "measure", "parse_slo", "percentile",
    "series",
]  # fmt: skip

#: Latencies by name, as users are told them.
LATENCIES = MappingProxyType({
    "ttft": "time to the first token", "tpot": "time per output token after the first",
    "itl": "time between two tokens", "e2e": "arrival to last token",
})  # fmt: skip
#: Runs costed at once.
_CHUNK = 100_000
#: Share of an iteration's tokens from which on they count as used up: chunks are cut to whole blocks.
_FULL = 0.98


class Costed(Protocol):
    """What costs iterations, for what limits them and what they draw: `foretell.simulate.serving.Iterations`."""

    def bound(self, batch: Batch, /) -> Sequence[str]:
        """What limits each iteration."""

    def power_w(self, batch: Batch, /) -> Floats:
        """Watts of one device in each iteration."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request has to keep, seconds; None: no such limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for column in fields(self):
            if getattr(self, column.name) is not None:
                number(getattr(self, column.name), column.name, "limits of a request")

    @property
    def limits(self) -> dict[str, float]:
        """The limits there are, by latency."""
        given = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return {name: limit for name, limit in given.items() if limit is not None}


def parse_slo(text: str) -> Slo:
    """Limits such as ``ttft=500ms,tpot=50ms``. Raises InputError, UnknownNameError.

    >>> parse_slo("ttft=500ms,tpot=50ms").limits
    {'ttft': 0.5, 'tpot': 0.05}
    """
    limits: dict[str, float] = {}
    instance(text, str, "the limits", "--slo", "a text, e.g. ttft=500ms,tpot=50ms")
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise InputError(f"{part.strip()[:40]!r} is no limit", "--slo", "write e.g. ttft=500ms,tpot=50ms")
        if f"{name}_s" not in Slo.__dataclass_fields__:
            raise unknown("latency to limit", name, [f.name.removesuffix("_s") for f in fields(Slo)])
        if name in limits:
            raise InputError(f"{name} is given twice", "--slo")
        limits[name] = parse_time(value, "--slo")
    return Slo(**{f"{name}_s": limit for name, limit in limits.items()})


def latencies(served: Served) -> dict[str, Floats]:
    """``ttft``, ``tpot`` and ``e2e`` of each request in seconds, (requests,).

    NaN where refused, and TPOT of requests of one token.
    """
    first, last = served.first_token_s, served.finished_s
    after = served.output_tokens - 1.0
    tpot = np.where(after > 0, (last - first) / np.maximum(after, 1.0), np.nan)
    return {"ttft": first - served.arrival_s, "tpot": tpot, "e2e": last - served.arrival_s}


def gaps(served: Served, since_s: float = 0.0, until_s: float = math.inf) -> tuple[Floats, Floats]:
    """Times between two tokens of a request, and how often each occurs, of iterations that end in a stretch of time.

    Iterations of a run count with their mean. A sequence that iterations without it delayed (prompts that run alone)
    waited from the end of the last one with it; one whose prompt ended just before, from the end of that; one that was
    preempted or sent elsewhere, from its last token before that.
    """
    runs = served.runs
    order = np.lexsort((runs.start_s, runs.rank, runs.replica))
    start, end, each = runs.start_s[order], runs.end_s[order], runs.duration_s[order]
    many = runs.iterations[order].astype(np.float64)
    # The rows of a static batch stay when their answers have ended.
    seqs = np.minimum(runs.decode_seqs, runs.running)[order].astype(np.float64)
    here = seqs - runs.late[order]  # the gaps of the others are among the breaks
    lane = runs.replica[order].astype(np.int64) * (int(runs.rank.max(initial=0)) + 1) + runs.rank[order]
    decodes = seqs > 0
    rows = np.arange(len(order))
    last = np.maximum.accumulate(np.where(decodes, rows, -1))
    before = np.concatenate([[-1], last[:-1]])[: len(order)]
    pause = (np.diff(lane, prepend=-1) != 0) | (start > np.concatenate([[-np.inf], end[:-1]])[: len(order)] + 1e-9)
    pauses = np.cumsum(pause)
    known = (before >= 0) & (pauses[np.maximum(before, 0)] == pauses)
    # Prompts that ended in an iteration without decoding just before.
    ended = np.concatenate([[0.0], np.where(decodes, 0.0, runs.sampled[order])[:-1]])[: len(order)]
    new = np.minimum(np.where(known, ended, here), here)
    waited = np.where(known, start - end[np.maximum(before, 0)], 0.0)
    inside = decodes & (end > since_s) & (end <= until_s)
    values = np.concatenate([each + np.maximum(waited, 0.0), each, each])[np.tile(inside, 3)]
    weights = np.concatenate([here - new, new, (many - 1.0) * seqs])[np.tile(inside, 3)]
    breaks = served.breaks_s[(served.breaks_s[:, 1] > since_s) & (served.breaks_s[:, 1] <= until_s)]
    values = np.concatenate([values, breaks[:, 1] - breaks[:, 0]])
    weights = np.concatenate([weights, np.ones(len(breaks))])
    return values[weights > 0], weights[weights > 0]


def percentile(values: Floats, q: float | Sequence[float], weights: Floats | None = None) -> Any:
    """Percentiles (0 to 100) of the finite values, interpolated linearly; NaN where there is none.

    With whole `weights` a value counts so many times.

    >>> percentile(np.array([1.0, 2.0]), 50), percentile(np.array([1.0, 2.0]), 50, np.array([1.0, 3.0]))
    (np.float64(1.5), np.float64(2.0))
    """
    kept = np.isfinite(values)
    values = values[kept]
    if not len(values):
        return np.full(np.shape(q), np.nan)[()]
    if weights is None:
        return np.percentile(values, q)
    order = np.argsort(values, kind="stable")
    values, upto = values[order], np.cumsum(weights[kept][order])
    at = np.asarray(q, dtype=np.float64) / 100.0 * (upto[-1] - 1.0)
    low = np.minimum(np.searchsorted(upto, np.floor(at), side="right"), len(values) - 1)
    high = np.minimum(np.searchsorted(upto, np.floor(at) + 1.0, side="right"), len(values) - 1)
    part = at - np.floor(at)
    return (values[low] * (1.0 - part) + values[high] * part)[()]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of a service from `since_s` until `until_s`; None where something is not known.

    `latency_s` has for each of `LATENCIES` the mean, the extremes and the wanted percentiles (``p50``, …), of requests
    that arrived in that time. Rates are a second of that time. `bound` are shares of the iterations' time by what
    limits them, `queue` shares of the iterations' time in which requests waited, by what kept them from running.
    `waiting` are requests that have come, are not done, and are in no iteration: in line, or on the way to where they
    are decoded. `attainment` is the share of requests that keep all limits, refused ones included; `goodput_per_s` how
    many do.
    """

    since_s: float
    until_s: float
    requests: int
    finished: int
    refused: Mapping[str, int]
    latency_s: Mapping[str, Mapping[str, float]]
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_device: float
    attainment: float | None
    attainment_by: Mapping[str, float]
    goodput_per_s: float | None
    running: float
    waiting: float
    busy: float
    kv_mean: float
    kv_peak: float
    preemptions: int
    cached_share: float
    bound: Mapping[str, float]
    queue: Mapping[str, float]
    energy_j: float | None
    power_w: float | None
    cost_usd: float | None
    output_tokens: float
    total_tokens: float

    @property
    def duration_s(self) -> float:
        """Seconds that the figures are about."""
        return self.until_s - self.since_s

    @property
    def energy_per_output_token_j(self) -> float | None:
        """Joules of all devices for each output token."""
        return None if self.energy_j is None or not self.output_tokens else self.energy_j / self.output_tokens

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """What a million output tokens cost, their prompts included."""
        return None if self.cost_usd is None or not self.output_tokens else 1e6 * self.cost_usd / self.output_tokens

    @property
    def usd_per_million_tokens(self) -> float | None:
        """What a million tokens cost, input and output alike."""
        return None if self.cost_usd is None or not self.total_tokens else 1e6 * self.cost_usd / self.total_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        names = [column.name for column in fields(self)]
        plain = {name: getattr(self, name) for name in names}
        for name in ("refused", "bound", "queue", "attainment_by"):
            plain[name] = dict(plain[name])
        plain["latency_s"] = {name: dict(values) for name, values in self.latency_s.items()}
        for name in ("duration_s", "energy_per_output_token_j", "usd_per_million_output_tokens",
                     "usd_per_million_tokens"):  # fmt: skip
            plain[name] = getattr(self, name)
        return plain


def measure(
    served: Served,
    plan: ServingPlan,
    *,
    costed: Costed | None = None,
    slo: Slo | None = None,
    percentiles: Sequence[float] = (50, 90, 95, 99),
    warm_up_s: float = 0.0,
    cool_down_s: float = 0.0,
    price_usd_per_h: float | None = None,
    idle_w: float = 0.0,
) -> Metrics:
    """The figures of `served`, without the first `warm_up_s` and the last `cool_down_s`.

    `price_usd_per_h` is that of one device, `idle_w` what one draws while it does nothing. Without `costed` what limits
    iterations and their energy stay unknown. Raises InputError where no time or no request is left.
    """
    number(warm_up_s, "warm_up_s", "measure")
    number(cool_down_s, "cool_down_s", "measure")
    for q in percentiles:
        number(q, "a percentile", "measure", most=100.0)
    if slo is not None:
        instance(slo, Slo, "slo", "measure", "Slo(ttft_s=…), or parse_slo(text)")
    ok = served.served
    first_s = float(served.arrival_s.min()) if len(served) else 0.0
    last_s = max(served.end_s, float(served.arrival_s.max(initial=0.0)))
    since, until = first_s + warm_up_s, last_s - cool_down_s
    mine = (served.arrival_s >= since) & (served.arrival_s <= until)
    if not until > since or not mine.any():
        whole = f"{last_s - first_s:.3g} s"
        raise InputError(f"nothing is left of {whole}", "--warm-up, --cool-down", "give less of them")
    times = latencies(served)
    values, weights = gaps(served, since, until)
    chosen = ok & mine
    table = {name: _summary(times[name][chosen], percentiles) for name in ("ttft", "tpot")}
    table["itl"] = _summary(values, percentiles, weights)
    table["e2e"] = _summary(times["e2e"][chosen], percentiles)
    duration = until - since
    inputs, outputs, finished = _done(served, since, until)
    attained, by = _attained(times, chosen, int(mine.sum()), slo)
    runs = served.runs
    present_s = _present_s(served, np.array((since, until)))
    inside = np.clip(np.minimum(runs.end_s, until) - np.maximum(runs.start_s, since), 0.0, None)
    # A pipeline's batches have ranks of their own: together they keep its stages' devices at work.
    ranks = plan.dp * plan.pp * max(len(served.kv_capacity_blocks), 1)
    used = _kv_share(served)
    energy, bound = _costs(runs, plan.dp, inside, costed)
    if energy is not None:
        idle_s = max(0.0, ranks * duration - float(inside.sum()))
        energy = (energy + idle_w * idle_s) * plan.tp
    running = float(inside @ runs.running) / duration
    return Metrics(
        since_s=since, until_s=until,
        requests=int(mine.sum()), finished=int((ok & (served.finished_s > since) & (served.finished_s <= until)).sum()),
        refused=_refused(served, mine),
        latency_s={name: table[name] for name in LATENCIES},
        requests_per_s=finished / duration,
        input_tokens_per_s=inputs / duration,
        output_tokens_per_s=outputs / duration,
        output_tokens_per_s_per_device=outputs / duration / plan.devices,
        attainment=attained,
        attainment_by=by,
        goodput_per_s=None if attained is None else attained * int(mine.sum()) / duration,
        running=running,
        waiting=float(_above(np.diff(present_s) / duration - running)[0]),
        busy=min(1.0, float(inside.sum()) / (ranks * duration)),  # sums of many iterations are not exact
        kv_mean=float(inside @ used) / (ranks * duration),
        kv_peak=float(used[inside > 0].max(initial=0.0)),
        preemptions=int(served.preemptions[chosen].sum()),
        cached_share=float(served.cached_tokens[chosen].sum() / max(1, int(served.input_tokens[chosen].sum()))),
        bound=bound,
        queue=_queue(served, plan, inside),
        energy_j=energy,
        power_w=None if energy is None else energy / duration / plan.devices,
        cost_usd=None if price_usd_per_h is None else price_usd_per_h * plan.devices * duration / 3600.0,
        output_tokens=outputs,
        total_tokens=inputs + outputs,
    )  # fmt: skip


def _summary(values: Floats, percentiles: Sequence[float], weights: Floats | None = None) -> dict[str, float]:
    kept = np.isfinite(values)
    some = bool(kept.any())
    mean = float(np.average(values[kept], weights=None if weights is None else weights[kept])) if some else math.nan
    found = {"mean": mean, "min": float(values[kept].min()) if some else math.nan}
    found |= {f"p{q:g}": float(percentile(values, q, weights)) for q in percentiles}
    return found | {"max": float(values[kept].max()) if some else math.nan}


def _done(served: Served, since: float, until: float) -> tuple[float, float, float]:
    """Input tokens, output tokens and requests done in a stretch of time: prompts at their first token, answers as
    they grow."""
    ok = served.served
    first, last = served.first_token_s[ok], served.finished_s[ok]
    prompt = (first > since) & (first <= until)
    length = np.maximum(last - first, 1e-12)
    part = np.clip(np.minimum(last, until) - np.maximum(first, since), 0.0, None) / length
    outputs = served.output_tokens[ok].astype(np.float64)
    inputs = served.input_tokens[ok].astype(np.float64)
    finished = float(((last > since) & (last <= until)).sum())
    return float(inputs @ prompt), float((outputs - 1.0) @ part + prompt.sum()), finished


def _attained(
    times: Mapping[str, Floats], chosen: npt.NDArray[np.bool_], count: int, slo: Slo | None
) -> tuple[float | None, dict[str, float]]:
    if slo is None or not slo.limits:
        return None, {}
    all_kept = chosen.copy()
    by = {}
    for name, limit in slo.limits.items():
        # A request of one token has no TPOT, and keeps any limit of it.
        kept = chosen & ~(times[name] > limit)
        by[name] = float(kept.sum()) / count
        all_kept &= kept
    return float(all_kept.sum()) / count, by


def _refused(served: Served, mine: npt.NDArray[np.bool_]) -> dict[str, int]:
    counts = np.bincount(served.refused[mine], minlength=len(served.reasons))
    return {why: int(n) for why, n in zip(served.reasons[1:], counts[1:], strict=True) if n}


def _present_s(served: Served, at_s: Floats) -> Floats:
    """Seconds that requests have been there by these times, all together: from arrival to the last token."""
    ok = served.served
    begin = float(at_s[0])

    def since(times: Floats) -> Floats:
        times = np.sort(times[ok]) - begin
        upto = np.concatenate([[0.0], np.cumsum(times)])
        count = np.searchsorted(times, at_s - begin)
        return np.asarray((at_s - begin) * count - upto[count])

    return since(served.arrival_s) - since(served.finished_s)


def _above(count: Floats) -> Floats:
    """What is more than rounding, else 0."""
    return np.where(count > 1e-9, count, 0.0)


def _kv_share(served: Served) -> Floats:
    """Share of its rank's KV blocks that each run holds, (runs,)."""
    capacity = np.array(served.kv_capacity_blocks or (1,), dtype=np.float64)
    share: Floats = served.runs.kv_blocks / np.maximum(capacity[served.runs.replica], 1.0)
    return share


def _costs(runs: Runs, dp: int, inside: Floats, costed: Costed | None) -> tuple[float | None, dict[str, float]]:
    """Joules of a device of each rank while iterations run, and shares of their time by what limits them."""
    if costed is None:
        return None, {}
    energy: float | None = 0.0
    shares: dict[str, float] = {}
    batch = runs.batch(dp)
    rows = np.flatnonzero(inside > 0.0)
    for begin in range(0, len(rows), _CHUNK):
        part = rows[begin : begin + _CHUNK]
        some = batch.take(part)
        for name, seconds in _bound_s(costed, some, inside[part]).items():
            shares[name] = shares.get(name, 0.0) + seconds
        if energy is not None:
            try:
                energy += float(inside[part] @ costed.power_w(some))
            except InputError:  # the device's power is unknown
                energy = None
    total = sum(shares.values())
    return energy, {name: shares[name] / total for name in sorted(shares, key=lambda one: -shares[one])}


def _bound_s(costed: Costed, batch: Batch, seconds: Floats) -> dict[str, float]:
    """Seconds of iterations by what limits them: parts of each where they are known, else each by its largest."""
    if isinstance(costed, Iterations):
        found = costed.bound_shares(batch) @ seconds
        return {name: float(value) for name, value in zip(BOUNDS, found, strict=True) if value > 0.0}
    names, codes = np.unique(np.asarray(costed.bound(batch)), return_inverse=True)
    return dict(zip(names.tolist(), np.bincount(codes, weights=seconds).tolist(), strict=True))


def _queue(served: Served, plan: ServingPlan, inside: Floats) -> dict[str, float]:
    """Shares of the iterations' time in which requests waited, by what kept them from running.

    Seats and tokens of an iteration are counted; where both are left, blocks of the cache lack for the first in line.
    """
    runs = served.runs
    total = float(inside.sum())
    waits = runs.waiting > 0
    seats = waits & (runs.running >= -(-plan.max_num_seqs // plan.pp))
    tokens = runs.decode_seqs + runs.prefill_tokens
    full = tokens >= _FULL * plan.max_num_batched_tokens
    if not plan.chunked_prefill:  # the next prompt does not fit beside those of this iteration
        full |= runs.prefill_seqs > 0
    full &= waits & ~seats & (plan.engine != "static")
    rest = "the batch to end" if plan.engine == "static" else "KV cache"
    shares = {
        "max-num-seqs": float(inside @ seats), "token budget": float(inside @ full),
        rest: float(inside @ (waits & ~seats & ~full)),
    }  # fmt: skip
    return {name: seconds / total for name, seconds in shares.items() if seconds > 0 and total > 0}


@dataclass(frozen=True, slots=True)
class Series:
    """Means over equal stretches of time, columns (stretches,); `edge_s` has one more.

    Sequences running and waiting (as in `Metrics`) of all ranks together, the share of KV blocks held, output tokens a
    second.
    """

    edge_s: Floats
    running: Floats
    waiting: Floats
    kv: Floats
    output_tokens_per_s: Floats


def series(served: Served, stretches: int = 240) -> Series:
    """How the service went over its time."""
    begin = min(float(served.arrival_s.min()) if len(served) else 0.0, served.end_s)
    edges = np.linspace(begin, max(served.end_s, begin + 1e-9), stretches + 1)
    runs = served.runs
    lanes = runs.replica.astype(np.int64) * (int(runs.rank.max(initial=0)) + 1) + runs.rank
    used = _kv_share(served)
    sums = {"running": np.zeros(stretches), "kv": np.zeros(stretches)}
    tokens = np.zeros(stretches)
    sampled = np.minimum(runs.sampled, runs.running) * runs.iterations / np.maximum(runs.end_s - runs.start_s, 1e-12)
    names = np.unique(lanes)
    for lane in names:
        mine = lanes == lane
        for name, column in (("running", runs.running), ("kv", used)):
            sums[name] += _mean(edges, runs.start_s[mine], runs.end_s[mine], column[mine].astype(np.float64))
        tokens += _mean(edges, runs.start_s[mine], runs.end_s[mine], sampled[mine])
    waiting = _above(np.diff(_present_s(served, edges)) / np.diff(edges) - sums["running"])
    return Series(edges, sums["running"], waiting, sums["kv"] / max(1, len(names)), tokens)


def _mean(edges: Floats, start: Floats, end: Floats, value: Floats) -> Floats:
    """Means between `edges` of a quantity that is `value` from `start` to `end`, in order, and 0 between."""
    times = np.stack([start, end], axis=1).reshape(-1)
    steps = np.stack([np.zeros(len(start)), value * (end - start)], axis=1).reshape(-1)
    upto = np.interp(edges, times, np.cumsum(steps), left=0.0)
    found: Floats = np.diff(upto) / np.diff(edges)
    return found
