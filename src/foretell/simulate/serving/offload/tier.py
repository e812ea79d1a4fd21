"""`Tier`: one place that keeps KV caches, with its capacity, its links, and what it gives up when it is full."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from foretell.errors import unknown
from foretell.simulate.serving.given import number, text
from foretell.simulate.serving.offload.timing import transfer_s
from foretell.simulate.serving.requests import LATEST_S

__all__ = ["EVICTION", "Chunk", "Tier"]

#: A prefix, and which chunk of it: known by what comes before it, as a hash chained over chunks is.
Chunk = tuple[int, int]
#: Chunks that a tier keeps, oldest first, with when each is there whole. Policies change the order.
Kept = OrderedDict[Chunk, float]


def _lru(kept: Kept, chunk: Chunk) -> None:
    """What was asked for last goes last."""
    kept.move_to_end(chunk)


def _fifo(kept: Kept, chunk: Chunk) -> None:
    """What came first goes first, whoever asks for it."""


#: What becomes of the order when a chunk is used; the first one in it is given up first.
EVICTION: Mapping[str, Callable[[Kept, Chunk], None]] = MappingProxyType({"lru": _lru, "fifo": _fifo})


class Tier:
    """A place for chunks: device or host memory, a disk, another machine.

    `read_bytes_per_s` and `write_bytes_per_s` are towards the engine and back (inf: no time at all), in transfers of
    up to `transfer_bytes` that take `latency_s` each beside their bytes. Reads queue behind reads and writes behind
    writes. `compression` is how many times smaller chunks are kept and moved. A tier that several engines are given is
    shared by them: what one stores, the others find. They share its reads too, unless each has one of `own_links`, as
    GPUs have to the memory of their host.
    """

    def __init__(
        self,
        name: str,
        capacity_bytes: float,
        read_bytes_per_s: float,
        write_bytes_per_s: float | None = None,
        *,
        latency_s: float = 0.0,
        transfer_bytes: float = math.inf,
        compression: float = 1.0,
        eviction: str = "lru",
        own_links: bool = False,
    ) -> None:
        writes = read_bytes_per_s if write_bytes_per_s is None else write_bytes_per_s
        where = f"tier {text(name, 'name', 'tier')!r}"
        number(capacity_bytes, "capacity_bytes", where)
        for value, what in (
            (read_bytes_per_s, "read_bytes_per_s"), (writes, "write_bytes_per_s"), (transfer_bytes, "transfer_bytes"),
            (compression, "compression"),
        ):  # fmt: skip
            number(value, what, where, above=True)
        number(latency_s, "latency_s", where, most=LATEST_S)
        if eviction not in EVICTION:
            raise unknown("eviction policy", str(eviction), EVICTION)
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.read_bytes_per_s = read_bytes_per_s
        self.write_bytes_per_s = writes
        self.latency_s = latency_s
        self.transfer_bytes = transfer_bytes
        self.compression = compression
        self.eviction = eviction
        self.own_links = own_links
        self.used_bytes = 0.0
        self.evicted = 0
        self.read_bytes = 0.0
        self.written_bytes = 0.0
        self._kept: Kept = OrderedDict()
        self._sizes: dict[Chunk, float] = {}
        self._pinned: set[int] = set()
        self._reads_until: dict[int, float] = {}
        self._writes_until = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._kept

    def has(self, chunk: Chunk, now: float) -> bool:
        """Whether the whole chunk is here; says nothing about use."""
        ready = self._kept.get(chunk)
        return ready is not None and ready <= now

    def touch(self, chunk: Chunk) -> None:
        """A chunk that is here is used."""
        EVICTION[self.eviction](self._kept, chunk)

    def put(self, chunk: Chunk, nbytes: float, now: float) -> list[tuple[Chunk, float]]:
        """Write a chunk, asynchronously: it is here once its write has had its turn. Returns what gave way, with bytes.

        A chunk that is here already is used, not written; one that does not fit beside what is pinned is not kept.
        """
        if chunk in self._kept:
            self.touch(chunk)
            return []
        size = nbytes / self.compression
        gone = self._room(size)
        if gone is None:
            return []
        begins = max(now, self._writes_until)
        self._writes_until = begins + transfer_s(size, self.write_bytes_per_s, self.latency_s, self.transfer_bytes)
        self._kept[chunk] = self._writes_until
        self._sizes[chunk] = size
        self.used_bytes += size
        self.written_bytes += size
        return gone

    def send_s(self, chunks: int, nbytes: float) -> float:
        """Seconds that so many bytes in so many chunks take from here to the engine, the link being free."""
        if not chunks:
            return 0.0
        each = nbytes / chunks / self.compression
        return chunks * transfer_s(each, self.read_bytes_per_s, self.latency_s, self.transfer_bytes)

    def load_s(self, chunks: int, nbytes: float, now: float, reader: int = 0) -> float:
        """Seconds until they are at the engine of number `reader`, were they asked for now."""
        queue = max(self._reads_until.get(reader * self.own_links, 0.0) - now, 0.0)
        return queue + self.send_s(chunks, nbytes) if chunks else 0.0

    def read(self, chunks: int, nbytes: float, now: float, reader: int = 0) -> float:
        """As `load_s`, and the link is taken for it."""
        seconds = self.load_s(chunks, nbytes, now, reader)
        if chunks:
            self._reads_until[reader * self.own_links] = now + seconds
            self.read_bytes += nbytes / self.compression
        return seconds

    def pin(self, prefix: int) -> None:
        """Never give up chunks of this prefix."""
        self._pinned.add(prefix)

    def unpin(self, prefix: int) -> None:
        """Let chunks of this prefix go as others do."""
        self._pinned.discard(prefix)

    def clear(self, prefixes: Iterable[int] | None = None) -> int:
        """Give up all chunks, or those of some prefixes; returns how many."""
        chosen = None if prefixes is None else set(prefixes)
        gone = [chunk for chunk in self._kept if chosen is None or chunk[0] in chosen]
        for chunk in gone:
            self._drop(chunk)
        return len(gone)

    def _room(self, size: float) -> list[tuple[Chunk, float]] | None:
        """Make room; None where there cannot be enough."""
        gone: list[tuple[Chunk, float]] = []
        if self.used_bytes + size <= self.capacity_bytes:
            return gone
        pinned = sum(self._sizes[c] for c in self._kept if c[0] in self._pinned) if self._pinned else 0.0
        if pinned + size > self.capacity_bytes:
            return None
        passed: list[Chunk] = []
        while self.used_bytes + size > self.capacity_bytes:
            chunk = next(iter(self._kept))
            if chunk[0] in self._pinned:
                self._kept.move_to_end(chunk)
                passed.append(chunk)
                continue
            gone.append((chunk, self._sizes[chunk] * self.compression))
            self._drop(chunk)
            self.evicted += 1
        for chunk in reversed(passed):
            self._kept.move_to_end(chunk, last=False)
        return gone

    def _drop(self, chunk: Chunk) -> None:
        del self._kept[chunk]
        self.used_bytes -= self._sizes.pop(chunk)
