"""Plain tables: CSV or JSON Lines with an arrival, input tokens and output tokens a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from foretell.errors import InputError
from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.source import Source, number

#: Names of columns, the first that is there counts; of arrivals also how many make a second.
_ARRIVAL = {"arrival_s": 1.0, "arrival_ms": 1e3, "arrival_time_ns": 1e9}
_INPUT = ("input_tokens", "input_toks", "prompt_tokens")
_OUTPUT = ("output_tokens", "output_toks", "completion_tokens")
_PREFIX = ("prefix", "prefix_tokens")
#: Numbers of prefixes that are named by a text begin there, above those that are numbers in the file.
_NAMED = 2**62


@reader(
    "plain",
    needs=(_INPUT, _OUTPUT),
    source="columns of this project; those of LLMServingSim's workloads",
    order=2,
)
def plain(source: Source, wanted: Wanted) -> Trace:
    """CSV or JSON with arrival_s (or none: no times), input_tokens, output_tokens, and prefix, prefix_tokens."""
    columns = source.head.cells or source.head.keys
    asked, answered = _one(columns, _INPUT, source), _one(columns, _OUTPUT, source)
    time = next((name for name in _ARRIVAL if name in columns), None)
    shares = all(name in columns for name in _PREFIX)
    rows = Rows(wanted, timed=time is not None)
    prefix: list[int] = []
    prefix_tokens: list[int] = []
    names: dict[str, int] = {}
    used = (asked, answered, *(() if time is None else (time,)), *(_PREFIX if shares else ()))
    for row, value in source.rows(*used, skip=rows.skip) if source.head.cells else source.objects():
        if rows.enough():
            break
        if not isinstance(value, Mapping):
            rows.skip(row, "no JSON" if value is None else "no columns")
            continue
        at_s = 0.0 if time is None else number(value.get(time)) / _ARRIVAL[time]
        tokens = number(value.get(asked))
        named, long = (value.get(name) if shares else None for name in _PREFIX)
        shared = number(0 if long in (None, "") else long)
        if not (shared >= 0 and shared.is_integer()):
            rows.skip(row, "prefix_tokens that are no whole number from 0 on")
        elif rows.add(row, at_s, tokens, number(value.get(answered))) and shares:
            prefix.append(_number(named, names))
            prefix_tokens.append(0 if named in (None, "") else int(min(shared, tokens)))
    if not shares:
        has, lacks = (", ".join(name for name in _PREFIX if (name in columns) == there) for there in (True, False))
        if has:
            return rows.trace(source, prefixes=f"no column {lacks} beside {has}: nothing is shared")
        return rows.trace(source)
    return rows.trace(source, np.array(prefix, np.int64), np.array(prefix_tokens, np.int64))


def _number(named: Any, names: dict[str, int]) -> int:
    """The number of a prefix: its own where it is a whole number, else one that its text gets in `names`."""
    text = str("" if named is None else named).strip()
    if text.isdecimal() and len(text) <= 18:
        return int(text)
    return names.setdefault(text, _NAMED + len(names)) if text else 0


def _one(columns: tuple[str, ...], names: tuple[str, ...], source: Source) -> str:
    for name in names:
        if name in columns:
            return name
    has = ", ".join(columns[:20]) or "none"
    raise InputError(f"no column {names[0]}", f"{source.name}, row 1",
                     f"it has {has}; wanted are arrival_s, input_tokens, output_tokens")  # fmt: skip
