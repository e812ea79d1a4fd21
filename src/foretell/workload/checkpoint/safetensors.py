"""Headers of safetensors files: 8 bytes of length, a JSON object of tensors, then their bytes.

The format: https://github.com/huggingface/safetensors (README, "Format"; types: ``safetensors/src/tensor.rs``).
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.workload.checkpoint.stored import Stored

__all__ = ["BITS", "read_file"]

# Bits of an element, enum Dtype of safetensors/src/tensor.rs.
BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST_PARSED_BYTES = 400 * 2**20  # what the parsed header may take, a few times its text
_MOST = 2**63 - 1
_MOST_DIMENSIONS = 64
_REPAIR = "fetch the file again"


def read_file(path: Path, where: str, metadata: dict[str, str]) -> list[Stored]:
    """The tensors that one file's header lists; texts it holds are added to `metadata`. Raises InputError."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(8)
            if len(start) < 8:
                raise InputError(f"is {size} bytes long, too short for a header", where, _REPAIR)
            (length,) = struct.unpack("<Q", start)
            if length > _MOST_HEADER_BYTES:
                raise InputError(f"states a header of {length:,} bytes, more than the format allows", where, _REPAIR)
            if 8 + length > size:
                raise InputError(f"is cut short: a header of {length:,} bytes in a file of {size:,}", where, _REPAIR)
            text = file.read(length)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where, "give a file that can") from None
    parsed = 240 * text.count(b"{") + 72 * text.count(b"[") + 160 * text.count(b",") + len(text)
    if parsed > _MOST_PARSED_BYTES:
        raise InputError("has a header that would take too much memory when parsed", where, _REPAIR)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise InputError("has a header that is nested too deeply", where, _REPAIR) from None
    except ValueError as error:
        raise InputError(f"has a header that is no JSON: {str(error)[:120]}", where, _REPAIR) from None
    if not isinstance(header, dict):
        raise InputError("has a header that is no JSON object", where, _REPAIR)
    notes = header.pop("__metadata__", None)
    if isinstance(notes, dict):
        for key, value in notes.items():
            if isinstance(value, str) and len(key) <= 100 and len(value) <= 200 and (key + value).isprintable():
                metadata.setdefault(key, value)
    return _tensors(header, size - 8 - length, where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _tensors(header: dict[str, Any], data_bytes: int, where: str) -> list[Stored]:
    """The tensors, whose bytes must follow one another without hole or overlap to the end of the file."""
    placed = []
    for name, entry in header.items():
        place = f"{where}, tensor {name[:80] if name.isprintable() else '?'}"
        if not isinstance(entry, dict):
            raise InputError("is no JSON object", place, _REPAIR)
        dtype, shape, ends = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in BITS:
            raise InputError(f"is of type {repr(dtype)[:40]}, which is not known", place, "update foretell")
        if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS or not all(_natural(n) for n in shape):
            raise InputError(f"has shape {repr(shape)[:60]}", place, _REPAIR)
        if not isinstance(ends, list) or len(ends) != 2 or not all(_natural(n) for n in ends):
            raise InputError(f"has data_offsets {repr(ends)[:60]}", place, _REPAIR)
        elements = math.prod(shape)
        nbytes = ends[1] - ends[0]
        if elements > _MOST // 64 or elements * BITS[dtype] != 8 * nbytes:
            raise InputError(
                f"states {nbytes:,} bytes for {'×'.join(map(str, shape))[:80] or 'one'} of {dtype}", place, _REPAIR
            )
        placed.append((ends[0], ends[1], Stored(name[:500], tuple(shape), dtype, elements, nbytes)))
    at = 0
    for begin, end, tensor in sorted(placed, key=lambda one: one[:2]):
        if begin != at:
            what = "overlaps the one before it" if begin < at else f"leaves {begin - at:,} bytes unused before it"
            raise InputError(what, f"{where}, tensor {tensor.name[:80]!r}", _REPAIR)
        at = end
    if at != data_bytes:
        raise InputError(f"lists {at:,} bytes of tensors and holds {data_bytes:,}", where, _REPAIR)
    return [tensor for _, _, tensor in placed]


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST
