"""RepVGG: trained with three branches a block, run as a plain stack of 3×3 convolutions.

X. Ding, X. Zhang, N. Ma, J. Han, G. Ding, J. Sun: RepVGG: Making VGG-style ConvNets Great Again. CVPR 2021.
Depths and widths are the paper's tables 2 and 3; these are the training-time models, which
`foretell.transform.reparametrize` turns into the plain ones.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from foretell.workload.zoo import registry


class RepVGGBlock(nn.Module):
    """relu(bn(conv3×3(x)) + bn(conv1×1(x)) [+ bn(x)]); the identity branch exists where shapes match."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.dense = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(outputs)
        )
        self.pointwise = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, groups=groups, bias=False), nn.BatchNorm2d(outputs)
        )
        self.identity = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dense(x) + self.pointwise(x)
        if self.identity is not None:
            y = y + self.identity(x)
        return self.act(y)


class RepVGG(nn.Module):
    """RepVGG classifier: images (N, 3, H, W) → logits (N, `num_classes`).

    `depths` are the layers of stages 2 … 5 (stage 1 has one), `a` widens stages 2 … 4 and `b` stage 5. Every other
    layer, from the third on, has `groups` groups.
    """

    def __init__(
        self, depths: tuple[int, int, int, int], a: float, b: float, groups: int = 1, num_classes: int = 1000
    ) -> None:
        super().__init__()
        widths = (min(64, int(64 * a)), int(64 * a), int(128 * a), int(256 * a), int(512 * b))
        blocks: list[nn.Module] = []
        channels = 3
        for depth, width in zip((1, *depths), widths, strict=True):
            for i in range(depth):
                number = len(blocks) + 1
                grouped = groups if number % 2 and number >= 3 else 1
                blocks.append(RepVGGBlock(channels, width, 2 if i == 0 else 1, grouped))
                channels = width
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


_A, _B = (2, 4, 14, 1), (4, 6, 16, 1)
_WIDTHS = {
    "a0": (_A, 0.75, 2.5),
    "a1": (_A, 1.0, 2.5),
    "a2": (_A, 1.5, 2.75),
    "b0": (_B, 1.0, 2.5),
    "b1": (_B, 2.0, 4.0),
    "b2": (_B, 2.5, 5.0),
    "b3": (_B, 3.0, 5.0),
}


def repvgg(size: str, groups: int = 1, num_classes: int = 1000) -> RepVGG:
    """RepVGG of a published size (``a0`` … ``b3``), training-time form."""
    depths, a, b = _WIDTHS[size]
    return RepVGG(depths, a, b, groups, num_classes)


def _register() -> None:
    for size in _WIDTHS:
        for groups in (1, 2, 4) if size in ("b1", "b2", "b3") else (1,):
            registry.add(
                f"repvgg_{size}" + (f"g{groups}" if groups > 1 else ""),
                partial(repvgg, size, groups),
                input_size=(224, 224),
                source="Ding et al., RepVGG, CVPR 2021, tables 2 and 3",
            )


_register()
