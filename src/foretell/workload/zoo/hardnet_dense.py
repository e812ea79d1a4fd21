"""HarDNet-96s, -117s, -138s: harmonic blocks in place of DenseNet's, with its dense connections between blocks.

Section 3.3 and table 1 of Chao et al., HarDNet, ICCV 2019. The paper leaves open which layers of a block get a
bottleneck, whether blocks at one resolution have a transition between them, and how widths are rounded. The readings
taken here (every fourth layer; yes; harmonic widths to even numbers, others down) are those under which layer counts
are the models' names and parameters, multiply-adds and convolutional traffic of all three are table 4's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from foretell.workload.zoo import registry
from foretell.workload.zoo.hardnet import HarmonicDenseBlock

REDUCTION = 0.85  # channels kept by a transition


def norm_conv(inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
    """Batch norm, ReLU, convolution: DenseNet's order."""
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class _Layers:
    """Makes a block's layers in order: every fourth goes through √(inputs · outputs) channels first."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, inputs: int, outputs: int) -> nn.Module:
        self.number += 1
        if self.number % 4:
            return norm_conv(inputs, outputs)
        bottleneck = int(math.sqrt(inputs / outputs) * outputs)
        return nn.Sequential(norm_conv(inputs, bottleneck, 1), norm_conv(bottleneck, outputs))


class InvertedTransition(nn.Module):
    """Halve the resolution by max and by average pooling, side by side, then mix with a 1×1 convolution (figure 3a)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.act = nn.ReLU(inplace=True)
        self.max_pool = nn.MaxPool2d(2, 2)
        self.avg_pool = nn.AvgPool2d(2, 2)
        self.conv = nn.Conv2d(2 * inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(x))
        return self.conv(torch.cat([self.max_pool(x), self.avg_pool(x)], 1))


class DenseHarDNet(nn.Module):
    """Classifier: images (N, 3, H, W) → logits (N, `num_classes`). `stages` are block depths per resolution."""

    def __init__(
        self, growth: int, multiplier: float, stages: Sequence[Sequence[int]], num_classes: int = 1000
    ) -> None:
        super().__init__()
        features: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = 64
        depths = [(depth, i == len(stage) - 1) for stage in stages for i, depth in enumerate(stage)]
        for number, (depth, last_of_stage) in enumerate(depths):
            block = HarmonicDenseBlock(channels, growth, multiplier, depth, _Layers(), keep_input=True)
            features.append(block)
            channels = block.out_channels
            if number < len(depths) - 1:
                kept = int(REDUCTION * channels)
                make = InvertedTransition if last_of_stage else partial(norm_conv, kernel=1)
                features.append(make(channels, kept))
                channels = kept
        self.features = nn.Sequential(*features, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


_SIZES = {
    "hardnet96s": (20, 1.6, ((8,), (16,), (16, 16), (16,))),
    "hardnet117s": (26, 1.6, ((8,), (16,), (16, 16, 16), (16,))),
    "hardnet138s": (30, 1.6, ((8,), (16,), (16, 16, 16), (16, 16))),
}


def dense_hardnet(name: str, num_classes: int = 1000) -> DenseHarDNet:
    """One of table 1's models."""
    return DenseHarDNet(*_SIZES[name], num_classes)


for _name in _SIZES:
    registry.add(
        _name,
        partial(dense_hardnet, _name),
        input_size=(224, 224),
        source="Chao et al., HarDNet, ICCV 2019, table 1",
    )
