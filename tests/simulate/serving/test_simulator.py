"""What must hold whatever is served: nothing lost, nothing twice, capacity kept, the same from the same seed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import ForetellError, InfeasibleError, InputError, UnknownNameError
from foretell.simulate.serving import Batch, Requests, ServingPlan
from foretell.simulate.serving.engine.blocks import Blocks
from foretell.simulate.serving.engine.family import Registry
from foretell.simulate.serving.engine.sequence import Seq
from foretell.simulate.serving.simulator import ROUTERS, SCHEDULERS, HostTier, Link, Served, Tabled, overlaps, serve
from foretell.timeline import chrome_events


@dataclass(frozen=True)
class Linear:
    """Times linear in the tokens run and read."""

    kv_capacity_tokens: int = 100_000
    kv_bytes_per_token: float = 1000.0
    start_s: float = 0.01
    token_s: float = 2e-5
    read_s: float = 1e-7

    def time_s(self, batch: Batch) -> np.ndarray:
        return self.start_s + self.token_s * batch.tokens + self.read_s * (batch.decode_tokens + batch.prefill_cached)


def poisson(count: int, rate: float, seed: int = 0, *, inputs: int = 300, outputs: int = 80) -> Requests:
    rng = np.random.default_rng(seed)
    prefix = rng.integers(1, 12, count)
    return Requests.of(
        np.cumsum(rng.exponential(1 / rate, count)),
        rng.integers(1, 2 * inputs, count),
        rng.integers(1, 2 * outputs, count),
        prefix,
        prefix * 20,
    )


def columns(result: Served) -> dict[str, bytes]:
    """All columns of a result, as bytes."""
    parts = (result, result.runs)
    found = [(f.name, getattr(part, f.name)) for part in parts for f in fields(part)]
    return {name: column.tobytes() for name, column in found if isinstance(column, np.ndarray)}


def check(result: Served, requests: Requests) -> None:
    """Every request is served once, to its last token, in order of time; blocks never exceed what there are."""
    runs, served = result.runs, result.served
    assert (result.output_tokens[served] == requests.output_tokens[served]).all()
    assert (result.output_tokens[~served] == 0).all()
    assert np.isnan(result.finished_s[~served]).all()
    for earlier, later in itertools.pairwise(
        (result.arrival_s, result.first_scheduled_s, result.first_token_s, result.finished_s)
    ):
        assert (earlier[served] <= later[served] + 1e-12).all()
    for replica, capacity in enumerate(result.kv_capacity_blocks):
        assert runs.kv_blocks[runs.replica == replica].max(initial=0) <= capacity
        for rank in range(runs.rank.max() + 1):
            mine = (runs.replica == replica) & (runs.rank == rank)
            assert (runs.start_s[mine][1:] >= runs.end_s[mine][:-1]).all()
    # Logits that were computed: each token of each answer, once. A row of a static batch goes on when its answer ended.
    sampled = int((runs.sampled.astype(np.int64) * runs.iterations).sum())
    asked = int(requests.output_tokens[served].sum())
    assert sampled >= asked if result.about["engine"] == "static" else sampled == asked


LOADS = ({}, {"offline": True}, {"concurrency": 5})


@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    capacity=st.sampled_from([1200, 1600, 20_000]),
    size=st.sampled_from([1, 16]),
    rate=st.sampled_from([1.0, 30.0]),
    dp=st.sampled_from([1, 2]),
    load=st.sampled_from(LOADS),
    swap=st.booleans(),
    host=st.sampled_from([0, 40_000, 10**9]),
    cache=st.booleans(),
    split=st.booleans(),
    pp=st.sampled_from([1, 2]),
)
def test_no_request_is_lost_or_served_twice(
    scheduler: str, seed: int, capacity: int, size: int, rate: float, dp: int, load: dict[str, object], swap: bool,
    host: int, cache: bool, split: bool, pp: int,
) -> None:  # fmt: skip
    requests = poisson(40, rate, seed, outputs=150)
    split = split and scheduler != "static"
    host = host or 40_000 * swap
    plan = ServingPlan(
        block_size=size, dp=dp, pp=pp, max_num_seqs=16, max_num_batched_tokens=512,
        router="least-loaded", prefix_cache=cache, preemption="swap" if swap else "recompute", host_kv_bytes=host,
        replicas=2, prefill_replicas=int(split), decode_replicas=int(split),
    )  # fmt: skip
    result = serve(
        Linear(capacity), plan, requests, scheduler=scheduler, host_link=Link(1e9, 1e-5), kv_link=Link(1e9), **load
    )
    check(result, requests)
    assert result.served.all()


@pytest.mark.parametrize(("scheduler", "seed"), [("sglang", 0), ("sglang", 5), ("trtllm", 4096)])
@pytest.mark.parametrize("split", [False, True])
def test_batches_of_a_pipeline_do_not_starve_each_other(scheduler: str, seed: int, split: bool) -> None:
    """They take from the same few blocks: one goes on while the other waits, and hears when blocks are free."""
    requests = poisson(40, 30.0, seed, outputs=150)
    plan = ServingPlan(
        block_size=16, pp=2, max_num_seqs=16, max_num_batched_tokens=512, router="least-loaded", prefix_cache=True,
        replicas=2, prefill_replicas=int(split), decode_replicas=int(split),
    )  # fmt: skip
    result = serve(Linear(1200), plan, requests, scheduler=scheduler, kv_link=Link(1e9), offline=True)
    check(result, requests)
    assert result.served.all()


@pytest.mark.parametrize("router", ROUTERS.names())
def test_the_same_seed_gives_the_same_bytes(router: str) -> None:
    plan = ServingPlan(replicas=3, prefix_cache=True)

    def served(seed: int) -> dict[str, bytes]:
        return columns(serve(Linear(), plan, poisson(300, 20.0), router=router, seed=seed))

    assert served(3) == served(3)
    drawn = [served(seed)["replica"] for seed in range(3)]
    assert (len(set(drawn)) > 1) == (router == "two-choices")


@pytest.mark.parametrize("router", ROUTERS.names())
def test_more_replicas_do_not_lower_attainment(router: str) -> None:
    """Share of requests with their first token in 0.3 s and 25 ms a token after it, mean over 20 seeds."""

    def attained(replicas: int, seed: int) -> float:
        plan = ServingPlan(replicas=replicas, max_num_seqs=32, prefix_cache=True)
        result = serve(Linear(20_000), plan, poisson(250, 40.0, seed), router=router, seed=seed)
        pace = (result.finished_s - result.first_token_s) / np.maximum(result.output_tokens - 1, 1)
        return float(np.mean((result.first_token_s - result.arrival_s <= 0.3) & (pace <= 0.025)))

    means = [np.mean([attained(replicas, seed) for seed in range(20)]) for replicas in (1, 2, 3, 4)]
    assert means[0] < 0.9  # the load is one that replicas matter for
    assert all(more >= fewer - 0.01 for fewer, more in itertools.pairwise(means))


# Queueing theory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneByOne:
    """A server whose requests take 1 ms a prompt token; decoding sequences take 1 ms a step, however many they are."""

    kv_capacity_tokens: int = 10**9
    kv_bytes_per_token: float = 1.0

    def time_s(self, batch: Batch) -> np.ndarray:
        return 1e-3 * np.where(batch.prefill_tokens > 0, batch.prefill_tokens, 1.0)


def waits(requests: Requests, plan: ServingPlan) -> np.ndarray:
    result = serve(OneByOne(), plan, requests, overlap=False)
    assert result.served.all()
    return result.first_scheduled_s - result.arrival_s


def means(samples: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error, from means of 50 blocks as waits in a row are alike."""
    blocks = samples[: len(samples) // 50 * 50].reshape(50, -1).mean(axis=1)
    return float(blocks.mean()), float(blocks.std(ddof=1) / np.sqrt(50))


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("law", ["M/M/1", "M/D/1"])
def test_one_server_waits_as_theory_says(law: str, load: float) -> None:
    """Pollaczek and Khinchine: W = ρ s (1 + c²) / (2 (1 − ρ)), c² the squared variation of the service time s."""
    rng, count, service = np.random.default_rng(5), 40_000, 1.0
    times = rng.exponential(service, count) if law == "M/M/1" else np.full(count, service)
    tokens = np.maximum(np.round(times * 1000), 1).astype(int)
    requests = Requests.of(np.cumsum(rng.exponential(service / load, count)), tokens, 1)
    mean, error = means(waits(requests, ServingPlan(max_num_seqs=1, max_num_batched_tokens=10**6)))
    theory = load * service * (2.0 if law == "M/M/1" else 1.0) / (2 * (1 - load))
    assert abs(mean - theory) <= 3 * error
    assert error < 0.06 * theory + 0.02


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("servers", [2, 5])
def test_several_servers_wait_as_theory_says(servers: int, load: float) -> None:
    """Erlang's C: a request waits with probability C, and C s / (c (1 − ρ)) in the mean."""
    rng, count, service = np.random.default_rng(7), 30_000, 0.05
    steps = np.maximum(np.round(rng.exponential(service, count) * 1000), 1).astype(int)
    requests = Requests.of(np.cumsum(rng.exponential(service / load / servers, count)), 1, steps)
    mean, error = means(waits(requests, ServingPlan(max_num_seqs=servers)))
    offered = servers * load
    terms = [1.0]
    for k in range(1, servers + 1):
        terms.append(terms[-1] * offered / k)
    last = terms[-1] / (1 - load)
    waiting = last / (sum(terms[:-1]) + last)
    # Iterations of 1 ms: who comes is seen, on average, half of one later, if anybody is being served.
    busy = 1 - 1 / (sum(terms[:-1]) + last)
    theory = waiting * service / (servers * (1 - load)) + busy * 0.5e-3
    assert abs(mean - theory) <= 3 * error
    assert error < 0.1 * theory


# Answers to check by hand ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """A second an iteration."""

    kv_capacity_tokens: int = 1000
    kv_bytes_per_token: float = 1.0

    def time_s(self, batch: Batch) -> np.ndarray:
        return np.ones(len(batch))


def test_a_prompt_is_cut_to_the_budget() -> None:
    requests = Requests.of(0.0, [250, 10], [3, 1])
    result = serve(Constant(), ServingPlan(max_num_batched_tokens=100, max_num_seqs=8), requests)
    assert result.first_token_s.tolist() == [3.0, 3.0]  # 100 + 100 + 50, and 10 of the second's with the last
    assert result.finished_s.tolist() == [5.0, 3.0]
    assert result.runs.prefill_tokens.tolist() == [100, 100, 60, 0]
    assert result.runs.iterations.tolist() == [1, 1, 1, 2]


def test_sglang_runs_prompts_before_decoding() -> None:
    requests = Requests.of([0.0, 1.5], [10, 250], [4, 2])
    plan = ServingPlan(engine="sglang", max_num_batched_tokens=100, max_num_seqs=8, block_size=10)
    result = serve(Constant(), plan, requests, overlap=False)
    # A prompt, one step, three chunks of the other's prompt, and what is left of both.
    assert result.runs.decode_seqs.tolist() == [0, 1, 0, 0, 0, 2, 1]
    assert result.first_token_s.tolist() == [1.0, 5.0]
    assert result.finished_s.tolist() == [7.0, 6.0]


def test_sglang_admits_when_what_it_expects_of_answers_has_fallen() -> None:
    requests = Requests.of([0.0, 0.5], [10, 300], [900, 120])
    result = serve(Constant(1000), ServingPlan(engine="sglang", block_size=1), requests, overlap=False)
    # After k steps the first caches 10 + k tokens, and (0.7 - 0.001003 k) of its other 899 - k are expected.
    steps = np.arange(900)
    room = 1000 - 10 - steps - (0.7 - 0.7 * 0.86 / 600 * steps) * (899 - steps)
    first = int(np.flatnonzero(room >= 300 + 120)[0])
    assert 100 < first < 200
    assert result.first_scheduled_s.tolist() == [0.0, 1.0 + first]


def test_the_least_loaded_replica_gets_the_next() -> None:
    requests = Requests.of([0.0, 0.1, 0.2, 5.0, 5.1], 1, [2, 20, 20, 9, 9])
    result = serve(Constant(), ServingPlan(replicas=3, router="least-loaded"), requests)
    assert result.replica.tolist() == [0, 1, 2, 0, 0]


def test_overlap_misses_who_comes_while_an_iteration_runs() -> None:
    requests = Requests.of([0.0, 0.5, 1.0], 1, [9, 1, 1])
    late = serve(Constant(), ServingPlan(), requests, overlap=True)
    soon = serve(Constant(), ServingPlan(), requests, overlap=False)
    assert late.first_scheduled_s.tolist() == [0.0, 2.0, 2.0]
    assert soon.first_scheduled_s.tolist() == [0.0, 1.0, 1.0]
    assert [overlaps(ServingPlan(version=v)) for v in ("0.13.2", "0.14.0", "v0.19", "")] == [False, True, True, True]
    assert not overlaps(ServingPlan(engine="static"))


def test_the_last_admitted_is_preempted_and_computed_anew() -> None:
    requests = Requests.of(0.0, [16, 16], [40, 40])
    result = serve(Constant(64), ServingPlan(), requests)
    # Each begins with a block and takes a second and a second more: at 4 blocks the next goes to the first alone.
    assert result.preemptions.tolist() == [0, 1]
    assert result.runs.kv_blocks.max() == 4
    assert result.finished_s[0] == 40.0
    again = result.runs.prefill_tokens[result.runs.start_s > 0].max()
    assert again == 16 + 17  # its prompt and what it had made when 33 tokens would have been cached


def test_trtllm_admits_only_what_can_end() -> None:
    requests = Requests.of(0.0, [16, 16], [40, 40])
    safe = serve(Constant(64), ServingPlan(engine="trtllm"), requests)
    assert safe.preemptions.sum() == 0
    assert safe.first_scheduled_s.tolist() == [0.0, 40.0]
    eager = serve(Constant(64), ServingPlan(engine="trtllm"), requests, scheduler="trtllm-max-utilisation")
    assert eager.first_scheduled_s.tolist() == [0.0, 0.0]
    assert eager.preemptions.sum() == 1


def test_a_static_batch_waits_for_its_longest() -> None:
    requests = Requests.of(0.0, [10, 30, 5], [2, 6, 1])
    result = serve(Constant(), ServingPlan(engine="static", max_num_seqs=2), requests)
    assert result.finished_s.tolist() == [2.0, 6.0, 7.0]
    assert result.runs.decode_seqs.tolist() == [0, 2, 2, 0]
    assert result.runs.prefill_tokens.tolist() == [60, 0, 0, 5]  # padded to 30 each


def test_swapping_moves_blocks_over_the_link() -> None:
    requests = Requests.of(0.0, [16, 16], [40, 40])
    plan = ServingPlan(preemption="swap", host_kv_bytes=10**6)
    link = Link(16.0 * 2, 0.25)  # a block of 16 bytes takes half a second
    result = serve(Constant(64), plan, requests, host_link=link)
    assert result.preemptions.tolist() == [0, 1]
    assert result.runs.prefill_tokens.sum() == 32  # nothing computed anew
    swapped = 2 * link.seconds(2 * 16.0)  # two blocks, out and in
    assert result.end_s == pytest.approx(40 + 23 + swapped)
    with pytest.raises(InputError, match="host_link"):
        serve(Constant(64), plan, requests)
    with pytest.raises(InputError, match="host_kv_bytes"):
        serve(Constant(64), plan.replace(host_kv_bytes=0), requests, host_link=link)


def test_a_prefix_is_computed_once_and_the_oldest_is_evicted() -> None:
    requests = Requests.of([0.0, 10.0, 20.0, 30.0], 64, 1, [1, 1, 2, 1], 48)
    plan = ServingPlan(prefix_cache=True)
    roomy = serve(Constant(1000), plan, requests)
    assert roomy.cached_tokens.tolist() == [0, 48, 0, 48]
    assert roomy.runs.prefill_tokens.tolist() == [64, 16, 64, 16]
    assert roomy.runs.prefill_cached.tolist() == [0, 48, 0, 48]
    tight = serve(Constant(64), plan, requests)
    assert tight.cached_tokens.tolist() == [0, 48, 0, 0]
    tiered = serve(Constant(64), plan.replace(host_kv_bytes=16 * 1000), requests, host_link=Link(16.0))
    assert tiered.cached_tokens.tolist() == [0, 48, 0, 48]
    assert tiered.finished_s[3] == 30 + 1 + 3  # three blocks loaded at a second each


def test_data_parallel_ranks_wait_for_the_longest() -> None:
    requests = Requests.of(0.0, [1000, 10], [1, 1])
    result = serve(Linear(), ServingPlan(dp=2), requests)
    assert result.runs.rank.tolist() == [0, 1]
    assert result.runs.prefill_tokens.tolist() == [1000, 10]
    assert result.finished_s.tolist() == [pytest.approx(0.01 + 2e-5 * 1000)] * 2


def test_data_parallel_ranks_are_told_what_all_work_on() -> None:
    """Two ranks: one has a prompt of 100 tokens and then decodes, the other comes later with one of 10."""
    seen: list[tuple[float, float, float]] = []

    class Seen(Linear):
        def time_s(self, batch: Batch) -> np.ndarray:
            seen.extend(zip(batch.decode_seqs, batch.prefill_tokens, batch.rank_tokens, strict=True))
            return super().time_s(batch)

    requests = Requests.of([0.0, 0.02], [100, 10], [5, 2])
    result = serve(Seen(), ServingPlan(dp=2), requests, exact=True, overlap=False)
    assert seen[0] == (0, 100, 50)  # the other rank has nothing to do
    assert (1, 0, 5.5) in seen
    assert (0, 10, 5.5) in seen
    assert (1, 0, 1) in seen
    batch = result.runs.batch(dp=2)
    assert batch.rank_tokens.tolist()[:2] == [50, 50]
    assert (batch.rank_tokens.reshape(-1, 2) == batch.tokens.reshape(-1, 2).mean(axis=1)[:, None]).all()


def test_batches_follow_each_other_through_a_pipeline() -> None:
    """Two stages: two sequences at a time, each of whose iterations is the whole way through both."""
    requests = Requests.of(0.0, 10, [4, 4, 4])
    result = serve(Constant(), ServingPlan(pp=2, max_num_seqs=2), requests)
    assert result.finished_s.tolist() == [4.0, 4.0, 8.0]
    assert result.kv_capacity_blocks == (1000 // 16,)  # of both together
    assert sorted(set(result.runs.rank.tolist())) == [0, 1]
    both = serve(Constant(), ServingPlan(pp=2, dp=2, max_num_seqs=2), requests)
    assert both.finished_s.tolist() == [4.0] * 3
    assert sorted(set(both.runs.rank.tolist())) == [0, 1, 2, 3]


@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_batches_of_a_pipeline_share_its_blocks(scheduler: str) -> None:
    """Of ten blocks the first request takes eight at its end: the second stage's batch waits for them."""
    requests = Requests.of([0.0, 0.5, 1.0], [110, 60, 60], 16)
    result = serve(Constant(160), ServingPlan(pp=2, max_num_seqs=2, version="0.18"), requests, scheduler=scheduler)
    assert result.served.all()
    assert (result.output_tokens == 16).all()
    assert result.finished_s[0] == 16
    assert result.finished_s[1:].min() > 16.5  # five blocks each: beside the first there are two or three
    assert result.runs.kv_blocks.max() <= 10
    # Alone they are not held up by each other.
    both = serve(Constant(160), ServingPlan(pp=2, max_num_seqs=2), Requests.of(0.0, 60, [16, 16]), scheduler=scheduler)
    assert both.finished_s.tolist() == [16, 16]


def test_blocks_taken_ahead_are_given_back() -> None:
    """Requests cut runs of the first one's iterations short; at its end it holds 109 tokens, and nobody else any."""
    arrivals = [0.0, *np.repeat(20.5 + 3.0 * np.arange(10), 2)]
    result = serve(Constant(), ServingPlan(pp=2), Requests.of(arrivals, 10, [100, *([2] * 20)]))
    assert result.runs.kv_blocks[np.argmax(result.runs.end_s)] == 7


def test_caches_move_between_prefill_and_decode() -> None:
    requests = Requests.of([0.0, 0.0], [100, 100], [5, 1])
    plan = ServingPlan(replicas=2, prefill_replicas=1, decode_replicas=1, max_num_seqs=1)
    result = serve(Constant(), plan, requests, kv_link=Link(200.0, 0.25), overlap=False)
    assert result.first_token_s.tolist() == [1.0, 2.0]
    assert result.finished_s.tolist() == [1.0 + 0.25 + 0.5 + 4.0, 2.0]
    assert result.prefill_replica.tolist() == [0, 0]
    assert result.replica.tolist() == [1, 0]
    with pytest.raises(InputError, match="disaggregation needs both"):
        serve(Constant(), plan, requests)
    with pytest.raises(InputError, match="disaggregation needs both"):
        serve(Constant(), plan.replace(decode_replicas=0), requests, kv_link=Link(1.0))
    with pytest.raises(InputError, match="static batches"):
        serve(Constant(), plan.replace(engine="static"), requests, kv_link=Link(1.0))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_replicas_for_prompts_need_no_room_for_answers(engine: str) -> None:
    plan = ServingPlan(engine=engine, replicas=2, prefill_replicas=1, decode_replicas=1)
    roomy = Constant(1000)
    result = serve(Constant(112), plan, Requests.of(0.0, [100, 110], 500), kv_link=Link(1e9), decode_iterations=roomy)
    assert result.served.all()
    assert result.kv_capacity_blocks == (7, 62)


def test_a_prefix_aware_router_finds_the_cache() -> None:
    requests = poisson(400, 30.0)
    hits = {}
    for router in ("round-robin", "prefix-aware"):
        plan = ServingPlan(replicas=4, router=router, prefix_cache=True)
        shared = Requests.of(requests.arrival_s, 300, 20, requests.prefix, 240)
        hits[router] = int(serve(Linear(8000), plan, shared).cached_tokens.sum())
    assert hits["prefix-aware"] > 1.05 * hits["round-robin"]


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    result = serve(Linear(), ServingPlan(), poisson(60, 1.0), concurrency=7)
    events = np.concatenate((result.arrival_s, result.finished_s))
    change = np.concatenate((np.ones(60), -np.ones(60)))[np.lexsort((np.repeat([1, 0], 60), events))]
    assert np.cumsum(change).max() == 7
    assert (np.sort(result.arrival_s)[7:] == np.sort(result.finished_s)[:-7]).all()


# Bad input ------------------------------------------------------------------------------------------------------------


def test_what_can_never_be_served_is_refused_with_the_reason() -> None:
    requests = Requests.of([0.0, 1.0, 2.0, 3.0], [10, 900, 300, 400], [5, 200, 5, 700])
    result = serve(Constant(1100), ServingPlan(max_model_len=1000), requests)
    assert [result.reasons[code] for code in result.refused] == ["", "longer than max_model_len", "", result.reasons[1]]
    assert result.refusals == {"longer than max_model_len": 2}
    assert np.isnan(result.finished_s).tolist() == [False, True, False, True]
    assert result.replica.tolist()[1] == -1
    assert result.arrival_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    small = serve(Constant(1100 - 16), ServingPlan(), requests)
    assert small.refusals == {"longer than the KV cache": 2}
    whole = serve(Constant(5000), ServingPlan(chunked_prefill=False, max_num_batched_tokens=400), requests)
    assert whole.refused.tolist() == [0, 3, 0, 0]
    huge = serve(Constant(), ServingPlan(), Requests.of(0.0, [2**62, 10], [2**62, 5]))
    assert huge.refused.tolist() == [2, 0]
    everyone = serve(Constant(16), ServingPlan(), Requests.of(0.0, [40, 50], 1))
    assert not everyone.served.any()
    assert everyone.end_s == 0.0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_whole_prompts_are_as_long_as_an_iteration_at_most(engine: str) -> None:
    """Of prompts of 2,048 and 2,049 tokens vLLM serves the first in iterations of 2,048 (its pull request 55130)."""
    plan = ServingPlan(engine=engine, chunked_prefill=False, max_num_batched_tokens=2048)
    result = serve(Constant(8192), plan, Requests.of(0.0, [2047, 2048, 2049], 300))
    assert result.refused.tolist() == [0, 0, 3]
    assert result.output_tokens.tolist() == [300, 300, 0]
    assert sorted(result.runs.prefill_tokens[result.runs.prefill_seqs > 0].tolist()) == [2047, 2048]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("scheduler", [None, "trtllm-max-utilisation"])
def test_whole_prompts_that_grew_past_an_iteration_come_back(engine: str, scheduler: str | None) -> None:
    """Preempted, 60 tokens and their answers are longer than iterations of 64."""
    plan = ServingPlan(engine=engine, chunked_prefill=False, max_num_batched_tokens=64, max_num_seqs=64)
    result = serve(Constant(400), plan, Requests.of(0.0, [60] * 4, 150), scheduler=scheduler)
    assert result.output_tokens.tolist() == [150] * 4
    assert result.runs.prefill_tokens.max() <= 64
    if engine != "trtllm" or scheduler:
        assert result.preemptions.sum() > 0


def test_exactly_as_long_as_allowed_is_served() -> None:
    for engine in ("vllm", "sglang", "trtllm", "static"):
        plan = ServingPlan(engine=engine, max_model_len=64)
        assert serve(Constant(64), plan, Requests.of(0.0, [24, 24], 40)).served.all()


def test_plans_that_cannot_run_are_named() -> None:
    requests = Requests.of(0.0, 10, 5)
    with pytest.raises(InfeasibleError, match="less than a block of 16"):
        serve(Constant(15), ServingPlan(), requests)
    with pytest.raises(InputError, match="max_num_seqs 256 is above"):
        serve(Constant(), ServingPlan(max_num_batched_tokens=100), requests)
    with pytest.raises(InputError, match="choose one kind of load"):
        serve(Constant(), ServingPlan(), requests, concurrency=2, offline=True)
    little = ServingPlan(prefix_cache=True, host_kv_bytes=15)
    with pytest.raises(InputError, match=r"15 B hold less than a block of 16 tokens; give it 16 B or more"):
        serve(Constant(), little, requests, host_link=Link(1.0))
    with pytest.raises(InputError, match=r"link: bytes_per_s is 0\.0; give a number above 0"):
        Link(0.0)
    with pytest.raises(UnknownNameError, match="did you mean 'round-robin'"):
        serve(Constant(), ServingPlan(), requests, router="roundrobin")
    with pytest.raises(UnknownNameError, match="did you mean 'sglang'"):
        serve(Constant(), ServingPlan(), requests, scheduler="sglan")

    class Broken(Constant):
        def time_s(self, batch: Batch) -> np.ndarray:
            return np.full(len(batch), np.nan)

    with pytest.raises(InputError, match="takes nan s"):
        serve(Broken(), ServingPlan(), requests)
    with pytest.raises(InfeasibleError, match="1 requests can never be scheduled"):
        serve(Constant(), ServingPlan(), requests, scheduler=lambda rank: None)


def test_registries_refuse_a_second_one_of_a_name() -> None:
    family: Registry[object] = Registry("thing", "foretell.simulate.serving.engine.routing")  # type: ignore[type-var]

    @family.add("one", source="here")
    def one() -> None:
        """The first."""

    with pytest.raises(ForetellError, match="registered already"):
        family.add("One", source="here")(one)
    assert family.named("one").summary == "The first."
    for registry in (SCHEDULERS, ROUTERS):
        for name in registry.names():
            member = registry.named(name)
            assert member.summary.endswith(".")
            assert member.source
            with pytest.raises(ForetellError, match="registered already"):
                registry.add(name, source="here")(member.run)


# Parts ----------------------------------------------------------------------------------------------------------------


def test_blocks_are_found_again_until_taken() -> None:
    blocks = Blocks(6, 4, cache=True)
    first = Seq(0, 16, 1, prefix=9, prefix_tokens=12)
    blocks.take(4)
    blocks.mark(first, 16)
    blocks.release(first, 16)
    assert (blocks.used, blocks.found(Seq(1, 16, 1, 9, 12))) == (0, (3, 3, 0))
    assert blocks.found(Seq(1, 12, 1, 9, 12)) == (2, 2, 0)  # the last token is computed whatever is cached
    blocks.take(4)  # two that were never used, the first's own, and the end of the prefix
    assert blocks.found(Seq(1, 16, 1, 9, 12)) == (2, 2, 0)
    blocks.hold(first, 2)
    assert blocks.used == 6
    with pytest.raises(AssertionError, match="more KV blocks"):
        blocks.take(1)


def test_a_host_tier_drops_what_was_used_least_recently() -> None:
    tier = HostTier(2, 10.0, Link(10.0))
    for place in range(2):
        tier.put((1, place))
    assert tier.has((1, 0))
    tier.put((1, 2))
    assert [tier.has((1, place)) for place in range(3)] == [True, False, True]
    keys = [(1, place) for place in range(3)]
    assert (len(tier), tier.load_s(keys, 5.0), tier.load_s([], 5.0)) == (2, 3.0, 0.0)
    assert tier.load_s(keys[:1], 6.0) == 3.0  # behind what is on the link for two seconds more


def test_a_table_gives_the_times_it_was_made_from() -> None:
    asked = []

    class Counted(Linear):
        def time_s(self, batch: Batch) -> np.ndarray:
            asked.append(len(batch))
            return super().time_s(batch)

    table = Tabled(Counted())
    decoding = {"decode_seqs": [4, 4, 7, 2], "decode_tokens": [100, 5000, 12_345, 9]}
    batch = Batch.of(**decoding)
    assert table.time_s(batch) == pytest.approx(Linear().time_s(batch), rel=1e-12)
    before = len(asked)
    table.time_s(batch.take([0, 3]))
    assert len(asked) == before
    mixed = Batch.of(**decoding, prefill_seqs=[0, 0, 0, 1], prefill_tokens=[0, 0, 0, 8])
    assert table.time_s(mixed).tolist() == Linear().time_s(mixed).tolist()
    assert asked[before:] == [4]  # ranks in lock step: as they are, together
    requests = poisson(100, 10.0)
    exact, tabled = (serve(Linear(), ServingPlan(), requests, exact=exact) for exact in (True, False))
    again = serve(Tabled(Linear()), ServingPlan(), requests)
    assert columns(again) == columns(tabled)
    assert tabled.finished_s == pytest.approx(exact.finished_s, rel=1e-9)


def test_runs_add_up_to_the_iterations() -> None:
    """A run's middle iteration, so many times over, is what its iterations take, where time is linear."""
    result = serve(Linear(), ServingPlan(), poisson(50, 5.0))
    runs = result.runs
    assert runs.iterations.max() > 5
    assert Linear().time_s(runs.batch()) == pytest.approx(runs.duration_s, rel=1e-9)
    with pytest.raises(ValueError, match="read-only"):
        runs.start_s[0] = 1.0


def test_levels_hold_while_they_run_and_fall_in_pauses() -> None:
    """One prompt of 100 tokens and two of its answer, a second each, again at 10 s."""
    result = serve(Constant(), ServingPlan(), Requests.of([0.0, 10.0], 100, 3))
    counters = {c.name: c for c in result.to_timeline().counters}
    running = counters["running, replica 0"]
    assert running.time_s.tolist() == [0.0, 1.0, 3.0, 10.0, 11.0, 13.0]
    assert running.value.tolist() == [1, 1, 0, 1, 1, 0]
    assert counters["KV blocks, replica 0"].value.tolist() == [7, 7, 0, 7, 7, 0]


def test_a_timeline_has_so_many_lanes_of_requests() -> None:
    result = serve(Linear(), ServingPlan(replicas=2), poisson(50, 20.0))
    timeline = result.to_timeline(most_requests=7)
    assert [lane for lane in timeline.lanes if lane.startswith("replica")] == ["replica 0", "replica 1"]
    requests = [lane for lane in timeline.lanes if lane.startswith("request")]
    assert (len(requests), requests[0], requests[-1]) == (7, "request 0", "request 49")
    assert timeline.busy_s("request 49") == pytest.approx(result.finished_s[49] - result.arrival_s[49])
    assert timeline.busy_s("replica 1") == pytest.approx(
        (result.runs.end_s - result.runs.start_s)[result.runs.replica == 1].sum()
    )
    assert {c.name for c in timeline.counters} >= {"KV blocks, replica 0", "waiting, replica 1"}
    assert sum(event["ph"] == "X" for event in chrome_events(timeline)) == len(timeline)
    assert len(result.to_timeline(most_requests=0, most_runs=10)) == 10
    named = next(chrome_events(result.to_timeline(about={"workload": "llm:x", "device": "h100"})))
    assert named["args"] == {"name": "llm:x · h100"}
    ranks = serve(Linear(), ServingPlan(dp=2), poisson(5, 20.0)).to_timeline()
    assert ranks.lanes[:2] == ("replica 0 rank 0", "replica 0 rank 1")
