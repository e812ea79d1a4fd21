"""Memory traffic of a graph as a number that needs no device.

*Convolutional input/output* (CIO) sums the sizes of every convolution's input and output: what a layer-by-layer run
without fusion moves for its feature maps. P. Chao et al., HarDNet: A Low Memory Traffic Network, ICCV 2019,
equation 1. Weights, and all operations but convolutions, are left out; a joined input counts each time it is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from foretell.graph.graph import Graph
from foretell.graph.op import Op, Tensor


def convolution_io_bytes(graph: Graph) -> int:
    """Bytes of all convolutions' inputs and outputs in the forward pass."""
    return sum((x.nbytes + y.nbytes) * op.repeat for op, x, y in _convolutions(graph))


def convolution_io_elements(graph: Graph) -> int:
    """Elements of all convolutions' inputs and outputs in the forward pass: the unit of the paper's table 4."""
    return sum((x.elements + y.elements) * op.repeat for op, x, y in _convolutions(graph))


def _convolutions(graph: Graph) -> Iterator[tuple[Op, Tensor, Tensor]]:
    for op in graph.ops:
        if op.kind == "convolution" and op.phase == "forward":
            yield op, graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
