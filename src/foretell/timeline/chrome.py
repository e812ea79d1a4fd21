"""Chrome's trace format (JSON), which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", Google, 2016. Complete events (``X``) carry a start and a duration in microseconds, ``C``
events a counter's value, ``M`` events the names of lanes and their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from foretell.timeline.timeline import Timeline

__all__ = ["chrome_events", "write_chrome"]

_PROCESS = 1


def chrome_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of `timeline` as Chrome's format has them, one by one."""
    title = " · ".join(timeline.about[key] for key in ("workload", "device") if key in timeline.about) or "timeline"
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": title}}
    for index, lane in enumerate(timeline.lanes):
        where = {"ph": "M", "pid": _PROCESS, "tid": index + 1}
        yield {**where, "name": "thread_name", "args": {"name": lane}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": index}}
    columns = [(key, column, column.dtype.kind == "f") for key, column in timeline.args.items()]
    for i in range(len(timeline)):
        args: dict[str, Any] = {}
        for key, column, number in columns:
            value = column[i]
            if number:
                if np.isfinite(value):
                    args[key] = int(value) if value == int(value) else float(value)
            elif isinstance(value, str):
                if value:
                    args[key] = str(value)
            else:
                args[key] = value.item()
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": int(timeline.lane[i]) + 1,
            "ts": float(timeline.start_s[i]) * 1e6,
            "dur": float(timeline.duration_s[i]) * 1e6,
            "name": timeline.names[timeline.name[i]],
            "cat": timeline.kinds[timeline.kind[i]],
            "args": args,
        }
    for counter in timeline.counters:
        last = None
        for time_s, value in zip(counter.time_s.tolist(), counter.value.tolist(), strict=True):
            if value != last:  # a level holds until the next
                series = {counter.unit: int(value) if value == int(value) else value}
                yield {"ph": "C", "pid": _PROCESS, "ts": time_s * 1e6, "name": counter.name, "args": series}
            last = value


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write `timeline` to a file, event by event. Raises OSError where it cannot be written."""
    with path.open("w", encoding="utf-8") as file:
        about = json.dumps(dict(timeline.about), ensure_ascii=False)
        file.write(f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n')
        separator = ""
        for event in chrome_events(timeline):
            file.write(separator + json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")
