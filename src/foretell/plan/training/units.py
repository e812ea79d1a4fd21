"""What the solvers of this package take, made from a model, a plan and a cluster.

`model_layers` gives `partition` each layer's units (Megatron-LM's operators) with their times and bytes, `work_of`
gives `place` the stages' times and messages, `Achieved` is the objective of a surrogate `search`. `adapt` and
`place_plan` go all the way.

>>> from foretell.hardware import cluster
>>> from foretell.simulate.training import TrainingPlan
>>> from foretell.workload import llm
>>> plan = TrainingPlan(32, 16384, tp=8, pp=8)
>>> found = adapt(llm.config("gpt-3-175b"), plan, cluster("8x dgx-a100"))
>>> sum(found.layers), found.layers[0] < found.layers[-1], found.stages[0].recompute_s > found.stages[-1].recompute_s
(98, True, True)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.hardware.cluster import Cluster
from foretell.plan.training.partition import Layer, Partition, Unit, partition
from foretell.plan.training.placement import Placement, Work, place
from foretell.plan.training.rows import budget_bytes
from foretell.simulate.collectives import Fabric
from foretell.simulate.training import kernels as costs
from foretell.simulate.training.constants import constants
from foretell.simulate.training.layers import Kernels, embedding, head, layer
from foretell.simulate.training.legality import explain
from foretell.simulate.training.memory import by_rank, memory
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.simulate.training.stages import layers_of
from foretell.simulate.training.step import stage_times, step
from foretell.workload.llm.config import LLMConfig
from foretell.workload.llm.weights import layer_weights, model_weights

__all__ = ["Achieved", "adapt", "model_layers", "place_plan", "work_of"]

Floats = npt.NDArray[np.float64]

HALF = 2.0


def adapt(config: LLMConfig, plan: TrainingPlan, on: Cluster, *, max_memory: float = 0.9) -> Partition:
    """The best stages and kept activations for the degrees and batch of a plan; its own recomputation is not looked at.

    The first layer of the partition is the embedding, the last the head. Raises InputError for what is not modelled
    (experts, virtual stages, context parallelism), InfeasibleError where it does not fit.
    """
    layers, room = model_layers(config, plan, on, max_memory=max_memory)
    return partition(layers, stages=plan.pp, micro_batches=plan.micro_batches, memory_bytes=room)


def model_layers(
    config: LLMConfig, plan: TrainingPlan, on: Cluster, *, max_memory: float = 0.9
) -> tuple[list[Layer], float]:
    """Embedding, layers and head of one tensor-parallel rank, and the bytes a device has for them.

    What backward does not need is never made again: the last product of a layer, whose result only goes on.
    """
    if config.moe is not None or config.mla is not None or config.block != "pre_norm" or len(config.groups) > 1:
        raise InputError(f"{config.name} is no stack of equal dense layers", "adaptive recomputation")
    if plan.vp > 1 or plan.cp > 1 or plan.framework == "fsdp2" or plan.zero == 3:
        raise InputError("virtual stages, context parallelism and ZeRO-3 are not modelled", "adaptive recomputation")
    device = on.groups[0][1].device
    bare = plan.replace(recompute="none", recompute_layers=0, schedule="1f1b")
    table, using = PlanTable.of([bare]), constants()
    made = layer(config, config.groups[0], table)
    tokens = plan.micro_batch * plan.seq_len
    shared = tokens / (plan.tp if plan.sequence_parallel else 1)
    h, q = float(config.hidden), config.heads / plan.tp * config.head_dim
    k = config.kv_heads / min(plan.tp, config.kv_heads) * config.head_dim
    f, gates = config.intermediate / plan.tp, 2 if config.gated else 1
    statistics = 4.0 if config.norm == "rms" else 8.0

    def seconds(*names: str, share: float = 1.0) -> float:
        """Forward time of some of the kernels."""
        some = Kernels(
            [p for p in made.products if p.name in names],
            [a for a in made.attentions if a.name in names],
            [s for s in made.streams if s.name in names],
        )
        return share * float(costs.sums(some, table, device, using).forward_s[0])

    before, after, back = _collectives(plan, on, HALF * tokens * h)
    hidden = 1.0 - (using["tp.hidden"] if plan.overlap_tp else 0.0)
    before, after, back = before * hidden, after * hidden, back * hidden
    core = HALF * q + 4.0 * config.heads / plan.tp
    if plan.attention == "unfused":
        core += HALF * config.heads / plan.tp * plan.seq_len
    units = (
        Unit("norm 1", seconds("norms", share=0.5), _bytes(HALF * h + statistics, shared)),
        Unit("qkv", before + seconds("qkv", "heads"), _bytes(HALF * (q + 2 * k), tokens)),
        Unit("core", seconds("attention", "scores", "context", "softmax"), _bytes(core, tokens)),
        Unit("proj", after + seconds("proj") + seconds("residuals", share=0.5), _bytes(HALF * h, shared)),
        Unit("norm 2", seconds("norms", share=0.5), _bytes(HALF * h + statistics, shared)),
        Unit("mlp up", before + seconds("mlp up"), _bytes(HALF * gates * f, tokens)),
        Unit("activation", seconds("mlp activation"), _bytes(HALF * f, tokens)),
    )
    every = costs.sums(made, table, device, using)
    states, others = _states(config, bare, on)
    body = Layer(
        units=units,
        backward_s=float(every.backward_s[0]) + back,
        weight_bytes=int(states * _elements(config, plan.tp)),
        input_bytes=_bytes(HALF * h, shared),
        workspace_bytes=_bytes(HALF * (gates + 1) * f + HALF * h, tokens),
        other_forward_s=after + seconds("mlp down") + seconds("residuals", share=0.5),
    )
    start, end = (costs.sums(part(config, table), table, device, using) for part in (embedding, head))
    table_elements = sum(w.elements for w in model_weights(config) if w.kind == "embedding") / plan.tp
    head_elements = config.vocab * h / plan.tp
    logits = _bytes(4.0 * config.vocab / plan.tp, tokens)
    layers = [
        Layer((), float(start.backward_s[0]), int(states * table_elements), 0, 0, float(start.forward_s[0])),
        *[body] * config.layers,
        Layer(
            (), float(end.backward_s[0]), int(states * head_elements), logits + _bytes(HALF * h, shared), logits,
            float(end.forward_s[0]),
        ),
    ]  # fmt: skip
    return layers, max(1.0, budget_bytes(on, max_memory) - others)


def _bytes(per_token: float, tokens: float) -> int:
    return int(per_token * tokens)


def _collectives(plan: TrainingPlan, on: Cluster, nbytes: float) -> tuple[float, float, float]:
    """Seconds of tensor-parallel collectives before and after a pair of products, and backward in a whole layer."""
    if plan.tp == 1:
        return 0.0, 0.0, 0.0
    fabric = Fabric.of(on)

    def time(kind: str) -> float:
        return float(np.asarray(fabric.time_s(kind, nbytes, plan.tp, 1)))

    if plan.sequence_parallel:
        gather, scatter = time("all_gather"), time("reduce_scatter")
        return gather, scatter, 2.0 * (2.0 * gather + scatter)
    reduce = time("all_reduce")
    return 0.0, reduce, 2.0 * reduce


def _elements(config: LLMConfig, tp: int) -> float:
    return sum(w.elements / (tp if w.kind == "matrix" else 1) for w in layer_weights(config, config.groups[0]))


def _states(config: LLMConfig, plan: TrainingPlan, on: Cluster) -> tuple[float, float]:
    """Bytes of parameters, gradients and optimiser by element on a device; and bytes of everything but states and
    activations on the fullest rank."""
    found = by_rank(config, plan, on.groups[0][1].device)
    sizes = {name: np.asarray(column) for name, column in found.parts.items()}
    states = sizes["parameters"] + sizes["gradients"] + sizes["optimizer"]
    # A rank in the middle holds layers only; of one or two ranks, take the first.
    rank = plan.pp // 2 if plan.pp > 2 else 0
    counts = layers_of(config, plan.pp, 1, plan.first_layers, plan.last_layers).sum(axis=(1, 2))
    elements = float(counts[rank]) * _elements(config, plan.tp)
    ends = model_weights(config)
    if plan.pp <= 2:
        elements += sum(w.elements for w in ends if plan.pp == 1 or w.kind == "embedding") / plan.tp
    others = sizes["communication"] + sizes["framework"]
    return float(states[rank]) / elements, float(np.max(others))


def work_of(config: LLMConfig, plan: TrainingPlan, on: Cluster) -> Work:
    """Times of the stages of a plan, its messages between stages and gradients between replicas.

    Raises InputError for virtual stages.
    """
    if plan.vp > 1:
        raise InputError("placement is modelled for 1F1B without virtual stages", "placement")
    times = stage_times(config, plan, on)
    tokens = plan.micro_batch * plan.seq_len / plan.cp
    message = HALF * tokens * config.hidden / (plan.tp if plan.sequence_parallel else 1)
    counts = layers_of(config, plan.pp, 1, plan.first_layers, plan.last_layers)[:, 0]
    elements = np.zeros(plan.pp)
    for index, group in enumerate(config.groups):
        elements += counts[:, index] * sum(
            w.elements / (plan.ep if w.kind == "experts" else plan.tp) for w in layer_weights(config, group)
        )
    ends = model_weights(config)
    elements[0] += sum(w.elements for w in ends if w.kind == "embedding") / plan.tp
    elements[-1] += sum(w.elements for w in ends if w.kind != "embedding") / plan.tp
    gradient = 4.0 if plan.grad_dtype == "fp32" else HALF
    return Work(
        forward_s=tuple(times.forward_s[:, 0].tolist()),
        backward_s=tuple(times.backward_s[:, 0].tolist()),
        micro_batches=plan.micro_batches,
        message_bytes=message,
        gradient_bytes=tuple((gradient * elements).tolist()),
    )


def place_plan(
    config: LLMConfig, plan: TrainingPlan, on: Cluster, bandwidth: Floats, *, steps: int = 20_000, seed: int = 0
) -> Placement:
    """Which device of a cluster runs which rank of a plan, its attained bandwidths given (`Latency`)."""
    per_node = on.groups[0][1].count
    work = work_of(config, plan, on)
    return place(
        work, bandwidth, block=plan.tp * plan.cp, per_node=per_node, data=plan.dp, steps=steps, seed=seed
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Achieved:
    """An objective for `search`: model FLOP/s of a device, None where rules or memory forbid a configuration.

    Knobs are fields of `TrainingPlan` beside ``nodes`` (machines of the kind of `on`) and ``accumulate`` (micro-batches
    a step; without it the global batch of `base` stays). Data parallelism takes the devices that are left.
    """

    config: LLMConfig
    base: TrainingPlan
    on: Cluster
    max_memory: float = 1.0

    def __call__(self, at: dict[str, Any]) -> float | None:
        """FLOP/s of a device in a step, by the simulator."""
        knobs = dict(at)
        nodes = int(knobs.pop("nodes", self.on.node_count))
        machines = self._machines(nodes)
        accumulate = knobs.pop("accumulate", None)
        tp, pp = int(knobs.get("tp", self.base.tp)), int(knobs.get("pp", self.base.pp))
        data, rest = divmod(machines.device_count, tp * pp * self.base.cp)
        if rest or not data:
            return None
        if accumulate is not None:
            knobs["global_batch"] = int(knobs.get("micro_batch", self.base.micro_batch)) * data * int(accumulate)
        plan = self.base.replace(**{**knobs, "dp": data})
        if explain(self.config, plan, machines):
            return None
        device = machines.groups[0][1].device
        if not memory(self.config, PlanTable.of([plan]), device).fits(self.max_memory)[0]:
            return None
        found = step(self.config, plan, machines)
        return float(found.flops_per_device[0] / found.time_s[0])

    def _machines(self, nodes: int) -> Cluster:
        count, node = self.on.groups[0]
        if nodes == count:
            return self.on
        if self.on.network is None and nodes > 1:
            raise InputError(f"{nodes} nodes of a cluster without a network", "search", "name a cluster of two or more")
        return replace(self.on, name=f"{nodes}x {node.name}", groups=((nodes, node),),
                       network=None if nodes == 1 else self.on.network)  # fmt: skip

