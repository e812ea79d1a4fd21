"""`Builder`: write ops down as PyTorch would run them: views that share storage, strides, lifetimes from use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from foretell.errors import InputError
from foretell.graph import DTYPES, Op, Storage, Tensor, dtype_bytes, is_floating, make_op
from foretell.graph.op import NO_ATTRS
from foretell.workload.onnx.read import MOST_ELEMENTS
from foretell.workload.onnx.values import Shape, Value

Output = tuple[Shape, str] | tuple[Shape, str, "Shape | None"]  # shape, element type, strides

_MOST = 2**63 - 1
CHANNELS_LAST = (0, 2, 3, 1)
_HALF = {"fp16": "float16", "bf16": "bfloat16"}


class Builder:
    """Ops, tensors and storages of one step, growing in the order they run.

    With precision ``fp16`` or ``bf16`` every float32 tensor becomes one of that type; with layout ``nhwc`` inputs and
    weights of four dimensions lie channels-last, as in a capture. `module` and `repeat` are those of the ops to come.
    """

    def __init__(self, precision: str = "fp32", layout: str = "nchw") -> None:
        self.half = _HALF.get(precision)
        self.channels_last = layout == "nhwc"
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.module = ""
        self.repeat = 1
        self._nbytes: list[int] = []
        self._roles: list[str] = []
        self._born: list[int] = []
        self._found: list[Value] = []  # values given a tensor because something asked for it

    # --- tensors ------------------------------------------------------------------------------------------------

    def dtype(self, dtype: str) -> str:
        """The element type a tensor of `dtype` has at this precision."""
        if dtype not in DTYPES:
            raise InputError(f"element type {dtype} is not known", repair="use a standard element type")
        return self.half if self.half is not None and dtype == "float32" else dtype

    def _new(self, shape: Shape, dtype: str, role: str, born: int, strides: Shape | None, nbytes: int | None) -> int:
        if any(d < 0 for d in shape) or math.prod(max(d, 1) for d in shape) > MOST_ELEMENTS:
            raise InputError(f"a tensor of shape {str(shape)[:80]} is too large", repair="check batch and lengths")
        dtype = self.dtype(dtype)
        self._nbytes.append(math.ceil(math.prod(shape) * dtype_bytes(dtype)) if nbytes is None else nbytes)
        self._roles.append(role)
        self._born.append(born)
        self.tensors.append(Tensor(shape, dtype, len(self._nbytes) - 1, strides))
        return len(self.tensors) - 1

    def register(self, value: Value, role: str) -> int:
        """Make a value that exists before the step known under its role; returns its tensor's index."""
        assert value.shape is not None
        if self.channels_last and len(value.shape) == 4 and is_floating(value.dtype):
            value.strides = dense(value.shape, CHANNELS_LAST)
        value.tensor = self._new(value.shape, value.dtype, role, -1, value.strides, value.nbytes)
        return value.tensor

    def index(self, value: Value) -> int:
        """The value's tensor; made now, where nothing has asked for it yet."""
        if value.tensor is None:
            value.tensor = value.later() if value.later is not None else self.register(value, value.role)
            self._found.append(value)
        return value.tensor

    def set_role(self, value: Value, role: str) -> None:
        """Say what a value's storage turned out to be; weights and inputs stay what they are."""
        if value.tensor is not None:
            storage = self.tensors[value.tensor].storage
            if self._roles[storage] in ("temporary", "input", "output"):
                self._roles[storage] = role

    # --- ops ----------------------------------------------------------------------------------------------------

    def emit(
        self,
        name: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[Output],
        attrs: Mapping[str, Any] | None = None,
        *,
        kind: str | None = None,
    ) -> list[Value]:
        """Append an op that writes new tensors; numbers among its inputs go by value."""
        reads = tuple(self.index(v) for v in inputs if v is not None and not v.is_number and v.shape is not None)
        made = []
        for shape, dtype, *rest in outputs:
            strides = rest[0] if rest else None
            tensor = self._new(shape, dtype, "temporary", len(self.ops), strides, None)
            made.append(Value(shape, dtype, tensor, strides))
        self._append(name, reads, tuple(v.tensor for v in made if v.tensor is not None), attrs, kind)
        return made

    def view(self, name: str, x: Value, shape: Shape, strides: Shape | None) -> Value:
        """Append a view of `x`: another tensor in the same storage."""
        return self.views(name, x, [(shape, strides)])[0]

    def views(self, name: str, x: Value, parts: Sequence[tuple[Shape, Shape | None]]) -> list[Value]:
        """Append one op that gives several views of `x`."""
        source = self.index(x)
        storage = self.tensors[source].storage
        made = []
        for shape, strides in parts:
            strides = None if strides == row_major(shape) else strides
            made.append(Value(shape, x.dtype, len(self.tensors), strides, fixed=x.fixed, role=x.role))
            self.tensors.append(Tensor(shape, self.dtype(x.dtype), storage, strides))
        self._append(name, (source,), tuple(v.tensor for v in made if v.tensor is not None), None, None)
        return made

    def into(self, name: str, target: Value, rest: Sequence[Value | None]) -> list[Value]:
        """Append an op that writes into its first operand: a new tensor in the same storage."""
        assert target.shape is not None
        source = self.index(target)
        reads = (source, *(self.index(v) for v in rest if v is not None and not v.is_number and v.shape is not None))
        made = Value(target.shape, target.dtype, len(self.tensors), target.strides)
        self.tensors.append(self.tensors[source])
        self._append(name, reads, (len(self.tensors) - 1,), None, None)
        return [made]

    def uncounted(self, name: str, inputs: Sequence[Value | None], outputs: Sequence[Output]) -> list[Value]:
        """Append an op that no rule covers."""
        return self.emit(name, inputs, outputs, kind="other")

    def _append(
        self, name: str, reads: tuple[int, ...], writes: tuple[int, ...], attrs: Mapping[str, Any] | None,
        kind: str | None,
    ) -> None:
        op = make_op(
            name,
            self.tensors,
            reads,
            writes,
            module=self.module,
            attrs=MappingProxyType(dict(attrs)) if attrs else NO_ATTRS,
            repeat=self.repeat,
            kind=kind,
        )
        if max(op.macs, op.norm_macs, op.bytes_read, op.bytes_written, *(op.gemm or (0,))) * op.repeat > _MOST:
            raise InputError(f"{name} counts beyond 64 bits", repair="check batch, lengths and widths")
        self.ops.append(op)

    # --- movement, as PyTorch does it ---------------------------------------------------------------------------

    def contiguous(self, x: Value) -> Value:
        """`x` in row-major order: itself, or a copy."""
        assert x.shape is not None
        return x if x.strides is None else self.emit("aten.clone.default", [x], [(x.shape, x.dtype)])[0]

    def reshape(self, x: Value, shape: Shape, *, of_result: bool = False) -> Value:
        """A view where strides allow one, else a copy and a view of that. `of_result`: x is an op's fresh output."""
        assert x.shape is not None
        strides = view_strides(x.shape, x.strides, shape)
        if strides is not None:
            return self.view("aten._unsafe_view.default" if of_result else "aten.view.default", x, shape, strides)
        return self.view("aten._unsafe_view.default", self.contiguous(x), shape, None)

    def permute(self, x: Value, order: Sequence[int], name: str = "aten.permute.default") -> Value:
        """A view of `x` with its dimensions in another order."""
        assert x.shape is not None
        strides = x.strides or row_major(x.shape)
        return self.view(name, x, tuple(x.shape[d] for d in order), tuple(strides[d] for d in order))

    def transpose(self, x: Value) -> Value:
        """The last two dimensions swapped."""
        assert x.shape is not None
        rank = len(x.shape)
        name = "aten.t.default" if rank == 2 else "aten.transpose.int"
        return self.permute(x, (*range(rank - 2), rank - 1, rank - 2), name)

    def expand(self, x: Value, shape: Shape) -> Value:
        """A view repeated along dimensions of size 1, which takes no memory."""
        assert x.shape is not None
        strides = x.strides or row_major(x.shape)
        lead = len(shape) - len(x.shape)
        new = [0] * lead
        for have, want, stride in zip(x.shape, shape[lead:], strides, strict=True):
            new.append(stride if have == want else 0)
        return self.view("aten.expand.default", x, shape, tuple(new))

    def like(self, shape: Shape, inputs: Sequence[Value | None]) -> Shape | None:
        """Strides of an elementwise result: the order of dimensions of the first operand of the result's shape."""
        for value in inputs:
            if value is not None and value.shape == shape and not value.is_number:
                if value.strides is None:
                    return None
                strides = value.strides
                order = sorted(range(len(shape)), key=lambda d: -strides[d])
                return dense(shape, order)
        return None

    # --- the result ---------------------------------------------------------------------------------------------

    def storages(self, kept: set[int]) -> tuple[Storage, ...]:
        """The storages; temporaries die with the last op that touches them, all but those in `kept`."""
        last = list(self._born)
        for index, op in enumerate(self.ops):
            for tensor in (*op.inputs, *op.outputs):
                last[self.tensors[tensor].storage] = index
        return tuple(
            Storage(nbytes, role, born, None if born < 0 or index in kept else last[index])
            for index, (nbytes, role, born) in enumerate(zip(self._nbytes, self._roles, self._born, strict=True))
        )

    def role_of(self, value: Value) -> str | None:
        """The role of a value's storage; None where it has no tensor."""
        return None if value.tensor is None else self._roles[self.tensors[value.tensor].storage]

    def storage_of(self, value: Value) -> int | None:
        """The value's storage; None where it has no tensor."""
        return None if value.tensor is None else self.tensors[value.tensor].storage

    # --- trying one of two --------------------------------------------------------------------------------------

    @property
    def _records(self) -> tuple[list[Any], ...]:
        return self.ops, self.tensors, self._nbytes, self._roles, self._born, self._found

    def mark(self) -> tuple[int, ...]:
        """Where the records end now."""
        return tuple(map(len, self._records))

    def cut(self, mark: tuple[int, ...]) -> tuple[list[Any], ...]:
        """Take out and return all that was recorded since `mark`."""
        parts = tuple(records[start:] for records, start in zip(self._records, mark, strict=True))
        for records, start in zip(self._records, mark, strict=True):
            del records[start:]
        tensors = [value.tensor for value in parts[-1]]
        for value in parts[-1]:
            value.tensor = None
        return (*parts, tensors)

    def paste(self, parts: tuple[list[Any], ...]) -> None:
        """Put back what `cut` took out, at the same place."""
        for records, part in zip(self._records, parts, strict=False):
            records.extend(part)
        for value, tensor in zip(parts[-2], parts[-1], strict=True):
            value.tensor = tensor


# --- strides ----------------------------------------------------------------------------------------------------


def row_major(shape: Shape) -> Shape:
    """Strides of a contiguous tensor, as PyTorch counts them.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense(shape: Shape, order: Sequence[int]) -> Shape | None:
    """Strides of a tensor without gaps whose dimensions lie in this order, outermost first; None where contiguous."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return None if tuple(strides) == row_major(shape) else tuple(strides)


def is_channels_last(value: Value) -> bool:
    """Whether a value of four dimensions lies channels-last in memory."""
    return (
        value.shape is not None
        and value.strides is not None
        and len(value.shape) == 4
        and value.strides == dense(value.shape, CHANNELS_LAST)
    )


def view_strides(old: Shape, strides: Shape | None, new: Shape) -> Shape | None:
    """Strides that show a tensor in another shape without moving it; None where that takes a copy.

    Dimensions of `old` that lie one after another in memory form a chunk; each chunk must be a run of `new`'s.

    >>> view_strides((2, 3, 4), None, (6, 4))
    (4, 1)
    >>> view_strides((3, 2), (1, 3), (6,)) is None
    True
    """
    if strides is None or math.prod(old) == 0:
        return row_major(new)
    result = [0] * len(new)
    at = len(new) - 1
    base, chunk = (strides[-1] if old else 1), 1
    for dim in range(len(old) - 1, -1, -1):
        chunk *= old[dim]
        if dim == 0 or (old[dim - 1] != 1 and strides[dim - 1] != chunk * base):
            filled = 1
            while at >= 0 and (filled < chunk or new[at] == 1):
                result[at] = filled * base
                filled *= new[at]
                at -= 1
            if filled != chunk:
                return None
            if dim > 0:
                base, chunk = strides[dim - 1], 1
    return tuple(result) if at < 0 else None
