"""What would let a model fit where it is to be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretell.errors import ForetellError
from foretell.hardware.device import Device
from foretell.simulate.serving.iteration import Iterations
from foretell.simulate.serving.iteration.kernels import FORMAT_BYTES
from foretell.simulate.serving.plan import ServingPlan
from foretell.workload.llm import LLMConfig

__all__ = ["what_fits"]


def what_fits(config: LLMConfig, plan: ServingPlan, device: Device) -> list[str]:
    """Changes of the plan that would leave room for a cache on devices like `device`: of its format, the one the model
    is published in first, of its degree, or of both where neither does."""
    degrees: list[dict[str, int | str]] = [
        {"tp": plan.tp * factor} for factor in (2, 4, 8, 16) if config.heads % (plan.tp * factor) == 0
    ]
    width = FORMAT_BYTES[plan.weight_dtype]
    names = [name for name in ("fp8", "int4") if name != config.published_weights]
    if config.published_weights:
        names.insert(0, config.published_weights)
    formats: list[dict[str, int | str]] = [{"weight_dtype": name} for name in names if FORMAT_BYTES[name] < width]
    both = [{**one, **other} for one in formats for other in degrees]
    found = [*_fitting(config, plan, device, formats, 1), *_fitting(config, plan, device, degrees, 2)]
    return found or _fitting(config, plan, device, both, 2)


def _fitting(
    config: LLMConfig, plan: ServingPlan, device: Device, changes: Sequence[Mapping[str, int | str]], most: int
) -> list[str]:
    """The first `most` changes that leave room, as options."""
    found: list[str] = []
    for change in changes:
        try:
            tokens = Iterations.of(config, plan.replace(**change), device).kv_capacity_tokens
        except ForetellError:
            continue
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())
        found.append(f"{options} leaves room for {tokens:,} tokens")
        if len(found) == most:
            break
    return found
