"""NAS-Bench-201: cells of six edges, five cells in each of three stages, on 32 × 32 images.

X. Dong and Y. Yang, NAS-Bench-201: Extending the Scope of Reproducible Neural Architecture Search, ICLR 2020, and its
code (the ``infer.tiny`` network). A stem of 16 channels; stages of 16, 32, 64, with a residual block that halves the
size between them. A node adds its edges with Python's ``sum``, which begins at 0: one addition *per edge*. ``none``
multiplies by zero and still adds.
"""

from __future__ import annotations

from functools import cache

from foretell.accuracy.spaces.rows import (
    Map,
    Rows,
    average_pool,
    batch_norm,
    classifier,
    convolution,
    global_pool,
    pointwise,
)
from foretell.errors import InputError, unknown

OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
CHANNELS = (16, 32, 64)
CELLS = 5  # in each stage
SIZE = 32


def parse(arch: str) -> tuple[tuple[str, ...], ...]:
    """The operations into each of the three nodes, from ``|op~0|+|op~0|op~1|+|op~0|op~1|op~2|``.

    >>> parse("|none~0|+|none~0|none~1|+|none~0|none~1|skip_connect~2|")[2]
    ('none', 'none', 'skip_connect')
    """
    nodes = []
    for position, node in enumerate(arch.split("+")):
        edges = [edge.partition("~") for edge in node.strip("|").split("|")]
        if [source for _, _, source in edges] != [str(i) for i in range(position + 1)]:
            raise InputError(f"node {position + 1} of {arch!r} does not take its inputs in order", "NAS-Bench-201")
        for operation, _, _ in edges:
            if operation not in OPERATIONS:
                raise unknown("NAS-Bench-201 operation", operation, OPERATIONS)
        nodes.append(tuple(operation for operation, _, _ in edges))
    if len(nodes) != 3:
        raise InputError(f"{arch!r} has {len(nodes)} nodes, not 3", "NAS-Bench-201")
    return tuple(nodes)


@cache
def _relu_conv_norm(x: Map, channels: int, kernel: int, stride: int = 1) -> tuple[Map, Rows]:
    y, rows = convolution(x, channels, kernel, stride)
    return y, (*pointwise("relu.default", x), *rows, *batch_norm(y))


@cache
def _edge(operation: str, x: Map) -> Rows:
    if operation == "none":
        return pointwise("mul.Tensor", x)
    if operation == "skip_connect":
        return ()
    if operation == "avg_pool_3x3":
        return average_pool(x, 3)[1]
    return _relu_conv_norm(x, x.channels, 3 if operation == "nor_conv_3x3" else 1)[1]


@cache
def _node(operations: tuple[str, ...], x: Map) -> Rows:
    rows: list[Rows] = []
    for position, operation in enumerate(operations):
        total = () if position == 0 else (x,)
        rows += [_edge(operation, x), pointwise("add.Tensor", x, *total)]
    return sum(rows, ())


@cache
def _residual(x: Map, channels: int) -> tuple[Map, Rows]:
    middle, first = _relu_conv_norm(x, channels, 3, 2)
    y, second = _relu_conv_norm(middle, channels, 3)
    pooled, pool = average_pool(x, 2, 2)
    return y, (*first, *second, *pool, *convolution(pooled, channels)[1], *pointwise("add.Tensor", y, y))


def rows(arch: str, batch: int, classes: int = 10) -> Rows:
    """The ops of one forward pass, in order."""
    nodes = parse(arch)
    x, stem = convolution(Map(batch, 3, SIZE), CHANNELS[0], 3)
    parts = [stem, batch_norm(x)]
    for channels in CHANNELS:
        if channels != x.channels:
            x, reduction = _residual(x, channels)
            parts.append(reduction)
        parts += [_node(node, x) for node in nodes] * CELLS
    parts += [batch_norm(x), pointwise("relu_.default", x), global_pool(x), classifier(batch, x.channels, classes)]
    return tuple(row for part in parts for row in part)
