"""A batch norm in inference is a scale and a shift, which the convolution before it can take over."""

from __future__ import annotations

from foretell.advise.bench import Bench
from foretell.advise.edit import Edit
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import Flow, batch_norm, some
from foretell.cost import Estimate
from foretell.graph import Graph
from foretell.hardware import Device

NAME = "batch_norm"


@rule(
    NAME,
    asks="fold batch norms into the convolutions before them for inference",
    source="Ding et al., RepVGG, CVPR 2021, equation 3",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Batch norms whose only input is a convolution that nothing else reads; all of them are folded at once."""
    bench, flow, edit = Bench.of(graph, device, estimate), Flow(graph), Edit(graph)
    folded = []
    for index, op in enumerate(graph.ops):
        writer = flow.writers[index][0] if batch_norm(op) else -1
        if writer < 0 or graph.ops[writer].kind != "convolution" or len(flow.readers[writer]) != 1:
            continue
        convolution = graph.ops[writer]
        edit.drop(index, writer)
        # The convolution's own bias, or the norm's in its place, comes along: as many values either way.
        edit.put(writer, convolution.name, convolution.inputs, op.outputs[:1], convolution.attrs)
        folded.append(index)
    if not folded:
        return []
    moved = sum(graph.ops[i].bytes_read + graph.ops[i].bytes_written for i in folded)
    return bench.findings(
        NAME, folded, edit,
        what=f"{some(len(folded), 'batch norm')} apart from their convolutions",
        evidence={"batch_norms": len(folded), "bytes": moved, "time_s": bench.op_time_s(folded)},
        advice="fold each into its convolution: foretell.transform.fold_batch_norm",
    )  # fmt: skip
