"""Tensor cores convolve channels-last; from channels-first, values are converted on the way in and out."""

from __future__ import annotations

from foretell.advise.bench import Bench
from foretell.advise.edit import channels_last, reshaped
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import convolutions, some
from foretell.cost import Estimate
from foretell.graph import Graph, Tensor
from foretell.hardware import Device

NAME = "layout"


@rule(
    NAME,
    asks="store images channels-last where tensor cores work",
    source="NVIDIA, Convolutional Layers User's Guide, on tensor layouts",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Convolutions of channels-first tensors, against the whole graph stored channels-last."""
    sites = [s for s in convolutions(graph) if graph.tensors[s.x].layout == "contiguous" and s.positions > 1]
    if not sites:
        return []
    bench = Bench.of(graph, device, estimate)

    def moved(index: int, tensor: Tensor) -> Tensor:
        if len(tensor.shape) != 4 or tensor.strides is not None:
            return tensor
        return Tensor(tensor.shape, tensor.dtype, tensor.storage, channels_last(tensor.shape))

    ops = [site.index for site in sites]
    return bench.findings(
        NAME, ops, reshaped(graph, moved),
        what=f"{some(len(ops), 'convolution')} on channels-first tensors",
        evidence={"convolutions": len(ops), "time_s": bench.op_time_s(ops)},
        advice="module and images to channels_last (--layout nhwc)",
    )  # fmt: skip
