"""DeepSpeed: its JSON, with the options of Megatron-DeepSpeed for what the JSON has no words for.

DeepSpeed knows of batches, ZeRO and formats; the model, tensor, pipeline, sequence and expert parallelism are the
training script's. Those stand under the key ``foretell``, which DeepSpeed passes over: ``launcher`` for ``deepspeed``,
``arguments`` for Megatron-DeepSpeed's ``pretrain_gpt.py``, and ``not_said``.

Keys are those of DeepSpeed 0.19 (`VERSION`), options those of ``megatron/arguments.py`` of Megatron-DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from foretell.documents import read_json_text
from foretell.errors import InfeasibleError, InputError
from foretell.hardware.cluster import Cluster
from foretell.plan.training.emit.found import METADATA, Found, check_devices, idle, machines, shown
from foretell.plan.training.emit.options import Arguments, given, parse
from foretell.simulate.training.plan import TrainingPlan
from foretell.workload.llm.config import LLMConfig

__all__ = ["OPTIONS", "VERSION", "read", "unsaid", "unsaid_model", "write"]

#: The version of DeepSpeed whose keys these are.
VERSION = "0.19.8"

#: Options of Megatron-DeepSpeed that say something about a plan or a model.
OPTIONS: Mapping[str, type] = MappingProxyType(
    {
        **dict.fromkeys(("--num-nodes", "--num-gpus"), int),
        **dict.fromkeys(
            (
                *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--ds-sequence-parallel-size"),
                *("--moe-expert-parallel-size", "--micro-batch-size", "--global-batch-size", "--seq-length"),
                *("--max-position-embeddings", "--num-layers", "--hidden-size", "--ffn-hidden-size"),
                *("--num-attention-heads", "--num-key-value-heads", "--kv-channels", "--checkpoint-num-layers"),
                *("--recompute-num-layers", "--zero-stage", "--num-experts", "--topk"),
            ),
            int,
        ),
        **dict.fromkeys(
            (
                *("--no-pipeline-parallel", "--sequence-parallel", "--enable-zbh1-pipeline", "--bf16", "--fp16"),
                *("--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2", "--checkpoint-activations"),
                *("--deepspeed-activation-checkpointing", "--recompute-activations", "--swiglu", "--deepspeed"),
                *("--untie-embeddings-and-output-weights", "--disable-bias-linear"),
                *("--use-rotary-position-embeddings",),
            ),
            bool,
        ),
        **dict.fromkeys(("--recompute-granularity", "--recompute-method", "--normalization"), str),
    }
)
_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--ds-sequence-parallel-size"),
                *("--moe-expert-parallel-size", "--checkpoint-num-layers"),
            ),
            1,
        ),
        "--normalization": "layernorm",
    }
)
_KEYS = frozenset(
    {
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization"),
        *("bf16", "bfloat16", "fp16", "data_types", "foretell", "tensor_parallel", "sequence_parallel_size"),
    }
)


# --- writing ----------------------------------------------------------------------------------------------------------


def write(config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> str:
    """The settings of one plan as JSON.

    Raises InfeasibleError where the plan takes other devices than the cluster has, or DeepSpeed would refuse it.
    """
    check_devices(plan, cluster)
    _refuse(config, plan)
    zero: dict[str, Any] = {"stage": plan.zero}
    if plan.zero:
        zero["overlap_comm"] = plan.overlap_grad_reduce
    data: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "zero_optimization": zero,
        "fp16" if plan.precision == "fp16" else "bf16": {"enabled": True},
    }
    if plan.grad_dtype in ("fp32", "bf16"):
        data["data_types"] = {"grad_accum_dtype": plan.grad_dtype}
    size = machines(cluster)
    own: dict[str, Any] = {
        "start": "deepspeed LAUNCHER pretrain_gpt.py --deepspeed --deepspeed_config THIS_FILE ARGUMENTS, on "
        f"{plan.devices} devices: {cluster.name[:200]}",
        "launcher": [] if size is None else ["--num_nodes", str(size[0]), "--num_gpus", str(size[1])],
        "arguments": [word for line in _arguments(config, plan) for word in line.split()],
    }
    lost = unsaid(config, plan)
    if lost:
        own["not_said"] = {name: f"{getattr(plan, name)}: {reason}" for name, reason in lost.items()}
    lacking = unsaid_model(config)
    if lacking:
        own["not_said_of_the_model"] = {name: str(getattr(config, name)) for name in lacking}
    return json.dumps({**data, "foretell": own}, indent=2, ensure_ascii=True) + "\n"


def _refuse(config: LLMConfig, plan: TrainingPlan) -> None:
    """Raise InfeasibleError for what DeepSpeed and Megatron-DeepSpeed assert."""
    for broken, reason, repair in (
        (
            plan.pp > 1 and plan.zero >= 2, f"ZeRO-{plan.zero} does not go with pipeline parallelism",
            "take ZeRO-1 or no pipeline",
        ),
        (
            plan.global_batch % (plan.micro_batch * plan.dp) != 0,
            f"the global batch {plan.global_batch} is no multiple of micro-batch {plan.micro_batch} · dp {plan.dp}",
            "choose another micro-batch",
        ),
        (
            plan.cp > 1 and plan.tp > 1 and plan.sequence_parallel,
            "DeepSpeed's sequence parallelism excludes Megatron's", "switch sequence_parallel off",
        ),
        (
            plan.cp > 1 and config.heads % plan.cp != 0,
            f"{config.heads} heads do not split over {plan.cp} sequence-parallel ranks", "choose another cp",
        ),
        (
            plan.pp > 1 and plan.schedule == "zero-bubble" and plan.sequence_parallel and plan.tp > 1,
            "the zero-bubble schedule excludes sequence parallelism", "switch sequence_parallel off",
        ),
        (
            plan.ep > 1 and (config.moe is None or config.moe.experts % plan.ep != 0),
            f"ep {plan.ep} does not divide {0 if config.moe is None else config.moe.experts} experts",
            "choose another ep",
        ),
    ):  # fmt: skip
        if broken:
            raise InfeasibleError(f"DeepSpeed refuses this plan: {reason}", repair)


def _arguments(config: LLMConfig, plan: TrainingPlan) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {plan.tp}"
    yield f"--pipeline-model-parallel-size {plan.pp}"
    if plan.pp == 1:
        yield "--no-pipeline-parallel"
    elif plan.schedule == "zero-bubble":
        yield "--enable-zbh1-pipeline"
    if plan.cp > 1:
        yield f"--ds-sequence-parallel-size {plan.cp}"
    if plan.sequence_parallel and plan.tp > 1:
        yield "--sequence-parallel"
    yield f"--micro-batch-size {plan.micro_batch}"
    yield f"--global-batch-size {plan.global_batch}"
    yield f"--seq-length {plan.seq_len}"
    yield f"--zero-stage {plan.zero}"
    yield "--fp16" if plan.precision == "fp16" else "--bf16"
    if plan.attention != "unfused":
        yield "--use-flash-attn-v2"
    if plan.recompute == "full":
        yield "--checkpoint-activations"
        yield "--deepspeed-activation-checkpointing"
    elif plan.recompute == "selective":
        yield "--recompute-granularity selective"
    yield f"--num-layers {config.layers}"
    yield f"--hidden-size {config.hidden}"
    yield f"--ffn-hidden-size {config.intermediate}"
    yield f"--num-attention-heads {config.heads}"
    yield f"--num-key-value-heads {config.kv_heads}"
    if config.mla is None:
        yield f"--kv-channels {config.head_dim}"
    rows = config.position_rows if config.positions == "learned" else config.context_length or 0
    yield f"--max-position-embeddings {max(rows, plan.seq_len)}"
    yield f"--normalization {'rmsnorm' if config.norm == 'rms' else 'layernorm'}"
    if config.gated:
        yield "--swiglu"
    if config.positions == "rope":
        yield "--use-rotary-position-embeddings"
    if not (config.qkv_bias and config.o_bias and config.mlp_bias):
        yield "--disable-bias-linear"
    if not config.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"
    if config.moe is not None:
        yield f"--num-experts {config.moe.experts}"
        yield f"--topk {config.moe.top_k}"
        yield f"--moe-expert-parallel-size {plan.ep}"


def unsaid_model(config: LLMConfig) -> tuple[str, ...]:
    """Fields of a model that Megatron-DeepSpeed has no option for."""
    options = given("\n".join(_arguments(config, TrainingPlan(1, 1))))
    said = _read_model(parse(options, OPTIONS, _DEFAULTS, "options")[0])
    return tuple(
        item.name for item in dataclasses.fields(config)
        if item.name not in METADATA and getattr(config, item.name) != said.get(item.name, item.default)
    )  # fmt: skip


def unsaid(config: LLMConfig, plan: TrainingPlan) -> dict[str, str]:
    """Fields of a plan that neither JSON nor options carry, and why; those without effect are left out."""
    nothing = idle(config, plan)
    schedule = plan.schedule not in ("1f1b", "zero-bubble")
    found: dict[str, str] = {}
    for lacking, name, reason in (
        (plan.framework != "deepspeed", "framework", "these are settings of DeepSpeed"),
        (schedule, "schedule", "DeepSpeed runs 1F1B or zero-bubble ZB-H1"),
        (plan.vp > 1, "vp", "DeepSpeed holds one stage on a rank"),
        (plan.first_layers > 0, "first_layers", "DeepSpeed deals layers by their parameters"),
        (plan.last_layers > 0, "last_layers", "DeepSpeed deals layers by their parameters"),
        (plan.shard > 0, "shard", "ZeRO shards over all data-parallel ranks"),
        (plan.recompute_layers > 0, "recompute_layers", "all layers are recomputed"),
        (plan.precision not in ("bf16", "fp16"), "precision", "DeepSpeed trains in bf16 or fp16"),
        (plan.attention == "flash", "attention", "fused attention is FlashAttention 2"),
        (plan.grad_dtype == "fp8", "grad_dtype", "gradients are fp32 or 16 bit"),
        (plan.state_dtype != "fp32", "state_dtype", "16-bit states come only with 16-bit master weights"),
        (plan.context_scheme != "a2a", "context_scheme", "sequence parallelism is by all-to-all (Ulysses)"),
        (plan.dispatcher != "alltoall", "dispatcher", "tokens reach experts by all-to-all"),
        (
            plan.overlap_grad_reduce and plan.zero == 0, "overlap_grad_reduce",
            "gradients are reduced beside compute with ZeRO only",
        ),
        (
            plan.overlap_param_gather != (plan.overlap_grad_reduce and plan.zero == 3), "overlap_param_gather",
            "overlap_comm is one switch, and parameters are gathered beside compute with ZeRO-3 only",
        ),
        (plan.overlap_tp, "overlap_tp", "tensor-parallel communication is not overlapped"),
        (plan.overlap_p2p, "overlap_p2p", "sends and receives of the pipeline are not overlapped"),
        (plan.overlap_ep, "overlap_ep", "expert communication is not overlapped"),
        (plan.cuda_graph, "cuda_graph", "there is no setting for it"),
        (plan.lora_rank > 0, "lora_rank", "pretrain_gpt.py trains all weights"),
        (plan.document_len > 0, "document_len", "how documents are packed is up to the data"),
    ):  # fmt: skip
        if lacking and name not in nothing:
            found[name] = reason
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


def read(text: str, where: str) -> Found:
    """What a DeepSpeed JSON says, and the options beside it. Raises InputError where it contradicts itself."""
    data = read_json_text(text, where, "DeepSpeed JSON file")
    if not isinstance(data, dict) or not _KEYS.intersection(data):
        raise InputError("has no key of DeepSpeed", where, "give a file with train_batch_size or zero_optimization")
    notes: list[str] = []
    strange = sorted(str(key) for key in data if key not in _KEYS)
    if strange:
        notes.append(f"keys that say nothing about the plan: {shown(strange)}")
    a = _options(data, notes, where)
    plan: dict[str, Any] = {"framework": "deepspeed"}
    plan |= _read_degrees(data, a, where)
    plan |= _read_batch(data, a, plan, notes, where)
    plan |= _read_zero(data, plan, notes, where)
    plan |= _read_formats(data, notes, where)
    plan |= _read_recompute(a)
    if "--seq-length" in a:
        plan["seq_len"] = a.number("--seq-length")
    if a.values:
        flash = any(a.on(name) for name in ("--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2"))
        plan["attention"] = "flash2" if flash else "unfused"
    return Found("deepspeed", where, MappingProxyType(plan), MappingProxyType(_read_model(a)), tuple(notes))


def _options(data: Mapping[str, Any], notes: list[str], where: str) -> Arguments:
    own = data.get("foretell", {})
    words: list[str] = []
    for key in ("launcher", "arguments"):
        listed = own.get(key, []) if isinstance(own, dict) else None
        if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
            raise InputError(f"foretell.{key} is no list of words", where, "write it as [\"--name\", \"value\", …]")
        words += listed
    # One option a line, so that nothing in a word is taken for syntax of a shell.
    lines = [word if word.startswith("--") else json.dumps(word) for word in words]
    parsed, more = parse(given("\n".join(lines)), OPTIONS, _DEFAULTS, f"{where}: foretell.arguments")
    notes += more
    return parsed


def _count(data: Mapping[str, Any], key: str, notes: list[str], where: str) -> int | None:
    value = data.get(key)
    if value is None:
        return None
    if value == "auto":
        notes.append(f"{key} is left to the trainer (auto)")
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise InputError(f"{key} is {shown([str(value)])}, want a whole number from 1 on", where)
    return value


def _read_degrees(data: Mapping[str, Any], a: Arguments, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tp": a.number("--tensor-model-parallel-size"),
        "pp": a.number("--pipeline-model-parallel-size"),
        "cp": a.number("--ds-sequence-parallel-size"),
        "ep": a.number("--moe-expert-parallel-size"),
        "sequence_parallel": a.on("--sequence-parallel"),
        "schedule": "zero-bubble" if a.on("--enable-zbh1-pipeline") else "1f1b",
        "dispatcher": "alltoall",
    }
    split = data.get("tensor_parallel")
    if isinstance(split, dict) and isinstance(split.get("autotp_size"), int) and split["autotp_size"] > 0:
        found["tp"] = split["autotp_size"]
    if isinstance(data.get("sequence_parallel_size"), int) and data["sequence_parallel_size"] > 0:
        found["cp"] = data["sequence_parallel_size"]
    if found["cp"] > 1:
        found["context_scheme"] = "a2a"
    if found["pp"] > 1:
        found["overlap_p2p"] = False
    for name in ("tp", "pp", "cp", "ep"):
        if found[name] < 1:
            raise InputError(f"{name} is {found[name]}, want 1 or more", where)
    if a.on("--no-pipeline-parallel") and found["pp"] > 1:
        raise InputError(
            f"--no-pipeline-parallel beside --pipeline-model-parallel-size {found['pp']}",
            f"{where}: foretell.arguments", "leave one of them out",
        )  # fmt: skip
    return found


def _read_batch(
    data: Mapping[str, Any], a: Arguments, plan: Mapping[str, Any], notes: list[str], where: str
) -> dict[str, Any]:
    batch, micro, steps = (
        _count(data, key, notes, where)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    for key, value, option in (
        ("train_batch_size", batch, "--global-batch-size"),
        ("train_micro_batch_size_per_gpu", micro, "--micro-batch-size"),
    ):
        if value is not None and option in a and a.number(option) != value:
            raise InputError(f"{key} is {value} and {option} {a.number(option)}", where, "make them equal")
    found: dict[str, Any] = {}
    world = a.number("--num-nodes") * a.number("--num-gpus")
    group = plan["tp"] * plan["pp"] * plan["cp"]
    if world and world % group:
        raise InputError(
            f"tp {plan['tp']} · pp {plan['pp']} · cp {plan['cp']} do not divide {world} devices",
            f"{where}: foretell.arguments", "Megatron-DeepSpeed asserts it",
        )  # fmt: skip
    dp = world // group if world else None
    if batch is not None and micro is not None:
        ranks, rest = divmod(batch, micro * (steps or 1))
        if steps is not None and (rest or (dp is not None and dp != ranks)):
            raise InputError(
                f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} · gradient_accumulation_steps "
                f"{steps} · data-parallel ranks{'' if dp is None else f' {dp}'}", where, "DeepSpeed asserts it",
            )  # fmt: skip
        if dp is None and steps is not None:
            dp = ranks
        elif dp is not None and batch % (micro * dp):
            raise InputError(
                f"train_batch_size {batch} is no multiple of train_micro_batch_size_per_gpu {micro} · {dp} ranks", where
            )
    elif batch is None and micro is not None and dp is not None:
        batch = micro * (steps or 1) * dp
    if dp is None:
        notes.append("does not say how many devices: give --dp")
    for field, value in (("global_batch", batch), ("micro_batch", micro), ("dp", dp)):
        if value is not None:
            found[field] = value
    return found


def _read_zero(data: Mapping[str, Any], plan: Mapping[str, Any], notes: list[str], where: str) -> dict[str, Any]:
    zero = data.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise InputError("zero_optimization is no object", where, 'write {"stage": 1}')
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage <= 3:
        raise InputError(f"zero_optimization.stage is {shown([str(stage)])}, want 0 to 3", where)
    if stage >= 2 and plan["pp"] > 1:
        raise InputError(f"ZeRO-{stage} does not go with pipeline parallelism", where, "DeepSpeed asserts it")
    overlap = zero.get("overlap_comm", stage == 3)
    if not isinstance(overlap, bool):
        raise InputError(f"zero_optimization.overlap_comm is {shown([str(overlap)])}, want true or false", where)
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), dict) and zero[key].get("device", "none") != "none":
            notes.append(f"zero_optimization.{key} is not read: nothing is offloaded in a plan")
    known = ("stage", "overlap_comm", "offload_optimizer", "offload_param")
    other = sorted(str(key) for key in zero if key not in known)
    if other:
        notes.append(f"of zero_optimization not read: {shown(other)}")
    overlap = overlap and stage > 0
    return {"zero": stage, "overlap_grad_reduce": overlap, "overlap_param_gather": overlap and stage == 3}


def _read_formats(data: Mapping[str, Any], notes: list[str], where: str) -> dict[str, Any]:
    def on(*keys: str) -> bool:
        parts = [data[key] for key in keys if key in data]
        return any(isinstance(part, dict) and part.get("enabled", False) is True for part in parts)

    if on("bf16", "bfloat16") and on("fp16"):
        raise InputError("bf16 and fp16 are both enabled", where, "DeepSpeed asserts that one is not")
    found: dict[str, Any] = {}
    if on("fp16"):
        found["precision"] = "fp16"
    elif on("bf16", "bfloat16"):
        found["precision"] = "bf16"
    else:
        notes.append("neither bf16 nor fp16 is enabled, and no plan trains in fp32; taken as bf16")
    types = data.get("data_types", {})
    dtype = types.get("grad_accum_dtype") if isinstance(types, dict) else None
    if dtype in ("fp32", "bf16"):
        found["grad_dtype"] = dtype
    elif dtype is None and found.get("precision") == "bf16":
        found["grad_dtype"] = "bf16"
    elif dtype is not None:
        notes.append(f"data_types.grad_accum_dtype {shown([str(dtype)])} is taken as fp32")
    return found


def _read_recompute(a: Arguments) -> dict[str, Any]:
    if not a.values:
        return {}
    if a.on("--checkpoint-activations") or a.text("--recompute-granularity") == "full":
        return {"recompute": "full"}
    selective = a.on("--recompute-activations") or a.text("--recompute-granularity") == "selective"
    return {"recompute": "selective" if selective else "none"}


def _read_model(a: Arguments) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, name in (
        ("layers", "--num-layers"),
        ("hidden", "--hidden-size"),
        ("heads", "--num-attention-heads"),
        ("kv_heads", "--num-key-value-heads"),
        ("head_dim", "--kv-channels"),
        ("intermediate", "--ffn-hidden-size"),
    ):
        if name in a:
            found[field] = a.number(name)
    if found:
        biased = not a.on("--disable-bias-linear")
        found |= {
            "gated": a.on("--swiglu"),
            "activation": "silu" if a.on("--swiglu") else "gelu",
            "norm": "rms" if a.text("--normalization") == "rmsnorm" else "layer",
            "norm_bias": a.text("--normalization") != "rmsnorm",
            **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), biased),
            "tied_embeddings": not a.on("--untie-embeddings-and-output-weights"),
        }
        rope = a.on("--use-rotary-position-embeddings")
        found["positions"] = "rope" if rope else "learned"
        if "--max-position-embeddings" in a:
            found["context_length" if rope else "position_rows"] = a.number("--max-position-embeddings")
    return found
