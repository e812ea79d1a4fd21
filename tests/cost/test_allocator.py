"""The allocator against hand-worked cases, a naive second implementation, and invariants that hold for any events."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cost.allocator import MIB, CachingAllocator, OutOfMemoryError, replay
from foretell.errors import InfeasibleError, InputError

KIB = 1024


# --- cases worked out by hand from the documented rules ------------------------------------------------------------


def test_small_requests_share_a_segment_of_2_mib() -> None:
    result = replay([(key, 100) for key in range(4096)])
    assert result.peak_allocated_bytes == 4096 * 512  # each rounded to 512 bytes
    assert result.peak_reserved_bytes == 2 * MIB
    assert replay([(key, 100) for key in range(4097)]).peak_reserved_bytes == 4 * MIB


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_what_the_first_request_reserves(request_bytes: int, segment: int) -> None:
    assert replay([(0, request_bytes)]).peak_reserved_bytes == segment


def test_a_large_block_keeps_a_left_over_of_1_mib_and_splits_more() -> None:
    # 11 MiB reserves 12: the last MiB is not split off, so it counts as allocated.
    assert replay([(0, 11 * MIB)]).peak_allocated_bytes == 12 * MIB
    # One block less than 11 MiB leaves more than 1 MiB over, which is split off: 2 MiB still need 20 more.
    result = replay([(0, 11 * MIB - 512), (1, 2 * MIB)])
    assert result.allocated_bytes.tolist() == [11 * MIB - 512, 13 * MIB - 512]
    assert result.reserved_bytes.tolist() == [12 * MIB, 32 * MIB]


def test_best_fit_takes_the_smallest_block_that_holds_the_request() -> None:
    # Segments of 40 and 30 MiB are free; 30 MiB goes into the second, and 40 still fits the first.
    events = [(0, 40 * MIB), (1, 30 * MIB), (0, -1), (1, -1), (2, 29 * MIB), (3, 40 * MIB)]
    assert replay(events).peak_reserved_bytes == 70 * MIB


def test_neighbours_merge_when_freed_and_segments_never_do() -> None:
    # 20 MiB are cut into four of 5; all free again they serve 20 MiB: what stays is one segment.
    fill = [(key, 5 * MIB) for key in range(4)]
    clear = [(key, -1) for key in (1, 3, 0, 2)]
    assert replay([*fill, *clear, (9, 20 * MIB)]).reserved_bytes[-1] == 20 * MIB
    # Two free segments of 12 MiB do not serve 24.
    events = [(0, 12 * MIB), (1, 12 * MIB), (0, -1), (1, -1), (2, 24 * MIB)]
    assert replay(events).reserved_bytes[-1] == 48 * MIB


def test_cached_segments_are_given_back_when_the_capacity_would_be_exceeded() -> None:
    events = [(0, 12 * MIB), (1, 12 * MIB), (0, -1), (1, -1), (2, 24 * MIB)]
    result = replay(events, capacity_bytes=30 * MIB)
    assert (result.retries, result.reserved_bytes[-1], result.peak_reserved_bytes) == (1, 24 * MIB, 24 * MIB)
    assert result.out_of_memory is None


def test_a_segment_in_use_is_not_given_back_and_the_error_says_what_is_missing() -> None:
    events = [(0, 12 * MIB), (1, 12 * MIB), (0, -1), (2, 24 * MIB), (3, 1)]
    result = replay(events, capacity_bytes=30 * MIB)
    error = result.out_of_memory
    assert isinstance(error, OutOfMemoryError)
    assert isinstance(error, InfeasibleError)
    assert error.missing_bytes == 12 * MIB + 24 * MIB - 30 * MIB
    assert "6" in str(error)
    assert len(result.allocated_bytes) == 3  # stopped at event 3


@pytest.mark.parametrize("freed", [0, 1])
def test_a_segment_that_is_partly_in_use_is_not_given_back(freed: int) -> None:
    events = [(0, 10 * MIB - 512), (1, 10 * MIB - 512), (freed, -1), (2, 20 * MIB)]
    result = replay(events, capacity_bytes=39 * MIB)
    assert result.out_of_memory is not None
    assert result.out_of_memory.reserved_bytes == 20 * MIB


def test_expandable_segments_grow_in_steps_and_leave_no_holes_between_segments() -> None:
    events = [(0, 12 * MIB), (1, 12 * MIB), (0, -1), (1, -1), (2, 24 * MIB)]
    result = replay(events, expandable_segments=True)
    assert result.reserved_bytes.tolist() == [20 * MIB, 40 * MIB, 40 * MIB, 40 * MIB, 40 * MIB]
    # A left-over of half a MiB is split off, unlike in a fixed segment.
    assert replay([(0, 19 * MIB + 512 * KIB)], expandable_segments=True).peak_allocated_bytes == 19 * MIB + 512 * KIB


def test_expandable_segments_prefer_a_hole_to_growing() -> None:
    # Free: a hole of 8 MiB, and 6 MiB at the end, which could grow. The request of 5 fits both; the hole is taken,
    # so that 12 MiB then find the 6 at the end and need only one more step.
    events = [(0, 8 * MIB), (1, 6 * MIB), (0, -1), (2, 5 * MIB), (3, 12 * MIB)]
    assert replay(events, expandable_segments=True).reserved_bytes.tolist()[-1] == 40 * MIB
    allocator = CachingAllocator(expandable_segments=True)
    hole, _ = allocator.allocate(8 * MIB), allocator.allocate(6 * MIB)
    allocator.free(hole)
    assert allocator.allocate(5 * MIB).address == 0


def test_expandable_segments_unmap_whole_steps_and_map_again() -> None:
    allocator = CachingAllocator(60 * MIB, expandable_segments=True)
    first, second, third = (allocator.allocate(20 * MIB) for _ in range(3))
    allocator.free(second)
    allocator.release_cached()
    assert allocator.reserved_bytes == 40 * MIB
    again = allocator.allocate(15 * MIB)  # the hole is mapped again before anything grows at the end
    assert (again.address, allocator.reserved_bytes) == (20 * MIB, 60 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(6 * MIB)
    for block in (first, again, third):
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


def test_events_must_pair() -> None:
    with pytest.raises(InputError, match="frees 7"):
        replay([(7, -1)])
    with pytest.raises(InputError, match="allocates 7"):
        replay([(7, 1), (7, 1)])
    assert replay([(7, 0), (7, -1)]).peak_reserved_bytes == 0


def test_a_hundred_thousand_events_take_less_than_a_second(within: Any) -> None:
    random = np.random.default_rng(0)
    sizes = (2.0 ** random.uniform(5, 26, 50_000)).astype(int).tolist()
    events: list[tuple[int, int]] = []
    for key, size in enumerate(sizes):
        events.append((key, size))
        if key >= 200:
            events.append((key - 200, -1))
    events.extend((key, -1) for key in range(len(sizes) - 200, len(sizes)))
    result = within(1.0, lambda: replay(events))
    assert len(events) == 100_000
    assert result.allocated_bytes[-1] == 0


# --- any events ----------------------------------------------------------------------------------------------------

_SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(1, 64 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB]),
)
# An allocation, or (a number) the free of one of the live blocks.
_STEP = st.one_of(_SIZES.map(lambda n: ("allocate", n)), st.integers(0, 63).map(lambda n: ("free", n)))
_STEPS = st.lists(_STEP, max_size=60)


def _events(steps: list[tuple[str, int]]) -> list[tuple[int, int]]:
    live: list[int] = []
    events: list[tuple[int, int]] = []
    for key, (what, number) in enumerate(steps):
        if what == "allocate":
            live.append(key)
            events.append((key, number))
        elif live:
            events.append((live.pop(number % len(live)), -1))
    return events


class _Naive:
    """The rules once more, as plainly as can be: a segment is a list of [size, key or None]; everything is a scan."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int | None]]]] = []

    def run(self, key: int, nbytes: int) -> tuple[int, int]:
        if nbytes < 0:
            self._free(key)
        else:
            self._allocate(key, nbytes)
        blocks = [block for _, segment in self.segments for block in segment]
        return sum(size for size, owner in blocks if owner is not None), sum(size for size, _ in blocks)

    def _allocate(self, key: int, nbytes: int) -> None:
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        fits = [
            (block[0], s, b)
            for s, (is_small, segment) in enumerate(self.segments)
            for b, block in enumerate(segment)
            if is_small == small and block[1] is None and block[0] >= size
        ]
        if not fits:
            new = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.segments.append((small, [[new, None]]))
            fits = [(new, len(self.segments) - 1, 0)]
        have, s, b = min(fits)
        segment = self.segments[s][1]
        rest = have - size
        if rest >= 512 if small else rest > MIB:
            segment[b : b + 1] = [[size, key], [rest, None]]
        else:
            segment[b][1] = key

    def _free(self, key: int) -> None:
        for _, segment in self.segments:
            for b, block in enumerate(segment):
                if block[1] == key:
                    block[1] = None
                    if b + 1 < len(segment) and segment[b + 1][1] is None:
                        block[0] += segment.pop(b + 1)[0]
                    if b > 0 and segment[b - 1][1] is None:
                        segment[b - 1][0] += segment.pop(b)[0]
                    return


@given(_STEPS)
@settings(max_examples=200, deadline=None)
def test_equals_the_naive_implementation(steps: list[tuple[str, int]]) -> None:
    events = _events(steps)
    result = replay(events)
    naive = _Naive()
    expected = [naive.run(key, nbytes) for key, nbytes in events]
    assert list(zip(result.allocated_bytes.tolist(), result.reserved_bytes.tolist(), strict=True)) == expected


@given(_STEPS, st.booleans(), st.one_of(st.none(), st.integers(20, 200)))
@settings(max_examples=300, deadline=None)
def test_blocks_never_overlap_and_bytes_are_conserved(
    steps: list[tuple[str, int]], expandable: bool, capacity_mib: int | None
) -> None:
    capacity = None if capacity_mib is None else capacity_mib * MIB
    allocator = CachingAllocator(capacity, expandable_segments=expandable)
    live = {}
    for key, nbytes in _events(steps):
        if nbytes < 0:
            if key in live:
                allocator.free(live.pop(key)[0])
        else:
            before = allocator.allocated_bytes
            try:
                live[key] = (allocator.allocate(nbytes), nbytes)
            except OutOfMemoryError:  # nothing changed for who holds memory
                assert allocator.allocated_bytes == before
        spans = sorted((id(b.pool), b.address, b.address + b.size) for b, _ in live.values())
        for (pool, _, end), (next_pool, start, _) in itertools.pairwise(spans):
            assert pool != next_pool or end <= start
        assert all(n <= b.size and b.size % 512 == 0 for b, n in live.values())
        assert allocator.allocated_bytes == sum(b.size for b, _ in live.values())
        assert allocator.reserved_bytes >= allocator.allocated_bytes
        assert capacity is None or allocator.reserved_bytes <= capacity
        free = [b for pool in (allocator._small, allocator._large) for b in pool.blocks.values()]
        assert allocator.reserved_bytes == allocator.allocated_bytes + sum(b.size for b in free)
        for block in free:  # two free neighbours would have merged
            assert block.right is None or not block.right.free or not block.right.mapped
    for block, _ in live.values():
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@given(_STEPS)
@settings(max_examples=100, deadline=None)
def test_a_capacity_that_is_not_reached_changes_nothing(steps: list[tuple[str, int]]) -> None:
    events = _events(steps)
    free = replay(events)
    bound = replay(events, capacity_bytes=free.peak_reserved_bytes)
    assert bound.out_of_memory is None
    assert bound.retries == 0
    assert np.array_equal(bound.reserved_bytes, free.reserved_bytes)
