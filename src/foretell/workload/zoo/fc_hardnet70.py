"""FC-HarDNet-70 for Cityscapes: a U shape of harmonic blocks without keeping their inputs, upsampled bilinearly.

From the authors' implementation (PingoLH/FCHarDNet): 4.1 M parameters, 35.4 GMAC at 1024×2048.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretell.workload.zoo import registry
from foretell.workload.zoo.hardnet import HarmonicDenseBlock, conv_norm

MULTIPLIER = 1.7
STEM = ((16, 2), (24, 1), (32, 2), (48, 1))  # (channels, stride) of the 3×3 convolutions
STAGES = ((4, 10, 64), (4, 16, 96), (8, 18, 160), (8, 24, 224), (8, 32, 320))  # depth, growth, transition channels

_conv = partial(conv_norm, act=nn.ReLU)


class FCHarDNet70(nn.Module):
    """Images (N, 3, H, W) → logits (N, `num_classes`, H, W); H and W divisible by 64."""

    def __init__(self, num_classes: int = 19) -> None:
        super().__init__()
        stem: list[nn.Module] = []
        channels = 3
        for width, stride in STEM:
            stem.append(_conv(channels, width, stride=stride))
            channels = width
        self.stem = nn.Sequential(*stem)
        self.down = nn.ModuleList()
        self.mix = nn.ModuleList()
        skips: list[int] = []
        for depth, growth, transition in STAGES:
            block = HarmonicDenseBlock(channels, growth, MULTIPLIER, depth, _conv)
            self.down.append(block)
            self.mix.append(_conv(block.out_channels, transition, 1))
            skips.append(block.out_channels)
            channels = transition
        self.pool = nn.AvgPool2d(2, 2)
        self.join = nn.ModuleList()
        self.up = nn.ModuleList()
        for (depth, growth, _), skip in zip(STAGES[-2::-1], skips[-2::-1], strict=True):
            joined = (channels + skip) // 2
            self.join.append(_conv(channels + skip, joined, 1))
            block = HarmonicDenseBlock(joined, growth, MULTIPLIER, depth, _conv)
            self.up.append(block)
            channels = block.out_channels
        self.head = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        x = self.stem(x)
        skips: list[Tensor] = []
        last = len(self.down) - 1
        for number, (block, mix) in enumerate(zip(self.down, self.mix, strict=True)):
            x = block(x)
            if number < last:
                skips.append(x)
            x = mix(x)
            if number < last:
                x = self.pool(x)
        for join, block in zip(self.join, self.up, strict=True):
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=True)
            x = block(join(torch.cat([x, skip], 1)))
        return F.interpolate(self.head(x), size=size, mode="bilinear", align_corners=True)


registry.add(
    "fc_hardnet70",
    FCHarDNet70,
    input_size=(1024, 2048),
    num_classes=19,
    source="PingoLH/FCHarDNet (MIT); Chao et al., HarDNet, ICCV 2019",
)
