"""Hugging Face transformers: a dynamic cache that grows by the token.

MLA was expanded to keys and values of all heads and is kept as latents since pull request 47761 of 2026 (5.24 has it;
the first release that does was not looked up). Sliding layers keep their window since 4.56 (`DynamicCache` with
`DynamicSlidingWindowLayer`: one token less between steps, the whole window within one), every token before.
"""

from __future__ import annotations

import math

from foretell.workload.kv.family import Ask, Laid, Part, engine, kind_name, row_bytes, token_bytes
from foretell.workload.kv.shape import CacheShape

_WINDOWED, _LATENT = (4, 56), (5, 24)


@engine(
    "transformers",
    formats=("bf16", "fp16", "fp32"),
    version="5.24.0",
    sources=(
        "huggingface.co/docs/transformers: cache_utils",
        "github.com/huggingface/transformers: pull request 47761",
    ),
)
def transformers(model: CacheShape, ask: Ask) -> Laid:
    """Exactly the tokens there are; the window honoured since 4.56, latents kept since 5.24."""
    parts, per_token = [], 0
    for layer in model.layers:
        if layer.kind == "recurrent":
            assert layer.state is not None
            share = min(ask.tensor_parallel, layer.state.heads)
            window = layer.state.channels * layer.state.kernel  # the newest input is kept as well
            state = row_bytes(window, ask.dtype) + row_bytes(layer.state.matrix, ask.dtype)
            parts.append(Part(kind_name(layer), layer.layers, 0, layer.layers * math.ceil(state / share) * ask.batch))
            continue
        size = layer.layers * token_bytes(layer, ask, latent=ask.version >= _LATENT)
        held = ask.tokens
        if layer.window is not None and ask.version >= _WINDOWED:
            held = min(held, layer.window)
        else:
            per_token += size
        parts.append(Part(kind_name(layer), layer.layers, held, size * held * ask.batch))
    return Laid(tuple(parts), per_token)
