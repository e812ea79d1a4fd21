"""HarDNet: harmonic dense connections, for low memory traffic.

P. Chao, C.-Y. Kao, Y.-S. Ruan, C.-H. Huang, Y.-L. Lin: HarDNet: A Low Memory Traffic Network. ICCV 2019.
Sizes are those of the paper's table 1 and of the authors' reference implementation (PingoLH/Pytorch-HarDNet, MIT).

Layer ``l`` of a block (layer 0 is its input) reads layer ``l - 2**n`` for every n with ``2**n`` dividing l, and is
``growth * multiplier**n`` wide for the largest such n. So layers that many others read are wide, and once layer
``2**n`` has run, layers 1 … ``2**n - 1`` are read no more. A block puts out its odd layers and its last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from foretell.workload.zoo import registry

Layer = Callable[[int, int], nn.Module]


def harmonic_links(layer: int) -> tuple[int, ...]:
    """The layers that `layer` (1, 2, …) reads, nearest first.

    >>> [harmonic_links(layer) for layer in range(1, 9)]
    [(0,), (1, 0), (2,), (3, 2, 0), (4,), (5, 4), (6,), (7, 6, 4, 0)]
    """
    return tuple(layer - 2**n for n in range(layer.bit_length()) if layer % 2**n == 0)


def harmonic_width(layer: int, growth: int, multiplier: float) -> int:
    """Channels that `layer` (1, 2, …) puts out, rounded to an even number."""
    power = (layer & -layer).bit_length() - 1
    return 2 * (int(growth * multiplier**power + 1) // 2)


class HarmonicDenseBlock(nn.Module):
    """`depth` layers with harmonic connections: (N, `in_channels`, H, W) → (N, `out_channels`, H, W).

    `layer(inputs, outputs)` makes one of them. With `keep_input` the block's input is part of its output, which
    DenseNet calls a dense connection between blocks.
    """

    def __init__(
        self, in_channels: int, growth: int, multiplier: float, depth: int, layer: Layer, keep_input: bool = False
    ) -> None:
        super().__init__()
        widths = [in_channels, *(harmonic_width(i, growth, multiplier) for i in range(1, depth + 1))]
        self.links = [harmonic_links(i) for i in range(1, depth + 1)]
        self.layers = nn.ModuleList(
            layer(sum(widths[i] for i in links), width) for links, width in zip(self.links, widths[1:], strict=True)
        )
        self.kept = [i for i in range(depth + 1) if (i % 2 or i == depth) or (i == 0 and keep_input)]
        self.out_channels = sum(widths[i] for i in self.kept)
        # A layer's output is let go after its last reader has run: that is where the low traffic shows as low memory.
        last_reader = {i: number for number, links in enumerate(self.links) for i in links}
        self.released = [
            [i for i, reader in last_reader.items() if reader == number and i not in self.kept]
            for number in range(depth)
        ]

    def forward(self, x: Tensor) -> Tensor:
        outputs = {0: x}
        del x
        for number, (layer, links) in enumerate(zip(self.layers, self.links, strict=True)):
            outputs[number + 1] = layer(_joined([outputs[i] for i in links]))
            for i in self.released[number]:
                del outputs[i]
        return _joined([outputs[i] for i in self.kept])


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), 1)


def conv_norm(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU6
) -> nn.Sequential:
    """Convolution (padded to keep the size at stride 1, no bias), batch norm, activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    if act is not None:
        layers.append(act(inplace=True))
    return nn.Sequential(*layers)


def depthwise(channels: int, stride: int = 1) -> nn.Sequential:
    """Depthwise 3×3 convolution and batch norm, without activation."""
    return conv_norm(channels, channels, stride=stride, groups=channels, act=None)


def separable(inputs: int, outputs: int) -> nn.Sequential:
    """Pointwise, then depthwise: that way round because a layer's input is wide and its output narrow (figure 3b)."""
    return nn.Sequential(conv_norm(inputs, outputs, 1), depthwise(outputs))


class HarDNet(nn.Module):
    """HarDNet classifier: images (N, 3, H, W) → logits (N, `num_classes`).

    `stages` are (depth, growth, transition channels, halve the resolution afterwards). The depthwise-separable
    variant also halves by strided depthwise convolutions instead of max pooling.
    """

    def __init__(
        self,
        stem: tuple[int, int],
        multiplier: float,
        stages: Sequence[tuple[int, int, int, bool]],
        *,
        dropout: float,
        last_dropout: float = 0.0,
        depthwise_separable: bool = False,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        layer: Layer = separable if depthwise_separable else conv_norm
        first, channels = stem
        features: list[nn.Module] = [
            conv_norm(3, first, stride=2),
            conv_norm(first, channels, 1 if depthwise_separable else 3),
            depthwise(channels, 2) if depthwise_separable else nn.MaxPool2d(3, 2, 1),
        ]
        for number, (depth, growth, transition, halve) in enumerate(stages):
            block = HarmonicDenseBlock(channels, growth, multiplier, depth, layer)
            features.append(block)
            if last_dropout and number == len(stages) - 1:
                features.append(nn.Dropout(last_dropout))
            features.append(conv_norm(block.out_channels, transition, 1))
            channels = transition
            if halve:
                features.append(depthwise(channels, 2) if depthwise_separable else nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


_39 = ((4, 16, 96, True), (16, 20, 320, True), (8, 64, 640, True), (4, 160, 1024, False))
_68 = ((8, 14, 128, True), (16, 16, 256, False), (16, 20, 320, True), (16, 40, 640, True), (4, 160, 1024, False))
_85 = (
    (8, 24, 192, True),
    (16, 24, 256, False),
    (16, 28, 320, True),
    (16, 36, 480, False),
    (16, 48, 720, True),
    (4, 256, 1280, False),
)
_SOURCE = "Chao et al., HarDNet, ICCV 2019, table 1; PingoLH/Pytorch-HarDNet"


def hardnet39ds(num_classes: int = 1000) -> HarDNet:
    """HarDNet-39DS: 3.5 M parameters, 0.44 GMAC at 224×224."""
    return HarDNet((24, 48), 1.6, _39, dropout=0.05, depthwise_separable=True, num_classes=num_classes)


def hardnet68ds(num_classes: int = 1000) -> HarDNet:
    """HarDNet-68DS: 4.2 M parameters, 0.79 GMAC at 224×224."""
    return HarDNet((32, 64), 1.7, _68, dropout=0.05, depthwise_separable=True, num_classes=num_classes)


def hardnet68(num_classes: int = 1000) -> HarDNet:
    """HarDNet-68: 17.6 M parameters, 4.3 GMAC at 224×224."""
    return HarDNet((32, 64), 1.7, _68, dropout=0.1, num_classes=num_classes)


def hardnet85(num_classes: int = 1000) -> HarDNet:
    """HarDNet-85: 36.7 M parameters, 9.1 GMAC at 224×224."""
    return HarDNet((48, 96), 1.7, _85, dropout=0.2, last_dropout=0.1, num_classes=num_classes)


for _build in (hardnet39ds, hardnet68ds, hardnet68, hardnet85):
    registry.add(_build.__name__, _build, input_size=(224, 224), source=_SOURCE)
