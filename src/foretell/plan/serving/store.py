"""`Results`: simulations that a search has done, in a file, so that one that was killed goes on where it was.

One SQLite database for one question; a row for each result under its key, written in a transaction of its own. (The
store of plans for training keeps columns of `TrainingPlan`; results here are of several shapes, and few.)
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import foretell
from foretell.errors import InputError

__all__ = ["Results"]

_HEADER = b"SQLite format 3\x00"
_WAIT_S = 2.0
#: What a result depends on besides the question.
_ROOMS = ("graph", "hardware", "workload/llm", "workload/kv", "cost", "simulate/serving", "plan/serving")


@cache
def _code() -> str:
    digest = hashlib.sha256()
    package = Path(foretell.__file__).resolve().parent
    for room in _ROOMS:
        for file in sorted((package / room).rglob("*")):
            if file.suffix in (".py", ".json", ".toml"):
                digest.update(str(file.relative_to(package)).encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


class Results:
    """Results of one search by their keys; a context manager. Without a path they are kept in memory only.

    Raises InputError where the file is something else, holds another search, is in use, damaged or not writable.
    """

    def __init__(self, path: Path | None, question: Mapping[str, Any]) -> None:
        self.path = path
        self.reused = 0
        self._where = f"--out {path}"
        text = json.dumps(question, sort_keys=True, default=repr)
        digest = hashlib.sha256(f"{_code()} {text}".encode()).hexdigest()
        if path is not None:
            self._refuse_others(path)
        try:
            self._db = sqlite3.connect(":memory:" if path is None else path, timeout=_WAIT_S, isolation_level=None)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("BEGIN IMMEDIATE")
            self._prepare(digest, text)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(error) from error
        except InputError:
            self.close()
            raise

    def _refuse_others(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                start = file.read(len(_HEADER))
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", self._where, "give another file") from None
        if start and start != _HEADER:
            raise InputError("is no store of results", self._where, "give a new file, e.g. serving.sqlite")

    def _prepare(self, digest: str, text: str) -> None:
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            self._db.execute("CREATE TABLE question (digest TEXT, text TEXT)")
            self._db.execute("CREATE TABLE results (key TEXT PRIMARY KEY, value TEXT)")
            self._db.execute("INSERT INTO question VALUES (?, ?)", (digest, text))
            return
        if tables != {"question", "results"}:
            raise InputError("is a database of something else", self._where, "give a new file")
        found = self._db.execute("SELECT digest, text FROM question").fetchall()
        if len(found) != 1:
            raise InputError("is damaged: it names no question", self._where, "delete it, or give a new file")
        if found[0][0] != digest:
            what = "this search by another version of Foretell" if found[0][1] == text else "another search"
            raise InputError(f"holds the results of {what}", self._where, "delete it, or give a new file")

    def of(self, key: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result under `key` (plain data), made and kept if it is not there. Values are plain data, floats
        exact.
        """
        name = json.dumps(key, sort_keys=True)
        try:
            row = self._db.execute("SELECT value FROM results WHERE key = ?", (name,)).fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        if row is not None:
            try:
                found = json.loads(row[0])
            except (ValueError, TypeError) as error:
                raise InputError(f"is damaged: {error}", self._where, "delete it, or give a new file") from error
            if not isinstance(found, dict):
                raise InputError("is damaged: a result is no object", self._where, "delete it, or give a new file")
            self.reused += 1
            return found
        made = json.loads(json.dumps(make()))
        try:
            self._db.execute("INSERT INTO results VALUES (?, ?)", (name, json.dumps(made)))
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return dict(made)

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

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
