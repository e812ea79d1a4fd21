"""E2GC: grouped convolutions of constant group width, in MobileNet-V1 and ResNeXt-50.

N. K. Jha, R. Saini, S. Nag, S. Mittal: E2GC: Energy-efficient Group Convolution in Deep Neural Networks. VLSI Design
2020. A convolution of C channels in g groups has groups C / g wide. The usual designs keep g, so that width grows from
stage to stage; E2GC keeps the width G, so that arithmetic intensity stays the same
(`foretell.workload.zoo.design.balanced_group_width` gives the G that suits a device).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from foretell.workload.zoo import registry

Groups = Callable[[int], int]


def constant_width(group_width: int, channels: int) -> int:
    """E2GC's number of groups: channels / G, at least 1.

    >>> [constant_width(8, channels) for channels in (128, 256, 1024)]
    [16, 32, 128]
    """
    return max(1, channels // group_width)


def constant_groups(groups: int, channels: int) -> int:
    """The usual number of groups, the same everywhere (but at most one a channel).

    >>> [constant_groups(32, channels) for channels in (16, 128, 1024)]
    [16, 32, 32]
    """
    return math.gcd(groups, channels)


def _conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


# MobileNet-V1's pairs of a spatial and a 1×1 convolution: (outputs, stride). Howard et al. 2017, table 1.
_PAIRS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)


def mobilenet_v1(groups: Groups, num_classes: int = 1000) -> nn.Sequential:
    """MobileNet-V1 whose spatial convolutions have `groups(channels)` groups (depthwise: as many as channels)."""
    layers = [*_conv(3, 32, 3, 2), nn.ReLU(inplace=True)]
    channels = 32
    for outputs, stride in _PAIRS:
        layers += [*_conv(channels, channels, 3, stride, groups(channels)), nn.ReLU(inplace=True)]
        layers += [*_conv(channels, outputs), nn.ReLU(inplace=True)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class _Bottleneck(nn.Module):
    """1×1 to half the block's width, grouped 3×3, 1×1 to the block's width, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: Groups) -> None:
        super().__init__()
        inner = outputs // 2
        self.layers = nn.Sequential(
            *_conv(inputs, inner),
            nn.ReLU(inplace=True),
            *_conv(inner, inner, 3, stride, groups(inner)),
            nn.ReLU(inplace=True),
            *_conv(inner, outputs),
        )
        changes = inputs != outputs or stride != 1
        self.shortcut = nn.Sequential(*_conv(inputs, outputs, 1, stride)) if changes else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layers(x) + self.shortcut(x))


def resnext50(groups: Groups, num_classes: int = 1000) -> nn.Sequential:
    """ResNeXt-50 whose 3×3 convolutions have `groups(channels)` groups (the published one: 32 throughout)."""
    layers = [*_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        outputs = 256 << stage
        for i in range(depth):
            layers.append(_Bottleneck(channels, outputs, 2 if stage and i == 0 else 1, groups))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


Network = Callable[[Groups, int], nn.Sequential]
_NETWORKS: dict[str, Network] = {"mobilenet_v1": mobilenet_v1, "resnext50": resnext50}
WIDTHS = (4, 8, 16, 32)
GROUPS = (8, 16, 32)


def _add(name: str, network: Network, groups: Groups) -> None:
    registry.add(
        name, partial(network, groups), input_size=(224, 224), source="Jha et al., E2GC, VLSI Design 2020"
    )


registry.add(
    "mobilenet_v1",
    partial(mobilenet_v1, partial(constant_width, 1)),
    input_size=(224, 224),
    source="Howard et al., MobileNets, 2017, table 1",
)
for _name, _network in _NETWORKS.items():
    for _width in WIDTHS:
        _add(f"{_name}_e2gc{_width}", _network, partial(constant_width, _width))
    for _groups in GROUPS:
        _add(f"{_name}_groups{_groups}", _network, partial(constant_groups, _groups))
