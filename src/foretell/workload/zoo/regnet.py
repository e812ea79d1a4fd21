"""RegNet: networks whose stage widths are a quantised linear function, and the design spaces that led to them.

I. Radosavovic, R. P. Kosaraju, R. Girshick, K. He, P. Dollár: Designing Network Design Spaces. CVPR 2020.

`regnet(parameters)` builds any member. The published ones (timm's ``regnetx_*`` and ``regnety_*``) are `PUBLISHED`.
A `DesignSpace` draws populations of members, which `edf` compares: the share of a population below an error, or below
a predicted time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretell.errors import InfeasibleError, InputError
from foretell.workload.zoo.blocks import SqueezeExcite, conv_norm
from foretell.workload.zoo.design import compatible_widths, quantised_linear, stages_of


@dataclass(frozen=True, slots=True)
class Stage:
    """`depth` equal blocks; the first halves the resolution. Inner width is `width` / `bottleneck`, in whole groups."""

    width: int
    depth: int
    group_width: int
    bottleneck: float = 1.0

    @property
    def inner(self) -> int:
        """Channels between a block's 1×1 convolutions."""
        return int(self.width / self.bottleneck)


@dataclass(frozen=True, slots=True)
class RegNetParameters:
    """The six numbers of a RegNet. `squeeze` is that of squeeze-and-excitation (0 for RegNetX, 0.25 for RegNetY)."""

    depth: int
    w0: int
    wa: float
    wm: float
    group_width: int
    bottleneck: float = 1.0
    squeeze: float = 0.0

    def __post_init__(self) -> None:
        if self.depth < 1 or self.w0 < 8 or self.w0 % 8 or self.wa < 0 or self.wm <= 1 or self.group_width < 1:
            raise InputError(
                f"no RegNet has depth {self.depth}, w0 {self.w0}, wa {self.wa}, wm {self.wm}, group {self.group_width}",
                repair="w0 is a multiple of 8, wa at least 0, wm above 1, the others at least 1",
            )

    def stages(self) -> tuple[Stage, ...]:
        """Stage widths and depths, with widths that whole groups divide."""
        stages = []
        for width, depth in stages_of(quantised_linear(self.depth, self.w0, self.wa, self.wm)):
            width, group = compatible_widths(width, self.group_width, self.bottleneck)
            stages.append(Stage(width, depth, group, self.bottleneck))
        return tuple(stages)


def _x(depth: int, w0: int, wa: float, wm: float, group: int) -> RegNetParameters:
    return RegNetParameters(depth, w0, wa, wm, group)


def _y(depth: int, w0: int, wa: float, wm: float, group: int) -> RegNetParameters:
    return RegNetParameters(depth, w0, wa, wm, group, squeeze=0.25)


# The paper's figures 15 and 16, in the precision of facebookresearch/pycls (MIT).
PUBLISHED = {
    "x-200mf": _x(13, 24, 36.44, 2.49, 8),
    "x-400mf": _x(22, 24, 24.48, 2.54, 16),
    "x-600mf": _x(16, 48, 36.97, 2.24, 24),
    "x-800mf": _x(16, 56, 35.73, 2.28, 16),
    "x-1.6gf": _x(18, 80, 34.01, 2.25, 24),
    "x-3.2gf": _x(25, 88, 26.31, 2.25, 48),
    "x-4.0gf": _x(23, 96, 38.65, 2.43, 40),
    "x-6.4gf": _x(17, 184, 60.83, 2.07, 56),
    "x-8.0gf": _x(23, 80, 49.56, 2.88, 120),
    "x-12gf": _x(19, 168, 73.36, 2.37, 112),
    "x-16gf": _x(22, 216, 55.59, 2.1, 128),
    "x-32gf": _x(23, 320, 69.86, 2.0, 168),
    "y-200mf": _y(13, 24, 36.44, 2.49, 8),
    "y-400mf": _y(16, 48, 27.89, 2.09, 8),
    "y-600mf": _y(15, 48, 32.54, 2.32, 16),
    "y-800mf": _y(14, 56, 38.84, 2.4, 16),
    "y-1.6gf": _y(27, 48, 20.71, 2.65, 24),
    "y-3.2gf": _y(21, 80, 42.63, 2.66, 24),
    "y-4.0gf": _y(22, 96, 31.41, 2.24, 64),
    "y-6.4gf": _y(25, 112, 33.22, 2.27, 72),
    "y-8.0gf": _y(17, 192, 76.82, 2.19, 56),
    "y-12gf": _y(19, 168, 73.36, 2.37, 112),
    "y-16gf": _y(18, 200, 106.23, 2.48, 112),
    "y-32gf": _y(20, 232, 115.89, 2.53, 232),
}


# --- the network -------------------------------------------------------------------------------------------------


class XBlock(nn.Module):
    """Residual bottleneck with a grouped 3×3 convolution; `squeeze` is a share of the block's input width."""

    def __init__(self, inputs: int, stage: Stage, stride: int, squeeze: float) -> None:
        super().__init__()
        inner, groups = stage.inner, stage.inner // stage.group_width
        layers = [*conv_norm(inputs, inner, 1), nn.ReLU(inplace=True)]
        layers += [*conv_norm(inner, inner, 3, stride, groups), nn.ReLU(inplace=True)]
        if squeeze:
            layers.append(SqueezeExcite(inner, round(inputs * squeeze), nn.ReLU))
        self.layers = nn.Sequential(*layers, *conv_norm(inner, stage.width, 1))
        changes = inputs != stage.width or stride != 1
        self.shortcut = nn.Sequential(*conv_norm(inputs, stage.width, 1, stride)) if changes else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layers(x) + self.shortcut(x))


class AnyNet(nn.Module):
    """Stem of 32 channels, stages of `XBlock`, pooled classifier: images (N, 3, H, W) → logits (N, `num_classes`)."""

    def __init__(self, stages: Sequence[Stage], squeeze: float = 0.0, num_classes: int = 1000) -> None:
        super().__init__()
        blocks: list[nn.Module] = [*conv_norm(3, 32, 3, 2), nn.ReLU(inplace=True)]
        channels = 32
        for stage in stages:
            for i in range(stage.depth):
                blocks.append(XBlock(channels, stage, 2 if i == 0 else 1, squeeze))
                channels = stage.width
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def regnet(parameters: RegNetParameters, num_classes: int = 1000) -> AnyNet:
    """The RegNet of those parameters, with random weights."""
    return AnyNet(parameters.stages(), parameters.squeeze, num_classes)


# --- populations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    """What a member costs an image: multiply-adds, parameters, and activations (outputs of convolutions, elements)."""

    macs: int
    parameters: int
    activations: int


def counts(stages: Sequence[Stage], image_size: int = 224, num_classes: int = 1000) -> Counts:
    """The counts of an `AnyNet` without squeeze-and-excitation, by closed form: thousands of members a second."""
    side = math.ceil(image_size / 2)
    macs, activations = 27 * 32 * side**2, 32 * side**2
    parameters = 27 * 32 + 64
    channels = 32
    for stage in stages:
        inner, width = stage.inner, stage.width
        for i in range(stage.depth):
            before, side = side**2, math.ceil(side / 2) if i == 0 else side
            grouped = 9 * inner * stage.group_width
            shortcut = channels * width if i == 0 else 0
            macs += channels * inner * before + (grouped + inner * width + shortcut) * side**2
            activations += inner * before + (inner + width + (width if i == 0 else 0)) * side**2
            parameters += channels * inner + grouped + inner * width + shortcut
            parameters += 4 * inner + 2 * width + (2 * width if i == 0 else 0)
            channels = width
    return Counts(macs + channels * num_classes, parameters + (channels + 1) * num_classes, activations)


Draw = Callable[[random.Random], Sequence[Stage]]


@dataclass(frozen=True, slots=True)
class DesignSpace:
    """A parametrised set of networks: `draw` makes one member (it may break a rule), `holds` says whether it counts."""

    name: str
    draw: Draw
    holds: Callable[[Sequence[Stage]], bool] = lambda stages: True

    def sample(
        self, number: int, seed: int = 0, macs: tuple[float, float] = (0, math.inf), tries: int = 1_000_000
    ) -> list[tuple[Stage, ...]]:
        """`number` members whose multiply-adds at 224×224 lie in `macs`. Raises InfeasibleError after `tries` draws."""
        chance = random.Random(seed)
        members: list[tuple[Stage, ...]] = []
        for _ in range(tries):
            if len(members) == number:
                return members
            stages = tuple(self.draw(chance))
            if self.holds(stages) and macs[0] <= counts(stages).macs <= macs[1]:
                members.append(stages)
        raise InfeasibleError(
            f"{tries:,} draws of {self.name} gave {len(members)} of {number} networks with {macs[0]:g} to {macs[1]:g}"
            " multiply-adds; widen that range"
        )


def _log_uniform(chance: random.Random, low: float, high: float, quantum: int = 1) -> int:
    """A multiple of `quantum`, log-uniform between the bounds."""
    value = math.exp(chance.uniform(math.log(low), math.log(high)))
    return max(1, round(value / quantum)) * quantum


def _draw_anynet(chance: random.Random, bottlenecks: int, groups: int) -> list[Stage]:
    """Four stages: at most 16 blocks, 1024 channels (of 8), ratios 1, 2, 4, groups 1 … 32 wide (section 3.2)."""
    ratios = [float(chance.choice((1, 2, 4))) for _ in range(bottlenecks)]
    wide = [2 ** chance.randint(0, 5) for _ in range(groups)]
    stages = []
    for i in range(4):
        width, depth = _log_uniform(chance, 16, 1024, 8), _log_uniform(chance, 1, 16)
        ratio = ratios[i % bottlenecks]
        width, group = compatible_widths(width, wide[i % groups], ratio)
        stages.append(Stage(width, depth, group, ratio))
    return stages


def _draw_regnet(chance: random.Random) -> Sequence[Stage]:
    """Depth below 64, w0 and wa below 256, wm from 1.5 to 3, b and g as AnyNet's (section 3.3)."""
    parameters = RegNetParameters(
        depth=_log_uniform(chance, 4, 63),
        w0=_log_uniform(chance, 8, 255, 8),
        wa=math.exp(chance.uniform(math.log(8), math.log(255))),
        wm=chance.uniform(1.5, 3),
        group_width=2 ** chance.randint(0, 5),
        bottleneck=float(chance.choice((1, 2, 4))),
    )
    return parameters.stages()


def _widening(stages: Sequence[Stage]) -> bool:
    return all(a.width <= b.width for a, b in itertools.pairwise(stages))


def _deepening(stages: Sequence[Stage]) -> bool:
    return all(a.depth <= b.depth for a, b in itertools.pairwise(stages))


# The paper's steps, each a subset of the one before: free; shared bottleneck ratio; shared group width; widths that do
# not fall; depths that do not fall; widths by a quantised linear function, in four stages.
SPACES = {
    space.name: space
    for space in (
        DesignSpace("anynetx-a", lambda chance: _draw_anynet(chance, 4, 4)),
        DesignSpace("anynetx-b", lambda chance: _draw_anynet(chance, 1, 4)),
        DesignSpace("anynetx-c", lambda chance: _draw_anynet(chance, 1, 1)),
        DesignSpace("anynetx-d", lambda chance: _draw_anynet(chance, 1, 1), _widening),
        DesignSpace("anynetx-e", lambda chance: _draw_anynet(chance, 1, 1), lambda s: _widening(s) and _deepening(s)),
        DesignSpace("regnetx", _draw_regnet, lambda stages: len(stages) == 4),
    )
}


def edf(values: Sequence[float], at: Sequence[float]) -> tuple[float, ...]:
    """The empirical distribution function: the share of `values` below each of `at` (the paper's equation 1).

    >>> edf([3.0, 1.0, 2.0, 5.0], at=[1.0, 2.5, 9.0])
    (0.0, 0.5, 1.0)
    """
    if not values:
        raise InputError("an empty population has no distribution", repair="draw members first")
    found = torch.searchsorted(torch.tensor(sorted(values), dtype=torch.float64), torch.tensor(at, dtype=torch.float64))
    return tuple(float(n) / len(values) for n in found)
