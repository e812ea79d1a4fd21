"""Of all 1 × 1 convolutions with so many multiply-adds, the one with equal widths moves the least memory."""

from __future__ import annotations

import math

from foretell.advise.bench import Bench
from foretell.advise.edit import Edit
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import alike, convolutions, times
from foretell.cost import Estimate
from foretell.graph import Graph
from foretell.hardware import Device
from foretell.workload.zoo.design import least_memory_access_cost, memory_access_cost

NAME = "equal_width"
#: Widths further apart than this are looked at.
RATIO = 2.0


@rule(
    NAME,
    asks="give 1 × 1 convolutions as many inputs as outputs",
    source="Ma et al., ShuffleNet V2, ECCV 2018, guideline 1; Lee et al., VoVNet, CVPR workshops 2019",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Lopsided 1 × 1 convolutions, against equal widths (a multiple of 8) with at least as many multiply-adds."""
    bench = Bench.of(graph, device, estimate)
    found = []
    for sites in alike([s for s in convolutions(graph) if s.pointwise and s.positions > 1]):
        first = sites[0]
        if max(first.inputs, first.outputs) <= RATIO * min(first.inputs, first.outputs):
            continue
        width = math.ceil(math.sqrt(first.inputs * first.outputs) / 8) * 8
        edit = Edit(graph)
        for site in sites:
            n, _, *space = site.shapes[0]
            x, y = edit.tensor((n, width, *space), site.x), edit.tensor((n, width, *space), site.y)
            edit.drop(site.index)
            edit.convolution(site.index, x, y, site.window)
        ops = [site.index for site in sites]
        batch = first.shapes[0][0]
        moved = memory_access_cost(batch * first.positions, first.inputs, first.outputs)
        macs = batch * first.positions * first.inputs * first.outputs
        found += bench.findings(
            NAME, ops, edit,
            what=f"1 × 1 from {first.inputs} to {first.outputs} channels at {first.positions:,} positions"
            f"{times(len(sites))}",
            evidence={
                "inputs": first.inputs, "outputs": first.outputs, "elements": moved,
                "elements_least": least_memory_access_cost(batch * first.positions, macs), "width_advised": width,
                "time_s": bench.op_time_s(ops),
            },
            advice=f"{width} to {width} channels does as many multiply-adds with less traffic",
        )  # fmt: skip
    return found
