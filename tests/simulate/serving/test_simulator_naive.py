"""The fast simulator equals an obvious one: vLLM's rules, one iteration at a time, every block an object of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.simulate.serving import Batch, Requests, ServingPlan
from foretell.simulate.serving.engine import replica
from foretell.simulate.serving.simulator import SCHEDULERS, Link, serve


@dataclass(frozen=True)
class Linear:
    """Time linear in all that is in a batch, with coefficients that leave no two sums alike."""

    kv_capacity_tokens: int = 640
    kv_bytes_per_token: float = 1000.0

    def time_s(self, batch: Batch) -> np.ndarray:
        time = 0.013 + 1.7e-4 * batch.decode_seqs + 3.1e-6 * batch.decode_tokens + 2.3e-4 * batch.prefill_tokens
        return time + 7.3e-7 * batch.prefill_pairs + 1.9e-6 * batch.prefill_cached + 1.1e-4 * batch.sampled


# The obvious simulator ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Block:
    key: tuple[int, ...] | None = None
    holders: int = 0


@dataclass(eq=False)
class Job:
    id: int
    arrival: float
    inputs: int
    outputs: int
    prefix: int
    prefix_tokens: int
    computed: int = 0
    made: int = 0
    blocks: list[Block] = field(default_factory=list)
    preempted: int = 0
    cached: int = 0
    decodes: bool = False
    scheduled: float | None = None
    first: float | None = None
    finished: float | None = None

    @property
    def known(self) -> int:
        """Tokens there are, prompt and answer; all but the newest decoded one are computed."""
        return self.inputs + self.made


class Cache:
    """A queue of free blocks; those with a key can be found again until they are taken from its head."""

    def __init__(self, count: int, size: int, on: bool) -> None:
        self.size, self.on = size, on
        self.queue = [Block() for _ in range(count)]
        self.by_key: dict[tuple[int, ...], Block] = {}

    def key(self, job: Job, place: int) -> tuple[int, ...]:
        return (job.prefix, place) if (place + 1) * self.size <= job.prefix_tokens else (job.id, place, 0)

    def find(self, job: Job) -> list[Block]:
        found: list[Block] = []
        while self.on and len(found) < (job.known - 1) // self.size and self.key(job, len(found)) in self.by_key:
            found.append(self.by_key[self.key(job, len(found))])
        return found

    def take(self, count: int) -> list[Block]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            if block.key is not None:
                del self.by_key[block.key]
                block.key = None
            block.holders = 1
        return taken

    def extend(self, job: Job, tokens: int) -> bool:
        """Blocks for the first `tokens` tokens of a job."""
        more = -(-tokens // self.size) - len(job.blocks)
        if more > len(self.queue):
            return False
        job.blocks += self.take(max(more, 0))
        return True

    def learn(self, job: Job, since: int, tokens: int, own: bool) -> None:
        """Make known the blocks that fill between these tokens, but for twins of known ones."""
        for place in range(since // self.size, tokens // self.size):
            key, block = self.key(job, place), job.blocks[place]
            if self.on and block.key is None and key not in self.by_key and (own or len(key) == 2):
                block.key, self.by_key[key] = key, block

    def free(self, job: Job, again: bool) -> None:
        self.learn(job, 0, job.computed, own=again)
        for block in reversed(job.blocks):
            block.holders -= 1
            if not block.holders:
                if block.key is not None and len(block.key) == 3 and not again:
                    del self.by_key[block.key]
                    block.key = None
                self.queue.append(block)
        job.blocks = []


def obvious(costs: Linear, plan: ServingPlan, requests: Requests, overlap: bool, whole: bool) -> list[Job]:
    columns = (requests.arrival_s, requests.input_tokens, requests.output_tokens, requests.prefix)
    rows = zip(*(column.tolist() for column in (*columns, requests.prefix_tokens)), strict=True)
    jobs = [Job(i, *row) for i, row in enumerate(rows)]
    coming, waiting, running = list(jobs), [], []
    cache = Cache(costs.kv_capacity_tokens // plan.block_size, plan.block_size, plan.prefix_cache)

    def look(until: float) -> None:
        while coming and coming[0].arrival <= until:
            waiting.append(coming.pop(0))

    now, before = 0.0, None  # before: when the last iteration began, if it has only just ended
    while coming or waiting or running:
        look(now if before is None or not overlap else before)
        if not waiting and not running:
            look(now)
        if not waiting and not running:
            now, before = coming[0].arrival, None
            continue
        budget, chunks, lost, at = plan.max_num_batched_tokens, [], False, 0
        while at < len(running):
            job = running[at]
            new = min(job.known - job.computed, budget)
            while not cache.extend(job, job.computed + new):
                victim = running.pop()
                victim.preempted += 1
                cache.free(victim, again=True)
                victim.computed, victim.decodes, lost = 0, False, True
                waiting.insert(0, victim)
                chunks = [(other, n) for other, n in chunks if other is not victim]
                if victim is job:
                    break
            else:
                if new:
                    chunks.append((job, new))
                    cache.learn(job, job.computed, job.computed + new, own=False)
                budget -= new
            at += 1
        while not lost and waiting and budget > 0 and len(running) < plan.max_num_seqs:
            job = waiting[0]
            found = cache.find(job)
            start = len(found) * plan.block_size
            new = min(job.known - start, budget)
            if new < job.known - start and not plan.chunked_prefill:
                break
            idle = sum(block.holders == 0 for block in found)
            if whole and -(-job.known // plan.block_size) - len(found) + idle > len(cache.queue):
                break
            if -(-(start + new) // plan.block_size) - len(found) + idle > len(cache.queue):
                break
            for block in found:
                if not block.holders:
                    cache.queue.remove(block)
                block.holders += 1
            job.blocks, job.computed = list(found), start
            assert cache.extend(job, start + new)
            cache.learn(job, start, start + new, own=False)
            if job.scheduled is None:
                job.scheduled, job.cached = now, start
            running.append(waiting.pop(0))
            chunks.append((job, new))
            budget -= new
        before = now
        now += float(costs.time_s(batch_of(chunks))[0])
        for job, new in chunks:
            job.computed += new
            if job.computed == job.known:
                job.made += 1
                job.decodes = True
                job.first = now if job.first is None else job.first
                if job.made == job.outputs:
                    job.finished = now
        over = [job for job in running if job.finished is not None]
        for job in sorted(over, key=lambda job: (job.made == 1, job.id)):
            cache.free(job, again=False)
            running.remove(job)
    return jobs


def batch_of(chunks: list[tuple[Job, int]]) -> Batch:
    decode = [(job, n) for job, n in chunks if job.decodes]
    prompts = [(job, n) for job, n in chunks if not job.decodes]
    return Batch.of(
        decode_seqs=len(decode),
        decode_tokens=sum(job.computed for job, _ in decode),
        prefill_seqs=len(prompts),
        prefill_tokens=sum(n for _, n in prompts),
        prefill_pairs=sum(n * job.computed + n * (n + 1) / 2 for job, n in prompts),
        prefill_cached=sum(job.computed for job, _ in prompts),
        sampled=sum(job.computed + n == job.known for job, n in chunks),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Requests:
    count = draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    inputs = rng.integers(1, draw(st.sampled_from([20, 150, 300])), count)
    prefix = rng.integers(1, 4, count)
    return Requests.of(
        np.cumsum(rng.exponential(draw(st.sampled_from([0.001, 0.05, 0.4, 2.0])), count)),
        inputs,
        rng.integers(1, draw(st.sampled_from([3, 40, 200])), count),
        prefix,
        np.minimum(inputs, rng.integers(0, 130, count)) * (rng.random(count) < 0.7),
    )


@settings(max_examples=150, deadline=None)
@given(
    workloads(),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([512, 640, 2048]),
    st.sampled_from([24, 64, 512]),
    st.sampled_from([1, 3, 24]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_equals_the_obvious_simulator(
    requests: Requests, size: int, capacity: int, budget: int, seqs: int, cache: bool, overlap: bool, chunked: bool,
    whole: bool,
) -> None:  # fmt: skip
    plan = ServingPlan(
        version="0.19.0" if whole else "0.18.1",
        block_size=size,
        max_num_batched_tokens=budget if chunked else 512,
        max_num_seqs=seqs,
        prefix_cache=cache,
        chunked_prefill=chunked,
    )
    costs = Linear(capacity)
    result = serve(costs, plan, requests, overlap=overlap, exact=True)
    kept = np.flatnonzero(result.served)
    columns = ("arrival_s", "input_tokens", "output_tokens", "prefix", "prefix_tokens")
    if not len(kept):
        return
    rest = Requests.of(*(getattr(requests, name)[kept] for name in columns))
    jobs = obvious(costs, plan, rest, overlap, whole)
    assert [job.scheduled for job in jobs] == result.first_scheduled_s[kept].tolist()
    assert [job.first for job in jobs] == result.first_token_s[kept].tolist()
    assert [job.finished for job in jobs] == result.finished_s[kept].tolist()
    assert [job.preempted for job in jobs] == result.preemptions[kept].tolist()
    assert [job.cached for job in jobs] == result.cached_tokens[kept].tolist()


@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
@pytest.mark.parametrize("split", [False, True])
@settings(max_examples=40, deadline=None)
@given(requests=workloads(), size=st.sampled_from([1, 16]), capacity=st.sampled_from([512, 1024]), dp=st.integers(1, 3))
def test_runs_of_iterations_equal_single_ones(
    scheduler: str, split: bool, requests: Requests, size: int, capacity: int, dp: int
) -> None:
    """Every scheduler decides in each iteration what it decided for the run."""
    phases = {"prefill_replicas": 1, "decode_replicas": 2} if split and scheduler != "static" else {}
    plan = ServingPlan(block_size=size, max_num_batched_tokens=512, max_num_seqs=8, dp=dp, replicas=3, **phases)
    costs = Linear(capacity)

    def run() -> tuple[list[float], ...]:
        link = Link(1e5, 1e-3)
        result = serve(
            costs, plan, requests, scheduler=scheduler, router="least-loaded", kv_link=link, exact=True
        )
        columns = (result.first_scheduled_s, result.first_token_s, result.finished_s, result.preemptions)
        return tuple(np.nan_to_num(column, nan=-1.0).tolist() for column in columns)

    fast = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "FEWEST", 1)
        patch.setattr(replica, "MOST", 1)
        single = run()
    assert fast == single
