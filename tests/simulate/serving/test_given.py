"""What the Python API of serving is given by mistake: the field is named, what it is, and the repair."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from foretell.errors import ForetellError, InputError
from foretell.simulate.serving import Batch, Requests, ServingPlan
from foretell.simulate.serving.given import wholes
from foretell.simulate.serving.metrics import Slo, measure, parse_slo
from foretell.simulate.serving.offload import (
    Hierarchy,
    NamedTier,
    Tier,
    break_even_tokens,
    parse_tier,
    pipelined_s,
)
from foretell.simulate.serving.simulator import Link, serve
from foretell.simulate.serving.workloads import (
    Lengths,
    Wanted,
    arrivals,
    offline,
    parse_lengths,
    read,
    synthetic,
)


class Second:
    """A second an iteration."""

    kv_capacity_tokens = 10_000
    kv_bytes_per_token = 1.0

    def time_s(self, batch: Batch) -> np.ndarray:
        return np.ones(len(batch))


TWO = Requests.of([0.0, 1.0], [10, 20], [3, 4])
LENGTHS = parse_lengths("10", "3")
RNG = np.random.default_rng(0)


def served(*arguments: Any, **more: Any) -> Any:
    """Two requests served, with one argument wrong."""
    return serve(*(arguments or (Second(), ServingPlan(), TWO)), **more)


def split(**more: Any) -> ServingPlan:
    return ServingPlan(replicas=2, prefill_replicas=1, decode_replicas=1, **more)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "plan, text": (lambda: ServingPlan(tp="two"), "tp is 'two', want a whole number"),  # type: ignore[arg-type]
    "plan, truth": (lambda: ServingPlan(tp=True), "tp is True, want a whole number"),
    "plan, part": (lambda: ServingPlan(tp=2.5), "tp is 2.5, want a whole number"),  # type: ignore[arg-type]
    "plan, engine": (lambda: ServingPlan(engine=None), "unknown engine 'None'; known"),  # type: ignore[arg-type]
    "requests, lengths": (lambda: Requests.of([0.0, 1.0], [10, 20, 30], 3), "columns of one length, or one number"),
    "requests, table": (lambda: Requests.of([[0.0, 1.0]], 10, 3), "arrival_s \\(1, 2\\)"),
    "requests, ragged": (lambda: Requests.of([0.0], [[1], [2, 3]], 3), "input_tokens is .* give whole numbers"),
    "requests, time": (lambda: Requests.of(["a", 1.0], 10, 3), "arrival_s is .*; give seconds"),
    "requests, no time": (lambda: Requests.of([0.0, math.nan], 10, 3), "arrivals are not sorted times"),
    "requests, text": (lambda: Requests.of([0.0], ["x"], 3), "input_tokens is \\['x'\\]; give whole numbers"),
    "requests, nan": (lambda: Requests.of([0.0], [math.nan], 3), "input_tokens is nan; give whole numbers"),
    "requests, part": (lambda: Requests.of([0.0], 10, [2.7]), "output_tokens is 2.7; give whole numbers"),
    "requests, endless": (lambda: Requests.of([0.0], 10, [math.inf]), "output_tokens is inf"),
    "requests, huge": (lambda: Requests.of([0.0], 2**70, 3), "input_tokens is 11805.*below 2\\^63"),
    "requests, rows": (lambda: Requests.of([0.0, 1.0], 10, 3, row=[1]), "row has shape \\(1,\\), not \\(2,\\)"),
    "requests, about": (lambda: Requests.of([0.0], 10, 3, about=3), "about is 3; give a mapping"),  # type: ignore[arg-type]
    "requests, lists": (lambda: Requests([0.0], [1], [1], [0], [0]), "Requests.of make them"),  # type: ignore[arg-type]
    "concurrency, below": (lambda: served(concurrency=-1), "concurrency is -1; give a whole number from 0 on"),
    "concurrency, part": (lambda: served(concurrency=1.5), "concurrency is 1.5"),
    "concurrency, truth": (lambda: served(concurrency=True), "concurrency is True"),
    "offline": (lambda: served(offline="yes"), "offline is 'yes'; give True or False"),
    "seed": (lambda: served(seed=None), "seed is None"),
    "overlap": (lambda: served(overlap=1), "overlap is 1; give True or False"),
    "router": (lambda: served(router=3), "unknown router '3'; known"),
    "scheduler": (lambda: served(scheduler=3), "unknown scheduler '3'"),
    "no plan": (lambda: served(Second(), None, TWO), "plan is None; give a ServingPlan"),
    "no requests": (lambda: served(Second(), ServingPlan(), None), "requests is None"),
    "no iterations": (lambda: served(None, ServingPlan(), TWO), "iterations has no kv_capacity_tokens"),
    "kv_link": (lambda: served(Second(), split(), TWO, kv_link=5e9), "kv_link is 5000000000.0; give Link"),
    "tier": (lambda: served(tier=3), "tier has no put"),
    "decode_plan": (lambda: served(decode_plan=ServingPlan(tp=2)), "not disaggregated"),
    "limits": (lambda: parse_slo(None), "the limits is None; give a text"),  # type: ignore[arg-type]
    "limit": (lambda: Slo(ttft_s=-1.0), "ttft_s is -1.0"),
    "limit, text": (lambda: Slo(tpot_s="1"), "tpot_s is '1'"),  # type: ignore[arg-type]
    "limit, nan": (lambda: Slo(tpot_s=math.nan), "tpot_s is nan"),
    "link": (lambda: Link(-1), "link: bytes_per_s is -1; give a number above 0"),
    "link, text": (lambda: Link("1"), "bytes_per_s is '1'"),  # type: ignore[arg-type]
    "link, latency": (lambda: Link(1.0, -1), "latency_s is -1"),
    "tier, name": (lambda: Tier(3, 1.0, 1.0), "name is 3; give a text"),  # type: ignore[arg-type]
    "tier, rate": (lambda: Tier("t", 1.0, None), "read_bytes_per_s is None"),  # type: ignore[arg-type]
    "tier, policy": (lambda: Tier("t", 1.0, 1.0, eviction=None), "unknown eviction policy"),  # type: ignore[arg-type]
    "tiers": (lambda: Hierarchy("ab", 1.0), "a tier is 'a'; give Tier"),  # type: ignore[arg-type]
    "chunks": (lambda: Hierarchy([Tier("t", 1.0, 1.0)], 1.0, chunk_tokens="x"), "chunk_tokens is 'x'"),  # type: ignore[arg-type]
    "named tier": (lambda: NamedTier("x", -1, 2), "capacity_bytes is -1"),
    "tier's text": (lambda: parse_tier(None), "--kv-tier: the tier is None"),  # type: ignore[arg-type]
    "layers": (lambda: pipelined_s(1.0, 1.0, 0), "layers is 0"),
    "no bandwidth": (lambda: break_even_tokens(1.0, 0.0, 1.0, 0.0), "bytes_per_s is 0.0"),
    "limit of a trace": (lambda: Wanted(limit="x"), "the number of requests is 'x'"),  # type: ignore[arg-type]
    "start of a trace": (lambda: Wanted(start_s=math.nan), "start_s is nan"),
    "end of a trace": (lambda: Wanted(duration_s=-1.0), "duration_s is -1.0"),
    "no trace": (lambda: read(None), "the trace is None; give a file"),  # type: ignore[arg-type]
    "process": (lambda: arrivals(None, 1.0, 3, RNG), "the process is None"),  # type: ignore[arg-type]
    "rate": (lambda: arrivals("poisson", "x", 3, RNG), "rate is 'x'"),  # type: ignore[arg-type]
    "count": (lambda: arrivals("poisson", 1.0, -3, RNG), "count is -3"),
    "lengths, text": (lambda: parse_lengths(None, "3"), "--isl: a length is None"),  # type: ignore[arg-type]
    "lengths, pairs": (lambda: Lengths.resampled([1], [1, 2], "x"), "columns of one length"),  # type: ignore[arg-type]
    "lengths, none": (lambda: Lengths.fitted([], [], "x"), "columns of one length"),  # type: ignore[arg-type]
    "drawn, count": (lambda: synthetic(LENGTHS, rate=1.0, count="x"), "the number of requests is 'x'"),  # type: ignore[arg-type]
    "drawn, time": (lambda: synthetic(LENGTHS, rate=1.0, duration_s=-3.0), "duration_s is -3.0"),
    "drawn, of what": (lambda: synthetic(None, rate=1.0, count=3), "lengths is None"),  # type: ignore[arg-type]
    "offline, count": (lambda: offline(LENGTHS, 1.5), "is 1.5"),  # type: ignore[arg-type]
    "offline, of what": (lambda: offline(None), "source is None; give a trace, or Lengths"),  # type: ignore[arg-type]
    "measured, percentile": (lambda: measure(served(), ServingPlan(), percentiles=[101]), "a percentile is 101"),
    "measured, warm-up": (lambda: measure(served(), ServingPlan(), warm_up_s=-5.0), "warm_up_s is -5.0"),
    "measured, limits": (lambda: measure(served(), ServingPlan(), slo="x"), "slo is 'x'; give Slo"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(case: str) -> None:
    call, said = CASES[case]
    with pytest.raises(ForetellError, match=said):
        call()


def test_numbers_of_any_kind_are_taken() -> None:
    """NumPy's own, whole ones written as fractions, and one value for all."""
    requests = Requests.of(np.arange(2), np.array([10.0, 20.0], np.float32), np.uint8(3))
    assert (requests.arrival_s.dtype, requests.input_tokens.tolist(), requests.output_tokens.tolist()) == (
        np.float64, [10, 20], [3, 3],
    )  # fmt: skip
    assert served(concurrency=np.int64(1)).served.all()
    assert Link(np.float32(5e9), 0).seconds(5e9) == pytest.approx(1.0)
    with pytest.raises(InputError, match="input_tokens is"):
        wholes(np.array([2**63], np.uint64), "input_tokens", "requests")
