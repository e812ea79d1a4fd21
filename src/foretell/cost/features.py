"""What a step looks like, in a few dimensionless numbers: the features of the learned residual of whole steps.

None is an absolute size of a device or a network's name: shares of the predicted time by kind and by limit, how well
shapes fill tiles, how large operations are beside the L2 cache and beside a launch. So a residual learned on some
networks and devices says something of others that spend their time alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.cost.model import OpTimes, Settings
from foretell.cost.program import Program
from foretell.cost.rates import matrix_rate
from foretell.graph import KINDS, PHASES
from foretell.graph.kinds import base_name
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_CODE = {kind: code for code, kind in enumerate(KINDS)}
_PLAIN = (
    *("matmul", "batched_matmul", "attention", "softmax", "reduction", "pooling", "pointwise", "copy", "resample"),
    "indexing",
)
_CONVOLUTIONS = ("conv_1x1", "conv_3x3", "conv_large", "conv_grouped", "conv_depthwise")
_NORMS = ("batch_norm", "other_norm")
_MATRIX = ("matmul", "batched_matmul", "attention", *_CONVOLUTIONS)

FEATURES: tuple[str, ...] = (
    *(f"share.{name}" for name in (*_PLAIN, *_CONVOLUTIONS, *_NORMS)),
    *(f"compute.{name}" for name in _MATRIX),
    "compute",  # share of the time that arithmetic limits
    "tensor",  # share of the arithmetic at more than the rate of fp32
    "strided",
    "launch",
    "backward",
    "optimizer",
    "mean_kernel",  # log of the mean kernel's time over a launch
    "kernels",  # log of their number
    "working_set",  # log of bytes moved by a kernel over the L2 cache, weighted by time
    "shape_efficiency",
    "ideal",  # share of the time that arithmetic would take at peak
    "reduced_channels",  # log2, weighted by FLOP: of the implicit products' k, n and m
    "columns",
    "rows",
    "unaligned",  # share of FLOP whose k is no multiple of eight
    "intensity",  # log of FLOP per byte over the device's own balance
    "winograd",  # share of FLOP in 3 × 3 convolutions of stride one
    "channels_last",
    "convolution",
    "compiled",
    "training",
)


def classes(program: Program) -> dict[str, Bools]:
    """Rows of `program` by class: kinds, and kinds of convolution and normalisation."""
    table = program.table
    convolution = table.kind == _CODE["convolution"]
    depthwise = convolution & (table.gemm_batch > 1) & (table.gemm_k == table.kernel_area)
    grouped = convolution & (table.gemm_batch > 1) & ~depthwise
    dense = convolution & ~depthwise & ~grouped
    result = {kind: table.kind == _CODE[kind] for kind in _PLAIN}
    result["conv_1x1"] = dense & (table.kernel_area == 1)
    result["conv_3x3"] = dense & (table.kernel_area == 9)
    result["conv_large"] = dense & (table.kernel_area != 1) & (table.kernel_area != 9)
    result["conv_grouped"] = grouped
    result["conv_depthwise"] = depthwise
    norm = table.kind == _CODE["normalization"]
    is_batch = np.array(["batch_norm" in base_name(name) for name, _ in program.names] or [False])
    batch = is_batch[program.name_code] if len(program) else np.zeros(0, dtype=np.bool_)
    result["batch_norm"], result["other_norm"] = norm & batch, norm & ~batch
    return result


def step_features(program: Program, times: OpTimes, device: Device, settings: Settings, starts: Ints) -> Floats:
    """Features (steps, `FEATURES`) of the steps that begin at rows `starts` of `program`, as `times` predicts them."""
    table = program.table
    busy = times.busy_s * table.repeat
    total = np.maximum(_added(busy, starts), 1e-12)  # a step may do nothing
    flops = 2.0 * table.macs * table.repeat
    all_flops = _added(flops, starts) + 1.0
    moved = times.details["moved_bytes"]
    kernels = np.maximum(1.0, _added(program.kernels * table.repeat, starts))
    by_arithmetic = times.compute_s > times.memory_s
    of = classes(program)
    area = np.maximum(1.0, table.kernel_area)
    convolution = table.kind == _CODE["convolution"]
    launch = 3e-6  # seconds: a typical launch, only a yardstick
    balance = device.peak("fp16") or device.peak("fp32") or 1.0
    l2 = device.l2_bytes or 4e6
    in_fp32 = matrix_rate(device, "fp32").flops_per_s

    def share(mask: Bools) -> Floats:
        return _added(np.where(mask, busy, 0.0), starts) / total

    def of_flops(values: Floats | Bools) -> Floats:
        return _added(flops * values, starts) / all_flops

    columns: dict[str, Floats] = {f"share.{name}": share(mask) for name, mask in of.items()}
    columns |= {f"compute.{name}": share(of[name] & by_arithmetic) for name in _MATRIX}
    columns["compute"] = share(by_arithmetic)
    columns["tensor"] = of_flops(times.details["peak_flops_per_s"] > 1.01 * in_fp32)
    columns["strided"] = share(program.strided)
    columns["launch"] = _added(times.launch_s * table.repeat, starts) / total
    columns["backward"] = share(table.phase == PHASES.index("backward"))
    columns["optimizer"] = share(table.phase == PHASES.index("optimizer"))
    columns["mean_kernel"] = np.log(total / kernels / launch)
    columns["kernels"] = np.log(kernels)
    columns["working_set"] = _added(np.log(np.maximum(moved, 1.0) / l2) * busy, starts) / total
    columns["shape_efficiency"] = _added(times.details["shape_efficiency"] * busy, starts) / total
    columns["ideal"] = _added(times.ideal_s * table.repeat, starts) / total
    columns["reduced_channels"] = of_flops(np.log2(np.maximum(1.0, table.gemm_k / area)))
    columns["columns"] = of_flops(np.log2(np.maximum(1.0, table.gemm_n)))
    columns["rows"] = of_flops(np.log2(np.maximum(1.0, table.gemm_m * table.gemm_batch)))
    columns["unaligned"] = of_flops(table.gemm_k / area % 8 != 0)
    bandwidth = device.memory_bandwidth_bytes_per_s or 1.0
    columns["intensity"] = np.log(all_flops / (_added(moved * table.repeat, starts) + 1.0) * bandwidth / balance)
    columns["winograd"] = of_flops(convolution & (table.kernel_area == 9) & (table.stride == 1) & (table.dilation == 1))
    columns["channels_last"] = of_flops(convolution & table.channels_last)
    columns["convolution"] = of_flops(convolution)
    columns["compiled"] = np.full(len(starts), float(settings.runtime == "compiled"))
    columns["training"] = np.full(len(starts), float(settings.mode == "train"))
    return np.stack([columns[name] for name in FEATURES], axis=1)


def _added(values: Floats | Bools, starts: Ints) -> Floats:
    return np.asarray(np.add.reduceat(values, starts), dtype=np.float64)

