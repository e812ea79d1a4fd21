"""The rules of large minibatches, each against another way to the same, and all of them on real digits."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from foretell.errors import InputError
from foretell.learn import digits as task
from foretell.learn.large_batch import (
    LargeBatchRate,
    LargeBatchSGD,
    WorkerBatchNorm2d,
    deal,
    decay_groups,
    global_loss,
    per_worker_norms,
    zero_last_norms,
)


def test_the_rate_is_that_of_torchs_own_schedulers() -> None:
    """A linear start, then steps, by `LinearLR` and `MultiStepLR`, on the paper's own numbers."""
    rate = LargeBatchRate(0.1, base_batch=256, batch=8192, steps_per_epoch=4)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.2)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 32, total_iters=20),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [100, 220, 300], 0.1),  # counted from the start's end
        ],
        [20],
    )
    for step in range(360):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        optimizer.step()
        scheduler.step()


def test_the_rate_without_the_rules() -> None:
    rule = {"base_batch": 16, "batch": 256, "steps_per_epoch": 10, "milestones": (30.0,)}
    assert LargeBatchRate(0.1, **rule)(50) == pytest.approx(1.6)
    assert LargeBatchRate(0.1, **rule, scale=False)(50) == LargeBatchRate(0.1, **rule, scale=False)(0) == 0.1
    assert LargeBatchRate(0.1, **rule, warmup_epochs=0)(0) == pytest.approx(1.6)
    assert LargeBatchRate(0.1, **rule)(300) == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_rate": 0.0}, "base_rate is 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0"),
        ({"batch": float("nan")}, "batch is nan"),
        ({"warmup_epochs": -1}, "warm-up"),
        ({"milestones": (60.0, 30.0)}, "in order"),
    ],
)
def test_a_rate_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LargeBatchRate(**{"base_rate": 0.1, "base_batch": 256, "batch": 512, "steps_per_epoch": 10} | change)


def steps(optimizer: Any, model: nn.Module, scheduler: Any = None) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1)
    for _ in range(12):
        x = torch.randn(6, 4, generator=dice, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_with_the_correction_momentum_does_what_it_does_free_of_the_rate() -> None:
    """Against `torch.optim.SGD`, whose velocity does not carry the rate, while the rate rises and falls."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    rate = LargeBatchRate(0.001, 1, 8, steps_per_epoch=1, warmup_epochs=6, milestones=(9.0,))
    plain = torch.optim.SGD(first.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)
    wanted = steps(plain, first, torch.optim.lr_scheduler.LambdaLR(plain, rate))
    found = steps(LargeBatchSGD(second.parameters(), rate, momentum=0.9, weight_decay=0.01), second)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    wrong = steps(LargeBatchSGD(third.parameters(), rate, momentum=0.9, weight_decay=0.01, correction=False), third)
    assert (wrong - wanted).abs().max() > 1e-3


def test_the_optimiser_goes_on_where_it_was_saved() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    rate = LargeBatchRate(0.001, 1, 8, steps_per_epoch=2)
    one = LargeBatchSGD(model.parameters(), rate)
    steps(one, model)
    other_model = copy.deepcopy(model)
    other = LargeBatchSGD(other_model.parameters(), rate)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    torch.testing.assert_close(steps(other, other_model), steps(one, model), rtol=0, atol=0)


def test_a_closure_is_called_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = LargeBatchSGD([weight, nn.Parameter(torch.ones(1))], lambda step: 0.1)

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 1.0
    assert weight.item() == pytest.approx(0.8)


def test_last_norms_start_at_zero_as_torchvision_has_it() -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.resnet50()
    assert zero_last_norms(model, models.resnet.Bottleneck) == 16
    zeroed = {name for name, p in model.named_parameters() if p.dim() == 1 and not p.any() and name.endswith("weight")}
    other = models.resnet50(zero_init_residual=True)
    assert zeroed == {n for n, p in other.named_parameters() if p.dim() == 1 and not p.any() and n.endswith("weight")}


def test_a_block_with_its_last_norm_at_zero_is_its_shortcut() -> None:
    block = task.Block(3, 3, 1)
    x = torch.rand(2, 3, 4, 4)
    assert not torch.equal(block(x), x)
    assert zero_last_norms(block, task.Block) == 1
    assert torch.equal(block(x), x)


def test_models_without_such_norms_are_refused() -> None:
    with pytest.raises(InputError, match="no block of the given classes"):
        zero_last_norms(nn.Linear(2, 2), task.Block)
    with pytest.raises(InputError, match="Sequential has no batch norm"):
        zero_last_norms(nn.Sequential(nn.Linear(2, 2)), nn.Sequential)


def test_no_norm_decays() -> None:
    model = task.TinyResNet()
    decayed, spared = decay_groups(model, 1e-4)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (1e-4, 0.0)
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all("norm" in names[id(p)] or "shortcut.1" in names[id(p)] for p in spared["params"])
    assert len(spared["params"]) == 2 * sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 18


def test_norms_see_one_workers_samples() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 3, 2, 2)
    plain, norm = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    per_worker_norms(nn.Sequential(norm), 4)
    assert isinstance(norm, WorkerBatchNorm2d)
    together = norm(x)
    for start in (0, 4, 8):
        alone = functional.batch_norm(x[start : start + 4], None, None, training=True)
        torch.testing.assert_close(together[start : start + 4], alone)
    assert not torch.allclose(together, plain(x), atol=1e-3)
    other = nn.BatchNorm2d(3)
    other(x[:4])  # running statistics are the first worker's
    torch.testing.assert_close(norm.running_mean, other.running_mean)
    torch.testing.assert_close(norm.running_var, other.running_var)
    torch.testing.assert_close(norm.eval()(x), other.eval()(x))
    with pytest.raises(InputError, match="a batch of 6, and workers have 4"):
        norm.train()(x[:6])
    with pytest.raises(InputError, match="no variance"):
        per_worker_norms(norm, 1)


def test_losses_of_workers_add_up_to_the_mean_whatever_each_has() -> None:
    losses = torch.arange(6.0)
    parts = [global_loss(losses[:4], 6), global_loss(losses[4:], 6)]
    assert sum(parts) == losses.mean()
    assert (losses[:4].mean() + losses[4:].mean()) / 2 != losses.mean()  # the pitfall


def test_one_shuffle_is_dealt_to_all() -> None:
    dealt = deal(50, workers=3, per_worker=4, epoch=0, seed=5)
    assert dealt.shape == (4, 3, 4)
    assert len(set(dealt.flatten().tolist())) == 48  # nobody's twice
    assert np.array_equal(dealt, deal(50, workers=3, per_worker=4, epoch=0, seed=5))
    assert not np.array_equal(dealt, deal(50, workers=3, per_worker=4, epoch=1, seed=5))
    # The order is the same for however many workers: one of twelve sees in a step what three of four see together.
    assert np.array_equal(dealt.reshape(4, 12), deal(50, workers=1, per_worker=12, epoch=0, seed=5)[:, 0])
    with pytest.raises(InputError, match="10 samples for 3 workers of 4"):
        deal(10, workers=3, per_worker=4, epoch=0)
