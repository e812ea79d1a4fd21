"""What a serving engine leaves for its KV cache on a device, after weights, activations and the rest.

vLLM loads the weights, runs one iteration over as many tokens and sequences as it will ever take, and gives the cache
what is then left of its share of the memory that CUDA shows. Up to 0.2.4 it counted what PyTorch had allocated, from
0.2.5 all that the process held (vllm-project/vllm, pull request 2031), since 0.7 what came on top of the CUDA context
that was there before (pull requests 11809 and 12126). CUDA graphs come later, out of the rest.

The iteration's peak is that of its largest layer or, with many sequences over a large vocabulary, of the sampler on
dummy logits: before 0.17 top-k and top-p sorted them, since then a kernel filters them in place (pull request 33538).
It does not depend on tensor parallelism, as logits are gathered.

SGLang runs nothing: of what is free once its ranks can talk to each other, `mem_fraction_static` is for weights and
cache (``profile_max_num_token``). TensorRT-LLM gives the cache a share of what is free after its trial run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from foretell.cost.memory import framework_bytes, peak_memory
from foretell.errors import InfeasibleError, InputError
from foretell.hardware import Device
from foretell.units import format_bytes
from foretell.workload import kv, llm

__all__ = ["Budget", "default_load", "default_share", "kv_budget", "visible_bytes", "what_helps"]

_GIB = 2**30
_MIB = 2**20

# The share of the device an engine takes unless told otherwise: vLLM's `gpu_memory_utilization` (0.9; 0.92 in current
# documentation) is of the whole device, TensorRT-LLM's `free_gpu_memory_fraction` of what is free once model and
# activations are in. SGLang's `mem_fraction_static` is of the whole device, at first by tensor parallelism alone.
_SHARE = {"vllm": 0.90, "trtllm": 0.90, "llama.cpp": 1.0, "transformers": 1.0}
_SGLANG_SHARE = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))

# Since 0.5.3 (pull request 10975) SGLang sets aside what it takes activations and CUDA graphs to need, in MiB: for each
# token of a chunk, each sequence of the largest decode graph, each GPU that shares the model, and each of these
# sequences and data-parallel ranks. Since 0.5.10 prompts have graphs too (16331), as many as there are sizes of theirs,
# unless there is a pipeline or data-parallel attention. A large GPU keeps 10 GiB at least. All from
# python/sglang/srt/arg_groups/memory_hook.py and cuda_graph_hook.py (2026); speculation and images have terms of their
# own there. Versions between the two rules had a table that is within 0.03 of the first.
_SGLANG_SIZED, _SGLANG_PROMPT_GRAPHS = (0, 5, 3), (0, 5, 10)
_SET_ASIDE, _A_TOKEN, _LEAST_TOKENS, _A_SEQUENCE, _A_GPU = 512, 1.5, 2048, 2, 128
_A_RANK, _A_RANK_OF_MANY, _MANY = 3.0, 4.5, 300
_A_PROMPT_GRAPH, _LATENT_PROMPT_GRAPHS, _LEAST_OF_LARGE = 8, 1536, 10 * 1024
# Tokens that have a graph of prompts: steps up to each size.
_PROMPT_GRAPHS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (1 << 30, 512))

# By memory in MiB: SGLang's `chunked_prefill_size`, and sequences of its largest decode graph on fewer than four GPUs
# and on more (0.5.10; later versions double them from 20 to 35 GiB).
_SGLANG_BY_MEMORY = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 2048, 24, 80),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
    (math.inf, 16384, 512, 512),
)

# Tokens an engine takes in one iteration, whose activations it makes room for: vLLM's `max_num_batched_tokens`,
# TensorRT-LLM's `max_num_tokens`, llama.cpp's `n_ubatch`.
_STEP = {"vllm": 8192, "trtllm": 8192, "llama.cpp": 512, "transformers": 2048}

# Sequences in an iteration: vLLM's `max_num_seqs`. On GPUs of 70 GiB and more but A100 (whose compute capability is
# 8.0) a server takes 8192 tokens and 1024 sequences, on others 2048 and 256 (`EngineArgs.get_batch_defaults`; since
# 0.8.5, pull request 17885). Older ones took 256 sequences.
_SEQS, _LARGE_SEQS, _SMALL_STEP, _LARGE_GPU = 256, 1024, 2048, 70 * _GIB
_BY_DEVICE = (0, 8, 5)

_GRAPHS_OUTSIDE = ("vllm", "sglang")  # their CUDA graphs are captured after the cache is sized

# What CUDA does not show of the memory that nvidia-smi lists. Totals in engines' logs: 79.19 to 79.25 GiB of 79.65 on
# H100, 139.8 of 140.4 on H200, 23.6 of 24.0 on RTX 4090 and 3090, 31.4 of 31.8 on RTX 5090, 22.1 of 22.5 on L4.
_HIDDEN_BYTES, _HIDDEN_SHARE = 320 * _MIB, 0.002

# Outside PyTorch's allocator, beyond the context: modules that kernels load as they first run (vLLM's "non-torch
# memory" of 0.24 to 0.27 GiB on one H100, 0.21 on L40S joined by PCIe; SGLang's "mem usage" of Qwen3-14B and QwQ-32B
# over four GPUs is 0.20 and 0.28 GiB above their weights), and what ranks joined by NVLink hold to exchange data,
# NCCL's channels above all (2.06 to 2.17 GiB of non-torch memory with two and four H100, 2.10 with eight A100).
# H100: llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0 (Apache-2.0); the others: single public start-up logs.
_MODULES_BYTES, _NVLINK_BYTES = 256 * _MIB, int(1.85 * _GIB)

# Bytes an element of (sequences × vocabulary) that the sampler holds at its peak. Logits as the model makes them take
# 2 and in float32 4. A sort along the vocabulary takes 32 more: sorted values 4, their indices 8, and 20 within
# PyTorch's segmented sort (indices in 8, double buffers of keys 4 and indices 8). Without it, probabilities 4 and the
# random numbers they are divided by 4. Peaks in vLLM's logs agree: 5.64 GiB in 0.16 and 2.23 in 0.17 for Qwen3-14B.
_SORTED_BYTES, _FILTERED_BYTES = 38, 14
_SAMPLER_BYTES = 56 * _MIB  # scratch of the filter (pull request 33538 measures 80 MiB) or of cuBLAS

# TensorRT-LLM's engines, which versions up to 0.19 run unless told otherwise, have buffers of their own before the
# cache ("for runtime buffers", "for decoder"), for all sequences that may run: 1.14 and 4.35 GB for 4,096 of them over
# 50,400 words, or 27 bytes each (benchmarks/Suite.md of July 2024, whose log is of GPT-J by the size of its cache).
_ENGINE_BYTES, _WITHOUT_ENGINES = 27, (0, 20)

_TORCH_ONLY, _SINCE_CONTEXT, _FILTERED = (0, 2, 5), (0, 7), (0, 17)
# Workspaces of experts that outlive their layer (v1/worker/workspace.py), which the sampler's peak then includes; the
# first version is not known, that of the measurements is later.
_KEPT_WORKSPACE = (0, 17)


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of one GPU, in bytes: `capacity` = `reserve` + `framework` + `weights` + `activations` + `kv`.

    `framework` is the driver's context, loaded code and the buffers that ranks exchange data through
    (`communication`); `reserve` is what the engine leaves alone and what CUDA hides; `tokens` how many cached tokens
    `kv` holds by the engine's own accounting of long sequences (slots, where all layers have a window), `sequences` how
    many of the asked length, 0 where none fits.
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
    communication_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"notes": list(self.notes)}


def visible_bytes(device: Device) -> int:
    """Memory that CUDA shows of a GPU, in bytes: what it has, less what driver and firmware keep.

    Raises InputError where the device's memory is unknown.
    """
    if device.memory_bytes is None:
        raise InputError(f"the memory of {device.name} is unknown", repair="add memory to its device file")
    if device.kind != "gpu" or device.vendor != "NVIDIA":
        return device.memory_bytes
    return max(0, device.memory_bytes - _HIDDEN_BYTES - int(_HIDDEN_SHARE * device.memory_bytes))


def default_load(device: Device, engine: str = "vllm", version: str | None = None) -> tuple[int, int]:
    """Tokens and sequences that an engine takes in one iteration on a device unless told otherwise."""
    member = kv.engine(engine)
    if member.name == "sglang":
        return _sglang_by_memory(device)[0], _SEQS
    if member.name != "vllm" or member.parse(version or member.version) < _BY_DEVICE:
        return _STEP[member.name], _SEQS
    large = (device.memory_bytes or 0) >= _LARGE_GPU and device.compute_capability != "8.0"
    return (_STEP["vllm"], _LARGE_SEQS) if large else (_SMALL_STEP, _SEQS)


def _sglang_by_memory(device: Device) -> tuple[int, int, int]:
    mib = (device.memory_bytes or 0) / _MIB
    return next(row[1:] for row in _SGLANG_BY_MEMORY if mib < row[0])


def default_share(
    device: Device,
    engine: str = "vllm",
    version: str | None = None,
    *,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    data_parallel: int = 1,
    step: int | None = None,
    latent: bool = False,
) -> float:
    """The share of a device's memory that an engine takes unless told otherwise, in hundredths.

    It is always the same but for SGLang, where it follows memory, GPUs and the tokens of an iteration (`step`), and is
    smaller for models with MLA (`latent`). A server on one H100 took 0.828 (sgl-project/sglang, issue 29092):

    >>> from foretell.hardware import device
    >>> default_share(device("h100-sxm"), "sglang"), default_share(device("h100-sxm"), "vllm")
    (0.83, 0.9)
    """
    member = kv.engine(engine)
    if member.name != "sglang":
        return _SHARE[member.name]
    used, gpus = member.parse(version or member.version), tensor_parallel * pipeline * data_parallel
    if used < _SGLANG_SIZED:
        return next(share for least, share in _SGLANG_SHARE if gpus >= least)
    mib = (device.memory_bytes or 0) / _MIB
    chunk, few, more = _sglang_by_memory(device)
    tokens, graph = max(step or chunk, _LEAST_TOKENS), few if tensor_parallel * data_parallel < 4 else more
    aside = _SET_ASIDE + _A_TOKEN * tokens + _A_SEQUENCE * graph + _A_GPU * gpus
    if data_parallel > 1:
        aside += graph * data_parallel * (_A_RANK_OF_MANY if graph > _MANY else _A_RANK)
    elif pipeline == 1 and used >= _SGLANG_PROMPT_GRAPHS:
        aside += _LATENT_PROMPT_GRAPHS if latent else _A_PROMPT_GRAPH * _prompt_graphs(step or chunk)
    if mib > 60 * 1024:
        aside = max(aside, _LEAST_OF_LARGE)
    return max(0.01, round(1.0 - aside / max(mib, 1.0), 2))


def _prompt_graphs(tokens: int) -> int:
    """Sizes of prompts that SGLang captures graphs of, up to `tokens`.

    >>> _prompt_graphs(8192)
    58
    """
    found, last = 0, 0
    for size, step in _PROMPT_GRAPHS:
        found += max(0, min(size, tokens) - last) // step
        last = size
    return found


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
    seqs: int | None = None,
    weight_dtype: str | None = None,
    expert_dtype: str | None = None,
    scale_bytes: int = 0,
) -> Budget:
    """What `engine` leaves for the KV cache of `config` on one of `tensor_parallel` GPUs.

    Weights are those of one GPU (`weight_dtype` and `expert_dtype` as in `llm.graph`, and `scale_bytes` of scales
    beside quantised ones), activations the peak of one iteration over `step` new tokens of `seqs` sequences, as the
    engines find it by a trial run. `share` is the engine's own setting, by default `default_share`. Raises
    InfeasibleError where nothing is left, with what takes the memory; InputError where the device's memory is unknown
    or heads do not divide.
    """
    member = kv.engine(engine)
    shown = visible_bytes(device)
    if share is not None and not 0 < share <= 1:
        raise InputError(f"share is {share:g}", repair="give a share of the device between 0 and 1")
    for what, count in (("step", step), ("seqs", seqs)):
        if count is not None and count < 1:
            raise InputError(f"{what} is {count}", repair="give a whole number above 0")
    taken = share or default_share(
        device, engine, version, tensor_parallel=tensor_parallel, step=step, latent=config.mla is not None
    )
    used = member.parse(version or member.version)
    usual = default_load(device, engine, version)
    tokens_of_step, sequences = step or usual[0], seqs or usual[1]
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
    modules = _MODULES_BYTES if context and member.name in ("vllm", "sglang") else 0
    linked = member.name != "llama.cpp" and tensor_parallel > 1 and any(link.kind == "nvlink" for link in device.links)
    communication = _NVLINK_BYTES if linked else 0
    weights = parts["parameters"] + parts["buffers"] + scale_bytes
    activations = parts["activations"] + parts["temporaries"] + parts["inputs"] + parts["workspaces"]
    if member.name == "vllm":
        activations = max(activations, _sampling(mine, config.vocab, tokens_of_step, sequences, used))
    if member.name == "trtllm" and used < _WITHOUT_ENGINES:
        activations += sequences * config.vocab * _ENGINE_BYTES
    if member.name == "llama.cpp":
        weights = math.ceil(weights / tensor_parallel)  # layers are split among GPUs
    assert device.memory_bytes is not None
    capacity, outside = device.memory_bytes, context + modules + communication
    if member.name == "trtllm":
        left = taken * (shown - outside - weights - activations)
    elif member.name == "sglang":  # the rest of the share is for activations and graphs
        left = taken * (shown - context - communication) - weights - modules
    elif member.name == "vllm":
        counted = 0 if used < _TORCH_ONLY else outside if used < _SINCE_CONTEXT else outside - context
        left = taken * shown - weights - activations - counted
    else:
        left = taken * shown - weights - activations - outside
    left = min(left, shown - outside - weights - activations)
    one = kv.kv_cache(
        config, tokens=tokens, dtype=dtype, engine=engine, version=version, tensor_parallel=tensor_parallel, step=step
    )
    if left <= 0:
        raise InfeasibleError(
            f"{config.name} leaves no room for a cache on {device.name}: {format_bytes(weights)} of weights, "
            f"{format_bytes(activations)} of activations and {format_bytes(outside)} of context and communication in "
            f"{taken:.0%} of {format_bytes(shown)}; it lacks {format_bytes(math.ceil(-left))}",
            "take more GPUs (--tp), a smaller weight type, or a larger device",
        )
    room = int(left)
    # Where all layers have a window a long sequence takes nothing more: what there is then are slots of its tokens.
    each: float = one.bytes_per_token
    if not each and all(part.tokens for part in one.parts):
        each = sum(part.nbytes / part.tokens for part in one.parts)
    notes = []
    if member.name in _GRAPHS_OUTSIDE:
        notes.append("CUDA graphs are captured later, from the reserve")
    if (weight_dtype or expert_dtype) and not scale_bytes:
        notes.append("scales of quantised weights are not counted")
    return Budget(
        device.name,
        member.name,
        capacity,
        taken,
        capacity - outside - weights - activations - room,
        outside,
        weights,
        activations,
        room,
        int(room / each) // one.block * one.block if each else 0,
        room // one.nbytes,
        tuple(notes),
        communication,
    )


def _sampling(mine: llm.LLMConfig, vocab: int, tokens: int, sequences: int, version: tuple[int, ...]) -> int:
    """Bytes of vLLM's trial run while it samples: logits and their copies, over what the model's last layer left.

    `mine` is one GPU's part of the model; logits are of the whole vocabulary on each.
    """
    element = _FILTERED_BYTES if version >= _FILTERED else _SORTED_BYTES
    held = min(sequences, tokens) * vocab * element + _SAMPLER_BYTES
    held += 2 * tokens * mine.hidden * 2  # the last layer's output and its residual
    if mine.moe is not None and version >= _KEPT_WORKSPACE:
        # Two workspaces of the fused experts, for each token's every choice: max(width, hidden), max(2·width, hidden).
        widths = (mine.moe.intermediate, 2 * mine.moe.intermediate)
        held += sum(tokens * mine.moe.top_k * max(width, mine.hidden) * 2 for width in widths)
    return held


def what_helps(config: llm.LLMConfig, device: Device, *, most: int = 2, **asked: Any) -> list[str]:
    """Changes, each by itself, that would leave room for a cache where `kv_budget` with `asked` finds none."""
    gpus = int(asked.get("tensor_parallel") or 1)
    changes: list[tuple[dict[str, Any], str]] = [({"share": 0.95}, "--share 0.95")] if not asked.get("share") else []
    for more in (2, 4, 8):
        change: dict[str, Any] = {"tensor_parallel": gpus * more}
        if asked.get("engine") != "llama.cpp":  # there all weights are given, and layers split
            change["scale_bytes"] = math.ceil(asked.get("scale_bytes", 0) / more)
        changes.append((change, f"--tp {gpus * more}"))
    if not asked.get("weight_dtype") and not asked.get("expert_dtype"):
        for name in ("fp8", "fp4"):
            experts = name if config.moe else None
            changes.append(({"weight_dtype": name, "expert_dtype": experts}, f"--weights {name}"))
    found: list[str] = []
    for change, text in changes:
        if len(found) == most:
            break
        try:
            room = kv_budget(config, device, **{**asked, **change})
        except (InfeasibleError, InputError):
            continue
        if room.tokens:
            found.append(f"{text} leaves {format_bytes(room.kv_bytes)}, {room.tokens:,} tokens")
    return found


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
