"""Megatron-LM: options of ``torchrun`` and ``pretrain_gpt.py``, one a line.

    torchrun $(grep -v '^#' plan.txt)

Names and meanings are those of Megatron-LM core 0.19.2 (`megatron_assertions.VERSION`). A file that Megatron-LM would
refuse is not written: `write` checks it against `ASSERTIONS`, and so does `read`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from foretell.errors import InfeasibleError, InputError
from foretell.hardware.cluster import Cluster
from foretell.plan.training.emit.found import Found, check_devices, idle, machines, shown
from foretell.plan.training.emit.megatron_assertions import VERSION, data_parallel, violated, virtual_stages
from foretell.plan.training.emit.options import Arguments, given, parse
from foretell.simulate.training.plan import TrainingPlan
from foretell.workload.llm.config import LLMConfig, MoE

__all__ = ["DEFAULTS", "OPTIONS", "arguments", "read", "unsaid", "unsaid_model", "write"]

#: Every option that says something about a plan or a model, and what its value is (bool: a flag, tuple: words).
OPTIONS: Mapping[str, type] = MappingProxyType(
    {
        # The launcher's.
        **dict.fromkeys(("--nnodes", "--nproc-per-node", "--world-size"), int),
        # Degrees and batch.
        **dict.fromkeys(
            (
                *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
                *("--expert-model-parallel-size", "--expert-tensor-parallel-size"),
                *("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"),
                *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
                *("--microbatch-group-size-per-virtual-pipeline-stage", "--flash-attention-version"),
                *("--micro-batch-size", "--global-batch-size", "--seq-length", "--max-position-embeddings"),
                "--num-distributed-optimizer-instances",
            ),
            int,
        ),
        **dict.fromkeys(
            (
                *("--sequence-parallel", "--use-distributed-optimizer", "--use-megatron-fsdp", "--use-torch-fsdp2"),
                *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
                *("--overlap-grad-reduce", "--overlap-param-gather", "--no-overlap-p2p-communication"),
                *("--tp-comm-overlap", "--overlap-moe-expert-parallel-comm"),
            ),
            bool,
        ),
        **dict.fromkeys(("--data-parallel-sharding-strategy", "--pipeline-model-parallel-layout"), str),
        "--cp-comm-type": tuple,
        "--hierarchical-context-parallel-sizes": tuple,
        # Recomputation and graphs.
        "--recompute-activations": bool,
        "--recompute-granularity": str,
        "--recompute-method": str,
        "--recompute-num-layers": int,
        "--recompute-modules": tuple,
        "--distribute-saved-activations": bool,
        "--cuda-graph-impl": str,
        "--cuda-graph-modules": tuple,
        **dict.fromkeys(("--enable-cuda-graph", "--external-cuda-graph", "--te-rng-tracker"), bool),
        "--no-check-for-nan-in-loss-and-grad": bool,
        # Formats.
        **dict.fromkeys(
            (
                *("--bf16", "--fp16", "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
                *("--use-precision-aware-optimizer", "--fp8-param-gather", "--no-gradient-accumulation-fusion"),
            ),
            bool,
        ),
        **dict.fromkeys(
            (
                *("--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe", "--main-grads-dtype"),
                *("--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype", "--megatron-fsdp-main-grads-dtype"),
                *("--attention-backend", "--ckpt-format", "--transformer-impl"),
            ),
            str,
        ),
        # The model.
        **dict.fromkeys(
            (
                *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"),
                *("--num-query-groups", "--kv-channels", "--vocab-size"),
                *("--kv-lora-rank", "--q-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"),
                *("--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size"),
                *("--moe-shared-expert-intermediate-size", "--window-attn-skip-freq"),
            ),
            int,
        ),
        **dict.fromkeys(
            (
                *("--group-query-attention", "--swiglu", "--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm"),
                *("--untie-embeddings-and-output-weights", "--use-rotary-position-embeddings", "--squared-relu"),
                *("--multi-latent-attention", "--moe-grouped-gemm", "--moe-shared-expert-gate", "--quick-geglu"),
                *("--moe-router-pre-softmax", "--moe-enable-deepep", "--moe-shared-expert-overlap"),
            ),
            bool,
        ),
        **dict.fromkeys(
            (
                *("--normalization", "--position-embedding-type", "--window-size", "--softmax-type"),
                *("--moe-layer-freq", "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"),
                *("--moe-router-score-function", "--moe-router-dtype"),
            ),
            str,
        ),
        "--rotary-percent": float,
    }
)

#: What Megatron-LM takes where an option is not given.
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
                *("--expert-model-parallel-size", "--num-distributed-optimizer-instances", "--num-query-groups"),
            ),
            1,
        ),
        **dict.fromkeys(
            ("--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype"), "fp32"
        ),
        "--data-parallel-sharding-strategy": "optim_grads_params",
        "--cp-comm-type": ("p2p",),
        "--recompute-modules": ("core_attn",),
        "--cuda-graph-impl": "none",
        "--cuda-graph-modules": (),
        "--fp8-recipe": "delayed",
        "--fp4-recipe": "nvfp4",
        "--attention-backend": "auto",
        "--ckpt-format": "torch_dist",
        "--transformer-impl": "transformer_engine",
        "--megatron-fsdp-main-grads-dtype": "auto",
        "--normalization": "LayerNorm",
        "--position-embedding-type": "learned_absolute",
        "--rotary-percent": 1.0,
        "--softmax-type": "vanilla",
        "--kv-lora-rank": 32,
        "--qk-head-dim": 128,
        "--qk-pos-emb-head-dim": 64,
        "--v-head-dim": 128,
        "--moe-router-topk": 2,
        "--moe-layer-freq": "1",
        "--moe-token-dispatcher-type": "allgather",
        "--moe-flex-dispatcher-backend": "deepep",
        "--moe-router-score-function": "softmax",
    }
)

_SCHEMES = {"ring": "p2p", "a2a": "a2a", "allgather": "allgather"}
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_FP8 = {"fp8": ("hybrid", "tensorwise"), "mxfp8": ("e4m3", "mxfp8")}
_PATTERN_MOST = 10_000


# --- writing ----------------------------------------------------------------------------------------------------------


def write(config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> str:
    """The options of one plan, one a line; comments say how to start it and what it cannot say.

    Raises InfeasibleError where the plan takes other devices than the cluster has, or Megatron-LM would refuse it.
    """
    check_devices(plan, cluster)
    lines = [*_launcher(cluster), "pretrain_gpt.py", *_model(config, plan), *_plan(config, plan)]
    found, _ = arguments("\n".join(lines), "Megatron-LM")
    broken = violated(found)
    if broken:
        rule = broken[0]
        raise InfeasibleError(f"Megatron-LM refuses this plan: {rule.reason}", f"see {', '.join(rule.options)}")
    return "\n".join([*_comments(config, plan, cluster), *lines]) + "\n"


def _comments(config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> Iterator[str]:
    yield f"# Megatron-LM core {VERSION}: {plan.devices} devices, {_word(cluster.name)}."
    size = machines(cluster)
    meet = "--rdzv-backend c10d --rdzv-endpoint HOST:PORT " if size is not None and size[0] > 1 else ""
    yield f"# Start on every machine with: torchrun {meet}$(grep -v '^#' THIS_FILE) DATA_AND_OPTIMIZER_OPTIONS"
    if meet:
        yield "# HOST:PORT is a free port of one of the machines, the same on all."
    if plan.zero >= 2:
        yield "# CUDA_DEVICE_MAX_CONNECTIONS must not be 1: Megatron-FSDP wants several."
    elif plan.tp > 1 or plan.cp > 1:
        yield "# Set CUDA_DEVICE_MAX_CONNECTIONS=1, which tensor and context parallelism want before Blackwell."
    for name, reason in unsaid_model(config).items():
        yield f"# not said of the model: {name} {_word(str(getattr(config, name)))}: {reason}"
    if config.positions == "rope":
        yield "# not said of the model: --rotary-base (10000 unless given): take it from the model's config"
    for name, reason in unsaid(config, plan).items():
        yield f"# not said: {name} {getattr(plan, name)}: {reason}"


def _word(text: str) -> str:
    return " ".join(re.sub(r"[^ -~·×]", "?", text).split())[:200]


def _launcher(cluster: Cluster) -> Iterator[str]:
    size = machines(cluster)
    if size is None:
        yield "--nproc-per-node gpu"
    else:
        yield f"--nnodes {size[0]}"
        yield f"--nproc-per-node {size[1]}"


def _plan(config: LLMConfig, plan: TrainingPlan) -> Iterator[str]:
    yield f"--micro-batch-size {plan.micro_batch}"
    yield f"--global-batch-size {plan.global_batch}"
    yield f"--seq-length {plan.seq_len}"
    yield f"--tensor-model-parallel-size {plan.tp}"
    yield f"--pipeline-model-parallel-size {plan.pp}"
    yield f"--context-parallel-size {plan.cp}"
    if plan.cp > 1:
        yield f"--cp-comm-type {_SCHEMES[plan.context_scheme]}"
    if plan.sequence_parallel and plan.tp > 1:
        yield "--sequence-parallel"
    if plan.overlap_tp and plan.tp > 1:
        yield "--tp-comm-overlap"
    yield from _pipeline(config, plan)
    yield from _experts(config, plan)
    yield from _sharding(plan)
    yield from _formats(plan)
    yield from _recompute(plan)
    if plan.cuda_graph:
        yield "--cuda-graph-impl transformer_engine"
        yield "--te-rng-tracker"
        if config.moe is not None:  # how many tokens an expert gets is known only while it runs
            yield "--cuda-graph-modules attn moe_router"


def _counted(config: LLMConfig, plan: TrainingPlan) -> tuple[bool, bool] | None:
    """Whether embedding and loss are counted as a layer of the first and last rank; None: as the plan's own counts.

    That is how Megatron-LM splits a rank that is one layer short into virtual stages.
    """
    ends = (plan.first_layers, plan.last_layers)
    if plan.vp == 1 or all(count % plan.vp == 0 for count in ends):
        return None
    marks = (ends[0] > 0, ends[1] > 0)
    each, rest = divmod(config.layers + sum(marks), plan.pp)
    fits = not rest and all(count == each - 1 for count in ends if count)
    return marks if fits else None


def _pipeline(config: LLMConfig, plan: TrainingPlan) -> Iterator[str]:
    if plan.pp == 1:
        return
    if plan.vp > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {plan.vp}"
        if not plan.overlap_p2p:
            yield "--no-overlap-p2p-communication"
    counted = _counted(config, plan)
    if counted is not None:
        if counted[0]:
            yield "--account-for-embedding-in-pipeline-split"
        if counted[1]:
            yield "--account-for-loss-in-pipeline-split"
        return
    if plan.first_layers:
        yield f"--decoder-first-pipeline-num-layers {plan.first_layers}"
    if plan.last_layers:
        yield f"--decoder-last-pipeline-num-layers {plan.last_layers}"


def _experts(config: LLMConfig, plan: TrainingPlan) -> Iterator[str]:
    if config.moe is None and plan.ep == 1:
        return
    yield f"--expert-model-parallel-size {plan.ep}"
    if plan.tp > 1:
        yield "--expert-tensor-parallel-size 1"  # each rank holds whole experts
    yield "--moe-grouped-gemm"
    yield f"--moe-token-dispatcher-type {'flex' if plan.dispatcher == 'deepep' else plan.dispatcher}"
    if plan.dispatcher == "deepep":
        yield "--moe-flex-dispatcher-backend deepep"
    if plan.overlap_ep and plan.ep > 1:
        yield "--overlap-moe-expert-parallel-comm"


def _sharding(plan: TrainingPlan) -> Iterator[str]:
    if plan.zero >= 1:
        yield "--use-distributed-optimizer"
    if plan.zero >= 2:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {_SHARDING[plan.zero]}"
        yield "--ckpt-format fsdp_dtensor"
    copies = _copies(plan)
    if copies > 1:
        yield f"--num-distributed-optimizer-instances {copies}"
    if plan.overlap_grad_reduce:
        yield "--overlap-grad-reduce"
        if plan.overlap_param_gather and plan.zero >= 1:
            yield "--overlap-param-gather"


def _copies(plan: TrainingPlan) -> int:
    """Sets of ranks that each hold everything once."""
    replicas = plan.dp * plan.cp
    whole = not plan.zero or not plan.shard or replicas % plan.shard
    return 1 if whole else replicas // plan.shard


def _formats(plan: TrainingPlan) -> Iterator[str]:
    yield "--fp16" if plan.precision == "fp16" else "--bf16"
    if plan.precision in _FP8:
        layout, recipe = _FP8[plan.precision]
        yield f"--fp8-format {layout}"
        yield f"--fp8-recipe {recipe}"
    if plan.precision == "nvfp4":
        yield "--fp4-format e2m1"
        yield "--fp4-recipe nvfp4"
    if plan.zero >= 2 and plan.grad_dtype != "fp8":
        yield f"--megatron-fsdp-main-grads-dtype {plan.grad_dtype}"
    elif plan.grad_dtype == "bf16" and plan.precision != "fp16":
        yield "--grad-reduce-in-bf16"
    elif plan.grad_dtype == "fp32":
        yield "--accumulate-allreduce-grads-in-fp32"
    if plan.state_dtype != "fp32" and plan.zero >= 1:
        yield "--use-precision-aware-optimizer"
        yield f"--exp-avg-dtype {plan.state_dtype}"
        yield f"--exp-avg-sq-dtype {plan.state_dtype}"
    yield f"--attention-backend {'unfused' if plan.attention == 'unfused' else 'flash'}"
    if plan.attention == "flash2":
        yield "--flash-attention-version 2"


def _recompute(plan: TrainingPlan) -> Iterator[str]:
    if plan.recompute == "none":
        return
    yield f"--recompute-granularity {plan.recompute}"
    if plan.recompute == "selective":
        yield "--recompute-modules core_attn"
    elif plan.recompute_layers and plan.recompute_layers % _chunks(plan) == 0:
        yield "--recompute-method block"
        yield f"--recompute-num-layers {plan.recompute_layers // _chunks(plan)}"
    else:
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"


def _chunks(plan: TrainingPlan) -> int:
    return plan.vp if plan.pp > 1 else 1


def unsaid(config: LLMConfig, plan: TrainingPlan) -> dict[str, str]:
    """Fields of a plan that the options do not carry, and why; those without effect are left out."""
    nothing = idle(config, plan)
    interleaved = plan.vp > 1
    found: dict[str, str] = {}
    for lacking, name, reason in (
        (plan.framework != "megatron", "framework", "these are options of Megatron-LM"),
        (
            plan.schedule != ("interleaved" if interleaved else "1f1b"), "schedule",
            f"Megatron-LM runs {'interleaved ' if interleaved else ''}1F1B with {plan.vp} virtual stages",
        ),
        (
            plan.overlap_param_gather and not plan.overlap_grad_reduce, "overlap_param_gather",
            "parameters are gathered beside compute only where gradients are reduced beside it",
        ),
        (
            plan.shard > 0 and plan.dp * plan.cp % plan.shard != 0, "shard",
            "the ranks do not split into such groups",
        ),
        (
            plan.recompute_layers % _chunks(plan) != 0, "recompute_layers",
            "layers are counted by virtual stage; all are recomputed",
        ),
        (
            plan.grad_dtype == "fp8" or (plan.grad_dtype == "bf16" and plan.precision == "fp16"), "grad_dtype",
            "gradients are bf16 or fp32, beside fp16 weights fp16 or fp32",
        ),
        (
            plan.state_dtype != "fp32" and plan.zero == 0, "state_dtype",
            "states are fp32 without the distributed optimiser",
        ),
        (plan.lora_rank > 0, "lora_rank", "pretrain_gpt.py trains all weights"),
        (plan.document_len > 0, "document_len", "how documents are packed is up to the data"),
    ):  # fmt: skip
        if lacking and name not in nothing:
            found[name] = reason
    return found


def _model(config: LLMConfig, plan: TrainingPlan) -> Iterator[str]:
    yield f"--num-layers {config.layers}"
    yield f"--hidden-size {config.hidden}"
    yield f"--ffn-hidden-size {config.intermediate}"
    yield f"--num-attention-heads {config.heads}"
    if config.mla is not None:
        yield "--multi-latent-attention"
        yield f"--kv-lora-rank {config.mla.kv_lora_rank}"
        if config.mla.q_lora_rank:
            yield f"--q-lora-rank {config.mla.q_lora_rank}"
        yield f"--qk-head-dim {config.mla.nope_head_dim}"
        yield f"--qk-pos-emb-head-dim {config.mla.rope_head_dim}"
        yield f"--v-head-dim {config.mla.v_head_dim}"
    else:
        if config.kv_heads != config.heads:
            yield "--group-query-attention"
            yield f"--num-query-groups {config.kv_heads}"
        yield f"--kv-channels {config.head_dim}"
    yield f"--vocab-size {config.vocab}"
    yield f"--max-position-embeddings {_positions(config, plan)}"
    yield f"--position-embedding-type {_EMBEDDINGS.get(config.positions, 'none')}"
    if config.positions == "rope" and config.rotary_dim not in (None, config.head_dim):
        yield f"--rotary-percent {config.rotary_dim / config.head_dim!r}"
    yield f"--normalization {'RMSNorm' if config.norm == 'rms' else 'LayerNorm'}"
    if config.qk_norm != "none":
        yield "--qk-layernorm"
    if config.gated:
        yield "--swiglu"
    if not _all_biased(config):
        yield "--disable-bias-linear"
        if config.qkv_bias:
            yield "--add-qkv-bias"
    if not config.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"
    if config.sliding_window and "sliding" in config.attention_pattern:
        yield f"--window-size {config.sliding_window - 1},0"
        if _window_period(config):
            yield f"--window-attn-skip-freq {_window_period(config)}"
    if config.attention_sinks:
        yield "--softmax-type learnable"
    if config.moe is not None:
        yield from _routing(config, config.moe)


def _routing(config: LLMConfig, moe: MoE) -> Iterator[str]:
    yield f"--num-experts {moe.experts}"
    yield f"--moe-router-topk {moe.top_k}"
    yield f"--moe-ffn-hidden-size {moe.intermediate}"
    if moe.shared_intermediate:
        yield f"--moe-shared-expert-intermediate-size {moe.shared_intermediate}"
        if moe.shared_gate:
            yield "--moe-shared-expert-gate"
    pattern = _moe_layers(config.layers, moe.first_dense, moe.every)
    if 0 in pattern:
        yield f"--moe-layer-freq {_runs(pattern)}"
    yield f"--moe-router-score-function {'sigmoid' if moe.scoring == 'sigmoid' else 'softmax'}"
    if moe.scoring == "softmax" and not moe.renormalize:
        yield "--moe-router-pre-softmax"
    if moe.router_fp32:
        yield "--moe-router-dtype fp32"


_EMBEDDINGS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}


def _positions(config: LLMConfig, plan: TrainingPlan) -> int:
    if config.positions == "learned":
        return config.position_rows
    return max(config.context_length or 0, plan.seq_len)


def _all_biased(config: LLMConfig) -> bool:
    return config.qkv_bias and config.o_bias and config.mlp_bias


def _window_period(config: LLMConfig) -> int:
    """Every how many layers one sees everything, 0: none does."""
    pattern = config.attention_pattern
    return len(pattern) if pattern == ("sliding",) * (len(pattern) - 1) + ("full",) else 0


def _moe_layers(layers: int, first_dense: int, every: int) -> tuple[int, ...]:
    return tuple(int(i >= first_dense and (i + 1) % every == 0) for i in range(layers))


def _runs(pattern: tuple[int, ...]) -> str:
    """A pattern as Megatron-LM takes it: ``[0]*3+[1]*58``, or a period of it repeated."""
    for period in range(2, len(pattern) // 2 + 1):
        if len(pattern) % period == 0 and pattern == pattern[:period] * (len(pattern) // period):
            return f"({_runs(pattern[:period])})*{len(pattern) // period}"
    parts: list[list[int]] = []
    for kind in pattern:
        if parts and parts[-1][0] == kind:
            parts[-1][1] += 1
        else:
            parts.append([kind, 1])
    return "+".join(f"[{kind}]*{count}" for kind, count in parts)


def unsaid_model(config: LLMConfig) -> dict[str, str]:
    """Fields of a model that Megatron-LM's options do not carry, and why."""
    sliding = "sliding" in config.attention_pattern
    found: dict[str, str] = {}
    for lacking, name, reason in (
        (config.block != "pre_norm", "block", "norms sit before attention and MLP"),
        (
            config.activation != ("silu" if config.gated else "gelu"), "activation",
            "the options are SiLU where gated, Megatron-LM's own GELU where not",
        ),
        (config.norm_bias != (config.norm == "layer"), "norm_bias", "LayerNorm has a bias, RMSNorm has none"),
        (
            len({config.o_bias, config.mlp_bias, _all_biased(config)}) > 1, "o_bias",
            "all linear layers have a bias, those of queries, keys and values alone, or none",
        ),
        (
            len({config.o_bias, config.mlp_bias, _all_biased(config)}) > 1, "mlp_bias",
            "all linear layers have a bias, those of queries, keys and values alone, or none",
        ),
        (config.head_bias, "head_bias", "the output layer has none"),
        (config.qk_norm == "full", "qk_norm", "queries and keys are normed head by head"),
        (config.positions == "alibi", "positions", "Megatron-LM has no ALiBi"),
        (
            config.positions == "learned" and config.context_length not in (None, config.position_rows),
            "context_length", "sequences are as long as the table of positions",
        ),
        (config.embedding_norm, "embedding_norm", "embeddings are not normed"),
        (config.embedding_scale, "embedding_scale", "embeddings are not scaled"),
        (config.final_softcap, "final_softcap", "logits are not capped"),
        (
            sliding and config.attention_pattern != ("sliding",) and not _window_period(config), "attention_pattern",
            "the pattern is windows with every n-th layer in full",
        ),
        (config.moe is not None and bool(_unsaid_moe(config, config.moe)), "moe",
         "" if config.moe is None else _unsaid_moe(config, config.moe)),
    ):  # fmt: skip
        if lacking:
            found[name] = reason
    return found


def _unsaid_moe(config: LLMConfig, moe: MoE) -> str:
    return "; ".join(
        reason
        for lacking, reason in (
            (moe.router_bias, "the router has no bias"),
            (moe.expert_bias != _all_biased(config), "experts have biases where all linear layers have"),
            (moe.scoring == "softmax_after_topk", "softmax over the chosen experts is its default"),
            (moe.scoring == "sigmoid" and not moe.renormalize, "sigmoid scores are made to sum to 1"),
        )
        if lacking
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def arguments(text: str, where: str) -> tuple[Arguments, list[str]]:
    """The options of a text as Megatron-LM would hold them, and notes on those that say nothing here.

    Raises InputError for an option with a wrong value or given twice.
    """
    options = [option for option in given(text) if option.values != ("gpu",)]
    parsed, notes = parse(options, OPTIONS, DEFAULTS, where)
    values = dict(parsed.values)
    if "--nnodes" in values and "--nproc-per-node" in values:
        values["--world-size"] = parsed.number("--nnodes") * parsed.number("--nproc-per-node")
    if values.pop("--recompute-activations", False):
        values.setdefault("--recompute-granularity", "selective")
    return Arguments(values, DEFAULTS, parsed.lines), notes


def read(text: str, where: str) -> Found:
    """What options of Megatron-LM say, from a file of options, a shell script or a YAML file.

    Raises InputError, with the line, where they contradict each other as Megatron-LM would say.
    """
    found, notes = arguments(text, where)
    if not any(name in found for name in ("--tensor-model-parallel-size", "--micro-batch-size", "--num-layers")):
        raise InputError("holds no option of Megatron-LM", where, "give a file with --tensor-model-parallel-size …")
    for rule in violated(found):
        lines = [found.lines[name] for name in rule.options if name in found.lines]
        absent = rule.presence and any(name not in found for name in rule.options)
        if rule.mended or absent or not lines:
            notes.append(f"Megatron-LM asserts: {rule.reason}")
        else:
            options = " ".join(f"{name} {_spoken(found, name)}" for name in rule.options if name in found)
            raise InputError(
                f"{options}: {rule.reason}", f"{where}: line {max(lines)}", f"Megatron-LM asserts it ({rule.source})"
            )
    plan = _read_plan(found, notes)
    return Found("megatron", where, MappingProxyType(plan), MappingProxyType(_read_model(found, notes)), tuple(notes))


def _spoken(a: Arguments, name: str) -> str:
    value = a[name]
    return "" if value is True else " ".join(value) if isinstance(value, tuple) else str(value)


def _read_plan(a: Arguments, notes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"framework": "megatron"}
    for field, name in (
        ("micro_batch", "--micro-batch-size"),
        ("global_batch", "--global-batch-size"),
        ("seq_len", "--seq-length"),
    ):
        if name in a:
            found[field] = a.number(name)
    found |= {
        "tp": a.number("--tensor-model-parallel-size"),
        "pp": a.number("--pipeline-model-parallel-size"),
        "cp": a.number("--context-parallel-size"),
        "ep": a.number("--expert-model-parallel-size"),
    }
    if data_parallel(a):
        found["dp"] = data_parallel(a)
    else:
        notes.append("does not say how many devices: give --dp")
    if "global_batch" not in found and "dp" in found and "micro_batch" in found:
        found["global_batch"] = found["dp"] * found["micro_batch"]
    found |= _read_pipeline(a, notes)
    found |= {
        "sequence_parallel": a.on("--sequence-parallel"),
        "overlap_tp": a.on("--tp-comm-overlap"),
        "overlap_ep": a.on("--overlap-moe-expert-parallel-comm"),
        "overlap_grad_reduce": a.on("--overlap-grad-reduce"),
        "overlap_param_gather": a.on("--overlap-param-gather"),
        "overlap_p2p": not a.on("--no-overlap-p2p-communication"),
    }
    schemes = {scheme: name for name, scheme in _SCHEMES.items()}
    scheme = a.words("--cp-comm-type")[0] if a.words("--cp-comm-type") else "p2p"
    if scheme in schemes and len(set(a.words("--cp-comm-type"))) == 1:
        found["context_scheme"] = schemes[scheme]
    else:
        notes.append(f"--cp-comm-type {shown(a.words('--cp-comm-type'))}: no plan mixes schemes")
    found |= _read_sharding(a) | _read_formats(a, notes) | _read_recompute(a, notes)
    if a.number("--num-experts"):
        dispatcher = a.text("--moe-token-dispatcher-type")
        found["dispatcher"] = "deepep" if dispatcher == "flex" else dispatcher
        if dispatcher == "flex" and a.text("--moe-flex-dispatcher-backend") != "deepep":
            notes.append(f"--moe-flex-dispatcher-backend {a.text('--moe-flex-dispatcher-backend')} is taken as deepep")
        if (a.number("--expert-tensor-parallel-size") or found["tp"]) > 1:
            notes.append("experts are split by tensor parallelism; a plan has them whole")
    graphs = a.text("--cuda-graph-impl") != "none" or a.on("--enable-cuda-graph") or a.on("--external-cuda-graph")
    found["cuda_graph"] = graphs
    return found


def _read_pipeline(a: Arguments, notes: list[str]) -> dict[str, Any]:
    chunks = virtual_stages(a)
    found: dict[str, Any] = {"vp": chunks, "schedule": "interleaved" if chunks > 1 else "1f1b"}
    first, last = a.number("--decoder-first-pipeline-num-layers"), a.number("--decoder-last-pipeline-num-layers")
    marks = (a.on("--account-for-embedding-in-pipeline-split"), a.on("--account-for-loss-in-pipeline-split"))
    if any(marks) and a.number("--pipeline-model-parallel-size") > 1:
        each = (a.number("--num-layers") + sum(marks)) // a.number("--pipeline-model-parallel-size")
        first, last = (each - 1 if mark else 0 for mark in marks)
    if "--pipeline-model-parallel-layout" in a:
        notes.append("--pipeline-model-parallel-layout is not read: layers are taken to be even")
    return found | {"first_layers": first, "last_layers": last}


def _read_sharding(a: Arguments) -> dict[str, Any]:
    if a.on("--use-torch-fsdp2"):
        return {"zero": 3}
    zero = int(a.on("--use-distributed-optimizer"))
    if a.on("--use-megatron-fsdp"):
        stages = ("no_shard", "optim", "optim_grads", "optim_grads_params")
        zero = stages.index(a.text("--data-parallel-sharding-strategy"))
    found: dict[str, Any] = {"zero": zero}
    copies = a.number("--num-distributed-optimizer-instances")
    if copies > 1 and data_parallel(a):
        found["shard"] = data_parallel(a) * a.number("--context-parallel-size") // copies
    return found


def _read_formats(a: Arguments, notes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    recipe = a.text("--fp8-recipe")
    if "--fp8-format" in a:
        found["precision"] = "mxfp8" if recipe == "mxfp8" else "fp8"
        if recipe not in ("mxfp8", "delayed", "tensorwise"):
            notes.append(f"--fp8-recipe {recipe} is taken as fp8 with one scale a tensor")
    elif "--fp4-format" in a:
        found["precision"] = "nvfp4"
    elif a.on("--bf16") or a.on("--fp16"):
        found["precision"] = "bf16" if a.on("--bf16") else "fp16"
    else:
        notes.append("trains in fp32, which no plan does; taken as bf16")
    sharded = a.text("--megatron-fsdp-main-grads-dtype")
    if sharded in ("fp32", "bf16"):
        found["grad_dtype"] = sharded
    elif a.on("--grad-reduce-in-bf16") or a.text("--main-grads-dtype") == "bf16":
        found["grad_dtype"] = "bf16"
    elif a.on("--fp16") and not a.on("--accumulate-allreduce-grads-in-fp32"):
        notes.append("gradients are fp16, which no plan has; taken as fp32")
    else:
        found["grad_dtype"] = "fp32"
    states = {a.text("--exp-avg-dtype"), a.text("--exp-avg-sq-dtype")}
    if len(states) == 1 and states <= {"fp32", "bf16", "fp8"}:
        found["state_dtype"] = states.pop()
    else:
        notes.append("states of the optimiser in several formats, or fp16; taken as fp32")
    backend = a.text("--attention-backend")
    if backend in ("flash", "fused", "unfused", "local"):
        second = backend == "flash" and a.number("--flash-attention-version") == 2
        found["attention"] = "flash2" if second else "flash" if backend in ("flash", "fused") else "unfused"
    return found


def _read_recompute(a: Arguments, notes: list[str]) -> dict[str, Any]:
    kind = a.text("--recompute-granularity") or "none"
    found: dict[str, Any] = {"recompute": kind}
    if kind == "full" and a.text("--recompute-method") == "block":
        found["recompute_layers"] = a.number("--recompute-num-layers") * virtual_stages(a)
    elif kind == "full" and a.number("--recompute-num-layers") > 1:
        notes.append("layers are recomputed several at a time, which is taken as one at a time")
    if kind == "selective" and a.words("--recompute-modules") != ("core_attn",):
        notes.append(f"--recompute-modules {shown(a.words('--recompute-modules'))} is taken as core_attn")
    return found


def _read_model(a: Arguments, notes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, name in (
        ("layers", "--num-layers"),
        ("hidden", "--hidden-size"),
        ("heads", "--num-attention-heads"),
        ("intermediate", "--ffn-hidden-size"),
        ("vocab", "--vocab-size"),
        ("head_dim", "--kv-channels"),
    ):
        if name in a:
            found[field] = a.number(name)
    if not found:
        return found
    gated = a.on("--swiglu") or a.on("--quick-geglu")
    if "intermediate" not in found and "hidden" in found:
        found["intermediate"] = int(found["hidden"] * 8 / 3) // 64 * 64 if gated else 4 * found["hidden"]
    if a.on("--group-query-attention"):
        found["kv_heads"] = a.number("--num-query-groups")
    rotary = a.on("--use-rotary-position-embeddings") or a.text("--position-embedding-type") in ("rope", "yarn")
    kind = "rope" if rotary else {"learned_absolute": "learned"}.get(a.text("--position-embedding-type"), "none")
    biased = not a.on("--disable-bias-linear")
    found |= {
        "gated": gated,
        "activation": "silu" if a.on("--swiglu") else "relu" if a.on("--squared-relu") else "gelu",
        "norm": "rms" if a.text("--normalization") == "RMSNorm" else "layer",
        "norm_bias": a.text("--normalization") != "RMSNorm",
        "qkv_bias": biased or a.on("--add-qkv-bias"),
        "o_bias": biased,
        "mlp_bias": biased,
        "qk_norm": "head" if a.on("--qk-layernorm") else "none",
        "tied_embeddings": not a.on("--untie-embeddings-and-output-weights"),
        "positions": kind,
        "attention_sinks": a.text("--softmax-type") == "learnable",
    }
    rows = a.number("--max-position-embeddings")
    if rows:
        found["context_length"] = rows
        if kind == "learned":
            found["position_rows"] = rows
    percent = a["--rotary-percent"]
    head = found.get("head_dim") or found.get("hidden", 0) // max(1, found.get("heads", 1))
    if kind == "rope" and isinstance(percent, float) and 0 < percent < 1 and head:
        found["rotary_dim"] = round(percent * head)
    if a.on("--multi-latent-attention"):
        found.pop("head_dim", None)
        found["mla"] = {
            "kv_lora_rank": a.number("--kv-lora-rank"),
            "q_lora_rank": a.number("--q-lora-rank"),
            "nope_head_dim": a.number("--qk-head-dim"),
            "rope_head_dim": a.number("--qk-pos-emb-head-dim"),
            "v_head_dim": a.number("--v-head-dim"),
        }
    found |= _read_window(a, notes)
    if a.number("--num-experts"):
        found["moe"] = _read_moe(a, found, biased, notes)
    return found


def _read_window(a: Arguments, notes: list[str]) -> dict[str, Any]:
    match = re.fullmatch(r"\(?(\d{1,9}),\s*-?\d{1,9}\)?", a.text("--window-size"))
    if match is None:
        if "--window-size" in a:
            notes.append(f"--window-size {shown([a.text('--window-size')])} is not read")
        return {}
    period = a.number("--window-attn-skip-freq")
    pattern = ("sliding",) * (period - 1) + ("full",) if 1 < period <= 1000 else ("sliding",)
    return {"sliding_window": int(match[1]) + 1, "attention_pattern": pattern}


def _read_moe(a: Arguments, model: Mapping[str, Any], biased: bool, notes: list[str]) -> dict[str, Any]:
    width = a.number("--moe-ffn-hidden-size") or model.get("intermediate", 0)
    sigmoid = a.text("--moe-router-score-function") == "sigmoid"
    found: dict[str, Any] = {
        "experts": a.number("--num-experts"),
        "top_k": a.number("--moe-router-topk"),
        "intermediate": width,
        "shared_intermediate": a.number("--moe-shared-expert-intermediate-size"),
        "shared_gate": a.on("--moe-shared-expert-gate"),
        "router_fp32": a.text("--moe-router-dtype") in ("fp32", "fp64"),
        "expert_bias": biased,
        "scoring": "sigmoid" if sigmoid else "softmax",
        "renormalize": sigmoid or not a.on("--moe-router-pre-softmax"),
    }
    layers = model.get("layers", 0)
    pattern = _layer_pattern(a.text("--moe-layer-freq"), layers)
    for first in range(layers):
        if pattern == _moe_layers(layers, first, 1):
            return found | {"first_dense": first}
        if pattern == _moe_layers(layers, 0, first + 1):
            return found | {"every": first + 1}
    notes.append(f"--moe-layer-freq {shown([a.text('--moe-layer-freq')])} is not read: all layers are taken to route")
    return found


def _layer_pattern(text: str, layers: int) -> tuple[int, ...] | None:
    """Which layers route, from a period or an expression such as ``([0]*3+[1])*4``; None where it is neither."""
    if re.fullmatch(r"\d{1,5}", text) and int(text):
        return tuple(int(i % int(text) == 0) for i in range(layers))
    tokens = re.findall(r"\d{1,5}|[\[\](),+*]", text)
    if len(text) > _PATTERN_MOST or "".join(tokens) != text:
        return None
    try:
        value, end = _sum(tokens, 0)
    except (ValueError, IndexError, RecursionError):
        return None
    return tuple(value) if end == len(tokens) else None


def _sum(tokens: list[str], at: int) -> tuple[list[int], int]:
    value, at = _product(tokens, at)
    while at < len(tokens) and tokens[at] == "+":
        more, at = _product(tokens, at + 1)
        if len(value) + len(more) > _PATTERN_MOST:
            raise ValueError("too long")
        value = value + more
    return value, at


def _product(tokens: list[str], at: int) -> tuple[list[int], int]:
    if tokens[at] == "(":
        value, at = _sum(tokens, at + 1)
        if tokens[at] != ")":
            raise ValueError("unclosed")
        at += 1
    elif tokens[at] == "[":
        end = tokens.index("]", at)
        value, at = [int(token) for token in tokens[at + 1 : end] if token != ","], end + 1
    else:
        raise ValueError("neither list nor group")
    while at + 1 < len(tokens) and tokens[at] == "*":
        if len(value) * int(tokens[at + 1]) > _PATTERN_MOST:
            raise ValueError("too long")
        value, at = value * int(tokens[at + 1]), at + 2
    return value, at
