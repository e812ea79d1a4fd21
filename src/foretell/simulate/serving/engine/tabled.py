"""`Tabled`: iterations that only decode, read from a table that fills as it is asked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.simulate.serving.batch import Batch
from foretell.simulate.serving.engine.replica import Costs

Floats = npt.NDArray[np.float64]

__all__ = ["Tabled"]

#: Knots of the mean length of a cache: eight an octave, beyond which a straight line is within the rounding of tiles.
_KNOTS = np.concatenate(((0.0,), 2.0 ** np.arange(0.0, 24.01, 0.125)))


class Tabled:
    """Costs like those of `costs`, where iterations that only decode are interpolated between lengths of the cache.

    For each number of sequences the time is asked for at knots of their mean length, an eighth of an octave apart, and
    taken as straight between them: what grows with the length (reading the cache) is. Batches with prompts, and those
    of data-parallel ranks that work on different numbers of tokens, are asked for as they are.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._tables: dict[float, Floats] = {}

    @property
    def kv_capacity_tokens(self) -> int:
        """As `costs` has it."""
        return self._costs.kv_capacity_tokens

    @property
    def kv_bytes_per_token(self) -> float:
        """As `costs` has it."""
        return self._costs.kv_bytes_per_token

    def time_s(self, batch: Batch) -> Floats:
        """Seconds of each iteration (iterations,)."""
        seqs = batch.decode_seqs
        if batch.prefill_seqs.any() or (batch.rank_tokens != seqs).any():
            return self._costs.time_s(batch)
        first = float(seqs[0])
        if len(seqs) == 1 or (seqs == first).all():
            return self._read(first, batch.decode_tokens)
        times = np.empty(len(seqs))
        for count in np.unique(seqs).tolist():
            rows = seqs == count
            times[rows] = self._read(count, batch.decode_tokens[rows])
        return times

    def _read(self, count: float, tokens: Floats) -> Floats:
        table = self._tables.get(count)
        if table is None:
            lengths = _KNOTS * max(count, 1.0)
            table = self._costs.time_s(Batch.of(decode_seqs=count, decode_tokens=lengths))
            self._tables[count] = table
        return np.interp(tokens, _KNOTS * max(count, 1.0), table)
