"""Throughput against speed: tokens/s of a GPU against tokens/s of a user, for every plan and batch, and their front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.plan.serving.load import Load
from foretell.plan.serving.steady import Iterations, curve
from foretell.plan.training.pareto import front as undominated
from foretell.simulate.serving import ServingPlan

__all__ = ["Point", "front", "points"]

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Point:
    """A plan kept at one batch: output tokens a second of one GPU and of one user."""

    gpu: str
    plan: ServingPlan
    batch: float
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    ttft_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "gpu": self.gpu, "plan": self.plan.to_dict(), "batch": self.batch,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu, "tokens_per_s_per_user": self.tokens_per_s_per_user,
            "ttft_s": self.ttft_s,
        }  # fmt: skip


def points(
    gpu: str, plan: ServingPlan, devices: int, iterations: Iterations, load: Load, link_bytes_per_s: float = np.inf
) -> list[Point]:
    """A plan at batches of powers of two, as far as its KV cache and settings reach; no latency limit."""
    sizes = [b for b in _BATCHES if b * plan.pp <= plan.max_num_seqs]
    found, _ = curve(iterations, plan, load, sizes, link_bytes_per_s=link_bytes_per_s)
    return [
        Point(gpu, plan, float(b), float(rate * load.output_tokens[0] / devices), 1.0 / float(tpot), float(ttft))
        for b, rate, tpot, ttft in zip(sizes, found.rate[0], found.tpot_s[0], found.ttft_s[0], strict=True)
        if rate > 0
    ]


def front(found: Sequence[Point]) -> list[Point]:
    """Points that no other equals or betters on both axes, fastest for the user first, at least 2 % apart."""
    if not found:
        return []
    rows = undominated(
        np.array([[1.0 / p.tokens_per_s_per_user, 1.0 / p.tokens_per_s_per_gpu] for p in found]), step=0.02
    )
    return [found[i] for i in rows]
