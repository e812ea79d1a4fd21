"""Why a serving plan is the best found: what binds each of its options, and what the others lose by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from foretell.plan.serving.space import label, shape
from foretell.plan.serving.steady import slo_text
from foretell.simulate.serving import ServingPlan

if TYPE_CHECKING:
    from foretell.plan.serving.options import Option
    from foretell.plan.serving.search import Answer, Unit

__all__ = ["BOUND", "amount", "differences", "percent", "rival", "sequences", "why"]

#: What an iteration's time goes to, in words.
BOUND: Mapping[str, str] = {
    "bandwidth": "memory bandwidth", "compute": "arithmetic", "network": "the network between GPUs", "host": "the host",
}  # fmt: skip
_UNITS = {"cost": "${:,.2f} an hour", "gpus": "{:,.0f} GPUs", "energy": "{:,.0f} W"}
_SMALL = 0.005


def amount(objective: str, value: float) -> str:
    """A value of the objective with its unit."""
    text = _UNITS[objective].format(value)
    return text[:-1] if text == "1 GPUs" else text


def percent(value: float, digits: int | None = None) -> str:
    """A share as per cent: as it was given, or with so many `digits` after the point.

    >>> percent(0.9), percent(0.995), percent(0.23456, 0)
    ('90 %', '99.5 %', '23 %')
    """
    return f"{100.0 * value:.6g} %" if digits is None else f"{100.0 * value:,.{digits}f} %"


def sequences(batch: float) -> str:
    """How many sequences decode at a time, on average: where prompts take most of the time, not even one.

    >>> sequences(0.2), sequences(1.3), sequences(1234.5)
    ('< 1', '1', '1,234')
    """
    return "< 1" if batch < 0.95 else f"{batch:,.0f}"


def differences(plan: ServingPlan, other: ServingPlan) -> str:
    """The settings in which two plans differ, as ``tp 2 (1)``: the first plan's, and the other's in brackets."""
    mine, theirs = plan.to_dict(), other.to_dict()
    skip = {"replicas"} if plan.prefill_replicas or other.prefill_replicas else set()
    said = [f"{n} {mine[n]} ({theirs[n]})" for n in mine if mine[n] != theirs[n] and n not in skip]
    return ", ".join(said)


def why(found: Answer) -> Iterator[str]:
    """Sentences: the mix against single types, what binds each option, what its nearest rival loses by."""
    yield from _mix(found)
    for unit in found.units:
        yield _binding(unit, found)
        other = rival(unit, found)
        if other is not None:
            yield other


def _mix(found: Answer) -> Iterator[str]:
    single = found.best_single()
    take = "takes" if sum(u.count for u in found.units) == 1 else "take"
    units = " and ".join(f"{u.count}x {u.option.gpu} ({label(u.option.plan)})" for u in found.units)
    sure = found.attained is not None
    said = f"{'' if sure else 'By the closed form alone '}{units} {take} {amount(found.objective, found.value)}"
    limits = f" within {slo_text(found.slo)}" if found.slo.limits else ""
    kinds = {u.option.gpu for u in found.units}
    if len(found.surveys) == 1:
        yield f"{said}, the least found on {found.surveys[0].gpu}."
        return
    if single is None or single.cost is None:
        yield f"{said}; no single GPU type serves everything{limits}."
        return
    saved = 1.0 - found.value / single.cost
    if kinds == {single.gpu} or saved < _SMALL:
        rest = [s for s in found.singles if s.gpu not in kinds]
        if not rest:
            yield f"{said}, the least found."
            return
        others = [s for s in rest if s.cost is not None]
        if not others:
            yield f"{said}; no other GPU type of those asked for serves everything{limits}."
            return
        second = min(others, key=lambda s: s.cost or 0.0)
        less = 1.0 - found.value / (second.cost or 1.0)
        than = f"{percent(less, 0)} less than {second.gpu} alone would, the next best" if less >= _SMALL else (
            "the least found")  # fmt: skip
        yield f"{said}, {than}; no mix of types {'takes' if sure else 'would take'} less."
        return
    other = f"{single.gpu} ({amount(found.objective, single.cost)})"
    yield f"{said}, {percent(saved, 0)} less than the best single type, {other}."
    parts = [f"{_name(u, found)} {percent(u.requests_per_s / found.rate, 0)}" for u in found.units]
    yield f"Shares of the requests: {', '.join(parts)}."


def _name(unit: Unit, found: Answer) -> str:
    """What a unit is called: its GPU type, and as much of its plan as tells it from others of that type."""
    mine, others = unit.option, [u.option for u in found.units if u is not unit and u.option.gpu == unit.option.gpu]
    if not others:
        return mine.gpu
    short = label(mine.plan, sizes=False)
    alike = any(label(other.plan, sizes=False) == short for other in others)
    return mine.name if alike else f"{mine.gpu} {short}"


def _binding(unit: Unit, found: Answer) -> str:
    option = unit.option
    batch, most = sequences(unit.batch), sequences(option.batch)
    said = f"{_name(unit, found)}: {batch} sequence{'' if batch in ('1', '< 1') else 's'} at a time"
    if batch != most:
        said += f" when full; the closed form has up to {most}"
    given = {name: f"{1e3 * limit:,.6g} ms" for name, limit in found.slo.limits.items()}
    waits = "prompts would wait too long" + (f" for TTFT ≤ {given['ttft']}" if "ttft" in given else "")
    limits = {
        "tpot": f"more would take TPOT over {given.get('tpot', 'its limit')}",
        "ttft": f"with more, {waits}",
        "e2e": f"more would take requests over {given.get('e2e', 'their limit')} end to end",
        "kv": f"its KV cache ({option.kv_capacity_tokens:,.0f} tokens) holds no more",
        "max_num_seqs": f"max_num_seqs {option.plan.max_num_seqs} lets in no more",
        "gain": "more would not serve more requests",
    }
    text = f"{said}, as {limits[option.limit]}"
    if option.bound:
        parts = sorted(option.parts.items(), key=lambda part: -part[1])[:2]
        shares = ", ".join(f"{name.replace('_', ' ')} {percent(share, 0)}" for name, share in parts)
        text += f"; what binds an iteration is {BOUND.get(option.bound, option.bound)} (of its time {shares})"
    return text + "."


def rival(unit: Unit, found: Answer) -> str | None:
    """The cheapest plan on the same GPU type that differs in more than batch sizes, and what it loses by."""
    mine = unit.option
    all_ = [o for s in found.surveys if s.gpu == mine.gpu for o in s.options if shape(o.plan) != shape(mine.plan)]
    if not all_:
        return None

    def each(option: Option) -> float:
        return option.cost(found.objective) / option.rate

    other = min(all_, key=each)
    more = each(other) / each(mine) - 1.0
    if more < -_SMALL:
        start = f"On {mine.gpu}, {label(other.plan)} would take {percent(-more, 0)} less a request when full, but"
        if other.cost(found.objective) > found.value:  # one unit alone takes more than all that was chosen
            return f"{start} a unit of it serves {other.rate:,.3g} requests/s and {found.rate:,.3g} are asked for."
        if label(other.plan) in found.failed.get(other.gpu, ()):
            return f"{start} too few of its requests keep the limits when simulated."
        return f"{start} not in whole units, or as it holds up when simulated."
    if more < _SMALL:
        return f"On {mine.gpu}, {label(other.plan)} takes as much a request, within {percent(_SMALL)}."
    reason = ""
    if other.parts and mine.parts:
        grown = {n: other.parts.get(n, 0.0) * other.tpot_s - mine.parts.get(n, 0.0) * mine.tpot_s for n in other.parts}
        name = max(grown, key=lambda n: grown[n])
        if grown[name] > 0:
            reason = f": its iterations spend {1e3 * grown[name]:.3g} ms more on {name.replace('_', ' ')}"
    return f"{label(mine.plan)} beats {label(other.plan)} there, which takes {percent(more, 0)} more a request{reason}."
