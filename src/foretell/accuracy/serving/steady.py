"""What users see of a steady load, in closed form: no event is simulated, each row takes a few iterations' cost.

Decoding sequences of a rank share its iterations. Let ``d`` of them run, each with its mean context, and ``t`` be the
time of an iteration that only decodes. A prompt adds ``e`` to the iterations it is processed in, chunk by chunk beside
the decoding sequences. Over the ``osl − 1`` iterations of a request each of the others brings one prompt, if requests
come and go evenly, so that

    TPOT = t + (d − 1) · e / (osl − 1)

Requests of one length end together, and so come together. Of a group whose prompts fit into one iteration none falls
between another's tokens. SGLang processes all waiting prompts before it decodes on, so that they stay in step for good:
between a request's first token and its others only those prompts fall that are processed after its own, half of them
on average.

A request waits for its own prompt, t + e, and for half a prompt before it where one is on its way (their share of
the time is ``ρ``): TTFT = (t + e) · (1 + ρ / 2). Where ``n`` come together, as all do at the start, their prompts wait
for one another, ``g`` at a time in one iteration: TTFT = t + (n + g) / 2 · e. Of ``n`` requests in a closed loop ``d``
decode at a time, the others' prompts being processed or waiting for room in the cache:

    d = min(n · answer / (TTFT + answer), sequences allowed, cached tokens / context),  answer = (osl − 1) · TPOT

Requests that are all there at the start run in waves as large as cache and settings allow, each prompt processed once
and each wave decoding ``osl`` times: tokens per second = requests · osl / Σ waves.

With pipeline parallelism the `pp` batches on their way share the sequences, and an iteration takes its whole way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foretell.accuracy.serving.row import Row
from foretell.errors import ForetellError
from foretell.simulate.serving import Batch

__all__ = ["Costs", "Steady", "predict", "steady"]

Floats = npt.NDArray[np.float64]

#: Requests that a closed loop was measured over, as a multiple of those under way (InferenceMAX's ``--num-prompts``).
ROUNDS = 10.0


class Costs(Protocol):
    """What is asked of a model of iterations."""

    def time_s(self, batch: Batch) -> Floats:
        """Seconds of each iteration."""
        ...

    def power_w(self, batch: Batch) -> Floats:
        """Watts of one device in each iteration."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Cached tokens that one rank holds."""
        ...


@dataclass(frozen=True, slots=True)
class Steady:
    """What a load comes to, means over its requests: `running` sequences of one rank decode, all devices take
    `power_w`.

    `decode_s` is what an iteration that only decodes takes, `prompt_s` what a prompt adds.
    """

    ttft_s: float
    tpot_s: float
    itl_s: float
    tokens_per_s: float
    power_w: float
    running: float
    decode_s: float
    prompt_s: float


def steady(row: Row, iterations: Costs) -> Steady:
    """What `iterations` predict for a row's load."""
    if row.load == "requests":
        return _waves(row, iterations)
    capacity = _capacity(row, iterations)
    if row.load == "batch":
        running = row.per_rank
        decode = _decode(row, iterations, running)
        prompt = _prompt(row, iterations, running)
        tpot = decode + (_others(running) * prompt / max(row.mean_osl - 1.0, 1.0) if row.itl_s else 0.0)
        alone = _prompt(row, iterations, 0.0, together=running)
        return _made(row, iterations, alone, tpot, decode, running, prompt)
    requests = min(row.per_rank, float(row.plan.max_num_seqs))
    running, in_step = min(requests, capacity), _in_step(row, requests)
    for _ in range(40):
        decode = _decode(row, iterations, running)
        prompt = _prompt(row, iterations, running)
        tpot = decode + _between(row, running) * prompt / max(row.mean_osl - 1.0, 1.0)
        busy = min(1.0, running * prompt / (tpot * max(row.mean_osl - 1.0, 1.0)))
        alone = (decode + prompt) * (1.0 + busy / 2.0)
        group = min(running, max(1.0, row.plan.max_num_batched_tokens / row.isl))
        ttft = alone + in_step * (decode + prompt * (running + group) / 2.0 - alone)
        answer = (row.mean_osl - 1.0) * tpot
        settled = min(requests * answer / (ttft + answer) if answer else requests, capacity)
        settled += in_step * (min(requests, capacity) - settled)
        if abs(settled - running) < 1e-3 * running:
            break
        running = (running + max(settled, 1.0)) / 2.0
    if running >= capacity and row.per_rank > running:  # the others wait for room
        ttft += (row.per_rank / running - 1.0) * (ttft + answer)
    # What a request takes outside the engine, where it is known.
    outside = float(getattr(iterations, "request_s", 0.0))
    return _made(row, iterations, ttft + outside, tpot, decode, running, prompt)


def predict(rows: Sequence[Row], iterations_of: Callable[[Row], Costs]) -> list[Steady | ForetellError]:
    """Each row's load; the models of one plan on one machine are made once. What cannot be predicted is its error."""
    made: dict[tuple[object, ...], Costs | ForetellError] = {}
    found: list[Steady | ForetellError] = []
    for row in rows:
        alike = replace(row, plan=row.plan.replace(max_num_seqs=256))  # which no iteration's cost depends on
        key = (alike.config, alike.plan, alike.cluster.name)
        if key not in made:
            try:
                made[key] = iterations_of(alike)
            except ForetellError as error:
                made[key] = error
        costs = made[key]
        if isinstance(costs, ForetellError):
            found.append(costs)
            continue
        try:
            found.append(steady(row, costs))
        except ForetellError as error:
            found.append(error)
    return found


def _made(
    row: Row, iterations: Costs, ttft: float, tpot: float, decode: float, running: float, prompt: float
) -> Steady:
    ranks = row.plan.dp * row.plan.replicas
    power = 0.0
    if row.power_w:
        watts = iterations.power_w(_mixed(row, running))
        length = max(row.mean_osl - 1.0, 1.0)
        share = min(1.0, running * prompt / (running * prompt + decode * length))
        power = float(watts[0] * (1.0 - share) + watts[1] * share) * row.gpus
    return Steady(ttft, tpot, decode, ranks * running / tpot, power, running, decode, prompt)


def _others(running: float) -> float:
    return max(running - 1.0, 0.0)


def _between(row: Row, running: float) -> float:
    """Prompts of other requests that fall between the tokens of one, on average."""
    others = _others(running)
    if row.shortest < 1.0:
        return others
    together = max(0.0, min(others, row.plan.max_num_batched_tokens / max(row.mean_isl - row.cached_isl, 1.0) - 1.0))
    apart = others - together
    return apart / 2.0 if row.plan.engine == "sglang" else apart


def _in_step(row: Row, requests: float) -> float:
    """The share of prompts that wait for all others' that came with them.

    Requests of different lengths come one by one, but for the first ones. Those of one length come together again:
    all of them where prompts go before tokens (SGLang), else as many as are processed in one iteration.
    """
    if row.shortest < 1.0:
        return 1.0 / ROUNDS
    if row.plan.engine == "sglang":
        return 1.0
    return min(1.0, row.plan.max_num_batched_tokens / (requests * row.isl))


def _lanes(row: Row, running: float) -> float:
    """Sequences of one of the batches on their way through the stages."""
    return running / row.plan.pp


def _decode(row: Row, iterations: Costs, running: float, context: float = 0.0) -> float:
    """Seconds of an iteration in which so many sequences decode."""
    d = _lanes(row, running)
    return float(iterations.time_s(Batch.of(decode_seqs=d, decode_tokens=d * (context or row.context)))[0])


def _chunks(row: Row, running: float) -> tuple[Floats, Floats]:
    """New and cached tokens of the chunks in which a prompt is processed beside `running` sequences."""
    budget = row.plan.max_num_batched_tokens
    if row.plan.chunked_prefill:
        budget = max(row.plan.block_size, budget - int(_lanes(row, running)))
    else:
        budget = max(budget, int(row.mean_isl))
    starts = np.arange(min(row.cached_isl, row.mean_isl - 1.0), row.mean_isl, float(budget))
    return np.minimum(row.mean_isl - starts, float(budget)), starts


def _prompt(row: Row, iterations: Costs, running: float, together: float = 1.0) -> float:
    """Seconds that a prompt adds to the iterations it is in; with `together`, of so many prompts at once."""
    new, cached = _chunks(row, running)
    last = np.arange(len(new)) == len(new) - 1
    d = _lanes(row, running)
    pairs = new * cached + new * (new + 1.0) / 2.0
    batch = Batch.of(
        decode_seqs=d,
        decode_tokens=d * row.context,
        prefill_seqs=together,
        prefill_tokens=new * together,
        prefill_pairs=pairs * together,
        prefill_cached=cached * together,
        sampled=d + np.where(last, together, 0.0),
    )
    mixed = iterations.time_s(batch)
    if not running:
        return float(mixed.sum())
    return float(mixed.sum() - len(new) * _decode(row, iterations, running)) / row.plan.pp


def _mixed(row: Row, running: float) -> Batch:
    """An iteration that only decodes, and one with a prompt beside."""
    new, cached = _chunks(row, running)
    d = _lanes(row, running)
    pairs = new[0] * cached[0] + new[0] * (new[0] + 1.0) / 2.0
    return Batch.of(
        decode_seqs=d,
        decode_tokens=d * row.context,
        prefill_seqs=[0.0, 1.0],
        prefill_tokens=[0.0, new[0]],
        prefill_pairs=[0.0, pairs],
    )


def _capacity(row: Row, iterations: Costs) -> float:
    """Sequences whose tokens a rank's cache holds on average; where the budget leaves no room, it ran all the same."""
    try:
        tokens = float(iterations.kv_capacity_tokens)
    except ForetellError:
        return float(row.plan.max_num_seqs)
    return max(1.0, tokens / row.context)


def _waves(row: Row, iterations: Costs) -> Steady:
    total = row.per_rank
    try:
        tokens = float(iterations.kv_capacity_tokens)
    except ForetellError:
        tokens = row.mean_isl + row.mean_osl
    most = max(1.0, min(float(row.plan.max_num_seqs), np.floor(tokens / (row.mean_isl + row.mean_osl)), total))
    prompt = _prompt(row, iterations, most)
    decode = _decode(row, iterations, most)
    full, rest = divmod(total, most)
    seconds = full * row.mean_osl * decode + total * prompt
    if rest:
        seconds += row.mean_osl * _decode(row, iterations, rest)
    rate = total * row.mean_osl / seconds * row.plan.dp * row.plan.replicas
    tpot = decode + most * prompt / row.mean_osl
    return Steady(prompt * most / 2.0 + decode, tpot, decode, rate, 0.0, most, decode, prompt)
