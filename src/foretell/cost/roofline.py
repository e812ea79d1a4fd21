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
* A card whose power limit is small beside what its tensor cores draw at full clock cannot keep that clock.
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
from foretell.units import format_bytes, format_flops, format_power, format_rate, format_time

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_CODE = {kind: code for code, kind in enumerate(KINDS)}
_BACKWARD = PHASES.index("backward")
_ITEMSIZE = np.array([dtype_bytes(dtype) for dtype in DTYPES])

# Tilings a matrix library chooses among, rows × columns, and in how many parts it may split the reduced dimension.
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (64, 16), (16, 64))
_SPLITS = (1, 4, 16)

# Attention works on tiles of this many query rows (FlashAttention-2 on half precision); kernels for decoding take small
# ones, as small as an instruction's (m16n8k16), and split the keys to fill the device (Flash-Decoding).
_QUERY_TILES = (16, 64, 128)
_KEYS_PER_SPLIT = 256

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

# Filters of a group from which cuDNN's channels-last gradients fall back to slow kernels.
_WIDE_GROUP = 64.0

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


def _by_kind(values: dict[str, float], default: float = 0.0) -> Floats:
    """A column indexed by kind code."""
    return np.array([values.get(kind, default) for kind in KINDS])


_UNCOUNTED = _by_kind(_OPS_PER_ELEMENT)
_IS_MATRIX = _by_kind(dict.fromkeys(_MATRIX, 1.0)) > 0
_IS_LIBRARY = _by_kind(dict.fromkeys(_LIBRARY, 1.0)) > 0


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
        convolution = table.kind == _CODE["convolution"]
        attention = table.kind == _CODE["attention"]
        backward = table.phase == _BACKWARD
        depthwise = convolution & (table.gemm_batch > 1) & (table.gemm_k == table.kernel_area)
        powered = power_share(device, constant)

        # Arithmetic.
        flops = 2.0 * table.macs
        needed = flops * np.where(table.causal, 0.5, 1.0)
        executed = needed * np.where(attention & backward, 1.25, 1.0)
        ideal = needed / peak
        efficiency = self._library_efficiency(table, convolution, attention, depthwise, backward)
        shape = _shape_efficiency(table, attention, depthwise, device.multiprocessors, constant)
        efficiency *= shape
        matrix = tensor & ~depthwise
        efficiency[matrix] *= powered ** constant["power.compute"]
        peak[depthwise] = np.minimum(peak[depthwise], vector.flops_per_s)
        fed = _fed(table, matrix & ~attention, device, constant)
        compute = executed / np.minimum(peak * efficiency, fed)
        uncounted = _UNCOUNTED[table.kind] * table.elements
        compute += uncounted / (vector.flops_per_s * constant["compute.vector"])

        # Traffic.
        moved = table.bytes_read + table.bytes_written
        converted = convolution & matrix & ~table.channels_last
        moved = moved * np.where(converted, 1.0 + constant["memory.convolution.conversion"], 1.0)
        # A library call cannot walk a slice of channels: the framework copies it first (read and write).
        moved += np.where(convolution & program.strided, 2.0 * table.bytes_read, 0.0)
        memory_efficiency = (
            self._memory_efficiency(program, depthwise, backward, settings) * powered ** constant["power.memory"]
        )
        if device.l2_bytes:
            hit = 1.0 / (1.0 + (moved / (constant["memory.l2_fraction"] * device.l2_bytes)) ** 2)
        else:
            hit = np.zeros(len(table))
            if device.kind == "gpu":
                notes = (*notes, f"l2 of {device.name} unknown: no traffic is taken to be served from it")
        speedup = 1.0 / (1.0 - hit * (1.0 - 1.0 / constant["memory.l2_speedup"]))
        memory = moved / (bandwidth(device) * memory_efficiency * speedup)

        launch, host = self._overheads(program, device)
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
            start_s=self._start(program, device),
            details={
                "executed_flops": executed,
                "peak_flops_per_s": peak,
                "compute_efficiency": efficiency,
                "shape_efficiency": shape,
                "fed_flops_per_s": fed,
                "moved_bytes": moved,
                "memory_efficiency": memory_efficiency,
                "l2_speedup": speedup,
                "uncounted_ops": uncounted,
                "vector_flops_per_s": np.full(len(table), vector.flops_per_s),
            },
            notes=notes,
        )

    def _library_efficiency(
        self, table: OpTable, convolution: Bools, attention: Bools, depthwise: Bools, backward: Bools
    ) -> Floats:
        """Share of peak that large, well-shaped calls of each kind reach; 1 for what is no matrix arithmetic."""
        constant, last = self.calibration, table.channels_last
        by_kind = _by_kind(
            {
                "matmul": constant["compute.matmul"],
                "batched_matmul": constant["compute.batched_matmul"],
                "grouped_matmul": constant["compute.matmul"],
                "convolution": constant["compute.convolution"],
                "attention": constant["compute.attention"],
                "recurrent": constant["compute.recurrent"],
            },
            1.0,
        )
        result: Floats = by_kind[table.kind]
        result[convolution & last] = constant["compute.convolution.channels_last"]
        grouped = convolution & (table.gemm_batch > 1) & ~depthwise
        result[grouped & ~last] *= constant["compute.grouped"]
        result[grouped & last] *= constant["compute.grouped.channels_last"]
        result[depthwise & ~last] = constant["compute.depthwise"]
        result[depthwise & last] = constant["compute.depthwise.channels_last"]
        dense = convolution & backward & (table.gemm_batch == 1)
        result[dense & ~last] *= constant["compute.convolution.backward"]
        result[dense & last] *= constant["compute.convolution.backward.channels_last"]
        result[grouped & backward & ~last] *= constant["compute.grouped.backward"]
        wide = table.gemm_n >= _WIDE_GROUP
        result[grouped & backward & last & ~wide] *= constant["compute.grouped.backward.channels_last"]
        result[grouped & backward & last & wide] *= constant["compute.grouped.backward.channels_last.wide"]
        result[depthwise & backward] *= constant["compute.depthwise.backward"]
        result[attention & backward] *= constant["compute.attention.backward"]
        return result

    def _memory_efficiency(self, program: Program, depthwise: Bools, backward: Bools, settings: Settings) -> Floats:
        """Share of bandwidth that each op's kernels reach, taking operands to be read once.

        By kind; by layout; by whether they walk a permuted view; by whether they run forward in training (a norm then
        reads its input twice) or backward.
        """
        last, constants = program.table.channels_last, self.calibration
        names = [f"memory.{_memory_constant(name, kind)}" for name, kind in program.names]
        if not names:
            return np.zeros(0)
        plain = [constants[name] for name in names]
        result: Floats = np.array(plain)[program.name_code]
        training = ~backward if settings.mode == "train" else np.zeros(len(program), dtype=np.bool_)
        for variant, column, relative in (
            ("channels_last", last, False),
            ("strided", program.strided, False),
            ("training", training, True),
            ("backward", backward, True),
        ):
            own = [constants.constants.get(f"{name}.{variant}") for name in names]
            varied = np.array([np.nan if value is None else value for value in own])[program.name_code]
            result = np.where(column & ~np.isnan(varied), varied * (result if relative else 1.0), result)
        result[depthwise & ~last] = constants["memory.depthwise"]
        result[depthwise & last] = constants["memory.depthwise.channels_last"]
        result[depthwise & backward] *= constants["memory.depthwise.backward"]
        return result

    def _start(self, program: Program, device: Device) -> float:
        """What the host does before it issues a step's first op: a compiled step checks its guards."""
        checks = program.runtime == "compiled" and device.kind != "cpu" and len(program)
        return self.calibration["host.compiled_step"] if checks else 0.0

    def _overheads(self, program: Program, device: Device) -> tuple[Floats, Floats]:
        """Device-side launch time and host-side issue time of one run of each op."""
        table, constant = program.table, self.calibration
        reads = table.kind == _CODE["scalar_read"]
        if device.kind == "cpu":  # the host is the device: nothing overlaps
            runs = np.where(program.kernels > 0, constant["host.cpu_op"], constant["host.cpu_view"])
            return runs * (program.issues > 0), np.zeros(len(table))
        launch = program.kernels * constant["launch.kernel"]
        if program.runtime == "compiled":
            host = program.issues * constant["host.compiled_kernel"]
        else:
            host = np.where(_IS_LIBRARY[table.kind], constant["host.library"], constant["host.op"])
            host = np.where(table.kind == _CODE["view"], constant["host.view"], host) * program.issues
        return launch, host + np.where(reads, constant["host.sync"], 0.0)

    def step(self, program: Program, times: OpTimes, settings: Settings) -> Step:
        """Ops one after another, the host running ahead."""
        return schedule(times, program.table.repeat)

    def interval(
        self, program: Program, times: OpTimes, step: Step, device: Device, settings: Settings
    ) -> tuple[float, float, str]:
        """Quantiles of held-out residuals of the calibration, and of hosts where the device waits for the host."""
        intervals, provenance = self.calibration.intervals, self.calibration.provenance
        condition = f"{settings.mode}.{settings.runtime}"
        seen = device.compute_capability in provenance.get("architectures", ())
        key = condition if seen else f"{condition}.unseen"
        of = f"{settings.mode}, {settings.runtime}"
        if key in intervals:
            basis = f"provisional: residuals of held-out {'families' if seen else 'GPUs'}, {of}"
        else:
            key, basis = "default", f"provisional: no measurements of {of} behind it"
        waiting = float(step.gap_s.sum()) / step.time_s if step.time_s else 0.0
        low, high = (
            float(np.hypot(np.log(own), waiting * np.log(host)))
            for own, host in zip(intervals[key], intervals["host"], strict=True)
        )
        if waiting > 0.2:
            basis += ", and how hosts differ"
        return float(np.exp(-low)), float(np.exp(high)), basis

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
                f"  (of which tiles and waves {value['shape_efficiency']:.3f})",
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
        powered = power_share(device, self.calibration)
        if powered < 1.0 and device.tdp_w:
            lines += [
                f"power    = {format_power(device.tdp_w)} is {powered:.0%} of what tensor cores draw at full clock: "
                "efficiency is",
                f"           × {powered ** self.calibration['power.compute']:.2f} for them, "
                f"× {powered ** self.calibration['power.memory']:.2f} for traffic",
            ]
        return lines


def _peaks(table: OpTable, device: Device, settings: Settings) -> tuple[Floats, Bools, tuple[str, ...]]:
    """Per row: peak FLOP/s of its arithmetic, whether that is a tensor core's; and notes on what stood in."""
    peak = np.ones(len(table))
    tensor = np.zeros(len(table), dtype=np.bool_)
    notes: dict[str, None] = {}
    matrix = _IS_MATRIX[table.kind] & (table.macs > 0)
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
                elif tf32 and not settings.matmul_tf32 and number_format == "fp32" and rate.unit == "tensor":
                    notes["fp32 convolutions run on TF32 units, as PyTorch lets them by default"] = None
    others = ~matrix & (table.macs > 0)
    if others.any():
        peak[others] = vector_rate(device).flops_per_s
    return peak, tensor, tuple(notes)


def power_share(device: Device, constant: Calibration) -> float:
    """TDP over what the tensor cores would draw at full clock and use; 1 where that is unknown or less than TDP.

    The draw is multiprocessors × clock × energy of one cycle of one, which is a constant of the architecture.
    """
    joules = constant.constants.get(f"power.{device.compute_capability}")
    if joules is None or not device.multiprocessors or not device.boost_clock_hz or not device.tdp_w:
        return 1.0
    return min(1.0, device.tdp_w / (joules * device.multiprocessors * device.boost_clock_hz))


def _fed(table: OpTable, rows: Bools, device: Device, constant: Calibration) -> Floats:
    """FLOP/s at which operands can be fetched for tensor cores, where their rows are not aligned to 16 bytes.

    Multiprocessors then load in smaller pieces, the smaller the slower: a rate per cycle and multiprocessor, whatever
    the tensor cores could do with it.
    """
    result = np.full(len(table), np.inf)
    if device.multiprocessors is None or device.boost_clock_hz is None or not rows.any():
        return result
    depth = table.gemm_k[rows] / np.maximum(1.0, table.kernel_area[rows])  # channels, for a convolution
    size = _ITEMSIZE[table.dtype[rows]]
    aligned = np.minimum(_power_of_two_in(depth), _power_of_two_in(table.gemm_n[rows])) * size
    # Libraries pad the three or so channels of an image by themselves.
    image = (table.kernel_area[rows] > 1) & (depth < 8)
    rate = constant["compute.fetch"] * (aligned / 16.0) ** constant["compute.fetch_growth"]
    rate *= device.multiprocessors * device.boost_clock_hz
    result[rows] = np.where((aligned < 16) & ~image, rate, np.inf)
    return result


def _power_of_two_in(number: Floats) -> Floats:
    """The largest power of two that divides each (whole) number, at most 64.

    >>> _power_of_two_in(np.array([12.0, 7.0, 64.0]))
    array([ 4.,  1., 64.])
    """
    result = np.ones(len(number))
    for power in (2.0, 4.0, 8.0, 16.0, 32.0, 64.0):
        result = np.where(number % power == 0, power, result)
    return result


def _shape_efficiency(
    table: OpTable,
    attention: Bools,
    depthwise: Bools,
    multiprocessors: int | None,
    constant: Calibration,
) -> Floats:
    """What tiles and waves leave of a matrix product's peak: 0 < efficiency ≤ 1."""
    result = np.ones(len(table))
    product = (table.gemm_m * table.gemm_n * table.gemm_k > 0) & ~attention & ~depthwise
    if product.any():
        batch, m, n, k = (column[product] for column in (table.gemm_batch, table.gemm_m, table.gemm_n, table.gemm_k))
        result[product] = tile_efficiency(batch, m, n, k, multiprocessors, constant)
        channels = k / np.maximum(1.0, table.kernel_area[product])
        result[product] *= np.where(channels == 3, 0.75, 1.0)  # an image: padded to four channels
    if attention.any():
        batch, rows, keys = table.gemm_batch[attention], table.gemm_m[attention], table.gemm_n[attention]
        tile = np.select([rows <= size for size in _QUERY_TILES[:-1]], _QUERY_TILES[:-1], _QUERY_TILES[-1])
        count = np.ceil(rows / tile)
        filled = rows / (count * tile)
        tiles = batch * count * np.where(count == 1, np.ceil(keys / _KEYS_PER_SPLIT), 1.0)
        result[attention] = filled * _wave_efficiency(tiles, multiprocessors, constant["compute.wave_tail"])
    return result


# Every tiling in every number of parts, as columns against rows of operations.
_CHOICES = [(rows, columns, parts) for rows, columns in _TILES for parts in _SPLITS]
_ROWS, _COLUMNS, _PARTS = (np.array(column, dtype=np.float64)[:, None] for column in zip(*_CHOICES, strict=True))
_CHUNK = 4096  # operations at a time, so that intermediate columns stay in cache


def tile_efficiency(
    batch: Floats, m: Floats, n: Floats, k: Floats, multiprocessors: int | None, constant: Calibration
) -> Floats:
    """Share of peak that the best tiling of ``batch`` products (m, k) × (k, n) reaches."""
    reuse, start, tail = (constant[f"compute.{name}"] for name in ("tile_reuse", "tile_start", "wave_tail"))
    # A tile of r × c does r·c multiply-adds per r + c operands it loads.
    own = _ROWS * _COLUMNS / (_ROWS + _COLUMNS)
    speed = own / (own + reuse) * (1.0 + reuse / own.max())
    best = np.empty(len(m))
    for first in range(0, len(m), _CHUNK):
        part = slice(first, first + _CHUNK)
        down, across, depth = np.ceil(m[part] / _ROWS), np.ceil(n[part] / _COLUMNS), k[part] / _PARTS
        tiles = down * across
        efficiency = speed * m[part] * n[part] / (tiles * _ROWS * _COLUMNS) * depth / (depth + start)
        efficiency *= _wave_efficiency(batch[part] * tiles * _PARTS, multiprocessors, tail)
        efficiency[(depth < 1.0) & (_PARTS > 1.0)] = 0.0
        best[part] = efficiency.max(axis=0)
    return np.minimum(best, 1.0)


def _wave_efficiency(tiles: Floats, multiprocessors: int | None, tail: float) -> Floats:
    """Share of multiprocessor time in use when `tiles` equal tiles run in waves; `tail` = 1 is strict lock-step."""
    if multiprocessors is None:
        return np.ones_like(tiles)
    waves = tiles / multiprocessors
    lasting = np.maximum(1.0, tail * np.ceil(waves) + (1.0 - tail) * waves)
    return np.asarray(waves / lasting)


REGISTRY.register(Roofline(load("roofline")))
