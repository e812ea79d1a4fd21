"""Filling meta tensors is skipped while a model is built; tensors that hold values are filled as ever."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from foretell.workload.capture import Uninitialised  # noqa: E402
from foretell.workload.resolve import on_meta  # noqa: E402


def test_meta_tensors_are_left_as_they_are() -> None:
    weight = torch.empty(3, 4, device="meta")
    version = weight._version
    with Uninitialised():
        assert nn.init.trunc_normal_(weight) is weight
        assert weight.mul_(2).add_(1) is weight
    assert weight._version == version
    weight.zero_()
    assert weight._version > version


def test_tensors_with_values_are_filled() -> None:
    """Constructors compute with small tensors on the CPU, such as stochastic-depth rates, and read them."""

    def build() -> list[float]:
        return torch.zeros(3, device="cpu").add_(2).mul_(3).tolist()

    assert on_meta(build) == [6.0, 6.0, 6.0]


def test_a_module_has_the_same_tensors() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LSTM(8, 4), nn.MultiheadAttention(8, 2))

    built = on_meta(build).state_dict()
    assert {k: (v.shape, v.dtype) for k, v in built.items()} == {
        k: (v.shape, v.dtype) for k, v in build().state_dict().items()
    }
    assert all(v.is_meta for v in built.values())
