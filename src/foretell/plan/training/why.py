"""Why one plan is faster than another: the difference of their steps, part by part, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foretell.simulate.training.plan import TrainingPlan
from foretell.units import format_bytes, format_energy, format_money, format_time

if TYPE_CHECKING:
    from foretell.plan.training.search import Candidate

__all__ = ["NAMES", "changes", "differences", "label", "step_text", "why"]

#: The parts of a step in words.
NAMES: Mapping[str, str] = {
    "compute_s": "computing",
    "recompute_s": "recomputing activations",
    "host_s": "waiting for the host",
    "tp_s": "tensor-parallel communication",
    "cp_s": "context-parallel communication",
    "ep_s": "expert-parallel communication",
    "pp_s": "sending between stages",
    "dp_s": "data-parallel communication",
    "bubble_s": "the pipeline's bubble",
    "optimizer_s": "updating weights",
}
_SETTINGS = {"micro_batch": "micro-batch", "shard": "shard", "recompute_layers": "recomputed layers"}
_SMALL = 0.002  # of the runner-up's step: less is not worth a word


def label(plan: TrainingPlan) -> str:
    """A plan in one line: degrees, micro-batch, sharding, recomputation, and what else is not the usual."""
    said = [str(plan)]
    if plan.pp > 1 and plan.schedule not in ("1f1b", "interleaved"):
        said.append(plan.schedule)
    if plan.shard:
        said.append(f"shard{plan.shard}")
    if plan.cp > 1 and plan.context_scheme != "ring":
        said.append(plan.context_scheme)
    if plan.ep > 1 and plan.dispatcher != "alltoall":
        said.append(plan.dispatcher)
    said += [f"{name}-overlap" for name in ("tp", "ep") if getattr(plan, f"overlap_{name}")]
    if plan.tp > 1 and not plan.sequence_parallel:
        said.append("no-sp")
    if plan.first_layers or plan.last_layers:
        said.append(f"ends{plan.first_layers or '–'}/{plan.last_layers or '–'}")
    if plan.cuda_graph:
        said.append("graphs")
    return " ".join(said)


def differences(winner: Candidate, other: Candidate) -> dict[str, float]:
    """Seconds by which each part of `other`'s step is longer; together what its step is longer by."""
    return {name: other.parts[name] - winner.parts[name] for name in winner.parts}


def changes(plan: TrainingPlan, other: TrainingPlan) -> str:
    """The settings in which two plans differ, as ``tp 8 (4)``: the first plan's, and the other's in brackets."""
    mine, theirs = plan.to_dict(), other.to_dict()
    said = [f"{_named(name)} {_word(mine[name])} ({_word(theirs[name])})"
            for name in mine if mine[name] != theirs[name]]  # fmt: skip
    return ", ".join(said)


def why(winner: Candidate, other: Candidate, objective: str = "time") -> tuple[str, ...]:
    """Why `winner` is before `other`, in sentences: what differs, what each part gains or costs, and memory."""
    gap = other.time_s - winner.time_s
    lines = [_head(winner, other, objective), f"They differ in {changes(winner.plan, other.plan) or 'machines only'}."]
    parts = sorted(differences(winner, other).items(), key=lambda item: -abs(item[1]))
    told = [(name, value) for name, value in parts if abs(value) > _SMALL * other.time_s]
    saved = [_part(name, value, winner, other) for name, value in told if value > 0]
    paid = [_part(name, value, winner, other) for name, value in told if value < 0]
    if saved:
        lines.append("It saves " + _listed(saved) + ".")
    if paid:
        lines.append(("In return it spends " if saved else "It spends ") + _listed(paid) + ".")
    rest = gap - sum(value for _, value in told)
    if told and abs(rest) > _SMALL * other.time_s:
        lines.append(f"Smaller parts make {format_time(abs(rest))} {'of it' if rest > 0 else 'less of it'}.")
    more = winner.memory_bytes - other.memory_bytes
    if abs(more) > 0.01 * other.memory_bytes:
        than = "more" if more > 0 else "less"
        lines.append(f"It takes {format_bytes(abs(more))} {than} memory on the fullest device.")
    return tuple(lines)


def _head(winner: Candidate, other: Candidate, objective: str) -> str:
    gap = (other.time_s - winner.time_s) / other.time_s
    slower = f"{_share(abs(gap))} {'faster' if gap > 0 else 'slower'}" if abs(gap) > 1e-4 else "as fast"
    times = "{} a step instead of {}".format(*_apart(winner.time_s, other.time_s))
    one, two = label(winner.plan), label(other.plan)
    if objective == "time":
        if slower == "as fast":
            return f"{one} is as fast as {two}, and before it for its memory."
        return f"{one} is {slower} than {two}: {times}."
    mine, theirs = winner.value(objective), other.value(objective)
    show = format_money if objective == "cost" else format_energy
    noun = "machine" if winner.nodes == 1 else "machines"
    machines = "" if winner.nodes == other.nodes else f", on {winner.nodes} {noun} instead of {other.nodes}"
    return (f"{one} takes {_share((theirs - mine) / theirs)} less {_WORDS[objective]} than {two}: "
            f"{show(mine)} a step instead of {show(theirs)}{machines}; it is {slower}: {times}.")  # fmt: skip


_WORDS = {"cost": "money", "energy": "energy"}


def _part(name: str, value: float, winner: Candidate, other: Candidate) -> str:
    """``1.2 s of the pipeline's bubble (0.3 s instead of 1.5 s: 64 micro-batches on 4 stages, not 16 on 8)``."""
    cause = _cause(name, winner.plan, other.plan)
    figures = "{} instead of {}".format(*_apart(winner.parts[name], other.parts[name]))
    return f"{format_time(abs(value))} of {NAMES[name]} ({figures}{': ' + cause if cause else ''})"


def _bubble(plan: TrainingPlan) -> str:
    chunks = f" of {plan.vp} chunks" if plan.vp > 1 else ""
    return f"{plan.micro_batches} micro-batches on {plan.pp} stages{chunks}"


def _recompute(plan: TrainingPlan) -> str:
    if plan.recompute == "full" and plan.recompute_layers:
        return f"{plan.recompute_layers} layers a rank"
    return {"none": "nothing", "selective": "attention's core", "full": "all layers"}[plan.recompute]


#: The settings that a part follows from.
_CAUSES = {
    "dp_s": ("dp", "cp", "zero", "shard"),
    "optimizer_s": ("tp", "pp", "dp", "zero", "shard"),
    "tp_s": ("tp", "overlap_tp"),
    "cp_s": ("cp", "context_scheme"),
    "ep_s": ("ep", "dispatcher", "overlap_ep"),
    "pp_s": ("pp", "vp"),
    "compute_s": ("tp", "cp", "dp", "micro_batch"),
    "host_s": ("pp", "micro_batch", "cuda_graph"),
}


def _cause(name: str, mine: TrainingPlan, theirs: TrainingPlan) -> str:
    """What in the plans a part follows from, where that differs."""
    if name in ("bubble_s", "recompute_s"):
        say = _bubble if name == "bubble_s" else _recompute
        return "" if say(mine) == say(theirs) else f"{say(mine)}, not {say(theirs)}"
    differ = [setting for setting in _CAUSES[name] if getattr(mine, setting) != getattr(theirs, setting)]
    return ", ".join(f"{_named(s)} {_word(getattr(mine, s))}, not {_word(getattr(theirs, s))}" for s in differ)


def step_text(seconds: float) -> str:
    """A step's time with three digits or more: minutes would hide what two plans differ by."""
    return f"{seconds:.1f} s" if 59.95 <= seconds < 3600.0 else format_time(seconds)


def _apart(one: float, two: float) -> tuple[str, str]:
    """Two times with as many digits as tell them apart.

    >>> _apart(17.96, 18.0), _apart(0.0, 0.5), _apart(7262.0, 7263.4)
    (('17.96 s', '18.00 s'), ('none', '500 ms'), ('7262 s', '7263 s'))
    """
    texts = tuple(step_text(value) if value else "none" for value in (one, two))
    if texts[0] != texts[1] or one == two:
        return texts[0], texts[1]
    unit, size = ("s", 1.0) if one >= 1.0 else ("ms", 1e-3) if one >= 1e-3 else ("µs", 1e-6)
    for digits in range(12):
        texts = tuple(f"{value / size:.{digits}f} {unit}" for value in (one, two))
        if texts[0] != texts[1]:
            break
    return texts[0], texts[1]


def _share(value: float) -> str:
    """Per cent, written as in the tables beside it: ``0.3 %``, ``49 %``."""
    percent = 100.0 * value
    return "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %" if percent < 9.95 else f"{percent:.0f} %"


def _named(setting: str) -> str:
    return _SETTINGS.get(setting, setting.replace("_", " "))


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
