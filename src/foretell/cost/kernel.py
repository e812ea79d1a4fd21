"""`kernel`: each op as the kernel a library would run for it, with its tiles, waves, occupancy and traffic.

    time = max over pipes (arithmetic, L2 and DRAM traffic) + what nothing hides (launch, first and last wave)

Families of kernels have a model each (`cost/kernels/`), with constants of its own fitted on measurements of single
operations: matrix products on tensor cores and on vector units, fused attention, fp32 convolutions, streaming kernels.
This module decides which op goes to which family, and holds what is left:

* Convolutions on tensor cores are implicit matrix products in the layout that tensor cores want; from channels-first
  they are converted and back. Their constants, and the shares of bandwidth of the other kinds, are fitted on whole
  networks (`calibrations/kernel.json`).
* PyTorch's own depthwise kernels are unrolled for windows of 1, 3 and 5; others loop.
* PyTorch's bilinear and bicubic resampling of channels-first tensors gives each thread one output position, and lets it
  walk all images and channels: at 14 × 14 positions, one block of one multiprocessor works
  (ATen/native/cuda/UpSampleBilinear2d.cu, `upsample_bilinear2d_out_frame`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration, load
from foretell.cost.kernels.attention import Attentions
from foretell.cost.kernels.convolution_simt import convolution
from foretell.cost.kernels.gemm import Products
from foretell.cost.kernels.simt import simt
from foretell.cost.kernels.stream import stream, variant
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.model import REGISTRY, OpTimes, Settings, Step, schedule
from foretell.cost.occupancy import achieved, limits_of, occupancy
from foretell.cost.program import Program
from foretell.cost.rates import bandwidth, matrix_rate, vector_rate
from foretell.cost.residual import Residual
from foretell.cost.roofline import Roofline
from foretell.errors import ForetellError
from foretell.graph import DTYPES, KINDS, PHASES, dtype_bytes
from foretell.graph.kinds import base_name
from foretell.hardware.device import Device
from foretell.units import format_bytes, format_flops, format_rate, format_time

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Factors = tuple[Floats | float, Floats | float, Floats | float]

_CODE = {kind: code for code, kind in enumerate(KINDS)}
_ITEMSIZE = np.array([dtype_bytes(dtype) for dtype in DTYPES])
_BACKWARD = PHASES.index("backward")

# Resampling kernels of channels-first tensors whose threads walk all planes.
_WALKS_PLANES = frozenset({"upsample_bilinear2d", "upsample_bicubic2d"})
# Windows that PyTorch's depthwise kernels are unrolled for (conv_depthwise2d_forward_kernel's template arguments).
_UNROLLED = (1.0, 9.0, 25.0)


_FLOAT32 = DTYPES.index("float32")
_HALVES = [DTYPES.index(name) for name in ("bfloat16", "float16")]
# Kinds whose fp32 kernels were measured one by one.
_MEASURED_KINDS = [_CODE[kind] for kind in ("pointwise", "softmax", "reduction", "copy", "random", "embedding")]
# Memories of the cards that whole networks were measured on, which give plain streaming nearly all their bandwidth.
_FAST_GRAPHICS = ("GDDR6X", "GDDR7")
_PLAIN_STREAMING = 0.91  # of the bandwidth, on those


def memory_share(device: Device, constants: Calibration) -> float:
    """Share of its bandwidth that the device's kind of memory gives to plain streaming in fp32."""
    if device.memory_type in _FAST_GRAPHICS:
        return _PLAIN_STREAMING
    return constants["memory.stacked" if (device.memory_type or "HBM").startswith("HBM") else "memory.graphics"]


def _relative(device: Device, share: float) -> float:
    """What a share of bandwidth fitted on cards with fast graphics memory comes to on this device."""
    return 1.0 if device.memory_type in _FAST_GRAPHICS else share / _PLAIN_STREAMING


# Kinds that stream their operands through.
_STREAMING = (
    *("pointwise", "normalization", "softmax", "reduction", "copy", "fill", "loss", "random", "embedding", "indexing"),
    *("optimizer", "scan"),
)


def step_bytes(program: Program, starts: Ints) -> Floats:
    """What the step of each row moves (rows,); steps begin at rows `starts`."""
    table = program.table
    if not len(program):
        return np.zeros(0)
    moved = np.add.reduceat((table.bytes_read + table.bytes_written) * table.repeat, starts)
    return np.asarray(moved, dtype=np.float64)[np.searchsorted(starts, np.arange(len(program)), side="right") - 1]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel model. `calibration` is of whole networks, `families` of the families of kernels."""

    calibration: Calibration
    families: Mapping[str, Calibration]
    name: str = "kernel"

    @property
    def rest(self) -> Roofline:
        """What costs the ops that no family takes."""
        return Roofline(self.calibration)

    def op_times(self, program: Program, device: Device, settings: Settings) -> OpTimes:
        """Times of every op. Raises InputError where the device lacks a peak or bandwidth that has no stand-in."""
        return self.step_times(program, device, settings, np.zeros(min(1, len(program)), dtype=np.int64))

    def operator_times(self, program: Program, device: Device, settings: Settings) -> OpTimes:
        """Times of ops that make no step together, such as the rows of a table."""
        return self.corrected(program, device, settings, {})

    def step_times(self, program: Program, device: Device, settings: Settings, starts: Ints) -> OpTimes:
        """Times of the ops of several steps, which begin at rows `starts`."""
        return self.corrected(program, device, settings, {}, step_bytes(program, starts))

    def corrected(
        self,
        program: Program,
        device: Device,
        settings: Settings,
        residuals: Mapping[str, Residual],
        moved_bytes: Floats | None = None,
    ) -> OpTimes:
        """Times of every op, those of some families times the factors that their residuals say.

        `moved_bytes` is what the step of each row moves; None: they make no step together.
        `details` then has the factor as ``op_factor``, and the ends of its interval as ``interval_low`` and ``_high``.
        """
        times = self.rest.op_times(program, device, settings)
        if device.kind != "gpu":  # waves and multiprocessors are a GPU's
            return times
        columns = _Columns.of(times)
        for family, rows in families_of(program, times, device).items():
            if len(rows) and family in self.families:
                moved = 0.0 if moved_bytes is None else moved_bytes[rows]
                columns.put(rows, *self._time(family, rows, program, times, device, residuals.get(family), moved))
                columns.launches["family"][rows] = 1.0 + _FAMILIES.index(family)
        self._depthwise(program, columns)
        self._resampling(program, columns, device)
        columns.launch_as_usual(program)
        factors = columns.factors if residuals else {}
        return columns.into(times, {**factors, **self._occupancy(columns, device)})

    def _time(
        self,
        family: str,
        rows: Ints,
        program: Program,
        times: OpTimes,
        device: Device,
        residual: Residual | None,
        moved_bytes: Floats | float,
    ) -> tuple[KernelTimes, Factors]:
        """What a family says of some rows, corrected by its residual if there is one."""
        table, constants = program.table, self.families[family]
        peak = times.details["peak_flops_per_s"][rows]
        plain = (1.0, 1.0, 1.0)
        if family in ("gemm", "attention"):
            work: Products | Attentions
            if family == "gemm":
                work = Products.of(program, rows, peak)
            else:
                work = Attentions.of(program, rows, peak, moved_bytes)
            found = work.times(device, constants)
            if residual is None:
                return found, plain
            return _correct(found, work.features(found, device), residual, device)
        batch, m, n, k = (c[rows] for c in (table.gemm_batch, table.gemm_m, table.gemm_n, table.gemm_k))
        read, written = table.bytes_read[rows], table.bytes_written[rows]
        if family == "simt":
            return simt(np.maximum(1.0, batch), m, n, k, device, constants), plain
        if family == "convolution_simt":
            area, stride, dilation = (c[rows] for c in (table.kernel_area, table.stride, table.dilation))
            found = convolution(batch, m, n, k, area, stride, dilation, read, written, device, constants)
            # A backward op makes one or two gradients, each a product of the forward's size.
            times_over = table.macs[rows] / np.maximum(batch * m * n * k, 1.0)
            return replace(found, compute_s=found.compute_s * times_over), plain
        return self._stream(rows, program, times, device), plain

    def _stream(self, rows: Ints, program: Program, times: OpTimes, device: Device) -> KernelTimes:
        """Streaming kernels: of fp32 with shares of bandwidth of their own, the rest with those of whole networks."""
        table, constants = program.table, self.families["stream"]
        # An operand smaller than the result is broadcast.
        read = table.bytes_read[rows]
        size = _ITEMSIZE[table.dtype[rows]]
        # A look-up walks what it fetches, not its table.
        fetched = table.bytes_written[rows] / np.maximum(size, 1e-9)
        elements = np.where(table.kind[rows] == _CODE["embedding"], fetched, table.elements[rows])
        broadcasts = (table.operands[rows] > 2) & (read < (table.operands[rows] - 1.5) * size * elements)
        variants = [[variant(name, bool(b)) for name, _ in program.names] for b in (False, True)]
        which = (broadcasts.astype(np.int64), program.name_code[rows])
        again, operations, block = (
            np.array([[float(getattr(v, f)) for v in row] for row in variants])[which]
            for f in ("again", "operations", "block")
        )
        own = np.array([[constants[f"share.{v.name}"] for v in row] for row in variants])[which]
        memory = memory_share(device, constants)
        measured = (table.dtype[rows] == _FLOAT32) & np.isin(table.kind[rows], _MEASURED_KINDS)
        share = np.where(measured, memory * own, times.details["memory_efficiency"][rows] * _relative(device, memory))
        found = stream(
            read,
            table.bytes_written[rows],
            elements,
            table.reduced[rows],
            np.minimum(share, 1.0),
            device,
            constants,
            again=again,
            operations=operations,
            block=block,
        )
        more = np.maximum(0.0, program.kernels[rows] - 1.0) * constants["latency.kernel"]
        return replace(found, latency_s=found.latency_s + more)

    def _depthwise(self, program: Program, columns: _Columns) -> None:
        table = program.table
        general = (table.kind == _CODE["convolution"]) & (table.gemm_batch > 1) & (table.gemm_k == table.kernel_area)
        general &= ~table.channels_last & ~np.isin(table.kernel_area, _UNROLLED)
        columns.compute[general] /= self.calibration["compute.depthwise.general"]

    def _resampling(self, program: Program, columns: _Columns, device: Device) -> None:
        """Threads are output positions; each walks batch · channels planes, waiting for memory at every one."""
        table = program.table
        if not len(program) or program.runtime != "eager":
            return
        walks = np.array([base_name(name) in _WALKS_PLANES for name, _ in program.names])[program.name_code]
        rows: Ints = np.flatnonzero(walks & ~table.channels_last)
        planes = np.maximum(1.0, table.reduced[rows])
        positions = table.elements[rows] / planes
        resident = float((device.multiprocessors or 100) * 2048)
        walk = planes * np.ceil(positions / resident) * self.calibration["latency.plane"]
        columns.memory[rows] = np.maximum(columns.memory[rows], walk)

    def _occupancy(self, columns: _Columns, device: Device) -> dict[str, Floats]:
        """Achieved occupancy of every launch (0: none), unless the device's limits are unknown."""
        try:
            limits = limits_of(device)
        except ForetellError:
            return {}
        blocks, threads, registers, shared = (
            np.rint(columns.launches[name]) for name in ("blocks", "threads", "registers", "shared_bytes")
        )
        # What a family guesses may exceed an old device's limits: its library would then take less.
        shared = np.minimum(shared, limits.shared_per_block)
        theory = occupancy(limits, registers, shared, np.maximum(1.0, threads))
        found = achieved(limits, blocks, threads, np.maximum(1, theory.blocks), device.multiprocessors or 1)
        return {"occupancy": np.where(blocks > 0, np.minimum(found, 1.0), 0.0)}

    def step(self, program: Program, times: OpTimes, settings: Settings) -> Step:
        """Ops one after another, the host running ahead."""
        return schedule(times, program.table.repeat)

    def interval(
        self, program: Program, times: OpTimes, step: Step, device: Device, settings: Settings
    ) -> tuple[float, float, str]:
        """As the roofline model's: quantiles of held-out residuals of the calibration."""
        return self.rest.interval(program, times, step, device, settings)

    def formula(self, program: Program, times: OpTimes, row: int, device: Device) -> list[str]:
        """The limits of one op, and the launch that was chosen for it."""
        value = {name: float(column[row]) for name, column in times.details.items()}
        launched = value.get("blocks", 0.0)
        if not value.get("family"):
            lines = self.rest.formula(program, times, row, device)
        else:
            name = _NAMES[int(value["family"])]
            if device.vendor == "NVIDIA" and float(device.compute_capability or "9.0") < 7.0:
                name = name.replace("tensor cores", "vector units")
            lines = [
                "time = max(compute, memory) + launch",
                "",
                f"compute  = {format_time(float(times.compute_s[row]))}  arithmetic and caches of {name}",
                *(
                    [
                        f"           counted        {format_flops(2.0 * float(program.table.macs[row]))}",
                        f"           peak           {format_rate(value['peak_flops_per_s'], 'FLOP')}"
                        f"  (alone {format_time(float(times.ideal_s[row]))})",
                    ]
                    if program.table.macs[row]
                    else []
                ),
                f"memory   = {format_time(float(times.memory_s[row]))}  device memory",
                f"           read           {format_bytes(float(program.table.bytes_read[row]))}",
                f"           written        {format_bytes(float(program.table.bytes_written[row]))}",
                f"           not from L2    {format_bytes(float(np.rint(value['dram_bytes'])))}",
                f"           bandwidth      {format_rate(bandwidth(device))}",
                f"launch   = {format_time(float(times.launch_s[row]))}  launch, first and last wave, what pipes leave",
            ]
        if launched:
            lines.append(f"launched as {launched:,.0f} blocks of {value['threads']:.0f} threads")
            each = f"{value['registers']:.0f} registers a thread, {value['shared_bytes'] / 1024:.0f} KiB shared a block"
            lines.append(f"           {each}")
            if value["tile_m"]:
                tile = f"tile {value['tile_m']:.0f} × {value['tile_n']:.0f}"
                parts = f", k in {value['split']:.0f} parts" if value["split"] > 1 else ""
                lines.append(f"           {tile}{parts}")
            if "occupancy" in value:
                lines.append(f"           occupancy      {value['occupancy']:.0%}")
        return lines


_FACTORS = ("op_factor", "interval_low", "interval_high")
_NAMES = (
    "",
    "a product on tensor cores",
    "a product on vector units",
    "fused attention",
    "an fp32 convolution",
    "a streaming kernel",
)
_LAUNCH = ("blocks", "threads", "registers", "shared_bytes", "tile_m", "tile_n", "split", "dram_bytes")


@dataclass(frozen=True, slots=True)
class _Columns:
    """Op times in the making."""

    compute: Floats
    memory: Floats
    launch: Floats
    launches: dict[str, Floats]
    factors: dict[str, Floats]

    @staticmethod
    def of(times: OpTimes) -> _Columns:
        n = len(times.compute_s)
        return _Columns(
            times.compute_s.copy(),
            times.memory_s.copy(),
            times.launch_s.copy(),
            {x: np.zeros(n) for x in (*_LAUNCH, "family")},
            {x: np.ones(n) for x in _FACTORS},
        )

    def put(self, rows: Ints, kernel: KernelTimes, factors: Factors) -> None:
        """Take a family's word for these rows."""
        for name, column in zip(_FACTORS, factors, strict=True):
            self.factors[name][rows] = column
        self.compute[rows], self.memory[rows] = kernel.compute_s, kernel.memory_s
        self.launch[rows] = kernel.latency_s
        for name in _LAUNCH:
            self.launches[name][rows] = getattr(kernel, name)

    def launch_as_usual(self, program: Program) -> None:
        """Launches of what no family took, of a size that is usual for its kind.

        Convolutions on tensor cores: tiles of 128 positions by up to 128 filters in four stages, as cuDNN's kernels
        are named (``…_128x128_…_stages_32x4``), a thread holding 64 sums. The rest: a thread an element.
        """
        table = program.table
        rows = np.flatnonzero((self.launches["blocks"] == 0) & (program.kernels > 0))
        convolution_ = (table.kind == _CODE["convolution"])[rows] & (table.gemm_m[rows] > 0)
        n, m = np.maximum(1.0, table.gemm_n[rows]), np.maximum(1.0, table.gemm_m[rows])
        tile_n = np.select([n > 64, n > 32], [128.0, 64.0], 32.0)
        tiles = np.maximum(1.0, table.gemm_batch[rows]) * np.ceil(m / 128.0) * np.ceil(n / tile_n)
        size = _ITEMSIZE[table.dtype[rows]]
        usual = {
            "blocks": np.where(convolution_, tiles, np.ceil(np.maximum(1.0, table.elements[rows]) / 256.0)),
            "threads": np.where(convolution_, 2.0 * tile_n, 256.0),
            "registers": np.where(convolution_, 168.0, 32.0),
            "shared_bytes": np.where(convolution_, 4.0 * 32.0 * size * (128.0 + tile_n), 0.0),
            "tile_m": np.where(convolution_, 128.0, 0.0),
            "tile_n": np.where(convolution_, tile_n, 0.0),
            "split": np.ones(len(rows)),
        }
        for name, column in usual.items():
            self.launches[name][rows] = column

    def into(self, times: OpTimes, more: Mapping[str, Floats]) -> OpTimes:
        compute = np.maximum(self.compute, np.minimum(times.ideal_s, times.compute_s))
        return replace(
            times,
            compute_s=compute,
            memory_s=self.memory,
            launch_s=self.launch,
            details={**times.details, **self.launches, **more},
        )


def _correct(
    found: KernelTimes, features: Floats, residual: Residual, device: Device
) -> tuple[KernelTimes, Factors]:
    """Times by the factors of a residual, no less than the floor; the factor, and its interval relative to it."""
    low, mid, high = residual.factors(features, residual.has_seen(device))
    time = found.time_s
    factor = np.maximum(mid * time, found.floor_s) / time
    corrected = replace(
        found,
        compute_s=found.compute_s * factor,
        memory_s=found.memory_s * factor,
        latency_s=found.latency_s * factor,
    )
    return corrected, (factor, low / mid, high / mid)


def families_of(program: Program, times: OpTimes, device: Device) -> dict[str, Ints]:
    """Which rows each family of kernels takes."""
    table = program.table
    product = np.isin(table.kind, [_CODE["matmul"], _CODE["batched_matmul"]]) & (table.macs > 0) & (table.gemm_k > 0)
    # One row times weights of 4 bits is no product of cuBLAS's: a kernel that unpacks them on the way, and that the
    # roofline prices by the bytes it reads.
    whole = _ITEMSIZE[table.dtype] * table.gemm_batch * table.gemm_k * np.maximum(table.gemm_m, table.gemm_n)
    product &= (np.minimum(table.gemm_m, table.gemm_n) > 1) | (table.bytes_read > 0.6 * whole)
    convolution_ = (table.kind == _CODE["convolution"]) & (table.macs > 0) & (table.gemm_m > 0)
    attention_ = (table.kind == _CODE["attention"]) & (table.macs > 0) & (table.gemm_m > 0)
    fp32 = table.dtype == _FLOAT32
    # AMD's matrix cores multiply fp32 too, with tiles like those of the vector units; a format that a device lacks is
    # multiplied as fp32.
    narrow = fp32 | np.isin(table.dtype, _HALVES)
    in_fp32 = narrow & (times.details["peak_flops_per_s"] <= 1.01 * matrix_rate(device, "fp32").flops_per_s)
    on_tensor_cores = times.details["peak_flops_per_s"] > 1.01 * vector_rate(device).flops_per_s
    streaming = np.isin(table.kind, [_CODE[kind] for kind in _STREAMING]) & (program.kernels > 0)
    return {
        "gemm": np.flatnonzero(product & on_tensor_cores & ~in_fp32),
        "simt": np.flatnonzero(product & in_fp32),
        "attention": np.flatnonzero(attention_),
        "convolution_simt": np.flatnonzero(convolution_ & ~on_tensor_cores & fp32 & ~table.channels_last),
        "stream": np.flatnonzero(streaming),
    }


_FAMILIES = ("gemm", "simt", "attention", "convolution_simt", "stream")
KERNEL = Kernel(load("kernel"), {family: load(family) for family in _FAMILIES})
REGISTRY.register(KERNEL)
