"""An exported program as the archive states it, its open sizes bound: what is given, and what each value is.

Every field is looked at before it is used; a `ValueError` says what is wrong and the caller adds where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.errors import InputError, unknown
from foretell.workload.options import Options
from foretell.workload.pt2.builder import Meta, row_major
from foretell.workload.pt2.symbols import Unbound, evaluate, symbol_of, symbols_in

__all__ = ["DTYPES", "Given", "Program", "Sizes", "bind", "printable", "program"]

# torch/_export/serde/schema.py, enum ScalarType
DTYPES: dict[int, str] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16",
    29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu",
    34: "uint32", 35: "uint64",
}
_STRIDED = 7  # enum Layout
_MAJORS = (7, 8)  # of the schema: PyTorch 2.5 to 2.14
_MOST = 2**63 - 1
_MOST_DIMENSIONS = 64
_MOST_EXPRESSIONS = 3_000_000  # characters, 1 to 2 million a second
_ROLES = {"parameter": "parameter", "buffer": "buffer", "tensor_constant": "buffer", "user_input": "input"}
_NAMES = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor the program is given: `role` as in a graph's storages, `target` its name in the module."""

    name: str
    role: str
    target: str


@dataclass(frozen=True, slots=True)
class Program:
    """The parts of an archive's JSON that matter, each of the type it must have."""

    graph: Mapping[str, Any]
    given: tuple[Given, ...]
    outputs: tuple[str, ...]
    ranges: Mapping[str, tuple[int, int]]
    torch: str

    @property
    def inputs(self) -> tuple[Given, ...]:
        """The tensors that the user gives."""
        return tuple(one for one in self.given if one.role == "input")


def printable(value: str, most: int = 200) -> str:
    """What an archive says, fit to be shown."""
    return "".join(c if c.isprintable() else "?" for c in value[:most])


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """`value` as a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_kind(value)}, not an object")
    return value


def sequence(value: Any, what: str) -> Sequence[Any]:
    """`value` as a JSON list."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is {_kind(value)}, not a list")
    return value


def text(value: Any, what: str) -> str:
    """`value` as a name: printable, of bounded length."""
    if not isinstance(value, str) or len(value) > 2000 or not value.isprintable():
        raise ValueError(f"{what} is {_kind(value)}, not a name")
    return value


def whole(value: Any, what: str) -> int:
    """`value` as a whole number of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST:
        raise ValueError(f"{what} is {str(value)[:40]}, not a whole number of 64 bits")
    return value


def only(value: Any, what: str) -> tuple[str, Any]:
    """The one alternative that is set of a union, and its value."""
    items = [(key, inner) for key, inner in mapping(value, what).items() if inner is not None]
    if len(items) != 1:
        raise ValueError(f"{what} names {len(items)} alternatives, not one")
    return items[0]


def _kind(value: Any) -> str:
    return {"dict": "an object", "list": "a list", "str": "text", "NoneType": "missing"}.get(
        type(value).__name__, str(value)[:40]
    )


def program(data: Mapping[str, Any]) -> Program:
    """The program in an archive's JSON. Raises ValueError where that is malformed."""
    major = whole(mapping(data.get("schema_version"), "schema_version").get("major"), "schema_version.major")
    if major not in _MAJORS:
        raise ValueError(f"it is of schema {major}, not one of {', '.join(map(str, _MAJORS))}")
    module = mapping(data.get("graph_module"), "graph_module")
    graph = mapping(module.get("graph"), "graph")
    signature = mapping(module.get("signature"), "signature")
    ranges = {}
    for symbol, bounds in mapping(data.get("range_constraints", {}), "range_constraints").items():
        least, most = (mapping(bounds, f"the range of {symbol[:40]}").get(key) for key in ("min_val", "max_val"))
        ranges[symbol] = (
            0 if least is None else whole(least, f"the range of {symbol[:40]}"),
            _MOST if most is None else whole(most, f"the range of {symbol[:40]}"),
        )
    return Program(
        graph=graph,
        given=tuple(_given(sequence(signature.get("input_specs"), "input_specs"))),
        outputs=tuple(_outputs(sequence(signature.get("output_specs"), "output_specs"))),
        ranges=ranges,
        torch=str(data.get("torch_version", ""))[:40],
    )


def _given(specs: Sequence[Any]) -> Iterator[Given]:
    for position, spec in enumerate(specs):
        kind, inner = only(spec, f"input {position}")
        if kind not in _ROLES:
            continue  # numbers and opaque objects
        inner = mapping(inner, f"input {position}")
        argument = mapping(inner.get("arg"), f"input {position}")
        if kind == "user_input":
            form, argument = only(argument, f"input {position}")
            if form != "as_tensor":
                continue
        name = text(mapping(argument, f"input {position}").get("name"), f"input {position}")
        target = name if kind == "user_input" else text(inner.get(_NAMES[kind]), f"input {position}")
        yield Given(name, _ROLES[kind], target)


def _outputs(specs: Sequence[Any]) -> Iterator[str]:
    for position, spec in enumerate(specs):
        kind, inner = only(spec, f"output {position}")
        argument = mapping(inner, f"output {position}").get("arg")
        if kind == "user_output":
            form, argument = only(argument, f"output {position}")
            if form != "as_tensor":
                continue
        elif kind == "token":
            continue
        yield text(mapping(argument, f"output {position}").get("name"), f"output {position}")


# --- sizes ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sizes:
    """The values of a program's symbols, and what that makes of its sizes. `most_batch`: the largest it takes."""

    values: dict[str, int]
    notes: tuple[str, ...] = ()
    most_batch: int = _MOST
    _known: dict[str, int] = field(default_factory=dict)
    _read: int = 0

    def number(self, value: Any, what: str) -> int:
        """A ``SymInt``: a number, or an expression."""
        kind, inner = only(value, what)
        if kind == "as_int":
            return whole(inner, what)
        if kind != "as_expr":
            raise ValueError(f"{what} is {kind}, no size")
        expression = mapping(inner, what).get("expr_str")
        if not isinstance(expression, str):
            raise ValueError(f"{what} is {_kind(expression)}, no size")
        if expression not in self._known:
            self._read += len(expression)
            if self._read > _MOST_EXPRESSIONS:
                raise ValueError("its sizes are expressions of more text than can be read in a few seconds")
            self._known[expression] = evaluate(expression, self.values)
        return self._known[expression]

    def meta(self, value: Any, what: str) -> Meta:
        """A ``TensorMeta``."""
        value = mapping(value, what)
        code = value.get("dtype")
        if not isinstance(code, int) or code not in DTYPES:
            raise ValueError(f"{what} is of element type {str(code)[:40]}, which is not known")
        if value.get("layout") != _STRIDED:
            raise ValueError(f"{what} is sparse, which is not counted")
        sizes = sequence(value.get("sizes"), f"{what}'s sizes")
        steps = sequence(value.get("strides"), f"{what}'s strides")
        if len(sizes) != len(steps) or len(sizes) > _MOST_DIMENSIONS:
            raise ValueError(f"{what} has {len(sizes)} sizes and {len(steps)} strides")
        shape = tuple(self.number(size, f"{what}'s size") for size in sizes)
        strides: tuple[int, ...] | None = tuple(self.number(step, f"{what}'s stride") for step in steps)
        if min(shape, default=0) < 0 or min(strides or (0,)) < 0:
            raise ValueError(f"{what} has a negative size or stride")
        if strides == row_major(shape):
            strides = None
        return Meta(shape, DTYPES[code], strides, value.get("requires_grad") is True)


def bind(one: Program, options: Options, where: str) -> Sizes:
    """Give every symbol a value: from ``--input``, from ``--batch``, else the one the program was exported with.

    The batch is the symbol that is the first dimension of every input whose first dimension is open.
    """
    metas = mapping(one.graph.get("tensor_values"), "tensor_values")
    stated: dict[str, list[Any]] = {}
    for given in one.inputs:
        meta = mapping(metas.get(given.name), f"input {given.name}")
        stated[given.name] = list(sequence(meta.get("sizes"), f"input {given.name}'s sizes"))
    values: dict[str, int] = {}
    origin: dict[str, str] = {}
    _from_inputs(one, options, stated, values, where)
    examples = _examples(stated.values())
    firsts = {
        symbol for sizes in stated.values() if sizes and (symbol := _symbol(sizes[0])) is not None
    }
    if len(firsts) == 1:
        (batch,) = firsts
        if batch in values:
            if options.names_batch and options.batch != values[batch]:
                raise InputError(
                    f"--batch {options.batch} contradicts an input of {values[batch]}", where, "leave --batch out"
                )
        elif _within(one, batch, options.batch) or options.names_batch or batch not in examples:
            values[batch], origin[batch] = options.batch, "the batch"
    elif options.names_batch:
        _check_batch(options, stated, where)
    for symbol, example in examples.items():
        if symbol not in values:
            values[symbol], origin[symbol] = example, "the example's"
    for symbol, value in values.items():
        if not _within(one, symbol, value):
            least, most = one.ranges[symbol]
            upto = f"to {most}" if most < _MOST else "up"
            raise InputError(
                f"size {symbol} is {value}, the program takes {least} {upto}", where, _input_repair(one, stated, symbol)
            )
    notes = tuple(f"{symbol}={values[symbol]} ({how})" for symbol, how in sorted(origin.items()))
    most = one.ranges.get(next(iter(firsts)), (0, _MOST))[1] if len(firsts) == 1 else _MOST
    sizes = Sizes(values, notes, most)
    _verify(options, stated, sizes, where, one)
    return sizes


def _from_inputs(
    one: Program, options: Options, stated: Mapping[str, list[Any]], values: dict[str, int], where: str
) -> None:
    inputs = dict(options.inputs or {})
    names = list(stated)
    if inputs and all(name.isdigit() for name in inputs):
        if any(int(name) >= len(names) for name in inputs):
            raise InputError(f"takes {len(names)} inputs, 0 to {len(names) - 1}", where, "name one of them")
        inputs = {names[int(name)]: spec for name, spec in inputs.items()}
    metas = one.graph["tensor_values"]
    for name, spec in inputs.items():
        if name not in stated:
            raise unknown(f"input of {where}", name, names)
        sizes = stated[name]
        dtype = DTYPES.get(metas[name].get("dtype"))
        if spec.dtype != dtype:
            shape = "x".join(map(str, spec.shape))
            repair = f"give --input {name}={shape}:{dtype}"
            raise InputError(f"input {name} is {dtype}, not {spec.dtype}", where, repair)
        if len(spec.shape) != len(sizes):
            raise InputError(
                f"input {name} has {len(sizes)} dimensions, not {len(spec.shape)}", where, _example_repair(one, name)
            )
        for size, wanted in zip(sizes, spec.shape, strict=True):
            symbol = _symbol(size)
            if symbol is not None and values.setdefault(symbol, wanted) != wanted:
                raise InputError(
                    f"size {symbol} is {values[symbol]} in one input and {wanted} in {name}", where, "make them equal"
                )
        for size, wanted in zip(sizes, spec.shape, strict=True):
            _solve(size, wanted, values)


def _solve(size: Any, wanted: int, values: dict[str, int]) -> None:
    """Find the one open symbol of a linear expression, such as 2·s0, from what it must be."""
    expression = _expression(size)
    if expression is None:
        return
    unknowns = [symbol for symbol in symbols_in(expression) if symbol not in values]
    if len(unknowns) != 1:
        return
    (symbol,) = unknowns
    at_two, at_four = (evaluate(expression, {**values, symbol: n}) for n in (2, 4))
    if at_four != at_two:
        guess = 2 + (wanted - at_two) * 2 // (at_four - at_two)
        if guess >= 0 and evaluate(expression, {**values, symbol: guess}) == wanted:
            values[symbol] = guess


def _verify(
    options: Options, stated: Mapping[str, list[Any]], sizes: Sizes, where: str, one: Program
) -> None:
    """What the user gave must be what the program makes of it: fixed sizes cannot be given anew."""
    names = list(stated)
    for name, spec in (options.inputs or {}).items():
        if name not in stated:
            name = names[int(name)] if name.isdigit() else names[0]
        try:
            shape = tuple(sizes.number(size, f"input {name}'s size") for size in stated[name])
        except Unbound as error:
            raise InputError(str(error), where, _input_repair(one, stated, error.symbol)) from None
        if shape != spec.shape:
            stated_shape, wanted = ("x".join(map(str, s)) for s in (shape, spec.shape))
            raise InputError(
                f"input {name} is {stated_shape} in the program, not {wanted}", where,
                "export it with dynamic_shapes to leave sizes open",
            )


def _check_batch(options: Options, stated: Mapping[str, list[Any]], where: str) -> None:
    fixed = [whole(sizes[0].get("as_int"), "a size") for sizes in stated.values() if sizes and "as_int" in sizes[0]]
    if options.batch not in fixed[:1]:
        what = f"is exported for a batch of {fixed[0]}" if fixed else "has no batch to set"
        raise InputError(what, where, "leave --batch out, or export it with dynamic_shapes")


def _examples(inputs: Iterable[Sequence[Any]]) -> dict[str, int]:
    """The sizes the program was exported with, by symbol, where the archive has them."""
    hints = []
    for size in (size for sizes in inputs for size in sizes):
        expression = _expression(size)
        hint = None if expression is None else size["as_expr"].get("hint")
        value = hint.get("as_int") if isinstance(hint, dict) else None
        if expression is not None and isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST:
            hints.append((size, symbol_of(expression), value))
    found: dict[str, int] = {}
    for _size, symbol, value in hints:
        if symbol is not None:
            found.setdefault(symbol, value)
    for size, symbol, value in hints:
        if symbol is None:
            _solve(size, value, found)
    return found


def _expression(size: Any) -> str | None:
    inner = size.get("as_expr") if isinstance(size, dict) else None
    expression = inner.get("expr_str") if isinstance(inner, dict) else None
    return expression if isinstance(expression, str) else None


def _symbol(size: Any) -> str | None:
    expression = _expression(size)
    return None if expression is None else symbol_of(expression)


def _within(one: Program, symbol: str, value: int) -> bool:
    least, most = one.ranges.get(symbol, (0, _MOST))
    return least <= value <= most


def _input_repair(one: Program, stated: Mapping[str, list[Any]], symbol: str) -> str:
    """The ``--input`` that sets a symbol."""
    for name, sizes in stated.items():
        if any(symbol in symbols_in(expression) for size in sizes if (expression := _expression(size)) is not None):
            return _example_repair(one, name)
    return "export the program for sizes that follow from its inputs"


def _example_repair(one: Program, name: str) -> str:
    meta = one.graph["tensor_values"][name]
    parts = []
    for size in meta["sizes"]:
        expression = _expression(size)
        fixed = str(size.get("as_int", "N")) if isinstance(size, dict) else "N"
        parts.append(fixed if expression is None else symbol_of(expression) or "N")
    return f"give --input {name}={'x'.join(parts)}:{DTYPES.get(meta.get('dtype'), 'float32')} with numbers for names"
