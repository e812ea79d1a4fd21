"""Which device runs which rank, where links between machines differ: simulated annealing over a model of the step.

As in Pipette (Yim et al., DATE 2024): the cluster's bandwidths are taken as measured, pair by pair; the step is that of
memory-efficient 1F1B, whose hidden critical path a slow link lengthens once for every round of micro-batches; and
tensor-parallel groups never leave a machine. What moves are whole groups ("blocks" of `block` neighbouring ranks).

>>> import numpy as np
>>> links = np.full((4, 4), 10.0)
>>> links[0, 1] = links[1, 0] = 1.0                       # one slow pair of machines
>>> work = Work(forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), micro_batches=8, message_bytes=2, gradient_bytes=(4, 4))
>>> found = place(work, links, block=1, per_node=1, data=2, steps=400)
>>> found.default_s, found.time_s
(33.0, 29.4)
>>> found.ranks().tolist()
[2, 1, 0, 3]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError

__all__ = ["Latency", "Placement", "Work", "place"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Work:
    """What a plan asks of each stage of its pipeline. Times are of one micro-batch.

    `message_bytes` is what one rank sends to the next stage for a micro-batch, and gets back as its gradient;
    `gradient_bytes` what each rank of a stage reduces over its data-parallel group at the end of the step.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    micro_batches: int
    message_bytes: float
    gradient_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if not stages or len(self.backward_s) != stages or len(self.gradient_bytes) != stages:
            raise InputError("one forward time, backward time and gradient size for each stage", "work")
        values = (*self.forward_s, *self.backward_s, *self.gradient_bytes, self.message_bytes)
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise InputError("times and bytes must be finite and not negative", "work")
        if self.micro_batches < 1:
            raise InputError(f"{self.micro_batches} micro-batches, want at least 1", "work")

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.forward_s)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each block of ranks runs: `order[stage, replica]` is a slot; slot ``s`` is devices ``s·block`` on.

    `time_s` is the modelled step, `default_s` that of the default order. `tried` counts the placements evaluated.
    """

    order: Ints
    block: int
    time_s: float
    default_s: float
    tried: int

    @property
    def speedup(self) -> float:
        """How many times as fast as the default order."""
        return self.default_s / self.time_s

    def ranks(self) -> Ints:
        """Device of each rank, ranks in Megatron's order (inside a block, data, pipeline): (ranks,)."""
        slots = self.order.reshape(-1)
        return np.asarray((slots[:, None] * self.block + np.arange(self.block)).reshape(-1))


class Latency:
    """The step time of any order of slots: ``order[stage, replica]`` is the slot that runs that stage."""

    def __init__(self, work: Work, bandwidth: Floats, *, block: int, per_node: int, data: int) -> None:
        """`bandwidth` in bytes/s, what one rank attains while its neighbours send too: of each pair of machines, the
        diagonal being inside one; or of each pair of devices."""
        links = np.asarray(bandwidth, dtype=np.float64)
        if links.ndim != 2 or links.shape[0] != links.shape[1]:
            raise InputError(f"a matrix of shape {links.shape}, want a square one", "bandwidth")
        if block < 1 or per_node < 1 or per_node % block:
            raise InputError(
                f"blocks of {block} ranks in machines of {per_node} devices", "placement", "let the block divide them"
            )
        devices = block * data * work.stages
        slots = data * work.stages
        if slots > MOST_BLOCKS:
            raise InputError(f"{slots} blocks, at most {MOST_BLOCKS} are placed", "placement")
        node = np.arange(slots) * block // per_node
        if links.shape[0] == devices and not (per_node == 1 and block == 1):
            # Aligned ranks of two blocks talk to each other: the slowest pair decides.
            shaped = links.reshape(slots, block, slots, block)
            between = np.min(np.einsum("ibjb->ijb", shaped), axis=2)
        elif links.shape[0] == -(-devices // per_node):
            between = links[np.ix_(node, node)]
        else:
            raise InputError(
                f"{links.shape[0]} rows for {devices} devices in machines of {per_node}",
                "bandwidth",
                f"give {-(-devices // per_node)} machines or {devices} devices",
            )
        off = ~np.eye(slots, dtype=np.bool_)
        if not (between[off] > 0).all():
            raise InputError("bandwidths must be positive", "bandwidth")
        self.work, self.data, self.slots, self.node = work, data, slots, node
        with np.errstate(divide="ignore"):
            self.seconds_per_byte = np.where(off, 1.0 / between, 0.0)
        self.forward, self.backward = np.array(work.forward_s), np.array(work.backward_s)
        self.gradients = np.array(work.gradient_bytes)
        # Sums over contiguous ranges of stages, for the hidden critical path.
        stages = work.stages
        both = np.concatenate([[0.0], np.cumsum(self.forward + self.backward)])
        first, last = np.triu_indices(stages)
        self._first, self._last = first, last
        self._busy, self._span = both[last + 1] - both[first], (last - first + 1).astype(np.float64)

    def default(self) -> Ints:
        """Megatron's order: data-parallel neighbours next to each other, then stages: (stages, replicas)."""
        return np.arange(self.slots).reshape(self.work.stages, self.data)

    def hops(self, order: Ints) -> Floats:
        """Seconds to send a micro-batch from each stage to the next, by replica: (replicas, stages - 1)."""
        return np.asarray(self.work.message_bytes * self.seconds_per_byte[order[:-1], order[1:]].T)

    def pipeline(self, hops: Floats) -> Floats:
        """End of each replica's last backward pass on its first stage: (replicas,).

        In steady 1F1B a micro-batch goes from stage s down to stage e and back while s works on e - s + 1 of them, so
        no stage is faster than any such round, (busy time + 2 · hops) / (e - s + 1). That is the hidden critical
        path: the largest mean cycle of the schedule. Against an event simulation of 2 to 6 stages with hops of up
        to half a micro-batch's work, within 8 % from 8 micro-batches on and 2.2 % from 32 on; too slow by up to 25 %
        where there are fewer micro-batches than stages.
        """
        f, b, m, stages = self.forward, self.backward, self.work.micro_batches, self.work.stages
        replicas = len(hops)
        total = np.concatenate([np.zeros((replicas, 1)), np.cumsum(hops, axis=1)], axis=1)
        rounds = self._busy + 2 * (total[:, self._last] - total[:, self._first])
        pace = np.max(rounds / self._span, axis=1)
        warm, end = np.full(replicas, f[-1]), np.full(replicas, b[-1])
        for s in range(stages - 2, -1, -1):
            more = min(m, stages - s) - 1
            warm = f[s] + np.maximum(warm + b[s + 1] + 2 * hops[:, s], more * f[s])
            end = b[s] + np.maximum(end + f[s + 1] + 2 * hops[:, s], more * b[s])
        if m < stages:
            return np.asarray(warm + b[0] + (m - 1) * pace)
        return np.asarray(warm + (m - stages) * pace + end)

    def rings(self, order: Ints) -> Floats:
        """Seconds of each stage's all-reduce over its replicas, as a ring in the order of slots: (stages,)."""
        if self.data == 1:
            return np.zeros(self.work.stages)
        ring = np.sort(order, axis=1)
        slowest = np.max(self.seconds_per_byte[ring, np.roll(ring, -1, axis=1)], axis=1)
        return np.asarray(2 * (self.data - 1) / self.data * self.gradients * slowest)

    def __call__(self, order: Ints) -> float:
        """Seconds of a step: a stage's gradients are reduced when its last backward pass is over, while earlier stages
        still work."""
        hops = self.hops(order)
        ends = self.pipeline(hops)
        lead = np.concatenate([[0.0], np.cumsum(self.backward[:-1])]) + np.concatenate(
            [np.zeros((len(hops), 1)), np.cumsum(hops, axis=1)], axis=1
        )
        ready = np.max(ends[:, None] - lead, axis=0)
        return float(np.max(ready + self.rings(order)))


def place(
    work: Work,
    bandwidth: Floats,
    *,
    block: int,
    per_node: int,
    data: int,
    steps: int = 20_000,
    restarts: int = 4,
    seed: int = 0,
) -> Placement:
    """The best order found by simulated annealing; the same for the same `seed`, and never worse than the default.

    `block` ranks stay together (tensor and context parallelism), `per_node` devices make a machine, `data` replicas of
    the pipeline are trained. Each of `steps` moves swaps two blocks, moves one elsewhere, or turns a run around.
    Raises InputError.
    """
    latency = Latency(work, bandwidth, block=block, per_node=per_node, data=data)
    if steps < 0 or restarts < 1:
        raise InputError(f"{steps} steps and {restarts} restarts", "annealing")
    default = latency.default()
    default_s = latency(default)
    best, best_s, tried = default, default_s, 1
    rng = np.random.default_rng(seed)
    for restart in range(restarts if latency.slots > 1 else 0):
        start = default if restart == 0 else rng.permutation(latency.slots).reshape(default.shape)
        found, found_s, count = _anneal(latency, start, steps // restarts, rng)
        tried += count
        if found_s < best_s:
            best, best_s = found, found_s
    return Placement(best, block, best_s, default_s, tried)


def _anneal(latency: Latency, start: Ints, steps: int, rng: np.random.Generator) -> tuple[Ints, float, int]:
    shape, now = start.shape, start.reshape(-1).copy()
    now_s = latency(start)
    best, best_s = now.copy(), now_s
    # From a twentieth of the step, where nearly any move is taken, down to a millionth; then only what is better.
    hot, cold = 0.05 * now_s, 1e-6 * now_s
    rounds = steps * 3 // 4
    for step in range(rounds):
        temperature = hot * (cold / hot) ** (step / max(1, rounds - 1))
        moved = _move(now, rng)
        moved_s = latency(moved.reshape(shape))
        if moved_s <= now_s or rng.random() < math.exp((now_s - moved_s) / temperature):
            now, now_s = moved, moved_s
            if now_s < best_s:
                best, best_s = now.copy(), now_s
    for _ in range(steps - rounds):
        moved = _move(best, rng)
        if rng.random() < 0.5:  # two moves lead off a plateau where one does not
            moved = _move(moved, rng)
        moved_s = latency(moved.reshape(shape))
        if moved_s <= best_s:
            best, best_s = moved, moved_s
    return best.reshape(shape), best_s, steps + 1


def _move(order: Ints, rng: np.random.Generator) -> Ints:
    """The order with two blocks swapped, one moved elsewhere, or a run of them turned around."""
    kind, i, step = (int(k) for k in rng.integers(0, (3, len(order), len(order) - 1)))
    j = (i + 1 + step) % len(order)
    moved = order.copy()
    if kind == 0:
        moved[i], moved[j] = order[j], order[i]
    elif kind == 1:
        moved = np.insert(np.delete(order, i), j, order[i])
    else:
        low, high = min(i, j), max(i, j) + 1
        moved[low:high] = order[low:high][::-1]
    return moved
