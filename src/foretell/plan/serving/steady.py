"""What one replica holds up in the long run, in closed form: batch, rate, TPOT and TTFT without simulating a request.

Requests come by chance, and `b` of them decode on average (less than one where prompts take most of the time). Each
waits for the iteration it falls into and for the prompts before it, as in M/D/1, or as servers that take several at
once have it; then its prompt goes in by chunks of what the token budget leaves. Once it decodes, prompts in line behind
it go first, and all that come while these do: a token of every iteration is all it gets until the line is empty. Its
TPOT is the mean of iterations with and without prompts, as many of each as that says; b and the rate go together by
Little's law. Where so many short prompts come that every iteration has some, TPOT is the mean iteration's. (Elsewhere
that would not do, of mixtures of experts least of all: the few tokens of a part of a prompt would have every expert
read.) KV cache bounds `b`. The search tries everything by this; the simulator then has the last word on the best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foretell.plan.serving.load import Load
from foretell.simulate.serving import Batch, ServingPlan
from foretell.simulate.serving.metrics import Slo

__all__ = ["LIMITS", "Iterations", "Steady", "curve", "most", "slo_text", "transfer_s"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: What keeps a batch from growing. ``gain``: a larger one serves no more requests.
LIMITS = ("tpot", "ttft", "e2e", "kv", "max_num_seqs", "gain")
_STEPS = 84  # batch sizes tried from 32 to 4,096, 6 % apart; below 32 all are
_FEWER = np.geomspace(1e-4, 0.9, 40)  # where prompts take so long that less than one sequence decodes on average
_HALVINGS = 30  # of an interval of rates
_BUSY = 0.95  # share of the time that prompts may be at work: beyond it their queue grows without end


class Iterations(Protocol):
    """What is asked of a cost model of engine iterations; `foretell.simulate.serving.iteration` has the real one."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the KV cache of a rank holds."""
        ...

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that a cached token takes on one device."""
        ...

    @property
    def weights_bytes(self) -> float:
        """Bytes of weights on one device."""
        ...

    def time_s(self, batch: Batch) -> Floats:
        """Seconds of each iteration."""
        ...

    def power_w(self, batch: Batch) -> Floats:
        """Watts of one device in each iteration."""
        ...


def slo_text(slo: Slo) -> str:
    """Limits in words.

    >>> slo_text(Slo(ttft_s=1.0, tpot_s=0.05))
    'TTFT ≤ 1,000 ms and TPOT ≤ 50 ms'
    """
    said = [f"{name.upper()} ≤ {1e3 * limit:,.6g} ms" for name, limit in slo.limits.items()]
    return " and ".join(said) or "no latency limit"


@dataclass(frozen=True, slots=True)
class Steady:
    """Steady states of one replica, columns: a group of a load each, or a batch size each.

    `batch` sequences decode in each batch of a rank (with pipeline stages, one batch for each is on its way); `rate`
    requests/s go through all ranks of the replica; `limit` is an index into `LIMITS`. Where not even one sequence
    meets the objective, `rate` is 0 and the rest describes that one.
    """

    batch: Floats
    rate: Floats
    tpot_s: Floats
    ttft_s: Floats
    iteration_s: Floats
    #: Tokens in the KV cache of a rank.
    kv_tokens: Floats
    limit: Ints


def _grid(plan: ServingPlan) -> Floats:
    """Batch sizes tried, of one of the `pp` batches that are on their way: the same for every plan, up to its own
    limit.
    """
    largest = max(1, plan.max_num_seqs // plan.pp)
    steps = np.unique(np.concatenate([_FEWER, np.arange(1.0, 33.0), np.round(np.geomspace(32, 4096, _STEPS))]))
    return np.append(steps[steps < largest], largest)


def _step(load: Load, plan: ServingPlan, b: Floats) -> Batch:
    """The mean iteration of `b` decoding sequences: the tokens they get, and the prompts that take freed places.

    Columns (groups, batches), flattened.
    """
    arrivals = b / load.output_tokens[:, None]  # new prompts with each iteration
    chunks = np.maximum(1.0, np.ceil(load.input_tokens[:, None] / plan.max_num_batched_tokens))
    ones = np.ones_like(arrivals)
    return Batch.of(
        decode_seqs=(ones * b).ravel(),
        decode_tokens=(load.context[:, None] * b).ravel(),
        prefill_seqs=(arrivals * chunks).ravel(),
        prefill_tokens=(load.input_tokens[:, None] * arrivals).ravel(),
        prefill_pairs=(load.pairs[:, None] * arrivals).ravel(),
        prefill_cached=(load.input_tokens[:, None] * (chunks - 1) / 2 * arrivals).ravel(),
        sampled=(ones * b + arrivals).ravel(),
    )


def _decode(load: Load, b: Floats) -> Batch:
    ones = np.ones((len(load), 1))
    return Batch.of(decode_seqs=(ones * b).ravel(), decode_tokens=(load.context[:, None] * b).ravel())


def _prompt(load: Load, budget: Floats, b: Floats) -> tuple[Batch, Floats]:
    """An iteration that takes as much of a prompt as the `budget` of tokens leaves beside `b` decoding sequences, and
    how many of them a prompt takes. Columns (groups, batches).
    """
    inputs = np.broadcast_to(load.input_tokens[:, None], budget.shape)
    chunks = np.ceil(inputs / budget)
    cached = inputs * (chunks - 1) / 2 / chunks  # on average over the chunks of a prompt
    return Batch.of(
        decode_seqs=np.broadcast_to(b, budget.shape).ravel(),
        decode_tokens=(load.context[:, None] * b).ravel(),
        prefill_seqs=1.0,
        prefill_tokens=(inputs / chunks).ravel(),
        prefill_pairs=(load.pairs[:, None] / chunks).ravel(),
        prefill_cached=cached.ravel(),
        sampled=(b + 1.0 / chunks).ravel(),
    ), chunks  # fmt: skip


def _queued(prompt: Floats, busy: Floats) -> Floats:
    """Seconds a prompt takes with those before it, as M/D/1 has them where prompts are at work `busy` of the time."""
    return np.asarray(prompt * (1 + busy / 2 / (1 - busy)), dtype=np.float64)


def transfer_s(iterations: Iterations, load: Load, plan: ServingPlan, link_bytes_per_s: float) -> Floats:
    """Seconds that a prompt's KV takes from a prefill to a decode replica, each device sending its part."""
    return np.asarray(load.input_tokens * iterations.kv_bytes_per_token / link_bytes_per_s, dtype=np.float64)


def curve(
    iterations: Iterations,
    plan: ServingPlan,
    load: Load,
    batches: npt.ArrayLike | None = None,
    *,
    link_bytes_per_s: float = np.inf,
) -> tuple[Steady, Floats]:
    """The steady state at each batch size, columns (groups, batches), and the batch sizes; nothing is ruled out.

    `rate` is what the batch gives; where the KV cache does not hold it, or prompts come faster than they go in, it is
    0.
    """
    b = _grid(plan) if batches is None else np.atleast_1d(np.asarray(batches, dtype=np.float64))
    shape = (len(load), len(b))
    ones = np.ones(shape)
    if plan.prefill_replicas:
        return _split(iterations, plan, load, b, link_bytes_per_s), b
    met = np.maximum(b, 1.0)  # by one that decodes
    inputs, outputs = load.input_tokens[:, None], load.output_tokens[:, None]
    budget = np.maximum(plan.max_num_batched_tokens - met, 1.0) * ones
    if not plan.chunked_prefill:  # whole prompts by themselves, between iterations that only decode
        budget = np.maximum(ones * inputs, budget)
        alone, chunks = _prompt(load, budget, np.zeros_like(b))
        prompt = each = iterations.time_s(alone).reshape(shape) * chunks
        fit, beside = ones, np.full(shape, np.inf)  # nothing is decoded beside a prompt
    else:
        one, chunks = _prompt(load, budget, met)
        beside = iterations.time_s(one).reshape(shape)
        prompt = beside * chunks
        # Short prompts go in together, each for its part of the time.
        fit = np.clip(budget / inputs, 1.0, float(plan.max_num_seqs))
        together = iterations.time_s(_prompts(load, fit, met)).reshape(shape)
        each = np.where(fit > 1.0, np.clip((together - prompt) / np.maximum(fit - 1.0, 1.0), 0.0, prompt), prompt)
    only = iterations.time_s(_decode(load, met)).reshape(shape)
    line = _Line(prompt, each, fit, only, beside, outputs)
    rate = line.rate(b)  # of one rank and one batch
    step = line.tpot_s(rate)
    if plan.chunked_prefill:
        # Where every iteration has prompts, it is always the mean one.
        mean = iterations.time_s(_step(load, plan, b)).reshape(shape)
        always = (chunks == 1.0) & (b >= outputs)
        rate = np.where(always, np.minimum(b / (outputs * mean), line.most), rate)
        step = np.where(always, mean, step)
    ttft = only / 2 + line.sojourn_s(rate)
    kv = b * plan.pp * load.context[:, None]
    held = np.maximum(kv, load.largest[:, None])  # one request at least must fit whole
    rate = np.where(held <= iterations.kv_capacity_tokens, rate, 0.0) * plan.dp * plan.pp
    limit = np.full(shape, LIMITS.index("gain"))
    return Steady(b * ones, rate, step, ttft, step, kv, limit), b


@dataclass(frozen=True, slots=True)
class _Line:
    """Prompts in line for iterations in which others decode, and what that line does to those; all (groups, batches).

    A prompt alone takes `prompt` seconds, each more of the `fit` that go in together `each`. An iteration takes `only`
    without prompts and `beside` with a part of one; a request has `outputs` tokens.
    """

    prompt: Floats
    each: Floats
    fit: Floats
    only: Floats
    beside: Floats
    outputs: Floats

    @property
    def most(self) -> Floats:
        """Prompts a second that go in at most."""
        return np.asarray(_BUSY * self.fit / (self.prompt + (self.fit - 1.0) * self.each))

    def sojourn_s(self, rate: Floats) -> Floats:
        """Seconds that a prompt waits and takes."""
        return self.prompt + _waits(rate, self.prompt, self.each, self.fit, 1)

    def tpot_s(self, rate: Floats) -> Floats:
        """Seconds of a token of a request that decodes while prompts come at `rate`.

        Its own prompt leaves others in line as often as prompts are at work, as many as came in the time that it waited
        and took. They go in first, with those that come meanwhile; after that any that comes keeps it back as well.
        """
        # Those that come in one's time go in with the next.
        joint = rate * (self.prompt - self.each) / np.maximum(1.0 - rate * self.each, 1.0 - _BUSY)
        joint = np.clip(joint, 1.0, self.fit)
        lone = (self.prompt + (joint - 1.0) * self.each) / joint
        busy = np.minimum(rate * lone, _BUSY)
        behind = rate * self.sojourn_s(rate) / np.maximum(busy, 1e-9)
        clear = lone / (1.0 - busy)  # seconds until one, and all that come meanwhile, are in
        return np.asarray(busy * self._told(rate, clear, behind) + (1.0 - busy) * self._told(rate, clear, 0.0))

    def _told(self, rate: Floats, clear: Floats, behind: Floats | float) -> Floats:
        """Seconds of a token where so many prompts are in line behind a request's own."""
        undisturbed = (self.outputs - behind * clear / self.beside) / (1.0 + rate * self.only * clear / self.beside)
        undisturbed = np.clip(undisturbed, 0.0, self.outputs)
        held = (rate * undisturbed * self.only + behind) * clear
        held = np.where(undisturbed > 0.0, held, self.outputs * self.beside)  # a token of every iteration all the same
        return np.asarray((undisturbed * self.only + held) / self.outputs)

    def rate(self, decoding: Floats) -> Floats:
        """Requests a second that so many `decoding` sequences on average come of (Little's law), no more than go in."""
        low, high = np.zeros_like(self.prompt), np.minimum(self.most, decoding / (self.outputs * self.only))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            fewer = middle * self.outputs * self.tpot_s(middle) < decoding
            low, high = np.where(fewer, middle, low), np.where(fewer, high, middle)
        return np.asarray(high)


def _split(iterations: Iterations, plan: ServingPlan, load: Load, b: Floats, link: float) -> Steady:
    """Prefill and decode replicas apart: prompts queue at the ones, decoding is undisturbed at the others.

    A request meets as many sequences in its iterations as there are on average, beside itself; where fewer prompts go
    in than `b` decoding sequences would end, fewer decode. Its first token comes from where its prompt was. Before the
    second its cache is on its way, behind others; then it waits for a place, and until an iteration ends.
    """
    shape, groups = (len(load), len(b)), (len(load), 1)
    inputs, outputs = load.input_tokens[:, None], load.output_tokens[:, None]
    servers = plan.prefill_replicas * plan.dp * plan.pp
    budget = np.full(groups, float(plan.max_num_batched_tokens))
    alone, chunks = _prompt(load, budget, np.zeros(1))
    prompt = iterations.time_s(alone).reshape(groups) * chunks
    fit = np.clip(np.floor(budget / inputs), 1.0, float(plan.max_num_seqs))
    full = iterations.time_s(_prompts(load, fit)).reshape(groups)
    each = np.where(fit > 1.0, np.clip((full - prompt) / np.maximum(fit - 1.0, 1.0), 0.0, prompt), prompt)
    most_prompts = servers * fit / (prompt + (fit - 1.0) * each)

    lanes = plan.decode_replicas * plan.dp * plan.pp
    places = float(max(1, plan.max_num_seqs // plan.pp))
    room = np.minimum(places, iterations.kv_capacity_tokens / plan.pp / load.context[:, None])
    batch, rate, step = b * np.ones(shape), np.zeros(shape), np.zeros(shape)
    for _ in range(4):  # settles at once, but where prompts are the limit
        met = np.minimum(batch + 1.0, np.maximum(batch, places))
        step = iterations.time_s(_decode(load, met)).reshape(shape)
        rate = np.minimum(b / (outputs * step) * lanes, _BUSY * most_prompts)
        batch = np.minimum(b, rate * outputs * step / lanes)
    ttft = prompt + _waits(rate, prompt, each, fit, servers)
    send = transfer_s(iterations, load, plan, link)[:, None]
    sent = _queued(send, np.minimum(rate / plan.prefill_replicas * send, _BUSY))
    answer = outputs * step
    place = answer * _waited(np.minimum(batch / np.maximum(room, 1.0), _BUSY), np.maximum(room, 1.0))
    tpot = step + (sent + place + step / 2.0) / np.maximum(outputs - 1.0, 1.0)
    kv = batch * plan.pp * load.context[:, None]
    held = np.maximum(kv, load.largest[:, None])
    rate = np.where(held <= iterations.kv_capacity_tokens, rate, 0.0)
    return Steady(batch, rate, tpot, ttft, step, kv, np.full(shape, LIMITS.index("gain")))


def _prompts(load: Load, count: Floats, decoding: Floats | float = 0.0) -> Batch:
    """An iteration of `count` whole prompts, (groups, batches), beside sequences that are `decoding`."""
    beside = np.broadcast_to(decoding, count.shape)
    return Batch.of(
        decode_seqs=beside.ravel(),
        decode_tokens=(load.context[:, None] * beside).ravel(),
        prefill_seqs=count.ravel(),
        prefill_tokens=(load.input_tokens[:, None] * count).ravel(),
        prefill_pairs=(load.pairs[:, None] * count).ravel(),
    )


def _waits(rate: Floats, prompt: Floats, each: Floats, fit: Floats, servers: int) -> Floats:
    """Seconds that prompts which come at `rate` wait before `servers` that take `prompt` for one alone.

    Where but one at a time fits, as M/D/1 has it. Else a server takes all that wait at once, and each takes `each` of
    the time beside what they share: a closed bound of what they wait then, and close to it, is known (Inoue, Queueing
    analysis of GPU-based inference servers with dynamic batching, Performance Evaluation 147, 2021). The exact mean
    latency, from the chain of batch sizes, is never above it and at most 8 % below, from 10 to 95 % of the load.
    Several servers keep prompts waiting less than one by the ratio of M/D/c to M/D/1.
    """
    lone = rate / servers
    busy = np.minimum(lone * each, _BUSY)
    shared = prompt - each
    first = prompt / (2.0 * (1.0 - busy)) * (1.0 + 2.0 * lone * shared + (1.0 - lone * shared) / (1.0 + busy))
    second = 1.5 * shared / (1.0 - busy) + each / 2.0 * (busy + 2.0) / (1.0 - busy**2)
    together = np.maximum(np.minimum(first, second) - prompt, 0.0)
    used = np.clip(lone * prompt, 1e-9, _BUSY)
    one = np.where(fit > 1.0, together, _queued(prompt, used) - prompt)
    return np.asarray(one * _waited(used, servers) / _waited(used, 1))


def _waited(busy: Floats, servers: npt.ArrayLike) -> Floats:
    """What is waited before `servers` that are `busy`, in times of service, by M/M/c as Sakasegawa has it in closed
    form (Annals of the Institute of Statistical Mathematics 29, 1977); exact for one server.

    >>> _waited(np.array([0.5]), 1).tolist(), _waited(np.array([0.8]), 4).round(3).tolist()  # 0.746 by Erlang's C
    ([1.0], [0.772])
    """
    c = np.asarray(servers, dtype=np.float64)
    return np.asarray(busy ** (np.sqrt(2.0 * (c + 1.0)) - 1.0) / (c * (1.0 - busy)))


def most(
    iterations: Iterations,
    plan: ServingPlan,
    load: Load,
    slo: Slo,
    *,
    link_bytes_per_s: float = np.inf,
) -> Steady:
    """The most requests/s that a replica serves of each group within `slo`, columns (groups,), and what stops it."""
    found, b = curve(iterations, plan, load, link_bytes_per_s=link_bytes_per_s)
    held = found.kv_tokens <= iterations.kv_capacity_tokens
    times = {"tpot": found.tpot_s, "ttft": found.ttft_s}
    times["e2e"] = found.ttft_s + found.tpot_s * (load.output_tokens[:, None] - 1.0)
    limits_s = slo.limits
    rules = {name: time_s <= limits_s.get(name, np.inf) for name, time_s in times.items()}
    rules["kv"] = held
    good = rules["tpot"] & rules["ttft"] & rules["e2e"] & held & (found.rate > 0)
    best = np.where(good, found.rate, -1.0).argmax(axis=1)
    rows = np.arange(len(load))
    served = good[rows, best]
    limits = np.full(len(load), LIMITS.index("max_num_seqs"))
    for row in rows:
        after = best[row] + 1 if served[row] else best[row]
        if after < len(b):
            broken = [name for name, kept in rules.items() if not kept[row, after]]
            if not held[row, after] or load.largest[row] > iterations.kv_capacity_tokens:
                broken = ["kv", *broken]
            limits[row] = LIMITS.index(broken[0] if broken else "gain")
    at = (rows, best)
    rate = np.where(served, found.rate[at], 0.0)
    return Steady(
        found.batch[at], rate, found.tpot_s[at], found.ttft_s[at], found.iteration_s[at], found.kv_tokens[at], limits
    )
