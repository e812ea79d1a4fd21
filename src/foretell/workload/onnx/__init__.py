"""ONNX files as graphs: the file is parsed, its shapes made concrete, and each node recorded as what PyTorch would run.

* `read` parses the file, or says what it is instead.
* `graph` (here) binds the inputs' shapes, and makes the result a `Graph`.
* `core` walks the nodes; `fuse` first joins what exporters spell out; `values` folds arithmetic on shapes.
* `ops` translates, one file a family; `builder` keeps tensors, views and lifetimes.

Nothing in a file is executed, and weights beside it are never opened.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretell.errors import CaptureError, InputError, unknown
from foretell.graph import Graph
from foretell.workload.onnx.builder import Builder
from foretell.workload.onnx.core import Walk, shown
from foretell.workload.onnx.read import checked_shape, dtype_name, load, opsets
from foretell.workload.onnx.values import Value
from foretell.workload.options import InputSpec, Options

__all__ = ["graph"]


def graph(name: str, options: Options) -> Graph:
    """The graph of the ONNX file at path `name`, its inputs' shapes taken from `options`.

    Raises InputError where the file is damaged or a dimension is left open, CaptureError where nothing of it can be
    known before it runs.
    """
    _refuse(name, options)
    model = load(Path(name))
    builder = Builder(options.precision, options.layout)
    walk = Walk(model, builder, name)
    scope: dict[str, Value] = {}
    parameters = walk.initializers(model.graph, scope)
    inputs = _inputs(model.graph, scope, options, name)
    for key, value in inputs.items():
        builder.register(value, "input")
        scope[key] = value
    outputs = walk.run(model.graph, scope)
    ids = tuple(builder.index(v) for v in outputs if v.shape is not None or v.tensor is not None)
    kept = {builder.tensors[i].storage for i in ids}
    for value in outputs:
        builder.set_role(value, "output")
    _mark_caches(model.graph, scope, builder)
    if not any(op.kind != "view" for op in builder.ops):
        raise CaptureError(f"{name}: nothing in it runs: its outputs are known beforehand", "export the whole model")
    first = next((v.shape[0] for v in inputs.values() if v.shape), options.batch)
    return Graph(
        name=f"onnx:{name}",
        mode="inference",
        precision=options.precision,
        ops=tuple(builder.ops),
        tensors=tuple(builder.tensors),
        storages=builder.storages(kept),
        parameters=parameters,
        trainable_parameters=parameters,
        items=MappingProxyType({"samples": max(1, first)}),
        inputs=tuple(v.tensor for v in inputs.values() if v.tensor is not None),
        outputs=ids,
        provenance=MappingProxyType(_provenance(model, walk)),
    )


def _refuse(name: str, options: Options) -> None:
    where = f"onnx:{name}"[:200]
    if options.phase != "inference":
        repair = "leave --train and --phase out, or give the PyTorch module as py:FILE.py:FACTORY"
        raise InputError(f"an ONNX file holds one forward pass, no {options.phase} phase", where, repair)
    if options.precision in ("amp", "amp_bf16"):
        repair = "give --precision fp16 or bf16, or leave it out: the file says what it runs in"
        raise InputError("autocast is PyTorch's, and an ONNX file has its casts written in", where, repair)
    for option, value in (("--seq-len", options.seq_len), ("--context", options.context),
                          ("--image-size", options.image_size)):  # fmt: skip
        if value is not None:
            repair = "give shapes by --input NAME=SHAPE, e.g. --input x=8x3x224x224"
            raise InputError(f"an ONNX file takes no {option}", where, repair)


# --- inputs -----------------------------------------------------------------------------------------------------


def _inputs(graph_: Any, scope: dict[str, Value], options: Options, where: str) -> dict[str, Value]:
    """The graph's inputs with concrete shapes: what the file fixes, what ``--input`` gives, ``--batch`` for the rest
    of first dimensions.
    """
    declared = {v.name: v for v in graph_.input if v.name not in scope}
    if len(declared) + sum(v.name in scope for v in graph_.input) != len(graph_.input):
        raise InputError("two inputs have one name", where, "export the model again")
    given = _given(declared, options)
    sizes: dict[str, tuple[int, str]] = {}  # symbol → size, and who said so
    for name, spec in given.items():
        for dim, size in zip(declared[name].type.tensor_type.shape.dim, spec.shape, strict=False):
            if dim.dim_param and not dim.HasField("dim_value"):
                _bind(sizes, dim.dim_param, size, f"--input {shown(name)}")
    fixed_batch = None
    for name, info in declared.items():
        dims = info.type.tensor_type.shape.dim
        if name not in given and len(dims) and not dims[0].HasField("dim_value"):
            symbol = dims[0].dim_param
            if symbol and symbol not in sizes:
                sizes[symbol] = options.batch, "--batch"
        elif name not in given and len(dims) and fixed_batch is None:
            fixed_batch = name, dims[0].dim_value
    free = any(who == "--batch" for _, who in sizes.values()) or any(
        name not in given and len(v.type.tensor_type.shape.dim)
        and not v.type.tensor_type.shape.dim[0].HasField("dim_value") for name, v in declared.items()
    )
    if options.names_batch and not free:
        if fixed_batch is not None and fixed_batch[1] != options.batch:
            what = f"input {shown(fixed_batch[0])} has a fixed first dimension of {fixed_batch[1]}"
            raise InputError(f"{what}, not {options.batch}", where, "export it with a dynamic batch (dynamic_axes), or "
                             "leave --batch out")
        if given and fixed_batch is None and all(s.shape[:1] != (options.batch,) for s in given.values()):
            raise InputError(f"--batch {options.batch} contradicts the inputs given", where, "leave --batch out")
    return {name: _input(name, info, given.get(name), sizes, options, where) for name, info in declared.items()}


def _given(declared: dict[str, Any], options: Options) -> dict[str, InputSpec]:
    """``--input`` by the file's own names; numbers are positions."""
    given = dict(options.inputs or {})
    names = list(declared)
    found = {}
    for name, spec in given.items():
        if name in declared:
            found[name] = spec
        elif name.isdigit() and int(name) < len(names):
            found[names[int(name)]] = spec
        else:
            raise unknown("input", name, [shown(n) for n in names])
    return found


def _bind(sizes: dict[str, tuple[int, str]], symbol: str, size: int, who: str) -> None:
    if symbol in sizes and sizes[symbol][0] != size:
        before, other = sizes[symbol]
        raise InputError(f"dimension {shown(symbol)!r} is {before} by {other} and {size} by {who}",
                         repair="give shapes that agree")
    sizes[symbol] = size, who


def _input(
    name: str, info: Any, spec: InputSpec | None, sizes: dict[str, tuple[int, str]], options: Options, where: str
) -> Value:
    here = f"{where}: input {shown(name)}"
    if not info.type.HasField("tensor_type"):
        raise InputError("is no tensor", here, "export the model with tensors as inputs")
    kind = info.type.tensor_type
    dtype = dtype_name(kind.elem_type, here)
    if spec is not None:
        if spec.dtype not in (dtype, "float32"):
            raise InputError(f"is {dtype} in the file, not {spec.dtype}", here, "leave the type out")
        if kind.HasField("shape") and len(kind.shape.dim) != len(spec.shape):
            raise InputError(f"has {len(kind.shape.dim)} dimensions, not {len(spec.shape)}", here,
                             f"write --input {_example(name, kind, sizes, options)}")
        for at, (dim, size) in enumerate(zip(kind.shape.dim, spec.shape, strict=False)):
            if dim.HasField("dim_value") and dim.dim_value not in (size, 0):
                raise InputError(f"dimension {at} is {dim.dim_value} in the file, not {size}", here,
                                 f"write --input {_example(name, kind, sizes, options)}")
        return Value(checked_shape(spec.shape, here), dtype)
    if not kind.HasField("shape"):
        raise InputError("has no shape in the file", here, f"write --input {shown(name)}=SHAPE")
    shape = []
    for at, dim in enumerate(kind.shape.dim):
        found = _size(dim, at, sizes, options)
        if found is None:
            what = f"dimension {at} ({shown(dim.dim_param)!r})" if dim.dim_param else f"dimension {at}"
            raise InputError(f"{what} is left open", here, f"write --input {_example(name, kind, sizes, options)}")
        shape.append(found)
    return Value(checked_shape(shape, here), dtype)


def _size(dim: Any, at: int, sizes: dict[str, tuple[int, str]], options: Options) -> int | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    if dim.dim_param in sizes:
        return sizes[dim.dim_param][0]
    return options.batch if at == 0 else None


def _example(name: str, kind: Any, sizes: dict[str, tuple[int, str]], options: Options) -> str:
    """What to write for an input: its known sizes, and 128 in place of the open ones."""
    known = [_size(dim, at, sizes, options) for at, dim in enumerate(kind.shape.dim)]
    return f"{shown(name)}={'x'.join(str(128 if s is None else s) for s in known)}"


def _mark_caches(graph_: Any, scope: dict[str, Value], builder: Builder) -> None:
    """A decoder's cache: an input that the model returns with new entries after it, at the same place."""
    outputs = {v.name for v in graph_.output}
    inputs = {v.name for v in graph_.input}
    for node in graph_.node:
        grown = [name for name in node.input if name in inputs and len(node.input) == 2]
        if node.op_type == "Concat" and grown and node.output[0] in outputs:
            for name in (*grown[:1], node.output[0]):
                builder.set_role(scope[name], "kv_cache")
        if node.op_type in ("GroupQueryAttention", "MultiHeadAttention", "Attention"):
            past = [name for name in node.input[3:] if name in inputs and scope[name].dtype.startswith(("fl", "bf"))]
            for name in (*past, *(n for n in node.output[1:3] if n in outputs and past)):
                builder.set_role(scope[name], "kv_cache")


def _provenance(model: Any, walk: Walk) -> dict[str, str]:
    found = {
        "source": "onnx",
        "opset": str(opsets(model)[""]),
        "producer": shown(f"{model.producer_name} {model.producer_version}".strip()) or "not named",
    }
    for about, entries in walk.notes.items():
        found[about] = ", ".join(f"{count} {what}" for what, count in sorted(entries.items()))
    return found
