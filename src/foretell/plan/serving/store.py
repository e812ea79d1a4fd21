"""`Results`: simulations that a search has done, in a file, so that one that was killed goes on where it was.

One SQLite database for one question; a row for each result under its key, written in a transaction of its own. (The
store of plans for training keeps columns of `TrainingPlan`; results here are of several shapes, and few.)
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.plan.database import Database, code_digest, question_text

__all__ = ["Results"]

#: What a result depends on besides the question.
_ROOMS = ("graph", "hardware", "workload/llm", "workload/kv", "cost", "simulate", "plan/serving")


class Results(Database):
    """Results of one search by their keys; a context manager. Without a path they are kept in memory only.

    Raises InputError where the file is something else, holds another search, is in use, damaged or not writable.
    """

    def __init__(self, path: Path | None, question: Mapping[str, Any]) -> None:
        #: Results that were there before this search and that it asked for, each counted once.
        self.reused = 0
        self._known: set[str] = set()
        text = question_text(question)
        super().__init__(
            path,
            digest=hashlib.sha256(f"{code_digest(_ROOMS)} {text}".encode()).hexdigest(),
            text=text,
            tables=("results",),
            create=("CREATE TABLE results (key TEXT PRIMARY KEY, value TEXT)",),
            example="serving.sqlite",
        )

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
            self.reused += name not in self._known
            self._known.add(name)
            return found
        made = json.loads(json.dumps(make()))
        try:
            self._db.execute("INSERT INTO results VALUES (?, ?)", (name, json.dumps(made)))
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._known.add(name)
        return dict(made)
