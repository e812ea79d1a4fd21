"""vLLM V1: one token budget for all, decoding sequences first, prompts cut to what is left of it."""

from __future__ import annotations

from foretell.simulate.serving.engine.rank import SCHEDULERS, Rank
from foretell.simulate.serving.engine.version import since

SOURCE = "vLLM 0.8-0.20, vllm/v1/core/sched/scheduler.py"
#: From when on a prompt comes in only if blocks for all of it are free, not just for its first chunk: vLLM's pull
#: request 37307 of March 2026 (scheduler_reserve_full_isl, on by default).
WHOLE_PROMPTS = (0, 19)


def make_room(rank: Rank) -> bool:
    """Preempt the running sequences admitted last until the others' blocks for this iteration are free."""
    preempted = False
    while True:
        need = rank.growth()
        part = rank.partial
        if part is not None:
            left = rank.plan.max_num_batched_tokens - rank.rows
            need += rank.chunk_blocks(part, min(left, part.prompt - part.computed))
        if need <= rank.blocks.free:
            return preempted
        rank.preempt(rank.running[next(reversed(rank.running))])
        preempted = True


def mixed(rank: Rank, *, reserve: bool) -> None:
    """Decoding sequences, the prompt that is not through, then waiting ones in order while budget and blocks last."""
    preempted = make_room(rank)
    budget = rank.plan.max_num_batched_tokens - rank.rows
    rank.decode_all()
    part = rank.partial
    if part is not None and budget > 0:
        chunk = min(budget, part.prompt - part.computed)
        rank.prefill(part, chunk)
        budget -= chunk
    if preempted:
        rank.hold = 1
        return
    while rank.waiting and budget > 0:
        # Where the first in line cannot come in nobody behind it can, and while others only decode it stays so: blocks
        # and budget do not grow before one of them ends.
        rank.deaf = True
        if len(rank.running) >= rank.plan.max_num_seqs:
            return
        seq = rank.waiting[0]
        took = rank.admit(seq, budget, whole=not rank.plan.chunked_prefill, reserve=reserve)
        if not took and not seq.loading:
            return
        rank.deaf = False
        budget -= took


@SCHEDULERS.add("vllm", source=SOURCE)
def vllm(rank: Rank) -> None:
    """Continuous batching with a token budget and chunked prompts; the last admitted is preempted."""
    mixed(rank, reserve=since(rank.plan.version, WHOLE_PROMPTS))
