"""What a file is, by its first bytes: so that a reader given the wrong one can say what it was given instead.

Nothing is unpacked or parsed, and nothing of the contents is told but their kind.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

__all__ = ["describe_kind", "kind_of_bytes"]

_HEAD_BYTES = 512

# (offset, first bytes, what starts so): each format's own signature. The first that matches wins.
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"GGUF", "a GGUF checkpoint"),
    (0, b"FUGG", "a big-endian GGUF checkpoint"),
    (0, b"lmgg", "a GGML file older than GGUF"),
    (0, b"tjgg", "a GGML file older than GGUF"),
    (0, b"fmgg", "a GGML file older than GGUF"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"BZh", "a bzip2 file"),
    (0, b"\xfd7zXZ\x00", "an xz file"),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard file"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!", "a RAR archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"PAR1", "a Parquet table"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (4, b"ET12", "an ExecuTorch program"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (0, b"%PDF", "a PDF document"),
    (0, b"\x7fELF", "an ELF binary"),
    (0, b"MZ", "a Windows binary"),
    (0, b"\xcf\xfa\xed\xfe", "a Mach-O binary"),
    (0, b"version https://git-lfs", "a Git LFS pointer, which stands for a file not fetched yet"),
    (0, b"#!", "a script"),
    (0, b"<!DOCTYPE html", "an HTML page"),
    (0, b"<html", "an HTML page"),
    (0, b"<?xml", "an XML document"),
)
_PT2_MEMBERS = re.compile(
    rb"(?:[^/]+/)?(?:archive_format|archive_version|serialized_exported_program\.json|serialized_state_dict\.(?:pt|json)"
    rb"|models/[^/]+\.json|data/(?:weights|constants|sample_inputs|aotinductor)/.*)"
)


def describe_kind(path: str | os.PathLike[str]) -> str:
    """What the file at `path` seems to be, as a phrase: ``"a GGUF checkpoint"``, ``"a folder"``.

    ``"a file of an unknown kind"`` where nothing fits, ``"no file"`` where there is none. Never raises.
    """
    try:
        file = Path(path)
        if file.is_dir():
            return "a folder"
        if not file.exists():
            return "no file"
        if not file.is_file():
            return "no regular file"
        size = file.stat().st_size
        with file.open("rb") as stream:
            return kind_of_bytes(stream.read(_HEAD_BYTES), size)
    except (OSError, ValueError):  # ValueError: a null byte in the path
        return "a file that cannot be read"


def kind_of_bytes(head: bytes, size: int | None = None) -> str:
    """The same from a file's first bytes (512 suffice) and its size, where known.

    >>> kind_of_bytes(b"GGUF" + bytes(20))
    'a GGUF checkpoint'
    """
    if not head:
        return "an empty file"
    for offset, signature, kind in _SIGNATURES:
        if head.startswith(signature, offset):
            return kind
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip(head)
    if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle"
    if _is_safetensors(head, size):
        return "a safetensors checkpoint"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if _is_text(head):
        if text[:1] in (b"{", b"["):
            return "a JSON document"
        return "a text file" if text else "a blank file"
    if _is_onnx(head):
        return "an ONNX model"
    return "a file of zeros" if not any(head) else "a file of an unknown kind"


def _zip(head: bytes) -> str:
    """A zip archive by the name of its first member."""
    if len(head) < 30 or head.startswith(b"PK\x05\x06"):
        return "an empty zip archive" if head.startswith(b"PK\x05\x06") else "a zip archive"
    (length,) = struct.unpack_from("<H", head, 26)
    name = head[30 : 30 + length]
    if _PT2_MEMBERS.fullmatch(name):
        return "a PyTorch exported program (pt2)"
    if name.endswith(b"/data.pkl") or name == b"data.pkl":
        return "a PyTorch checkpoint (zipped pickle)"
    if name.endswith(b".npy"):
        return "an archive of NumPy arrays"
    return "a zip archive"


def _is_safetensors(head: bytes, size: int | None) -> bool:
    """Length of the header (8 bytes, little-endian), then the header, a JSON object."""
    if len(head) < 9 or head[8:9] != b"{":
        return False
    (length,) = struct.unpack_from("<Q", head)
    return length <= (1 << 32) and (size is None or length + 8 <= size)


def _is_text(head: bytes) -> bool:
    for cut in range(4):  # the last character may be cut through
        try:
            text = head[: len(head) - cut].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return all(character.isprintable() or character in "\t\n\r\f\ufeff" for character in text)
    return False


def _is_onnx(head: bytes) -> bool:
    """Protobuf fields of a ModelProto: ir_version (1), a small number, first; then one of those that follow it."""
    # Field numbers and wire types: onnx.proto3, message ModelProto.
    following = b"\x12\x1a\x22\x28\x32\x3a\x42"
    return len(head) > 3 and head[0] == 0x08 and 1 <= head[1] <= 0x20 and head[2] in following
