"""AdaPipe: recomputation and stages of a pipeline, chosen together."""

from __future__ import annotations

import math

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Gain

SYSTEM = "adapipe"
CLUSTER = "8x dgx-a100"
#: Model, batch in sequences, tokens of a sequence.
CASES = (
    *(("gpt-3-175b", batch, tokens) for batch, tokens in ((64, 4096), (64, 8192), (32, 16384))),
    *(("llama-2-70b", batch, tokens) for batch, tokens in ((64, 4096), (64, 8192), (64, 16384))),
)
#: Tensor, pipeline and data parallelism.
DEGREES = ((8, 8, 1), (4, 8, 2), (4, 16, 1), (2, 16, 2), (2, 32, 1))


def _source(place: str) -> Source:
    return Source(
        "Sun, Cao, Wang, Feng, Chen, Wang, Chen: AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation"
        " and Partitioning",
        2024,
        "ASPLOS",
        place,
    )


def _fixed(layers, plan, room, keep: str) -> float:  # type: ignore[no-untyped-def]
    from foretell.errors import InfeasibleError
    from foretell.plan.training.partition import even

    try:
        return even(
            layers, stages=plan.pp, micro_batches=plan.micro_batches, memory_bytes=room, keep=keep, ends=True
        ).time_s
    except InfeasibleError:
        return math.inf


def _speedup() -> Obtained:
    """How much faster the chosen partition is than equal stages that keep all or recompute all, whichever is faster of
    those that fit (share)."""
    from foretell.errors import InfeasibleError
    from foretell.hardware import cluster
    from foretell.plan.training.partition import partition
    from foretell.plan.training.units import model_layers
    from foretell.simulate.training import TrainingPlan
    from foretell.workload import llm

    on = cluster(CLUSTER)
    details: dict[str, float | str] = {}
    best, gains, only = 0.0, [], 0
    for name, batch, tokens in CASES:
        tried: dict[str, list[float]] = {"chosen": [], "fixed": []}
        for tp, pp, dp in DEGREES:
            plan = TrainingPlan(batch, tokens, tp=tp, pp=pp, dp=dp)
            layers, room = model_layers(llm.config(name), plan, on)
            try:
                found = partition(layers, stages=pp, micro_batches=plan.micro_batches, memory_bytes=room).time_s
            except InfeasibleError:
                continue
            fixed = min(_fixed(layers, plan, room, keep) for keep in ("all", "none"))
            tried["chosen"].append(found)
            tried["fixed"].append(fixed)
            if math.isinf(fixed):
                only += 1
                continue
            gains.append(fixed / found - 1)
            details[f"{name}, {tokens} tokens, tp{tp} pp{pp} dp{dp}"] = round(gains[-1], 4)
            best = max(best, gains[-1])
        details[f"{name}, {tokens} tokens, each at its best degrees"] = round(
            min(tried["fixed"]) / min(tried["chosen"]) - 1, 4
        )
    details["mean"] = round(sum(gains) / len(gains), 4)
    details["settings that only the chosen partition fits"] = only
    return Obtained(f"up to {best:.1%} faster, {sum(gains) / len(gains):.1%} on average", best, details)


CLAIMS = (
    Claim(
        id="adapipe/speedup-nvidia",
        system=SYSTEM,
        title="Adaptive recomputation and partitioning trains faster than equal stages",
        source=_source("abstract"),
        metric="speed-up less one",
        claimed=Claimed("up to 1.32×", 0.32),
        setting="GPT-3 175B and Llama 2 70B, 4,096 to 16,384 tokens, on 64 A100 80 GB, with the same degrees of tensor,"
        " pipeline and data parallelism; against the faster of keeping all and recomputing all that fits",
        rule=Gain(),
        how="modelled",
        run=_speedup,
        note="The abstract does not name the cluster, the sequences or the degrees: these are ours. Times of the 1F1B"
        " model of the planner, operators from the cost model. Where each side may choose its degrees, the gain is 0 to"
        " 20 %: with degrees at which all activations fit, nothing is left to gain.",
    ),
    Claim(
        id="adapipe/speedup-ascend",
        system=SYSTEM,
        title="Adaptive recomputation and partitioning trains faster on Ascend NPUs",
        source=_source("abstract"),
        metric="speed-up less one",
        claimed=Claimed("up to 1.22×", 0.22),
        setting="the same models on a cluster of Ascend NPUs",
        rule=Gain(),
        note="The device catalogue has no Ascend NPU.",
    ),
)
