"""Claims about planners of serving: what they are made of, and that their figures are of the code."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from foretell.claims import claims
from foretell.claims.plan import bca, melange

DATA = Path(os.environ.get("FORETELL_DATA") or "../shared/data") / "azure-llm-2023"

# What their authors claim, whatever came of it.
HEADLINES = (
    ("melange", "77 %", "33 %", "51 %", "99.5 %"),
    ("bca", "remains memory-bound", "minimal impact on throughput", "33.8 %", "12.8 %"),
)


@pytest.mark.parametrize(("system", "words"), [(s, w) for s, *w in HEADLINES], ids=[h[0] for h in HEADLINES])
def test_the_authors_figures_are_in_the_ledger(system: str, words: list[str]) -> None:
    found = claims(system)
    texts = " ".join(f"{claim.title} {claim.claimed.text}" for claim in found)
    assert [word for word in words if word not in texts] == []
    assert all(claim.note and claim.how == "modelled" for claim in found)
    assert all(claim.obtained is not None for claim in found)


def test_the_measured_gains_are_those_claimed() -> None:
    for model, (one, several) in bca.MEASURED.items():
        (claim,) = claims(f"bca/replication-{model.replace('.', '-')}")
        assert claim.claimed.value == pytest.approx(several / one - 1, abs=5e-4)


def test_replication_is_run_anew() -> None:
    (claim,) = claims("bca/replication-opt-1-3b")
    assert claim.run is not None
    found = claim.run()
    # The gain is of the two throughputs that it names, and no larger than two replicas of as fast a replica could have.
    one, two = found.details["1 replica, batch 768: tokens/s"], found.details["2 replicas, batch 256: tokens/s"]
    assert found.value == pytest.approx(float(two) / float(one) - 1, abs=1e-4)


@pytest.mark.skipif(not DATA.is_dir(), reason="the public traces are not here (FORETELL_DATA)")
def test_the_workloads_have_the_sizes_they_say() -> None:
    short, long, mixed = (melange.workload(kind) for kind in ("short", "long", "mixed"))
    assert short.input_tokens.max() <= 1024 < long.input_tokens.min()
    assert np.mean(mixed.input_tokens <= 1024) == pytest.approx(0.8)
    assert (long.input_tokens + long.output_tokens).max() <= melange.CONTEXT
