"""fp32 matrix products on ordinary multiply-add lanes (CUDA cores), and on AMD's fp32 matrix units.

    time = max(arithmetic, traffic) + start and end of a kernel
    arithmetic = waves of tiles · FLOP of a tile / (what a multiprocessor sustains · what the tile's shape allows)

* The library cuts the result in tiles and picks the fastest of its menu, split along the reduced dimension where that
  fills the device. Menus differ by generation, and are narrow for batched products: cuBLAS 12 has one 128 × 128 kernel
  for them from Ampere on, so a product with 64 columns wastes half of its arithmetic.
* A tile of r × c does r·c multiply-adds per r + c operands it loads from shared memory. A multiprocessor with 128 lanes
  has the shared memory bandwidth of one with 64, so a smaller share of its peak is within reach.
* **Power.** Multiply-adds at full rate are what a chip draws most for. The sustained clock is where
  ``energy · rate · voltage²`` meets what the card's limit leaves. Energy follows the feature size of the
  process, voltage follows the clock down to a floor. T4, P4 and L4 sustain a third to four fifths of their peak.
* Blocks run in rows of the result's width, so that the right operand is read again for each row of resident blocks
  unless it stays in L2.

Shapes: every column is (rows,), one product each; m × k times k × n, `batch` of them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.rates import bandwidth, matrix_rate
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]

# Feature size in nm of the process (its name, where that is all there is), by architecture. Vendors' white papers.
_PROCESS_NM = {
    "Kepler": 28.0, "Maxwell": 28.0, "Pascal": 16.0, "Volta": 12.0, "Turing": 12.0, "Ampere": 7.0, "Ada Lovelace": 5.0,
    "Hopper": 5.0, "Blackwell": 5.0, "Vega": 14.0, "CDNA": 7.0, "CDNA 2": 6.0, "CDNA 3": 5.0, "CDNA 4": 3.0,
    "RDNA 2": 7.0, "RDNA 3": 5.0, "RDNA 4": 4.0,
}
_UNKNOWN_NM = 7.0

# Tiles (rows, columns of the result) on offer; cuBLAS names them the other way round, being column-major.
_PLAIN = {
    "6.0": ((128, 32), (64, 64)),
    "": ((128, 128), (64, 128), (128, 64), (32, 128), (128, 32), (64, 64), (32, 64), (64, 32), (32, 32)),
}
_BATCHED = {
    "pascal": ((64, 128), (128, 64)),
    "volta": ((64, 128), (128, 64), (64, 64), (32, 128), (128, 32)),
    "ampere": ((128, 128),),
}
_SPLITS = (1, 2, 3, 4, 6, 8, 16)
_SMALL_CHIP_LANES = 96  # multiprocessors have 64 lanes or 128
_CHUNK = 4096


def gemm_tiles(device: Device, batched: bool) -> tuple[tuple[int, int], ...]:
    """The tiles the vendor's library chooses among for fp32 products on this device."""
    if not batched or device.compute_capability is None:
        return _PLAIN.get(device.compute_capability or "", _PLAIN[""])
    capability = float(device.compute_capability)
    return _BATCHED["ampere" if capability >= 8 else "volta" if capability >= 7 else "pascal"]


def lanes(device: Device) -> float | None:
    """fp32 multiply-adds one multiprocessor starts in a cycle, where the data sheet allows to tell."""
    peak = device.peak("fp32", "vector")
    if not peak or not device.multiprocessors or not device.boost_clock_hz:
        return None
    return peak / (2.0 * device.multiprocessors * device.boost_clock_hz)


def sustained_share(device: Device, constants: Calibration) -> float:
    """Clock over boost clock that the power limit sustains in fp32 products: 0 < share ≤ 1; 1 where it is unknown."""
    return _sustained(
        device,
        *(constants[f"power.{name}"] for name in ("joules", "joules_matrix", "process", "voltage_floor", "others")),
    )


@lru_cache(maxsize=4096)
def _sustained(
    device: Device, joules: float, joules_matrix: float, process: float, floor: float, others: float
) -> float:
    if not device.tdp_w:
        return 1.0
    rate = matrix_rate(device, "fp32")
    each = joules if rate.unit == "vector" else joules_matrix
    full = each * rate.flops_per_s * (_PROCESS_NM.get(device.architecture, _UNKNOWN_NM) / 16.0) ** process

    def draw(share: float) -> float:
        return float(full * share * (floor + (1.0 - floor) * share) ** 2)

    allowed = max(0.3 * device.tdp_w, device.tdp_w - others)
    if draw(1.0) <= allowed:
        return 1.0
    low, high = 0.02, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if draw(middle) < allowed else (low, middle)
    return low


def simt(
    batch: Floats, m: Floats, n: Floats, k: Floats, device: Device, constants: Calibration,
    efficiency: Floats | float = 1.0,
) -> KernelTimes:
    """Times of fp32 products. `efficiency` scales the share of peak a kernel reaches (from a calibration).

    Raises InputError where the device lacks a peak or bandwidth.
    """
    rate = matrix_rate(device, "fp32")
    per_sm = lanes(device)
    if rate.unit == "tensor":
        share = constants["share.matrix"]
    elif per_sm is not None and per_sm > _SMALL_CHIP_LANES:
        share = constants["share.wide"]
    else:
        share = constants["share.narrow"]
    peak = rate.flops_per_s * sustained_share(device, constants)
    columns = [np.empty(len(m)) for _ in range(9)]
    scale = np.broadcast_to(np.asarray(efficiency, dtype=np.float64), (len(m),))
    for batched in (False, True):
        rows = np.flatnonzero((batch > 1) == batched)
        for first in range(0, len(rows), _CHUNK):
            part = rows[first : first + _CHUNK]
            results = _chunk(batch[part], m[part], n[part], k[part], gemm_tiles(device, batched), peak * share,
                             scale[part], device, constants)
            for column, result in zip(columns, results, strict=True):
                column[part] = result
    compute, memory, latency, blocks, tile_m, tile_n, split, dram, l2 = columns
    flops = 2.0 * batch * m * n * k
    return KernelTimes(
        compute_s=compute,
        memory_s=memory,
        latency_s=latency,
        floor_s=flops / rate.flops_per_s,
        blocks=blocks,
        threads=np.where(tile_m * tile_n >= 16384, 256.0, 128.0),
        registers=np.full(len(m), 122.0),
        shared_bytes=4.0 * 16.0 * (tile_m + tile_n),
        tile_m=tile_m,
        tile_n=tile_n,
        split=split,
        dram_bytes=dram,
        l2_bytes=l2,
    )


def _chunk(
    batch: Floats, m: Floats, n: Floats, k: Floats, tiles: tuple[tuple[int, int], ...], peak: float, scale: Floats,
    device: Device, constants: Calibration,
) -> tuple[Floats, ...]:
    reuse, start, tail = (constants[f"tile.{name}"] for name in ("reuse", "start", "tail"))
    choices = [(r, c, s) for r, c in tiles for s in _SPLITS]
    tm, tn, parts = (np.array(column, dtype=np.float64)[:, None] for column in zip(*choices, strict=True))
    own = tm * tn / (tm + tn)
    speed = own / (own + reuse) * (1.0 + reuse / 64.0)
    down, across, depth = np.ceil(m / tm), np.ceil(n / tn), np.ceil(k / parts)
    count = batch * down * across * parts
    processors = float(device.multiprocessors or 1)
    waves = count / processors
    lasting = np.maximum(1.0, tail * np.ceil(waves) + (1.0 - tail) * waves)
    work = 2.0 * tm * tn * (depth + start)
    compute = lasting * processors * work / (peak * speed * scale)
    # Traffic: rows of resident blocks share the right operand.
    resident = processors * constants["memory.resident"]
    rows_at_once = np.maximum(1.0, resident / (across * parts))
    right = 4.0 * k * n
    cache = float(device.l2_bytes or 0) * constants["memory.l2_fraction"]
    missed = right / (right + cache + 1.0)
    again = np.maximum(0.0, down / rows_at_once - 1.0) * missed
    dram = batch * (4.0 * m * k + right * (1.0 + again) + 4.0 * m * n * np.where(parts > 1, 3.0, 1.0))
    memory = dram / (bandwidth(device) * constants["memory.share"])
    time = np.maximum(compute, memory)
    # A split product adds up its parts: through atomics, or in a second kernel.
    latency = np.where(parts > 1, constants["latency.split"], 0.0) + constants["latency.kernel"]
    time = time + latency
    time[(parts > 1.0) & (depth < 64.0)] = np.inf
    best = np.argmin(time, axis=0)
    at = np.arange(len(m))
    picked = (compute, memory, latency, count, tm, tn, parts)
    pick = [np.broadcast_to(column, time.shape)[best, at] for column in picked]
    l2 = pick[3] * 4.0 * k / pick[6] * (pick[4] + pick[5])
    return (*pick, dram[best, at], l2)
