"""Hand the ONNX reader thousands of malformed files: each must be refused by name, soon, and in little memory.

    python benchmarks/fuzz_onnx.py [--count 2400] [--seed 0]

Every file is a sound one after one of the mutations below, a hostile one built whole, or one node of a standard
operation with operands and attributes drawn at random. The reader passes where it returns a graph or raises a
`ForetellError`; a traceback, a dead process, more than 5 s for a file, or more than 1 GB of memory is a failure.
Batches run in processes of their own with both limits set, so that a crash in a library is seen too. The tests run a
few hundred cases.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, TensorProto, defs, helper, numpy_helper

from foretell.errors import ForetellError
from foretell.graph import Graph
from foretell.workload.onnx import graph
from foretell.workload.options import options

MOST_SECONDS = 5
MOST_BYTES = 1_000_000_000
BATCH = 200
HUGE = (0, 1, -1, 2, 3, 7, 1024, 2**31, 2**32, 2**59, 2**62, 2**63 - 1, -(2**63))
F = TensorProto.FLOAT

Mutation = Callable[[random.Random, ModelProto], "ModelProto | bytes"]


# --- sound models -----------------------------------------------------------------------------------------------


def _value(name: str, shape: Any, kind: int = F) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def _stored(name: str, *shape: int, dtype: str = "float32") -> Any:
    return numpy_helper.from_array(np.zeros(shape, dtype=dtype), name)


def _model(nodes: list[Any], inputs: list[Any], outputs: list[str], stored: list[Any], **settings: Any) -> ModelProto:
    made = helper.make_graph(nodes, "g", inputs, [_value(n, None) for n in outputs], stored)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)],
                             **settings)


def convolutional() -> ModelProto:
    """Convolution, norm, pooling, a classifier."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["a", "g", "g", "m", "m"], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("MaxPool", ["c"], ["d"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Shape", ["d"], ["s"]),
        node("Slice", ["s", "zero", "one"], ["n"]),
        node("Concat", ["n", "minus"], ["to"], axis=0),
        node("Reshape", ["d", "to"], ["e"]),
        node("Gemm", ["e", "v", "k"], ["y"], transB=1),
    ]
    integers = [numpy_helper.from_array(np.array([i], dtype=np.int64), n) for n, i in
                (("zero", 0), ("one", 1), ("minus", -1))]
    stored = [_stored("w", 8, 3, 3, 3), _stored("g", 8), _stored("m", 8), _stored("v", 5, 32), _stored("k", 5)]
    return _model(nodes, [_value("x", ["n", 3, 8, 8])], ["y"], [*stored, *integers])


def attentive() -> ModelProto:
    """Projections, attention with a mask, a branch, a quantised product."""
    node = helper.make_node
    then = helper.make_graph([node("Relu", ["o"], ["t"])], "t", [], [_value("t", None)])
    other = helper.make_graph([node("Softmax", ["o"], ["e"])], "e", [], [_value("e", None)])
    nodes = [
        node("MatMul", ["x", "w"], ["p"]),
        node("Split", ["p"], ["q", "k", "v"], axis=2, num_outputs=3),
        node("Attention", ["q", "k", "v"], ["o"], domain="com.acme"),
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], ["s"]),
        node("Softmax", ["s"], ["f"]),
        node("MatMul", ["f", "v"], ["z"]),
        node("If", ["c"], ["i"], then_branch=then, else_branch=other),
        node("DequantizeLinear", ["u", "scale"], ["ud"]),
        node("MatMul", ["z", "ud"], ["y"]),
        node("Einsum", ["z", "z"], ["h"], equation="bij,bkj->bik"),
        node("LSTM", ["z", "lw", "lr"], ["r"], hidden_size=4),
    ]
    stored = [_stored("w", 16, 48), _stored("u", 16, 4, dtype="int8"), _stored("scale", 1), _stored("lw", 1, 16, 16),
              _stored("lr", 1, 16, 4)]
    return _model(nodes, [_value("x", [2, 6, 16]), _value("c", [], TensorProto.BOOL)], ["y", "i", "h", "r"], stored)


SOUND = (convolutional, attentive)


# --- mutations --------------------------------------------------------------------------------------------------


def cut(draw: random.Random, model: ModelProto) -> bytes:
    """The file ends early."""
    data = model.SerializeToString()
    return data[: draw.randrange(len(data))]


def flip(draw: random.Random, model: ModelProto) -> bytes:
    """Some bytes are others."""
    data = bytearray(model.SerializeToString())
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def splice(draw: random.Random, model: ModelProto) -> bytes:
    """A stretch of the file is missing, doubled or zero."""
    data = model.SerializeToString()
    a, b = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[:a] + draw.choice((b"", data[a:b] * 2, bytes(b - a))) + data[b:]


def dims(draw: random.Random, model: ModelProto) -> ModelProto:
    """A stored tensor is declared of another size, or of another type."""
    tensor = draw.choice(model.graph.initializer)
    if draw.random() < 0.3:
        tensor.data_type = draw.choice((0, 8, 10, 14, 16, 22, 25, 26, 99, -1 % 2**31))
    elif draw.random() < 0.5 and tensor.dims:
        tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice(HUGE)
    else:
        tensor.dims.extend([draw.choice(HUGE)] * draw.choice((1, 2, 70)))
    return model


def external(draw: random.Random, model: ModelProto) -> ModelProto:
    """A stored tensor lies in another file, perhaps a hostile one, and is huge."""
    tensor = draw.choice(model.graph.initializer)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    places = ("../../etc/passwd", "/etc/passwd", "a/../../b", "C:\\x", "w.bin", "", "\0", "x" * 5000)
    tensor.external_data.add(key="location", value=draw.choice(places))
    tensor.external_data.add(key="offset", value=str(draw.choice(HUGE)))
    if draw.random() < 0.5 and tensor.dims:
        tensor.dims[0] = draw.choice(HUGE)
    return model


def input_shape(draw: random.Random, model: ModelProto) -> ModelProto:
    """An input of another shape or type, or of none."""
    one = draw.choice(model.graph.input).type
    if draw.random() < 0.15:
        one.Clear()
    elif draw.random() < 0.15:
        one.tensor_type.elem_type = draw.choice((0, 8, 15, 16, 77))
    elif draw.random() < 0.15:
        one.tensor_type.ClearField("shape")
    elif one.tensor_type.shape.dim:
        one.tensor_type.shape.dim[draw.randrange(len(one.tensor_type.shape.dim))].dim_value = draw.choice(HUGE)
    return model


def names(draw: random.Random, model: ModelProto) -> ModelProto:
    """A name is missing, doubled, another's, or its own: cycles and orphans."""
    every = [n for node in model.graph.node for n in (*node.input, *node.output)]
    every += ["", "nowhere", "\x1b[31m", "n" * 9999]
    node = draw.choice(model.graph.node)
    where = node.input if draw.random() < 0.5 and node.input else node.output
    if where:
        where[draw.randrange(len(where))] = draw.choice(every)
    if draw.random() < 0.2:
        node.input.extend([draw.choice(every)] * draw.choice((1, 3, 500)))
    if draw.random() < 0.1:
        del node.input[:]
    return model


def kinds(draw: random.Random, model: ModelProto) -> ModelProto:
    """A node is of another operation or domain."""
    node = draw.choice(model.graph.node)
    node.op_type = draw.choice((*OPERATIONS, "", "mm", "Loop", "Scan", "\0"))
    node.domain = draw.choice(("", "", "com.microsoft", "ai.onnx.ml", "foretell", "a.mm.b"))
    return model


def attribute(draw: random.Random, model: ModelProto) -> ModelProto:
    """An attribute is another's type, enormous, or refers to nothing."""
    node = draw.choice([n for n in model.graph.node if n.attribute] or list(model.graph.node))
    _any_attribute(draw, draw.choice(node.attribute) if node.attribute else node.attribute.add(name="axis"))
    return model


def _any_attribute(draw: random.Random, one: AttributeProto) -> None:
    name = one.name
    one.Clear()
    one.name = name
    kind = draw.randrange(8)
    if kind == 0:
        one.type, one.i = AttributeProto.INT, draw.choice(HUGE)
    elif kind == 1:
        one.type = AttributeProto.INTS
        one.ints.extend([draw.choice(HUGE) for _ in range(draw.choice((0, 1, 2, 4, 100_000)))])
    elif kind == 2:
        one.type, one.f = AttributeProto.FLOAT, draw.choice((0.0, float("nan"), float("inf"), -1e30))
    elif kind == 3:
        one.type = AttributeProto.STRING
        one.s = draw.choice((b"", b"\xff\xfe", b"SAME_UPPER", b"bij,bjk->bik", b"a" * 9999))
    elif kind == 4:
        one.type = AttributeProto.GRAPH
        one.g.node.add(op_type="Relu", input=["x"], output=["x"])
    elif kind == 5:
        one.type, one.ref_attr_name = AttributeProto.INT, "nothing"
    elif kind == 6:
        one.type = AttributeProto.TENSOR
        one.t.data_type = draw.choice((1, 7, 8, 99))
        one.t.dims.extend([draw.choice(HUGE)])
    else:
        one.type = draw.randrange(20)


def nested(draw: random.Random, model: ModelProto) -> bytes:
    """Branches within branches, deeper than any reader should go: written by hand, as the library would refuse."""
    inner = b""
    for _ in range(draw.choice((5, 30, 60, 99, 1000))):
        attr = b"\x0a\x01t\x32" + _varint(len(inner)) + inner + b"\xa0\x01\x05"
        node = b"\x0a\x01c\x12\x01y\x22\x02If" + b"\x2a" + _varint(len(attr)) + attr
        inner = b"\x0a" + _varint(len(node)) + node
    return b"\x08\x08\x3a" + _varint(len(inner)) + inner + b"\x42\x02\x10\x14"


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def laughs(draw: random.Random, model: ModelProto) -> ModelProto:
    """Functions that call each other twice, or themselves: small in the file, endless in the run."""
    depth = draw.choice((1, 10, 40))
    node = helper.make_node
    for level in range(depth):
        callee = f"f{level - 1}" if level else draw.choice(("f0", f"f{depth - 1}", "gone"))
        body = [node(callee, ["a"], ["b"], domain="d"), node(callee, ["b"], ["c"], domain="d")]
        made = helper.make_function("d", f"f{level}", ["a"], ["c"], body, [helper.make_opsetid("", 20)])
        model.functions.append(made)
    model.graph.node.append(node(f"f{depth - 1}", ["x"], ["last"], domain="d"))
    model.graph.output.append(_value("last", None))
    return model


def shapes(draw: random.Random, model: ModelProto) -> ModelProto:
    """A small file whose tensors are enormous: shapes written out of numbers."""
    sizes = numpy_helper.from_array(np.array([draw.choice(HUGE) for _ in range(draw.randrange(1, 6))], np.int64), "sz")
    model.graph.initializer.append(sizes)
    node = helper.make_node
    made = draw.choice((
        node("Expand", ["x", "sz"], ["last"]), node("Reshape", ["x", "sz"], ["last"]),
        node("Tile", ["x", "sz"], ["last"]), node("ConstantOfShape", ["sz"], ["last"]),
        node("Range", ["sz", "sz", "sz"], ["last"]),
        node("Pad", ["x", "sz"], ["last"]), node("Resize", ["x", "", "", "sz"], ["last"]),
        node("Unsqueeze", ["x", "sz"], ["last"]), node("Slice", ["x", "sz", "sz"], ["last"]),
        node("SplitToSequence", ["x", "sz"], ["last"]), node("TopK", ["x", "sz"], ["last", "i"]),
        node("OneHot", ["x", "sz", "sz"], ["last"]), node("Gather", ["sz", "x"], ["last"]),
    ))  # fmt: skip
    model.graph.node.append(made)
    model.graph.output.append(_value("last", None))
    return model


def opset(draw: random.Random, model: ModelProto) -> ModelProto:
    """Another opset, or several, or none."""
    del model.opset_import[:]
    for _ in range(draw.randrange(3)):
        version = draw.choice((7, 9, 11, 13, 15, 18, 23, 24, *HUGE))
        model.opset_import.add(domain=draw.choice(("", "ai.onnx", "x")), version=version)
    return model


def lone_node(draw: random.Random, model: ModelProto) -> ModelProto:
    """One standard operation on operands and attributes drawn at random."""
    name = draw.choice(OPERATIONS)
    schema = defs.get_schema(name)
    count = draw.randint(schema.min_input, min(schema.max_input, schema.min_input + 3))
    node = helper.make_node(name, [f"i{k}" for k in range(count)], [f"o{k}" for k in range(max(1, schema.min_output))])
    for key in schema.attributes:
        if draw.random() < 0.5:
            _plausible(draw, node.attribute.add(name=key), schema.attributes[key].type)
    inputs, stored = [], []
    for k in range(count):
        shape = [draw.choice((0, 1, 2, 3, 8, 2**33)) for _ in range(draw.randrange(6))]
        if draw.random() < 0.4:
            small = [min(s, 3) for s in shape]
            kind = draw.choice(("int64", "float32", "int8", "bool"))
            stored.append(numpy_helper.from_array((np.ones(small) * draw.choice((0, 1, -1, 3))).astype(kind), f"i{k}"))
        else:
            inputs.append(_value(f"i{k}", shape, draw.choice((1, 1, 1, 7, 3, 9, 10))))
    made = _model([node], inputs, list(node.output), stored)
    made.opset_import[0].version = draw.choice((7, 11, 13, 18, 20, 23, defs.onnx_opset_version()))
    return made


def _plausible(draw: random.Random, one: AttributeProto, kind: Any) -> None:
    one.type = int(kind)
    small = (0, 1, -1, 2, 3, 5, -7, 2**40, -(2**63))
    if one.type == AttributeProto.INT:
        one.i = draw.choice(small)
    elif one.type == AttributeProto.INTS:
        one.ints.extend([draw.choice(small) for _ in range(draw.randrange(6))])
    elif one.type == AttributeProto.FLOAT:
        one.f = draw.choice((0.0, 1.0, float("nan"), -1e30))
    elif one.type == AttributeProto.STRING:
        one.s = draw.choice((b"", b"SAME_UPPER", b"linear", b"ij,jk->ik", b"\xff", b"reflect"))
    elif one.type == AttributeProto.GRAPH:
        one.g.node.add(op_type="Identity", input=["i0"], output=["q"])
        one.g.output.add(name="q")


OPERATIONS = tuple(sorted({s.name for s in defs.get_all_schemas() if s.domain == ""}))
MUTATIONS: tuple[Mutation, ...] = (
    cut, flip, splice, dims, external, input_shape, names, kinds, attribute, nested, laughs, shapes, opset, lone_node,
    lone_node, lone_node,
)  # fmt: skip


def cases(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """What was done, and the file, `count` times; the same for the same seed."""
    for index in range(count):
        draw = random.Random(seed * 1_000_003 + index)
        mutation = MUTATIONS[index % len(MUTATIONS)]
        made: Any = draw.choice(SOUND)()
        for _ in range(draw.choice((1, 1, 1, 2))):
            try:
                made = mutation(draw, made)
            except (ValueError, TypeError, OverflowError):  # a number that the field does not take
                continue
            if isinstance(made, bytes):
                break
        yield mutation.__name__, made if isinstance(made, bytes) else made.SerializeToString()


# --- judging ----------------------------------------------------------------------------------------------------


class TooSlow(BaseException):
    """A file took more than its time."""


def judge(path: Path, data: bytes) -> str:
    """``graph``, ``refused``, or what went wrong."""
    path.write_bytes(data)

    def late(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(MOST_SECONDS)
    try:
        made = graph(str(path), options())
        made.table()
        return "graph" if Graph.from_json(made.to_json()) == made else "another graph after JSON"
    except ForetellError as error:
        return "refused" if error.hint and str(error).isprintable() else f"no repair, or not printable: {error!s:.200}"
    except TooSlow:
        return f"more than {MOST_SECONDS} s"
    except MemoryError:
        return "more than 1 GB"
    except Exception as error:  # the point is to find them
        return f"traceback: {type(error).__name__}: {error!s:.200}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _batch(start: int, stop: int, seed: int, results: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        graph_data = convolutional().SerializeToString()
        judge(path, graph_data)  # what imports take is not the file's
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + MOST_BYTES, used + MOST_BYTES))
        for index, (name, data) in enumerate(cases(stop, seed)):
            if index >= start:
                results.put((index, name, None, 0.0))
                before = time.perf_counter()
                verdict = judge(path, data)
                results.put((index, name, verdict, time.perf_counter() - before))
        results.put(None)


def run(count: int, seed: int) -> int:
    """Judge `count` files; returns how many failed."""
    context = multiprocessing.get_context("spawn")
    verdicts: Counter[str] = Counter()
    failures, slowest, start = 0, 0.0, 0
    while start < count:
        stop = min(count, start + BATCH)
        results = context.Queue()
        worker = context.Process(target=_batch, args=(start, stop, seed, results))
        worker.start()
        last, pending = start, None
        while True:
            try:
                message = results.get(timeout=4 * MOST_SECONDS)
            except Exception:
                message = ()
            if message is None:
                start = stop
                break
            if not message:  # it died, or hangs where no signal reaches it
                failures += 1
                print(f"case {last} ({pending}): the process died or hangs")
                start = last + 1
                break
            last, pending, verdict, seconds = message
            if verdict is None:
                continue
            slowest = max(slowest, seconds)
            verdicts[verdict if verdict in ("graph", "refused") else "failed"] += 1
            if verdict not in ("graph", "refused"):
                failures += 1
                print(f"case {last} ({pending}): {verdict}")
        worker.kill()
        worker.join()
    print(f"{count:,} files: {dict(verdicts)}; slowest {slowest:.2f} s; {failures} failures")
    return failures


def main() -> int:
    """Exit code 1 where any file failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    return 1 if run(given.count, given.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
