"""The learned model: residuals of steps, where they apply, and what they may not do."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from foretell.accuracy.columns import op_table
from foretell.accuracy.measured import joined
from foretell.cost import Settings, models
from foretell.cost.features import FEATURES, step_features
from foretell.cost.learned import Learned, familiarity
from foretell.cost.program import Program
from foretell.cost.residual import Residual
from foretell.graph.table import DTYPE_CODE
from foretell.hardware import device

GPU = device("rtx-4090")


class Constant:
    """A forest of one leaf."""

    def __init__(self, value: float) -> None:
        self.value = value

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), self.value)


def residual(low: float, mid: float, high: float, ranges: tuple[float, float] = (-1e9, 1e9)) -> Residual:
    forests = {name: Constant(np.log(value)) for name, value in (("low", low), ("mid", mid), ("high", high))}
    return Residual(
        "steps",
        FEATURES,
        MappingProxyType(forests),  # type: ignore[arg-type]
        (-5.0, 5.0),
        MappingProxyType({"seen": (0.0, 0.0), "unseen": (0.1, 0.1)}),
        {"devices": [GPU.name], "ranges": dict.fromkeys(FEATURES, ranges), "foreign_interval": [0.5, 2.0],
         "vector_interval": [0.8, 1.25]},
    )


def step(scale: float) -> Program:
    """A convolution, a relu, a product."""
    m = 56.0 * 56 * scale
    return Program.of(
        op_table(
            ["aten.convolution.default", "aten.relu.default", "aten.mm.default"],
            "float16",
            gemm_batch=[1, 0, 1], gemm_m=[m, 0, 4096], gemm_n=[128, 0, 4096], gemm_k=[576, 0, 4096],
            macs=[m * 128 * 576, 0, 4096.0**3], kernel_area=[9, 0, 0], stride=[1, 0, 0], dilation=[1, 0, 0],
            elements=[m * 128, m * 128, 4096.0**2], bytes_read=[m * 128, m * 256, 6.7e7],
            bytes_written=[m * 256, m * 256, 3.4e7],
        )
    )


def model(steps: Residual | None) -> Learned:
    return replace(models()["learned"], steps=steps)  # type: ignore[type-var]


def test_the_factor_of_a_step_multiplies_all_its_ops() -> None:
    plain, slower = (model(s).op_times(step(64), GPU, Settings()) for s in (None, residual(1.2, 1.5, 2.0)))
    np.testing.assert_allclose(slower.busy_s, 1.5 * plain.busy_s)
    program = step(64)
    low, high, basis = model(residual(1.2, 1.5, 2.0)).interval(
        program, slower, model(None).step(program, slower, Settings()), GPU, Settings()
    )
    assert (low, high) == pytest.approx((1.2 / 1.5, 2.0 / 1.5), rel=0.02)
    assert "held-out families" in basis


def test_no_factor_makes_arithmetic_faster_than_the_peak() -> None:
    times = model(residual(0.01, 0.01, 0.01)).op_times(step(64), GPU, Settings())
    assert (times.ideal_s <= times.busy_s * (1 + 1e-9)).all()


def test_steps_of_a_table_are_predicted_as_each_alone() -> None:
    parts = [step(16), step(64), step(256)]
    program, starts = joined(parts, "eager")
    learned = models()["learned"]
    assert isinstance(learned, Learned)
    together = learned.step_times(program, GPU, Settings(), starts).busy_s
    alone = np.concatenate([learned.op_times(p, GPU, Settings()).busy_s for p in parts])
    np.testing.assert_allclose(together, alone, rtol=1e-9)


def test_a_step_unlike_any_that_was_fitted_is_left_to_physics_with_a_wide_interval() -> None:
    foreign = residual(1.2, 1.5, 2.0, ranges=(1e8, 1e9))
    plain, times = (model(s).op_times(step(64), GPU, Settings()) for s in (None, foreign))
    np.testing.assert_allclose(times.busy_s, plain.busy_s)
    assert times.details["interval_low"][0] == pytest.approx(0.5)
    assert times.details["interval_high"][0] == pytest.approx(2.0)


def test_familiarity_falls_with_the_share_of_features_out_of_range() -> None:
    steps = residual(1, 1, 1, ranges=(0.0, 1.0))
    others = [i for i, name in enumerate(FEATURES) if not name.startswith("share.")]
    x = np.full((3, len(FEATURES)), 0.6)
    x[1, others[-3:]] = 9.0
    x[2, others[len(others) // 2 :]] = 9.0
    near = familiarity(steps, x)
    assert near[0] == 1.0
    assert 0.0 < near[1] < 1.0
    assert near[2] == 0.0


def test_a_step_of_one_kind_of_operation_is_foreign_by_that_alone() -> None:
    steps = residual(1, 1, 1, ranges=(0.0, 0.7))
    x = np.full((3, len(FEATURES)), 0.6)
    x[:, FEATURES.index("share.matmul")] = 0.7, 0.82, 1.0
    near = familiarity(steps, x)
    assert near[0] == 1.0
    assert 0.0 < near[1] < 0.9
    assert near[2] == 0.0


def test_an_unseen_gpu_gets_the_wider_interval() -> None:
    steps = residual(1.2, 1.5, 2.0)
    seen, unseen = (
        model(steps).op_times(step(64), device(name), Settings()).details for name in (GPU.name, "rtx-3090")
    )
    width = [d["interval_high"][0] / d["interval_low"][0] for d in (seen, unseen)]
    assert width[1] == pytest.approx(width[0] * np.exp(0.2))


def test_features_are_finite_even_of_a_step_that_does_nothing() -> None:
    program = Program.of(op_table("aten.view.default", "float32"))
    times = models()["kernel"].op_times(program, GPU, Settings())
    x = step_features(program, times, GPU, Settings(), np.zeros(1, dtype=np.int64))
    assert np.isfinite(x).all()


def test_a_step_in_fp32_is_left_to_physics() -> None:
    table = step(64).table
    program = Program.of(replace(table, dtype=np.full_like(table.dtype, DTYPE_CODE["float32"])))
    plain, times = (model(s).op_times(program, GPU, Settings(conv_tf32=False)) for s in (None, residual(1.2, 1.5, 2.0)))
    np.testing.assert_allclose(times.busy_s, plain.busy_s)
    assert times.details["interval_high"][0] == pytest.approx(1.25)
