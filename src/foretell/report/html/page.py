"""The page: figures as text, plots as data, one template, and a policy that lets the file load nothing."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

import foretell
from foretell.cost import BOUNDS, Estimate, Program, lower
from foretell.graph import Graph
from foretell.hardware.device import Device
from foretell.report.graphs import shape_text, short_name
from foretell.report.html import plots
from foretell.report.html.sensitivity import Variation
from foretell.report.text import UNKNOWN, count, interval, not_counted_text, rate, share, singular
from foretell.units import (
    format_bytes,
    format_count,
    format_energy,
    format_flops,
    format_money,
    format_power,
    format_time,
)

__all__ = ["Page", "content_policy", "environment", "html_page", "script_hash", "versions"]

_DEAREST = 15  # ops in the table
_MARKS = 2400  # in all plots of one kind together, however many devices there are

# Libraries that a capture comes from: their versions belong to a figure.
_LIBRARIES = ("numpy", "torch", "timm", "torchvision", "transformers")


@dataclass(frozen=True, slots=True)
class Page:
    """What a report is made of: one graph, its estimates on one device or several, and how to get them again.

    `devices` are parallel to `estimates`. `program` is the graph lowered for their runtime. `variations` and
    `largest_batches` are by device name; `command` is a line for a shell.
    """

    graph: Graph
    estimates: Sequence[Estimate]
    devices: Sequence[Device]
    settings: Sequence[str] = ()
    command: str = ""
    program: Program | None = None
    variations: Mapping[str, Sequence[Variation]] = field(default_factory=dict)
    largest_batches: Mapping[str, int | None] = field(default_factory=dict)


def html_page(page: Page, template: str = "report.html", **more: Any) -> str:
    """The report as the text of one HTML file. `template` and `more` are for pages that put something around it."""
    program = page.program or lower(page.graph, page.estimates[0].runtime)
    first = page.estimates[0]
    data, texts = [], plots.Texts()
    most = max(200, _MARKS // len(page.estimates))
    views = []
    for estimate, device in zip(page.estimates, page.devices, strict=True):
        roofline = plots.roofline(page.graph, estimate, program, device, texts, most)
        data.append(
            {
                "device": estimate.device,
                "time": estimate.time_s,
                "roofline": roofline,
                "memory": plots.memory_curve(page.graph, estimate, texts, min(800, most)),
                "icicle": plots.icicle(page.graph, estimate, texts, most),
            }
        )
        undrawn = _of(roofline["undrawn"], estimate.time_s)
        views.append(_view(page, estimate, device) | {"undrawn": share(undrawn) if undrawn > 0 else None})
    document = {"families": list(plots.FAMILIES), "bounds": BOUNDS, "devices": data, "texts": texts.all()}
    several = len(page.estimates) > 1
    where = f"{len(page.estimates)} devices" if several else page.devices[0].title
    return environment().get_template(template).render(
        title=f"{first.workload} · {first.mode} on {where}",
        workload=first.workload,
        mode=first.mode,
        where=where,
        settings=[*page.settings, first.precision, first.runtime],
        views=views,
        comparison=_comparison(page) if several else None,
        families=list(plots.FAMILIES),
        data=_json(document),
        command=page.command,
        versions=versions(),
        work=_work(page.graph),
        **more,
    )


@cache
def environment() -> jinja2.Environment:
    """Templates of this package: everything put into them is escaped, and a name that is missing is an error."""
    result = jinja2.Environment(
        loader=jinja2.PackageLoader("foretell.report.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    result.globals.update(asset=_asset, policy=content_policy)
    return result


@cache
def _asset(name: str) -> Markup:
    """A script or style sheet of ours, as it is."""
    loader = environment().loader
    assert loader is not None
    return Markup(loader.get_source(environment(), name)[0])


def script_hash(name: str) -> str:
    """What a content policy calls one of our scripts or style sheets."""
    digest = hashlib.sha256(_asset(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def content_policy(scripts: Sequence[str] = ("report.js",), connect: bool = False) -> str:
    """A content security policy: our own scripts and styles run, by their hash; nothing else runs, nothing is loaded.

    With `connect` scripts may ask the server that the page came from.
    """
    rules = [
        "default-src 'none'",
        "script-src " + " ".join(script_hash(name) for name in scripts),
        f"style-src {script_hash('report.css')}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join([*rules, "connect-src 'self'"] if connect else rules)


def versions() -> dict[str, str]:
    """Versions of Foretell, Python, and the libraries that are installed."""
    found = {"foretell": foretell.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _json(document: Any) -> Markup:
    """JSON that may stand inside a script element: it holds no ``<`` that could end it."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


# --- figures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fact:
    """One tile: what it is, the figure, and what there is to say of it."""

    name: str
    figure: str
    lines: tuple[str, ...] = ()
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One bar of several: its name, its share (0 to 1, for the length), and the share and quantity in words."""

    name: str
    share: float
    figure: str
    detail: str = ""
    tone: str = ""


def _view(page: Page, estimate: Estimate, device: Device) -> dict[str, Any]:
    total = estimate.time_s
    memory = estimate.memory
    graph = page.graph
    noun = singular(next(iter(estimate.items)))
    held = sorted(((name, size) for name, size in memory.breakdown.items() if size), key=lambda item: -item[1])
    at = memory.peak_op
    return {
        "title": device.title,
        "name": estimate.device,
        "facts": _facts(page, estimate, device),
        "bounds": [
            Part(name, _of(seconds, total), share(_of(seconds, total)), format_time(seconds), name)
            for name, seconds in estimate.breakdown_s.items()
        ],
        "bound": estimate.bound,
        "host": format_time(estimate.host_s) if estimate.host_s else None,
        "peak": format_bytes(memory.allocated_bytes),
        "peak_op": None if at < 0 else _op_text(graph, at),
        "peak_phase": None if at < 0 else graph.ops[at].phase,
        "held": [
            Part(name.replace("_", " "), _of(size, memory.peak_bytes), share(_of(size, memory.peak_bytes)),
                 format_bytes(size))
            for name, size in held
        ],
        "alive": [
            {
                "what": block.role,
                "module": block.module or "outside modules",
                "shape": block.shape,
                "size": format_bytes(block.nbytes),
            }
            for block in plots.alive_at_peak(graph, estimate)
        ],
        "dearest": _dearest(graph, estimate),
        "op_count": count(len(graph.ops), "op"),
        "variations": _variations(page.variations.get(estimate.device, ()), estimate),
        "noun": noun,
        "notes": list(estimate.notes),
        "not_counted": not_counted_text(estimate.not_counted),
        "basis": estimate.interval_basis,
        "model": estimate.model,
        "price": _price(device),
    }


def _facts(page: Page, estimate: Estimate, device: Device) -> list[Fact]:
    low, high = estimate.time_interval_s
    memory = estimate.memory
    noun, number = next(iter(estimate.items.items()))
    one = singular(noun)
    step = ", ".join(f"{n:,} {name if n != 1 else singular(name)}" for name, n in estimate.items.items())
    others = list(estimate.items.items())[1:]
    facts = [
        Fact(
            "Time per step",
            format_time(estimate.time_s),
            (f"80 % interval {interval(low, high)}", f"a step is {step}"),
        ),
        Fact(
            f"{noun.capitalize()} per second",
            rate(estimate.throughput_per_s),
            tuple(f"{rate(n / estimate.time_s)} {name}/s" for name, n in others if estimate.time_s > 0),
        ),
    ]
    if memory.capacity_bytes is None:
        facts.append(Fact("Memory", format_bytes(memory.peak_bytes), ("the device's capacity is unknown",)))
    else:
        used = share(memory.peak_bytes / memory.capacity_bytes)
        lines = [f"{used} of {format_bytes(memory.capacity_bytes)}: " + ("fits" if memory.fits else "does not fit")]
        largest = page.largest_batches.get(estimate.device)
        if largest is not None:
            lines.append("no batch fits" if largest < 1 else f"largest batch that fits: {largest:,}")
        facts.append(Fact("Memory", format_bytes(memory.peak_bytes), tuple(lines), "" if memory.fits else "bad"))
    if estimate.energy_j is None:
        facts.append(Fact("Energy", UNKNOWN, ("the device's power is not in the catalogue",)))
    else:
        average = "" if estimate.power_w is None else f"{format_power(estimate.power_w)} on average"
        facts.append(
            Fact(
                "Energy per step",
                format_energy(estimate.energy_j),
                (f"{format_energy(estimate.energy_j / number)} per {one}", average),
            )
        )
    if estimate.cost_usd is None or device.price_usd_per_h is None:
        facts.append(Fact("Cost", UNKNOWN, ("no hourly price of the device is in the catalogue",)))
    else:
        million = format_money(1e6 * estimate.cost_usd / number)
        facts.append(
            Fact(
                f"Cost per million {noun}", million, (f"at {format_money(device.price_usd_per_h)} an hour",)
            )
        )
    most = share(_of(estimate.breakdown_s[estimate.bound], estimate.time_s))
    mfu = UNKNOWN if estimate.mfu is None else share(estimate.mfu)
    facts.append(Fact("Limited by", estimate.bound, (f"for {most} of the time", f"MFU {mfu}")))
    return facts


def _work(graph: Graph) -> list[str]:
    moved = sum((op.bytes_read + op.bytes_written) * op.repeat for op in graph.ops)
    return [
        f"{format_flops(graph.flops())}",
        f"{format_count(graph.parameters)} parameters",
        f"{format_bytes(moved)} of traffic before fusion",
        count(sum(op.repeat for op in graph.ops), "op"),
    ]


def _of(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _op_text(graph: Graph, index: int) -> str:
    op = graph.ops[index]
    where = f" in {op.module}" if op.module else ""
    return f"op {index}, {short_name(op.name)}{where}"


def _dearest(graph: Graph, estimate: Estimate) -> list[dict[str, Any]]:
    times = estimate.ops.time_s
    order = sorted(range(len(graph.ops)), key=lambda i: (-times[i], i))[:_DEAREST]
    longest = float(times[order[0]]) if order else 0.0
    rows = []
    for i in order:
        if times[i] <= 0.0:
            break
        op, time_s = graph.ops[i], float(times[i])
        rows.append(
            {
                "index": i,
                "name": short_name(op.name) + (f" ×{op.repeat}" if op.repeat > 1 else ""),
                "module": op.module or "outside modules",
                "shape": shape_text(graph, op),
                "phase": op.phase,
                "time": format_time(time_s),
                "share": share(_of(time_s, estimate.time_s)),
                "length": _of(time_s, longest),
                "bound": BOUNDS[int(estimate.ops.bound[i])],
            }
        )
    return rows


def _variations(found: Sequence[Variation], base: Estimate) -> list[dict[str, Any]]:
    changes = [change for v in found if (change := v.change(base)) is not None]
    widest = max([0.05, *(abs(c) for c in changes)])
    rows: list[dict[str, Any]] = []
    for variation in found:
        change = variation.change(base)
        row: dict[str, Any] = {"group": variation.group, "name": variation.name}
        row |= {"reason": variation.reason, "change": None}
        if variation.estimate is not None and change is not None:
            length = abs(change) / widest
            row |= {
                "change": _signed(change),
                "tone": "same" if abs(change) < 5e-4 else "good" if change < 0 else "bad",
                "start": 50.0 - 50.0 * length if change < 0 else 50.0,
                "length": 50.0 * length,
                "time": format_time(1.0 / variation.estimate.throughput_per_s),
                "memory": format_bytes(variation.estimate.memory.peak_bytes),
                "fits": variation.estimate.memory.fits,
            }
        rows.append(row)
    return rows


def _signed(change: float) -> str:
    """A relative change in per cent with its sign.

    >>> _signed(0.118), _signed(-0.5), _signed(0.0), _signed(1.5)
    ('+12 %', '−50 %', '±0 %', '+150 %')
    """
    if abs(change) < 5e-4:
        return "±0 %"
    return ("+" if change > 0 else "−") + share(abs(change))


def _price(device: Device) -> str | None:
    """The hourly price and where it is from."""
    if device.price_usd_per_h is None:
        return None
    source = device.sources.get("price_usd_per_h", "")
    return f"{format_money(device.price_usd_per_h)} an hour" + (f": {source}" if source else "")


def _comparison(page: Page) -> dict[str, Any]:
    estimates = page.estimates
    noun, _ = next(iter(estimates[0].items.items()))
    longest = max(e.time_interval_s[1] for e in estimates)

    def cost(e: Estimate) -> float | None:
        return None if e.cost_usd is None else 1e6 * e.cost_usd / next(iter(e.items.values()))

    feasible = [e for e in estimates if e.memory.fits is not False]

    def best(key: Any) -> float | None:
        values = [value for e in feasible if (value := key(e)) is not None]
        return min(values) if len(values) > 1 else None

    fastest, cheapest = best(lambda e: e.time_s), best(cost)
    frugal = best(lambda e: e.energy_j)
    rows: list[dict[str, Any]] = []
    for e, device in zip(estimates, page.devices, strict=True):
        low, high = e.time_interval_s
        largest = page.largest_batches.get(e.device)
        fits = {True: "yes", False: "no", None: UNKNOWN}[e.memory.fits]
        rows.append(
            {
                "name": e.device,
                "title": device.title,
                "fits": e.memory.fits,
                "low": 100.0 * low / longest,
                "width": 100.0 * (high - low) / longest,
                "mid": 100.0 * e.time_s / longest,
                "cells": [
                    ("time", format_time(e.time_s), e.time_s == fastest and e in feasible),
                    ("80 % interval", interval(low, high), False),
                    (f"{noun}/s", rate(e.throughput_per_s), False),
                    ("memory", format_bytes(e.memory.peak_bytes), False),
                    ("fits", fits + ("" if largest is None else f", up to {largest:,}"), False),
                    ("limited by", e.bound, False),
                    ("MFU", UNKNOWN if e.mfu is None else share(e.mfu), False),
                    ("energy", UNKNOWN if e.energy_j is None else format_energy(e.energy_j),
                     e.energy_j == frugal and e in feasible),
                    ("price", UNKNOWN if device.price_usd_per_h is None
                     else f"{format_money(device.price_usd_per_h)}/h", False),
                    (f"per M {noun}", UNKNOWN if cost(e) is None else format_money(cost(e) or 0.0),
                     cost(e) == cheapest and e in feasible),
                ],
            }
        )
    return {"rows": rows, "head": [name for name, _, _ in rows[0]["cells"]], "noun": noun}

