"""`ServingPlan`: how one replica of a model is served, and what its engine is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from foretell.errors import InputError, unknown

__all__ = ["CHOICES", "ServingPlan"]

#: ``static``: whole batches, padded, one after the other (no continuous batching).
ENGINES = ("vllm", "sglang", "trtllm", "static")
PREEMPTION = ("recompute", "swap")
#: Formats of weights, and of the KV cache; an engine may have fewer. In ``int8`` activations are too (W8A8), ``w8a16``
#: and ``int4`` are of weights alone.
FORMATS = ("bf16", "fp16", "fp8", "nvfp4", "mxfp4", "int8", "w8a16", "int4")
KV_FORMATS = ("bf16", "fp16", "fp8", "nvfp4", "int8")
ROUTERS = ("round-robin", "least-loaded", "prefix-aware", "two-choices")

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "engine": ENGINES,
        "preemption": PREEMPTION,
        "weight_dtype": FORMATS,
        "kv_dtype": KV_FORMATS,
        "router": ROUTERS,
    }
)

#: The most of each number: more devices than a machine has, more tokens than fit in any memory, hundredths.
_MOST = MappingProxyType(
    {"tp": 2**14, "pp": 2**14, "dp": 2**14, "ep": 2**14, "replicas": 2**20, "prefill_replicas": 2**20,
     "decode_replicas": 2**20, "max_num_batched_tokens": 2**30, "max_num_seqs": 2**20, "max_model_len": 2**30,
     "block_size": 2**16, "gpu_memory_percent": 100, "host_kv_bytes": 2**50}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """One replica: degrees, formats and engine settings. Raises InputError for a value that is wrong by itself.

    ``tp · pp · dp`` is a replica's number of devices; `dp` are ranks that each run attention for sequences of their own
    and share experts (`ep` ranks hold them, out of ``tp · dp``). `replicas` stand behind one router. With
    `prefill_replicas` and `decode_replicas` above 0 the two phases run on replicas of their own (disaggregated), and
    `replicas` is their sum.
    """

    engine: str = "vllm"
    #: Version of the engine, where its habits changed ("" for the newest known).
    version: str = ""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    replicas: int = 1
    prefill_replicas: int = 0
    decode_replicas: int = 0
    router: str = "round-robin"
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    #: Tokens a request may have in all, 0: what the model allows.
    max_model_len: int = 0
    block_size: int = 16
    #: Hundredths of the device's memory that the engine may use.
    gpu_memory_percent: float = 90.0
    chunked_prefill: bool = True
    prefix_cache: bool = False
    cuda_graph: bool = True
    preemption: str = "recompute"
    #: Bytes of host memory that evicted KV blocks move to, 0: they are lost.
    host_kv_bytes: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in CHOICES:
                if value not in CHOICES[field.name]:
                    raise unknown(field.name, str(value), CHOICES[field.name])
            elif isinstance(field.default, str):
                if not isinstance(value, str):
                    raise InputError(f"{field.name} is {value!r}, want text", "serving plan")
            elif isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise InputError(f"{field.name} is {value!r}, want true or false", "serving plan")
            elif isinstance(field.default, float):
                most = _MOST[field.name]
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= most:
                    raise InputError(f"{field.name} is {value!r}, want above 0 and at most {most}", "serving plan")
            elif not isinstance(value, int) or isinstance(value, bool):
                raise InputError(f"{field.name} is {value!r}, want a whole number", "serving plan")
            else:
                least, most = 0 if field.default == 0 else 1, _MOST[field.name]
                if not least <= value <= most:
                    raise InputError(f"{field.name} is {value}, want {least} to {most:,}", "serving plan")

    @property
    def devices_per_replica(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp * self.dp

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.devices_per_replica * self.replicas

    def replace(self, **changes: Any) -> ServingPlan:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        return dataclasses.asdict(self)
