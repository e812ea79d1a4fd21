"""Azure's traces of its language-model services, 2023 and 2024: when each request came, and its tokens."""

from __future__ import annotations

from datetime import UTC, datetime

from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.source import Source, number

_TIME, _INPUT, _OUTPUT = "TIMESTAMP", "ContextTokens", "GeneratedTokens"


@reader(
    "azure",
    needs=((_TIME,), (_INPUT,), (_OUTPUT,)),
    source="github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md (Splitwise, ISCA 2024)",
    folder="azure-llm-2023",
    files="*.csv*",
)
def azure(source: Source, wanted: Wanted) -> Trace:
    """CSV with columns TIMESTAMP, ContextTokens and GeneratedTokens."""
    rows = Rows(wanted)
    for row, cells in source.rows(_TIME, _INPUT, _OUTPUT, skip=rows.skip):
        if rows.enough():
            break
        rows.add(row, _seconds(cells.get(_TIME, "")), number(cells.get(_INPUT)), number(cells.get(_OUTPUT)))
    return rows.trace(source)


def _seconds(text: str) -> float:
    """Seconds since 1970 of a time such as ``2023-11-16 18:15:46.6805900``; NaN for anything else."""
    try:
        time = datetime.fromisoformat(text.strip())
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return float("nan")
