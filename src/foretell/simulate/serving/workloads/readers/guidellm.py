"""Results of GuideLLM: one benchmark of a file, its requests replayed.

A benchmark's requests are in lists by status: successful, incomplete, errored (schemas/benchmark). Of each,
``prompt_tokens`` and ``output_tokens`` are computed from what the server counted, and ``request_start_time`` from
``info.timings`` (schemas/base/request_stats.py); in the first versions it was ``start_time``
(GenerativeTextResponseStats, benchmark/benchmark.py).
"""

from __future__ import annotations

from typing import Any

from foretell.errors import InputError
from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.source import Source, number

#: Groups of requests, and why those of a group are left out.
_GROUPS = {"successful": None, "incomplete": "requests that did not finish", "errored": "requests that failed"}


@reader(
    "guidellm",
    looks=lambda head: head.text.lstrip().startswith("{") and '"benchmarks"' in head.text,
    source="github.com/vllm-project/guidellm, src/guidellm/schemas/base/request_stats.py",
)
def guidellm(source: Source, wanted: Wanted) -> Trace:
    """JSON of benchmarks with requests (prompt_tokens, output_tokens, start times); FILE#2 is the second benchmark."""
    document = source.document()
    found = document.get("benchmarks") if isinstance(document, dict) else None
    if not isinstance(found, list) or not found:
        raise InputError("no list of benchmarks", source.name, "give the JSON that guidellm writes")
    index = source.choose(len(found), "benchmark")
    groups = found[index].get("requests") if isinstance(found[index], dict) else None
    if not isinstance(groups, dict) or not isinstance(groups.get("successful"), list):
        raise InputError("no requests.successful", f"{source.name}, benchmark {index + 1}",
                         "write requests as well, not only statistics")  # fmt: skip
    ok = groups["successful"]
    timed = any(_start(one) == _start(one) for one in ok)
    rows = Rows(wanted, timed)
    for row, one in enumerate(ok, 1):
        if rows.enough():
            break
        given = one if isinstance(one, dict) else {}
        rows.add(row, _start(one), number(given.get("prompt_tokens")), number(given.get("output_tokens")))
    for name, reason in _GROUPS.items():
        members = groups.get(name)
        if reason is not None and isinstance(members, list):
            for row in range(1, len(members) + 1):
                rows.skip(row, reason)
    return rows.trace(source, benchmark=f"{index + 1} of {len(found)}")


def _start(one: Any) -> float:
    """When a request was sent; NaN where that is not said."""
    if not isinstance(one, dict):
        return float("nan")
    for key in ("request_start_time", "start_time"):
        if key in one:
            return number(one[key])
    info = one.get("info")
    timings = info.get("timings") if isinstance(info, dict) else None
    return number(timings.get("request_start")) if isinstance(timings, dict) else float("nan")
