"""vLLM: pages of one size for all layers, taken from one pool.

Layers of one kind form groups of equal length, short ones padded, and a page holds `block` tokens of all layers of a
group (design document "Hybrid KV Cache Manager", docs.vllm.ai). Layers whose token takes fewer bytes hold more
tokens in a page (Gemma 4), and a page of attention grows until a recurrent state fits it.

Rules by version: before 0.7.0 keys and values of MLA were padded to heads of 256 and in 0.7.0 to those of keys
(pull request 12067); from 0.7.1 on the latent is cached. Up to 0.20 the capacity an engine reports counts every
layer as if it kept all tokens; from 0.21 on sliding layers count what lies in their window (issue 43308).
"""

from __future__ import annotations

import math

from foretell.errors import InputError
from foretell.workload.kv.family import Ask, Laid, Part, engine, kind_name, state_bytes, state_part, token_bytes
from foretell.workload.kv.shape import CacheLayer, CacheShape

_BLOCK = 16  # CacheConfig.DEFAULT_BLOCK_SIZE
_MLA_BLOCK = 64  # what FlashMLA asks for
_LATENT, _WINDOWED = (0, 7, 1), (0, 21)


@engine(
    "vllm",
    formats=("bf16", "fp16", "fp32", "fp8"),
    version="0.20.0",
    sources=(
        "docs.vllm.ai: design/hybrid_kv_cache_manager, api/vllm/v1/kv_cache_interface",
        "github.com/vllm-project/vllm: pull requests 12067 and 14097, issues 24280 and 43308",
    ),
)
def vllm(model: CacheShape, ask: Ask) -> Laid:
    """Pages from one pool; sliding layers of hybrid models count full pages (windowed from 0.21 on)."""
    specs = [_expanded(layer, ask) for layer in model.layers]
    attention = [layer for layer in specs if layer.kind != "recurrent"]
    recurrent = [layer for layer in specs if layer.kind == "recurrent"]
    notes: list[str] = []
    latent = any(layer.kind == "latent" for layer in specs)
    block = ask.block or (_MLA_BLOCK if latent else _BLOCK)
    if not attention:
        states = tuple(state_part(layer, ask) for layer in recurrent)
        return Laid(states, 0, 1, ("a state a sequence, nothing a token",))

    token = max(token_bytes(layer, ask) for layer in attention)
    if recurrent:
        state = max(state_bytes(layer, ask) for layer in recurrent)
        if state > block * token:
            block = _BLOCK * math.ceil(state / (_BLOCK * token))
            notes.append(f"pages of {block} tokens, so that a recurrent state fits one")
    page = block * token  # bytes of one layer's page, equal for all

    counts = [layer.layers for layer in specs]
    group = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    if len(specs) == 1:
        group = counts[0]
    padding = sum(math.ceil(count / group) * group - count for count in counts)
    if padding:
        notes.append(f"{padding} layers of padding: groups of {group} layers share pages")

    parts: list[Part] = []
    per_token = 0
    for layer in specs:
        slots = math.ceil(layer.layers / group) * group
        if layer.kind == "recurrent":
            parts.append(Part(kind_name(layer), layer.layers, 0, slots * page * ask.batch))
            continue
        held = block * (token // token_bytes(layer, ask))  # tokens of a page of this layer
        windowed = len(specs) == 1 or ask.version >= _WINDOWED
        if not windowed:
            held = block
        elif token % token_bytes(layer, ask):
            raise InputError(
                f"tokens of {token} and {token_bytes(layer, ask)} bytes cannot share pages", model.name,
                "vLLM refuses this model with this cache format; take another format",
            )
        pages = math.ceil(ask.tokens / held)
        if windowed and layer.window is not None:
            reach = layer.window if layer.kind == "chunked" else layer.window - 1
            pages = min(pages, math.ceil(reach / held) + 1)
        else:
            per_token += slots * (page // held)
        parts.append(Part(kind_name(layer), layer.layers, pages * held, slots * pages * page * ask.batch))
    if ask.version < _WINDOWED and len(specs) > 1 and any(layer.window for layer in specs):
        notes.append("its capacity counts windowed layers as if they kept every token (until 0.21)")
    return Laid(tuple(parts), per_token, block, tuple(notes))


def _expanded(layer: CacheLayer, ask: Ask) -> CacheLayer:
    """Before latents were cached, MLA's layers kept keys and values of all heads, padded to one width."""
    if layer.kind != "latent" or ask.version >= _LATENT:
        return layer
    width = 256 if ask.version < (0, 7) else layer.expanded_key_dim
    return CacheLayer(layer.layers, "full", layer.kv_heads, width, width)
