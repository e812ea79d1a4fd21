"""Outputs of ops whose fake implementation is slow (PyTorch decomposes a batch norm anew for every shape) or knows less
than the op (the gradients of a recurrent layer, to PyTorch always an LSTM's).

Each function takes the op's arguments and returns fake outputs of the very shapes, types and strides; a test holds
them equal to what the decomposition gives, but for one thing: saved statistics of half-precision inputs are float32, as
cuDNN keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in _HALF else x.dtype


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.shape[1] if training else 0
    saved = [x.new_empty((channels,), dtype=_statistics_dtype(x)) for _ in range(2)]
    return torch.empty_like(x), saved[0], saved[1]


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    saved_mean: Tensor | None,
    saved_rstd: Tensor | None,
    training: bool,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dtype = x.dtype if weight is None else weight.dtype
    vectors = [x.new_empty((x.shape[1],), dtype=dtype) if flag else None for flag in wanted[1:]]
    return (torch.empty_like(x) if wanted[0] else None), vectors[0], vectors[1]


def _recurrent_backward(
    x: Tensor, w_in: Tensor, w_hidden: Tensor, b_in: Tensor, b_hidden: Tensor, h: Tensor, c: Tensor, *_others: Any
) -> tuple[Tensor, ...]:
    bias = torch.empty_like(b_in)  # both biases have one gradient
    return (*(torch.empty_like(t) for t in (x, w_in, w_hidden)), bias, bias, h.new_empty(h.shape), c.new_empty(c.shape))


SHAPES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _recurrent_backward,
}
