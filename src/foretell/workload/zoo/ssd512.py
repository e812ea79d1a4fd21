"""SSD at 512×512 without its default boxes and suppression: what the network itself computes.

W. Liu, D. Anguelov, D. Erhan, C. Szegedy, S. Reed, C.-Y. Fu, A. Berg: SSD: Single Shot MultiBox Detector. ECCV 2016
(VGG-16 backbone); Chao et al., HarDNet, ICCV 2019, section 4.3 (HarDNet-68 backbone and its bridge).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foretell.workload.zoo import registry
from foretell.workload.zoo.hardnet import HarDNet, conv_norm, hardnet68

COORDINATES = 4


class L2Norm(nn.Module):
    """Scale each position's channel vector to unit length, then by a learned factor a channel."""

    def __init__(self, channels: int, scale: float = 20.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels,), scale))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.weight[:, None, None]


class SSD512(nn.Module):
    """Images (N, 3, 512, 512) → (locations (N, boxes, 4), class scores (N, boxes, `num_classes`)).

    `lower` ends in the first source (stride 8), `upper` goes on to the second (stride 16); `channels` are theirs and
    `boxes` the default boxes a position has in each of the seven sources.
    """

    def __init__(
        self,
        lower: nn.Module,
        upper: nn.Module,
        channels: tuple[int, int],
        boxes: tuple[int, int, int, int, int, int, int],
        num_classes: int,
    ) -> None:
        super().__init__()
        self.lower, self.upper = lower, upper
        self.norm = L2Norm(channels[0])
        self.extras = nn.ModuleList(
            _extra(inputs, middle, outputs, kernel, stride)
            for inputs, middle, outputs, kernel, stride in (
                (channels[1], 256, 512, 3, 2),
                (512, 128, 256, 3, 2),
                (256, 128, 256, 3, 2),
                (256, 128, 256, 3, 2),
                (256, 128, 256, 4, 1),
            )
        )
        widths = (*channels, 512, 256, 256, 256, 256)
        self.locations = nn.ModuleList(
            nn.Conv2d(w, b * COORDINATES, 3, padding=1) for w, b in zip(widths, boxes, strict=True)
        )
        self.scores = nn.ModuleList(
            nn.Conv2d(w, b * num_classes, 3, padding=1) for w, b in zip(widths, boxes, strict=True)
        )
        self.num_classes = num_classes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.lower(x)
        sources = [self.norm(x)]
        x = self.upper(x)
        sources.append(x)
        for extra in self.extras:
            x = extra(x)
            sources.append(x)
        return (
            torch.cat([_flat(head(s), COORDINATES) for head, s in zip(self.locations, sources, strict=True)], 1),
            torch.cat([_flat(head(s), self.num_classes) for head, s in zip(self.scores, sources, strict=True)], 1),
        )


def _extra(inputs: int, middle: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, middle, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(middle, outputs, kernel, stride, 1),
        nn.ReLU(inplace=True),
    )


def _flat(x: Tensor, last: int) -> Tensor:
    """(N, boxes·last, H, W) → (N, H·W·boxes, last)."""
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, last)


def _vgg(widths: tuple[int | str, ...], channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in widths:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2, 2, ceil_mode=True))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
    return layers


def ssd512_vgg16(num_classes: int = 21) -> SSD512:
    """SSD512 on VGG-16: fully connected layers 6 and 7 turned into convolutions, the first of them dilated."""
    lower = nn.Sequential(*_vgg((64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512), 3))
    upper = nn.Sequential(
        *_vgg(("pool", 512, 512, 512), 512),
        nn.MaxPool2d(3, 1, 1),
        nn.Conv2d(512, 1024, 3, padding=6, dilation=6),
        nn.ReLU(inplace=True),
        nn.Conv2d(1024, 1024, 1),
        nn.ReLU(inplace=True),
    )
    return SSD512(lower, upper, (512, 1024), (4, 6, 6, 6, 6, 4, 4), num_classes)


def ssd512_hardnet68(num_classes: int = 21) -> SSD512:
    """SSD512 on HarDNet-68 up to stride 16, with the paper's bridge: pooling, a dilated 3×3 and a 1×1 convolution."""
    backbone: HarDNet = hardnet68()
    features = list(backbone.features)
    # Stem and pool (3), block and transition (2) with pool (1), then two blocks and transitions at stride 8.
    lower = nn.Sequential(*features[:10])
    upper = nn.Sequential(
        *features[10:13],
        nn.MaxPool2d(3, 1, 1),
        nn.Conv2d(640, 640, 3, padding=4, dilation=4, bias=False),
        nn.BatchNorm2d(640),
        nn.ReLU(inplace=True),
        conv_norm(640, 640, 1, act=nn.ReLU),
    )
    return SSD512(lower, upper, (320, 640), (6, 6, 6, 6, 6, 4, 4), num_classes)


registry.add(
    "ssd512_vgg16", ssd512_vgg16, input_size=(512, 512), num_classes=21, source="Liu et al., SSD, ECCV 2016"
)
registry.add(
    "ssd512_hardnet68",
    ssd512_hardnet68,
    input_size=(512, 512),
    num_classes=21,
    source="Chao et al., HarDNet, ICCV 2019, section 4.3; PingoLH/Pytorch-HarDNet",
)
