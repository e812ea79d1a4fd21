"""BurstGPT: requests to ChatGPT and GPT-4 at a campus, over months.

Its README's schema: Timestamp (seconds from midnight of the first day), Model, Request tokens, Response tokens, Total
tokens, Log Type; the third file has Session ID and Elapsed time as well. Files with "without_fails" in their names
have no response of 0 tokens.
"""

from __future__ import annotations

from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.source import Source, number

_TIME, _INPUT, _OUTPUT = "Timestamp", "Request tokens", "Response tokens"


@reader(
    "burstgpt",
    needs=((_TIME,), (_INPUT,), (_OUTPUT,)),
    source="github.com/HPMLL/BurstGPT, README.md, Schema (arXiv 2401.17644)",
)
def burstgpt(source: Source, wanted: Wanted) -> Trace:
    """CSV with columns Timestamp (s), Request tokens and Response tokens; a response of 0 tokens is a failure."""
    rows = Rows(wanted)
    for row, cells in source.rows(_TIME, _INPUT, _OUTPUT, skip=rows.skip):
        if rows.enough():
            break
        rows.add(row, number(cells.get(_TIME)), number(cells.get(_INPUT)), number(cells.get(_OUTPUT)))
    return rows.trace(source)
