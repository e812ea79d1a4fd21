"""TensorRT-LLM: blocks of tokens, one pool for each window and head count, the window honoured.

Blocks hold 64 tokens before 1.0 and 32 since (`KvCacheConfig.tokens_per_block`). Until 1.0 a windowed layer reuses
its blocks in a ring; since 1.1 blocks are written in a line and leave the pool once outside the window (pull request
6768), so one more is held.
"""

from __future__ import annotations

import math

from foretell.workload.kv.family import Ask, Laid, Part, engine, kind_name, state_part, token_bytes
from foretell.workload.kv.shape import CacheShape

_SMALL_BLOCKS, _LINEAR = (1, 0), (1, 1)


@engine(
    "trtllm",
    formats=("bf16", "fp16", "fp8", "int8", "nvfp4"),
    version="1.2.0",
    sources=(
        "nvidia.github.io/TensorRT-LLM: llm-api/reference/KvCacheConfig, features/kvcache",
        "github.com/NVIDIA/TensorRT-LLM: pull request 6768, issue 2738 (MLA caches latents)",
    ),
)
def trtllm(model: CacheShape, ask: Ask) -> Laid:
    """Blocks of 32 tokens (64 before 1.0), a pool for each window; windowed layers keep their window."""
    block = ask.block or (32 if ask.version >= _SMALL_BLOCKS else 64)
    parts, per_token = [], 0
    for layer in model.layers:
        if layer.kind == "recurrent":
            parts.append(state_part(layer, ask))  # in the model's type (`mamba_ssm_cache_dtype` auto)
            continue
        size = layer.layers * token_bytes(layer, ask)
        blocks = math.ceil(ask.tokens / block)
        if layer.window is not None:
            blocks = min(blocks, math.ceil(layer.window / block) + (ask.version >= _LINEAR))
        else:
            per_token += size
        parts.append(Part(kind_name(layer), layer.layers, blocks * block, size * blocks * block * ask.batch))
    return Laid(tuple(parts), per_token, block)
