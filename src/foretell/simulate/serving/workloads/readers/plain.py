"""Plain tables: CSV or JSON Lines with an arrival, input tokens and output tokens a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.source import Head, Source, number

#: Names of columns, the first that is there counts; of arrivals also how many make a second.
_ARRIVAL = {"arrival_s": 1.0, "arrival_ms": 1e3, "arrival_time_ns": 1e9}
_INPUT = ("input_tokens", "input_toks", "prompt_tokens")
_OUTPUT = ("output_tokens", "output_toks", "completion_tokens")
_PREFIX = ("prefix", "prefix_tokens")


def _looks(head: Head) -> bool:
    return any(map(head.has, _INPUT)) and any(map(head.has, _OUTPUT))


@reader("plain", looks=_looks, source="columns of this project; those of LLMServingSim's workloads", order=2)
def plain(source: Source, wanted: Wanted) -> Trace:
    """CSV or JSON with arrival_s (or none: no times), input_tokens, output_tokens, and prefix, prefix_tokens."""
    columns = source.head.cells or source.head.keys
    asked, answered = _one(columns, _INPUT, source), _one(columns, _OUTPUT, source)
    time = next((name for name in _ARRIVAL if name in columns), None)
    shares = all(name in columns for name in _PREFIX)
    rows = Rows(wanted, timed=time is not None)
    prefix: list[int] = []
    prefix_tokens: list[int] = []
    for row, value in _values(source):
        if rows.enough():
            break
        if not isinstance(value, Mapping):
            rows.skip(row, "no JSON" if value is None else "no columns")
            continue
        at_s = 0.0 if time is None else number(value.get(time)) / _ARRIVAL[time]
        tokens = number(value.get(asked))
        shared = [number(value.get(name) or 0) for name in _PREFIX] if shares else []
        if shares and not all(one.is_integer() and 0 <= one < 2**62 for one in shared):
            rows.skip(row, "a prefix that is no whole number from 0 on")
        elif rows.add(row, at_s, tokens, number(value.get(answered))) and shares:
            prefix.append(int(shared[0]))
            prefix_tokens.append(min(int(shared[1]), int(tokens)))
    if not shares:
        return rows.trace(source)
    return rows.trace(source, np.array(prefix, np.int64), np.array(prefix_tokens, np.int64))


def _values(source: Source) -> Iterator[tuple[int, Any]]:
    return source.rows() if source.head.cells else source.objects()


def _one(columns: tuple[str, ...], names: tuple[str, ...], source: Source) -> str:
    for name in names:
        if name in columns:
            return name
    has = ", ".join(columns[:20]) or "none"
    raise InputError(f"no column {names[0]}", f"{source.name}, row 1",
                     f"it has {has}; wanted are arrival_s, input_tokens, output_tokens")  # fmt: skip
