"""`Source`: a file that is streamed, as lines, CSV rows or JSON objects, packed with gzip or not, within bounds."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

from foretell.errors import InputError

__all__ = ["Head", "Source", "number"]

#: Bytes of one line, and of one JSON value in a stream of them: a conversation of a million words is below.
MOST_LINE = 16 * 2**20
#: Bytes of a JSON document that has to be read whole.
MOST_DOCUMENT = 512 * 2**20
_HEAD = 64 * 2**10
_KEY = re.compile(r'"([^"\\]{1,80})"\s*:')


@dataclass(frozen=True, slots=True)
class Head:
    """How a file begins: its first 64 KiB as text, the cells of its first line, the keys of its first JSON object."""

    text: str
    cells: tuple[str, ...]
    keys: tuple[str, ...]

    def has(self, *columns: str) -> bool:
        """Whether the first line, or the first object, has all these columns."""
        return set(columns) <= set(self.cells) or set(columns) <= set(self.keys)


class Source:
    """One file, and whether its kind was said or is a guess (`named`). Raises InputError where it cannot be read."""

    def __init__(self, path: Path, part: str = "", named: bool = False) -> None:
        self.path = path
        self.name = str(path)
        self.part = part
        self.named = named

    def _open(self) -> IO[bytes]:
        try:
            with self.path.open("rb") as file:
                begin = file.read(2)
            if begin in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise InputError("is UTF-16 text", self.name, "save it as UTF-8")
            packed = begin == b"\x1f\x8b"
            return cast(IO[bytes], gzip.open(self.path)) if packed else self.path.open("rb")
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror or error}", self.name) from error

    def _chunks(self, size: int = 2**20) -> Iterator[str]:
        """The text in pieces, an empty one at the end; what is no UTF-8 becomes a replacement character."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        with self._open() as file:
            while True:
                try:
                    chunk = file.read(size)
                except (OSError, EOFError, zlib.error) as error:
                    raise InputError(f"cannot be read to its end: {error}", self.name, "is it whole?") from error
                text = decoder.decode(chunk, final=not chunk)
                if text or not chunk:
                    yield text
                if not chunk:
                    if text:
                        yield ""
                    return

    @cached_property
    def head(self) -> Head:
        """How the file begins."""
        text = next(self._chunks(_HEAD))
        line = text.partition("\n")[0].strip()
        cells: tuple[str, ...] = ()
        keys: tuple[str, ...] = ()
        if not line.startswith(("{", "[")):
            try:
                cells = tuple(cell.strip() for cell in next(csv.reader([line]), []))
            except csv.Error:
                cells = ()
        else:
            begin = text.lstrip().removeprefix("[").lstrip()
            try:
                value, _ = json.JSONDecoder().raw_decode(begin)
                keys = tuple(value) if isinstance(value, dict) else ()
            except (ValueError, RecursionError):  # longer than that: whatever keys are in sight
                keys = tuple(_KEY.findall(begin))
        return Head(text, cells, keys)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Lines that are not blank, with their numbers from 1 on."""
        rest, number = "", 0
        for chunk in self._chunks():
            parts = (rest + chunk).split("\n")
            rest = parts.pop()
            for line in parts:
                number += 1
                if line.strip():
                    yield number, line
            if len(rest) > MOST_LINE:
                raise InputError(f"line {number + 1:,} is longer than {MOST_LINE >> 20} MiB", self.name)
        if rest.strip():
            yield number + 1, rest

    def rows(self, *needed: str, skip: Callable[[int, str], None]) -> Iterator[tuple[int, dict[str, str]]]:
        """Rows of a CSV file by column, with the numbers of their first lines.

        A row with fewer cells than the header lacks the last columns; one with more is told to `skip`, as it may have
        commas in its numbers. Raises InputError where a needed column is missing, or is there twice, or a quote is not
        closed.
        """
        at = 1
        held: list[str] = []  # lines of a row, which quotes may make several

        def texts() -> Iterator[str]:
            nonlocal at
            for number, line in self.lines():
                at = at if held else number
                held.append(line.replace("\0", "\ufffd"))
                yield held[-1]

        table = csv.reader(texts())
        try:
            header = [cell.strip() for cell in next(table, [])]
            missing = [name for name in needed if name not in header]
            if missing:
                raise InputError(
                    f"no column {' and no column '.join(missing)}", f"{self.name}, row 1",
                    f"it has {', '.join(header[:20]) or 'none'}; wanted are {', '.join(needed)}",
                )  # fmt: skip
            if twice := [name for name in needed if header.count(name) > 1]:
                raise InputError(f"two columns {twice[0]}", f"{self.name}, row 1", "leave one of them")
            held.clear()
            for cells in table:
                if len(held) > 1 and _open(held):
                    raise InputError("a quote that is never closed", f"{self.name}, row {at:,}", "close it")
                held.clear()
                if any(cell.strip() for cell in cells[len(header) :]):
                    skip(at, "more cells than columns")
                    continue
                yield at, dict(zip(header, cells, strict=False))
        except csv.Error as error:
            most = csv.field_size_limit()
            if max(map(len, held), default=0) > most or len(held) > 1:
                what, repair = f"a cell longer than {most:,} characters", "close its quote, or shorten it"
                raise InputError(what, f"{self.name}, row {at:,}", repair) from error
            raise InputError(str(error), f"{self.name}, row {at:,}") from error

    def objects(self, most: int = MOST_LINE) -> Iterator[tuple[int, Any]]:
        """JSON values one after the other (a line each, or items of one list), numbered from 1 on.

        A line that is no JSON, after a first one that is, comes as None. Raises InputError where another value is no
        JSON, or longer than `most`.
        """
        decoder = json.JSONDecoder()
        buffer, at, count, enough = "", 0, 0, 0
        listed: bool | None = None
        lines = False  # whether the first value is a line by itself
        for chunk in self._chunks():
            buffer, at = buffer[at:] + chunk, 0
            if chunk and len(buffer) < enough:
                continue
            while True:
                while at < len(buffer) and buffer[at] in " \t\r\n,":
                    at += 1
                if at == len(buffer):
                    break
                if listed is None and buffer[at] == "[":
                    listed, at = True, at + 1
                    continue
                listed = bool(listed)
                if listed and buffer[at] == "]":
                    return
                try:
                    value, end = decoder.raw_decode(buffer, at)
                except (ValueError, RecursionError) as error:
                    stop = buffer.find("\n", at)
                    if lines and (stop >= 0 or not chunk):
                        at, count = stop if stop >= 0 else len(buffer), count + 1
                        yield count, None
                        continue
                    if not chunk or len(buffer) - at > most or isinstance(error, RecursionError):
                        longer = f", or longer than {most >> 20} MiB" if len(buffer) - at > most else ""
                        raise InputError(f"is no JSON{longer}", f"{self.name}, value {count + 1:,}") from error
                    enough = 2 * (len(buffer) - at)  # the rest of it is in chunks to come: not tried at each of them
                    break
                at, count = end, count + 1
                lines = lines or (count == 1 and not listed and buffer[end : end + 2].lstrip(" \r").startswith("\n"))
                yield count, value

    def document(self) -> Any:
        """The whole file as one JSON value."""
        parts, size = [], 0
        for chunk in self._chunks():
            size += len(chunk)
            if size > MOST_DOCUMENT:
                raise InputError(f"is larger than {MOST_DOCUMENT >> 20} MiB", self.name, "give a JSON Lines file")
            parts.append(chunk)
        try:
            return json.loads("".join(parts))
        except (ValueError, RecursionError) as error:
            raise InputError(f"is no JSON: {error}", self.name) from error

    def choose(self, count: int, what: str) -> int:
        """Which of `count` parts is asked for with ``#N`` (from 0 on): the only one by default."""
        if not self.part and count == 1:
            return 0
        if not self.part.isdecimal() or not 1 <= int(self.part[:9]) <= count:
            said = f"no {what} #{self.part[:20]}" if self.part else f"{count:,} {what}s"
            raise InputError(said, self.name, f"name one of them: FILE#1 to FILE#{count}")
        return int(self.part) - 1


def _open(lines: list[str]) -> bool:
    """Whether a quote in these lines of one row is never closed.

    >>> _open(['1,"a', "b"]), _open(['1,"a', 'b"'])
    (True, False)
    """
    try:
        list(csv.reader(lines, strict=True))
    except csv.Error as error:
        return "unexpected end" in str(error)
    return False


def number(value: Any) -> float:
    """A number, or text that is one; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return float("nan")
    try:
        return float(value)
    except (ValueError, OverflowError):
        return float("nan")
