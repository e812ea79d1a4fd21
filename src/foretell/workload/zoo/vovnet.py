"""VoVNet: one-shot aggregation, for a low memory access cost.

Y. Lee, J. Hwang, S. Lee, Y. Bae, J. Park: An Energy and GPU-Computation Efficient Backbone Network for Real-Time Object
Detection. CVPR workshops 2019. Sizes are those of its table 1; where blocks repeat, the input is added to the output,
as in the authors' implementation (stigma0617/VoVNet.pytorch, MIT). The slim network is of no library.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from foretell.workload.zoo import registry


def conv_norm(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Convolution (padded to keep the size at stride 1, no bias), batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class OneShotAggregation(nn.Module):
    """`depth` 3×3 convolutions in a chain, all `width` wide; input and outputs are joined once and mixed by a 1×1.

    (N, `inputs`, H, W) → (N, `outputs`, H, W).
    """

    def __init__(self, inputs: int, width: int, outputs: int, depth: int = 5, residual: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv_norm(width if i else inputs, width) for i in range(depth))
        self.mix = conv_norm(inputs + depth * width, outputs, 1)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        mixed = self.mix(torch.cat(outputs, 1))
        return mixed + x if self.residual else mixed


class VoVNet(nn.Module):
    """VoVNet classifier: images (N, 3, H, W) → logits (N, `num_classes`). `stages` are (width, outputs, modules)."""

    def __init__(self, stages: Sequence[tuple[int, int, int]], num_classes: int = 1000) -> None:
        super().__init__()
        features: list[nn.Module] = [conv_norm(3, 64, stride=2), conv_norm(64, 64), conv_norm(64, 128, stride=2)]
        channels = 128
        for number, (width, outputs, modules) in enumerate(stages):
            if number:
                features.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            for i in range(modules):
                features.append(OneShotAggregation(channels, width, outputs, residual=i > 0))
                channels = outputs
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


_STAGES = {
    "vovnet27_slim": ((64, 128, 1), (80, 256, 1), (96, 384, 1), (112, 512, 1)),
    "vovnet39": ((128, 256, 1), (160, 512, 1), (192, 768, 2), (224, 1024, 2)),
    "vovnet57": ((128, 256, 1), (160, 512, 1), (192, 768, 4), (224, 1024, 3)),
}

for _name, _stages in _STAGES.items():
    registry.add(
        _name,
        partial(VoVNet, _stages),
        input_size=(224, 224),
        source="Lee et al., VoVNet, CVPR workshops 2019, table 1",
    )
