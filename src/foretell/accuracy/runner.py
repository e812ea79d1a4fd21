"""Predict every row of some slices and score the predictions; what is done is kept, so a second run goes on from it."""

from __future__ import annotations

import hashlib
import json
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from foretell.accuracy.metrics import Score, score
from foretell.accuracy.programs import Store
from foretell.accuracy.slices import Row, Slice, data_folder, slices
from foretell.accuracy.tables import TableResult, judge, sources
from foretell.cost.model import AUTO, default_model, models
from foretell.errors import ForetellError, InputError, UnknownNameError, unknown
from foretell.hardware.device import Device


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row and what was predicted for it; `error` says why there is no prediction."""

    row: Row
    family: str = ""
    time_s: float | None = None
    low_s: float = 0.0
    high_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class SliceResult:
    """Predictions of one slice. `total` is how many rows its files hold; `complete` is False after an interruption."""

    slice: Slice
    predictions: tuple[Prediction, ...]
    total: int
    complete: bool = True

    @property
    def name(self) -> str:
        """The slice's name."""
        return self.slice.name

    @property
    def device(self) -> str:
        """The device it was measured on."""
        return self.slice.device

    @property
    def runtime(self) -> str:
        """``eager`` or ``compiled``."""
        return self.slice.runtime

    @property
    def conditions(self) -> Mapping[str, str]:
        """What else the measurements were taken under."""
        return self.slice.conditions

    @property
    def score(self) -> Score | None:
        """Errors over the rows that could be predicted; None where there are none."""
        made = [p for p in self.predictions if p.time_s is not None]
        return score(
            [p.row.measured_s for p in made],
            [p.time_s for p in made if p.time_s is not None],
            [p.low_s for p in made],
            [p.high_s for p in made],
            failed=len(self.predictions) - len(made),
        )

    @property
    def failures(self) -> dict[str, int]:
        """Why rows could not be predicted, with how many each."""
        counts: dict[str, int] = {}
        for p in self.predictions:
            if p.error:
                counts[p.error] = counts.get(p.error, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


@dataclass(slots=True)
class Progress:
    """What a run has done so far, for whoever shows it."""

    slice: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of `run`. `absent` are slices whose files the data folder lacks."""

    results: tuple[SliceResult | TableResult, ...]
    absent: tuple[str, ...] = ()
    interrupted: bool = False
    notes: tuple[str, ...] = field(default=())


def run(
    names: Sequence[str] | None = None,
    data: str | os.PathLike[str] | None = None,
    *,
    model: str = AUTO,
    limit: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Predict the rows of the named slices and sources (all that are present, if None) and score them.

    `model` is a cost model's name, or ``auto`` for what `foretell.predict` uses on each device. `limit` takes that many
    workloads, the same ones in every slice, chosen by a hash of their names so that any limit is a fair sample, and
    that many measurements of a table of operators. Results
    and captures are kept under `cache_dir` (default ``$FORETELL_CACHE``, else ``~/.cache/foretell``) as they come, by
    the code and data they depend on; Ctrl-C ends the run early with a partial report. Raises UnknownNameError for a
    slice or model we do not know, InputError where a named slice's files are not in `data` or are malformed.
    """
    folder = data_folder(data)
    registry, tables = slices(), sources()
    if names is None:
        names_of_slices, wanted = list(registry), [source for source in tables.values() if source.present(folder)]
    else:
        for name in names:
            if name not in registry and name not in tables:
                error = unknown("slice or source", name, offered(folder))
                every = "--slice list names all that the data folder has"
                raise UnknownNameError(
                    error.kind, name, error.near, error.known, f"{error.hint}; {every}" if error.near else every
                )
        names_of_slices = [name for name in names if name in registry]
        wanted = [tables[name] for name in names if name in tables]
        for source in wanted:
            if not source.present(folder):
                raise InputError(f"lacks {source.folder}/", str(folder), f"source {source.name!r} reads it")
    chosen = [registry[name] for name in names_of_slices]
    absent = tuple(s.name for s in chosen if not s.present(folder))
    if names is not None and absent:
        entry = registry[absent[0]]
        raise InputError(f"lacks {', '.join(entry.files)}", str(folder), f"slice {entry.name!r} reads it")
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}", repair="give a whole number ≥ 1")
    present = [s for s in chosen if s.present(folder)]
    rows = {s.name: s.read(folder) for s in present}
    if limit is not None:
        kept = set(sample_names({row.workload for part in rows.values() for row in part}, limit))
        rows_kept = {name: [row for row in part if row.workload in kept] for name, part in rows.items()}
    else:
        rows_kept = rows
    root = home(cache_dir)
    store = Store(None if root is None else root / "programs")
    results: list[SliceResult | TableResult] = []
    interrupted = False
    for entry in present:
        todo = rows_kept[entry.name]
        made: list[Prediction] = []
        try:
            for prediction in _predictions(entry, todo, model, store, root):
                made.append(prediction)
                if progress is not None:
                    progress(Progress(entry.name, len(made), len(todo)))
        except KeyboardInterrupt:
            interrupted = True
        results.append(SliceResult(entry, tuple(made), len(rows[entry.name]), complete=len(made) == len(todo)))
        if interrupted:
            break
    try:
        for source in () if interrupted else wanted:
            found = source.tables(folder)
            for done, table in enumerate(found, start=1):
                if limit is not None:
                    table = table.sample(limit)
                results.append(judge(table, models()[default_model(table.device) if model == AUTO else model]))
                if progress is not None:
                    progress(Progress(source.name, done, len(found)))
    except KeyboardInterrupt:
        interrupted = True
    return Report(tuple(results), absent if names is None else (), interrupted)


def offered(data: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Names of the slices and sources whose files the data folder has."""
    folder = data_folder(data)
    return tuple(entry.name for entry in (*slices().values(), *sources().values()) if entry.present(folder))


def _predictions(
    entry: Slice, rows: Iterable[Row], model: str, store: Store, root: Path | None
) -> Iterator[Prediction]:
    from foretell.hardware import device as find

    device = find(entry.device)
    model = default_model(device) if model == AUTO else model
    kept = _Kept(None if root is None else root / "accuracy" / f"{entry.name}-{_fingerprint(model, device)}.jsonl")
    with kept:
        for row in rows:
            known = kept.get(row)
            if known is None:
                known = predict(row, device, entry.runtime, model, store)
                kept.add(known)
            yield known


def predict(row: Row, device: Device, runtime: str, model: str, store: Store) -> Prediction:
    """The prediction of one row, or why there is none."""
    predictor = models()[model]
    try:
        programs = store.get(row.workload, **row.options)
        if row.parameters is not None and not row.parameters[0] <= programs.parameters <= row.parameters[1]:
            return Prediction(row, programs.family, error="the table measured a network of another parameter count")
        program = programs.at(row.batch, runtime)
        settings = programs.settings[runtime]
        times = predictor.op_times(program, device, settings)
        step = predictor.step(program, times, settings)
        low, high, _ = predictor.interval(program, times, step, device, settings)
    except ForetellError as error:
        return Prediction(row, error=textwrap.shorten(str(error), 300, placeholder=" …"))
    return Prediction(row, programs.family, step.time_s, step.time_s * low, step.time_s * high)


class _Kept:
    """Predictions on disk, one JSON line each, by what the row asks."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        self._file: Any = None

    def __enter__(self) -> _Kept:
        if self._path is not None:
            if self._path.is_file():
                for line in self._path.read_text(encoding="utf-8").splitlines():
                    try:
                        record = json.loads(line)
                        self._known[record["key"]] = record
                    except (ValueError, KeyError, TypeError):
                        continue  # a line cut short by an interruption
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @staticmethod
    def _key(row: Row) -> str:
        return json.dumps([row.workload, dict(row.options), row.batch], sort_keys=True)

    def get(self, row: Row) -> Prediction | None:
        record = self._known.get(self._key(row))
        if record is None:
            return None
        return Prediction(row, record["family"], record["time_s"], record["low_s"], record["high_s"], record["error"])

    def add(self, made: Prediction) -> None:
        if self._file is None:
            return
        record = {
            "key": self._key(made.row),
            "family": made.family,
            "time_s": made.time_s,
            "low_s": made.low_s,
            "high_s": made.high_s,
            "error": made.error,
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def sample_names(names: Iterable[str], limit: int) -> list[str]:
    """`limit` of these names, the same ones whatever else is asked for: a sample by hash."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:limit]


def home(given: str | os.PathLike[str] | None) -> Path | None:
    """Where results and programs are kept: the folder given, else the captures' cache; None where that is off."""
    if given is not None:
        return Path(given)
    from foretell.workload.cache import folder

    return folder()


def _fingerprint(model: str, device: Device) -> str:
    """Changes with the code, the constants and the device that a prediction rests on."""
    digest = hashlib.sha256(f"{model} {_code()} {device!r}".encode())
    return digest.hexdigest()[:16]


@cache
def _code() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for room in ("graph", "workload", "cost", "accuracy"):
        for file in sorted((package / room).rglob("*")):
            if file.suffix in (".py", ".json"):
                digest.update(file.read_bytes())
    return digest.hexdigest()
