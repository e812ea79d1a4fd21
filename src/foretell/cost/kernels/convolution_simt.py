"""Convolutions in fp32 on the ordinary lanes (no tensor cores): what cuDNN and PyTorch run for channels-first fp32.

Three kernels, of which a library takes the fastest that applies:

* *Implicit GEMM*: the product of (output pixels, window × channels) by (window × channels, filters), cut in tiles, one
  a thread block. Padded tiles cost what full ones do: with 16 filters, three quarters of a tile of 64 are idle. A tile
  walks k after a prologue worth so many steps; small tiles reuse fewer operands; blocks run in rounds over the
  multiprocessors. Addresses are computed on integer units, which are the floating-point lanes before compute
  capability 7.0.
* *Winograd*, for windows of 3×3 and stride 1 (A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks,
  CVPR 2016): in one kernel, F(2×2, 3×3), 16 multiplications for four outputs in place of 36; or, on compute capability
  7.x, F(4×4, 3×3), 36 for sixteen outputs in place of 144, with transforms in kernels of their own, which move every
  map 2.25 times larger, out and in. In DeepBench's fp32 tables cuDNN prefers the second on Volta and Turing (23 of 32
  such convolutions) and the first on Maxwell and Pascal (16 to 22 of 32).
* *Depthwise*: PyTorch's own kernel, a thread an output, which loads each tap through the cache: so many cycles of a
  lane an output and a tap.

Time = max(pipe, memory) + latency. Traffic is compulsory (operands and result once), partly served by the L2.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.rates import bandwidth, vector_rate
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]

# Tiles of implicit GEMM: (output pixels, filters), and threads of their blocks.
_TILES = ((128, 128), (128, 64), (128, 32), (64, 64), (64, 32), (32, 32))
_TM, _TN = (np.array(side, dtype=np.float64)[:, None] for side in zip(*_TILES, strict=True))
_REACH = _TM * _TN / (_TM + _TN)
_WINOGRAD_PIXELS = 128.0
_WINOGRAD_FILTERS = (32.0, 64.0)
_WINOGRAD_GROWTH = 36.0 / 16.0  # transformed elements for one of a map, in F(4×4, 3×3)
_CHUNK = 4096  # rows at a time, so that intermediate columns stay in cache


def convolution(
    groups: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    kernel_area: Floats,
    stride: Floats,
    dilation: Floats,
    bytes_read: Floats,
    bytes_written: Floats,
    device: Device,
    constants: Calibration,
) -> KernelTimes:
    """Times of fp32 convolutions given as implicit products of `groups` times (m, k) by (k, n), all columns (rows,).

    m counts output pixels of all images, n filters of a group, k the window times the channels of a group. `stride`
    and `dilation` are products over dimensions. Bytes are operands and result, each once.
    """
    columns = (groups, m, n, k, kernel_area, stride, dilation, bytes_read + bytes_written)
    parts = [
        _chunk(*(column[first : first + _CHUNK] for column in columns), device=device, constant=constants)
        for first in range(0, len(m), _CHUNK)
    ]
    if not parts:
        return KernelTimes(*(np.zeros(0) for _ in fields(KernelTimes)))
    return KernelTimes(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(KernelTimes)))


def _chunk(
    groups: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    area: Floats,
    stride: Floats,
    dilation: Floats,
    moved: Floats,
    *,
    device: Device,
    constant: Calibration,
) -> KernelTimes:
    rate = vector_rate(device).flops_per_s
    sms = float(device.multiprocessors or 80)
    shared = _integers_share_lanes(device)

    # Implicit GEMM, every tiling.
    blocks = groups * np.ceil(m / _TM) * np.ceil(n / _TN)
    reuse = constant["gemm.reuse"]
    speed = _REACH / (_REACH + reuse) * (1.0 + reuse / _REACH.max())
    pipe = constant["gemm.pipe"] * np.where(area > 1, 1.0, constant["gemm.pointwise"])
    pipe = pipe / (1.0 + shared * constant["gemm.addresses"])
    work = 2.0 * _TM * _TN * (k + constant["gemm.start"]) / (rate / sms * pipe * speed)
    gemm = work * _rounds(blocks, sms, constant["tail"])
    choice = gemm.argmin(axis=0)
    rows = np.arange(len(m))
    compute = gemm[choice, rows]
    tile_m, tile_n, count = _TM[choice, 0], _TN[choice, 0], blocks[choice, rows]

    efficiency = np.where((groups > 1) & (k == area), constant["memory.depthwise"], constant["memory.gemm"])
    traffic = moved.copy()
    latency = np.full(len(m), constant["latency"])

    # Winograd, where it applies.
    winograd = (area == 9) & (stride == 1) & (dilation == 1) & (groups == 1)
    if winograd.any():
        index = np.flatnonzero(winograd)
        pixels, outputs, channels = m[winograd], n[winograd], k[winograd] / 9.0
        apart = _transforms_apart(device)
        maps = 4.0 * pixels * (channels + outputs)
        more = 2.0 * _WINOGRAD_GROWTH * maps if apart else 0.0 * maps
        saved = constant["winograd.apart.products" if apart else "winograd.products"]
        for filters in _WINOGRAD_FILTERS:
            tiles = np.ceil(pixels / _WINOGRAD_PIXELS) * np.ceil(outputs / filters)
            depth = (9.0 / saved) * (channels + constant["winograd.start"])
            share = filters / (filters + constant["winograd.reuse"])
            own = 2.0 * _WINOGRAD_PIXELS * filters * depth / (rate / sms * constant["winograd.pipe"] * share)
            own = own * _rounds(tiles, sms, constant["tail"])
            other = (moved[winograd] + more) / (bandwidth(device) * constant["memory.gemm"])
            now = np.maximum(compute[index], traffic[index] / (bandwidth(device) * constant["memory.gemm"]))
            better = np.maximum(own, other) < now
            chosen = index[better]
            compute[chosen], tile_m[chosen], tile_n[chosen] = own[better], _WINOGRAD_PIXELS, filters
            count[chosen], traffic[chosen] = tiles[better], (moved[winograd] + more)[better]
            latency[chosen] = constant["latency"] * (3.0 if apart else 1.0)

    # Depthwise.
    depthwise = (groups > 1) & (k == area)
    outputs = groups * m * n
    cycles = constant["depthwise.output"] + constant["depthwise.tap"] * area
    cycles = cycles * (1.0 + shared * constant["depthwise.addresses"])
    compute = np.where(depthwise, outputs * cycles * 2.0 / rate, compute)
    threads = np.where(depthwise, 256.0, np.clip(tile_m * tile_n / 64.0, 64.0, 256.0))
    count = np.where(depthwise, np.ceil(outputs / 256.0), count)

    dram = bandwidth(device)
    hit = 1.0 / (1.0 + (traffic / (constant["l2.share"] * device.l2_bytes)) ** 2) if device.l2_bytes else 0.0 * moved
    served = 1.0 - hit * (1.0 - 1.0 / constant["l2.speedup"])
    memory = traffic / (dram * efficiency) * served
    useful = 2.0 * groups * m * n * k
    least = useful / np.where(winograd, 4.0, 1.0) / rate
    return KernelTimes(
        compute_s=compute,
        memory_s=memory,
        latency_s=latency,
        floor_s=np.maximum(least, moved * served / dram),
        blocks=count,
        threads=threads,
        registers=np.where(depthwise, 32.0, 128.0),
        shared_bytes=np.where(depthwise, 0.0, 4.0 * 2.0 * 8.0 * (tile_m + tile_n)),
        tile_m=np.where(depthwise, 256.0, tile_m),
        tile_n=np.where(depthwise, 1.0, tile_n),
        split=np.ones(len(m)),
        dram_bytes=traffic * (1.0 - hit),
        l2_bytes=traffic,
    )


def _rounds(blocks: Floats, sms: float, tail: float) -> Floats:
    """How often each multiprocessor's pipe does one block's work; blocks of the last round drift together by `tail`."""
    rounds = blocks / sms
    return np.maximum(1.0, tail * np.ceil(rounds) + (1.0 - tail) * rounds)


def _transforms_apart(device: Device) -> bool:
    """Whether cuDNN runs Winograd's transforms as kernels of their own: compute capability 7.x."""
    return (device.compute_capability or "").split(".")[0] == "7"


def _integers_share_lanes(device: Device) -> float:
    """1 where integer instructions issue to the fp32 lanes (before compute capability 7.0), else 0."""
    try:
        return float(float(device.compute_capability or "7.0") < 7.0)
    except ValueError:
        return 0.0
