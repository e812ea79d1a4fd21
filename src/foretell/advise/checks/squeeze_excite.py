"""Squeeze-and-excitation reads its features twice and writes them again: dear where they are large."""

from __future__ import annotations

import math

from foretell.advise.bench import Bench
from foretell.advise.edit import Edit
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import Flow, times
from foretell.cost import Estimate
from foretell.graph import Graph
from foretell.graph.kinds import base_name
from foretell.hardware import Device

NAME = "squeeze_excite"
#: Positions from which features are large: early stages of networks for 224 × 224.
POSITIONS = 28 * 28


@rule(
    NAME,
    asks="leave squeeze-and-excitation out of the early stages",
    source="Tan and Le, EfficientNetV2, ICML 2021, table 4",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Gates of channels by their own means over many positions, against none. What accuracy that takes is left out."""
    bench, flow = Bench.of(graph, device, estimate), Flow(graph)
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for index, op in enumerate(graph.ops):
        if base_name(op.name) != "mul" or op.phase != "forward" or len(op.inputs) != 2:
            continue
        shapes = [graph.tensors[t].shape for t in op.inputs]
        wide = max((0, 1), key=lambda i: math.prod(shapes[i]))
        if len(shapes[wide]) != 4 or math.prod(shapes[wide][2:]) < POSITIONS:
            continue
        gate = _gate(flow, index, 1 - wide, graph.tensors[op.inputs[wide]].storage)
        if gate:
            groups.setdefault(shapes[wide], []).append([*gate, index])
    found = []
    for shape, gates in groups.items():
        edit = Edit(graph)
        ops = sorted(i for gate in gates for i in gate)
        edit.drop(*ops)
        found += bench.findings(
            NAME, ops, edit,
            what=f"squeeze-and-excitation of {shape[1]} channels at {math.prod(shape[2:]):,} positions"
            f"{times(len(gates))}",
            evidence={
                "positions": math.prod(shape[2:]), "ops": len(ops),
                "bytes": sum(graph.ops[i].bytes_read + graph.ops[i].bytes_written for i in ops),
                "time_s": bench.op_time_s(ops),
            },
            advice="leave it out at this resolution, or keep it for later stages",
            at_most=True,
        )  # fmt: skip
    return found


def _gate(flow: Flow, index: int, operand: int, source: int) -> list[int]:
    """The ops from a mean of storage `source` to operand number `operand` of op `index`; empty if it is no gate."""
    graph = flow.graph
    writer = flow.writers[index][operand]
    ops: list[int] = []
    while writer >= 0 and len(ops) < 16:
        op = graph.ops[writer]
        if len(flow.readers[writer]) != 1 or not op.inputs:
            return []
        ops.insert(0, writer)
        if op.kind in ("reduction", "pooling"):
            return ops if graph.tensors[op.inputs[0]].storage == source else []
        if op.kind not in ("convolution", "matmul", "pointwise", "normalization"):
            return []
        # A product with a bias takes it first.
        at = 1 if base_name(op.name) == "addmm" else 0
        writer = flow.writers[writer][at]
    return []
