"""Training on machines of several kinds: each kind gets as much of the work as it is fast, and its memory holds.

Two ways to share it out. With uneven *stages* one pipeline runs over all machines, and a stage of a faster kind holds
more layers. With uneven *batches* every kind holds whole replicas, and a replica of a faster kind takes more
micro-batches. Either way the step is that of the slowest kind. What a kind takes for some layers or micro-batches is
what the same plan takes where all machines are of that kind: a pipeline of several kinds is no slower than the equal
one of its slowest stage. So the embedding, the loss, and the micro-batches that a first stage holds count for every
kind, and the figures are on the safe side.

>>> balanced(10, (2, 3), [lambda n: 1.0 * n, lambda n: 2.0 * n], (9, 9))
(2, 2)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foretell.errors import InfeasibleError, InputError
from foretell.hardware.cluster import Cluster, Node
from foretell.plan.training.rows import budget_bytes, hourly_price, needed_bytes
from foretell.simulate.collectives import Fabric
from foretell.simulate.training.legality import RULES, divisors, legal
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.simulate.training.step import steps
from foretell.units import format_bytes
from foretell.workload.llm.config import LLMConfig

__all__ = ["Kind", "Uneven", "balanced", "document", "search_uneven"]

_MICRO_BATCHES = (1, 2, 4, 8)
_ZERO = {"megatron": (1, 3), "deepspeed": (1, 3), "fsdp2": (2, 3)}
_LEAST_CONTEXT = 8192  # tokens of a sequence on a rank, unless cp is pinned
_RULES = tuple(rule for rule in RULES if rule.name != "devices")  # kinds need not fill whole machines of another


@dataclass(frozen=True, slots=True)
class Kind:
    """What one kind of machine does: `units` pipeline stages, or replicas, of at most `each` layers, or micro-batches,
    `total` together. `time_s` is the step where all machines were like these, `memory_bytes` the fullest device's."""

    machines: int
    name: str
    units: int
    each: int
    total: int
    time_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Uneven:
    """One way to share the work: `by` ``stages`` or ``batches``; `plan` is what the kinds have in common."""

    by: str
    plan: TrainingPlan
    kinds: tuple[Kind, ...]
    time_s: float
    cost_usd: float | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, all devices together."""
        return self.plan.tokens / self.time_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        return {
            "by": self.by,
            "plan": self.plan.to_dict(),
            "kinds": [asdict(kind) for kind in self.kinds],
            "time_s": self.time_s,
            "tokens_per_s": self.tokens_per_s,
            "cost_usd": self.cost_usd,
        }


def document(config: LLMConfig, cluster: Cluster, found: Sequence[Uneven], tokens: float | None) -> dict[str, Any]:
    """What was `found`, fastest first, as plain values of schema ``foretell.shared-plan/1``."""
    plan = found[0].plan
    return {
        "schema": "foretell.shared-plan/1",
        "workload": f"llm:{config.name}",
        "cluster": cluster.name,
        "devices": cluster.device_count,
        "global_batch": plan.global_batch,
        "seq_len": plan.seq_len,
        "framework": plan.framework,
        "tokens": tokens,
        "best": [one.to_dict() for one in found],
    }


def balanced(
    total: int, units: Sequence[int], times: Sequence[Callable[[int], float]], most: Sequence[int]
) -> tuple[int, ...] | None:
    """How many layers (or micro-batches) a unit of each kind gets at most, so that the slowest is as fast as can be.

    `times` say what a kind takes for so many a unit, growing; `most` what its memory holds. None where that is too few.
    """
    if sum(u * m for u, m in zip(units, most, strict=True)) < total:
        return None
    # The least time for which there is room: every candidate is some kind's time for some number.
    candidates = sorted({time(n) for time, m in zip(times, most, strict=True) for n in range(1, m + 1)})

    def fitted(limit: float) -> list[int]:
        found = []
        for time, m in zip(times, most, strict=True):
            low, high = 0, m
            while low < high:  # the largest number within the limit
                middle = (low + high + 1) // 2
                low, high = (middle, high) if time(middle) <= limit else (low, middle - 1)
            found.append(low)
        return found

    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(u * n for u, n in zip(units, fitted(candidates[middle]), strict=True)) >= total:
            high = middle
        else:
            low = middle + 1
    counts = fitted(candidates[low])
    # What is too much is taken from the kinds that take longest.
    while True:
        over = sum(u * n for u, n in zip(units, counts, strict=True)) - total
        able = [i for i, (u, n) in enumerate(zip(units, counts, strict=True)) if u <= over and n > 0]
        if not able:
            return tuple(counts)
        slowest = max(able, key=lambda i: times[i](counts[i]))
        counts[slowest] -= 1


def search_uneven(
    config: LLMConfig,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int,
    framework: str = "megatron",
    max_memory: float = 0.9,
    top: int = 10,
    settings: Mapping[str, Any] | None = None,
    pinned: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[Uneven, ...]:
    """The fastest ways to share the work among the kinds of a cluster's machines, fastest first.

    Tried are all degrees that the devices of every kind divide by, micro-batches up to 8, with all layers recomputed or
    none, in order 1F1B; `pinned` narrows them. Raises InputError where no such degrees are legal, InfeasibleError where
    none fits.
    """
    base = TrainingPlan(global_batch=global_batch, seq_len=seq_len, framework=framework, **(settings or {}))
    pins = {name: tuple(values) for name, values in (pinned or {}).items()}
    others = set(pins) - {"tp", "cp", "dp", "pp", "micro_batch", "recompute", "zero"}
    if others:
        raise InputError(
            f"{', '.join(sorted(others))} cannot be pinned on machines of several kinds", "training plans",
            "pin tp, cp, dp, pp, micro_batch, recompute or zero",
        )  # fmt: skip
    kinds = _kinds(cluster)
    budgets = [budget_bytes(Cluster(node.name, ((1, node),)), max_memory) for _, node in kinds]
    sharings = [
        _Sharing(config, plan, by, cluster, kinds)
        for by in ("stages", "batches") for plan in _plans(base, [c * n.count for c, n in kinds], by, pins, config)
    ]  # fmt: skip
    sharings = [one for one in sharings if one.legal()]
    if not sharings:
        raise InputError(
            "no degrees that the model allows divide the devices of every kind", f"cluster {cluster.name!r}",
            "plan each kind by itself, or pin fewer settings",
        )  # fmt: skip
    # Time and memory grow by the same for each layer, and for each micro-batch: two points give the line.
    ends = [[(1, max(2, one.total // units)) for units in one.units] for one in sharings]
    first, second = (
        _figures([one.asked(kind, e[kind][i]) for one, e in zip(sharings, ends, strict=True) for kind in range(len(e))])
        for i in (0, 1)
    )
    found: list[Uneven] = []
    short: list[float] = []
    chosen: list[tuple[_Sharing, tuple[int, ...]]] = []
    for i, one in enumerate(sharings):
        span = slice(i * len(kinds), (i + 1) * len(kinds))
        counts, missing = one.balance(ends[i], first[span], second[span], budgets)
        if counts is None:
            short.append(missing)
        else:
            chosen.append((one, counts))
    exact = _figures([one.asked(kind, each) for one, counts in chosen for kind, each in enumerate(counts)])
    for i, (one, counts) in enumerate(chosen):
        figures = exact[i * len(kinds):(i + 1) * len(kinds)]
        over = max(nbytes - budget for (_, nbytes), budget in zip(figures, budgets, strict=True))
        if over > 0:
            short.append(over)
        else:
            found.append(one.result(counts, figures))
    if not found:
        raise InfeasibleError(
            f"{config.name} fits in none of {len(sharings)} ways to share it among the machines of {cluster.name}: "
            f"{format_bytes(min(short))} a device are missing at least",
            "take more machines, or a larger --max-memory",
        )
    return tuple(sorted(found, key=lambda one: one.time_s)[:top])


def _kinds(cluster: Cluster) -> list[tuple[int, Node]]:
    """The machines by kind, the same kind once."""
    found: dict[str, tuple[int, Node]] = {}
    for count, node in cluster.groups:
        found[node.name] = (found.get(node.name, (0, node))[0] + count, node)
    return list(found.values())


def _plans(
    base: TrainingPlan, sizes: Sequence[int], by: str, pins: Mapping[str, tuple[Any, ...]], config: LLMConfig
) -> list[TrainingPlan]:
    """Plans whose stages (or replicas) each lie on machines of one kind. `dp` and `pp` are those of all machines."""
    every = sum(sizes)
    common = divisors(int(np.gcd.reduce(sizes))).tolist()
    short = [cp for cp in common if cp == 1 or "cp" in pins or base.seq_len >= _LEAST_CONTEXT * cp]
    found = []
    for tp, cp, other in itertools.product(common, short, common):
        # The third degree that each kind's devices divide by: dp where stages are shared out, pp where batches are.
        part = tp * cp * other
        if any(size % part for size in sizes):
            continue
        dp, pp = (other, every // part) if by == "stages" else (every // part, other)
        if pp > config.layers or (by == "stages" and pp < 2):
            continue
        for micro_batch, recompute, zero in itertools.product(
            pins.get("micro_batch", _MICRO_BATCHES), pins.get("recompute", ("none", "full")),
            pins.get("zero", _ZERO[base.framework]),
        ):  # fmt: skip
            if base.global_batch % (micro_batch * (dp if by == "stages" else 1)):
                continue
            plan = base.replace(tp=tp, cp=cp, dp=dp, pp=pp, micro_batch=micro_batch, recompute=recompute, zero=zero)
            if all(getattr(plan, name) in values for name, values in pins.items()):
                found.append(plan)
    return found


_Asked = tuple[LLMConfig, TrainingPlan, Cluster]


def _figures(asked: Sequence[_Asked]) -> list[tuple[float, float]]:
    """Seconds of a step and bytes of the fullest device of each: those of one model and cluster together."""
    groups: dict[tuple[LLMConfig, Cluster], list[int]] = {}
    for i, (config, _, cluster) in enumerate(asked):
        groups.setdefault((config, cluster), []).append(i)
    found = [(0.0, 0.0)] * len(asked)
    for (config, cluster), rows in groups.items():
        table = PlanTable.of([asked[i][1] for i in rows])
        times, needed = steps(config, table, cluster).time_s, needed_bytes(config, table, cluster)
        for i, time_s, nbytes in zip(rows, times.tolist(), needed.tolist(), strict=True):
            found[i] = (time_s, nbytes)
    return found


class _Sharing:
    """One plan whose layers (`by` stages) or micro-batches (`by` batches) are shared out among the kinds."""

    def __init__(
        self, config: LLMConfig, plan: TrainingPlan, by: str, cluster: Cluster, kinds: Sequence[tuple[int, Node]]
    ) -> None:
        self.config, self.plan, self.by, self.cluster, self.kinds = config, plan, by, cluster, kinds
        unit = plan.tp * plan.cp * (plan.dp if by == "stages" else plan.pp)  # devices of a stage, or of a replica
        sizes = [count * node.count for count, node in kinds]
        self.units = [size // unit for size in sizes]
        self.total = config.layers if by == "stages" else plan.global_batch // plan.micro_batch
        self.alike = []
        for (_, node), size in zip(kinds, sizes, strict=True):
            machines = -(-(plan.devices if by == "stages" else size) // node.count)
            network = cluster.network if machines > 1 else None
            self.alike.append(Cluster(f"{machines}x {node.name}", ((machines, node),), network))

    def asked(self, kind: int, each: int) -> _Asked:
        """What a kind with `each` layers a stage or micro-batches a replica does, were all machines like it."""
        plan, units = self.plan, self.units[kind]
        if self.by == "stages":
            return self.config.replace(layers=plan.pp * each), plan, self.alike[kind]
        own = plan.replace(dp=units, global_batch=each * plan.micro_batch * units)
        return self.config, own, self.alike[kind]

    def legal(self) -> bool:
        """Whether every kind could start it."""
        even = -(-self.total // sum(self.units))
        asked = [self.asked(kind, even) for kind in range(len(self.kinds))]
        return all(bool(legal(c, PlanTable.of([p]), on, _RULES)[0]) for c, p, on in asked)

    @property
    def between_s(self) -> float:
        """Seconds of reducing gradients between kinds, which no kind's own step has: each rank's share of them."""
        if self.by == "stages":
            return 0.0
        nbytes = (4.0 if self.plan.grad_dtype == "fp32" else 2.0) * self.config.parameters
        nbytes /= self.plan.tp * self.plan.pp * min(self.units)
        size, stride = np.array([len(self.units)]), np.array([self.cluster.device_count // len(self.units)])
        return float(Fabric.of(self.cluster).time_s("all_reduce", np.array([nbytes]), size, stride)[0])

    def balance(
        self, ends: Sequence[tuple[int, int]], first: Sequence[tuple[float, float]],
        second: Sequence[tuple[float, float]], budgets: Sequence[float],
    ) -> tuple[tuple[int, ...] | None, float]:  # fmt: skip
        """How much each unit of each kind gets; or None, and the bytes a device that are missing."""
        lines: list[Callable[[int], float]] = []
        most, short = [], 0.0
        for (low, high), (t0, m0), (t1, m1), units, budget in zip(
            ends, first, second, self.units, budgets, strict=True
        ):
            lines.append(_line(t0, (t1 - t0) / (high - low)))
            growth = max(0.0, (m1 - m0) / (high - low))
            room = self.total if growth == 0 else int((budget - m0) / growth) + 1
            most.append(max(0, min(room, -(-self.total // units))) if m0 <= budget else 0)
            even = -(-self.total // sum(self.units))
            short = max(short, m0 + (even - 1) * growth - budget)
        counts = balanced(self.total, self.units, lines, most)
        # A kind without work had better be left out.
        return (None, short if short > 0 else np.inf) if counts is None or min(counts) < 1 else (counts, 0.0)

    def result(self, counts: Sequence[int], figures: Sequence[tuple[float, float]]) -> Uneven:
        """The sharing with what each kind takes."""
        times = [time_s + self.between_s for time_s, _ in figures]
        slowest = times.index(max(times))
        totals = [unit * each for unit, each in zip(self.units, counts, strict=True)]
        totals[slowest] -= sum(totals) - self.total
        done = tuple(
            Kind(count, node.name, self.units[i], counts[i], totals[i], times[i], figures[i][1])
            for i, (count, node) in enumerate(self.kinds)
        )
        price = hourly_price(self.cluster)
        cost = None if price is None else times[slowest] * price / 3600.0
        return Uneven(self.by, self.plan, done, times[slowest], cost)


def _line(first: float, slope: float) -> Callable[[int], float]:
    return lambda n: first + (n - 1) * slope if n else 0.0
