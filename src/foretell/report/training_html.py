"""A ranking of training plans as one HTML file that opens offline: tables, bars and a plot, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from foretell.plan.training.search import Candidate, Ranking
from foretell.plan.training.why import NAMES, step_text
from foretell.report.html.page import Fact, Part, environment, versions
from foretell.report.text import count, rate, share
from foretell.report.training import columns_of, label, money, notes_of, worth_showing
from foretell.units import format_bytes, format_count, format_energy, format_time

__all__ = ["ranking_page"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 340, 80, 690, 26, 290


def ranking_page(found: Ranking, command: str) -> str:
    """The page's text. Everything from outside is escaped; nothing is loaded."""
    best = found.best[0]
    plan = best.plan
    every = (*found.best, *found.front)
    return environment().get_template("plan.html").render(
        title=f"llm:{found.config.name} · training on {found.cluster.name}",
        workload=f"llm:{found.config.name}",
        where=found.cluster.name,
        settings=[
            f"{format_count(found.config.parameters)} parameters",
            count(found.cluster.device_count, "device"),
            f"{plan.global_batch:,} sequences of {plan.seq_len:,} tokens a step",
            plan.precision, plan.framework,
            f"{found.legal:,} legal plans, {found.fitting:,} fit",
            f"least {found.objective}",
        ],
        facts=_facts(found),
        columns=list(columns_of(every, found)),
        best=_rows(found.best, found),
        front=_rows(worth_showing(found), found),
        left=len(found.front) - len(worth_showing(found)),
        imported=None if found.imported is None else _rows([found.imported], found)[0],
        import_notes=found.notes,
        why=found.why,
        parts=[
            Part(NAMES[name], value / best.time_s, share(value / best.time_s), format_time(value))
            for name, value in best.parts.items() if value > 0
        ],
        plot=_plot(found),
        command=command,
        notes=notes_of(found),
        versions=versions(),
    )  # fmt: skip


def _rows(rows: Sequence[Candidate], found: Ranking) -> list[dict[str, Any]]:
    columns = columns_of(rows, found)
    return [{"label": label(row.plan), "cells": [(name, cells[i]) for name, cells in columns.items()]}
            for i, row in enumerate(rows)]  # fmt: skip


def _facts(found: Ranking) -> list[Fact]:
    best = found.best[0]
    facts = [
        Fact("Step", step_text(best.time_s), (label(best.plan),)),
        Fact("Rate", f"{rate(best.tokens_per_s)} tok/s", (f"{rate(best.tokens_per_s_per_device)} a GPU",)),
        Fact("MFU", share(best.mfu), (f"{share(best.exposed_s / best.time_s)} exposed communication",)),
        Fact("Memory", format_bytes(best.memory_bytes), (f"of {format_bytes(found.budget_bytes)} allowed",)),
    ]
    if found.tokens is not None:
        run = best.run(found.tokens)
        cost = "cost unknown" if run.cost_usd is None else money(run.cost_usd)
        lines = [f"{run.device_hours:,.0f} GPU-hours", cost]
        lines += [] if run.energy_j is None else [format_energy(run.energy_j)]
        facts.append(Fact(f"{format_count(found.tokens)} tokens", f"{run.time_s / 86400:,.1f} days", tuple(lines)))
    return facts


def _plot(found: Ranking) -> dict[str, Any] | None:
    """Time over memory of the front, and the best plans in another colour; None of a single point."""
    points = [(one, "k1") for one in worth_showing(found)]
    points += [(one, "k0") for one in found.best if one not in found.front]
    xs, ys = [one.memory_bytes for one, _ in points], [one.time_s for one, _ in points]
    if max(xs) <= min(xs) or max(ys) <= min(ys):
        return None
    x_ticks, y_ticks = _ticks(min(xs) / 2**30, max(xs) / 2**30), _ticks(min(ys), max(ys))
    low_x, high_x, low_y, high_y = x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1]

    def x(gib: float) -> float:
        return round(_LEFT + (gib - low_x) / (high_x - low_x) * (_RIGHT - _LEFT), 1)

    def y(seconds: float) -> float:
        return round(_BOTTOM - (seconds - low_y) / (high_y - low_y) * (_BOTTOM - _TOP), 1)

    return {
        "width": _WIDTH, "height": _HEIGHT, "left": _LEFT, "right": _RIGHT, "top": _TOP, "bottom": _BOTTOM,
        "x": [{"at": x(tick), "text": f"{tick:g} GiB"} for tick in x_ticks],
        "y": [{"at": y(tick), "text": format_time(tick) if tick else "0"} for tick in y_ticks],
        "dots": [
            {"x": x(one.memory_bytes / 2**30), "y": y(one.time_s), "tone": tone,
             "text": f"{label(one.plan)}: {format_time(one.time_s)}, {format_bytes(one.memory_bytes)}"}
            for one, tone in points
        ],
    }  # fmt: skip


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that span low to high, at least two."""
    rough = (high - low) / (most - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1.0, 2.0, 5.0, 10.0) if unit * m >= rough)
    first = math.floor(low / step)
    last = math.ceil(high / step)
    return [step * i for i in range(first, max(last, first + 1) + 1)]
