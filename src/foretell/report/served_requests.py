"""What became of each request of a simulated service, as a table for those who plot and count themselves."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import ForetellError, InputError
from foretell.simulate.serving.engine.served import Served
from foretell.simulate.serving.metrics import latencies

__all__ = ["COLUMNS", "FORMATS", "request_columns", "write_requests"]

FORMATS = (".csv", ".jsonl", ".parquet")
#: Columns by name, with what they are: times in seconds since the beginning, latencies in seconds.
COLUMNS = {
    "request": "Its number, in order of arrival, from 0.",
    "arrival_s": "When it came; in a closed loop, when its turn did.",
    "scheduled_s": "When the iteration began that first worked on it.",
    "first_token_s": "When it got its first token.",
    "finished_s": "When it got its last.",
    "input_tokens": "Tokens of its prompt.",
    "output_tokens": "Tokens generated for it.",
    "queued_s": "Arrival until it was scheduled.",
    "ttft_s": "Arrival until the first token.",
    "tpot_s": "Mean time of the tokens after the first; none for one token.",
    "e2e_s": "Arrival until the last token.",
    "preemptions": "Times it lost its blocks.",
    "cached_tokens": "Tokens of its prompt that were found when it was first scheduled.",
    "prefill_replica": "The replica that ran its prompt.",
    "replica": "The replica that finished it.",
    "refused": "Why it was not served; empty where it was.",
}
_CHUNK = 50_000


def request_columns(served: Served) -> dict[str, npt.NDArray[Any]]:
    """The columns (requests,): NaN and −1 where there is nothing to say."""
    times = latencies(served)
    return {
        "request": np.arange(len(served)),
        "arrival_s": served.arrival_s,
        "scheduled_s": served.first_scheduled_s,
        "first_token_s": served.first_token_s,
        "finished_s": served.finished_s,
        "input_tokens": served.input_tokens,
        "output_tokens": served.output_tokens,
        "queued_s": served.first_scheduled_s - served.arrival_s,
        "ttft_s": times["ttft"],
        "tpot_s": times["tpot"],
        "e2e_s": times["e2e"],
        "preemptions": served.preemptions,
        "cached_tokens": served.cached_tokens,
        "prefill_replica": served.prefill_replica,
        "replica": served.replica,
        "refused": np.array(served.reasons, dtype=object)[served.refused],
    }


def write_requests(served: Served, path: Path) -> None:
    """Write a row for each request, by the ending of the file's name.

    Raises InputError for another ending, ForetellError where Parquet's library is missing, OSError.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise InputError(f"{path.name!r} names no kind of table", str(path), f"end it in {', '.join(FORMATS)}")
    columns = request_columns(served)
    if suffix == ".parquet":
        _parquet(columns, path)
        return
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8", newline="") as file:
        if suffix == ".csv":
            csv.writer(file, lineterminator="\n").writerow(columns)
        for rows in _chunks(columns):
            text = io.StringIO()
            if suffix == ".csv":
                csv.writer(text, lineterminator="\n").writerows(rows)
            else:
                text.writelines(
                    json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n" for row in rows
                )
            file.write(text.getvalue())
    part.replace(path)


def _chunks(columns: dict[str, npt.NDArray[Any]]) -> Iterator[list[tuple[Any, ...]]]:
    """Rows of plain values, None for what is not there."""
    count = len(columns["request"])
    for start in range(0, count, _CHUNK):
        plain = []
        for column in columns.values():
            part = column[start : start + _CHUNK]
            values = part.tolist()
            if part.dtype.kind == "f":
                values = [None if value != value else value for value in values]
            plain.append(values)
        for name in ("prefill_replica", "replica"):
            at = list(columns).index(name)
            plain[at] = [None if value < 0 else value for value in plain[at]]
        yield list(zip(*plain, strict=True))


def _parquet(columns: dict[str, npt.NDArray[Any]], path: Path) -> None:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ForetellError(f"Parquet needs pyarrow ({error})", "pip install 'foretell[tables]'") from error
    made = {}
    for name, column in columns.items():
        missing = np.isnan(column) if column.dtype.kind == "f" else None
        if name in ("prefill_replica", "replica"):
            missing = column < 0
        made[name] = arrow.array(column, mask=missing)
    part = path.with_name(path.name + ".part")
    parquet.write_table(arrow.table(made), part)
    part.replace(path)
