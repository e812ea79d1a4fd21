"""What would let a model fit where it is to be served."""

from __future__ import annotations

from collections.abc import Iterator

from foretell.errors import ForetellError
from foretell.hardware.device import Device
from foretell.simulate.serving.iteration import Iterations
from foretell.simulate.serving.plan import ServingPlan
from foretell.workload.llm import LLMConfig

__all__ = ["what_fits"]


def what_fits(config: LLMConfig, plan: ServingPlan, device: Device, most: int = 2) -> list[str]:
    """Changes of the plan, each by itself, that would leave room for a cache on devices like `device`."""
    found: list[str] = []
    for change, text in _changes(config, plan):
        try:
            tokens = Iterations.of(config, plan.replace(**change), device).kv_capacity_tokens
        except ForetellError:
            continue
        found.append(f"{text} leaves room for {tokens:,} tokens")
        if len(found) == most:
            break
    return found


def _changes(config: LLMConfig, plan: ServingPlan) -> Iterator[tuple[dict[str, int | str], str]]:
    degrees = [plan.tp * factor for factor in (2, 4, 8, 16) if config.heads % (plan.tp * factor) == 0]
    narrower = [name for name in ("fp8", "int4") if plan.weight_dtype in ("bf16", "fp16") or name == "int4"]
    for tp in degrees:
        yield {"tp": tp}, f"--tp {tp}"
    for name in narrower:
        if name != plan.weight_dtype:
            yield {"weight_dtype": name}, f"--weight-dtype {name}"
            for tp in degrees:
                yield {"weight_dtype": name, "tp": tp}, f"--weight-dtype {name} --tp {tp}"
