"""Rows of an op table by layer: fp32, contiguous, inference, as eager PyTorch issues them.

Every function takes a `Map` and returns the rows of one layer. Sizes are elements, traffic is bytes; a weight is read
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.graph import DTYPES, KINDS, PHASES, OpTable

ITEM = 4  # bytes of an fp32 element


class Map(NamedTuple):
    """A feature map: batch × channels × size × size."""

    batch: int
    channels: int
    size: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return self.batch * self.channels * self.size * self.size


class Row(NamedTuple):
    """One op: `foretell.graph.OpTable`'s columns that vary between these ops."""

    name: str
    kind: str
    elements: int
    bytes_read: int
    bytes_written: int
    operands: int
    macs: int = 0
    norm_macs: int = 0
    groups: int = 0
    gemm_m: int = 0
    gemm_n: int = 0
    gemm_k: int = 0
    kernel_area: int = 0
    stride: int = 0
    dilation: int = 0
    reduced: int = 0
    dtype: str = "float32"


Rows = tuple[Row, ...]


@cache
def convolution(
    x: Map, channels: int, kernel: int = 1, stride: int = 1, groups: int = 1, bias: bool = False
) -> tuple[Map, Rows]:
    """A square convolution with "same" padding."""
    y = Map(x.batch, channels, -(-x.size // stride))
    depth = x.channels // groups * kernel * kernel
    weights = channels * (depth + bias)
    row = Row(
        "aten.convolution.default",
        "convolution",
        max(x.elements, y.elements),
        ITEM * (x.elements + weights),
        ITEM * y.elements,
        4 if bias else 3,
        macs=y.elements * depth,
        groups=groups,
        gemm_m=y.elements // channels,
        gemm_n=channels // groups,
        gemm_k=depth,
        kernel_area=kernel * kernel,
        stride=stride * stride,
        dilation=1,
    )
    return y, (row,)


@cache
def batch_norm(x: Map) -> Rows:
    """Normalisation by running statistics: a kernel of its own, beside the empty reserve of a training run."""
    traffic = ITEM * x.elements
    return (
        Row("aten.empty.memory_format", "view", 0, 0, 0, 1, dtype="uint8"),
        Row(
            "aten.native_batch_norm.default",
            "normalization",
            x.elements,
            traffic + 4 * ITEM * x.channels,
            traffic,
            8,
            norm_macs=2 * x.elements,
        ),
    )


@cache
def pointwise(name: str, x: Map, *others: Map) -> Rows:
    """An elementwise op of one or several maps (the smaller ones are broadcast); a scalar beside them costs nothing."""
    read = ITEM * (x.elements + sum(other.elements for other in others))
    return (Row(f"aten.{name}", "pointwise", x.elements, read, ITEM * x.elements, 2 + len(others)),)


@cache
def average_pool(x: Map, window: int, stride: int = 1) -> tuple[Map, Rows]:
    """Average pooling that keeps the size, or divides it by `stride`."""
    y = Map(x.batch, x.channels, x.size // stride)
    read, written, area = ITEM * x.elements, ITEM * y.elements, window * window
    return y, (Row("aten.avg_pool2d.default", "pooling", x.elements, read, written, 2, reduced=area),)


@cache
def mean(x: Map, dimension: int) -> Rows:
    """``x.mean(dimension, keepdim=True)`` of a map whose later dimensions have been averaged already."""
    rows = x.batch * x.channels * (x.size if dimension == 3 else 1)
    elements = rows * x.size
    return (Row("aten.mean.dim", "reduction", elements, ITEM * elements, ITEM * rows, 2, reduced=x.size),)


@cache
def global_pool(x: Map) -> Rows:
    """``AdaptiveAvgPool2d(1)``, which PyTorch runs as a mean over both dimensions."""
    rows, area = x.batch * x.channels, x.size * x.size
    read, written = ITEM * x.elements, ITEM * rows
    return (Row("aten.mean.dim", "reduction", x.elements, read, written, 2, norm_macs=x.elements, reduced=area),)


@cache
def classifier(batch: int, channels: int, classes: int) -> Rows:
    """Flatten, and a linear layer with bias."""
    read = ITEM * (batch * channels + classes * channels + classes)
    return (
        Row("aten.view.default", "view", batch * channels, 0, 0, 2),
        Row("aten.t.default", "view", channels * classes, 0, 0, 2),
        Row(
            "aten.addmm.default",
            "matmul",
            max(batch * classes, classes),
            read,
            ITEM * batch * classes,
            4,
            macs=batch * channels * classes,
            groups=1,
            gemm_m=batch,
            gemm_n=classes,
            gemm_k=channels,
        ),
    )


def table(rows: Sequence[Row], repeat: Sequence[int] | None = None) -> OpTable:
    """The op table of some rows, each run `repeat` times (once by default)."""
    count = len(rows)
    columns = dict(zip(Row._fields, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(Row._fields, ())

    def numbers(field: str) -> npt.NDArray[np.float64]:
        return np.array(columns[field], dtype=np.float64)

    def codes(field: str, names: tuple[str, ...]) -> npt.NDArray[np.int16]:
        return np.array([names.index(name) for name in columns[field]], dtype=np.int16)

    return OpTable(
        name=np.array(columns["name"], dtype=object),
        module=np.full(count, "", dtype=object),
        kind=codes("kind", KINDS),
        phase=np.full(count, PHASES.index("forward"), dtype=np.int16),
        dtype=codes("dtype", DTYPES),
        macs=numbers("macs"),
        norm_macs=numbers("norm_macs"),
        bytes_read=numbers("bytes_read"),
        bytes_written=numbers("bytes_written"),
        elements=numbers("elements"),
        gemm_batch=numbers("groups"),
        gemm_m=numbers("gemm_m"),
        gemm_n=numbers("gemm_n"),
        gemm_k=numbers("gemm_k"),
        kernel_area=numbers("kernel_area"),
        channels_last=np.zeros(count, dtype=np.bool_),
        causal=np.zeros(count, dtype=np.bool_),
        stride=numbers("stride"),
        dilation=numbers("dilation"),
        reduced=numbers("reduced"),
        operands=numbers("operands"),
        repeat=np.ones(count) if repeat is None else np.array(repeat, dtype=np.float64),
    )


def select(whole: OpTable, index: npt.NDArray[np.int64], repeat: npt.NDArray[np.float64]) -> OpTable:
    """Rows of a table by index, repeated anew."""
    columns = {name: getattr(whole, name)[index] for name in OpTable.__dataclass_fields__}
    return OpTable(**{**columns, "repeat": repeat})


def stack(networks: Iterable[Rows]) -> tuple[OpTable, npt.NDArray[np.int64]]:
    """All networks' ops in one table, equal ops of one network as one row with a count, and where each starts.

    Ops are in order of their first use; what depends on order between them is lost.
    """
    known: dict[Row, int] = {}
    index: list[int] = []
    repeat: list[int] = []
    starts: list[int] = []
    for rows in networks:
        starts.append(len(index))
        for row, count in Counter(rows).items():
            index.append(known.setdefault(row, len(known)))
            repeat.append(count)
    distinct = table(list(known))
    return select(distinct, np.array(index, dtype=np.int64), np.array(repeat, dtype=np.float64)), np.array(
        starts, dtype=np.int64
    )
