"""Plans for serving, for reading: the mix of GPUs, what single types would take, the front, replicas by hour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foretell.plan.serving.autoscale import Scaling
from foretell.plan.serving.division import division
from foretell.plan.serving.pareto import Point
from foretell.plan.serving.search import Answer, Unit
from foretell.plan.serving.space import label
from foretell.plan.serving.steady import slo_text
from foretell.plan.serving.why import amount, percent, sequences, why
from foretell.report.text import UNKNOWN, Flow, add_row, count, rate, share
from foretell.units import format_bytes, format_count, format_money, format_power, format_time

__all__ = ["Columns", "notes_of", "scaling_view", "serving_plan_view"]

_FRONT = 10  # points of the front that are shown
_LEAST_LABEL = 24  # cells that the first column keeps
_HEADINGS = {"cost": "$/h", "gpus": "GPUs", "energy": "power"}


class Columns:
    """A table whose first column wraps and whose others are never cut: those that do not fit are left out, and
    named.
    """

    def __init__(
        self, first: str, labels: Sequence[str], columns: Mapping[str, Sequence[str]], dispensable: Sequence[str]
    ) -> None:
        self.first = first
        self.labels = labels
        self.columns = columns
        self.dispensable = dispensable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gap = 2 if options.max_width >= 100 else 1
        width = {name: max(len(name), *map(len, cells)) for name, cells in self.columns.items()}
        widest = max(len(self.first), *map(len, self.labels))
        left_out = []
        for name in self.dispensable:
            if options.max_width - sum(w + gap for w in width.values()) >= min(widest, _LEAST_LABEL):
                break
            if width.pop(name, None) is not None:
                left_out.append(name)
        room = options.max_width - sum(w + gap for w in width.values())
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        table.add_column(self.first, width=max(min(widest, room), 4), overflow="fold")
        for name in width:
            table.add_column(name, justify="right", no_wrap=True, min_width=width[name])
        for i, text in enumerate(self.labels):
            add_row(table, text, *(self.columns[name][i] for name in width))
        yield table
        if left_out:
            named = " and ".join([", ".join(left_out[:-1]), left_out[-1]] if left_out[1:] else left_out)
            yield Text(f"{named} left out for want of width; --json has all", style="dim")


def serving_plan_view(
    found: Answer, scaling: Sequence[tuple[str, Scaling]] = (), settings: Sequence[str] = ()
) -> RenderableType:
    """The whole of an answer. `scaling` has each option's replicas over time, by its name."""
    inputs = float(found.load.rate @ found.load.input_tokens) / found.rate
    outputs = float(found.load.rate @ found.load.output_tokens) / found.rate
    skipped = sum(found.requests.skipped.values())
    lines: list[RenderableType] = [
        Text(f"serving llm:{found.config.name}", style="bold"),
        Flow(
            f"{format_count(found.config.parameters)} parameters",
            f"{rate(found.rate)} request{'' if rate(found.rate) == '1' else 's'}/s",
            f"{inputs:,.0f} tokens in, {outputs:,.0f} out on average",
            f"{slo_text(found.slo)} for {percent(found.attainment)}" if found.slo.limits else "no latency limit",
            *settings,
        ),
        Flow(
            f"{count(len(found.requests), 'request')} in {count(len(found.load), 'size')}",
            f"{count(skipped, 'row')} skipped ({_listed(found.requests.skipped)})" if skipped else None,
            *(f"{count(number, 'request')} refused: {reason}" for reason, number in found.refused.items()),
            f"{count(found.tried, 'plan')} tried, {count(found.simulated, 'simulation')}"
            + (f", {found.reused} results from the file" if found.reused else ""),
            f"least {found.objective}",
        ),
        *(Text(f"{found.requests.about['trace']}: {said}") for said in _reading(found.requests.about)),
        Text(""),
        _units(found),
        _total(found),
    ]
    if found.attained is None:
        lines.append(Text(_unchecked(found)))
    if len(found.units) > 1:
        lines += [Text(""), Text("Who serves which sizes", style="bold"), *_divided(found)]
    if len(found.singles) > 1:
        lines += [Text(""), Text("One GPU type alone", style="bold"), _singles(found)]
    if len(found.front) > 1:
        heading = "Pareto front of throughput against speed, without limits"
        lines += [Text(""), Text(heading, style="bold"), _front(found.front)]
    advised = [_memory(unit) for unit in found.units if unit.advice is not None]
    if advised:
        lines += [Text(""), Text("Memory", style="bold"), *advised]
    for name, one in scaling:
        lines += [Text(""), Text(f"Over time: {name}", style="bold"), scaling_view(one)]
    lines += [Text(""), Text("Why", style="bold"), *(Text(line) for line in why(found))]
    lines += [Text(""), Text(notes_of(found), style="dim")]
    return Group(*lines)


def _reading(about: Mapping[str, str]) -> Iterator[str]:
    """What was done to a trace to read it, where anything was."""
    if "trace" in about:
        yield from (about[name] for name in ("part", "cut", "scale", "order", "lengths", "prefixes") if name in about)


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())


def _names(units: Sequence[Unit]) -> list[str]:
    """What each kind of unit is called; token budget and sequences stand under Why, and here would take the room of a
    figure.
    """
    short = [f"{u.option.gpu} {label(u.option.plan, sizes=False)}" for u in units]
    return [f"{u.count}x {name if short.count(name) == 1 else u.option.name}"
            for u, name in zip(units, short, strict=True)]  # fmt: skip


def _units(found: Answer) -> Columns:
    """Who serves how much of the load, how full they are, what a million tokens cost where they are full, and what the
    simulator found.
    """
    units = found.units
    columns = {
        "GPUs": [str(u.count * u.option.devices) for u in units],
        "requests/s": [rate(u.requests_per_s) for u in units],
        "full": [share(u.work / u.count) for u in units],
        "batch": [sequences(u.batch) for u in units],
        "$/h": [UNKNOWN if u.option.usd_per_h is None else f"{u.count * u.option.usd_per_h:,.2f}" for u in units],
        "$/M tokens": ["?" if u.usd_per_million is None else f"{u.usd_per_million:.3g}" for u in units],
    }
    if any(u.checked is not None for u in units):
        columns |= {
            "TTFT p99": [_time(u, "ttft_p99_s") for u in units],
            "TPOT p99": [_time(u, "tpot_p99_s") for u in units],
            "in SLO": ["–" if u.checked is None else _attained(u.checked["attainment"]) for u in units],
        }
    if found.objective == "energy":
        columns["power"] = [_power(None if u.option.power_w is None else u.count * u.option.power_w) for u in units]
    # What has a limit stays longest.
    limited = [name for key, name in (("ttft", "TTFT p99"), ("tpot", "TPOT p99")) if key in found.slo.limits]
    free = [name for name in ("TPOT p99", "TTFT p99") if name not in limited]
    dispensable = ["batch", *free, "full", "requests/s", "GPUs", "$/M tokens", *limited]
    return Columns("units", _names(units), columns, dispensable)


def _divided(found: Answer) -> Iterator[RenderableType]:
    """The share of each size of requests that each kind of unit but the last serves."""
    names = _names(found.units)
    *some, last = names
    predicted = False
    for unit, name in zip(found.units, some, strict=False):
        rule = division(found.load, found.shares(unit))
        if rule.shares.size == 1:
            yield Text(f"{name} serves {percent(rule.shares.item())} of the requests of every size.")
            continue
        yield Text(f"Of each size {name} serves this share{'' if len(some) > 1 else f', {last} the rest'}:")
        columns = {
            _upto(rule.outputs, j): ["–" if np.isnan(value) else percent(value) for value in rule.shares[:, j].tolist()]
            for j in range(len(rule.outputs))
        }
        rows = [f"{_upto(rule.inputs, i)} in" for i in range(len(rule.inputs))]
        yield Columns("tokens out:", rows, columns, list(reversed(columns)))
        predicted = predicted or len(rule.outputs) > 1
    if len(some) > 1:
        yield Text(f"{last} serves the rest.")
    if predicted:
        yield Text("How many tokens come out, a router has to predict.", style="dim")


def _upto(ends: Sequence[float], at: int) -> str:
    """A range of tokens between these ends, in order."""
    if np.isfinite(ends[at]):
        return f"≤ {ends[at]:,.0f}"
    return f"> {ends[at - 1]:,.0f}" if at else "any"


def _within(found: Answer) -> str:
    assert found.attained is not None
    assert found.attained_within is not None
    if not found.slo.limits:
        return "keeps up when simulated"
    low, high = found.attained_within
    ends = f"{_attained(low).removesuffix(' %')}–{_attained(high)}"
    close = f": close to {percent(found.attainment)}" if found.close else ""
    return f"{_attained(found.attained)} within the SLO when simulated ({ends}){close}"


def _unchecked(found: Answer) -> str:
    """What to think of a plan of which not everything was simulated."""
    what = "Not all of it" if any(unit.checked is not None for unit in found.units) else "Nothing"
    fails = "fail the SLO" if found.slo.limits else "fall behind"
    return f"{what} was simulated: a plan by the closed form alone can {fails} in simulation."


def _attained(value: float) -> str:
    """A share of requests within the limits: near a goal tenths of a per cent decide."""
    return "100 %" if value == 1.0 else f"{min(value, 0.999):.1%}".replace("%", " %")


def _time(unit: Unit, name: str) -> str:
    """What the simulator found; "–" where nothing was simulated."""
    if unit.checked is None or unit.checked[name] is None or not np.isfinite(unit.checked[name]):
        return "–"
    return format_time(float(unit.checked[name]))


def _power(watts: float | None) -> str:
    return UNKNOWN if watts is None else format_power(watts)


def _total(found: Answer) -> RenderableType:
    usd, tokens = found.usd_per_h, found.load.tokens_per_s
    return Flow(
        Text(count(found.devices, "GPU"), style="bold"),
        None if usd is None else f"{format_money(usd)} an hour",
        None if usd is None else f"${usd / 3600 / tokens * 1e6:,.3g} for a million output tokens",
        None if found.power_w is None else f"{format_power(found.power_w)} when full (GPUs only)",
        None if found.attained is None else _within(found),
        None if found.mix.proven else "the solver ran out of time: a cheaper mix may exist",
    )


def _singles(found: Answer) -> RenderableType:
    known = [one for one in found.singles if one.cost is not None]
    lines: list[RenderableType] = []
    if known:
        columns = {
            "GPUs": [str(one.devices) for one in known],
            _HEADINGS[found.objective]: [_value(found.objective, one.cost or 0.0) for one in known],
            "the mix saves": [share(max(0.0, 1 - found.value / (one.cost or 1.0))) for one in known],
        }
        if found.slo.limits and any(one.attained is not None for one in known):
            columns["in SLO"] = ["–" if one.attained is None else _attained(one.attained) for one in known]
        labels = [f"{one.gpu}: " + ", ".join(f"{n}x {plan}" for plan, n in one.counts) for one in known]
        lines.append(Columns("GPU type", labels, columns, ("in SLO",)))
    lines += [Text(f"{one.gpu} does not: {one.reason}") for one in found.singles if one.cost is None]
    return Group(*lines)


def _value(objective: str, value: float) -> str:
    """What a column headed by the objective holds."""
    if objective == "energy":
        return format_power(value)
    return amount(objective, value).split(" ")[0]


def _front(points: Sequence[Point]) -> RenderableType:
    shown = list(points)
    if len(points) > _FRONT:
        shown = [points[round(i * (len(points) - 1) / (_FRONT - 1))] for i in range(_FRONT)]
    columns = {
        "tokens/s/GPU": [rate(p.tokens_per_s_per_gpu) for p in shown],
        "tokens/s/user": [rate(p.tokens_per_s_per_user) for p in shown],
        "batch": [f"{p.batch:,.0f}" for p in shown],
        "TTFT": [format_time(p.ttft_s) for p in shown],
    }
    table = Columns("plan", [f"{p.gpu} {label(p.plan)}" for p in shown], columns, ("TTFT", "batch"))
    left = len(points) - len(shown)
    return Group(table, Text(f"{left} more between these; --json has all", style="dim")) if left else table


def _memory(unit: Unit) -> RenderableType:
    a = unit.advice
    assert a is not None
    kept = share(a.rate / a.best_rate)
    more = (f"; {a.replicas} replicas on one GPU then serve {percent(a.gain, 0)} more" if a.replicas > 1
            else "; a second replica beside it would add nothing" if a.fitting > 1
            else "; a second replica does not fit beside it")  # fmt: skip
    return Text(
        f"{unit.option.gpu}: batch {a.batch:,} in {format_bytes(a.kv_bytes)} of KV cache keeps {kept} of the best"
        f" throughput, {share(max(0.0, a.saved))} of the cache is free{more}."
    )


def scaling_view(found: Scaling) -> RenderableType:
    """Replicas by hour, and what scaling saves."""
    hours = found.hourly()
    columns = {
        "requests/s": [rate(h["requests_per_s"]) for h in hours],
        "replicas": [str(h["most"]) if h["fewest"] == h["most"] else f"{h['fewest']}–{h['most']}" for h in hours],
        "paid": [f"{h['replica_hours']:,.2f} h" for h in hours],
        "cost": ["?" if h["cost_usd"] is None else f"${h['cost_usd']:,.2f}" for h in hours],
    }
    usd = found.usd_per_h
    fixed = int(found.needed.max())
    return Group(
        Columns("hour", [str(h["hour"]) for h in hours], columns, ("paid",)),
        Flow(
            f"{found.replica_hours:,.1f} replica-hours",
            None if usd is None else f"{format_money(usd * found.replica_hours)}",
            f"{count(fixed, 'replica')} throughout: {found.fixed_hours:,.1f} replica-hours"
            + ("" if usd is None else f", {format_money(usd * found.fixed_hours)}"),
            f"{share(max(0.0, found.saved))} saved",
            f"{share(found.beyond)} of the requests arrive beyond what serves" if found.beyond > 0 else None,
        ),
    )


def _notes(found: Answer) -> Iterator[str]:
    if found.attained is None:
        yield "Rates are of a closed form of the mean iteration"
    else:
        yield "What each unit holds up is corrected by simulation, and the mix was simulated with the requests it gets"
        yield "shares within the SLO have 95 % intervals, of requests that are not independent of each other"
        if found.close:
            yield "the goal lies in that interval after all that is simulated at most, so the share itself decided"
        if found.attained < found.attainment:
            yield (f"after {found.rounds} rounds only {_attained(found.attained)} of the requests are within the SLO:"
                   " take more, or loosen it")  # fmt: skip
    yield "prices unknown" if found.usd_per_h is None else "prices are the catalogue's on-demand prices unless given"


def notes_of(found: Answer) -> str:
    """What holds for every figure."""
    return "; ".join(_notes(found)) + "."
