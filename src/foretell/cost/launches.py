"""Launches: kernels with the place they would run on, and the occupancy they would have there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from foretell.cost import occupancy as oc
from foretell.cost.binaries import Kernel, shorten
from foretell.errors import InputError, UnknownNameError
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
    (one,) = launches(
        [kernel],
        block=block,
        dynamic_bytes=dynamic_bytes,
        capability=capability,
        device=device,
        grid=grid,
        carveout_bytes=carveout_bytes,
    )
    return one


def launches(
    kernels: Sequence[Kernel],
    *,
    block: int | None = None,
    dynamic_bytes: int = 0,
    capability: str | None = None,
    device: Device | None = None,
    grid: int | None = None,
    carveout_bytes: int | None = None,
    where: str | None = None,
) -> list[Launch]:
    """`launch` of every kernel, in their order; `where` is the file they are from, for errors to name."""
    if device is not None and capability is not None:
        raise InputError("both a device and a compute capability", "--on, --cc", "give one of them")
    if grid is not None and (device is None or device.multiprocessors is None):
        raise InputError("a grid needs a device, to be spread over its multiprocessors", "--grid", "give --on DEVICE")
    if grid is not None and not 1 <= grid <= oc.MOST_BLOCKS_OF_GRID:
        raise InputError(
            f"a grid of {oc.shown(grid)} blocks", "--grid", f"give 1 to {oc.MOST_BLOCKS_OF_GRID:,}, the most of CUDA"
        )
    by_place: dict[str | None, list[int]] = {}
    for index, kernel in enumerate(kernels):
        by_place.setdefault(None if device is not None else capability or kernel.capability, []).append(index)
    found: dict[int, Launch] = {}
    for place, indices in by_place.items():
        limits = oc.limits_of(device) if device is not None else _limits(place, where)
        group = [kernels[index] for index in indices]
        blocks = [kernel.max_block if block is None else block for kernel in group]
        if None in blocks:
            name = f"kernel {shorten(group[blocks.index(None)].name)}"
            asked = f"{where}, {name}" if where else name
            raise InputError("no block size", asked, "give --block N: the file does not say")
        ones = oc.calculations(
            limits,
            [kernel.registers for kernel in group],
            [kernel.shared_bytes + dynamic_bytes for kernel in group],
            [threads for threads in blocks if threads is not None],
            [kernel.barriers for kernel in group],
            carveout_bytes=carveout_bytes,
        )
        made = [_launch(kernel, one, place, device) for kernel, one in zip(group, ones, strict=True)]
        if grid is not None and device is not None:
            made = _on_grid(made, limits, grid, device)
        found.update(zip(indices, made, strict=True))
    return [found[index] for index in range(len(kernels))]


def _limits(capability: str | None, where: str | None) -> oc.Limits:
    """The limits of a compute capability; where it is not known, the file that asks for it is named."""
    if capability is None:
        raise InputError("no place to run on", "--cc", "give --cc 9.0, or a device by --on")
    try:
        return oc.limits(capability)
    except UnknownNameError as error:
        if where is None:
            raise
        repair = "give the place to run on by --cc or --on"
        raise InputError(f"compiled for compute capability {capability}, which is not known", where, repair) from error


def _launch(kernel: Kernel, one: oc.Calculation, capability: str | None, device: Device | None) -> Launch:
    if kernel.max_block is not None:
        one = _bounded(one, kernel.max_block)
    return Launch(
        kernel.name or None,
        device.title if device is not None else f"compute capability {capability}",
        device.compute_capability if device is not None else capability,
        device.name if device is not None else None,
        one,
        kernel.spill_bytes,
    )


def _on_grid(made: Sequence[Launch], limits: oc.Limits, grid: int, device: Device) -> list[Launch]:
    """The launches with waves and achieved occupancy, where any block is resident."""
    resident = [max(one.calculation.blocks, 1) for one in made]
    multiprocessors = device.multiprocessors or 1
    rounds = oc.waves(grid, resident, multiprocessors).tolist()
    means = oc.achieved(limits, grid, [one.calculation.block for one in made], resident, multiprocessors).tolist()
    return [
        replace(one, grid=grid, waves=waves, achieved=mean, achieved_interval=oc.achieved_interval(mean))
        if one.calculation.blocks
        else replace(one, grid=grid)
        for one, waves, mean in zip(made, rounds, means, strict=True)
    ]


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
