"""`Store`: the file that a search writes its results to as they come, and goes on from.

One SQLite database for one question: a table ``plans`` with a row for each plan that fits, one of ``parts`` that were
looked at, and a ``question``. A part of the space is written in one transaction with its plans, so that a search
that is killed at any moment has lost the parts it was at, and no other, and does none twice.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.plan.database import Database, code_digest, question_text
from foretell.plan.training.rows import VALUES, Part, Rows
from foretell.simulate.training.plan import CHOICES, PlanTable, TrainingPlan

__all__ = ["Store", "digest_of"]

_FIELDS = tuple(PlanTable.of([]).columns)
_FORMAT = 1
#: What a result depends on besides the question.
_ROOMS = ("graph", "hardware", "workload/llm", "cost", "simulate", "plan/training")


def _code_digest() -> str:
    return code_digest(_ROOMS)


def digest_of(question: Mapping[str, Any]) -> str:
    """What tells one search from another: the question, and the code that answers it."""
    return hashlib.sha256(f"{_FORMAT} {_code_digest()} {question_text(question)}".encode()).hexdigest()


class Store(Database):
    """Results of one search in a file. A context manager; only one process at a time may write.

    Raises InputError where the file is not such a store, holds another search, is damaged, in use, or not writable.
    """

    def __init__(self, path: Path, question: Mapping[str, Any]) -> None:
        settings = ", ".join(f'"{name}" {"TEXT" if name in CHOICES else "INTEGER"}' for name in _FIELDS)
        figures = ", ".join(f'"{name}" REAL' for name in VALUES)
        super().__init__(
            path,
            digest=digest_of(question),
            text=question_text(question),
            tables=("parts", "plans"),
            create=(
                "CREATE TABLE parts (part INTEGER PRIMARY KEY, legal INTEGER, fitting INTEGER, "
                "least_bytes REAL, leanest TEXT)",
                f"CREATE TABLE plans (part INTEGER, {settings}, {figures})",
                "CREATE INDEX by_part ON plans (part)",
            ),
            example="plans.sqlite",
        )

    def done(self) -> tuple[int, ...]:
        """Parts of the space that are in the file."""
        try:
            return tuple(part for (part,) in self._db.execute("SELECT part FROM parts ORDER BY part"))
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def write(self, part: Part) -> None:
        """Add a part, whole or not at all."""
        columns: list[list[Any]] = [[part.index] * len(part.rows)]
        for name in _FIELDS:
            column = part.rows.plans[name]
            columns.append(np.array(CHOICES[name])[column].tolist() if name in CHOICES else column.tolist())
        columns += [[None if x != x else x for x in part.rows[name].tolist()] for name in VALUES]
        leanest = None if part.leanest is None else json.dumps(part.leanest.to_dict())
        least = part.least_bytes if np.isfinite(part.least_bytes) else None
        try:
            self._db.execute("BEGIN IMMEDIATE")
            marks = ", ".join("?" * len(columns))
            self._db.executemany(f"INSERT INTO plans VALUES ({marks})", zip(*columns, strict=True))
            row = (part.index, part.legal, len(part.rows), least, leanest)
            self._db.execute("INSERT INTO parts VALUES (?, ?, ?, ?, ?)", row)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def read(self, index: int) -> Part:
        """A part as it was written."""
        names = ", ".join(f'"{name}"' for name in (*_FIELDS, *VALUES))
        try:
            (row,) = self._db.execute(
                "SELECT legal, fitting, least_bytes, leanest FROM parts WHERE part = ?", (index,)
            ).fetchall()
            rows = self._db.execute(f"SELECT {names} FROM plans WHERE part = ? ORDER BY rowid", (index,)).fetchall()
            if len(rows) != row[1]:
                raise ValueError(f"part {index} has {len(rows)} of {row[1]} plans")
            return Part(index, int(row[0]), _rows(rows),
                        np.inf if row[2] is None else float(row[2]),
                        None if row[3] is None else TrainingPlan(**json.loads(row[3])))  # fmt: skip
        except sqlite3.Error as error:
            raise self._failed(error) from error
        except (ValueError, TypeError, KeyError, InputError) as error:
            raise InputError(f"is damaged: {error}", self._where, "delete it, or give a new file") from error


def _rows(found: list[tuple[Any, ...]]) -> Rows:
    if not found:
        return Rows.concatenate([])
    columns = list(zip(*found, strict=True))
    plans: dict[str, Any] = {}
    for name, column in zip(_FIELDS, columns, strict=False):
        known = {choice: i for i, choice in enumerate(CHOICES.get(name, ()))}
        plans[name] = np.array([known[v] for v in column] if known else column, dtype=np.int64)
    figures = columns[len(_FIELDS):]
    values = {name: np.array(column, dtype=np.float64) for name, column in zip(VALUES, figures, strict=True)}
    return Rows(PlanTable.build(plans, len(found)), MappingProxyType(values))
