"""What two engines left for the KV cache of one model on one machine, as their logs say it.

Qwen3-235B-A22B-FP8 over four H100 (vllm-project/vllm, issue 21348): vLLM with its defaults, "Available KV cache memory:
8.11 GiB", "GPU KV cache size: 178,880 tokens"; SGLang with ``--mem-fraction-static 0.93``, "#tokens: 367404, K size:
8.23 GB, V size: 8.23 GB".
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.accuracy.serving.models import model
from foretell.accuracy.serving.row import devices
from foretell.hardware.cluster import Cluster
from foretell.simulate.serving import ServingPlan
from foretell.workload.llm import LLMConfig

__all__ = ["CacheBudget", "budgets"]

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Bytes of one device that an engine gave to its KV cache, and the tokens they hold."""

    label: str
    config: LLMConfig
    plan: ServingPlan
    cluster: Cluster
    nbytes: float
    tokens: int


def budgets() -> list[CacheBudget]:
    """The two engines."""
    name = "Qwen/Qwen3-235B-A22B-FP8"
    shape = model(name)
    assert shape is not None
    found = []
    for engine, percent, gib, tokens in (("vllm", 90, 8.11, 178_880), ("sglang", 93, 16.46, 367_404)):
        plan = ServingPlan(engine=engine, tp=4, weight_dtype="fp8", gpu_memory_percent=percent)
        found.append(CacheBudget(f"{name} {engine}", shape.config, plan, devices(4, "h100-sxm"), gib * GIB, tokens))
    return found
