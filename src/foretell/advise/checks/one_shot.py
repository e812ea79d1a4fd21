"""Dense connections join everything before every layer; joining once at the end moves far less."""

from __future__ import annotations

from foretell.advise.bench import Bench
from foretell.advise.edit import Edit
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import some
from foretell.cost import Estimate
from foretell.graph import Graph
from foretell.graph.kinds import base_name
from foretell.hardware import Device

NAME = "one_shot"


@rule(
    NAME,
    asks="join features once at the end of a block, not before every layer",
    source="Lee et al., VoVNet, CVPR workshops 2019",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Runs of joins that take the same features again, against their last join alone.

    The layers keep their arithmetic: a block that aggregates once can spend it on wider layers.
    """
    bench = Bench.of(graph, device, estimate)
    found = []
    for joins in _blocks(graph):
        if len(joins) < 3:
            continue
        edit = Edit(graph)
        edit.drop(*joins[:-1])
        widest = graph.tensors[graph.ops[joins[-1]].outputs[0]].shape[1]
        moved = [graph.ops[i].bytes_read + graph.ops[i].bytes_written for i in joins]
        found += bench.findings(
            NAME, joins, edit,
            what=f"{some(len(joins), 'join')} of features up to {widest} channels",
            evidence={
                "joins": len(joins), "bytes": sum(moved), "bytes_advised": moved[-1],
                "time_s": bench.op_time_s(joins),
            },
            advice="aggregate once, at the end of the block; spend the layers' arithmetic on width",
        )  # fmt: skip
    return found


def _blocks(graph: Graph) -> list[list[int]]:
    """Joins over channels that share an operand, or take another's result, with earlier ones."""
    blocks: list[list[int]] = []
    block_of: dict[int, list[int]] = {}  # by storage that the joins of a block read or wrote
    for index, op in enumerate(graph.ops):
        if base_name(op.name) != "cat" or op.phase != "forward" or len(op.inputs) < 2:
            continue
        out = graph.tensors[op.outputs[0]]
        operands = [graph.tensors[t] for t in op.inputs]
        if len(out.shape) != 4 or sum(t.shape[1] for t in operands if len(t.shape) == 4) != out.shape[1]:
            continue
        storages = [t.storage for t in operands]
        block = next((block_of[s] for s in storages if s in block_of), None)
        if block is None:
            block = []
            blocks.append(block)
        block.append(index)
        block_of.update(dict.fromkeys((*storages, out.storage), block))
    return blocks
