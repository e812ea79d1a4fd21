"""Occupancy: how many warps a multiprocessor holds at once, and how many it holds on average.

*Theoretical* occupancy is arithmetic. A block becomes resident when its warps, its registers and its shared memory all
fit, so the least of these limits, each in blocks per multiprocessor, counts:

- warps: the resident warps divided by the block's;
- registers: handed out per warp, in whole units, within one of the multiprocessor's partitions (its warp schedulers),
  so that warps a partition cannot hold are not held by another;
- shared memory: what the block asks for and what the driver reserves, in whole units, from the share of the L1 array
  that is configured as shared memory;
- blocks: a fixed number; and, from compute capability 9.0 on, the named barriers.

It is what NVIDIA's calculator (``cuda_occupancy.h``) gives; thread-block clusters are not considered.

*Achieved* occupancy is the mean over the cycles in which a multiprocessor has any warp. With ``k`` blocks resident and
``W`` waves of them (blocks of the grid per block that the device holds), in units of one block's duration, it falls
short of theory by

- a grid that does not fill the multiprocessors: ``n`` blocks each, ``n < k``;
- *skew*: resident blocks begin one after another and do not end together, ``skew · (1 − 1/k)``;
- *launch*: a block's warps begin one after another, ``launch · warps``;
- *relaunch*: a place is empty from a block's end to the next one's first instruction, in every wave after the first;
- *drain*: in the last wave places empty with nothing to fill them, ``drain · min(W − 1, 1)``.

The four constants are shares of a block's duration, fitted on kernels of one A100 (``calibrations/occupancy.json``);
no device, kernel or shape enters them. What blocks do unevenly, such as warps that leave at once, is not in the launch
configuration, and the interval holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration, load
from foretell.errors import InputError, unknown
from foretell.hardware.device import Device

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SCHEMA = "foretell.occupancy/1"
#: What can limit the resident blocks, in the order in which it is told.
CAUSES = ("warps", "registers", "shared", "blocks", "barriers")
#: Sizes in KiB of shared memory that the L1 array can be divided into, by the largest of them. Source: CUDA C++
#: Programming Guide, compute capabilities 7.x to 12.x, "shared memory"; the same in cuda_occupancy.h of CUDA 13.0.
_CARVEOUTS: Mapping[int, tuple[int, ...]] = {
    96: (0, 8, 16, 32, 64, 96),
    64: (32, 64),
    164: (0, 8, 16, 32, 64, 100, 132, 164),
    100: (0, 8, 16, 32, 64, 100),
    228: (0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
}
_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What one multiprocessor and one block may hold: registers as numbers, shared memory in bytes.

    `partitions` is how many parts the register file is divided into, `barriers` how many named barriers there are
    (None where they limit nothing), `carveouts` the bytes that may be configured as shared memory, ascending.
    """

    warp_size: int
    max_warps: int
    max_blocks: int
    max_threads_per_block: int
    registers: int
    max_registers_per_block: int
    max_registers_per_thread: int
    register_unit: int
    partitions: int
    shared: int
    shared_per_block: int
    shared_unit: int
    shared_reserved: int
    barriers: int | None = None
    l1: int | None = None
    carveouts: tuple[int, ...] = ()
    capability: str | None = None


# Field of `Limits` → field of `Device`.
_FIELDS = {
    "warp_size": "warp_size",
    "max_warps": "max_warps_per_sm",
    "max_blocks": "max_blocks_per_sm",
    "max_threads_per_block": "max_threads_per_block",
    "registers": "registers_per_sm",
    "max_registers_per_block": "max_registers_per_block",
    "max_registers_per_thread": "max_registers_per_thread",
    "register_unit": "register_allocation_unit",
    "partitions": "warp_allocation_unit",
    "shared": "shared_bytes_per_sm",
    "shared_per_block": "shared_bytes_per_block",
    "shared_unit": "shared_allocation_unit_bytes",
    "shared_reserved": "shared_reserved_bytes_per_block",
}


def limits_of(device: Device) -> Limits:
    """The limits of a device. Raises InputError naming what the catalogue does not know."""
    values = {name: getattr(device, field) for name, field in _FIELDS.items()}
    if device.vendor != "NVIDIA":
        raise InputError(
            f"{device.title} hands out registers by another rule", device.name, "name an NVIDIA GPU, or give --cc"
        )
    if missing := [_FIELDS[name] for name, value in values.items() if value is None]:
        raise InputError(f"{', '.join(missing)} unknown", device.name, "give --cc, or state them in its device file")
    return _limits(values, device.compute_capability, device.l1_bytes_per_sm)


@cache
def limits(capability: str) -> Limits:
    """The limits that a compute capability such as ``9.0`` fixes. Raises UnknownNameError with near names."""
    from foretell.hardware.loader import compute_capabilities

    known = compute_capabilities()
    if capability not in known:
        raise unknown("compute capability", capability, known)
    table = known[capability][0]
    return _limits({name: table[field] for name, field in _FIELDS.items()}, capability, table.get("l1_bytes_per_sm"))


def _limits(values: Mapping[str, Any], capability: str | None, l1: int | None) -> Limits:
    major = int(capability.split(".")[0]) if capability else 0
    # Two barriers a block on the large chips, one on the small: cuda_occupancy.h, "barrier limit"; from Hopper on.
    barriers = values["max_blocks"] * (2 if values["max_blocks"] == 32 else 1) if major >= 9 else None
    sizes = _CARVEOUTS.get(values["shared"] >> 10, ()) if major >= 7 else ()
    return Limits(
        **values, barriers=barriers, l1=l1, carveouts=tuple(size << 10 for size in sizes), capability=capability
    )


@dataclass(frozen=True, slots=True)
class Columns:
    """Theoretical occupancy of many launches, one a row.

    `blocks` and `warps` are resident on one multiprocessor, `occupancy` is the share of its warps; `limits` maps each
    of `CAUSES` to the blocks it would allow. No blocks: it cannot be launched.
    """

    blocks: Ints
    warps: Ints
    occupancy: Floats
    limits: Mapping[str, Ints]

    def limiting(self, cause: str) -> npt.NDArray[np.bool_]:
        """Where this is the least of the limits (several may be)."""
        return np.asarray(self.limits[cause] == self.blocks)


def occupancy(
    limits: Limits,
    registers: npt.ArrayLike,
    shared_bytes: npt.ArrayLike,
    block: npt.ArrayLike,
    *,
    barriers: npt.ArrayLike = 0,
    carveout_bytes: int | None = None,
) -> Columns:
    """Theoretical occupancy by `registers` a thread, `shared_bytes` and threads of a `block` (arrays, broadcast).

    `shared_bytes` is static and dynamic memory together, without what the driver reserves; `carveout_bytes` is what
    of the L1 array is configured as shared memory, by default all that can be.
    """
    given = (np.atleast_1d(np.asarray(x, np.int64)) for x in (registers, shared_bytes, block, barriers))
    r, s, b, n = np.broadcast_arrays(*given)
    warps = np.maximum(-(-b // limits.warp_size), 1)
    runs = (b > 0) & (b <= limits.max_threads_per_block)

    per_warp = _up(np.maximum(r, 0) * limits.warp_size, limits.register_unit)
    held = np.where(
        per_warp > 0, limits.registers // limits.partitions // np.maximum(per_warp, 1) * limits.partitions, _UNLIMITED
    )
    # The check at launch takes registers from all partitions at once; on 6.0, with two, as if there were four.
    checked = 4 if limits.capability == "6.0" else limits.partitions
    fits = (per_warp * _up(warps, checked) <= limits.max_registers_per_block) & (r <= limits.max_registers_per_thread)
    by_registers = np.where(fits, held // warps, 0)

    per_block = _up(np.maximum(s, 0) + limits.shared_reserved, limits.shared_unit)
    shared = np.full(s.shape, limits.shared if carveout_bytes is None else carveout_bytes, np.int64)
    if carveout_bytes is not None and limits.carveouts:  # a preference: more is configured if one block needs it
        sizes = np.array(limits.carveouts, np.int64)
        wanted = np.maximum(np.minimum(per_block, limits.shared), carveout_bytes)
        shared = sizes[np.minimum(np.searchsorted(sizes, wanted), len(sizes) - 1)]
    by_shared = np.where(per_block > 0, shared // np.maximum(per_block, 1), _UNLIMITED)
    by_shared = np.where(s <= limits.shared_per_block, by_shared, 0)

    by_barriers = np.full(s.shape, _UNLIMITED, np.int64)
    if limits.barriers is not None:
        by_barriers = np.where(n > 0, limits.barriers // np.maximum(n, 1), _UNLIMITED)
    found = {
        "warps": np.where(runs, limits.max_warps // warps, 0),
        "registers": by_registers,
        "shared": by_shared,
        "blocks": np.full(s.shape, limits.max_blocks, np.int64),
        "barriers": by_barriers,
    }
    blocks = np.minimum.reduce(list(found.values()))
    return Columns(blocks, blocks * warps, blocks * warps / limits.max_warps, MappingProxyType(found))


def _up(value: Ints, unit: int) -> Ints:
    """`value` rounded up to whole units."""
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class Change:
    """One thing changed, all else as it is: `knob` set to `value` gives `blocks` resident and this `occupancy`."""

    knob: str
    value: int
    blocks: int
    occupancy: float

    @property
    def text(self) -> str:
        """The change in words: ``at most 64 registers a thread``."""
        if self.knob == "registers":
            return f"at most {self.value} registers a thread"
        if self.knob == "shared":
            from foretell.units import format_bytes

            exact = self.value % 1024 and self.value > 1024
            return f"at most {f'{self.value:,} B' if exact else format_bytes(self.value)} shared memory a block"
        return f"blocks of {self.value} threads"


@dataclass(frozen=True, slots=True)
class Calculation:
    """One launch: what was asked, what is resident, what limits it, what would lift it.

    `limits` and `limiting` are as in `Columns`; `carveout_bytes` is the least configured size of shared memory that
    holds the resident blocks, `l1_bytes` what it leaves to the L1 cache (None where the two are apart).
    """

    registers: int
    shared_bytes: int
    block: int
    barriers: int
    max_warps: int
    blocks: int
    warps: int
    occupancy: float
    limits: Mapping[str, int]
    limiting: tuple[str, ...]
    changes: tuple[Change, ...]
    carveout_bytes: int | None = None
    l1_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["limits"] = dict(self.limits)
        data["limiting"] = list(self.limiting)
        data["changes"] = [
            {"knob": c.knob, "value": c.value, "blocks": c.blocks, "occupancy": c.occupancy, "text": c.text}
            for c in self.changes
        ]
        return data


def calculate(
    limits: Limits,
    registers: int,
    shared_bytes: int,
    block: int,
    *,
    barriers: int = 0,
    carveout_bytes: int | None = None,
) -> Calculation:
    """`occupancy` of one launch, with the limiting factors and the changes that would lift it.

    >>> from foretell.cost.occupancy import limits
    >>> one = calculate(limits("9.0"), registers=72, shared_bytes=0, block=256)
    >>> one.occupancy, one.limiting, one.changes[0].text, one.changes[0].occupancy
    (0.375, ('registers',), 'at most 64 registers a thread', 0.5)
    """
    for name, value in (("registers", registers), ("shared memory", shared_bytes), ("barriers", barriers)):
        if value < 0:
            raise InputError(f"{value} is less than nothing", name, "give 0 or more")
    if block < 1:
        raise InputError(f"a block of {block} threads", "block", "give 1 or more")
    settings = {"barriers": barriers, "carveout_bytes": carveout_bytes}
    columns = occupancy(limits, registers, shared_bytes, block, barriers=barriers, carveout_bytes=carveout_bytes)
    blocks = int(columns.blocks[0])
    found = {cause: int(column[0]) for cause, column in columns.limits.items() if column[0] < _UNLIMITED}
    size = None
    if limits.carveouts:
        needed = blocks * int(_up(np.array(shared_bytes + limits.shared_reserved), limits.shared_unit))
        size = next((size for size in limits.carveouts if size >= needed), limits.carveouts[-1])
    return Calculation(
        registers=registers,
        shared_bytes=shared_bytes,
        block=block,
        barriers=barriers,
        max_warps=limits.max_warps,
        blocks=blocks,
        warps=int(columns.warps[0]),
        occupancy=float(columns.occupancy[0]),
        limits=MappingProxyType(found),
        limiting=tuple(cause for cause, limit in found.items() if limit == blocks),
        changes=_changes(limits, registers, shared_bytes, block, float(columns.occupancy[0]), settings),
        carveout_bytes=size,
        l1_bytes=None if size is None or limits.l1 is None else limits.l1 - size,
    )


def _changes(
    limits: Limits, registers: int, shared: int, block: int, now: float, settings: Mapping[str, Any]
) -> tuple[Change, ...]:
    """For each knob the least change that lifts occupancy, and the one that lifts it furthest if that is another."""
    # Shared memory a block may have for each number of resident blocks, the most first.
    room = limits.shared // np.arange(1, limits.max_blocks + 1) // limits.shared_unit * limits.shared_unit
    room = np.minimum(room - limits.shared_reserved, limits.shared_per_block)
    threads = np.arange(limits.warp_size, limits.max_threads_per_block + 1, limits.warp_size)
    tried = {
        "registers": np.arange(min(registers - 1, limits.max_registers_per_thread), 15, -1),
        "shared": np.append(room[(room >= 0) & (room < shared)], 0)[: None if shared else 0],
        # The nearest block by ratio first; of two as near the smaller, which leaves more blocks to balance.
        "block": threads[np.argsort(np.abs(np.log(threads / block)), kind="stable")],
    }
    changes: list[Change] = []
    for knob, values in tried.items():
        if not len(values):
            continue
        launch: dict[str, Any] = {"registers": registers, "shared_bytes": shared, "block": block}
        launch["shared_bytes" if knob == "shared" else knob] = values
        columns = occupancy(limits, **launch, **settings)
        better = np.flatnonzero(columns.occupancy > now + 1e-9)
        if not len(better):
            continue
        most = better[np.argmax(columns.occupancy[better])]
        changes += [
            Change(knob, int(values[i]), int(columns.blocks[i]), float(columns.occupancy[i]))
            for i in dict.fromkeys((int(better[0]), int(most)))
        ]
    return tuple(changes)


def constants() -> Calibration:
    """The shipped constants of achieved occupancy, with their provenance."""
    return load("occupancy")


def waves(grid: npt.ArrayLike, blocks: npt.ArrayLike, multiprocessors: int) -> Floats:
    """Waves of a grid: its blocks over those that are resident on the whole device at once."""
    places = np.maximum(np.asarray(blocks, np.float64), 1.0) * multiprocessors
    return np.asarray(np.asarray(grid, np.float64) / places)


def achieved(
    limits: Limits,
    grid: npt.ArrayLike,
    block: npt.ArrayLike,
    blocks: npt.ArrayLike,
    multiprocessors: int,
    calibration: Calibration | None = None,
) -> Floats:
    """Mean occupancy while a multiprocessor is busy, of `grid` blocks of `block` threads (arrays, broadcast).

    `blocks` is what is resident on a multiprocessor by theory (`Columns.blocks`).
    """
    c = constants() if calibration is None else calibration
    g, b, k = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, np.float64)) for x in (grid, block, blocks)))
    warps = np.ceil(b / limits.warp_size)
    k = np.maximum(k, 1.0)
    each = np.maximum(g / multiprocessors, 1.0)  # blocks of a multiprocessor that has any
    rounds = each / k
    later = np.maximum(rounds - 1.0, 0.0)
    resident = np.minimum(each, k)
    busy = (
        np.maximum(rounds, 1.0)
        + c["skew"] * (1.0 - 1.0 / resident)
        + c["launch"] * warps
        + c["relaunch"] * later
        + c["drain"] * np.minimum(later, 1.0)
    )
    return np.asarray(each * warps / (limits.max_warps * busy))


def achieved_interval(value: float, calibration: Calibration | None = None) -> tuple[float, float]:
    """Between which 80 % of the kernels that the constants had not seen lay, around one achieved occupancy."""
    low, high = (constants() if calibration is None else calibration).intervals["default"]
    return value * low, min(value * high, 1.0)
