"""``pt2:FILE``: a program that ``torch.export.save`` wrote, read as data. Neither PyTorch nor its unpickler is used.

=================  ==================================================================================
`archive`          which member of the zip archive is the program, its size bounded
`program`          the fields that matter, checked; open sizes bound to numbers
`symbols`          expressions over open sizes
`lowering`         the walk through the nodes; what each op does, by name
`views`            ops that move nothing, and their strides
`compositions`     ops that run as several: layers, products, attention, norms, pooling
`recurrent`        RNN, GRU, LSTM
`builder`          tensors, storages and their lifetimes as ops are added
=================  ==================================================================================

An exported program is one inference step at one precision, so that no other setting applies than its open sizes.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from foretell.errors import InputError
from foretell.graph import Graph
from foretell.workload.options import Options
from foretell.workload.pt2 import compositions, recurrent, views  # noqa: F401 (each fills the table of lowering)
from foretell.workload.pt2.archive import read
from foretell.workload.pt2.builder import Builder
from foretell.workload.pt2.lowering import Lowering
from foretell.workload.pt2.program import Program, Sizes, bind, mapping, printable, program
from foretell.workload.pt2.symbols import Unbound

__all__ = ["graph"]

_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16"}
_EXPORT = "export the module anew with torch.export.save"


def graph(file: str, options: Options) -> Graph:
    """The graph of the program in a ``.pt2`` archive; ``FILE:NAME`` names one of several programs.

    Open sizes are bound by ``options.inputs``, the batch by ``options.batch``, the rest by the example the program was
    exported with, where the archive has it; what was bound so is in ``provenance["sizes"]``, and the largest batch
    that the program takes in ``provenance["most_batch"]``, where it has a limit. Raises InputError.
    """
    path, name = _path(file)
    where = str(path)[:300]
    _check(options, where)
    archive = read(path, name)
    try:
        one = program(archive.program)
        sizes = bind(one, options, where)
        builder, inputs, outputs = _lowered(one, sizes, archive.weights, where)
    except Unbound as error:
        raise InputError(
            f"size {printable(error.symbol)} is open and the archive has no example of it", where,
            "set it with --input NAME=SHAPE:DTYPE, or export the program with example inputs",
        ) from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "its parts do not fit together"
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        raise InputError(f"is no exported program: {printable(reason)}", where, _EXPORT) from None
    if not any(op.kind != "view" for op in builder.ops):
        raise InputError("runs nothing", where, _EXPORT)
    parameters = builder.of_role("parameter")
    types = [t.dtype for index in parameters if (t := builder.tensors[index]).dtype.endswith(("16", "32"))]
    most = max(sorted(set(types)), key=types.count, default="float32")
    own = _PRECISIONS.get(most, options.precision if options.precision == "tf32" else "fp32")
    if options.precision not in ("fp32", own):
        raise InputError(f"is exported in {own}, not {options.precision}", where, "leave --precision out")
    first = next((builder.shape(t)[0] for t in inputs if builder.shape(t)), 1)
    return Graph(
        name=f"pt2:{path.name}" + (f":{name}" if name else ""),
        mode="inference",
        precision=own,
        ops=tuple(builder.ops),
        tensors=tuple(builder.tensors),
        storages=builder.storages(outputs),
        parameters=sum(builder.tensors[t].elements for t in parameters),
        trainable_parameters=sum(builder.tensors[t].elements for t in parameters if t in builder.trained),
        items=MappingProxyType({"samples": max(1, first)}),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        provenance=MappingProxyType({
            "source": "torch.export",
            "torch": one.torch,
            "layout": archive.layout,
            **({"sizes": ", ".join(sizes.notes)} if sizes.notes else {}),
            **({"most_batch": str(sizes.most_batch)} if sizes.most_batch < 2**31 else {}),
        }),
    )


def _path(file: str) -> tuple[Path, str | None]:
    path = Path(file)
    name = None
    try:
        if not path.is_file() and ":" in file and Path(file.rpartition(":")[0]).is_file():
            file, _, name = file.rpartition(":")
            path = Path(file)
    except (OSError, ValueError):
        raise InputError("cannot be read", file[:200], "give the path of a file that torch.export.save wrote") from None
    return path, name


def _check(options: Options, where: str) -> None:
    """An exported program stays as it is: say what cannot be set, and how to get it."""
    module = "capture the module it was made from, with py:FILE.py:FACTORY"
    refused = (
        (options.phase != "inference", f"is one inference step, not {options.phase}", module),
        (options.layout != "nchw", "has its layout built in", "export the module in channels_last"),
        (options.image_size is not None, "takes no --image-size", "give --input NAME=SHAPE:DTYPE"),
        (options.seq_len is not None or options.context is not None, "takes no --seq-len or --context",
         "give --input NAME=SHAPE:DTYPE"),
        (options.precision.startswith("amp"), "has its precision built in", "export the module under autocast"),
    )
    for wrong, what, repair in refused:
        if wrong:
            raise InputError(what, where, repair)


def _lowered(
    one: Program, sizes: Sizes, weights: dict[str, str], where: str
) -> tuple[Builder, list[int], list[int]]:
    builder = Builder()
    lowering = Lowering(builder, sizes, where)
    metas = mapping(one.graph.get("tensor_values"), "tensor_values")
    values: dict[str, int] = {}
    inputs: list[int] = []
    shared: dict[tuple[str, object], int] = {}
    for given in one.given:
        meta = sizes.meta(metas.get(given.name), f"input {given.name}")
        key = (weights.get(given.target, given.name), meta)
        if given.role != "input" and key in shared:  # one weight under two names
            values[given.name] = shared[key]
            continue
        index = builder.given(meta, given.role)
        values[given.name] = index
        if given.role == "input":
            inputs.append(index)
        else:
            shared[key] = index
        if meta.requires_grad:
            builder.trained.add(index)
    lowering.graph(one.graph, values)
    outputs = []
    for name in one.outputs:
        if name not in values:
            raise ValueError(f"its result {name[:80]} is never made")
        outputs.append(values[name])
        builder.mark(values[name], "output")
    return builder, inputs, outputs

