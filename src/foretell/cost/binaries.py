"""What a compiler says its kernels need: registers, shared memory, barriers, largest block. Read, never executed.

Two sources: the text that ``ptxas -v`` (``nvcc -Xptxas -v``) prints, and CUDA binaries. A cubin is an ELF file of
machine 190. A kernel ``NAME`` has a section ``.text.NAME``; its register count is in ``.nv.info`` (attribute 0x2f, by
symbol), in older files in the top byte of the section's ``sh_info``; its static shared memory is the size of
``.nv.shared.NAME``, which from compute capability 9.0 on includes the kilobyte that the driver reserves; the barriers
are attribute 0x4c of ``.nv.info.NAME``, in older files bits 20 to 26 of ``sh_flags``, and the largest block is
attribute 0x05 or 0x10. A fatbin is a row of cubins and PTX, and an
object file or library has its fatbins in ``.nv_fatbin``. (Layout: what ``cuobjdump`` and ``nvdisasm`` of CUDA 12.9 and
13.0 show of files compiled for 7.5 to 12.1.)

Files are not trusted: every offset and size is checked against the bytes there are.
"""

from __future__ import annotations

import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import InputError

__all__ = ["Kernel", "parse_binary", "parse_ptxas", "read_binary", "short_name"]

_MOST_BYTES = 1 << 30
_EM_CUDA = 190
_RELOCATABLE = 1
_FATBIN = 0xBA55ED50
_COMPRESSED = 0x2000 | 0x8000  # LZ4, Zstandard
_RESERVED = 1024
_FUNC, _ENTRY = 2, 0x10  # a symbol's type, and the bit that makes a function a kernel
_MAX_THREADS, _REQUIRED_THREADS, _REGISTERS, _BARRIERS = 0x05, 0x10, 0x2F, 0x4C
_BYTES, _VALUE = 4, 2  # formats of an attribute: that many bytes follow; or a byte is in it


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel as compiled for one `capability` (``9.0``; None where the source does not say).

    `registers` are per thread, `shared_bytes` the static shared memory of a block, without what the driver reserves;
    `max_block` is the largest block it may be launched with by its launch bounds, `spill_bytes` what a thread stores
    for want of registers (None where not known).
    """

    name: str
    registers: int
    shared_bytes: int
    barriers: int = 0
    capability: str | None = None
    max_block: int | None = None
    spill_bytes: int | None = None


_ENTRY_LINE = re.compile(r"Compiling entry function '([^']{1,4096})' for 'sm_(\d{2,3})[a-z]?'")
_SPILL = re.compile(r"(\d{1,9}) bytes spill stores")
_USED = re.compile(r"Used (\d{1,9}) registers")
_USED_BARRIERS = re.compile(r"used (\d{1,9}) barriers")
_USED_SHARED = re.compile(r"(\d{1,9})(?:\+\d{1,9})? bytes smem")


def parse_ptxas(text: str, where: str = "ptxas -v") -> list[Kernel]:
    """The kernels in what ``ptxas -v`` printed. Raises InputError where there is none."""
    kernels: list[Kernel] = []
    entry: tuple[str, str] | None = None
    spill = 0
    for line in text.splitlines():
        if found := _ENTRY_LINE.search(line):
            entry, spill = (found[1], _capability(int(found[2]))), 0
        elif found := _SPILL.search(line):
            spill = int(found[1])
        elif entry is not None and (found := _USED.search(line)):
            barriers, shared = _USED_BARRIERS.search(line), _USED_SHARED.search(line)
            kernels.append(
                Kernel(
                    name=entry[0],
                    registers=int(found[1]),
                    shared_bytes=int(shared[1]) if shared else 0,
                    barriers=int(barriers[1]) if barriers else 0,
                    capability=entry[1],
                    spill_bytes=spill,
                )
            )
            entry = None
    if not kernels:
        raise InputError("no kernel in it", where, "give what nvcc -Xptxas -v prints (on standard error)")
    return kernels


def read_binary(path: Path) -> list[Kernel]:
    """The kernels of a cubin, fatbin, object file or library. Raises InputError saying what is wrong and where."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # a pipe or device has no end
            raise InputError("is not a regular file", str(path), "give a .cubin or .fatbin")
        if status.st_size > _MOST_BYTES:
            raise InputError("is larger than a GiB", str(path), "give the cubin of the kernels in question")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", str(path), "give a .cubin or .fatbin") from error
    return parse_binary(data, str(path))


def parse_binary(data: bytes, where: str) -> list[Kernel]:
    """The kernels in the bytes of a cubin, a fatbin, or an ELF file that has fatbins."""
    kernels: list[Kernel] = []
    compressed = 0
    for part in _cubins(_Bytes(data, where)):
        if part is None:
            compressed += 1
        else:
            kernels += _kernels(part)
    if not kernels and compressed:
        raise InputError(
            "its cubins are compressed", where, "compile with --compress-mode=none, or cuobjdump -xelf all FILE"
        )
    if not kernels:
        raise InputError("no kernel in it", where, "compile for a real architecture, such as -arch=sm_90, not PTX only")
    return kernels


class _Bytes:
    """Bytes with a name; whatever reaches beyond their end is an InputError, not a crash."""

    def __init__(self, data: bytes | memoryview, where: str) -> None:
        self.data = memoryview(data)
        self.where = where

    def __len__(self) -> int:
        return len(self.data)

    def error(self, what: str) -> InputError:
        return InputError(what, self.where, "compile it anew: it is cut short, damaged or no CUDA binary")

    def unpack(self, form: str, offset: int) -> tuple[Any, ...]:
        end = offset + struct.calcsize("<" + form)
        if end > len(self.data):
            raise self.error(f"ends before byte {end}")
        return struct.unpack_from("<" + form, self.data, offset)

    def slice(self, offset: int, size: int) -> _Bytes:
        if offset > len(self.data) or size > len(self.data) - offset:
            raise self.error(f"ends before byte {offset + size}")
        return _Bytes(self.data[offset : offset + size], self.where)

    def text(self, offset: int) -> str:
        """The zero-ended text at an offset."""
        tail = bytes(self.data[min(offset, len(self)) : offset + 4097])
        end = tail.find(b"\0")
        if end < 0:
            raise self.error(f"a name at byte {offset} has no end")
        return tail[:end].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    flags: int
    offset: int
    size: int
    link: int
    info: int


def _cubins(data: _Bytes) -> Iterator[_Bytes | None]:
    """The cubins in a file; None for one that is compressed."""
    if bytes(data.data[:4]) == b"\x7fELF":
        if _machine(data) == _EM_CUDA:
            yield data
            return
        for section in _sections(data):
            if section.name in (".nv_fatbin", "__nv_relfatbin"):
                yield from _fatbins(data.slice(section.offset, section.size))
    elif len(data) >= 4 and data.unpack("I", 0)[0] == _FATBIN:
        yield from _fatbins(data)
    else:
        raise data.error("is neither ELF nor fatbin")


def _fatbins(data: _Bytes) -> Iterator[_Bytes | None]:
    """The cubins of fatbins that lie one behind another, each at a multiple of eight bytes."""
    at = 0
    while at + 16 <= len(data):
        magic, _, header, size = data.unpack("IHHQ", at)
        if magic != _FATBIN:
            at += 8  # padding between two of them
            continue
        if header < 16:
            raise data.error(f"a fatbin at byte {at} has a header of {header} bytes")
        entries = data.slice(at + header, size)
        inner = 0
        while inner + 64 <= len(entries):
            kind, _, entry_header, payload = entries.unpack("HHIQ", inner)
            flags = entries.unpack("Q", inner + 40)[0]
            if entry_header < 64:
                raise data.error(f"an entry of a fatbin has a header of {entry_header} bytes")
            body = entries.slice(inner + entry_header, payload)
            if kind == 2:
                yield None if flags & _COMPRESSED else body
            inner += entry_header + payload
        at += header + size


def _machine(data: _Bytes) -> int:
    if len(data) < 64 or data.data[4] != 2 or data.data[5] != 1:
        raise data.error("is no 64-bit little-endian ELF file")
    return int(data.unpack("H", 18)[0])


def _sections(data: _Bytes) -> list[_Section]:
    (offset,) = data.unpack("Q", 40)
    size, count, names = data.unpack("HHH", 58)
    if count and size < 64:
        raise data.error(f"its section headers have {size} bytes")
    raw = [data.unpack("IIQQQQIIQQ", offset + i * size) for i in range(count)]
    if names >= count:
        raise data.error("the names of its sections are nowhere")
    text = data.slice(raw[names][4], raw[names][5])
    return [_Section(text.text(r[0]), r[2], r[4], r[5], r[6], r[7]) for r in raw]


def _kernels(data: _Bytes) -> list[Kernel]:
    """The kernels of one cubin, by name."""
    if _machine(data) != _EM_CUDA:
        raise data.error(f"is for machine {_machine(data)}, not a CUDA GPU")
    if data.unpack("H", 16)[0] == _RELOCATABLE:
        raise InputError(
            "is not linked, so that registers and shared memory are not final",
            data.where,
            "link it (nvcc -dlink), or compile without -rdc=true",
        )
    sections = _sections(data)
    by_name = {section.name: section for section in sections}
    entries, names = _symbols(data, sections)
    counts = {}
    if (info := by_name.get(".nv.info")) is not None:
        for attribute, value in _attributes(data.slice(info.offset, info.size)):
            if attribute == _REGISTERS and isinstance(value, _Bytes):
                symbol, count = value.unpack("II", 0)
                counts[names.get(symbol)] = int(count)
    reserved = _RESERVED if ".nv.shared.reserved.0" in by_name else 0
    kernels = []
    for section in sections:
        name = section.name.removeprefix(".text.")
        if name == section.name or (entries and name not in entries):
            continue
        shared = by_name.get(f".nv.shared.{name}")
        registers = counts.get(name, section.info >> 24)
        barriers, max_block = section.flags >> 20 & 0x7F, None
        if (own := by_name.get(f".nv.info.{name}")) is not None:
            for attribute, value in _attributes(data.slice(own.offset, own.size)):
                if attribute == _BARRIERS and isinstance(value, int):
                    barriers = value
                elif attribute in (_MAX_THREADS, _REQUIRED_THREADS) and isinstance(value, _Bytes):
                    x, y, z = value.unpack("III", 0)
                    max_block = min(x * y * z, max_block or x * y * z)
        if registers > 1024 or barriers > 64 or (max_block is not None and not 0 < max_block <= 1 << 20):
            raise data.error(f"{name} has {registers} registers, {barriers} barriers and blocks of {max_block}")
        size = max(0, shared.size - reserved) if shared is not None else 0
        if size > 1 << 24:
            raise data.error(f"{name} has {size} bytes of shared memory")
        kernels.append(Kernel(name, registers, size, barriers, _architecture(data), max_block))
    return sorted(kernels, key=lambda kernel: kernel.name)


def _architecture(data: _Bytes) -> str:
    """The compute capability in the header's flags: in their second byte since CUDA 13, in their first before."""
    (flags,) = data.unpack("I", 48)
    return _capability(flags >> 8 & 0xFF if data.data[8] >= 8 else flags & 0xFF)


def _capability(architecture: int) -> str:
    """``sm_90`` is 9.0, ``sm_120`` 12.0."""
    return f"{architecture // 10}.{architecture % 10}"


def _symbols(data: _Bytes, sections: list[_Section]) -> tuple[set[str], dict[int, str]]:
    """The names of kernels, and of every function by index."""
    entries: set[str] = set()
    names: dict[int, str] = {}
    table = next((section for section in sections if section.name == ".symtab"), None)
    if table is None:
        return entries, names
    if table.link >= len(sections):
        raise data.error("the names of its symbols are nowhere")
    strings = data.slice(sections[table.link].offset, sections[table.link].size)
    symbols = data.slice(table.offset, table.size)
    for index in range(table.size // 24):
        name, info, other = symbols.unpack("IBB", index * 24)
        if info & 0xF == _FUNC:
            names[index] = strings.text(name)
            if other & _ENTRY:
                entries.add(names[index])
    return entries, names


def _attributes(info: _Bytes) -> Iterator[tuple[int, int | _Bytes]]:
    """(attribute, value) of an ``.nv.info`` section."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = info.unpack("BBH", at)
        at += 4
        if form == _BYTES:
            yield attribute, info.slice(at, value)
            at += value
        elif form == _VALUE:
            yield attribute, value & 0xFF
        else:
            yield attribute, value


def short_name(name: str) -> str:
    """The function's name in a mangled one, without parameters and template arguments; others come back as they are.

    >>> short_name("_Z5scalePffi"), short_name("_ZN2at6native4tileILi2048EEEvPKfPf"), short_name("triton_poi_fused_0")
    ('scale', 'at::native::tile', 'triton_poi_fused_0')
    """
    if not name.startswith("_Z"):
        return name
    at, parts = 2, []
    if nested := name.startswith("N", at):
        at += 1
    while found := re.compile(r"(\d{1,4})").match(name, at):
        length = int(found[1])
        part = name[found.end() : found.end() + length]
        if len(part) < length:
            return name
        parts.append("(anonymous)" if part.startswith("_GLOBAL__N") else part)
        at = found.end() + length
        if not nested:
            break
    return "::".join(parts) or name
