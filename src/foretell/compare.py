"""`compare`: workloads × devices × precisions × batches, one row each, and the Pareto front among them.

Rows are kept as they come, so that a run that was stopped goes on where it was: in the cache's folder, under a key of
everything a row depends on (the question, this package's code and the catalogue it found its devices in).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from foretell.errors import ForetellError, InputError, unknown
from foretell.graph import Graph
from foretell.hardware import Device, device

__all__ = ["AXES", "Comparison", "Row", "compare", "pareto"]

# What a Pareto front weighs, each by a column of `Row` and whether more of it is better.
AXES: Mapping[str, tuple[str, bool]] = {
    "speed": ("throughput_per_s", True),
    "memory": ("memory_bytes", False),
    "energy": ("energy_j_per_item", False),
    "price": ("usd_per_million", False),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One workload in one precision and batch on one device. Columns are None where unknown.

    `throughput_per_s`, `energy_j_per_item` and `usd_per_million` are of `item` (images, sequences, tokens); `fits`
    whether the peak of memory does; `problem` why there is no prediction; `pareto` whether no other row of its group
    is as good in every axis and better in one.
    """

    workload: str
    device: str
    precision: str
    batch: int
    mode: str = ""
    item: str = ""
    time_s: float | None = None
    time_low_s: float | None = None
    time_high_s: float | None = None
    throughput_per_s: float | None = None
    memory_bytes: int | None = None
    fits: bool | None = None
    mfu: float | None = None
    bound: str = ""
    energy_j_per_item: float | None = None
    usd_per_million: float | None = None
    problem: str = ""
    pareto: bool = False


COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(Row))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows in the order asked, how many were at hand from a run before, and whether the run was interrupted."""

    rows: tuple[Row, ...]
    axes: tuple[str, ...]
    reused: int = 0
    interrupted: bool = False

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain data, a mapping of `COLUMNS` each."""
        return [asdict(row) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, schema ``foretell.comparison/1``."""
        return {
            "schema": "foretell.comparison/1",
            "axes": list(self.axes),
            "interrupted": self.interrupted,
            "rows": self.to_dicts(),
        }


def compare(
    workloads: Sequence[str],
    on: Sequence[str | Device],
    *,
    precisions: Sequence[str] = ("fp32",),
    batches: Sequence[int | None] = (None,),
    axes: Sequence[str] = tuple(AXES),
    across: bool = False,
    runtime: str = "eager",
    model: str = "auto",
    keep: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    **settings: Any,
) -> Comparison:
    """Predict every combination. What cannot be predicted is a row that says why; the others go on.

    A batch of None is the workload's own: 1, or that of a file or of example inputs. `axes` are those of the Pareto
    front, drawn among rows of one workload, or among all with ``across=True``;
    `settings` go to `capture`. ``keep=False`` neither reads nor keeps rows of other runs. An interrupt returns what
    there is. Raises UnknownNameError for an unknown axis or device, InputError for an empty list or one that is too
    long.
    """
    for what, given in (("workload", workloads), ("device", on), ("precision", precisions), ("batch", batches)):
        if not given:
            raise InputError(f"no {what} to compare", repair=f"give at least one {what}")
        if len(set(map(str, given))) != len(given):
            raise InputError(f"a {what} is given twice", repair="give each once")
    for axis in axes:
        if axis not in AXES:
            raise unknown("axis", axis, AXES)
    if len(set(axes)) != len(axes):
        raise InputError("an axis is given twice", repair="give each once")
    cells = list(itertools.product(workloads, precisions, batches))
    if len(cells) * len(on) > 100_000:
        raise InputError(f"{len(cells) * len(on):,} combinations", repair="ask for at most 100,000 at a time")
    devices = [one if isinstance(one, Device) else device(one) for one in on]
    done = _Kept(keep, {"runtime": runtime, "model": model, **settings})
    rows: list[Row] = []
    interrupted = False
    try:
        for i, (workload, precision, batch) in enumerate(cells):
            rows += _cell(workload, precision, batch, devices, done, runtime, model, settings)
            if progress is not None:
                progress("combinations", (i + 1) * len(devices), len(cells) * len(devices))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        done.close()
    return Comparison(tuple(pareto(rows, axes, across=across)), tuple(axes), done.reused, interrupted)


def _cell(
    workload: str,
    precision: str,
    batch: int | None,
    devices: Sequence[Device],
    done: _Kept,
    runtime: str,
    model: str,
    settings: Mapping[str, Any],
) -> list[Row]:
    """The rows of one graph: captured once, costed on each device."""
    from foretell.api import capture
    from foretell.cost import estimate, lower

    found: dict[str, Row] = {}
    for one in devices:
        row = done.get(Row(workload, one.name, precision, batch or 0), one)
        if row is not None:
            found[one.name] = row
    missing = [one for one in devices if one.name not in found]
    program = None
    for one in missing:
        asked = row = Row(workload, one.name, precision, batch or 0)
        try:
            if program is None:
                graph = capture(workload, **{**settings, "precision": precision, "batch": batch})
                program = lower(graph, runtime)
            row = _row(row, estimate(graph, one, runtime=runtime, model=model, program=program))
            row = replace(row, batch=batch or _batch(graph))
        except ForetellError as error:
            row = Row(workload, one.name, precision, batch or 1, problem=" ".join(str(error).split()))
        except Exception as error:  # one odd workload must not lose the others' rows
            what = " ".join(f"{type(error).__name__}: {error}".split())
            row = Row(workload, one.name, precision, batch or 1, problem=f"failed unexpectedly: {what[:200]}")
        done.put(asked, row, one)
        found[one.name] = row
    return [found[one.name] for one in devices]


def _batch(graph: Graph) -> int:
    """The batch a graph was captured with: its first input's first dimension."""
    shape = graph.tensors[graph.inputs[0]].shape if graph.inputs else ()
    return max(1, shape[0]) if shape else 1


def _row(row: Row, estimate: Any) -> Row:
    item, number = next(iter(estimate.items.items()))
    low_s, high_s = estimate.time_interval_s
    return Row(
        row.workload,
        row.device,
        row.precision,
        row.batch,
        estimate.mode,
        item,
        estimate.time_s,
        low_s,
        high_s,
        estimate.throughput_per_s,
        estimate.memory.peak_bytes,
        estimate.memory.fits,
        estimate.mfu,
        estimate.bound,
        None if estimate.energy_j is None else estimate.energy_j / number,
        None if estimate.cost_usd is None else 1e6 * estimate.cost_usd / number,
    )


def pareto(rows: Sequence[Row], axes: Sequence[str] = tuple(AXES), *, across: bool = False) -> list[Row]:
    """`rows` with `pareto` set. Rows that do not fit or lack an axis that their group has are never on the front.

    An axis that no row of a group knows (a price, for a group of devices without one) is left out for that group.
    """
    marked = [replace(row, pareto=False) for row in rows]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, row in enumerate(rows):
        if not row.problem and row.fits is not False:
            key = (row.mode, row.item) if across else (row.workload, row.mode, row.item)
            groups.setdefault(key, []).append(i)
    for members in groups.values():
        columns = []
        for axis in axes:
            name, more = AXES[axis]
            values = [getattr(rows[i], name) for i in members]
            if all(value is None for value in values):
                continue
            columns.append([np.inf if v is None else -v if more else v for v in values])
        if not columns:
            continue
        points = np.array(columns, dtype=float).T
        for place, i in enumerate(members):
            if not np.isfinite(points[place]).all():
                continue
            as_good = (points <= points[place]).all(axis=1)
            better = (points < points[place]).any(axis=1)
            marked[i] = replace(rows[i], pareto=not (as_good & better).any())
    return marked


# --- rows of other runs -----------------------------------------------------------------------------------------------


@cache
def _code_fingerprint() -> str:
    """Changes whenever anything does that a prediction may depend on."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent
    for folder in ("graph", "hardware", "workload", "cost"):
        for file in sorted((package / folder).rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                digest.update(file.name.encode())
                digest.update(file.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


def _checked(row: Row) -> Row:
    """`row`, if every column is of its type. Raises TypeError."""
    for field in fields(Row):
        value = getattr(row, field.name)
        kinds = {"str": str, "int": int, "float": float, "bool": bool, "None": type(None)}
        allowed = tuple(kinds[name] for name in str(field.type).split(" | "))
        if not isinstance(value, (*allowed, int) if float in allowed else allowed) or (
            isinstance(value, bool) and bool not in allowed
        ):
            raise TypeError(f"{field.name} is {value!r}")
    return row


class _Kept:
    """Rows of earlier runs by what they depend on: one line of JSON each, written as they come."""

    def __init__(self, keep: bool, settings: Mapping[str, Any]) -> None:
        from foretell.workload import cache as captures

        self.reused = 0
        self._rows: dict[str, Row] = {}
        self._file: Any = None
        self._settings = json.dumps(settings, sort_keys=True, default=str)
        folder = captures.folder() if keep else None
        if folder is None:
            return
        path = folder / "compare" / f"{_code_fingerprint()[:32]}.jsonl"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # cut off by a kill
                    entry = json.loads(line)
                    self._rows[str(entry["key"])] = _checked(Row(**entry["row"]))
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._file.write("\n")  # the last line may lack its end

    def _key(self, row: Row, on: Device) -> str | None:
        if row.workload.startswith("py:") or Path(row.workload.partition(":")[2] or row.workload).exists():
            return None  # a file may have changed
        question = [row.workload, row.precision, row.batch, repr(on), self._settings]
        return hashlib.sha256(json.dumps(question).encode()).hexdigest()

    def get(self, row: Row, on: Device) -> Row | None:
        key = self._key(row, on)
        found = None if key is None else self._rows.get(key)
        self.reused += found is not None
        return found

    def put(self, asked: Row, row: Row, on: Device) -> None:
        key = None if row.problem else self._key(asked, on)
        if key is not None and self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(json.dumps({"key": key, "row": asdict(row)}) + "\n")
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
