"""Once-for-all MobileNetV3: five stages of two to four inverted bottlenecks, with kernels and expansions of each block.

H. Cai et al., Once for All: Train One Network and Specialize it for Efficient Deployment, ICLR 2020, and its code
(MIT licence; ``OFAMobileNetV3``). Its hard swish and hard sigmoid are written out: x + 3, relu6, product, division, a
kernel each; squeeze-and-excitation averages rows first, then columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from foretell.accuracy.spaces.rows import Map, Rows, batch_norm, classifier, convolution, mean, pointwise
from foretell.errors import InputError

WIDTH = 1.2
# (channels, stride, activation, squeeze-and-excitation) of each stage.
STAGES = (
    (24, 2, "relu", False),
    (40, 2, "relu", True),
    (80, 2, "swish", False),
    (112, 1, "swish", True),
    (160, 2, "swish", True),
)
STEM, FINAL, MIX = 16, 960, 1280
DEPTH = 4  # blocks a stage may have
KERNELS, EXPANSIONS, DEPTHS, RESOLUTIONS = (3, 5, 7), (3, 4, 6), (2, 3, 4), range(32, 513)
_NOTHING: Rows = ()


def divisible(channels: float) -> int:
    """To the nearest multiple of 8, and never below nine tenths (make_divisible of the MobileNets)."""
    whole = max(8, int(channels + 4) // 8 * 8)
    return whole + 8 if whole < 0.9 * channels else whole


@cache
def _swish(x: Map) -> Rows:
    return (
        *pointwise("add.Tensor", x),
        *pointwise("hardtanh_.default", x),
        *pointwise("mul.Tensor", x, x),
        *pointwise("div.Tensor", x),
    )


def _activation(name: str, x: Map) -> Rows:
    return pointwise("relu_.default", x) if name == "relu" else _swish(x)


@cache
def _squeeze(x: Map) -> Rows:
    one = Map(x.batch, x.channels, 1)
    small, reduce = convolution(one, divisible(x.channels // 4), bias=True)
    gate = (pointwise(name, one) for name in ("add.Tensor", "hardtanh_.default", "div.Tensor"))
    return (
        *mean(x, 3),
        *mean(x, 2),
        *reduce,
        *pointwise("relu_.default", small),
        *convolution(small, x.channels, bias=True)[1],
        *(row for rows in gate for row in rows),
        *pointwise("mul.Tensor", x, one),
    )


@cache
def _conv_norm(x: Map, channels: int, kernel: int, stride: int, groups: int, activation: str) -> tuple[Map, Rows]:
    y, rows = convolution(x, channels, kernel, stride, groups)
    return y, (*rows, *batch_norm(y), *(_activation(activation, y) if activation else ()))


@cache
def _block(
    x: Map, channels: int, kernel: int, expansion: int, stride: int, activation: str, squeeze: bool
) -> tuple[Map, Rows]:
    wide, rows = x, _NOTHING
    if expansion != 1:
        wide, rows = _conv_norm(x, divisible(x.channels * expansion), 1, 1, 1, activation)
    deep, depthwise = _conv_norm(wide, wide.channels, kernel, stride, wide.channels, activation)
    y, projection = _conv_norm(deep, channels, 1, 1, 1, "")
    rows += depthwise + (_squeeze(deep) if squeeze else _NOTHING) + projection
    return y, rows + pointwise("add.Tensor", y, y) if y == x else rows


def rows(
    kernels: Sequence[int],
    expansions: Sequence[int],
    depths: Sequence[int],
    resolution: int,
    batch: int,
    *,
    width: float = WIDTH,
    classes: int = 1000,
) -> Rows:
    """The ops of one forward pass, in order.

    `kernels` and `expansions` have four numbers a stage, of which the first ``depths[stage]`` count.
    """
    blocks = len(STAGES) * DEPTH
    if len(kernels) != blocks or len(expansions) != blocks or len(depths) != len(STAGES) or max(depths) > DEPTH:
        raise InputError(f"not {blocks} kernels and expansions and {len(STAGES)} depths up to {DEPTH}", "OFA")
    for name, given, allowed in (
        ("kernel", kernels, KERNELS), ("expansion", expansions, EXPANSIONS), ("depth", depths, DEPTHS),
        ("resolution", (resolution,), RESOLUTIONS),
    ):
        for value in given:
            if type(value) is not int or value not in allowed:
                raise InputError(f"{str(value)[:40]} is no {name}: {allowed[0]} to {allowed[-1]}", "OFA")
    stem = divisible(STEM * width)
    x, first = _conv_norm(Map(batch, 3, resolution), stem, 3, 2, 1, "swish")
    parts = [first]
    x, block = _block(x, stem, 3, 1, 1, "relu", False)
    parts.append(block)
    for stage, (channels, stride, activation, squeeze) in enumerate(STAGES):
        for layer in range(depths[stage]):
            i = stage * DEPTH + layer
            step = stride if layer == 0 else 1
            x, block = _block(x, divisible(channels * width), kernels[i], expansions[i], step, activation, squeeze)
            parts.append(block)
    x, final = _conv_norm(x, divisible(FINAL * width), 1, 1, 1, "swish")
    one, mix = convolution(Map(batch, x.channels, 1), divisible(MIX * width))
    parts += [final, mean(x, 3), mean(x, 2), mix, _swish(one), classifier(batch, one.channels, classes)]
    return tuple(row for part in parts for row in part)
