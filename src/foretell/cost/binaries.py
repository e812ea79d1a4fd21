"""What a compiler says its kernels need: registers, shared memory, barriers, largest block. Read, never executed.

Two sources: the text that ``ptxas -v`` (``nvcc -Xptxas -v``) prints, and CUDA binaries. A cubin is an ELF file of
machine 190. A kernel ``NAME`` has a section ``.text.NAME``; its register count is in ``.nv.info`` (attribute 0x2f, by
symbol), in older files in the top byte of the section's ``sh_info``; its static shared memory is the size of
``.nv.shared.NAME``, which from compute capability 9.0 on includes the kilobyte that the driver reserves; the barriers
are attribute 0x4c of ``.nv.info.NAME``, in older files bits 20 to 26 of ``sh_flags``, and the largest block is
attribute 0x05 or 0x10. A fatbin is a row of cubins and PTX, and an
object file or library has its fatbins in ``.nv_fatbin``. (Layout: what ``cuobjdump`` and ``nvdisasm`` of CUDA 12.9 and
13.0 show of files compiled for 7.5 to 12.1.)

Files are not trusted: every offset and size is checked against the bytes there are, no byte is searched twice for
fatbins, and the entries read (sections, symbols, attributes, fatbins) are counted, so that a file whose tables lie over
each other ends as soon as any other.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foretell import documents
from foretell.errors import InputError

__all__ = ["Kernel", "parse_binary", "parse_ptxas", "read_binary", "read_ptxas", "short_name"]

#: Bytes of a file that are read: a whole library of kernels, and yet a third of a gigabyte in memory.
MOST_BYTES = 320 << 20
#: Characters of a log that are read.
MOST_CHARACTERS = 1 << 26
_MOST_KERNELS = 100_000
_MOST_ENTRIES = 500_000
_MOST_REGISTERS = 255  # of a thread, and 16 named barriers of a block: CUDA C++ Programming Guide, 3.5 to 12.x
_MOST_BARRIERS = 16
_EM_CUDA = 190
_RELOCATABLE = 1
_FATBIN = b"\x50\xed\x55\xba"
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


# What tells of a kernel, and what follows it on its line. Each begins with a letter, and not with the digits before
# "bytes", so that what is none of them is skipped quickly. Not ``\d{1,9}``: ten digits would read as nine.
_TOLD = re.compile(
    r"Compiling entry function '([^'\n]{1,4096})' for 'sm_(\d{2,3})[a-z]?'"
    r"|bytes (spill stores)"
    r"|Used (\d++) registers([^\n]{0,1000})",
    re.ASCII,
)
_BEFORE = re.compile(r"(\d++) $", re.ASCII)
_BARRIERS_USED = re.compile(r"used (\d++) barriers", re.ASCII)
_SHARED_USED = re.compile(r"(?<!\d)(\d++)(?:\+\d++)? bytes smem", re.ASCII)


def parse_ptxas(text: str, where: str = "ptxas -v") -> list[Kernel]:
    """The kernels in what ``ptxas -v`` printed. Raises InputError where there is none, or one that no GPU could run."""
    kernels: list[Kernel] = []
    entry: tuple[str, str] | None = None
    spill = 0
    for found in _TOLD.finditer(text):
        name, architecture, spilled, used, rest = found.groups()
        if name is not None:
            entry, spill = (_printable(name), _capability(int(architecture))), 0
        elif spilled is not None:
            number = _BEFORE.search(text[max(0, found.start() - 20) : found.start()])
            spill = _number(number[1]) if number else spill
        elif entry is not None:
            barriers, shared = _BARRIERS_USED.search(rest), _SHARED_USED.search(rest)
            kernel = Kernel(
                name=entry[0],
                registers=_number(used),
                shared_bytes=_number(shared[1]) if shared else 0,
                barriers=_number(barriers[1]) if barriers else 0,
                capability=entry[1],
                spill_bytes=spill,
            )
            if problem := _problem(kernel):
                line = text.count("\n", 0, found.start()) + 1
                raise InputError(problem, f"{where}:{line}", "give what ptxas -v prints as it is")
            kernels.append(kernel)
            entry = None
            if len(kernels) > _MOST_KERNELS:
                raise _too_many_kernels(where)
    if not kernels:
        raise InputError("no kernel in it", where, "give what nvcc -Xptxas -v prints (on standard error)")
    return kernels


def read_ptxas(path: Path) -> list[Kernel]:
    """The kernels in a file of what ``ptxas -v`` printed. Raises InputError saying what is wrong and where."""
    text = documents.read_text(path, "log of ptxas -v, or - for standard input", MOST_CHARACTERS, errors="replace")
    return parse_ptxas(text, str(path))


def _number(digits: str) -> int:
    """Digits as a number; those of an absurdly long one as one that is merely too large."""
    return int(digits[:18])


def _problem(kernel: Kernel) -> str | None:
    """What a kernel has more of than any GPU of its compute capability gives, in words."""
    most = _most_shared_bytes(kernel.capability)
    for value, limit, what in (
        (kernel.registers, _MOST_REGISTERS, "registers a thread"),
        (kernel.barriers, _MOST_BARRIERS, "barriers a block"),
        (kernel.shared_bytes, most, "bytes of shared memory a block"),
    ):
        if value > limit:
            return f"{shorten(kernel.name)} has {value:,} {what}, where {limit:,} are the most"
    return None


@cache
def _most_shared_bytes(capability: str | None) -> int:
    """What a block may have by a compute capability; by any, where this one is not known."""
    from foretell.hardware.loader import compute_capabilities

    known = compute_capabilities()
    tables = [known[capability]] if capability is not None and capability in known else known.values()
    return max(int(table["shared_bytes_per_block"]) for table, *_ in tables)


def _too_many_kernels(where: str) -> InputError:
    return InputError(f"more than {_MOST_KERNELS:,} kernels", where, "give those in question")


def _printable(name: str) -> str:
    """A name without what would steer a terminal."""
    return name if name.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in name)


def shorten(name: str) -> str:
    """A name as a message shows it."""
    return name if len(name) <= 80 else f"{name[:79]}…"


def read_binary(path: Path) -> list[Kernel]:
    """The kernels of a cubin, fatbin, object file or library. Raises InputError saying what is wrong and where."""
    return parse_binary(documents.read_bytes(path, ".cubin, .fatbin, object file or library", MOST_BYTES), str(path))


def parse_binary(data: bytes, where: str) -> list[Kernel]:
    """The kernels in the bytes of a cubin, a fatbin, or an ELF file that has fatbins."""
    kernels: list[Kernel] = []
    compressed = 0
    for part in _cubins(_Bytes(data, where)):
        if part is None:
            compressed += 1
        else:
            kernels += _kernels(part)
        if len(kernels) > _MOST_KERNELS:
            raise _too_many_kernels(where)
    if not kernels and compressed:
        raise InputError(
            "its cubins are compressed", where, "compile with --compress-mode=none, or cuobjdump -xelf all FILE"
        )
    if not kernels:
        raise InputError("no kernel in it", where, "compile for a real architecture, such as -arch=sm_90, not PTX only")
    return kernels


class _Budget:
    """How many entries of a file may still be read."""

    def __init__(self, where: str) -> None:
        self.left = _MOST_ENTRIES
        self.where = where

    def spend(self, entries: int) -> None:
        self.left -= entries
        if self.left < 0:
            raise InputError(
                f"more than {_MOST_ENTRIES:,} sections, symbols and attributes",
                self.where,
                "give the cubin of the kernels in question (cuobjdump -xelf NAME FILE)",
            )


class _Bytes:
    """A stretch of a file's bytes; whatever reaches beyond its end is an InputError, not a crash."""

    def __init__(self, data: bytes, where: str, start: int = 0, size: int | None = None, budget: _Budget | None = None):
        self.data = data
        self.where = where
        self.start = start
        self.size = len(data) if size is None else size
        self.budget = budget or _Budget(where)

    def __len__(self) -> int:
        return self.size

    def error(self, what: str) -> InputError:
        return InputError(what, self.where, "compile it anew: it is cut short, damaged or no CUDA binary")

    def unpack(self, form: str, offset: int) -> tuple[Any, ...]:
        end = offset + struct.calcsize("<" + form)
        if end > self.size:
            raise self.error(f"ends before byte {end}")
        return struct.unpack_from("<" + form, self.data, self.start + offset)

    def rows(self, form: str, offset: int, count: int) -> Iterator[tuple[Any, ...]]:
        """`count` equal structures that lie one behind another."""
        self.budget.spend(count)
        table = self.slice(offset, count * struct.calcsize("<" + form))
        return struct.iter_unpack("<" + form, memoryview(self.data)[table.start : table.start + table.size])

    def slice(self, offset: int, size: int) -> _Bytes:
        if offset > self.size or size > self.size - offset:
            raise self.error(f"ends before byte {offset + size}")
        return _Bytes(self.data, self.where, self.start + offset, size, self.budget)

    def find(self, what: bytes, offset: int) -> int:
        """Where `what` next is, from `offset` on; -1: nowhere."""
        at = self.data.find(what, self.start + offset, self.start + self.size)
        return at if at < 0 else at - self.start

    def text(self, offset: int) -> str:
        """The zero-ended text at an offset."""
        start = self.start + min(offset, self.size)
        end = self.data.find(b"\0", start, min(start + 4097, self.start + self.size))
        if end < 0:
            raise self.error(f"a name at byte {offset} has no end")
        self.budget.spend((end - start) >> 8)
        return _printable(self.data[start:end].decode("utf-8", "replace"))


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
    if data.data.startswith(b"\x7fELF"):
        if _machine(data) == _EM_CUDA:
            yield data
            return
        named = [s for s in _sections(data) if s.name in (".nv_fatbin", "__nv_relfatbin") and s.size]
        end = 0
        for section in sorted(named, key=lambda section: (section.offset, -section.size)):
            if section.offset >= end:  # what lies over another was searched with it
                yield from _fatbins(data.slice(section.offset, section.size))
                end = section.offset + section.size
    elif data.data.startswith(_FATBIN):
        yield from _fatbins(data)
    else:
        raise data.error("is neither ELF nor fatbin")


def _fatbins(data: _Bytes) -> Iterator[_Bytes | None]:
    """The cubins of fatbins that lie one behind another, each at a multiple of eight bytes, with padding between."""
    at = 0
    while (at := data.find(_FATBIN, at)) >= 0 and at + 16 <= len(data):
        data.budget.spend(1)
        if at % 8:
            at += 1
            continue
        _, _, header, size = data.unpack("IHHQ", at)
        if header < 16:
            raise data.error(f"a fatbin at byte {at} has a header of {header} bytes")
        entries = data.slice(at + header, size)
        inner = 0
        while inner + 64 <= len(entries):
            data.budget.spend(1)
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
    if len(data) < 64 or data.unpack("4s2B", 0) != (b"\x7fELF", 2, 1):
        raise data.error("is no 64-bit little-endian ELF file")
    return int(data.unpack("H", 18)[0])


def _sections(data: _Bytes) -> list[_Section]:
    (offset,) = data.unpack("Q", 40)
    size, count, names = data.unpack("HHH", 58)
    if count and size != 64:
        raise data.error(f"its section headers have {size} bytes")
    raw = list(data.rows("IIQQQQIIQQ", offset, count))
    if names >= count:
        raise data.error("the names of its sections are nowhere")
    text = data.slice(raw[names][4], raw[names][5])
    return [_Section(text.text(r[0]), r[2], r[4], r[5], r[6], r[7]) for r in raw]


def _kernels(data: _Bytes) -> list[Kernel]:
    """The kernels of one cubin, by name."""
    data.budget.spend(16)  # what a cubin costs however few its sections
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
    capability = _architecture(data)
    kernels = {}
    for section in sections:
        name = section.name.removeprefix(".text.")
        if name == section.name or (entries and name not in entries) or name in kernels:
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
        size = max(0, shared.size - reserved) if shared is not None else 0
        kernel = Kernel(name, registers, size, barriers, capability, max_block)
        if problem := _problem(kernel):
            raise data.error(problem)
        if max_block is not None and not 0 < max_block <= 1 << 20:
            raise data.error(f"{shorten(name)} is bound to blocks of {max_block:,} threads")
        kernels[name] = kernel
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def _architecture(data: _Bytes) -> str:
    """The compute capability in the header's flags: in their second byte since CUDA 13, in their first before."""
    (flags,) = data.unpack("I", 48)
    return _capability(flags >> 8 & 0xFF if data.unpack("B", 8)[0] >= 8 else flags & 0xFF)


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
    for index, (name, info, other) in enumerate(symbols.rows("IBB18x", 0, len(symbols) // 24)):
        if info & 0xF == _FUNC:
            names[index] = strings.text(name)
            if other & _ENTRY:
                entries.add(names[index])
    return entries, names


def _attributes(info: _Bytes) -> Iterator[tuple[int, int | _Bytes]]:
    """(attribute, value) of an ``.nv.info`` section."""
    at = 0
    while at + 4 <= len(info):
        info.budget.spend(1)
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
        if not part or len(part) < length:
            return name
        parts.append("(anonymous)" if part.startswith("_GLOBAL__N") else part)
        at = found.end() + length
        if not nested:
            break
    return "::".join(parts) or name
