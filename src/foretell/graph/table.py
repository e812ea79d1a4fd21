"""`OpTable`: the ops of a graph as NumPy columns, so that costing is vectorised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from foretell.graph.dtypes import DTYPES
from foretell.graph.kinds import KINDS
from foretell.graph.op import PHASES, Op, Tensor

KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}

_REDUCED = frozenset({"reduction", "softmax", "normalization", "loss", "pooling", "resample"})

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class OpTable:
    """One row an op; every column has the same length. Codes index `KINDS`, `DTYPES` and `PHASES`.

    `macs`, `norm_macs`, `bytes_read` and `bytes_written` are of one run; multiply by `repeat` for the step.
    `gemm_*` are the (implicit) matrix product, 0 where there is none; for a convolution `gemm_batch` is its groups.
    `elements` are the elements of the largest output (or input, for a reduction); `kernel_area` is a convolution's
    window (0 otherwise), `channels_last` is 1 where the first operand is stored so.
    `stride` and `dilation` are products over a convolution's spatial dimensions (0 otherwise). `reduced` is how many
    elements each row of a reduction, softmax or normalisation goes over, a pooling's window, or the planes (batch ·
    channels) of a resampling; 0 for the rest.
    `operands` counts tensors in and out (a fused optimiser step has hundreds).
    """

    name: npt.NDArray[np.object_]
    module: npt.NDArray[np.object_]
    kind: Codes
    phase: Codes
    dtype: Codes
    macs: Floats
    norm_macs: Floats
    bytes_read: Floats
    bytes_written: Floats
    elements: Floats
    gemm_batch: Floats
    gemm_m: Floats
    gemm_n: Floats
    gemm_k: Floats
    kernel_area: Floats
    channels_last: npt.NDArray[np.bool_]
    causal: npt.NDArray[np.bool_]
    stride: Floats
    dilation: Floats
    reduced: Floats
    operands: Floats
    repeat: Floats

    def __len__(self) -> int:
        return len(self.kind)

    @staticmethod
    def from_ops(ops: Sequence[Op], tensors: Sequence[Tensor]) -> OpTable:
        """Columns of `ops`, whose tensor indices point into `tensors`."""
        numbers = np.empty((14, len(ops)))
        for i, op in enumerate(ops):
            gemm = op.gemm or (0, 0, 0, 0)
            largest = max((tensors[t].elements for t in (*op.outputs, *op.inputs[:1])), default=0)
            area = 0
            if op.kind == "convolution":
                weight = tensors[op.inputs[2 if op.phase == "backward" and len(op.inputs) > 2 else 1]]
                area = 1
                for size in weight.shape[2:]:
                    area *= size
            numbers[:, i] = (
                op.macs,
                op.norm_macs,
                op.bytes_read,
                op.bytes_written,
                largest,
                *gemm,
                area,
                *_steps(op),
                _reduced(op, tensors),
                len(op.inputs) + len(op.outputs),
            )
        return OpTable(
            name=np.array([op.name for op in ops], dtype=object),
            module=np.array([op.module for op in ops], dtype=object),
            kind=np.array([KIND_CODE[op.kind] for op in ops], dtype=np.int16),
            phase=np.array([PHASE_CODE[op.phase] for op in ops], dtype=np.int16),
            dtype=np.array([DTYPE_CODE[op.dtype] for op in ops], dtype=np.int16),
            macs=numbers[0],
            norm_macs=numbers[1],
            bytes_read=numbers[2],
            bytes_written=numbers[3],
            elements=numbers[4],
            gemm_batch=numbers[5],
            gemm_m=numbers[6],
            gemm_n=numbers[7],
            gemm_k=numbers[8],
            kernel_area=numbers[9],
            channels_last=np.array(
                [bool(op.inputs) and tensors[op.inputs[0]].layout == "channels_last" for op in ops], dtype=np.bool_
            ),
            causal=np.array([bool(op.attrs.get("causal")) for op in ops], dtype=np.bool_),
            stride=numbers[10],
            dilation=numbers[11],
            reduced=numbers[12],
            operands=numbers[13],
            repeat=np.array([op.repeat for op in ops], dtype=np.float64),
        )

    @staticmethod
    def concatenate(tables: Sequence[OpTable]) -> OpTable:
        """One table of all rows, in order."""
        return OpTable(
            **{f.name: np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(OpTable)}
        )


def _steps(op: Op) -> tuple[int, int]:
    """Products of a convolution's strides and dilations; zeros for anything else."""
    if op.kind != "convolution":
        return 0, 0
    return math.prod(op.attrs.get("stride", (1,))), math.prod(op.attrs.get("dilation", (1,)))


def _reduced(op: Op, tensors: Sequence[Tensor]) -> float:
    """Elements one row of a reduction, softmax or normalisation goes over, and what stands for them elsewhere."""
    if op.kind not in _REDUCED or not op.inputs or not op.outputs:
        return 0.0
    source, result = tensors[op.inputs[0]], tensors[op.outputs[0]]
    if op.kind == "softmax":
        return float(source.shape[op.attrs.get("dim", -1)]) if source.shape else 1.0
    if op.kind == "resample":
        return float(math.prod(source.shape[:2]))
    if op.kind == "pooling" and "window" in op.attrs:
        return float(math.prod(op.attrs["window"]))
    # A norm puts out its statistics, one a row, after its result; one that is told them takes none.
    rows = tensors[op.outputs[1]] if op.kind == "normalization" and len(op.outputs) > 1 else result
    return max(source.elements, result.elements) / rows.elements if rows.elements else 0.0
