"""Gains against the changed module itself, captured: what the advice is worth if it is followed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foretell
from foretell.advise import member
from foretell.advise.bench import held, step_time_s
from foretell.cost import estimate
from foretell.graph import Graph
from foretell.hardware import device
from foretell.transform import fold_batch_norm, reparametrize
from foretell.workload import zoo

ON = device("l4")


def _share(name: str, graph: Graph) -> float:
    """By which share the step becomes shorter, as the rule's findings say."""
    now = estimate(graph, ON)
    return sum(f.gain_s for f in member(name).check(graph, ON, now)) / now.time_s


def _obtained(before: Graph, after: Graph) -> float:
    model = held("learned")
    return 1.0 - step_time_s(after, ON, model, "eager") / step_time_s(before, ON, model, "eager")


def test_the_gain_of_a_layout_is_that_of_capturing_it() -> None:
    first, last = (
        foretell.capture("zoo:hardnet68", batch=64, precision="fp16", layout=layout) for layout in ("nchw", "nhwc")
    )
    assert _obtained(first, last) > 0.05
    assert _share("layout", first) == pytest.approx(_obtained(first, last), rel=0.05)
    assert _share("layout", last) == 0.0


@pytest.mark.parametrize(
    ("name", "transform", "build"),
    [
        ("branches", reparametrize, lambda: zoo.build("repvgg_a0")),
        ("batch_norm", fold_batch_norm, lambda: zoo.build("hardnet68")),
    ],
)
def test_the_gain_of_a_transform_is_that_of_applying_it(name: str, transform, build) -> None:  # type: ignore[no-untyped-def]
    with torch.device("meta"):
        module: nn.Module = build().eval()
        images = torch.empty(64, 3, 224, 224)
    before = foretell.capture(module, images, precision="fp16", layout="nhwc")
    after = foretell.capture(transform(module).module, images, precision="fp16", layout="nhwc")
    assert _obtained(before, after) > 0.05
    assert _share(name, before) == pytest.approx(_obtained(before, after), rel=0.05)
    assert _share(name, after) == 0.0


def test_a_fused_block_is_as_fast_as_advised() -> None:
    class Block(nn.Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            first = [nn.Conv2d(64, 256, 3, padding=1, bias=False)] if fused else [
                nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU(),
                nn.Conv2d(256, 256, 3, padding=1, groups=256, bias=False),
            ]  # fmt: skip
            self.layers = nn.Sequential(*first, nn.BatchNorm2d(256), nn.ReLU(), nn.Conv2d(256, 64, 1, bias=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    with torch.device("meta"):
        images = torch.empty(64, 64, 56, 56)
        before, after = (
            foretell.capture(Block(fused).eval(), images, precision="fp16", layout="nhwc") for fused in (False, True)
        )
    assert _share("depthwise", before) == pytest.approx(_obtained(before, after), rel=0.05)
    assert _share("depthwise", before) > 0.05
