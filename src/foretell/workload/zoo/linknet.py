"""LinkNet: segmentation whose decoder adds what the encoder saw.

A. Chaurasia, E. Culurciello: LinkNet: Exploiting Encoder Representations for Efficient Semantic Segmentation. VCIP
2017. Sizes are those of its table I and of the authors' implementation (e-lab/LinkNet, BSD).
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor, nn

from foretell.workload.zoo import registry
from foretell.workload.zoo.blocks import conv_norm


class BasicBlock(nn.Module):
    """ResNet-18's block: two 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *conv_norm(inputs, outputs, 3, stride), nn.ReLU(inplace=True), *conv_norm(outputs, outputs, 3)
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_norm(inputs, outputs, 1, stride))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layers(x) + self.shortcut(x))


class Decoder(nn.Module):
    """1×1 to a quarter of the channels, 3×3 transposed convolution to `size`, 1×1 to `outputs`."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = inputs // 4
        self.reduce = nn.Sequential(nn.Conv2d(inputs, inner, 1), nn.BatchNorm2d(inner), nn.ReLU(inplace=True))
        self.grow = nn.ConvTranspose2d(inner, inner, 3, stride, 1)
        self.expand = nn.Sequential(
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outputs, 1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor, size: list[int]) -> Tensor:
        return self.expand(self.grow(self.reduce(x), size))


class LinkNet(nn.Module):
    """Images (N, 3, H, W), sides multiples of 4 → logits (N, `num_classes`, H, W).

    With `join` the encoder's outputs are joined to the decoder's, as U-Net does, and not added: the alternative whose
    cost the paper's choice saves.
    """

    def __init__(self, num_classes: int = 20, join: bool = False) -> None:
        super().__init__()
        widths = (64, 64, 128, 256, 512)
        self.stem = nn.Sequential(*conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.encoders, self.decoders = nn.ModuleList(), nn.ModuleList()
        self.join = join
        for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            stride = 2 if number else 1
            self.encoders.append(nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)))
            deepest = number == len(widths) - 2
            self.decoders.append(Decoder(2 * outputs if join and not deepest else outputs, inputs, stride))
        last = 2 * 64 if join else 64
        self.head = nn.Sequential(
            nn.ConvTranspose2d(last, 32, 3, 2, 1, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(32, num_classes, 2, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.stem(x)]
        for encoder in self.encoders:
            seen.append(encoder(seen[-1]))
        y = seen.pop()
        for decoder in reversed(self.decoders):
            skip = seen.pop()
            y = decoder(y, list(skip.shape[-2:]))
            y = torch.cat([y, skip], 1) if self.join else torch.relu(y + skip)
        return self.head(y)


registry.add(
    "linknet",
    LinkNet,
    input_size=(360, 640),
    num_classes=20,
    source="Chaurasia and Culurciello, LinkNet, VCIP 2017, table I",
)
registry.add(
    "linknet_joined",
    partial(LinkNet, join=True),
    input_size=(360, 640),
    num_classes=20,
    source="LinkNet with its additions replaced by joins, as U-Net (MICCAI 2015) has them",
)
