"""`Batch`: what engine iterations work on, as columns: enough to cost each, whatever the requests behind it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Iterations of one engine rank, columns (iterations,).

    `decode_seqs` sequences get one more token each and attend to `decode_tokens` cached ones in all. `prefill_tokens`
    new prompt tokens of `prefill_seqs` sequences (chunks of prompts count as they are run) attend to `prefill_pairs`
    query-key pairs in all, causally (a whole prompt of n tokens has n·(n + 1)/2; a chunk of q behind c cached ones
    q·c + q·(q + 1)/2), and read `prefill_cached` cached tokens. `sampled` logits rows are computed: every decoding
    sequence and every prompt that ends in this iteration. `rank_tokens` are what a data-parallel rank of the replica
    works on in the same iteration, the mean of all: experts get the tokens of every rank.
    """

    decode_seqs: Floats
    decode_tokens: Floats
    prefill_seqs: Floats
    prefill_tokens: Floats
    prefill_pairs: Floats
    prefill_cached: Floats
    sampled: Floats
    rank_tokens: Floats

    @staticmethod
    def of(
        *,
        decode_seqs: npt.ArrayLike = 0.0,
        decode_tokens: npt.ArrayLike = 0.0,
        prefill_seqs: npt.ArrayLike = 0.0,
        prefill_tokens: npt.ArrayLike = 0.0,
        prefill_pairs: npt.ArrayLike | None = None,
        prefill_cached: npt.ArrayLike = 0.0,
        sampled: npt.ArrayLike | None = None,
        rank_tokens: npt.ArrayLike | None = None,
    ) -> Batch:
        """Columns that broadcast; by default pairs of whole prompts of equal length, logits of all sequences, and ranks
        that all work on as much.

        >>> Batch.of(prefill_seqs=2, prefill_tokens=8).prefill_pairs.tolist()  # two prompts of four tokens
        [20.0]
        """
        seqs, tokens = np.asarray(prefill_seqs, dtype=np.float64), np.asarray(prefill_tokens, dtype=np.float64)
        if prefill_pairs is None:
            prefill_pairs = tokens * (tokens / np.maximum(seqs, 1.0) + 1.0) / 2.0
        if sampled is None:
            sampled = np.asarray(decode_seqs, dtype=np.float64) + seqs
        if rank_tokens is None:
            rank_tokens = np.asarray(decode_seqs, dtype=np.float64) + tokens
        given = (decode_seqs, decode_tokens, seqs, tokens, prefill_pairs, prefill_cached, sampled, rank_tokens)
        columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(c, dtype=np.float64)) for c in given))
        return Batch(*columns)

    def __len__(self) -> int:
        return len(self.decode_seqs)

    @property
    def tokens(self) -> Floats:
        """Rows that go through the layers."""
        return self.decode_seqs + self.prefill_tokens

    def take(self, rows: npt.ArrayLike) -> Batch:
        """Some of the iterations."""
        index = np.asarray(rows)
        return Batch(*(getattr(self, f.name)[index] for f in fields(self)))
