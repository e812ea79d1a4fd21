"""Depthwise convolutions do little arithmetic a byte; where channels are modest, a full convolution is faster."""

from __future__ import annotations

import math

from foretell.advise.bench import Bench
from foretell.advise.edit import Edit
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import Convolution, Flow, alike, convolutions, times
from foretell.cost import Estimate
from foretell.graph import Graph
from foretell.hardware import Device

NAME = "depthwise"


@rule(
    NAME,
    asks="fuse a depthwise convolution and the 1 × 1 beside it into a full convolution where that is faster",
    source="Tan and Le, EfficientNetV2, ICML 2021, section 3.2; Lin et al., GENet, arXiv 2006.14090; Nottebaum et al., "
    "LowFormer, WACV 2025",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Each depthwise convolution behind a 1 × 1 (MBConv), or before one; both become one full convolution."""
    bench, flow = Bench.of(graph, device, estimate), Flow(graph)
    by_index = {site.index: site for site in convolutions(graph)}
    found = []
    for sites in alike([site for site in by_index.values() if site.depthwise]):
        edit, ops, replaced, weights = Edit(graph), [], 0, 0.0
        for site in sites:
            before, passed = flow.before(site.index)
            partner = by_index.get(before)
            if partner is not None and partner.pointwise and partner.index not in ops:
                ops += _fuse(edit, partner.index, passed, site.index, partner.x, site.y, site)
            else:
                after, passed = flow.after(site.index)
                partner = by_index.get(after)
                if partner is None or not partner.pointwise or partner.index in ops:
                    continue
                ops += _fuse(edit, site.index, passed, partner.index, site.x, partner.y, site)
            replaced = site.macs + partner.macs
            area, both = math.prod(site.window), partner.inputs * partner.outputs
            weights = area * both / (both + area * site.outputs)
        if not ops:
            continue
        first = sites[0]
        op = graph.ops[first.index]
        window = " × ".join(map(str, first.window))
        full = edit.graph().macs() - graph.macs()
        found += bench.findings(
            NAME, ops, edit,
            what=f"depthwise {window} of {first.inputs} channels at {first.positions:,} positions{times(len(sites))}",
            evidence={
                "flop_per_byte": op.flops / max(1, op.bytes_read + op.bytes_written),
                "macs": replaced * len(sites),
                "macs_fused": replaced * len(sites) + full,
                "weights_times": weights,
                "time_s": bench.op_time_s(ops),
            },
            advice=f"fuse it and its 1 × 1 into one full {window} convolution (Fused-MBConv)",
        )  # fmt: skip
    return found


def _fuse(edit: Edit, first: int, between: list[int], last: int, x: int, y: int, site: Convolution) -> list[int]:
    ops = [first, *between, last]
    edit.drop(*ops)
    edit.convolution(last, x, y, site.window, stride=site.stride)
    return sorted(ops)
