"""Branches of convolutions and batch norms that are added up are one convolution."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretell.advise.bench import Bench
from foretell.advise.edit import Edit
from foretell.advise.family import rule
from foretell.advise.finding import Finding
from foretell.advise.flow import Convolution, Flow, batch_norm, convolutions, some
from foretell.cost import Estimate
from foretell.graph import Graph
from foretell.graph.kinds import base_name
from foretell.hardware import Device

NAME = "branches"


@dataclass(slots=True)
class _Sum:
    """What an addition adds up: the ops that go, the convolutions among them, and the storages they start from."""

    ops: list[int] = field(default_factory=list)
    sites: list[Convolution] = field(default_factory=list)
    roots: set[int] = field(default_factory=set)
    branches: int = 0


@rule(
    NAME,
    asks="merge parallel convolutions, batch norms and identities for inference",
    source="Ding et al., RepVGG, CVPR 2021, section 3.3",
)
def check(graph: Graph, device: Device, estimate: Estimate) -> list[Finding]:
    """Sums of branches from one input, against the one convolution of the largest window; all of them at once."""
    bench, flow, edit = Bench.of(graph, device, estimate), Flow(graph), Edit(graph)
    sites = {site.index: site for site in convolutions(graph)}
    adds = [i for i, op in enumerate(graph.ops) if _adds(graph, i) and op.phase == "forward"]
    merged: list[_Sum] = []
    for index in adds:
        if any(_adds(graph, reader) for reader in flow.readers[index]) and len(flow.readers[index]) == 1:
            continue  # a part of a longer sum
        total = _Sum()
        _gather(flow, sites, index, total)
        largest = max(total.sites, key=lambda s: s.window, default=None)
        if largest is None or total.branches < 2 or len(total.roots) != 1:
            continue
        same = all((s.stride, s.groups) == (largest.stride, largest.groups) for s in total.sites)
        if not same or any(side % 2 == 0 for s in total.sites for side in s.window):
            continue
        edit.drop(*total.ops)
        edit.convolution(
            index, largest.x, graph.ops[index].outputs[0], largest.window, groups=largest.groups, stride=largest.stride
        )
        merged.append(total)
    if not merged:
        return []
    ops = sorted(i for total in merged for i in total.ops)
    return bench.findings(
        NAME, ops, edit,
        what=f"{some(len(merged), 'sum')} of {sum(t.branches for t in merged)} parallel branches in all",
        evidence={
            "sums": len(merged), "branches": sum(t.branches for t in merged), "ops": len(ops),
            "time_s": bench.op_time_s(ops),
        },
        advice="merge each into one convolution: foretell.transform.reparametrize",
    )  # fmt: skip


def _adds(graph: Graph, index: int) -> bool:
    op = graph.ops[index]
    return base_name(op.name) == "add" and len(op.inputs) == 2 and len(graph.tensors[op.outputs[0]].shape) == 4


def _gather(flow: Flow, sites: dict[int, Convolution], index: int, total: _Sum) -> None:
    """Walk up from an addition through additions and norms to convolutions, or to what they start from."""
    total.ops.append(index)
    for tensor, writer in zip(flow.graph.ops[index].inputs, flow.writers[index], strict=True):
        passed = []
        # What others read too is no branch's own value.
        while writer >= 0 and batch_norm(flow.graph.ops[writer]) and len(flow.readers[writer]) == 1:
            passed.append(writer)
            tensor, writer = flow.graph.ops[writer].inputs[0], flow.writers[writer][0]
        own = writer >= 0 and len(flow.readers[writer]) == 1
        if own and _adds(flow.graph, writer):
            total.ops += passed
            _gather(flow, sites, writer, total)
            continue
        total.branches += 1
        total.ops += passed
        if own and writer in sites:
            total.ops.append(writer)
            total.sites.append(sites[writer])
            tensor = sites[writer].x
        total.roots.add(flow.graph.tensors[tensor].storage)
