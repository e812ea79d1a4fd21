"""Claims about planners of training: what they are made of."""

import os
from pathlib import Path

import numpy as np
import pytest

from foretell.claims import claims
from foretell.claims.gpt import gpt, step_flops
from foretell.claims.plan import megatron_ptdp, pipette, rail_only
from foretell.plan.network import Wires
from foretell.plan.training.placement import Latency, Work

DATA = Path(os.environ.get("FORETELL_DATA") or "../shared/data") / "nccl-tests-cluster"

# What their abstracts claim in numbers, whatever came of it.
HEADLINES = (
    ("adapipe", "1.32×", "1.22×"),
    ("rail-only", "75 %", "not compromised"),
    ("megatron-ptdp", "10 %", "502 petaFLOP/s", "52 % of peak"),
    ("frontier-trillion-training", "38.38 %", "36.14 %", "31.96 %", "100 %", "89 %", "87 %", "120 million exaFLOP"),
    ("pipette", "significant speed-up", "run out of memory"),
)


@pytest.mark.parametrize(("system", "words"), [(s, w) for s, *w in HEADLINES], ids=[h[0] for h in HEADLINES])
def test_the_abstracts_figures_are_in_the_ledger(system: str, words: list[str]) -> None:
    texts = " ".join(f"{claim.title} {claim.claimed.text}" for claim in claims(system))
    assert [word for word in words if word not in texts] == []
    unexplained = [c.id for c in claims(system) if c.verdict in ("not reproduced", "partly") and not c.note]
    assert unexplained == []


def test_the_models_have_the_sizes_and_the_arithmetic_that_the_paper_gives() -> None:
    """Table 1 of arXiv 2104.04473: billions of parameters, and petaFLOP/s from the step's FLOP."""
    billions = (1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0)
    for (heads, hidden, layers, *_), size in zip(megatron_ptdp.TABLE_1, billions, strict=True):
        assert gpt(layers, hidden, heads).parameters / 1e9 == pytest.approx(size, abs=0.06)
    # Equation 3 with its terms written out: four passes of 24 B s l h² + 4 B s² l h, and 6 B s h V of the logits.
    batch, s, layers, h, v = 64, 2048, 96, 12288, 51200
    by_hand = 4 * (24 * batch * s * layers * h**2 + 4 * batch * s**2 * layers * h) + 6 * batch * s * h * v
    assert step_flops(layers, h, batch) == pytest.approx(by_hand)


def test_a_uniform_all_to_all_has_the_overhead_of_the_closed_form() -> None:
    inside, port, domain, devices = 9.0, 1.0, 4, 64
    far = devices - domain
    clos = (domain - 1) / inside + far / port
    forwarded = far * (domain - 1) / domain / inside
    assert rail_only._uniform(Wires(inside, port), domain, devices) == pytest.approx(forwarded / clos)


def test_a_placement_is_judged_by_simulation() -> None:
    """Two stages by hand: m + p - 1 turns of f + b, and each message of the warm-up and ending in the open."""
    work = Work((1.0, 1.0), (2.0, 2.0), 1, 3.0, (0.0, 0.0))
    latency = Latency(work, np.full((2, 2), 6.0), block=1, per_node=1, data=1)
    assert pipette.simulated_s(work, latency, latency.default()) == pytest.approx(2 * 3.0 + 2 * 0.5)
    replicas = Latency(
        Work((1.0,), (2.0,), 4, 0.0, (6.0,)), np.full((2, 2), 6.0), block=1, per_node=1, data=2
    )  # fmt: skip
    assert pipette.simulated_s(replicas.work, replicas, replicas.default()) == pytest.approx(12.0 + 1.0)


@pytest.mark.skipif(not DATA.is_dir(), reason="public measurements of a cluster are not here ($FORETELL_DATA)")
def test_measured_links_differ_and_are_symmetric() -> None:
    links = pipette.bandwidths()
    assert links.shape == (16, 16)
    assert (links == links.T).all()
    assert 3e9 < links.min() < 0.5 * np.median(links)
    assert links.max() < 16e9
