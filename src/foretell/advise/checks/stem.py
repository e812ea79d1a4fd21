"""A large strided convolution over the image, then pooling, spends much on three channels."""

from __future__ import annotations

import math

from foretell.advise.bench import Bench
from foretell.advise.edit import Edit
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import Flow, convolutions
from foretell.cost import Estimate
from foretell.graph import Graph
from foretell.hardware import Device

NAME = "stem"
BLOCK = 4


@rule(
    NAME,
    asks="begin with space-to-depth and a small convolution, not a large strided one and pooling",
    source="Ridnik et al., TResNet, WACV 2021",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """A first convolution of stride 2 that pooling of stride 2 follows, against 4 × 4 blocks put in channels.

    A 3 × 3 convolution over 16 times the channels at a quarter of the height and width then gives the same result's
    shape.
    """
    flow, bench = Flow(graph), Bench.of(graph, device, estimate)
    inputs = {graph.tensors[t].storage for t in graph.inputs}
    found = []
    for site in convolutions(graph):
        n, channels, height, width = site.shapes[0]
        if channels > 4 or not site.dense or site.stride != (2, 2) or graph.tensors[site.x].storage not in inputs:
            continue
        pool, passed = flow.after(site.index)
        if pool < 0 or graph.ops[pool].kind != "pooling" or height % BLOCK or width % BLOCK:
            continue
        shape = graph.tensors[graph.ops[pool].outputs[0]].shape
        if shape != (n, site.outputs, height // BLOCK, width // BLOCK):
            continue
        ops = [site.index, *passed, pool]
        edit = Edit(graph)
        edit.drop(*ops)
        deep = edit.tensor((n, channels * BLOCK**2, *shape[2:]), site.x)
        edit.put(pool, "aten.pixel_unshuffle.default", (site.x,), (deep,))
        result = graph.ops[pool].outputs[0]
        edit.convolution(pool, deep, result, (3, 3))
        for index in passed:
            op = graph.ops[index]
            edit.put(pool, op.name, (result, *op.inputs[1:]), (result, *op.outputs[1:]), op.attrs)
        found += bench.findings(
            NAME, ops, edit,
            what=f"stem of a {' × '.join(map(str, site.window))} convolution of stride 2, and pooling",
            evidence={"macs": site.macs, "window": math.prod(site.window), "time_s": bench.op_time_s(ops)},
            advice=f"{BLOCK} × {BLOCK} space-to-depth, then a 3 × 3 convolution of {channels * BLOCK**2} channels",
        )  # fmt: skip
    return found
