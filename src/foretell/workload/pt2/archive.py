"""The members of a ``.pt2`` archive that say what the program does: JSON, of bounded size. Nothing is unpickled.

Two layouts exist. PyTorch up to 2.7 writes ``serialized_exported_program.json`` beside three pickles (weights,
constants, example inputs), which are never opened: the shapes are in the JSON. Only the pickles would say which
parameters share one weight, so that a shared weight counts once for each of its names. Later versions write
``models/NAME.json`` with raw weights in ``data/weights/`` and ``data/weights/NAME_weights_config.json``, which says
which parameters share one weight; all below one folder named after the file.
"""

from __future__ import annotations

import errno
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from foretell import documents
from foretell.errors import InputError, unknown
from foretell.workload.filekind import describe_kind
from foretell.workload.pt2.program import printable

__all__ = ["Archive", "read"]

MIB = 2**20
_MOST_MEMBERS = 100_000
_MOST_DIRECTORY_BYTES = 32 * MIB
_MOST_JSON_BYTES = 64 * MIB
_MOST_PARSED_BYTES = 700 * MIB  # what the parsed JSON may take
_OLD = "serialized_exported_program.json"
_MODEL = re.compile(r"(?:(?P<root>[^/]+)/)?models/(?P<name>[^/]+)\.json")
_REPAIR = "give a file that torch.export.save wrote"
_FAULTS = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError,
    OverflowError, IndexError, KeyError, MemoryError,
)


@dataclass(frozen=True, slots=True)
class Archive:
    """`program` is the exported program as plain data; `weights` says which payload each parameter or buffer is."""

    program: dict[str, Any]
    weights: dict[str, str]
    layout: str


def read(path: Path, model: str | None = None) -> Archive:
    """Read the archive at `path`; `model` chooses among several programs. Raises InputError for whatever is wrong."""
    where = str(path)[:300]
    kind = describe_kind(path)
    if kind == "no file":
        raise InputError("no such file", where, _REPAIR)
    if kind in ("a folder", "no regular file", "a file that cannot be read"):
        raise InputError(f"is {kind}", where, _REPAIR)
    try:
        with path.open("rb") as file:
            if file.read(4) not in (b"PK\x03\x04", b"PK\x05\x06"):
                raise InputError(f"is {kind}, not a PyTorch exported program", where, _REPAIR)
            _check_directory(file, where)
            with zipfile.ZipFile(file) as archive:
                return _read(archive, path, model)
    except InputError:
        raise
    except _FAULTS as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise InputError(f"cannot be read: {error.strerror or error}", where, "give a file that can") from None
        what = str(error) if isinstance(error, (zipfile.BadZipFile, zlib.error)) else "a place outside the file"
        raise InputError(f"is a damaged archive: {printable(what)}", where, "fetch the file again") from None


def _check_directory(file: BinaryIO, where: str) -> None:
    """Refuse a table of contents too large to hold, before it is read whole."""
    size = file.seek(0, 2)
    start = max(0, size - 65_557)  # the end record, and the longest comment after it
    file.seek(start)
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        raise InputError("is cut short: the archive's table of contents is missing", where, "fetch the file again")
    members, directory = struct.unpack_from("<HI", tail, at + 10)
    locator = tail[at - 20 : at] if at >= 20 else b""
    if locator.startswith(b"PK\x06\x07"):  # the larger records of zip64
        (offset,) = struct.unpack_from("<Q", locator, 8)
        if offset + 56 <= size:
            file.seek(offset)
            record = file.read(56)
            if record.startswith(b"PK\x06\x06"):
                members, directory = struct.unpack_from("<QQ", record, 32)
    if members > _MOST_MEMBERS or directory > _MOST_DIRECTORY_BYTES:
        raise InputError(f"lists {members:,} members, more than a program has", where, _REPAIR)
    file.seek(0)


def _read(archive: zipfile.ZipFile, path: Path, model: str | None) -> Archive:
    where = str(path)
    members: dict[str, zipfile.ZipInfo] = {}
    twice: set[str] = set()
    for info in archive.infolist():
        if info.filename in members:
            twice.add(info.filename)
        members[info.filename] = info

    def load(name: str) -> Any:
        place = f"{where}, member {printable(name)}"
        if name in twice:
            raise InputError("is in the archive twice", place, _REPAIR)
        return _json(archive, members[name], place)

    programs = {m["name"]: name for name in members if (m := _MODEL.fullmatch(name)) is not None}
    if programs:
        if model is None and len(programs) > 1 and "model" not in programs:
            known = printable(", ".join(sorted(programs)[:8]))
            raise InputError(f"holds several programs: {known}", where, "name one after a colon: pt2:FILE:NAME")
        chosen = model or ("model" if "model" in programs else next(iter(programs)))
        if chosen not in programs:
            raise unknown(f"program in {where}", chosen, programs)
        member = programs[chosen]
        root = member[: member.index("models/")]
        config = f"{root}data/weights/{chosen}_weights_config.json"
        weights = _payloads(load(config)) if config in members else {}
        return Archive(_object(load(member), where, member), weights, "models")
    if _OLD in members:
        return Archive(_object(load(_OLD), where, _OLD), {}, "serialized_exported_program")
    if any("data/aotinductor/" in name for name in members):
        raise InputError("holds only compiled code (AOTInductor), no program", where, _REPAIR)
    raise InputError(f"is {describe_kind(path)} without a program to read", where, _REPAIR)


def _json(archive: zipfile.ZipFile, info: zipfile.ZipInfo, place: str) -> Any:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError("is compressed in a way that PyTorch does not use", place, _REPAIR)
    if info.file_size > _MOST_JSON_BYTES:
        raise InputError(f"is {info.file_size:,} bytes long, more than {_MOST_JSON_BYTES:,}", place, _REPAIR)
    with archive.open(info) as stream:
        data = stream.read(_MOST_JSON_BYTES + 1)
    if len(data) > _MOST_JSON_BYTES:
        raise InputError(f"is longer than {_MOST_JSON_BYTES:,} bytes", place, _REPAIR)
    # What CPython takes for a dict, a list and an entry of one: a few bytes of text can stand for hundreds in memory.
    parsed = 240 * data.count(b"{") + 72 * data.count(b"[") + 160 * data.count(b",") + len(data)
    if parsed > _MOST_PARSED_BYTES:
        raise InputError("would take too much memory when parsed", place, _REPAIR)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("is not text", place, _REPAIR) from None
    return documents.read_json_text(text, place, "program that torch.export.save wrote")


def _object(data: Any, where: str, member: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InputError("is not a JSON object", f"{where}, member {printable(member)}", _REPAIR)
    return data


def _payloads(data: Any) -> dict[str, str]:
    """Payload by name of the parameter or buffer; whatever is not of that form is left out."""
    config = data.get("config") if isinstance(data, dict) else None
    if not isinstance(config, dict):
        return {}
    found = {}
    for name, entry in config.items():
        payload = entry.get("path_name") if isinstance(entry, dict) else None
        if isinstance(payload, str):
            found[name] = payload
    return found
