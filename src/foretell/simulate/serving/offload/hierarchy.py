"""`Hierarchy`: the tiers one engine loads KV caches from and stores them to, and what a request gets of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.simulate.serving.given import instance, number, whole
from foretell.simulate.serving.offload.tier import Chunk, Tier
from foretell.simulate.serving.offload.timing import pipelined_s

Floats = npt.NDArray[np.float64]
#: Seconds to compute new tokens behind cached ones: (cached, new) columns to a column.
Prefill = Callable[[Floats, Floats], Floats]

__all__ = ["Admission", "EngineTier", "Hierarchy", "Prefill"]

#: LMCache's default: caches are kept and moved in chunks of so many tokens.
CHUNK_TOKENS = 256
#: Bytes of one cached token that are none.
_MOST_BYTES = 1e12


@dataclass(frozen=True, slots=True)
class Admission:
    """What a prompt gets: `tokens` loaded in `load_s`, the rest computed; `ready_s` until its first token, both ways
    overlapped, and `compute_s` had nothing been loaded. `found` is what could have been loaded."""

    tokens: int
    found: int
    load_s: float
    ready_s: float
    compute_s: float


class Hierarchy:
    """Tiers of one engine, the fastest first; tiers may be shared with other engines.

    A prefix is cut into chunks of `chunk_tokens`, a last part short of one is never kept. A chunk is useful only with
    all before it. ``write="through"`` writes a chunk to every tier at once (LMCache's way), ``"back"`` to the first,
    from which it moves down when it gives way. What a slower tier is found to have is copied to the faster ones.

    With `prefill_s` nothing is loaded that is faster computed: the beginning of what is found that makes a prompt ready
    first is loaded, or, without `partial`, all of it or nothing.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        bytes_per_token: float,
        *,
        layers: int = 1,
        chunk_tokens: int = CHUNK_TOKENS,
        write: str = "through",
        prefill_s: Prefill | None = None,
        partial: bool = True,
    ) -> None:
        if not tiers:
            raise InputError("no tier", "offload", "give one at least")
        for tier in tiers:
            instance(tier, Tier, "a tier", "offload", "Tier(…)")
        if len({id(tier) for tier in tiers}) < len(tiers):
            raise InputError("a tier is given twice", "offload")
        number(bytes_per_token, "bytes_per_token", "offload", above=True, most=_MOST_BYTES)
        whole(chunk_tokens, "chunk_tokens", "offload", least=1)
        whole(layers, "layers", "offload", least=1)
        if write not in ("through", "back"):
            raise InputError(f"write {write!r}", "offload", "write through or back")
        self.tiers = tuple(tiers)
        self.bytes_per_token = bytes_per_token
        self.layers = layers
        self.chunk_tokens = chunk_tokens
        self.write = write
        self.prefill_s = prefill_s
        self.partial = partial
        self.asked_tokens = 0
        self.hit_tokens = dict.fromkeys((tier.name for tier in tiers), 0)

    @property
    def chunk_bytes(self) -> float:
        """Bytes of one chunk, uncompressed."""
        return self.chunk_tokens * self.bytes_per_token

    def where(self, prefix: int, prefix_tokens: int, now: float = 0.0) -> list[Tier]:
        """The fastest tier that has each chunk of a prefix, up to the first that none has."""
        found = []
        for place in range(prefix_tokens // self.chunk_tokens):
            tier = next((tier for tier in self.tiers if tier.has((prefix, place), now)), None)
            if tier is None:
                break
            found.append(tier)
        return found

    def lookup(self, prefix: int, prefix_tokens: int, now: float) -> tuple[int, float]:
        """Tokens of a prefix to load, and seconds until they are there; the tiers' links are taken for it.

        With `prefill_s` no more is loaded than is worth it: nothing where computing the prefix is faster.
        """
        admission = self.admit(prefix, prefix_tokens, prefix_tokens, now)
        return admission.tokens, admission.load_s

    def admit(self, prefix: int, prefix_tokens: int, input_tokens: int, now: float) -> Admission:
        """As `lookup`, for a prompt of `input_tokens`, with when it is ready: loading and computing overlap by layer.

        Without `prefill_s` everything found is loaded, and computing takes no time.
        """
        found = self.where(prefix, min(prefix_tokens, input_tokens), now)
        self.asked_tokens += prefix_tokens
        chunks = np.arange(len(found) + 1)
        cached = chunks * float(self.chunk_tokens)
        loads = self._loads(found, now)
        compute = np.zeros(len(chunks))
        if self.prefill_s is not None:
            # The last token is always computed: its logits are wanted.
            new = np.maximum(float(input_tokens) - cached, 1.0)
            compute = np.asarray(self.prefill_s(float(input_tokens) - new, new), dtype=np.float64)
            ready = np.array([pipelined_s(a, b, self.layers) for a, b in zip(loads, compute, strict=True)])
            best = int(np.argmin(ready)) if self.partial else int(ready[-1] < ready[0]) * len(found)
        else:
            ready, best = np.array(loads), len(found)
        self._take(prefix, found[:best], now)
        return Admission(
            min(best * self.chunk_tokens, input_tokens), len(found) * self.chunk_tokens, loads[best],
            float(ready[best]), float(compute[0]),
        )  # fmt: skip

    def _loads(self, found: Sequence[Tier], now: float) -> list[float]:
        """Seconds to load the first 0, 1, 2 … chunks: tiers send side by side, each its own in turn."""
        counts = dict.fromkeys(self.tiers, 0)
        slowest = [0.0]
        each = dict.fromkeys(self.tiers, 0.0)
        for tier in found:
            counts[tier] += 1
            each[tier] = tier.load_s(counts[tier], counts[tier] * self.chunk_bytes, now)
            slowest.append(max(each.values()))
        return slowest

    def _take(self, prefix: int, found: Sequence[Tier], now: float) -> None:
        for tier in self.tiers:
            if count := sum(other is tier for other in found):
                tier.read(count, count * self.chunk_bytes, now)
                self.hit_tokens[tier.name] += count * self.chunk_tokens
        # From the last to the first, so that what is given up leaves a beginning.
        for place in range(len(found) - 1, -1, -1):
            for level in range(self.tiers.index(found[place]) + 1):
                self._put((prefix, place), level, now)

    def store(self, prefix: int, tokens: int, now: float) -> int:
        """Keep the first `tokens` tokens of a prefix, in whole chunks; returns how many. The caller never waits."""
        chunks = tokens // self.chunk_tokens
        for place in range(chunks - 1, -1, -1):
            for level in range(len(self.tiers) if self.write == "through" else 1):
                self._put((prefix, place), level, now)
        return chunks * self.chunk_tokens

    def _put(self, chunk: Chunk, level: int, now: float) -> None:
        for gone, _ in self.tiers[level].put(chunk, self.chunk_bytes, now):
            if self.write == "back" and level + 1 < len(self.tiers):
                self._put(gone, level + 1, now)

    @property
    def hit_rate(self) -> float:
        """Share of the prefix tokens asked for that were loaded."""
        return sum(self.hit_tokens.values()) / self.asked_tokens if self.asked_tokens else 0.0

    def engine_tier(self, block_tokens: int, *, eager: bool = True) -> EngineTier:
        """These tiers as the engine simulator asks them: block by block, as they are computed and found again."""
        return EngineTier(self, block_tokens, eager)


class EngineTier:
    """A hierarchy behind an engine's paged blocks: `put` a block, whether it `has` one, `load_s` of some.

    Keys are (prefix, place) of a block and longer ones of a preempted sequence. Blocks are kept one by one, and loaded
    in transfers of a chunk of them; with ``chunk_tokens`` of a block they go one by one, as engines' own offloading
    moves them. Loads queue behind each other on a tier's link; writes are taken to be done before anything is asked
    for. An `eager` tier gets blocks of prefixes as they are computed (LMCache's way, so that other replicas find them),
    one that is not gets them as they are evicted.
    """

    def __init__(self, hierarchy: Hierarchy, block_tokens: int, eager: bool = True) -> None:
        self.hierarchy = hierarchy
        self.eager = eager
        self.block_bytes = block_tokens * hierarchy.bytes_per_token
        self.blocks_per_chunk = max(1, hierarchy.chunk_tokens // block_tokens)

    def _chunk(self, key: tuple[int, ...]) -> Chunk:
        # Sequences' own keys have three parts; they are told from prefixes by a negative number.
        return (key[0], key[1]) if len(key) == 2 else (-1 - key[0], key[1])

    def put(self, key: tuple[int, ...]) -> None:
        """A block with this content is there to be kept."""
        self._put(self._chunk(key), 0)

    def _put(self, chunk: Chunk, level: int) -> None:
        tiers = self.hierarchy.tiers
        waiting = [(chunk, level)]
        while waiting:
            chunk, level = waiting.pop()
            gone = tiers[level].put(chunk, self.block_bytes, 0.0)
            if level + 1 < len(tiers):
                if self.hierarchy.write == "back":
                    waiting += [(other, level + 1) for other, _ in gone]
                else:
                    waiting.append((chunk, level + 1))

    def has(self, key: tuple[int, ...]) -> bool:
        """Whether some tier has it; asking counts as use."""
        chunk = self._chunk(key)
        tier = next((tier for tier in self.hierarchy.tiers if chunk in tier), None)
        if tier is None:
            return False
        tier.touch(chunk)
        return True

    def load_s(self, keys: Sequence[tuple[int, ...]], now_s: float = 0.0, reader: int = 0) -> float:
        """Seconds until these blocks are with an engine: each tier sends its own, side by side, behind what it sends.

        They are copied to the tiers that are faster.
        """
        hierarchy, tiers, slowest = self.hierarchy, self.hierarchy.tiers, 0.0
        chunks = [self._chunk(key) for key in keys]
        levels = [next(level for level, tier in enumerate(tiers) if chunk in tier) for chunk in chunks]
        for level, tier in enumerate(tiers):
            if count := levels.count(level):
                nbytes = count * self.block_bytes
                slowest = max(slowest, tier.read(-(-count // self.blocks_per_chunk), nbytes, now_s, reader))
                hierarchy.hit_tokens[tier.name] += round(nbytes / hierarchy.bytes_per_token)
        for chunk, found in zip(reversed(chunks), reversed(levels), strict=True):
            if found:
                self._put(chunk, 0)
        return slowest
