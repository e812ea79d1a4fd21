"""What a serving engine leaves for its KV cache on a device, after weights, activations and the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from foretell.cost.memory import framework_bytes, peak_memory
from foretell.errors import InfeasibleError, InputError
from foretell.hardware import Device
from foretell.units import format_bytes
from foretell.workload import kv, llm

__all__ = ["Budget", "kv_budget"]

# The share of the device an engine takes unless told otherwise: vLLM's `gpu_memory_utilization` (0.9; 0.92 in current
# documentation) and SGLang's `mem_fraction_static` by tensor parallelism (server_args.py) are shares of the whole
# device, TensorRT-LLM's `free_gpu_memory_fraction` of what is free once model and activations are in.
_SHARE = {"vllm": 0.90, "trtllm": 0.90, "llama.cpp": 1.0, "transformers": 1.0}
_SGLANG_SHARE = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))

# Tokens an engine takes in one iteration, whose activations it makes room for: vLLM's `max_num_batched_tokens`,
# SGLang's `chunked_prefill_size`, TensorRT-LLM's `max_num_tokens`, llama.cpp's `n_ubatch`.
_STEP = {"vllm": 8192, "sglang": 8192, "trtllm": 8192, "llama.cpp": 512, "transformers": 2048}

_GRAPHS_OUTSIDE = ("vllm", "sglang")  # their CUDA graphs are captured after the cache is sized


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of one GPU, in bytes: `capacity` = `reserve` + `framework` + `weights` + `activations` + `kv`.

    `reserve` is what the engine leaves alone; `tokens` how many cached tokens `kv` holds by the engine's own
    accounting of long sequences, `sequences` how many of the asked length, 0 where none fits.
    """

    device: str
    engine: str
    capacity_bytes: int
    share: float
    reserve_bytes: int
    framework_bytes: int
    weights_bytes: int
    activations_bytes: int
    kv_bytes: int
    tokens: int
    sequences: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"notes": list(self.notes)}


def kv_budget(
    config: llm.LLMConfig,
    device: Device,
    *,
    tokens: int,
    engine: str = "vllm",
    version: str | None = None,
    dtype: str = "auto",
    tensor_parallel: int = 1,
    share: float | None = None,
    step: int | None = None,
    weight_dtype: str | None = None,
    expert_dtype: str | None = None,
) -> Budget:
    """What `engine` leaves for the KV cache of `config` on one of `tensor_parallel` GPUs.

    Weights are those of one GPU (`weight_dtype` and `expert_dtype` as in `llm.graph`), activations the peak of one
    iteration over `step` new tokens, as the engines find it by a trial run. `share` is the engine's own setting.
    Raises InfeasibleError where nothing is left, with what takes the memory; InputError where the device's memory is
    unknown or heads do not divide.
    """
    member = kv.engine(engine)
    if device.memory_bytes is None:
        raise InputError(f"the memory of {device.name} is unknown", repair="add memory to its device file")
    if share is not None and not 0 < share <= 1:
        raise InputError(f"share is {share:g}", repair="give a share of the device between 0 and 1")
    taken = share or _SHARE.get(member.name) or next(s for least, s in _SGLANG_SHARE if tensor_parallel >= least)
    tokens_of_step = step or _STEP[member.name]
    mine = _one_gpu(config, tensor_parallel if member.name != "llama.cpp" else 1)
    length = min(tokens_of_step, config.context_length or tokens_of_step)
    trial = llm.graph(
        mine,
        phase="prefill",
        batch=math.ceil(tokens_of_step / length),
        seq_len=length,
        weight_dtype=weight_dtype,
        expert_dtype=expert_dtype,
        fused=member.name != "transformers",
    )
    parts = peak_memory(trial, device).breakdown
    context = framework_bytes(device, "torch" if member.name != "llama.cpp" else "none")
    weights = parts["parameters"] + parts["buffers"]
    activations = parts["activations"] + parts["temporaries"] + parts["inputs"] + parts["workspaces"]
    if member.name == "llama.cpp":
        weights = math.ceil(weights / tensor_parallel)  # layers are split among GPUs
    capacity = device.memory_bytes
    if member.name == "trtllm":
        left = taken * (capacity - context - weights - activations)
    elif member.name == "sglang":  # the rest of the share is for activations and graphs
        left = taken * capacity - weights - context
    else:
        left = taken * capacity - weights - activations - context
    left = min(left, capacity - context - weights - activations)
    one = kv.kv_cache(
        config, tokens=tokens, dtype=dtype, engine=engine, version=version, tensor_parallel=tensor_parallel, step=step
    )
    if left <= 0:
        raise InfeasibleError(
            f"{config.name} leaves no room for a cache on {device.name}: {format_bytes(weights)} of weights, "
            f"{format_bytes(activations)} of activations and {format_bytes(context)} of context in "
            f"{taken:.0%} of {format_bytes(capacity)}",
            "take more GPUs (--tp), a smaller weight type, or a larger device",
        )
    room = int(left)
    notes = []
    if member.name in _GRAPHS_OUTSIDE:
        notes.append("CUDA graphs are captured later, from the reserve")
    if weight_dtype or expert_dtype:
        notes.append("scales of quantised weights are not counted")
    return Budget(
        device.name,
        member.name,
        capacity,
        taken,
        capacity - context - weights - activations - room,
        context,
        weights,
        activations,
        room,
        room // one.bytes_per_token // one.block * one.block if one.bytes_per_token else 0,
        room // one.nbytes,
        tuple(notes),
    )


def _one_gpu(config: llm.LLMConfig, gpus: int) -> llm.LLMConfig:
    """The transformer as one of `gpus` tensor-parallel GPUs runs it: heads, widths and vocabulary divided."""
    if gpus == 1:
        return config
    for what, size in (("heads", config.heads), ("intermediate", config.intermediate)):
        if size % gpus:
            raise InputError(f"{what} {size} of {config.name} cannot be divided by {gpus}", "--tp", "give a divisor")
    kv_heads = max(1, math.ceil(config.kv_heads / gpus))
    heads = config.heads // gpus
    while heads % kv_heads:  # uneven KV heads: the GPU that holds most
        kv_heads += 1
    moe = config.moe
    if moe is not None:
        shared = math.ceil(moe.shared_intermediate / gpus)
        moe = llm.MoE(
            **{
                **{name: getattr(moe, name) for name in moe.__slots__},
                "intermediate": math.ceil(moe.intermediate / gpus),
                "shared_intermediate": shared,
            }
        )
    return config.replace(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate // gpus,
        vocab=math.ceil(config.vocab / gpus),
        moe=moe,
    )
