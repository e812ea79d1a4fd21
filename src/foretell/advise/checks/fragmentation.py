"""Many small operations keep the device waiting for the host, or for the next launch."""

from __future__ import annotations

from foretell.advise.bench import Bench
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import some
from foretell.cost import Estimate
from foretell.graph import Graph
from foretell.hardware import Device

NAME = "fragmentation"
#: From this share of the step on, launches are looked at.
SHARE = 0.15


@rule(
    NAME,
    asks="run few large operations instead of many small ones",
    source="Ma et al., ShuffleNet V2, ECCV 2018, guideline 3",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Steps that launches take a good part of, against the compiled program, which joins small operations."""
    share = estimate.breakdown_s["launch"] / estimate.time_s if estimate.time_s > 0 else 0.0
    if estimate.runtime != "eager" or share < SHARE:
        return []
    bench = Bench.of(graph, device, estimate)
    kernels = [i for i, op in enumerate(graph.ops) if op.kind not in ("view", "scalar_read")]
    return bench.findings(
        NAME, kernels, graph, runtime="compiled",
        what=f"launches of {some(len(kernels), 'operation')} take {share:.0%} of the step",
        evidence={"launches": len(kernels), "launch_share": share, "host_s": estimate.host_s},
        advice="compile it (torch.compile), enlarge the batch, or join branches",
    )  # fmt: skip
