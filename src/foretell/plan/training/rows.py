"""`Rows`: plans with what was found of each, as columns; `evaluate` finds it for one part of a space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost.energy import power_of
from foretell.errors import InputError
from foretell.hardware.cluster import Cluster
from foretell.plan.training.space import Space
from foretell.simulate.training.memory import memory
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.simulate.training.step import PARTS, steps
from foretell.workload.llm.config import LLMConfig

__all__ = ["VALUES", "Part", "Rows", "budget_bytes", "evaluate", "hourly_price", "leanest", "needed_bytes", "timed"]

Floats = npt.NDArray[np.float64]

#: What is found of a plan: machines used; seconds of a step and its parts; communication that compute hides; bytes
#: in use on the fullest device; model FLOP on a device and its peak; joules and dollars of a step (NaN: unknown).
VALUES = (
    *("nodes", "time_s", *PARTS, "hidden_s", "memory_bytes", "flops_per_device", "peak_flops_per_s"),
    *("energy_j", "cost_usd"),
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Plans and their `VALUES`, one a row."""

    plans: PlanTable
    values: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.values["time_s"])

    def __getitem__(self, name: str) -> Floats:
        return self.values[name]

    def take(self, rows: npt.ArrayLike) -> Rows:
        """Some of the rows."""
        index = np.asarray(rows)
        return Rows(self.plans.take(index), MappingProxyType({n: v[index] for n, v in self.values.items()}))

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only views of mappings cannot be pickled, and rows come from other processes.
        return _rebuilt, (dict(self.plans.columns), dict(self.values))

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """All rows in order; none of no parts."""
        if not parts:
            empty = PlanTable.of([TrainingPlan(1, 1)]).take(np.zeros(1, dtype=bool))
            return Rows(empty, MappingProxyType({name: np.zeros(0) for name in VALUES}))
        plans = PlanTable.concatenate([part.plans for part in parts])
        values = {name: np.concatenate([part.values[name] for part in parts]) for name in VALUES}
        return Rows(plans, MappingProxyType(values))


def _rebuilt(plans: dict[str, Any], values: dict[str, Floats]) -> Rows:
    return Rows(PlanTable(MappingProxyType(plans)), MappingProxyType(values))


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of a space holds: `legal` plans, the `rows` of those that fit, and the one that needs least memory
    (None where no plan is legal)."""

    index: int
    legal: int
    rows: Rows
    least_bytes: float = np.inf
    leanest: TrainingPlan | None = None


def budget_bytes(cluster: Cluster, max_memory: float) -> float:
    """Bytes of a device that a plan may take: a share of the smallest device's memory. Raises InputError if unknown."""
    sizes = []
    for _, node in cluster.groups:
        if node.device.memory_bytes is None:
            raise InputError("its memory is not in the catalogue", node.device.name, "name another device")
        sizes.append(node.device.memory_bytes)
    return max_memory * min(sizes)


def hourly_price(cluster: Cluster) -> float | None:
    """Dollars an hour of all machines: of each as a whole, else of its devices; None where that is not known."""
    total = 0.0
    for count, node in cluster.groups:
        each = node.price_usd_per_h
        if each is None and node.device.price_usd_per_h is not None:
            each = node.count * node.device.price_usd_per_h
        if each is None:
            return None
        total += count * each
    return total


def evaluate(space: Space, index: int, budget: float) -> Part:
    """Memory of every legal plan of a part, and time, energy and cost of those within `budget` bytes."""
    table, nodes = space.block(index)
    if not len(table):
        return Part(index, 0, Rows.concatenate([]))
    needed = needed_bytes(space.config, table, space.cluster)
    least = int(np.argmin(needed))
    fits = needed <= budget
    parts = []
    for count in np.unique(nodes[fits]):
        here = np.flatnonzero(fits & (nodes == count))
        parts.append(timed(space.config, table.take(here), space.on(int(count)), needed[here]))
    return Part(index, len(table), Rows.concatenate(parts), float(needed[least]), table.plan(least))


def needed_bytes(config: LLMConfig, table: PlanTable, cluster: Cluster) -> Floats:
    """Bytes in use on the fullest device of each plan, those of the driver and of NCCL included."""
    return memory(config, table, cluster.groups[0][1].device).peak_bytes


def leanest(space: Space) -> tuple[float, TrainingPlan | None]:
    """The least memory that any legal plan of a space takes on its fullest device, and that plan."""
    best: tuple[float, TrainingPlan | None] = (np.inf, None)
    for index in range(space.blocks):
        table, _ = space.block(index)
        if len(table):
            needed = needed_bytes(space.config, table, space.cluster)
            row = int(np.argmin(needed))
            if needed[row] < best[0]:
                best = float(needed[row]), table.plan(row)
    return best


def timed(config: LLMConfig, table: PlanTable, cluster: Cluster, needed: Floats) -> Rows:
    """Time, energy and cost of plans on a cluster, beside the memory they need."""
    found = steps(config, table, cluster)
    time_s = found.time_s
    values = {name: np.asarray(getattr(found, name), dtype=np.float64) for name in PARTS}
    values |= {
        "nodes": np.full(len(table), float(cluster.node_count)),
        "time_s": time_s,
        "hidden_s": found.hidden_s,
        "memory_bytes": needed,
        "flops_per_device": found.flops_per_device,
        "peak_flops_per_s": found.peak_flops_per_s,
        "energy_j": energy(cluster, time_s, values["compute_s"] + values["recompute_s"] + values["optimizer_s"]),
        "cost_usd": time_s * (_price(cluster) / 3600.0),
    }
    return Rows(table, MappingProxyType({name: values[name] for name in VALUES}))


@lru_cache(maxsize=256)
def _price(cluster: Cluster) -> float:
    price = hourly_price(cluster)
    return np.nan if price is None else price


def energy(cluster: Cluster, time_s: Floats, busy_s: Floats) -> Floats:
    """Joules that all devices of a cluster take in `time_s`; NaN where the data sheet has no power.

    A device draws its power limit while it computes (dense products do, which the power model's constants are drawn
    from, `foretell.cost.energy`), and idle power and leakage while it waits. Hosts, network and cooling are left out.
    """
    total = np.zeros_like(time_s)
    for count, node in cluster.groups:
        power = power_of(node.device)
        if power is None:
            return np.full_like(time_s, np.nan)
        waiting = power.idle_w + power.leakage_w
        total += count * node.count * (busy_s * power.limit_w + (time_s - busy_s) * min(waiting, power.limit_w))
    return total
