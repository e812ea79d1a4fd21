"""llama.cpp: all cells of the context allocated at the start, keys and values in formats of their own.

Cells are padded to 256. Sliding layers get ``pad(min(n_ctx, n_swa + n_ubatch), 256)`` cells a sequence since May
2025 (pull request 13194; `llama-kv-cache-iswa.cpp`), all cells before. MLA: keys and values of all heads until April
2025 (pull request 12801), then the latent as key and its first part once more as value, and since January 2026 (pull
request 19067) the latent alone. A version is a build (``b7900``) or a date (``2025-06-01``); builds are dated by
interpolation between known ones, good to a few days.
"""

from __future__ import annotations

import datetime
import itertools
import math

from foretell.errors import InputError
from foretell.workload.kv.family import Ask, Laid, Part, engine, kind_name, row_bytes
from foretell.workload.kv.shape import CacheLayer, CacheShape

_CELLS = 256
_UBATCH = 512  # n_ubatch
_LATENT, _WINDOWED, _ONE_LATENT = (2025, 4, 15), (2025, 5, 20), (2026, 1, 25)
_BUILDS = ((3030, (2024, 5, 29)), (5135, (2025, 4, 15)), (7830, (2026, 1, 25)))  # build → day


def _day(version: str) -> tuple[int, ...]:
    text = version.casefold()
    try:
        if "-" in text:
            day = datetime.date.fromisoformat(text)
        else:
            build = int(text.removeprefix("b"))
            if not 0 < build < 100_000:
                raise ValueError
            spans = itertools.pairwise(_BUILDS)
            (low, start), (high, end) = next((span for span in spans if build <= span[1][0]), _BUILDS[-2:])
            first, last = datetime.date(*start), datetime.date(*end)
            day = first + (last - first) * ((build - low) / (high - low))
    except (ValueError, OverflowError):
        raise InputError(
            f"{version[:40]!r} is no version of llama.cpp",
            "--engine-version",
            "write a build (b7900) or a date (2025-06-01)",
        ) from None
    return (day.year, day.month, day.day)


@engine(
    "llama.cpp",
    formats=("fp32", "fp16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"),
    version="2026-06-01",
    parse=_day,
    sources=("github.com/ggml-org/llama.cpp: pull requests 12801, 13194, 18986, 19067; src/llama-kv-cache-iswa.cpp",),
)
def llama_cpp(model: CacheShape, ask: Ask) -> Laid:
    """All cells at the start, padded to 256; the window is honoured since May 2025. GPUs split layers."""
    keys, _, values = ask.dtype.partition("/")
    values = values or keys
    cells = _pad(ask.tokens)
    parts, per_token, notes = [], 0, []
    for layer in model.layers:
        mine = math.ceil(layer.layers / ask.tensor_parallel)
        if layer.kind == "recurrent":
            assert layer.state is not None
            state = 4 * (layer.state.convolution + layer.state.matrix)  # fp32, R and S
            parts.append(Part(kind_name(layer), mine, 0, mine * state * ask.batch))
            continue
        size = mine * _cell_bytes(layer, ask, keys, values)
        held = cells
        if layer.window is not None and ask.version >= _WINDOWED:
            held = _pad(min(cells, layer.window + (ask.step or _UBATCH)))
        else:
            per_token += size
        parts.append(Part(kind_name(layer), mine, held, size * held * ask.batch))
    if any(layer.window for layer in model.layers):
        notes.append(
            "sliding layers keep their window and one micro-batch (--swa-full keeps all)"
            if ask.version >= _WINDOWED
            else "sliding layers keep every token (until May 2025)"
        )
    if ask.tensor_parallel > 1:
        notes.append("GPUs split the layers; this is the one with most")
    return Laid(tuple(parts), per_token, _CELLS, tuple(notes))


def _pad(cells: int) -> int:
    return _CELLS * math.ceil(cells / _CELLS)


def _cell_bytes(layer: CacheLayer, ask: Ask, keys: str, values: str) -> int:
    if layer.kind == "latent" and ask.version >= _LATENT:
        again = 0 if ask.version >= _ONE_LATENT else row_bytes(layer.value_dim, values)
        return row_bytes(layer.key_dim, keys) + again
    key, value = layer.key_dim, layer.value_dim
    if layer.kind == "latent":
        key, value = layer.expanded_key_dim, layer.expanded_value_dim
    return row_bytes(layer.kv_heads * key, keys) + row_bytes(layer.kv_heads * value, values)
