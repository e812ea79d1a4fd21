"""`roofline`: an op takes as long as its arithmetic or its traffic, whichever is longer, plus what launching costs.

    time = max(executed FLOP / (peak · efficiency), bytes / (bandwidth · efficiency)) + kernels · launch

Efficiencies are constants by kind (`calibrations/roofline.json`, with where they come from) times what shapes imply:

* A matrix product is cut in tiles. Small tiles reuse fewer operands, edges of tiles are wasted, the last *wave* of
  tiles leaves multiprocessors idle, and short reduced dimensions do not amortise a tile's start. The library picks the
  best of several tilings, and so do we.
* A depthwise convolution multiplies vectors, not matrices: it runs on the vector unit.
* Traffic of ops whose operands fit the L2 cache is partly served from there.
* A convolution on channels-first half-precision operands converts them for the tensor cores, and back.
* The backward of fused attention recomputes the scores: 2.5 times the forward's work where the count says 2.
* A causal mask lets fused attention skip half of the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration, load
from foretell.cost.model import REGISTRY, OpTimes, Settings, Step, schedule
from foretell.cost.program import Program
from foretell.cost.rates import FORMATS, bandwidth, matrix_rate, vector_rate
from foretell.graph import DTYPES, KINDS, PHASES, OpTable, dtype_bytes
from foretell.graph.kinds import base_name
from foretell.hardware.device import Device
from foretell.units import format_bytes, format_flops, format_rate, format_time

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_CODE = {kind: code for code, kind in enumerate(KINDS)}
_BACKWARD = PHASES.index("backward")
_ITEMSIZE = np.array([dtype_bytes(dtype) for dtype in DTYPES])

# Tilings a matrix library chooses among, rows × columns, and in how many parts it may split the reduced dimension.
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (64, 16), (16, 64))
_SPLITS = (1, 4, 16)

# Attention works on tiles of this many queries (FlashAttention-2 on half precision).
_QUERY_TILE = 128

# fp32 operations an element takes in kernels whose arithmetic the graph does not count: orders of magnitude, for
# devices with little arithmetic beside their bandwidth.
_OPS_PER_ELEMENT = {
    "pointwise": 8.0,
    "normalization": 10.0,
    "softmax": 12.0,
    "reduction": 2.0,
    "pooling": 10.0,
    "resample": 24.0,
    "random": 30.0,
    "optimizer": 12.0,
    "loss": 8.0,
    "fft": 60.0,
    "scan": 8.0,
}

_MATRIX = ("matmul", "batched_matmul", "grouped_matmul", "convolution", "attention", "recurrent")
_LIBRARY = (*_MATRIX, "normalization", "pooling", "sort", "fft", "linear_algebra")  # dearer to issue

# Which memory efficiency a kind has, where it is not its own name.
_MEMORY = {
    "batched_matmul": "matmul",
    "grouped_matmul": "matmul",
    "recurrent": "matmul",
    "scan": "reduction",
    "loss": "reduction",
    "fill": "copy",
    "fft": "pooling",
    "linear_algebra": "other",
    "communication": "other",
    "view": "copy",
    "scalar_read": "copy",
}
_NORMS = {"layer": "layer_norm", "rms": "layer_norm", "group": "group_norm"}


def _memory_constant(name: str, kind: str) -> str:
    if kind == "normalization":
        base = base_name(name)
        return next((norm for part, norm in _NORMS.items() if part in base), "batch_norm")
    return _MEMORY.get(kind, kind)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The roofline model with one set of constants."""

    calibration: Calibration
    name: str = "roofline"

    def op_times(self, program: Program, device: Device, settings: Settings) -> OpTimes:
        """Times of every op. Raises InputError where the device lacks a peak or bandwidth that has no stand-in."""
        table, constant = program.table, self.calibration
        peak, tensor, notes = _peaks(table, device, settings)
        vector = vector_rate(device)
        kind_is = {kind: table.kind == _CODE[kind] for kind in KINDS}
        convolution, attention = kind_is["convolution"], kind_is["attention"]
        backward = table.phase == _BACKWARD
        depthwise = convolution & (table.gemm_batch > 1) & (table.gemm_k == table.kernel_area)

        # Arithmetic.
        flops = 2.0 * table.macs
        executed = flops * np.where(attention & backward, 1.25, 1.0) * np.where(table.causal, 0.5, 1.0)
        efficiency = np.ones(len(table))
        for kind in _MATRIX:
            rows = kind_is[kind]
            if kind == "convolution":
                efficiency[rows] = np.where(
                    table.channels_last[rows],
                    constant["compute.convolution.channels_last"],
                    constant["compute.convolution"],
                )
                efficiency[rows & backward] *= constant["compute.convolution.backward"]
            else:
                efficiency[rows] = constant[f"compute.{'matmul' if kind == 'grouped_matmul' else kind}"]
        efficiency[attention & backward] *= constant["compute.attention.backward"]
        shape = _shape_efficiency(table, tensor, attention, depthwise, device.multiprocessors, constant)
        efficiency *= shape
        ideal = flops * np.where(table.causal, 0.5, 1.0) / peak
        peak[depthwise] = np.minimum(peak[depthwise], vector.flops_per_s)
        efficiency[depthwise] = np.where(
            table.channels_last[depthwise],
            constant["compute.depthwise.channels_last"],
            constant["compute.depthwise"],
        )
        compute = executed / (peak * efficiency)
        uncounted = np.zeros(len(table))
        for kind, count in _OPS_PER_ELEMENT.items():
            uncounted[kind_is[kind]] = count
        compute += uncounted * table.elements / (vector.flops_per_s * constant["compute.vector"])

        # Traffic.
        moved = table.bytes_read + table.bytes_written
        converted = convolution & ~depthwise & ~table.channels_last & tensor
        moved = moved * np.where(converted, 1.0 + constant["memory.convolution.conversion"], 1.0)
        memory_efficiency = self._memory_efficiency(program, depthwise)
        hit = np.zeros(len(table))
        if device.l2_bytes:
            hit = 1.0 / (1.0 + (moved / (constant["memory.l2_fraction"] * device.l2_bytes)) ** 2)
        elif device.kind == "gpu":
            notes = (*notes, f"l2 of {device.name} unknown: no traffic is taken to be served from it")
        speedup = 1.0 / (1.0 - hit * (1.0 - 1.0 / constant["memory.l2_speedup"]))
        memory = moved / (bandwidth(device) * memory_efficiency * speedup)

        launch, host = self._overheads(program, device, kind_is)
        if device.multiprocessors is None:
            notes = (*notes, f"multiprocessors of {device.name} unknown: waves of tiles are not modelled")
        if vector.note:
            notes = (*notes, vector.note)
        return OpTimes(
            compute_s=compute,
            memory_s=memory,
            launch_s=launch,
            host_s=host,
            ideal_s=ideal,
            details={
                "executed_flops": executed,
                "peak_flops_per_s": peak,
                "compute_efficiency": efficiency,
                "shape_efficiency": shape,
                "moved_bytes": moved,
                "memory_efficiency": memory_efficiency,
                "l2_speedup": speedup,
                "uncounted_ops": uncounted * table.elements,
                "vector_flops_per_s": np.full(len(table), vector.flops_per_s),
            },
            notes=notes,
        )

    def _memory_efficiency(self, program: Program, depthwise: Bools) -> Floats:
        table, constant = program.table, self.calibration
        codes: dict[tuple[str, int], int] = {}
        rows = np.fromiter(
            (codes.setdefault(key, len(codes)) for key in zip(table.name, table.kind.tolist(), strict=True)),
            dtype=np.int64,
            count=len(table),
        )
        names = [_memory_constant(name, KINDS[kind]) for name, kind in codes]
        result: Floats = np.array([constant[f"memory.{name}"] for name in names])[rows] if names else np.zeros(0)
        for variant, column in (("channels_last", table.channels_last), ("strided", program.strided)):
            changed = np.array([constant.constants.get(f"memory.{n}.{variant}", np.nan) for n in names])
            there = changed[rows] if names else result
            result = np.where(column & ~np.isnan(there), there, result)
        result[depthwise] = np.where(
            table.channels_last[depthwise],
            constant["memory.depthwise.channels_last"],
            constant["memory.depthwise"],
        )
        return result

    def _overheads(self, program: Program, device: Device, kind_is: dict[str, Bools]) -> tuple[Floats, Floats]:
        """Device-side launch time and host-side issue time of one run of each op."""
        table, constant = program.table, self.calibration
        launch = program.kernels * constant["launch.kernel"]
        library = np.zeros(len(table), dtype=np.bool_)
        for kind in _LIBRARY:
            library |= kind_is[kind]
        if program.runtime == "compiled":
            host = program.issues * constant["host.compiled_kernel"]
            if len(host):
                host[0] += constant["host.compiled_step"] / max(1.0, table.repeat[0])
        else:
            host = np.where(library, constant["host.library"], constant["host.op"])
            host = np.where(kind_is["view"], constant["host.view"], host) * program.issues
        host = host + np.where(kind_is["scalar_read"], constant["host.sync"], 0.0)
        if device.kind == "cpu":  # the host is the device: nothing overlaps
            return np.where(program.kernels > 0, constant["host.cpu_op"], 0.2 * constant["host.cpu_op"]), 0.0 * host
        return launch, host

    def step(self, program: Program, times: OpTimes, settings: Settings) -> Step:
        """Ops one after another, the host running ahead."""
        return schedule(times, program.table.repeat)

    def interval(self, program: Program, device: Device, settings: Settings) -> tuple[float, float, str]:
        """Quantiles of held-out residuals of the calibration."""
        intervals = self.calibration.intervals
        condition = f"{settings.mode}.{settings.runtime}"
        key = condition if condition in intervals else "default"
        low, high = intervals[key]
        basis = "provisional: "
        if key == "default":
            basis += "no measurements of this kind behind it"
        else:
            basis += f"10–90 % of held-out residuals, {condition.replace('.', ', ')}"
        return low, high, basis

    def formula(self, program: Program, times: OpTimes, row: int, device: Device) -> list[str]:
        """The two limits of one op, with the numbers in them."""
        value = {name: float(column[row]) for name, column in times.details.items()}
        table = program.table
        compute, memory, launch = times.compute_s[row], times.memory_s[row], times.launch_s[row]
        lines = ["time = max(compute, memory) + launch", ""]
        if value["executed_flops"]:
            note = ""
            counted = 2.0 * float(table.macs[row])
            if value["executed_flops"] != counted:
                note = f"  (counted {format_flops(counted)})"
            lines += [
                f"compute  = FLOP executed / (peak · efficiency) = {format_time(compute)}",
                f"           FLOP executed  {format_flops(value['executed_flops'])}{note}",
                f"           peak           {format_rate(value['peak_flops_per_s'], 'FLOP')}",
                f"           efficiency     {value['compute_efficiency']:.3f}"
                f"  (of which shape: tiles, waves, alignment {value['shape_efficiency']:.3f})",
            ]
        else:
            lines += [
                f"compute  = operations / (vector peak · efficiency) = {format_time(compute)}",
                f"           operations     {value['uncounted_ops']:.3g} (estimated, not counted as FLOP)",
                f"           vector peak    {format_rate(value['vector_flops_per_s'], 'FLOP')}",
                f"           efficiency     {self.calibration['compute.vector']:.3f}",
            ]
        counted_bytes = float(table.bytes_read[row] + table.bytes_written[row])
        extra = ""
        if value["moved_bytes"] > counted_bytes:
            extra = f"  (+ {format_bytes(value['moved_bytes'] - counted_bytes)} layout conversion)"
        lines += [
            f"memory   = bytes / (bandwidth · efficiency · L2 speed-up) = {format_time(memory)}",
            f"           read           {format_bytes(float(table.bytes_read[row]))}",
            f"           written        {format_bytes(float(table.bytes_written[row]))}{extra}",
            f"           bandwidth      {format_rate(bandwidth(device))}",
            f"           efficiency     {value['memory_efficiency']:.3f}",
            f"           L2 speed-up    {value['l2_speedup']:.2f}",
            f"launch   = kernels · cost of one = {format_time(launch)}",
            f"           kernels        {program.kernels[row]:g}",
        ]
        return lines


def _peaks(table: OpTable, device: Device, settings: Settings) -> tuple[Floats, Bools, tuple[str, ...]]:
    """Per row: peak FLOP/s of its arithmetic, whether that is a tensor core's; and notes on what stood in."""
    peak = np.ones(len(table))
    tensor = np.zeros(len(table), dtype=np.bool_)
    notes: dict[str, None] = {}
    matrix = np.isin(table.kind, [_CODE[kind] for kind in _MATRIX]) & (table.macs > 0)
    convolution = table.kind == _CODE["convolution"]
    for code in np.unique(table.dtype[matrix]):
        number_format = FORMATS[code]
        of_dtype = matrix & (table.dtype == code)
        for rows, tf32 in (
            (of_dtype & convolution, settings.conv_tf32),
            (of_dtype & ~convolution, settings.matmul_tf32),
        ):
            if rows.any():
                rate = matrix_rate(device, "tf32" if tf32 and number_format == "fp32" else number_format)
                peak[rows] = rate.flops_per_s
                tensor[rows] = rate.unit == "tensor"
                if rate.note:
                    notes[rate.note] = None
    others = ~matrix & (table.macs > 0)
    if others.any():
        peak[others] = vector_rate(device).flops_per_s
    return peak, tensor, tuple(notes)


def _shape_efficiency(
    table: OpTable,
    tensor: Bools,
    attention: Bools,
    depthwise: Bools,
    multiprocessors: int | None,
    constant: Calibration,
) -> Floats:
    """What tiles, waves and alignment leave of a matrix product's peak: 0 < efficiency ≤ 1."""
    result = np.ones(len(table))
    product = (table.gemm_m * table.gemm_n * table.gemm_k > 0) & ~attention & ~depthwise
    if product.any():
        batch, m, n, k = (column[product] for column in (table.gemm_batch, table.gemm_m, table.gemm_n, table.gemm_k))
        result[product] = tile_efficiency(batch, m, n, k, multiprocessors, constant)
        depth = k / np.maximum(1.0, table.kernel_area[product])  # channels, for a convolution
        narrow = tensor[product] & (_ITEMSIZE[table.dtype[product]] <= 2)
        odd = narrow & ((depth % 8 != 0) | (n % 8 != 0))
        result[product] *= np.where(odd, constant["compute.misaligned"], 1.0)
    if attention.any():
        batch, queries = table.gemm_batch[attention], table.gemm_m[attention]
        tiles = batch * np.ceil(queries / _QUERY_TILE)
        filled = queries / (np.ceil(queries / _QUERY_TILE) * _QUERY_TILE)
        result[attention] = filled * _wave_efficiency(tiles, multiprocessors, constant["compute.wave_tail"])
    return result


def tile_efficiency(
    batch: Floats, m: Floats, n: Floats, k: Floats, multiprocessors: int | None, constant: Calibration
) -> Floats:
    """Share of peak that the best tiling of ``batch`` products (m, k) × (k, n) reaches."""
    reuse, start, tail = (constant[f"compute.{name}"] for name in ("tile_reuse", "tile_start", "wave_tail"))
    best_reuse = max(_reuse(*tile) for tile in _TILES)
    best = np.zeros(len(m))
    for rows, columns in _TILES:
        # A tile of r × c does r·c multiply-adds per r + c operands it loads.
        speed = _reuse(rows, columns) / (_reuse(rows, columns) + reuse) * (best_reuse + reuse) / best_reuse
        down, across = np.ceil(m / rows), np.ceil(n / columns)
        filled = speed * (m / (down * rows)) * (n / (across * columns))
        tiles = batch * down * across
        for parts in _SPLITS:
            depth = k / parts
            efficiency = filled * depth / (depth + start) * _wave_efficiency(tiles * parts, multiprocessors, tail)
            best = np.maximum(best, np.where(depth >= 1, efficiency, 0.0) if parts > 1 else efficiency)
    return np.minimum(best, 1.0)


def _reuse(rows: int, columns: int) -> float:
    return rows * columns / (rows + columns)


def _wave_efficiency(tiles: Floats, multiprocessors: int | None, tail: float) -> Floats:
    """Share of multiprocessor time in use when `tiles` equal tiles run in waves; `tail` = 1 is strict lock-step."""
    if multiprocessors is None:
        return np.ones(len(tiles))
    waves = tiles / multiprocessors
    lasting = np.maximum(1.0, tail * np.ceil(waves) + (1.0 - tail) * waves)
    return np.asarray(waves / lasting)


REGISTRY.register(Roofline(load("roofline")))
