"""Prompts as chains of block hashes, put as `Requests` have it: an id of what a prompt begins with, and its length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foretell.units import format_count

Ints = npt.NDArray[np.int64]

__all__ = ["shared_prefixes"]


def shared_prefixes(chains: Sequence[Sequence[int]], lengths: Sequence[int], block: int) -> tuple[Ints, Ints, str]:
    """The prefix ids (from 1 on; 0: shared with nobody), their tokens, and what of the sharing that keeps, in words.

    A chain is the hashes of a prompt's blocks, each a hash of everything up to it, so that equal hashes mean equal
    beginnings; `lengths` are the prompts' tokens. A request gets one id, while chains form a tree: every path of it
    from the root along the branch that saves most is one id, and a request is on the path of its deepest block that
    another request has as well. What is lost is the part that two paths share, once for each path.

    >>> ids, tokens, _ = shared_prefixes([[1, 2], [1, 2, 3], [9]], [1024, 1500, 100], 512)
    >>> ids.tolist(), tokens.tolist()
    ([1, 1, 0], [1024, 1024, 0])
    """
    count = len(chains)
    times = Counter(block_hash for chain in chains for block_hash in chain)
    #: Blocks of each prompt that another one has too: a beginning of the chain.
    depth = np.array([sum(1 for _ in _while_shared(chain, times)) for chain in chains], dtype=np.int64)
    tips = [chain[d - 1] if d else None for chain, d in zip(chains, depth, strict=True)]
    at = {tip: int(d) for tip, d in zip(tips, depth, strict=True) if tip is not None}
    parent: dict[int, int | None] = {}
    for chain, d in zip(chains, depth, strict=True):
        if d and chain[d - 1] not in parent:
            parent[chain[d - 1]] = next((h for h in reversed(chain[: d - 1]) if h in at), None)
    # Deepest first: what a path through each tip saves, and the branch that saves most.
    own = Counter(tip for tip in tips if tip is not None)
    saved: dict[int, int] = {}
    best: dict[int | None, int] = {}
    for tip in sorted(at, key=lambda one: -at[one]):
        branch = best.get(tip)
        saved[tip] = own[tip] * at[tip] + (saved[branch] if branch is not None else 0)
        up = parent[tip]
        if up is not None and (up not in best or saved[tip] > saved[best[up]]):
            best[up] = tip
    path: dict[int, int] = {}
    for tip in sorted(at, key=lambda one: at[one]):
        up = parent[tip]
        path[tip] = path[up] if up is not None and best[up] == tip else len(path) + 1
    ids = np.array([0 if tip is None else path[tip] for tip in tips], dtype=np.int64)
    tokens = np.minimum(depth * block, np.asarray(lengths, dtype=np.int64))
    return ids, tokens, _kept(chains, lengths, block, ids, tokens) if count else ""


def _while_shared(chain: Sequence[int], times: Counter[int]) -> list[int]:
    for index, block_hash in enumerate(chain):
        if times[block_hash] < 2:
            return list(chain[:index])
    return list(chain)


def _kept(chains: Sequence[Sequence[int]], lengths: Sequence[int], block: int, ids: Ints, tokens: Ints) -> str:
    """What a cache without limit finds of the chains, and what it finds of the ids."""
    seen: set[int] = set()
    whole = 0
    for chain, length in zip(chains, lengths, strict=True):
        known = next((i for i, block_hash in enumerate(chain) if block_hash not in seen), len(chain))
        whole += min(known * block, length)
        seen.update(chain)
    longest: dict[int, int] = {}
    found = 0
    for one, length in zip(ids.tolist(), tokens.tolist(), strict=True):
        if one:
            found += min(longest.get(one, 0), length)
            longest[one] = max(longest.get(one, 0), length)
    total = sum(lengths)
    if not whole:
        return "no prompt begins as another does"
    return (
        f"{format_count(whole)} of {format_count(total)} input tokens begin as an earlier prompt does; one shared "
        f"beginning a request keeps {100.0 * found / whole:.0f} % of them"
    )
