"""Requests from traces, arrivals and lengths: replayed, sped up, drawn, or all at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from foretell.errors import InputError
from foretell.simulate.serving.given import instance, number, whole
from foretell.simulate.serving.requests import LATEST_S, Requests
from foretell.simulate.serving.workloads.arrivals import arrivals
from foretell.simulate.serving.workloads.family import MOST_REQUESTS, Trace
from foretell.simulate.serving.workloads.lengths import Lengths

__all__ = ["MOST_REQUESTS", "faster", "offline", "relengthed", "replayed", "synthetic"]


def replayed(trace: Trace, *, rate: float | None = None, process: str = "poisson", seed: int = 0) -> Requests:
    """A trace's requests: at its own times, or with `rate` at times drawn anew from `process`.

    Raises InputError where it has no times and no `rate` is given.
    """
    at = trace.arrival_s
    about = dict(trace.about)
    if rate is not None:
        at = arrivals(process, rate, len(trace), np.random.default_rng(seed))
        about["arrivals"] = f"{process} at {rate:g} requests/s, seed {seed}"
    if at is None:
        raise InputError("the trace has no times", about.get("trace"), "give --rate, --concurrency or --offline")
    return Requests.of(
        at, trace.input_tokens, trace.output_tokens, trace.prefix, trace.prefix_tokens,
        about=about, skipped=trace.skipped, row=trace.row,
    )  # fmt: skip


def faster(trace: Trace, scale: str) -> Trace:
    """A trace sped up in time: ``2x`` halves all gaps, ``10/s`` makes that its mean rate.

    Raises InputError for another text, or a trace without times.
    """
    repair = "write e.g. 2x (twice as fast) or 10/s (to that mean rate)"
    if trace.arrival_s is None:
        raise InputError("the trace has no times to scale", "--scale", "give --rate instead")
    span = float(trace.arrival_s[-1] - trace.arrival_s[0])
    text = scale.strip()
    try:
        value = float(text.removesuffix("x") if text.endswith("x") else text.removesuffix("/s"))
    except ValueError:
        value = float("nan")
    if not text.endswith(("x", "/s")) or not 0 < value < 1e9:
        raise InputError(f"{scale[:40]!r} is no scale", "--scale", repair)
    factor = value
    if text.endswith("/s"):
        if span <= 0:
            raise InputError("all requests arrive at once: there is no rate", "--scale", "give --rate instead")
        factor = value / ((len(trace) - 1) / span)
    about = MappingProxyType({**trace.about, "scale": f"{factor:.4g} times as fast"})
    return replace(trace, arrival_s=trace.arrival_s / factor, about=about)


def relengthed(trace: Trace, lengths: Lengths, seed: int = 0) -> Trace:
    """A trace's times with other lengths; nothing is shared between its prompts."""
    asked, answered = lengths.draw(len(trace), np.random.default_rng(seed))
    nothing = np.zeros(len(trace), dtype=np.int64)
    return replace(
        trace, input_tokens=asked, output_tokens=answered, prefix=nothing, prefix_tokens=nothing,
        about=MappingProxyType({**trace.about, "lengths": lengths.about}),
    )  # fmt: skip


def synthetic(
    lengths: Lengths, *, rate: float, count: int | None = None, duration_s: float | None = None,
    process: str = "poisson", seed: int = 0,
) -> Requests:  # fmt: skip
    """Requests drawn at `rate` a second: `count` of them, or those of `duration_s`."""
    instance(lengths, Lengths, "lengths", "requests", "Lengths, or parse_lengths(isl, osl)")
    rng = np.random.default_rng(whole(seed, "seed", "requests"))
    number(rate, "rate", "--rate", above=True, most=1e9)
    if duration_s is not None:
        number(duration_s, "duration_s", "--duration", most=LATEST_S)
    if count is None:
        if duration_s is None:
            raise InputError("neither how many nor for how long", "requests", "give --num-requests or --duration")
        count = int(rate * duration_s + 8.0 * np.sqrt(rate * duration_s)) + 16
        _few(count)
        at = arrivals(process, rate, count, rng)
        while at[-1] < duration_s:  # bursty: fewer came by then than were drawn
            count *= 2
            _few(count)
            at = arrivals(process, rate, count, np.random.default_rng(seed))
        at = at[at < duration_s]
        if not len(at):
            raise InputError(f"no request arrives in {duration_s:g} s at {rate:g} requests/s", "--duration")
    else:
        _few(count)
        at = arrivals(process, rate, count, rng)
        if duration_s is not None:
            at = at[at < duration_s]
    about = {"arrivals": f"{process} at {rate:g} requests/s", **_about(lengths, seed)}
    return Requests.of(at, *lengths.draw(len(at), rng), about=about)


def offline(source: Trace | Lengths, count: int = 1000, seed: int = 0) -> Requests:
    """Requests that are all there at time 0: a trace's, or `count` of drawn lengths."""
    if isinstance(source, Trace):
        return replayed(replace(source, arrival_s=np.zeros(len(source))))
    instance(source, Lengths, "source", "requests", "a trace, or Lengths")
    _few(count)
    whole(seed, "seed", "requests")
    return Requests.of(0.0, *source.draw(count, np.random.default_rng(seed)), about=_about(source, seed))


def _about(lengths: Lengths, seed: int) -> Mapping[str, str]:
    return {"lengths": lengths.about, "seed": str(seed)}


def _few(count: int) -> None:
    whole(count, "the number of requests", "--num-requests", least=1, most=MOST_REQUESTS)
