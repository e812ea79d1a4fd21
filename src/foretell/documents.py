"""Reading the files a user hands over: data, of bounded size, and every failure an `InputError`."""

from __future__ import annotations

import json
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretell.errors import InputError

__all__ = ["read_bytes", "read_json", "read_json_text", "read_text", "read_toml"]

MIB = 2**20
JSON_LIMIT_BYTES = 256 * MIB  # parsed, a graph takes a few times its text
TOML_LIMIT_BYTES = MIB // 16  # a data sheet; nested keys cost the parser quadratic time
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_text(path: Path, what: str, limit_bytes: int, errors: str = "strict") -> str:
    """The text of a regular file in UTF-8. Raises InputError where it is none, cannot be read, or is too large."""
    with _reading(path, what, limit_bytes):
        return path.read_text(encoding="utf-8", errors=errors)


def read_bytes(path: Path, what: str, limit_bytes: int) -> bytes:
    """The bytes of a regular file. Raises InputError where it is none, cannot be read, or is too large."""
    with _reading(path, what, limit_bytes):
        return path.read_bytes()


@contextmanager
def _reading(path: Path, what: str, limit_bytes: int) -> Iterator[None]:
    """Refuse what has no end or is too large before it is read, and say of every failure what it is."""
    repair = f"give the path of a {what}"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise InputError(f"is {kind}, not a regular file", _shown(path), repair)
        if status.st_size > limit_bytes:
            raise InputError(f"is larger than {limit_bytes:,} bytes", _shown(path), repair)
        yield
    except FileNotFoundError:
        raise InputError("no such file", _shown(path), repair) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot be read: {reason}", _shown(path), repair) from None


def read_json_text(text: str, where: str, what: str) -> Any:
    """Parse JSON. Raises InputError where it is malformed, nested too deeply, or holds an absurd number."""
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError("nested too deeply", where, f"give a {what}") from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}", where, f"give a {what}") from None


def read_json(path: Path, what: str) -> Any:
    """Parse a JSON file; see `read_text` and `read_json_text`."""
    return read_json_text(read_text(path, what, JSON_LIMIT_BYTES), _shown(path), what)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Parse a TOML file; a syntax error names its line."""
    text = read_text(path, what, TOML_LIMIT_BYTES)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError("nested too deeply", _shown(path), f"give a {what}") from None
    except ValueError as error:
        raise InputError(f"malformed TOML: {error}", _shown(path), "mend the syntax there") from None


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:97]}…{text[-97:]}"
