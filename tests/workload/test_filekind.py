"""Every kind of file is named by its first bytes, and nothing a file holds makes naming it fail."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from foretell.workload.filekind import describe_kind, kind_of_bytes


def _zip(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return buffer.getvalue()


def _npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO(b""))
    return buffer.getvalue()


def _safetensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


CASES = [
    ("a GGUF checkpoint", b"GGUF" + struct.pack("<IQQ", 3, 0, 0)),
    ("a safetensors checkpoint", _safetensors()),
    ("a pickle", pickle.dumps({"a": 1}, protocol=4)),
    ("a PyTorch checkpoint (zipped pickle)", _zip("archive/data.pkl", "archive/data/0")),
    ("a PyTorch exported program (pt2)", _zip("m/data/weights/weight_0", "m/models/model.json")),
    ("a PyTorch exported program (pt2)", _zip("serialized_exported_program.json", "version")),
    ("an archive of NumPy arrays", _zip("a.npy")),
    ("a zip archive", _zip("readme.txt")),
    ("an empty zip archive", _zip()),
    ("a gzip file", gzip.compress(b"x")),
    ("a tar archive", _tar()),
    ("a NumPy array", _npy()),
    ("an HDF5 file", b"\x89HDF\r\n\x1a\n" + bytes(40)),
    ("a PNG image", b"\x89PNG\r\n\x1a\n" + bytes(40)),
    ("an ELF binary", b"\x7fELF\x02\x01\x01" + bytes(40)),
    ("a JSON document", b' {"schema": 1}'),
    ("a text file", "Grüße aus der Küche\n".encode()),
    ("an HTML page", b"<!DOCTYPE html><title>404</title>"),
    ("a Git LFS pointer, which stands for a file not fetched yet", b"version https://git-lfs.github.com/spec/v1\n"),
    ("an ONNX model", b"\x08\x08\x12\x07pytorch\x1a\x052.6.0" + bytes(60)),
    ("a file of zeros", bytes(600)),
    ("an empty file", b""),
    ("a file of an unknown kind", bytes(range(128, 256)) * 4),
]


@pytest.mark.parametrize(("kind", "content"), CASES, ids=[f"{i}-{kind[:30]}" for i, (kind, _) in enumerate(CASES)])
def test_a_file_is_named_by_what_it_starts_with(tmp_path: Path, kind: str, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert describe_kind(path) == kind


def test_an_onnx_model_is_known() -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []), producer_name="someone")
    assert kind_of_bytes(model.SerializeToString()[:512]) == "an ONNX model"


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    assert describe_kind(tmp_path) == "a folder"
    assert describe_kind(tmp_path / "none") == "no file"
    assert describe_kind("/dev/null") == "no regular file"
    assert describe_kind("a\0b") in ("no file", "a file that cannot be read")
    assert describe_kind("x" * 5000) in ("no file", "a file that cannot be read")


def test_text_cut_within_a_character_is_text() -> None:
    head = ("ü" * 300).encode()[:511]
    assert kind_of_bytes(head) == "a text file"


def test_any_bytes_have_a_name() -> None:
    source = random.Random(0)
    starts = [content[: source.randrange(1, 40)] for _, content in CASES]
    for _ in range(3000):
        head = source.choice(starts) + source.randbytes(source.randrange(40))
        assert isinstance(kind_of_bytes(head, len(head)), str)
