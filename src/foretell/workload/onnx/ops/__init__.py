"""What each ONNX operation becomes: the operations PyTorch dispatches for the same work, by family.

A translation is a function of a `Builder` and a `Node`; it records ops and returns the node's outputs in order. Names,
kinds and attributes are those a capture gives, which the counting rules and cost models read.
"""

from foretell.workload.onnx.ops import (  # noqa: F401  (they register themselves)
    attention,
    microsoft,
    movement,
    normalization,
    pointwise,
    pooling,
    products,
    quantized,
    recurrent,
)
from foretell.workload.onnx.ops.registry import FUSED, MICROSOFT, translation

__all__ = ["FUSED", "MICROSOFT", "translation"]
