"""`Recorder`: write ops down as a framework would run them, and differentiate what was written.

A value is the index of a `Tensor`. Each method below is one framework operation: it appends the forward op and, in
training, a `Node` that knows how to append the backward ones. `Recorder.backward` walks the nodes in reverse and sums
gradients where a value was used more than once. Lifetimes come from use: a storage dies with the last op that
touches it, and what forward leaves for backward is an activation.

**Equal layers are written once.** An op's `repeat` counts all of them, and what each layer keeps (weights, caches,
activations, gradients, optimizer state) is one `Storage` of the group's total size; a temporary is one layer's. The
group's gradients are allocated while its activations are freed, layer by layer, so their storages are born with the
last backward op of the group: both ends of that exchange, where a peak can lie, are then right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from foretell.graph import Op, Storage, Tensor, dtype_bytes, make_op
from foretell.graph.op import NO_ATTRS
from foretell.workload.lora import SCALES_PER_SCALE, VALUES_PER_SCALE, packed_bytes, scale_bytes

Shape = tuple[int, ...]
Gradients = Sequence["int | None"]


@dataclass(frozen=True, slots=True)
class Node:
    """A recorded operation that can be differentiated: gradients of `outputs` in, gradients of `inputs` out."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    backward: Callable[[Gradients], Gradients]


@dataclass(slots=True)
class _Block:
    """A `Storage` being filled in."""

    nbytes: int
    layers: int
    role: str | None
    born: int
    born_phase: str
    last_use: int = -1
    last_phase: str = "forward"
    pinned: bool = False  # alive until the step ends


def promote(a: str, b: str) -> str:
    """The dtype of an elementwise result of two floating dtypes."""
    return a if a == b or dtype_bytes(a) > dtype_bytes(b) else b


def _multiplied(stored: str) -> bool:
    """Whether products take activations, too, in the format in which weights are stored; the others are widened."""
    return stored.startswith("float8") or stored == "int8"


class Recorder:
    """Ops, tensors and storages of one step, growing in the order they run.

    `compute_dtype` is what matrix products run in, `param_dtype` what weights are stored in; they differ under
    autocast. `rounds` is how often forward and backward run before the optimizer (gradient accumulation).
    """

    def __init__(self, compute_dtype: str, param_dtype: str, training: bool, rounds: int = 1) -> None:
        self.compute_dtype = compute_dtype
        self.param_dtype = param_dtype
        self.training = training
        self.rounds = rounds
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.phase = "forward"
        self.module = ""
        self.layers = 1
        self.tape: list[Node] | None = [] if training else None
        self.gradients: dict[int, int] = {}  # parameter → its gradient
        self.parameter_layers: dict[int, int] = {}  # parameter → layers that have one like it
        self.packed: dict[int, Shape] = {}  # parameter of 4-bit weights → the matrix it stands for
        self._blocks: list[_Block] = []
        self._live: set[int] = set()  # values that need a gradient
        self._casts: dict[tuple[int, str], int] = {}  # autocast's cache of weights in half precision
        self._carried: dict[int, int] = {}  # storage of a group's input → of its output, which later layers read

    # --- values -------------------------------------------------------------------------------------------------

    def shape(self, value: int) -> Shape:
        return self.tensors[value].shape

    @property
    def autocast(self) -> bool:
        """Whether weights are stored wider than they multiply."""
        return self.compute_dtype != self.param_dtype

    def dtype(self, value: int) -> str:
        return self.tensors[value].dtype

    def new(self, shape: Shape, dtype: str, role: str | None = None, layers: int | None = None) -> int:
        """A tensor in a block of its own. With a `role` it is there before the step, in every layer of the group."""
        born = -1 if role else len(self.ops)
        nbytes = math.ceil(math.prod(shape) * dtype_bytes(dtype))
        self._blocks.append(_Block(nbytes, self.layers if layers is None else layers, role, born, self.phase))
        return self._tensor(shape, dtype, len(self._blocks) - 1)

    def _tensor(self, shape: Shape, dtype: str, block: int, strides: Shape | None = None) -> int:
        self.tensors.append(Tensor(shape, dtype, block, strides))
        return len(self.tensors) - 1

    def parameter(self, shape: Shape, dtype: str | None = None, trained: bool = True) -> int:
        """A weight of every layer of the group; one that is not `trained` gets no gradient."""
        value = self.new(shape, dtype or self.param_dtype, "parameter")
        self.parameter_layers[value] = self.layers
        if self.training and trained:
            self._live.add(value)
        return value

    def packed_parameter(self, shape: Shape) -> int:
        """A matrix (out, in) in 4 bits with its scales, as one run of bytes; it is never trained."""
        value = self.parameter((packed_bytes(math.prod(shape)),), "uint8", trained=False)
        self.packed[value] = shape
        return value

    def alias(self, value: int, shape: Shape) -> int:
        """The same memory under another shape: no op, gradients pass through."""
        t = self.tensors[value]
        result = self._tensor(shape, t.dtype, t.storage)
        self.node((value,), (result,), lambda g: (self.reshaped(g[0], t.shape),))
        return result

    def reshaped(self, value: int | None, shape: Shape) -> int | None:
        """`alias` outside differentiation; None stays None."""
        if value is None or self.shape(value) == shape:
            return value
        t = self.tensors[value]
        return self._tensor(shape, t.dtype, t.storage)

    def narrowed(self, value: int, shape: Shape) -> int:
        """A part of a value, as an operand only: no gradient flows through."""
        t = self.tensors[value]
        return self._tensor(shape, t.dtype, t.storage)

    def spread(self, value: int, shape: Shape, dim: int) -> int:
        """The value read again and again along dimension `dim` of `shape`: the gradient of a sum."""
        t = self.tensors[value]
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        outer = tuple(stride // shape[dim] for stride in strides[:dim])
        return self._tensor(shape, t.dtype, t.storage, (*outer, 0, *strides[dim + 1:]))

    def whole(self, value: int, layers: int | None = None) -> int:
        """A parameter of all layers of its group at once (or what has `layers` like it)."""
        return self.narrowed(value, (self.parameter_layers[value] if layers is None else layers, *self.shape(value)))

    def written(self, value: int) -> int:
        """The value after a write in place."""
        return self.narrowed(value, self.shape(value))

    def split(self, value: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """Views of the last dimension cut into `sizes`; backward concatenates their gradients."""
        parts = self._views(value, sizes)
        shape = self.shape(value)
        self.node((value,), parts, lambda g: (self._joined(g, parts, shape),))
        return parts

    def _views(self, value: int, sizes: Sequence[int]) -> tuple[int, ...]:
        t = self.tensors[value]
        strides = [t.shape[-1]]
        for size in reversed(t.shape[1:-1]):
            strides.insert(0, strides[0] * size)
        return tuple(self._tensor((*t.shape[:-1], size), t.dtype, t.storage, (*strides, 1)) for size in sizes)

    def concatenate(self, values: Sequence[int]) -> int:
        """Values side by side along the last dimension; backward views the gradient's parts."""
        sizes = [self.shape(value)[-1] for value in values]
        result = self.op("aten.cat.default", values, ((*self.shape(values[0])[:-1], sum(sizes)), self.dtype(values[0])))
        self.node(tuple(values), (result,), lambda g: () if g[0] is None else self._views(g[0], sizes))
        return result

    def expand_heads(self, value: int, heads: int) -> int:
        """(batch, tokens, 1, d) read as (batch, tokens, heads, d) without a copy; backward sums over heads."""
        t = self.tensors[value]
        batch, tokens, _, d = t.shape
        result = self._tensor((batch, tokens, heads, d), t.dtype, t.storage, (tokens * d, d, 0, 1))

        def backward(g: Gradients) -> Gradients:
            assert g[0] is not None
            return (self.op("aten.sum.dim_IntList", (g[0],), (t.shape, t.dtype)),)

        self.node((value,), (result,), backward)
        return result

    def slices(self, value: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """Like `split`, taken one by one: backward pads each gradient with zeros, and their sum is one more op."""
        t = self.tensors[value]
        parts = self._views(value, sizes)
        for part in parts:
            self.node((value,), (part,), lambda g: (
                None if g[0] is None else self.op("aten.slice_backward.default", (g[0],), (t.shape, t.dtype)),))
        return parts

    def _joined(self, grads: Gradients, parts: Sequence[int], shape: Shape) -> int:
        whole = [
            self.op("aten.zeros.default", (), (self.shape(part), self.dtype(part))) if grad is None else grad
            for part, grad in zip(parts, grads, strict=True)
        ]
        return self.op("aten.cat.default", whole, (shape, self.dtype(whole[0])))

    def require_gradient(self, value: int) -> None:
        """Let gradients reach this value: the result of a checkpointed layer, or of frozen embeddings."""
        self._live.add(value)

    def requires_gradient(self, value: int) -> bool:
        """Whether this value needs a gradient."""
        return value in self._live

    # --- ops ----------------------------------------------------------------------------------------------------

    def emit(
        self, name: str, inputs: Sequence[int], outputs: Sequence[tuple[Shape, str] | int],
        attrs: Mapping[str, Any] = NO_ATTRS, times: int | None = None, read_less: int = 0,
    ) -> tuple[int, ...]:
        """Append an op. An output is (shape, dtype) for a new tensor, or a value written in place.

        `times` overrides how often it runs; `read_less` are bytes of the operands a kernel does not fetch.
        """
        results = tuple(
            out if isinstance(out, int) else self.new(out[0], out[1], layers=self.layers) for out in outputs
        )
        repeat = self.layers * self.rounds if times is None else times
        op = make_op(name, self.tensors, tuple(inputs), results, phase=self.phase, module=self.module, attrs=attrs,
                     repeat=repeat)
        if read_less:
            op = replace(op, bytes_read=op.bytes_read - read_less)
        for value in (*inputs, *results):
            self._touch(self.tensors[value].storage)
        self.ops.append(op)
        return results

    def _touch(self, block: int) -> None:
        touched = [block]
        if self.phase == "backward" and block in self._carried:
            touched.append(self._carried[block])
        for index in touched:
            self._blocks[index].last_use, self._blocks[index].last_phase = len(self.ops), self.phase

    def hold(self, value: int) -> None:
        """Keep the block of `value` alive through the op recorded last, though that does not read it."""
        entry = self._blocks[self.tensors[value].storage]
        entry.last_use = len(self.ops) - 1

    def op(self, name: str, inputs: Sequence[int], output: tuple[Shape, str] | int,
           attrs: Mapping[str, Any] = NO_ATTRS) -> int:
        """Append an op with one output."""
        return self.emit(name, inputs, (output,), attrs)[0]

    def node(self, inputs: tuple[int, ...], outputs: tuple[int, ...],
             backward: Callable[[Gradients], Gradients]) -> None:
        """Remember how to differentiate what was just recorded, if anything before it needs a gradient."""
        if self.tape is not None and any(value in self._live for value in inputs):
            self._live.update(outputs)
            self.tape.append(Node(inputs, outputs, backward))

    # --- groups and phases --------------------------------------------------------------------------------------

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Ops inside belong to the submodule `name`."""
        outer = self.module
        self.module = f"{outer}.{name}" if outer else name
        try:
            yield
        finally:
            self.module = outer

    @contextmanager
    def group(self, name: str, layers: int) -> Iterator[None]:
        """Ops inside run once in each of `layers` equal layers."""
        outer, self.layers = self.layers, layers
        try:
            with self.at(name):
                yield
        finally:
            self.layers = outer

    def carry(self, entering: int, leaving: int) -> None:
        """Say that layers after the first read `leaving` where the first reads `entering`."""
        source, target = self.tensors[entering].storage, self.tensors[leaving].storage
        if source != target:
            self._carried[source] = target

    def take_tape(self) -> list[Node]:
        """The nodes recorded so far; recording starts afresh."""
        nodes, self.tape = self.tape or [], []
        return nodes

    @contextmanager
    def untaped(self) -> Iterator[None]:
        """Forward ops inside keep nothing for backward (checkpointing)."""
        outer, self.tape = self.tape, None
        try:
            yield
        finally:
            self.tape = outer

    def backward(self, nodes: Sequence[Node], grads: dict[int, int]) -> None:
        """Append the backward ops of `nodes`. `grads` maps values to gradients and ends holding those left over."""
        start = len(self.ops)
        finished: list[int] = []
        for node in reversed(nodes):
            outs = [grads.pop(value, None) for value in node.outputs]
            if all(grad is None for grad in outs):
                continue
            for value, grad in zip(node.inputs, node.backward(outs), strict=True):
                if grad is None or value not in self._live:
                    continue
                if value in self.parameter_layers:
                    finished.append(self._parameter_gradient(value, grad))
                elif value in grads:
                    grads[value] = self.add_values(grads[value], grad)
                else:
                    grads[value] = grad
        if self.layers > 1 and len(self.ops) > start:
            for grad in finished:
                block = self._blocks[self.tensors[grad].storage]
                block.born = max(block.born, len(self.ops) - 1) if block.born >= 0 else -1

    def drop_unread(self, start: int, end: int) -> None:
        """Take back the last of the ops from `start` to `end` whose results nothing later reads.

        Checkpointing stops to recompute a layer when all that backward needs is there.
        """
        read = {self.tensors[value].storage for op in self.ops[end:] for value in op.inputs}
        first = end
        while first > start and not any(self.tensors[v].storage in read for v in self.ops[first - 1].outputs):
            first -= 1
        gone = end - first
        del self.ops[first:end]

        def moved(index: int) -> int:
            return index if index < first else first - 1 if index < end else index - gone

        for block in self._blocks:
            if first <= block.born < end:
                block.nbytes = 0
            block.born, block.last_use = moved(block.born), moved(block.last_use)

    def _parameter_gradient(self, parameter: int, grad: int) -> int:
        """Store or add the gradient of a parameter."""
        if parameter in self.gradients:  # used twice: a tied embedding
            held = self.gradients[parameter]
            self.op("aten.add_.Tensor", (held, grad), held)
            return held
        if self.rounds > 1:  # gradients of earlier rounds are there already
            t = self.tensors[grad]
            held = self.new(t.shape, t.dtype, "gradient")
            self.emit("aten.add_.Tensor", (held, grad), (held,), times=self.layers * (self.rounds - 1))
        else:
            held = grad
            self._blocks[self.tensors[grad].storage].role = "gradient"
        self.gradients[parameter] = held
        return held

    def storages(self) -> tuple[Storage, ...]:
        """The blocks as storages: roles and deaths from how they were used."""
        result = []
        for block in self._blocks:
            dies: int | None = max(block.last_use, block.born)
            role = block.role
            if role is not None:
                dies = None
            elif block.born_phase == "forward" and block.last_phase == "backward":
                role = "activation"
            else:
                role = "temporary"
            layers = 1 if role == "temporary" and not block.pinned else block.layers
            if block.pinned and dies is not None:
                dies = len(self.ops) - 1
            result.append(Storage(block.nbytes * layers, role, block.born, dies))
        return tuple(result)

    def keep(self, value: int, role: str) -> None:
        """The block of `value` outlives the step under `role`."""
        self._blocks[self.tensors[value].storage].role = role

    # --- elementwise --------------------------------------------------------------------------------------------

    def cast(self, value: int, dtype: str) -> int:
        """Convert to `dtype`; nothing happens where it has it already."""
        source = self.dtype(value)
        if source == dtype:
            return value
        result = self.op("aten._to_copy.default", (value,), (self.shape(value), dtype))
        self.node((value,), (result,), lambda g: (g[0] if g[0] is None else self.cast_value(g[0], source),))
        return result

    def cast_value(self, value: int, dtype: str) -> int:
        """`cast` outside differentiation."""
        if self.dtype(value) == dtype:
            return value
        return self.op("aten._to_copy.default", (value,), (self.shape(value), dtype))

    def unary(self, name: str, value: int, backward: Callable[[int], int]) -> int:
        """An elementwise op of one operand; `backward` maps the gradient of its result to that of its operand."""
        result = self.op(name, (value,), (self.shape(value), self.dtype(value)))
        self.node((value,), (result,), lambda g: (None if g[0] is None else backward(g[0]),))
        return result

    def like(self, name: str, *inputs: int) -> int:
        """An op whose result looks like its first operand, not differentiated."""
        return self.op(name, inputs, (self.shape(inputs[0]), self.dtype(inputs[0])))

    def scale(self, value: int, name: str = "aten.mul.Tensor") -> int:
        """Multiply by (or divide by) a constant."""
        return self.unary(name, value, lambda g: self.like(name, g))

    def shift(self, value: int) -> int:
        """Add a constant: the gradient is the same one."""
        return self.unary("aten.add.Tensor", value, lambda g: g)

    def add_values(self, a: int, b: int) -> int:
        """a + b outside differentiation."""
        dtype = promote(self.dtype(a), self.dtype(b))
        return self.op("aten.add.Tensor", (a, b), (self._broadcast(a, b), dtype))

    def add(self, a: int, b: int) -> int:
        """a + b."""
        result = self.add_values(a, b)
        self.node((a, b), (result,), lambda g: (self._summed(g[0], a), self._summed(g[0], b)))
        return result

    def mul(self, a: int, b: int) -> int:
        """a · b elementwise, the smaller one broadcast."""
        shape, dtype = self._broadcast(a, b), promote(self.dtype(a), self.dtype(b))
        result = self.op("aten.mul.Tensor", (a, b), (shape, dtype))

        def backward(g: Gradients) -> Gradients:
            grad = g[0]
            assert grad is not None

            def side(own: int, other: int) -> int | None:
                if own not in self._live:
                    return None
                product = self.op("aten.mul.Tensor", (grad, other), (shape, self.dtype(grad)))
                return self._summed(product, own)

            return side(a, b), side(b, a)

        self.node((a, b), (result,), backward)
        return result

    def _broadcast(self, a: int, b: int) -> Shape:
        first, second = self.shape(a), self.shape(b)
        longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
        padded = (1,) * (len(longer) - len(shorter)) + shorter
        return tuple(max(x, y) for x, y in zip(longer, padded, strict=True))

    def _summed(self, grad: int | None, like: int) -> int | None:
        """The gradient summed over what was broadcast, in the operand's dtype."""
        if grad is None or like not in self._live:
            return None
        target = self.shape(like)
        if math.prod(self.shape(grad)) != math.prod(target):
            grad = self.op("aten.sum.dim_IntList", (grad,), (target, self.dtype(grad)))
        return self.cast_value(grad, self.dtype(like))

    # --- matrix products ----------------------------------------------------------------------------------------

    def half(self, value: int) -> int:
        """`value` in the dtype of matrix products: what autocast inserts; weights are converted once a forward."""
        if value in self.packed:
            return self.dequantized(value)
        if value not in self.parameter_layers or self.dtype(value) == self.compute_dtype:
            return self.cast(value, self.compute_dtype)
        key = (value, self.phase)
        if key not in self._casts:
            self._casts[key] = self.cast(value, self.compute_dtype)
            if not self.training:  # the cache is emptied when the autocast region ends
                self._blocks[self.tensors[self._casts[key]].storage].pinned = True
        return self._casts[key]

    def dequantized(self, weight: int) -> int:
        """4-bit weights unpacked for one product: the scales first, then the matrix (out, in), as bitsandbytes does."""
        shape = self.packed[weight]
        elements = math.prod(shape)
        scales = (math.ceil(elements / VALUES_PER_SCALE),)
        groups = (math.ceil(scales[0] / SCALES_PER_SCALE),)
        block = self.tensors[weight].storage
        bytewise, wide = self._tensor(scales, "uint8", block), self._tensor(groups, "float32", block)
        unpacked = self.op("foretell.dequantize.scales", (bytewise, wide), (scales, "float32"))
        unpacked = self.op("aten.add_.Tensor", (unpacked,), self.written(unpacked))
        values = self._tensor((math.ceil(elements / 2),), "uint8", block)
        return self.op("foretell.dequantize.default", (values, unpacked), (shape, self.compute_dtype))

    def _packed_product(self, x: int, weight: int, bias: int | None) -> int:
        """One row times 4-bit weights in a kernel that unpacks them on the way."""
        shape = self.packed[weight]
        *lead, inner = self.shape(x)
        x = self.alias(self.half(x), (1, inner))
        matrix = self._transposed(self._tensor(shape, "int4", self.tensors[weight].storage))
        result = self.emit("aten.mm.default", (x, matrix), (((1, shape[0]), self.compute_dtype),),
                           read_less=-scale_bytes(math.prod(shape)))[0]
        if bias is not None:
            result = self.like("aten.add_.Tensor", result, self.half(bias))
        return self.alias(result, (*lead, shape[0]))

    def linear(self, x: int, weight: int, bias: int | None = None, fp32: bool = False) -> int:
        """x (…, in) times weight (out, in) transposed, plus bias (out)."""
        *lead, inner = self.shape(x)
        rows = math.prod(lead)
        packed = weight if weight in self.packed else None
        if packed is not None:
            if rows == 1 and not self.training:
                return self._packed_product(x, weight, bias)
            weight = self.dequantized(packed)
        outer = self.shape(weight)[0]
        stored = self.dtype(weight)
        quantized = weight in self.parameter_layers and stored != self.param_dtype and not (fp32 or self.training)
        if fp32:
            x, weight = self.cast(x, "float32"), self.cast(weight, "float32")
            bias = None if bias is None else self.cast(bias, "float32")
        elif not quantized:
            x, weight = self.half(x), self.half(weight)
            bias = None if bias is None else self.half(bias)
        x = self.alias(x, (rows, inner))
        dtype = "float32" if fp32 else self.compute_dtype
        name, first = ("aten.mm.default", ()) if bias is None else ("aten.addmm.default", (bias,))
        if quantized and _multiplied(stored):  # activations are converted too
            x = self.op("aten._to_copy.default", (x,), (self.shape(x), stored))
            name, first = "aten._scaled_mm.default", ()
        transposed = self._transposed(weight)
        result = self.op(name, (*first, x, transposed), ((rows, outer), dtype))
        if name == "aten._scaled_mm.default" and bias is not None:
            result = self.op("aten.add.Tensor", (result, bias), (self.shape(result), dtype))

        def backward(g: Gradients) -> Gradients:
            grad = g[0]
            assert grad is not None
            into = None
            if x in self._live:
                matrix = weight if packed is None else self.dequantized(packed)
                into = self.op("aten.mm.default", (grad, matrix), ((rows, inner), dtype))
            by_weight = by_bias = None
            if weight in self._live:
                by_weight = self.op("aten.mm.default", (self._transposed(grad), x), ((outer, inner), dtype))
            if bias is not None and bias in self._live:
                by_bias = self.op("aten.sum.dim_IntList", (grad,), ((outer,), dtype))
            return (into, by_weight) if bias is None else (into, by_weight, by_bias)

        self.node((x, weight) if bias is None else (x, weight, bias), (result,), backward)
        return self.alias(result, (*lead, outer))

    def _transposed(self, value: int) -> int:
        t = self.tensors[value]
        *lead, rows, columns = t.shape
        strides = (rows * columns, 1, columns) if lead else (1, columns)
        return self._tensor((*lead, columns, rows), t.dtype, t.storage, strides)

    def grouped_linear(self, x: int, weight: int, touched: float) -> int:
        """x (rows, in) sorted by expert against weight (experts, out, in), of which `touched` are read."""
        rows, inner = self.shape(x)
        experts, outer, _ = self.shape(weight)
        stored = self.dtype(weight)
        quantized = weight in self.parameter_layers and stored != self.param_dtype
        name = "foretell.grouped_mm.default"
        if not quantized:
            x, weight = self.half(x), self.half(weight)
        elif _multiplied(stored):
            x = self.op("aten._to_copy.default", (x,), (self.shape(x), stored))
            name = "aten._scaled_grouped_mm.default"
        met = max(1, min(experts, round(touched)))  # whole experts in the shape, the expectation in the bytes
        t = self.tensors[weight]
        one = inner * outer * dtype_bytes(t.dtype)
        surplus = round((met - touched) * one)

        def part(transpose: bool) -> int:
            value = self._tensor((met, outer, inner), t.dtype, t.storage)
            return self._transposed(value) if transpose else value

        dtype = self.compute_dtype
        result = self.emit(name, (x, part(True)), (((rows, outer), dtype),), read_less=surplus)[0]

        def backward(g: Gradients) -> Gradients:
            grad = g[0]
            assert grad is not None
            into = None
            if x in self._live:
                into = self.emit("foretell.grouped_mm.default", (grad, part(False)), (((rows, inner), dtype),),
                                 read_less=surplus)[0]
            by_weight = None
            if weight in self._live:
                by_weight = self.op("foretell.grouped_mm_weight.default", (self._transposed(grad), x),
                                    ((experts, outer, inner), dtype))
            return into, by_weight

        self.node((x, weight), (result,), backward)
        return result

    def batched_matmul(self, a: int, b: int) -> int:
        """a (g, m, k) times b (g, k, n); forward only."""
        return self.op("aten.bmm.default", (a, b), ((*self.shape(a)[:-1], self.shape(b)[-1]), self.dtype(a)))

    # --- attention ----------------------------------------------------------------------------------------------

    def attention(self, q: int, k: int, v: int, causal: bool, window: int | None = None, sinks: int | None = None,
                  read_less: int = 0) -> int:
        """Scaled dot-product attention of q (…, heads, queries, d) over k (…, kv_heads, keys, d), v (…, d_v).

        `sinks` (heads) are learned scores that take part in the softmax and attend to nothing.
        """
        q = self.half(q)
        if self.dtype(k) == "float32":
            k, v = self.half(k), self.half(v)
        attrs: dict[str, Any] = {"causal": causal, "gqa": self.shape(q)[-3] != self.shape(k)[-3]}
        if window is not None and window < self.shape(k)[-2]:
            attrs["window"] = window
        *lead, _ = self.shape(q)
        shape = (*lead, self.shape(v)[-1])
        outputs: list[tuple[Shape, str]] = [(shape, self.dtype(q))]
        if self.tape is not None:
            outputs.append((tuple(lead), "float32"))  # log of the sum of exponentials, for backward
        operands = (q, k, v) if sinks is None else (q, k, v, sinks)
        results = self.emit("foretell.sdpa.default", operands, outputs, attrs, read_less=read_less)

        def backward(g: Gradients) -> Gradients:
            grad = g[0]
            assert grad is not None
            specs = [(self.shape(value), self.dtype(value)) for value in operands]
            return self.emit("foretell.sdpa_backward.default", (grad, *operands, *results), specs, attrs)

        self.node(operands, (results[0],), backward)
        return results[0]
