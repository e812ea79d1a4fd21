"""A tiny GPT, cut for tensor parallelism as Megatron-LM cuts it; layers of a pipeline, each with its own weights.

Letters: S sequence, B micro-batch, H hidden, A heads, F inner width of the MLP, V vocabulary, t tensor-parallel ranks.
Activations are (S, B, H), or (S/t, B, H) where the sequence is split (sequence parallelism; Korthikanti et al.,
arXiv 2205.05198). There is no dropout: results are compared to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from foretell.errors import InputError
from foretell.learn.distributed.wire import Group
from foretell.workload.llm.config import LLMConfig

__all__ = ["SPLIT", "Context", "Later", "check", "forward", "initial_weights", "kinds", "local_weights"]

#: The axis along which tensor-parallel ranks share out a weight; the rest are on all of them.
SPLIT: Mapping[str, int] = {
    "qkv": 0,
    "project": 1,
    "up": 0,
    "down": 1,
    "tokens": 0,
    "logits": 0,
}

Weights = Mapping[str, Tensor]
#: Puts off the gradient of a weight: takes the weight, what makes the gradient, and the tensors it makes it of.
Later = Callable[[Tensor, Callable[..., Tensor], tuple[Tensor, ...]], None]


@dataclass(frozen=True, slots=True)
class Context:
    """What a layer needs to know besides its weights. `later` is None where weight gradients come with the others."""

    config: LLMConfig
    tensor: Group
    sequence_parallel: bool
    recompute: str
    mask: Tensor
    later: Later | None = None

    @property
    def split_sequence(self) -> bool:
        """Whether activations between the large products are cut along the sequence."""
        return self.sequence_parallel and self.tensor.size > 1


def check(config: LLMConfig) -> None:
    """Raise InputError unless the model is a plain GPT, which is all that is built here."""
    wanted = {
        "norm": "layer", "gated": False, "activation": "gelu", "block": "pre_norm", "positions": "learned",
        "qk_norm": "none", "kv_heads": config.heads, "head_dim": config.hidden // config.heads, "moe": None,
        "mla": None, "tied_embeddings": False, "attention_pattern": ("full",), "qkv_bias": False, "o_bias": False,
        "mlp_bias": False, "head_bias": False, "embedding_norm": False, "embedding_scale": False,
        "attention_sinks": False, "final_softcap": False,
    }  # fmt: skip
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise InputError(
                f"{field} is {getattr(config, field)!r}", f"llm config {config.name!r}",
                f"only a plain GPT is run here: {field}={value!r}",
            )  # fmt: skip


def kinds(config: LLMConfig) -> tuple[str, ...]:
    """The model from its input to its loss: an embedding, the layers, a head."""
    return ("embedding", *["layer"] * config.layers, "head")


def initial_weights(config: LLMConfig, index: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole weights of the part at `index` of `kinds`: the same on whichever rank they are made."""
    dice = torch.Generator().manual_seed(seed * 100_003 + index)
    hidden, inner, kind = config.hidden, config.intermediate, kinds(config)[index]
    shapes: dict[str, tuple[int, ...]]
    if kind == "embedding":
        shapes = {"tokens": (config.vocab, hidden), "positions": (config.position_rows, hidden)}
    elif kind == "head":
        shapes = {"norm": (hidden,), "logits": (config.vocab, hidden)}
    else:
        shapes = {
            "norm1": (hidden,), "qkv": (3 * hidden, hidden), "project": (hidden, hidden),
            "norm2": (hidden,), "up": (inner, hidden), "down": (hidden, inner),
        }  # fmt: skip
    if config.norm_bias:
        shapes |= {f"{name}_bias": shape for name, shape in shapes.items() if name.startswith("norm")}
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=dice, dtype=torch.float64) * (0.5 / math.sqrt(hidden))
        made[name] = (noise + 1.0 if name.startswith("norm") and not name.endswith("bias") else noise).to(dtype)
    return made


def local_weights(weights: Weights, rank: int, size: int) -> dict[str, Tensor]:
    """What tensor-parallel rank `rank` of `size` holds. Rows of ``qkv`` are ordered by head: its q, its k, its v."""
    return {
        name: weight.tensor_split(size, SPLIT[name])[rank].contiguous() if name in SPLIT else weight
        for name, weight in weights.items()
    }


def forward(kind: str, weights: Weights, x: Tensor, context: Context, targets: Tensor | None = None) -> Tensor:
    """One part of `kinds`. `x` is tokens (S, B) for the embedding; the head returns the summed loss of `targets`."""
    if kind == "embedding":
        return _embedding(weights, x, context)
    if kind == "head":
        assert targets is not None
        return _head(weights, x, targets, context)
    if context.recompute == "full":
        return checkpoint(_layer, weights, x, context, use_reentrant=True)
    return _layer(weights, x, context)


def _layer(weights: Weights, x: Tensor, context: Context) -> Tensor:
    heads = context.config.heads // context.tensor.size
    inner = _column(_norm(weights, "norm1", x), weights["qkv"], context)
    if context.recompute == "selective":
        inner = checkpoint(_attention, inner, heads, context.mask, use_reentrant=True)
    else:
        inner = _attention(inner, heads, context.mask)
    x = x + _row(inner, weights["project"], context)
    inner = functional.gelu(_column(_norm(weights, "norm2", x), weights["up"], context))
    return x + _row(inner, weights["down"], context)


def _attention(qkv_SBD: Tensor, heads: int, mask_SS: Tensor) -> Tensor:
    """Causal attention of this rank's heads, its probabilities stored; D = 3 · heads · head size."""
    s, b, width = qkv_SBD.shape
    size = width // (3 * heads)
    parts = qkv_SBD.view(s, b * heads, 3, size).permute(2, 1, 0, 3)
    q, k, v = (part.contiguous() for part in parts)  # (B · heads, S, size) each
    scores = torch.bmm(q, k.transpose(1, 2)) * (1.0 / math.sqrt(size)) + mask_SS
    mixed = torch.bmm(scores.softmax(-1), v)
    return mixed.transpose(0, 1).reshape(s, b, heads * size)


def _embedding(weights: Weights, tokens_SB: Tensor, context: Context) -> Tensor:
    group, rows = context.tensor, weights["tokens"].shape[0]
    local = tokens_SB - group.index * rows
    mine = (local >= 0) & (local < rows)
    found = functional.embedding(local.clamp(0, rows - 1), weights["tokens"])
    x = _leave(torch.where(mine[..., None], found, 0.0), context)
    s = tokens_SB.shape[0]
    positions = weights["positions"][:s]
    if context.split_sequence:
        positions = positions.tensor_split(group.size)[group.index]
    return x + positions[:, None, :]


def _head(weights: Weights, x: Tensor, targets_SB: Tensor, context: Context) -> Tensor:
    logits = _column(_norm(weights, "norm", x), weights["logits"], context)
    return CrossEntropy.apply(logits, targets_SB, context.tensor)  # type: ignore[no-any-return]


def _norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weights[name], weights.get(f"{name}_bias"))


def _column(x: Tensor, weight: Tensor, context: Context) -> Tensor:
    """A product whose outputs tensor-parallel ranks share out."""
    return Product.apply(x, weight, context, True)  # type: ignore[no-any-return]


def _row(x: Tensor, weight: Tensor, context: Context) -> Tensor:
    """A product whose inputs tensor-parallel ranks share out: its results are summed over them."""
    return _leave(Product.apply(x, weight, context, False), context)


def _leave(x: Tensor, context: Context) -> Tensor:
    if context.tensor.size == 1:
        return x
    return Leave.apply(x, context)  # type: ignore[no-any-return]


class Product(torch.autograd.Function):
    """``x @ weight.T``. Keeps `x` alone; with the sequence split, gathers it before and again for the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, context: Context, column: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.context, ctx.column = weight, context, column
        if column and context.split_sequence:
            x = context.tensor.all_gather(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x,), context = grads, ctx.saved_tensors, ctx.context
        gathered = ctx.column and context.split_sequence

        def of_weight(x: Tensor, grad: Tensor) -> Tensor:
            if gathered:
                x = context.tensor.all_gather(x)
            return grad.flatten(0, 1).T @ x.flatten(0, 1)

        weight_grad = None
        if context.later is not None:
            context.later(ctx.weight, of_weight, (x, grad))
        else:
            weight_grad = of_weight(x, grad)
        back = grad @ ctx.weight
        if gathered:
            back = context.tensor.reduce_scatter(back)
        elif ctx.column and context.tensor.size > 1:
            back = context.tensor.all_reduce(back)
        return back, weight_grad, None, None


class Leave(torch.autograd.Function):
    """Sums partial results: to all ranks, or to each its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return context.tensor.reduce_scatter(x) if context.split_sequence else context.tensor.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        context = ctx.context
        return (context.tensor.all_gather(grads[0].contiguous()) if context.split_sequence else grads[0]), None


class CrossEntropy(torch.autograd.Function):
    """The summed loss of logits (S, B, V/t), of which only three numbers a token go to the other ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:
        most = logits.amax(-1)
        if group.size > 1:
            most = group.all_reduce(most, torch.maximum)
        exp = (logits - most[..., None]).exp()
        total = exp.sum(-1)
        local = targets - group.index * logits.shape[-1]
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        wanted = torch.where(mine, logits.gather(-1, local[..., None])[..., 0], 0.0)
        if group.size > 1:
            total, wanted = group.all_reduce(total), group.all_reduce(wanted)
        ctx.save_for_backward(exp / total[..., None], local, mine)
        return (total.log() + most - wanted).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shares, local, mine = ctx.saved_tensors
        back = shares.clone()
        back.scatter_add_(-1, local[..., None], -mine[..., None].to(back.dtype))
        return back * grads[0], None, None
