"""Files that users hand over: whatever is wrong with them is one error that says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretell import documents
from foretell.errors import InputError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" + b"9" * 5000 + b"]", "not JSON"),
        (b"\xff\xfe", "cannot be read"),
    ],
    ids=["syntax", "depth", "digits", "encoding"],
)
def test_json(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match=message):
        documents.read_json(path, "thing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a = ", r"malformed TOML: .*"),
        (b"a = " + b"[" * 20_000, "nested too deeply"),
        (b"a = " + b"9" * 5000, "malformed TOML"),
        (b"#" * 70_000, "larger than 65,536 bytes"),
    ],
    ids=["syntax", "depth", "digits", "size"],
)
def test_toml(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(text)
    with pytest.raises(InputError, match=message):
        documents.read_toml(path, "thing")


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")  # reading it would wait for ever
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    for path, message in (
        (tmp_path / "pipe.json", "is a named pipe, not a regular file"),
        (Path("/dev/zero"), "is a device, not a regular file"),
        (tmp_path, "is a directory, not a regular file"),
        (tmp_path / "loop.json", "cannot be read"),
        (tmp_path / "none.json", "no such file"),
        (Path("null\0byte.json"), "cannot be read"),
        (Path("x" * 5000), "cannot be read: File name too long"),
    ):
        for read in (documents.read_text, documents.read_bytes):
            with pytest.raises(InputError, match=message) as caught:
                read(path, "thing", 100)
            assert len(str(caught.value)) < 400


def test_bytes_and_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"\xff\r\na")
    assert documents.read_bytes(path, "thing", 4) == b"\xff\r\na"
    assert documents.read_text(path, "thing", 4, errors="replace") == "\ufffd\na"
    for read in (documents.read_text, documents.read_bytes):
        with pytest.raises(InputError, match="is larger than 3 bytes; give the path of a thing"):
            read(path, "thing", 3)
