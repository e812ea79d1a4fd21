"""Estimates with figures chosen by hand, so that a report's arithmetic can be checked by eye."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from foretell.cost.estimate import Estimate, Memory, OpEstimates, frozen
from foretell.graph import Graph, Storage, Tensor, make_op

GIB = 2**30
MIB = 2**20


def make_memory(**changes: Any) -> Memory:
    values: dict[str, Any] = {
        "peak_bytes": 6 * GIB,
        "reserved_bytes": 5 * GIB,
        "allocated_bytes": 4 * GIB,
        "breakdown": frozen(
            {
                "parameters": 1 * GIB,
                "activations": 3 * GIB,
                "workspaces": 512 * MIB,
                "fragmentation": 512 * MIB,
                "framework": 1 * GIB,
            }
        ),
        "peak_op": 1,
        "capacity_bytes": 80 * GIB,
    }
    return Memory(**{**values, **changes})


def make_estimate(**changes: Any) -> Estimate:
    """64 images in 20 ms: 60 % compute, 35 % memory, 5 % launch."""
    values: dict[str, Any] = {
        "workload": "timm:resnet50",
        "device": "a100-sxm4-80gb",
        "mode": "inference",
        "precision": "fp32",
        "runtime": "eager",
        "model": "roofline",
        "items": frozen({"images": 64}),
        "time_s": 20e-3,
        "time_interval_s": (16e-3, 28e-3),
        "interval_basis": "provisional",
        "breakdown_s": frozen({"compute": 12e-3, "memory": 7e-3, "launch": 1e-3}),
        "flops": 523_400_000_000,
        "macs": 261_700_000_000,
        "parameters": 25_557_032,
        "mfu": 0.125,
        "memory": make_memory(),
        "energy_j": 6.4,
        "cost_usd": 0.0000192,
        "ops": OpEstimates(
            time_s=np.array([12e-3, 8e-3]),
            compute_s=np.array([12e-3, 1e-3]),
            memory_s=np.array([2e-3, 7e-3]),
            launch_s=np.array([0.0, 1e-3]),
            bound=np.array([0, 1], dtype=np.int8),
        ),
        "modules": (
            ("layer1.0.conv1", 5e-3),
            ("layer1.0.conv2", 4e-3),
            ("layer2.0.downsample.0", 3e-3),
            ("layer3.0.conv1", 2e-3),
            ("layer4.0.conv3", 1e-3),
            ("fc", 0.5e-3),
        ),
        "not_counted": frozen({}),
        "host_s": 3e-3,
    }
    return Estimate(**{**values, **changes})


@pytest.fixture(scope="session")
def estimate() -> Callable[..., Estimate]:
    """`estimate(time_s=…)` gives the sample estimate with those fields changed."""
    return make_estimate


@pytest.fixture(scope="session")
def memory() -> Callable[..., Memory]:
    """`memory(peak_bytes=…)` gives the sample memory with those fields changed."""
    return make_memory


@pytest.fixture(scope="session")
def printed() -> Callable[..., str]:
    """`printed(renderable, width=80, terminal=False)` is what a console of that width shows, without colours."""

    def show(renderable: Any, width: int = 80, terminal: bool = False) -> str:
        out = io.StringIO()
        Console(file=out, width=width, force_terminal=terminal, color_system=None).print(renderable)
        return out.getvalue()

    return show


@pytest.fixture(scope="session")
def graph() -> Graph:
    """A training step by hand: x (4×8) · w (8×16), relu three times, the weight's gradient, an op without a rule."""
    shapes = ((4, 8), (8, 16), (4, 16), (4, 16), (8, 4), (8, 16))
    tensors = tuple(Tensor(shape, "float32", i) for i, shape in enumerate(shapes))
    roles = ("input", "parameter", "activation", "temporary", "temporary", "gradient")
    storages = tuple(Storage(t.nbytes, role) for t, role in zip(tensors, roles, strict=True))
    ops = (
        make_op("aten.mm.default", tensors, (0, 1), (2,), module="fc"),
        make_op("aten.relu.default", tensors, (2,), (3,), module="act", repeat=3),
        make_op("aten.mm.default", tensors, (4, 3), (5,), module="fc", phase="backward"),
        make_op("mine.strange.default", tensors, (5,), (1,), phase="optimizer"),
    )
    return Graph(
        name="py:mlp.py:make",
        mode="train",
        precision="fp32",
        ops=ops,
        tensors=tensors,
        storages=storages,
        parameters=128,
        trainable_parameters=128,
        items={"samples": 4},
        inputs=(0,),
        outputs=(3,),
    )
