"""Static batching: whole batches, padded, one after the other."""

from __future__ import annotations

from foretell.simulate.serving.engine.rank import SCHEDULERS, Rank


@SCHEDULERS.add("static", source="Orca (OSDI 2022), section 2: request-level scheduling")
def static(rank: Rank) -> None:
    """A batch of what waits, prompts padded to the longest, decoded until its last sequence is done."""
    if rank.running:
        rank.decode_all()
        rank.deaf = True
        return
    prompt = answer = count = 0
    free = rank.blocks.free
    share = min(free, rank.blocks.capacity // len(rank.peers))  # so that a pipeline's batches do not take turns
    for seq in rank.waiting:
        longest, most = max(prompt, seq.prompt), max(answer, seq.outputs)
        fits = (count + 1) * -(-(longest + most - 1) // rank.size) <= (share if count else free)
        if count == rank.plan.max_num_seqs or not fits:
            break
        prompt, answer, count = longest, most, count + 1
    if count:
        rank.pad(count, prompt, prompt + answer - 1)
