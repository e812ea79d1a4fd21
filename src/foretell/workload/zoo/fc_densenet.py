"""Fully convolutional DenseNets for segmentation, and the same with harmonic blocks (FC-HarDNet).

S. Jégou, M. Drozdzal, D. Vazquez, A. Romero, Y. Bengio: The One Hundred Layers Tiramisu. CVPR Workshops 2017.
P. Chao et al.: HarDNet: A Low Memory Traffic Network. ICCV 2019, section 4.1 and tables 2 and 3.

Down: dense block with its input kept, then 1×1 convolution and max pooling. Up: transposed convolution of what the
block below made anew, joined with the skip connection. The last block puts out only what it made anew: with that,
the HarDNet paper's convolutional traffic comes out to the megabyte for all its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from foretell.workload.zoo import registry
from foretell.workload.zoo.hardnet import HarmonicDenseBlock

Block = Callable[[int, bool], nn.Module]  # (input channels, keep the input) → module with `out_channels`


def norm_conv(inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
    """Batch norm, ReLU, convolution, dropout."""
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2),
        nn.Dropout2d(0.2),
    )


class DenseBlock(nn.Module):
    """`depth` layers, each reading the input and all layers before it: (N, C, H, W) → (N, `out_channels`, H, W)."""

    def __init__(self, in_channels: int, growth: int, depth: int, keep_input: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(norm_conv(in_channels + i * growth, growth) for i in range(depth))
        self.keep_input = keep_input
        self.out_channels = depth * growth + (in_channels if keep_input else 0)

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for layer in self.layers:
            new = layer(x)
            made.append(new)
            x = torch.cat([x, new], 1)
        return x if self.keep_input else torch.cat(made, 1)


class FullyConvolutional(nn.Module):
    """U-shaped segmentation: images (N, 3, H, W) → logits (N, `num_classes`, H, W); H and W divisible by 32.

    `blocks` make the dense blocks from the highest resolution to the lowest; the way up mirrors the way down.
    """

    def __init__(self, stem: int, blocks: Sequence[Block], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, stem, 3, padding=1)
        self.down = nn.ModuleList()
        self.shrink = nn.ModuleList()
        channels = stem
        skips: list[int] = []
        for make in blocks[:-1]:
            block = make(channels, True)
            channels = block.out_channels
            self.down.append(block)
            self.shrink.append(nn.Sequential(norm_conv(channels, channels, 1), nn.MaxPool2d(2, 2)))
            skips.append(channels)
        self.bottom = blocks[-1](channels, False)
        channels = self.bottom.out_channels
        self.grow = nn.ModuleList()
        self.up = nn.ModuleList()
        for make, skip in zip(blocks[-2::-1], skips[::-1], strict=True):
            self.grow.append(nn.ConvTranspose2d(channels, channels, 3, 2, 1, output_padding=1))
            block = make(channels + skip, False)
            self.up.append(block)
            channels = block.out_channels
        self.head = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips: list[Tensor] = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x)
            skips.append(x)
            x = shrink(x)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], 1))
        return self.head(x)


_DENSE = {  # first convolution, growth, block depths
    "fc_densenet56": (48, 12, (4, 4, 4, 4, 4, 4)),
    "fc_densenet67": (48, 16, (5, 5, 5, 5, 5, 5)),
    "fc_densenet103": (48, 16, (4, 5, 7, 10, 12, 15)),
}
_HARMONIC = {  # first convolution, multiplier, (block depth, growth)
    "fc_hardnet68": (8, 1.7, ((4, 4), (4, 6), (4, 8), (4, 8), (8, 10), (8, 10))),
    "fc_hardnet76": (24, 1.7, ((4, 8), (4, 10), (4, 12), (8, 12), (8, 12), (8, 14))),
    "fc_hardnet84": (32, 1.7, ((4, 10), (4, 12), (8, 14), (8, 16), (8, 20), (8, 22))),
}


def fc_densenet(name: str, num_classes: int = 11) -> FullyConvolutional:
    """FC-DenseNet of a published depth."""
    stem, growth, depths = _DENSE[name]
    blocks = [partial(_dense, growth, depth) for depth in depths]
    return FullyConvolutional(stem, blocks, num_classes)


def fc_hardnet(name: str, num_classes: int = 11) -> FullyConvolutional:
    """FC-HarDNet of table 3."""
    stem, multiplier, layout = _HARMONIC[name]
    blocks = [partial(_harmonic, growth, multiplier, depth) for depth, growth in layout]
    return FullyConvolutional(stem, blocks, num_classes)


def _dense(growth: int, depth: int, channels: int, keep_input: bool) -> nn.Module:
    return DenseBlock(channels, growth, depth, keep_input)


def _harmonic(growth: int, multiplier: float, depth: int, channels: int, keep_input: bool) -> nn.Module:
    return HarmonicDenseBlock(channels, growth, multiplier, depth, norm_conv, keep_input)


for _name in _DENSE:
    registry.add(
        _name,
        partial(fc_densenet, _name),
        input_size=(352, 480),
        num_classes=11,
        source="Jégou et al., The One Hundred Layers Tiramisu, CVPR Workshops 2017, tables 1 and 2",
    )
for _name in _HARMONIC:
    registry.add(
        _name,
        partial(fc_hardnet, _name),
        input_size=(352, 480),
        num_classes=11,
        source="Chao et al., HarDNet, ICCV 2019, table 3",
    )
