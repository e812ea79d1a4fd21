"""What several of these tests need."""

from collections.abc import Callable

import pytest
import torch
from torch import nn


@pytest.fixture(name="trained")
def _trained() -> Callable[[nn.Module], nn.Module]:
    return trained


def trained(module: nn.Module) -> nn.Module:
    """`module` with the batch-norm statistics and weights that training would leave: nothing at its default."""
    generator = torch.Generator().manual_seed(7)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for tensor, low, high in (
                (layer.running_mean, -0.5, 0.5),
                (layer.running_var, 0.5, 2.0),
                (layer.weight, 0.5, 1.5),
                (layer.bias, -0.3, 0.3),
            ):
                if tensor is not None:
                    tensor.data.uniform_(low, high, generator=generator)
    return module
