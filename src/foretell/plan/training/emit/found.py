"""What the formats share: `Found`, what a file said, and `idle`, what of a plan changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from foretell.errors import InfeasibleError, InputError
from foretell.hardware.cluster import Cluster
from foretell.simulate.training.plan import TrainingPlan
from foretell.units import printable
from foretell.workload.llm.config import LLMConfig, config_from_mapping

__all__ = ["METADATA", "MOST_BYTES", "Found", "check_devices", "idle", "machines", "shown"]

#: Largest file that is read.
MOST_BYTES = 1_000_000

#: Fields of a model that no training framework takes, for they change neither weights nor arithmetic.
METADATA = frozenset(
    {
        *("name", "source", "published_parameters", "published_active_parameters", "published_source"),
        *("published_weights", "fused_qkv", "fused_gate_up", "norm_fp32"),
    }
)

_NEEDED = ("layers", "hidden", "heads", "intermediate", "vocab")


@dataclass(frozen=True, slots=True)
class Found:
    """What a configuration file says: the fields of a plan and of a model that it gives, and what was passed over.

    `format` is the name of its format, `where` the file. `notes` name every option that says nothing about the plan or
    that no field of it can hold.
    """

    format: str
    where: str
    plan: Mapping[str, Any]
    model: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def training_plan(self, **others: Any) -> TrainingPlan:
        """The plan: what the file gives, `others` instead where given, and defaults for the rest.

        Raises InputError where neither gives a field without which there is no plan.
        """
        fields = {**self.plan, **others}
        missing = [name for name in ("global_batch", "seq_len") if name not in fields]
        if missing:
            options = ", ".join("--" + name.replace("_", "-") for name in missing)
            raise InputError(f"does not say {' and '.join(missing)}", self.where, f"give {options}")
        return TrainingPlan(**fields)

    @property
    def config(self) -> LLMConfig | None:
        """The model, where the file gives its shape whole; None: name a workload beside the file."""
        if any(name not in self.model for name in _NEEDED):
            return None
        return config_from_mapping(self.model, "imported", self.where)


def idle(config: LLMConfig, plan: TrainingPlan) -> frozenset[str]:
    """Fields whose value changes nothing in this plan, such as a scheme of context parallelism on one rank."""
    found: set[str] = set()
    replicas = plan.dp * plan.cp
    for nothing, names in (
        (plan.tp == 1, ("sequence_parallel", "overlap_tp")),
        (plan.cp == 1, ("context_scheme",)),
        (plan.pp == 1, ("schedule", "vp", "first_layers", "last_layers", "overlap_p2p")),
        (plan.vp == 1, ("overlap_p2p",)),
        (config.moe is None or plan.ep == 1, ("dispatcher", "overlap_ep")),
        (plan.recompute != "full", ("recompute_layers",)),
        (plan.zero == 0, ("shard", "overlap_param_gather")),
        (plan.shard >= replicas, ("shard",)),
        (plan.shard == 1, ("zero", "shard")),
        (replicas == 1, ("zero", "shard", "overlap_grad_reduce", "overlap_param_gather")),
    ):
        if nothing:
            found.update(names)
    return frozenset(found)


def check_devices(plan: TrainingPlan, cluster: Cluster) -> None:
    """Raise InfeasibleError where the plan takes other devices than the cluster has."""
    if plan.devices != cluster.device_count:
        raise InfeasibleError(
            f"the plan is of tp {plan.tp} · cp {plan.cp} · dp {plan.dp} · pp {plan.pp} = {plan.devices:,} devices, "
            f"{cluster.name!r} has {cluster.device_count:,}",
            f"give a cluster of {plan.devices:,} devices or another dp",
        )


def machines(cluster: Cluster) -> tuple[int, int] | None:
    """Machines and devices in each; None where they hold different numbers."""
    counts = {node.count for _, node in cluster.groups}
    return (cluster.node_count, counts.pop()) if len(counts) == 1 else None


def shown(items: Iterable[str], most: int = 12) -> str:
    """Some names in a line, the rest counted; long ones cut, and what a terminal would obey taken out."""
    names = [printable(item if len(item) <= 80 else item[:79] + "…") for item in items]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
