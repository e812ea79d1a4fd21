"""Rules by which efficient networks are shaped, as plain functions of sizes; no framework is imported.

`memory_access_cost` and its bound: equal widths (ShuffleNetV2, VoVNet). `dense_reads` and `one_shot_reads`: what
aggregation costs (VoVNet). `balanced_group_width`: grouped convolution (E2GC). `quantised_linear` and
`compatible_widths`: stage widths (RegNet). `compound`, `scaled_channels`, `scaled_repeats`: growing a network
(EfficientNet). Sizes are channels and elements, times and rates are named.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# --- memory traffic of a convolution -----------------------------------------------------------------------------


def memory_access_cost(positions: int, inputs: int, outputs: int, kernel: int = 1) -> int:
    """Elements a convolution reads and writes: positions · (inputs + outputs) + kernel² · inputs · outputs.

    `positions` is height × width, the same before and after. Lee et al., VoVNet, CVPR workshops 2019, equation 1.

    >>> memory_access_cost(56 * 56, 64, 64, kernel=3)
    438272
    """
    return positions * (inputs + outputs) + kernel**2 * inputs * outputs


def least_memory_access_cost(positions: int, macs: float, kernel: int = 1) -> float:
    """The least elements a convolution of that many multiply-adds moves; reached where inputs equal outputs.

    Ma et al., ShuffleNet V2, ECCV 2018, guideline 1, with the kernel's size kept.

    >>> least_memory_access_cost(56 * 56, 9 * 64 * 64 * 56 * 56, kernel=3)
    438272.0
    """
    return 2 * math.sqrt(positions * macs / kernel**2) + macs / positions


def dense_reads(inputs: int, growth: int, depth: int) -> int:
    """Channels that the layers of a densely connected block read, together: each reads all before it.

    >>> dense_reads(64, 32, 6)  # 64 + 96 + … + 224
    864
    """
    return sum(inputs + growth * i for i in range(depth))


def one_shot_reads(inputs: int, width: int, depth: int) -> int:
    """Channels that a one-shot aggregation reads: a chain of layers, and everything once at the end.

    >>> one_shot_reads(64, 32, 6)  # (64 + 5 · 32) + (64 + 6 · 32)
    480
    """
    return inputs + (depth - 1) * width + inputs + depth * width


# --- grouped convolutions ----------------------------------------------------------------------------------------


def group_convolution_intensity(positions: float, group_width: int, kernel: int = 3, element_bytes: float = 4) -> float:
    """FLOP a byte of a grouped convolution with as many outputs as inputs: 2 · G · k² / (bytes · (2 + G · k² / P)).

    It depends on the width G of a group and not on the number of channels: that is why E2GC keeps G, and not the
    number of groups, constant through a network.

    >>> round(group_convolution_intensity(56 * 56, 1), 2), round(group_convolution_intensity(56 * 56, 8), 1)
    (2.25, 17.8)
    """
    weights = group_width * kernel**2
    return 2 * weights / (element_bytes * (2 + weights / positions))


def balanced_group_width(
    flop_per_byte: float, positions: float = math.inf, kernel: int = 3, element_bytes: float = 4
) -> float:
    """The group width whose arithmetic takes a device as long as its data's movement.

    `flop_per_byte` is the device's peak over its memory bandwidth. Narrower groups wait for memory, wider ones add
    arithmetic. Infinite where the weights alone keep a small image (`positions`) memory-bound at any width.

    >>> round(balanced_group_width(9.5e12 / 732e9), 1)  # a P100 in float32
    5.8
    """
    room = 2 - element_bytes * flop_per_byte / positions
    return element_bytes * flop_per_byte * 2 / kernel**2 / room if room > 0 else math.inf


# --- stage widths ------------------------------------------------------------------------------------------------


def quantised_linear(depth: int, w0: float, wa: float, wm: float, quantum: int = 8) -> tuple[int, ...]:
    """Widths of `depth` blocks: w0 + wa · j, moved to the nearest w0 · wm^s (s whole) and to multiples of `quantum`.

    Radosavovic et al., Designing Network Design Spaces, CVPR 2020, equations 2 to 4.

    >>> quantised_linear(13, 24, 36.44, 2.49)  # RegNetX-200MF: 1, 1, 4 and 7 blocks
    (24, 56, 152, 152, 152, 152, 368, 368, 368, 368, 368, 368, 368)
    """
    steps = (round(math.log((w0 + wa * j) / w0) / math.log(wm)) for j in range(depth))
    return tuple(round(w0 * wm**s / quantum) * quantum for s in steps)


def stages_of(widths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Runs of equal width as (width, depth).

    >>> stages_of((24, 56, 152, 152))
    ((24, 1), (56, 1), (152, 2))
    """
    return tuple((width, len(list(run))) for width, run in itertools.groupby(widths))


def compatible_widths(width: int, group_width: int, bottleneck: float = 1.0) -> tuple[int, int]:
    """A block's width and group width, moved so that groups divide its inner width, width / `bottleneck`.

    >>> compatible_widths(56, 16), compatible_widths(8, 16)
    ((64, 16), (8, 8))
    """
    inner = int(width / bottleneck)
    group = min(group_width, inner)
    inner = round(inner / group) * group
    return int(inner * bottleneck), group


# --- growing a network -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors on a network's width, depth and input resolution."""

    width: float = 1.0
    depth: float = 1.0
    resolution: float = 1.0

    @property
    def macs(self) -> float:
        """The factor on its multiply-adds, before rounding: depth · width² · resolution²."""
        return self.depth * self.width**2 * self.resolution**2


def compound(phi: float, alpha: float = 1.2, beta: float = 1.1, gamma: float = 1.15) -> Scaling:
    """depth = alpha^phi, width = beta^phi, resolution = gamma^phi; by default EfficientNet's constants.

    Tan and Le, EfficientNet, ICML 2019, equation 3.

    >>> round(compound(1).macs, 2)  # "about 2"
    1.92
    """
    return Scaling(width=beta**phi, depth=alpha**phi, resolution=gamma**phi)


def compound_constants(
    score: Callable[[Scaling], float], step: float = 0.05, macs: float = 2.0, within: float = 0.1
) -> tuple[float, float, float]:
    """(alpha, beta, gamma) of the best `score`, of those that multiply the multiply-adds by `macs` (± `within`).

    The small grid search of the paper's section 3.3; `score` trains and evaluates the baseline so scaled.
    """
    return max(_constants(step, macs, within), key=lambda c: score(compound(1, *c)))


def _constants(step: float, macs: float, within: float) -> Iterator[tuple[float, float, float]]:
    axis = [round(1 + step * i, 10) for i in range(math.ceil((macs + within - 1) / step) + 1)]
    for alpha, beta, gamma in itertools.product(axis, repeat=3):
        if abs(alpha * beta**2 * gamma**2 - macs) <= within:
            yield alpha, beta, gamma


def scaled_channels(channels: int, width: float, divisor: int = 8) -> int:
    """`channels` · `width` to the nearest multiple of `divisor`, but not below 90 % of it.

    >>> [scaled_channels(32, w) for w in (1.0, 1.1, 1.4, 2.0)]
    [32, 32, 48, 64]
    """
    wanted = channels * width
    rounded = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
    return rounded if rounded >= 0.9 * wanted else rounded + divisor


def scaled_repeats(repeats: int, depth: float) -> int:
    """`repeats` · `depth`, rounded up."""
    return math.ceil(repeats * depth)
