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

__all__ = ["BOUND", "amount", "differences", "rival", "why"]

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
        yield _binding(unit.option, found)
        other = rival(unit, found)
        if other is not None:
            yield other


def _mix(found: Answer) -> Iterator[str]:
    single = found.best_single()
    mine = amount(found.objective, found.value)
    take = "takes" if sum(u.count for u in found.units) == 1 else "take"
    said = " and ".join(f"{u.count}x {u.option.gpu} ({label(u.option.plan)})" for u in found.units)
    if single is None or single.cost is None:
        yield f"{said} {take} {mine}; no single GPU type serves everything within {slo_text(found.slo)}."
        return
    kinds = {u.option.gpu for u in found.units}
    saved = 1.0 - found.value / single.cost
    if kinds == {single.gpu} or saved < _SMALL:
        others = [s for s in found.singles if s.cost is not None and s.gpu not in kinds]
        if not others:
            yield f"{said} {take} {mine}; no other GPU type of those asked for serves everything within the limits."
            return
        second = min(others, key=lambda s: s.cost or 0.0)
        less = 1.0 - found.value / (second.cost or 1.0)
        than = f"{less:.0%} less than {second.gpu} alone would, the next best" if less >= _SMALL else "the least found"
        yield f"{said} {take} {mine}, {than}; no mix of types takes less."
        return
    other = f"{single.gpu} ({amount(found.objective, single.cost)})"
    yield f"{said} {take} {mine}, {saved:.0%} less than the best single type, {other}."
    for unit in found.units:
        yield f"{unit.option.gpu} serves {unit.requests_per_s / found.rate:.0%} of the requests: {unit.serves}."


def _binding(option: Option, found: Answer) -> str:
    batch = f"{option.gpu}: {option.batch:,.0f} sequences at a time"
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
    text = f"{batch}, as {limits[option.limit]}"
    if option.bound:
        parts = sorted(option.parts.items(), key=lambda part: -part[1])[:2]
        shares = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in parts)
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
        start = f"On {mine.gpu}, {label(other.plan)} would take {-more:.0%} less a request when full, but"
        if other.cost(found.objective) > found.value:  # one unit alone takes more than all that was chosen
            return f"{start} a unit of it serves {other.rate:,.3g} requests/s and {found.rate:,.3g} are asked for."
        if label(other.plan) in found.failed.get(other.gpu, ()):
            return f"{start} too few of its requests keep the limits when simulated."
        return f"{start} not in whole units, or as it holds up when simulated."
    if more < _SMALL:
        return f"On {mine.gpu}, {label(other.plan)} takes as much a request, within {_SMALL:.1%}."
    reason = ""
    if other.parts and mine.parts:
        grown = {n: other.parts.get(n, 0.0) * other.tpot_s - mine.parts.get(n, 0.0) * mine.tpot_s for n in other.parts}
        name = max(grown, key=lambda n: grown[n])
        if grown[name] > 0:
            reason = f": its iterations spend {1e3 * grown[name]:.3g} ms more on {name.replace('_', ' ')}"
    return f"{label(mine.plan)} beats {label(other.plan)} there, which takes {more:.0%} more a request{reason}."
