"""SGLang: batches of prompts before batches of decoding sequences, admission by how long answers are expected to be."""

from __future__ import annotations

import numpy as np

from foretell.simulate.serving.engine.rank import SCHEDULERS, Rank, remaining
from foretell.simulate.serving.engine.sequence import Seq

SOURCE = "SGLang 0.4-0.5, managers/scheduler.py, schedule_policy.py (PrefillAdder), schedule_batch.py (retract_decode)"

#: SGLang's defaults: the share of what running requests may still generate that admission takes to be used, at first
#: and at least; how it falls a step; what it counts of one request's answer; steps for which a retraction makes room.
FIRST_RATIO = 0.7
LEAST_RATIO = 0.7 * 0.14
DECAY = (FIRST_RATIO - LEAST_RATIO) / 600
CLIP = 4096
RETRACT_STEPS = 20
#: Steps looked ahead for when the first waiting request may come in.
_AHEAD = np.arange(1, 257)


def ratio(rank: Rank, step: int) -> float:
    """The share at a step: it falls with every step since it was last set."""
    since = step - int(rank.memory.get("set_at", 0))
    return max(LEAST_RATIO, rank.memory.get("ratio", FIRST_RATIO) - DECAY * since)


def expected(rank: Rank) -> float:
    """Tokens that admission expects the decoding sequences to need still."""
    decoding = [seq for seq in rank.running.values() if seq.joined >= 0] if rank.memory.get("long") else []
    left = sum(min(seq.due - rank.step, CLIP) for seq in decoding) if decoding else remaining(rank)
    return ratio(rank, rank.step) * left


@SCHEDULERS.add("sglang", source=SOURCE)
def sglang(rank: Rank) -> None:
    """Prompts first, in chunks, as long as the answers expected of all fit; else decoding sequences."""
    _prompts(rank)
    if rank.chunks:
        return
    _retract(rank)
    rank.decode_all()
    while rank.waiting and rank.waiting[0].ready:  # sent here with its cache
        rank.deaf = True
        if len(rank.running) >= rank.plan.max_num_seqs or not rank.admit(rank.waiting[0], 1, whole=False):
            break
        rank.deaf = False
        rank.hold = 1  # the next in line is looked at in the next iteration
    if not rank.rows:
        rank.memory["ratio"], rank.memory["set_at"] = FIRST_RATIO, rank.step


def _prompts(rank: Rank) -> None:
    budget, size = rank.plan.max_num_batched_tokens, rank.size
    if rank.partial is None and not rank.waiting:
        return
    # Batches on their way through one pipeline take from the same blocks.
    room = rank.blocks.free * size - sum(expected(peer) for peer in rank.peers)
    room -= sum(_promised(peer, peer.partial) for peer in rank.peers if peer is not rank and peer.partial is not None)
    part = rank.partial
    if part is not None:
        chunk = min(budget, part.prompt - part.computed)
        if chunk < part.prompt - part.computed:
            chunk = max(chunk // size * size, 1)
        if rank.chunk_blocks(part, chunk) > rank.blocks.free:
            rank.preempt(part, last=True)
            return
        rank.prefill(part, chunk)
        budget -= chunk
        room -= chunk + (min(rank.left(part), CLIP) if part.computed == part.prompt else 0)
    while rank.waiting and budget > 0 and rank.partial is None and not rank.waiting[0].ready:
        rank.deaf = True
        if len(rank.running) >= rank.plan.max_num_seqs:
            return
        seq = rank.waiting[0]
        if seq.outputs > CLIP:
            rank.memory["long"] = 1.0
        # Blocks for the prompt are kept where its beginning was loaded.
        wanted = min(rank.left(seq), CLIP) + (0 if seq.loaded else seq.prompt - rank.known(seq))
        if wanted > room and any(peer.running for peer in rank.peers):
            rank.hold = 1 if rank.memory.get("long") else _steps_until(rank, wanted)
            return
        took = rank.admit(seq, budget, whole=not rank.plan.chunked_prefill, multiple=size)
        if not took and not seq.loading:
            return
        rank.deaf = False
        budget -= took
        room -= (wanted if rank.partial is None else took) + (seq.loaded if seq.loading else 0)


def _promised(rank: Rank, part: Seq) -> int:
    """Tokens that a prompt which is not through will still cache."""
    return part.prompt - part.computed + min(rank.left(part), CLIP)


def _steps_until(rank: Rank, wanted: int) -> int:
    """Steps for which the first waiting request stays out, as the expectation falls and blocks fill."""
    if not rank.rows:
        return 1
    size = rank.size
    phase = np.array([rank.growth(at) for at in range(1, size + 1)])
    laps, rest = np.divmod(_AHEAD, size)
    grown = laps * rank.rows + np.where(rest, phase[rest - 1], 0)
    since = rank.step - rank.memory.get("set_at", 0)
    share = np.maximum(LEAST_RATIO, rank.memory.get("ratio", FIRST_RATIO) - DECAY * (since + _AHEAD))
    room = (rank.blocks.free - grown) * size - share * (remaining(rank) - rank.rows * _AHEAD)
    opens = np.flatnonzero(wanted <= room)
    return int(_AHEAD[opens[0]]) if len(opens) else int(_AHEAD[-1])


def _retract(rank: Rank) -> None:
    """Where blocks lack, send back those with the fewest tokens made until there is room for some steps."""
    if rank.growth() <= rank.blocks.free:
        return
    order = sorted((s for s in rank.running.values() if s.joined >= 0), key=lambda s: (-rank.made(s), s.inputs, s.id))
    while len(order) > (not rank.shares):  # the last one has room, unless others hold blocks
        rank.preempt(order.pop(), last=True)
        if rank.blocks.free * rank.size >= len(order) * RETRACT_STEPS:
            break
    made, asked = sum(rank.made(seq) for seq in order), sum(seq.outputs for seq in order)
    rank.memory["ratio"] = min(1.0, (made + RETRACT_STEPS * len(order)) / (asked + 1))
    rank.memory["set_at"] = rank.step
    rank.hold = 1
