"""The trial by the engine simulator: what it counts as within the limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from foretell.hardware import cluster
from foretell.plan.serving.load import Load
from foretell.plan.serving.options import link_of
from foretell.plan.serving.steady import most
from foretell.plan.serving.trial import simulated
from foretell.simulate.serving import Requests, ServingPlan
from foretell.simulate.serving.metrics import Slo, latencies
from foretell.simulate.serving.simulator import serve

PLAN = ServingPlan(max_num_seqs=64, version="0.10.1")


def test_attainment_is_of_every_limit_at_once(fake: Any, poisson: Callable[..., Requests]) -> None:
    server, requests = fake(each=1e-3, token=1e-4, kv_capacity_tokens=100_000), poisson(400, rate=5.0)
    times = latencies(serve(server, PLAN, requests))
    for limits in ({"ttft_s": 0.2}, {"tpot_s": 0.06}, {"ttft_s": 0.2, "tpot_s": 0.06, "e2e_s": 4.0}):
        kept = np.ones(400, dtype=bool)
        for name, limit in limits.items():
            kept &= times[name.removesuffix("_s")] <= limit
        found = simulated(server, PLAN, requests, Slo(**limits), 1e9)
        assert 0 < kept.mean() < 1
        assert found.attainment == pytest.approx(kept.mean())
        assert found.ttft_p50_s == pytest.approx(float(np.median(times["ttft"])))
        assert found.tpot_p99_s == pytest.approx(float(np.percentile(times["tpot"], 99)))


def test_what_is_refused_is_not_within_the_limits(fake: Any, poisson: Callable[..., Requests]) -> None:
    requests = poisson(400, rate=5.0)  # half of them 1,000 tokens long
    found = simulated(fake(kv_capacity_tokens=800), PLAN, requests, Slo(tpot_s=1.0), 1e9)
    assert found.attainment == pytest.approx(float(np.mean(requests.input_tokens == 100)))
    none = simulated(fake(kv_capacity_tokens=64), PLAN, requests, Slo(), 1e9)
    assert none.attainment == 0.0


@pytest.mark.parametrize(("share", "slo", "up"), [
    (0.85, Slo(), True), (1.25, Slo(), False), (1.25, Slo(tpot_s=1.0), False), (1.25, Slo(ttft_s=1e4), True),
])  # fmt: skip
def test_a_server_that_falls_behind_does_not_keep_up(fake: Any, share: float, slo: Slo, up: bool) -> None:
    """No limit on the time between tokens shows it: requests wait ever longer for their first."""
    server, plan = fake(each=2e-4, token=2e-5, kv_capacity_tokens=1_000_000), PLAN
    rate = share * most(server, plan, Load.of(300, 150), Slo()).rate[0]
    for seed, bursts in ((0, 1), (1, 1), (2, 20)):  # one by one, and twenty at once
        gaps = np.random.default_rng(seed).exponential(bursts / rate, 1600 // bursts)
        requests = Requests.of(np.repeat(np.cumsum(gaps), bursts), 300, 150)
        found = simulated(server, plan, requests, slo, 1e9, 200)
        assert found.attainment == 1.0
        assert found.keeps_up == up, (seed, bursts)


def test_the_closed_form_is_near_the_simulator(fake: Any) -> None:
    # At 95 % of the rate that the closed form says holds, TPOT is what it says; well beyond it, requests queue.
    server, plan = fake(each=2e-4, token=2e-5, kv_capacity_tokens=1_000_000), PLAN
    load = Load.of(300, 150)
    state = most(server, plan, load, Slo())
    rng = np.random.default_rng(0)
    count = 3000
    for share, low, high in ((0.95, 0.85, 1.05), (1.3, 0.9, 1.1)):
        arrivals = np.cumsum(rng.exponential(1 / (share * state.rate[0]), count))
        found = simulated(server, plan, Requests.of(arrivals, 300, 150), Slo(), 1e9)
        assert low * state.tpot_s[0] <= found.tpot_p50_s <= high * state.tpot_s[0]
        assert (found.ttft_p50_s > 1.0) == (share > 1)


def test_prefill_and_decode_apart_send_over_the_link(fake: Any, poisson: Callable[..., Requests]) -> None:
    plan = PLAN.replace(prefill_replicas=1, decode_replicas=1, replicas=2)
    requests = poisson(200, rate=3.0)
    fast, slow = (simulated(fake(token=1e-5), plan, requests, Slo(), rate) for rate in (1e12, 2e6))
    assert slow.tpot_p50_s != fast.tpot_p50_s or slow.ttft_p50_s != fast.ttft_p50_s


def test_links_of_machines() -> None:
    assert link_of(cluster("2x h100-sxm")) == pytest.approx(450e9)  # NVLink
    assert link_of(cluster("l4")) == pytest.approx(31.5e9)  # PCIe 4.0 x16
    assert link_of(cluster("2x 8x l40s over 4x ib-ndr")) == pytest.approx(4 * 50e9 / 8)  # four ports for eight
