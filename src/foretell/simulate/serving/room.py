"""What weights take where a model is to be served, and what would let it fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretell.cost.kv_budget import default_share
from foretell.errors import ForetellError
from foretell.hardware.device import Device
from foretell.simulate.serving.iteration import Iterations
from foretell.simulate.serving.iteration.kernels import FORMAT_BYTES
from foretell.simulate.serving.plan import ServingPlan
from foretell.workload.llm import LLMConfig
from foretell.workload.llm.weights import layer_weights

__all__ = ["own_share", "scale_bytes", "what_fits"]

#: Tokens of an iteration and hundredths of memory that are usual, where less room is left by what is asked for.
_TOKENS, _PERCENT = 8192, 90.0
_OPTIONS = {"max_num_batched_tokens": "--max-batched-tokens", "gpu_memory_percent": "--gpu-memory-utilization"}
#: Bytes of scales beside each value of the formats of four bits.
_SCALES = {name: each - 0.5 for name, each in FORMAT_BYTES.items() if each < 1}


def scale_bytes(config: LLMConfig, weights: str, experts: str, gpus: int = 1) -> int:
    """Bytes of scales on one of `gpus` that share a model, beside matrices of layers and of routed experts in formats.

    Those of formats of eight bits, a thousandth of the weights or less, are not counted.
    """
    each = {"matrix": _SCALES.get(weights, 0.0), "experts": _SCALES.get(experts, 0.0)}
    return round(sum(
        group.layers * weight.elements * each.get(weight.kind, 0.0)
        for group in config.groups for weight in layer_weights(config, group) if weight.name != "mlp.gate.weight"
    ) / gpus)  # fmt: skip


def own_share(config: LLMConfig, plan: ServingPlan, device: Device) -> ServingPlan:
    """The plan with the share of memory that its engine takes where none is asked for."""
    share = default_share(
        device, "vllm" if plan.engine == "static" else plan.engine, plan.version or None, tensor_parallel=plan.tp,
        pipeline=plan.pp, data_parallel=plan.dp, step=plan.max_num_batched_tokens, latent=config.mla is not None,
    )  # fmt: skip
    return plan.replace(gpu_memory_percent=round(100.0 * share, 1))


def what_fits(config: LLMConfig, plan: ServingPlan, device: Device, *, given_share: bool = True) -> list[str]:
    """Changes of the plan that would leave room for a cache on devices like `device`: of settings that leave less than
    is usual, of its format, the one the model is published in first, of its degree, or of both where neither does.

    Where the share of memory was not given, it is the engine's own for each changed plan.
    """
    settings: list[dict[str, Any]] = []
    if plan.max_num_batched_tokens > _TOKENS:
        settings.append({"max_num_batched_tokens": _TOKENS})
    if given_share and plan.gpu_memory_percent < _PERCENT:
        settings.append({"gpu_memory_percent": _PERCENT})
    degrees: list[dict[str, Any]] = [
        {"tp": plan.tp * factor} for factor in (2, 4, 8, 16) if config.heads % (plan.tp * factor) == 0
    ]
    width = FORMAT_BYTES[plan.weight_dtype]
    names = [name for name in ("fp8", "int4") if name != config.published_weights]
    if config.published_weights:
        names.insert(0, config.published_weights)
    formats: list[dict[str, Any]] = [{"weight_dtype": name} for name in names if FORMAT_BYTES[name] < width]
    both = [{**one, **other} for one in formats for other in degrees]

    def fitting(changes: Sequence[Mapping[str, Any]], most: int) -> list[str]:
        """The first `most` changes that leave room, as options."""
        found: list[str] = []
        for change in changes:
            changed = plan.replace(**change)
            try:
                changed = changed if given_share else own_share(config, changed, device)
                tokens = Iterations.of(config, changed, device).kv_capacity_tokens
            except ForetellError:
                continue
            found.append(f"{_options(change)} leaves room for {tokens:,} tokens")
            if len(found) == most:
                break
        return found

    return fitting(settings, 1) + fitting(formats, 1) + fitting(degrees, 2) or fitting(both, 2)


def _options(change: Mapping[str, Any]) -> str:
    texts = []
    for name, value in change.items():
        said = f"{value / 100.0:g}" if name == "gpu_memory_percent" else str(value)
        texts.append(f"{_OPTIONS.get(name, '--' + name.replace('_', '-'))} {said}")
    return " ".join(texts)
