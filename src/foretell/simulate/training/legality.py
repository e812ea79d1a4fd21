"""Whether a plan suits a model, a cluster and a framework: a table of rules, each with its reason and its source.

A rule looks at a whole `PlanTable` at once. What breaks none can be started; whether it fits into memory is another
question (`foretell.simulate.training.memory`).

Two things are no rules. The vocabulary never stands in the way: frameworks pad it to a multiple of the tensor-parallel
degree. Tensor parallelism beyond a machine's fast links is only slow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.hardware.cluster import Cluster
from foretell.hardware.device import Device
from foretell.simulate.training.plan import CHOICES, PlanTable, TrainingPlan
from foretell.workload.llm.config import LLMConfig

__all__ = ["RULES", "Rule", "Violation", "divisors", "explain", "illegal", "legal", "supports"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Broken = Callable[[LLMConfig, PlanTable, Cluster], Bools]

#: What a rule follows from. A plan that breaks only those of a framework is what another framework could run.
KINDS = ("cluster", "batch", "model", "device", "framework")

# The least compute capability of an NVIDIA device with arithmetic in a format, and the rate of `Device.peaks` that
# tells of it on others. NVIDIA CUDA C++ programming guide, "Compute Capabilities"; Transformer Engine's
# `check_fp8_support`, `check_mxfp8_support`, `check_nvfp4_support`.
_FORMATS = {
    "bf16": ((8, 0), "bf16"),
    "fp16": ((7, 0), "fp16"),
    "fp8": ((8, 9), "fp8"),
    "mxfp8": ((10, 0), "fp4"),
    "nvfp4": ((10, 0), "fp4"),
}
# Rows and columns of a product in these formats are multiples of: Transformer Engine, `assert_dim_for_fp8_exec`;
# its block formats scale 32 and 16 values at a time.
_MULTIPLES = {"fp8": 16, "mxfp8": 32, "nvfp4": 32}

_CORE = "Megatron-core TransformerConfig"
_ARGS = "Megatron-LM arguments.py"


@dataclass(frozen=True, slots=True)
class Rule:
    """`broken` marks the plans of a table that break it; `reason` says why, with the values of one such plan in it.

    `mends` are the settings that repair it, likeliest first; `source` is who refuses otherwise.
    """

    name: str
    kind: str
    mends: tuple[str, ...]
    reason: str
    source: str
    broken: Broken


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule that a plan breaks: `reason` with its numbers, `nearest` the settings next to it that keep it in words.

    `repairs` are the same as values by setting; `plans` those most like it that keep every rule, nearest first.
    """

    rule: str
    kind: str
    reason: str
    nearest: str
    source: str
    plans: tuple[TrainingPlan, ...] = ()
    repairs: tuple[tuple[str, tuple[str, ...]], ...] = ()


def divisors(number: int) -> Ints:
    """All divisors, ascending."""
    found = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return np.array(sorted({*found, *(number // i for i in found)}), dtype=np.int64)


def supports(device: Device, precision: str) -> bool:
    """Whether a device has arithmetic in the format of `precision`."""
    least, peak = _FORMATS[precision]
    if device.compute_capability is not None:
        major, _, minor = device.compute_capability.partition(".")
        return (int(major), int(minor or 0)) >= least
    return device.peak(peak) is not None


# --- the rules --------------------------------------------------------------------------------------------------------


def _devices(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    return np.asarray(plans.devices != cluster.device_count)


def _batch(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    return np.asarray(plans["global_batch"] % (plans["micro_batch"] * plans["dp"]) != 0)


def _sequence(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    twice = plans.chosen("framework", "megatron") | plans.chosen("context_scheme", "ring")
    cp = plans["cp"]
    return np.asarray((cp > 1) & (plans["seq_len"] % (cp * np.where(twice, 2, 1)) != 0))


def _sequence_parallel(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    split = plans.flag("sequence_parallel") & (plans["tp"] > 1)
    return np.asarray(split & (plans["seq_len"] % (plans["cp"] * plans["tp"]) != 0))


def _positions(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    rows = config.position_rows if config.positions == "learned" else 2**31
    return np.asarray(plans["seq_len"] > rows)


def _heads(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    return np.asarray(config.heads % plans["tp"] != 0)


def _kv_heads(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    if config.mla is not None:  # one latent, on every rank
        return np.zeros(len(plans), dtype=bool)
    return np.asarray((config.kv_heads % plans["tp"] != 0) & (plans["tp"] % config.kv_heads != 0))


def _width(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    result = np.zeros(len(plans), dtype=bool)
    for width in _widths(config):
        result |= width % plans["tp"] != 0
    return result


def _widths(config: LLMConfig) -> tuple[int, ...]:
    """Widths of the MLPs that tensor parallelism splits."""
    found = {config.intermediate} if any(not group.moe for group in config.groups) else set()
    if config.moe is not None:
        found |= {config.moe.shared_intermediate} - {0}  # routed experts are whole on their rank
    return tuple(sorted(found))


def _multiple(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    result = np.zeros(len(plans), dtype=bool)
    for precision, multiple in _MULTIPLES.items():
        odd = np.full(len(plans), config.hidden % multiple != 0)
        for width in _widths(config):
            odd |= (width // plans["tp"]) % multiple != 0
        odd |= config.moe is not None and config.moe.intermediate % multiple != 0
        result |= plans.chosen("precision", precision) & odd
    return result


def _stages(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    return np.asarray(plans["pp"] * plans["vp"] > config.layers)


def _layers(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    pp, vp, first, last = (plans[name] for name in ("pp", "vp", "first_layers", "last_layers"))
    ends = (first > 0).astype(np.int64) + (last > 0)
    inner, free = config.layers - first - last, pp - ends
    uneven = (ends == 0) & (config.layers % (pp * vp) != 0) & plans.chosen("framework", "megatron")
    wrong = (free < 0) | (inner < 0) | ((free == 0) & (inner != 0))
    wrong |= (free > 0) & (inner % np.maximum(1, free * vp) != 0)
    wrong |= ((first > 0) & (first < vp)) | ((last > 0) & (last < vp))
    # One layer short is the embedding's or the loss's place (Megatron's account_for_… switches); else chunks are equal.
    wrong |= ((first % vp != 0) & ((first + 1) % vp != 0)) | ((last % vp != 0) & ((last + 1) % vp != 0))
    return np.asarray(uneven | ((ends > 0) & wrong))


def _interleaved(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    chunked = plans.chosen("schedule", "interleaved")
    several = (plans["vp"] > 1) & plans.chosen("schedule", "1f1b", "gpipe")
    return np.asarray((chunked & ((plans["vp"] < 2) | (plans["pp"] < 2))) | several)


def _zero_bubble(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    whole = plans.chosen("schedule", "zero-bubble") & (plans["vp"] < 2) & (plans["pp"] > 1)
    return np.asarray(whole & plans.chosen("framework", "fsdp2"))


def _groups(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    return np.asarray(plans.chosen("schedule", "interleaved") & (plans.micro_batches % plans["pp"] != 0))


def _two_ranks(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    alone = plans.chosen("schedule", "interleaved") & ~plans.flag("overlap_p2p") & (plans["pp"] == 2)
    return np.asarray(alone & plans.chosen("framework", "megatron"))


def _experts(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    if config.moe is None:
        return np.asarray(plans["ep"] > 1)
    return np.asarray(config.moe.experts % plans["ep"] != 0)


def _expert_ranks(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    ranks = plans["dp"] * plans["cp"] * np.where(plans.chosen("framework", "fsdp2"), 1, plans["tp"])
    return np.asarray(ranks % plans["ep"] != 0)


def _expert_sequences(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    if config.moe is None:
        return np.zeros(len(plans), dtype=bool)
    alone = (plans["tp"] > 1) & ~plans.flag("sequence_parallel")
    return np.asarray(alone & plans.chosen("framework", "megatron"))


def _deepep(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    able = all(node.device.vendor == "NVIDIA" and supports(node.device, "bf16") for _, node in cluster.groups)
    if config.moe is None or able:
        return np.zeros(len(plans), dtype=bool)
    return np.asarray(plans.chosen("dispatcher", "deepep") & (plans["ep"] > 1))


def _expert_overlap(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    whole = plans.chosen("recompute", "full")
    unfit = (plans["ep"] < 2) | whole | ((plans["pp"] > 1) & (plans["vp"] < 2))
    return np.asarray(plans.flag("overlap_ep") & unfit)


def _tensor_overlap(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    unfit = ~plans.flag("sequence_parallel") | (plans["tp"] < 2)
    return np.asarray(plans.flag("overlap_tp") & unfit)


def _ulysses(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    exchanged = plans.chosen("context_scheme", "a2a") & (plans["cp"] > 1)
    ranks = plans["tp"] * plans["cp"]
    heads = config.heads % ranks != 0
    keys = (config.kv_heads % ranks != 0) & (config.mla is None)
    keys &= plans.chosen("framework", "megatron")
    return np.asarray(exchanged & (heads | keys))


def _windows(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    if not any(group.window for group in config.groups):
        return np.zeros(len(plans), dtype=bool)
    return np.asarray(plans.chosen("context_scheme", "ring") & (plans["cp"] > 1))


def _unfused(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    return np.asarray(plans.chosen("attention", "unfused") & (plans["cp"] > 1))


def _recomputed(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    most = -(-config.layers // plans["pp"])
    count = plans["recompute_layers"]
    return np.asarray((count > most) | ((count > 0) & ~plans.chosen("recompute", "full")))


def _graphs(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    return np.asarray(plans.flag("cuda_graph") & plans.chosen("recompute", "full"))


def _shard(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    shard = plans["shard"]
    uneven = (plans["dp"] * plans["cp"]) % np.maximum(1, shard) != 0
    # torchtitan's mesh has context parallelism within a copy, whole.
    uneven |= plans.chosen("framework", "fsdp2") & (shard % plans["cp"] != 0)
    return np.asarray((shard > 0) & uneven)


def _zero(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    staged = plans.chosen("framework", "megatron", "deepspeed") & (plans["pp"] > 1)
    return np.asarray(staged & (plans["zero"] > 1))


def _fsdp(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    return np.asarray(plans.chosen("framework", "fsdp2") & (plans["zero"] == 1))


def _precision(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    lacking = [
        name for name in CHOICES["precision"]
        if not all(supports(node.device, name) for _, node in cluster.groups)
    ]  # fmt: skip
    return plans.chosen("precision", *lacking)


def _schedule(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    result = np.zeros(len(plans), dtype=bool)
    for framework, offered in _SCHEDULES.items():
        result |= plans.chosen("framework", framework) & ~plans.chosen("schedule", *offered)
    return result


def _both_sequences(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    both = (plans["cp"] > 1) & (plans["tp"] > 1) & plans.flag("sequence_parallel")
    return np.asarray(both & plans.chosen("framework", "deepspeed"))


def _scheme(config: LLMConfig, plans: PlanTable, cluster: Cluster) -> Bools:
    other = plans.chosen("framework", "deepspeed") & ~plans.chosen("context_scheme", "a2a")
    return np.asarray(other & (plans["cp"] > 1))


_SCHEDULES = {
    "megatron": ("1f1b", "interleaved"),
    "deepspeed": ("1f1b",),
    "fsdp2": ("1f1b", "gpipe", "interleaved", "zero-bubble"),
}

#: Every rule once, those that others follow from first.
RULES: tuple[Rule, ...] = (
    Rule(
        "devices", "cluster", ("dp", "pp", "tp", "cp"),
        "tp {tp} · cp {cp} · dp {dp} · pp {pp} = {devices:,} devices, the cluster has {cluster:,}",
        f"{_ARGS}: the world size is divisible by tp · cp · pp", _devices,
    ),
    Rule(
        "batch", "batch", ("micro_batch", "dp", "global_batch"),
        "a global batch of {global_batch:,} does not split into micro-batches of {micro_batch} on {dp} data-parallel "
        "ranks ({split} at a time)",
        "Megatron-core num_microbatches_calculator: the global batch is a multiple of micro-batch · dp", _batch,
    ),
    Rule(
        "sequence", "batch", ("cp", "seq_len"),
        "a sequence of {seq_len:,} tokens does not split into equal causal shares for cp {cp}",
        f"{_ARGS}: seq-length is a multiple of 2 · context-parallel-size", _sequence,
    ),
    Rule(
        "sequence-parallel", "batch", ("tp", "cp", "sequence_parallel", "seq_len"),
        "with sequence parallelism {seq_len:,} tokens do not split over cp {cp} · tp {tp}",
        "Megatron-core tensor_parallel.mappings: the sequence is divisible by the tensor-parallel size",
        _sequence_parallel,
    ),
    Rule(
        "positions", "model", ("seq_len",),
        "a sequence of {seq_len:,} tokens is longer than the model's table of {positions:,} positions",
        f"{_ARGS}: max_position_embeddings is at least seq_length", _positions,
    ),
    Rule(
        "heads", "model", ("tp",),
        "tp {tp} does not divide {heads} attention heads",
        f"{_CORE}: num_attention_heads is a multiple of tensor_model_parallel_size", _heads,
    ),
    Rule(
        "kv-heads", "model", ("tp",),
        "tp {tp} neither divides {kv_heads} key and value heads nor is a multiple of them",
        f"{_CORE}: num_query_groups is a multiple or divisor of tensor_model_parallel_size", _kv_heads,
    ),
    Rule(
        "width", "model", ("tp",),
        "tp {tp} does not divide the MLP's width {widths}",
        "Megatron-core ColumnParallelLinear: the output size is divisible by the tensor-parallel size", _width,
    ),
    Rule(
        "multiples", "device", ("tp", "precision"),
        "{precision} takes products in multiples of {multiple}; hidden {hidden} and MLP width {widths} over tp {tp} "
        "are not",
        "Transformer Engine: assert_dim_for_fp8_exec", _multiple,
    ),
    Rule(
        "stages", "model", ("pp", "vp"),
        "pp {pp} · vp {vp} = {chunks} stages are more than {layers} layers",
        f"{_CORE}: each stage holds at least one layer", _stages,
    ),
    Rule(
        "layers", "model", ("pp", "vp", "first_layers", "last_layers"),
        "{layers} layers do not split over pp {pp} · vp {vp}{ends}",
        f"{_ARGS}: layers are divisible by pipeline-model-parallel-size · virtual stages, but for the first and last "
        "stage's own counts", _layers,
    ),
    Rule(
        "interleaving", "model", ("schedule", "vp", "pp"),
        "schedule {schedule} does not go with vp {vp} and pp {pp}: several chunks a rank are interleaved, and want "
        "at least two ranks",
        f"{_ARGS}: pipeline-model-parallel size is greater than 1 when the interleaved schedule is used", _interleaved,
    ),
    Rule(
        "zero-bubble", "framework", ("vp", "schedule"),
        "torchtitan's zero-bubble schedule wants at least 2 chunks a rank, not vp {vp}",
        "torch.distributed.pipelining ScheduleInterleavedZeroBubble", _zero_bubble,
    ),
    Rule(
        "groups", "batch", ("micro_batch", "vp", "dp"),
        "interleaving wants micro-batches in multiples of pp {pp}; a rank has {micro_batches}",
        "Megatron-core schedules: the number of micro-batches is divisible by the pipeline-parallel size", _groups,
    ),
    Rule(
        "two-ranks", "framework", ("overlap_p2p", "pp"),
        "interleaving over pp 2 wants overlapped sends and receives",
        f"{_ARGS}: pp is greater than 2 when p2p overlap is disabled", _two_ranks,
    ),
    Rule(
        "experts", "model", ("ep",),
        "ep {ep} does not divide {experts}",
        f"{_ARGS}: num_experts is a multiple of expert_model_parallel_size, and given", _experts,
    ),
    Rule(
        "expert-ranks", "cluster", ("ep", "tp", "dp", "cp"),
        "ep {ep} does not divide the {stage} ranks of {stages}",
        "Megatron-core parallel_state: the world size is divisible by tp · ep · pp of the experts", _expert_ranks,
    ),
    Rule(
        "expert-sequences", "framework", ("sequence_parallel", "tp"),
        "experts beside tp {tp} want sequence parallelism",
        "Megatron-core MoE layer: sequence parallelism is used with expert and tensor parallelism", _expert_sequences,
    ),
    Rule(
        "dispatcher", "device", ("dispatcher",),
        "DeepEP's kernels run on NVIDIA devices of compute capability 8.0 and newer, not on {device}",
        "DeepEP README, Requirements", _deepep,
    ),
    Rule(
        "expert-overlap", "framework", ("overlap_ep", "vp", "recompute"),
        "overlap of expert communication wants ep above 1, vp above 1 where pp is, and no full recomputation",
        f"{_CORE}: overlap_moe_expert_parallel_comm", _expert_overlap,
    ),
    Rule(
        "tensor-overlap", "framework", ("overlap_tp", "sequence_parallel"),
        "overlap of tensor-parallel communication wants tp above 1 and sequence parallelism",
        f"{_ARGS}: tp_comm_overlap can happen only when sequence parallelism is enabled", _tensor_overlap,
    ),
    Rule(
        "exchanged-heads", "model", ("context_scheme", "cp", "tp"),
        "context scheme a2a gives each rank whole heads: tp {tp} · cp {cp} does not divide {heads} heads with "
        "{kv_heads} keys",
        "Transformer Engine AttnFuncWithCPAndQKVOA2A: heads and query groups are divisible by the context-parallel "
        "size; DeepSpeed-Ulysses, arXiv 2309.14509", _ulysses,
    ),
    Rule(
        "windows", "framework", ("context_scheme", "cp"),
        "layers with a sliding window want context scheme a2a or allgather, not ring",
        "Transformer Engine attn_forward_func_with_cp: sliding windows with all_gather or a2a only", _windows,
    ),
    Rule(
        "unfused", "framework", ("attention", "cp"),
        "context parallelism (cp {cp}) works on fused attention only",
        "Megatron-core DotProductAttention: context parallelism is only supported by TEDotProductAttention", _unfused,
    ),
    Rule(
        "recomputed", "model", ("recompute_layers", "recompute"),
        "{recompute_layers} recomputed layers: the first rank has {per_rank}, and they are counted with full "
        "recomputation only",
        f"{_CORE}: recompute_num_layers is between 1 and the layers of a rank, for full granularity", _recomputed,
    ),
    Rule(
        "graphs", "framework", ("cuda_graph", "recompute"),
        "CUDA graphs do not go with full recomputation",
        f"{_CORE}: CUDA graphs are not supported with full activation recomputation", _graphs,
    ),
    Rule(
        "shard", "cluster", ("shard",),
        "groups of {shard} do not divide the {replicas} ranks of dp {dp} · cp {cp}",
        "PyTorch DeviceMesh: the replicated and the sharded dimension multiply to the ranks", _shard,
    ),
    Rule(
        "zero", "framework", ("zero", "pp"),
        "ZeRO stage {zero} does not go with a pipeline (pp {pp}) in {framework}",
        "DeepSpeed PipelineEngine: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism; "
        f"{_ARGS}: FSDP is not supported with pipeline parallelism", _zero,
    ),
    Rule(
        "fsdp", "framework", ("zero",),
        "FSDP2 shards parameters (--zero 3), or gathers them once a step (2), or replicates (0); it has no stage 1",
        "PyTorch fully_shard: reshard_after_forward", _fsdp,
    ),
    Rule(
        "precision", "device", ("precision",),
        "{device} has no arithmetic in {precision}",
        "NVIDIA CUDA C++ programming guide, Compute Capabilities; Transformer Engine check_fp8_support", _precision,
    ),
    Rule(
        "schedule", "framework", ("schedule", "framework"),
        "{framework} has no pipeline schedule {schedule} (it has {schedules})",
        "Megatron-core schedules.py; DeepSpeed TrainSchedule; torch.distributed.pipelining.schedules", _schedule,
    ),
    Rule(
        "both-sequences", "framework", ("sequence_parallel", "cp", "tp"),
        "DeepSpeed splits the sequence over cp {cp} or, between tp {tp} ranks, by sequence parallelism; not both",
        "Megatron-DeepSpeed arguments.py: DeepSpeed's sequence parallelism excludes Megatron's", _both_sequences,
    ),
    Rule(
        "scheme", "framework", ("context_scheme", "framework"),
        "DeepSpeed splits a sequence by context scheme a2a only",
        "DeepSpeed-Ulysses, arXiv 2309.14509", _scheme,
    ),
)  # fmt: skip


def illegal(config: LLMConfig, plans: PlanTable, cluster: Cluster, rules: Sequence[Rule] = RULES) -> Bools:
    """Which rules each plan breaks: (rules, rows)."""
    if not rules:
        return np.zeros((0, len(plans)), dtype=bool)
    return np.stack([rule.broken(config, plans, cluster) for rule in rules])


def legal(config: LLMConfig, plans: PlanTable, cluster: Cluster, rules: Sequence[Rule] = RULES) -> Bools:
    """Which plans keep every rule: (rows,)."""
    return np.asarray(~illegal(config, plans, cluster, rules).any(axis=0))


# --- reasons and repairs ----------------------------------------------------------------------------------------------

_FIELDS = {field.name: field for field in dataclasses.fields(TrainingPlan)}
_DEGREES = ("tp", "cp", "dp", "pp")
_ENDS = ("first_layers", "last_layers")
#: What is said where no single setting repairs a plan.
ALONE = "none by one setting alone"


def explain(config: LLMConfig, plan: TrainingPlan, cluster: Cluster, most: int = 3) -> list[Violation]:
    """The rules that `plan` breaks, each with what would keep it; empty where it can be started.

    `most` is how many of the nearest plans that keep every rule are named.
    """
    table = PlanTable.of([plan])
    broken = [rule for rule, wrong in zip(RULES, illegal(config, table, cluster)[:, 0], strict=True) if wrong]
    if not broken:
        return []
    plans = nearest_plans(config, plan, cluster, [name for rule in broken for name in rule.mends], most)
    values = _values(config, plan, cluster)
    found = []
    for rule in broken:
        repairs = _repairs(rule, config, plan, cluster)
        said = "; ".join(f"{name} {' or '.join(choices)}" for name, choices in repairs)
        found.append(Violation(rule.name, rule.kind, rule.reason.format(**values), said or ALONE, rule.source, plans,
                               repairs))  # fmt: skip
    return found


def _values(config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> dict[str, Any]:
    """What a reason may name."""
    ends = [f"{name} {count}" for name, count in (("first", plan.first_layers), ("last", plan.last_layers)) if count]
    lacking = [n.device for _, n in cluster.groups if not supports(n.device, plan.precision)]
    return plan.to_dict() | {
        "devices": plan.devices, "cluster": cluster.device_count, "split": plan.micro_batch * plan.dp,
        "micro_batches": plan.micro_batches, "chunks": plan.pp * plan.vp, "replicas": plan.dp * plan.cp,
        "stage": plan.cp * plan.dp * (1 if plan.framework == "fsdp2" else plan.tp),
        "stages": f"cp {plan.cp} · dp {plan.dp}" + ("" if plan.framework == "fsdp2" else f" · tp {plan.tp}"),
        "heads": config.heads, "kv_heads": config.kv_heads, "hidden": config.hidden, "layers": config.layers,
        "widths": " and ".join(map(str, _widths(config))), "positions": config.position_rows,
        "ends": f" ({', '.join(ends)} layers)" if ends else "", "per_rank": -(-config.layers // plan.pp),
        "experts": "the model's experts (it has none)" if config.moe is None else f"{config.moe.experts} experts",
        "multiple": _MULTIPLES.get(plan.precision, 1), "schedules": ", ".join(_SCHEDULES[plan.framework]),
        "device": (lacking or [cluster.groups[0][1].device])[0].name,
    }  # fmt: skip


def _alternatives(name: str, plan: TrainingPlan, most: int) -> Ints:
    """Other values a setting could have, by number: all names, both truth values, or every count up to twice `most`."""
    if name in CHOICES:
        return np.arange(len(CHOICES[name]), dtype=np.int64)
    if isinstance(_FIELDS[name].default, bool):
        return np.array([0, 1], dtype=np.int64)
    if name == "zero":
        return np.arange(4, dtype=np.int64)
    value = int(getattr(plan, name))
    if name in ("global_batch", "seq_len"):  # the nearest multiples of what divides them, and halves
        step = plan.micro_batch * plan.dp if name == "global_batch" else 2 * plan.cp * plan.tp
        halves = [value >> i for i in range(1, 12) if value >> i]
        return np.unique([*halves, max(step, value // step * step), value // step * step + step])
    least = 0 if _FIELDS[name].default == 0 else 1
    return np.arange(least, min(4096, 2 * max(value, most)) + 1, dtype=np.int64)


def _repairs(
    rule: Rule, config: LLMConfig, plan: TrainingPlan, cluster: Cluster
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Values of single settings that keep `rule`: the nearest below and above; of the ends of a pipeline the count
    nearest to that of the other ranks."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for name in rule.mends:
        values = _alternatives(name, plan, max(config.layers, cluster.device_count))
        table = PlanTable.build(_columns(plan) | {name: values}, len(values))
        good = values[~rule.broken(config, table, cluster)]
        if not len(good):
            continue
        if name in CHOICES:
            found.append((name, tuple(CHOICES[name][i] for i in good)))
        elif isinstance(_FIELDS[name].default, bool):
            found.append((name, ("on" if good[0] else "off",)))
        elif name in _ENDS:
            away = np.abs(np.log(np.maximum(1, good) * plan.pp / config.layers))
            found.append((name, (str(good[np.argmin(away)]),)))
        else:
            value = int(getattr(plan, name))
            near = [*good[good < value][-1:], *good[good > value][:1]]
            found.append((name, tuple(str(one) for one in near)))
    return tuple(found)


def _columns(plan: TrainingPlan) -> dict[str, Any]:
    return dict(PlanTable.of([plan]).columns.items())


def nearest_plans(
    config: LLMConfig, plan: TrainingPlan, cluster: Cluster, mends: Sequence[str], most: int = 3
) -> tuple[TrainingPlan, ...]:
    """The plans that keep every rule and differ least from `plan`.

    Degrees may change, and besides them the settings in `mends`; a doubling counts as much as another name. First and
    last ranks with layers of their own count by how far these are from the others'. The batch and the length of
    sequences change only where nothing else helps.
    """
    found = _nearest_plans(config, plan, cluster, mends, most)
    for name in ("global_batch", "seq_len"):
        if not found and name in mends:
            others = _alternatives(name, plan, 0)
            others = others[np.argsort(np.abs(others - getattr(plan, name)), kind="stable")]
            for value in others[:8]:
                found = found or _nearest_plans(config, plan.replace(**{name: int(value)}), cluster, mends, most)
    return found


def _nearest_plans(
    config: LLMConfig, plan: TrainingPlan, cluster: Cluster, mends: Sequence[str], most: int
) -> tuple[TrainingPlan, ...]:
    count = cluster.device_count
    found = divisors(count)
    tp, cp, pp = (axis.reshape(-1) for axis in np.meshgrid(found, found, found, indexing="ij"))
    able = (tp <= config.heads) & (pp <= config.layers) & (count % np.minimum(tp * cp * pp, 2**40) == 0)
    columns: dict[str, Any] = {"tp": tp[able], "cp": cp[able], "pp": pp[able]}
    columns["dp"] = count // (columns["tp"] * columns["cp"] * columns["pp"])
    # First the degrees most like it, so that the other settings are tried on few.
    keep = np.argsort(_distance(columns, plan, config), kind="stable")[:400]
    columns = {name: column[keep] for name, column in columns.items()}
    if any(name in mends for name in _ENDS):
        columns = _with_ends(columns, plan, config)
    for name, values in _changes(config, plan, mends).items():
        if len(columns["tp"]) * len(values) > 400_000:
            break
        columns = {key: np.repeat(column, len(values)) for key, column in columns.items()}
        columns[name] = np.tile(values, len(columns["tp"]) // len(values))
    rows = len(columns["tp"])
    table = PlanTable.build({**_columns(plan), **columns}, rows)
    good = np.flatnonzero(legal(config, table, cluster))
    order = good[np.argsort(_distance(columns, plan, config)[good], kind="stable")]
    found_plans: dict[str, TrainingPlan] = {}  # by what is said of them: names of a setting are one plan's variants
    for row in order:
        if len(found_plans) == most:
            break
        one = table.plan(int(row))
        # Another micro-batch is another plan only where that is what mends.
        found_plans.setdefault(str(one if "micro_batch" in mends else one.replace(micro_batch=1)), one)
    return tuple(found_plans.values())


def _changes(config: LLMConfig, plan: TrainingPlan, mends: Sequence[str]) -> dict[str, Ints]:
    """What besides the degrees may change: a few values of each setting, its own first."""
    changes: dict[str, list[int]] = {
        "vp": [plan.vp, 1], "micro_batch": [plan.micro_batch, 1, 2, 4, 8],
        "schedule": [CHOICES["schedule"].index(name) for name in (plan.schedule, "1f1b", "interleaved")],
    }  # fmt: skip
    if plan.ep > 1:
        experts = 1 if config.moe is None else config.moe.experts
        changes["ep"] = [plan.ep, *divisors(experts).tolist()]
    for name in mends:
        if name in (*_DEGREES, *_ENDS, "global_batch", "seq_len") or name in changes:
            continue
        if name == "recompute_layers":
            changes[name] = [plan.recompute_layers, 0]
        elif name == "shard":
            changes[name] = [plan.shard, 0]
        else:
            changes[name] = _alternatives(name, plan, 0).tolist()
    return {name: np.array(list(dict.fromkeys(values)), dtype=np.int64) for name, values in changes.items()}


def _with_ends(columns: dict[str, Any], plan: TrainingPlan, config: LLMConfig) -> dict[str, Any]:
    """The degrees with layers of the first and last rank: the plan's own, none, and what the others leave, where each
    of those has the mean rounded up or down; that is the first's, the last's, or half is each's."""
    pp, zero = columns["pp"], np.zeros_like(columns["pp"])
    pairs = [(zero + plan.first_layers, zero + plan.last_layers), (zero, zero)]
    for each in (config.layers // pp, -(-config.layers // pp)):
        one = np.maximum(0, config.layers - (pp - 1) * each)
        both = np.maximum(0, config.layers - (pp - 2) * each)
        pairs += [(one, zero), (zero, one), (both // 2, both - both // 2)]
    made = {name: np.tile(column, len(pairs)) for name, column in columns.items()}
    made |= {name: np.concatenate([pair[i] for pair in pairs]) for i, name in enumerate(_ENDS)}
    # What is said of a pair that is no change is said once.
    rows = np.unique(np.stack(list(made.values())), axis=1)
    return dict(zip(made, rows, strict=True))


def _distance(columns: dict[str, Any], plan: TrainingPlan, config: LLMConfig) -> npt.NDArray[np.float64]:
    """How far plans are from `plan`: doublings of counts, and 1 for each other name. Layers of a rank of its own that
    the plan has not: 1/4, and doublings from the mean."""
    own = PlanTable.of([plan])
    total = np.zeros(len(columns["tp"]))
    for name, column in columns.items():
        value = int(own[name][0])
        if name in CHOICES or isinstance(_FIELDS[name].default, bool):
            total += column != value
        elif name in _ENDS:
            uneven = np.abs(np.log2(np.maximum(1, column) * columns["pp"] / config.layers))
            total += np.where(column == value, 0.0, 0.25 + np.where(column > 0, uneven, 0.0))
        elif name in ("zero", "recompute_layers", "shard"):
            away = np.abs(column - value)
            total += np.minimum(away, 1) + 0.01 * away
        else:
            total += np.abs(np.log2(np.maximum(1, column) / max(1, value)))
    return total
