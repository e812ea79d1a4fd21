"""`Bench`: what a change to a graph gains on a device, by predicting the graph before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from foretell.advise.edit import Edit
from foretell.advise.family import member
from foretell.advise.finding import Finding
from foretell.cost import Estimate
from foretell.cost.learned import Learned
from foretell.cost.model import CostModel, Settings, models
from foretell.cost.program import lower
from foretell.graph import Graph
from foretell.hardware import Device

#: A gain below this share of the step is not worth a finding.
WORTH = 1e-3

_latest: list[Bench] = []  # the rules ask one after another about one graph


def held(model: str) -> CostModel:
    """The cost model `model` without what it learned of whole steps.

    That correction goes by features of the step, and a change may move a feature across a threshold of its trees. What
    a change gains is to come from its operations, so the correction is held where it is for the graph as it stands:
    it falls out of the ratio of two times.
    """
    found = models()[model]
    return replace(found, steps=None) if isinstance(found, Learned) else found


def step_time_s(graph: Graph, device: Device, model: CostModel, runtime: str) -> float:
    """Seconds of one step of `graph` by `model`."""
    settings = Settings.of(graph, runtime)
    program = lower(graph, runtime)
    return model.step(program, model.op_times(program, device, settings), settings).time_s


@dataclass(frozen=True, slots=True)
class Bench:
    """A graph on a device, with its estimate; `base_s` is its time by the model that changed graphs are held to."""

    graph: Graph
    device: Device
    estimate: Estimate
    model: CostModel
    base_s: float

    @staticmethod
    def of(graph: Graph, device: Device, estimate: Estimate) -> Bench:
        """The bench of these three; the last one made is kept."""
        if _latest:
            last = _latest[0]
            if last.graph is graph and last.device is device and last.estimate is estimate:
                return last
        model = held(estimate.model)
        bench = Bench(graph, device, estimate, model, step_time_s(graph, device, model, estimate.runtime))
        _latest[:] = [bench]
        return bench

    def gain_s(self, changed: Graph, runtime: str | None = None) -> float:
        """Seconds that a step of `changed` is shorter; negative where it is longer."""
        time_s = step_time_s(changed, self.device, self.model, runtime or self.estimate.runtime)
        return self.estimate.time_s * (1.0 - time_s / self.base_s) if self.base_s > 0 else 0.0

    def findings(
        self,
        name: str,
        ops: Iterable[int],
        changed: Graph | Edit,
        *,
        what: str,
        evidence: Mapping[str, float],
        advice: str,
        at_most: bool = False,
        runtime: str | None = None,
    ) -> list[Finding]:
        """The finding of rule `name`, or none where predicting `changed` shows no gain worth it."""
        gain = self.gain_s(changed.graph() if isinstance(changed, Edit) else changed, runtime)
        if gain < WORTH * self.estimate.time_s:
            return []
        low, high = (end / self.estimate.time_s for end in self.estimate.time_interval_s)
        indices = tuple(ops)
        modules = tuple(dict.fromkeys(self.graph.ops[i].module for i in indices))
        numbers = {key: float(value) for key, value in evidence.items()}
        source = member(name).source
        interval = (gain * low, gain * high)
        return [Finding(name, indices, modules, what, numbers, advice, gain, interval, at_most, source)]

    def op_time_s(self, ops: Iterable[int]) -> float:
        """Seconds that these ops take in the step as estimated."""
        return float(sum(self.estimate.ops.time_s[i] for i in ops))
