"""Predicted effects: counted where a count is known, compared where only the direction is."""

import pytest
import torch
from torch import nn

from foretell.errors import InputError, UnknownNameError
from foretell.transform import effect
from foretell.workload.zoo.repvgg import RepVGGBlock


def block() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return RepVGGBlock(64, 64), torch.empty(8, 64, 56, 56)


def test_merging_a_block_removes_the_pointwise_work_and_time() -> None:
    module, x = block()
    found = effect("reparametrize", module, x, on="t4")
    assert found.before.macs - found.after.macs == 8 * 56 * 56 * 64 * 64  # the 1×1 branch
    assert found.before.parameters - found.after.parameters == 64 * 64 + 3 * 2 * 64 - 64  # its kernel, norms; a bias
    assert len(found.before.ops) > len(found.after.ops) == 2  # a convolution and a ReLU are left
    assert found.speedup == pytest.approx(found.before.time_s / found.after.time_s)
    assert found.speedup > 1.5
    assert found.memory_saved_bytes > 0
    assert str(found).startswith("reparametrize on ")
    assert module.training  # as it was


def test_folding_saves_less_than_merging() -> None:
    module, x = block()
    folded, merged = (effect(name, module, x, on="t4").speedup for name in ("fold_batch_norm", "reparametrize"))
    assert 1 < folded < merged


def test_wrong_questions_are_named() -> None:
    module, x = block()
    with pytest.raises(UnknownNameError, match="did you mean 'fold_batch_norm'"):
        effect("fold_batchnorm", module, x, on="t4")
    with pytest.raises(InputError, match="for inference"):
        effect("reparametrize", module, x, on="t4", train=True)
    with pytest.raises(UnknownNameError, match="device"):
        effect("reparametrize", module, x, on="t44444")
