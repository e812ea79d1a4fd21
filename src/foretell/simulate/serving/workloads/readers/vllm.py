"""Results of ``vllm bench serve`` and of SGLang's ``bench_serving``: the requests of one run, replayed.

Both write ``input_lens``, ``output_lens``, ``ttfts``, ``itls`` and ``errors`` (empty or null where there was none), a
list each, if they are told to; vLLM, and SGLang in its newer versions, ``start_times`` too: when each was sent, on a
clock of their own. Requests that waited for a place at the client (vLLM's ``queue_times``) are replayed as the server
got them.
"""

from __future__ import annotations

from typing import Any

from foretell.errors import InputError
from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.source import MOST_DOCUMENT, Source, number


@reader(
    "vllm",
    looks=lambda head: (
        head.text.lstrip().startswith("{")
        and any(f'"{key}"' in head.text for key in ("input_lens", "request_throughput"))
    ),
    source="github.com/vllm-project/vllm, vllm/benchmarks/serve.py (--save-result --save-detailed)",
)
def vllm(source: Source, wanted: Wanted) -> Trace:
    """JSON (Lines: FILE#2 is the second run) with input_lens, output_lens, and start_times where they were kept."""
    runs = [value for _, value in source.objects(most=MOST_DOCUMENT)]
    run = runs[source.choose(len(runs), "run")] if runs else None
    if not isinstance(run, dict):
        raise InputError("no result of a benchmark", source.name, "give what vllm bench serve --save-result writes")
    inputs, outputs = run.get("input_lens"), run.get("output_lens")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise InputError("has no input_lens and output_lens, only totals", source.name, _repair(run))
    if len(outputs) != len(inputs):
        raise InputError(f"{len(inputs):,} input_lens and {len(outputs):,} output_lens", source.name)
    starts, errors = (_column(run, name, len(inputs), source) for name in ("start_times", "errors"))
    rows = Rows(wanted, timed=starts is not None)
    for row, (asked, answered) in enumerate(zip(inputs, outputs, strict=True), 1):
        if rows.enough():
            break
        if errors is not None and errors[row - 1]:
            rows.skip(row, "requests that failed")
        else:
            rows.add(row, 0.0 if starts is None else number(starts[row - 1]), number(asked), number(answered))
    return rows.trace(source)


def _column(run: dict[str, Any], name: str, count: int, source: Source) -> list[Any] | None:
    """A list with an entry for each request; None where the run has none of the name."""
    found = run.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != count:
        entries = f"{len(found):,}" if isinstance(found, list) else "no"
        raise InputError(f"{count:,} input_lens and {entries} {name}", source.name)
    return found


def _repair(run: dict[str, Any]) -> str:
    """How to get each request, and what the totals of this run say in the meantime."""
    served = number(run.get("completed"))
    names = ("total_input_tokens", "total_output_tokens")
    totals = [number(run.get(name)) / served if served > 0 else 0.0 for name in names]
    pace = number(run.get("request_throughput"))
    again = "run vllm bench serve with --save-detailed (SGLang: --output-details)"
    if not all(value >= 1 for value in totals) or not pace > 0:
        return again
    isl, osl = totals
    return f"{again}, or say what its totals come to: --rate {pace:.4g} --isl {isl:.0f} --osl {osl:.0f}"
