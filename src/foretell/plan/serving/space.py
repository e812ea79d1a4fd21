"""The settings that a search for serving tries: degrees, prefill and decode apart, chunk, batch, formats."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretell.errors import InputError, unknown
from foretell.hardware import Cluster, Device, cluster
from foretell.simulate.serving import CHOICES, ServingPlan
from foretell.simulate.serving.formats import refusal
from foretell.simulate.serving.room import own_share
from foretell.workload.llm import LLMConfig

__all__ = ["DEGREES", "label", "machines", "plans", "refused", "shape"]

#: Degrees and settings that may be pinned, and what is tried where they are not. Formats stay the model's own (that of
#: its published weights, where the device can): another one changes what the model answers.
DEGREES: Mapping[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2),
    "dp": (1, 2, 4, 8),
    "weight_dtype": ("bf16",),
    "kv_dtype": ("bf16",),
    "max_num_batched_tokens": (2048, 8192),
    "max_num_seqs": (64, 256, 1024),
    "disaggregate": ((0, 0), (1, 1), (1, 2), (1, 3), (2, 1)),
}
_FIXED = ("gpu_memory_percent", "block_size", "max_model_len", "prefix_cache", "cuda_graph", "version", "router")
_MOST_DEVICES = 16  # of one replica
_MOST_APART = 8  # devices of all prefill and decode replicas of one unit


def machines(device: Device, plan: ServingPlan) -> Cluster:
    """What one unit of a plan runs on: boxes of up to eight devices of one kind; beyond one box, a network is named."""
    need = plan.devices_per_replica
    if need <= 8:
        return cluster(device.name if need == 1 else f"{need}x {device.name}")
    return cluster(f"{-(-need // 8)}x 8x {device.name} over {_network(device)}")


def _network(device: Device) -> str:
    return "4x ib-ndr" if any(link.topology for link in device.links) else "roce-100"


def refused(config: LLMConfig, plan: ServingPlan) -> str:
    """Why a plan makes no sense for a model; "" where it does. What does not fit shows only with memory."""
    heads = config.kv_heads if config.mla is None else config.heads
    if config.heads % plan.tp or (heads % plan.tp and plan.tp % heads):
        return f"{config.heads} heads ({heads} of keys and values) cannot be divided by tp {plan.tp}"
    if plan.pp > config.layers:
        return f"pp {plan.pp} is more than {config.layers} layers"
    if plan.dp > 1 and config.moe is None:
        return "dp ranks share experts, and the model has none: take more replicas"
    if plan.ep > 1 and (config.moe is None or config.moe.experts % plan.ep):
        return f"experts cannot be divided by ep {plan.ep}"
    if plan.ep not in (1, plan.tp * plan.dp):
        return f"ep {plan.ep} is neither 1 nor tp · dp = {plan.tp * plan.dp}"
    if plan.ep == 1 and plan.dp > 1:
        return "dp ranks without ep would each hold every expert: take more replicas"
    return ""


def plans(
    config: LLMConfig, device: Device, engine: str = "vllm", pinned: Mapping[str, Sequence[Any]] | None = None
) -> Iterator[ServingPlan]:
    """Plans to try on a device, simplest first. `pinned` gives the values of a setting to try instead.

    Raises InputError for a pinned setting that is unknown or not legal for the model.
    """
    asked = dict(pinned or {})
    for name in asked:
        if name not in DEGREES and name not in _FIXED:
            raise unknown("setting of a serving plan", name, (*DEGREES, *_FIXED))
        for value in asked[name]:
            if name in CHOICES and value not in CHOICES[name]:
                raise unknown(name, str(value), CHOICES[name])
    fixed = {name: asked.pop(name) for name in _FIXED if name in asked}
    values = {name: tuple(asked.get(name, usual)) for name, usual in DEGREES.items()}
    if not runs(device, "bf16"):
        values |= {name: ("fp16",) for name in ("weight_dtype", "kv_dtype") if name not in asked}
    if config.moe is None and "dp" not in asked:
        values["dp"] = (1,)
    if "weight_dtype" not in asked and config.published_weights and runs(device, config.published_weights):
        values["weight_dtype"] = (config.published_weights,)
    reasons: dict[str, None] = {}
    found = 0
    rest = [fixed[name] for name in fixed]
    for tp, pp, dp, (p, d) in itertools.product(values["tp"], values["pp"], values["dp"], values["disaggregate"]):
        unit = tp * pp * dp
        pins = {"tp", "pp", "dp"} & asked.keys()
        if unit > _MOST_DEVICES and not pins:
            continue
        if p and unit * (p + d) > _MOST_APART and "disaggregate" not in asked:
            continue
        for ep in sorted({1, tp * dp}) if config.moe is not None else (1,):
            usual = ServingPlan(engine=engine, tp=tp, pp=pp, dp=dp, ep=ep)
            reason = refused(config, usual)
            if reason:
                reasons[reason] = None
                continue
            for w, kv, tokens, seqs, *others in itertools.product(
                values["weight_dtype"], values["kv_dtype"], values["max_num_batched_tokens"], values["max_num_seqs"],
                *rest,
            ):  # fmt: skip
                if reason := _format_refused(device, w, kv):
                    reasons[reason] = None
                    continue
                if tokens < seqs:
                    reasons[f"{seqs} sequences take a token each of iterations of {tokens}"] = None
                    continue
                found += 1
                more = dict(zip(fixed, others, strict=True))
                plan = usual.replace(
                    weight_dtype=w, kv_dtype=kv, max_num_batched_tokens=tokens, max_num_seqs=seqs,
                    prefill_replicas=p, decode_replicas=d, replicas=max(1, p + d), **more,
                )  # fmt: skip
                yield plan if "gpu_memory_percent" in more else own_share(config, plan, device)
    if not found:
        what = "; ".join(list(reasons)[:3]) or "no combination of the settings asked for"
        raise InputError(f"no plan for {config.name} on {device.name} is legal: {what}", "plan serve")


def _format_refused(device: Device, weights: str, cache: str) -> str:
    """Why a device has not these formats of weights and of the cache; "" where it has. Nothing multiplies a cache."""
    if (refused := refusal(weights, device)) is not None:
        return f"{refused.what}: {refused.repair}"
    cached = cache == "int8" or (device.peak(cache) is not None if cache == "fp8" else runs(device, cache))
    lacking = weights if not runs(device, weights) else "" if cached else cache
    return f"{device.name} has no {lacking} arithmetic" if lacking else ""


def runs(device: Device, dtype: str) -> bool:
    """Whether engines serve a format of weights on a device: its own arithmetic, or kernels that widen it, which for
    FP8 are NVIDIA's GPUs' alone.
    """
    if refusal(dtype, device) is not None:
        return False
    if dtype == "fp8":
        return device.vendor == "NVIDIA" or any(name.startswith("fp8") for name in device.peaks)
    if dtype == "bf16":
        return any(name.startswith("bf16") for name in device.peaks)
    return True


def shape(plan: ServingPlan) -> tuple[Any, ...]:
    """What a plan is besides batch and chunk: degrees, prefill and decode apart, formats."""
    names = ("tp", "pp", "dp", "ep", "prefill_replicas", "decode_replicas", "weight_dtype", "kv_dtype")
    return tuple(getattr(plan, name) for name in names)


def label(plan: ServingPlan, sizes: bool = True) -> str:
    """A plan in one line: degrees, prefill and decode apart, formats, and with `sizes` token budget and batch."""
    said = [f"tp{plan.tp}"]
    said += [f"{name}{getattr(plan, name)}" for name in ("pp", "dp", "ep") if getattr(plan, name) > 1]
    if plan.prefill_replicas:
        said.append(f"{plan.prefill_replicas}P:{plan.decode_replicas}D")
    if plan.weight_dtype != "bf16":
        said.append(plan.weight_dtype)
    if plan.kv_dtype != "bf16":
        said.append(f"kv-{plan.kv_dtype}")
    if sizes:
        said += [f"tokens{plan.max_num_batched_tokens}", f"seqs{plan.max_num_seqs}"]
    return " ".join(said)
