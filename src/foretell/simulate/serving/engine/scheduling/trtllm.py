"""TensorRT-LLM's in-flight batching, with its two capacity policies."""

from __future__ import annotations

from foretell.simulate.serving.engine.rank import SCHEDULERS, Rank
from foretell.simulate.serving.engine.scheduling.vllm import mixed
from foretell.simulate.serving.engine.sequence import Seq

SOURCE = "TensorRT-LLM 0.17-1.1, CapacitySchedulerPolicy and MicroBatchScheduler"


def full(rank: Rank, seq: Seq) -> int:
    """Blocks a sequence holds when it ends; its last token is never cached."""
    return -(-(seq.inputs + seq.made + rank.left(seq) - 1) // rank.size)


@SCHEDULERS.add("trtllm", source=SOURCE)
def guaranteed_no_evict(rank: Rank) -> None:
    """In-flight batching that admits a request only if all running ones can end without eviction."""
    budget = rank.plan.max_num_batched_tokens - rank.rows
    rank.decode_all()
    part = rank.partial
    if part is not None and budget > 0:
        chunk = min(budget, part.prompt - part.computed)
        rank.prefill(part, chunk)
        budget -= chunk
    reserved = sum(peer.leaving for peer in rank.peers)
    if rank.waiting:
        held = (here for peer in rank.peers for here in (peer.running, peer.aside))
        reserved += sum(full(rank, seq) for here in held for seq in here.values())
    while rank.waiting and budget > 0:
        rank.deaf = True
        seq = rank.waiting[0]
        wanted = 0 if seq.loaded else full(rank, seq)  # counted among those aside
        if len(rank.running) >= rank.plan.max_num_seqs or reserved + wanted > rank.blocks.capacity:
            return
        took = rank.admit(seq, budget, whole=not rank.plan.chunked_prefill)
        if not took and not seq.loading:
            return
        rank.deaf = False
        reserved += wanted
        budget -= took


@SCHEDULERS.add("trtllm-max-utilisation", source=SOURCE)
def max_utilisation(rank: Rank) -> None:
    """In-flight batching that admits what fits now and evicts the last admitted when blocks run out."""
    mixed(rank, reserve=True)
