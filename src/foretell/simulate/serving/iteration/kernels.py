"""What kernels of an iteration take, and what they draw: columns (points,) by part.

Matrix products and attention are those of `foretell.cost.kernels` with their residuals, whose measurements were of
serving engines' kernels; streams go by bandwidth, collectives by `foretell.simulate.collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretell.cost import residual
from foretell.cost.energy import Power, power_of
from foretell.cost.kernel import KERNEL
from foretell.cost.kernels.attention import Attentions
from foretell.cost.kernels.gemm import SCHEMES, Products, operands_in_shared, powered_rate
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.rates import bandwidth, matrix_rate
from foretell.hardware.device import Device
from foretell.simulate.collectives import Fabric
from foretell.simulate.collectives.experts import exchange_s
from foretell.simulate.serving.iteration.constants import Constants
from foretell.simulate.serving.iteration.sizes import Kernels, Message, Product, Stream
from foretell.simulate.training.constants import generation
from foretell.workload.llm import LLMConfig

Floats = npt.NDArray[np.float64]

__all__ = ["COLUMNS", "FORMAT_BYTES", "KERNELS", "PARTS", "Costs", "attended"]

#: Bytes of one value of weights or of the cache: blocks of 16 or 32 values share a scale of 8 bits, groups of 128 one
#: of 16 bits.
FORMAT_BYTES = {
    "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "w8a16": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125,
    "int4": 0.515625,
}  # fmt: skip
PARTS = ("products", "attention", "experts", "communication", "elementwise", "logits", "sampling")
#: What a table keeps beside the seconds of each part: seconds that arithmetic and device memory are the limit, joules
#: of the core at boost voltage, joules of memory, and launches.
COLUMNS = (*PARTS, "compute", "memory", "core_j", "memory_j", "kernels")
KERNELS = COLUMNS.index("kernels")
_COMPUTE, _MEMORY, _CORE_J, _MEMORY_J = (COLUMNS.index(name) for name in ("compute", "memory", "core_j", "memory_j"))
#: Tokens a rank sends up to which engines take DeepEP's low-latency kernels.
_LOW_LATENCY = 256.0
#: Widening weights on the way in takes three instructions for a pair of values: bits put in place, an offset taken off,
#: a scale (Marlin's `lop3` way). It is done again for every tile of so many rows.
_WIDENING, _TILE_ROWS = 1.5, 64.0
#: Rows of the smallest tile of tensor cores (mma.m16n8k16).
_FEW_ROWS = 16.0
#: Whose constants products in int8 go by, of which no open table has any: CUTLASS's kernels for fp8, which differ in
#: the instruction alone; for experts one Triton kernel serves 16 bits and int8.
_ALIKE = {("product", "int8"): "fp8", ("experts", "int8"): "half"}


@dataclass(frozen=True, slots=True)
class _Runs:
    """How products in a format run on a device: rate, bytes of operands, scheme of quantising, and which constant."""

    flops_per_s: float
    a_bytes: float
    b_bytes: float
    scheme: int
    kind: str


def _runs(number_format: str, device: Device) -> _Runs:
    if number_format == "fp32":
        return _Runs(matrix_rate(device, "tf32").flops_per_s, 4.0, 4.0, -1, "half")
    # GPUs without bf16 (up to 7.x) are served in fp16, whatever the model is published in.
    half = "bf16" if number_format != "fp16" and device.peak("bf16") else "fp16"
    b_bytes = FORMAT_BYTES[number_format]
    if number_format == "fp8" and (rate := matrix_rate(device, "fp8")).runs_as == "fp8":
        return _Runs(rate.flops_per_s, 1.0, 1.0, SCHEMES.index("token"), "fp8")
    if number_format == "int8" and (rate := matrix_rate(device, "int8")).runs_as == "int8":
        return _Runs(rate.flops_per_s, 1.0, 1.0, SCHEMES.index("token"), "int8")
    if number_format == "nvfp4" and (rate := matrix_rate(device, "fp4")).runs_as == "fp4":
        return _Runs(rate.flops_per_s, 0.5, b_bytes, SCHEMES.index("nvfp4"), "fp4")
    if number_format == "mxfp4" and matrix_rate(device, "fp4").runs_as == "fp4" and not _widens_mxfp4(device):
        # Activations are kept in MXFP8, and mixed operands run at its rate (PTX ISA, tcgen05.mma kind::mxf8f6f4).
        return _Runs(matrix_rate(device, "fp8").flops_per_s, 1.0, b_bytes, SCHEMES.index("token"), "fp8")
    # Anything else is widened on the way in: weights only.
    rate = matrix_rate(device, half)
    return _Runs(rate.flops_per_s, 2.0, b_bytes, -1, "half" if b_bytes == 2.0 else "weight_only")


def _widens_mxfp4(device: Device) -> bool:
    """Whether engines widen MXFP4 though the device multiplies in 4 bits: on NVIDIA's 12.x (vLLM's Marlin there)."""
    return device.vendor == "NVIDIA" and (device.compute_capability or "").startswith("12.")


@dataclass(frozen=True)
class Costs:
    """A device with its fabric and constants: turns kernels into columns (`COLUMNS`, points)."""

    device: Device
    fabric: Fabric | None
    constants: Constants
    config: LLMConfig
    #: Whose habits apply: an engine's, or those of an older generation of it (`constants.host_of`).
    host: str

    @property
    def power(self) -> Power | None:
        """What the device draws."""
        return power_of(self.device)

    def of(self, kernels: Kernels, points: int) -> Floats:
        """Columns of these kernels together, (`COLUMNS`, points)."""
        table = np.zeros((len(COLUMNS), points))
        for product in kernels.products:
            self._product(table, product)
        for stream in kernels.streams:
            self._stream(table, stream)
        for message in kernels.messages:
            table[PARTS.index("communication")] += self._message(message)
            table[KERNELS] += 1.0
        return table

    def _add(self, table: Floats, part: str, found: _Alone, flops: Floats, runs: _Runs, shares: tuple[str, str],
             latency: str) -> None:  # fmt: skip
        """Add kernels that do `flops`, at `shares` of the arithmetic and bandwidth they reach alone, and with one of
        their latency."""
        there = flops > 0.0
        # Older engines' kernels for experts in fp8 are slower, those in 16 bits are not.
        whole = self.constants[f"experts.fp8.{self.host}"] if part == "experts" and runs.kind == "fp8" else 1.0
        if runs.kind == "weight_only":
            # Kernels that widen weights on the way in have tiles of as few rows as an instruction takes (Marlin), and
            # multiply many rows at a share of the peak.
            peak = np.array(runs.flops_per_s)
            rate = np.minimum(peak, powered_rate(peak, self.device, KERNEL.families["gemm"]))
            compute = found.few_rows * flops / (rate * self.constants[shares[0]])
        else:
            compute = found.compute_s / (self.constants[shares[0]] * whole)
        memory = found.memory_s / (self.constants[shares[1]] * whole)
        seconds = np.maximum(compute, memory) + found.latency_s * self.constants[latency]
        seconds = np.where(there, np.maximum(seconds, found.floor_s), 0.0)
        table[PARTS.index(part)] += seconds
        bound = np.where(compute >= memory, _COMPUTE, _MEMORY)
        table[bound, np.arange(len(seconds))] += seconds
        table[KERNELS] += there
        power = self.power
        if power is not None:
            ideal = flops * found.padding / runs.flops_per_s
            relative = dict(power.format_w)
            own = runs.kind if runs.kind in ("fp8", "fp4", "int8") else "bf16"
            watts = power.core_w * relative.get(own, 1.0)
            held = np.maximum(ideal, compute)
            joules = watts * ((1.0 - power.issue) * ideal + power.issue * held)
            if runs.kind == "weight_only":
                joules += found.weights * _WIDENING * _lane_j(self.device, power)
            table[_CORE_J] += np.where(there, joules, 0.0)
            moved = found.dram_bytes * power.dram_j_per_byte + found.l2_bytes * power.l2_j_per_byte
            table[_MEMORY_J] += np.where(there, moved, 0.0)

    def _stream(self, table: Floats, stream: Stream) -> None:
        rate = bandwidth(self.device) * self.constants["stream.share"]
        nbytes = np.broadcast_to(stream.nbytes, table.shape[1:])
        there = nbytes > 0.0
        each = self.constants["routing_s" if stream.routing else "kernel_s"]
        seconds = nbytes / rate + stream.kernels * each * there
        table[PARTS.index(stream.part)] += seconds
        table[_MEMORY] += seconds
        table[KERNELS] += stream.kernels * there
        if self.power is not None:
            table[_MEMORY_J] += nbytes * (self.power.dram_j_per_byte + self.power.l2_j_per_byte)

    def _message(self, message: Message) -> Floats:
        assert self.fabric is not None
        if message.kind in ("dispatch", "combine"):
            moe = self.config.moe
            assert moe is not None
            sizes = (self.config.hidden, moe.top_k, moe.experts, message.size, message.stride)
            low, normal = (exchange_s(self.fabric, message.kind, message.nbytes, *sizes, low_latency=quick)
                           for quick in (True, False))  # fmt: skip
            return np.where(message.nbytes <= _LOW_LATENCY, low, normal)
        alone, waits = (self.fabric.time_s(message.kind, nbytes, message.size, message.stride)
                        for nbytes in (message.nbytes, np.minimum(message.nbytes, 1.0)))  # fmt: skip
        return np.asarray(alone - waits * (1.0 - self.constants["latency.communication"]))

    def _product(self, table: Floats, p: Product) -> None:
        runs = _runs(p.format, self.device)
        kind = "experts" if p.part == "experts" and bool((p.batch > 1.0).any()) else "product"
        how, alike = generation(self.device), _ALIKE.get((kind, runs.kind), runs.kind)
        own = f"{kind}.memory.{alike}.{how}"
        shares = f"{kind}.{alike}.{how}", own if own in self.constants else f"{kind}.memory.{how}"
        sizes = np.stack([np.maximum(p.batch, 1e-3), np.maximum(p.m, 1.0), p.n, p.k])
        found = _products_alone(sizes.tobytes(), runs, self.device)
        flops = 2.0 * p.batch * p.m * p.n * p.k
        self._add(table, p.part, found, flops, runs, shares, "latency.product")

    def attention(self, batch: Floats, queries: Floats, seen: Floats, depth: float, kv_bytes: float, kind: str,
                  between: float) -> Floats:  # fmt: skip
        """Columns of attention of `batch` key heads: `queries` rows each against `seen` keys.

        `kind` is ``decode``, ``prefill`` or ``latent``, `between` are bytes touched between two uses of the cache.
        """
        sizes = np.stack([np.maximum(batch, 1.0), np.maximum(queries, 1.0), np.maximum(seen, 1.0)])
        runs = _runs("bf16", self.device)
        found = _attention_alone(sizes.tobytes(), depth, kv_bytes, between, kind != "latent", runs, self.device)
        table = np.zeros((len(COLUMNS), len(batch)))
        flops = 4.0 * batch * queries * seen * depth
        share = f"attention.{kind}"
        self._add(table, "attention", found, flops, runs, (share, share), "latency.attention")
        return table


@dataclass(frozen=True, slots=True)
class _Alone:
    """What is kept of kernels by themselves (`foretell.cost.kernels`), columns (kernels,)."""

    compute_s: Floats
    memory_s: Floats
    latency_s: Floats
    floor_s: Floats
    dram_bytes: Floats
    l2_bytes: Floats
    #: Executed arithmetic over what was asked for: tiles are filled up.
    padding: Floats | float = 1.0
    #: The same in tiles of `_FEW_ROWS`.
    few_rows: Floats | float = 1.0
    #: Weights that tiles of `_TILE_ROWS` take in.
    weights: Floats | float = 0.0

    @staticmethod
    def of(times: KernelTimes, factor: Floats, padding: Floats | float = 1.0) -> _Alone:
        return _Alone(
            times.compute_s * factor, times.memory_s * factor, times.latency_s * factor, times.floor_s,
            times.dram_bytes, times.l2_bytes, padding,
        )  # fmt: skip


# Whoever asks for the same model on the same device again, with another plan or other constants, gets its kernels at
# once.
@lru_cache(maxsize=8192)
def _products_alone(sizes: bytes, runs: _Runs, device: Device) -> _Alone:
    """Matrix products of these (batch, m, n, k; kernels)."""
    batch, m, n, k = np.frombuffer(sizes).reshape(4, -1)
    if device.kind != "gpu":
        moved = m * k * runs.a_bytes + n * k * runs.b_bytes + m * n * 2.0
        return _roofline(2.0 * batch * m * n * k, batch * moved, runs, device)
    one = np.ones(len(m))
    work = Products(batch, m, n, k, runs.flops_per_s * one, runs.a_bytes * one, runs.b_bytes * one, 2.0 * one,
                    np.full(len(m), runs.scheme))  # fmt: skip
    times = work.times(device, KERNEL.families["gemm"])
    learned = runs.kind != "weight_only"
    found = _Alone.of(times, _factor("gemm", work.features(times, device), times) if learned else one)
    weights = batch * n * k * np.ceil(m / _TILE_ROWS)
    return replace(found, few_rows=np.ceil(m / _FEW_ROWS) * _FEW_ROWS / m, weights=weights)


def _lane_j(device: Device, power: Power) -> float:
    """Joules of an ordinary instruction in one lane: those of a multiply-add, two of the FLOP that peaks count."""
    peak = device.peaks.get("fp32.vector")
    return 2.0 * power.vector_w / peak if peak else 0.0


@lru_cache(maxsize=1024)
def _attention_alone(
    sizes: bytes, depth: float, kv_bytes: float, between: float, learned: bool, runs: _Runs, device: Device
) -> _Alone:
    """Attention of these (batch, queries, keys; kernels)."""
    batch, queries, seen = np.frombuffer(sizes).reshape(3, -1)
    if device.kind != "gpu":
        moved = 2.0 * depth * batch * (2.0 * queries + kv_bytes * seen)
        return _roofline(4.0 * batch * queries * seen * depth, moved, runs, device)
    one = np.ones(len(batch))
    never = np.zeros(len(batch), dtype=np.bool_)
    work = Attentions(batch, queries, seen, depth * one, runs.flops_per_s * one, 2.0 * one, kv_bytes * one, never,
                      never, between)  # fmt: skip
    times = work.times(device, KERNEL.families["attention"])
    tile = np.maximum(times.tile_m, 64.0 if operands_in_shared(device) else 16.0)
    padding = tile * np.ceil(queries / tile) / queries
    return _Alone.of(times, _factor("attention", work.features(times, device), times) if learned else one, padding)


def _roofline(flops: Floats, nbytes: Floats, runs: _Runs, device: Device) -> _Alone:
    """Kernels of what is no GPU, whose tiles and rounds are not known: arithmetic at peak, bytes at the bandwidth that
    GPUs reach of theirs."""
    compute, memory = flops / runs.flops_per_s, nbytes / bandwidth(device)
    reached, none = KERNEL.families["gemm"]["dram.efficiency"], np.zeros(len(flops))
    return _Alone(compute, memory / reached, none, np.maximum(compute, memory), nbytes, none)


def _factor(family: str, features: Floats, times: KernelTimes) -> Floats:
    """What measurements leave of the physics, no faster than the hardware."""
    learned = residual.load(family)
    factor = np.exp(np.clip(learned.forests["mid"].predict(features), *learned.clip))
    return np.maximum(factor, times.floor_s / times.time_s)


def attended(tokens: Floats, cached: Floats, window: int | None) -> Floats:
    """Mean keys that each of `tokens` new queries sees behind `cached` ones, in a causal mask within `window`.

    >>> attended(np.array([4.0, 4.0, 4.0]), np.array([0.0, 6.0, 6.0]), None).tolist()
    [2.5, 8.5, 8.5]
    >>> attended(np.array([4.0, 4.0]), np.array([0.0, 6.0]), 2).tolist()  # 1, 2, 2, 2; 2, 2, 2, 2
    [1.75, 2.0]
    """
    q = np.maximum(tokens, 1.0)
    full = cached + (q + 1.0) / 2.0
    if window is None:
        return full
    growing = np.clip(window - cached, 0.0, q)  # queries that do not see a whole window
    return np.asarray((growing * (cached + (growing + 1.0) / 2.0) + (q - growing) * window) / q)
