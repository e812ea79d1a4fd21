"""FBNet: 22 layers of nine candidate blocks, on 32 × 32 images with 100 classes.

B. Wu et al., FBNet: Hardware-Aware Efficient ConvNet Design via Differentiable Neural Architecture Search, CVPR 2019,
in the CIFAR form of HW-NAS-Bench (C. Li et al., ICLR 2021, MIT licence; ``fbnet_models``), which HELP took its FBNet
space from: strides 1 1 2 2 1 2 1 and a head of 1,504 channels, where ImageNet's has strides 1 2 2 2 1 2 1 and 1,984.
A block is a 1×1 convolution that expands, a depthwise one, and a 1×1 that projects; blocks of two groups shuffle their
channels between. A skip that must change shape is a 1×1 convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from foretell.accuracy.spaces.rows import Map, Row, Rows, batch_norm, classifier, convolution, global_pool, pointwise
from foretell.errors import InputError

# (kernel, expansion, groups) of each candidate; None is the skip.
BLOCKS = ((3, 1, 1), (3, 1, 2), (3, 3, 1), (3, 6, 1), (5, 1, 1), (5, 1, 2), (5, 3, 1), (5, 6, 1), None)
# (channels, layers, stride of the first) of each stage.
STAGES = ((16, 1, 1), (24, 4, 1), (32, 4, 2), (64, 4, 2), (112, 4, 1), (184, 4, 2), (352, 1, 1))
LAYERS = sum(layers for _, layers, _ in STAGES)
STEM, HEAD, SIZE = 16, 1504, 32


@cache
def _conv_norm(x: Map, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> tuple[Map, Rows]:
    y, rows = convolution(x, channels, kernel, stride, groups)
    return y, (*rows, *batch_norm(y))


@cache
def _conv_norm_relu(x: Map, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> tuple[Map, Rows]:
    y, rows = _conv_norm(x, channels, kernel, stride, groups)
    return y, (*rows, *pointwise("relu_.default", y))


@cache
def _shuffle(x: Map) -> Rows:
    traffic = 4 * x.elements
    views = [Row(f"aten.{name}.default", "view", x.elements, 0, 0, 2) for name in ("view", "permute", "view")]
    return (*views[:2], Row("aten.clone.default", "copy", x.elements, traffic, traffic, 2), views[2])


@cache
def _block(choice: int, x: Map, channels: int, stride: int) -> tuple[Map, Rows]:
    block = BLOCKS[choice]
    if block is None:
        same = x.channels == channels and stride == 1
        return (x, ()) if same else _conv_norm_relu(x, channels, 1, stride)
    kernel, expansion, groups = block
    wide, rows = _conv_norm_relu(x, x.channels * expansion, 1, groups=groups)
    if groups > 1:
        rows += _shuffle(wide)
    deep, depthwise = _conv_norm_relu(wide, wide.channels, kernel, stride, wide.channels)
    y, projection = _conv_norm(deep, channels, 1, groups=groups)
    rows += depthwise + projection
    if y == x:
        rows += pointwise("add_.Tensor", y, y)
    return y, rows


def rows(choices: Sequence[int], batch: int, classes: int = 100) -> Rows:
    """The ops of one forward pass, in order; `choices` index `BLOCKS`."""
    if len(choices) != LAYERS or not all(type(c) is int and 0 <= c < len(BLOCKS) for c in choices):
        raise InputError(f"{str(list(choices))[:120]} is not {LAYERS} choices of 0 … {len(BLOCKS) - 1}", "FBNet")
    x, stem = _conv_norm_relu(Map(batch, 3, SIZE), STEM, 3)
    parts, choice = [stem], iter(choices)
    for channels, layers, stride in STAGES:
        for layer in range(layers):
            x, block = _block(next(choice), x, channels, stride if layer == 0 else 1)
            parts.append(block)
    x, head = _conv_norm_relu(x, HEAD, 1)
    parts += [head, global_pool(x), classifier(batch, x.channels, classes)]
    return tuple(row for part in parts for row in part)
