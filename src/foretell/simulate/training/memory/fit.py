"""What would fit: the largest micro-batch of a plan, and the least changes that make a plan fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.errors import InfeasibleError
from foretell.hardware.cluster import Cluster
from foretell.hardware.device import Device
from foretell.simulate.training.legality import divisors, legal
from foretell.simulate.training.memory.table import by_rank, memory
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.units import format_bytes
from foretell.workload.llm.config import LLMConfig

__all__ = ["Repair", "largest_micro_batch", "over_capacity", "repairs"]


@dataclass(frozen=True, slots=True)
class Repair:
    """A plan that fits, `changes` in words (``pp 8``), and the peak of its fullest device."""

    changes: str
    plan: TrainingPlan
    peak_bytes: float


def _smallest(cluster: Cluster) -> Device:
    """The device with the least memory: a plan is to fit on each."""
    devices = [node.device for _, node in cluster.groups]
    return min(devices, key=lambda device: float("inf") if device.memory_bytes is None else device.memory_bytes)


def largest_micro_batch(config: LLMConfig, plan: TrainingPlan, cluster: Cluster, share: float = 1.0) -> int:
    """The largest micro-batch with which `plan` fits `share` of every device's memory, and keeps the rules it keeps.

    Raises InfeasibleError where not even one sequence at a time does, saying what would.
    """
    sizes = divisors(plan.global_batch // plan.dp if plan.global_batch % plan.dp == 0 else 1)
    table = PlanTable.of([plan.replace(micro_batch=int(size)) for size in sizes])
    table = table.take(legal(config, table, cluster)) if legal(config, PlanTable.of([plan]), cluster)[0] else table
    fitting = table["micro_batch"][memory(config, table, _smallest(cluster)).fits(share)]
    if not len(fitting):
        what = over_capacity(config, plan.replace(micro_batch=1), cluster, share)
        raise InfeasibleError(f"even one sequence at a time does not fit: {what}")
    return int(fitting.max())


def over_capacity(config: LLMConfig, plan: TrainingPlan, cluster: Cluster, share: float = 1.0) -> str:
    """By how much a plan misses a device's memory and what would fit, in a sentence; empty where it fits."""
    device = _smallest(cluster)
    found = memory(config, PlanTable.of([plan]), device)
    if found.fits(share)[0] or device.memory_bytes is None:
        return ""
    peak, room = float(found.peak_bytes[0]), share * device.memory_bytes
    ways = [f"{repair.changes} ({format_bytes(repair.peak_bytes)})" for repair in repairs(config, plan, cluster, share)]
    would = f"{' or '.join(ways)} would fit" if ways else "no change of its degrees, recomputation or batch would do"
    if not ways:
        alone = by_rank(config, plan.replace(tp=1, pp=1, cp=1, dp=1, ep=1, vp=1, first_layers=0, last_layers=0), device)
        states = sum(float(alone[part][0]) for part in ("parameters", "gradients", "optimizer"))
        would += f"; its parameters, gradients and optimiser state alone fill {math.ceil(states / room):,} such devices"
    return (f"{plan} takes {format_bytes(peak)} of {format_bytes(room)} on {device.title}, "
            f"{format_bytes(peak - room)} too many; {would}")  # fmt: skip


def repairs(
    config: LLMConfig, plan: TrainingPlan, cluster: Cluster, share: float = 1.0, most: int = 3
) -> tuple[Repair, ...]:
    """At most `most` ways to make `plan` fit `share` of every device's memory: of one change each where one is enough,
    else of two, then of three. What costs least comes first: sharding, then smaller micro-batches, other degrees on
    the same devices, and recomputation. Of several steps in one direction the shortest is given. Empty where nothing
    helps; one Repair without changes where the plan fits as it is.
    """
    device = _smallest(cluster)
    found = memory(config, PlanTable.of([plan]), device)
    if found.fits(share)[0]:
        return (Repair("", plan, float(found.peak_bytes[0])),)
    kept = legal(config, PlanTable.of([plan]), cluster)[0]
    ladders = [steps for steps in _ladders(config, plan) if steps]
    for count in (1, 2, 3):
        tried: list[tuple[tuple[int, ...], str, dict[str, Any]]] = []
        for chosen in itertools.combinations(range(len(ladders)), count):
            for steps in itertools.product(*(ladders[i] for i in chosen)):
                changes: dict[str, Any] = {}
                factor = 1
                for step in steps:
                    factor *= step.get("dp", 1)
                    changes |= {name: value for name, value in step.items() if name != "dp"}
                if plan.dp % factor:
                    continue
                words = ", ".join(_words(step) for step in steps)
                tried.append((chosen, words, changes | {"dp": plan.dp // factor}))
        if not tried:
            continue
        table = PlanTable.of([plan.replace(**changes) for _, _, changes in tried])
        able = legal(config, table, cluster) if kept else np.ones(len(table), dtype=bool)
        result = memory(config, table, device)
        ways: dict[tuple[int, ...], Repair] = {}
        for row in np.flatnonzero(able & result.fits(share)):
            chosen, words, _ = tried[row]
            ways.setdefault(chosen, Repair(words, table.plan(int(row)), float(result.peak_bytes[row])))
        if ways:
            return tuple(ways.values())[:most]
    return ()


def _words(step: dict[str, Any]) -> str:
    names = {"micro_batch": "micro-batch", "recompute": "recomputation"}
    return ", ".join(
        f"{value} {names[name]}" if name == "recompute" else f"{names.get(name, name)} {value}"
        for name, value in step.items() if name not in ("dp", "schedule")
    )  # fmt: skip


def _ladders(config: LLMConfig, plan: TrainingPlan) -> Iterator[list[dict[str, Any]]]:
    """Directions in which a plan can be changed, each as steps from the shortest on. ``dp`` is what a step divides the
    data-parallel ranks by, so that the devices stay as many."""
    yield [{"zero": level} for level in range(plan.zero + 1, 4)]
    yield [{"ep": plan.ep * k} for k in _powers(plan.dp * plan.cp // plan.ep)] if config.moe is not None else []
    yield [{"micro_batch": int(size)} for size in divisors(plan.micro_batch)[::-1] if size < plan.micro_batch]
    yield [{"pp": plan.pp * k, "dp": k} for k in _powers(plan.dp)]
    yield [{"tp": plan.tp * k, "dp": k} for k in _powers(plan.dp)]
    yield [{"cp": plan.cp * k, "dp": k} for k in _powers(plan.dp)]
    level = ("none", "selective", "full").index(plan.recompute)
    yield [{"recompute": name} for name in ("selective", "full")[level:]]


def _powers(most: int) -> list[int]:
    return [2**i for i in range(1, max(1, most).bit_length())]
