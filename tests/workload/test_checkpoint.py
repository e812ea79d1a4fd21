"""Headers of checkpoints: sizes as the libraries that write them see them, and every fault named."""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.errors import InputError
from foretell.report import schema
from foretell.workload.checkpoint import read
from foretell.workload.checkpoint.gguf import BLOCKS
from foretell.workload.checkpoint.safetensors import BITS


def safetensors_bytes(tensors: dict[str, Any], data: bytes | None = None, notes: dict[str, str] | None = None) -> bytes:
    """A file whose tensors (name → type and shape) lie one after another."""
    header: dict[str, Any] = {} if notes is None else {"__metadata__": notes}
    at = 0
    for name, (dtype, shape) in tensors.items():
        elements = 1
        for n in shape:
            elements *= n
        size = elements * BITS.get(dtype, 8) // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + (bytes(at) if data is None else data)


def gguf_text(text: str, order: str = "<") -> bytes:
    data = text.encode()
    return struct.pack(order + "Q", len(data)) + data


def gguf_bytes(
    tensors: list[tuple[str, tuple[int, ...], int]], values: bytes = b"", count: int = 0, version: int = 3,
    alignment: int = 32, order: str = "<",
) -> bytes:
    """A file of tensors (name, dimensions with the fastest first, ggml type); `values` are `count` encoded values."""
    header = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), count) + values
    at = 0
    for name, dims, kind in tensors:
        header += gguf_text(name, order) + struct.pack(f"{order}I{len(dims)}QIQ", len(dims), *dims, kind, at)
        elements = 1
        for n in dims:
            elements *= n
        _, block, size = BLOCKS.get(kind, ("", 1, 1))
        at += -(-elements // block * size // alignment) * alignment
    return header + bytes(-len(header) % alignment + at)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def put(data: bytes | str, name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return put


# --- safetensors ------------------------------------------------------------------------------------------------


def test_a_file_that_the_library_wrote(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    weights = {
        "a.weight": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7, dtype=torch.int64),
        "c": torch.zeros((), dtype=torch.float32), "d": torch.zeros(2, 4, dtype=torch.float8_e4m3fn),
        "e": torch.zeros(0, 4), "f": torch.zeros(4, dtype=torch.bool), "g": torch.zeros(2, dtype=torch.complex64),
    }
    library.save_file(weights, tmp_path / "w.safetensors", metadata={"format": "pt"})
    found = read(tmp_path / "w.safetensors")
    assert found.parameters == sum(w.numel() for w in weights.values())
    assert found.nbytes == sum(w.numel() * w.element_size() for w in weights.values())
    assert {t.name: t.shape for t in found.tensors} == {name: tuple(w.shape) for name, w in weights.items()}
    assert found.by_dtype["BF16"] == (1, 15, 30)
    assert found.metadata == {"format": "pt"}
    assert found.largest(1)[0].name == "b"


def test_a_checkpoint_in_shards(write: Any, tmp_path: Path) -> None:
    write(safetensors_bytes({"a": ("F16", [4, 4])}), "model-00001-of-00002.safetensors")
    write(safetensors_bytes({"b": ("F32", [8])}), "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = write(json.dumps({"metadata": {}, "weight_map": places}), "model.safetensors.index.json")
    for path in (index, tmp_path):
        found = read(path)
        assert (found.parameters, found.nbytes, len(found.files)) == (24, 64, 2)
    index.unlink()
    assert read(tmp_path).nbytes == 64  # the folder's files, without an index


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"a": "../a.safetensors"}, "which is no file beside it"),
        ({"a": "/etc/passwd"}, "which is no file beside it"),
        ({"a": "sub/a.safetensors"}, "which is no file beside it"),
        ({"a": "..\\a.safetensors"}, "which is no file beside it"),
        ({"a": ""}, "which is no file beside it"),
        ({"a": "a\0.safetensors"}, "which is no file beside it"),
        ({"a": 3}, "which is no file beside it"),
        ({"a": "missing.safetensors"}, "lists missing.safetensors, which is not there; fetch that file too"),
        ({"z": "a.safetensors"}, "lists 'z' in a.safetensors, which has no such tensor"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_reaches_for_nothing_else(write: Any, places: Any, said: str) -> None:
    write(safetensors_bytes({"a": ("F16", [4, 4])}), "a.safetensors")
    index = write(json.dumps({"weight_map": places}), "model.safetensors.index.json")
    with pytest.raises(InputError) as error:
        read(index)
    assert said in str(error.value)
    assert "model.safetensors.index.json" in str(error.value)


def _header(text: str, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode() + data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is 0 bytes long, too short for a header"),
        (b"\x01", "too short for a header"),
        (_header("{}", 2**63), "states a header of 9,223,372,036,854,775,808 bytes"),
        (_header("{}", 1000), "is cut short: a header of 1,000 bytes"),
        (_header("{"), "a header that is no JSON"),
        (_header("[" * 50_000), "nested too deeply"),
        (_header('{"a": 1}'), "tensor a: is no JSON object"),
        (_header('{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]}}', data=b"x"), "is of type 'F99'"),
        (_header('{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', data=b"1234"), "is of type"),
        (_header('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', data=b"1234"), "has shape [-1]"),
        (_header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, -4]}}', data=b"1234"), "has data_offsets"),
        (_header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', data=b"1234"), "states 4 bytes for"),
        (_header('{"a": {"dtype": "F32", "shape": [9223372036854775807, 9], "data_offsets": [0, 4]}}'), "states 4"),
        (_header('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}', data=b"123"), "leaves 1 bytes unused"),
        (
            _header('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, '
                    '"b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}', data=b"123"),
            "tensor 'b': overlaps the one before it",
        ),
        (_header('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}', data=b"1"), "lists 2 bytes of"),
        (_header('{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}'), "a name is given twice"),
    ],
)
def test_damaged_safetensors_are_refused(write: Any, data: bytes, said: str) -> None:
    path = write(data, "bad.safetensors")
    with pytest.raises(InputError) as error:
        read(path)
    assert said in str(error.value)
    assert "bad.safetensors" in str(error.value)
    assert error.value.repair


# --- GGUF -------------------------------------------------------------------------------------------------------

# Bits an element takes, of each block format, as ggml's own documentation states them: another way to the same sizes.
# https://github.com/ggml-org/llama.cpp/blob/master/tools/quantize/README.md and the comments of ggml-common.h ("bpw").
BITS_PER_WEIGHT = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q8_1": 9.0, "Q2_K": 2.625, "Q3_K": 3.4375,
    "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "Q8_K": 9.125, "IQ2_XXS": 2.0625, "IQ2_XS": 2.3125, "IQ3_XXS": 3.0625,
    "IQ1_S": 1.5625, "IQ4_NL": 4.5, "IQ3_S": 3.4375, "IQ2_S": 2.5625, "IQ4_XS": 4.25, "IQ1_M": 1.75, "TQ1_0": 1.6875,
    "TQ2_0": 2.0625, "MXFP4": 4.25, "NVFP4": 4.5, "Q1_0": 1.125, "Q2_0": 2.25, "F32": 32, "F16": 16, "BF16": 16,
    "F64": 64, "I8": 8, "I16": 16, "I32": 32, "I64": 64,
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_block_format_takes_its_bits(write: Any, kind: int) -> None:
    label, _block, _size = BLOCKS[kind]
    found = read(write(gguf_bytes([("w", (512, 3), kind)]), "w.gguf"))
    assert found.tensors[0].shape == (3, 512)
    assert found.tensors[0].dtype == label
    assert found.parameters == 1536
    assert found.nbytes * 8 == 1536 * BITS_PER_WEIGHT[label]


def _values(order: str = "<") -> tuple[bytes, int]:
    def key(name: str, kind: int) -> bytes:
        return gguf_text(name, order) + struct.pack(order + "I", kind)

    words = b"".join(gguf_text(w, order) for w in ("a", "b" * 300, "c"))
    return (
        key("general.architecture", 8) + gguf_text("llama", order)
        + key("llama.block_count", 4) + struct.pack(order + "I", 32)
        + key("llama.rope.freq_base", 6) + struct.pack(order + "f", 10000.0)
        + key("general.alignment", 4) + struct.pack(order + "I", 64)
        + key("tokenizer.ggml.tokens", 9) + struct.pack(order + "IQ", 8, 3) + words
        + key("tokenizer.ggml.scores", 9) + struct.pack(order + "IQ3f", 6, 3, 0, 0, 0)
        + key("flag", 7) + b"\x01",
        7,
    )


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [2, 3])
def test_values_and_tensors_of_a_gguf_file(write: Any, version: int, order: str) -> None:
    values, count = _values(order)
    tensors = [("token_embd.weight", (256, 10), 12), ("blk.0.norm", (256,), 0)]
    found = read(write(gguf_bytes(tensors, values, count, version, 64, order), "m.gguf"))
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.block_count"] == "32"
    assert found.metadata["tokenizer.ggml.tokens"] == "3 values"
    assert found.nbytes == 10 * 144 + 4 * 256
    assert found.by_dtype == {"Q4_K": (1, 2560, 1440), "F32": (1, 256, 1024)}


def test_a_gguf_checkpoint_in_parts(write: Any, tmp_path: Path) -> None:
    for n in (1, 2):
        write(gguf_bytes([(f"w{n}", (32, 2), 8)]), f"m-0000{n}-of-00002.gguf")
    for path in (tmp_path, tmp_path / "m-00002-of-00002.gguf"):
        assert read(path).nbytes == 2 * 2 * 34
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(InputError, match=r"is one of 2 parts, of which m-00001-of-00002\.gguf is not there"):
        read(tmp_path)


def _start(tensors: int, values: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GGUF", "is cut short: 4 bytes wanted at byte 4 of 4"),
        (_start(0, 0, 1), "is GGUF version 1; convert it to version 3"),
        (_start(2**63, 0), "states 9,223,372,036,854,775,808 tensors"),
        (_start(0, 2**63), "and 9,223,372,036,854,775,808 values"),
        (_start(0, 1) + struct.pack("<Q", 2**62), "has a text of 4,611,686,018,427,387,904 bytes"),
        (_start(0, 1) + gguf_text("k") + struct.pack("<I", 99), "has a value of type 99"),
        (_start(0, 1) + gguf_text("k") + struct.pack("<IIQ", 9, 8, 2**60), "more than a vocabulary has"),
        (_start(0, 1) + gguf_text("k") + struct.pack("<IIQ", 9, 4, 2**60), "is cut short"),
        (_start(0, 1) + gguf_text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10, "has a value of type 9"),
        (_start(0, 2) + (gguf_text("k") + struct.pack("<IB", 0, 1)) * 2, "value k: is given twice"),
        (_start(0, 1) + gguf_text("general.alignment") + struct.pack("<II", 4, 0), "is 0, not a multiple of 8"),
        (_start(1, 0) + gguf_text("w") + struct.pack("<I", 2**31), "has 2,147,483,648 dimensions"),
        (_start(1, 0) + gguf_text("w") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "has shape"),
        (_start(1, 0) + gguf_text("w") + struct.pack("<IQIQ", 1, 32, 4, 0), "is of ggml type 4, which is not known"),
        (_start(1, 0) + gguf_text("w") + struct.pack("<IQIQ", 1, 33, 2, 0), "has rows of 33, no multiple of a Q4_0"),
        (_start(1, 0) + gguf_text("w") + struct.pack("<IQIQ", 1, 32, 0, 7), "which is not aligned to 32"),
        (_start(1, 0) + gguf_text("w") + struct.pack("<IQIQ", 1, 32, 0, 0), "ends at byte"),
        (
            _start(2, 0) + gguf_text("a") + struct.pack("<IQIQ", 1, 32, 0, 0) + gguf_text("b")
            + struct.pack("<IQIQ", 1, 32, 0, 64) + bytes(512),
            "tensor b: overlaps the one before it",
        ),
        (
            _start(2, 0) + gguf_text("a") + struct.pack("<IQIQ", 1, 8, 0, 0) + gguf_text("a")
            + struct.pack("<IQIQ", 1, 8, 0, 32) + bytes(512),
            "tensor a: is listed twice",
        ),
    ],
)
def test_damaged_gguf_is_refused(write: Any, data: bytes, said: str) -> None:
    path = write(data, "bad.gguf")
    with pytest.raises(InputError) as error:
        read(path)
    assert said in str(error.value)
    assert "bad.gguf" in str(error.value)
    assert error.value.repair


def test_a_large_vocabulary_is_passed_over_quickly(write: Any, within: Any) -> None:
    words = b"".join(gguf_text(f"token{n}") for n in range(250_000))
    values = gguf_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 250_000) + words
    path = write(gguf_bytes([("w", (32,), 0)], values, 1), "large.gguf")
    assert within(3.0, lambda: read(path)).nbytes == 128


# --- both -------------------------------------------------------------------------------------------------------


def test_the_document_is_of_its_schema(write: Any) -> None:
    values, count = _values()
    for path in (
        write(safetensors_bytes({"a": ("BF16", [4, 4]), "b": ("F4", [2])}), "a.safetensors"),
        write(gguf_bytes([("w", (256, 3), 14)], values, count, alignment=64), "a.gguf"),
    ):
        jsonschema.validate(read(path).to_dict(), schema("foretell.checkpoint/1"))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.bin", b"PK\x03\x04" + bytes(22) + struct.pack("<HH", 16, 0) + b"archive/data.pkl", "zipped pickle"),
        ("a.pt", b"\x80\x02}q\x00.", "is a pickle"),
        ("a.txt", b"hello", "is a text file"),
        ("a.png", b"\x89PNG\r\n\x1a\n", "is a PNG image"),
    ],
)
def test_other_files_are_named_for_what_they_are(write: Any, name: str, data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        read(write(data, name))


def test_what_is_no_checkpoint_is_said(tmp_path: Path, write: Any) -> None:
    with pytest.raises(InputError, match="no such file"):
        read(tmp_path / "none")
    with pytest.raises(InputError, match="holds no checkpoint"):
        read(tmp_path)
    write(gguf_bytes([]), "a.gguf")
    write(gguf_bytes([]), "b.gguf")
    with pytest.raises(InputError, match=r"holds 2 GGUF checkpoints; name one, e\.g\. a\.gguf"):
        read(tmp_path)


def test_sizes_of_random_checkpoints_add_up(write: Any) -> None:
    source = random.Random(1)
    for n in range(20):
        tensors = {
            f"t{i}": (source.choice([d for d in BITS if BITS[d] % 8 == 0]), [source.randrange(5) for _ in range(3)])
            for i in range(source.randrange(1, 12))
        }
        found = read(write(safetensors_bytes(tensors), f"{n}.safetensors"))
        assert found.nbytes == sum(nbytes for _, _, nbytes in found.by_dtype.values())
        assert found.file_bytes - found.nbytes == 8 + struct.unpack("<Q", (Path(found.path).read_bytes())[:8])[0]
