"""EfficientMod: efficient modulation, a context branch times a value branch in one block.

X. Ma, X. Dai, J. Yang, B. Xiao, Y. Chen, Y. Fu, L. Yuan: Efficient Modulation for Vision Networks. ICLR 2024.
Sizes are those of its table 10 and of the authors' implementation (ma-xu/EfficientMod).

Tensors are channels-last, (N, H, W, C), but for convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from foretell.workload.zoo import registry


class Patches(nn.Module):
    """Strided convolution and layer norm: (N, H, W, C) → (N, H/s, W/s, C')."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous())


class Context(nn.Module):
    """Linear, depthwise 7×7 convolution, GELU, linear: (N, H, W, C) → the same shape, seen from further away."""

    def __init__(self, width: int, kernel: int = 7) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)
        self.conv = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        context = self.act(self.conv(self.before(x).permute(0, 3, 1, 2).contiguous()))
        return self.after(context.permute(0, 2, 3, 1).contiguous())


class Modulation(nn.Module):
    """x + γ · W₂(v · c): values v = W₁(norm(x)), `expansion` times as wide, modulated by the context c.

    Token mixing and channel mixing in one: there is no separate MLP. At expansion 1 the values are not activated.
    """

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.context = Context(width)
        self.values = nn.Linear(width, expansion * width)
        self.project = nn.Linear(expansion * width, width)
        self.act = nn.GELU() if expansion > 1 else nn.Identity()
        self.expansion = expansion
        self.scale = nn.Parameter(torch.full((width,), 1e-4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        context = self.context(normed)
        values = self.act(self.values(normed))
        if self.expansion > 1:
            context = context.repeat(1, 1, 1, self.expansion)
        return x + self.scale * self.project(values * context)


class Attention(nn.Module):
    """Pre-norm self-attention and MLP over all positions: (N, H, W, C) → the same shape."""

    def __init__(self, width: int, expansion: int, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.head_width = heads, max(width // heads, 32)
        inner = heads * self.head_width
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.project = nn.Linear(inner, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        x = x.reshape(n, h * w, c)
        qkv = self.qkv(self.norm(x)).reshape(n, h * w, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv.unbind(0))
        x = x + self.project(mixed.transpose(1, 2).reshape(n, h * w, self.heads * self.head_width))
        return (x + self.mlp(x)).reshape(n, h, w, c)


@dataclass(frozen=True, slots=True)
class Size:
    """Widths, blocks of modulation and of attention in the four stages, and their expansions.

    Blocks of modulation take expansion 1 and `expansion` in turn; attention's is `attention_expansion` by stage.
    """

    widths: Sequence[int]
    modulations: Sequence[int]
    attentions: Sequence[int]
    expansion: int
    attention_expansion: Sequence[int] = (4, 4, 4, 4)


class EfficientMod(nn.Module):
    """Images (N, 3, H, W) → logits (N, `num_classes`)."""

    def __init__(self, size: Size, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for i, width in enumerate(size.widths):
            layers.append(Patches(channels, width, 7, 4) if i == 0 else Patches(channels, width, 3, 2))
            layers += [Modulation(width, size.expansion if n % 2 else 1) for n in range(size.modulations[i])]
            layers += [Attention(width, size.attention_expansion[i]) for _ in range(size.attentions[i])]
            channels = width
        self.features = nn.Sequential(*layers, nn.LayerNorm(channels))
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.permute(0, 2, 3, 1)).mean((1, 2)))


_SIZES = {
    "efficientmod_xxs": Size((32, 64, 128, 256), (2, 2, 6, 2), (0, 0, 1, 2), 6),
    "efficientmod_xs": Size((32, 64, 144, 288), (3, 3, 4, 2), (0, 0, 3, 3), 4),
    "efficientmod_s": Size((32, 64, 144, 312), (4, 4, 8, 4), (0, 0, 4, 4), 6, (4, 4, 4, 5)),
    "efficientmod_s_conv": Size((40, 80, 160, 344), (4, 4, 12, 8), (0, 0, 0, 0), 6),
}

for _name, _size in _SIZES.items():
    registry.add(
        _name, partial(EfficientMod, _size), input_size=(224, 224), source="Ma et al., Efficient Modulation, ICLR 2024"
    )
