"""`advise`: every rule, or some, on one graph and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretell.advise.family import member, rules
from foretell.advise.finding import Finding
from foretell.cost import Estimate
from foretell.cost import estimate as estimated
from foretell.cost.model import AUTO
from foretell.errors import InputError
from foretell.graph import Graph
from foretell.hardware import Device

SCHEMA = "foretell.advice/1"


@dataclass(frozen=True, slots=True)
class Advice:
    """What the rules found, largest gain first. Gains are each alone: together they are less than their sum."""

    estimate: Estimate
    rules: tuple[str, ...]
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, schema ``foretell.advice/1`` (documented in docs/schema.md)."""
        estimate = self.estimate
        return {
            "schema": SCHEMA,
            "workload": estimate.workload,
            "device": estimate.device,
            "precision": estimate.precision,
            "runtime": estimate.runtime,
            "model": estimate.model,
            "time_s": estimate.time_s,
            "time_interval_s": list(estimate.time_interval_s),
            "rules": list(self.rules),
            "findings": [finding.to_dict() for finding in self.findings],
        }


def advise(
    graph: Graph, device: Device, *, names: Sequence[str] = (), runtime: str = "eager", model: str = AUTO
) -> Advice:
    """Check `graph` on `device` against the rules called `names` (all without any).

    Raises InputError for a graph that is no forward pass, and what `foretell.cost.estimate` raises.
    """
    if graph.mode == "train":
        raise InputError("is a training step", graph.name, "capture it without --train: rules cost its forward pass")
    if graph.mode != "inference":
        raise InputError(
            f"is the {graph.mode} of a language model", graph.name, "ask foretell advise transformer llm:NAME"
        )
    chosen = [member(name) for name in names or rules()]
    estimate = estimated(graph, device, runtime=runtime, model=model)
    findings = [finding for rule in chosen for finding in rule.check(graph, device, estimate)]
    findings.sort(key=lambda finding: (-finding.gain_s, finding.rule, finding.ops))
    return Advice(estimate, tuple(rule.name for rule in chosen), tuple(findings))
