"""Results of ``vllm bench serve`` and of SGLang's ``bench_serving``: the requests of one run, replayed."""

from __future__ import annotations

from typing import Any

from foretell.errors import InputError
from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.source import MOST_DOCUMENT, Source, number


@reader(
    "vllm",
    looks=lambda head: head.text.lstrip().startswith("{")
    and any(f'"{key}"' in head.text for key in ("input_lens", "request_throughput")),
    source="github.com/vllm-project/vllm, vllm/benchmarks/serve.py (--save-result --save-detailed)",
)
def vllm(source: Source, wanted: Wanted) -> Trace:
    """JSON (Lines: FILE#2 is the second run) with input_lens, output_lens, and start_times where they were kept."""
    runs = [value for _, value in source.objects(most=MOST_DOCUMENT)]
    run = runs[source.choose(len(runs), "run")] if runs else None
    if not isinstance(run, dict) or not all(isinstance(run.get(key), list) for key in ("input_lens", "output_lens")):
        raise InputError("no lists input_lens and output_lens", source.name, "write it with --save-detailed")
    inputs, outputs = run["input_lens"], run["output_lens"]
    starts, errors = _column(run, "start_times", len(inputs)), _column(run, "errors", len(inputs))
    if len(outputs) != len(inputs):
        raise InputError(f"{len(inputs):,} input_lens and {len(outputs):,} output_lens", source.name)
    rows = Rows(wanted, timed=starts is not None)
    for row, (asked, answered) in enumerate(zip(inputs, outputs, strict=True), 1):
        if rows.enough():
            break
        if errors is not None and errors[row - 1]:
            rows.skip(row, "requests that failed")
        else:
            rows.add(row, 0.0 if starts is None else number(starts[row - 1]), number(asked), number(answered))
    return rows.trace(source)


def _column(run: dict[str, Any], name: str, count: int) -> list[Any] | None:
    found = run.get(name)
    return found if isinstance(found, list) and len(found) == count else None
