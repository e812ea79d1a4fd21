"""The GPT models that claims about training at scale are made of, and the arithmetic their authors count."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretell.workload.llm.config import LLMConfig

VOCABULARY = 51_200
SEQ_LEN = 2048


def gpt(layers: int, hidden: int, heads: int, vocab: int = VOCABULARY) -> LLMConfig:
    """GPT-2's architecture at another size: learned positions, a plain MLP of four times the width, tied embeddings."""
    from foretell.workload.llm.config import LLMConfig

    return LLMConfig(
        f"gpt-{layers}x{hidden}", layers=layers, hidden=hidden, heads=heads, intermediate=4 * hidden, vocab=vocab,
        gated=False, activation="gelu", norm="layer", norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True,
        positions="learned", position_rows=SEQ_LEN, tied_embeddings=True,
    )  # fmt: skip


def step_flops(layers: int, hidden: int, batch: int, vocab: int = VOCABULARY) -> float:
    """FLOP of a step as Narayanan et al. count them (arXiv 2104.04473, equation 3): every layer's forward pass twice,
    attention in full."""
    s, h = SEQ_LEN, hidden
    return 96.0 * batch * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
