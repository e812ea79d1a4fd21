"""Graphs at other batch sizes from two captures: shapes are affine in the batch, so two points give the line.

A capture runs the module; a graph at a third batch then only takes arithmetic. Equal structure is required, not
assumed: the two captures must hold the same operations on the same tensors and storages, with sizes that differ only
along the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from foretell.errors import InputError
from foretell.graph.graph import Graph
from foretell.graph.op import NO_ATTRS, Op, Storage, Tensor, make_op

__all__ = ["AffineFamily", "at_batch"]

def at_batch(graph_a: Graph, graph_b: Graph, batch: int) -> Graph:
    """The graph at `batch` of the workload captured at two other batches.

    Dimensions, strides, storage sizes and whole-number attributes are read off the line through both captures; the
    work of each op is counted anew by the rules. Raises InputError where the captures differ in structure, where a
    tensor grows with the batch along two dimensions, and where a size would not be a whole number.
    """
    return AffineFamily(graph_a, graph_b)(batch)


class AffineFamily:
    """All batches of a workload, from two captures: ``family(batch)`` is the graph there. Raises as `at_batch`.

    What is checked once, when the family is made, is not checked again for each batch.
    """

    def __init__(self, graph_a: Graph, graph_b: Graph) -> None:
        if graph_a.batch == graph_b.batch:
            raise InputError(
                f"both captures have batch {graph_a.batch}", "affine graphs", "capture at two different batch sizes"
            )
        self.graph_a, self.graph_b = graph_a, graph_b
        for name in ("mode", "precision", "parameters", "trainable_parameters", "inputs", "outputs"):
            _same(name, getattr(graph_a, name), getattr(graph_b, name))
        _same("items", tuple(graph_a.items), tuple(graph_b.items))
        for name in ("ops", "tensors", "storages"):
            _same(f"number of {name}", len(getattr(graph_a, name)), len(getattr(graph_b, name)))
        for index, (a, b) in enumerate(zip(graph_a.storages, graph_b.storages, strict=True)):
            _same(f"life of storage {index}", (a.role, a.born, a.dies), (b.role, b.born, b.dies))
        self._moving_tensors = self._compare_tensors()
        self._moving_ops = self._compare_ops()

    def _compare_tensors(self) -> tuple[int, ...]:
        moving = []
        for index, (a, b) in enumerate(zip(self.graph_a.tensors, self.graph_b.tensors, strict=True)):
            if a == b:
                continue
            where = f"tensor {index}"
            for what, left, right in (
                ("type", a.dtype, b.dtype),
                ("storage", a.storage, b.storage),
                ("rank", len(a.shape), len(b.shape)),
            ):
                _same(f"{where}'s {what}", left, right)
            _same(f"{where}'s layout", a.strides is None, b.strides is None)
            if sum(x != y for x, y in zip(a.shape, b.shape, strict=True)) > 1:
                raise _refused(f"{where} grows with the batch along two dimensions: {a.shape} and {b.shape}")
            moving.append(index)
        return tuple(moving)

    def _compare_ops(self) -> tuple[int, ...]:
        moving = []
        changed = set(self._moving_tensors)
        for index, (a, b) in enumerate(zip(self.graph_a.ops, self.graph_b.ops, strict=True)):
            for name in ("name", "kind", "phase", "module", "inputs", "outputs", "counted"):
                _same(f"op {index}'s {name}", getattr(a, name), getattr(b, name))
            _same(f"attributes of op {index}", tuple(a.attrs), tuple(b.attrs))
            if a.repeat != b.repeat or a.attrs != b.attrs or not changed.isdisjoint((*a.inputs, *a.outputs)):
                again = _recount(a, self.graph_a.tensors, a.attrs, a.repeat)
                if again != a:
                    raise _refused(f"op {index} ({a.name}) was not counted by this version's rules")
                moving.append(index)
        return tuple(moving)

    def __call__(self, batch: int) -> Graph:
        """The graph at `batch` (≥ 1)."""
        if batch < 1:
            raise InputError(f"{batch} is no batch size", "affine graphs", "give a whole number ≥ 1")
        a, b = self.graph_a, self.graph_b
        line = _Line(a.batch, b.batch, batch)
        tensors = list(a.tensors)
        for index in self._moving_tensors:
            tensors[index] = _tensor(line, f"tensor {index}", a.tensors[index], b.tensors[index])
        known = tuple(tensors)
        ops = list(a.ops)
        for index in self._moving_ops:
            left, right = a.ops[index], b.ops[index]
            where = f"op {index} ({left.name})"
            attrs = {key: line.value(f"{where}: {key}", left.attrs[key], right.attrs[key]) for key in left.attrs}
            repeat = line.number(f"{where}: repeat", left.repeat, right.repeat)
            ops[index] = _recount(left, known, MappingProxyType(attrs) if attrs else NO_ATTRS, repeat)
        storages = tuple(
            left if left == right else _storage(line, f"storage {index}", left, right)
            for index, (left, right) in enumerate(zip(a.storages, b.storages, strict=True))
        )
        return replace(
            a,
            ops=tuple(ops),
            tensors=known,
            storages=storages,
            items=MappingProxyType({k: line.number(f"items: {k}", v, b.items[k]) for k, v in a.items.items()}),
        )


class _Line:
    """The line through two points, evaluated at a third; whole numbers only."""

    def __init__(self, a: int, b: int, batch: int) -> None:
        self.weight = Fraction(batch - a, b - a)
        self.batch = batch

    def number(self, where: str, left: int, right: int) -> int:
        if left == right:
            return left
        value = left + (right - left) * self.weight
        if value.denominator != 1 or value < 0:
            raise _refused(f"{where} is {left} and {right}, which makes {float(value):g} at batch {self.batch}")
        return int(value)

    def value(self, where: str, left: Any, right: Any) -> Any:
        """An attribute: whole numbers and tuples of them move; anything else must be equal."""
        if left == right:
            return left
        if _whole(left) and _whole(right):
            return self.number(where, left, right)
        if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
            return tuple(self.value(where, x, y) for x, y in zip(left, right, strict=True))
        raise _refused(f"{where} is {left!r} in one capture and {right!r} in the other")


def _refused(what: str) -> InputError:
    return InputError(what, "affine graphs", "capture the workload at the batch you need")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensor(line: _Line, where: str, left: Tensor, right: Tensor) -> Tensor:
    shape = tuple(line.number(where, x, y) for x, y in zip(left.shape, right.shape, strict=True))
    strides = None
    if left.strides is not None and right.strides is not None:
        strides = tuple(
            line.number(f"{where}: stride", x, y) for x, y in zip(left.strides, right.strides, strict=True)
        )
    return Tensor(shape, left.dtype, left.storage, strides)


def _storage(line: _Line, where: str, left: Storage, right: Storage) -> Storage:
    return replace(left, nbytes=line.number(where, left.nbytes, right.nbytes))


def _recount(op: Op, tensors: tuple[Tensor, ...], attrs: Mapping[str, Any], repeat: int) -> Op:
    return make_op(
        op.name,
        tensors,
        op.inputs,
        op.outputs,
        phase=op.phase,
        module=op.module,
        attrs=attrs,
        repeat=repeat,
        kind=op.kind,
    )


def _same(what: str, left: Any, right: Any) -> None:
    if left != right:
        raise _refused(f"{what} differs between the captures: {left!r} and {right!r}")
