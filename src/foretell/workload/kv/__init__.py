"""The KV cache of a model as each serving engine lays it out: bytes on one GPU, by version.

>>> from foretell.workload import kv
>>> kv.kv_cache_bytes("llm:gpt-oss-120b", tokens=16, engine="vllm") / 16
73728.0
>>> kv.kv_cache_bytes("llm:deepseek-v2-lite", tokens=32768, engine="llama.cpp", version="b4500") / 2**20
8640.0
>>> kv.kv_cache_bytes("llm:deepseek-v2-lite", tokens=32768, engine="llama.cpp") / 2**20
972.0
>>> kv.engines()
('vllm', 'sglang', 'trtllm', 'llama.cpp', 'transformers')

An engine is one file of this package; `CacheShape` is what a model keeps before an engine lays it out, read from an
`llm:` name, a shipped cache configuration (`kv.catalogue()`), or a ``config.json``.
"""

from foretell.workload.kv.api import KVCache, catalogue, kv_cache, kv_cache_bytes, shape
from foretell.workload.kv.family import Part, engines
from foretell.workload.kv.family import member as engine
from foretell.workload.kv.hf import MODEL_TYPES
from foretell.workload.kv.shape import CacheLayer, CacheShape, State

__all__ = [
    "MODEL_TYPES",
    "CacheLayer",
    "CacheShape",
    "KVCache",
    "Part",
    "State",
    "catalogue",
    "engine",
    "engines",
    "kv_cache",
    "kv_cache_bytes",
    "shape",
]
