"""`Edit`: a graph with some ops dropped or replaced, for costing what the change would take.

The result has what times depend on: operations, shapes, layouts, types. When its storages live is not brought up to
date, so its memory is not to be asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from foretell.graph import Graph, Op, Storage, Tensor
from foretell.graph.op import NO_ATTRS, make_op


class Edit:
    """Collects changes to `source`; `graph` applies them."""

    def __init__(self, source: Graph) -> None:
        self.source = source
        self.tensors: list[Tensor] = list(source.tensors)
        self._storages: list[Storage] = list(source.storages)
        self._dropped: set[int] = set()
        self._put: dict[int, list[Op]] = {}

    def drop(self, *indices: int) -> None:
        """Leave these ops out."""
        self._dropped.update(indices)

    def tensor(self, shape: tuple[int, ...], like: int) -> int:
        """A new tensor of the type, and for four dimensions the layout, of tensor `like`, in memory of its own."""
        pattern = self.tensors[like]
        strides = channels_last(shape) if pattern.layout == "channels_last" and len(shape) == 4 else None
        made = Tensor(shape, pattern.dtype, len(self._storages), strides)
        self._storages.append(Storage(made.nbytes, "temporary"))
        self.tensors.append(made)
        return len(self.tensors) - 1

    def put(
        self, at: int, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], attrs: Mapping[str, Any] = NO_ATTRS
    ) -> None:
        """Run an op where op `at` ran (which stays unless dropped), in its module and as often."""
        there = self.source.ops[at]
        made = make_op(
            name, self.tensors, inputs, outputs, phase=there.phase, module=there.module, attrs=attrs,
            repeat=there.repeat,
        )  # fmt: skip
        self._put.setdefault(at, []).append(made)

    def convolution(
        self, at: int, x: int, y: int, window: tuple[int, ...], *, groups: int = 1, stride: tuple[int, ...] = (1, 1)
    ) -> None:
        """A convolution from tensor `x` to tensor `y`, padded as a centred window is, with weights of x's type."""
        inputs, outputs = self.tensors[x].shape[1], self.tensors[y].shape[1]
        weight = self.tensor((outputs, inputs // groups, *window), x)
        attrs = {
            "stride": stride, "padding": tuple(k // 2 for k in window), "dilation": (1,) * len(window),
            "transposed": False, "output_padding": (0,) * len(window), "groups": groups,
        }  # fmt: skip
        self.put(at, "aten.convolution.default", (x, weight), (y,), MappingProxyType(attrs))

    def graph(self) -> Graph:
        """The changed graph."""
        ops: list[Op] = []
        for index, op in enumerate(self.source.ops):
            if index not in self._dropped:
                ops.append(op)
            ops += self._put.get(index, ())
        return replace(self.source, ops=tuple(ops), tensors=tuple(self.tensors), storages=tuple(self._storages))


def reshaped(source: Graph, change: Callable[[int, Tensor], Tensor]) -> Graph:
    """`source` with each tensor as `change(index, tensor)` says, and the ops that touch a changed one counted anew."""
    tensors = tuple(change(index, tensor) for index, tensor in enumerate(source.tensors))
    changed = {i for i, (old, new) in enumerate(zip(source.tensors, tensors, strict=True)) if old is not new}
    ops = tuple(
        op
        if changed.isdisjoint((*op.inputs, *op.outputs))
        else make_op(
            op.name, tensors, op.inputs, op.outputs, phase=op.phase, module=op.module, attrs=op.attrs,
            repeat=op.repeat, kind=op.kind,
        )
        for op in source.ops
    )  # fmt: skip
    return replace(source, ops=ops, tensors=tensors)


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of (N, C, *spatial) with channels innermost.

    >>> channels_last((2, 8, 4, 4))
    (128, 1, 32, 8)
    """
    batch_stride = math.prod(shape[1:])
    spatial = [shape[1] * math.prod(shape[i + 1 :]) for i in range(2, len(shape))]
    return (batch_stride, 1, *spatial)
