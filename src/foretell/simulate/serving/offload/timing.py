"""How long moving a KV cache takes, what of it computing hides, and from which length on it beats computing anew."""

from __future__ import annotations

import math

from foretell.simulate.serving.given import number, whole

__all__ = ["break_even_tokens", "pipelined_s", "transfer_s"]


def transfer_s(nbytes: float, bytes_per_s: float, latency_s: float = 0.0, transfer_bytes: float = math.inf) -> float:
    """Seconds to move `nbytes` in transfers of up to `transfer_bytes`, one after the other.

    Each takes `latency_s` beside its bytes. This is why caches move in chunks of many tokens: LMCache's authors
    (arXiv 2510.09665) quote 4 GB/s at 64 KB, 13 GB/s at 256 KB and 49 GB/s from 16 MB on, which is 49 GB/s and 15 µs:

    >>> [round(n / transfer_s(n, 49e9, 15e-6) / 1e9, 1) for n in (64e3, 256e3, 16e6)]
    [3.9, 12.7, 46.8]
    """
    if nbytes <= 0.0:
        return 0.0
    return max(1, math.ceil(nbytes / transfer_bytes)) * latency_s + nbytes / bytes_per_s


def pipelined_s(load_s: float, compute_s: float, layers: int) -> float:
    """Seconds until both are done where a layer is computed once its part is loaded, and loading runs ahead.

    A layer's cache is a `layers`-th of the whole, and so is its computing. With one layer nothing overlaps.

    >>> pipelined_s(8.0, 4.0, 1), pipelined_s(8.0, 4.0, 4), pipelined_s(4.0, 8.0, 4)
    (12.0, 9.0, 9.0)
    """
    whole(layers, "layers", "offload", least=1)
    load, compute = load_s / layers, compute_s / layers
    return load + (layers - 1) * max(load, compute) + compute


def break_even_tokens(
    token_s: float, pair_s: float, bytes_per_token: float, bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """The length of a prefix from which on loading it beats computing it; inf where that never comes.

    Computing n tokens takes ``token_s · n + pair_s · n²``, loading them ``latency_s + n · bytes_per_token /
    bytes_per_s``. Where a token loads faster than it computes, only latency stands against loading; where it loads
    slower, attention among ever more tokens (`pair_s`) outweighs that in the end.

    >>> break_even_tokens(token_s=0.0, pair_s=1e-9, bytes_per_token=1e5, bytes_per_s=1e9)
    100000.0
    >>> break_even_tokens(token_s=1e-4, pair_s=0.0, bytes_per_token=1e5, bytes_per_s=5e8)
    inf
    """
    number(bytes_per_s, "bytes_per_s", "offload", above=True)
    gain = token_s - bytes_per_token / bytes_per_s
    # pair_s n² + gain n - latency_s = 0, by whichever form of its root does not cancel
    root = math.sqrt(gain * gain + 4.0 * pair_s * latency_s)
    if gain > 0.0:
        return 2.0 * latency_s / (gain + root)
    return (root - gain) / (2.0 * pair_s) if pair_s > 0.0 else math.inf
