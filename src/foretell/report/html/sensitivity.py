"""What else would be, had the device or the request been different: each case is predicted anew, none extrapolated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretell.cost import Estimate, Program, estimate, lower
from foretell.errors import ForetellError
from foretell.graph import Graph
from foretell.hardware.device import Device, FrozenMap

__all__ = ["Recapture", "Variation", "variations"]

#: A graph of the same workload under other settings of its capture (``batch=…``, ``precision=…``); None where it is
#: not to be had without running what nobody asked for.
Recapture = Callable[[Mapping[str, Any]], Graph | None]

# How far the device's numbers are moved.
_LESS, _MORE = 0.8, 1.25
_PRECISIONS = ("fp32", "tf32", "amp", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Variation:
    """A case and its estimate; where there is none, `reason` says why. `group` is what was changed."""

    group: str
    name: str
    estimate: Estimate | None
    reason: str = ""

    def change(self, base: Estimate) -> float | None:
        """By what share the time of one item grows (0.1: a tenth longer) or shrinks against `base`."""
        if self.estimate is None or base.time_s <= 0.0 or self.estimate.throughput_per_s <= 0.0:
            return None
        return base.throughput_per_s / self.estimate.throughput_per_s - 1.0


def variations(
    graph: Graph,
    device: Device,
    base: Estimate,
    *,
    program: Program | None = None,
    how: Mapping[str, Any] | None = None,
    recapture: Recapture | None = None,
    batch: int | None = None,
) -> tuple[Variation, ...]:
    """Cases beside `base`, the estimate of `graph` on `device`.

    `how` are the keywords that `base` was estimated with, `program` the graph lowered for its runtime. `recapture`
    gives the graph at another batch than `batch` or precision; without it these cases are left out.
    """
    how = {key: value for key, value in (how or {}).items() if key not in ("program", "memory")}
    how.setdefault("runtime", base.runtime)
    if program is None:
        program = lower(graph, how["runtime"])
    found: list[Variation] = []

    def add(group: str, name: str, make: Callable[[], Estimate | None]) -> None:
        try:
            result = make()
        except ForetellError as error:
            found.append(Variation(group, name, None, str(error)))
        else:
            if result is not None:
                found.append(Variation(group, name, result))

    def on(changed: Device) -> Callable[[], Estimate]:
        # The same step takes the same memory: it need not be replayed.
        return lambda: estimate(graph, changed, **how, program=program, memory=base.memory)

    for label, changed in _devices(device):
        add("Device", label, on(changed))
    if "calibration" not in how or how["calibration"] is None:
        other = "compiled" if base.runtime == "eager" else "eager"
        add("Runtime", other, lambda: estimate(graph, device, **{**how, "runtime": other}, memory=base.memory))

    def again(**settings: Any) -> Callable[[], Estimate | None]:
        def make() -> Estimate | None:
            changed = None if recapture is None else recapture(settings)
            return None if changed is None else estimate(changed, device, **how)

        return make

    if recapture is not None:
        for size in _batches(batch):
            add("Batch", f"batch {size:,}", again(batch=size))
        for precision in _PRECISIONS:
            if precision != base.precision:
                add("Precision", precision, again(precision=precision))
    return tuple(found)


def _devices(device: Device) -> list[tuple[str, Device]]:
    """The device with one kind of number moved, as far as it has it."""
    cases = []
    for factor in (_MORE, _LESS):
        moved = f"{factor - 1.0:+.0%}".replace("-", "−").replace("%", " %")
        if device.memory_bandwidth_bytes_per_s:
            faster = replace(device, memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * factor)
            cases.append((f"memory bandwidth {moved}", faster))
        if device.peaks:
            peaks = FrozenMap({name: peak * factor for name, peak in device.peaks.items()})
            cases.append((f"arithmetic peaks {moved}", replace(device, peaks=peaks)))
    return sorted(cases, key=lambda case: not case[0].startswith("memory"))


def _batches(batch: int | None) -> list[int]:
    if batch is None:
        return []
    return sorted({max(1, batch // 2), batch * 2} - {batch})
