"""KV caches outside the device: tiers of host memory, disks and other machines that engines load prefixes from.

>>> host = Tier("host", capacity_bytes=500e9, read_bytes_per_s=50e9, latency_s=15e-6)
>>> cache = Hierarchy([host], bytes_per_token=131072.0, layers=32)
>>> cache.lookup(prefix=7, prefix_tokens=10_000, now=0.0)
(0, 0.0)
>>> cache.store(prefix=7, tokens=10_000, now=0.0)  # whole chunks of 256 tokens
9984
>>> tokens, load_s = cache.lookup(prefix=7, prefix_tokens=10_000, now=1.0)
>>> tokens, round(load_s, 4)
(9984, 0.0268)
"""

from foretell.simulate.serving.offload.hierarchy import Admission, EngineTier, Hierarchy
from foretell.simulate.serving.offload.named import NamedTier, engine_tier, parse_tier
from foretell.simulate.serving.offload.prefill import prefill_of
from foretell.simulate.serving.offload.tier import EVICTION, Tier
from foretell.simulate.serving.offload.timing import break_even_tokens, pipelined_s, transfer_s

__all__ = [
    "EVICTION",
    "Admission",
    "EngineTier",
    "Hierarchy",
    "NamedTier",
    "Tier",
    "break_even_tokens",
    "engine_tier",
    "parse_tier",
    "pipelined_s",
    "prefill_of",
    "transfer_s",
]
