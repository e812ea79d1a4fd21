"""Optimizer steps: the multi-tensor ops PyTorch runs on a GPU, and the kernels of bitsandbytes.

A step of PyTorch's is (op, what it reads, what it writes), each over all parameters at once: P parameters, G gradients,
M and V state kept between steps, D and E temporaries. These are the ops a capture of the same optimizer records, step
counters left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The state tensors kept for each parameter, and the ops of one step."""

    state: str
    steps: tuple[tuple[str, str, str], ...]


_ADAM = (
    ("aten._foreach_lerp_.Scalar", "MG", "M"),
    ("aten._foreach_mul_.Scalar", "V", "V"),
    ("aten._foreach_addcmul_.Scalar", "VGG", "V"),
    ("aten._foreach_sqrt.default", "V", "D"),
    ("aten._foreach_div_.ScalarList", "D", "D"),
    ("aten._foreach_add_.Scalar", "D", "D"),
    ("aten._foreach_addcdiv_.ScalarList", "PMD", "P"),
)
_DECAY = ("aten._foreach_mul_.Scalar", "P", "P")

OPTIMIZERS: dict[str, Optimizer] = {
    "adagrad": Optimizer("M", (
        ("aten._foreach_addcmul_.Scalar", "MGG", "M"),
        ("aten._foreach_sqrt.default", "M", "D"),
        ("aten._foreach_add_.Scalar", "D", "D"),
        ("aten._foreach_mul.ScalarList", "G", "E"),
        ("aten._foreach_addcdiv_.Scalar", "PED", "P"),
    )),
    "adam": Optimizer("MV", _ADAM),
    "adamw": Optimizer("MV", (_DECAY, *_ADAM)),
    "adamw-fused": Optimizer("MV", (("aten._fused_adamw_.default", "PGMV", "PMV"),)),
    "lion": Optimizer("M", (
        _DECAY,
        ("aten._foreach_lerp.Scalar", "MG", "D"),
        ("aten._foreach_sign_.default", "D", "D"),
        ("aten._foreach_add_.List", "PD", "P"),
        ("aten._foreach_lerp_.Scalar", "MG", "M"),
    )),
    "rmsprop": Optimizer("M", (
        ("aten._foreach_mul_.Scalar", "M", "M"),
        ("aten._foreach_addcmul_.Scalar", "MGG", "M"),
        ("aten._foreach_sqrt.default", "M", "D"),
        ("aten._foreach_add_.Scalar", "D", "D"),
        ("aten._foreach_addcdiv_.Scalar", "PGD", "P"),
    )),
    "sgd": Optimizer("M", (
        ("aten._foreach_mul_.Scalar", "M", "M"),
        ("aten._foreach_add_.List", "MG", "M"),
        ("aten._foreach_add_.List", "PM", "P"),
    )),
    "sgd-plain": Optimizer("", (("aten._foreach_add_.List", "PG", "P"),)),
}


@dataclass(frozen=True, slots=True)
class BlockwiseAdamW:
    """AdamW of bitsandbytes: one kernel a parameter, two states in fp32 or (`bits` 8) a byte a value.

    Bytes share an fp32 scale for each 256 values, and parameters of fewer than 4096 values keep fp32 states. `paged`
    states are allocated in CUDA's unified memory, from 100,000 values on: the driver may move them to the host
    (``bitsandbytes/optim/optimizer.py``: `init_state`, `get_state_buffer`).
    """

    bits: int
    paged: bool

    def state(self, elements: int) -> tuple[tuple[int, str], ...]:
        """(elements, dtype) of each state tensor of a parameter."""
        if self.bits == 32 or elements < 4096:
            return ((elements, "float32"),) * 2
        return ((elements, "uint8"),) * 2 + ((math.ceil(elements / 256), "float32"),) * 2

    def pages(self, elements: int) -> bool:
        """Whether the states of a parameter, not their scales, lie in unified memory."""
        return self.paged and elements >= 100_000


BLOCKWISE: dict[str, BlockwiseAdamW] = {
    "adamw-8bit": BlockwiseAdamW(8, paged=False),
    "paged-adamw": BlockwiseAdamW(32, paged=True),
    "paged-adamw-8bit": BlockwiseAdamW(8, paged=True),
}
