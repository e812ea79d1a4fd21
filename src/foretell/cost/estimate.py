"""`Estimate` and `Memory`: the answer to "how fast, how large, how dear?", as immutable values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SCHEMA = "foretell.estimate/1"

# Parts of `Memory.breakdown`, in the order they are shown.
MEMORY_PARTS: tuple[str, ...] = (
    "parameters",
    "buffers",
    "inputs",
    "kv_cache",
    "gradients",
    "optimizer",
    "activations",
    "temporaries",
    "workspaces",  # library scratch: cuBLAS, cuDNN
    "fragmentation",  # what the caching allocator reserves beyond what is allocated
    "framework",  # driver context and loaded kernels
)

# What limits an op, and the parts of `Estimate.breakdown_s`.
BOUNDS: tuple[str, ...] = ("compute", "memory", "launch")


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak device memory of a step, in bytes.

    `breakdown` (keys `MEMORY_PARTS`) sums to `peak_bytes`, which is what nvidia-smi shows for the process.
    `allocated_bytes` ≤ `reserved_bytes` ≤ `peak_bytes`: live tensors at their peak, what the caching allocator holds
    for them, and that plus the framework's own. `peak_op` is the index of the op running at the peak (-1: before
    the first). `timeline_bytes` is the allocated bytes while each op runs (None where lifetimes are unknown).
    `pageable_bytes` of the peak lie in CUDA's unified memory (a paged optimizer's state): they move to the host as far
    as there is no room for them.
    """

    peak_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    breakdown: Mapping[str, int]
    peak_op: int
    capacity_bytes: int | None
    timeline_bytes: Floats | None = None
    pageable_bytes: int = 0

    @property
    def fits(self) -> bool | None:
        """Whether what must stay on the device fits it; None where its capacity is unknown."""
        return None if self.capacity_bytes is None else self.peak_bytes - self.pageable_bytes <= self.capacity_bytes

    @property
    def paged_out_bytes(self) -> int:
        """What must be on the host at the peak for the step to fit."""
        over = 0 if self.capacity_bytes is None else self.peak_bytes - self.capacity_bytes
        return min(max(over, 0), self.pageable_bytes)


@dataclass(frozen=True, slots=True)
class OpEstimates:
    """Per-op columns of an estimate, parallel to `Graph.ops`. Times are of the step: one run times `repeat`.

    `compute_s`, `memory_s` and `launch_s` are what each limit alone would take; `bound` indexes `BOUNDS`. `gap_s` is
    the part of `launch_s` that the device waits for the host before the op, `host_s` what issuing it costs the host.
    """

    time_s: Floats
    compute_s: Floats
    memory_s: Floats
    launch_s: Floats
    bound: npt.NDArray[np.int8]
    energy_j: Floats | None = None
    gap_s: Floats | None = None
    host_s: Floats | None = None

    def __len__(self) -> int:
        return len(self.time_s)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one step of a workload takes on one device.

    `time_interval_s` is the (low, high) of an 80 % interval, `interval_basis` what it rests on. `breakdown_s` splits
    `time_s` by what limits it (keys `BOUNDS`) and sums to it. `flops` are the graph's ("matmul" convention) and `mfu`
    their share of the device's dense peak in the precision that dominates: None where that peak is unknown.
    `not_counted` lists ops without a FLOP rule by name and count, and by name (count 0) what else is left out.
    `occupancy`, `energy_j`, `cost_usd` are None where unknown.
    """

    workload: str
    device: str
    mode: str
    precision: str
    runtime: str
    model: str
    items: Mapping[str, int]
    time_s: float
    time_interval_s: tuple[float, float]
    interval_basis: str
    breakdown_s: Mapping[str, float]
    flops: int
    macs: int
    parameters: int
    mfu: float | None
    memory: Memory
    energy_j: float | None
    cost_usd: float | None
    ops: OpEstimates
    modules: tuple[tuple[str, float], ...]  # (module path, seconds), dearest first
    not_counted: Mapping[str, int]
    notes: tuple[str, ...] = ()
    occupancy: float | None = None
    host_s: float = 0.0

    @property
    def throughput_per_s(self) -> float:
        """First entry of `items` a second: images, sequences or tokens."""
        return next(iter(self.items.values())) / self.time_s if self.time_s > 0 else math.inf

    @property
    def power_w(self) -> float | None:
        """Average power over the step; None where `energy_j` is."""
        return self.energy_j / self.time_s if self.energy_j is not None and self.time_s > 0 else None

    @property
    def bound(self) -> str:
        """What the largest share of the time goes to: ``compute``, ``memory`` or ``launch``."""
        return max(BOUNDS, key=lambda b: self.breakdown_s[b])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, schema ``foretell.estimate/1`` (documented in docs/schema.md)."""
        memory = self.memory
        return {
            "schema": SCHEMA,
            "workload": self.workload,
            "device": self.device,
            "mode": self.mode,
            "precision": self.precision,
            "runtime": self.runtime,
            "model": self.model,
            "items": dict(self.items),
            "time_s": self.time_s,
            "time_interval_s": list(self.time_interval_s),
            "interval_basis": self.interval_basis,
            "breakdown_s": dict(self.breakdown_s),
            "bound": self.bound,
            "host_s": self.host_s,
            "throughput_per_s": self.throughput_per_s,
            "flops": self.flops,
            "macs": self.macs,
            "parameters": self.parameters,
            "mfu": self.mfu,
            "occupancy": self.occupancy,
            "memory": {
                "peak_bytes": memory.peak_bytes,
                "reserved_bytes": memory.reserved_bytes,
                "allocated_bytes": memory.allocated_bytes,
                "breakdown_bytes": dict(memory.breakdown),
                "peak_op": memory.peak_op,
                "capacity_bytes": memory.capacity_bytes,
                "fits": memory.fits,
                "pageable_bytes": memory.pageable_bytes,
            },
            "energy_j": self.energy_j,
            "power_w": self.power_w,
            "cost_usd": self.cost_usd,
            "modules": [{"module": name, "time_s": time_s} for name, time_s in self.modules],
            "not_counted": dict(self.not_counted),
            "notes": list(self.notes),
        }


def frozen(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """A read-only copy of `mapping`."""
    return MappingProxyType(dict(mapping))
