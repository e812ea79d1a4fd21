"""Work shared among machines of several kinds: the balance by brute force, and equal machines as a check."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InfeasibleError, InputError
from foretell.hardware import cluster
from foretell.plan.training.search import search
from foretell.plan.training.uneven import balanced, search_uneven
from foretell.simulate.training.step import step
from foretell.workload import llm

CONFIG = llm.config("llama-3-8b")
MIXED = cluster("2x dgx-h100 + 2x dgx-a100 over ib-hdr")
PINS = {"micro_batch": (1,), "recompute": ("none",), "cp": (1,)}


@settings(max_examples=200)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=3),
)
def test_the_slowest_is_as_fast_as_can_be(total: int, kinds: list[tuple[int, int, int]]) -> None:
    units = [u for u, _, _ in kinds]
    times = [lambda n, s=speed: 3.0 + s * n if n else 0.0 for _, speed, _ in kinds]
    most = [m for _, _, m in kinds]
    found = balanced(total, units, times, most)
    able = [
        max(time(n) for time, n in zip(times, counts, strict=True))
        for counts in itertools.product(*(range(m + 1) for m in most))
        if sum(u * n for u, n in zip(units, counts, strict=True)) >= total
    ]
    if not able:
        assert found is None
        return
    assert found is not None
    assert all(0 <= n <= m for n, m in zip(found, most, strict=True))
    assert sum(u * n for u, n in zip(units, found, strict=True)) >= total
    assert max(time(n) for time, n in zip(times, found, strict=True)) == min(able)


def test_every_kind_gets_its_share_and_nothing_is_left_over() -> None:
    found = search_uneven(CONFIG, MIXED, global_batch=128, seq_len=8192, pinned=PINS, top=50)
    assert {one.by for one in found} == {"stages", "batches"}
    assert [one.time_s for one in found] == sorted(one.time_s for one in found)
    for one in found:
        fast, slow = one.kinds
        assert (fast.name, slow.name) == ("dgx-h100", "dgx-a100")
        assert sum(kind.total for kind in one.kinds) == (32 if one.by == "stages" else 128)
        assert all((kind.each - 1) * kind.units < kind.total <= kind.each * kind.units for kind in one.kinds)
        assert fast.each >= slow.each  # three times the arithmetic
        assert one.time_s == max(kind.time_s for kind in one.kinds)
        assert all(kind.memory_bytes <= 0.9 * 80 * 2**30 for kind in one.kinds)
        assert one.plan.devices == 32
    # Both together are faster than the faster kind alone, and slower than if all were of it.
    alone = search(CONFIG, cluster("2x dgx-h100"), global_batch=128, seq_len=8192, pinned=PINS).best[0].time_s
    best = search(CONFIG, cluster("4x dgx-h100"), global_batch=128, seq_len=8192, pinned=PINS).best[0].time_s
    assert best < found[0].time_s < alone


def test_equal_stages_are_the_pipeline_of_one_kind() -> None:
    """Where a stage of each kind gets as many layers as the even split has, its time is the plan's own."""
    (one,) = search_uneven(
        CONFIG, cluster("1x dgx-h100 + 1x hgx-h100 over ib-ndr"), global_batch=64, seq_len=8192, top=1,
        pinned=PINS | {"tp": (8,), "dp": (1,), "pp": (2,), "zero": (1,)},
    )  # fmt: skip
    assert one.by == "stages"
    assert [kind.each for kind in one.kinds] == [16, 16]
    alone = step(CONFIG, one.plan, cluster("2x dgx-h100")).time_s[0]
    assert one.kinds[0].time_s == pytest.approx(alone, rel=0.02)


def test_what_cannot_be_shared_says_so() -> None:
    with pytest.raises(InputError, match="no degrees that the model allows divide the devices of every kind"):
        search_uneven(CONFIG, MIXED, global_batch=64, seq_len=8192, pinned={"tp": (3,)})
    with pytest.raises(InputError, match="vp cannot be pinned"):
        search_uneven(CONFIG, MIXED, global_batch=64, seq_len=8192, pinned={"vp": (2,)})
    with pytest.raises(InfeasibleError, match=r"GiB a device are missing"):
        search_uneven(llm.config("llama-3.1-405b"), MIXED, global_batch=64, seq_len=8192, pinned=PINS)


def test_groups_of_one_kind_are_one_group() -> None:
    two = search(CONFIG, cluster("1x dgx-h100 + 1x dgx-h100"), global_batch=64, seq_len=8192)
    one = search(CONFIG, cluster("2x dgx-h100"), global_batch=64, seq_len=8192)
    assert two.best == one.best
