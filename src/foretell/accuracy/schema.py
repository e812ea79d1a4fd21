"""Accuracy as plain data."""

from __future__ import annotations

from typing import Any

from foretell.accuracy.runner import Report

SCHEMA = "foretell.accuracy/1"


def to_dict(report: Report) -> dict[str, Any]:
    """Plain data, schema ``foretell.accuracy/1``."""
    results = []
    for result in report.results:
        score = result.score
        results.append(
            {
                "slice": result.name,
                "device": result.device,
                "runtime": result.runtime,
                "conditions": dict(result.conditions),
                "rows": result.total,
                "complete": result.complete,
                "score": None if score is None else {name: getattr(score, name) for name in score.__slots__},
                "failures": dict(result.failures),
            }
        )
    return {
        "schema": SCHEMA,
        "results": results,
        "absent": list(report.absent),
        "interrupted": report.interrupted,
    }
