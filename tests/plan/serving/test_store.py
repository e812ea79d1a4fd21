"""Results kept in a file: found again, never mixed with others, refused where damaged."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.plan.serving.store import Results


def test_what_was_made_is_not_made_again(tmp_path: Path) -> None:
    path, made = tmp_path / "r.sqlite", []

    def make() -> dict[str, float]:
        made.append(1)
        return {"x": 0.1 + 0.2}

    for again in range(2):
        with Results(path, {"a": 1}) as results:
            assert results.of(["k", 1], make) == {"x": 0.1 + 0.2}
            assert results.of(["k", 1], make) == {"x": 0.1 + 0.2}
            assert results.reused == again  # asked for twice, it counts once
    assert made == [1]
    with Results(None, {"a": 1}) as results:
        results.of(["k", 1], make)
    assert made == [1, 1]


def test_what_fails_is_not_kept(tmp_path: Path) -> None:
    def fail() -> dict[str, float]:
        raise InfeasibleError("no room")

    with Results(tmp_path / "r.sqlite", {}) as results:
        with pytest.raises(InfeasibleError):
            results.of("k", fail)
        assert results.of("k", lambda: {"x": 1}) == {"x": 1}


def test_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    Results(path, {"a": 1}).close()
    with pytest.raises(InputError, match="holds the results of another search"):
        Results(path, {"a": 2})


def test_other_files_are_never_written(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("keep me")
    with pytest.raises(InputError, match="is no store of results"):
        Results(text, {})
    assert text.read_text() == "keep me"
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(InputError, match="database of something else"):
        Results(other, {})
    with pytest.raises(InputError, match=r"cannot be (read|written)"):
        Results(tmp_path, {})


def test_two_at_once(tmp_path: Path) -> None:
    with Results(tmp_path / "r.sqlite", {}), pytest.raises(InputError, match="in use by another search"):
        Results(tmp_path / "r.sqlite", {})


def test_damage_is_said(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    with Results(path, {}) as results:
        results.of("k", lambda: {"x": 1})
    with sqlite3.connect(path) as db:
        db.execute("UPDATE results SET value = '[1'")
    db.close()
    with Results(path, {}) as results, pytest.raises(InputError, match="is damaged"):
        results.of("k", lambda: {"x": 1})


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="is a pipe"):
        Results(pipe, {"asked": 1})
