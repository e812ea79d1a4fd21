"""Figures of a service, on small ones whose every number can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from foretell.errors import InputError, UnknownNameError
from foretell.simulate.serving import Batch, ServingPlan
from foretell.simulate.serving.engine.served import Runs, Served
from foretell.simulate.serving.metrics import gaps, latencies, measure, parse_slo, percentile, series
from foretell.simulate.serving.requests import Requests
from foretell.simulate.serving.simulator import Link, serve

NAN = math.nan


def runs(rows: Sequence[dict[str, float]]) -> Runs:
    """Runs of rows that say what is not 0 (one iteration, one row of logits for each sequence, all of them running)."""
    ints = {column.name for column in fields(Runs) if column.type == "Ints"}
    filled = []
    for row in rows:
        seqs = row.get("decode_seqs", 0) + row.get("prefill_seqs", 0)
        base = {"iterations": 1, "decode_seqs": 0, "sampled": seqs, "running": seqs}
        filled.append({**dict.fromkeys((c.name for c in fields(Runs)), 0), **base, **row})
    return Runs(**{  # type: ignore[arg-type]
        c.name: np.array([row[c.name] for row in filled], np.int32 if c.name in ints else np.float64)
        for c in fields(Runs)
    })  # fmt: skip


def served(**changes: Any) -> Served:
    """Three requests. A: prompt 1 to 2 s, then a token at 3, 4, 5 s. B comes at 3 s: prompt with A's token until 4 s,
    one token more at 5 s. C is refused."""
    columns: dict[str, Any] = {
        "arrival_s": np.array([0.0, 3.0, 3.5]),
        "first_scheduled_s": np.array([1.0, 3.0, NAN]),
        "first_token_s": np.array([2.0, 4.0, NAN]),
        "finished_s": np.array([5.0, 5.0, NAN]),
        "input_tokens": np.array([100, 50, 9999], np.int32),
        "output_tokens": np.array([4, 2, 7], np.int32),
        "cached_tokens": np.array([0, 30, 0], np.int32),
        "preemptions": np.array([0, 1, 0], np.int32),
        "prefill_replica": np.array([0, 0, -1], np.int32),
        "replica": np.array([0, 0, -1], np.int32),
        "refused": np.array([0, 0, 1], np.int8),
        "reasons": ("", "longer than the model allows"),
        "runs": runs([
            {"start_s": 1, "end_s": 2, "prefill_seqs": 1, "prefill_tokens": 100, "kv_blocks": 7, "running": 1},
            {"start_s": 2, "end_s": 3, "decode_seqs": 1, "kv_blocks": 7, "running": 1},
            {"start_s": 3, "end_s": 4, "decode_seqs": 1, "prefill_seqs": 1, "kv_blocks": 10, "running": 2},
            {"start_s": 4, "end_s": 5, "decode_seqs": 2, "kv_blocks": 5, "running": 2, "waiting": 3},
        ]),
        "kv_capacity_blocks": (10,),
        "block_size": 16,
    }  # fmt: skip
    return Served(**{**columns, **changes})


class Costs:
    """100 W while it decodes only, 300 W with a prompt; prompts are bound by compute."""

    def bound(self, batch: Batch) -> list[str]:
        return ["compute" if seqs else "bandwidth" for seqs in batch.prefill_seqs]

    def power_w(self, batch: Batch) -> Any:
        return np.where(batch.prefill_seqs > 0, 300.0, 100.0)


def test_latencies_by_hand() -> None:
    found = latencies(served())
    assert found["ttft"].tolist() == pytest.approx([2.0, 1.0, NAN], nan_ok=True)
    assert found["tpot"].tolist() == pytest.approx([1.0, 1.0, NAN], nan_ok=True)
    assert found["e2e"].tolist() == pytest.approx([5.0, 2.0, NAN], nan_ok=True)
    one = latencies(served(output_tokens=np.array([4, 1, 7], np.int32)))
    assert math.isnan(one["tpot"][1])


def test_figures_by_hand() -> None:
    one = measure(served(), ServingPlan(tp=2), costed=Costs(), slo=parse_slo("ttft=1.5s,tpot=1s"), idle_w=10.0,
                  price_usd_per_h=3.6)  # fmt: skip
    assert (one.since_s, one.until_s, one.requests, one.finished) == (0.0, 5.0, 3, 2)
    assert dict(one.refused) == {"longer than the model allows": 1}
    assert one.requests_per_s == pytest.approx(2 / 5)
    assert one.input_tokens_per_s == pytest.approx(150 / 5)
    assert one.output_tokens_per_s == pytest.approx(6 / 5)
    assert one.output_tokens_per_s_per_device == pytest.approx(6 / 5 / 2)
    assert one.attainment == pytest.approx(1 / 3)  # only B: A waits 2 s, C is refused
    assert one.attainment_by == pytest.approx({"ttft": 1 / 3, "tpot": 2 / 3})
    assert one.goodput_per_s == pytest.approx(1 / 5)
    assert one.running == pytest.approx((1 + 1 + 2 + 2) / 5)
    assert one.waiting == pytest.approx(1 / 5)  # A, from 0 to 1 s
    assert one.busy == pytest.approx(4 / 5)
    assert one.kv_mean == pytest.approx((0.7 + 0.7 + 1.0 + 0.5) / 5)
    assert one.kv_peak == 1.0
    assert one.preemptions == 1
    assert one.cached_share == pytest.approx(30 / 150)
    assert one.bound == pytest.approx({"compute": 0.5, "bandwidth": 0.5})
    assert one.queue == {"KV cache": 0.25}
    # 2 s at 300 W, 2 s at 100 W and a second idle, on two devices.
    assert one.energy_j == pytest.approx(2 * (600 + 200 + 10))
    assert one.power_w == pytest.approx(810 / 5)
    assert one.cost_usd == pytest.approx(2 * 5 * 0.001)
    assert one.usd_per_million_output_tokens == pytest.approx(0.01 / 6 * 1e6)
    assert one.usd_per_million_tokens == pytest.approx(0.01 / 156 * 1e6)
    assert one.energy_per_output_token_j == pytest.approx(1620 / 6)
    assert one.latency_s["ttft"]["p50"] == pytest.approx(1.5)
    assert one.latency_s["itl"] == pytest.approx(dict.fromkeys(one.latency_s["itl"], 1.0))


def test_what_is_unknown_stays_unknown() -> None:
    one = measure(served(), ServingPlan())
    assert (one.energy_j, one.cost_usd, one.attainment, one.goodput_per_s) == (None, None, None, None)
    assert one.energy_per_output_token_j is one.usd_per_million_tokens is one.power_w is None

    class NoPower(Costs):
        def power_w(self, batch: Batch) -> Any:
            raise InputError("its TDP is unknown")

    assert measure(served(), ServingPlan(), costed=NoPower()).energy_j is None
    assert measure(served(), ServingPlan(), costed=NoPower()).bound == pytest.approx({"compute": 0.5, "bandwidth": 0.5})


def test_the_beginning_and_the_end_left_out() -> None:
    one = measure(served(), ServingPlan(), warm_up_s=2.5, cool_down_s=0.5, costed=Costs())
    assert (one.since_s, one.until_s, one.requests) == (2.5, 4.5, 2)
    # A had a token at 2 s and three until 5 s; B its prompt and first token at 4 s, and half of the second.
    assert one.output_tokens == pytest.approx(3 * 2 / 3 + 1 + 0.5)
    assert one.input_tokens_per_s == pytest.approx(50 / 2)
    assert one.finished == 0
    assert one.latency_s["ttft"]["max"] == pytest.approx(1.0)  # A came before
    assert one.energy_j == pytest.approx(0.5 * 100 + 300 + 0.5 * 100)
    assert one.busy == pytest.approx(1.0)
    with pytest.raises(InputError, match="nothing is left of 5 s"):
        measure(served(), ServingPlan(), warm_up_s=6.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"running": 2}, "KV cache"),
        ({"running": 4}, "max-num-seqs"),
        ({"prefill_tokens": 62, "prefill_seqs": 1}, "token budget"),
        ({"prefill_tokens": 20, "prefill_seqs": 1}, "KV cache"),
    ],
)
def test_what_keeps_requests_waiting(change: dict[str, float], why: str) -> None:
    rows = [{"start_s": 0, "end_s": 1, "decode_seqs": 2, "running": 2, "kv_blocks": 5, "waiting": 1, **change},
            {"start_s": 1, "end_s": 4, "decode_seqs": 2, "running": 2, "kv_blocks": 5}]  # fmt: skip
    plan = ServingPlan(max_num_seqs=4, max_num_batched_tokens=64)
    assert measure(served(runs=runs(rows)), plan).queue == {why: 0.25}


def test_prompts_in_one_piece_and_batches_in_one_go() -> None:
    rows = [{"start_s": 0, "end_s": 1, "prefill_seqs": 1, "prefill_tokens": 20, "running": 2, "waiting": 1}]
    for plan, why in ((ServingPlan(chunked_prefill=False), "token budget"), (ServingPlan(), "KV cache"),
                      (ServingPlan(engine="static"), "the batch to end")):  # fmt: skip
        assert measure(served(runs=runs(rows)), plan).queue == {why: 1.0}


def test_a_pipeline_keeps_its_devices_at_work_together() -> None:
    """Two stages with two batches on their way: each rank's iterations draw a device's power, idle time included."""
    rows = [{"start_s": 0, "end_s": 5, "decode_seqs": 1, "running": 1, "kv_blocks": 5},
            {"start_s": 0, "end_s": 3, "decode_seqs": 1, "running": 1, "rank": 1}]  # fmt: skip
    one = measure(served(runs=runs(rows)), ServingPlan(tp=2, pp=2), costed=Costs(), idle_w=10.0)
    assert one.busy == pytest.approx(8 / 10)
    assert one.energy_j == pytest.approx(2 * (5 * 100 + 3 * 100 + 2 * 10))
    assert one.power_w == pytest.approx(2 * 820 / 5 / 4)
    assert one.kv_mean == pytest.approx(0.25)


def test_gaps_of_long_runs_count_each_iteration() -> None:
    rows = [{"start_s": 0, "end_s": 1, "prefill_seqs": 3},
            {"start_s": 1, "end_s": 5, "iterations": 8, "decode_seqs": 3}]  # fmt: skip
    values, weights = gaps(served(runs=runs(rows)))
    assert float(weights.sum()) == 8 * 3
    assert set(values.tolist()) == {0.5}


def test_prompts_that_run_alone_delay_the_others() -> None:
    """Two sequences decode, a prompt of a third runs for 5 s, then all three: the two waited 6 s, the third 1 s."""
    rows = [{"start_s": 0, "end_s": 1, "decode_seqs": 2}, {"start_s": 1, "end_s": 6, "prefill_seqs": 1},
            {"start_s": 6, "end_s": 7, "decode_seqs": 3},
            # After a pause nobody waited; another replica has nothing to do with it.
            {"start_s": 20, "end_s": 21, "decode_seqs": 4},
            {"start_s": 0, "end_s": 9, "decode_seqs": 5, "replica": 1}]  # fmt: skip
    values, weights = gaps(served(runs=runs(rows)))
    found: dict[float, float] = {}
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        found[value] = found.get(value, 0.0) + weight
    assert found == {1.0: 2 + 1 + 4, 6.0: 2, 9.0: 5}


def test_weighted_percentiles_are_those_of_repeated_values() -> None:
    rng = np.random.default_rng(2)
    values, weights = rng.random(40), rng.integers(1, 9, 40).astype(float)
    wanted = np.linspace(0, 100, 301).tolist()
    repeated = np.repeat(values, weights.astype(int))
    assert percentile(values, wanted, weights).tolist() == pytest.approx(np.percentile(repeated, wanted).tolist())
    assert math.isnan(percentile(np.array([NAN]), 50))


def test_series_are_means_over_time() -> None:
    found = series(served(), 5)
    assert found.edge_s.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.running.tolist() == pytest.approx([0, 1, 1, 2, 2])
    assert found.waiting.tolist() == pytest.approx([1, 0, 0, 0, 0])
    assert found.kv.tolist() == pytest.approx([0, 0.7, 0.7, 1.0, 0.5])
    assert found.output_tokens_per_s.tolist() == pytest.approx([0, 1, 1, 2, 2])
    assert series(served(), 2).running.tolist() == pytest.approx([1.5 / 2.5, 4.5 / 2.5])


def test_the_cache_of_two_replicas_is_one_share() -> None:
    rows = [{"start_s": 0, "end_s": 5, "kv_blocks": 8}, {"start_s": 0, "end_s": 5, "kv_blocks": 4, "replica": 1}]
    found = series(served(runs=runs(rows), kv_capacity_blocks=(10, 20)), 5)
    assert found.kv.tolist() == pytest.approx([0.5] * 5)


def test_a_request_that_comes_last_and_is_refused_counts() -> None:
    late = served(arrival_s=np.array([0.0, 3.0, 8.0]))
    one = measure(late, ServingPlan(), slo=parse_slo("e2e=1h"))
    assert (one.until_s, one.requests) == (8.0, 3)
    assert one.attainment == pytest.approx(2 / 3)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=5", "ttft=1s,ttft=2s", "tpot=-1s"])
def test_limits_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--slo"):
        parse_slo(text)


def test_limits_by_name() -> None:
    assert parse_slo(" ttft=500ms, e2e=2 s").limits == {"ttft": 0.5, "e2e": 2.0}
    with pytest.raises(UnknownNameError, match="did you mean 'tpot'"):
        parse_slo("tpott=1s")


def test_plain_values() -> None:
    document = measure(served(), ServingPlan(), costed=Costs()).to_dict()
    assert document["duration_s"] == 5.0
    assert list(document["latency_s"]) == ["ttft", "tpot", "itl", "e2e"]
    assert document["refused"] == {"longer than the model allows": 1}


class Seconds:
    """10 ms and something for every token; a cache that holds some answers at a time."""

    kv_capacity_tokens = 2000
    kv_bytes_per_token = 1e3

    def time_s(self, batch: Batch) -> Any:
        return 0.01 + 1e-5 * (batch.prefill_tokens + batch.decode_seqs) + 1e-8 * batch.decode_tokens


@pytest.mark.parametrize("plan", [
    {}, {"pp": 2}, {"dp": 2}, {"replicas": 2}, {"preemption": "swap", "host_kv_bytes": 1_000_000},
    {"prefill_replicas": 2, "decode_replicas": 1}, {"prefill_replicas": 1, "decode_replicas": 2, "pp": 2},
    {"engine": "sglang"}, {"engine": "sglang", "prefill_replicas": 2, "decode_replicas": 1},
    {"engine": "trtllm"}, {"engine": "static"}, {"engine": "static", "pp": 2},
])  # fmt: skip
def test_figures_do_not_contradict_each_other(plan: dict[str, Any]) -> None:
    """Gaps between tokens add up to the answers' times, requests there to Little's law, series to means."""
    rng = np.random.default_rng(0)
    count = 120
    inputs, outputs = rng.integers(1, 500, count), rng.integers(1, 300, count)
    made = ServingPlan(max_num_seqs=32, max_num_batched_tokens=512, **plan)
    found = serve(
        Seconds(), made, Requests.of(np.sort(rng.uniform(1, 4, count)), inputs, outputs),
        host_link=Link(1e8) if made.host_kv_bytes else None, kv_link=Link(1e6) if made.prefill_replicas else None,
    )  # fmt: skip
    if plan.get("engine") not in ("static", "trtllm"):
        assert found.preemptions.sum()
    values, weights = gaps(found)
    assert weights.sum() == (outputs - 1).sum()
    assert values @ weights == pytest.approx((found.finished_s - found.first_token_s).sum(), rel=1e-6)
    one, over_time = measure(found, made), series(found, 50)
    there = (found.finished_s - found.arrival_s).sum() / one.duration_s
    assert one.running + one.waiting == pytest.approx(there, rel=1e-9)
    lasts = np.diff(over_time.edge_s)
    assert over_time.running @ lasts == pytest.approx(one.running * one.duration_s, rel=1e-6)
    assert over_time.waiting @ lasts == pytest.approx(one.waiting * one.duration_s, rel=1e-6)
    assert over_time.output_tokens_per_s @ lasts == pytest.approx(outputs.sum(), rel=1e-6)
