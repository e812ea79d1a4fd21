"""A replay of PyTorch's CUDA caching allocator: what a sequence of allocations reserves on the device.

The allocator asks the driver for *segments* and cuts them into *blocks*; freed blocks go back to a pool, where they
merge with free neighbours and wait for the next request. The rules, as PyTorch documents them ("CUDA semantics: memory
management") and sets them in ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp`` (2.0 to 2.14):

* a request is rounded up to a multiple of 512 bytes;
* requests up to 1 MiB are served from the small pool (segments of 2 MiB), the others from the large pool: segments of
  20 MiB for requests below 10 MiB, else of the request rounded up to 2 MiB;
* the smallest free block that holds the request is taken (lowest address first among equals), and split when what is
  left over is at least 512 bytes (small pool) or more than 1 MiB (large pool);
* when the driver has no room, segments that are wholly free are given back to it, then the request is tried again;
* with *expandable segments* each pool is one range of addresses whose physical memory grows at its end, in steps of
  2 MiB (small) or 20 MiB (large); every left-over of 512 bytes is split off.

One stream is replayed: blocks in use by several streams, graph pools and the optional settings (`max_split_size_mb`,
`roundup_power2_divisions`, `garbage_collection_threshold`) are off by default there and left out here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import InfeasibleError, InputError
from foretell.units import format_bytes

__all__ = ["EMPTY_CACHE", "CachingAllocator", "OutOfMemoryError", "Replay", "replay", "round_size", "segment_size"]

KIB = 1024
MIB = 1024 * KIB
MIN_BLOCK = 512
SMALL_LIMIT = 1 * MIB  # largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB  # from here on a segment is the request itself, rounded up
LARGE_ROUND = 2 * MIB

#: Key of an event that gives the cached segments back (``torch.cuda.empty_cache``); its size is ignored.
EMPTY_CACHE = -1

Ints = npt.NDArray[np.int64]


class OutOfMemoryError(InfeasibleError):
    """A request does not fit even with every cached segment given back.

    `missing_bytes` is how much more memory it would have taken.
    """

    def __init__(self, requested_bytes: int, reserved_bytes: int, capacity_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes
        self.missing_bytes = reserved_bytes + requested_bytes - capacity_bytes
        super().__init__(
            f"out of memory: {format_bytes(requested_bytes)} more do not fit beside {format_bytes(reserved_bytes)} of "
            f"{format_bytes(capacity_bytes)}",
            f"{format_bytes(self.missing_bytes)} too many",
        )


def round_size(nbytes: int) -> int:
    """Bytes of the block a request needs: a multiple of 512.

    >>> round_size(1), round_size(512), round_size(513)
    (512, 512, 1024)
    """
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(rounded: int) -> int:
    """Bytes asked of the driver when no cached block holds a request of `rounded` bytes.

    >>> [segment_size(n * MIB) // MIB for n in (1, 2, 10, 11)]
    [2, 20, 10, 12]
    """
    if rounded <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-rounded // LARGE_ROUND) * LARGE_ROUND


class _Block:
    """A run of addresses in one segment; `left` and `right` are its neighbours there.

    An unmapped block is addresses without memory behind them (expandable segments only); it counts as free.
    """

    __slots__ = ("address", "free", "left", "mapped", "pool", "right", "size")

    def __init__(
        self, pool: _Pool, address: int, size: int, left: _Block | None, right: _Block | None, mapped: bool = True
    ) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.left = left
        self.right = right
        self.mapped = mapped
        self.free = not mapped

    def split(self, size: int) -> _Block:
        """Keep the first `size` bytes; the rest becomes the block to the right, which is returned."""
        rest = _Block(self.pool, self.address + size, self.size - size, self, self.right, self.mapped)
        if self.right is not None:
            self.right.left = rest
        self.right = rest
        self.size = size
        return rest

    def merge(self) -> None:
        """Swallow the neighbours that are free and of the same kind; they leave their pool."""
        left, right = self.left, self.right
        if left is not None and left.free and left.mapped == self.mapped:
            self.pool.take(left)
            self.address = left.address
            self.size += left.size
            self.left = left.left
            if left.left is not None:
                left.left.right = self
        if right is not None and right.free and right.mapped == self.mapped:
            self.pool.take(right)
            self.size += right.size
            self.right = right.right
            if right.right is not None:
                right.right.left = self

    def size_when_grown(self) -> int:
        """What it would hold if memory were added behind it."""
        grows = self.right is not None and not self.right.mapped
        return self.size + self.right.size if grows and self.right is not None else self.size


class _Pool:
    """Free blocks sorted by size, then address: best fit is a bisection. Unmapped ones are kept apart."""

    __slots__ = ("blocks", "order", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.order: list[tuple[int, int]] = []
        self.blocks: dict[int, _Block] = {}  # by address
        self.unmapped: dict[int, _Block] = {}  # by address

    def put(self, block: _Block) -> None:
        block.free = True
        if block.mapped:
            insort(self.order, (block.size, block.address))
            self.blocks[block.address] = block
        else:
            self.unmapped[block.address] = block

    def take(self, block: _Block) -> None:
        block.free = False
        if block.mapped:
            del self.order[bisect_left(self.order, (block.size, block.address))]
            del self.blocks[block.address]
        else:
            del self.unmapped[block.address]


# Addresses of one expandable segment: far more than any device has memory.
_RANGE = 1 << 48


class CachingAllocator:
    """The allocator's state; `allocate` and `free` are its two requests. All sizes in bytes.

    `capacity_bytes` is what the driver can give (None: no limit). `allocated_bytes` is the sum of the blocks in use,
    rounding and unsplit left-overs included, as ``torch.cuda.memory_allocated`` counts them; `reserved_bytes` is the
    sum of the segments (``torch.cuda.memory_reserved``). `retries` counts the times the cache was given back.
    """

    def __init__(self, capacity_bytes: int | None = None, *, expandable_segments: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0
        self._small = _Pool(small=True)
        self._large = _Pool(small=False)
        self._next_address = 0  # where the driver places segments is not known: one after the other
        if expandable_segments:
            for pool in (self._small, self._large):
                pool.put(_Block(pool, 0, _RANGE, None, None, mapped=False))

    def allocate(self, nbytes: int) -> _Block:
        """A block for `nbytes` (≥ 1). Raises OutOfMemoryError when the capacity does not allow it."""
        size = round_size(nbytes)
        pool = self._small if size <= SMALL_LIMIT else self._large
        block = self._best_fit(pool, size) or self._extend(pool, size)
        if block is None:
            self.retries += 1
            self.release_cached()
            block = self._extend(pool, size)
        if block is None:
            assert self.capacity_bytes is not None
            raise OutOfMemoryError(segment_size(size), self.reserved_bytes, self.capacity_bytes)
        left_over = block.size - size
        if left_over > SMALL_LIMIT or (left_over >= MIN_BLOCK and (pool.small or self.expandable_segments)):
            pool.put(block.split(size))
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: _Block) -> None:
        """Give a block back to its pool, merged with the free blocks beside it."""
        self.allocated_bytes -= block.size
        block.merge()
        block.pool.put(block)

    def release_cached(self) -> None:
        """Give back to the driver what is wholly free, as ``torch.cuda.empty_cache`` does."""
        for pool in (self._small, self._large):
            for block in list(pool.blocks.values()):
                if self.expandable_segments:
                    self._unmap(block)
                elif block.left is None and block.right is None:
                    pool.take(block)
                    self.reserved_bytes -= block.size

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that holds `size`, taken from the pool."""
        at = bisect_left(pool.order, (size, -1))
        if at == len(pool.order):
            return None
        block = pool.blocks[pool.order[at][1]]
        if self.expandable_segments and block.size_when_grown() > block.size:
            # The block that memory can be added behind counts as large as it can become: others go first.
            for _, address in pool.order[at + 1 :]:
                other = pool.blocks[address]
                if other.size_when_grown() >= block.size_when_grown():
                    break
                block = other
        pool.take(block)
        return block

    def _extend(self, pool: _Pool, size: int) -> _Block | None:
        """A block of memory new to the pool; None where the driver has none left."""
        if self.expandable_segments:
            return self._grow(pool, size)
        nbytes = segment_size(size)
        if not self._reserve(nbytes):
            return None
        address = self._next_address
        self._next_address += nbytes
        return _Block(pool, address, nbytes, None, None)

    def _reserve(self, nbytes: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    # --- expandable segments -------------------------------------------------------------------------------------

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """Put memory behind the first run of free addresses that is long enough."""
        block = self._first_run(pool, size)
        while not block.mapped or block.size < size:
            hole = block.right if block.mapped else block
            assert hole is not None
            assert not hole.mapped  # free neighbours that are mapped have been merged
            wanted = size - block.size if block.mapped else size
            grown = self._map(hole, min(wanted, hole.size))
            if grown is None:
                return None
            block = grown
        pool.take(block)
        return block

    def _first_run(self, pool: _Pool, size: int) -> _Block:
        for address in sorted(pool.unmapped):
            hole = pool.unmapped[address]
            start = hole.left if hole.left is not None and hole.left.free else hole
            room = 0
            block: _Block | None = start
            while block is not None and block.free and room < size:
                room += block.size
                block = block.right
            if room >= size:
                return start
        raise AssertionError("the address range of an expandable segment is used up")

    def _map(self, hole: _Block, nbytes: int) -> _Block | None:
        """Back the first `nbytes` of unmapped addresses with memory, in whole steps; the free block they become."""
        step = SMALL_SEGMENT if hole.pool.small else LARGE_SEGMENT
        nbytes = -(-nbytes // step) * step
        if not self._reserve(nbytes):
            return None
        hole.pool.take(hole)
        if nbytes < hole.size:
            hole.pool.put(hole.split(nbytes))
        hole.mapped = True
        hole.merge()
        hole.pool.put(hole)
        return hole

    def _unmap(self, block: _Block) -> None:
        """Give back the whole steps inside a free block."""
        step = SMALL_SEGMENT if block.pool.small else LARGE_SEGMENT
        start = -(-block.address // step) * step
        end = (block.address + block.size) // step * step
        if end <= start:
            return
        pool = block.pool
        pool.take(block)
        if end < block.address + block.size:
            pool.put(block.split(end - block.address))
        if start > block.address:
            rest = block.split(start - block.address)
            pool.put(block)
            block = rest
        self.reserved_bytes -= block.size
        block.mapped = False
        block.merge()
        pool.put(block)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a sequence of events did to the allocator.

    `allocated_bytes` and `reserved_bytes` are the state after each event (int64, one entry an event that was run);
    the peaks are their maxima. `out_of_memory` is the error that stopped the replay, at event `len(allocated_bytes)`.
    """

    allocated_bytes: Ints
    reserved_bytes: Ints
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    out_of_memory: OutOfMemoryError | None = None


def replay(
    events: Iterable[tuple[int, int]], *, capacity_bytes: int | None = None, expandable_segments: bool = False
) -> Replay:
    """Run allocations and frees in order.

    An event is ``(key, nbytes)``: the first with a key allocates `nbytes` (≥ 0), the next with the same key, whose
    `nbytes` must be negative, frees it; then the key may be used again. Nothing is allocated for 0 bytes. The key
    `EMPTY_CACHE` gives cached segments back instead.
    Raises InputError for a free without an allocation, or an allocation under a key in use.

    >>> replay([(0, 3 * MIB), (1, 100), (0, -1)]).reserved_bytes // MIB
    array([20, 22, 22])
    """
    allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
    live: dict[int, _Block | None] = {}
    allocated: list[int] = []
    reserved: list[int] = []
    failure: OutOfMemoryError | None = None
    for index, (key, nbytes) in enumerate(events):
        if key == EMPTY_CACHE:
            allocator.release_cached()
        elif nbytes < 0:
            if key not in live:
                raise InputError(f"event {index} frees {key}, which is not allocated", "allocator events")
            block = live.pop(key)
            if block is not None:
                allocator.free(block)
        else:
            if key in live:
                raise InputError(f"event {index} allocates {key} while it is in use", "allocator events")
            try:
                live[key] = allocator.allocate(nbytes) if nbytes else None
            except OutOfMemoryError as error:
                failure = error
                break
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Replay(
        allocated_bytes=np.array(allocated, dtype=np.int64),
        reserved_bytes=np.array(reserved, dtype=np.int64),
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.retries,
        out_of_memory=failure,
    )
