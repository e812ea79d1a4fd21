"""WaveMix: tokens mixed by a two-dimensional discrete wavelet transform.

P. Jeevan, K. Viswanathan, Anandu A S, A. Sethi: WaveMix: A Resource-efficient Neural Network for Image Analysis. 2022.
How levels are merged, and the stems and heads, are those of the authors' implementation (pranavphoenix/WaveMix, MIT).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from foretell.workload.zoo import registry

# Haar's four filters over a square of 2×2: mean, and its differences across, down and along the diagonal.
_HAAR = (((1, 1), (1, 1)), ((1, -1), (1, -1)), ((1, 1), (-1, -1)), ((1, -1), (-1, 1)))


class HaarTransform(nn.Module):
    """One level of the 2-D Haar transform: (N, C, H, W) → low (N, C, H/2, W/2), high (N, 3C, H/2, W/2).

    Orthonormal, so it keeps energy, and without parameters. H and W are even.
    """

    filters: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        filters = torch.tensor(_HAAR, dtype=torch.float32).unsqueeze(1) / 2
        self.register_buffer("filters", filters.repeat(channels, 1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        bands = nn.functional.conv2d(x, self.filters, stride=2, groups=self.channels).unflatten(1, (self.channels, 4))
        return bands[:, :, 0], bands[:, :, 1:].flatten(1, 2)

    def inverse(self, low: Tensor, high: Tensor) -> Tensor:
        """The image whose transform they are."""
        bands = torch.cat([low.unsqueeze(2), high.unflatten(1, (self.channels, 3))], 2).flatten(1, 2)
        return nn.functional.conv_transpose2d(bands, self.filters, stride=2, groups=self.channels)


class WaveMixBlock(nn.Module):
    """(N, `width`, H, W) → the same shape, H and W multiples of 2^`levels`.

    A 1×1 convolution keeps a quarter of the channels; every level of the transform has its four bands, `width` channels
    together, mixed by an MLP and brought to twice the resolution, where they join the next finer level's bands.
    `upsample` is ``deconvolution`` or, in the smallest models, ``nearest``.
    """

    def __init__(
        self, width: int, levels: int = 1, expansion: int = 2, dropout: float = 0.5, upsample: str = "deconvolution"
    ) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width, width // 4, 1)
        self.transforms = nn.ModuleList(HaarTransform(width // 4) for _ in range(levels))
        self.mixers = nn.ModuleList()
        for level in range(levels):
            inputs = width if level == levels - 1 else width + width // 2
            outputs = width if level == 0 else width // 2
            grow: nn.Module = nn.Upsample(scale_factor=2)
            if upsample == "deconvolution":
                grow = nn.ConvTranspose2d(width, outputs, 4, 2, 1)
            mixer = [nn.Conv2d(inputs, expansion * width, 1), nn.GELU(), nn.Dropout(dropout)]
            mixer += [nn.Conv2d(expansion * width, width, 1), grow, nn.BatchNorm2d(outputs)]
            self.mixers.append(nn.Sequential(*mixer))

    def forward(self, x: Tensor) -> Tensor:
        low = self.reduce(x)
        bands = []
        for transform in self.transforms:
            low, high = transform(low)
            bands.append(torch.cat([low, high], 1))
        coarser: Tensor | None = None
        for mixer, level in zip(reversed(self.mixers), reversed(bands), strict=True):
            coarser = mixer(level if coarser is None else torch.cat([level, coarser], 1))
        assert coarser is not None
        return coarser + x


def _strided_stem(width: int, stride: int, channels: int) -> nn.Sequential:
    half = width // 2
    return nn.Sequential(nn.Conv2d(channels, half, 3, stride, 1), nn.Conv2d(half, width, 3, stride, 1))


def _patch_stem(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width // 4, 3, 1, 1),
        nn.Conv2d(width // 4, width // 2, 3, 1, 1),
        nn.Conv2d(width // 2, width, 4, 4),
        nn.GELU(),
        nn.BatchNorm2d(width),
    )


def wavemix_classifier(
    width: int,
    depth: int,
    levels: int = 1,
    num_classes: int = 1000,
    stem: str = "strided",
    stride: int = 2,
    channels: int = 3,
    upsample: str = "deconvolution",
) -> nn.Sequential:
    """WaveMix-`width`/`depth`: images (N, `channels`, H, W) → logits. `stem` is ``strided`` or ``patch`` (of 4×4)."""
    return nn.Sequential(
        _patch_stem(width) if stem == "patch" else _strided_stem(width, stride, channels),
        *(WaveMixBlock(width, levels, upsample=upsample) for _ in range(depth)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )


def wavemix_segmenter(width: int, depth: int, levels: int, num_classes: int = 20) -> nn.Sequential:
    """WaveMix for segmentation: images (N, 3, H, W) → logits (N, `num_classes`, H, W)."""
    half, quarter = width // 2, width // 4
    return nn.Sequential(
        _strided_stem(width, 2, 3),
        *(WaveMixBlock(width, levels, dropout=0.0) for _ in range(depth)),
        nn.ConvTranspose2d(width, half, 4, 2, 1),
        nn.ConvTranspose2d(half, quarter, 4, 2, 1),
        nn.Conv2d(quarter, num_classes, 1),
    )


_SOURCE = "Jeevan et al., WaveMix, arXiv 2205.14375; pranavphoenix/WaveMix"


def _classifier(
    width: int, depth: int, levels: int, stem: str, upsample: str, stride: int, num_classes: int
) -> nn.Module:
    return wavemix_classifier(width, depth, levels, num_classes, stem, stride, 3, upsample)


def _add(name: str, build: Callable[[int], nn.Module], size: tuple[int, int], classes: int) -> None:
    registry.add(name, build, input_size=size, num_classes=classes, source=_SOURCE)


for _levels in (1, 4):
    _add(f"wavemix_256_16_seg{_levels}", partial(wavemix_segmenter, 256, 16, _levels), (512, 1024), 20)
_add("wavemix_192_16", partial(_classifier, 192, 16, 3, "patch", "deconvolution", 2), (224, 224), 1000)
_add("wavemix_lite_64_6", partial(_classifier, 64, 6, 1, "strided", "deconvolution", 1), (32, 32), 10)
_add("wavemix_lite_32_7", partial(_classifier, 32, 7, 1, "strided", "nearest", 1), (32, 32), 10)
