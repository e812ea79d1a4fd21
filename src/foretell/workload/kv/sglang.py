"""SGLang: a pool of token slots for each kind of layer, laid out at the start.

Models that mix windows have two pools: one for full layers, one for sliding layers with `swa_full_tokens_ratio`
(0.8) slots for each slot of the other, so what T tokens take is the full layers' T and the sliding layers' 0.8 T
(pull request 22389). A page of slots is kept as padding. MLA: the latent, from 0.3 on.
"""

from __future__ import annotations

import math

from foretell.workload.kv.family import Ask, Laid, Part, engine, kind_name, state_part, token_bytes
from foretell.workload.kv.shape import CacheShape

_LATENT, _TWO_POOLS = (0, 3), (0, 5)
_WINDOW_RATIO = 0.8  # ServerArgs.swa_full_tokens_ratio


@engine(
    "sglang",
    formats=("bf16", "fp16", "fp8", "fp4"),
    version="0.5.10",
    sources=(
        "github.com/sgl-project/sglang: pull requests 22389 and 36729 (pools and their ratio)",
        "LMSYS blog, 2024-09-04: SGLang v0.3, DeepSeek MLA",
    ),
)
def sglang(model: CacheShape, ask: Ask) -> Laid:
    """Slots by the token; of hybrid models the sliding layers get 0.8 slots for each full one (from 0.5 on)."""
    page = ask.block or 1
    slots = page * math.ceil(ask.tokens / page) * ask.batch
    two_pools = ask.version >= _TWO_POOLS and bool(model.of("full")) and bool(model.of("sliding", "chunked"))
    parts, per_token, notes = [], 0.0, []
    for layer in model.layers:
        if layer.kind == "recurrent":
            parts.append(state_part(layer, ask, matrix_bytes=4))  # `Mamba2StateDType`: the matrix in fp32
            continue
        size = layer.layers * token_bytes(layer, ask, latent=ask.version >= _LATENT)
        share = _WINDOW_RATIO if two_pools and layer.kind != "full" else 1.0
        held = page * math.ceil(share * slots / page)
        if two_pools and layer.window is not None:  # a pool smaller than one window would serve nothing
            held = max(held, min(slots, page * math.ceil(layer.window / page) * ask.batch))
        parts.append(Part(kind_name(layer), layer.layers, math.ceil(held / ask.batch), size * (held + page)))
        per_token += share * size
    if two_pools:
        notes.append("the sliding layers' pool has 0.8 slots for each full one (--swa-full-tokens-ratio)")
    if any(part.tokens for part in parts):
        notes.append(f"with {page} slot{'s' * (page > 1)} of padding in each pool")
    return Laid(tuple(parts), round(per_token), page, tuple(notes))
