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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
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
#: Sizes in KiB of shared memory that the L1 array can be divided into, by the largest of them, from 7.x on. Source:
#: CUDA C++ Programming Guide, compute capabilities 7.x to 12.x, "shared memory"; the same in cuda_occupancy.h of CUDA
#: 13.0. By that file 3.x takes 16, 32 or 48 KiB of it for L1, and 5.x and 6.x have shared memory apart, in one size.
_CARVEOUTS: Mapping[int, tuple[int, ...]] = {
    96: (0, 8, 16, 32, 64, 96),
    64: (32, 64),
    164: (0, 8, 16, 32, 64, 100, 132, 164),
    100: (0, 8, 16, 32, 64, 100),
    228: (0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
}
_UNLIMITED = 1 << 30
#: The largest count that is worked out: CUDA's own are 32-bit integers, and their products then fit in 64 bits.
MOST = (1 << 31) - 1
#: Blocks of the largest grid: the product of its dimensions' limits, CUDA C++ Programming Guide, 3.0 to 12.x.
MOST_BLOCKS_OF_GRID = MOST * 65_535 * 65_535
_CHUNK = 4096  # launches whose changes are tried at once: bounds the memory that takes


@dataclass(frozen=True, slots=True)
class Limits:
    """What one multiprocessor and one block may hold: registers as numbers, shared memory in bytes.

    `partitions` is how many parts the register file is divided into, `barriers` how many named barriers there are
    (None where they limit nothing), `carveouts` the bytes that may be configured as shared memory, ascending (one where
    it is fixed, none where that is not known).
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
    return Limits(
        **values, barriers=barriers, l1=l1, carveouts=_carveouts(major, values["shared"]), capability=capability
    )


def _carveouts(major: int, shared: int) -> tuple[int, ...]:
    """The bytes that may be configured as shared memory, of which `shared` are the most."""
    if major >= 7:
        return tuple(size << 10 for size in _CARVEOUTS.get(shared >> 10, ()))
    if major >= 5:
        return (shared,)
    return tuple(shared - (less << 10) for less in (32, 16, 0)) if major else ()


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
    of the L1 array is preferred as shared memory, by default all that can be. Counts are at most `MOST`.
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
    shared = np.full(s.shape, limits.shared, np.int64)
    if carveout_bytes is not None:
        shared = _configured(limits, per_block, carveout_bytes)
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


def _configured(limits: Limits, per_block: Ints, preferred: int) -> Ints:
    """Bytes of shared memory where so many are `preferred`: the next size, and more where one block needs it."""
    sizes = np.array(limits.carveouts, np.int64)

    def next_size(wanted: Ints) -> Ints:
        wanted = np.minimum(wanted, limits.shared)
        return sizes[np.minimum(np.searchsorted(sizes, wanted), len(sizes) - 1)] if len(sizes) else wanted

    size = next_size(np.full_like(per_block, preferred))
    before_volta = limits.capability is not None and int(limits.capability.split(".")[0]) < 7
    more = np.full_like(per_block, limits.shared) if before_volta else next_size(per_block)
    return np.where(per_block <= size, size, more)


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
    holds the resident blocks (None where it is fixed), `l1_bytes` what it leaves to the L1 cache (None where the two
    are apart, or it is not known).
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
    return calculations(limits, [registers], [shared_bytes], [block], [barriers], carveout_bytes=carveout_bytes)[0]


def calculations(
    limits: Limits,
    registers: Sequence[int],
    shared_bytes: Sequence[int],
    block: Sequence[int],
    barriers: Sequence[int],
    *,
    carveout_bytes: int | None = None,
) -> list[Calculation]:
    """`calculate` of many launches at once, one an entry of the sequences, which are of one length."""
    for name, values, least, most in (
        ("registers", registers, 0, limits.max_registers_per_thread),
        ("bytes of shared memory", shared_bytes, 0, limits.shared_per_block),
        ("threads of a block", block, 1, limits.max_threads_per_block),
        ("barriers", barriers, 0, limits.barriers or MOST),
        ("bytes of carveout", () if carveout_bytes is None else (carveout_bytes,), 0, limits.shared),
    ):
        for value in (min(values, default=least), max(values, default=least)):
            _check(name, value, least, most)
    found: list[Calculation] = []
    for start in range(0, len(block), _CHUNK):
        part = slice(start, start + _CHUNK)
        r, s, b, n = (np.array(column[part], np.int64) for column in (registers, shared_bytes, block, barriers))
        found += _calculations(limits, r, s, b, n, carveout_bytes)
    return found


def _check(name: str, value: int, least: int, most: int) -> None:
    """Refuse a count below `least`, and one too absurd to work with; `most` is what can be launched."""
    if value < least:
        what = f"{shown(value)} is less than {'nothing' if least == 0 else least}"
        raise InputError(what, name, f"give {least} to {most:,}")
    if value > MOST:
        raise InputError(f"{shown(value)} is beyond any GPU", name, f"give {least} to {most:,}")


def shown(value: int) -> str:
    """A number in words of bounded length.

    >>> shown(2048), shown(10**40)
    ('2,048', 'about 1e+40')
    """
    return f"{value:,}" if abs(value) < 10**20 else f"about {Decimal(value):.0e}"


def _calculations(
    limits: Limits, registers: Ints, shared: Ints, block: Ints, barriers: Ints, carveout_bytes: int | None
) -> list[Calculation]:
    columns = occupancy(limits, registers, shared, block, barriers=barriers, carveout_bytes=carveout_bytes)
    changes = _changes(limits, registers, shared, block, barriers, columns.occupancy, carveout_bytes)
    needed = columns.blocks * _up(shared + limits.shared_reserved, limits.shared_unit)
    sizes: list[int | None] = [None] * len(block)
    if len(limits.carveouts) > 1:
        at = np.minimum(np.searchsorted(limits.carveouts, needed), len(limits.carveouts) - 1)
        sizes = np.array(limits.carveouts)[at].tolist()
    rows = (registers, shared, block, barriers, columns.blocks, columns.warps, columns.occupancy)
    causes = list(columns.limits)
    found = []
    for r, s, b, n, blocks, warps, share, allowed, size, lifts in zip(
        *(column.tolist() for column in rows),
        np.stack([columns.limits[cause] for cause in causes], axis=1).tolist(),
        sizes,
        changes,
        strict=True,
    ):
        by = {cause: limit for cause, limit in zip(causes, allowed, strict=True) if limit < _UNLIMITED}
        found.append(
            Calculation(
                registers=r,
                shared_bytes=s,
                block=b,
                barriers=n,
                max_warps=limits.max_warps,
                blocks=blocks,
                warps=warps,
                occupancy=share,
                limits=MappingProxyType(by),
                limiting=tuple(cause for cause, limit in by.items() if limit == blocks),
                changes=tuple(lifts),
                carveout_bytes=size,
                l1_bytes=None if size is None or limits.l1 is None else limits.l1 - size,
            )
        )
    return found


def _changes(
    limits: Limits,
    registers: Ints,
    shared: Ints,
    block: Ints,
    barriers: Ints,
    now: Floats,
    carveout_bytes: int | None,
) -> list[list[Change]]:
    """For each knob the least change that lifts occupancy, and the one that lifts it furthest if that is another."""
    given = {"registers": registers[:, None], "shared_bytes": shared[:, None], "block": block[:, None]}
    # Shared memory a block may have for each number of resident blocks, the most first; and none.
    room = limits.shared // np.arange(1, limits.max_blocks + 1) // limits.shared_unit * limits.shared_unit
    room = np.append(np.minimum(room - limits.shared_reserved, limits.shared_per_block), 0)
    room = room[room >= 0]
    threads = np.arange(limits.warp_size, limits.max_threads_per_block + 1, limits.warp_size)
    # The nearest block by ratio first; of two as near the smaller, which leaves more blocks to balance.
    nearest = np.argsort(np.abs(np.log(threads / given["block"])), axis=1, kind="stable")
    # Registers are handed out in units, so the most of each unit stands for the others; fewer than 16 nobody compiles.
    fewer = np.arange(limits.max_registers_per_thread, 15, -1)
    units = _up(fewer * limits.warp_size, limits.register_unit)
    fewer = fewer[np.append(True, units[1:] < units[:-1])]
    # By knob: the values to try, the nearest first, and where they are changes at all.
    tried = {
        "registers": ("registers", fewer[None, :], fewer < given["registers"]),
        "shared": ("shared_bytes", room[None, :], room < given["shared_bytes"]),
        "block": ("block", threads[nearest], np.True_),
    }
    changes: list[list[Change]] = [[] for _ in range(len(now))]
    for knob, (argument, values, is_change) in tried.items():
        launch: dict[str, Any] = {**given, argument: values}
        columns = occupancy(limits, **launch, barriers=barriers[:, None], carveout_bytes=carveout_bytes)
        lifts = (columns.occupancy > now[:, None] + 1e-9) & is_change
        least = np.argmax(lifts, axis=1)
        most = np.argmax(np.where(lifts, columns.occupancy, -1.0), axis=1)
        values = np.broadcast_to(values, lifts.shape)
        for row in np.flatnonzero(lifts.any(axis=1)).tolist():
            for i in dict.fromkeys((int(least[row]), int(most[row]))):
                share = float(columns.occupancy[row, i])
                changes[row].append(Change(knob, int(values[row, i]), int(columns.blocks[row, i]), share))
    return changes


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
