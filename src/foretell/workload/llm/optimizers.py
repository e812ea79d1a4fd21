"""Optimizer steps as the multi-tensor ops PyTorch runs on a GPU, each over all parameters at once.

A step is (op, what it reads, what it writes): P parameters, G gradients, M and V state kept between steps, D and E
temporaries. These are the ops a capture of the same optimizer records, step counters left out.
"""

from __future__ import annotations

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
