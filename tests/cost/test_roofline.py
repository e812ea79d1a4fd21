"""The roofline model against arithmetic a reader can do, on a device with round numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foretell.cost.calibration import load
from foretell.cost.model import Settings
from foretell.cost.program import Program
from foretell.cost.rates import matrix_rate, vector_rate
from foretell.cost.roofline import Roofline, power_share, tile_efficiency
from foretell.errors import InputError
from foretell.graph import OpTable, Tensor, make_op
from foretell.hardware.device import Device, FrozenMap

# One FLOP/s or byte/s is a round power of ten, so that times can be read off.
DEVICE = Device(
    name="round",
    title="Round numbers",
    vendor="none",
    kind="gpu",
    architecture="test",
    multiprocessors=100,
    boost_clock_hz=1e9,
    peaks=FrozenMap({"fp32.vector": 1e12, "tf32.tensor": 4e12, "fp16.tensor": 1e13}),
    memory_bandwidth_bytes_per_s=1e12,
    l2_bytes=1,
)

_SHIPPED = load("roofline")


def ideal(**changes: float) -> Roofline:
    """A roofline of perfect kernels: every efficiency 1, no launch cost, no waves, no L2, no alignment."""
    perfect = {
        name: 1.0
        for name in _SHIPPED.constants
        if name.startswith(("compute.", "memory.")) and not name.startswith("power.")
    }
    perfect |= {"compute.tile_reuse": 0.0, "compute.tile_start": 0.0, "compute.wave_tail": 0.0}
    perfect |= {"compute.fetch": 1e9, "memory.convolution.conversion": 0.0, "launch.kernel": 0.0}
    return Roofline(_SHIPPED.replace({**perfect, **changes}))


def one(name: str, ins: list[Tensor], outs: list[Tensor], **rest: object) -> Program:
    """A program of one op."""
    tensors = [*ins, *outs]
    op = make_op(
        name,
        tensors,
        tuple(range(len(ins))),
        tuple(range(len(ins), len(tensors))),
        **rest,  # type: ignore[arg-type]
    )
    return Program.of(OpTable.from_ops([op], tensors))


def tensor(*shape: int, dtype: str = "float16", strides: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(shape, dtype, 0, strides)


def times(program: Program, model: Roofline | None = None, device: Device = DEVICE, **settings: object):
    return (model or ideal()).op_times(program, device, Settings(**settings))  # type: ignore[arg-type]


def test_a_large_product_is_flops_over_peak():
    t = times(one("aten.mm.default", [tensor(1280, 1280), tensor(1280, 1280)], [tensor(1280, 1280)]))
    assert t.compute_s[0] == pytest.approx(2 * 1280**3 / 1e13)
    assert t.memory_s[0] == pytest.approx(3 * 1280**2 * 2 / 1e12)
    assert t.busy_s[0] == t.compute_s[0] == t.ideal_s[0]


def test_an_addition_is_bytes_over_bandwidth():
    t = times(one("aten.add.Tensor", [tensor(1024, 1024), tensor(1024, 1024)], [tensor(1024, 1024)]))
    assert t.memory_s[0] == pytest.approx(1024 * 1024 * 3 * 2 / 1e12)  # 2 reads + 1 write
    assert t.busy_s[0] == max(t.memory_s[0], t.compute_s[0])


def test_fp32_products_use_tf32_only_where_the_settings_say_so():
    x = tensor(1280, 1280, dtype="float32")
    product = one("aten.mm.default", [x, x], [x])
    image, window = tensor(1, 128, 64, 64, dtype="float32"), tensor(128, 128, 3, 3, dtype="float32")
    convolution = one("aten.convolution.default", [image, window], [image], attrs={"groups": 1})
    assert times(product).details["peak_flops_per_s"] == 1e12
    assert times(product, matmul_tf32=True).details["peak_flops_per_s"] == 4e12
    assert times(convolution).details["peak_flops_per_s"] == 4e12  # PyTorch's default for cuDNN
    assert times(convolution, conv_tf32=False).details["peak_flops_per_s"] == 1e12


def test_a_causal_mask_halves_attention_and_its_backward_recomputes():
    q = tensor(2, 8, 1280, 64)
    forward = times(one("foretell.sdpa.default", [q, q, q], [q])).compute_s[0]
    assert forward == pytest.approx(2 * 2 * 2 * 8 * 1280 * 1280 * 64 / 1e13)
    causal = times(one("foretell.sdpa.default", [q, q, q], [q], attrs={"causal": True})).compute_s[0]
    assert causal == pytest.approx(forward / 2)
    backward = times(one("foretell.sdpa_backward.default", [q, q, q, q], [q, q, q], phase="backward")).compute_s[0]
    assert backward == pytest.approx(2.5 * forward)


def test_a_depthwise_convolution_runs_on_the_vector_unit():
    image = tensor(8, 64, 32, 32)
    t = times(one("aten.convolution.default", [image, tensor(64, 1, 3, 3)], [image], attrs={"groups": 64}))
    assert t.compute_s[0] == pytest.approx(2 * 8 * 64 * 32 * 32 * 9 / 1e12)
    assert t.ideal_s[0] == pytest.approx(2 * 8 * 64 * 32 * 32 * 9 / 1e13)  # MFU is against the precision's peak


def test_odd_row_lengths_starve_the_tensor_cores():
    model = ideal(**{"compute.fetch": 80.0, "compute.fetch_growth": 1.0})
    square = 1280

    def rate(n: int) -> float:
        p = one("aten.mm.default", [tensor(square, square), tensor(square, n)], [tensor(square, n)])
        return float(2 * square * square * n / times(p, model).compute_s[0])

    assert rate(1280) == pytest.approx(1e13)
    assert rate(1284) == pytest.approx(80 * 0.5 * 100 * 1e9)  # 8-byte rows: FLOP per cycle · share · SMs · Hz
    assert rate(1281) == pytest.approx(80 * 0.125 * 100 * 1e9)


def test_channels_first_convolutions_convert_and_slices_are_copied():
    image, window = tensor(8, 64, 32, 32), tensor(64, 64, 1, 1)
    last = tensor(8, 64, 32, 32, strides=(65536, 1, 2048, 64))
    model = ideal(**{"memory.convolution.conversion": 0.5})
    plain = one("aten.convolution.default", [image, window], [image], attrs={"groups": 1})
    nhwc = one("aten.convolution.default", [last, window], [last], attrs={"groups": 1})
    traffic = 2 * image.nbytes + window.nbytes
    assert times(plain, model).details["moved_bytes"] == pytest.approx(1.5 * traffic)
    assert times(nhwc, model).details["moved_bytes"] == pytest.approx(traffic)
    sliced = replace(nhwc, strided=np.array([True]))
    assert times(sliced, model).details["moved_bytes"] == pytest.approx(traffic + 2 * (image.nbytes + window.nbytes))


def test_small_operands_are_served_from_l2():
    p = one("aten.relu.default", [tensor(1000)], [tensor(1000)])
    model = ideal(**{"memory.l2_speedup": 4.0, "memory.l2_fraction": 1.0})
    inside = times(p, model, replace(DEVICE, l2_bytes=10**9)).memory_s[0]
    outside = times(p, model, replace(DEVICE, l2_bytes=1)).memory_s[0]
    assert outside / inside == pytest.approx(4.0, rel=1e-3)


def test_tiles_waste_edges_and_the_last_wave():
    def share(m: int, n: int, multiprocessors: int | None = None, reuse: float = 0.0) -> float:
        constant = _SHIPPED.replace({"compute.tile_reuse": reuse, "compute.tile_start": 0.0, "compute.wave_tail": 1.0})
        columns = (np.array([float(v)]) for v in (1, m, n, 3))  # k is too short to split
        return float(tile_efficiency(*columns, multiprocessors, constant)[0])

    assert share(256, 128) == 1.0
    assert share(1, 64) == pytest.approx(1 / 16)  # the narrowest tile has 16 rows
    assert share(256 * 8, 128, 8, reuse=1e6) == pytest.approx(1.0)  # 8 tiles on 8 multiprocessors
    # Of 9 the last waits for a second wave; three waves of half the size, at 3/4 of the speed, are better.
    assert share(256 * 9, 128, 8, reuse=1e6) == pytest.approx(0.75 * 18 / 24, rel=1e-3)


def test_power_limits_the_clock():
    joules = _SHIPPED["power.12.0"]
    card = replace(DEVICE, compute_capability="12.0", tdp_w=joules * 100 * 1e9 / 2)
    assert power_share(card, _SHIPPED) == pytest.approx(0.5)
    assert power_share(replace(card, tdp_w=None), _SHIPPED) == 1.0
    assert power_share(replace(card, compute_capability="99.0"), _SHIPPED) == 1.0


def test_a_cpu_pays_for_each_op_in_line():
    p = one("aten.relu.default", [tensor(10)], [tensor(10)])
    t = times(p, Roofline(_SHIPPED), replace(DEVICE, kind="cpu"))
    assert t.host_s[0] == 0.0
    assert t.launch_s[0] == _SHIPPED["host.cpu_op"]


# --- missing numbers ------------------------------------------------------------------------------------------------


def test_missing_bandwidth_names_the_key_to_add():
    p = one("aten.relu.default", [tensor(10)], [tensor(10)])
    with pytest.raises(InputError, match=r"device 'round': memory bandwidth unknown.*`memory_bandwidth`"):
        times(p, device=replace(DEVICE, memory_bandwidth_bytes_per_s=None))


def test_missing_peak_names_the_key_to_add():
    p = one("aten.mm.default", [tensor(64, 64, dtype="float64")] * 2, [tensor(64, 64, dtype="float64")])
    with pytest.raises(InputError, match=r"no peak for fp64.*`fp64.tensor`"):
        times(p)


def test_bf16_where_the_card_has_none_runs_as_fp32_and_says_so():
    p = one("aten.mm.default", [tensor(1280, 1280, dtype="bfloat16")] * 2, [tensor(1280, 1280, dtype="bfloat16")])
    t = times(p)
    assert t.details["peak_flops_per_s"] == 1e12
    assert any("bf16" in note and "fp32" in note for note in t.notes)


def test_slow_native_half_precision_loses_to_widening():
    pascal = replace(DEVICE, peaks=FrozenMap({"fp32.vector": 1e13, "fp16.vector": 1.5e11}))
    assert matrix_rate(pascal, "fp16").flops_per_s == 1e13
    vega = replace(DEVICE, peaks=FrozenMap({"fp32.vector": 1e13, "fp16.vector": 2e13}))
    assert matrix_rate(vega, "fp16").flops_per_s == 2e13


def test_a_matrix_machine_without_fp32_says_what_stands_in():
    tpu = replace(DEVICE, peaks=FrozenMap({"bf16.tensor": 1.6e13}))
    assert matrix_rate(tpu, "fp32").runs_as == "bf16"
    assert vector_rate(tpu).flops_per_s == 1e12
    assert "1/16" in (vector_rate(tpu).note or "")
    with pytest.raises(InputError, match="no peak for fp32"):
        vector_rate(replace(DEVICE, peaks=FrozenMap()))


def test_unknown_multiprocessors_and_l2_are_noted():
    p = one("aten.mm.default", [tensor(64, 64)] * 2, [tensor(64, 64)])
    notes = times(p, device=replace(DEVICE, multiprocessors=None, l2_bytes=None)).notes
    assert any("multiprocessors" in n for n in notes)
    assert any("l2" in n for n in notes)


def test_convolutions_on_tf32_units_are_told() -> None:
    from foretell import predict
    from foretell.graph import Graph, Storage, Tensor, make_op

    tensors = tuple(Tensor(shape, "float32", i) for i, shape in enumerate([(2, 8, 9, 9), (4, 8, 3, 3), (2, 4, 7, 7)]))
    graph = Graph(
        name="one convolution",
        mode="inference",
        precision="fp32",
        ops=(make_op("aten.convolution.default", tensors, (0, 1), (2,)),),
        tensors=tensors,
        storages=tuple(Storage(t.nbytes, "temporary") for t in tensors),
        parameters=0,
        trainable_parameters=0,
        items={"images": 2},
    )
    assert any("TF32" in note for note in predict(graph, on="a100-sxm4-80gb").notes)
    assert not any("TF32" in note for note in predict(graph, on="t4").notes)  # which has none


def test_a_power_limit_below_full_clock_is_explained() -> None:
    from foretell import capture
    from foretell.cost import explain
    from foretell.hardware import device

    graph = capture("llm:gpt2", seq_len=64)
    said = {name: explain(graph, device(name), 1, model="roofline") for name in ("h100-pcie", "h100-sxm")}
    assert "350 W is 53% of what tensor cores draw" in said["h100-pcie"]
    assert "700 W is 81% of what tensor cores draw" in said["h100-sxm"]
