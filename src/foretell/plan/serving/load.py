"""`Load`: what requests ask of a server, in groups of like size (buckets) or all as one mixture."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.simulate.serving import Requests

__all__ = ["INPUT_EDGES", "OUTPUT_EDGES", "Load", "bucket_of", "buckets", "mixture"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Upper ends of the sizes of one bucket, in tokens, inclusive; a last bucket takes what is longer.
INPUT_EDGES = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
OUTPUT_EDGES = (32, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Load:
    """Groups of requests, columns (groups,), each described by what its requests ask for on average.

    `rate` requests a second arrive with `input_tokens` and `output_tokens` each. `pairs` are the query-key pairs of a
    prompt, `context` the cached tokens that a decoding sequence attends to, averaged over its life and over sequences
    as they are met in a batch (long outputs are met more often), and `largest` the most tokens one request comes to.
    """

    rate: Floats
    input_tokens: Floats
    output_tokens: Floats
    pairs: Floats
    context: Floats
    largest: Floats

    def __len__(self) -> int:
        return len(self.rate)

    def take(self, rows: npt.ArrayLike) -> Load:
        """Some of the groups."""
        index = np.asarray(rows)
        return Load(*(getattr(self, f.name)[index] for f in fields(self)))

    def mixed(self, rows: npt.ArrayLike | None = None) -> Load:
        """Some of the groups (all, unless given) as one."""
        some = self if rows is None else self.take(rows)
        rate = some.rate.sum(keepdims=True)

        def mean(values: Floats) -> Floats:
            return np.asarray((some.rate * values).sum(keepdims=True) / rate, dtype=np.float64)

        outputs = mean(some.output_tokens)
        context = mean(some.output_tokens * some.context) / outputs
        largest = some.largest.max(keepdims=True)
        return Load(rate, mean(some.input_tokens), outputs, mean(some.pairs), context, largest)

    def name(self, group: int) -> str:
        """A group in words: its mean sizes."""
        return f"{self.input_tokens[group]:,.0f} tokens in, {self.output_tokens[group]:,.0f} out"

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of all groups."""
        return float((self.rate * self.output_tokens).sum())

    @staticmethod
    def of(input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, rate: npt.ArrayLike = 1.0) -> Load:
        """Groups whose requests are all of one size.

        >>> Load.of(100, 20).context.tolist(), Load.of(4, 1).pairs.tolist()
        ([110.0], [10.0])
        """
        inputs, outputs, rates = (
            np.array(c, dtype=np.float64)
            for c in np.broadcast_arrays(*map(np.atleast_1d, (input_tokens, output_tokens, rate)))
        )
        return Load(rates, inputs, outputs, inputs * (inputs + 1) / 2, inputs + outputs / 2, inputs + outputs)


def duration_s(requests: Requests) -> float:
    """Seconds that requests arrive over: the mean gap counts once more after the last of them."""
    count = len(requests)
    span = float(requests.arrival_s[-1] - requests.arrival_s[0])
    if count < 2:
        raise InputError("one request has no rate", "requests", "give more of them, or --rate N")
    if span <= 0:
        raise InputError(
            "all requests arrive at once, so they have no rate", "requests", "give a trace over time, or --rate N"
        )
    return span * count / (count - 1)


def bucket_of(requests: Requests) -> Ints:
    """The cell of the grid of sizes that each request is in, (requests,)."""
    rows = np.searchsorted(INPUT_EDGES, requests.input_tokens)
    columns = np.searchsorted(OUTPUT_EDGES, requests.output_tokens)
    return np.asarray(rows * (len(OUTPUT_EDGES) + 1) + columns, dtype=np.int64)


def buckets(requests: Requests, rate: float | None = None) -> tuple[Load, Ints]:
    """Requests by size, and the group of each; `rate` a second of all, or as the arrivals have it.

    Every request is in a bucket: empty ones are left out.
    """
    cells, group = np.unique(bucket_of(requests), return_inverse=True)
    total = len(requests) / duration_s(requests) if rate is None else rate
    return _means(requests, np.asarray(group, dtype=np.int64), len(cells), total), np.asarray(group, dtype=np.int64)


def mixture(requests: Requests, rate: float | None = None) -> Load:
    """All requests as one group."""
    total = len(requests) / duration_s(requests) if rate is None else rate
    return _means(requests, np.zeros(len(requests), dtype=np.int64), 1, total)


def _means(requests: Requests, group: Ints, groups: int, rate: float) -> Load:
    count = np.bincount(group, minlength=groups)
    inputs, outputs = requests.input_tokens.astype(np.float64), requests.output_tokens.astype(np.float64)

    def mean(values: Floats) -> Floats:
        return np.asarray(np.bincount(group, weights=values, minlength=groups) / count, dtype=np.float64)

    largest = np.zeros(groups)
    np.maximum.at(largest, group, inputs + outputs)
    return Load(
        rate * count / len(requests),
        mean(inputs),
        mean(outputs),
        mean(inputs * (inputs + 1) / 2),
        mean(outputs * (inputs + outputs / 2)) / mean(outputs),
        largest,
    )
