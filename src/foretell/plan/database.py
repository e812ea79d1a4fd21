"""`Database`: the file that a search keeps its results in, so that one that was killed goes on where it was.

One SQLite database for one question. What is asked and the code that answers it are told apart by a digest: results of
another question, or of another version, are never mixed with these.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import foretell
from foretell.errors import InputError

__all__ = ["Database", "code_digest", "question_text"]

_HEADER = b"SQLite format 3\x00"
_WAIT_S = 2.0


@cache
def code_digest(rooms: tuple[str, ...]) -> str:
    """Digest of the code and data of some rooms of this package."""
    digest = hashlib.sha256()
    package = Path(foretell.__file__).resolve().parent
    for room in rooms:
        for file in sorted((package / room).rglob("*")):
            if file.suffix in (".py", ".json", ".toml"):
                digest.update(str(file.relative_to(package)).encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def question_text(question: Mapping[str, Any]) -> str:
    """A question as the text that it is compared by."""
    return json.dumps(question, sort_keys=True, default=repr)


class Database:
    """An open file of results; a context manager. Without a path it is in memory. Only one process may write.

    `digest` tells the search from others and `text` is what it asks; `tables` are the tables' names and `create` what
    makes them in a new file; `example` names one. Raises InputError where the file is something else, holds another
    search, is damaged, in use, or not writable.
    """

    def __init__(
        self, path: Path | None, *, digest: str, text: str, tables: Iterable[str], create: Iterable[str], example: str
    ) -> None:
        self.path = path
        self._where = f"--out {path}"
        if path is not None:
            self._refuse_others(path, example)
        try:
            self._db = sqlite3.connect(":memory:" if path is None else path, timeout=_WAIT_S, isolation_level=None)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("BEGIN IMMEDIATE")
            self._prepare(digest, text, {"question", *tables}, create)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(error) from error
        except InputError:
            self.close()
            raise

    def _refuse_others(self, path: Path, example: str) -> None:
        """Never write into a file that is something else."""
        try:
            if path.is_fifo():  # reading would wait for a writer
                raise InputError("is a pipe", self._where, f"give a new file, e.g. {example}")
            with path.open("rb") as file:
                start = file.read(len(_HEADER))
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", self._where, "give another file") from None
        if start and start != _HEADER:
            raise InputError("is no store of results", self._where, f"give a new file, e.g. {example}")

    def _prepare(self, digest: str, text: str, tables: set[str], create: Iterable[str]) -> None:
        there = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not there:
            self._db.execute("CREATE TABLE question (digest TEXT, text TEXT)")
            for statement in create:
                self._db.execute(statement)
            self._db.execute("INSERT INTO question VALUES (?, ?)", (digest, text))
            return
        if there != tables:
            raise InputError("is a database of something else", self._where, "give a new file")
        found = self._db.execute("SELECT digest, text FROM question").fetchall()
        if len(found) != 1:
            raise InputError("is damaged: it names no question", self._where, "delete it, or give a new file")
        if found[0][0] != digest:
            what = "this search by another version of Foretell" if found[0][1] == text else "another search"
            raise InputError(f"holds the results of {what}", self._where, "delete it, or give a new file")

    def _failed(self, error: sqlite3.Error) -> InputError:
        self.close()
        said = str(error)
        if "locked" in said or "busy" in said:
            return InputError("is in use by another search", self._where, "wait for it, or give another file")
        if isinstance(error, sqlite3.OperationalError) and ("full" in said or "open" in said or "readonly" in said):
            return InputError(f"cannot be written: {said}", self._where, "give another file")
        return InputError(f"is damaged: {said}", self._where, "delete it, or give a new file")

    def close(self) -> None:
        """Let others have the file."""
        if hasattr(self, "_db"):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
