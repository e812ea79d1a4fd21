"""Whether a model fits where it is to be served: by how much it does not, and what would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from foretell.errors import ForetellError
from foretell.hardware.cluster import Cluster, cluster
from foretell.hardware.device import Device
from foretell.simulate.serving.iteration import Iterations
from foretell.simulate.serving.plan import ServingPlan
from foretell.workload.llm import LLMConfig

__all__ = ["shortage_bytes", "what_fits"]

#: Memory of a device that everything fits.
_ENOUGH = 2**50


def shortage_bytes(config: LLMConfig, plan: ServingPlan, machine: Cluster | Device) -> float:
    """Bytes that one device lacks before the first cached token, beside what the engine keeps in reserve; below 0: it
    has as many left."""
    where = machine if isinstance(machine, Cluster) else cluster(f"{plan.devices_per_replica}x {machine.name}")
    groups = tuple((n, replace(node, device=replace(node.device, memory_bytes=_ENOUGH))) for n, node in where.groups)
    need = Iterations.of(config, plan, replace(where, groups=groups)).budget
    has = where.nodes[0].device.memory_bytes or 0
    return need.weights_bytes + need.activations_bytes + need.framework_bytes - has * plan.gpu_memory_percent / 100.0


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
