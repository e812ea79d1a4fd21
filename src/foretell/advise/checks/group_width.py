"""A grouped convolution's arithmetic a byte depends on the width of its groups alone; narrow ones wait for memory."""

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
from foretell.workload.zoo.design import group_convolution_intensity

NAME = "group_width"
#: Widths that are tried: what vector and tensor instructions like.
WIDTHS = (8, 16, 32, 64, 128)
#: Multiply-adds may become so many times as many, since groups divide channels.
MORE = 1.15


@rule(
    NAME,
    asks="make groups of convolutions as wide as the device wants, with fewer channels",
    source="Radosavovic et al., RegNet, CVPR 2020; Jha et al., E2GC, VLSI Design 2020",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Grouped convolutions, against wider groups over so many fewer channels that multiply-adds stay the same."""
    bench = Bench.of(graph, device, estimate)
    found = []
    for sites in alike([s for s in convolutions(graph) if s.groups > 1 and not s.depthwise]):
        first = sites[0]
        width = first.inputs // first.groups
        best: list[Finding] = []
        for wider in (w for w in WIDTHS if w > width):
            # channels · width does not fall, hardly rises, and groups divide the channels.
            groups = math.ceil(first.inputs * width / wider / wider)
            if groups * wider**2 > MORE * first.inputs * width or first.inputs != first.outputs:
                continue
            edit = Edit(graph)
            for site in sites:
                n, _, *space = site.shapes[0]
                x = edit.tensor((n, groups * wider, *space), site.x)
                y = edit.tensor((n, groups * wider, *site.shapes[2][2:]), site.y)
                edit.drop(site.index)
                edit.convolution(site.index, x, y, site.window, groups=groups, stride=site.stride)
            ops = [site.index for site in sites]
            size = 4.0 if graph.tensors[first.x].dtype == "float32" else 2.0
            area = math.prod(first.window)
            flop_per_byte, wider_flop_per_byte = (
                group_convolution_intensity(first.positions, w, math.isqrt(area), size) for w in (width, wider)
            )
            finding = bench.findings(
                NAME, ops, edit,
                what=f"groups of {width} in a {' × '.join(map(str, first.window))} of {first.inputs} channels at "
                f"{first.positions:,} positions{times(len(sites))}",
                evidence={
                    "group_width": width, "group_width_advised": wider, "channels": first.inputs,
                    "channels_advised": groups * wider, "flop_per_byte": flop_per_byte,
                    "flop_per_byte_advised": wider_flop_per_byte, "time_s": bench.op_time_s(ops),
                },
                advice=f"groups of {wider} over {groups * wider} channels: as many multiply-adds, less traffic",
            )  # fmt: skip
            best = max(best, finding, key=lambda f: f[0].gain_s if f else 0.0)
        found += best
    return found
