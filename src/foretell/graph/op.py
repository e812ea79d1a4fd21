"""The three small values a graph is made of: `Tensor`, `Storage`, `Op`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from foretell.graph.dtypes import dtype_bytes

PHASES: tuple[str, ...] = ("forward", "backward", "optimizer")

ROLES: tuple[str, ...] = (
    "parameter",
    "buffer",
    "input",
    "kv_cache",
    "gradient",
    "optimizer",
    "activation",  # born in forward, still needed in backward
    "temporary",
    "output",
)

NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value between operations. Each write makes a new one, so an in-place result has its own `Tensor`.

    `storage` is the index of the `Storage` it lives in: views and in-place results share one.
    `strides` are in elements; None means contiguous (row-major).
    """

    shape: tuple[int, ...]
    dtype: str
    storage: int
    strides: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes really touched when all of it is read: an expanded (stride 0) dimension is read once."""
        if self.strides is None:
            elements = math.prod(self.shape)
        else:
            elements = 1
            for size, stride in zip(self.shape, self.strides, strict=True):
                if size == 0:
                    return 0
                if stride:
                    elements *= size
        return math.ceil(elements * dtype_bytes(self.dtype))

    @property
    def layout(self) -> str:
        """``contiguous``, ``channels_last`` (innermost dimension is the second of 4 or 5) or ``strided``."""
        if self.strides is None:
            return "contiguous"
        if len(self.shape) in (4, 5):
            order = (*range(len(self.shape) - 1, 1, -1),)  # from the last spatial dimension inwards
            expected = self.shape[1]
            if self.strides[1] == 1:
                for dim in order:
                    if self.shape[dim] != 1 and self.strides[dim] != expected:
                        return "strided"
                    expected *= self.shape[dim]
                return "channels_last"
        return "strided"


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory, and when it lives.

    `born` is the index of the op that allocates it (-1: alive before the step);
    `dies` the index of the last op before it is freed (None: alive after the step).
    """

    nbytes: int
    role: str
    born: int = -1
    dies: int | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One operation as the framework dispatches it; on a GPU usually one kernel.

    `macs` follow the "matmul" convention, `norm_macs` are what "fvcore" adds. `gemm` is (batch, m, n, k) of the
    matrix product that does the work, with k the reduced dimension; a convolution's is its implicit one.
    `repeat` says how often the very same op runs in a row of equal layers (1 in captured graphs).
    `counted` is False where no rule says how much arithmetic it does.
    """

    name: str
    kind: str
    phase: str
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Any]
    macs: int
    norm_macs: int
    bytes_read: int
    bytes_written: int
    gemm: tuple[int, int, int, int] | None = None
    dtype: str = "float32"
    repeat: int = 1
    counted: bool = True

    @property
    def flops(self) -> int:
        """FLOP of one run, "matmul" convention: 2 per multiply-add."""
        return 2 * self.macs


def make_op(
    name: str,
    tensors: Sequence[Tensor],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    *,
    phase: str = "forward",
    module: str = "",
    attrs: Mapping[str, Any] = NO_ATTRS,
    repeat: int = 1,
    kind: str | None = None,
) -> Op:
    """Build an op, its arithmetic and traffic filled in by the rules of `foretell.graph.rules`.

    `tensors` is the graph's tensor list that `inputs` and `outputs` index. `kind` overrides the name's own.
    """
    from foretell.graph.kinds import kind_of
    from foretell.graph.rules import work_of

    ins = [tensors[i] for i in inputs]
    outs = [tensors[i] for i in outputs]
    kind = kind_of(name) if kind is None else kind
    work = work_of(name, kind, ins, outs, attrs)
    return Op(
        name=name,
        kind=kind,
        phase=phase,
        module=module,
        inputs=inputs,
        outputs=outputs,
        attrs=attrs,
        macs=work.macs,
        norm_macs=work.norm_macs,
        bytes_read=work.bytes_read,
        bytes_written=work.bytes_written,
        gemm=work.gemm,
        dtype=work.dtype,
        repeat=repeat,
        counted=work.counted,
    )
