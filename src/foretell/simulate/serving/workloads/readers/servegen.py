"""ServeGen: what clients of Alibaba's services sent, as statistics, from which requests are drawn anew."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.simulate.serving.workloads.family import MOST_REQUESTS, Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.source import Source, number

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_COLUMNS = ("client", "timestamp_s", "rate_req_per_s", "cv", "arrival_distribution", "param1")
#: Seconds that one row of rates is about.
WINDOW_S = 600.0
_BIN = re.compile(r"(\d+(?:\.\d+)?): ([0-9.eE+-]+)")
#: Tokens of one item of each kind that a prompt may hold besides text, and how many items it holds.
_ITEMS = ("image", "audio", "video")


@reader(
    "servegen",
    needs=tuple((name,) for name in _COLUMNS),
    source="github.com/alibaba/ServeGen, data/ (NSDI 2026)",
    folder="servegen",
    files="*_client_rate_traces.csv*",
)
def servegen(source: Source, wanted: Wanted) -> Trace:
    """Rates, variation and length histograms of clients in windows of ten minutes; requests are drawn from them.

    Each client is a renewal process in every window: gaps are gamma or Weibull distributed as the file says, and the
    first one is what is left of a gap that began before the window, so that the rate is right whatever the
    variation. Lengths come from the client's histograms of that time, lengths of input and output independent of
    each other: the file has no joint distribution. Without histograms, `wanted.lengths` says them.
    """
    rng = np.random.default_rng(wanted.seed)
    windows = _windows(source)
    histograms = _histograms(source)
    if not histograms and wanted.lengths is None:
        raise InputError("this file of rates has no lengths beside it", source.name,
                         "say them: --isl 1024 --osl 256, or --lengths TRACE")  # fmt: skip
    end_s = math.inf if wanted.duration_s is None else wanted.start_s + wanted.duration_s
    rows = Rows(wanted)
    beyond = 0
    for begin in sorted(windows):
        if begin + WINDOW_S <= wanted.start_s or begin >= end_s:
            continue
        arrivals, inputs, outputs = [], [], []
        for client, rate, cv, kind, shape in windows[begin]:
            if len(rows) + rate * WINDOW_S > MOST_REQUESTS:
                raise InputError(f"more than {MOST_REQUESTS:,} requests", source.name, "give --duration, e.g. 1h")
            times = _arrivals(rate, cv, kind, shape, rng)
            arrivals.append(begin + times)
            if histograms and wanted.lengths is None:
                asked, answered = _lengths(histograms, client, begin, len(times), rng)
            else:
                assert wanted.lengths is not None
                asked, answered = wanted.lengths.draw(len(times), rng)
            inputs.append(asked)
            outputs.append(answered)
        if not arrivals:
            continue
        at, asked, answered = np.concatenate(arrivals), np.concatenate(inputs), np.concatenate(outputs)
        order = np.argsort(at, kind="stable")
        kept = order[(at[order] >= wanted.start_s) & (at[order] < end_s)]
        for one in kept:
            if len(rows) >= wanted.limit:
                beyond += 1
                break
            rows.add(len(rows) + 1, float(at[one]), float(asked[one]), float(answered[one]))
        if beyond:
            break
    clients = {client for window in windows.values() for client, *_ in window}
    about = {"drawn": f"from statistics of {len(clients):,} clients, seed {wanted.seed}"}
    if beyond:
        about["cut"] = f"the first {wanted.limit:,} requests drawn"
    return replace(rows.trace(source, begin_s=0.0, **about), row=None)  # the file has no row of a request


def _windows(source: Source) -> dict[float, list[tuple[str, float, float, str, float]]]:
    """Client, rate, variation, distribution and its shape, of clients that send something in each window."""
    found: dict[float, list[tuple[str, float, float, str, float]]] = {}

    def refuse(row: int, why: str) -> None:
        raise InputError(why, f"{source.name}, row {row:,}")

    for row, cells in source.rows(*_COLUMNS, skip=refuse):
        begin, rate, cv, shape = (number(cells.get(name)) for name in ("timestamp_s", "rate_req_per_s", "cv", "param1"))
        if not (0 <= begin < 1e10 and 0 <= rate < 1e9 and 0 <= cv < 1e6):
            raise InputError("a time, rate or variation that is none", f"{source.name}, row {row:,}")
        if rate > 0:
            kind = cells["arrival_distribution"].strip().casefold()
            found.setdefault(begin, []).append((cells["client"].strip(), rate, cv, kind, shape))
    return found


def _arrivals(rate: float, cv: float, kind: str, shape: float, rng: np.random.Generator) -> Floats:
    """Arrivals in a window of a renewal process in equilibrium: gaps of mean 1/rate."""
    mean = 1.0 / rate
    weibull = kind == "weibull" and 0.05 <= shape <= 50
    k = shape if weibull else 1.0 / max(cv, 0.01) ** 2
    scale = mean / math.gamma(1.0 + 1.0 / k) if weibull else mean / k
    # What is left of a gap is a uniform part of one that is drawn in proportion to its length.
    first = rng.gamma(1.0 + 1.0 / k) ** (1.0 / k) if weibull else rng.gamma(k + 1.0)
    gaps = [np.array([first * scale * rng.random()])]
    total = float(gaps[0][0])
    while total < WINDOW_S:
        need = int(1.2 * (WINDOW_S - total) * rate) + 16
        more = scale * (rng.weibull(k, need) if weibull else rng.gamma(k, size=need))
        gaps.append(more)
        total += float(more.sum())
    times: Floats = np.cumsum(np.concatenate(gaps))
    return times[times < WINDOW_S]


def _histograms(source: Source) -> dict[str, dict[float, dict[str, Any]]]:
    """Histograms by client and begin, from the file beside `source`; none where there is none."""
    name = source.path.name.replace("_client_rate_traces.csv", "_length_distributions.json")
    path = source.path.with_name(name)
    if name == source.path.name or not path.is_file():
        return {}
    document = Source(path).document()
    found: dict[str, dict[float, dict[str, Any]]] = {}
    for client, times in document.items() if isinstance(document, dict) else ():
        for begin, sides in times.items() if isinstance(times, dict) else ():
            if isinstance(sides, dict) and number(begin) == number(begin):
                found.setdefault(client, {})[number(begin)] = dict(sides)
    if not found:
        raise InputError("no histograms by client and time", str(path))
    return found


def _lengths(
    histograms: dict[str, dict[float, dict[str, Any]]], client: str, begin: float, count: int, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Input and output tokens of `count` requests; 0 where the client has no histogram of that side."""
    times = histograms.get(client, {})
    earlier = [time for time in times if time <= begin]
    sides = times[max(earlier)] if earlier else times[min(times)] if times else {}
    text = _draw(sides, "input_tokens" if "input_tokens" in sides else "text_tokens", count, rng)
    for item in _ITEMS:
        if f"{item}_count" in sides:
            many = _draw(sides, f"{item}_count", count, rng)
            owner = np.repeat(np.arange(count), many)
            np.add.at(text, owner, _draw(sides, f"{item}_tokens", len(owner), rng))
    return text, _draw(sides, "output_tokens", count, rng)


def _draw(sides: dict[str, Any], name: str, count: int, rng: np.random.Generator) -> Ints:
    """Values of the histogram ``{value: probability, …}``, a text that is read once."""
    held = sides.get(name)
    if held is None:
        return np.zeros(count, dtype=np.int64)
    if isinstance(held, str):
        bins = [(float(value), float(share)) for value, share in _BIN.findall(held)]
        values = np.array([value for value, _ in bins])
        shares = np.cumsum([share for _, share in bins])
        held = sides[name] = (values.astype(np.int64), shares)
    values, shares = held
    if not len(values) or not shares[-1] > 0:
        return np.zeros(count, dtype=np.int64)
    bins = np.searchsorted(shares, rng.random(count) * shares[-1], side="right")
    drawn: Ints = values[np.minimum(bins, len(values) - 1)]
    return drawn
