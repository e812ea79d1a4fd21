"""`NamedTier`: a tier as a user names it, of the whole service; and the part of it that one device sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from foretell.errors import InputError, unknown
from foretell.simulate.serving.engine.link import Link
from foretell.simulate.serving.given import instance, number
from foretell.simulate.serving.offload.hierarchy import EngineTier, Hierarchy
from foretell.simulate.serving.offload.tier import Tier
from foretell.simulate.serving.plan import ServingPlan
from foretell.simulate.serving.requests import LATEST_S
from foretell.units import format_bytes, format_rate, parse_bandwidth, parse_bytes, parse_time
from foretell.workload.llm import LLMConfig

__all__ = ["HOST", "NamedTier", "engine_tier", "parse_tier", "parts_of"]

#: The tier that is host memory: each GPU has a link of its own to it.
HOST = "cpu"
_OPTION = "--kv-tier"
_SETTINGS = ("bandwidth", "latency")
#: What a text may give: more bytes than any service keeps, and a second of a disk's and of a thousand hosts' memories.
_MOST_BYTES, _LEAST_RATE, _MOST_RATE = 2**60, 1e6, 1e15


@dataclass(frozen=True, slots=True)
class NamedTier:
    """`capacity_bytes` for all that is kept, `bytes_per_s` of one GPU (`own_links`) or of all together."""

    name: str
    capacity_bytes: float
    bytes_per_s: float
    latency_s: float = 0.0
    own_links: bool = False

    def __post_init__(self) -> None:
        where = f"tier {instance(self.name, str, 'name', 'tier', 'a text')!r}"
        number(self.capacity_bytes, "capacity_bytes", where, above=True)
        number(self.bytes_per_s, "bytes_per_s", where, above=True)
        number(self.latency_s, "latency_s", where, most=LATEST_S)

    @property
    def text(self) -> str:
        """In words.

        >>> NamedTier("disk", 1e12, 6e9).text
        'disk: 931 GiB at 6 GB/s for all'
        """
        whose = "a GPU" if self.own_links else "for all"
        return f"{self.name}: {format_bytes(self.capacity_bytes)} at {self.bytes_per_s / 1e9:.3g} GB/s {whose}"


def parse_tier(text: str, host: Link | None = None) -> NamedTier:
    """``NAME=BYTES[,bandwidth=RATE][,latency=TIME]``; `host` is what a GPU has to host memory, tier ``cpu``.

    >>> parse_tier("cpu=64GiB", Link(50e9)).text
    'cpu: 64 GiB at 50 GB/s a GPU'

    Raises InputError, UnknownNameError.
    """
    instance(text, str, "the tier", _OPTION, "a text")
    parts = [part.strip() for part in text.split(",")]
    name, equals, size = parts[0].partition("=")
    if not equals or not name.isidentifier():
        raise InputError(f"{text[:60]!r} is no tier", _OPTION, "write e.g. cpu=64GiB or disk=2TB,bandwidth=6GB/s")
    where = f"{_OPTION} {name}"
    given: dict[str, str] = {}
    for part in parts[1:]:
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{part[:40]!r} sets nothing", where, "write e.g. bandwidth=6GB/s")
        if key not in _SETTINGS:
            raise unknown("setting of a tier", key, _SETTINGS)
        if key in given:
            raise InputError(f"{key} is given twice", where)
        given[key] = value
    capacity = parse_bytes(size, where)
    if not capacity:
        raise InputError("holds nothing", where, "give it more than 0 bytes")
    if capacity > _MOST_BYTES:
        raise InputError(f"{format_bytes(capacity)} are more than any tier holds", where, "give at most 1 EiB")
    own = name == HOST
    if "bandwidth" not in given and not (own and host is not None):
        why = "the link to its host is unknown" if own else "how fast it is read is unknown"
        raise InputError(why, where, f"say it: {name}={size},bandwidth=6GB/s")
    rate = parse_bandwidth(given["bandwidth"], where) if "bandwidth" in given else host.bytes_per_s if host else 0.0
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise InputError(f"{format_rate(rate)} is no bandwidth of a tier", where, "give 1 MB/s to 1 PB/s")
    latency = parse_time(given["latency"], where) if "latency" in given else host.latency_s if own and host else 0.0
    return NamedTier(name, float(capacity), rate, latency, own)


def parts_of(config: LLMConfig, plan: ServingPlan) -> int:
    """Among how many devices the cache of a sequence is split, copies not counted.

    >>> from foretell.workload import llm
    >>> models = "qwen3-32b", "deepseek-v3", "qwen3-235b-a22b"
    >>> [parts_of(llm.config(name), ServingPlan(tp=8, pp=2)) for name in models]
    [16, 2, 8]
    """
    return plan.pp * (1 if config.mla is not None else min(plan.tp, config.kv_heads))


def engine_tier(tiers: Sequence[NamedTier], config: LLMConfig, plan: ServingPlan, bytes_per_token: float) -> EngineTier:
    """These tiers as one device of each replica sees them: its part of what they hold, and of links that all share.

    Raises InputError for a tier that is given twice, that holds not even a block, or that is faster than one before it.
    """
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name} is given twice", _OPTION, "give a tier once")
    parts = parts_of(config, plan)
    block = plan.block_size * bytes_per_token * parts
    for tier in tiers:
        if tier.capacity_bytes < block:
            what = f"{format_bytes(tier.capacity_bytes)} hold less than a block of {plan.block_size} tokens"
            raise InputError(what, f"{_OPTION} {tier.name}", f"give it {format_bytes(math.ceil(block))} or more")
    made = [
        Tier(tier.name, tier.capacity_bytes / parts, tier.bytes_per_s / (1 if tier.own_links else parts),
             latency_s=tier.latency_s, own_links=tier.own_links)
        for tier in tiers
    ]  # fmt: skip
    for before, after in pairwise(made):
        if after.read_bytes_per_s > before.read_bytes_per_s:
            rates = [f"{tier.read_bytes_per_s / 1e9:.3g} GB/s" for tier in (after, before)]
            what = f"gives a GPU {rates[0]}, and {before.name} before it {rates[1]}"
            raise InputError(what, f"{_OPTION} {after.name}", "give the fastest first")
    return Hierarchy(made, bytes_per_token, layers=config.layers).engine_tier(plan.block_size)
