"""A convolution with few multiply-adds for what it reads and writes waits for memory, however few they are."""

from __future__ import annotations

from foretell.advise.bench import Bench
from foretell.advise.edit import Edit
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import alike, convolutions, times
from foretell.cost import Estimate
from foretell.cost.estimate import BOUNDS
from foretell.graph import Graph
from foretell.hardware import Device

NAME = "memory_traffic"
_MEMORY = BOUNDS.index("memory")


@rule(
    NAME,
    asks="keep multiply-adds over feature-map traffic high: fewer positions, more channels",
    source="Chao et al., HarDNet, ICCV 2019",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Memory-bound full convolutions, against half the height and width with twice the channels.

    That is as many multiply-adds with half the traffic.
    """
    bench = Bench.of(graph, device, estimate)
    found = []
    for sites in alike([s for s in convolutions(graph) if s.dense and s.inputs > 4]):
        first = sites[0]
        x_shape, _, y_shape = first.shapes
        if estimate.ops.bound[first.index] != _MEMORY or any(side % 2 for side in (*x_shape[2:], *y_shape[2:])):
            continue
        edit = Edit(graph)
        for site in sites:
            x, y = (
                edit.tensor((n, 2 * channels, *(side // 2 for side in space)), like)
                for (n, channels, *space), like in ((x_shape, site.x), (y_shape, site.y))
            )
            edit.drop(site.index)
            edit.convolution(site.index, x, y, site.window, stride=site.stride)
        ops = [site.index for site in sites]
        traffic = sum(graph.tensors[t].elements for t in (first.x, first.y))
        found += bench.findings(
            NAME, ops, edit,
            what=f"{' × '.join(map(str, first.window))} from {first.inputs} to {first.outputs} channels at "
            f"{first.positions:,} positions{times(len(sites))} waits for memory",
            evidence={
                "macs_per_element": graph.ops[first.index].macs / traffic,
                "macs_per_element_advised": 2.0 * graph.ops[first.index].macs / traffic,
                "time_s": bench.op_time_s(ops),
            },
            advice=f"downsample before it: {2 * first.inputs} to {2 * first.outputs} channels at a quarter of the "
            "positions",
        )  # fmt: skip
    return found
