"""Who wrote what an op reads, and who reads what it wrote; the convolutions of a graph with their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretell.graph import Graph, Op


@dataclass(frozen=True, slots=True)
class Convolution:
    """Op `index`: a forward convolution over images; `x` and `y` are tensor indices."""

    index: int
    x: int
    y: int
    inputs: int
    outputs: int
    groups: int
    window: tuple[int, ...]
    stride: tuple[int, ...]
    positions: int  # height · width of the output
    macs: int
    shapes: tuple[tuple[int, ...], ...]  # of x, weight and y: what tells sites alike

    @property
    def depthwise(self) -> bool:
        """One input channel an output."""
        return self.groups > 1 and self.groups == self.inputs

    @property
    def dense(self) -> bool:
        """One group."""
        return self.groups == 1

    @property
    def pointwise(self) -> bool:
        """A dense 1 × 1 window at every position."""
        return self.dense and math.prod(self.window) == 1 and math.prod(self.stride) == 1


def convolutions(graph: Graph) -> list[Convolution]:
    """The forward convolutions over two spatial dimensions that are not transposed or dilated."""
    found = []
    for index, op in enumerate(graph.ops):
        if op.kind != "convolution" or op.phase != "forward" or op.attrs.get("transposed"):
            continue
        x, w, y = (graph.tensors[t] for t in (*op.inputs[:2], op.outputs[0]))
        stride = tuple(op.attrs.get("stride", (1, 1)))
        if len(x.shape) != 4 or len(stride) != 2 or math.prod(op.attrs.get("dilation", (1,))) != 1:
            continue
        found.append(
            Convolution(
                index, op.inputs[0], op.outputs[0], x.shape[1], y.shape[1], int(op.attrs.get("groups", 1)),
                w.shape[2:], stride, math.prod(y.shape[2:]), op.macs * op.repeat, (x.shape, w.shape, y.shape),
            )
        )  # fmt: skip
    return found


class Flow:
    """Producers and readers of every op, through shared memory too. Views count as what they look at."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.writers: list[tuple[int, ...]] = []  # for each op, who wrote each of its inputs (-1: nobody)
        self.readers: list[list[int]] = [[] for _ in graph.ops]
        last: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            storages = [graph.tensors[t].storage for t in op.inputs]
            self.writers.append(tuple(last.get(s, -1) for s in storages))
            if op.kind == "view":
                continue
            for writer in dict.fromkeys(self.writers[-1]):
                if writer >= 0:
                    self.readers[writer].append(index)
            for t in op.outputs:
                last[graph.tensors[t].storage] = index

    def simple(self, index: int) -> bool:
        """Whether an op maps its first input value by value: an activation, or a norm over channels."""
        op = self.graph.ops[index]
        return op.kind == "normalization" or (op.kind == "pointwise" and len(op.inputs) == 1)

    def before(self, index: int) -> tuple[int, list[int]]:
        """The op whose result op `index` takes, past activations and norms (-1: none), and those passed."""
        passed: list[int] = []
        writer = self.writers[index][0] if self.writers[index] else -1
        while writer >= 0 and self.simple(writer) and len(self.readers[writer]) == 1:
            passed.append(writer)
            writer = self.writers[writer][0]
        return (writer, passed) if writer < 0 or len(self.readers[writer]) == 1 else (-1, [])

    def after(self, index: int) -> tuple[int, list[int]]:
        """The one op that takes the result of op `index`, past activations and norms (-1: none), and those passed."""
        passed: list[int] = []
        while len(self.readers[index]) == 1:
            index = self.readers[index][0]
            if not self.simple(index):
                return index, passed
            passed.append(index)
        return -1, []


def batch_norm(op: Op) -> bool:
    """Whether an op is a batch norm by statistics it is told."""
    return op.kind == "normalization" and "batch_norm" in op.name and not op.attrs.get("training", False)


def alike(sites: list[Convolution]) -> list[list[Convolution]]:
    """Sites by equal shapes and strides, in order of appearance: one finding speaks of all of them."""
    groups: dict[object, list[Convolution]] = {}
    for site in sites:
        groups.setdefault((site.shapes, site.stride, site.groups), []).append(site)
    return list(groups.values())


def some(count: int, noun: str) -> str:
    """How many of what.

    >>> some(1, "join"), some(4, "join")
    ('1 join', '4 joins')
    """
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def times(count: int) -> str:
    """How often, in words that end a clause.

    >>> times(1), times(4)
    ('', ', 4 times')
    """
    return "" if count == 1 else f", {count} times"
