"""`Blocks`: a rank's paged KV cache, with the prefix cache that lives in what is free.

A block that nobody holds keeps its content until it is taken for something else, oldest first (LRU). Blocks of a
prefix are known by the prefix and their place in it, which is what a hash chained over their tokens tells an engine;
all other blocks of a finished sequence can never be found again, so they are only counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from foretell.simulate.serving.engine.sequence import Seq

__all__ = ["Blocks", "Key", "Tier"]

#: (prefix, place), or (sequence, place, 0) for what a preempted sequence alone can find again.
Key = tuple[int, ...]


class Tier(Protocol):
    """Where blocks are kept outside a device: host memory, a disk, other machines. May be shared by ranks."""

    @property
    def eager(self) -> bool:
        """Whether it gets a copy of a prefix's blocks as they are computed, and not only when they are evicted."""

    def put(self, key: Key, /) -> None:
        """A block with this content is there to be kept."""

    def has(self, key: Key, /) -> bool:
        """Whether the content can be loaded."""

    def load_s(self, keys: Sequence[Key], now_s: float, reader: int, /) -> float:
        """Seconds from now until these blocks are with the rank of number `reader`; links are taken for it."""


class Blocks:
    """`capacity` blocks of `size` tokens. `used` are held by sequences; the others are free, whatever they keep."""

    __slots__ = ("_blank", "_kept", "_refs", "_serial", "cache", "capacity", "size", "tier", "used")

    def __init__(self, capacity: int, size: int, *, cache: bool = False, tier: Tier | None = None) -> None:
        self.capacity = capacity
        self.size = size
        self.cache = cache
        self.tier = tier
        self.used = 0
        self._blank = capacity
        #: Holders of each known block; 0: it is free and listed in `_kept`.
        self._refs: dict[Key, int] = {}
        #: Free blocks with content, oldest first: known ones by key, runs of others by a serial number.
        self._kept: OrderedDict[Key | int, int] = OrderedDict()
        self._serial = 0

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self.capacity - self.used

    def untake(self, count: int) -> None:
        """Give back blocks that were taken and not written to."""
        self.used -= count
        self._blank += count

    def take(self, count: int) -> None:
        """Take free blocks, the empty ones first, then those unused for longest."""
        self.used += count
        if self.used > self.capacity:
            raise AssertionError("more KV blocks taken than there are")  # a scheduler's fault, never the user's
        if not self.cache:
            return
        blank = min(count, self._blank)
        self._blank -= blank
        count -= blank
        while count:
            key, held = self._kept.popitem(last=False)
            if not isinstance(key, int):
                del self._refs[key]
                if self.tier is not None:
                    self.tier.put(key)
            elif held > count:
                self._kept[key] = held - count
                self._kept.move_to_end(key, last=False)
                held = count
            count -= held

    def found(self, seq: Seq) -> tuple[int, int, int]:
        """Leading blocks of its prompt that are here, how many of them nobody holds, and further ones in the tier.

        A prompt's last token is always computed, as its logits are wanted.
        """
        if not self.cache or not (seq.prefix_tokens or seq.preempted):
            return 0, 0, 0
        most = (seq.prompt - 1) // self.size
        refs, here, idle = self._refs, 0, 0
        shared = min(most, seq.prefix_tokens // self.size)
        stop = most if seq.preempted else shared
        while here < stop:
            count = refs.get(self._key(seq, here, shared))
            if count is None:
                break
            idle += not count
            here += 1
        more = 0
        if self.tier is not None:
            while here + more < stop and self.tier.has(self._key(seq, here + more, shared)):
                more += 1
        return here, idle, more

    def places(self, seq: Seq, since: int, count: int) -> list[Key]:
        """Keys of so many blocks of its prompt."""
        shared = min((seq.prompt - 1) // self.size, seq.prefix_tokens // self.size)
        return [self._key(seq, place, shared) for place in range(since, since + count)]

    @staticmethod
    def _key(seq: Seq, place: int, shared: int) -> Key:
        return (seq.prefix, place) if place < shared else (seq.id, place, 0)

    def hold(self, seq: Seq, count: int) -> None:
        """Let a sequence hold the first `count` blocks of its prompt, all of them found here."""
        shared = seq.prefix_tokens // self.size
        for place in range(count):
            key = self._key(seq, place, shared)
            if not self._refs[key]:
                del self._kept[key]
                self.used += 1
            self._refs[key] += 1
            seq.keys.add(key)
        seq.marked = count

    def mark(self, seq: Seq, tokens: int) -> None:
        """Make known the full blocks of its prefix among its first `tokens` tokens, but for twins of known ones."""
        if self.cache and seq.prefix_tokens:
            stop = min(tokens, seq.prefix_tokens) // self.size
            for place in range(seq.marked, stop):
                key = (seq.prefix, place)
                if key not in self._refs:
                    self._refs[key] = 1
                    seq.keys.add(key)
                    if self.tier is not None and self.tier.eager:
                        self.tier.put(key)
            seq.marked = max(seq.marked, stop)

    def release(self, seq: Seq, tokens: int, *, again: bool = False) -> None:
        """Give back all blocks of a sequence of `tokens` cached tokens; `again`: it will come back for them."""
        count = -(-tokens // self.size)
        if not self.cache:
            self.give(count)
            return
        full = tokens // self.size
        shared = min(full, seq.prefix_tokens // self.size)
        known = full if again else shared
        self.give(count - known)
        for place in range(known - 1, -1, -1):  # the last goes first, so that what is left begins at the beginning
            key = self._key(seq, place, shared)
            if key in seq.keys:
                self._refs[key] -= 1
                if not self._refs[key]:
                    self._kept[key] = 1
                    self.used -= 1
            elif key in self._refs:  # a twin of another's block
                self.give(1)
            else:
                self._refs[key] = 0
                self._kept[key] = 1
                self.used -= 1
        if not again:
            for key in seq.keys:
                if len(key) == 3:  # its own, found again after a preemption: nobody else will ask for it
                    del self._refs[key]
        seq.keys.clear()
        seq.marked = 0

    def give(self, count: int) -> None:
        """Give blocks back whose content nobody can ask for."""
        self.used -= count
        if count and self.cache:
            self._serial += 1
            self._kept[self._serial] = count
