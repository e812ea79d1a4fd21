"""Accuracy as a table for the terminal."""

from __future__ import annotations

from typing import Any

from foretell.accuracy.runner import Report


def to_table(report: Report) -> Any:
    """A `rich.table.Table`: one row a slice, and the mean over slices."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("slice", "n", "median", "mean", "p90", "bias", "in 80 %", "high/low", "failed"):
        table.add_column(title, justify="left" if title == "slice" else "right", no_wrap=title == "slice")
    scores = []
    for result in report.results:
        score = result.score
        name = result.slice.name + ("" if result.complete else " (stopped)")
        if score is None:
            table.add_row(name, "0", *["–"] * 6, str(len(result.predictions)))
            continue
        scores.append(score)
        table.add_row(
            name,
            str(score.n),
            *(f"{value:.1%}" for value in (score.median, score.mean, score.p90)),
            f"{score.bias:+.1%}",
            f"{score.coverage:.0%}",
            f"{score.width:.2f}",
            str(score.failed),
        )
    if len(scores) > 1:
        table.add_section()
        average = [sum(getattr(s, name) for s in scores) / len(scores) for name in ("median", "mean", "p90", "bias")]
        table.add_row(
            "mean of slices",
            str(sum(s.n for s in scores)),
            *(f"{value:.1%}" for value in average[:3]),
            f"{average[3]:+.1%}",
            f"{sum(s.coverage for s in scores) / len(scores):.0%}",
            f"{sum(s.width for s in scores) / len(scores):.2f}",
            str(sum(s.failed for s in scores)),
        )
    return table


def to_dict(report: Report) -> dict[str, Any]:
    """Plain data, schema ``foretell.accuracy/1``."""
    results = []
    for result in report.results:
        score = result.score
        results.append(
            {
                "slice": result.slice.name,
                "device": result.slice.device,
                "runtime": result.slice.runtime,
                "conditions": dict(result.slice.conditions),
                "rows": result.total,
                "complete": result.complete,
                "score": None if score is None else {name: getattr(score, name) for name in score.__slots__},
                "failures": result.failures,
            }
        )
    return {
        "schema": "foretell.accuracy/1",
        "results": results,
        "absent": list(report.absent),
        "interrupted": report.interrupted,
    }
