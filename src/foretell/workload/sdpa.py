"""Scaled dot-product attention as one operation, forward and backward.

On fake CPU tensors PyTorch would choose its CPU kernel or decompose into products and a softmax; a GPU runs one fused
kernel. While `fused_attention` is active, ``aten::scaled_dot_product_attention`` becomes ``foretell::sdpa``, which saves what the flash kernel saves: q, k, v, the output and one log-sum-exp a query.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("foretell::sdpa", mutates_args=())
def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of q (…, H, L, D) over k (…, H_kv, S, D), v (…, H_kv, S, D_v): output and log-sum-exp (…, H, L)."""
    groups = q.shape[-3] // k.shape[-3] if q.dim() > 3 else 1
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1).to(v.dtype) @ v).contiguous(), scores.logsumexp(-1)


@sdpa.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], v.shape[-1])
    if q.dim() == 4:  # the flash kernel writes (batch, length, heads, depth)
        batch, heads, length, depth = shape
        out = q.new_empty((batch, length, heads, depth)).transpose(1, 2)
    else:
        out = q.new_empty(shape)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("foretell::sdpa_backward", mutates_args=())
def sdpa_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Runs only as shapes: a capture never holds values."""
    raise RuntimeError("foretell::sdpa_backward describes a kernel; it computes nothing")


@sdpa_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, causal = inputs
    ctx.causal = causal
    ctx.save_for_backward(q, k, v, mask, *output)


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, mask, out, lse = ctx.saved_tensors
    grad_q, grad_k, grad_v = sdpa_backward(grad, q, k, v, out, lse, mask, ctx.causal)
    return grad_q, grad_k, grad_v, None, None


sdpa.register_autograd(_backward, setup_context=_setup_context)

@contextmanager
def fused_attention() -> Iterator[None]:
    """While active, every attention call on CPU tensors, from Python or C++, becomes ``foretell::sdpa``."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding a registered kernel is the point
            library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        yield
    finally:
        library._destroy()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dim() > 3 and key.shape[-3] != query.shape[-3] and not enable_gqa:
        raise RuntimeError(
            f"attention heads differ: query {tuple(query.shape)}, key {tuple(key.shape)}; pass enable_gqa=True"
        )
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"attention shapes do not fit: query {tuple(query.shape)}, key {tuple(key.shape)}, "
            f"value {tuple(value.shape)}"
        )
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    query, key, value = (
        t if t.shape[:-3] == lead else t.expand(*lead, *t.shape[-3:]) for t in (query, key, value)
    )
    return sdpa(query, key, value, attn_mask, is_causal)[0]
