"""One row times 4-bit weights: as long as reading them takes, whatever the model of kernels."""

from __future__ import annotations

import pytest

import foretell
from foretell.hardware import device

SETTINGS = {"phase": "decode", "context": 512, "precision": "bf16"}
GPU = device("rtx-4060")
HALF = foretell.capture("llm:llama-3.1-8b", **SETTINGS)
PACKED = foretell.capture("llm:llama-3.1-8b", quantize="nf4", **SETTINGS)


@pytest.mark.parametrize("model", ["roofline", "kernel", "learned"])
def test_a_decode_step_takes_its_bytes(model: str) -> None:
    half, packed = (foretell.predict(graph, on=GPU, model=model) for graph in (HALF, PACKED))
    bandwidth = GPU.memory_bandwidth_bytes_per_s
    assert bandwidth is not None
    layers = [op for op in PACKED.ops if op.kind == "matmul" and op.module != "lm_head"]
    moved = sum((op.bytes_read + op.bytes_written) * op.repeat for op in layers)
    assert moved == pytest.approx(PACKED.parameter_bytes - 2 * 2 * 128_256 * 4096, rel=0.01)  # tables stay in half
    rows = [PACKED.ops.index(op) for op in layers]
    assert moved / bandwidth <= packed.ops.time_s[rows].sum() <= 1.6 * moved / bandwidth
    assert packed.time_s < 0.5 * half.time_s


def test_rows_together_unpack_first_and_take_longer() -> None:
    one, two = (foretell.predict(foretell.capture("llm:llama-3.1-8b", quantize="nf4", batch=batch, **SETTINGS), on=GPU)
                for batch in (1, 2))  # fmt: skip
    assert two.time_s > 2 * one.time_s
