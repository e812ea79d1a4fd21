"""GhostSR: super-resolution whose redundant features are shifts of others.

Y. Nie, K. Han, Z. Liu, C. Liu, Y. Wang: GhostSR: Learning Ghost Features for Efficient Image Super-Resolution.
TMLR 2022. The baseline is EDSR (B. Lim, S. Son, H. Kim, S. Nah, K. M. Lee, CVPR workshops 2017).

A `GhostConv` computes some of its outputs (intrinsic features) and makes the others (ghosts) by moving those over a few
pixels: no arithmetic. Where to is learned: `LearnableShift`, which `freeze` turns into a `Shift`, a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from foretell.errors import InputError
from foretell.workload.zoo import registry

Offset = tuple[int, int]


def offsets(reach: int) -> tuple[Offset, ...]:
    """All (down, right) moves of at most `reach` pixels either way, row by row.

    >>> offsets(1)[:4]
    ((-1, -1), (-1, 0), (-1, 1), (0, -1))
    """
    steps = range(-reach, reach + 1)
    return tuple((y, x) for y in steps for x in steps)


class Shift(nn.Module):
    """Channel c of (N, C, H, W) moved by `moves[c]` pixels, zeros coming in: one padded copy, no arithmetic."""

    def __init__(self, moves: Sequence[Offset]) -> None:
        super().__init__()
        self.moves = tuple(moves)
        self.reach = max(max(abs(y), abs(x)) for y, x in self.moves)
        # Neighbouring channels of equal move are one slice.
        self.runs: list[tuple[int, int, Offset]] = []
        for channel, move in enumerate(self.moves):
            if self.runs and self.runs[-1][2] == move:
                self.runs[-1] = (self.runs[-1][0], channel + 1, move)
            else:
                self.runs.append((channel, channel + 1, move))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.slices(x), 1)

    def slices(self, x: Tensor) -> list[Tensor]:
        """The moved channels, in runs of equal move, still to be joined."""
        height, width = x.shape[-2:]
        padded = nn.functional.pad(x, (self.reach,) * 4)
        moved = []
        for first, last, (down, right) in self.runs:
            top, left = self.reach - down, self.reach - right
            moved.append(padded[:, first:last, top : top + height, left : left + width])
        return moved


class LearnableShift(nn.Module):
    """A move for every channel, chosen by the Gumbel-softmax trick: (N, C, H, W) → the same shape.

    In training one move is drawn a channel and its gradient is that of the soft choice (straight-through); in
    evaluation the likeliest is taken. `temperature` is lowered as training goes on.
    """

    def __init__(self, channels: int, reach: int = 1, temperature: float = 1.0) -> None:
        super().__init__()
        self.reach, self.temperature = reach, temperature
        self.logits = nn.Parameter(torch.zeros(channels, len(offsets(reach))))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            chosen = nn.functional.gumbel_softmax(self.logits, self.temperature, hard=True)
        else:
            chosen = nn.functional.one_hot(self.logits.argmax(1), self.logits.shape[1]).to(x.dtype)
        # Moving down by y reads y rows further up: the kernel's order is that of the moves, turned round.
        side = 2 * self.reach + 1
        kernels = chosen.flip(1).reshape(-1, 1, side, side)
        return nn.functional.conv2d(x, kernels, padding=self.reach, groups=len(kernels))

    def moves(self) -> tuple[Offset, ...]:
        """The likeliest move of every channel."""
        known = offsets(self.reach)
        return tuple(known[int(i)] for i in self.logits.argmax(1))

    def freeze(self) -> Shift:
        """The same by copies, in place of a depthwise convolution."""
        return Shift(self.moves())


def spread(channels: int, reach: int = 1) -> Shift:
    """A shift with every move equally often, equal ones together: what a network costs before anything is learned."""
    known = offsets(reach)
    return Shift([known[i * len(known) // channels] for i in range(channels)])


class GhostConv(nn.Module):
    """3×3 convolution with a share `ratio` of its outputs made by shifts: (N, C, H, W) → (N, `outputs`, H, W).

    Intrinsic features come first; ghost i is a move of intrinsic i, modulo their number.
    """

    def __init__(self, inputs: int, outputs: int, ratio: float = 0.5, reach: int = 1, learn: bool = False) -> None:
        super().__init__()
        intrinsic = math.ceil(outputs * (1 - ratio))
        ghosts = outputs - intrinsic
        if not 0 < ghosts <= intrinsic:
            raise InputError(f"a ghost ratio of {ratio:g}", repair="give one above 0 and at most 0.5")
        self.conv = nn.Conv2d(inputs, intrinsic, 3, padding=1)
        self.ghosts = ghosts
        self.shift: Shift | LearnableShift = LearnableShift(ghosts, reach) if learn else spread(ghosts, reach)

    def forward(self, x: Tensor) -> Tensor:
        intrinsic = self.conv(x)
        source = intrinsic[:, : self.ghosts]
        moved = self.shift.slices(source) if isinstance(self.shift, Shift) else [self.shift(source)]
        return torch.cat([intrinsic, *moved], 1)

    def freeze(self) -> None:
        """Replace the learned shift by the copy it has become."""
        if isinstance(self.shift, LearnableShift):
            self.shift = self.shift.freeze()


def intrinsic_filters(weight: Tensor, number: int, rounds: int = 25) -> Tensor:
    """Indices (`number`) of the filters of (outputs, inputs, k, k) nearest the centres of as many clusters, sorted.

    k-means from filters spread evenly by norm, so that equal weights give equal choices (the paper's section 3.4).
    """
    filters = weight.detach().flatten(1).double()
    if not 0 < number <= len(filters):
        raise InputError(f"{number} intrinsic of {len(filters)} filters", repair="give at least 1 and at most all")
    order = filters.norm(dim=1).argsort(stable=True)
    centres = filters[order[[(2 * i + 1) * len(filters) // (2 * number) for i in range(number)]]]
    for _ in range(rounds):
        nearest = torch.cdist(filters, centres).argmin(1)
        members = nn.functional.one_hot(nearest, number).double()
        size = members.sum(0)
        centres = torch.where(size[:, None] > 0, members.T @ filters / size.clamp(min=1)[:, None], centres)
    distance = torch.cdist(centres, filters)
    chosen: list[int] = []
    for row in distance:  # a filter nearest two centres serves one of them, the other takes its next nearest
        chosen.append(next(int(i) for i in row.argsort() if int(i) not in chosen))
    return torch.tensor(sorted(chosen))


class ResidualBlock(nn.Module):
    """x + 0.1 · conv(relu(conv(x))), without norms; EDSR's block."""

    def __init__(self, width: int, ratio: float, scale: float, learn: bool) -> None:
        super().__init__()

        def conv() -> nn.Module:
            return GhostConv(width, width, ratio, learn=learn) if ratio else nn.Conv2d(width, width, 3, padding=1)

        self.layers = nn.Sequential(conv(), nn.ReLU(inplace=True), conv())
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) * self.scale


class EDSR(nn.Module):
    """Small images (N, 3, H, W) → large ones (N, `colours`, `factor` · H, `factor` · W).

    A share `ghost` of the features of the residual blocks' convolutions are ghosts (0: EDSR itself).
    """

    def __init__(
        self,
        factor: int = 2,
        blocks: int = 32,
        width: int = 256,
        ghost: float = 0.0,
        learn: bool = False,
        colours: int = 3,
    ) -> None:
        super().__init__()
        residual_scale = 0.1 if width > 64 else 1.0
        self.head = nn.Conv2d(3, width, 3, padding=1)
        body: list[nn.Module] = [ResidualBlock(width, ghost, residual_scale, learn) for _ in range(blocks)]
        self.body = nn.Sequential(*body, nn.Conv2d(width, width, 3, padding=1))
        tail: list[nn.Module] = []
        for step in (2,) * int(math.log2(factor)) if factor != 3 else (3,):
            tail += [nn.Conv2d(width, step**2 * width, 3, padding=1), nn.PixelShuffle(step)]
        self.tail = nn.Sequential(*tail, nn.Conv2d(width, colours, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        return self.tail(x + self.body(x))


def _edsr(factor: int, blocks: int, width: int, ghost: float, colours: int) -> EDSR:
    return EDSR(factor, blocks, width, ghost, colours=colours)


# The papers count on a result of 1280×720.
_SMALL = {2: (360, 640), 3: (240, 427), 4: (180, 320)}

for _factor, _size in _SMALL.items():
    for _name, _blocks, _width in (("edsr", 32, 256), ("edsr_baseline", 16, 64)):
        for _ghost in (0.0, 0.5):
            registry.add(
                f"{'ghost_' if _ghost else ''}{_name}_x{_factor}",
                partial(_edsr, _factor, _blocks, _width, _ghost),
                input_size=_size,
                num_classes=3,  # here: colours
                source="Nie et al., GhostSR, TMLR 2022" if _ghost else "Lim et al., EDSR, CVPR workshops 2017, table 1",
            )
