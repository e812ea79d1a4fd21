"""A simulated service as one HTML file that opens offline: tables, curves and bars as they are, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foretell.report.html.page import Fact, Part, environment, versions
from foretell.report.serving import (
    Service,
    cost_lines,
    degrees,
    energy_lines,
    kept_text,
    kv_lines,
    left_out,
    limits,
    load_lines,
    policies,
    settings,
    time_text,
)
from foretell.report.text import UNKNOWN, rate, share
from foretell.simulate.serving.metrics import LATENCIES, gaps, latencies, percentile, series
from foretell.units import format_count, format_money, format_time

__all__ = ["service_page"]

Floats = npt.NDArray[np.float64]

#: The drawing of a chart, in its own units: the whole, and the margins to the left, right, top and bottom of the plot.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480.0, 250.0, 52.0, 12.0, 12.0, 34.0
#: Points of a curve, and requests that are drawn as bars.
_POINTS, _REQUESTS = 200, 48
#: Seconds between ticks of longer times.
_STEPS = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0, 43200.0, 86400.0)
_DASHES = ("", "7 4", "2 3", "10 3 2 3")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: its name, its SVG path, and how it is told from others."""

    name: str
    path: str
    tone: str
    dash: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over axes with ticks (place, label); `marks` are limits drawn across it."""

    title: str
    about: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    x_name: str
    curves: list[Curve]
    marks: list[tuple[float, str, str]] = field(default_factory=list)
    width: float = _WIDTH
    height: float = _HEIGHT
    left: float = _LEFT
    right: float = _WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = _HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase of a request as a rectangle."""

    x: float
    y: float
    width: float
    height: float
    tone: str
    title: str


@dataclass(frozen=True, slots=True)
class Gantt:
    """Requests over time, a row each."""

    bars: list[Bar]
    x_ticks: list[tuple[float, str]]
    shown: int
    height: float
    width: float = 960.0
    left: float = 60.0
    rows: list[tuple[float, str]] = field(default_factory=list)


def service_page(found: Service, command: str) -> str:
    """The page's text. Everything from outside is escaped; nothing is loaded."""
    one = found.metrics
    names = list(next(iter(one.latency_s.values())))
    return environment().get_template("serving.html").render(
        title=f"llm:{found.config.name} · served by {found.plan.engine} on {found.where}",
        workload=f"llm:{found.config.name}",
        engine=found.plan.engine,
        where=found.where,
        settings=[
            f"{format_count(found.config.parameters)} parameters", *degrees(found.plan),
            *(text for text in settings(found.plan) if text), *policies(found),
        ],
        load=[text for line in load_lines(found) for text in line],
        facts=_facts(found),
        columns=names,
        latencies=[
            {"name": name.upper(), "about": LATENCIES[name], "cells": [time_text(values[column]) for column in names]}
            for name, values in one.latency_s.items()
        ],
        objective=[] if found.slo is None or one.attainment is None else limits(found),
        charts=[_cdfs(found), *_over_time(found)],
        gantt=_gantt(found),
        bound=_parts(one.bound),
        queue=_parts(one.queue),
        kv=[text for text in kv_lines(found) if text],
        energy=energy_lines(one),
        cost=cost_lines(found),
        left_out=left_out(found),
        about=[f"{key}: {text}" for key, text in found.requests.about.items()],
        command=command,
        notes=found.notes,
        versions=versions(),
    )  # fmt: skip


def _parts(shares: dict[str, float] | object) -> list[Part]:
    return [Part(name, part, share(part)) for name, part in shares.items()] if isinstance(shares, dict) else []


def _facts(found: Service) -> list[Fact]:
    one = found.metrics
    ttft, tpot = one.latency_s["ttft"], one.latency_s["tpot"]
    late = [name for name in ttft if name.startswith("p") and float(name[1:]) > 50]
    facts = [
        Fact("Time to first token", time_text(ttft.get("p50", ttft["mean"])),
             tuple(f"{name} {time_text(ttft[name])}" for name in late)),
        Fact("Time per output token", time_text(tpot.get("p50", tpot["mean"])),
             tuple(f"{name} {time_text(tpot[name])}" for name in late)),
        Fact("Throughput", f"{rate(one.output_tokens_per_s)} tok/s",
             (f"{rate(one.output_tokens_per_s_per_device)} a GPU", f"{rate(one.requests_per_s)} requests/s")),
    ]  # fmt: skip
    if one.attainment is not None:
        facts.append(Fact("Within objective", kept_text(one.attainment), tuple(limits(found))))
    facts.append(Fact("KV cache", f"{share(one.kv_peak)} at most", (f"{share(one.kv_mean)} on average",)))
    price = one.usd_per_million_output_tokens
    facts.append(Fact("Million output tokens", UNKNOWN if price is None else format_money(price),
                      tuple(cost_lines(found)[1:])))  # fmt: skip
    return facts


# --- drawing -------------------------------------------------------------------------------------------------------


def _path(x: Floats, y: Floats) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _across(values: Floats, low: float, high: float) -> Floats:
    placed: Floats = _LEFT + (np.asarray(values) - low) / max(high - low, 1e-12) * (_WIDTH - _RIGHT - _LEFT)
    return placed


def _upward(values: Floats, high: float) -> Floats:
    placed: Floats = _HEIGHT - _BOTTOM - np.asarray(values) / max(high, 1e-12) * (_HEIGHT - _BOTTOM - _TOP)
    return placed


def ticks(high: float, most: int = 5) -> list[float]:
    """Round numbers from 0 to `high`, at most `most` steps.

    >>> ticks(7.3), ticks(100.0)
    ([0.0, 2.0, 4.0, 6.0], [0.0, 20.0, 40.0, 60.0, 80.0, 100.0])
    """
    if not high > 0 or not math.isfinite(high):
        return [0.0]
    step = 10.0 ** math.floor(math.log10(high / most))
    step *= next(m for m in (1.0, 2.0, 5.0, 10.0) if high / (m * step) <= most)
    return [step * i for i in range(int(high / step + 1e-9) + 1)]


def time_ticks(seconds: float, most: int = 5) -> list[float]:
    """Times from 0 to `seconds` that a clock shows in round numbers, at most `most` steps.

    >>> time_ticks(481.0), time_ticks(0.7)
    ([0.0, 120.0, 240.0, 360.0, 480.0], [0.0, 0.2, 0.4, 0.6000000000000001])
    """
    if not seconds > 60.0 * most / 4.0:
        return ticks(seconds, most)
    step = next((s for s in _STEPS if seconds / s <= most), 0.0)
    return ticks(seconds, most) if not step else [step * i for i in range(int(seconds / step + 1e-9) + 1)]


def _clock(seconds: float) -> str:
    return format_time(seconds).removesuffix(" 0 s").removesuffix(" 0 min") if seconds else "0"


def _cdfs(found: Service) -> Chart:
    """Shares of requests (of tokens, for ITL) up to a latency, on a logarithmic axis."""
    times = latencies(found.served)
    one = found.metrics
    mine = (found.served.arrival_s >= one.since_s) & (found.served.arrival_s <= one.until_s)
    values, weights = gaps(found.served, one.since_s, one.until_s)
    shares = np.linspace(0.0, 100.0, _POINTS)
    curves = {name: percentile(times[name][mine], list(shares)) for name in ("ttft", "tpot")}
    curves["itl"] = percentile(values, list(shares), weights)
    curves["e2e"] = percentile(times["e2e"][mine], list(shares))
    known = np.concatenate([column[np.isfinite(column) & (column > 0)] for column in curves.values()])
    low, high = (math.log10(float(edge(known))) if len(known) else 0.0 for edge in (np.min, np.max))
    low, high = math.floor(low * 2) / 2, math.ceil(high * 2) / 2 + (1e-9 if low == high else 0.0)
    drawn = []
    for index, (name, column) in enumerate(curves.items()):
        column = np.maximum(column, 10.0**low)
        if np.isfinite(column).all():
            path = _path(_across(np.log10(column), low, high), _upward(shares, 100.0))
            drawn.append(Curve(name.upper(), path, f"k{index}", _DASHES[index]))
    given = found.slo.limits if found.slo is not None else {}
    marks = [
        (float(_across(np.array(math.log10(limit)), low, high)), f"{name.upper()} ≤ {format_time(limit)}", f"k{index}")
        for index, name in enumerate(curves) if (limit := given.get(name, 0.0)) > 0 and low <= math.log10(limit) <= high
    ]  # fmt: skip
    decades = [float(d) for d in range(math.ceil(low), math.floor(high) + 1)]
    return Chart(
        "Latencies", "share of requests (ITL: of tokens) that take no longer",
        [(float(_across(np.array(d), low, high)), time_text(10.0**d)) for d in decades],
        [(float(_upward(np.array(t), 100.0)), share(t / 100.0)) for t in (0.0, 25.0, 50.0, 75.0, 100.0)],
        "latency", drawn, marks,
    )  # fmt: skip


def _over_time(found: Service) -> list[Chart]:
    went = series(found.served, _POINTS)
    middle = (went.edge_s[:-1] + went.edge_s[1:]) / 2.0
    begin, end = float(went.edge_s[0]), float(went.edge_s[-1])
    places = [(float(_across(np.array(begin + t), begin, end)), _clock(t))
              for t in time_ticks(end - begin)]  # fmt: skip

    def chart(
        title: str, about: str, columns: Sequence[tuple[str, Floats]], top: float, percent: bool = False
    ) -> Chart:
        curves = [
            Curve(name, _path(_across(middle, begin, end), _upward(np.minimum(column, top), top)), f"k{i}", _DASHES[i])
            for i, (name, column) in enumerate(columns)
        ]
        labels = [(float(_upward(np.array(t), top)), share(t) if percent else format_count(t)) for t in ticks(top)]
        return Chart(title, about, places, labels, "time", curves)

    most = max(1.0, float(went.running.max(initial=0.0)), float(went.waiting.max(initial=0.0)))
    return [
        chart("Batch", "requests that run, and that wait for a place",
              [("running", went.running), ("waiting", went.waiting)], 1.05 * most),
        chart("KV cache", "share of blocks held", [("held", went.kv)], 1.0, percent=True),
        chart("Output", "output tokens a second", [("tokens/s", went.output_tokens_per_s)],
              1.05 * max(1.0, float(went.output_tokens_per_s.max(initial=0.0)))),
    ]  # fmt: skip


def _gantt(found: Service) -> Gantt:
    """Requests taken evenly over those that were served, with their phases."""
    served = found.served
    chosen = np.flatnonzero(served.served)
    if len(chosen) > _REQUESTS:
        chosen = chosen[np.linspace(0, len(chosen) - 1, _REQUESTS).round().astype(np.int64)]
    begin = float(served.arrival_s.min()) if len(served) else 0.0
    end = max(served.end_s, begin + 1e-9)
    left, width, row = 60.0, 960.0, 11.0
    scale = (width - left - 12.0) / (end - begin)
    bars, rows = [], []
    for line, index in enumerate(chosen.tolist()):
        times = [float(column[index]) for column in (served.arrival_s, served.first_scheduled_s, served.first_token_s,
                                                     served.finished_s)]  # fmt: skip
        y = 6.0 + row * line
        if line % 6 == 0:
            rows.append((y + row - 3.0, f"{index:,}"))
        for phase, tone, since, until in zip(
            ("waits", "prompt", "answer"), ("wait", "k1", "k0"), times, times[1:], strict=False
        ):
            if until > since:
                bars.append(Bar(left + scale * (since - begin), y, max(0.6, scale * (until - since)), row - 3.0, tone,
                                f"request {index:,}: {phase} {format_time(until - since)}"))  # fmt: skip
    return Gantt(
        bars, [(left + scale * t, _clock(t)) for t in time_ticks(end - begin, 8)], len(chosen),
        row * len(chosen) + 34.0, width, left, rows,
    )  # fmt: skip
