"""Algebra of the maps that a convolution can express, so that a sum of branches can be written as one convolution.

A branch is either an `Affine` map (a convolution and a bias) or a `Channelwise` one (every channel scaled and
shifted: an identity, a batch norm). Composing with a batch norm and adding two branches stay within the two.
All products are taken in float64 and rounded once, where the convolution is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, slots=True)
class Channelwise:
    """y[c] = scale[c]·x[c] + shift[c]. None stands for 1 and for 0."""

    scale: Tensor | None = None
    shift: Tensor | None = None

    def normalised(self, scale: Tensor, shift: Tensor) -> Channelwise:
        """This map, then `scale` and `shift` a channel."""
        return Channelwise(
            scale if self.scale is None else self.scale * scale,
            shift if self.shift is None else self.shift * scale + shift,
        )

    def shifted(self, amount: float | Tensor) -> Channelwise | None:
        """This map, then the same number added everywhere; None where the number of channels is unknown."""
        known = self.shift if self.shift is not None else self.scale
        if known is None:
            return None
        return replace(self, shift=(0 if self.shift is None else self.shift) + torch.full_like(known, 1.0) * amount)


@dataclass(frozen=True, slots=True)
class Affine:
    """A convolution with a bias. `weight` is (outputs, inputs/groups, *kernel), `bias` (outputs,), both float64."""

    weight: Tensor
    bias: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def inputs(self) -> int:
        """Channels read."""
        return self.weight.shape[1] * self.groups

    @property
    def outputs(self) -> int:
        """Channels written."""
        return self.weight.shape[0]

    @property
    def kernel(self) -> tuple[int, ...]:
        """Taps in each dimension."""
        return tuple(self.weight.shape[2:])

    def normalised(self, scale: Tensor, shift: Tensor) -> Affine:
        """This map, then `scale` and `shift` an output channel (a batch norm at inference)."""
        shape = (-1,) + (1,) * (self.weight.dim() - 1)
        return replace(self, weight=self.weight * scale.reshape(shape), bias=self.bias * scale + shift)

    def shifted(self, amount: float | Tensor) -> Affine:
        """This map, then the same number added everywhere."""
        return replace(self, bias=self.bias + amount)

    def to_module(self, like: Convolution) -> Convolution:
        """A convolution of the class and element type of `like` that computes this map."""
        weight = like.weight
        shape = (self.inputs, self.outputs, self.kernel, self.stride, self.padding, self.dilation, self.groups)
        module: Convolution = type(like)(*shape, device="meta")  # type: ignore[arg-type]
        module.weight = nn.Parameter(self.weight.to(weight.dtype), requires_grad=weight.requires_grad)
        module.bias = nn.Parameter(self.bias.to(weight.dtype), requires_grad=weight.requires_grad)
        module.train(like.training)
        return module


Map = Affine | Channelwise


def affine_of(conv: Convolution) -> Affine | None:
    """The map of a convolution; None where it is none we can express (a subclass, other padding than zeros, hooks)."""
    if type(conv) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d) or conv.padding_mode != "zeros" or _hooked(conv):
        return None
    dilation: tuple[int, ...] = conv.dilation
    if isinstance(conv.padding, str):
        total = [d * (k - 1) for d, k in zip(dilation, conv.kernel_size, strict=True)]
        if conv.padding == "valid":
            total = [0] * len(total)
        if any(t % 2 for t in total):
            return None  # padded on one side more than on the other
        padding = tuple(t // 2 for t in total)
    else:
        padding = tuple(conv.padding)
    weight = conv.weight.detach().double()
    bias = weight.new_zeros(weight.shape[0]) if conv.bias is None else conv.bias.detach().double()
    return Affine(weight, bias, tuple(conv.stride), padding, tuple(dilation), conv.groups)


def norm_of(norm: _BatchNorm) -> tuple[Tensor, Tensor] | None:
    """(scale, shift) a channel that a batch norm applies at inference; None where it uses the batch's statistics."""
    if norm.training or norm.running_mean is None or norm.running_var is None or _hooked(norm):
        return None
    return scale_and_shift(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)


def scale_and_shift(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """weight·(x - mean)/√(variance + eps) + bias as scale·x + shift, in float64."""
    scale = (variance.detach().double() + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.detach().double()
    shift = -mean.detach().double() * scale
    if bias is not None:
        shift = shift + bias.detach().double()
    return scale, shift


def added(first: Map, second: Map) -> Map | None:
    """The sum of two maps of one input; None where no single convolution of no more work computes it."""
    if isinstance(first, Channelwise) and isinstance(second, Channelwise):
        return _sum_channelwise(first, second)
    if isinstance(first, Channelwise):
        first, second = second, first
    assert isinstance(first, Affine)
    if isinstance(second, Channelwise):
        expressed = _as_affine(second, first)
        # One tap more on a kernel that reads the pixel anyway: no work.
        return None if expressed is None else _sum_affine(first, expressed, first.weight.numel())
    return _sum_affine(first, second, first.weight.numel() + second.weight.numel())


def _sum_channelwise(first: Channelwise, second: Channelwise) -> Channelwise | None:
    if first.scale is None and second.scale is None:
        return None  # 2·x: the number of channels is unknown, and there is nothing to gain
    known = first.scale if first.scale is not None else second.scale
    assert known is not None
    one, zero = torch.ones_like(known), torch.zeros_like(known)
    return Channelwise(
        (one if first.scale is None else first.scale) + (one if second.scale is None else second.scale),
        (zero if first.shift is None else first.shift) + (zero if second.shift is None else second.shift),
    )


def _as_affine(channelwise: Channelwise, partner: Affine) -> Affine | None:
    """A channelwise map as a 1×…×1 convolution in the groups of `partner`."""
    if partner.inputs != partner.outputs or any(s != 1 for s in partner.stride):
        return None
    channels, dims = partner.inputs, len(partner.kernel)
    weight = partner.weight
    scale = weight.new_ones(channels) if channelwise.scale is None else channelwise.scale
    shift = weight.new_zeros(channels) if channelwise.shift is None else channelwise.shift
    if len(scale) != channels:
        return None
    a_group = channels // partner.groups
    device = weight.device
    own = torch.arange(channels, device=device) % a_group  # the input of its group that an output stands for
    delta = (own[:, None] == torch.arange(a_group, device=device)).double()
    kernel = (delta * scale[:, None]).reshape(channels, a_group, *(1,) * dims)
    return Affine(kernel, shift, (1,) * dims, (0,) * dims, (1,) * dims, partner.groups)


def _sum_affine(first: Affine, second: Affine, most_weights: int) -> Affine | None:
    """The sum as one convolution whose kernel covers the taps of both, if it has at most `most_weights` weights."""
    same = first.stride == second.stride and first.groups == second.groups
    if not same or first.weight.dim() != second.weight.dim():
        return None
    if first.outputs != second.outputs or first.inputs != second.inputs:
        return None
    dims = len(first.kernel)
    padding, kernel, dilation = [], [], []
    for d in range(dims):
        spread = _common_dilation(first, second, d)
        if spread is None:
            return None
        # Taps read x[i·stride - padding + t·dilation]: `low` and `high` bound those offsets over both kernels.
        low = -max(first.padding[d], second.padding[d])
        high = max((c.kernel[d] - 1) * c.dilation[d] - c.padding[d] for c in (first, second))
        for conv in (first, second):
            if (-conv.padding[d] - low) % spread:
                return None  # the two grids of taps interleave
            if 2 * conv.padding[d] - (conv.kernel[d] - 1) * conv.dilation[d] != -low - high:
                return None  # the outputs differ in size
        padding.append(-low)
        kernel.append((high - low) // spread + 1)
        dilation.append(spread)
    if first.outputs * first.weight.shape[1] * math.prod(kernel) > most_weights:
        return None
    weight = first.weight.new_zeros(first.outputs, first.weight.shape[1], *kernel)
    for conv in (first, second):
        weight = weight + _placed(conv, kernel, padding, dilation)
    return Affine(weight, first.bias + second.bias, first.stride, tuple(padding), tuple(dilation), first.groups)


def _common_dilation(first: Affine, second: Affine, d: int) -> int | None:
    """The dilation both kernels have along `d`; one of a single tap has any."""
    spreads = {c.dilation[d] for c in (first, second) if c.kernel[d] > 1}
    return spreads.pop() if len(spreads) == 1 else 1 if not spreads else None


def _placed(conv: Affine, kernel: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """`conv`'s kernel inside the larger one, zeros around it."""
    pads: list[int] = []
    for d in reversed(range(len(kernel))):  # `pad` starts at the last dimension
        before = (padding[d] - conv.padding[d]) // dilation[d]
        pads += [before, kernel[d] - conv.kernel[d] - before]
    return nn.functional.pad(conv.weight, pads)


def _hooked(module: nn.Module) -> bool:
    """Does more than its forward happen when `module` is called?"""
    return bool(module._forward_hooks or module._forward_pre_hooks)
