"""What one device does in one engine iteration, as sizes of kernels.

A layer is sharded as Megatron-LM does it (arXiv 1909.08053): tensor-parallel ranks split heads and the width of the
MLP. With attention data parallelism (`dp`) each group of `tp` ranks has sequences of its own, and the experts lie on
all ``tp · dp`` ranks: `ep` ways whole, each split over what remains.

Sizes follow one of four counts, and all are columns (points,) of a grid over it:

    rows      tokens of a rank that go through the layers
    together  the same, the mean of all data-parallel ranks: the experts have the tokens of all
    decode    sequences that get one more token (absorbed projections of latent attention)
    keys      tokens whose keys and values a prompt sees (their expansion from latents)
    sampled   rows of logits
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foretell.simulate.serving.plan import ServingPlan
from foretell.workload.llm import LayerGroup, LLMConfig

Floats = npt.NDArray[np.float64]

__all__ = ["Kernels", "Message", "Product", "Stream", "decode", "embedding", "head", "keys", "rows", "together",
           "touched"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products (m, k) · (k, n) with weights (k, n) in `format`; `part` is what they count as."""

    part: str
    batch: Floats
    m: Floats
    n: Floats
    k: Floats
    format: str


@dataclass(frozen=True, slots=True)
class Stream:
    """`kernels` kernels that move so many bytes together; `routing`: all that chooses and sorts experts."""

    part: str
    nbytes: Floats
    kernels: float = 1.0
    routing: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of `kind` (``dispatch`` and ``combine`` count tokens) among `size` ranks `stride` apart."""

    kind: str
    nbytes: Floats
    size: int
    stride: int = 1


@dataclass(slots=True)
class Kernels:
    """The kernels of one layer, or of what is outside the layers."""

    products: list[Product] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


def _ones(x: Floats) -> Floats:
    return np.ones(len(x))


def dense_format(config: LLMConfig, weights: str) -> str:
    """The format of matrices outside the experts where `weights` is the model's: of MXFP4, and of models published in
    int4 (Kimi K2), only those of experts are, where there are any."""
    only_experts = weights == "mxfp4" or weights == config.published_weights == "int4"
    return "bf16" if only_experts and config.moe is not None else weights


def heads_of(config: LLMConfig, plan: ServingPlan) -> tuple[float, float]:
    """Query heads and KV heads of one rank; KV heads fewer than ranks are copied."""
    return config.heads / plan.tp, max(1.0, config.kv_heads / plan.tp)


def rows(config: LLMConfig, group: LayerGroup, plan: ServingPlan, m: Floats, kv_bytes: float) -> Kernels:
    """What one layer of `group` does for `m` tokens of a rank, the cores of attention and of the experts left out."""
    kernels, h = Kernels(), float(config.hidden)
    norms = {"sandwich": 4.0, "parallel": 1.0}.get(config.block, 2.0)
    kernels.streams.append(Stream("elementwise", norms * 8.0 * m * h, norms))
    _attention(kernels, config, plan, m, kv_bytes)
    if plan.tp > 1:
        kernels.messages.append(Message("all_reduce", 2.0 * m * h, plan.tp))
    if group.moe:
        _around_experts(kernels, config, plan, m)
    else:
        _mlp(kernels, config, plan, m, config.intermediate / plan.tp)
        if plan.tp > 1 and not config.block.startswith("parallel"):  # side by side: one sum for both
            kernels.messages.append(Message("all_reduce", 2.0 * m * h, plan.tp))
    return kernels


def _linear(kernels: Kernels, m: Floats, n: float, k: float, number_format: str, part: str = "products") -> None:
    one = _ones(m)
    kernels.products.append(Product(part, one, m, one * n, one * k, number_format))


def _attention(kernels: Kernels, config: LLMConfig, plan: ServingPlan, m: Floats, kv_bytes: float) -> None:
    h, weights = float(config.hidden), dense_format(config, plan.weight_dtype)
    heads, kv_heads = heads_of(config, plan)
    qd, vd = float(config.query_dim), float(config.value_dim)
    if config.mla is not None:
        a = config.mla
        latent = float(a.kv_lora_rank + a.rope_head_dim)
        if a.q_lora_rank:  # both down-projections are one product
            _linear(kernels, m, a.q_lora_rank + latent, h, weights)
            _linear(kernels, m, heads * qd, a.q_lora_rank, weights)
        else:
            _linear(kernels, m, heads * qd, h, weights)
            _linear(kernels, m, latent, h, weights)
        kernels.streams.append(Stream("elementwise", 4.0 * m * (a.q_lora_rank + latent), 2.0))
        turned, cached = 4.0 * m * (heads + 1.0) * a.rope_head_dim, m * latent * (2.0 + kv_bytes)
    else:
        _linear(kernels, m, heads * qd + kv_heads * (qd + vd), h, weights)
        turned = 4.0 * m * (heads + kv_heads) * qd
        cached = m * kv_heads * (qd + vd) * (2.0 + kv_bytes)
    _linear(kernels, m, h, heads * vd, weights)
    if config.qk_norm != "none":
        kernels.streams.append(Stream("elementwise", 4.0 * m * (heads + kv_heads) * qd, 2.0))
    turns = 1.0 if config.positions == "rope" else 0.0
    kernels.streams.append(Stream("elementwise", turns * turned + cached, turns + 1.0))


def _mlp(kernels: Kernels, config: LLMConfig, plan: ServingPlan, m: Floats, f: float, part: str = "products") -> None:
    gates, weights = (2.0 if config.gated else 1.0), dense_format(config, plan.weight_dtype)
    _linear(kernels, m, gates * f, float(config.hidden), weights, part)
    _linear(kernels, m, float(config.hidden), f, weights, part)
    kernels.streams.append(Stream("elementwise", 2.0 * (gates + 1.0) * m * f))


def touched(experts: int, top_k: int, tokens: Floats) -> Floats:
    """`workload.llm.experts_touched` of many numbers of tokens.

    >>> touched(128, 8, np.array([1.0, 64.0])).round(2).tolist()
    [8.0, 125.94]
    """
    return np.asarray(experts * -np.expm1(tokens * np.log1p(-top_k / experts)) if top_k < experts
                      else np.full(len(tokens), float(experts)))  # fmt: skip


def _busiest(experts: int, top_k: int, ranks: int, tokens: Floats, uneven: float) -> tuple[Floats, Floats]:
    """Experts reached, and rows for them, on the busiest of `ranks` that share the experts: all wait for it.

    Each expert of a rank is reached or not, and each row comes or not, about independently; the largest of several
    normal values is so many deviations above their mean.
    """
    held = experts / ranks
    share = touched(experts, top_k, tokens) / experts
    above = uneven * float(np.interp(np.log2(ranks), np.arange(len(_LARGEST)), _LARGEST))
    here = held * share + above * np.sqrt(held * share * (1.0 - share))
    rows_of = tokens * top_k / ranks
    sent = np.minimum(rows_of + above * np.sqrt(rows_of * (1.0 - 1.0 / ranks)), tokens * top_k)
    return np.maximum(np.minimum(1.0, tokens), np.minimum(here, np.minimum(held, sent))), sent


#: Expected largest of 1, 2, 4 … 64 normal values, in standard deviations.
_LARGEST = (0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344)


def _exchanged(plan: ServingPlan) -> bool:
    """Whether tokens are sent to the ranks of their experts only: with data parallelism, but for vLLM's default."""
    return plan.dp > 1 and plan.ep > 1 and plan.engine != "vllm"


def _around_experts(kernels: Kernels, config: LLMConfig, plan: ServingPlan, m: Floats) -> None:
    """What each rank does for its own tokens: routing, shared experts, sending and gathering."""
    moe = config.moe
    assert moe is not None
    _linear(kernels, m, float(moe.experts), float(config.hidden), "fp32" if moe.router_fp32 else "bf16", "experts")
    if moe.shared_intermediate:
        _mlp(kernels, config, plan, m, moe.shared_intermediate / plan.tp, "experts")
    if _exchanged(plan):
        for kind in ("dispatch", "combine"):
            kernels.messages.append(Message(kind, m / plan.tp, plan.tp * plan.dp))
    if plan.tp > 1:
        kernels.messages.append(Message("all_reduce", 2.0 * m * float(config.hidden), plan.tp))


def together(config: LLMConfig, plan: ServingPlan, m: Floats, uneven: float) -> Kernels:
    """What the experts of one layer do for all ranks, each of which has `m` tokens in the mean.

    `uneven` is how unlike the ranks' shares of the experts' work are, over what evenly choosing tokens make of it.
    """
    moe, kernels = config.moe, Kernels()
    assert moe is not None
    h, one = float(config.hidden), _ones(m)
    ranks = plan.tp * plan.dp
    split = ranks // plan.ep  # ways each expert is split
    tokens = m * plan.dp
    here, sent = _busiest(moe.experts, moe.top_k, plan.ep, tokens, uneven)
    gates, f = (2.0 if config.gated else 1.0), moe.intermediate / split
    each = sent / np.maximum(here, 1e-9)
    for n, k in ((gates * f, h), (h, f)):
        kernels.products.append(Product("experts", here, each, one * n, one * k, plan.weight_dtype))
    # Softmax and top-k, sorting by expert, activation, weighted sum. Where tokens are not sent to their experts' ranks,
    # kernels walk the rows of all experts.
    walked = sent if _exchanged(plan) else tokens * moe.top_k
    kernels.streams.append(Stream("experts", 6.0 * m * moe.experts + 16.0 * walked, 1.0, routing=True))
    kernels.streams.append(Stream("experts", 2.0 * (gates + 1.0) * walked * f, 1.0))
    kernels.streams.append(Stream("experts", 2.0 * (walked + tokens) * h, 1.0))
    if plan.dp > 1 and not _exchanged(plan):  # every rank gets all tokens, and sums come back
        kernels.messages.append(Message("all_gather", 2.0 * tokens * h, plan.dp, plan.tp))
        kernels.messages.append(Message("reduce_scatter", 2.0 * tokens * h, plan.dp, plan.tp))
    return kernels


def decode(config: LLMConfig, plan: ServingPlan, n: Floats) -> Kernels:
    """One layer's absorbed projections of latent attention: queries to latents, and sums of latents to values."""
    kernels = Kernels()
    if config.mla is not None:
        a, (heads, _), one = config.mla, heads_of(config, plan), _ones(n)
        for wide, deep in ((a.kv_lora_rank, a.nope_head_dim), (a.v_head_dim, a.kv_lora_rank)):
            kernels.products.append(Product("products", one * heads, n, one * wide, one * deep, "bf16"))
        # Queries and latents joined, planned and transposed around the core.
        kernels.streams.append(Stream("elementwise", 8.0 * n * heads * a.kv_lora_rank, 6.0))
    return kernels


def keys(config: LLMConfig, plan: ServingPlan, t: Floats) -> Kernels:
    """One layer's expansion of `t` tokens' latents to keys and values, for prompts."""
    kernels = Kernels()
    if config.mla is not None:
        a, (heads, _) = config.mla, heads_of(config, plan)
        up = heads * (a.nope_head_dim + a.v_head_dim)
        _linear(kernels, t, up, float(a.kv_lora_rank), dense_format(config, plan.weight_dtype))
        kernels.streams.append(Stream("elementwise", 4.0 * t * heads * config.query_dim))  # keys joined
    return kernels


def embedding(config: LLMConfig, plan: ServingPlan, m: Floats) -> Kernels:
    """What `m` tokens take before the first layer and between stages of the pipeline."""
    h = float(config.hidden)
    kernels = Kernels(streams=[Stream("elementwise", 4.0 * m * h)])
    if plan.tp > 1:
        kernels.messages.append(Message("all_reduce", 2.0 * m * h, plan.tp))
    for _ in range(plan.pp - 1):  # hidden states and residuals, split over the ranks and gathered again
        kernels.messages.append(Message("send_recv", 4.0 * m * h / plan.tp, 2, plan.tp * plan.dp))
        kernels.messages.append(Message("all_gather", 4.0 * m * h, plan.tp))
    return kernels


def head(config: LLMConfig, plan: ServingPlan, s: Floats) -> Kernels:
    """Final norm, logits and choice of `s` tokens."""
    h, share = float(config.hidden), config.vocab / plan.tp
    kernels = Kernels(streams=[Stream("elementwise", 8.0 * s * h)])
    _linear(kernels, s, share, h, "bf16", "logits")
    # To fp32 and the largest of each row, in a dozen small kernels (vLLM's sampler).
    kernels.streams.append(Stream("sampling", 6.0 * s * config.vocab, 12.0))
    if plan.tp > 1:
        kernels.messages.append(Message("all_gather", 2.0 * s * config.vocab, plan.tp))
    return kernels
