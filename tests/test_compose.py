"""Pipelines of estimates: sums, the largest part's memory, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

import foretell
from foretell.compose import Part, pipeline
from foretell.errors import InputError


def _estimate(seq_len: int = 64, on: str = "l4"):
    return foretell.predict("llm:gpt2", on=on, batch=1, seq_len=seq_len)


def test_parts_add_up_and_the_largest_gives_the_peak() -> None:
    small, large = _estimate(64), _estimate(1024)
    total = pipeline([Part("small", small, times=5), Part("large", large)])
    assert total.time_s == pytest.approx(5 * small.time_s + large.time_s)
    for end in (0, 1):
        assert total.time_interval_s[end] == pytest.approx(5 * small.time_interval_s[end] + large.time_interval_s[end])
    assert total.flops == 5 * small.flops + large.flops
    assert (total.peak_part, total.peak_bytes) == ("large", large.memory.peak_bytes)
    assert total.energy_j == pytest.approx(5 * small.energy_j + large.energy_j)
    assert total.cost_usd == pytest.approx(5 * small.cost_usd + large.cost_usd)


def test_what_one_part_lacks_the_whole_lacks() -> None:
    known = _estimate()
    total = pipeline([Part("known", known), Part("unknown", dataclasses.replace(known, energy_j=None, cost_usd=None))])
    assert total.energy_j is None
    assert total.cost_usd is None


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="no parts"):
        pipeline([])
    with pytest.raises(InputError, match="0 times"):
        pipeline([Part("a", _estimate(), times=0)])
    with pytest.raises(InputError, match="different devices"):
        pipeline([Part("a", _estimate()), Part("b", _estimate(on="t4"))])
