"""Times of the kernels of a layer: forward, gradients of inputs, gradients of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from foretell.cost import residual
from foretell.cost.calibration import Calibration, load
from foretell.cost.kernel import KERNEL
from foretell.cost.kernels.attention import attention
from foretell.cost.kernels.gemm import Products
from foretell.cost.rates import bandwidth, matrix_rate
from foretell.hardware.device import Device
from foretell.simulate.training.constants import Constants, generation
from foretell.simulate.training.layers import Attention, Kernels, Product
from foretell.simulate.training.plan import CHOICES, PlanTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

__all__ = ["FORMATS", "KernelSums", "arithmetic", "sums"]

#: Precision of a plan → (number format of the large products, bytes of an operand).
FORMATS: Mapping[str, tuple[str, float]] = {
    "bf16": ("bf16", 2.0),
    "fp16": ("fp16", 2.0),
    "fp8": ("fp8", 1.0),
    "mxfp8": ("fp8", 1.03125),  # 32 values share a scale of 8 bits
    "nvfp4": ("fp4", 0.5625),  # 16 values share a scale of 8 bits
}
_HALF = {"bf16": "bf16", "fp16": "fp16"}
# Bytes moved to convert a 16-bit value to the low format, once along rows and once along columns: read, write both.
_CONVERTED = {"bf16": 0.0, "fp16": 0.0, "fp8": 4.0, "mxfp8": 4.0, "nvfp4": 3.2}


@dataclass(frozen=True, slots=True)
class KernelSums:
    """Device time of all kernels of a layer, columns (shapes,).

    `input_s` and `weight_s` are the two halves of the backward pass: what the layer before waits for, and what can be
    put off. `core_s` is the forward time of the core of attention, which selective recomputation repeats.
    """

    forward_s: Floats
    input_s: Floats
    weight_s: Floats
    core_s: Floats
    forward_kernels: Floats
    backward_kernels: Floats

    @property
    def backward_s(self) -> Floats:
        """Both halves of the backward pass."""
        return self.input_s + self.weight_s


def sums(kernels: Kernels, t: PlanTable, device: Device, constants: Constants) -> KernelSums:
    """Times of these kernels, whose columns are parallel to `t`."""
    rows = len(t)
    forward, of_input, of_weight, core = (np.zeros(rows) for _ in range(4))
    forward_kernels, backward_kernels = np.zeros(rows), np.zeros(rows)
    gap = constants["kernel_s"]
    for product, (ahead, back_input, back_weight) in zip(
        kernels.products, _products(kernels.products, t, device, constants), strict=True
    ):
        there = product.batch > 0
        learns = np.logical_not(np.broadcast_to(product.frozen, rows))
        forward += ahead + gap * there
        of_input += back_input + gap * there
        of_weight += np.where(learns, back_weight + gap * there, 0.0)
        core += (ahead + gap * there) * product.core
        forward_kernels += there
        backward_kernels += (1.0 + learns) * there
    for attend in kernels.attentions:
        ahead, back = _attention(attend, t, device, constants)
        there = np.broadcast_to(attend.where, rows)
        forward += np.where(there, ahead, 0.0)
        of_input += np.where(there, back, 0.0)
        core += np.where(there, ahead, 0.0)
        forward_kernels += there
        backward_kernels += 2.0 * there
    rate = bandwidth(device) * constants["stream_share"]
    # Megatron-LM's streams are fused by hand; plain PyTorch modules move more.
    plain = np.where(t.chosen("framework", "fsdp2"), constants["eager.fsdp2"], 1.0)
    for stream in kernels.streams:
        there = (np.asarray(stream.forward_bytes) > 0) & np.ones(rows, dtype=np.bool_)
        ahead = plain * stream.forward_bytes / rate + stream.kernels * gap * there
        back = plain * stream.backward_bytes / rate + stream.kernels * gap * there
        forward += ahead
        of_input += back
        core += ahead * stream.core
        forward_kernels += stream.kernels * there
        backward_kernels += stream.kernels * there
    converted, count = _conversions(kernels.products, t, rate)
    forward += converted + count * gap
    of_input += converted + count * gap
    forward_kernels += count
    backward_kernels += count
    return KernelSums(forward, of_input, of_weight, core, forward_kernels, backward_kernels)


def arithmetic(kernels: Kernels, rows: int) -> tuple[Floats, Floats]:
    """FLOP of one forward pass as executed, and the part of it whose second operand gets a gradient too."""
    forward, trained = np.zeros(rows), np.zeros(rows)
    for p in kernels.products:
        work = 2.0 * p.batch * p.m * p.n * p.k
        forward += work
        trained += np.where(p.frozen, 0.0, work)
    for a in kernels.attentions:
        work = np.where(a.where, 4.0 * a.batch * a.rows * a.keys * a.depth * (0.5 if a.causal else 1.0), 0.0)
        forward += work
        trained += work
    return forward, trained


def _conversions(products: Sequence[Product], t: PlanTable, rate: float) -> tuple[Floats, Floats]:
    """Seconds, and kernels, of converting what products take to a low format: about as much forward as backward."""
    each = np.array([_CONVERTED[name] for name in CHOICES["precision"]])[t["precision"]]
    low = [p for p in products if p.low and p.weights]
    moved = sum((each * p.batch * p.m * p.k for p in low), start=np.zeros(len(t)))
    return moved / rate, len(low) * (each > 0.0).astype(np.float64)


def _products(
    products: Sequence[Product], t: PlanTable, device: Device, constants: Constants
) -> list[tuple[Floats, Floats, Floats]]:
    """For each product its forward time and those of both gradients."""
    columns = []
    for p in products:
        low = np.full(len(t), p.low and p.weights)
        for m, n, k in ((p.m, p.n, p.k), (p.m, p.k, p.n), (p.k, p.n, p.m)):
            grows = np.full(len(t), p.weights and m is p.k)  # the gradient of weights is added to in fp32
            columns.append(np.stack([p.batch, m, n, k, t["precision"], low, grows]))
    if not columns:
        return []
    stacked = np.stack(columns)  # (products · 3, 7, rows)
    flat = stacked.transpose(0, 2, 1).reshape(-1, 7)
    distinct, inverse = np.unique(flat, axis=0, return_inverse=True)
    seconds = (_alone(distinct, device) / _efficiency(distinct, device, constants))[inverse.reshape(-1)]
    seconds = seconds.reshape(len(products), 3, len(t))
    return [(one[0], one[1], one[2]) for one in seconds]


def _efficiency(rows: Floats, device: Device, constants: Constants) -> Floats:
    """What training reaches of the speed of each of these products alone."""
    narrow = {name: matrix_rate(device, FORMATS[name][0]).runs_as in ("fp8", "fp4") for name in CHOICES["precision"]}
    each = np.array(
        [[constants.efficiency(name if low and narrow[name] else "half", device) for low in (False, True)]
         for name in CHOICES["precision"]]
    )  # fmt: skip
    return np.asarray(each[rows[:, 4].astype(np.int64), rows[:, 5].astype(np.int64)])


# Tables of up to so many products are remembered: whoever asks for the same plans again, with other constants or on
# more machines, gets them at once.
_REMEMBERED = 2048


def _alone(rows: Floats, device: Device) -> Floats:
    """Seconds of products alone (rows of batch, m, n, k, precision, low, grows); 0 where there is none."""
    if len(rows) > _REMEMBERED:
        return _times(rows, device)
    return _kept(rows.tobytes(), device)


@lru_cache(maxsize=512)
def _kept(rows: bytes, device: Device) -> Floats:
    return _times(np.frombuffer(rows).reshape(-1, 7), device)


def _times(rows: Floats, device: Device) -> Floats:
    batch, m, n, k, precision, low, grows = rows.T
    seconds = np.zeros(len(rows))
    for index, name in enumerate(CHOICES["precision"]):
        for is_low in (False, True):
            of = np.flatnonzero((precision == index) & (low == is_low) & (batch > 0))
            if not len(of):
                continue
            number_format, size = FORMATS[name] if is_low else (_HALF.get(name, "bf16"), 2.0)
            rate = matrix_rate(device, number_format)
            size = max(size, {"fp8": 1.0, "fp4": 0.5}.get(rate.runs_as, 2.0))
            ones = np.ones(len(of))
            out = np.where(grows[of] > 0, 8.0, 2.0)
            if device.kind != "gpu":
                work = batch[of] * m[of] * n[of] * k[of]
                moved = work * (size / n[of] + size / m[of] + out / k[of])
                seconds[of] = _roofline("matmul", 2.0 * work, moved, rate.flops_per_s, device)
                continue
            found = Products(
                np.maximum(1.0, batch[of]), m[of], n[of], k[of], rate.flops_per_s * ones,
                size * ones, size * ones, out, np.full(len(of), -1),
            )  # fmt: skip
            seconds[of] = _library(found, device, size < 2.0)
    return seconds


def _library(products: Products, device: Device, narrow: bool) -> Floats:
    """Seconds of products as a library runs them: physics, and for 16 bits what measurements leave of it."""
    times = products.times(device, KERNEL.families["gemm"])
    if narrow:  # narrow products were measured with the conversion of their operands
        return times.time_s
    learned = residual.load("gemm")
    factor = np.exp(np.clip(learned.forests["mid"].predict(products.features(times, device)), *learned.clip))
    return np.maximum(times.time_s * factor, times.floor_s)


@cache
def _roofline_shares() -> Calibration:
    return load("roofline")


def _roofline(
    kind: str, flops: Floats, nbytes: Floats, flops_per_s: float, device: Device, way: str = ""
) -> Floats:
    """Seconds of kernels of a device that is no GPU: tiles, waves and multiprocessors are a GPU's."""
    share = _roofline_shares()
    return np.maximum(
        flops / (flops_per_s * share[f"compute.{kind}{way}"]), nbytes / (bandwidth(device) * share[f"memory.{kind}"])
    )


def _attention(a: Attention, t: PlanTable, device: Device, constants: Constants) -> tuple[Floats, Floats]:
    rate = matrix_rate(device, "bf16").flops_per_s
    where = np.broadcast_to(a.where, len(t))
    columns = np.stack([a.batch, a.rows, a.keys, a.depth])
    columns = np.where(where, columns, 1.0)
    distinct, inverse = np.unique(columns, axis=1, return_inverse=True)
    count = distinct.shape[1]
    both = np.concatenate([distinct, distinct], axis=1)
    backward = np.arange(2 * count) >= count
    two = np.full(2 * count, 2.0)
    batch, queries, keys, depth = both
    if device.kind == "gpu":
        found = attention(
            batch, queries, keys, depth, np.full(2 * count, rate), two, two, np.full(2 * count, a.causal), backward,
            device, KERNEL.families["attention"],
        ).time_s  # fmt: skip
        ahead, back = found[:count], found[count:]
    else:
        batch, queries, keys, depth = distinct
        work = 4.0 * batch * queries * keys * depth * (0.5 if a.causal else 1.0)
        moved = 4.0 * batch * (queries + keys) * depth
        ahead = _roofline("attention", work, moved, rate, device)
        back = _roofline("attention", 2.5 * work, 3.0 * moved, rate, device, ".backward")
    inverse = inverse.reshape(-1)
    older = t.chosen("attention", "flash2")
    forward, backward_ = (
        np.where(older, constants[f"flash2.{way}.{how}"], constants[f"flash.{way}.{how}"])
        for way in ("forward", "backward")
        for how in (generation(device),)
    )
    return ahead[inverse] / forward, back[inverse] / backward_


