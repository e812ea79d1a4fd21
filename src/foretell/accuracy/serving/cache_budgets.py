"""What engines left for the KV cache of a model on a GPU, as their logs say it.

`budgets` are the two that the product is judged by, Qwen3-235B-A22B-FP8 over four H100 (vllm-project/vllm, issue
21348): vLLM with its defaults, "Available KV cache memory: 8.11 GiB", "GPU KV cache size: 178,880 tokens"; SGLang with
``--mem-fraction-static 0.93``, "#tokens: 367404, K size: 8.23 GB, V size: 8.23 GB". Neither chose a constant.

`logged` are all, those first. Some chose the constants of `foretell.cost.kv_budget` (`Logged.chose`), the others only
check them. Of TensorRT-LLM's, one is far off: an engine for 2,048 sequences over 128,256 words, whose buffers took 21
bytes each and not the 27 that three other logs print (one of them that of Qwen2.5-0.5B in its issue 1188).
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.accuracy.serving.models import model
from foretell.accuracy.serving.row import devices
from foretell.hardware.cluster import Cluster
from foretell.simulate.serving import ServingPlan
from foretell.workload.llm import LLMConfig

__all__ = ["CacheBudget", "Logged", "budgets", "logged"]

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


@dataclass(frozen=True, slots=True)
class Logged:
    """One start of an engine: what was run with which settings, GiB and tokens of its cache (0: not printed), whether
    the constants were chosen on it, where it is from, and the format of its cache."""

    name: str
    device: str
    tp: int
    engine: str
    version: str
    percent: int
    step: int
    seqs: int
    weights: str
    gib: float
    tokens: int
    chose: bool
    source: str
    cache: str = "bf16"

    @property
    def budget(self) -> CacheBudget:
        """The same with shape, plan and machine."""
        found = model(self.name)
        assert found is not None, self.name
        plan = ServingPlan(
            engine=self.engine, version=self.version, tp=self.tp, weight_dtype=self.weights, kv_dtype=self.cache,
            gpu_memory_percent=self.percent, max_num_batched_tokens=self.step, max_num_seqs=self.seqs,
        )  # fmt: skip
        label = f"{self.name} {self.engine} {self.version}, {self.tp}x {self.device}"
        return CacheBudget(label, found.config, plan, devices(self.tp, self.device), self.gib * GIB, self.tokens)


_ISSUE = "vllm-project/vllm, issue 21348 (July 2025; 8192 tokens and 1024 sequences are the server's defaults there)"
#: Pools of 58.11 and 58.53 GiB and their tokens are printed there; the others are 0.95 of 79.19 GiB less the parts that
#: it prints (tensor parallelism), or follow from its prediction of each pool and that prediction's error (one GPU).
_REPORT = "llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0/accuracy_report.md (Apache-2.0)"
_PULL = "vllm-project/vllm, pull request 2031: GPU blocks of 16 tokens"
_H100 = ("vllm", "0.19.0", 95, 8192, 1024, "bf16")

LOGS: tuple[Logged, ...] = (
    Logged("Qwen3-235B-A22B", "h100-sxm", 4, "vllm", "0.9.2", 90, 8192, 1024, "fp8", 8.11, 178_880, False, _ISSUE),
    Logged("Qwen3-235B-A22B", "h100-sxm", 4, "sglang", "0.4.9", 93, 8192, 256, "fp8", 16.46, 367_404, False, _ISSUE),
    Logged("Llama-3.1-8B", "h100-sxm", 1, *_H100, 58.11, 476_016, True, _REPORT),
    Logged("Llama-3.1-8B", "h100-sxm", 2, *_H100, 63.76, 0, True, _REPORT),
    Logged("Llama-3.1-8B", "h100-sxm", 4, *_H100, 67.44, 0, False, _REPORT),
    Logged("Qwen2.5-7B", "h100-sxm", 1, *_H100, 58.53, 1_096_000, True, _REPORT),
    Logged("Qwen2.5-7B", "h100-sxm", 2, *_H100, 63.84, 0, True, _REPORT),
    Logged("Qwen2.5-7B", "h100-sxm", 4, *_H100, 67.34, 0, False, _REPORT),
    Logged("Qwen3-30B-A3B", "h100-sxm", 1, *_H100, 15.41, 0, True, _REPORT),
    Logged("Qwen3-8B", "h100-sxm", 1, *_H100, 57.50, 0, False, _REPORT),
    Logged("DeepSeek-V2-Lite", "h100-sxm", 1, *_H100, 43.60, 0, False, _REPORT),
    Logged("phi-4", "h100-sxm", 1, *_H100, 46.08, 0, False, _REPORT),
    Logged("gemma-2-9b", "h100-sxm", 1, *_H100, 54.11, 0, False, _REPORT),
    Logged("gemma-2-27b", "h100-sxm", 1, *_H100, 20.59, 0, False, _REPORT),
    Logged("Llama-2-7b", "a100-sxm4-80gb", 1, "vllm", "0.2.4", 90, 4096, 256, "bf16", 58.20, 119_184, False, _PULL),
    Logged("Llama-2-7b", "a100-sxm4-80gb", 1, "vllm", "0.2.5", 90, 4096, 256, "bf16", 57.43, 117_616, False, _PULL),
    Logged("Llama-2-70b", "a100-sxm4-80gb", 4, "vllm", "0.2.4", 90, 4096, 256, "bf16", 38.59, 505_840, False, _PULL),
    Logged(
        "Llama-3.1-8B", "a100-sxm4-80gb", 1, "vllm", "0.31.0", 92, 2048, 256, "bf16", 56.21, 460_496, False,
        "a start-up log of vllm/vllm-openai:v0.31.0 with no other settings, public notes of October 2026",
    ),
    Logged(
        "DeepSeek-R1", "h200-sxm", 8, "sglang", "0.5.0", 82, 32768, 256, "fp8", 33.31, 509_000, False,
        "ai-dynamo/aisimulate, pull request 263: about 509,000 tokens of 70,272 bytes",
    ),
    Logged(
        "Qwen2.5-32B", "l4", 4, "sglang", "0.4.3", 85, 2048, 256, "bf16", 2.84, 46_611, False,
        "didier-durand/llms-in-clouds, SGLang with QwQ-32B (of the same shape) on g6.12xlarge, March 2025",
    ),
    # TensorRT-LLM: the percentage is of what is free.
    Logged(
        "Llama-3.1-8B", "h100-sxm", 1, "trtllm", "0.20.0", 80, 23552, 4096, "fp8", 52.51, 860_320, False,
        "NVIDIA/TensorRT-LLM, issue 6294 (July 2025): trtllm-bench on PyTorch", "fp8",
    ),
    Logged(
        "Llama-3.1-8B", "rtx-5090", 1, "trtllm", "0.19.0", 90, 1024, 2048, "fp8", 16.05, 263_008, False,
        "NVIDIA/TensorRT-LLM, issue 4275, comment 2941155249: an engine for 2,048 sequences", "fp8",
    ),
    Logged(
        "Llama-2-7b", "h100-sxm", 2, "trtllm", "0.16.0", 90, 8192, 256, "bf16", 63.44, 259_840, False,
        "NVIDIA/TensorRT-LLM, docs/source/reference/memory.md: model, GPU and degree by the sizes that its log prints",
    ),
    Logged(
        "Llama-2-7b", "a100-sxm4-80gb", 1, "trtllm", "0.8.0", 90, 4096, 1, "int8", 64.75, 132_608, False,
        "NVIDIA/TensorRT-LLM, issue 1400 (April 2024): model by the sizes that its log prints",
    ),
    Logged(
        "Llama-2-7b", "a10", 1, "trtllm", "0.5.0", 95, 51200, 25, "bf16", 5.23, 10_718, False,
        "NVIDIA/TensorRT-LLM, issue 224 (October 2023): prompts of up to 2,048 tokens, 25 at a time",
    ),
    Logged(
        "gpt-j-6b", "h100-sxm", 1, "trtllm", "0.12.0", 99, 8192, 4096, "fp8", 62.99, 294_848, True,
        "NVIDIA/TensorRT-LLM, benchmarks/Suite.md of July 2024: model by the size of its cache", "fp8",
    ),
)  # fmt: skip


def logged() -> tuple[Logged, ...]:
    """All starts, the two of `budgets` first."""
    return LOGS


def budgets() -> list[CacheBudget]:
    """The two engines."""
    return [one.budget for one in LOGS[:2]]
