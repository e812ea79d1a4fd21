"""Operations of eager fp32 PyTorch on a processor: seconds of each, as pure functions over columns.

    time = arithmetic + traffic + dispatch          (pointwise: the two overlap partly, so their 2-norm + dispatch)

What the terms stand for, and what of it is physics of the libraries:

* **Traffic** costs seconds a byte by the operation's own footprint: level-2 caches of all cores, level 3, memory. A
  result in fresh memory costs more than one written in place, as its lines are fetched before they are written.
* **Fresh pages.** The C library returns blocks above 32 MiB to the system when they are freed (glibc's
  ``DEFAULT_MMAP_THRESHOLD_MAX``), so every larger result is mapped anew, and its pages faulted in one by one.
* **Matrix products** reach the library's rate times what small sides leave of it; weights are packed, at a cost a byte.
* **Convolutions** run in oneDNN on a layout blocked by 16 channels: channels are padded to blocks, and in the
  channels-first layout inputs, outputs and weights are reordered, in and out, at every call. An image of three channels
  is read as it is; channels-last needs no reorder of activations. A depthwise one works on vectors, at a cost per
  element and window position. One image with at most 20,480 elements and a window up to 3×3 takes PyTorch's own
  im2col and matrix product instead (``ConvParams::use_mkldnn`` in ATen/native/Convolution.cpp).
* **Transcendental functions** cost time per element; **norms and softmax** per element and per row.
* **Dispatch** is what interpreter, dispatcher and allocator take, by kind of call.

Constants are named ``<term>.<what>``: seconds a call (``dispatch``), an element (``element``), a row (``row``), a byte
(``byte``), FLOP/s (``rate``), how many times over reading bytes costs (``read``, ``fresh``) and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.graph import KINDS, OpTable
from foretell.graph.kinds import base_name

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

PAGE_LIMIT_BYTES = 32 * 2**20
NATIVE_LIMIT_ELEMENTS = 20480
_BLOCK = 16  # channels

_CODE = {kind: code for code, kind in enumerate(KINDS)}

_EXPONENTIAL = """
    silu silu_backward sigmoid exp exp2 expm1 log log2 log10 log1p mish mish_backward softplus elu elu_backward celu
    selu log_sigmoid_forward sin cos tan asin acos atan atan2 sinh cosh pow glu special_expit logit"""
# Which cost an element a pointwise function has.
_FUNCTIONS: dict[str, str] = {
    **dict.fromkeys(("gelu", "gelu_backward", "erf", "erfc", "erfinv"), "gelu"),
    **dict.fromkeys(_EXPONENTIAL.split(), "exp"),
    "tanh": "tanh",
    **dict.fromkeys(("hardswish", "hardsigmoid", "leaky_relu"), "clamp"),
}
# Which dispatch cost, element cost a kind has, where it is not its own name.
_COSTS = {
    "scan": "reduction",
    "loss": "reduction",
    "embedding": "indexing",
    "sort": "other",
    "random": "other",
    "fill": "pointwise",
    "optimizer": "pointwise",
    "fft": "other",
    "linear_algebra": "other",
    "communication": "other",
    "scalar_read": "view",
    "grouped_matmul": "matmul",
    "recurrent": "matmul",
}
_NORMS = {"layer": "layer_norm", "rms": "layer_norm", "group": "group_norm"}

#: Every constant with what it is on a core of 2023 (two of them, 2.1 GHz nominal, AVX-512): where fitting starts from.
DEFAULTS: Mapping[str, float] = {
    "rate.matmul": 2.8e11,
    "rate.convolution": 2.5e11,
    "rate.convolution.pointwise": 2.5e11,
    "rate.attention": 2.0e11,
    "matmul.rows": 40.0,
    "matmul.columns": 8.0,
    "matmul.depth": 30.0,
    "batched.side": 20.0,
    "convolution.rows": 60.0,
    "convolution.depth": 60.0,
    "convolution.image": 1.3,
    "convolution.grouped": 1.5,
    "native.rows": 60.0,
    "byte.l2": 1.0e-11,
    "byte.l3": 1.5e-11,
    "byte.memory": 1.0e-10,
    "byte.page": 3.0e-10,
    "fresh": 2.5,
    "read.vector": 2.0,
    "read.packed": 4.0,
    "read.reordered": 3.5,
    "read.weights": 6.0,
    "element.gelu": 3.6e-10,
    "element.exp": 4.2e-10,
    "element.tanh": 3.0e-10,
    "element.clamp": 1.7e-10,
    "element.batch_norm": 1.5e-10,
    "element.layer_norm": 3.5e-10,
    "element.group_norm": 2.0e-10,
    "element.softmax": 5.0e-10,
    "element.attention": 5.0e-10,
    "element.reduction": 1.0e-10,
    "element.max_pool": 2.0e-8,
    "element.avg_pool": 1.44e-9,
    "element.resample": 1.6e-9,
    "element.indexing": 1.0e-9,
    "element.strided": 3.0e-10,
    "element.roll": 2.0e-10,
    "element.depthwise": 5.0e-11,
    "element.depthwise_output": 1.0e-10,
    "element.im2col": 3.0e-10,
    "element.other": 5.0e-9,
    "row.layer_norm": 2.0e-8,
    "row.softmax": 2.0e-8,
    "row.batched": 5.0e-8,
    "dispatch.pointwise": 5.0e-6,
    "dispatch.normalization": 1.2e-5,
    "dispatch.batch_norm": 2.2e-5,
    "dispatch.softmax": 7.0e-6,
    "dispatch.reduction": 9.0e-6,
    "dispatch.pooling": 1.0e-5,
    "dispatch.copy": 7.0e-6,
    "dispatch.indexing": 1.2e-5,
    "dispatch.resample": 1.0e-5,
    "dispatch.matmul": 9.0e-6,
    "dispatch.batched_matmul": 6.0e-6,
    "dispatch.attention": 1.6e-5,
    "dispatch.convolution": 1.0e-4,
    "dispatch.native": 1.6e-5,
    "dispatch.other": 1.0e-5,
    "dispatch.view": 1.5e-6,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """What names say of each row, by name code: its dispatch and element cost, whether it works in place, whether it
    puts out indices beside its result."""

    dispatch: npt.NDArray[np.object_]
    function: npt.NDArray[np.object_]
    in_place: Bools
    indexed: Bools


def described(names: Sequence[tuple[str, str]]) -> Rows:
    """Which constants the ops of these names and kinds use. An empty cost is none."""
    dispatch, function, in_place, indexed = [], [], [], []
    for name, kind in names:
        base = base_name(name)
        cost = _COSTS.get(kind, kind)
        what = ""
        if kind == "pointwise":
            what = _FUNCTIONS.get(base, "")
        elif kind == "normalization":
            what = next((norm for part, norm in _NORMS.items() if part in base), "batch_norm")
            cost = "batch_norm" if what == "batch_norm" else cost
        elif kind == "pooling":
            what = "max_pool" if "max" in base else "avg_pool"
        elif kind == "copy":
            what = "roll" if base in ("roll", "flip", "constant_pad_nd", "pad") or "_pad" in base else ""
        elif cost in ("reduction", "softmax", "resample", "indexing", "other"):
            what = cost
        dispatch.append("" if base == "empty" else cost)
        function.append(what)
        overload = name.split(".")
        in_place.append(len(overload) > 1 and overload[1].endswith("_") and not overload[1].endswith("__"))
        indexed.append("with_indices" in base)
    return Rows(
        np.array(dispatch, dtype=object),
        np.array(function, dtype=object),
        np.array(in_place, dtype=np.bool_),
        np.array(indexed, dtype=np.bool_),
    )


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one run of each op: arithmetic, traffic (layout changes and page faults included), dispatch, all."""

    arithmetic_s: Floats
    traffic_s: Floats
    dispatch_s: Floats
    total_s: Floats


@dataclass(frozen=True, slots=True)
class Caches:
    """Bytes of the caches of all cores in use together: level 2 and level 3."""

    l2: float
    l3: float


def per_byte(footprint: Floats, caches: Caches, c: Mapping[str, float]) -> Floats:
    """Seconds a byte takes to and from where an operation of this footprint finds its operands."""
    beyond_l2 = _beyond(footprint, caches.l2)
    beyond_l3 = _beyond(footprint, caches.l3)
    cached = c["byte.l2"] * (1.0 - beyond_l2) + c["byte.l3"] * beyond_l2
    return cached * (1.0 - beyond_l3) + c["byte.memory"] * beyond_l3


def _beyond(footprint: Floats, size: float) -> Floats:
    """Share of a footprint that a cache of `size` bytes does not hold: 1/2 where both are equal."""
    square = (footprint / size) ** 2
    return np.asarray(square / (1.0 + square))


def faults(nbytes: Floats, c: Mapping[str, float]) -> Floats:
    """Seconds of page faults for a new block of this many bytes."""
    return np.where(nbytes > PAGE_LIMIT_BYTES, nbytes * c["byte.page"], 0.0)


@dataclass(frozen=True, slots=True)
class Context:
    """What an op's time depends on besides itself: bytes of all weights of its step, and whether that is of one image.

    One value a row, so that ops of many steps can be costed in one table.
    """

    weights_bytes: Floats
    single: Bools

    @staticmethod
    def of(table: OpTable) -> Context:
        """The context of a table that is one step."""
        count = len(table)
        return Context(np.full(count, _weights(table).sum()), np.full(count, _is_single(table)))


def times(
    table: OpTable, strided: Bools, names: Sequence[tuple[str, str]], name_code: npt.NDArray[np.int64],
    context: Context, caches: Caches, c: Mapping[str, float],
) -> Times:
    """Times of every op of a program under the constants `c` (see `DEFAULTS`)."""
    rows = described(names)
    count = len(table)
    if not count:
        none = np.zeros(0)
        return Times(none, none, none, none)
    dispatch_of = np.array([c[f"dispatch.{what}"] if what else 0.0 for what in rows.dispatch])
    element_of = np.array([c[f"element.{what}"] if what else 0.0 for what in rows.function])
    row_of = np.array([c.get(f"row.{what}", 0.0) for what in rows.function])
    dispatch = dispatch_of[name_code]
    in_place = rows.in_place[name_code]
    read, written = table.bytes_read, table.bytes_written

    # What any operation does: read operands once, write the result, new or in place.
    new = np.where(in_place, 0.0, written)
    byte = per_byte(read + new, caches, c)
    traffic = (read + np.where(in_place, written, 0.0) + c["fresh"] * new) * byte + faults(new, c)
    per_row = table.elements / np.maximum(table.reduced, 1.0)
    pooling = table.kind == _CODE["pooling"]
    worked = np.where(pooling, _pooled(table, rows.indexed[name_code]), table.elements)
    arithmetic = worked * element_of[name_code] + np.where(table.reduced > 0, per_row, 0.0) * row_of[name_code]
    copied = strided & np.isin(table.kind, [_CODE["copy"], _CODE["normalization"], _CODE["pointwise"]])
    arithmetic += np.where(copied, table.elements * c["element.strided"], 0.0)
    total = np.hypot(arithmetic, traffic)

    weights_byte = per_byte(context.weights_bytes, caches, c)
    for rows_of, cost in (
        (_kind(table, "matmul", "grouped_matmul", "recurrent"), _matmul),
        (_kind(table, "batched_matmul"), _batched),
        (_kind(table, "attention"), _attention),
    ):
        if rows_of.any():
            arithmetic[rows_of] = cost(table, rows_of, c)
            total[rows_of] = arithmetic[rows_of] + traffic[rows_of]
    products = _kind(table, "matmul", "grouped_matmul", "recurrent")
    if products.any():
        weights = _weights(table)[products]
        times_read = np.where(table.gemm_m[products] < 2, c["read.vector"], c["read.packed"])
        # Weights come from wherever a whole step leaves them; the rest of what is read from where the last op left it.
        traffic[products] += weights * (times_read * weights_byte[products] - byte[products])
        traffic = np.maximum(traffic, 0.0)
        total[products] = arithmetic[products] + traffic[products]
    convolution = _kind(table, "convolution")
    if convolution.any():
        native = np.zeros(count, dtype=np.bool_)
        native[convolution] = _native(table, convolution) & context.single[convolution]
        blocked = convolution & ~native
        arithmetic[blocked], traffic[blocked] = _blocked(table, blocked, strided, weights_byte, caches, c)
        if native.any():
            arithmetic[native], traffic[native] = _im2col(table, native, weights_byte, caches, c)
        total[convolution] = (arithmetic + traffic)[convolution]
        dispatch[convolution] = np.where(native, c["dispatch.native"], dispatch)[convolution]
    idle = _kind(table, "view", "scalar_read")
    arithmetic[idle] = traffic[idle] = total[idle] = 0.0
    return Times(arithmetic, traffic, dispatch, total + dispatch)


def _kind(table: OpTable, *kinds: str) -> Bools:
    return np.isin(table.kind, [_CODE[kind] for kind in kinds])


def _pooled(table: OpTable, indexed: Bools) -> Floats:
    """Results of pooling for a maximum, positions of all windows for an average.

    A window is not among the columns: it is taken to be as large as what the average shrinks, or 3×3 where it shrinks
    nothing; the maximum's is 3×3.
    """
    outputs = table.bytes_written / np.where(indexed, 12.0, 4.0)  # indices have eight bytes
    inputs = table.bytes_read / 4.0
    window = np.where(outputs < 0.9 * inputs, inputs / np.maximum(outputs, 1.0), 9.0)
    return np.where(indexed, outputs, outputs * window)


def _weights(table: OpTable) -> Floats:
    """Bytes of the second operand of products and convolutions; 0 for anything else."""
    of = _kind(table, "matmul", "grouped_matmul", "recurrent", "convolution")
    return np.where(of, 4.0 * table.gemm_batch * table.gemm_n * table.gemm_k, 0.0)


def _matmul(table: OpTable, rows: Bools, c: Mapping[str, float]) -> Floats:
    m, n, k = table.gemm_m[rows], table.gemm_n[rows], table.gemm_k[rows]
    small = (1.0 + c["matmul.rows"] / m) * (1.0 + c["matmul.columns"] / n) * (1.0 + c["matmul.depth"] / k)
    # A product with a vector is nothing but reading the matrix.
    return np.where(m < 2, 0.0, 2.0 * table.macs[rows] * small / c["rate.matmul"])


def _batched(table: OpTable, rows: Bools, c: Mapping[str, float]) -> Floats:
    m, n, k = table.gemm_m[rows], table.gemm_n[rows], table.gemm_k[rows]
    side = c["batched.side"]
    small = (1.0 + side / m) * (1.0 + side / n) * (1.0 + side / k)
    return 2.0 * table.macs[rows] * small / c["rate.matmul"] + table.gemm_batch[rows] * c["row.batched"]


def _attention(table: OpTable, rows: Bools, c: Mapping[str, float]) -> Floats:
    scores = table.gemm_batch[rows] * table.gemm_m[rows] * table.gemm_n[rows]
    products = 2.0 * table.macs[rows] * (1.0 + c["batched.side"] / table.gemm_m[rows]) / c["rate.attention"]
    return products + scores * c["element.attention"] + table.gemm_batch[rows] * c["row.batched"]


def _input_bytes(table: OpTable, rows: Bools) -> Floats:
    """Bytes of a convolution's input: what it reads but its weights (and a bias, which is next to nothing)."""
    return np.maximum(table.bytes_read[rows] - 4.0 * (table.gemm_batch * table.gemm_n * table.gemm_k)[rows], 4.0)


def _is_single(table: OpTable) -> bool:
    """Whether a step is of one image. The batch is not among the columns, but a network's last product shows it."""
    products = _kind(table, "matmul")
    if products.any():
        return bool(table.gemm_m[products].min() < 2)
    rows = _kind(table, "convolution")  # without one: the positions of one image are a square
    channels = table.gemm_batch[rows] * table.gemm_k[rows] / np.maximum(table.kernel_area[rows], 1.0)
    elements = np.rint(_input_bytes(table, rows) / 4.0)
    biased = elements - table.gemm_batch[rows] * table.gemm_n[rows]
    return bool(np.all(_is_square(elements / channels) | _is_square(biased / channels)))


def _is_square(number: Floats) -> Bools:
    side = np.sqrt(np.maximum(number, 0.0))
    return np.asarray((np.abs(side - np.rint(side)) < 1e-6) & (side > 0.5))


def _native(table: OpTable, rows: Bools) -> Bools:
    """Which convolutions PyTorch runs by itself if they are of one image (see the module's introduction)."""
    elements = _input_bytes(table, rows) / 4.0
    few = (table.kernel_area[rows] <= 9) & (elements <= NATIVE_LIMIT_ELEMENTS)
    return np.asarray((table.gemm_batch[rows] == 1) & few)


def _padded(channels: Floats) -> Floats:
    return np.ceil(channels / _BLOCK) * _BLOCK


def _blocked(
    table: OpTable, rows: Bools, strided: Bools, weights_byte: Floats, caches: Caches, c: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """Arithmetic and traffic of convolutions in oneDNN."""
    groups, m, n, k = (col[rows] for col in (table.gemm_batch, table.gemm_m, table.gemm_n, table.gemm_k))
    area, last = table.kernel_area[rows], table.channels_last[rows]
    depth = k / area
    macs = table.macs[rows]
    depthwise = (groups > 1) & (depth == 1)
    grouped = (groups > 1) & ~depthwise
    image = (groups == 1) & (depth <= 4)
    wide = np.where(image, depth, _padded(depth)) / depth * _padded(n) / n
    wide = np.where(grouped & (depth < 8), 8.0 / depth * 8.0 / n, np.where(grouped & (depth < 16), 1.0, wide))
    rate = np.where(area == 1, c["rate.convolution.pointwise"], c["rate.convolution"])
    small = (1.0 + c["convolution.rows"] / m) * (1.0 + c["convolution.depth"] / k)
    small *= np.where(image, c["convolution.image"], 1.0) * np.where(grouped, c["convolution.grouped"], 1.0)
    outputs = groups * m * n
    # Blocked buffers hold whole blocks of channels, filled or not.
    fuller_in = np.where(last | image, 1.0, _padded(groups * depth) / (groups * depth))
    fuller_out = np.where(last, 1.0, _padded(groups * n) / (groups * n))
    vector = (macs * c["element.depthwise"] + outputs * c["element.depthwise_output"]) * fuller_out
    arithmetic = np.where(depthwise, vector, 2.0 * macs * wide * small / rate)

    came, went = _input_bytes(table, rows), table.bytes_written[rows]
    weights = 4.0 * groups * n * k
    blocked_in, blocked_out = came * fuller_in, went * fuller_out
    byte = per_byte(blocked_in + blocked_out, caches, c)
    plain = (blocked_in + c["fresh"] * blocked_out) * byte + faults(went, c)
    reordered = byte * c["read.reordered"]
    reorder_in = np.where(last | image, 0.0, 0.5 * (came + blocked_in) * reordered + faults(blocked_in, c))
    reorder_out = np.where(last, 0.0, 0.5 * (went + blocked_out) * reordered + faults(blocked_out, c))
    conversion = np.where(strided[rows], came * byte * c["read.reordered"], 0.0)
    traffic = plain + reorder_in + reorder_out + conversion + weights * c["read.weights"] * weights_byte[rows]
    return arithmetic, traffic


def _im2col(
    table: OpTable, rows: Bools, weights_byte: Floats, caches: Caches, c: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """Arithmetic and traffic of PyTorch's own convolution: (n, k) weights times (k, positions) of the image."""
    positions, n, k = table.gemm_m[rows], table.gemm_n[rows], table.gemm_k[rows]
    small = (1.0 + c["native.rows"] / positions) * (1.0 + c["matmul.columns"] / n) * (1.0 + c["matmul.depth"] / k)
    unrolled = np.where(table.kernel_area[rows] > 1, positions * k * c["element.im2col"], 0.0)
    arithmetic = np.where(positions < 2, 0.0, 2.0 * table.macs[rows] * small / c["rate.matmul"]) + unrolled
    read, written = table.bytes_read[rows], table.bytes_written[rows]
    traffic = (read + c["fresh"] * written) * per_byte(read + written, caches, c)
    traffic += 4.0 * n * k * c["read.packed"] * weights_byte[rows]
    return arithmetic, traffic
