"""Large minibatches without loss of accuracy: the rules of Goyal et al. (arXiv 1706.02677), for a user's own training.

A step of k workers with n samples each is one of batch k·n. The rules:

- multiply the learning rate by the growth of the batch, `LargeBatchRate`, and approach it over the first epochs;
- start residual blocks as identities, `zero_last_norms`; decay no norm's weights, `decay_groups`;
- divide each worker's summed loss by the *global* batch and sum gradients, `global_loss`;
- where momentum carries the learning rate, correct it when the rate changes, `LargeBatchSGD`;
- batch norm sees n samples, one worker's, whatever k is: so it is by itself with one process a worker, and with
  `WorkerBatchNorm2d` where one process plays several;
- shuffle once an epoch and deal to the workers, `deal`.

For instance::

    rate = LargeBatchRate(base_rate=0.1, base_batch=256, batch=8192, steps_per_epoch=157)
    zero_last_norms(model, Bottleneck)
    optimizer = LargeBatchSGD(decay_groups(model, 1e-4), rate, momentum=0.9)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretell.errors import InputError

__all__ = [
    "LargeBatchRate",
    "LargeBatchSGD",
    "WorkerBatchNorm2d",
    "deal",
    "decay_groups",
    "global_loss",
    "per_worker_norms",
    "zero_last_norms",
]


@dataclass(frozen=True, slots=True)
class LargeBatchRate:
    """The learning rate of a step: called with its number, from 0 on; any optimiser or `LambdaLR` can use it.

    `base_rate` suits `base_batch`. In `warmup_epochs` it rises evenly to ``base_rate · batch / base_batch``, step by
    step; it is multiplied by `factor` at each of `milestones` (epochs). Both may be turned off: ``scale=False`` keeps
    to the base rate, ``warmup_epochs=0`` starts with the full one. Raises InputError for values that make no sense.

    >>> rate = LargeBatchRate(0.1, base_batch=256, batch=8192, steps_per_epoch=100)
    >>> [round(rate(step), 3) for step in (0, 250, 500, 2999, 3000, 8000)]
    [0.1, 1.65, 3.2, 3.2, 0.32, 0.003]
    """

    base_rate: float
    base_batch: int
    batch: int
    steps_per_epoch: int
    warmup_epochs: float = 5.0
    milestones: tuple[float, ...] = (30.0, 60.0, 80.0)
    factor: float = 0.1
    scale: bool = True

    def __post_init__(self) -> None:
        for name in ("base_rate", "base_batch", "batch", "steps_per_epoch", "factor"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}, want more than 0", "large-batch rate")
        if self.warmup_epochs < 0 or list(self.milestones) != sorted(self.milestones):
            raise InputError("epochs of warm-up and milestones must be 0 or more, in order", "large-batch rate")

    @property
    def full_rate(self) -> float:
        """The rate after warm-up: linear in the batch."""
        return self.base_rate * (self.batch / self.base_batch if self.scale else 1.0)

    def __call__(self, step: int) -> float:
        epoch = step / self.steps_per_epoch
        if epoch < self.warmup_epochs:
            return self.base_rate + (self.full_rate - self.base_rate) * epoch / self.warmup_epochs
        return self.full_rate * self.factor ** sum(epoch >= milestone for milestone in self.milestones)


class LargeBatchSGD(torch.optim.Optimizer):
    """Momentum SGD whose velocity carries the learning rate, as many frameworks have it, with momentum correction.

    ``u ← m · (η / η before) · u + η · g``, ``w ← w - u``: without the factor, a rate that grows by k leaves old steps k
    times too light (section 3 of the paper). With it, it does what `torch.optim.SGD` does, whose velocity is free of
    the rate; ``correction=False`` shows what the factor is worth. `rate` gives the learning rate of each step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rate: Callable[[int], float],
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        correction: bool = True,
    ) -> None:
        self.rate, self.correction, self.steps = rate, correction, 0
        super().__init__(params, {"lr": rate(0), "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rate = self.rate(self.steps)
        for group in self.param_groups:
            carried = group["momentum"] * (rate / group["lr"] if self.correction else 1.0)
            group["lr"] = rate
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                grad = weight.grad.add(weight, alpha=group["weight_decay"])
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                velocity.mul_(carried).add_(grad, alpha=rate)
                weight.sub_(velocity)
        self.steps += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's state, with the number of steps taken."""
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.steps = int(state_dict["steps"])
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "steps"})


def global_loss(losses: Tensor, global_batch: int) -> Tensor:
    """A worker's part of the mean loss: the sum over its samples, divided by the samples of *all* workers.

    The sum over workers of its gradients is the gradient of the mean; dividing by a worker's own samples and averaging
    comes to the same only where all have as many.
    """
    return losses.sum() / global_batch


def zero_last_norms(module: nn.Module, blocks: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Set to zero the scale of the last batch norm of each residual block, so that blocks start as identities.

    `blocks` are the classes of residual blocks; a norm in a block's shortcut, which is a module of its own, is left.
    Returns how many were set. Raises InputError where there is no such block, or one without a batch norm.
    """
    found = [block for block in module.modules() if isinstance(block, blocks)]
    if not found:
        raise InputError("the model has no block of the given classes", "zero_last_norms", "give its residual blocks")
    for block in found:
        norms = [child for child in block.children() if isinstance(child, nn.modules.batchnorm._BatchNorm)]
        if not norms or norms[-1].weight is None:
            raise InputError(f"{type(block).__name__} has no batch norm with a scale of its own", "zero_last_norms")
        nn.init.zeros_(norms[-1].weight)
    return len(found)


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: weight decay for all but norms' scales and shifts."""
    norms = [p for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase) for p in m.parameters(False)]
    of_norms = {id(parameter) for parameter in norms}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in of_norms]
    return [{"params": rest, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]


class WorkerBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that normalises every `per_worker` samples by themselves, as workers of that batch would.

    Running statistics are those of the first worker. Raises InputError for a batch that is no multiple.
    """

    per_worker: int = 0

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W), N a multiple of `per_worker`."""
        if not self.training or input.shape[0] == self.per_worker:
            return super().forward(input)
        if input.shape[0] % self.per_worker:
            raise InputError(f"a batch of {input.shape[0]}, and workers have {self.per_worker}", "WorkerBatchNorm2d")
        with torch.no_grad():
            super().forward(input[: self.per_worker])  # for its running statistics
        # Workers beside each other, as channels: each has means and deviations of its own.
        workers = input.shape[0] // self.per_worker
        apart = input.view(workers, self.per_worker, *input.shape[1:]).transpose(0, 1)
        weight, bias = (None if p is None else p.repeat(workers) for p in (self.weight, self.bias))
        normal = functional.batch_norm(apart.flatten(1, 2), None, None, weight, bias, True, 0.0, self.eps)
        return normal.view(apart.shape).transpose(0, 1).reshape(input.shape)


def per_worker_norms(module: nn.Module, per_worker: int) -> nn.Module:
    """Make each `nn.BatchNorm2d` of `module` a `WorkerBatchNorm2d`, in place; returns `module`."""
    if per_worker < 2:
        raise InputError(f"{per_worker} samples a worker have no variance", "per_worker_norms", "give 2 or more")
    for norm in module.modules():
        if type(norm) in (nn.BatchNorm2d, WorkerBatchNorm2d):
            norm.__class__ = WorkerBatchNorm2d
            norm.per_worker = per_worker  # type: ignore[assignment]
    return module


def deal(samples: int, workers: int, per_worker: int, *, epoch: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Which samples each worker takes in each step of an epoch: (steps, workers, per_worker).

    One shuffle of all samples, the same on every worker, dealt out; what fills no whole step is left out this time.

    >>> deal(10, workers=2, per_worker=2, epoch=0).shape
    (2, 2, 2)
    """
    if min(samples, workers, per_worker) < 1 or samples < workers * per_worker:
        raise InputError(f"{samples} samples for {workers} workers of {per_worker}", "deal")
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    steps = samples // (workers * per_worker)
    return order[: steps * workers * per_worker].reshape(steps, workers, per_worker)
