"""Launches: kernels with the place they would run on, and the occupancy they would have there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from foretell.cost import occupancy as oc
from foretell.cost.binaries import Kernel
from foretell.errors import InputError
from foretell.hardware.device import Device


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel's `calculation` on a `place` (a device, or a compute capability).

    With a `grid` (in blocks): its `waves` on the device, and the `achieved` occupancy with the interval that holds
    80 % of kernels.
    """

    name: str | None
    place: str
    capability: str | None
    device: str | None
    calculation: oc.Calculation
    spill_bytes: int | None = None
    grid: int | None = None
    waves: float | None = None
    achieved: float | None = None
    achieved_interval: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        interval = self.achieved_interval
        return {
            "name": self.name,
            "device": self.device,
            "compute_capability": self.capability,
            **self.calculation.to_dict(),
            "spill_bytes": self.spill_bytes,
            "grid": self.grid,
            "waves": self.waves,
            "achieved": self.achieved,
            "achieved_interval": None if interval is None else list(interval),
        }


def launch(
    kernel: Kernel,
    *,
    block: int | None = None,
    dynamic_bytes: int = 0,
    capability: str | None = None,
    device: Device | None = None,
    grid: int | None = None,
    carveout_bytes: int | None = None,
) -> Launch:
    """One kernel on a device, or on any of a compute capability: by default the one it was compiled for.

    `block` is by default the largest that the kernel's launch bounds allow, `dynamic_bytes` come on top of its static
    shared memory. Raises InputError where something needed is missing or contradicts.
    """
    if device is not None and capability is not None:
        raise InputError("both a device and a compute capability", "--on, --cc", "give one of them")
    chosen = capability or kernel.capability
    if device is None and chosen is None:
        raise InputError("no place to run on", "--cc", "give --cc 9.0, or a device by --on")
    limits = oc.limits_of(device) if device is not None else oc.limits(str(chosen))
    threads = block if block is not None else kernel.max_block
    if threads is None:
        raise InputError("no block size", f"kernel {kernel.name}", "give --block N: the file does not say")
    one = oc.calculate(
        limits,
        kernel.registers,
        kernel.shared_bytes + dynamic_bytes,
        threads,
        barriers=kernel.barriers,
        carveout_bytes=carveout_bytes,
    )
    if kernel.max_block is not None:
        one = _bounded(one, kernel.max_block)
    place = device.title if device is not None else f"compute capability {chosen}"
    found = Launch(
        kernel.name or None,
        place,
        device.compute_capability if device is not None else chosen,
        device.name if device is not None else None,
        one,
        kernel.spill_bytes,
    )
    if grid is None:
        return found
    if device is None or device.multiprocessors is None:
        raise InputError("a grid needs a device, to be spread over its multiprocessors", "--grid", "give --on DEVICE")
    if grid < 1:
        raise InputError(f"a grid of {grid} blocks", "--grid", "give 1 or more")
    if not one.blocks:
        return replace(found, grid=grid)
    mean = float(oc.achieved(limits, grid, threads, one.blocks, device.multiprocessors)[0])
    return replace(
        found,
        grid=grid,
        waves=float(oc.waves(grid, one.blocks, device.multiprocessors)),
        achieved=mean,
        achieved_interval=oc.achieved_interval(mean),
    )


def that_run_on(kernels: Sequence[Kernel], capability: str | None) -> list[Kernel]:
    """Of kernels compiled for several architectures, those a device of this compute capability would load.

    A binary runs on its own major version from its minor one on; the newest of a kernel's is loaded. Where none runs,
    or nothing says for what they were compiled, all come back.
    """
    if capability is None:
        return list(kernels)
    major, minor = (int(part) for part in capability.split("."))
    best: dict[str, tuple[int, Kernel]] = {}
    for kernel in kernels:
        own = [int(part) for part in (kernel.capability or "0.0").split(".")]
        if own[0] == major and own[1] <= minor and own[1] >= best.get(kernel.name, (-1, kernel))[0]:
            best[kernel.name] = (own[1], kernel)
    return [kernel for _, kernel in best.values()] or list(kernels)


def _bounded(one: oc.Calculation, most: int) -> oc.Calculation:
    """With launch bounds: larger blocks cannot be launched, nor do they count as changes."""
    changes = tuple(c for c in one.changes if c.knob != "block" or c.value <= most)
    if one.block <= most:
        return replace(one, changes=changes)
    return replace(
        one,
        blocks=0,
        warps=0,
        occupancy=0.0,
        limits=MappingProxyType({**one.limits, "launch bounds": 0}),
        limiting=("launch bounds",),
        changes=(),
    )


def document(launches: Iterable[Launch]) -> dict[str, Any]:
    """The launches as one JSON document."""
    return {"schema": oc.SCHEMA, "launches": [one.to_dict() for one in launches]}
