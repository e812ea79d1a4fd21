"""Steady states against what can be written down, and against a simulation request by request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretell.hardware import device
from foretell.plan.serving.load import Load
from foretell.plan.serving.steady import LIMITS, curve, most
from foretell.simulate.serving import Requests, ServingPlan
from foretell.simulate.serving.engine.link import Link
from foretell.simulate.serving.iteration import Iterations
from foretell.simulate.serving.metrics import Slo
from foretell.simulate.serving.simulator import Tabled, serve
from foretell.workload import llm


def test_constant_iterations(fake: Any) -> None:
    # Each iteration takes 10 ms whatever is in it: 64 sequences give 6,400 tokens/s, 128 requests/s of 50 tokens.
    found = most(fake(), ServingPlan(max_num_seqs=64), Load.of(100, 50), Slo())
    assert found.batch.tolist() == [64.0]
    assert found.rate[0] == pytest.approx(128.0)
    assert found.tpot_s[0] == pytest.approx(0.01)
    assert LIMITS[found.limit[0]] == "max_num_seqs"


def test_tpot_stops_the_batch(fake: Any) -> None:
    # 10 ms and 1 ms for each sequence: 30 ms allow twenty.
    found = most(fake(each=0.001), ServingPlan(max_num_seqs=256), Load.of(100, 50), Slo(tpot_s=0.0301))
    assert found.batch.tolist() == [20.0]
    assert found.rate[0] == pytest.approx(20 / (50 * 0.03))
    assert LIMITS[found.limit[0]] == "tpot"


def test_kv_stops_the_batch(fake: Any) -> None:
    # A sequence of 100 + 50 tokens holds 125 on average; 2,500 tokens hold twenty.
    found = most(fake(kv_capacity_tokens=2500), ServingPlan(), Load.of(100, 50), Slo())
    assert found.batch.tolist() == [20.0]
    assert LIMITS[found.limit[0]] == "kv"
    none = most(fake(kv_capacity_tokens=149), ServingPlan(), Load.of(100, 50), Slo())
    assert none.rate.tolist() == [0.0]
    assert LIMITS[none.limit[0]] == "kv"


def test_an_objective_that_nothing_meets(fake: Any) -> None:
    found = most(fake(), ServingPlan(), Load.of(100, 50), Slo(tpot_s=0.009))
    assert found.rate.tolist() == [0.0]
    assert LIMITS[found.limit[0]] == "tpot"
    found = most(fake(token=1e-3), ServingPlan(), Load.of([100, 1000], 50), Slo(ttft_s=0.5))
    assert found.rate[0] > 0
    assert found.rate[1] == 0
    assert LIMITS[found.limit[1]] == "ttft"


def test_an_end_to_end_limit_is_of_all_tokens(fake: Any) -> None:
    # 50 tokens of 30 ms and the prompt's: 1.5 s and a little.
    found = most(fake(each=0.001), ServingPlan(), Load.of(100, 50), Slo(e2e_s=1.55))
    assert found.batch.tolist() == [20.0]
    assert LIMITS[found.limit[0]] == "e2e"


def test_prompts_take_their_part_of_an_iteration(fake: Any) -> None:
    # A request in 50 iterations brings 100 prompt tokens: b sequences bring 2 b with each iteration, at 10 µs.
    found, batches = curve(fake(token=1e-5), ServingPlan(), Load.of(100, 50), [1, 10, 100])
    assert batches.tolist() == [1.0, 10.0, 100.0]
    # Of ten, now and then two prompts come one behind the other.
    assert found.tpot_s[0] == pytest.approx(0.01 + 2 * batches * 1e-5, rel=1e-3)


def test_a_prompt_longer_than_the_budget_goes_in_by_chunks(fake: Any) -> None:
    plan = ServingPlan(max_num_batched_tokens=513, max_num_seqs=64)
    found, _ = curve(fake(), plan, Load.of(2048, 1000), [1])
    # Four chunks of 512 beside one sequence, half an iteration until the first, hardly a queue.
    assert found.ttft_s[0, 0] == pytest.approx(0.01 * (4 + 0.5), rel=0.01)


def test_ranks_and_stages_multiply(fake: Any) -> None:
    one = most(fake(), ServingPlan(max_num_seqs=64), Load.of(100, 50), Slo())
    dp = most(fake(), ServingPlan(max_num_seqs=64, dp=4, ep=4), Load.of(100, 50), Slo())
    pp = most(fake(), ServingPlan(max_num_seqs=64, pp=2), Load.of(100, 50), Slo())
    assert dp.rate[0] == pytest.approx(4 * one.rate[0])
    assert pp.batch[0] == 32  # two batches share the places
    assert pp.rate[0] == pytest.approx(one.rate[0])


def test_prefill_and_decode_apart(fake: Any) -> None:
    plan = ServingPlan(prefill_replicas=1, decode_replicas=1, replicas=2, max_num_seqs=64)
    slow = fake(token=1e-4)
    load = Load.of(1000, 100)
    together = most(slow, ServingPlan(max_num_seqs=64), load, Slo())
    apart = most(slow, plan, load, Slo())
    # Undisturbed by prompts, which take 0.11 s each; half an iteration until a request joins one, over 99 tokens.
    assert apart.tpot_s[0] == pytest.approx(0.01 * (1 + 0.5 / 99), rel=1e-6)
    assert together.tpot_s[0] > 0.05
    assert apart.rate[0] < 8 / 0.81  # no more than prompts go in, eight at a time
    load = Load.of(1000, 1000)
    strict = most(slow, plan, load, Slo(ttft_s=0.165))
    # 0.11 s of its own leave half as long to wait. Prompts go in together, each 0.1 s beside 0.01 s that they share: a
    # third of the time at work, where prompts one by one (M/D/1) would wait as long at half of it.
    assert 0.35 < strict.rate[0] * 0.11 < 0.5
    # Four times as many servers wait for less.
    four = plan.replace(prefill_replicas=4, decode_replicas=4, replicas=8)
    assert most(slow, four, load, Slo(ttft_s=0.165)).rate[0] > 6.0 * strict.rate[0]
    # Sending a cache takes 50 ms, before the second token.
    limit, whole = Slo(e2e_s=10.2), most(slow, plan, load, Slo(e2e_s=10.2))
    link = most(slow, plan, load, limit, link_bytes_per_s=1000 * 1000 / 0.05)
    assert 0 < link.rate[0] < whole.rate[0]


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 3), (2, 1), (4, 4)])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 200), (3000, 100), (20_000, 100)])
def test_phases_apart_are_as_the_simulator_has_them(
    fake: Any, prefill: int, decode: int, inputs: int, outputs: int
) -> None:
    """Poisson arrivals at three and six tenths of the most that goes through: prompts in batches, alone, in chunks."""
    costs = fake(base=0.005, each=1e-4, token=1e-5)
    plan = ServingPlan(prefill_replicas=prefill, decode_replicas=decode, replicas=prefill + decode, max_num_seqs=128)
    load, link = Load.of(inputs, outputs), Link(2e9)
    found, _ = curve(costs, plan, load, np.geomspace(0.02, 128, 300), link_bytes_per_s=link.bytes_per_s)
    rising = slice(0, int(found.rate[0].argmax()) + 1)  # beyond, caches do not hold as many
    for share in (0.3, 0.6):
        rate = share * found.rate.max()
        rng = np.random.default_rng(0)
        count = 1500
        came = np.cumsum(rng.exponential(1.0 / rate, count))
        served = serve(costs, plan, Requests.of(came, np.full(count, inputs), np.full(count, outputs)), kv_link=link)
        steady = slice(count // 6, -count // 10)
        ttft = (served.first_token_s - served.arrival_s)[steady].mean()
        tpot = (served.finished_s - served.first_token_s)[steady].mean() / (outputs - 1)
        assert np.interp(rate, found.rate[0, rising], found.ttft_s[0, rising]) == pytest.approx(ttft, rel=0.1)
        assert np.interp(rate, found.rate[0, rising], found.tpot_s[0, rising]) == pytest.approx(tpot, rel=0.03)


def simulated(base: float, token: float, b: int, inputs: int, outputs: int) -> float:
    """Seconds between tokens of a server that always has `b` sequences: one request after another, in plain Python."""
    left = [1 + (i * outputs) // b for i in range(b)]  # spread over their lives
    time = tokens = 0.0
    for _ in range(20 * outputs):
        new = sum(1 for n in left if n == outputs)
        time += base + token * new * inputs
        tokens += b
        left = [n - 1 if n > 1 else outputs for n in left]
    return time * b / tokens


@pytest.mark.parametrize("b", [1, 60, 128])
def test_the_mean_iteration_is_that_of_a_simulation(fake: Any, b: int) -> None:
    """With one sequence nothing comes meanwhile, from 60 on every iteration has a prompt: chance plays no part."""
    found, _ = curve(fake(token=1e-4), ServingPlan(), Load.of(300, 60), [b])
    assert found.tpot_s[0, 0] == pytest.approx(simulated(0.01, 1e-4, b, 300, 60), rel=0.01)


@pytest.mark.parametrize("load", [0.05, 0.3, 0.6, 0.8])
@pytest.mark.parametrize(
    ("inputs", "outputs", "tokens"),
    [(1024, 256, 2048), (1024, 256, 8192), (2000, 20, 8192), (8000, 200, 2048), (32000, 100, 8192), (130_000, 5, 2048)],
)
def test_arrivals_by_chance_fare_as_in_a_simulation(inputs: int, outputs: int, tokens: int, load: float) -> None:
    """Llama-3.1-8B on H100, from chats to documents of which little is asked, at shares of the most that goes in."""
    plan = ServingPlan(max_num_batched_tokens=tokens)
    iterations = Iterations.of(llm.config("llama-3.1-8b"), plan, device("h100-sxm"))
    found, _ = curve(iterations, plan, Load.of(inputs, outputs))
    rates, count = found.rate[0], 800
    first = int(np.argmax(rates >= 0.999 * rates.max()))
    rate = load * rates.max()
    ttft, tpot = (np.interp(rate, rates[: first + 1], x[0][: first + 1]) for x in (found.ttft_s, found.tpot_s))
    gaps = np.random.default_rng(1).exponential(1.0 / rate, count)
    requests = Requests.of(np.cumsum(gaps), np.full(count, inputs), np.full(count, outputs))
    served = serve(Tabled(iterations), plan, requests)
    late = slice(count // 8, None)
    waited = float((served.first_token_s - served.arrival_s)[late].mean())
    each = float((served.finished_s - served.first_token_s)[late].mean()) / (outputs - 1)
    assert ttft == pytest.approx(waited, rel=0.35)
    if outputs > 5:  # so few tokens come beside the first chunks of the next prompt, which take less than the mean one
        assert tpot == pytest.approx(each, rel=0.25)


def test_a_tighter_objective_never_serves_more(fake: Any) -> None:
    load = Load.of([50, 500, 2000], [20, 200, 400])
    slow = fake(each=1e-4, token=2e-5, kv_capacity_tokens=60_000)
    for plan in (ServingPlan(), ServingPlan(chunked_prefill=False), ServingPlan(pp=2)):
        limits = np.linspace(0.011, 0.1, 12)
        rates = np.array([most(slow, plan, load, Slo(tpot_s=x, ttft_s=10 * x)).rate for x in limits])
        assert (np.diff(rates, axis=0) >= -1e-9).all()


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", ["gpt-oss-120b", "llama-3.1-8b"])
def test_iterations_with_and_without_prompts_are_told_apart(name: str, batch: int) -> None:
    """Few tokens reach few experts: the mean iteration's would reach most of them, twice as slow in a simulation."""
    config, rng = llm.config(name), np.random.default_rng(0)
    plan = ServingPlan(weight_dtype=config.published_weights or "bf16", max_num_batched_tokens=2048)
    iterations = Iterations.of(config, plan, device("h100-sxm"))
    count = 20 * batch
    requests = Requests.of(np.zeros(count), rng.integers(600, 1400, count), rng.integers(150, 350, count))
    served = serve(Tabled(iterations), plan, requests, concurrency=batch)
    tpot = float((served.finished_s - served.first_token_s).sum() / (served.output_tokens - 1).sum())
    found, _ = curve(iterations, plan, Load.of([1000.0], [250.0]), [batch])
    assert found.tpot_s[0, 0] == pytest.approx(tpot, rel=0.08)
