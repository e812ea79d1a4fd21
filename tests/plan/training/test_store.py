"""The file of results: whole or not at all, gone on from after a kill, refused where it is not what it should be."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.hardware import cluster
from foretell.plan import database
from foretell.plan.training import search as module
from foretell.plan.training import store as stores
from foretell.plan.training.rows import VALUES, Part, Rows, budget_bytes, evaluate
from foretell.plan.training.search import search
from foretell.plan.training.space import Space
from foretell.plan.training.store import Store, digest_of
from foretell.simulate.training import TrainingPlan
from foretell.workload import llm

CONFIG = llm.config("llama-3-8b")
ON = cluster("2x dgx-h100")
QUESTION = {"what": "a search"}
ASKED = {"global_batch": 64, "seq_len": 8192}

# A search of many parts, as a script: what is killed in the middle.
LONG = """
import sys, time
from pathlib import Path
from foretell.hardware import cluster
from foretell.plan.training import search as module
from foretell.workload import llm

true = module.evaluate
if {slow}:
    def evaluate(space, index, budget):
        time.sleep(0.2)
        return true(space, index, budget)
    module.evaluate = evaluate

if __name__ == "__main__":
    module.search(llm.config("deepseek-v3"), cluster("32x dgx-h100"), global_batch=4096, seq_len=4096,
                  pinned={{"micro_batch": (1,)}}, out=Path(sys.argv[1]), jobs={jobs},
                  progress=lambda what, done, total: print(done, total, flush=True))
"""


@pytest.fixture(scope="module")
def part() -> Part:
    space = Space(CONFIG, ON, TrainingPlan(64, 8192))
    return evaluate(space, 0, budget_bytes(ON, 0.9))


def same(one: Rows, two: Rows) -> bool:
    plans = all((one.plans[name] == two.plans[name]).all() for name in one.plans.columns)
    return plans and all(np.array_equal(one[name], two[name], equal_nan=True) for name in VALUES)


def test_a_part_is_read_as_it_was_written(part: Part, tmp_path: Path) -> None:
    path = tmp_path / "plans.sqlite"
    nothing = Part(7, 0, Rows.concatenate([]))
    with Store(path, QUESTION) as store:
        store.write(part)
        store.write(nothing)
    with Store(path, QUESTION) as store:
        assert store.done() == (0, 7)
        again = store.read(0)
        assert same(again.rows, part.rows)
        assert (again.legal, again.least_bytes, again.leanest) == (part.legal, part.least_bytes, part.leanest)
        empty = store.read(7)
        assert (len(empty.rows), empty.legal, empty.least_bytes, empty.leanest) == (0, 0, np.inf, None)


def test_the_file_can_be_asked_in_sql(part: Part, tmp_path: Path) -> None:
    path = tmp_path / "plans.sqlite"
    with Store(path, QUESTION) as store:
        store.write(part)
    with sqlite3.connect(path) as db:
        (best,) = db.execute("SELECT min(time_s) FROM plans WHERE recompute = 'none' AND tp = 2").fetchone()
    alike = (part.rows.plans["tp"] == 2) & part.rows.plans.chosen("recompute", "none")
    assert best == part.rows["time_s"][alike].min()
    db.close()


def test_a_search_goes_on_from_its_file_and_does_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plans.sqlite"
    whole = search(CONFIG, ON, **ASKED)
    blocks = Space(CONFIG, ON, TrainingPlan(64, 8192)).blocks
    done: list[int] = []
    true = module.evaluate

    def counted(space: Space, index: int, budget: float) -> Part:
        if len(done) == 1 and not stopped:
            raise KeyboardInterrupt
        done.append(index)
        return true(space, index, budget)

    monkeypatch.setattr(module, "evaluate", counted)
    assert blocks > 1
    stopped: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        search(CONFIG, ON, out=path, **ASKED)
    stopped.append(True)
    found = search(CONFIG, ON, out=path, **ASKED)
    assert sorted(done) == list(range(blocks))  # each once
    assert found.reused == 1
    assert found.to_dict() == whole.to_dict()
    third = search(CONFIG, ON, out=path, objective="energy", nodes=(2,), **ASKED)  # the same plans, ranked otherwise
    assert (third.reused, len(done)) == (blocks, blocks)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_search_loses_nothing_and_does_nothing_twice(tmp_path: Path, jobs: int) -> None:
    path, script = tmp_path / "plans.sqlite", tmp_path / "run.py"
    script.write_text(LONG.format(slow=True, jobs=jobs))
    with subprocess.Popen([sys.executable, str(script), str(path)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for _ in range(3):
            said = run.stdout.readline()
        assert said.startswith("3 ")
        run.send_signal(signal.SIGKILL)
        run.wait(timeout=30)
    total = int(said.split()[1])
    assert total > 5
    with sqlite3.connect(path) as db:
        before = db.execute("SELECT part, legal, fitting FROM parts ORDER BY part").fetchall()
        orphans = db.execute("SELECT count(*) FROM plans WHERE part NOT IN (SELECT part FROM parts)").fetchone()
    db.close()
    assert 3 <= len(before) < total
    assert orphans == (0,)
    script.write_text(LONG.format(slow=False, jobs=jobs))
    again = finished(script, path)
    assert [int(line.split()[0]) for line in again.stdout.splitlines()] == list(range(len(before) + 1, total + 1))
    fresh = tmp_path / "fresh.sqlite"
    finished(script, fresh)
    tables = []
    for file in (path, fresh):
        with sqlite3.connect(file) as db:
            tables.append([sorted(db.execute(f"SELECT * FROM {name}"), key=repr) for name in ("parts", "plans")])
        db.close()
    assert tables[0] == tables[1]


def finished(script: Path, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run


def test_workers_end_when_the_search_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(LONG.format(slow=True, jobs=2))
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "plans.sqlite")], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        run.stdout.readline()
        children = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        assert len(children) >= 2
        run.send_signal(signal.SIGKILL)
        run.wait(timeout=30)
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in children if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_another_question_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plans.sqlite"
    search(CONFIG, ON, out=path, **ASKED)
    with pytest.raises(InputError, match="holds the results of another search"):
        search(CONFIG, ON, out=path, global_batch=128, seq_len=8192)
    with pytest.raises(InputError, match="holds the results of another search"):
        search(CONFIG, ON, out=path, max_memory=0.8, **ASKED)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plans.sqlite"
    Store(path, QUESTION).close()
    before = digest_of(QUESTION)
    monkeypatch.setattr(stores, "_code_digest", lambda: "other")
    assert digest_of(QUESTION) != before
    with pytest.raises(InputError, match="this search by another version of Foretell"):
        Store(path, QUESTION)


def test_files_of_something_else_are_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("mine")
    with pytest.raises(InputError, match="is no store of results"):
        Store(text, QUESTION)
    assert text.read_text() == "mine"
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(InputError, match="is a database of something else"):
        Store(other, QUESTION)
    with pytest.raises(InputError, match="cannot be read"):
        Store(tmp_path, QUESTION)
    with pytest.raises(InputError, match="cannot be written"):
        Store(tmp_path / "no" / "folder.sqlite", QUESTION)


def everything(path: Path) -> list[Part]:
    with Store(path, QUESTION) as store:
        return [store.read(index) for index in store.done()]


@pytest.mark.parametrize("where", ["start", "middle", "cut"])
def test_a_damaged_file_is_refused(part: Part, tmp_path: Path, where: str) -> None:
    path = tmp_path / "plans.sqlite"
    with Store(path, QUESTION) as store:
        store.write(part)
    data = bytearray(path.read_bytes())
    if where == "start":
        data[16:4096] = bytes(4080)
    elif where == "middle":
        data[4096:] = bytes([0xA5]) * (len(data) - 4096)
    else:
        data = data[: len(data) // 3]
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"is damaged: .*; delete it, or give a new file"):
        everything(path)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM plans WHERE rowid = 1",
        "UPDATE plans SET recompute = 'sometimes' WHERE rowid = 1",
        "UPDATE parts SET leanest = '{\"tp\": 1}'",
        "UPDATE parts SET leanest = 'x'",
        "UPDATE plans SET tp = 'x' WHERE rowid = 1",
        "DELETE FROM question",
    ],
)
def test_rows_that_cannot_be_are_refused(part: Part, tmp_path: Path, change: str) -> None:
    path = tmp_path / "plans.sqlite"
    with Store(path, QUESTION) as store:
        store.write(part)
    with sqlite3.connect(path) as db:
        db.execute(change)
    db.close()
    with pytest.raises(InputError, match="is damaged"), Store(path, QUESTION) as store:
        store.read(0)


def test_only_one_search_writes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plans.sqlite"
    monkeypatch.setattr(database, "_WAIT_S", 0.1)
    with Store(path, QUESTION), pytest.raises(InputError, match="is in use by another search"):
        Store(path, QUESTION)
    Store(path, QUESTION).close()


def test_a_full_disk_is_said(part: Part, tmp_path: Path) -> None:
    with Store(tmp_path / "plans.sqlite", QUESTION) as store:
        pages: Any = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(InputError, match="cannot be written: database or disk is full"):
            store.write(part)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InputError, match="is a pipe"):
        Store(path, QUESTION)
