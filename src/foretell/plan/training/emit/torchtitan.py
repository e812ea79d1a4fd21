"""torchtitan: a TOML file.

    torchrun … -m torchtitan.train --job.config_file plan.toml

Sections, names and meanings are those of torchtitan 0.2 (`VERSION`), the last that reads TOML. From 0.3 on the settings
are a Python function or options on the command line; the file's last comment gives those that carry over.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from foretell.errors import InfeasibleError, InputError
from foretell.hardware.cluster import Cluster
from foretell.plan.training.emit.found import Found, check_devices, idle, machines, shown
from foretell.simulate.training.plan import TrainingPlan
from foretell.simulate.training.stages import layers_of
from foretell.workload.llm.config import LLMConfig

__all__ = ["KINDS", "VERSION", "read", "unsaid", "write"]

#: The version whose sections and names these are.
VERSION = "0.2.2"

_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}
_ROTATE = {"ring": "alltoall", "allgather": "allgather"}
_FP8, _MX = "quantize.linear.float8", "quantize.linear.mx"

#: What the settings that are read hold, by section and name.
KINDS: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {
        "model": {"name": str, "flavor": str, "converters": list},
        "training": {
            "local_batch_size": int, "global_batch_size": int, "seq_len": int, "dtype": str,
            "mixed_precision_param": str, "mixed_precision_reduce": str,
        },
        "parallelism": {
            "data_parallel_replicate_degree": int, "data_parallel_shard_degree": int,
            "fsdp_reshard_after_forward": str, "tensor_parallel_degree": int, "enable_async_tensor_parallel": bool,
            "pipeline_parallel_degree": int, "module_fqns_per_model_part": list,
            "pipeline_parallel_first_stage_less_layers": int, "pipeline_parallel_last_stage_less_layers": int,
            "pipeline_parallel_layers_per_stage": int, "pipeline_parallel_schedule": str,
            "pipeline_parallel_microbatch_size": int, "context_parallel_degree": int,
            "context_parallel_rotate_method": str, "expert_parallel_degree": int,
            "expert_tensor_parallel_degree": int, "expert_parallel_comm_backend": str,
            "enable_sequence_parallel": bool,
        },
        "activation_checkpoint": {"mode": str, "selective_ac_option": str},
        "compile": {"enable": bool, "components": list},
    }
)  # fmt: skip
_PARTS = ("quantize",)
#: What settings were called up to 0.1.
_OLDER = {("training", "batch_size"): "local_batch_size"}


# --- writing ----------------------------------------------------------------------------------------------------------


def write(config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> str:
    """The settings of one plan as TOML; comments say how to start it and what it cannot say.

    Raises InfeasibleError where the plan takes other devices than the cluster has, or torchtitan would refuse it.
    """
    check_devices(plan, cluster)
    _refuse(config, plan)
    sections = _settings(config, plan)
    lines = list(_comments(config, plan, cluster))
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {_toml(value)}" for name, value in values.items()]
    lines += ["", *_newer(sections)]
    return "\n".join(lines) + "\n"


def _refuse(config: LLMConfig, plan: TrainingPlan) -> None:
    """Raise InfeasibleError for what torchtitan asserts (distributed/, models/*/infra/parallelize.py, train.py)."""
    chunked = plan.schedule in ("interleaved", "zero-bubble")
    local = plan.micro_batch * plan.micro_batches if plan.pp > 1 else plan.micro_batch
    for broken, reason, repair in (
        (
            plan.global_batch % (local * plan.dp) != 0,
            f"the global batch {plan.global_batch} is no multiple of local batch {local} · dp {plan.dp}",
            "choose another micro-batch",
        ),
        (
            plan.zero == 0 and plan.dp > 1 and plan.cp == 1 and plan.tp * plan.pp > 1,
            "replicated data parallelism goes with no other parallelism", "shard with ZeRO-2 or ZeRO-3",
        ),
        (
            plan.seq_len % (plan.tp * (2 * plan.cp if plan.cp > 1 else 1)) != 0,
            f"the sequence of {plan.seq_len} is no multiple of tp {plan.tp}"
            + (f" · 2 · cp {plan.cp}" if plan.cp > 1 else ""), "choose another length or degree",
        ),
        (
            plan.shard > 0 and plan.zero > 0 and (plan.shard % plan.cp != 0 or plan.dp % (plan.shard // plan.cp) != 0),
            f"{plan.shard} ranks to a copy do not divide dp {plan.dp} · cp {plan.cp}", "choose another number",
        ),
        (
            plan.pp > 1 and plan.vp == 1 and chunked,
            f"schedule {_SCHEDULES.get(plan.schedule)} wants at least 2 stages on a rank", "give vp 2 or more",
        ),
        (
            plan.pp > 1 and plan.vp > 1 and not chunked,
            f"schedule {_SCHEDULES.get(plan.schedule, plan.schedule)} wants 1 stage on a rank", "give vp 1",
        ),
        (
            config.moe is None and plan.ep > 1, f"ep {plan.ep} wants experts, and the model has none", "give ep 1",
        ),
        (
            plan.ep > 1 and plan.dp * plan.cp % plan.ep != 0,
            f"ep {plan.ep} does not divide the {plan.dp * plan.cp} ranks of dp · cp", "choose another ep",
        ),
        (
            _lost(config, plan),
            f"{config.layers} layers do not fill pp {plan.pp} · vp {plan.vp} stages with {plan.first_layers} on the "
            f"first rank and {plan.last_layers} on the last (0: as on others)", "choose other numbers",
        ),
    ):  # fmt: skip
        if broken:
            raise InfeasibleError(f"torchtitan refuses this plan: {reason}", repair)


def _comments(config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> Iterator[str]:
    size = machines(cluster)
    start = "torchrun" if size is None else f"torchrun --nnodes {size[0]} --nproc-per-node {size[1]}"
    if size is not None and size[0] > 1:  # HOST:PORT is a free port of one machine, the same on all
        start += " --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    yield f"# torchtitan {VERSION}: {plan.devices} devices, {_plain(cluster.name)}."
    yield f"# Start on every machine with: {start} -m torchtitan.train --job.config_file THIS_FILE"
    yield "# torchtitan takes a model by name: set [model] name to its architecture, and register this flavor with"
    yield f"#   dim {config.hidden}, n_layers {config.layers}, n_heads {config.heads}, n_kv_heads {config.kv_heads},"
    yield f"#   MLP width {config.intermediate}, vocab_size {config.vocab}"
    for name, reason in unsaid(config, plan).items():
        yield f"# not said: {name} {getattr(plan, name)}: {reason}"


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^ -~·×]", "?", text).split())[:200]


def _settings(config: LLMConfig, plan: TrainingPlan) -> dict[str, dict[str, Any]]:
    shard, replicate = _degrees(plan)
    model: dict[str, Any] = {"flavor": _plain(config.name)}
    sections: dict[str, dict[str, Any]] = {"model": model}
    if plan.precision == "fp8":
        model["converters"] = [_FP8]
    elif plan.precision == "mxfp8":
        model["converters"] = [_MX]
    sections["training"] = {
        "local_batch_size": plan.micro_batch * (plan.micro_batches if plan.pp > 1 else 1),
        "global_batch_size": plan.global_batch,
        "seq_len": plan.seq_len,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never",
        "tensor_parallel_degree": plan.tp,
        "enable_async_tensor_parallel": plan.overlap_tp and plan.tp > 1,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
    }
    if plan.cp > 1 and plan.context_scheme in _ROTATE:
        parallel["context_parallel_rotate_method"] = _ROTATE[plan.context_scheme]
    if plan.pp > 1:
        parallel["pipeline_parallel_schedule"] = _SCHEDULES.get(plan.schedule, "1F1B")
        parallel["pipeline_parallel_microbatch_size"] = plan.micro_batch
        parallel |= _split(config, plan)
    if config.moe is not None:
        parallel["expert_parallel_degree"] = plan.ep
        parallel["expert_tensor_parallel_degree"] = 1
        parallel["expert_parallel_comm_backend"] = "deepep" if plan.dispatcher == "deepep" else "standard"
    sections["parallelism"] = parallel
    sections["activation_checkpoint"] = {"mode": plan.recompute}
    if plan.recompute == "selective":
        sections["activation_checkpoint"]["selective_ac_option"] = "op"
    elif _every(config, plan) > 1:
        sections["activation_checkpoint"] = {"mode": "selective", "selective_ac_option": str(_every(config, plan))}
    if parallel["enable_async_tensor_parallel"]:
        sections["compile"] = {"enable": True}
    if plan.precision == "fp8":
        sections["quantize.linear.float8"] = {"recipe_name": "tensorwise"}
    elif plan.precision == "mxfp8":
        sections["quantize.linear.mx"] = {"recipe_name": "mxfp8_cublas"}
    return sections


def _degrees(plan: TrainingPlan) -> tuple[int, int]:
    """Degrees of sharding and replication; what context parallelism adds to the former torchtitan adds itself."""
    if plan.zero == 0:
        return 1, plan.dp
    shard = plan.shard // plan.cp if plan.shard and plan.shard % plan.cp == 0 else plan.dp
    shard = min(shard, plan.dp)
    return shard, plan.dp // shard


def _split(config: LLMConfig, plan: TrainingPlan) -> dict[str, Any]:
    """How layers are dealt to stages: so many each, or a list where they are not equal."""
    stages = plan.pp * plan.vp
    if plan.vp == 1 and config.layers % stages == 0 and not plan.first_layers and not plan.last_layers:
        return {
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
            "pipeline_parallel_layers_per_stage": config.layers // stages,
        }
    counts = layers_of(config, plan.pp, plan.vp, plan.first_layers, plan.last_layers).sum(axis=2)  # (pp, vp)
    parts: list[list[str]] = []
    layer = 0
    for stage in range(stages):
        count = int(counts[stage % plan.pp, stage // plan.pp])
        parts.append([f"layers.{layer + i}" for i in range(count)])
        layer += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return {"module_fqns_per_model_part": parts}


def _lost(config: LLMConfig, plan: TrainingPlan) -> bool:
    """Whether a stage gets no layer, or a layer no stage."""
    if plan.pp == 1:
        return False
    counts = layers_of(config, plan.pp, plan.vp, plan.first_layers, plan.last_layers).sum(axis=2)
    return bool(counts.min() < 1 or counts.sum() != config.layers)


def _every(config: LLMConfig, plan: TrainingPlan) -> int:
    """Every how many layers one is recomputed whole, 1: each; 0: torchtitan cannot say it."""
    if plan.recompute != "full" or not plan.recompute_layers:
        return 1
    held, rest = divmod(config.layers, plan.pp)
    return 0 if rest or held % plan.recompute_layers else held // plan.recompute_layers


def unsaid(config: LLMConfig, plan: TrainingPlan) -> dict[str, str]:
    """Fields of a plan that the settings do not carry, and why; those without effect are left out."""
    nothing = idle(config, plan)
    found: dict[str, str] = {}
    every = _every(config, plan)
    for lacking, name, reason in (
        (plan.framework != "fsdp2", "framework", "torchtitan runs PyTorch's FSDP2"),
        (plan.schedule not in _SCHEDULES, "schedule", "torchtitan runs 1F1B"),
        (plan.zero == 1, "zero", "FSDP2 shards gradients too"),
        (plan.zero == 0 and plan.cp > 1, "zero", "context-parallel ranks always shard"),
        (not plan.sequence_parallel, "sequence_parallel", "tensor parallelism always splits the sequence"),
        (
            plan.recompute == "selective", "recompute",
            "torchtitan's selective keeps every other matrix product and attention, and makes the rest again",
        ),
        (
            plan.recompute_layers > 0, "recompute_layers",
            f"torchtitan recomputes one layer in {every}" if every else "torchtitan recomputes all layers",
        ),
        (every > 1, "recompute", f"written as selective, one layer in {every}"),
        (plan.precision in ("fp16", "nvfp4"), "precision", "torchtitan trains in bf16, fp8 or mxfp8"),
        (plan.attention != "flash", "attention", "attention is whichever fused kernel PyTorch chooses"),
        (plan.grad_dtype != "fp32", "grad_dtype", "gradients are reduced in fp32"),
        (plan.state_dtype != "fp32", "state_dtype", "states of the optimiser are fp32"),
        (plan.context_scheme == "a2a", "context_scheme", "keys and values go round a ring or are gathered"),
        (plan.dispatcher == "allgather", "dispatcher", "tokens reach experts by all-to-all or DeepEP"),
        (not plan.overlap_grad_reduce, "overlap_grad_reduce", "FSDP2 always overlaps it"),
        (not plan.overlap_param_gather, "overlap_param_gather", "FSDP2 always overlaps it"),
        (not plan.overlap_p2p, "overlap_p2p", "PyTorch's schedules always overlap it"),
        (plan.overlap_ep, "overlap_ep", "only the DualPipeV schedule overlaps it"),
        (plan.cuda_graph, "cuda_graph", "there is no setting for it"),
        (plan.lora_rank > 0, "lora_rank", "all weights are trained"),
        (plan.document_len > 0, "document_len", "the flavor of the model says what attends to what"),
    ):
        if lacking and name not in nothing:
            found[name] = reason
    return found


def _newer(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The same for torchtitan 0.3, which has options in place of this file, and other places for some settings."""
    kept = {
        "training": ("local_batch_size", "global_batch_size", "seq_len", "dtype", "mixed_precision_param"),
        "parallelism": tuple(
            name for name in KINDS["parallelism"]
            if name not in (
                "enable_async_tensor_parallel", "context_parallel_rotate_method", "expert_tensor_parallel_degree",
                "expert_parallel_comm_backend", "module_fqns_per_model_part",
            )
        ),
    }  # fmt: skip
    yield "# torchtitan 0.3 reads no file. There, beside --module and --config, these settings are the options"
    options = [
        f"--{section}.{name} {value}"
        for section, names in kept.items() for name, value in sections[section].items() if name in names
    ]  # fmt: skip
    for option in options:
        yield f"#   {option}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(text: str, where: str) -> Found:
    """What a torchtitan TOML file says. Raises InputError where it is malformed or contradicts itself."""
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise InputError("nested too deeply", where, "give a torchtitan TOML file") from None
    except ValueError as error:
        raise InputError(f"malformed TOML: {error}", where, "mend the syntax there") from None
    if not any(section in data for section in ("training", "parallelism", "model")):
        raise InputError("has neither [training] nor [parallelism]", where, "give a torchtitan TOML file")
    s, notes = _checked(data, text, where)
    plan = _read_plan(s, notes, text, where)
    if "name" in s["model"] or "flavor" in s["model"]:
        named = " ".join(str(s["model"][key]) for key in ("name", "flavor") if key in s["model"])
        notes.append(f"the model is {shown([named])} of torchtitan's registry: name the workload beside the file")
    return Found("torchtitan", where, MappingProxyType(plan), MappingProxyType({}), tuple(notes))


def _line(text: str, section: str, name: str) -> str:
    """`` line N`` of a setting, as far as plain text tells."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[", line):
            inside = line.strip().strip("[]").strip() == section
        elif inside and re.match(rf"\s*{re.escape(name)}\s*=", line):
            return f": line {number}"
    return ""


def _checked(data: Mapping[str, Any], text: str, where: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    found: dict[str, dict[str, Any]] = {section: {} for section in (*KINDS, *_PARTS)}
    strange: list[str] = []
    for section, values in data.items():
        if not isinstance(values, dict) or section not in found:
            strange.append(section)
            continue
        if section in _PARTS:
            found[section] = values
            continue
        for given, value in values.items():
            name: str = _OLDER.get((section, given), str(given))
            kind = KINDS[section].get(name)
            if kind is list and isinstance(value, str):
                value = [item.strip() for item in value.split(",")]
            if kind is None:
                strange.append(f"{section}.{name}")
            elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                wanted = {int: "a whole number", str: "text", bool: "true or false", list: "a list"}[kind]
                raise InputError(
                    f"{section}.{given} is {shown([str(value)])}, want {wanted}", where + _line(text, section, given)
                )
            else:
                found[section][name] = value
    return found, [f"settings that say nothing about the plan: {shown(strange)}"] if strange else []


def _read_plan(s: Mapping[str, Mapping[str, Any]], notes: list[str], text: str, where: str) -> dict[str, Any]:
    t, p = s["training"], s["parallelism"]
    found: dict[str, Any] = {"framework": "fsdp2"}
    for field, name in (
        ("tp", "tensor_parallel_degree"),
        ("cp", "context_parallel_degree"),
        ("pp", "pipeline_parallel_degree"),
        ("ep", "expert_parallel_degree"),
    ):
        found[field] = p.get(name, 1)
        if found[field] < 1:
            raise InputError(f"{name} is {found[field]}, want 1 or more", where + _line(text, "parallelism", name))
    replicate, shard = p.get("data_parallel_replicate_degree", 1), p.get("data_parallel_shard_degree", -1)
    if replicate < 1 or shard == 0 or shard < -1:
        raise InputError(
            f"data_parallel_replicate_degree is {replicate} and data_parallel_shard_degree {shard}",
            where + _line(text, "parallelism", "data_parallel_shard_degree"), "want 1 or more, or -1 for the latter",
        )  # fmt: skip
    found |= _read_sharding(p, found, replicate, shard, notes)
    if "seq_len" in t:
        found["seq_len"] = t["seq_len"]
    found |= _read_batch(t, p, found, notes, text, where)
    found |= _read_pipeline(p, found["pp"], notes)
    found |= _read_formats(s, notes)
    rotate = {method: scheme for scheme, method in _ROTATE.items()}
    if found["cp"] > 1:
        found["context_scheme"] = rotate.get(p.get("context_parallel_rotate_method", "allgather"), "allgather")
    found["dispatcher"] = "deepep" if p.get("expert_parallel_comm_backend") == "deepep" else "alltoall"
    found["overlap_tp"] = p.get("enable_async_tensor_parallel", False)
    found["sequence_parallel"] = p.get("enable_sequence_parallel", True)
    if p.get("expert_tensor_parallel_degree", 1) > 1:
        notes.append("experts are split by tensor parallelism; a plan has them whole")
    return found


def _read_sharding(
    p: Mapping[str, Any], plan: Mapping[str, Any], replicate: int, shard: int, notes: list[str]
) -> dict[str, Any]:
    policy = p.get("fsdp_reshard_after_forward", "default")
    whole = policy == "always" or (policy == "default" and plan["pp"] == 1)
    found: dict[str, Any] = {"zero": 3 if whole else 2}
    if shard == 1 and plan["cp"] == 1:
        found["zero"] = 0
    if shard == -1:
        notes.append("data_parallel_shard_degree -1 is whatever devices are left: give --dp")
        return found
    found["dp"] = replicate * shard
    if replicate > 1 and found["zero"]:
        found["shard"] = shard * plan["cp"]
    return found


def _read_batch(
    t: Mapping[str, Any], p: Mapping[str, Any], plan: Mapping[str, Any], notes: list[str], text: str, where: str
) -> dict[str, Any]:
    local, dp = t.get("local_batch_size", 8), plan.get("dp")
    found: dict[str, Any] = {}
    if local < 1:
        line = _line(text, "training", "local_batch_size")
        raise InputError(f"local_batch_size is {local}, want 1 or more", where + line)
    if plan["pp"] > 1:
        found["micro_batch"] = p.get("pipeline_parallel_microbatch_size", 1)
        if found["micro_batch"] < 1 or local % found["micro_batch"]:
            raise InputError(
                f"local_batch_size {local} is no multiple of pipeline_parallel_microbatch_size {found['micro_batch']}",
                where + _line(text, "training", "local_batch_size"), "torchtitan asserts it",
            )  # fmt: skip
    else:
        found["micro_batch"] = local
    batch = t.get("global_batch_size", -1)
    if batch < 0 and dp is not None:
        batch = local * dp
    if batch > 0:
        found["global_batch"] = batch
    if batch > 0 and dp is not None:
        if batch % (local * dp):
            raise InputError(
                f"global_batch_size {batch} is no multiple of local_batch_size {local} · {dp} data-parallel ranks",
                where + _line(text, "training", "global_batch_size"), "torchtitan asserts it",
            )  # fmt: skip
        if plan["pp"] > 1 and batch > local * dp:
            notes.append(f"the pipeline is filled {batch // (local * dp)} times a step; a plan fills it once")
    return found


def _read_pipeline(p: Mapping[str, Any], pp: int, notes: list[str]) -> dict[str, Any]:
    if pp == 1:
        return {}
    names = {name.casefold(): schedule for schedule, name in _SCHEDULES.items()}
    given = p.get("pipeline_parallel_schedule", "1F1B")
    schedule = names.get(given.casefold())
    chunked = schedule in ("interleaved", "zero-bubble")
    if schedule is None:
        notes.append(f"pipeline_parallel_schedule {shown([given])} is taken as 1F1B")
        schedule = "1f1b"
    parts = p.get("module_fqns_per_model_part")
    found: dict[str, Any] = {"schedule": schedule, "vp": 2 if chunked else 1}
    if isinstance(parts, list) and parts and len(parts) % pp == 0 and all(isinstance(part, list) for part in parts):
        counts = [sum(str(name).startswith("layers.") for name in part) for part in parts]
        found["vp"] = len(parts) // pp
        ends = _ends(counts, pp)
        if ends is None:
            notes.append("module_fqns_per_model_part deals layers as no plan does: taken as even")
        else:
            found |= {"first_layers": ends[0], "last_layers": ends[1]}
    elif "pipeline_parallel_layers_per_stage" in p and chunked:
        notes.append("pipeline_parallel_layers_per_stage tells the stages of a rank only beside the layers: give --vp")
        del found["vp"]
    return found


def _ends(counts: list[int], pp: int) -> tuple[int, int] | None:
    """Layers of the first and last rank (0: as many as the others) that give each stage this many; None: none do."""
    held = [sum(counts[rank::pp]) for rank in range(pp)]
    if not 1 <= sum(held) <= 10_000:
        return None
    model = LLMConfig("layers", layers=sum(held), hidden=1, heads=1, intermediate=1, vocab=1)
    for first, last in ((0, 0), (held[0], 0), (0, held[-1]), (held[0], held[-1])):
        dealt = layers_of(model, pp, len(counts) // pp, first, last).sum(axis=2)
        if dealt.T.reshape(-1).tolist() == counts:
            return first, last
    return None


def _read_formats(s: Mapping[str, Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    t, c = s["training"], s["activation_checkpoint"]
    converters = s["model"].get("converters", [])
    found: dict[str, Any] = {"precision": "bf16", "grad_dtype": "fp32", "state_dtype": "fp32"}
    if _FP8 in converters or "float8" in converters:
        found["precision"] = "fp8"
    elif _MX in converters or "mx" in converters:
        found["precision"] = "mxfp8"
    if t.get("mixed_precision_param", "bfloat16") == "float32":
        notes.append("trains in fp32, which no plan does; taken as bf16")
    if t.get("dtype") == "bfloat16":
        found |= {"grad_dtype": "bf16", "state_dtype": "bf16"}
        notes.append("weights have no fp32 copy, which a plan has")
    mode, option = c.get("mode", "selective"), c.get("selective_ac_option", "2")
    if mode == "selective" and option != "op":
        mode = "full"
        notes.append(f"recomputes one layer in {shown([option])}, taken as all: give --recompute N, layers of a rank")
    elif mode == "selective":
        notes.append("torchtitan's selective recomputation is taken as that of the core of attention")
    elif mode == "memory_budget":
        notes.append("recomputation by memory budget is taken as none")
    found["recompute"] = mode if mode in ("none", "selective", "full") else "none"
    return found
