"""Tensor cores take channels by eights in half precision; what is between runs slower kernels."""

from __future__ import annotations

from foretell.advise.bench import Bench
from foretell.advise.edit import channels_last, reshaped
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import convolutions
from foretell.cost import Estimate
from foretell.graph import Graph, Tensor
from foretell.hardware import Device

NAME = "channel_multiple"
MULTIPLE = 8


@rule(
    NAME,
    asks="make channels multiples of 8 where tensor cores work",
    source="Anthony et al., The Case for Co-Designing Model Architectures with Hardware, ICPP 2024; Tan and Le, "
    "EfficientNet, ICML 2019",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Widths that are no multiple of 8, against the next that is, everywhere at once. Images keep theirs."""
    sites = convolutions(graph)
    # The groups of a grouped convolution would have to be cut anew.
    kept = {n for s in sites if s.groups > 1 and not s.depthwise for n in (s.inputs, s.outputs)}
    odd = {
        n for s in sites if graph.ops[s.index].dtype in ("float16", "bfloat16") for n in (s.inputs, s.outputs)
        if n % MULTIPLE and n > 4 and n not in kept
    }  # fmt: skip
    if not odd:
        return []
    weights = {graph.ops[s.index].inputs[1] for s in sites}
    vectors = {t for op in graph.ops if op.kind in ("normalization", "convolution") for t in op.inputs[1:]}

    def padded(index: int, tensor: Tensor) -> Tensor:
        shape = tensor.shape
        if index in weights:
            # A depthwise weight has one input channel, which is no width.
            wide = tuple(_up(n, odd) if i < 2 and n > 1 else n for i, n in enumerate(shape))
        elif (len(shape) == 1 and index in vectors) or (len(shape) == 4 and index not in inputs):
            at = 0 if len(shape) == 1 else 1
            wide = (*shape[:at], _up(shape[at], odd), *shape[at + 1 :])
        else:
            return tensor
        if wide == shape or tensor.layout == "strided":
            return tensor
        strides = channels_last(wide) if tensor.layout == "channels_last" else None
        return Tensor(wide, tensor.dtype, tensor.storage, strides)

    inputs = set(graph.inputs)
    bench = Bench.of(graph, device, estimate)
    ops = [s.index for s in sites if s.inputs in odd or s.outputs in odd]
    return bench.findings(
        NAME, ops, reshaped(graph, padded),
        what=f"channels that are no multiple of {MULTIPLE}: {', '.join(map(str, sorted(odd)[:6]))}"
        + (" …" if len(odd) > 6 else ""),
        evidence={"widths": len(odd), "convolutions": len(ops), "time_s": bench.op_time_s(ops)},
        advice=f"round them up to multiples of {MULTIPLE}",
    )  # fmt: skip


def _up(n: int, odd: set[int]) -> int:
    return -(-n // MULTIPLE) * MULTIPLE if n in odd else n
