"""The family of trace readers: one signature, one registry, one file each in `readers`.

A reader is given a `Source` to stream and what is wanted of it, and answers with a `Trace`. Rows that cannot be used
are counted by reason, the first of each with its place in the file; a file without what every row needs is an
InputError.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foretell.errors import ForetellError, InputError, unknown
from foretell.simulate.serving.given import instance, number, whole
from foretell.simulate.serving.requests import LATEST_S
from foretell.simulate.serving.workloads.lengths import Lengths
from foretell.simulate.serving.workloads.source import Head, Source
from foretell.units import printable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

__all__ = ["MOST_REQUESTS", "Reader", "Rows", "Trace", "Wanted", "read", "reader", "readers"]

#: Requests that one trace may have: their columns are 48 bytes a request.
MOST_REQUESTS = 20_000_000
#: Tokens that one request may have on either side; what is above is no token count.
MOST_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a trace: at most `limit` requests from `start_s` after its beginning, over `duration_s`.

    `seed` and `lengths` are for traces that are statistics to draw from, or that hold no lengths.
    """

    limit: int = MOST_REQUESTS
    start_s: float = 0.0
    duration_s: float | None = None
    seed: int = 0
    lengths: Lengths | None = None

    def __post_init__(self) -> None:
        where = "what is wanted of a trace"
        whole(self.limit, "the number of requests", where, least=1, most=MOST_REQUESTS)
        whole(self.seed, "seed", where)
        number(self.start_s, "start_s", where, most=LATEST_S)
        if self.duration_s is not None:
            number(self.duration_s, "duration_s", where)
        if self.lengths is not None:
            instance(self.lengths, Lengths, "lengths", where, "Lengths, or parse_lengths(isl, osl)")


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file holds: requests, columns (requests,), in order of arrival from 0 on.

    `arrival_s` is None where the file has no times. `prefix`, `prefix_tokens` and `row` are as in `Requests`. `about`
    says what was read, `skipped` counts unusable rows by reason.
    """

    arrival_s: Floats | None
    input_tokens: Ints
    output_tokens: Ints
    prefix: Ints
    prefix_tokens: Ints
    about: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    skipped: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    row: Ints | None = None

    def __len__(self) -> int:
        return len(self.input_tokens)

    def take(self, rows: npt.NDArray[np.intp] | slice) -> Trace:
        """Some of the requests."""
        return replace(
            self,
            arrival_s=None if self.arrival_s is None else self.arrival_s[rows],
            input_tokens=self.input_tokens[rows], output_tokens=self.output_tokens[rows],
            prefix=self.prefix[rows], prefix_tokens=self.prefix_tokens[rows],
            row=None if self.row is None else self.row[rows],
        )  # fmt: skip


class Rows:
    """Collects a trace row by row. What cannot be a request is counted by reason instead."""

    def __init__(self, wanted: Wanted, timed: bool = True) -> None:
        self.timed = timed
        # A part of the time is taken after all rows are read: a file need not be in order.
        whole = wanted.start_s == 0.0 and wanted.duration_s is None
        self._most = wanted.limit if whole else MOST_REQUESTS
        self._arrival, self._input, self._output, self._row = array("d"), array("q"), array("q"), array("q")
        self._skipped: dict[str, list[int]] = {}
        self._unsorted = [0, 0]
        self._cut = False

    def __len__(self) -> int:
        return len(self._input)

    def enough(self) -> bool:
        """Whether as many requests were read as are wanted; asked before a further row, which is then left unread."""
        self._cut = len(self._input) >= self._most
        return self._cut

    def skip(self, row: int, reason: str) -> None:
        """Row `row` (counted from 1) is no request, for `reason`."""
        self._skipped.setdefault(reason, [row, 0])[1] += 1

    def add(self, row: int, arrival_s: float, input_tokens: float, output_tokens: float) -> bool:
        """Take a row as a request; False where it was skipped: a time or a length is missing (NaN) or impossible."""
        if self.timed and not 0.0 <= arrival_s <= LATEST_S:
            late = f"a time above {LATEST_S:g} s" if arrival_s > LATEST_S else "no time"
            self.skip(row, "a negative time" if arrival_s < 0 else late)
        elif not 1 <= input_tokens <= MOST_TOKENS or input_tokens % 1:
            self.skip(row, _why("input", input_tokens))
        elif not 1 <= output_tokens <= MOST_TOKENS or output_tokens % 1:
            self.skip(row, _why("output", output_tokens))
        else:
            if self.timed and len(self._arrival) and arrival_s < self._arrival[-1]:
                self._unsorted = [self._unsorted[0] or row, self._unsorted[1] + 1]
            self._arrival.append(arrival_s if self.timed else 0.0)
            self._input.append(int(input_tokens))
            self._output.append(int(output_tokens))
            self._row.append(row)
            return True
        return False

    def trace(
        self,
        source: Source,
        prefix: npt.ArrayLike = 0,
        prefix_tokens: npt.ArrayLike = 0,
        *,
        begin_s: float | None = None,
        **about: str,
    ) -> Trace:
        """What was collected, sorted by arrival from `begin_s` on (the first arrival).

        Raises InputError where no row was usable.
        """
        skipped = {f"{reason}, first at row {row:,}": count for reason, (row, count) in self._skipped.items()}
        if not len(self):
            why = "; ".join(f"{count:,} with {reason}" for reason, count in skipped.items())
            raise InputError("no row is a request" + (f": {why}" if why else ", it is empty"), source.name,
                             "give times from 0 on and lengths from 1 on")  # fmt: skip
        arrival = np.frombuffer(self._arrival, dtype=np.float64)
        order = np.argsort(arrival, kind="stable")
        row, count = self._unsorted
        if count:
            rows = "1 row was" if count == 1 else f"{count:,} rows were"
            about["order"] = f"{rows} earlier than the row before, first row {row:,}: sorted"
        if self._cut:
            about["cut"] = f"the first {len(self):,} requests; the file has more"
        return Trace(
            arrival[order] - (arrival[order[0]] if begin_s is None else begin_s) if self.timed else None,
            np.frombuffer(self._input, dtype=np.int64)[order],
            np.frombuffer(self._output, dtype=np.int64)[order],
            np.broadcast_to(np.asarray(prefix, dtype=np.int64), len(self))[order],
            np.broadcast_to(np.asarray(prefix_tokens, dtype=np.int64), len(self))[order],
            MappingProxyType(about), MappingProxyType(skipped), np.frombuffer(self._row, dtype=np.int64)[order],
        )  # fmt: skip


def _why(side: str, tokens: float) -> str:
    if tokens != tokens:
        return f"no {side} length"
    if tokens > MOST_TOKENS:
        return f"an {side} of more than {MOST_TOKENS:,} tokens"
    if tokens % 1:
        return f"an {side} of no whole number of tokens"
    return f"an {side} of 0 tokens" if tokens == 0 else f"a negative {side} length"


class Read(Protocol):
    """A reader: the trace in `source`, or InputError."""

    def __call__(self, source: Source, wanted: Wanted, /) -> Trace: ...


@dataclass(frozen=True, slots=True)
class Reader:
    """A registered reader: how to know its files (`looks`), who published the schema (`source`), and where files lie.

    `needs` are the columns that a table of its kind has, each with the names it goes by; none for other documents.
    `folder` is where ``$FORETELL_DATA`` keeps files of the kind, if it does, and `files` the pattern of their names.
    """

    name: str
    run: Read
    looks: Callable[[Head], bool]
    source: str
    summary: str
    folder: str
    files: str
    order: int
    needs: tuple[tuple[str, ...], ...]

    def lacks(self, head: Head) -> list[str]:
        """Names of columns that the file lacks."""
        return [names[0] for names in self.needs if not any(map(head.has, names))]


_members: dict[str, Reader] = {}


def reader(
    name: str, *, source: str, looks: Callable[[Head], bool] | None = None, needs: tuple[tuple[str, ...], ...] = (),
    folder: str = "", files: str = "*", order: int = 0,
) -> Callable[[Read], Read]:  # fmt: skip
    """Register a reader; the first line of its docstring is its summary. Refuses a second one of the name.

    Its files are known by `looks`, or by having the columns that it `needs`. Where several know a file, the one of the
    lowest `order` reads it.
    """

    def register(run: Read) -> Read:
        if name in _members:
            raise ForetellError(f"a trace reader {name!r} is registered already", "give it another name")
        summary = (run.__doc__ or "").strip().partition("\n")[0]
        knows = looks or (lambda head: not _members[name].lacks(head))
        _members[name] = Reader(name, run, knows, source, summary, folder, files, order, needs)
        return run

    return register


@cache
def _discover() -> None:
    package = importlib.import_module("foretell.simulate.serving.workloads.readers")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def readers() -> Mapping[str, Reader]:
    """All readers by name.

    >>> "azure" in readers()
    True
    """
    _discover()
    return MappingProxyType(dict(sorted(_members.items())))


def read(spec: str, wanted: Wanted | None = None) -> Trace:
    """The trace that `spec` names: a file, or ``NAME:FILE`` with the name of a reader.

    A file that does not exist is looked for, by the end of its name, in the reader's folder of ``$FORETELL_DATA``.
    Raises InputError, UnknownNameError.
    """
    wanted = wanted or Wanted()
    spec = instance(os.fspath(spec) if isinstance(spec, os.PathLike) else spec, str, "the trace", "read", "a file")
    name, path, part = _named(spec)
    source = Source(path, part, named=name is not None)
    if name is None:
        fitting = sorted((one for one in readers().values() if one.looks(source.head)), key=lambda one: one.order)
        if not fitting:
            raise InputError(
                f"no kind of trace that is known: {_seen(source.head)}", source.name,
                f"give columns arrival_s, input_tokens, output_tokens, or name a kind: {', '.join(readers())}",
            )  # fmt: skip
        found = fitting[0]
    else:
        found = readers()[name]
    return windowed(found.run(source, wanted), wanted, spec, found.name)


def _seen(head: Head) -> str:
    """What a file of no known kind has, and which kind it is nearest to."""
    if not head.text.strip():
        return "it is empty"
    if "\0" in head.text or "\ufffd" in head.text:
        return "it is no UTF-8 text"
    columns = head.cells or head.keys
    for separator, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(columns) == 1 and separator in columns[0]:
            return f"its columns are separated by {name}, not commas"
    said = f"it has {', '.join(column[:40] for column in columns[:10]) or 'neither columns nor keys'}"
    # Columns in other letters count for what is near, and are named as missing all the same.
    folded = Head("", tuple(column.casefold() for column in columns), ())
    near = [
        (sum(any(folded.has(name.casefold()) for name in names) for names in one.needs) / len(one.needs), one)
        for one in readers().values() if one.needs
    ]  # fmt: skip
    best, nearest = max(near, key=lambda pair: (pair[0], -pair[1].order))
    if not best:
        return said
    return f"{said}; nearest is {nearest.name}, for which it lacks {', '.join(nearest.lacks(head))}"


def windowed(trace: Trace, wanted: Wanted, spec: str, kind: str) -> Trace:
    """The part of `trace` that is wanted, its arrivals from 0 on, with a note of what it is."""
    about = {"trace": printable(spec), "kind": kind, **trace.about}
    part = wanted.start_s > 0.0 or wanted.duration_s is not None
    if part and trace.arrival_s is None:
        raise InputError("the trace has no times to choose by", spec, "leave the start and the duration out")
    if part and trace.arrival_s is not None:
        end = np.inf if wanted.duration_s is None else wanted.start_s + wanted.duration_s
        low, high = np.searchsorted(trace.arrival_s, [wanted.start_s, end])
        if low == high:
            last = float(trace.arrival_s[-1])
            until = f"to {end:g} s" if end < np.inf else "on"
            raise InputError(f"no request from {wanted.start_s:g} s {until}", spec,
                             f"the trace ends at {last:g} s")  # fmt: skip
        until = f" until {end:g} s" if end < np.inf else ""
        about["part"] = f"{high - low:,} requests from {wanted.start_s:g} s on{until}"
        trace = trace.take(slice(int(low), int(high)))
        assert trace.arrival_s is not None
        trace = replace(trace, arrival_s=trace.arrival_s - wanted.start_s)
    if len(trace) > wanted.limit:
        about["cut"] = f"the first {wanted.limit:,} of {len(trace):,} requests"
        trace = trace.take(slice(0, wanted.limit))
    return replace(trace, about=MappingProxyType(about))


def _named(spec: str) -> tuple[str | None, Path, str]:
    """The reader that `spec` names, if any, its file, and the part of it after ``#``."""
    name, colon, rest = spec.partition(":")
    if not colon or Path(spec.partition("#")[0]).is_file():
        path, part = _part(spec)
        if not path.is_file():
            raise _no_file(path, spec, f"give a file, or NAME:FILE of {', '.join(readers())}")
        return None, path, part
    if name not in readers():
        raise unknown("kind of trace", name, readers())
    path, part = _part(rest)
    if path.is_file():
        return name, path, part
    member = readers()[name]
    if not rest or path.exists() or not member.folder:
        raise _no_file(path, rest or spec, f"write {name}:FILE")
    home = Path(os.environ.get("FORETELL_DATA") or Path("..") / "shared" / "data") / member.folder
    held = sorted(file for file in home.glob(member.files) if file.is_file())
    if not held:
        repair = f"give its path, or set $FORETELL_DATA to where {member.folder}/ is"
        raise InputError("no such file", rest[:200], repair)
    fitting = [file for file in held if path.name and path.name in file.name]
    if len(fitting) != 1:
        what = f"could be {len(fitting)} files" if fitting else "no such file"
        raise InputError(what, rest[:200], "there are " + ", ".join(file.name for file in fitting or held))
    return name, fitting[0], part


def _no_file(path: Path, named: str, repair: str) -> InputError:
    """What is there instead of a file that can be read twice, first for its kind."""
    what = "no such file"
    if path == Path():
        what = "names no file"
    elif path.is_dir():
        what = "is a directory"
    elif path.exists():
        what, repair = "is no regular file, and a pipe can be read only once", "write it to a file first"
    return InputError(what, named[:200], repair)


def _part(text: str) -> tuple[Path, str]:
    """``FILE#PART``, unless a file is called that."""
    if Path(text).is_file():
        return Path(text), ""
    file, _, part = text.partition("#")
    return Path(file), part
