"""The rules of large minibatches with real processes: k workers take the step that one process takes for all."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from foretell.learn.digits import Block, TinyResNet
from foretell.learn.distributed import Workers
from foretell.learn.distributed.wire import Group, Wire
from foretell.learn.large_batch import (
    LargeBatchRate,
    LargeBatchSGD,
    deal,
    decay_groups,
    global_loss,
    per_worker_norms,
    zero_last_norms,
)

WORKERS, PER_WORKER, STEPS = 4, 4, 3


def task() -> tuple[TinyResNet, torch.Tensor, torch.Tensor, np.ndarray]:
    """A model, images, labels, and who takes which: the same in every process, by seed."""
    torch.manual_seed(0)
    model = TinyResNet(width=4).double()
    zero_last_norms(model, Block)
    images, labels = torch.rand(48, 1, 8, 8, dtype=torch.float64), torch.randint(10, (48,))
    return model, images, labels, deal(48, WORKERS, PER_WORKER, epoch=0)


def optimiser(model: nn.Module) -> LargeBatchSGD:
    rate = LargeBatchRate(0.05, PER_WORKER, WORKERS * PER_WORKER, steps_per_epoch=1, warmup_epochs=2)
    return LargeBatchSGD(decay_groups(model, 1e-2), rate)


def work(rank: int, normalised_by: int) -> tuple[np.ndarray, int]:
    """One worker: its own samples and norms, gradients summed over all. Its weights, and messages sent."""
    model, images, labels, dealt = task()
    optimizer = optimiser(model)
    wire = Wire(rank)
    group = Group(wire, range(WORKERS), "dp")
    for step in range(STEPS):
        chosen = torch.from_numpy(dealt[step, rank])
        optimizer.zero_grad()
        losses = functional.cross_entropy(model(images[chosen]), labels[chosen], reduction="none")
        global_loss(losses, normalised_by).backward()
        for parameter in reversed(list(model.parameters())):  # a layer at a time, the last first
            assert parameter.grad is not None
            parameter.grad = group.all_reduce_by_halving(parameter.grad)
        optimizer.step()
    return _flat(model), wire.messages["dp"]


def alone() -> np.ndarray:
    """One process that plays all workers."""
    model, images, labels, dealt = task()
    per_worker_norms(model, PER_WORKER)
    optimizer = optimiser(model)
    for step in range(STEPS):
        chosen = torch.from_numpy(dealt[step].flatten())
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return _flat(model)


def _flat(model: nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def test_workers_take_the_step_that_one_process_takes(workers: Workers) -> None:
    found = workers.run(work, WORKERS, WORKERS * PER_WORKER)
    wanted = alone()
    for weights, messages in found:
        np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-13)
        np.testing.assert_array_equal(weights, found[0][0])  # to the bit, on all workers
        assert messages == STEPS * len(list(TinyResNet().parameters())) * 2 * 2  # 2·log2(4) for each weight
    # The pitfall: normalised by a worker's own batch, a summed gradient is four times too large.
    assert np.abs(workers.run(work, WORKERS, PER_WORKER)[0][0] - wanted).max() > 1e-2
