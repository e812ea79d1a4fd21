"""From the operations an exported program names to those that PyTorch runs for them.

`Lowering` walks a program's nodes. What a node does is looked up by name in one table, which `lower` fills (here and in
`compositions`); a name that is in no table is an operation of its own, and its results are what the archive says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretell.errors import InputError
from foretell.graph.kinds import base_name, kind_of
from foretell.workload.pt2.builder import Builder, Meta, Shape, dense, permuted_like
from foretell.workload.pt2.program import DTYPES, Sizes, mapping, only, printable, sequence, text, whole
from foretell.workload.pt2.symbols import Unbound

__all__ = ["Args", "Lowering", "lower"]

Results = Sequence[int | None]
Rule = Callable[[Builder, "Args", Sequence[Meta]], Results]

_RULES: dict[str, Rule] = {}
_MOST_DEPTH = 32  # of programs within programs
_MOST_NODES = 100_000
_NAMESPACES = ("aten", "prims", "torchvision", "quantized_decomposed", "foretell")
_FAULTS = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, AssertionError)
# Compositions under no name of their own: they run what they hold.
_WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast", "wrap", "hints_wrapper")
# No kernel, no work.
_SILENT = frozenset(
    {
        "aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten._assert_async.default",
        "aten._assert_scalar.default", "aten.sym_size.int", "aten.sym_stride.int", "aten.sym_numel.default",
        "aten.sym_storage_offset.default", "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default", "aten.sym_is_contiguous.default", "aten.is_same_size.default",
        "aten.numel.default", "aten.size.int",
    }
)
_SAME = frozenset(
    {
        "aten.detach.default", "aten.detach_.default", "aten.alias.default", "aten.lift_fresh.default",
        "aten.lift_fresh_copy.default", "aten.resolve_conj.default", "aten.resolve_neg.default",
        "aten.positive.default", "aten.requires_grad_.default",
    }
)


def lower(*names: str) -> Callable[[Rule], Rule]:
    """Register what the ops of these names do; refuses a second rule for one of them."""

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"{name!r} is lowered already")
            _RULES[name] = rule
        return rule

    return register


class Args:
    """A node's arguments by the names of its schema; sizes are numbers, tensors are indices."""

    def __init__(self, name: str, values: Mapping[str, Any], tensors: Mapping[str, int]) -> None:
        self.name = name
        self.values = values
        self._tensors = tensors

    def tensor(self, *names: str) -> int:
        """A tensor that must be there."""
        value = self.maybe(*names)
        if value is None:
            raise ValueError(f"it has no tensor {' or '.join(names)}")
        return value

    def maybe(self, *names: str) -> int | None:
        """A tensor that may be missing."""
        value = next((self.values[name] for name in names if self.values.get(name) is not None), None)
        if value is None:
            return None
        if not isinstance(value, Tensor):
            raise ValueError(f"its argument {names[0]} is no tensor")
        return value.index

    def tensors(self, name: str) -> list[int]:
        """A list of tensors, without those missing in it."""
        value = self.values.get(name)
        if not isinstance(value, (list, tuple)) or any(not isinstance(t, (Tensor, type(None))) for t in value):
            raise ValueError(f"its argument {name} is no list of tensors")
        return [t.index for t in value if t is not None]

    def all_tensors(self) -> list[int]:
        """Every tensor among the arguments, in order."""
        found: list[int] = []
        for value in self.values.values():
            items = value if isinstance(value, (list, tuple)) else (value,)
            found += [item.index for item in items if isinstance(item, Tensor)]
        return found

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        return whole(value, f"its argument {name}")

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(name)
        return default if value is None else bool(value)

    def numbers(self, name: str, count: int | None = None, default: int | None = None) -> tuple[int, ...]:
        """A list of whole numbers; one number stands for `count` equal ones."""
        value = self.values.get(name)
        if value is None or value == []:
            if default is None:
                raise ValueError(f"it has no {name}")
            return (default,) * (count or 1)
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,) * (count or 1)
        if not isinstance(value, list) or len(value) > 64:
            raise ValueError(f"its argument {name} is no list of numbers")
        found = tuple(whole(n, f"its argument {name}") for n in value)
        return found * count if count is not None and len(found) == 1 else found

    def dim(self, name: str, rank: int, default: int | None = None) -> int:
        """A dimension, counted from the front."""
        value = self.number(name, default)
        if not -max(rank, 1) <= value < max(rank, 1):
            raise ValueError(f"its argument {name} is {value}, but there are {rank} dimensions")
        return value + rank if value < 0 else value


class Tensor:
    """A tensor among arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Lowering:
    """Runs through the nodes of a program and writes down what they do."""

    def __init__(self, builder: Builder, sizes: Sizes, where: str) -> None:
        self.builder = builder
        self.sizes = sizes
        self.where = where
        self.nodes = 0

    def graph(
        self, graph: Mapping[str, Any], values: dict[str, int], depth: int = 0, outer: tuple[str, ...] = ()
    ) -> list[int]:
        """Lower the nodes of one graph, given its inputs by name; returns its results that are tensors."""
        if depth > _MOST_DEPTH:
            raise InputError(f"programs within programs, {depth} deep", self.where, "give a program of fewer levels")
        metas = mapping(graph.get("tensor_values"), "tensor_values")
        scalars = mapping(graph.get("sym_int_values") or {}, "sym_int_values")
        nodes = sequence(graph.get("nodes"), "nodes")
        self.nodes += len(nodes)
        if self.nodes > _MOST_NODES:
            raise InputError(f"has more than {_MOST_NODES:,} nodes", self.where, "give a smaller program")
        for index, node in enumerate(nodes):
            target = node.get("target") if isinstance(node, dict) else None
            try:
                self._node(mapping(node, "the node"), values, metas, scalars, depth, outer)
            except Unbound as error:
                raise InputError(
                    f"node {index} ({_short(target)}): size {printable(error.symbol)} depends on values, "
                    "which do not exist before the run",
                    self.where,
                    "export a program whose sizes follow from its inputs",
                ) from None
            except _FAULTS as error:
                # Others than ValueError are Python's own: of arguments that are missing, or fewer than they must be.
                reason = str(error) if isinstance(error, ValueError) else "its arguments do not fit together"
                raise InputError(
                    f"node {index} ({_short(target)}): {printable(reason)}", self.where, "export the program anew"
                ) from None
        results = []
        for position, output in enumerate(sequence(graph.get("outputs"), "outputs")):
            for name in _names(output, f"output {position}"):
                if name is not None:
                    results.append(_known(values, name))
        return results

    def _node(
        self,
        node: Mapping[str, Any],
        values: dict[str, int],
        metas: Mapping[str, Any],
        scalars: Mapping[str, Any],
        depth: int,
        outer: tuple[str, ...],
    ) -> None:
        target = text(node.get("target"), "the target")
        name = target.removeprefix("torch.ops.")
        stack, module = _modules(node.get("metadata"))
        self.builder.enter(outer + stack, module)
        names: list[str | None] = []
        for output in sequence(node.get("outputs"), "outputs"):
            names += _names(output, "an output")
        if name in _SILENT or not target.startswith("torch.ops.") or (not names and name.startswith("aten.sym_")):
            return
        arguments = sequence(node.get("inputs"), "inputs")
        namespace, _, rest = name.partition(".")
        if namespace == "higher_order":
            results: Results = self._higher_order(rest, arguments, values, metas, depth, outer + stack, names)
        else:
            args = Args(name, {
                text(mapping(a, "an argument").get("name"), "an argument"): self._value(a.get("arg"), values, scalars)
                for a in arguments
            }, values)
            stated = [self._meta(metas, one) for one in names if one is not None]
            results = self._run(name, args, stated)
        if len(results) < sum(one is not None for one in names):
            raise ValueError(f"it has {len(names)} results, not {len(results)}")
        for one, result in zip([n for n in names if n is not None], results, strict=False):
            if result is not None:
                values[one] = result

    def _meta(self, metas: Mapping[str, Any], name: str) -> Meta:
        return self.sizes.meta(metas.get(name), f"value {name}")

    def _run(self, name: str, args: Args, stated: Sequence[Meta]) -> Results:
        builder = self.builder
        if name in _SAME:
            return [args.all_tensors()[0]]
        if name.partition(".")[0] not in _NAMESPACES:
            return uncounted(builder, name, args.all_tensors(), stated)
        rule = _RULES.get(name)
        if rule is None:
            packet = name.rpartition(".")[0]
            rule = _RULES.get(packet + ".*")
        if rule is not None:
            return rule(builder, args, stated)
        return plain(builder, name, args, stated)

    def _value(self, argument: Any, values: Mapping[str, int], scalars: Mapping[str, Any]) -> Any:
        """An argument as plain data: tensors as `Tensor`, sizes as numbers."""
        kind, inner = only(argument, "an argument")
        if kind == "as_tensor":
            return Tensor(_known(values, text(mapping(inner, "a tensor").get("name"), "a tensor")))
        if kind == "as_tensors":
            return [Tensor(_known(values, text(mapping(t, "a tensor").get("name"), "a tensor")))
                    for t in sequence(inner, "tensors")]
        if kind == "as_optional_tensors":
            return [self._optional(t, values) for t in sequence(inner, "tensors")]
        if kind == "as_optional_tensor":
            return self._optional(inner, values)
        if kind == "as_none":
            return None
        if kind == "as_sym_int":
            return self._scalar(inner, scalars)
        if kind == "as_sym_ints":
            return [self._scalar(n, scalars) for n in sequence(inner, "sizes")]
        if kind == "as_scalar_type":
            return DTYPES.get(inner) if isinstance(inner, int) else None
        return inner  # numbers, texts, flags and lists of them; what reads one checks it

    def _optional(self, value: Any, values: Mapping[str, int]) -> Tensor | None:
        kind, inner = only(value, "a tensor")
        if kind != "as_tensor":
            return None
        return Tensor(_known(values, text(mapping(inner, "a tensor").get("name"), "a tensor")))

    def _scalar(self, value: Any, scalars: Mapping[str, Any]) -> int:
        kind, inner = only(value, "a size")
        if kind == "as_int":
            return whole(inner, "a size")
        name = text(inner, "a size")
        if name not in scalars:
            raise ValueError(f"size {name[:80]} is not defined")
        return self.sizes.number(scalars[name], f"size {name[:80]}")

    def _higher_order(
        self,
        name: str,
        arguments: Sequence[Any],
        values: Mapping[str, int],
        metas: Mapping[str, Any],
        depth: int,
        stack: tuple[str, ...],
        names: Sequence[str | None],
    ) -> Results:
        """A program within the program: run through where it runs once for certain, else not counted."""
        programs: list[Mapping[str, Any]] = []
        operands: list[int] = []
        for argument in arguments:
            kind, inner = only(mapping(argument, "an argument").get("arg"), "an argument")
            if kind == "as_graph":
                programs.append(mapping(mapping(inner, "a program").get("graph"), "a program"))
            elif kind in ("as_tensor", "as_tensors", "as_optional_tensors"):
                value = self._value({kind: inner}, values, {})
                operands += [t.index for t in (value if isinstance(value, list) else [value]) if t is not None]
        base = name.partition(".")[0]
        if base in _WRAPPERS and len(programs) == 1:
            inside = programs[0]
            given = [n for p, spec in enumerate(sequence(inside.get("inputs"), "inputs"))
                     for n in _names(spec, f"input {p}")]
            if len(given) > len(operands):
                raise ValueError(f"a program within takes {len(given)} tensors and is given {len(operands)}")
            local = {n: t for n, t in zip(given, operands[len(operands) - len(given):], strict=True) if n is not None}
            return self.graph(inside, local, depth + 1, stack)
        stated = [self._meta(metas, one) for one in names if one is not None]
        return uncounted(self.builder, f"higher_order.{base}", operands, stated)


def uncounted(builder: Builder, name: str, inputs: Sequence[int], stated: Sequence[Meta]) -> Results:
    """An op of which only its name and tensors are known: its traffic is counted, its arithmetic is not."""
    outputs = [builder.new(meta) for meta in stated]
    builder.add("unknown", inputs, outputs, kind="other")
    builder.ops[-1] = replace(builder.ops[-1], name=name)
    return outputs


def plain(builder: Builder, name: str, args: Args, stated: Sequence[Meta]) -> Results:
    """An op that runs as it is named."""
    inputs = args.all_tensors()
    attrs = attributes(name, args)
    packet = name.rpartition(".")[0]
    if packet.endswith("_") and not packet.endswith("__") and inputs:  # in place
        return [builder.write(name, inputs, **attrs), *(builder.new(m) for m in stated[1:])]
    kind = kind_of(name)
    outputs = [builder.new(_placed(builder, meta, inputs, kind)) for meta in stated]
    builder.add(name, inputs, outputs, attrs)
    return outputs


def _placed(builder: Builder, meta: Meta, inputs: Sequence[int], kind: str) -> Meta:
    """A result of an elementwise op keeps the order of its operands' dimensions, whatever the archive says of it."""
    if kind != "pointwise":
        return meta
    for tensor in inputs:
        shape, strides = builder.shape(tensor), builder.strides(tensor)
        if shape == meta.shape and 0 not in strides and not dense(shape, strides):
            return Meta(meta.shape, meta.dtype, permuted_like(shape, strides))
        if shape == meta.shape:
            return Meta(meta.shape, meta.dtype) if dense(shape, strides) else meta
    return meta


def attributes(name: str, args: Args) -> dict[str, Any]:
    """What the counting rules and the cost models read of an op's arguments, as a capture writes it down."""
    values = args.values
    base = base_name(name)

    def integers(*names: str) -> Shape | None:
        for one in names:
            if isinstance(values.get(one), list):
                return args.numbers(one)
        return None

    if "pool" in name:
        window = integers("kernel_size", "output_size")
        return {} if window is None else {"window": window}
    if base in ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"):
        return {"training": args.flag("training"), "affine": args.maybe("weight") is not None}
    if base in ("native_layer_norm", "native_group_norm"):
        return {"affine": args.maybe("weight") is not None}
    if name.startswith(("aten.sum.", "aten.mean.", "aten.amax.", "aten.var", "aten.std")):
        dims = integers("dim")
        return {} if dims is None else {"dims": dims}
    if name.startswith(("aten._softmax", "aten._log_softmax")):
        return {"dim": args.number("dim", -1)}
    if name == "aten.topk.default":
        return {"k": args.number("k")}
    return {}


def _known(values: Mapping[str, int], name: str) -> int:
    if name not in values:
        raise ValueError(f"value {name[:80]} is used before it is made")
    return values[name]


def _names(argument: Any, what: str) -> list[str | None]:
    """The tensors an output stands for: one, several, or none where it is a number."""
    kind, inner = only(argument, what)
    if kind == "as_tensor":
        return [text(mapping(inner, what).get("name"), what)]
    if kind == "as_tensors":
        return [text(mapping(t, what).get("name"), what) for t in sequence(inner, what)]
    if kind == "as_optional_tensors":
        names: list[str | None] = []
        for t in sequence(inner, what):
            alternative, tensor = only(t, what)
            names.append(text(mapping(tensor, what).get("name"), what) if alternative == "as_tensor" else None)
        return names
    return []


def _modules(metadata: Any) -> tuple[tuple[str, ...], str]:
    """The modules a node runs in, outermost first, and the path of the innermost."""
    stack = metadata.get("nn_module_stack") if isinstance(metadata, dict) else None
    if not isinstance(stack, str) or not stack or len(stack) > 100_000:
        return (), ""
    entries = [entry.split(",", 2) for entry in stack.split(";")][:128]
    keys = tuple(entry[0] for entry in entries)
    path = entries[-1][1] if len(entries[-1]) > 1 else ""
    for prefix in ("L['self'].", "L['self']", "L__self__"):
        path = path.removeprefix(prefix)
    path = path.partition("@")[0]
    return keys, path[:500] if path.isprintable() else ""


def _short(target: Any) -> str:
    return printable(str(target).removeprefix("torch.ops."), 80)
