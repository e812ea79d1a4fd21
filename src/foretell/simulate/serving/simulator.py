"""`serve`: an event-driven simulation of engines that serve requests.

Events are requests that come, runs of iterations that end, and caches that arrive over a link, in order of time and,
at one time, in that order and then by serial number; so the same input gives the same bytes.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from functools import partial
from heapq import heappop, heappush
from types import MappingProxyType

import numpy as np

from foretell.errors import InfeasibleError, InputError
from foretell.simulate.serving.engine.blocks import Blocks, Tier
from foretell.simulate.serving.engine.link import HostTier, Link
from foretell.simulate.serving.engine.rank import SCHEDULERS, Rank, Scheduler
from foretell.simulate.serving.engine.replica import Costs, Replica
from foretell.simulate.serving.engine.router import ROUTERS, Router, Routing
from foretell.simulate.serving.engine.sequence import Seq
from foretell.simulate.serving.engine.served import Runs, RunsWriter, Served
from foretell.simulate.serving.engine.tabled import Tabled
from foretell.simulate.serving.engine.version import since
from foretell.simulate.serving.given import instance, number, whole
from foretell.simulate.serving.plan import ServingPlan
from foretell.simulate.serving.requests import Requests
from foretell.units import format_bytes

__all__ = ["ROUTERS", "SCHEDULERS", "Costs", "HostTier", "Link", "Runs", "Served", "Tabled", "overlaps", "serve"]

#: First version of vLLM that forms the next iteration while one runs unless told otherwise (asynchronous scheduling).
_VLLM_OVERLAPS = (0, 14)
REASONS = (
    "",
    "longer than max_model_len",
    "longer than the KV cache",
    "prompt longer than max_num_batched_tokens, and prompts are not cut into chunks",
)


def overlaps(plan: ServingPlan) -> bool:
    """Whether the plan's engine forms the next iteration while one runs, which then misses who comes meanwhile.

    >>> overlaps(ServingPlan(engine="vllm", version="0.10.1")), overlaps(ServingPlan(engine="sglang"))
    (False, True)
    """
    if plan.engine == "static":
        return False
    return plan.engine != "vllm" or since(plan.version, _VLLM_OVERLAPS)


def serve(
    iterations: Costs,
    plan: ServingPlan,
    requests: Requests,
    *,
    concurrency: int = 0,
    offline: bool = False,
    scheduler: str | Scheduler | None = None,
    router: str | Router | None = None,
    overlap: bool | None = None,
    host_link: Link | None = None,
    kv_link: Link | None = None,
    decode_iterations: Costs | None = None,
    decode_plan: ServingPlan | None = None,
    tier: Tier | None = None,
    blocking_loads: bool = False,
    exact: bool = False,
    seed: int = 0,
) -> Served:
    """Serve `requests` on replicas as `plan` describes, each of whose iterations takes what `iterations` says.

    Requests come at their arrivals; with `concurrency` above 0 so many are under way at a time and the next comes as
    one ends, with `offline` all come at 0. `scheduler` and `router` are names or callables, by default those of
    ``plan.engine`` and ``plan.router``; `overlap` overrides `overlaps`. Iterations that only decode are read from a
    table (`Tabled`), unless `exact`.

    A plan with ``prefill_replicas`` and ``decode_replicas`` runs prompts on the first and sends their caches over
    `kv_link` to the others, which may have `decode_iterations` and a `decode_plan` of their own. `host_link` leads to
    host memory of ``host_kv_bytes``, for preemption by swap or else for evicted blocks; `tier` takes its place for
    these. A sequence waits for what is loaded from there while others go on; with `blocking_loads` the iteration that
    admits it waits. `seed` is for routers that draw lots.

    A request that can never be served is refused, with the reason, and all others are served to their last token.
    Raises InfeasibleError where not one block fits, InputError where the plan and the arguments do not go together.
    """
    instance(plan, ServingPlan, "plan", "serving", "a ServingPlan")
    instance(requests, Requests, "requests", "serving", "Requests, as Requests.of makes them")
    for name, wanted, missing in (
        ("iterations", "something like Iterations", _lacks(iterations, "kv_capacity_tokens", "time_s")),
        ("tier", "something like HostTier", tier is not None and _lacks(tier, "put", "has", "load_s")),
    ):
        if missing:
            raise InputError(f"{name} has no {missing}", "serving", f"give {wanted}")
    whole(concurrency, "concurrency", "serving")
    instance(offline, bool, "offline", "serving", "True or False")
    whole(seed, "seed", "serving")
    for name, link in (("host_link", host_link), ("kv_link", kv_link)):
        if link is not None:
            instance(link, Link, name, "serving", "Link(bytes_per_s)")
    if overlap is not None:
        instance(overlap, bool, "overlap", "serving", "True or False")
    if decode_plan is not None:
        instance(decode_plan, ServingPlan, "decode_plan", "serving", "a ServingPlan")
    if concurrency and offline:
        raise InputError(f"concurrency {concurrency} with offline={offline}", "serving", "choose one kind of load")
    split = bool(plan.prefill_replicas or plan.decode_replicas)
    if not split and (decode_iterations is not None or decode_plan is not None):
        what = "decode_iterations or decode_plan for a plan that is not disaggregated"
        raise InputError(what, "serving", "give the plan prefill_replicas and decode_replicas")
    if split and (not (plan.prefill_replicas and plan.decode_replicas) or kv_link is None):
        what = f"{plan.prefill_replicas} replicas for prompts, {plan.decode_replicas} to decode, kv_link {kv_link}"
        raise InputError(what, "serving plan", "disaggregation needs both, and a link between them")
    if not exact:
        iterations = _tabled(iterations)
        decode_iterations = None if decode_iterations is None else _tabled(decode_iterations)
    if split and plan.engine == "static":
        raise InputError("static batches end where they began", "serving plan", "disaggregate another engine")
    later_plan, later = decode_plan or plan, decode_iterations or iterations
    event_loop = _Simulation(plan, requests, kv_link if split else None, blocking_loads, seed)
    policy = _scheduler(scheduler, plan)
    lag = overlaps(plan) if overlap is None else overlap
    route = ROUTERS.named(plan.router if router is None else router).run if not callable(router) else router
    for _ in range(plan.prefill_replicas if split else plan.replicas):
        event_loop.add(iterations, plan, policy, lag, host_link, tier, hands_over=split)
    event_loop.route = route
    if split:
        event_loop.first_decoder = len(event_loop.replicas)
        for _ in range(plan.decode_replicas):
            event_loop.add(later, later_plan, policy, lag, host_link, tier)
    event_loop.refuse(plan, later_plan if split else plan)
    event_loop.run(concurrency, offline)
    return event_loop.served(
        {
            "engine": plan.engine if scheduler is None or callable(scheduler) else scheduler,
            "load": "offline" if offline else f"concurrency {concurrency}" if concurrency else "open loop",
            "seed": str(seed),
        }
    )


def _lacks(given: object, *names: str) -> str:
    """The first of these attributes that it has not; "" where it has all."""
    return next((name for name in names if not hasattr(type(given), name) and not hasattr(given, name)), "")


def _tabled(costs: Costs) -> Costs:
    return costs if isinstance(costs, Tabled) else Tabled(costs)


def _scheduler(scheduler: str | Scheduler | None, plan: ServingPlan) -> Scheduler:
    if callable(scheduler):
        return scheduler
    return SCHEDULERS.named(plan.engine if scheduler is None else scheduler).run


class _Simulation:
    """The event loop over all replicas."""

    route: Router

    def __init__(
        self, plan: ServingPlan, requests: Requests, kv_link: Link | None, blocking_loads: bool, seed: int
    ) -> None:
        count = len(requests)
        self.requests = requests
        #: By number, the lanes of each: batches that are on their way through its pipeline at a time.
        self.replicas: list[list[Replica]] = []
        self._lanes: list[Replica] = []
        #: Index of the first replica that only decodes; 0: all do everything.
        self.first_decoder = 0
        self._kv_link = kv_link
        self._blocking_loads = blocking_loads
        self._ranks = 0
        self._rng = random.Random(seed)
        self._writer = RunsWriter()
        self._capacity: list[int] = []
        self._costs: list[Costs] = []
        #: Void where a replica's serial has moved on; with a sequence, its cache has arrived from another or a tier.
        self._events: list[tuple[float, int, int, int, Seq | None, Rank | None]] = []
        self._serial = 0
        self._link_free: list[float] = []
        self._size = plan.block_size
        self._arrival = np.full(count, np.nan)
        self._scheduled = np.full(count, np.nan)
        self._first = np.full(count, np.nan)
        self._finished = np.full(count, np.nan)
        self._made = np.zeros(count, dtype=np.int32)
        self._cached = np.zeros(count, dtype=np.int32)
        self._preempted = np.zeros(count, dtype=np.int32)
        self._prefilled_by = np.full(count, -1, dtype=np.int32)
        self._replica = np.full(count, -1, dtype=np.int32)
        self._refused = np.zeros(count, dtype=np.int8)
        self._now = 0.0

    # Building ------------------------------------------------------------------------------------------------------

    def add(
        self, costs: Costs, plan: ServingPlan, schedule: Scheduler, lag: bool, link: Link | None, tier: Tier | None,
        *, hands_over: bool = False,
    ) -> None:  # fmt: skip
        """Add a replica.

        With a pipeline, `pp` batches of different sequences are on their way through it at a time; they take from the
        same blocks.
        """
        if plan.max_num_seqs > plan.max_num_batched_tokens:
            what = f"max_num_seqs {plan.max_num_seqs} is above max_num_batched_tokens {plan.max_num_batched_tokens}"
            raise InputError(what, "serving plan", "each running sequence takes a token of every iteration")
        number(costs.kv_capacity_tokens, "kv_capacity_tokens", "iterations", most=2**62)
        number(costs.kv_bytes_per_token, "kv_bytes_per_token", "iterations", most=2**62)
        capacity = int(costs.kv_capacity_tokens) // plan.block_size
        if capacity < 1:
            what = f"the KV cache holds {int(costs.kv_capacity_tokens)} tokens, less than a block of {plan.block_size}"
            raise InfeasibleError(what, "use more or larger devices, narrower formats or smaller batches")
        block_bytes = plan.block_size * costs.kv_bytes_per_token
        swaps = plan.preemption == "swap"
        if link is None and (swaps or (plan.host_kv_bytes and tier is None)):
            raise InputError("KV blocks move to host memory over no link", "serving plan", "give host_link")
        if swaps and not plan.host_kv_bytes:
            raise InputError("KV blocks are swapped to no memory", "serving plan", "give host_kv_bytes")
        host = int(plan.host_kv_bytes // block_bytes) if block_bytes else 0
        if plan.host_kv_bytes and block_bytes and not host:
            what = f"{format_bytes(plan.host_kv_bytes)} hold less than a block of {plan.block_size} tokens"
            repair = f"give it {format_bytes(math.ceil(block_bytes))} or more"
            raise InputError(what, "host memory (host_kv_bytes)", repair)
        plan = plan.replace(max_num_seqs=-(-plan.max_num_seqs // plan.pp))
        ranks: list[Rank] = []
        pools: list[Blocks] = []
        for index in range(plan.pp * plan.dp):
            if index < plan.dp:
                below = tier
                if below is None and host and link is not None and not swaps:
                    below = HostTier(host, block_bytes, link)
                pools.append(Blocks(capacity, plan.block_size, cache=plan.prefix_cache, tier=below))
            ranks.append(
                Rank(
                    plan,
                    pools[index % plan.dp],
                    schedule,
                    number=self._ranks,
                    waits=self._blocking_loads,
                    swap=(link, block_bytes, host // plan.pp) if swaps and link is not None else None,
                    preempted=self._note_preemption,
                    scheduled=self._note_scheduled,
                    loading=partial(self._note_load, len(self._lanes) + index // plan.dp),
                )
            )
            self._ranks += 1
            ranks[-1].hands_over = hands_over
        for rank in ranks:
            rank.peers = [peer for peer in ranks if peer.blocks is rank.blocks]
        lanes = []
        for lane in range(plan.pp):
            first = lane * plan.dp
            mine = dict(enumerate(ranks[first : first + plan.dp], start=first))
            lanes.append(
                Replica(len(self.replicas), len(self._lanes), mine, costs, overlap=lag, writer=self._writer)
            )
            self._lanes.append(lanes[-1])
        self.replicas.append(lanes)
        self._capacity.append(capacity)
        self._costs.append(costs)
        self._link_free.append(0.0)

    def refuse(self, plan: ServingPlan, later: ServingPlan) -> None:
        """Mark the requests that can never be served. The last token of an answer is never cached."""
        inputs = self.requests.input_tokens.astype(np.float64)
        total = inputs + self.requests.output_tokens
        for at, (one, capacity) in enumerate(zip((plan, later), (self._capacity[0], self._capacity[-1]), strict=True)):
            if one.max_model_len:
                self._refused[(self._refused == 0) & (total > one.max_model_len)] = 1
            cached = total - 1 if at or not self.first_decoder else inputs
            self._refused[(self._refused == 0) & (cached > capacity * one.block_size)] = 2
            if not at and not one.chunked_prefill and one.engine != "static":
                self._refused[(self._refused == 0) & (inputs > one.max_num_batched_tokens)] = 3

    # Notes ---------------------------------------------------------------------------------------------------------

    def _note_preemption(self, seq: Seq) -> None:
        self._preempted[seq.id] += 1

    def _note_scheduled(self, seq: Seq, cached: int) -> None:
        if not seq.ready:
            self._scheduled[seq.id] = self._now
            self._cached[seq.id] = cached

    def _note_load(self, lane: int, rank: Rank, seq: Seq, time_s: float) -> None:
        self._serial += 1
        heappush(self._events, (time_s, self._serial, lane, 0, seq, rank))

    # Running -------------------------------------------------------------------------------------------------------

    def run(self, concurrency: int, offline: bool) -> None:
        """Serve all requests that were not refused."""
        split = self.first_decoder
        self._routing = Routing([0] * (split or len(self.replicas)), self._rng)
        self._decoding = Routing([0] * (len(self.replicas) - split), self._rng) if split else self._routing
        wanted = np.flatnonzero(self._refused == 0)
        self._arrival[self._refused > 0] = 0.0 if offline or concurrency else self.requests.arrival_s[self._refused > 0]
        source = self._sequences(wanted)
        times = self.requests.arrival_s[wanted] if not offline and not concurrency else np.zeros(len(wanted))
        upcoming = len(wanted) if not concurrency else min(concurrency, len(wanted))
        queue: deque[None] | None = deque([None] * (len(wanted) - upcoming)) if concurrency else None
        came, events = 0, self._events
        chunk: list[float] = []
        while came < upcoming or events:
            if came < upcoming:
                if not came % 65536:
                    chunk = times[came : came + 65536].tolist()
                arrival = chunk[came % 65536]
                if not events or arrival <= events[0][0]:
                    came += 1
                    self._now = arrival
                    self._come(next(source), arrival)
                    continue
            now, _, index, serial, seq, rank = heappop(events)
            if seq is not None and rank is not None:
                self._now = now
                (self._loaded if seq.loading else self._received)(seq, rank, index, now)
                continue
            replica = self._lanes[index]
            if serial != replica.serial:
                continue
            self._now = now
            if replica.busy:
                ended = self._end(replica, now)
                for other in self.replicas[replica.index] if replica.shared else ():
                    if other.waits:  # blocks may be free by now
                        self._schedule(other, now)
                if queue is not None:
                    for _ in range(min(ended, len(queue))):
                        queue.popleft()
                        self._come(next(source), now)
            if replica.begin(now):
                self._schedule(replica, replica.end_s)
        missing = int(np.isnan(self._finished[wanted]).sum())
        if missing:
            raise InfeasibleError(f"{missing} requests can never be scheduled", "the scheduler leaves them waiting")

    def _sequences(self, wanted: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Iterator[Seq]:
        columns = self.requests
        for start in range(0, len(wanted), 65536):
            part = wanted[start : start + 65536]
            rows = (columns.input_tokens, columns.output_tokens, columns.prefix, columns.prefix_tokens)
            for row in zip(part.tolist(), *(column[part].tolist() for column in rows), strict=True):
                yield Seq(*row)

    def _schedule(self, replica: Replica, time_s: float) -> None:
        replica.serial += 1
        self._serial += 1
        heappush(self._events, (time_s, self._serial, replica.lane, replica.serial, None, None))

    def _give(self, lanes: list[Replica], seq: Seq, now: float) -> None:
        replica = lanes[0] if len(lanes) == 1 else min(lanes, key=lambda lane: lane.count)
        if replica.arrive(seq, now):
            self._schedule(replica, replica.end_s if replica.busy else now)

    def _come(self, seq: Seq, now: float) -> None:
        self._arrival[seq.id] = now
        routing = self._routing
        index = self.route(seq, routing)
        routing.sent += 1
        routing.loads[index] += 1
        self._prefilled_by[seq.id] = self._replica[seq.id] = index
        self._give(self.replicas[index], seq, now)

    def _end(self, replica: Replica, now: float) -> int:
        """End a run of iterations; returns how many requests are done."""
        first, done = replica.end()
        for rank, seq in first:
            self._first[seq.id] = now
            if self._kv_link is not None and seq.made < seq.outputs:
                self._send(replica, rank, seq, now)
        for _, seq in done:
            self._finished[seq.id] = now
            self._made[seq.id] = seq.made
            if not self.first_decoder or replica.index < self.first_decoder:
                self._routing.loads[replica.index] -= 1
            else:
                self._decoding.loads[replica.index - self.first_decoder] -= 1
        return len(done)

    def _send(self, replica: Replica, rank: Rank, seq: Seq, now: float) -> None:
        """Send a prompt's cache to where it is decoded: one after the other over the replica's link."""
        assert self._kv_link is not None
        rank.hand_over(seq)
        nbytes = seq.prompt * self._costs[replica.index].kv_bytes_per_token
        start = max(now, self._link_free[replica.index])
        self._link_free[replica.index] = start + nbytes / self._kv_link.bytes_per_s
        self._serial += 1
        event = (start + self._kv_link.seconds(nbytes), self._serial, replica.lane, 0, seq, rank)
        heappush(self._events, event)

    def _loaded(self, seq: Seq, rank: Rank, index: int, now: float) -> None:
        """A cache has arrived from a tier: its sequence is first in line."""
        seq.loading = False
        replica = self._lanes[index]
        if replica.back(rank, seq, now):
            self._schedule(replica, replica.end_s if replica.busy else now)

    def _received(self, seq: Seq, rank: Rank, index: int, now: float) -> None:
        """A cache has arrived: its blocks are free where it came from, and it goes on where it is decoded."""
        rank.handed_over(seq)
        sender = self._lanes[index]
        self._routing.loads[sender.index] -= 1
        for lane in self.replicas[sender.index] if sender.shared else (sender,):
            if not lane.busy and (lane is sender or lane.waits):  # its blocks are free now
                self._schedule(lane, now)
        seq.ready, seq.computed = True, 0
        to = self.route(seq, self._decoding)
        self._decoding.sent += 1
        self._decoding.loads[to] += 1
        self._replica[seq.id] = self.first_decoder + to
        self._give(self.replicas[self.first_decoder + to], seq, now)

    def served(self, about: dict[str, str]) -> Served:
        """The result."""
        return Served(
            arrival_s=self._arrival,
            first_scheduled_s=self._scheduled,
            first_token_s=self._first,
            finished_s=self._finished,
            input_tokens=self.requests.input_tokens,
            output_tokens=self._made,
            cached_tokens=self._cached,
            preemptions=self._preempted,
            prefill_replica=self._prefilled_by,
            replica=self._replica,
            refused=self._refused,
            reasons=REASONS,
            runs=self._writer.done(),
            kv_capacity_blocks=tuple(self._capacity),
            block_size=self._size,
            breaks_s=np.array(self._writer.breaks).reshape(-1, 2),
            about=MappingProxyType({**dict(self.requests.about), **about}),
        )

