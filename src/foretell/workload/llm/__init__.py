"""Transformers as a function of their sizes: a `Graph` in milliseconds, without torch.

>>> from foretell.workload import llm
>>> llama = llm.config("llama-3.1-8b")          # or a path to a TOML file, or to a public config.json
>>> llama.parameters
8030261248
>>> prefill = llm.graph(llama, phase="prefill", batch=4, seq_len=2048)
>>> f"{prefill.flops() / 1e12:.1f} TFLOP"
'123.1 TFLOP'
>>> decode = llm.graph(llama, phase="decode", batch=64, context=4096, kv_dtype="fp8", fused=True)
>>> dict(decode.items)
{'tokens': 64, 'sequences': 64}
>>> llm.kv_cache_bytes_per_token(llama)
131072.0
>>> train = llm.graph(llm.config("qwen3-30b-a3b"), phase="train", seq_len=8192)
>>> train.flops() // 8192, llm.six_n_flops_per_token(llm.config("qwen3-30b-a3b"), 8192)
(37577293824, 37578559488)

Equal layers are one op with a `repeat`; what each of them keeps is one storage of the group's total size
(`foretell.workload.llm.recorder`). ``llm.catalogue()`` lists the public configurations that ship,
``llm.from_hf_config`` reads others.
"""

from foretell.workload.llm.build import PHASES, PRECISIONS, graph
from foretell.workload.llm.catalogue import catalogue, config
from foretell.workload.llm.config import MLA, LayerGroup, LLMConfig, MoE
from foretell.workload.llm.hf import MODEL_TYPES, from_hf_config
from foretell.workload.llm.layers import experts_touched
from foretell.workload.llm.optimizers import BLOCKWISE, OPTIMIZERS, BlockwiseAdamW, Optimizer
from foretell.workload.llm.weights import (
    Weight,
    adapter_weights,
    count_adapters,
    count_parameters,
    kv_cache_bytes_per_token,
    layer_weights,
    model_weights,
    six_n_flops_per_token,
)

__all__ = [
    "BLOCKWISE",
    "MLA",
    "MODEL_TYPES",
    "OPTIMIZERS",
    "PHASES",
    "PRECISIONS",
    "BlockwiseAdamW",
    "LLMConfig",
    "LayerGroup",
    "MoE",
    "Optimizer",
    "Weight",
    "adapter_weights",
    "catalogue",
    "config",
    "count_adapters",
    "count_parameters",
    "experts_touched",
    "from_hf_config",
    "graph",
    "kv_cache_bytes_per_token",
    "layer_weights",
    "model_weights",
    "six_n_flops_per_token",
]
