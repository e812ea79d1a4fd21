"""`Finding`: what a rule says of a graph, with the numbers it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One piece of advice.

    `ops` are indices into the graph's ops and `modules` where they stand. `evidence` are the numbers the rule looked
    at, named with their units. `gain_s` is by how much the step becomes shorter, obtained by predicting the changed
    graph on the same device, and `gain_interval_s` what it is at the ends of the step's 80 % interval. `at_most` says
    that something the change takes in return was left out of it. `source` is the paper that found the rule.
    """

    rule: str
    ops: tuple[int, ...]
    modules: tuple[str, ...]
    what: str
    evidence: Mapping[str, float]
    advice: str
    gain_s: float
    gain_interval_s: tuple[float, float]
    at_most: bool
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data: an entry of ``findings`` in ``foretell.advice/1``."""
        return {
            "rule": self.rule,
            "ops": list(self.ops),
            "modules": list(self.modules),
            "what": self.what,
            "evidence": dict(self.evidence),
            "advice": self.advice,
            "gain_s": self.gain_s,
            "gain_interval_s": list(self.gain_interval_s),
            "at_most": self.at_most,
            "source": self.source,
        }
