"""What one device does for one layer and one micro-batch, as sizes of kernels.

A layer is sharded as Megatron-LM does it (arXiv 1909.08053, 2205.05198): tensor-parallel ranks split heads and the
width of the MLP, the first product of a pair by its columns and the second by its rows; with sequence parallelism they
split norms and residuals over the sequence. Context-parallel ranks split the sequence of everything. Expert-parallel
ranks hold whole experts; each takes its own part of the tokens to them.

All sizes are columns (shapes,), one entry for each `Shapes` row, so that a search costs its few hundred distinct
shapes at once. Names: s tokens on the device, h hidden, a heads, f width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foretell.simulate.training.plan import PlanTable
from foretell.workload.llm.config import LayerGroup, LLMConfig

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

__all__ = ["Attention", "Kernels", "Product", "Shapes", "Stream", "head", "layer"]

#: Columns of a plan that the sizes of a layer's kernels depend on.
KEYS = (
    *("tp", "cp", "ep", "micro_batch", "seq_len", "document_len", "sequence_parallel"),
    *("precision", "attention", "framework", "lora_rank"),
    *("context_scheme", "dispatcher", "overlap_tp"),
)
#: Megatron-LM pads the vocabulary to a multiple of this times tp (--make-vocab-size-divisible-by).
VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class Shapes:
    """The distinct shapes of a table of plans: `table` has one row each, `of` maps the rows of the plans to them."""

    table: PlanTable
    of: Ints

    @staticmethod
    def among(table: PlanTable) -> Shapes:
        """The distinct shapes of these plans."""
        keys = np.stack([table[name] for name in KEYS], axis=1)
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return Shapes(table.take(first), np.asarray(inverse, dtype=np.int64).reshape(-1))


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products (m, k) · (k, n) with weights (k, n), forward.

    `weights` is False where the second operand is an activation: both gradients are then of the input. `low` says
    whether it runs in the plan's low precision where that is below 16 bits. `frozen`: the weights get no gradient.
    """

    name: str
    batch: Floats
    m: Floats
    n: Floats
    k: Floats
    weights: bool = True
    low: bool = True
    core: bool = False
    frozen: Bools | bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention of `batch` key heads: `rows` queries that share a key head, against `keys`."""

    name: str
    batch: Floats
    rows: Floats
    keys: Floats
    depth: Floats
    causal: bool
    where: Bools | bool = True


@dataclass(frozen=True, slots=True)
class Stream:
    """A kernel that moves so many bytes forward and backward; `core`: part of what selective recomputation repeats."""

    name: str
    forward_bytes: Floats
    backward_bytes: Floats
    kernels: float = 1.0
    core: bool = False


@dataclass(slots=True)
class Kernels:
    """The kernels of one layer (or of the head)."""

    products: list[Product] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)


def tokens(t: PlanTable) -> Floats:
    """Tokens a device holds of one micro-batch."""
    return t["micro_batch"] * t["seq_len"] / t["cp"]


def shared_tokens(t: PlanTable) -> Floats:
    """Tokens a device holds where tensor-parallel ranks hold the same: fewer by that degree with sequence
    parallelism."""
    return tokens(t) / np.where(t.flag("sequence_parallel"), t["tp"], 1)


def layer(config: LLMConfig, group: LayerGroup, t: PlanTable) -> Kernels:
    """The kernels of one layer of `group`, for each row of `t`."""
    kernels = Kernels()
    shared, h = shared_tokens(t), float(config.hidden)
    _norms(kernels, config, shared)
    _attention(kernels, config, group, t)
    if group.moe:
        _experts(kernels, config, t)
    else:
        _mlp(kernels, "mlp", config, t, config.intermediate / t["tp"])
    if config.block in ("sandwich", "post_norm"):
        kernels.streams.append(Stream("more norms", 8 * shared * h, 16 * shared * h, 2.0))
    return kernels


def _linear(kernels: Kernels, name: str, t: PlanTable, m: Floats, n: Floats, k: Floats) -> None:
    """A product with weights (k, n), and the two small ones of its low-rank adapter if it has one."""
    one, rank = np.ones(len(t)), t["lora_rank"].astype(np.float64)
    kernels.products.append(Product(name, one, m, n, k, frozen=rank > 0))
    if (rank > 0).any():
        there = (rank > 0).astype(np.float64)
        kernels.products.append(Product(f"{name} A", there, m, np.maximum(1.0, rank), k, low=False))
        kernels.products.append(Product(f"{name} B", there, m, n, np.maximum(1.0, rank), low=False))


def _norms(kernels: Kernels, config: LLMConfig, shared: Floats) -> None:
    """Two norms, two residual additions; backward, the gradients of two branches meet twice."""
    h = float(config.hidden)
    kernels.streams.append(Stream("norms", 2 * 4 * shared * h, 2 * 8 * shared * h, 2.0))
    kernels.streams.append(Stream("residuals", 2 * 7 * shared * h, 2 * 6 * shared * h, 2.0))


def _attention(kernels: Kernels, config: LLMConfig, group: LayerGroup, t: PlanTable) -> None:
    s, h = tokens(t), float(config.hidden)
    heads = config.heads / t["tp"]
    kv_heads = np.maximum(1.0, config.kv_heads / t["tp"])  # fewer than ranks: each rank has a copy
    one = np.ones(len(t))
    qd, vd = float(config.query_dim), float(config.value_dim)
    if config.mla is not None:
        m = config.mla
        kv_heads = heads
        if m.q_lora_rank:
            _linear(kernels, "q_a", t, s, one * m.q_lora_rank, one * h)
            _linear(kernels, "q_b", t, s, heads * qd, one * m.q_lora_rank)
        else:
            _linear(kernels, "q", t, s, heads * qd, one * h)
        latent = float(m.kv_lora_rank + m.rope_head_dim)
        _linear(kernels, "kv_a", t, s, one * latent, one * h)
        up = heads * (m.nope_head_dim + m.v_head_dim)
        _linear(kernels, "kv_b", t, s, up, one * m.kv_lora_rank)
        width = heads * (2 * qd + vd)
        kernels.streams.append(Stream("latent norms", 4 * s * (latent + m.q_lora_rank),
                                      8 * s * (latent + m.q_lora_rank), 2.0))  # fmt: skip
    else:
        width = heads * qd + kv_heads * (qd + vd)
        _linear(kernels, "qkv", t, s, width, one * h)
    _linear(kernels, "proj", t, s, one * h, heads * vd)
    # The joint projection is split, and (with rotary positions) queries and keys are turned.
    moved = 4 * s * width + (4 * s * (heads + kv_heads) * qd if config.positions == "rope" else 0.0)
    kernels.streams.append(Stream("heads", moved, moved, 3.0))
    if config.qk_norm != "none":
        kernels.streams.append(Stream("qk norms", 4 * s * (heads + kv_heads) * qd, 8 * s * (heads + kv_heads) * qd, 2))
    length = t["seq_len"].astype(np.float64)
    sequences = t["micro_batch"].astype(np.float64)
    packed = (t["document_len"] > 0) & (t["document_len"] < t["seq_len"])
    document = np.where(packed, t["document_len"], length)
    flash = ~t.chosen("attention", "unfused")
    # Causal attention of documents; the part of a device is 1/cp of each, balanced.
    each = sequences * length / document
    keys = document
    causal = True
    if group.window is not None:
        # Mean keys a query sees, of a mask that is causal within a window.
        window = np.minimum(float(group.window), document)
        keys = window - window * (window - 1.0) / (2.0 * document)
        causal = False
    kernels.attentions.append(
        Attention("attention", each * kv_heads, document / t["cp"] * heads / kv_heads, keys,
                  one * (qd + vd) / 2.0, causal, flash)
    )  # fmt: skip
    # Unfused: scores in full, whatever the mask.
    batch = np.where(flash, 0.0, sequences * heads)
    rows = length / t["cp"]
    kernels.products.append(Product("scores", batch, rows, length, one * qd, weights=False, low=False, core=True))
    kernels.products.append(Product("context", batch, rows, one * vd, length, weights=False, low=False, core=True))
    scores = batch * rows * length
    # Scale, mask and softmax in one kernel (2 + 2 bytes), dropout (2 + 2 and a mask of 1); backward in reverse.
    kernels.streams.append(Stream("softmax", 9 * scores, 11 * scores, 2.0, core=True))


def _mlp(kernels: Kernels, name: str, config: LLMConfig, t: PlanTable, f: Floats) -> None:
    s, one, h = tokens(t), np.ones(len(t)), float(config.hidden)
    gates = 2.0 if config.gated else 1.0
    _linear(kernels, f"{name} up", t, s, gates * f, one * h)
    _linear(kernels, f"{name} down", t, s, one * h, f)
    kernels.streams.append(_activation(f"{name} activation", config, s, f))


def _activation(name: str, config: LLMConfig, s: Floats, f: Floats) -> Stream:
    """Gate and up in, their product out; backward reads both and the gradient and writes two.

    The clamped gate of gpt-oss has no kernel of its own: split, two clamps, sigmoid, three products and a sum, each by
    itself, forward and (two for each) backward.
    """
    if config.activation == "swiglu_clamped":
        return Stream(name, 42 * s * f, 84 * s * f, 9.0)
    return Stream(name, (6 if config.gated else 4) * s * f, (10 if config.gated else 6) * s * f)


def _experts(kernels: Kernels, config: LLMConfig, t: PlanTable) -> None:
    moe = config.moe
    assert moe is not None
    s, shared, h, one = tokens(t), shared_tokens(t), float(config.hidden), np.ones(len(t))
    frozen = t["lora_rank"] > 0
    # Each rank routes its own tokens; with tensor parallelism and no split of the sequence all ranks hold the same.
    own = np.where(t.flag("sequence_parallel"), shared, s / t["tp"])
    rows = own * moe.top_k
    kernels.products.append(Product("router", one, own, one * moe.experts, one * h, low=False))
    here = np.maximum(1.0, moe.experts / t["ep"])
    gates = 2.0 if config.gated else 1.0
    each, f = rows / here, one * moe.intermediate
    kernels.products.append(Product("experts up", here, each, gates * f, one * h, frozen=frozen))
    kernels.products.append(Product("experts down", here, each, one * h, f, frozen=frozen))
    kernels.streams.append(_activation("experts activation", config, rows, f))
    if moe.expert_bias:
        kernels.streams.append(Stream("expert biases", 4 * rows * (gates * f + h), 6 * rows * (gates * f + h), 2.0))
    # Permute to experts and back, weighted by their scores; softmax, top-k and sorting of the router.
    kernels.streams.append(Stream("permute", 2 * 4 * rows * h, 2 * 4 * rows * h, 4.0))
    kernels.streams.append(Stream("routing", 24 * own * moe.experts, 16 * own * moe.experts, 12.0))
    if moe.shared_intermediate:
        _mlp(kernels, "shared experts", config, t, moe.shared_intermediate / t["tp"])


def padded_vocabulary(config: LLMConfig, tp: Ints) -> Floats:
    """Rows of the embedding table, padded so that ranks share it evenly."""
    multiple = VOCABULARY_MULTIPLE * tp
    return np.asarray(np.ceil(config.vocab / multiple) * multiple, dtype=np.float64)


def head(config: LLMConfig, t: PlanTable) -> Kernels:
    """Final norm, logits and loss of one micro-batch, on the last rank of the pipeline."""
    s, shared, h, one = tokens(t), shared_tokens(t), float(config.hidden), np.ones(len(t))
    vocabulary = padded_vocabulary(config, t["tp"]) / t["tp"]
    kernels = Kernels()
    kernels.products.append(Product("logits", one, s, vocabulary, one * h, low=False, frozen=t["lora_rank"] > 0))
    kernels.streams.append(Stream("final norm", 4 * shared * h, 8 * shared * h))
    # Converted to fp32 (2 + 4), largest (4), exponentials and their sum (4 + 4); backward: the gradient (4 + 4) and its
    # conversion (4 + 2).
    kernels.streams.append(Stream("loss", 18 * s * vocabulary, 14 * s * vocabulary, 4.0))
    return kernels


def embedding(config: LLMConfig, t: PlanTable) -> Kernels:
    """Look-up of a micro-batch's tokens, on the first rank of the pipeline."""
    s, h = tokens(t), float(config.hidden)
    return Kernels(streams=[Stream("embedding", 4 * s * h, 6 * s * h, 2.0)])
