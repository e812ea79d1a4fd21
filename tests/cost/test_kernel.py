"""The kernel model: what it gives to families, what it keeps, and the launches behind its occupancy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.accuracy.columns import op_table
from foretell.cost import Settings, models
from foretell.cost.program import Program
from foretell.hardware import device

A100 = device("a100-sxm4-80gb")
KERNEL = models()["kernel"]


def program(*args: object, **columns: object) -> Program:
    return Program.of(op_table(*args, **columns))  # type: ignore[arg-type]


def product(n: float, dtype: str) -> Program:
    size = 4 if dtype == "float32" else 2
    return program(
        "aten.mm.default", dtype, gemm_batch=1, gemm_m=n, gemm_n=n, gemm_k=n, macs=n**3, elements=n * n,
        bytes_read=2 * n * n * size, bytes_written=n * n * size,
    )


@pytest.mark.parametrize(("dtype", "peak", "least"), [("bfloat16", 312e12, 0.6), ("float32", 19.5e12, 0.7)])
def test_a_large_square_product_runs_near_the_peak_of_its_unit(dtype: str, peak: float, least: float) -> None:
    """cuBLAS reaches 250 to 290 TFLOP/s in bf16 on an A100 at 8192, and more than 17 in fp32."""
    times = KERNEL.op_times(product(8192, dtype), A100, Settings())
    share = 2 * 8192**3 / peak / times.busy_s[0]
    assert least < share <= 1.0


def test_resampling_of_small_images_walks_all_planes_in_few_threads() -> None:
    """Twice the planes take twice as long, while the device idles; channels-last is free of it."""

    def upsample(planes: float, channels_last: bool) -> float:
        elements = planes * 14 * 14
        of = program(
            "aten.upsample_bilinear2d.default", "float16", elements=elements, reduced=planes,
            bytes_read=elements / 2, bytes_written=elements * 2, channels_last=channels_last,
        )
        return float(KERNEL.op_times(of, A100, Settings()).busy_s[0])

    one, two = upsample(1 << 18, False), upsample(1 << 19, False)
    assert two / one == pytest.approx(2.0, rel=0.02)
    assert upsample(1 << 18, True) < one / 20
    compiled = replace(
        program(
            "aten.upsample_bilinear2d.default", "float16",
            elements=14 * 14 * 4096.0, reduced=4096.0, bytes_read=1e6, bytes_written=1.6e6,
        ),
        runtime="compiled",
    )
    eager = replace(compiled, runtime="eager")
    times = [KERNEL.op_times(p, A100, Settings()).busy_s[0] for p in (compiled, eager)]
    assert times[0] < times[1]  # Inductor writes a loop over all elements


def test_winograd_never_saves_more_than_the_multiplications_it_leaves_out() -> None:
    pascal = device("gtx-1080-ti")
    n, m, k = 256.0, 64.0 * 56 * 56, 256.0 * 9
    columns = {
        "gemm_batch": 1, "gemm_m": m, "gemm_n": n, "gemm_k": k, "macs": m * n * k, "kernel_area": 9, "dilation": 1,
        "bytes_read": 4 * m * 256, "bytes_written": 4 * m * n, "elements": m * n,
    }
    strided, plain = (
        float(KERNEL.op_times(program("aten.convolution.default", "float32", stride=s, **columns), pascal, Settings())
              .busy_s[0])
        for s in (4, 1)
    )
    assert 1.0 < strided / plain < 2.25 * 1.3
    assert 2 * m * n * k / plain <= 2.25 * pascal.peaks["fp32.vector"]


def test_every_op_that_launches_has_an_occupancy_between_nothing_and_full() -> None:
    of = program(
        ["aten.mm.default", "aten.relu.default", "aten.view.default", "aten.convolution.default"],
        "float16", gemm_batch=[1, 0, 0, 1], gemm_m=[4096, 0, 0, 4096], gemm_n=[4096, 0, 0, 64], gemm_k=[512, 0, 0, 576],
        macs=[4096 * 4096 * 512, 0, 0, 4096 * 64 * 576], elements=[1 << 24, 1 << 24, 1 << 24, 1 << 18],
        bytes_read=1e7, bytes_written=1e7, kernel_area=[0, 0, 0, 9],
    )
    occupancy = KERNEL.op_times(of, A100, Settings()).details["occupancy"]
    assert occupancy[2] == 0  # a view launches nothing
    assert ((occupancy > 0) & (occupancy <= 1))[[0, 1, 3]].all()
    assert occupancy[1] > occupancy[0]  # a product's blocks hold many registers


def test_a_device_without_known_limits_has_times_but_no_occupancy() -> None:
    bare = replace(A100, compute_capability=None, registers_per_sm=None, max_warps_per_sm=None)
    times = KERNEL.op_times(product(1024, "bfloat16"), bare, Settings())
    assert times.busy_s[0] > 0
    assert "occupancy" not in times.details



def test_a_look_up_takes_what_it_fetches_not_its_table() -> None:
    from foretell.graph import OpTable, Tensor, make_op

    def seconds(rows: int) -> float:
        pool = [Tensor((rows, 768), "float32", 0), Tensor((512,), "int64", 1), Tensor((512, 768), "float32", 2)]
        op = make_op("aten.embedding.default", pool, (0, 1), (2,))
        return float(KERNEL.op_times(Program.of(OpTable.from_ops([op], pool)), device("t4"), Settings()).busy_s[0])

    assert seconds(1_000) == pytest.approx(seconds(250_000))


def test_a_format_without_tensor_cores_multiplies_as_fp32() -> None:
    """T4 has no bf16: no faster than fp32."""
    from foretell import predict

    full, half = (predict("llm:gpt2", seq_len=512, on="t4", precision=p, model="kernel") for p in ("fp32", "bf16"))
    assert half.breakdown_s["compute"] == pytest.approx(full.breakdown_s["compute"], rel=0.02)
