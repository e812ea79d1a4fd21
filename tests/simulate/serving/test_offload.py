"""Tiers of KV caches: what is found, how long it takes, what gives way, and when computing anew is better."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InputError, UnknownNameError
from foretell.simulate.serving import Batch, Requests, ServingPlan
from foretell.simulate.serving.engine import replica
from foretell.simulate.serving.offload import (
    Hierarchy,
    Tier,
    break_even_tokens,
    pipelined_s,
    prefill_of,
    transfer_s,
)
from foretell.simulate.serving.simulator import SCHEDULERS, Served, serve

CHUNK = 256


def host(chunks: float = math.inf, rate: float = 256.0 * 1000.0, **more: float) -> Tier:
    """A tier whose chunk of 256 tokens at 1 byte takes a millisecond."""
    return Tier("host", chunks * CHUNK, rate, **more)  # type: ignore[arg-type]


def test_what_is_stored_is_found_in_whole_chunks() -> None:
    cache = Hierarchy([host()], 1.0)
    assert cache.lookup(1, 1000, 0.0) == (0, 0.0)
    assert cache.store(1, 1000, 0.0) == 768
    assert cache.lookup(1, 1000, 1.0) == (768, pytest.approx(3e-3))
    assert cache.lookup(2, 1000, 2.0) == (0, 0.0)  # another prefix
    assert cache.lookup(1, 300, 3.0) == (256, pytest.approx(1e-3))
    assert cache.hit_rate == pytest.approx((768 + 256) / (1000 + 1000 + 1000 + 300))


def test_a_chunk_is_there_once_it_is_written() -> None:
    cache = Hierarchy([host()], 1.0)
    cache.store(1, 512, now=10.0)  # two writes of a millisecond each, the last chunk first
    assert cache.lookup(1, 512, 10.0015) == (0, 0.0)  # the second is there, but not the first
    assert cache.lookup(1, 512, 10.0021)[0] == 512


def test_reads_queue_behind_each_other() -> None:
    cache = Hierarchy([host()], 1.0)
    cache.store(1, 1024, 0.0)
    assert cache.lookup(1, 1024, 1.0)[1] == pytest.approx(4e-3)
    assert cache.lookup(1, 1024, 1.001)[1] == pytest.approx(7e-3)  # 3 ms of the first are still to come
    assert cache.lookup(1, 1024, 2.0)[1] == pytest.approx(4e-3)


def test_the_least_recently_used_gives_way_and_its_end_before_its_beginning() -> None:
    cache = Hierarchy([host(chunks=4)], 1.0)
    for prefix, now in ((1, 0.0), (2, 1.0)):
        cache.store(prefix, 512, now)
    cache.lookup(1, 512, 2.0)
    cache.store(3, 256, 3.0)
    assert [cache.lookup(p, 512, 4.0 + p)[0] for p in (1, 2, 3)] == [512, 256, 256]


def test_first_in_first_out_does_not_care_about_use() -> None:
    tier = Tier("host", 2 * CHUNK, 1e6, eviction="fifo")
    cache = Hierarchy([tier], 1.0)
    cache.store(1, 256, 0.0)
    cache.store(2, 256, 1.0)
    cache.lookup(1, 256, 2.0)
    cache.store(3, 256, 3.0)
    assert [cache.lookup(p, 256, 4.0)[0] for p in (1, 2, 3)] == [0, 256, 256]


def test_pinned_prefixes_stay_and_cleared_ones_go() -> None:
    tier = host(chunks=2)
    cache = Hierarchy([tier], 1.0)
    cache.store(1, 256, 0.0)
    tier.pin(1)
    cache.store(2, 256, 1.0)
    cache.store(3, 256, 2.0)
    assert [cache.lookup(p, 256, 3.0)[0] for p in (1, 2, 3)] == [256, 0, 256]
    cache.store(4, 1024, 4.0)  # more than fits beside it: a part is kept
    assert tier.used_bytes <= tier.capacity_bytes
    tier.unpin(1)
    assert tier.clear([1]) == 1
    assert cache.lookup(1, 256, 5.0) == (0, 0.0)
    tier.clear()
    assert (len(tier), tier.used_bytes) == (0, 0.0)


def test_pins_do_not_change_whose_turn_it_is() -> None:
    tier = host(chunks=3)
    cache = Hierarchy([tier], 1.0)
    tier.pin(1)
    for prefix in (1, 2, 3, 4):
        cache.store(prefix, 256, float(prefix))
    assert [(p, 0) in tier for p in (1, 2, 3, 4)] == [True, False, True, True]
    tier.unpin(1)
    cache.store(5, 256, 5.0)
    assert [(p, 0) in tier for p in (1, 3, 4, 5)] == [False, True, True, True]


def test_what_was_loaded_gives_way_from_its_end() -> None:
    cache = Hierarchy([host(chunks=3)], 1.0)
    cache.store(1, 768, 0.0)
    cache.lookup(1, 768, 1.0)
    cache.store(2, 256, 2.0)
    assert cache.lookup(1, 768, 3.0)[0] == 512


def test_a_slower_tier_is_asked_next_and_what_it_has_moves_up() -> None:
    fast, disk = host(chunks=2), Tier("disk", 1e9, 256.0 * 100.0)  # 10 ms a chunk
    cache = Hierarchy([fast, disk], 1.0)
    cache.store(1, 512, 0.0)
    cache.store(2, 512, 1.0)  # pushes 1 out of host memory
    assert cache.lookup(1, 512, 2.0) == (512, pytest.approx(20e-3))
    assert cache.hit_tokens == {"host": 0, "disk": 512}
    assert cache.lookup(1, 512, 3.0) == (512, pytest.approx(2e-3))
    assert cache.lookup(2, 512, 4.0)[1] == pytest.approx(20e-3)


def test_written_back_chunks_move_down_when_they_give_way() -> None:
    fast, disk = host(chunks=2), Tier("disk", 1e9, 256.0 * 100.0)
    cache = Hierarchy([fast, disk], 1.0, write="back")
    cache.store(1, 512, 0.0)
    assert len(disk) == 0
    cache.store(2, 512, 1.0)
    assert (len(fast), len(disk)) == (2, 2)
    assert cache.lookup(1, 512, 2.0)[0] == 512


def test_engines_share_what_is_shared_and_nothing_else() -> None:
    remote = Tier("remote", 1e9, 1e6)
    first, second = (Hierarchy([Tier("host", 1e9, 1e9), remote], 1.0) for _ in range(2))
    first.store(1, 512, 0.0)
    assert [tier.name for tier in first.where(1, 512, 1.0)] == ["host", "host"]
    assert [tier.name for tier in second.where(1, 512, 1.0)] == ["remote", "remote"]
    assert second.lookup(1, 512, 1.0)[0] == 512
    assert [tier.name for tier in second.where(1, 512, 2.0)] == ["host", "host"]


def test_compressed_chunks_take_less_room_and_time() -> None:
    cache = Hierarchy([host(chunks=2, compression=4.0)], 1.0)
    cache.store(1, 8 * CHUNK, 0.0)
    assert cache.lookup(1, 8 * CHUNK, 1.0) == (8 * CHUNK, pytest.approx(2e-3))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000), st.booleans()), max_size=60),
    st.integers(0, 12),
    st.sampled_from(["through", "back"]),
    st.sampled_from(["lru", "fifo"]),
)
def test_never_more_than_fits_and_never_what_was_not_stored(
    steps: list[tuple[int, int, bool]], chunks: int, write: str, eviction: str
) -> None:
    tiers = [Tier("host", chunks * CHUNK, 1e6, eviction=eviction), Tier("disk", 2 * chunks * CHUNK, 1e5)]
    cache = Hierarchy(tiers, 1.0, write=write)
    stored: dict[int, int] = {}
    for now, (prefix, tokens, store) in enumerate(steps):
        if store:
            cache.store(prefix, tokens, float(now))
            stored[prefix] = max(stored.get(prefix, 0), tokens // CHUNK * CHUNK)
        else:
            found, seconds = cache.lookup(prefix, tokens, float(now))
            assert found <= min(stored.get(prefix, 0), tokens)
            assert (seconds > 0.0) == (found > 0)
        for tier in tiers:
            assert tier.used_bytes == pytest.approx(len(tier) * CHUNK)
            assert tier.used_bytes <= tier.capacity_bytes


# How long it takes


def test_transfers_by_hand() -> None:
    assert transfer_s(0.0, 1.0, 5.0) == 0.0
    assert transfer_s(1000.0, 100.0, 0.5) == 10.5
    assert transfer_s(1000.0, 100.0, 0.5, transfer_bytes=300.0) == 12.0  # four transfers


def steps_s(load_s: float, compute_s: float, layers: int) -> float:
    """Layer after layer: loading runs on, computing waits for its layer."""
    loaded = done = 0.0
    for _ in range(layers):
        loaded += load_s / layers
        done = max(done, loaded) + compute_s / layers
    return done


@given(st.floats(0, 100), st.floats(0, 100), st.integers(1, 100))
def test_pipelining_is_that_of_the_layers_one_by_one(load_s: float, compute_s: float, layers: int) -> None:
    assert pipelined_s(load_s, compute_s, layers) == pytest.approx(steps_s(load_s, compute_s, layers), abs=1e-9)


@given(
    st.floats(1e-6, 1e-3), st.just(0.0) | st.floats(1e-12, 1e-8), st.floats(1e3, 1e6), st.floats(1e8, 1e11),
    st.floats(0, 1.0),
)  # fmt: skip
def test_loading_wins_from_the_break_even_on(a: float, b: float, k: float, rate: float, latency: float) -> None:
    n = break_even_tokens(a, b, k, rate, latency)
    gain = lambda tokens: a * tokens + b * tokens**2 - (latency + tokens * k / rate)  # noqa: E731
    if math.isinf(n):
        assert b == 0.0
        assert a <= k / rate
        return
    assert gain(n) == pytest.approx(0.0, abs=1e-6 * (latency + n * k / rate) + 1e-9)
    assert gain(2.0 * n + 1.0) > -1e-9
    if n > 2.0:
        assert gain(n / 2.0) < 1e-9


def test_a_prefix_is_computed_where_loading_it_takes_longer() -> None:
    """The hierarchy decides as the formula does: computing n tokens takes n ms + n² µs here."""

    def prefill(cached: np.ndarray, new: np.ndarray) -> np.ndarray:
        total = cached + new
        return 1e-3 * new + 1e-6 * (total**2 - cached**2)

    slow = Tier("remote", 1e12, 500.0)  # 2 ms a token
    cache = Hierarchy([slow], 1.0, prefill_s=prefill)
    n = break_even_tokens(1e-3, 1e-6, 1.0, 500.0)
    assert n == pytest.approx(1000.0)
    for prefix, tokens in ((1, 768), (2, 2048)):
        slow.put((prefix, 0), 0.0, 0.0)
        cache.store(prefix, tokens, 0.0)
    assert cache.lookup(1, 768, 1e6)[0] == 0
    assert cache.lookup(2, 2048, 2e6)[0] == 2048


def test_the_beginning_that_is_near_is_loaded_and_the_rest_computed() -> None:
    near, far = Tier("host", 4 * CHUNK, 1e9), Tier("remote", 1e9, 10.0)
    cache = Hierarchy([near, far], 1.0, prefill_s=lambda cached, new: 1e-3 * new)
    far_only = Hierarchy([far], 1.0)
    far_only.store(1, 8 * CHUNK, 0.0)
    near.put((1, 0), CHUNK, 0.0)
    near.put((1, 1), CHUNK, 0.0)
    got = cache.admit(1, 8 * CHUNK, 10 * CHUNK, 1e6)
    assert (got.tokens, got.found) == (2 * CHUNK, 8 * CHUNK)
    assert got.compute_s == pytest.approx(1e-3 * 10 * CHUNK)
    assert got.ready_s == pytest.approx(1e-3 * 8 * CHUNK, rel=1e-3)


@pytest.mark.parametrize(("rate", "loaded"), [(500.0, 0), (2000.0, 8 * CHUNK)])
def test_all_or_nothing(rate: float, loaded: int) -> None:
    """A token computes in a millisecond; in the first case it loads in two, and loading half would be best."""
    remote = Tier("remote", 1e9, rate)
    how = {"prefill_s": lambda cached, new: 1e-3 * new, "layers": 1000}
    parts, whole = (Hierarchy([remote], 1.0, partial=partial, **how) for partial in (True, False))  # type: ignore[arg-type]
    parts.store(1, 8 * CHUNK, 0.0)
    assert whole.admit(1, 8 * CHUNK, 8 * CHUNK, 1e6).tokens == loaded
    some = parts.admit(1, 8 * CHUNK, 8 * CHUNK, 2e6)
    assert 0 < some.tokens < 8 * CHUNK
    assert some.ready_s < some.compute_s


def test_a_whole_prompt_that_is_found_still_computes_its_last_token() -> None:
    cache = Hierarchy([host()], 1.0, prefill_s=lambda cached, new: 1e-3 * new)
    cache.store(1, 512, 0.0)
    got = cache.admit(1, 512, 512, 1.0)
    assert got.tokens == 512
    assert got.ready_s == pytest.approx(2e-3 + 1e-3)


class Counted:
    """Iterations of a second a token and another for each thousand pairs; batches are kept."""

    def __init__(self) -> None:
        self.seen: list[Batch] = []

    def time_s(self, batch: Batch) -> np.ndarray:
        self.seen.append(batch)
        return batch.prefill_tokens + batch.prefill_pairs / 1000.0


def test_prompts_longer_than_an_iteration_take_several() -> None:
    counted = Counted()
    seconds = prefill_of(counted, chunk_tokens=100)(np.array([0.0, 50.0]), np.array([250.0, 100.0]))
    pairs = 250 * 251 / 2, 100 * 50 + 100 * 101 / 2
    assert seconds == pytest.approx([250 + pairs[0] / 1000, 100 + pairs[1] / 1000])
    assert [batch.prefill_tokens.tolist() for batch in counted.seen] == [[100.0, 100.0], [100.0], [50.0]]
    assert [batch.sampled.tolist() for batch in counted.seen] == [[0.0, 1.0], [0.0], [1.0]]


def test_an_engine_gives_blocks_and_gets_them_back() -> None:
    cache = Hierarchy([Tier("host", 2 * 16.0, 16.0, own_links=True), Tier("disk", 1e3, 1.6)], 1.0)
    tier = cache.engine_tier(block_tokens=16)
    prefix = [(7, place) for place in range(3)]
    for place in range(3):
        tier.put((7, place))
    tier.put((7, 0, 0))  # a preempted sequence's, not the prefix's
    assert [tier.has((7, place)) for place in range(4)] == [True, True, True, False]
    # By now host memory holds the last of the prefix and the sequence's; the first two come from the disk.
    assert tier.load_s(prefix) == pytest.approx(max(1.0, 2 * 10.0))
    assert tier.load_s([]) == 0.0
    assert cache.hit_tokens == {"host": 16, "disk": 32}
    # What came from the disk is in host memory now, the prefix's beginning last of all.
    assert [chunk in cache.tiers[0] for chunk in ((7, 0), (7, 1), (7, 2))] == [True, True, False]
    # Engines wait for each other's reads of the disk, and have links of their own to host memory.
    assert tier.load_s([(7, 2)], 5.0, 1) == pytest.approx(15.0 + 10.0)
    assert tier.load_s([(7, 2)], 20.0, 0) == pytest.approx(1.0)
    assert tier.load_s([(7, 2)], 20.0, 0) == pytest.approx(2.0)
    assert tier.load_s([(7, 2)], 20.0, 1) == pytest.approx(1.0)
    assert tier.has((7, 0, 0))
    assert not tier.has((8, 0, 0))


class Costs:
    """An engine that holds 560 tokens; a prompt token takes a millisecond, an iteration another."""

    kv_capacity_tokens = 560
    kv_bytes_per_token = 1.0

    def time_s(self, batch: Batch) -> np.ndarray:
        return 1e-3 + 1e-3 * batch.prefill_tokens


def test_replicas_of_an_engine_find_what_another_computed() -> None:
    """Two prefixes of 512 tokens take turns; the device holds one."""
    prefix = np.array([1, 2, 1, 2, 1, 2])
    requests = Requests.of(np.arange(6) * 10.0, 544, 2, prefix, 512)
    plan = ServingPlan(prefix_cache=True)
    alone = serve(Costs(), plan, requests)
    assert alone.cached_tokens.tolist() == [0] * 6
    tier = Hierarchy([Tier("host", 1e6, 512e3)], 1.0).engine_tier(plan.block_size)
    kept = serve(Costs(), plan, requests, tier=tier)
    assert kept.cached_tokens.tolist() == [0, 0, 512, 512, 512, 512]
    ttft = kept.first_token_s - kept.arrival_s
    assert ttft[:2] == pytest.approx(0.545)
    assert ttft[2:] == pytest.approx(0.033 + 1e-3)  # 32 tokens computed, 512 loaded in a millisecond
    # Another engine finds what it never computed.
    shared = Hierarchy([Tier("host", 1e6, 512e3)], 1.0).engine_tier(plan.block_size)
    first = serve(Costs(), plan, requests, tier=shared)
    second = serve(Costs(), plan, Requests.of([0.0], 544, 2, 1, 512), tier=shared)
    assert first.cached_tokens.tolist() == kept.cached_tokens.tolist()
    assert second.cached_tokens.tolist() == [512]


def test_others_go_on_while_a_cache_is_loaded() -> None:
    """A document of 256 tokens takes three seconds from a tier; another request comes a second later."""
    requests = Requests.of([0.0, 1.0], 288, 2, [1, 2], [256, 0])
    plan = ServingPlan(prefix_cache=True)

    class Roomy(Costs):
        kv_capacity_tokens = 640

    def served(blocking: bool) -> Served:
        tier = Hierarchy([Tier("host", 1e6, 256.0 / 3.0)], 1.0).engine_tier(plan.block_size)
        for place in range(16):
            tier.put((1, place))
        return serve(Roomy(), plan, requests, tier=tier, blocking_loads=blocking, overlap=False)

    beside, held = served(False), served(True)
    for found in (beside, held):
        assert found.cached_tokens.tolist() == [256, 0]
        assert found.first_token_s[0] == pytest.approx(3.0 + 0.033)  # 32 tokens of the prompt are left
    assert beside.first_token_s[1] == pytest.approx(1.0 + 0.289)
    assert held.first_token_s[1] == pytest.approx(3.033 + 0.289)
    # While it is on its way blocks for all of its prompt are kept.
    assert beside.runs.kv_blocks[0] == 2 * 18


@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS.names() if name != "static"])
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), capacity=st.sampled_from([1200, 1600, 20_000]), rate=st.sampled_from([1.0, 30.0]),
    load=st.sampled_from([1e3, 1e5, 1e8]), room=st.sampled_from([3e5, 1e9]), blocking=st.booleans(),
    eager=st.booleans(), dp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]), cut=st.booleans(),
)  # fmt: skip
def test_nobody_is_lost_while_caches_are_loaded(
    scheduler: str, seed: int, capacity: int, rate: float, load: float, room: float, blocking: bool, eager: bool,
    dp: int, pp: int, cut: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    prefix = rng.integers(1, 8, 40)
    shared = prefix * 50
    requests = Requests.of(
        np.cumsum(rng.exponential(1 / rate, 40)), shared + rng.integers(1, 200, 40), rng.integers(1, 300, 40), prefix,
        shared,
    )  # fmt: skip
    plan = ServingPlan(
        prefix_cache=True, max_num_seqs=8, max_num_batched_tokens=512 if cut else 2048, chunked_prefill=cut, replicas=2,
        dp=dp, pp=pp, version="0.18",
    )  # fmt: skip

    class Small(Costs):
        kv_capacity_tokens = capacity

    def served() -> Served:
        tiers = [Tier("host", room, 4.0 * load, own_links=True), Tier("disk", 4.0 * room, load)]
        tier = Hierarchy(tiers, 1.0).engine_tier(plan.block_size, eager=eager)
        return serve(Small(), plan, requests, scheduler=scheduler, tier=tier, blocking_loads=blocking, exact=True)

    result = served()
    assert result.served.all()
    assert (result.output_tokens == requests.output_tokens).all()
    assert (result.runs.sampled.astype(np.int64) * result.runs.iterations).sum() == requests.output_tokens.sum()
    assert result.runs.kv_blocks.max() <= capacity // 16
    if not eager or room < 1e9 or pp > 1:
        return  # when blocks are taken or evicted within a run of iterations is not seen by others
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "FEWEST", 1)
        patch.setattr(replica, "MOST", 1)
        single = served()
    assert result.finished_s.tolist() == single.finished_s.tolist()
    assert result.first_token_s.tolist() == single.first_token_s.tolist()


def test_bad_input_says_what() -> None:
    tier = host()
    for tiers, more, text in (
        ([], {}, "no tier"), ([tier, tier], {}, "twice"), ([tier], {"write": "around"}, "through or back"),
        ([tier], {"chunk_tokens": 0}, "from 1 on"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=text):
            Hierarchy(tiers, 1.0, **more)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"bytes_per_token is 0\.0; give a number above 0"):
        Hierarchy([tier], 0.0)
    with pytest.raises(UnknownNameError, match="lru"):
        Tier("host", 1.0, 1.0, eviction="lur")
    with pytest.raises(InputError, match=r"read_bytes_per_s is 0\.0"):
        Tier("host", 1.0, 0.0)
    with pytest.raises(InputError, match="capacity"):
        Tier("host", -1.0, 1.0)
    with pytest.raises(InputError, match="latency"):
        Tier("host", 1.0, 1.0, latency_s=-1.0)
    with pytest.raises(InputError, match="layers"):
        pipelined_s(1.0, 1.0, 0)
