"""What a transform changes in time, memory and energy: predicted, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.cost import Estimate, estimate
from foretell.errors import InputError
from foretell.hardware import Device, device
from foretell.transform.family import Transformed, member

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Effect:
    """Estimates of one workload before and after a transform, on one device."""

    transformed: Transformed
    before: Estimate
    after: Estimate

    @property
    def speedup(self) -> float:
        """How many times as fast it becomes."""
        return self.before.time_s / self.after.time_s

    @property
    def memory_saved_bytes(self) -> int:
        """Peak device memory it no longer needs."""
        return self.before.memory.peak_bytes - self.after.memory.peak_bytes

    def __str__(self) -> str:
        before, after = self.before, self.after
        return (
            f"{self.transformed.transform} on {after.device}: "
            f"{before.time_s * 1e3:.3g} ms → {after.time_s * 1e3:.3g} ms ({self.speedup:.2f}× as fast), "
            f"{before.memory.peak_bytes / 1e9:.3g} GB → {after.memory.peak_bytes / 1e9:.3g} GB, "
            f"{before.parameters:,} → {after.parameters:,} parameters"
        )


def effect(
    transform: str,
    module: nn.Module,
    *example_inputs: Any,
    on: str | Device,
    runtime: str = "eager",
    model: str = "roofline",
    **settings: Any,
) -> Effect:
    """Predict what `transform` does for `module` on `example_inputs` (real or *meta* tensors) on a device.

    `runtime`, `model` and `settings` are those of `foretell.predict`. Raises UnknownNameError or InputError.
    """
    from foretell.workload.options import options
    from foretell.workload.resolve import capture_given

    chosen = options(**settings)
    if chosen.trains:
        raise InputError("transforms are for inference", "train=True", "leave it out")
    found = member(transform)
    target = on if isinstance(on, Device) else device(on)
    was_training = module.training
    transformed = found.run(module)
    try:
        graphs = [
            capture_given(m.eval(), example_inputs, chosen, type(module).__name__) for m in (module, transformed.module)
        ]
    finally:
        module.train(was_training)
    before, after = (estimate(graph, target, runtime=runtime, model=model) for graph in graphs)
    return Effect(transformed, before, after)
