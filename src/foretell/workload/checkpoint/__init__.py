"""Checkpoints on disk by their headers: what is stored, in which types, how large. No weight is read.

`read` takes a safetensors or GGUF file, the index of a sharded checkpoint, or a folder that holds one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath

from foretell import documents
from foretell.errors import InputError
from foretell.workload.checkpoint import gguf, safetensors
from foretell.workload.checkpoint.stored import SCHEMA, Checkpoint, Stored
from foretell.workload.filekind import describe_kind

__all__ = ["SCHEMA", "Checkpoint", "Stored", "read"]

_Reader = Callable[[Path, str, dict[str, str]], list[Stored]]
_READERS: dict[str, _Reader] = {"safetensors": safetensors.read_file, "gguf": gguf.read_file}
_KINDS = {"a safetensors checkpoint": "safetensors", "a GGUF checkpoint": "gguf"}
_MOST_FILES = 10_000
_MOST_INDEX_BYTES = 64 * documents.MIB
_MOST_TENSORS = 1_000_000
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_REPAIR = "give a safetensors or GGUF file, an index.json, or a folder that holds one"


def read(path: str | Path) -> Checkpoint:
    """What a checkpoint holds, from its headers.

    `path` is a ``.safetensors`` or ``.gguf`` file (of a split GGUF, any of its parts), a
    ``model.safetensors.index.json``, or a folder with one of these. Raises InputError naming file, place and repair.
    """
    given = Path(path)
    kind = _kind(given)
    if kind == "a folder":
        return _folder(given)
    if kind == "no file":
        raise InputError("no such file", _shown(given), _REPAIR)
    if kind == "a JSON document":
        return _indexed(given)
    if kind not in _KINDS:
        raise InputError(f"is {kind}, not a checkpoint that can be sized", _shown(given), _REPAIR)
    if _KINDS[kind] == "gguf" and (split := _SPLIT.fullmatch(given.name)) is not None:
        return _split(given, split)
    return _together(given, _KINDS[kind], [given])


def _together(path: Path, kind: str, files: list[Path], listed: dict[str, str] | None = None) -> Checkpoint:
    """The tensors of several files as one checkpoint. `listed` says in which file each must be."""
    if len(files) > _MOST_FILES:
        raise InputError(f"has {len(files):,} files, more than {_MOST_FILES:,}", _shown(path), "give one of them")
    tensors: list[Stored] = []
    home: dict[str, str] = {}
    metadata: dict[str, str] = {}
    total = 0
    for file in files:
        found_kind = _kind(file)
        if _KINDS.get(found_kind) != kind:
            raise InputError(f"is {found_kind}, not {kind}", _shown(file), "fetch the file again")
        for tensor in _READERS[kind](file, _shown(file), metadata):
            if tensor.name in home:
                what = f"holds tensor {tensor.name[:80]!r}, which is in {home[tensor.name][:80]} too"
                raise InputError(what, _shown(file), "keep one of the two files")
            home[tensor.name] = file.name
            tensors.append(tensor)
        if len(tensors) > _MOST_TENSORS:
            raise InputError(f"lists more than {_MOST_TENSORS:,} tensors", _shown(path), "give one of its files")
        total += file.stat().st_size
    for name, file_name in (listed or {}).items():
        if home.get(name) != file_name:
            raise InputError(f"lists {name[:80]!r} in {file_name[:80]}, which has no such tensor", _shown(path),
                             "fetch the checkpoint again")
    return Checkpoint(str(path), kind, tuple(file.name for file in files), tuple(tensors), total, metadata)


def _kind(path: Path) -> str:
    """As `describe_kind`; a damaged file is what its name says, so that its reader can say what is wrong with it."""
    kind = describe_kind(path)
    if kind in ("a file of an unknown kind", "a file of zeros", "an empty file"):
        return {".safetensors": "a safetensors checkpoint", ".gguf": "a GGUF checkpoint"}.get(path.suffix, kind)
    return kind


def _folder(folder: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", _shown(folder), _REPAIR) from None
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indexes) == 1 or "model.safetensors.index.json" in indexes:
        return _indexed(folder / ("model.safetensors.index.json" if len(indexes) > 1 else indexes[0]))
    tensors = [folder / name for name in names if name.endswith(".safetensors")]
    if tensors:
        whole = [file for file in tensors if file.name == "model.safetensors"]
        return _together(folder, "safetensors", whole or tensors)
    found = [folder / name for name in names if name.endswith(".gguf")]
    stems = {(m["stem"] if (m := _SPLIT.fullmatch(file.name)) is not None else file.name) for file in found}
    if len(stems) > 1:
        raise InputError(f"holds {len(stems)} GGUF checkpoints", _shown(folder), f"name one, e.g. {found[0].name[:80]}")
    if not found:
        raise InputError("holds no checkpoint", _shown(folder), _REPAIR)
    return read(found[0])


def _indexed(index: Path) -> Checkpoint:
    """A sharded checkpoint by its index: ``{"weight_map": {tensor: file}}``, the files beside it."""
    what = "safetensors index"
    data = documents.read_json_text(documents.read_text(index, what, _MOST_INDEX_BYTES), _shown(index), what)
    listed = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise InputError("has no weight_map", _shown(index), _REPAIR)
    for tensor, name in listed.items():
        plain = isinstance(name, str) and PurePosixPath(name).name == name == PureWindowsPath(name).name
        if not plain or name in ("", ".", "..") or "\0" in name:
            raise InputError(
                f"places {tensor[:80]!r} in {str(name)[:80]!r}, which is no file beside it", _shown(index),
                "fetch the index again",
            )
    files = [index.parent / name for name in sorted(set(listed.values()))]
    for file in files[:_MOST_FILES]:
        if not file.is_file():
            raise InputError(f"lists {file.name[:80]}, which is not there", _shown(index), "fetch that file too")
    return _together(index, "safetensors", files, listed)


def _split(path: Path, split: re.Match[str]) -> Checkpoint:
    """A GGUF checkpoint in numbered parts."""
    count = int(split["count"])
    if not 1 <= int(split["number"]) <= count or count > _MOST_FILES:
        raise InputError("is named as a part that cannot be", _shown(path), "give it its own name")
    files = [path.with_name(f"{split['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise InputError(f"is one of {count} parts, of which {file.name[:80]} is not there", _shown(path),
                             "fetch that file too")
    return _together(path, "gguf", files)


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:97]}…{text[-97:]}"
