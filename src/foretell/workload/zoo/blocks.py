"""Parts that several architectures share."""

from __future__ import annotations

from torch import Tensor, nn


def conv_norm(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias, padded to keep the image's size, and its batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class SqueezeExcite(nn.Module):
    """x · sigmoid(W₂ a(W₁ mean(x))), a weight for each channel, with `activation` a between the two."""

    def __init__(self, channels: int, squeezed: int, activation: type[nn.SiLU] | type[nn.ReLU]) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            activation(inplace=True),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)
