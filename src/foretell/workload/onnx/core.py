"""Walk an ONNX graph with concrete shapes and record what runs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from foretell.errors import ForetellError, InputError
from foretell.graph import DTYPES
from foretell.workload.onnx import fuse, read
from foretell.workload.onnx.builder import Builder, Output
from foretell.workload.onnx.nodes import Node, Type, attributes, infer, is_readable, largest
from foretell.workload.onnx.ops import FUSED, translation
from foretell.workload.onnx.ops.quantized import INTEGERS
from foretell.workload.onnx.values import MOST_KNOWN, Value, constant, fold

Scope = MutableMapping[str, Value]

MOST_NODES = 1_000_000  # that are walked
MOST_CALLED = 50_000  # nodes that functions of the model's own may stand for
MOST_DEPTH = 64  # of functions within functions
MOST_TRIPS = 2**31

_CHECK = "check the model with onnx.checker"

_STANDARD = ("", "ai.onnx", "ai.onnx.preview.training")
# Operations that a load-time constant never comes from, though their inputs do not change.
_NEVER_FIXED = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli",
                          "Multinomial", "DequantizeLinear", "If", "Loop", "Scan", "SequenceMap"})
# A transposed weight is recorded as a view, as a capture does; other work on weights alone is done at loading.
_VIEWS = frozenset({"Transpose", "Identity"})
# Operations whose int8 form passes its input's scale on, so that what quantises after them speaks for them too.
_ACTIVATIONS = frozenset({"Relu", "Clip"})
_PRODUCTS = frozenset({"Conv", "MatMul", "Gemm", "ConvTranspose"})
_MALFORMED = (IndexError, KeyError, ValueError, TypeError, ZeroDivisionError, AttributeError, OverflowError,
              AssertionError, RecursionError, StopIteration, ArithmeticError)


class Walk:
    """One model being recorded.

    `notes` says what was taken how: sizes bounded from above, branches chosen, patterns joined; by name, how often.
    """

    def __init__(self, model: Any, builder: Builder, where: str) -> None:
        self.model, self.builder, self.where = model, builder, where
        self.versions = read.opsets(model)
        self.functions = {(f.domain, f.name): f for f in model.functions}
        self.notes: dict[str, dict[str, int]] = {}
        self.left = MOST_NODES
        self.types: dict[str, Type] = {}  # that the file itself declares
        self.scope: Scope = {}
        self._plans: dict[int, fuse.Plan] = {}
        self._check_functions()

    def _check_functions(self) -> None:
        """Functions that stand for endless nodes, or for themselves, are refused before any is walked."""
        sizes: dict[tuple[str, str], int] = {}

        def size(key: tuple[str, str], above: tuple[tuple[str, str], ...]) -> int:
            where = f"{self.where}: function {shown(key[1])}"
            if key in above:
                raise InputError("functions call each other in a circle", where, "export the model again")
            if len(above) > MOST_DEPTH:
                what = f"functions call each other more than {MOST_DEPTH} deep"
                raise InputError(what, where, "inline them on export")
            if key not in sizes:
                total = 0
                for node in _every(self.functions[key].node):
                    inner = (node.domain, node.op_type)
                    total += 1 + (size(inner, (*above, key)) if inner in self.functions else 0)
                sizes[key] = total
            return sizes[key]

        called = ((n.domain, n.op_type) for n in _every(self.model.graph.node)) if self.functions else ()
        calls = [key for key in called if key in self.functions]
        if sum(size(key, ()) for key in calls) > MOST_CALLED:
            what = f"its functions stand for more than {MOST_CALLED:,} nodes"
            raise InputError(what, self.where, "inline them on export")

    def note(self, about: str, what: str, count: int = 1) -> None:
        """Keep for the graph's provenance."""
        entry = self.notes.setdefault(about, {})
        entry[what] = entry.get(what, 0) + count

    # --- graphs -------------------------------------------------------------------------------------------------

    def initializers(self, graph: Any, scope: Scope) -> int:
        """Stored tensors into the scope; returns how many elements are parameters."""
        roles = _Roles(graph)
        parameters = 0
        seen: set[str] = set()
        for tensor in graph.initializer:
            where = f"{self.where}: initializer {shown(tensor.name)}"
            if tensor.name in seen or not tensor.name:
                raise InputError("is there twice" if tensor.name else "has no name", where, "export the model again")
            seen.add(tensor.name)
            shape, dtype = read.check_tensor(tensor, where)
            value = Value(shape, dtype, fixed=True)
            value.role, elements = roles.of(tensor.name, value)
            parameters += elements
            value.known = _content(tensor, value)
            scope[tensor.name] = value
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            where = f"{self.where}: sparse initializer {shown(name)}"
            _, dtype = read.check_tensor(sparse.values, where)
            read.check_tensor(sparse.indices, where)
            value = Value(read.checked_shape(sparse.dims, where), dtype, fixed=True, role="parameter")
            value.nbytes = len(sparse.values.raw_data) + len(sparse.indices.raw_data)
            parameters += sum(sparse.values.dims)
            scope[name] = value
        return parameters

    def run(self, graph: Any, scope: Scope) -> list[Value]:
        """Record a graph whose inputs and stored tensors are in the scope; returns its outputs."""
        names = [v.name for v in graph.output]
        self._declared(graph, scope)
        self.scope = scope
        self.nodes(graph.node, names, scope, {}, key=id(graph))
        return [self._found(scope, name, f"{self.where}: output {shown(name)}") for name in names]

    def _declared(self, graph: Any, scope: Scope) -> None:
        """Shapes the file itself gives, for what nothing else can tell."""
        for info in graph.value_info:
            kind = info.type.tensor_type
            if not info.type.HasField("tensor_type") or not kind.HasField("shape"):
                continue
            if kind.elem_type in read.DTYPES and all(d.HasField("dim_value") for d in kind.shape.dim):
                shape = read.checked_shape((d.dim_value for d in kind.shape.dim), f"{self.where}: {shown(info.name)}")
                self.types[info.name] = shape, read.DTYPES[kind.elem_type]

    def nodes(
        self, nodes: Sequence[Any], outputs: Sequence[str], scope: Scope, outer: Mapping[str, Any], key: int,
        depth: int = 0,
    ) -> fuse.Plan:
        """Record the nodes that these outputs need."""
        plan = self._plans.get(key)
        if plan is None:
            ordered = _ordered(nodes, scope, self.where)
            plan = self._plans[key] = fuse.plan(ordered, outputs, *_stored(ordered, scope))
            for name, count in plan.joined.items():
                self.note("joined", name, count)
        for proto in plan.nodes:
            self.left -= 1
            if self.left < 0:
                repair = "export it without nested functions"
                raise InputError(f"runs more than {MOST_NODES:,} nodes", self.where, repair)
            self._node(proto, scope, plan, outer, depth)
        return plan

    def _found(self, scope: Scope, name: str, where: str) -> Value:
        value = scope.get(name)
        if value is None:
            raise InputError(f"nothing makes {shown(name)}", where, "export the model again")
        return value

    # --- one node -----------------------------------------------------------------------------------------------

    def _node(self, proto: Any, scope: Scope, plan: fuse.Plan, outer: Mapping[str, Any], depth: int) -> None:
        domain = "" if proto.domain in _STANDARD else proto.domain
        where = f"{self.where}: node {shown(proto.name or next(iter(proto.output), ''))} ({shown(proto.op_type)})"
        attrs = attributes(proto, outer, where)
        inputs = [self._found(scope, name, where) if name else None for name in proto.input]
        self.builder.module = _module(proto)
        try:
            values = self._values(proto, domain, inputs, attrs, scope, plan, depth, where)
        except ForetellError:
            raise
        except _MALFORMED as error:
            if self.notes.get("at_most"):  # sizes above the real ones need not fit each other
                values = self._uncounted(proto, domain, inputs, [None] * len(proto.output))
            else:
                text = " ".join(str(error).split())[:160] or type(error).__name__
                reason = "".join(c if c.isprintable() else "?" for c in text)
                raise InputError(f"cannot be understood: {reason}", where, _CHECK) from None
        for name, value in zip(proto.output, values, strict=False):
            if name:
                scope[name] = value
        for name in proto.output[len(values) :]:
            if name and plan.users.get(name):
                raise InputError(f"has no output {shown(name)}", where, _CHECK)

    def _values(
        self, proto: Any, domain: str, inputs: list[Value | None], attrs: dict[str, Any], scope: Scope,
        plan: fuse.Plan, depth: int, where: str,
    ) -> list[Value]:
        op = proto.op_type
        if (proto.domain, op) in self.functions:
            return self._function(self.functions[proto.domain, op], inputs, attrs, depth, where)
        if domain == "":
            if op == "Constant":
                return [_constant(attrs, where)]
            if op in ("If", "Loop", "Scan"):
                control: Callable[..., list[Value]] = {"If": self._if, "Loop": self._loop, "Scan": self._scan}[op]
                return control(proto, inputs, attrs, scope, where)
            if op in ("Shape", "Size") and inputs and inputs[0] is not None and inputs[0].shape is not None:
                return [_sizes(op, inputs[0], attrs)]
            if op == "SequenceLength" and inputs and inputs[0] is not None and inputs[0].items is not None:
                return [_number(len(inputs[0].items))]
            folded = self._folded(op, inputs, attrs, len(proto.output))
            if folded is not None:
                return folded
        unknown = any(v is not None and v.shape is None and v.items is None for v in inputs)
        types: list[Type] = [None] * len(proto.output)
        if domain == "" and not unknown and not any(v is not None and v.items is not None for v in inputs):
            types = self._types(proto, inputs, attrs, where)
        names = list(proto.output)
        types = [self.types.get(n) if t is None or t[0] is None else t for t, n in zip(types, names, strict=True)]
        node = Node(op, domain, proto.name, self.versions.get(domain, 1), inputs, names, attrs, types, proto)
        if domain == "" and not unknown and any(t is None or t[0] is None for t in types):
            bound = largest(node)
            if bound is not None:
                self.note("at_most", op)
                types = node.types = [b if t is None or t[0] is None else t for t, b in zip(types, bound, strict=False)]
        translate = translation(domain, op) if not unknown else None
        if translate is None:
            return self._uncounted(proto, domain, inputs, types)
        return self._translated(translate, node, plan)

    def _types(self, proto: Any, inputs: list[Value | None], attrs: dict[str, Any], where: str) -> list[Type]:
        plain = proto
        if any(a.ref_attr_name for a in proto.attribute):  # within a function: with the caller's attributes
            from onnx import helper

            plain = helper.make_node(proto.op_type, proto.input, proto.output, **attrs)
        try:
            return infer(plain, inputs, self.versions, where)
        except InputError:
            if self.notes.get("at_most"):
                return [None] * len(proto.output)
            raise

    def _folded(
        self, op: str, inputs: list[Value | None], attrs: dict[str, Any], outputs: int
    ) -> list[Value] | None:
        """A node on known values is a number of the host's; its result is known too."""
        if not inputs or any(v is not None and v.known is None for v in inputs):
            return None
        arrays = [None if v is None else v.known for v in inputs]
        if op == "Cast":
            dtype = read.DTYPES.get(int(attrs.get("to", 1)), "")
            readable = arrays[0] is not None and dtype in DTYPES and is_readable(dtype)
            found = [arrays[0].astype(dtype)] if readable and arrays[0] is not None else None
        else:
            found = fold(op, arrays, {**attrs, "_outputs": outputs})
        return None if found is None else [constant(array) for array in found]

    def _translated(self, translate: Callable[..., list[Value]], node: Node, plan: fuse.Plan) -> list[Value]:
        reals = [v for v in node.inputs if v is not None]
        fixed = bool(reals) and all(v.fixed for v in reals) and node.op not in _NEVER_FIXED
        if fixed and node.domain != FUSED and node.op not in _VIEWS and all(t and t[0] is not None for t in node.types):
            role = "parameter" if any(v.role == "parameter" for v in reals) else "buffer"
            return [Value(t[0], t[1], fixed=True, role=role) for t in node.types if t is not None]
        if node.op not in ("QuantizeLinear", "DequantizeLinear") and any(v.source is not None for v in reals):
            return self._on_integers(translate, node, plan)
        return translate(self.builder, node)

    # --- quantised ----------------------------------------------------------------------------------------------

    def _on_integers(self, translate: Callable[..., list[Value]], node: Node, plan: fuse.Plan) -> list[Value]:
        """An operation on dequantised operands runs on their integers, where it is a product or its result is
        quantised again. Its result is written as integers if that is all that is ever read of it.
        """
        reals = [v for v in node.inputs if v is not None and not v.is_number and v.shape is not None]
        if any(v.source is None for v in reals if v.elements > 1) or node.domain not in ("", FUSED):
            return translate(self.builder, node)
        dtypes = [self._quantized_as(name, plan) for name in node.outputs if name]
        again = bool(dtypes) and all(dtypes)
        product = node.op in _PRODUCTS or (node.domain == FUSED and node.op == "Linear")
        if not again and not product:
            return translate(self.builder, node)
        types = list(node.types)
        before = node.inputs
        node.inputs = [v.source if v is not None and v.source is not None else v for v in before]
        again = again and node.domain != FUSED
        if again:
            pairs = zip(types, dtypes, strict=False)
            node.types = [None if t is None or d is None else (t[0], d) for t, d in pairs]
        results = translate(self.builder, node)
        if not again:
            for value in results:
                value.dtype = types[0][1] if types[0] is not None else "float32"
            return results
        return [self._dequantised(v, "float32") for v in results]

    @staticmethod
    def _dequantised(source: Value, dtype: str) -> Value:
        """What stands for integers that were written in place of a floating-point tensor."""
        return Value(source.shape, dtype, source=source, later=lambda: source.tensor or 0, tensor=source.tensor)

    def _quantized_as(self, name: str, plan: fuse.Plan, depth: int = 4) -> str | None:
        """The integers a result is read as by everything that reads it; None where something reads it as it is."""
        found = None
        for user in plan.users.get(name, []):
            if user is None:
                return None
            if user.op_type == "QuantizeLinear":
                zero = user.input[2] if len(user.input) > 2 else ""
                kind = self._zero_type(zero)
            elif user.op_type in _ACTIVATIONS and depth > 0:
                kind = self._quantized_as(user.output[0], plan, depth - 1)
            else:
                return None
            if kind is None or found not in (None, kind):
                return None
            found = kind
        return found

    def _zero_type(self, name: str) -> str | None:
        if not name:
            return "uint8"
        value = self.scope.get(name)
        return value.dtype if value is not None and value.dtype in INTEGERS else None

    # --- what has no rule ---------------------------------------------------------------------------------------

    def _uncounted(self, proto: Any, domain: str, inputs: list[Value | None], types: Sequence[Type]) -> list[Value]:
        name = shown(proto.op_type) if domain == "" else f"{shown(domain).replace('.', '_')}:{shown(proto.op_type)}"
        name = "onnx." + name.replace(".", "_")
        outputs: list[Output] = [(t[0], t[1]) for t in types if t is not None and t[0] is not None]
        made = iter(self.builder.uncounted(name, inputs, outputs))
        return [
            next(made) if t is not None and t[0] is not None else Value(None, t[1] if t is not None else "float32")
            for t in types
        ]

    # --- functions and control flow -----------------------------------------------------------------------------

    def _function(
        self, function: Any, inputs: list[Value | None], attrs: dict[str, Any], depth: int, where: str
    ) -> list[Value]:
        """A function of the model's own: its nodes, in place of the call."""
        if depth >= MOST_DEPTH:
            raise InputError(f"functions call each other more than {MOST_DEPTH} deep", where, "inline them on export")
        scope: Scope = {name: v for name, v in zip(function.input, inputs, strict=False) if v is not None}
        before, self.scope = self.scope, scope
        given = attributes(_Holder(function.attribute_proto), {}, where)
        module = self.builder.module
        self.nodes(function.node, list(function.output), scope, {**given, **attrs}, id(function), depth + 1)
        self.builder.module, self.scope = module, before
        return [self._found(scope, name, where) for name in function.output]

    def _inner(self, graph: Any, scope: Scope, bound: Mapping[str, Value]) -> list[Value]:
        inner: Scope = ChainMap(dict(bound), scope)
        self.initializers(graph, inner)
        before, self.scope = self.scope, inner
        try:
            return self.run(graph, inner)
        finally:
            self.scope = before

    def _if(
        self, proto: Any, inputs: list[Value | None], attrs: dict[str, Any], scope: Scope, where: str
    ) -> list[Value]:
        """The branch that is taken, where that is known; else the one with more arithmetic, or more operations."""
        branches = [attrs["then_branch"], attrs["else_branch"]]
        condition = inputs[0].known if inputs[0] is not None else None
        if condition is not None and condition.size:
            return self._inner(branches[0] if condition.reshape(-1)[0] else branches[1], scope, {})
        tried = []
        for branch in branches:
            mark = self.builder.mark()
            outputs = self._inner(branch, scope, {})
            ops = self.builder.ops[mark[0] :]
            weight = (sum(op.macs * op.repeat for op in ops), len(ops))
            tensors = [v.tensor for v in outputs]
            tried.append((weight, outputs, tensors, self.builder.cut(mark)))
        taken = 0 if tried[0][0] >= tried[1][0] else 1
        _, outputs, tensors, parts = tried[taken]
        self.builder.paste(parts)
        for value, tensor in zip(outputs, tensors, strict=True):
            value.tensor = tensor
        self.note("branches", "then" if taken == 0 else "else")
        return outputs

    def _loop(
        self, proto: Any, inputs: list[Value | None], attrs: dict[str, Any], scope: Scope, where: str
    ) -> list[Value]:
        """A loop of known length whose values keep their shapes runs its body that often; another is not counted."""
        body = attrs["body"]
        trips = inputs[0].known if inputs and inputs[0] is not None else None
        carried = list(inputs[2:])
        names = [v.name for v in body.input]
        if trips is None or not 0 < int(trips.reshape(-1)[0]) <= MOST_TRIPS or len(names) != len(carried) + 2:
            return self._uncounted(proto, "", inputs, [self.types.get(n) for n in proto.output])
        count = int(trips.reshape(-1)[0])
        bound = {names[0]: Value((), "int64"), names[1]: Value((), "bool")}
        bound |= {n: _changing(v) for n, v in zip(names[2:], carried, strict=True) if v is not None}
        return self._repeated(proto, body, scope, bound, carried, count, skip=1, where=where)

    def _scan(
        self, proto: Any, inputs: list[Value | None], attrs: dict[str, Any], scope: Scope, where: str
    ) -> list[Value]:
        """The body runs once for each element of the scanned dimension."""
        body, scanned = attrs["body"], int(attrs.get("num_scan_inputs", 1))
        names = [v.name for v in body.input]
        state, sequences = inputs[: len(inputs) - scanned], inputs[len(inputs) - scanned :]
        axes = attrs.get("scan_input_axes") or [0] * scanned
        known = all(v is not None and v.shape is not None for v in sequences) and len(names) == len(inputs)
        if not known or not sequences:
            return self._uncounted(proto, "", inputs, [self.types.get(n) for n in proto.output])
        bound = {n: _changing(v) for n, v in zip(names, state, strict=False) if v is not None}
        count = 1
        for name, value, axis in zip(names[len(state) :], sequences, axes, strict=True):
            assert value is not None
            assert value.shape is not None
            at = int(axis) % len(value.shape)
            count = value.shape[at]
            shape = (*value.shape[:at], *value.shape[at + 1 :])
            bound[name] = self.builder.view("aten.select.int", value, shape, None)
        if not count:
            return self._uncounted(proto, "", inputs, [self.types.get(n) for n in proto.output])
        return self._repeated(proto, body, scope, bound, state, count, skip=0, where=where)

    def _repeated(
        self, proto: Any, body: Any, scope: Scope, bound: Mapping[str, Value], carried: Sequence[Value | None],
        count: int, skip: int, where: str,
    ) -> list[Value]:
        """A body run `count` times: each of its ops once, repeated; what it collects is one tensor."""
        before = self.builder.repeat
        if before * count > MOST_TRIPS:
            raise InputError(f"runs {before * count:,} times", where, f"at most {MOST_TRIPS:,} are counted")
        mark = self.builder.mark()
        self.builder.repeat = before * count
        try:
            results = self._inner(body, scope, bound)[skip:]
        finally:
            self.builder.repeat = before
        state, collected = results[: len(carried)], results[len(carried) :]
        if any(v is not None and v.shape != r.shape for v, r in zip(carried, state, strict=False)):
            self.builder.cut(mark)
            return self._uncounted(proto, "", [], [self.types.get(n) for n in proto.output])
        self.note("loops", f"{proto.op_type} of {count}")
        made = []
        for value in collected:
            if value.shape is None:
                made.append(value)
            else:
                made += self.builder.emit("aten.stack.default", [value], [((count, *value.shape), value.dtype)])
        return [*state, *made]


def _every(nodes: Sequence[Any]) -> Iterator[Any]:
    """The nodes, and those of the graphs inside them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _every(attribute.g.node)


class _Holder:
    """Attributes that belong to no node."""

    def __init__(self, attribute: Sequence[Any]) -> None:
        self.attribute = attribute


def _changing(value: Value) -> Value:
    """A value that a loop replaces: of the same shape, its content no longer known."""
    if value.known is None and not value.fixed:
        return value
    return Value(value.shape, value.dtype, value.tensor, value.strides)


# --- names ------------------------------------------------------------------------------------------------------


def shown(name: str | bytes) -> str:
    """A name from the file, fit to be printed; one that is no UTF-8 comes as bytes."""
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
    text = "".join(c if c.isprintable() else "?" for c in text[:81])
    return text if len(text) <= 80 else text[:79] + "…"


def _module(proto: Any) -> str:
    """The path of the module a node came from, where the exporter wrote it down."""
    for entry in proto.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            scopes = [part.strip(" '\"[]") for part in entry.value.split(",")]
            return shown(scopes[-2]) if len(scopes) > 1 else ""
    name = proto.name if isinstance(proto.name, str) else ""
    if not name.startswith("/"):
        return ""
    path = before = last = ""  # "/layer1/layer1.0/conv1/Conv": a part may repeat the one before it
    for part in name.split("/")[1:-1]:
        if not (last and part.startswith(last + ".")):
            before = f"{path}." if path else ""
        path, last = before + part, part
    return shown(path)


# --- constants --------------------------------------------------------------------------------------------------


def _content(tensor: Any, value: Value) -> Any:
    """What a stored tensor holds, where it is small: whole numbers, or up to a few others, such as scales."""
    from onnx import TensorProto, numpy_helper

    most = MOST_KNOWN if value.dtype in ("int64", "int32", "bool") else 8
    if value.elements > most or not is_readable(value.dtype) or tensor.data_location == TensorProto.EXTERNAL:
        return None
    return numpy_helper.to_array(tensor)


def _constant(attrs: Mapping[str, Any], where: str) -> Value:
    import numpy as np

    if "value" in attrs:
        content = attrs["value"]
        if isinstance(content, np.ndarray):
            return constant(content)
        shape, dtype = read.check_tensor(content, where)
        return Value(shape, dtype, fixed=True)
    for name, dtype in (("value_int", "int64"), ("value_ints", "int64"), ("value_float", "float32"),
                        ("value_floats", "float32")):  # fmt: skip
        if name in attrs:
            array = np.array(attrs[name], dtype=dtype)
            return constant(array) if array.size <= MOST_KNOWN else Value(array.shape, dtype, fixed=True)
    if "sparse_value" in attrs:
        sparse = attrs["sparse_value"]
        _, dtype = read.check_tensor(sparse.values, where)
        return Value(read.checked_shape(sparse.dims, where), dtype, fixed=True)
    raise InputError("holds no number", where, "export the part of the model that computes on numbers")


def _sizes(op: str, value: Value, attrs: Mapping[str, Any]) -> Value:
    import numpy as np

    assert value.shape is not None
    if op == "Size":
        return _number(value.elements)
    return constant(np.array(value.shape[slice(attrs.get("start"), attrs.get("end"))], dtype=np.int64))


def _number(value: int) -> Value:
    import numpy as np

    return constant(np.array(value, dtype=np.int64))


# --- roles ------------------------------------------------------------------------------------------------------

# Stored floating-point tensors at these places are no parameters: running statistics, scales, numbers by value.
_NOT_PARAMETERS = {
    "BatchNormalization": (3, 4), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "Resize": (1, 2),
    "Upsample": (1,), "QLinearConv": (1, 2, 4, 5, 6, 7), "QLinearMatMul": (1, 2, 4, 5, 6, 7), "Pad": (2,),
    "MatMulNBits": (2, 3), "Clip": (1, 2), "QGemm": (1, 2, 4, 5, 7, 8), "QAttention": (3, 4, 6, 7),
    "MatMulIntegerToFloat": (2, 3, 4, 5), "DynamicQuantizeMatMul": (2, 3),
}  # fmt: skip
# Stored integers, and single numbers, at these places are parameters.
_PARAMETERS = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2), "MatMul": (1,), "PRelu": (1,),
    "BatchNormalization": (1, 2), "LayerNormalization": (1, 2), "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2), "LSTM": (1, 2, 3), "GRU": (1, 2, 3), "RNN": (1, 2, 3),
    "DequantizeLinear": (0,), "QLinearConv": (3, 8), "QLinearMatMul": (3,), "MatMulInteger": (1,), "ConvInteger": (1,),
    "MatMulNBits": (1,), "MatMulBnb4": (1,), "QGemm": (3, 6), "QAttention": (1,), "MatMulIntegerToFloat": (1,),
    "DynamicQuantizeMatMul": (1,), "GatherBlockQuantized": (0,),
}  # fmt: skip


class _Roles:
    """Which stored tensors are parameters, by where they are used."""

    def __init__(self, graph: Any) -> None:
        self.never: set[str] = set()
        self.always: set[str] = set()
        self.bits: dict[str, int] = {}  # elements of a packed weight
        for node in graph.node:
            for index in _NOT_PARAMETERS.get(node.op_type, ()):
                if index < len(node.input):
                    self.never.add(node.input[index])
            for index in _PARAMETERS.get(node.op_type, ()):
                if index < len(node.input):
                    self.always.add(node.input[index])
            if node.op_type in ("MatMulNBits", "MatMulBnb4") and len(node.input) > 1:
                sizes = {a.name: a.i for a in node.attribute if a.name in ("K", "N")}
                self.bits[node.input[1]] = max(0, sizes.get("K", 0) * sizes.get("N", 0))

    def of(self, name: str, value: Value) -> tuple[str, int]:
        """Role of a stored tensor, and how many parameters it holds."""
        floating = value.dtype.startswith(("float", "bfloat"))
        if name in self.always or (floating and value.elements > 1 and name not in self.never):
            return "parameter", self.bits.get(name, value.elements)
        return "buffer", 0


def _stored(nodes: Sequence[Any], scope: Scope) -> tuple[set[str], set[str]]:
    """Names of stored single numbers, and of stored vectors."""
    scalars = {name for name, v in scope.items() if v.fixed and v.elements == 1}
    vectors = {name for name, v in scope.items() if v.fixed and v.shape is not None and len(v.shape) == 1}
    for node in nodes:
        if node.op_type != "Constant" or not node.output:
            continue
        for attribute in node.attribute:
            dims = list(attribute.t.dims) if attribute.name == "value" else None
            if attribute.name in ("value_float", "value_int") or dims == [] or dims == [1]:
                scalars.add(node.output[0])
            if dims is not None and len(dims) == 1:
                vectors.add(node.output[0])
    return scalars, vectors


# --- order ------------------------------------------------------------------------------------------------------


def _ordered(nodes: Sequence[Any], scope: Scope, where: str) -> list[Any]:
    """The nodes so that each comes after what it reads, constants first.

    Raises InputError for cycles, and for names that are made twice or never.
    """
    nodes = sorted(nodes, key=lambda node: node.op_type != "Constant")
    maker: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in node.output:
            if not name:
                continue
            if name in maker:
                raise InputError(f"two nodes make {shown(name)}", where, "export the model again")
            maker[name] = index
    needs = [sorted({maker[name] for name in fuse.reads(node) if name in maker}) for node in nodes]
    for node in nodes:
        for name in fuse.reads(node):
            if name not in maker and name not in scope:
                raise InputError(f"nothing makes {shown(name)}, which node {shown(node.name or node.op_type)} reads",
                                 where, "export the model again")
    if all(before < index for index, each in enumerate(needs) for before in each):
        return list(nodes)
    waits = [len(each) for each in needs]
    readers: list[list[int]] = [[] for _ in nodes]
    for index, each in enumerate(needs):
        for before in each:
            readers[before].append(index)
    ready = [index for index, count in enumerate(waits) if not count]
    order = []
    while ready:
        index = ready.pop()
        order.append(index)
        for reader in readers[index]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    if len(order) < len(nodes):
        stuck = next(node for index, node in enumerate(nodes) if waits[index])
        name = shown(stuck.name or stuck.op_type)
        raise InputError(f"node {name} is part of a cycle", where, "export the model again")
    return [nodes[index] for index in order]
