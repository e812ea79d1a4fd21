"""EfficientNet at any scale, and the same compound scaling of a ResNet and a MobileNet.

M. Tan, Q. V. Le: EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks. ICML 2019.

The baseline is the paper's table 1. `RELEASED` holds the factors of B0 … B7 that the authors' code uses: they round
the formula's (`foretell.workload.zoo.design.compound`) and leave it from B3 on. timm has those eight; any other scale
is what this file is for.
"""

from __future__ import annotations

from torch import Tensor, nn

from foretell.workload.zoo.blocks import SqueezeExcite, conv_norm
from foretell.workload.zoo.design import Scaling, scaled_channels, scaled_repeats

# Table 1: (repeats, kernel, stride, expansion, channels).
_B0 = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
BASE_SIZE = 224
# tensorflow/tpu, efficientnet_builder.py (Apache-2.0): width, depth, image size.
RELEASED = {
    "b0": (1.0, 1.0, 224),
    "b1": (1.0, 1.1, 240),
    "b2": (1.1, 1.2, 260),
    "b3": (1.2, 1.4, 300),
    "b4": (1.4, 1.8, 380),
    "b5": (1.6, 2.2, 456),
    "b6": (1.8, 2.6, 528),
    "b7": (2.0, 3.1, 600),
}


class MBConv(nn.Module):
    """Inverted bottleneck: 1×1 up (unless `expansion` is 1), depthwise, squeeze and excitation, 1×1 down."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [*conv_norm(inputs, wide), nn.SiLU(inplace=True)]
        layers += [*conv_norm(wide, wide, kernel, stride, wide), nn.SiLU(inplace=True)]
        layers += [SqueezeExcite(wide, max(1, int(inputs * 0.25)), nn.SiLU), *conv_norm(wide, outputs)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.residual else y


class EfficientNet(nn.Module):
    """EfficientNet-B0 with its width and depth scaled: images (N, 3, H, W) → logits (N, `num_classes`)."""

    def __init__(self, scaling: Scaling, num_classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        channels = scaled_channels(32, scaling.width)
        features: list[nn.Module] = [*conv_norm(3, channels, 3, 2), nn.SiLU(inplace=True)]
        for repeats, kernel, stride, expansion, base in _B0:
            outputs = scaled_channels(base, scaling.width)
            for i in range(scaled_repeats(repeats, scaling.depth)):
                features.append(MBConv(channels, outputs, kernel, stride if i == 0 else 1, expansion))
                channels = outputs
        last = scaled_channels(1280, scaling.width)
        self.features = nn.Sequential(*features, *conv_norm(channels, last), nn.SiLU(inplace=True))
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(last, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def released(name: str) -> tuple[Scaling, int]:
    """The scaling and the image size of ``b0`` … ``b7``."""
    width, depth, size = RELEASED[name]
    return Scaling(width, depth, size / BASE_SIZE), size


def image_size(scaling: Scaling, base: int = BASE_SIZE) -> int:
    """The side of the scaled network's images, to a whole pixel."""
    return round(base * scaling.resolution)


def scaled_resnet50(scaling: Scaling, num_classes: int = 1000) -> nn.Module:
    """ResNet-50 (timm's) with scaled widths and depths, as in the paper's table 3."""
    from timm.models.resnet import Bottleneck, ResNet

    layers = [scaled_repeats(n, scaling.depth) for n in (3, 4, 6, 3)]
    channels = [scaled_channels(c, scaling.width) for c in (64, 128, 256, 512)]
    stem = scaled_channels(64, scaling.width)
    return ResNet(Bottleneck, layers, num_classes, channels=channels, stem_width=stem)


def scaled_mobilenet_v2(scaling: Scaling, num_classes: int = 1000) -> nn.Module:
    """MobileNetV2 (torchvision's) with scaled widths and depths, as in the paper's table 3."""
    from torchvision.models import MobileNetV2

    # Sandler et al., CVPR 2018, table 2: expansion, channels, repeats, stride.
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    scaled = [[t, c, scaled_repeats(n, scaling.depth), s] for t, c, n, s in table]
    return MobileNetV2(num_classes, width_mult=scaling.width, inverted_residual_setting=scaled)
