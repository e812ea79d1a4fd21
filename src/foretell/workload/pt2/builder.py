"""Writing down a graph one operation at a time: tensors, the storages under them, and how long those live."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from foretell.graph import Op, Storage, Tensor, dtype_bytes, make_op
from foretell.graph.op import NO_ATTRS

__all__ = ["Builder", "Meta", "dense", "row_major", "view_strides"]

_MOST_OPS = 200_000
_MOST = 2**63 - 1

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meta:
    """What an archive says of a tensor: `strides` in elements, None where it is contiguous."""

    shape: Shape
    dtype: str
    strides: Shape | None = None
    requires_grad: bool = False


def row_major(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense(shape: Shape, strides: Shape | None) -> bool:
    """Whether elements lie row by row: dimensions of size 1 do not matter."""
    if strides is None or math.prod(shape) == 0:
        return True
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def view_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides under which the same elements have the shape `new`; None where they would have to be copied.

    Neighbouring dimensions can be merged or cut where the outer one steps over the inner ones whole.
    """
    if math.prod(shape) == 0:
        return strides if shape == new else row_major(new)
    if not shape:
        return (1,) * len(new)
    result = [0] * len(new)
    at = len(new) - 1
    base, block, done = strides[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        block *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != block * base):
            while at >= 0 and (done < block or new[at] == 1):
                result[at] = done * base
                done *= new[at]
                at -= 1
            if done != block:
                return None
            if dim > 0:
                base, block, done = strides[dim - 1], 1, 1
    if at >= 0:
        return None
    _keep_strides(shape, strides, new, result)
    return tuple(result)


def _keep_strides(shape: Shape, strides: Shape, new: Shape, result: list[int]) -> None:
    """Where a dimension stays as it was its stride does too: that of a size of 1 does not matter, and is kept.

    Both shapes are walked from the front, dimensions merged and cut until they agree.
    """
    dim, rest = 0, 0  # of a dimension that was cut, what is left of it
    for index, size in enumerate(new):
        if dim >= len(shape):
            return
        here = rest or shape[dim]
        if size == here:
            if not rest:
                result[index] = strides[dim]
            dim, rest = dim + 1, 0
            continue
        while here % size:
            dim += 1
            if dim >= len(shape):
                return
            here *= shape[dim]
        rest = here // size if here != size else 0
        dim += not rest


class Builder:
    """Ops, tensors and storages as they are added.

    A storage dies at its last use. Where a module was called on it that did not make it, that call's caller still
    holds it: it dies when the outermost such call ends. `stacks` are the modules each node runs in, outermost first.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.module = ""
        self.trained: set[int] = set()  # parameters that require a gradient, and views of them
        self._nbytes: list[int] = []
        self._roles: list[str | None] = []
        self._born: list[tuple[int, int]] = []  # op, node
        self._uses: list[list[tuple[int, int]]] = []
        self._node_of_op: list[int] = []
        self._stacks: list[tuple[str, ...]] = [()]

    # --- tensors ------------------------------------------------------------------------------------------------

    def given(self, meta: Meta, role: str) -> int:
        """A tensor that exists before the step."""
        index = self.new(meta)
        storage = self.tensors[index].storage
        self._roles[storage] = role
        self._born[storage] = (-1, -1)
        return index

    def new(self, meta: Meta) -> int:
        """A tensor in a storage of its own, allocated by the op that is added next."""
        extent = 0
        if math.prod(meta.shape):
            strides = row_major(meta.shape) if meta.strides is None else meta.strides
            extent = 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, strides, strict=True))
        self._nbytes.append(math.ceil(extent * dtype_bytes(meta.dtype)))
        self._roles.append(None)
        self._born.append((len(self.ops), len(self._stacks) - 1))
        self._uses.append([])
        return self._add(meta.shape, meta.dtype, len(self._nbytes) - 1, meta.strides)

    def _add(self, shape: Shape, dtype: str, storage: int, strides: Shape | None) -> int:
        if math.prod(shape) > _MOST // 16 or self._nbytes[storage] > _MOST:
            raise ValueError(f"a tensor of shape {str(shape)[:80]} is too large")
        if strides is not None and strides == row_major(shape):
            strides = None
        self.tensors.append(Tensor(shape, dtype, storage, strides))
        return len(self.tensors) - 1

    def alias(self, of: int, shape: Shape, strides: Shape | None, dtype: str | None = None) -> int:
        """Another tensor in the storage of `of`."""
        tensor = self.tensors[of]
        index = self._add(shape, dtype or tensor.dtype, tensor.storage, strides)
        if of in self.trained:
            self.trained.add(index)
        return index

    def shape(self, tensor: int) -> Shape:
        """Shape of a tensor."""
        return self.tensors[tensor].shape

    def strides(self, tensor: int) -> Shape:
        """Strides of a tensor, in elements."""
        strides = self.tensors[tensor].strides
        return row_major(self.tensors[tensor].shape) if strides is None else strides

    def contiguous(self, tensor: int) -> bool:
        """Whether a tensor's elements lie row by row."""
        return dense(self.tensors[tensor].shape, self.tensors[tensor].strides)

    def meta(self, tensor: int, shape: Shape | None = None, dtype: str | None = None) -> Meta:
        """A contiguous result like a tensor."""
        return Meta(self.shape(tensor) if shape is None else shape, dtype or self.tensors[tensor].dtype)

    def like(self, tensor: int) -> Meta:
        """A result of the same shape, type and order of dimensions."""
        one = self.tensors[tensor]
        return Meta(one.shape, one.dtype, permuted_like(one.shape, self.strides(tensor)))

    # --- operations ---------------------------------------------------------------------------------------------

    def enter(self, stack: tuple[str, ...], module: str) -> None:
        """The node that the next ops belong to."""
        self._stacks.append(stack)
        self.module = module

    def run(self, name: str, inputs: Sequence[int | None], *results: Meta, **attrs: Any) -> list[int]:
        """An op with new results; returns them."""
        outputs = [self.new(meta) for meta in results]
        self.add(name, inputs, outputs, attrs)
        return outputs

    def one(self, name: str, inputs: Sequence[int | None], result: Meta, **attrs: Any) -> int:
        """An op with one new result."""
        return self.run(name, inputs, result, **attrs)[0]

    def view(self, name: str, of: int, shape: Shape, strides: Shape | None, dtype: str | None = None) -> int:
        """A view of a tensor."""
        out = self.alias(of, shape, strides, dtype)
        self.add(name, [of], [out])
        return out

    def write(self, name: str, inputs: Sequence[int | None], target: int | None = None, **attrs: Any) -> int:
        """An op that writes into `target` (its first input unless given)."""
        into = inputs[0] if target is None else target
        assert into is not None
        out = self.alias(into, self.shape(into), self.tensors[into].strides)
        self.add(name, inputs, [out], attrs)
        return out

    def add(
        self, name: str, inputs: Sequence[int | None], outputs: Sequence[int], attrs: Mapping[str, Any] = NO_ATTRS,
        kind: str | None = None,
    ) -> None:
        """An op whose results exist already."""
        at = len(self.ops)
        if at >= _MOST_OPS:
            raise ValueError(f"the program runs more than {_MOST_OPS:,} operations")
        present = tuple(t for t in inputs if t is not None)
        op = make_op(
            name,
            self.tensors,
            present,
            tuple(outputs),
            module=self.module,
            attrs=MappingProxyType(dict(attrs)) if attrs else NO_ATTRS,
            kind=kind,
        )
        if max(op.macs, op.bytes_read, op.bytes_written) > _MOST:
            raise ValueError("it does more than 64-bit numbers count")
        self.ops.append(op)
        node = len(self._stacks) - 1
        self._node_of_op.append(node)
        for tensor in (*present, *outputs):
            self._uses[self.tensors[tensor].storage].append((at, node))

    def hold(self, tensor: int) -> None:
        """Say that a tensor lives until now."""
        self._uses[self.tensors[tensor].storage].append((len(self.ops) - 1, len(self._stacks) - 1))

    # --- compositions that many ops share -----------------------------------------------------------------------

    def reshape(self, x: int, shape: Shape, view: str = "aten.view.default") -> int:
        """`x` under another shape: a view where its elements allow it, else a copy."""
        strides = view_strides(self.shape(x), self.strides(x), shape)
        if strides is not None:
            return self.view(view, x, shape, strides)
        return self.unsafe_view(self.one("aten.clone.default", [x], self.meta(x)), shape)

    def unsafe_view(self, x: int, shape: Shape) -> int:
        """A result nobody else sees, under another shape."""
        return self.view("aten._unsafe_view.default", x, shape, None)

    def permute(self, x: int, dims: Sequence[int], name: str = "aten.permute.default") -> int:
        """Dimensions in another order."""
        shape, strides = self.shape(x), self.strides(x)
        return self.view(name, x, tuple(shape[d] for d in dims), tuple(strides[d] for d in dims))

    def transpose(self, x: int, first: int, second: int, name: str = "aten.transpose.int") -> int:
        """Two dimensions exchanged."""
        order = list(range(len(self.shape(x))))
        order[first], order[second] = order[second], order[first]
        return self.permute(x, order, name)

    def t(self, x: int) -> int:
        """A matrix transposed."""
        return self.transpose(x, 0, 1, "aten.t.default") if len(self.shape(x)) == 2 else x

    def expand(self, x: int, shape: Shape) -> int:
        """Dimensions of size 1 repeated without a copy."""
        old, strides = self.shape(x), self.strides(x)
        lead = len(shape) - len(old)
        if lead < 0:
            raise ValueError(f"{old} cannot be expanded to {shape}")
        new = [0] * lead
        for size, stride, wanted in zip(old, strides, shape[lead:], strict=True):
            if size not in (1, wanted):
                raise ValueError(f"{old} cannot be expanded to {shape}")
            new.append(stride if size == wanted else 0)
        return self.view("aten.expand.default", x, shape, tuple(new))

    def unsqueeze(self, x: int, dim: int) -> int:
        """A dimension of size 1 put in."""
        shape, strides = list(self.shape(x)), list(self.strides(x))
        dim += len(shape) + 1 if dim < 0 else 0
        strides.insert(dim, shape[dim] * strides[dim] if dim < len(shape) else 1)
        shape.insert(dim, 1)
        return self.view("aten.unsqueeze.default", x, tuple(shape), tuple(strides))

    def squeeze(self, x: int, dim: int, name: str = "aten.squeeze.dim") -> int:
        """A dimension taken out, where its size is 1."""
        shape, strides = list(self.shape(x)), list(self.strides(x))
        if shape[dim] == 1:
            del shape[dim], strides[dim]
        return self.view(name, x, tuple(shape), tuple(strides))

    def of_role(self, role: str) -> list[int]:
        """The first tensor of each storage of a role."""
        found: dict[int, int] = {}
        for index, tensor in enumerate(self.tensors):
            if self._roles[tensor.storage] == role:
                found.setdefault(tensor.storage, index)
        return list(found.values())

    # --- result -------------------------------------------------------------------------------------------------

    def mark(self, tensor: int, role: str) -> None:
        """Give the storage of a tensor a role, unless it has one."""
        storage = self.tensors[tensor].storage
        if self._roles[storage] is None:
            self._roles[storage] = role

    def storages(self, kept: Sequence[int]) -> tuple[Storage, ...]:
        """The storages; those of the tensors `kept` outlive the step, as do those there before it."""
        alive = {self.tensors[t].storage for t in kept}
        ends = self._ends()
        result = []
        for index, (nbytes, role, (born, made)) in enumerate(zip(self._nbytes, self._roles, self._born, strict=True)):
            dies = None
            if born >= 0 and index not in alive:
                dies = max(self._end(ends, made, op, node) for op, node in self._uses[index])
            result.append(Storage(nbytes, role or "temporary", born, dies))
        return tuple(result)

    def _ends(self) -> list[list[int]]:
        """For each node and depth of its stack, the last op of that module's call."""
        last = [-1] * len(self._stacks)
        for op, node in enumerate(self._node_of_op):
            last[node] = op
        for node in range(1, len(last)):
            last[node] = max(last[node], last[node - 1])
        ends: list[list[int]] = [[] for _ in self._stacks]
        following: tuple[str, ...] = ()
        for node in range(len(ends) - 1, -1, -1):
            stack = self._stacks[node]
            same = 0
            while same < min(len(stack), len(following)) and stack[same] == following[same]:
                same += 1
            ends[node] = [ends[node + 1][d] if d < same else last[node] for d in range(len(stack))]
            following = stack
        return ends

    def _end(self, ends: list[list[int]], made: int, op: int, node: int) -> int:
        maker, user = self._stacks[made], self._stacks[node]
        for depth, module in enumerate(user):
            if depth >= len(maker) or maker[depth] != module:
                return ends[node][depth]
        return op


def permuted_like(shape: Shape, strides: Shape) -> Shape | None:
    """Strides of a new result that keeps the order of an operand's dimensions; None where that is row by row."""
    if dense(shape, strides) or 0 in strides:
        return None
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    new, step = [0] * len(shape), 1
    for dim in reversed(order):
        new[dim] = step
        step *= max(shape[dim], 1)
    return tuple(new)
