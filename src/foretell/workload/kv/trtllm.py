"""TensorRT-LLM: blocks of tokens, one pool for each window and head count, the window honoured.

Blocks hold 64 tokens before 1.0 and 32 since (`KvCacheConfig.tokens_per_block`). Until 1.0 a windowed layer reuses
its blocks in a ring; since 1.1 blocks are written in a line and leave the pool once outside the window (pull request
6768), so one more is held.
"""

from __future__ import annotations

import math

from foretell.workload.kv.family import Ask, Laid, Part, engine, kind_name, row_bytes
from foretell.workload.kv.shape import CacheLayer, CacheShape

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
            parts.append(Part(kind_name(layer), layer.layers, 0, layer.layers * _state_bytes(layer, ask) * ask.batch))
            continue
        size = layer.layers * _token_bytes(layer, ask)
        blocks = math.ceil(ask.tokens / block)
        if layer.window is not None:
            blocks = min(blocks, math.ceil(layer.window / block) + (ask.version >= _LINEAR))
        else:
            per_token += size
        parts.append(Part(kind_name(layer), layer.layers, blocks * block, size * blocks * block * ask.batch))
    return Laid(tuple(parts), per_token, block)


def _token_bytes(layer: CacheLayer, ask: Ask) -> int:
    if layer.kind == "latent":
        return row_bytes(layer.key_dim, ask.dtype)  # replicated on every GPU
    return ask.heads(layer) * (row_bytes(layer.key_dim, ask.dtype) + row_bytes(layer.value_dim, ask.dtype))


def _state_bytes(layer: CacheLayer, ask: Ask) -> int:
    """Both states in the model's type (`mamba_ssm_cache_dtype` auto)."""
    assert layer.state is not None
    share = min(ask.tensor_parallel, layer.state.heads)
    return 2 * (math.ceil(layer.state.convolution / share) + math.ceil(layer.state.matrix / share))
