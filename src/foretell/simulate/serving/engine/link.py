"""`Link`: what KV caches move over, between devices and to host memory; `HostTier`: blocks kept at its other end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.simulate.serving.engine.blocks import Key
from foretell.simulate.serving.given import number
from foretell.simulate.serving.requests import LATEST_S

__all__ = ["HostTier", "Link"]

#: Bytes a second: as good as no time at all.
_FASTEST = 1e30


@dataclass(frozen=True, slots=True)
class Link:
    """`bytes_per_s` of one device, one way, and the time a transfer takes beside its bytes."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        number(self.bytes_per_s, "bytes_per_s", "link", above=True, most=_FASTEST)
        number(self.latency_s, "latency_s", "link", most=LATEST_S)

    def seconds(self, nbytes: float) -> float:
        """Time of one transfer.

        >>> Link(1e9, 1e-3).seconds(2e9)
        2.001
        """
        return self.latency_s + nbytes / self.bytes_per_s


class HostTier:
    """Evicted blocks of one rank in host memory, the least recently used dropped when `capacity` blocks are there."""

    eager = False

    def __init__(self, capacity: int, block_bytes: float, link: Link) -> None:
        self.capacity = capacity
        self._block_bytes = block_bytes
        self._link = link
        self._kept: OrderedDict[Key, None] = OrderedDict()
        self._free_s = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: Key) -> None:
        """Keep a block's content."""
        self._kept[key] = None
        self._kept.move_to_end(key)
        if len(self._kept) > self.capacity:
            self._kept.popitem(last=False)

    def has(self, key: Key) -> bool:
        """Whether it is kept; asking counts as use."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return True
        return False

    def load_s(self, keys: Sequence[Key], now_s: float, reader: int = 0) -> float:
        """Time over the link, behind what it carries already; nothing for no block."""
        if not keys:
            return 0.0
        self._free_s = max(self._free_s, now_s) + self._link.seconds(len(keys) * self._block_bytes)
        return self._free_s - now_s
