"""Headers of GGUF files, versions 2 and 3: counts, named values, then names, shapes and block formats of tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Block formats: ``enum ggml_type`` of
``ggml/include/ggml.h`` and the structs of ``ggml/src/ggml-common.h`` in https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from foretell.errors import InputError
from foretell.workload.checkpoint.stored import Stored

__all__ = ["BLOCKS", "read_file"]

# ggml_type: name, elements of a block, bytes of a block. Below each, the struct's members (ggml-common.h): `half` is 2
# bytes, K-blocks are of 256. Numbers that are missing were withdrawn (4, 5, 31 to 33, 36 to 38).
BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 2 + 16),  # block_q4_0: half d, 32 nibbles
    3: ("Q4_1", 32, 2 + 2 + 16),  # block_q4_1: half d, m, 32 nibbles
    6: ("Q5_0", 32, 2 + 4 + 16),  # block_q5_0: half d, 32 fifth bits, 32 nibbles
    7: ("Q5_1", 32, 2 + 2 + 4 + 16),  # block_q5_1: half d, m, 32 fifth bits, 32 nibbles
    8: ("Q8_0", 32, 2 + 32),  # block_q8_0: half d, 32 bytes
    9: ("Q8_1", 32, 2 + 2 + 32),  # block_q8_1: half d, s, 32 bytes
    10: ("Q2_K", 256, 16 + 64 + 2 + 2),  # block_q2_K: scales, 2 bits each, half d, dmin
    11: ("Q3_K", 256, 32 + 64 + 12 + 2),  # block_q3_K: third bits, 2 bits each, scales, half d
    12: ("Q4_K", 256, 2 + 2 + 12 + 128),  # block_q4_K: half d, dmin, scales, nibbles
    13: ("Q5_K", 256, 2 + 2 + 12 + 32 + 128),  # block_q5_K: half d, dmin, scales, fifth bits, nibbles
    14: ("Q6_K", 256, 128 + 64 + 16 + 2),  # block_q6_K: nibbles, 2 bits each, scales, half d
    15: ("Q8_K", 256, 4 + 256 + 32),  # block_q8_K: float d, bytes, sums
    16: ("IQ2_XXS", 256, 2 + 64),  # block_iq2_xxs: half d, 32 words
    17: ("IQ2_XS", 256, 2 + 64 + 8),  # block_iq2_xs: half d, 32 words, scales
    18: ("IQ3_XXS", 256, 2 + 96),  # block_iq3_xxs: half d, 96 bytes
    19: ("IQ1_S", 256, 2 + 32 + 16),  # block_iq1_s: half d, 32 bytes, 8 words
    20: ("IQ4_NL", 32, 2 + 16),  # block_iq4_nl: half d, nibbles
    21: ("IQ3_S", 256, 2 + 64 + 8 + 32 + 4),  # block_iq3_s: half d, 64 bytes, ninth bits, signs, scales
    22: ("IQ2_S", 256, 2 + 64 + 8 + 8),  # block_iq2_s: half d, 64 bytes, high bits, scales
    23: ("IQ4_XS", 256, 2 + 2 + 4 + 128),  # block_iq4_xs: half d, scales high and low, nibbles
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 32 + 16 + 8),  # block_iq1_m: 32 bytes, high bits, scales
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 48 + 4 + 2),  # block_tq1_0: 5 elements a byte, 4 a byte, half d
    35: ("TQ2_0", 256, 64 + 2),  # block_tq2_0: 2 bits each, half d
    39: ("MXFP4", 32, 1 + 16),  # block_mxfp4: exponent, nibbles
    40: ("NVFP4", 64, 4 + 32),  # block_nvfp4: a scale for 16, nibbles
    41: ("Q1_0", 128, 2 + 16),  # block_q1_0: half d, a bit each
    42: ("Q2_0", 64, 2 + 16),  # block_q2_0: half d, 2 bits each
}
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_REPAIR = "fetch the file again"
_MOST_ITEMS = 3_000_000  # values read one by one: the largest vocabularies are of a tenth of that
_MOST_TENSORS = 200_000
_MOST_TEXT = 1 << 20
_MOST_DIMENSIONS = 8  # ggml has 4
_MOST_DEPTH = 4
_MOST = 2**63 - 1
# gguf_metadata_value_type: struct code of each; 8 is a text, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


def read_file(path: Path, where: str, metadata: dict[str, str]) -> list[Stored]:
    """The tensors that one file's header lists; short values it names are added to `metadata`. Raises InputError."""
    try:
        with path.open("rb") as file:
            return _Header(file, where).read(metadata)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where, "give a file that can") from None


class _Header:
    def __init__(self, file: BinaryIO, where: str) -> None:
        self.file, self.where = file, where
        self.size = file.seek(0, 2)
        file.seek(0)
        self.at = 0
        self.order = "<"
        self.items = 0

    def fault(self, what: str, place: str = "", repair: str = _REPAIR) -> InputError:
        return InputError(what, self.where + (f", {place}" if place else ""), repair)

    # --- parts --------------------------------------------------------------------------------------------------

    def bytes(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise self.fault(f"is cut short: {count:,} bytes wanted at byte {self.at:,} of {self.size:,}")
        data = self.file.read(count)
        if len(data) < count:
            raise self.fault(f"is cut short at byte {self.at + len(data):,}")
        self.at += count
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(self.order + code, self.bytes(struct.calcsize(code)))[0]

    def text(self) -> str:
        length = self.number("Q")
        if length > _MOST_TEXT:
            raise self.fault(f"has a text of {length:,} bytes at byte {self.at:,}")
        return self.bytes(length).decode("utf-8", errors="replace")

    def skip(self, count: int) -> None:
        if count > self.size - self.at:
            raise self.fault(f"is cut short: {count:,} bytes wanted at byte {self.at:,} of {self.size:,}")
        self.at += count
        self.file.seek(self.at)

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value; of an array only its length."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY or depth > _MOST_DEPTH:
            raise self.fault(f"has a value of type {kind} at byte {self.at:,}, which is not known")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[inner]))
        else:
            self.items += count
            if self.items > _MOST_ITEMS:
                raise self.fault(f"names {self.items:,} values, more than a vocabulary has")
            for _ in range(count):
                if inner == _TEXT:
                    self.skip_text()
                else:
                    self.value(inner, depth + 1)
        return f"{count:,} values"

    def skip_text(self) -> None:
        length = self.number("Q")
        if length <= 256:  # what follows is in the buffer already
            self.bytes(length)
        else:
            self.skip(length)

    # --- the whole ----------------------------------------------------------------------------------------------

    def read(self, metadata: dict[str, str]) -> list[Stored]:
        if self.bytes(4) != _MAGIC:
            raise self.fault("does not begin with GGUF")
        version = self.number("I")
        if version & 0xFFFF == 0 and version:  # written on a machine of the other byte order
            self.order = ">"
            version = int.from_bytes(struct.pack("<I", version), "big")
        if version not in _VERSIONS:
            raise self.fault(f"is GGUF version {version}", repair="convert it to version 3 with llama.cpp")
        tensors, values = self.number("Q"), self.number("Q")
        if tensors > _MOST_TENSORS or values > _MOST_TENSORS:
            raise self.fault(f"states {tensors:,} tensors and {values:,} values, more than a model has")
        alignment = 32
        seen: set[str] = set()
        for _ in range(values):
            key = self.text()
            kind = self.number("I")
            value = self.value(kind)
            if key in seen:
                raise self.fault("is given twice", f"value {_shown(key)}")
            seen.add(key)
            if key == "general.alignment":
                if not isinstance(value, int) or value < 1 or value % 8:
                    raise self.fault(f"is {_shown(str(value))}, not a multiple of 8", "value general.alignment")
                alignment = value
            elif key.isprintable() and len(key) <= 100 and str(value).isprintable() and len(str(value)) <= 200:
                metadata.setdefault(key, str(value))
        found = [self.tensor() for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment
        self.check(found, start, alignment)
        return [tensor for _, tensor in found]

    def tensor(self) -> tuple[int, Stored]:
        name = self.text()
        place = f"tensor {_shown(name)}"
        rank = self.number("I")
        if rank > _MOST_DIMENSIONS:
            raise self.fault(f"has {rank:,} dimensions", place)
        dims = [self.number("Q") for _ in range(rank)]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in BLOCKS:
            repair = "convert it with a current llama.cpp" if kind <= 38 else "update foretell"
            raise self.fault(f"is of ggml type {kind}, which is not known", place, repair)
        label, block, block_bytes = BLOCKS[kind]
        elements = math.prod(dims)
        if max([elements, *dims]) > _MOST // 8:
            raise self.fault(f"has shape {'×'.join(map(str, dims))[:80]}", place)
        row = dims[0] if dims else 1
        if row % block:
            raise self.fault(f"has rows of {row:,}, no multiple of a {label} block of {block}", place)
        return offset, Stored(name[:500], tuple(reversed(dims)), label, elements, elements // block * block_bytes)

    def check(self, found: list[tuple[int, Stored]], start: int, alignment: int) -> None:
        """Every tensor lies in the file, aligned, on no other; names differ."""
        names: set[str] = set()
        for _, tensor in found:
            if tensor.name in names:
                raise self.fault("is listed twice", f"tensor {_shown(tensor.name)}")
            names.add(tensor.name)
        end = 0
        for offset, tensor in sorted(found, key=lambda one: (one[0], one[1].nbytes)):
            place = f"tensor {_shown(tensor.name)}"
            if offset % alignment:
                raise self.fault(f"begins at {offset:,}, which is not aligned to {alignment}", place)
            if offset < end and tensor.nbytes:
                raise self.fault("overlaps the one before it", place)
            end = max(end, offset + tensor.nbytes)
            if start + offset + tensor.nbytes > self.size:
                raise self.fault(f"ends at byte {start + offset + tensor.nbytes:,} of a file of {self.size:,}", place)


def _shown(text: str) -> str:
    return text[:80] if text.isprintable() else "?"
