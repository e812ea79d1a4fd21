"""Files without an end are refused before a byte of them is read."""

import os
from pathlib import Path

import pytest

from foretell.errors import InputError

pytest.importorskip("onnx")

from foretell.workload.onnx.read import load


def test_what_is_no_regular_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Path) -> bytes:
        raise AssertionError(f"{self} was read")

    monkeypatch.setattr(Path, "read_bytes", read)
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(InputError, match="not a regular file"):
            load(path)
