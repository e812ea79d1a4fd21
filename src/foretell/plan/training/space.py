"""`Space`: all plans worth trying for a model, a cluster and a batch, as columns.

Degrees come first: every way to write the number of devices as tp · cp · dp · pp. Each then meets every choice of the
other settings that the framework offers. What the rules of legality refuse is dropped on the way. No plan is left out
because it looks bad, but for these, which a pinned setting brings back:

* micro-batches of 1, 2, 4, 8 and 16 sequences;
* tensor parallelism up to 8 ranks, or a machine's devices where they are more; context parallelism down to 1,024 tokens
  a rank;
* full recomputation of all layers of a rank, or of a quarter, half and three quarters of them; selective recomputation
  where attention stores its probabilities (fused attention has nothing to gain from it);
* what is better or the same whatever else is chosen is on: sequence parallelism where tokens divide, overlap of
  gradients, weights and activations between stages; CUDA graphs, which many models cannot use, are off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.hardware.cluster import Cluster
from foretell.simulate.training.legality import RULES, Rule, divisors, illegal, legal, supports
from foretell.simulate.training.plan import CHOICES, PlanTable, TrainingPlan
from foretell.workload.llm.config import LLMConfig

__all__ = ["PINNABLE", "Space", "sizes_of", "smaller"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MICRO_BATCHES = (1, 2, 4, 8, 16)
MOST_TP = 8  # or a machine's devices, where they are more
LEAST_CONTEXT = 1024  # tokens of a sequence on a rank
RECOMPUTED = (0.25, 0.5, 0.75)  # shares of a rank's layers
_MOST_CLOSEST = 2000  # combinations of degrees among which the nearest to being legal is looked for
# Combinations of degrees that are looked at together: tables of some thousand plans, on which little is spent twice.
_BLOCK = {"megatron": 24, "fsdp2": 24, "deepspeed": 96}

_ZERO = {"megatron": (1, 2, 3), "deepspeed": (1, 2, 3), "fsdp2": (2, 3)}
_SCHEDULES = {"megatron": ("1f1b", "interleaved"), "deepspeed": ("1f1b",),
              "fsdp2": ("1f1b", "interleaved", "zero-bubble")}  # fmt: skip
_SCHEMES = {"megatron": ("ring", "a2a", "allgather"), "deepspeed": ("a2a",), "fsdp2": ("ring", "a2a", "allgather")}

_FIELDS = {field.name: field for field in dataclasses.fields(TrainingPlan)}
_SHARED = ("global_batch", "seq_len", "framework")
#: The settings that a search may be told the values of.
PINNABLE = tuple(name for name in _FIELDS if name not in _SHARED)
# Rules of degrees alone: what breaks them is dropped before it meets other settings.
_EARLY = tuple(rule for rule in RULES if rule.name in ("heads", "kv-heads", "width", "experts", "expert-ranks"))


@dataclass(frozen=True)
class Space:
    """The plans for `config` on `cluster`. `base` is what all have in common; `pinned` the only values of a setting
    that are tried, by name. `nodes` are the numbers of machines that are tried (all of them, unless given).

    Raises InputError for a pinned setting that no plan has, and for a cluster of several kinds of machine.
    """

    config: LLMConfig
    cluster: Cluster
    base: TrainingPlan
    pinned: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, values in self.pinned.items():
            if name not in PINNABLE:
                raise InputError(f"{name!r} cannot be pinned", "training plans", f"pin {', '.join(PINNABLE)}")
            if not values:
                raise InputError("no value is left to try", name, "give at least one")
            for value in values:
                self.base.replace(**{name: value})  # one that is wrong by itself is refused here
        for count in self.nodes:
            if not 1 <= count <= self.cluster.node_count:
                what = f"{count} machines of a cluster of {self.cluster.node_count}"
                raise InputError(what, "--nodes", f"give 1 to {self.cluster.node_count}")
        if len(self.cluster.groups) > 1 and self.sizes != (self.cluster.node_count,):
            raise InputError("machines of several kinds", f"cluster {self.cluster.name!r}", "ask for all of them")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of machines that are tried, the most first."""
        return self.nodes or (self.cluster.node_count,)

    def on(self, nodes: int) -> Cluster:
        """So many machines of the cluster."""
        return smaller(self.cluster, nodes)

    @cached_property
    def degrees(self) -> Mapping[str, Ints]:
        """Every combination of tp, cp, dp, pp and ep that the model's sizes allow, with its number of machines."""
        tables = [self._degrees(nodes) for nodes in self.sizes]
        return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

    @property
    def blocks(self) -> int:
        """Parts that the space is looked at in. Which plans a part holds depends on nothing but the space."""
        return -(-len(self.degrees["tp"]) // self._block)

    @property
    def _block(self) -> int:
        return _BLOCK[self.base.framework]

    def block(self, index: int) -> tuple[PlanTable, Ints]:
        """The legal plans of one part, and how many machines each takes."""
        rows = slice(index * self._block, (index + 1) * self._block)
        table, nodes = self._expanded({name: column[rows] for name, column in self.degrees.items()})
        keep = np.zeros(len(table), dtype=bool)
        for count in np.unique(nodes):
            here = np.flatnonzero(nodes == count)
            keep[here] = legal(self.config, table.take(here), self.on(int(count)))
        return table.take(keep), nodes[keep]

    def closest(self) -> TrainingPlan | None:
        """Where no plan is legal: one that breaks the fewest rules, to tell which; None where none was even tried."""
        best: tuple[int, TrainingPlan] | None = None
        degrees = self._degrees(self.sizes[0], ())
        for start in range(0, min(len(degrees["tp"]), _MOST_CLOSEST), self._block):
            part = {name: column[start:start + self._block] for name, column in degrees.items()}
            table, _ = self._expanded(part, fitted=False)
            if not len(table):
                continue
            broken = illegal(self.config, table, self.on(self.sizes[0])).sum(axis=0)
            row = int(np.argmin(broken))
            if best is None or broken[row] < best[0]:
                best = int(broken[row]), table.plan(row)
        return None if best is None else best[1]

    # --- how it is enumerated ----------------------------------------------------------------------------------------

    def _among(self, name: str, values: Iterable[Any]) -> tuple[Any, ...]:
        """The values of a setting to try: the pinned ones, else `values`."""
        return tuple(self.pinned.get(name, tuple(values)))

    def _degrees(self, nodes: int, rules: Sequence[Rule] = _EARLY) -> dict[str, Ints]:
        cluster = self.on(nodes)
        count = cluster.device_count
        within = max(node.count for _, node in cluster.groups)
        found = divisors(count)
        free = {
            "tp": found[found <= max(MOST_TP, within)],
            "cp": found[found * LEAST_CONTEXT <= max(self.base.seq_len, LEAST_CONTEXT)],
            "pp": found[found <= self.config.layers],
            "ep": divisors(self.config.moe.experts) if self.config.moe else np.ones(1, dtype=np.int64),
        }
        axes = [np.array(self._among(name, values), dtype=np.int64) for name, values in free.items()]
        grid = np.meshgrid(*axes, indexing="ij")
        columns = {name: axis.reshape(-1) for name, axis in zip(free, grid, strict=True)}
        product = columns["tp"] * columns["cp"] * columns["pp"]
        if "dp" in self.pinned:
            columns = _cross(columns, {"dp": np.array(self.pinned["dp"], dtype=np.int64)})
        else:
            columns["dp"] = np.maximum(1, count // product)
        if rules:  # else all are wanted, to tell what is wrong
            whole = columns["dp"] * columns["tp"] * columns["cp"] * columns["pp"] == count
            split = self.base.global_batch % columns["dp"] == 0
            columns = _kept(columns, np.asarray(whole & split))
            wrong = illegal(self.config, self._table(columns), cluster, rules).any(axis=0)
            columns = _kept(columns, np.asarray(~wrong))
        return columns | {"nodes": np.full(len(columns["tp"]), nodes, dtype=np.int64)}

    def _table(self, columns: Mapping[str, Ints]) -> PlanTable:
        rows = len(columns["tp"])
        base = PlanTable.of([self.base]).columns
        return PlanTable.build({**base, **columns}, rows)

    def _expanded(self, columns: Mapping[str, Ints], fitted: bool = True) -> tuple[PlanTable, Ints]:
        """Each combination of degrees with every choice of the other settings. Not `fitted`: also with those that do
        not split the batch or the layers."""
        config, base, framework = self.config, self.base, self.base.framework
        made = dict(columns)
        made = _cross(made, {"micro_batch": np.array(self._among("micro_batch", MICRO_BATCHES), dtype=np.int64)})
        if fitted:
            made = _kept(made, base.global_batch % (made["micro_batch"] * made["dp"]) == 0)
        made = self._stages(made, fitted)
        made = self._recompute(made)
        # Sharding, with copies shared among a machine's ranks as the alternative to all ranks.
        zero = np.array(self._among("zero", _ZERO[framework]), dtype=np.int64)
        made = _cross(made, {"zero": zero})
        replicas = made["dp"] * made["cp"]
        if "zero" not in self.pinned:
            made = _kept(made, (replicas > 1) | (made["zero"] == zero[0]))
            made = _kept(made, (made["pp"] == 1) | (made["zero"] < 2) | (framework == "fsdp2"))
        made = self._shard(made)
        made = self._flags(made)
        # How sequences and tokens travel.
        made = self._named(made, "context_scheme", made["cp"] > 1, _SCHEMES[framework])
        if config.moe is not None:
            device = self.cluster.groups[0][1].device
            able = device.vendor == "NVIDIA" and supports(device, "bf16") and framework == "megatron"
            ways = ("alltoall", "deepep") if able else ("alltoall",)
            made = self._named(made, "dispatcher", made["ep"] > 1, ways)
        for name in PINNABLE:
            if name in self.pinned and name not in made:
                values = self.pinned[name]
                if name in CHOICES:
                    values = tuple(CHOICES[name].index(value) for value in values)
                made = _cross(made, {name: np.array(values, dtype=np.int64)})
        nodes = made.pop("nodes")
        return self._table(made), nodes

    def _stages(self, made: dict[str, Ints], fitted: bool) -> dict[str, Ints]:
        """Chunks of layers, the order of work, and the layers of the first and last rank."""
        layers, framework = self.config.layers, self.base.framework
        offered = self._among("schedule", _SCHEDULES[framework])
        several = "interleaved" in offered or "zero-bubble" in offered or "layered" in offered
        some = sorted({int(d) for extra in (0, 1, 2) for d in divisors(layers + extra)})
        made = _cross(made, {"vp": np.array(self._among("vp", some if several else (1,)), dtype=np.int64)})
        if "vp" not in self.pinned:
            able = (made["pp"] > 1) & (made["pp"] * made["vp"] <= layers)
            made = _kept(made, able | (made["vp"] == 1))
        made = _cross(made, {"schedule": np.array([CHOICES["schedule"].index(s) for s in offered], dtype=np.int64)})
        if "schedule" not in self.pinned:
            plain = CHOICES["schedule"].index("1f1b")
            made = _kept(made, np.where(made["vp"] > 1, made["schedule"] != plain, made["schedule"] == plain))
        if "first_layers" in self.pinned or "last_layers" in self.pinned:
            for name in ("first_layers", "last_layers"):
                made = _cross(made, {name: np.array(self._among(name, (0,)), dtype=np.int64)})
            return made
        # Where layers do not divide, embedding and loss may stand for one each.
        parts = made["pp"] * made["vp"]
        even = layers % parts == 0
        both = ~even & ((layers + 2) % parts == 0) & (made["pp"] > 2)
        loss = ~even & ~both & ((layers + 1) % parts == 0) & (made["pp"] > 1)
        short, last = (layers + 2) // made["pp"] - 1, (layers + 1) // made["pp"] - 1
        # Else the last rank has what the others, with as many as it takes, leave: 61 layers on 16 ranks are 15 · 4 + 1.
        left = layers - (made["pp"] - 1) * made["vp"] * -(-layers // parts)
        fewer = ~even & ~both & ~loss & (made["pp"] > 1) & (left > 0) & (left % made["vp"] == 0)
        fewer &= framework == "megatron"
        made["first_layers"] = np.where(both, short, 0)
        made["last_layers"] = np.where(both, short, np.where(loss, last, np.where(fewer, left, 0)))
        if framework == "megatron" and fitted:
            made = _kept(made, even | both | loss | fewer)
        return made

    def _recompute(self, made: dict[str, Ints]) -> dict[str, Ints]:
        index = CHOICES["recompute"].index
        ways = self._among("recompute", CHOICES["recompute"] if self.base.attention == "unfused" else ("none", "full"))
        if "recompute_layers" in self.pinned:
            pairs = [(index(way), int(count)) for way in ways for count in self.pinned["recompute_layers"]]
            return _cross(made, {
                "recompute": np.array([p[0] for p in pairs], dtype=np.int64),
                "recompute_layers": np.array([p[1] for p in pairs], dtype=np.int64),
            })  # fmt: skip
        shares = [(index(way), 0.0) for way in ways]
        if "full" in ways:
            shares += [(index("full"), share) for share in RECOMPUTED]
        made = _cross(made, {
            "recompute": np.array([s[0] for s in shares], dtype=np.int64),
            "_share": np.array(range(len(shares)), dtype=np.int64),
        })  # fmt: skip
        share = np.array([s[1] for s in shares])[made.pop("_share")]
        most = -(-self.config.layers // made["pp"])
        made["recompute_layers"] = np.floor(share * most + 0.5).astype(np.int64)
        # Few layers have fewer parts: each count once, and all of them are written as 0.
        once = (share == 0) | ((made["recompute_layers"] > 0) & (made["recompute_layers"] < most))
        for less in RECOMPUTED:
            once &= ~((share > less) & (np.floor(less * most + 0.5) == made["recompute_layers"]))
        return _kept(made, once)

    def _shard(self, made: dict[str, Ints]) -> dict[str, Ints]:
        if "shard" in self.pinned:
            return _cross(made, {"shard": np.array(self.pinned["shard"], dtype=np.int64)})
        within = np.maximum(1, min(node.count for _, node in self.cluster.groups) // made["tp"])
        replicas = made["dp"] * made["cp"]
        made = _cross(made | {"_within": within, "_replicas": replicas}, {"shard": np.array([0, 1], dtype=np.int64)})
        within, replicas = made.pop("_within"), made.pop("_replicas")
        local = made["shard"] == 1
        made["shard"] = np.where(local, within, 0)
        fits = (made["zero"] == 3) & (within > 1) & (replicas > within) & (replicas % within == 0)
        return _kept(made, ~local | fits)

    def _flags(self, made: dict[str, Ints]) -> dict[str, Ints]:
        split = self.base.seq_len % (made["cp"] * made["tp"]) == 0
        if self.base.framework == "deepspeed":
            split &= made["cp"] == 1
        if "sequence_parallel" in self.pinned:
            made = _cross(made, {"sequence_parallel": np.array(self.pinned["sequence_parallel"], dtype=np.int64)})
        else:
            made["sequence_parallel"] = split.astype(np.int64)
        if self.base.framework == "deepspeed":
            values: tuple[Any, ...] = self._among("overlap_tp", (False,))
        else:
            values = self._among("overlap_tp", (False, True))
        made = _cross(made, {"overlap_tp": np.array(values, dtype=np.int64)})
        if "overlap_tp" not in self.pinned:
            able = (made["tp"] > 1) & (made["sequence_parallel"] == 1)
            made = _kept(made, able | (made["overlap_tp"] == 0))
        values = self._among("overlap_ep", (False, True) if self.base.framework == "megatron" else (False,))
        made = _cross(made, {"overlap_ep": np.array(values, dtype=np.int64)})
        if "overlap_ep" not in self.pinned:
            full = made["recompute"] == CHOICES["recompute"].index("full")
            able = (made["ep"] > 1) & ~full & ((made["pp"] == 1) | (made["vp"] > 1))
            made = _kept(made, able | (made["overlap_ep"] == 0))
        return made

    def _named(self, made: dict[str, Ints], name: str, matters: Bools, offered: Sequence[str]) -> dict[str, Ints]:
        """Cross with the names of a setting, where it matters; the first of them elsewhere."""
        chosen = self._among(name, offered)
        values = np.array([CHOICES[name].index(value) for value in chosen], dtype=np.int64)
        made = _cross(made | {"_matters": matters.astype(np.int64)}, {name: values})
        return _kept(made, (made.pop("_matters") == 1) | (made[name] == values[0]))


def smaller(cluster: Cluster, nodes: int) -> Cluster:
    """The first `nodes` machines of a cluster of one kind of machine; the cluster itself where that is all of them."""
    if nodes == cluster.node_count:
        return cluster
    ((_, node),) = cluster.groups
    return Cluster(f"{nodes}x {node.name}", ((nodes, node),), cluster.network if nodes > 1 else None)


def sizes_of(cluster: Cluster) -> tuple[int, ...]:
    """Numbers of machines to try where fewer may be better: all of them, a half, a quarter, …, one."""
    if len(cluster.groups) > 1:
        return (cluster.node_count,)
    found, count = [], cluster.node_count
    while count:
        found.append(count)
        count //= 2
    return tuple(found)


def _cross(columns: Mapping[str, Ints], other: Mapping[str, Ints]) -> dict[str, Ints]:
    """Every row of `columns` with every row of `other`."""
    rows = len(next(iter(columns.values())))
    times = len(next(iter(other.values())))
    made = {name: np.repeat(column, times) for name, column in columns.items()}
    return made | {name: np.tile(column, rows) for name, column in other.items()}


def _kept(columns: Mapping[str, Ints], rows: Bools) -> dict[str, Ints]:
    return {name: column[rows] for name, column in columns.items()}
