"""Hand the readers of files thousands of malformed ones: each must be refused by name, soon, and in little memory.

    python benchmarks/fuzz_files.py [--reader pt2|safetensors|gguf] [--count 2000] [--seed 0]

Every input is made from a sound one by one of the mutations below, or is a hostile one built whole. A reader passes
where it returns a value or raises an `InputError` (or another `ForetellError`) that has a repair; a traceback, more
than 5 s for a file, or more than 1 GB of memory is a failure. The tests run a few hundred of each.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import pickle
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError
from foretell.workload import pt2
from foretell.workload.checkpoint import read as read_checkpoint
from foretell.workload.options import options

MOST_SECONDS = 5.0
MOST_BYTES = 1_000_000_000
HUGE = (0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30)
ODD: tuple[Any, ...] = (None, True, 1.5, "", "x", "../../etc/passwd", [], {}, [[]], {"a": {}}, "\ud800", "\0", *HUGE)
READERS = ("pt2", "safetensors", "gguf")


# --- sound files ------------------------------------------------------------------------------------------------


def _tensor(*shape: Any) -> dict[str, Any]:
    """A ``TensorMeta`` of float32; a text stands for an open size."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append({"as_int": step})
        step *= n if isinstance(n, int) else 2
    sizes = [
        {"as_int": n} if isinstance(n, int)
        else {"as_expr": {"expr_str": f"Symbol('{n}', positive=True, integer=True)", "hint": {"as_int": 2}}}
        for n in shape
    ]
    return {"dtype": 7, "sizes": sizes, "requires_grad": False, "device": {"type": "cpu", "index": None},
            "strides": strides[::-1], "storage_offset": {"as_int": 0}, "layout": 7}


def _node(target: str, result: str, **arguments: Any) -> dict[str, Any]:
    inputs = [{"name": name, "arg": value, "kind": 1} for name, value in arguments.items()]
    stack = f"L__self__,,M;L__self__{result},{result},torch.nn.Module"
    return {"target": f"torch.ops.aten.{target}", "inputs": inputs, "outputs": [_ref(result)],
            "metadata": {"nn_module_stack": stack}}


def _ref(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


def program() -> dict[str, Any]:
    """A small program as PyTorch writes it: a convolution, norm, pooling, views, a linear layer, attention, a GRU."""
    values = {
        "w": _tensor(8, 3, 3, 3), "v": _tensor(8), "l": _tensor(4, 8), "g": _tensor(12, 4), "h0": _tensor(1, "s0", 4),
        "x": _tensor("s0", 3, 8, 8), "conv": _tensor("s0", 8, 8, 8), "norm": _tensor("s0", 8, 8, 8),
        "pool": _tensor("s0", 8, 1, 1), "flat": _tensor("s0", 8), "lin": _tensor("s0", 4), "seq": _tensor("s0", 1, 4),
        "att": _tensor("s0", 1, 4), "t": _tensor(1, "s0", 4), "gru": _tensor(1, "s0", 4), "state": _tensor(1, "s0", 4),
    }
    nodes = [
        _node("conv2d.default", "conv", input=_ref("x"), weight=_ref("w"), bias=_ref("v"), stride={"as_ints": [1, 1]},
              padding={"as_ints": [1, 1]}),
        _node("batch_norm.default", "norm", input=_ref("conv"), weight=_ref("v"), bias=_ref("v"),
              running_mean=_ref("v"), running_var=_ref("v"), training={"as_bool": False}),
        _node("adaptive_avg_pool2d.default", "pool", input=_ref("norm"), output_size={"as_ints": [1, 1]}),
        _node("flatten.using_ints", "flat", self=_ref("pool"), start_dim={"as_int": 1}),
        _node("linear.default", "lin", input=_ref("flat"), weight=_ref("l"), bias={"as_none": True}),
        _node("unsqueeze.default", "seq", self=_ref("lin"), dim={"as_int": 1}),
        _node("scaled_dot_product_attention.default", "att", query=_ref("seq"), key=_ref("seq"), value=_ref("seq")),
        _node("transpose.int", "t", self=_ref("att"), dim0={"as_int": 0}, dim1={"as_int": 1}),
        _node("gru.input", "gru", input=_ref("t"), hx=_ref("h0"), params={"as_tensors": [{"name": "g"}, {"name": "g"}]},
              has_biases={"as_bool": False}, num_layers={"as_int": 1}, dropout={"as_float": 0.0},
              train={"as_bool": False}, bidirectional={"as_bool": False}, batch_first={"as_bool": False}),
    ]
    nodes[-1]["outputs"] = [_ref("gru"), _ref("state")]
    given = [{"parameter": {"arg": {"name": n}, "parameter_name": n}} for n in ("w", "v", "l", "g")]
    given += [{"user_input": {"arg": _ref(n)}} for n in ("x", "h0")]
    return {
        "graph_module": {
            "graph": {"inputs": [_ref(n) for n in ("w", "v", "l", "g", "x", "h0")], "outputs": [_ref("gru")],
                      "nodes": nodes, "tensor_values": values, "sym_int_values": {}, "sym_bool_values": {}},
            "signature": {"input_specs": given, "output_specs": [{"user_output": {"arg": _ref("gru")}}]},
            "module_call_graph": [],
        },
        "opset_version": {"aten": 10},
        "range_constraints": {"s0": {"min_val": 1, "max_val": 64}},
        "schema_version": {"major": 8, "minor": 8},
        "torch_version": "2.8.0",
    }


def archive(members: dict[str, bytes | str], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def pt2_bytes(data: Any, old: bool = False) -> bytes:
    """The archive of a program, in the older or the newer layout."""
    if old:
        return archive({"serialized_exported_program.json": json.dumps(data), "serialized_state_dict.pt": b"",
                        "version": "8.8"})
    return archive({"m/models/model.json": json.dumps(data), "m/archive_format": "pt2", "m/archive_version": "0"})


def safetensors_bytes() -> bytes:
    """Three tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, size in (("a", "F32", [2, 3], 24), ("b", "BF16", [5], 10), ("c", "I64", [], 8)):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return safetensors_of(header, bytes(at))


def safetensors_of(header: Any, data: bytes) -> bytes:
    """A file with any header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_bytes() -> bytes:
    """Values of several types, two tensors."""
    values = (
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama")
        + _text("llama.block_count") + struct.pack("<II", 4, 2)
        + _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + _text("a") + _text("b") + _text("c")
        + _text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.0, 1.0)
    )
    tensors = (
        _text("w") + struct.pack("<IQQIQ", 2, 256, 2, 12, 0) + _text("n") + struct.pack("<IQIQ", 1, 32, 0, 288)
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 4) + values + tensors
    return head + bytes(-len(head) % 32 + 288 + 128)


# --- mutations --------------------------------------------------------------------------------------------------


def cut(data: bytes, source: random.Random) -> bytes:
    """The beginning of a file."""
    return data[: source.randrange(len(data))]


def flip(data: bytes, source: random.Random) -> bytes:
    """A few bytes changed."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 8, 64))):
        changed[source.randrange(len(changed))] = source.randrange(256)
    return bytes(changed)


def splice(data: bytes, source: random.Random) -> bytes:
    """A piece left out, doubled, or replaced by a number in eight bytes."""
    at = source.randrange(len(data))
    end = min(len(data), at + source.randrange(1, 64))
    return source.choice((
        data[:at] + data[end:],
        data[:end] + data[at:],
        data[:at] + struct.pack("<q", source.choice((0, -1, 2**31, 2**62, 2**63 - 1))) + data[at + 8 :],
    ))


def twist(data: Any, source: random.Random) -> Any:
    """A few entries of JSON data replaced, removed or doubled, names of tensors and ops exchanged."""
    changed = copy.deepcopy(data)
    for _ in range(source.choice((1, 1, 1, 2, 5))):
        places = list(_places(changed))
        if not places:
            return changed
        holder, key = source.choice(places)
        deed = source.randrange(5)
        if deed == 0:
            del holder[key]
        elif deed == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif deed == 2:
            other, name = source.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif deed == 3 and isinstance(holder[key], int):
            holder[key] = source.choice(HUGE)
        else:
            holder[key] = copy.deepcopy(source.choice(ODD))
    return changed


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    stack = [data]
    while stack:
        here = stack.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, value in items:
            yield here, key
            stack.append(value)


def _nested(depth: int, open_: str = "[", close: str = "]") -> str:
    return open_ * depth + close * depth


class Trap:
    """What a pickle can do: unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


def trapped(path: Path, old: bool = False) -> bytes:
    """A sound program in an archive whose pickled members make a file at `path` when they are unpickled."""
    pickled = pickle.dumps(Trap(str(path)))
    inner = archive({"archive/data.pkl": pickled, "archive/version": "3"})
    text = json.dumps(program())
    if old:
        return archive({"serialized_exported_program.json": text, "serialized_state_dict.pt": inner,
                        "serialized_constants.pt": pickled, "serialized_example_inputs.pt": inner, "version": "8.8"})
    config = {"config": {"w": {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}}}
    return archive({
        "m/models/model.json": text, "m/data/weights/model_weights_config.json": json.dumps(config),
        "m/data/weights/weight_0": inner, "m/data/constants/custom_obj_0": pickled,
        "m/data/sample_inputs/model.pt": inner, "m/data.pkl": pickled, "m/archive_format": "pt2",
    })


def bomb(name: str, size: int, stated: int | None = None, fill: bytes = b"\0") -> bytes:
    """An archive of one member that unpacks to `size` bytes (of `stated`, it says): a deflated piece, repeated."""
    piece = 2**20
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = deflate.compress(fill * (piece // len(fill))) + deflate.flush(zlib.Z_FULL_FLUSH)
    data = packed * (size // piece) + zlib.compressobj(9, zlib.DEFLATED, -15).flush()
    check_sum = zlib.crc32(fill * (size // len(fill))) if size <= 2**26 else 0
    both = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0, check_sum, len(data), stated or size, len(name), 0)
    local = b"PK\x03\x04" + both + name.encode()
    central = b"PK\x01\x02" + struct.pack("<H", 20) + both + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name.encode()
    end = struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local) + len(data), 0)
    return local + data + central + b"PK\x05\x06" + end


def _huge_archive(members: int) -> bytes:
    """A table of contents that states more members than there are."""
    sound = bytearray(pt2_bytes(program()))
    at = sound.rfind(b"PK\x05\x06")
    struct.pack_into("<HHII", sound, at + 8, members & 0xFFFF, members & 0xFFFF, 2**31, 0)
    return bytes(sound)


def hostile_pt2() -> Iterator[bytes]:
    """Archives built to hang, to fill memory, to reach outside."""
    sound = program()
    model = "m/models/model.json"
    yield bomb(model, 2**30)  # 1 GiB of zeros in 1 MiB
    yield bomb(model, 2**30, stated=2**26)
    yield bomb(model, 2**26, fill=b"[")
    yield bomb(model, 2**26, fill=b"[],1")
    yield bomb(model, 2**26, fill=b'{"a"')
    yield bomb("m/data/weights/weight_0", 2**30)
    yield archive({model: b'{"a":' * 5000 + b"1" + b"}" * 5000})
    yield archive({model: b"1" * 10_000})
    yield archive({model: json.dumps(sound)}, zipfile.ZIP_LZMA)
    yield archive({"../../m/models/model.json": json.dumps(sound), "/etc/passwd": "x"})
    yield archive({"m/models/../../x.json": json.dumps(sound)})
    yield archive({f"m/models/p{n}.json": "{}" for n in range(50)})
    yield archive({f"m/{n}": "" for n in range(20_000)})
    yield _huge_archive(65_535)
    for name, other in (("m/models/model.json", "m/models/nodel.json"),
                        ("serialized_exported_program.json", "serialized_exported_programs.jso")):
        yield archive({name: json.dumps(sound), other: "{}"}).replace(other.encode(), name.encode())
    graph = sound["graph_module"]["graph"]
    for text in ("Symbol('s9')", "(" * 15_000, "1+" * 9_000 + "1", "2**64**64", "Mod(Integer(1), Integer(0))",
                 "Add(" * 3_000 + "1" + ")" * 3_000, "__import__('os').system('true')", "-" * 19_000 + "1", "s0.a"):
        one = copy.deepcopy(sound)
        one["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][1] = {"as_expr": {"expr_str": text, "hint": None}}
        yield pt2_bytes(one)
    for size in HUGE:
        one = copy.deepcopy(sound)
        one["graph_module"]["graph"]["tensor_values"]["t"]["sizes"][0] = {"as_int": size}
        one["graph_module"]["graph"]["tensor_values"]["att"]["sizes"][1] = {"as_int": size}
        yield pt2_bytes(one)
    steps = copy.deepcopy(sound)  # a recurrent layer of endlessly many steps
    for name in ("seq", "att", "lin"):
        steps["graph_module"]["graph"]["tensor_values"][name] = _tensor(10**9, 1, 4)
    steps["graph_module"]["graph"]["nodes"] = graph["nodes"][-1:]
    steps["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = _ref("x")
    steps["graph_module"]["graph"]["tensor_values"]["x"] = _tensor(10**9, 2, 4)
    steps["graph_module"]["graph"]["tensor_values"]["h0"] = _tensor(1, 2, 4)
    yield pt2_bytes(steps)
    deep = copy.deepcopy(sound)  # programs within programs
    for _ in range(60):
        inner = copy.deepcopy(deep["graph_module"]["graph"])
        inner["nodes"] = inner["nodes"][:1] if inner["nodes"][0]["target"].startswith("torch.ops.higher") else []
        node = {"target": "torch.ops.higher_order.wrap", "outputs": [], "metadata": {},
                "inputs": [{"name": "g", "arg": {"as_graph": {"name": "g", "graph": inner}}, "kind": 1}]}
        deep["graph_module"]["graph"]["nodes"] = [node]
    yield pt2_bytes(deep)
    cycle = copy.deepcopy(sound)  # a value made of itself
    cycle["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = _ref("conv")
    yield pt2_bytes(cycle)
    long = copy.deepcopy(sound)
    long["graph_module"]["graph"]["nodes"][0]["metadata"]["nn_module_stack"] = ";".join("a,b,c" for _ in range(30_000))
    yield pt2_bytes(long)


def hostile_safetensors() -> Iterator[bytes]:
    """Headers built to hang or to fill memory."""
    for length in (2**63, 2**64 - 1, 2**40, 100_000_001, 2**31):
        yield struct.pack("<Q", length) + b"{}"
    for header in (_nested(100_000), _nested(20_000, '{"a":', "}").replace(":}", ":1}", 1), "1" * 10_000, "null", "[]"):
        yield struct.pack("<Q", len(header)) + header.encode()
    wide = b"{" + b",".join(b'"%d":[]' % n for n in range(400_000)) + b"}"
    yield struct.pack("<Q", len(wide)) + wide
    lists = b'{"a":[' + b"[]," * (2**24) + b"[]]}"
    yield struct.pack("<Q", len(lists)) + lists
    for begin, end in ((0, 2**63 - 1), (2**62, 2**62 + 24), (-24, 0), (24, 0), (1, 25)):
        yield safetensors_of({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}, bytes(24))
    for size in HUGE:
        yield safetensors_of({"a": {"dtype": "U8", "shape": [size, size], "data_offsets": [0, 24]}}, bytes(24))
        yield safetensors_of({"a": {"dtype": "U8", "shape": [size] * 70, "data_offsets": [0, 24]}}, bytes(24))


def hostile_gguf() -> Iterator[bytes]:
    """Counts and lengths far beyond the file."""
    for tensors in (0, 1, 2**20, 2**32, 2**63, 2**64 - 1):
        for values in (0, 1, 2**20, 2**64 - 1):
            yield b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + bytes(64)
    one_value = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text("k")
    for length in (2**20, 2**32, 2**63, 2**64 - 1):
        yield b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length) + bytes(64)
        for inner in (0, 4, 8, 9, 12, 77):
            yield one_value + struct.pack("<IIQ", 9, inner, length) + bytes(64)
    yield one_value + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000
    yield one_value + struct.pack("<IIQ", 9, 8, 2_900_000) + bytes(8 * 2_900_000)
    many = b"".join(_text(f"{n}") + struct.pack("<IQIQ", 1, 0, 0, 0) for n in range(100_000))
    yield b"GGUF" + struct.pack("<IQQ", 3, 100_000, 0) + many + bytes(64)
    for size in (0, 1, 2**31, 2**62, 2**64 - 1):
        for rank in (1, 4, 8):
            dims = struct.pack(f"<I{rank}QIQ", rank, *[size] * rank, 12, 0)
            yield b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + _text("w") + dims + bytes(512)
    for offset in (1, 2**40, 2**63, 2**64 - 32):
        yield b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + _text("w") + struct.pack("<IQIQ", 1, 32, 0, offset) + bytes(512)


HOSTILE: dict[str, Callable[[], Iterator[bytes]]] = {
    "pt2": hostile_pt2, "safetensors": hostile_safetensors, "gguf": hostile_gguf,
}


def inputs(reader: str, count: int, seed: int = 0, hostile: bool = True) -> Iterator[bytes]:
    """`count` malformed files for a reader: the hostile ones, then mutations of sound ones."""
    source = random.Random(f"{reader} {seed}")
    made = 0
    if hostile:
        for data in HOSTILE[reader]():
            yield data
            made += 1
    sound_program = program()
    header = json.loads(safetensors_bytes()[8:].split(b"}}")[0] + b"}}" if reader == "safetensors" else b"{}")
    while made < count:
        made += 1
        if reader == "pt2":
            old = source.random() < 0.3
            if source.random() < 0.75:
                yield pt2_bytes(twist(sound_program, source), old)
            else:
                yield source.choice((cut, flip, splice))(pt2_bytes(sound_program, old), source)
        elif reader == "safetensors":
            if source.random() < 0.6:
                yield safetensors_of(twist(header, source), bytes(source.choice((42, 42, 0, 41, 100))))
            else:
                yield source.choice((cut, flip, splice))(safetensors_bytes(), source)
        else:
            yield source.choice((cut, flip, splice, splice))(gguf_bytes(), source)


def reader_of(name: str) -> Callable[[Path], Any]:
    """The function that reads such a file."""
    return (lambda path: pt2.graph(str(path), options())) if name == "pt2" else read_checkpoint


def check(reader: str, data: bytes, folder: Path) -> tuple[str, float]:
    """Hand a reader one file: what came of it ("read" or "refused"), and the seconds. Anything else propagates."""
    path = folder / f"input.{reader}"
    path.write_bytes(data)
    start = time.perf_counter()
    try:
        reader_of(reader)(path)
    except ForetellError as error:
        took = time.perf_counter() - start
        said = str(error)
        if not error.hint or f"input.{reader}" not in said:
            raise AssertionError(f"refused without place or repair: {said}") from error
        if not said.isprintable() or len(said) > 700:
            raise AssertionError(f"refused in words that cannot be shown: {said!r}") from error
        return "refused", took
    return "read", time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for reader in [asked.reader] if asked.reader else READERS:
            tally, slowest, started = {"read": 0, "refused": 0, "failed": 0}, 0.0, time.perf_counter()
            for index, data in enumerate(inputs(reader, asked.count, asked.seed)):
                signal.alarm(30)  # ends a file that hangs, with the whole run: which is then the failure
                try:
                    outcome, took = check(reader, data, Path(folder))
                except Exception as error:  # whatever else comes is the finding
                    outcome, took = "failed", 0.0
                    print(f"{reader} {index}: {type(error).__name__}: {str(error)[:300]}")
                signal.alarm(0)
                if took > MOST_SECONDS:
                    outcome = "failed"
                    print(f"{reader} {index}: {took:.1f} s")
                tally[outcome] += 1
                slowest = max(slowest, took)
            failures += tally["failed"]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if peak > MOST_BYTES:
                failures += 1
            print(f"{reader:12} {sum(tally.values()):6,} files: {tally['read']:,} read, {tally['refused']:,} refused, "
                  f"{tally['failed']:,} failed; slowest {slowest:.2f} s, peak {peak / 1e6:,.0f} MB, "
                  f"{time.perf_counter() - started:.0f} s in all")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
