"""Who sends how much to whom in one step of training: flows between ranks, by kind of parallelism.

Collectives are taken as their bandwidth-optimal form: a ring, a hierarchy of two rings where a group spans several
domains with the same places in each (scatter inside, reduce between equal places, gather inside), and a direct exchange
for all-to-all. Bytes are of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.simulate.training.plan import TrainingPlan
from foretell.simulate.training.stages import layers_of
from foretell.workload.llm.config import LLMConfig
from foretell.workload.llm.weights import layer_weights, model_weights

__all__ = ["KINDS", "LOCALITIES", "Traffic", "traffic"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KINDS = ("tp", "cp", "ep", "pp", "dp")
#: How far a flow goes: within its domain; along its rail; to another rail of another domain.
LOCALITIES = ("domain", "rail", "cross")

MOST_FLOWS = 50_000_000
MOST_MATRIX = 8192

_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Flows between ranks, columns (flows,): from `source` to `target`, `nbytes`, and an index into `KINDS`."""

    ranks: int
    domain: int
    source: Ints
    target: Ints
    nbytes: Floats
    kind: Ints

    @property
    def locality(self) -> Ints:
        """For each flow an index into `LOCALITIES`."""
        same = self.source // self.domain == self.target // self.domain
        rail = self.source % self.domain == self.target % self.domain
        return np.where(same, 0, np.where(rail, 1, 2))

    def totals(self) -> Mapping[str, Mapping[str, float]]:
        """Bytes by kind and locality."""
        sums = np.zeros((len(KINDS), len(LOCALITIES)))
        np.add.at(sums, (self.kind, self.locality), self.nbytes)
        rows = zip(KINDS, sums.tolist(), strict=True)
        return MappingProxyType({k: MappingProxyType(dict(zip(LOCALITIES, row, strict=True))) for k, row in rows})

    def of(self, kind: str) -> Traffic:
        """The flows of one kind."""
        keep = self.kind == KINDS.index(kind)
        return Traffic(
            self.ranks, self.domain, self.source[keep], self.target[keep], self.nbytes[keep], self.kind[keep]
        )

    def matrix(self) -> Floats:
        """Bytes from each rank (row) to each other: (ranks, ranks)."""
        if self.ranks > MOST_MATRIX:
            raise InputError(f"{self.ranks} ranks, a matrix is made of up to {MOST_MATRIX}", "traffic", "use the flows")
        made = np.zeros((self.ranks, self.ranks))
        np.add.at(made, (self.source, self.target), self.nbytes)
        return made

    def pairs(self) -> float:
        """Share of ordered pairs of ranks in different domains that exchange anything."""
        outside = self.locality > 0
        used = np.unique(self.source[outside] * self.ranks + self.target[outside])
        every = self.ranks * (self.ranks - self.domain)
        return len(used) / every if every else 0.0


def traffic(config: LLMConfig, plan: TrainingPlan, *, domain: int) -> Traffic:
    """The flows of a step; `domain` ranks in a row share a high-bandwidth domain. Raises InputError.

    Activations and parameters travel in 16 bits, gradients in the plan's `grad_dtype`.
    """
    ranks = plan.devices
    if domain < 1 or ranks % domain:
        raise InputError(f"{ranks} ranks in domains of {domain}", "traffic", "let them divide")
    if config.moe is not None and (plan.dp * plan.cp) % plan.ep:
        raise InputError(f"ep {plan.ep} does not divide dp · cp = {plan.dp * plan.cp}", "traffic")
    made = _Flows(ranks, domain)
    counts = layers_of(config, plan.pp, plan.vp, plan.first_layers, plan.last_layers).sum(axis=1)  # (pp, groups)
    rank = np.arange(ranks)
    stage = rank // (plan.tp * plan.cp * plan.dp)
    layers = counts.sum(axis=1)[stage]
    micro = plan.micro_batches
    tokens = plan.micro_batch * plan.seq_len / plan.cp
    again = plan.recompute == "full"

    # Four all-reduces of the activations a layer, two of them forward; as many bytes where the sequence is split.
    activations = 2.0 * tokens * config.hidden
    reduces = (6.0 if again else 4.0) * micro * layers
    made.ring("tp", made.groups(plan.tp, 1), reduces * activations, 2.0)
    # Keys and values go around the ring once forward, they and their gradients once backward.
    kv = 2.0 * tokens * (2.0 * config.kv_heads * config.head_dim if config.mla is None
                         else config.heads * (config.query_dim + config.value_dim)) / plan.tp  # fmt: skip
    turns = (4.0 if again else 3.0) * micro * layers
    made.ring("cp", made.groups(plan.cp, plan.tp), turns * kv * plan.cp, 1.0)

    message = activations / (plan.tp if plan.sequence_parallel else 1)
    _pipeline(made, plan, rank, stage, micro * message)

    if config.moe is not None and plan.ep > 1:
        routed = np.array([group.moe for group in config.groups])
        own = tokens / (plan.tp if plan.sequence_parallel else 1)
        each = 2.0 * own * config.moe.top_k * config.hidden  # one way
        ways = (6.0 if again else 4.0) * micro * (counts * routed).sum(axis=1)[stage]
        made.exchange("ep", made.groups(plan.ep, plan.tp), ways * each)

    _gradients(made, config, plan, counts)
    return made.done()


def _pipeline(made: _Flows, plan: TrainingPlan, rank: Ints, stage: Ints, nbytes: float) -> None:
    if plan.pp == 1:
        return
    stride = plan.tp * plan.cp * plan.dp
    last = stage == plan.pp - 1
    # Every chunk but the last passes on what it made; the last rank's chunks pass it to the first rank.
    times = np.where(last, plan.vp - 1, plan.vp).astype(np.float64)
    following = (rank + stride) % (stride * plan.pp)
    made.add("pp", rank, following, times * nbytes)
    made.add("pp", following, rank, times * nbytes)


def _gradients(made: _Flows, config: LLMConfig, plan: TrainingPlan, counts: Ints) -> None:
    dense, experts = np.zeros(plan.pp), np.zeros(plan.pp)
    for index, group in enumerate(config.groups):
        for weight in layer_weights(config, group):
            into = experts if weight.kind == "experts" else dense
            into += counts[:, index] * weight.elements / (plan.ep if weight.kind == "experts" else plan.tp)
    ends = model_weights(config)
    dense[0] += sum(w.elements for w in ends if w.kind == "embedding") / plan.tp
    dense[-1] += sum(w.elements for w in ends if w.kind != "embedding") / plan.tp
    gradients, parameters = _STATE_BYTES[plan.grad_dtype], 2.0
    if plan.zero == 0:
        per_element = 2.0 * gradients  # an all-reduce is a scatter and a gather
    elif plan.zero < 3:
        per_element = gradients + parameters
    else:
        per_element = gradients + 2.0 * parameters * plan.micro_batches
    size = plan.dp * plan.cp
    stage = np.arange(made.ranks) // (plan.tp * size)
    made.hierarchy("dp", made.groups(size, plan.tp), per_element * dense[stage])
    if experts.any():
        # Each expert's copies: every ep-th rank of the group.
        made.hierarchy("dp", made.groups(size // plan.ep, plan.tp * plan.ep), per_element * experts[stage])


class _Flows:
    """Collects flows. `nbytes` of collectives is by rank: what the group's ranks each hold or end up with."""

    def __init__(self, ranks: int, domain: int) -> None:
        self.ranks, self.domain, self.rows = ranks, domain, 0
        self.columns: list[tuple[Ints, Ints, Floats, Ints]] = []

    def groups(self, size: int, stride: int) -> Ints:
        """Groups of `size` ranks `stride` apart: (groups, size)."""
        return np.arange(self.ranks).reshape(-1, size, stride).transpose(0, 2, 1).reshape(-1, size)

    def add(self, kind: str, source: Ints, target: Ints, nbytes: Floats) -> None:
        there = (nbytes > 0) & (source != target)
        self.rows += int(there.sum())
        if self.rows > MOST_FLOWS:
            raise InputError(f"more than {MOST_FLOWS:,} flows", "traffic", "look at fewer ranks")
        index = np.full(int(there.sum()), KINDS.index(kind))
        self.columns.append((source[there], target[there], nbytes[there], index))

    def ring(self, kind: str, groups: Ints, nbytes: Floats, passes: float) -> None:
        """Each rank sends ``passes · (n - 1) / n`` of its bytes to the next."""
        size = groups.shape[1]
        if size > 1:
            source = groups.reshape(-1)
            following = np.roll(groups, -1, axis=1).reshape(-1)
            self.add(kind, source, following, passes * (size - 1) / size * nbytes[source])

    def exchange(self, kind: str, groups: Ints, nbytes: Floats) -> None:
        """Each rank sends an equal part of its bytes to every rank of its group, itself included."""
        size = groups.shape[1]
        if self.rows + groups.size * (size - 1) > MOST_FLOWS:
            raise InputError(f"more than {MOST_FLOWS:,} flows", "traffic", "look at fewer ranks")
        for step in range(1, size):
            source = groups.reshape(-1)
            self.add(kind, source, np.roll(groups, -step, axis=1).reshape(-1), nbytes[source] / size)

    def hierarchy(self, kind: str, groups: Ints, nbytes: Floats) -> None:
        """One pass over the group (`nbytes` counts all passes): a ring inside each domain, and rings between equal
        places of the domains for what each holds then. A plain ring where places differ."""
        count, size = groups.shape
        if size == 1:
            return
        domains = groups // self.domain
        inside = int((domains[0] == domains[0, 0]).sum())
        blocks = groups.reshape(count, size // inside, inside) if size % inside == 0 else None
        if blocks is not None:
            homes, places = blocks // self.domain, blocks % self.domain
            if not ((homes == homes[:, :, :1]).all() and (places == places[:, :1]).all()):
                blocks = None
        if blocks is None:
            self.ring(kind, groups, nbytes, 1.0)
            return
        self.ring(kind, blocks.reshape(-1, inside), nbytes, 1.0)
        self.ring(kind, blocks.transpose(0, 2, 1).reshape(-1, size // inside), nbytes / inside, 1.0)

    def done(self) -> Traffic:
        if not self.columns:
            empty = np.zeros(0, dtype=np.int64)
            return Traffic(self.ranks, self.domain, empty, empty, np.zeros(0), empty)
        source, target, nbytes, kind = (np.concatenate(column) for column in zip(*self.columns, strict=True))
        return Traffic(self.ranks, self.domain, source, target, nbytes, kind)
