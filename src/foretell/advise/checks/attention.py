"""Attention over images grows with the square of their positions; at lower resolution it costs a sixteenth."""

from __future__ import annotations

import math

from foretell.advise.bench import Bench
from foretell.advise.edit import Edit
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import times
from foretell.cost import Estimate
from foretell.graph import Graph
from foretell.hardware import Device

NAME = "attention"
#: Positions up to which attention is left alone: 14 × 14 and a class token.
POSITIONS = 256


@rule(
    NAME,
    asks="run attention over images at lowered resolution",
    source="Nottebaum et al., LowFormer, WACV 2025",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Attention over many positions of images, against a quarter of them, with downsampling before and after."""
    if "images" not in graph.items:
        return []
    bench = Bench.of(graph, device, estimate)
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, op in enumerate(graph.ops):
        if op.kind != "attention" or op.phase != "forward" or len(op.inputs) < 3:
            continue
        shape = graph.tensors[op.inputs[0]].shape
        if len(shape) == 4 and shape[2] > POSITIONS and graph.tensors[op.inputs[1]].shape[2] == shape[2]:
            groups.setdefault(shape, []).append(index)
    found = []
    for (n, heads, positions, depth), ops in groups.items():
        edit = Edit(graph)
        low = (n, heads, math.ceil(positions / 4), depth)
        for index in ops:
            op = graph.ops[index]
            small = [edit.tensor(low, t) for t in op.inputs[:3]]
            result = edit.tensor(low, op.outputs[0])
            statistics = tuple(edit.tensor(low[:3], t) for t in op.outputs[1:2])
            edit.drop(index)
            for t, lowered in zip(op.inputs[:3], small, strict=True):  # each reads all positions, writes a quarter
                edit.put(index, "aten.avg_pool2d.default", (t,), (lowered,))
            edit.put(index, op.name, tuple(small), (result, *statistics), op.attrs)
            edit.put(index, "aten.upsample_nearest2d.vec", (result,), op.outputs[:1])
        found += bench.findings(
            NAME, ops, edit,
            what=f"attention of {heads} heads over {positions:,} positions{times(len(ops))}",
            evidence={"positions": positions, "positions_advised": low[2], "time_s": bench.op_time_s(ops)},
            advice="halve height and width before it and restore them after",
        )  # fmt: skip
    return found
