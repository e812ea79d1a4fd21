"""`steady`: the iteration that an engine with work waiting settles at, which a pipeline is searched for."""

from __future__ import annotations

from typing import Protocol

from foretell.simulate.serving.batch import Batch
from foretell.simulate.serving.plan import ServingPlan

__all__ = ["Planned", "steady"]


class Planned(Protocol):
    """What `steady` needs of `foretell.simulate.serving.iteration.Iterations`."""

    @property
    def plan(self) -> ServingPlan:
        """What the engine is told."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Cached tokens that one rank holds."""
        ...


def steady(iterations: Planned, prompt: float, answer: float) -> Batch:
    """The batch in which as many prompts of `prompt` tokens begin as answers of `answer` tokens end.

    d sequences decode, and d · prompt / answer prompt tokens join them; together they fill the budget of tokens, unless
    the sequences allowed or the cache run out.
    """
    plan = iterations.plan
    sequences = min(
        plan.max_num_batched_tokens * answer / (prompt + answer),
        plan.max_num_seqs,
        iterations.kv_capacity_tokens / (prompt + answer / 2.0),
    )
    fresh = sequences * prompt / answer
    return Batch.of(
        decode_seqs=sequences, decode_tokens=sequences * (prompt + answer / 2.0), prefill_seqs=fresh / prompt,
        prefill_tokens=fresh, prefill_pairs=fresh * (prompt + 1.0) / 2.0, sampled=sequences + fresh / prompt,
    )  # fmt: skip
