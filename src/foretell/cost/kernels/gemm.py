"""Tensor-core matrix products: C (m, n) = A (m, k) · B (k, n), `batch` times.

A kernel cuts C in tiles, one a thread block, and walks k in steps; the blocks run in rounds over the multiprocessors.
For each of several tilings, undivided or with k split to fill the device, we take

* *tensor pipe*: padded tiles at the peak of one multiprocessor, less what small tiles cost in issue;
* *feed*: operands from L2, ``tm·k + tn·k`` elements a tile, at so many bytes a cycle and multiprocessor;
* *steps*: each step of the loop takes at least a synchronisation, however small the tile;
* *rounds*: whole rounds of blocks, as far as blocks drift apart;
* *DRAM*: operands once, again where the tiles that run together span more than one pass and L2 cannot keep it, and not
  at all where the call before left them in L2;
* *power*: executed arithmetic costs energy, and no more than the card's limit is to be had;
* *latency*: launch, first loads and last stores; a second pass where k was split.

The pipes overlap imperfectly (a 4-norm). The library takes the fastest tiling, and so do we. Instruction shapes set the
tiles: 16-row steps with operands in registers up to compute capability 8.x and in 12.x, 64 or 128 rows with operands in
shared memory in 9.0 and 10.x (PTX ISA, `mma.sync`, `wgmma`, `tcgen05`).

Formats below 16 bits may have their activations quantised by a kernel that runs first; `quantized` adds its time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.program import Program
from foretell.cost.rates import bandwidth, matrix_rate
from foretell.graph import DTYPES, dtype_bytes
from foretell.graph.kinds import base_name
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

# Bytes of one value: a packed pair of 4-bit values is one element of PyTorch's.
_ELEMENT_BYTES = np.array([0.5 if dtype.endswith("_x2") else dtype_bytes(dtype) for dtype in DTYPES])

# Tiles (rows, columns) and the threads of their blocks.
_TILES = (
    (16, 64),
    (64, 16),
    (32, 64),
    (64, 32),
    (64, 64),
    (64, 128),
    (128, 64),
    (128, 128),
    (128, 256),
    (256, 128),
)
_TM, _TN = (np.array(side, dtype=np.float64)[:, None] for side in zip(*_TILES, strict=True))
_REACH = 128.0 * 256.0 / (128.0 + 256.0)
_CHUNK = 2048
_MAY_KEEP = 1.25  # L2's sizes between two uses of an operand, up to which part of it may still be there
_CYCLE_STEP = 64.0  # bytes of k one loop step takes
_CUT = 1.5  # of the generation's rate over a device's, from which the device counts as cut down


def operands_in_shared(device: Device) -> bool:
    """Whether tensor instructions read operands from shared memory (``wgmma``, ``tcgen05``), not registers."""
    major = (device.compute_capability or "").split(".")[0]
    return major in ("9", "10")


def _sixteen_bits(device: Device) -> float:
    """FLOP/s of products in 16 bits, which the energy of one is counted from: in the formats the device has."""
    had = [name for name in ("bf16", "fp16") if device.peak(name)]
    return min(matrix_rate(device, name).flops_per_s for name in had or ("bf16", "fp16"))


#: FLOP a cycle and multiprocessor of dense products in 16 bits, by major compute capability (NVIDIA H100 and B200
#: architecture papers). Versions for some markets have less of it, but issue instructions as fast.
_FULL_RATE = {"9": 4096.0, "10": 8192.0}


def _full_rate(peak_flops_per_s: Floats, device: Device) -> Floats:
    """What formats of these peaks (rows,) would reach were the tensor cores those of the whole generation."""
    major = (device.compute_capability or "").split(".")[0]
    if major not in _FULL_RATE or not device.multiprocessors or not device.boost_clock_hz:
        return peak_flops_per_s
    whole = _FULL_RATE[major] * device.multiprocessors * device.boost_clock_hz
    cut = whole / _sixteen_bits(device)
    return peak_flops_per_s * (cut if cut > _CUT else 1.0)


def power_rate(device: Device, constants: Calibration) -> float:
    """FLOP/s, as a share of the tensor cores' full rate, that the card's power limit sustains; may exceed 1."""
    if not device.tdp_w:
        return 2.0
    peak = _sixteen_bits(device)
    joules = constants["power.shared_operands" if operands_in_shared(device) else "power.register_operands"]
    return float(device.tdp_w / (joules * peak))


# A multiply-add on vector units is taken to cost no more than this many of tensor cores.
_DEAREST = 8.0


def powered_rate(peak_flops_per_s: Floats, device: Device, constants: Calibration) -> Floats:
    """FLOP/s that the card's power limit sustains in formats of these peaks (rows,)."""
    fullest = _sixteen_bits(device)
    return np.maximum(peak_flops_per_s, fullest / _DEAREST) * power_rate(device, constants)


def gemm(
    batch: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    peak_flops_per_s: Floats,
    a_bytes: Floats,
    b_bytes: Floats,
    out_bytes: Floats,
    device: Device,
    constants: Calibration,
    *,
    a_distance: Floats | None = None,
    b_distance: Floats | None = None,
    whole_k: Bools | None = None,
    coarse: Bools | None = None,
) -> KernelTimes:
    """Times of `batch` products each, all columns (rows,).

    `a_bytes`, `b_bytes` and `out_bytes` are of one element. `a_distance` and `b_distance` are bytes touched between two
    uses of an operand: what is below the L2's size is found there. Where none is given, the product is taken to be one
    of several alike that take turns, as in a benchmark that rotates its operands. `whole_k` marks kernels that cannot
    split k (those for quantised operands), `coarse` those whose tiles are no smaller than 128 × 128.
    """
    rows = len(m)
    ones = np.ones(rows)
    a_bytes, b_bytes, out_bytes, peak = (ones * x for x in (a_bytes, b_bytes, out_bytes, peak_flops_per_s))
    a_once, b_once, c_once = batch * m * k * a_bytes, batch * n * k * b_bytes, batch * m * n * out_bytes
    alike = constants["rotation"] * (a_once + b_once + c_once)
    a_distance = alike if a_distance is None else a_distance
    b_distance = alike if b_distance is None else b_distance
    never = np.zeros(rows, dtype=np.bool_)
    whole_k = never if whole_k is None else whole_k
    coarse = never if coarse is None else coarse
    numbers = np.stack([batch, m, n, k, peak, a_bytes, b_bytes, out_bytes, a_distance, b_distance])
    parts = []
    for first in range(0, rows, _CHUNK):
        part = slice(first, first + _CHUNK)
        parts.append(_chunk(numbers[:, part], whole_k[part], coarse[part], device, constants))
    if not parts:
        return KernelTimes(*(np.zeros(0) for _ in fields(KernelTimes)))
    return KernelTimes(*(np.concatenate([getattr(x, f.name) for x in parts]) for f in fields(KernelTimes)))


def _overlapped(*pipes: Floats) -> Floats:
    """What pipes that work side by side take together: a little more than the longest, their 4-norm."""
    squares = sum(np.square(np.square(pipe)) for pipe in pipes)
    return np.asarray(np.sqrt(np.sqrt(squares)))


def _staged(step_bytes: Floats, most: float) -> Floats:
    """Shared memory of a block: four stages of the loop's operands, or two, or two of half the depth, as fits."""
    fits = [stages * step_bytes <= most for stages in (4.0, 2.0)]
    return np.select(fits, [4.0 * step_bytes, 2.0 * step_bytes], step_bytes)


def _chunk(numbers: Floats, whole_k: Bools, coarse: Bools, device: Device, constant: Calibration) -> KernelTimes:
    batch, m, n, k, peak, a, b, c, a_distance, b_distance = numbers
    a_once, b_once, c_once = batch * m * k * a, batch * n * k * b, batch * m * n * c
    sms = float(device.multiprocessors or 108)
    clock = device.boost_clock_hz or 1.5e9
    l2 = float(device.l2_bytes or 6 << 20)
    dram = bandwidth(device)
    sm_peak = peak / sms

    down, across = np.ceil(m / _TM), np.ceil(n / _TN)
    tiles = batch * down * across
    # k whole, or split so that the blocks fill the device once.
    most = np.maximum(1.0, np.floor(k * np.maximum(a, b) / constant["split.least_bytes"]))
    fill = np.maximum(1.0, np.floor(sms * constant["split.fill"] / tiles))
    split = np.where(whole_k, 1.0, np.minimum(fill, most))
    tm, tn = np.concatenate([_TM, _TM]), np.concatenate([_TN, _TN])
    down, across, tiles = (np.concatenate([x, x]) for x in (down, across, tiles))
    split = np.concatenate([np.ones_like(split), split])

    blocks = tiles * split
    depth = k / split
    area = tm * tn
    reach = area / (tm + tn)
    rounds = blocks / sms
    whole = np.ceil(rounds)
    lasting = np.maximum(1.0, rounds + constant["tail"] * (whole - rounds))

    # One block, in seconds.
    issue = area * (constant["issue"] * (1.0 / reach - 1.0 / _REACH))
    full = _full_rate(peak, device) / sms
    multiply = depth * (area / sm_peak + issue / full) * (2.0 / constant["pipe"])
    # Loop synchronisations of blocks that share a multiprocessor overlap.
    resident = np.maximum(1.0, np.minimum(rounds, constant["resident"] * 128.0 * 128.0 / area))
    steps = depth * (np.maximum(a, b) / _CYCLE_STEP * constant["step.cycles"] / clock) / resident
    block = _overlapped(multiply, steps)
    pipe = lasting * block

    # Device memory.
    a_hit, b_hit = (1.0 / (1.0 + (x / (constant["l2.share"] * l2)) ** 4) for x in (a_distance, b_distance))
    # Blocks that run together form a near-square patch of the result; each operand is read once a patch.
    patch = np.sqrt(sms * _TM * _TN)
    kept_a, kept_b = (1.0 / (1.0 + (x / (constant["l2.share"] * l2)) ** 2) for x in (a_once / batch, b_once / batch))
    again = np.maximum(n / patch - 1.0, 0.0) * (constant["again"] * (1.0 - kept_a) * a_once)
    again += np.maximum(m / patch - 1.0, 0.0) * (constant["again"] * (1.0 - kept_b) * b_once)
    c_hit = 1.0 / (1.0 + (c_once / (constant["l2.share"] * l2)) ** 4)
    once = a_once * (1.0 - a_hit) + b_once * (1.0 - b_hit) + c_once * (1.0 - constant["l2.write"] * c_hit)
    from_dram = np.concatenate([again, again]) + once
    partial = np.where(split > 1.0, batch * m * n * 4.0 * split, 0.0)
    # A block keeps only so many bytes on their way, so few blocks cannot draw the whole bandwidth.
    per_sm = constant["dram.sm_bytes_per_cycle"] * clock
    drawn = np.minimum(dram * constant["dram.efficiency"], np.minimum(blocks, sms) * per_sm)
    memory = from_dram / drawn
    l2_moved = tiles * k * (tm * a + tn * b) + (c_once + 2.0 * partial)
    l2_rate = constant["l2.bytes_per_cycle"] * clock * sms
    cache = l2_moved / l2_rate

    # Energy.
    powered = tiles * area * (2.0 * k / powered_rate(peak, device, constant))
    total = np.maximum(_overlapped(pipe, cache, memory), powered)
    # Latency beyond the pipes: the first loads and the last stores of each round that nothing else hides.
    fixed = constant["start_s"] + constant["start.cycles"] / clock
    exposed = constant["round.cycles"] / clock * np.ceil(rounds / resident)
    second = np.where(split > 1.0, constant["split_s"] + constant["split.each_s"] * (split - 1.0), 0.0)
    extra = fixed + exposed + second
    time = total + extra + np.where(coarse & (np.minimum(tm, tn) < 128.0), np.inf, 0.0)

    best = np.argmin(time, axis=0)
    row = np.arange(len(m))

    def chosen(x: Floats) -> Floats:
        return np.asarray(np.broadcast_to(x, time.shape)[best, row], dtype=np.float64)

    shared = operands_in_shared(device)
    tile_m, tile_n = chosen(tm), chosen(tn)
    threads = np.where(tile_m * tile_n >= 128 * 128, 256.0, 128.0) + (128.0 if shared else 0.0)
    registers = np.where(shared, 168.0, np.clip(tile_m * tile_n / threads + 96.0, 64.0, 255.0))
    step_bytes = (tile_m * a + tile_n * b) * np.minimum(64.0, 128.0 / np.maximum(a, b))
    compute, moved = chosen(np.maximum(np.maximum(pipe, cache), powered)), chosen(memory)
    floor = np.maximum(
        2.0 * batch * m * n * k / peak,
        (a_once * (a_distance > _MAY_KEEP * l2) + b_once * (b_distance > _MAY_KEEP * l2)) / dram,
    )
    return KernelTimes(
        compute_s=compute,
        memory_s=moved,
        latency_s=chosen(total) - np.maximum(compute, moved) + chosen(extra),
        floor_s=floor,
        blocks=chosen(blocks),
        threads=threads,
        registers=registers,
        shared_bytes=_staged(step_bytes, float(device.shared_bytes_per_block or 227 << 10)),
        tile_m=tile_m,
        tile_n=tile_n,
        split=chosen(split),
        dram_bytes=chosen(from_dram),
        l2_bytes=chosen(l2_moved),
    )


#: How activations are quantised before a product: one scale a tensor, a token, 128 values, 16 values.
SCHEMES = ("tensor", "token", "block", "nvfp4")


def quantize(m: Floats, k: Floats, scheme: str, device: Device, constants: Calibration) -> Floats:
    """Seconds of quantising activations (m, k) from 16 bits: passes over them, at so many bytes and cycles an element.

    A scale of the whole tensor takes a pass of its own (in vLLM 0.14 one whose index arithmetic outweighs its traffic);
    scales of 128 or 16 values are found as a token's is.
    """
    name = "tensor" if scheme == "tensor" else "token"
    elements = m * k
    streamed = elements * constants[f"quantize.{name}.bytes"] / bandwidth(device)
    if device.l2_bytes:
        hit = 1.0 / (1.0 + (2.0 * constants["rotation"] * elements / (constants["l2.share"] * device.l2_bytes)) ** 4)
        streamed = streamed * (1.0 - hit)
    rate = (device.multiprocessors or 108) * (device.boost_clock_hz or 1.5e9)
    computed = elements * constants[f"quantize.{name}.cycles"] / rate
    # A token is one block's work.
    chain = k * constants["quantize.chain_cycles"] / (device.boost_clock_hz or 1.5e9)
    return np.maximum(streamed, computed) + chain + constants[f"quantize.{scheme}.start_s"]


#: What a residual of matrix products goes by, all dimensionless.
FEATURES = (
    "log2_m",
    "log2_n",
    "log2_k",
    "log2_rounds",
    "last_round_fill",
    "tile_fill",
    "log2_split",
    "log2_depth",
    "compute_share",
    "memory_share",
    "latency_share",
    "log2_b_per_l2",
    "log2_c_per_l2",
    "log2_intensity_per_balance",
    "weight_bytes",
    "scheme",
    "operands_in_shared",
)


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products as columns (rows,): sizes, bytes of one element, and how activations are quantised first.

    `scheme` is an index into `SCHEMES`, or -1 where nothing is quantised.
    """

    batch: Floats
    m: Floats
    n: Floats
    k: Floats
    peak_flops_per_s: Floats
    a_bytes: Floats
    b_bytes: Floats
    out_bytes: Floats
    scheme: Ints

    @staticmethod
    def of(program: Program, rows: Ints, peak_flops_per_s: Floats) -> Products:
        """Rows of a program that are matrix products, given the peak of each of them.

        Operands are of the row's element type. A ``foretell.quantized_mm.SCHEME`` takes and gives 16 bits.
        """
        table = program.table
        by_name = np.array([_scheme(name) for name, _ in program.names] or [-1])
        scheme = by_name[program.name_code[rows]]
        size = _ELEMENT_BYTES[table.dtype[rows]]
        narrow = scheme >= 0
        return Products(
            batch=np.maximum(1.0, table.gemm_batch[rows]),
            m=table.gemm_m[rows],
            n=table.gemm_n[rows],
            k=table.gemm_k[rows],
            peak_flops_per_s=peak_flops_per_s,
            a_bytes=size,
            b_bytes=size * np.where(size < 1.0, 1.125, 1.0),  # 16 values of 4 bits share a scale of 8
            out_bytes=np.where(narrow, 2.0, size),
            scheme=scheme,
        )

    def times(self, device: Device, constants: Calibration) -> KernelTimes:
        """Times of these products and of quantising what they take."""
        quantized = self.scheme >= 0
        peak = self.peak_flops_per_s * np.where(self.scheme == SCHEMES.index("block"), constants["pipe.block"], 1.0)
        coarse = (self.scheme == SCHEMES.index("nvfp4")) | (quantized & _coarse_quantized(device))
        result = gemm(
            *(self.batch, self.m, self.n, self.k, peak, self.a_bytes, self.b_bytes, self.out_bytes, device, constants),
            whole_k=quantized,
            coarse=coarse,
        )
        if not quantized.any():
            return result
        latency = result.latency_s.copy()
        for index, scheme in enumerate(SCHEMES):
            rows = self.scheme == index
            if rows.any():
                latency[rows] += quantize((self.batch * self.m)[rows], self.k[rows], scheme, device, constants)
        return replace(result, latency_s=latency)

    def features(self, times: KernelTimes, device: Device) -> Floats:
        """Features (rows, `FEATURES`) of these products, whose times are `times`."""
        l2 = float(device.l2_bytes or 6 << 20)
        rounds = times.blocks / float(device.multiprocessors or 108)
        filled = np.ceil(self.m / times.tile_m) * np.ceil(self.n / times.tile_n) * times.tile_m * times.tile_n
        a_once = self.batch * self.m * self.k * self.a_bytes
        b_once = self.batch * self.n * self.k * self.b_bytes
        c_once = self.batch * self.m * self.n * self.out_bytes
        flops = 2.0 * self.batch * self.m * self.n * self.k
        balance = self.peak_flops_per_s / bandwidth(device)
        columns = (
            np.log2(self.m),
            np.log2(self.n),
            np.log2(self.k),
            np.log2(rounds),
            rounds / np.ceil(rounds),
            self.m * self.n / filled,
            np.log2(times.split),
            np.log2(self.k / times.split),
            times.compute_s / times.time_s,
            times.memory_s / times.time_s,
            times.latency_s / times.time_s,
            np.log2(b_once / l2),
            np.log2(c_once / l2),
            np.log2(flops / (a_once + b_once + c_once) / balance),
            self.b_bytes,
            self.scheme.astype(np.float64),
            np.full(len(self.m), float(operands_in_shared(device))),
        )
        return np.stack(columns, axis=1)


def _scheme(name: str) -> int:
    scheme = name.rsplit(".", 1)[-1]
    return SCHEMES.index(scheme) if base_name(name) == "quantized_mm" and scheme in SCHEMES else -1


def _coarse_quantized(device: Device) -> bool:
    """Whether libraries have only tiles of 128 × 128 and more for quantised operands (CUTLASS's for 12.x)."""
    return (device.compute_capability or "").startswith("12.")
