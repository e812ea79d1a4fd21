"""Operations that a GPU runs as one fused kernel, and that fake CPU tensors would decompose or refuse.

While `fused_operations` is active, attention becomes ``foretell::sdpa``, which saves what the flash kernel saves (q, k,
v, the output and one log-sum-exp a query), the experts' product becomes ``foretell::grouped_mm`` in any type, and every
direction of a layer of LSTM, GRU or RNN becomes ``aten::mkldnn_rnn_layer``, which PyTorch keeps for float32 LSTMs, as
cuDNN fuses all of them. LSTMs with projections stay steps.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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

@torch.library.custom_op("foretell::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows of `a` (m, k) that fall into groups ending at `ends` (g,), each with its own matrix of `b` (g, k, n)."""
    starts = [0, *ends.tolist()]
    return torch.cat([a[s:e] @ b[g] for g, (s, e) in enumerate(itertools.pairwise(starts))])


@grouped_mm.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[-1]))


@torch.library.custom_op("foretell::grouped_mm_weight", mutates_args=())
def grouped_mm_weight(a: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Weight gradients (g, k, n): rows of `a` (m, k) against rows of `grad` (m, n), summed within each group."""
    starts = [0, *ends.tolist()]
    return torch.stack([a[s:e].T @ grad[s:e] for s, e in itertools.pairwise(starts)])


@grouped_mm_weight.register_fake
def _(a: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty((ends.shape[0], a.shape[1], grad.shape[1]))


def _grouped_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, ends = ctx.saved_tensors
    grad_a = grouped_mm(grad, b.transpose(-2, -1), ends) if ctx.needs_input_grad[0] else None
    grad_b = grouped_mm_weight(a, grad, ends) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b, None


grouped_mm.register_autograd(_grouped_backward, setup_context=_grouped_setup)


def _grouped(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if a.dim() != 2 or b.dim() != 3 or offs is None:
        raise RuntimeError(f"grouped product of {tuple(a.shape)} and {tuple(b.shape)}: only rows by group are known")
    out = grouped_mm(a, b, offs)
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)


_RECURRENT = {"rnn_relu.input": 0, "rnn_tanh.input": 1, "lstm.input": 2, "gru.input": 3}  # PyTorch's numbers


def _recurrent(
    mode: int,
    input: Tensor,
    hx: Tensor | list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Layer by layer, as PyTorch's LSTM does; x (steps, batch, features), states (layers · directions, batch, H)."""
    first = [hx] if isinstance(hx, Tensor) else hx
    each, directions = (4 if has_biases else 2), (2 if bidirectional else 1)
    if len(params) != num_layers * directions * each:  # projections
        return torch.ops.aten.lstm.input.decompose(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    x = (input.transpose(0, 1) if batch_first else input).contiguous()
    none = [] if has_biases and len(first) == 2 else [x.new_empty(0)]  # in the place of biases, of a cell state
    final: list[list[Tensor]] = [[] for _ in first]
    for layer in range(num_layers):
        sides = []
        for side in range(directions):
            at = layer * directions + side
            weights = [*params[at * each : (at + 1) * each], *none, *none][:4]
            h, c = [*(state[at] for state in first), *none][:2]
            out, *last, _ = torch.ops.aten.mkldnn_rnn_layer(
                x, *weights, h, c, bool(side), [], mode, h.shape[-1], 1, has_biases, False, False, train
            )
            sides.append(out)
            for states, state in zip(final, last, strict=False):  # no cell state: one less
                states.append(state)
        x = sides[0] if directions == 1 else torch.cat(sides, -1)
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    stacked = [torch.stack(states) for states in final]
    return (x.transpose(0, 1) if batch_first else x), *stacked


@contextmanager
def fused_operations() -> Iterator[None]:
    """While active, attention, a grouped product, a recurrent layer's direction are each one operation on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding a registered kernel is the point
            library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
            library.impl("_grouped_mm", _grouped, "AutogradCPU")
            for name, mode in _RECURRENT.items():
                library.impl(name, partial(_recurrent, mode), "AutogradCPU")
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
    if query.dim() > 3 and key.shape[-3] not in (1, query.shape[-3]) and not enable_gqa:
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
        t if t.dim() < 4 or t.shape[:-3] == lead else t.expand(*lead, *t.shape[-3:]) for t in (query, key, value)
    )
    return sdpa(query, key, value, attn_mask, is_causal)[0]
