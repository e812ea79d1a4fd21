"""A small real task: 1,797 handwritten digits of 8×8 pixels, and a tiny residual network to learn them.

Training methods are tried on it where their authors' data is out of reach. The digits come with scikit-learn (Alpaydin
and Kaynak, UCI, 1998).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretell.errors import ForetellError
from foretell.learn.large_batch import (
    LargeBatchRate,
    LargeBatchSGD,
    deal,
    decay_groups,
    global_loss,
    per_worker_norms,
    zero_last_norms,
)

__all__ = ["Block", "Digits", "TinyResNet", "digits", "learn"]


@dataclass(frozen=True, slots=True)
class Digits:
    """Images (N, 1, 8, 8), 0 to 1, and their digits (N), for training and for testing."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def digits(test_share: float = 0.3, seed: int = 0) -> Digits:
    """The digits, split at random. Raises ForetellError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ForetellError("the digits come with scikit-learn", "pip install scikit-learn") from error
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    images = torch.tensor(data.images[order] / 16.0, dtype=torch.float32)[:, None]
    labels = torch.tensor(data.target[order])
    cut = round(len(order) * (1 - test_share))
    return Digits(images[:cut], labels[:cut], images[cut:], labels[cut:])


class Block(nn.Module):
    """A residual block: two convolutions with batch norm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) → (N, outputs, H / stride, W / stride)."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class TinyResNet(nn.Module):
    """A residual network of three blocks for 8×8 images."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, classes)
        nn.init.normal_(self.head.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) → (N, classes)."""
        x = self.blocks(functional.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def learn(
    data: Digits,
    *,
    workers: int,
    per_worker: int = 16,
    base_rate: float = 0.1,
    epochs: int = 20,
    seed: int = 0,
    scale: bool = True,
    warmup_epochs: float = 5.0,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    watch: Callable[[int, float], None] | None = None,
) -> float:
    """Accuracy on the test digits after training with batch ``workers · per_worker`` by the rules of `large_batch`.

    `base_rate` suits one worker. ``scale=False`` leaves it as it is, ``warmup_epochs=0`` starts with the full one. The
    rate falls tenfold after 1/2, 3/4 and 9/10 of `epochs`. `watch` is told each step and its loss.
    """
    torch.manual_seed(seed)
    model = TinyResNet()
    zero_last_norms(model, Block)
    per_worker_norms(model, per_worker)
    batch = workers * per_worker
    rate = LargeBatchRate(
        base_rate, base_batch=per_worker, batch=batch, steps_per_epoch=len(data.labels) // batch, scale=scale,
        warmup_epochs=warmup_epochs if workers > 1 else 0.0, milestones=(epochs * 0.5, epochs * 0.75, epochs * 0.9),
    )  # fmt: skip
    optimizer = LargeBatchSGD(decay_groups(model, weight_decay), rate, momentum=momentum)
    dealt = (
        torch.from_numpy(indices.flatten())
        for epoch in range(epochs)
        for indices in deal(len(data.labels), workers, per_worker, epoch=epoch, seed=seed)
    )
    for chosen in dealt:
        optimizer.zero_grad()
        losses = functional.cross_entropy(model(data.images[chosen]), data.labels[chosen], reduction="none")
        loss = global_loss(losses, batch)
        torch.autograd.backward(loss)
        if watch is not None:
            watch(optimizer.steps, float(loss.detach()))
        optimizer.step()
        if not math.isfinite(float(loss.detach())):
            break  # nothing will come of it
    model.eval()
    with torch.no_grad():
        found = model(data.test_images).argmax(1)
    return float((found == data.test_labels).float().mean())
