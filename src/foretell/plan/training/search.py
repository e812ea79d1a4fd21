"""`search`: the best ways to train a model on a cluster, and why the best is.

Every legal plan of a `Space` is asked for its memory, those that fit for their time; cost and energy follow. The
ranking has one plan for each combination of degrees (tp, cp, dp, pp, ep), with the other settings that suit it best.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InfeasibleError, InputError, unknown
from foretell.hardware.cluster import Cluster
from foretell.hardware.cluster import cluster as one_of
from foretell.plan.training.pareto import front
from foretell.plan.training.rows import Part, Rows, budget_bytes, evaluate, hourly_price, leanest, needed_bytes, timed
from foretell.plan.training.space import Space, sizes_of
from foretell.plan.training.store import Store
from foretell.plan.training.why import label, why
from foretell.simulate.training.legality import ALONE, Violation, explain
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.simulate.training.step import PARTS
from foretell.units import format_bytes
from foretell.workload.llm.config import LLMConfig

__all__ = ["AXES", "OBJECTIVES", "Candidate", "Ranking", "Run", "search"]

#: What a search may make least, and the column of `Rows` that holds it.
OBJECTIVES: Mapping[str, str] = {"time": "time_s", "cost": "cost_usd", "energy": "energy_j"}
#: What the front weighs.
AXES: Mapping[str, str] = {"time": "time_s", "memory": "memory_bytes", "cost": "cost_usd", "energy": "energy_j"}
_STEP = 0.01  # plans of the front differ by 1 % somewhere
_USUAL = TrainingPlan(1, 1)
_DEGREES = ("tp", "cp", "dp", "pp", "ep")  # one plan of each combination is ranked
_MORE = (2, 4, 8, 16, 32, 64)  # times the machines that are tried where nothing fits
_BOX = 8  # devices that one machine of bare cards is taken to hold
_NETWORK = "ib-ndr"  # named where machines bring no ports of their own


@dataclass(frozen=True, slots=True)
class Run:
    """What a run of `tokens` takes."""

    tokens: float
    steps: float
    time_s: float
    device_hours: float
    cost_usd: float | None
    energy_j: float | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan on `nodes` machines: seconds of its step and their parts, bytes on the fullest device, what it costs.

    `hidden_s` is communication that compute hides; `energy_j` is of the devices alone; both money and energy are of one
    step, and None where unknown.
    """

    plan: TrainingPlan
    nodes: int
    time_s: float
    parts: Mapping[str, float]
    hidden_s: float
    memory_bytes: float
    mfu: float
    energy_j: float | None
    cost_usd: float | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, all devices together."""
        return self.plan.tokens / self.time_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens a second of one device."""
        return self.tokens_per_s / self.plan.devices

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides."""
        return sum(self.parts[name] for name in ("tp_s", "cp_s", "ep_s", "pp_s", "dp_s"))

    def value(self, objective: str) -> float:
        """Seconds, dollars or joules of a step; NaN where unknown."""
        found = getattr(self, OBJECTIVES[objective])
        return np.nan if found is None else float(found)

    def run(self, tokens: float) -> Run:
        """A run of so many tokens."""
        steps = tokens / self.plan.tokens
        time_s = steps * self.time_s
        return Run(
            tokens, steps, time_s, time_s / 3600.0 * self.plan.devices,
            None if self.cost_usd is None else steps * self.cost_usd,
            None if self.energy_j is None else steps * self.energy_j,
        )  # fmt: skip

    def to_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        run = None if tokens is None else self.run(tokens)
        return {
            "plan": self.plan.to_dict(),
            "nodes": self.nodes,
            "time_s": self.time_s,
            "parts_s": {name.removesuffix("_s"): self.parts[name] for name in PARTS},
            "hidden_s": self.hidden_s,
            "memory_bytes": self.memory_bytes,
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "energy_j": self.energy_j,
            "cost_usd": self.cost_usd,
            "run": None if run is None else {
                "time_s": run.time_s, "steps": run.steps, "device_hours": run.device_hours, "cost_usd": run.cost_usd,
                "energy_j": run.energy_j,
            },
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ranking:
    """The `best` plans for an objective, best first; the Pareto `front`, fastest first; `why` the best is.

    `legal` plans were looked at, of which `fitting` fit into `budget_bytes` a device; `reused` parts of the space came
    from a file. `imported` is the caller's own plan, where there is one, and `notes` what its file says besides.
    """

    config: LLMConfig
    cluster: Cluster
    objective: str
    budget_bytes: float
    legal: int
    fitting: int
    best: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    why: tuple[str, ...]
    tokens: float | None = None
    reused: int = 0
    imported: Candidate | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, schema ``foretell.plan/1``."""
        plan = self.best[0].plan
        return {
            "schema": "foretell.plan/1",
            "workload": f"llm:{self.config.name}",
            "cluster": self.cluster.name,
            "devices": self.cluster.device_count,
            "global_batch": plan.global_batch,
            "seq_len": plan.seq_len,
            "framework": plan.framework,
            "objective": self.objective,
            "budget_bytes": self.budget_bytes,
            "usd_per_h": hourly_price(self.cluster),
            "tokens": self.tokens,
            "legal": self.legal,
            "fitting": self.fitting,
            "best": [one.to_dict(self.tokens) for one in self.best],
            "front": [one.to_dict(self.tokens) for one in self.front],
            "why": list(self.why),
            "imported": None if self.imported is None else self.imported.to_dict(self.tokens),
            "notes": list(self.notes),
        }


def search(
    config: LLMConfig,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int,
    framework: str = "megatron",
    objective: str = "time",
    max_memory: float = 0.9,
    top: int = 10,
    tokens: float | None = None,
    settings: Mapping[str, Any] | None = None,
    pinned: Mapping[str, Sequence[Any]] | None = None,
    nodes: Sequence[int] = (),
    imported: TrainingPlan | None = None,
    out: Path | None = None,
    jobs: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
) -> Ranking:
    """The `top` plans that make `objective` (time, cost or energy) of a step least within `max_memory` of a device.

    `settings` are what all plans share (``precision="fp8"``), `pinned` the only values of settings that are tried
    (``tp=(4, 8)``), `nodes` the numbers of machines (all; for cost and energy also half, a quarter, …). With `out`,
    every plan that fits is kept in an SQLite file as it is found; the same search goes on from there. `jobs` processes
    share the work. `imported` is a plan of the caller's that is weighed too.

    Raises InputError where settings break a rule of legality (saying which, and the nearest that do not), where the
    objective is not known of the cluster, or machines differ; InfeasibleError where no legal plan fits, with what is
    missing and what would make it fit.
    """
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    if not 0 < max_memory <= 1:
        raise InputError(f"a share of {max_memory:g} of the memory", "--max-memory", "give 1% to 100%, e.g. 90%")
    if len({node.name for _, node in cluster.groups}) > 1:
        alone = " and ".join(f"--on '{count}x {node.name}'" for count, node in cluster.groups)
        raise InputError("machines of several kinds", f"cluster {cluster.name!r}", f"plan each by itself: {alone}")
    if len(cluster.groups) > 1:  # of one kind after all
        cluster = Cluster(cluster.name, ((cluster.node_count, cluster.groups[0][1]),), cluster.network)
    base = TrainingPlan(global_batch=global_batch, seq_len=seq_len, framework=framework, **(settings or {}))
    tried = tuple(nodes) or ((cluster.node_count,) if objective == "time" else sizes_of(cluster))
    pins = {name: tuple(values) for name, values in (pinned or {}).items()}
    fixed = {name for name in (settings or {}) if name in ("zero", "recompute", "schedule", "context_scheme")}
    pins |= {name: (getattr(base, name),) for name in fixed if name not in pins}
    space = Space(config, cluster, base, pins, tried)
    budget = budget_bytes(cluster, max_memory)
    found = list(_parts(space, budget, out, jobs, progress))
    parts = [part for part, _ in found]
    legal = sum(part.legal for part in parts)
    if not legal:
        raise _no_legal_plan(space)
    rows = Rows.concatenate([_worth_keeping(part.rows, objective) for part in parts if len(part.rows)])
    if not len(rows):
        raise _nothing_fits(space, parts, budget, max_memory)
    column = rows[OBJECTIVES[objective]]
    if np.isnan(column).all():
        what = "an hourly price" if objective == "cost" else "the power"
        raise InputError(f"{what} of its devices is not in the catalogue", f"--objective {objective}", "take time")
    best = [_candidate(rows, int(row)) for row in _ranked(rows, objective)[:max(2, top)]]
    points = np.stack([rows[name] for name in AXES.values()], axis=1)
    return Ranking(
        config, cluster, objective, budget, legal, sum(len(part.rows) for part in parts),
        tuple(best[:top]), tuple(_candidate(rows, int(row)) for row in front(points, _STEP)),
        why(best[0], best[1], objective) if len(best) > 1 else ("It is the only one that fits.",),
        tokens, sum(reused for _, reused in found),
        None if imported is None else weigh(config, cluster, imported),
    )  # fmt: skip


def weigh(config: LLMConfig, cluster: Cluster, plan: TrainingPlan) -> Candidate:
    """One plan as a candidate, whether it fits or not. Raises InputError where it breaks a rule."""
    violations = explain(config, plan, cluster)
    if violations:
        raise illegal_error(violations, asked=plan)
    table = PlanTable.of([plan])
    return _candidate(timed(config, table, cluster, needed_bytes(config, table, cluster)), 0)


#: Settings as options of the command line.
OPTIONS: Mapping[str, str] = {
    **{name: f"--{name.replace('_', '-')}" for name in (
        "global_batch", "seq_len", "tp", "cp", "dp", "pp", "ep", "vp", "first_layers", "last_layers", "schedule",
        "framework", "zero", "shard", "recompute", "precision", "attention", "context_scheme", "dispatcher",
    )},
    "micro_batch": "--mbs", "recompute_layers": "--recompute", "cuda_graph": "--cuda-graph",
    "overlap_tp": "--overlap tp", "overlap_ep": "--overlap ep",
}  # fmt: skip


def illegal_error(
    violations: Sequence[Violation], lead: str = "", most: int = 3, *, asked: TrainingPlan | None = None,
    options: Iterable[str] = OPTIONS,
) -> InputError:  # fmt: skip
    """An error that says which rules are broken, and the nearest settings that keep them, where these are of another
    batch or length of sequences than `asked` was with that. `options` are the settings that the command has options
    for: nothing else is named."""
    able = frozenset(options)
    said = "; ".join(f"{v.reason} (rule {v.rule}; nearest: {_repair(v, able)})" for v in violations[:most])
    rest = len(violations) - most
    more = f"; and {rest} more rule{'s' if rest > 1 else ''}" if rest > 0 else ""
    plans = [p for p in violations[0].plans if asked is None or _differ(p, asked) <= {*able, "dp", "schedule"}]
    shown = dict.fromkeys(_options(plan, asked, able) for plan in plans)
    repair = "the nearest plans: " + ", or ".join(shown) if shown else None
    return InputError(lead + said + more, "training plan", repair)


def _repair(violation: Violation, able: Collection[str]) -> str:
    said = [_option(name, values) for name, values in violation.repairs if name in able]
    return "; ".join(said) or ALONE


def _option(name: str, values: Sequence[str]) -> str:
    if name == "sequence_parallel":  # an option of `predict` alone
        return "--no-sp" if values == ("off",) else "without --no-sp"
    if values == ("off",):
        return f"without {OPTIONS[name]}"
    return OPTIONS[name] if values == ("on",) else f"{OPTIONS[name]} {' or '.join(values)}"


def _differ(one: TrainingPlan, other: TrainingPlan) -> set[str]:
    mine, theirs = one.to_dict(), other.to_dict()
    return {name for name in mine if mine[name] != theirs[name]}


def _options(plan: TrainingPlan, asked: TrainingPlan | None, able: Collection[str]) -> str:
    """The plan as options: its degrees and micro-batch, and of the rest what is not the usual or not as asked."""
    degrees = ("tp", "cp", "dp", "pp", "vp", "ep", "micro_batch")
    rest = ("first_layers", "last_layers", "zero", "shard", "precision")
    names = [name for name in degrees if name in ("tp", "pp", "dp", "micro_batch") or getattr(plan, name) > 1]
    names += [name for name in rest if getattr(plan, name) != getattr(_USUAL, name)]
    if asked is not None:
        also = ("schedule", "framework", "attention", "context_scheme", "dispatcher", "global_batch", "seq_len")
        names += [name for name in also if getattr(plan, name) != getattr(asked, name)]
    shown = [f"{OPTIONS[name]} {getattr(plan, name)}" for name in names if name in able]
    if plan.recompute != "none" and "recompute" in able:
        shown.append(f"--recompute {plan.recompute_layers or plan.recompute}")
    return " ".join(shown)


# --- the work, in this process or several -----------------------------------------------------------------------------


def _parts(
    space: Space, budget: float, out: Path | None, jobs: int, progress: Callable[[str, int, int], None] | None
) -> Iterator[tuple[Part, bool]]:
    """Every part of the space, and whether it was at hand."""
    if out is None:
        store = None
        done: set[int] = set()
    else:
        store = Store(out, _question(space, budget))
        done = set(store.done())
    try:
        if store is not None:
            for index in sorted(done):
                yield store.read(index), True
        missing = [index for index in range(space.blocks) if index not in done]
        count = len(done)
        for part in _work(space, missing, budget, jobs):
            if store is not None:
                store.write(part)
            count += 1
            if progress is not None:
                progress("parts of the space", count, space.blocks)
            yield part, False
    finally:
        if store is not None:
            store.close()


def _question(space: Space, budget: float) -> dict[str, Any]:
    return {
        "config": repr(space.config), "cluster": repr(space.cluster), "plan": space.base.to_dict(),
        "pinned": {name: list(values) for name, values in space.pinned.items()}, "nodes": list(space.sizes),
        "budget_bytes": budget,
    }  # fmt: skip


def _work(space: Space, missing: Iterable[int], budget: float, jobs: int) -> Iterator[Part]:
    todo = list(missing)
    if jobs <= 1 or len(todo) <= 1:
        for index in todo:
            yield evaluate(space, index, budget)
        return
    # Not forked: a caller may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(todo)), context, _begin, (space, budget)) as pool:
        waiting: set[Future[Part]] = set()
        try:
            for index in todo:
                waiting.add(pool.submit(_do, index))
            while waiting:
                ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for one in ready:
                    yield one.result()
        finally:
            for one in waiting:
                one.cancel()


_mine: tuple[Space, float] | None = None


def _begin(space: Space, budget: float) -> None:
    """A worker's own copy of the question. It ends when the search does, however that ends."""
    global _mine
    _mine = space, budget

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _do(index: int) -> Part:
    assert _mine is not None
    return evaluate(_mine[0], index, _mine[1])


# --- which rows answer ------------------------------------------------------------------------------------------------


def _worth_keeping(rows: Rows, objective: str) -> Rows:
    """The rows of a part that the answer may hold: the best of each combination, and the part's own front."""
    points = np.stack([rows[name] for name in AXES.values()], axis=1)
    kept = np.union1d(_ranked(rows, objective), front(points, _STEP))
    return rows.take(kept)


def _ranked(rows: Rows, objective: str) -> npt.NDArray[np.int64]:
    """Rows in order of the objective, then memory; the first of each combination of degrees only."""
    order = np.lexsort((rows["memory_bytes"], rows["time_s"], rows[OBJECTIVES[objective]]))
    keys = np.stack([rows["nodes"].astype(np.int64), *(rows.plans[name] for name in _DEGREES)], axis=1)[order]
    _, first = np.unique(keys, axis=0, return_index=True)
    return np.asarray(order[np.sort(first)], dtype=np.int64)


def _candidate(rows: Rows, row: int) -> Candidate:
    value = {name: float(column[row]) for name, column in rows.values.items()}
    return Candidate(
        rows.plans.plan(row), int(value["nodes"]), value["time_s"], {name: value[name] for name in PARTS},
        value["hidden_s"], value["memory_bytes"],
        value["flops_per_device"] / (value["time_s"] * value["peak_flops_per_s"]),
        *(None if np.isnan(value[name]) else value[name] for name in ("energy_j", "cost_usd")),
    )  # fmt: skip


# --- where there is no answer -----------------------------------------------------------------------------------------


def _no_legal_plan(space: Space) -> InputError:
    nearest = space.closest()
    violations = [] if nearest is None else explain(space.config, nearest, space.on(space.sizes[0]))
    if not violations:
        return InputError("no plan has all the pinned settings", "training plans", "pin fewer")
    given = ", ".join(f"{name.replace('_', ' ')} {' or '.join(map(_word, values[:4]))}"
                      for name, values in space.pinned.items())  # fmt: skip
    return illegal_error(violations, f"no legal plan has {given}; the nearest breaks a rule: " if given else "",
                         asked=nearest)  # fmt: skip


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _nothing_fits(space: Space, parts: Sequence[Part], budget: float, max_memory: float) -> InfeasibleError:
    """How much is missing, and what would make it fit."""
    least = min(parts, key=lambda part: part.least_bytes)
    device = space.cluster.groups[0][1].device
    message = (
        f"{space.config.name} fits in none of {sum(p.legal for p in parts):,} legal plans on {space.cluster.name}: the "
        f"leanest, {least.leanest}, needs {format_bytes(least.least_bytes)} a device and has {format_bytes(budget)} "
        f"({100 * max_memory:.3g}% of {device.name}); {format_bytes(least.least_bytes - budget)} are missing"
    )
    return InfeasibleError(message, _what_would_fit(space, least.least_bytes, budget, max_memory))


def _larger(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """More devices of the same kind, and how they are written: in one machine up to a box of eight, where it is none of
    the catalogue; then in more machines, over a network that is named where they bring none."""
    count, node = cluster.groups[0]
    bare = not node.nics and node.name == f"{node.count}x {node.device.name}"
    for times in _MORE:
        together = times * node.count
        if count == 1 and bare and together <= _BOX:
            yield f"one machine of {together}: --on '{together}x {node.device.name}'", one_of(
                f"{together}x {node.device.name}"
            )
            continue
        text = f"{times * count}x {node.name}"
        if cluster.network is not None:
            yield f"{times * count} machines of {node.name}", Cluster(
                text, ((times * count, node),), cluster.network
            )
        elif not bare:
            yield f"{times * count} machines of {node.name}", one_of(text)
        else:
            yield f"{times * count} machines of {node.name} over {_NETWORK}", one_of(f"{text} over {_NETWORK}")


def _what_would_fit(space: Space, least: float, budget: float, max_memory: float) -> str:
    said = []
    whole = budget / max_memory
    if least <= whole:
        said.append(f"--max-memory {np.ceil(100 * least / whole):.0f}%")
    for name, values in space.pinned.items():
        freed = Space(space.config, space.cluster, space.base, {n: v for n, v in space.pinned.items() if n != name},
                      space.nodes)  # fmt: skip
        needed, plan = leanest(freed)
        if plan is not None and needed <= budget:
            given = ", ".join(map(_word, values))
            said.append(f"{name.replace('_', ' ')} {_word(getattr(plan, name))} instead of {given}")
    if len(space.pinned) > 1 and not said:
        needed, plan = leanest(Space(space.config, space.cluster, space.base, {}, space.nodes))
        if plan is not None and needed <= budget:
            said.append(f"none of {', '.join(name.replace('_', ' ') for name in space.pinned)} pinned ({plan})")
    for words, larger in _larger(space.cluster):
        needed, plan = leanest(Space(space.config, larger, space.base, space.pinned))
        if plan is not None and needed <= budget:
            said.append(f"{words} ({label(plan)})")
            break
    if not said:
        return "no more machines of this kind make it fit: take devices with more memory, or a shorter sequence"
    return "it would fit with " + ", or with ".join(said)
