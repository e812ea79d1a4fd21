"""Fused attention: softmax(Q Kᵀ) V without writing the scores (FlashAttention, Dao et al., 2022 and 2023).

A thread block holds a tile of query rows, those of all heads that share a key head side by side, and walks the keys:

* *tensor pipe*: two products, ``4 · rows · keys · depth`` FLOP a tile, the depth padded to what kernels are built for.
  Kernels whose operands are in registers reach less of the peak than those that read shared memory (`gemm`);
* *softmax*: each score takes an exponential, of which a multiprocessor does 16 a cycle (CUDA C++ Programming Guide,
  throughput of native arithmetic instructions), and other instructions, partly hidden behind the products;
* *causal*: a tile walks the keys before its own, and its diagonal in full; the longest tile walks all of them;
* *splits*: too few tiles to fill the device (decoding) divide the keys, and a second kernel joins the parts;
* *memory*: queries and results once, keys and values once, unless the call before left them in L2;
* *power* and *latency* as for products.

Backward takes 2.5 times the forward's products (five for two) and reads and writes four operands more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration
from foretell.cost.kernels.gemm import operands_in_shared, powered_rate
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.program import Program
from foretell.cost.rates import bandwidth
from foretell.graph import DTYPES, PHASES, dtype_bytes
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_ELEMENT_BYTES = np.array([dtype_bytes(dtype) for dtype in DTYPES])
_BACKWARD = PHASES.index("backward")
_TILES = np.array([16.0, 64.0, 128.0, 16.0, 64.0, 128.0])[:, None]  # query rows, undivided and divided
_DIVIDED = np.array([False, False, False, True, True, True])[:, None]
_KEYS = 64.0  # of one step of the loop
_MAY_KEEP = 1.25  # L2's sizes between two uses of the keys, up to which part of them may still be there
_DECODING = 64.0  # rows up to which kernels divide the keys
_EXPONENTIALS_PER_CYCLE = 16.0
_CHUNK = 4096


def attention(
    batch: Floats,
    rows: Floats,
    keys: Floats,
    depth: Floats,
    peak_flops_per_s: Floats,
    query_bytes: Floats,
    kv_bytes: Floats,
    causal: Bools,
    backward: Bools,
    device: Device,
    constants: Calibration,
    *,
    kv_distance: Floats | None = None,
) -> KernelTimes:
    """Times of attention of `batch` key heads (sequences × heads), all columns (op,).

    `rows` are the queries of all heads that share a key head; `query_bytes` and `kv_bytes` are of one element.
    `kv_distance` are bytes touched between two uses of the keys; by default those of the call itself.
    """
    count = len(rows)
    ones = np.ones(count)
    given = [ones * x for x in (batch, rows, keys, depth, peak_flops_per_s, query_bytes, kv_bytes)]
    batch, rows, keys, depth, _, query_bytes, kv_bytes = given
    if kv_distance is None:
        kv_distance = 2.0 * batch * (rows * query_bytes + keys * kv_bytes) * depth
    numbers = np.stack([*given, ones * kv_distance])
    causal, backward = (np.broadcast_to(mask, count) for mask in (causal, backward))
    parts = []
    for first in range(0, count, _CHUNK):
        part = slice(first, first + _CHUNK)
        parts.append(_chunk(numbers[:, part], causal[part], backward[part], device, constants))
    if not parts:
        return KernelTimes(*(np.zeros(0) for _ in fields(KernelTimes)))
    return KernelTimes(*(np.concatenate([getattr(x, f.name) for x in parts]) for f in fields(KernelTimes)))


def _chunk(numbers: Floats, causal: Bools, backward: Bools, device: Device, constant: Calibration) -> KernelTimes:
    batch, rows, keys, depth, peak, query_bytes, kv_bytes, kv_distance = numbers
    sms = float(device.multiprocessors or 108)
    clock = device.boost_clock_hz or 1.5e9
    l2 = float(device.l2_bytes or 6 << 20)
    dram = bandwidth(device)
    shared = operands_in_shared(device)
    p = constant["overlap"]
    padded = np.where(depth > 32.0, 32.0 * np.ceil(depth / 32.0), np.maximum(16.0, depth))
    odd = depth % 16.0 > 0.0

    # What a tile of queries walks: all keys, or with a causal mask those before it and its diagonal.
    heads = np.where(causal, np.maximum(1.0, np.round(rows / keys)), 1.0)  # sharing a key head
    diagonal = 0.5 * (keys + _KEYS + _TILES / heads)
    walked = np.where(causal, np.minimum(keys, diagonal), keys)
    tiles = batch * np.ceil(rows / _TILES)
    most = np.maximum(1.0, np.ceil(keys / constant["split.least_keys"]))
    fill = np.maximum(1.0, np.floor(sms * constant["split.fill"] / tiles))
    split = np.where(_DIVIDED & (rows <= _DECODING), np.minimum(most, fill), 1.0)
    blocks = tiles * split
    rounds = blocks / sms
    lasting = np.maximum(1.0, constant["tail"] * np.ceil(rounds) + (1.0 - constant["tail"]) * rounds)

    # Seconds a tile takes for one key.
    work = np.where(backward, 2.5, 1.0)
    efficiency = np.where(odd, constant["pipe.odd_depth"], 1.0)
    efficiency = efficiency * constant["pipe.shared_operands" if shared else "pipe.register_operands"]
    multiply = work * 4.0 * _TILES * padded / (peak / sms * efficiency) * (1.0 + constant["issue"] / _TILES)
    exponential = _TILES * (1.0 / _EXPONENTIALS_PER_CYCLE + constant["softmax.cycles"]) / clock
    steps = constant["step.cycles"] / _KEYS / clock / np.clip(rounds, 1.0, constant["resident"])
    each = (multiply**p + exponential**p + steps**p) ** (1.0 / p)
    pipe = np.maximum(lasting * each * walked / split, each * keys / split)

    # Device memory.
    hit = 1.0 / (1.0 + (kv_distance / (constant["l2.share"] * l2)) ** 4)
    passes = np.where(backward, 3.0, 1.0)
    queries = 2.0 * batch * rows * depth * query_bytes * passes
    cache = 2.0 * batch * keys * depth * kv_bytes * passes
    partial = np.where(split > 1.0, 2.0 * split * batch * rows * (depth + 2.0) * 4.0, 0.0)
    # A causal mask lets the last keys go unread where no query sees them: not here, each is seen by some query.
    from_dram = (queries + cache) * (1.0 - hit)
    memory = np.broadcast_to(from_dram / (dram * constant["dram.efficiency"]), blocks.shape)
    # Each block draws what it walks, from wherever it is, no faster than a multiprocessor can.
    l2_moved = queries + 2.0 * tiles * walked * depth * kv_bytes * passes + partial
    served = l2_moved / (np.minimum(blocks, sms) * constant["l2.bytes_per_cycle"] * clock)

    scores = batch * rows * np.where(causal, np.minimum(keys, 0.5 * (keys + _KEYS)), keys)
    powered = work * 4.0 * scores * padded / powered_rate(peak, device, constant)
    total = np.maximum((pipe**p + served**p + memory**p) ** (1.0 / p), powered)
    extra = constant["start_s"] + constant["start.cycles"] / clock
    each_round = constant["round_s"] + constant["round.cycles"] / clock
    extra = extra + each_round * np.ceil(rounds / constant["resident"])
    extra = extra + np.where(split > 1.0, constant["split_s"], 0.0)
    extra = extra + np.where(kv_bytes < query_bytes, constant["narrow_s"], 0.0)
    extra = extra * np.where(backward, 3.0, 1.0)
    if (device.compute_capability or "").startswith("10."):
        extra = extra * constant["latency.tensor_memory"]
    time = total + extra

    best = np.argmin(time, axis=0)
    row = np.arange(len(rows))

    def chosen(x: Floats) -> Floats:
        return np.asarray(np.broadcast_to(x, time.shape)[best, row], dtype=np.float64)

    tile = chosen(_TILES)
    compute, moved = chosen(np.maximum(np.maximum(pipe, served), powered)), chosen(memory)
    needed = work * 4.0 * batch * rows * np.where(causal, 0.5 * keys, keys) * depth
    threads = np.where(tile > 64.0, 256.0, 128.0) + (128.0 if shared else 0.0)
    return KernelTimes(
        compute_s=compute,
        memory_s=moved,
        latency_s=chosen(total) - np.maximum(compute, moved) + chosen(extra),
        floor_s=np.maximum(needed / (peak * query_bytes / kv_bytes), cache * (kv_distance > _MAY_KEEP * l2) / dram),
        blocks=chosen(blocks),
        threads=threads,
        registers=np.full(len(rows), 168.0 if shared else 255.0),
        shared_bytes=(tile * query_bytes + 2.0 * 2.0 * _KEYS * kv_bytes) * padded,
        tile_m=tile,
        tile_n=padded,
        split=chosen(split),
        dram_bytes=from_dram,
        l2_bytes=chosen(l2_moved),
    )


#: What a residual of attention goes by, all dimensionless.
FEATURES = (
    "log2_batch",
    "log2_rows",
    "log2_keys",
    "log2_rows_per_key",
    "depth",
    "log2_rounds",
    "tile_fill",
    "log2_split",
    "compute_share",
    "memory_share",
    "latency_share",
    "log2_kv_per_l2",
    "log2_intensity_per_balance",
    "kv_bytes",
    "causal",
    "backward",
    "operands_in_shared",
)


@dataclass(frozen=True, slots=True)
class Attentions:
    """Fused attention as columns (op,), as `attention` takes them.

    `step_bytes` is what the whole step of each moves, 0 for an operation by itself: between two uses of a decoder's
    cache, all of that passes through L2.
    """

    batch: Floats
    rows: Floats
    keys: Floats
    depth: Floats
    peak_flops_per_s: Floats
    query_bytes: Floats
    kv_bytes: Floats
    causal: Bools
    backward: Bools
    step_bytes: Floats | float = 0.0

    @staticmethod
    def of(
        program: Program, rows: Ints, peak_flops_per_s: Floats, step_bytes: Floats | float = 0.0
    ) -> Attentions:
        """Rows of a program that are attention, given the peak of each of them and what its step moves.

        The bytes of a cached element follow from what is read besides the queries.
        """
        table = program.table
        sides = (table.gemm_batch, table.gemm_m, table.gemm_n, table.gemm_k)
        batch, m, n, k = (np.maximum(1.0, side[rows]) for side in sides)
        size = _ELEMENT_BYTES[table.dtype[rows]]
        backward = table.phase[rows] == _BACKWARD
        cached = (table.bytes_read[rows] - size * batch * m * k) / (2.0 * batch * n * k)
        narrow = ~backward & (cached > 0.0) & (cached < 0.75 * size)
        return Attentions(
            batch=batch,
            rows=m,
            keys=n,
            depth=k,
            peak_flops_per_s=peak_flops_per_s,
            query_bytes=size,
            kv_bytes=np.where(narrow, 0.5 * size, size),
            causal=table.causal[rows],
            backward=backward,
            step_bytes=step_bytes,
        )

    def times(self, device: Device, constants: Calibration) -> KernelTimes:
        """Times of these ops."""
        sizes = self.batch, self.rows, self.keys, self.depth, self.peak_flops_per_s, self.query_bytes, self.kv_bytes
        own = 2.0 * self.batch * (self.rows * self.query_bytes + self.keys * self.kv_bytes) * self.depth
        decoding = ~self.backward & (self.rows <= _DECODING) & (self.keys > self.rows)
        distance = np.where(decoding, np.maximum(own, self.step_bytes), own)
        return attention(*sizes, self.causal, self.backward, device, constants, kv_distance=distance)

    def features(self, times: KernelTimes, device: Device) -> Floats:
        """Features (op, `FEATURES`) of these ops, whose times are `times`."""
        l2 = float(device.l2_bytes or 6 << 20)
        cache = 2.0 * self.batch * self.keys * self.depth * self.kv_bytes
        queries = 2.0 * self.batch * self.rows * self.depth * self.query_bytes
        flops = 4.0 * self.batch * self.rows * self.keys * self.depth * np.where(self.causal, 0.5, 1.0)
        columns = (
            np.log2(self.batch),
            np.log2(self.rows),
            np.log2(self.keys),
            np.log2(self.rows / self.keys),
            self.depth / 64.0,
            np.log2(times.blocks / float(device.multiprocessors or 108)),
            self.rows / (np.ceil(self.rows / times.tile_m) * times.tile_m),
            np.log2(times.split),
            times.compute_s / times.time_s,
            times.memory_s / times.time_s,
            times.latency_s / times.time_s,
            np.log2((queries + cache) / l2),
            np.log2(flops / (queries + cache) / self.peak_flops_per_s * bandwidth(device)),
            self.kv_bytes,
            self.causal.astype(np.float64),
            self.backward.astype(np.float64),
            np.full(len(self.rows), float(operands_in_shared(device))),
        )
        return np.stack(columns, axis=1)
