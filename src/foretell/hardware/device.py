"""`Device` and `Link`: what one accelerator or processor can do, and how it talks to others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from foretell.errors import unknown

__all__ = ["DTYPES", "KINDS", "UNITS", "Device", "FrozenMap", "Link"]

T = TypeVar("T")

#: Number formats a peak can be given for. ``fp16`` and ``fp8`` accumulate in fp32, as PyTorch asks; cards that are
#: faster with a 16-bit accumulator list that rate apart, under ``fp16acc16`` and ``fp8acc16``.
DTYPES = (
    *("fp64", "fp32", "tf32", "bf16", "fp16", "fp16acc16", "fp8", "fp8acc16", "fp6", "fp4"),
    *("int8", "int4"),
)
#: ``tensor``: matrix engines (tensor cores, matrix cores, MXU, AMX); ``vector``: everything else.
UNITS = ("tensor", "vector")
KINDS = ("gpu", "cpu", "accelerator")


class FrozenMap(Mapping[str, T], Generic[T]):
    """A read-only mapping that can be hashed and pickled, unlike `types.MappingProxyType`."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, T] | None = None) -> None:
        self._items: dict[str, T] = dict(items or {})

    def __getitem__(self, key: str) -> T:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True, slots=True)
class Link:
    """`count` equal links of one kind leaving a device or a node.

    `bandwidth_bytes_per_s` is of one link in one direction, as the signalling allows, before protocol overhead.
    `topology` says how the links of one machine are wired: ``nvswitch`` (any pair at full speed), ``full-mesh``,
    ``hybrid-mesh`` (DGX-1's cube), ``bridge`` (an optional bridge between two cards), ``torus``, ``tree``.
    """

    kind: str
    generation: str | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None
    count: int = 1
    topology: str | None = None

    @property
    def total_bandwidth_bytes_per_s(self) -> float | None:
        """All `count` links together, one direction."""
        if self.bandwidth_bytes_per_s is None:
            return None
        return self.bandwidth_bytes_per_s * self.count

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


# Fields that only make sense where many threads share a multiprocessor.
_GPU_ONLY = frozenset(
    {
        "warp_size",
        "max_warps_per_sm",
        "max_blocks_per_sm",
        "max_threads_per_block",
        "registers_per_sm",
        "max_registers_per_block",
        "max_registers_per_thread",
        "register_allocation_unit",
        "warp_allocation_unit",
        "shared_bytes_per_sm",
        "shared_bytes_per_block",
        "shared_allocation_unit_bytes",
        "shared_reserved_bytes_per_block",
    }
)
# Fields that exist on some vendors' devices only, so that None does not mean unknown.
_OPTIONAL = frozenset({"compute_capability", "l3_bytes"})


@dataclass(frozen=True, slots=True)
class Device:
    """One device, in SI units; None where the catalogue does not know, never a guess.

    A device is what a framework sees as one: one GPU of the two on a K80 board, one die (GCD) of an MI250.
    Names follow NVIDIA's, being the most used: a *multiprocessor* (sm) is also AMD's compute unit, Intel's Xe core, a
    CPU's core; a *warp* also a wavefront; *shared* memory also LDS.

    `peaks` maps ``"<dtype>.<unit>"`` (see `DTYPES`, `UNITS`) to dense FLOP/s, no sparsity, at `boost_clock_hz`
    unless the source says otherwise. `memory_bytes` is what the driver reports as total where that is on record (ECC
    in its default state), else the nominal binary amount: "80 GB" of HBM is 80 GiB. `l1_bytes_per_sm` includes shared
    memory where the two are one. `price_usd` is a list price at launch, `price_usd_per_h` an on-demand cloud price of
    one device, both dated in `sources`, which maps each field (``peaks.fp16.tensor``, ``links.nvlink.bandwidth``) to
    where its number is from.

    Occupancy limits (`max_warps_per_sm` … `shared_reserved_bytes_per_block`) follow CUDA's: registers are handed out
    per warp in multiples of `register_allocation_unit`, warps in multiples of `warp_allocation_unit`, shared memory
    in multiples of `shared_allocation_unit_bytes` after adding `shared_reserved_bytes_per_block`.
    """

    name: str
    title: str
    vendor: str
    kind: str
    architecture: str
    aliases: tuple[str, ...] = ()
    compute_capability: str | None = None
    launch_year: int | None = None
    multiprocessors: int | None = None
    peaks: Mapping[str, float] = field(default_factory=FrozenMap)
    base_clock_hz: float | None = None
    boost_clock_hz: float | None = None
    warp_size: int | None = None
    max_warps_per_sm: int | None = None
    max_blocks_per_sm: int | None = None
    max_threads_per_block: int | None = None
    registers_per_sm: int | None = None
    max_registers_per_block: int | None = None
    max_registers_per_thread: int | None = None
    register_allocation_unit: int | None = None
    warp_allocation_unit: int | None = None
    shared_bytes_per_sm: int | None = None
    shared_bytes_per_block: int | None = None
    shared_allocation_unit_bytes: int | None = None
    shared_reserved_bytes_per_block: int | None = None
    l1_bytes_per_sm: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    memory_bytes: int | None = None
    memory_type: str | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    links: tuple[Link, ...] = ()
    tdp_w: float | None = None
    idle_w: float | None = None
    price_usd: float | None = None
    price_usd_per_h: float | None = None
    sources: Mapping[str, str] = field(default_factory=FrozenMap)

    @property
    def max_threads_per_sm(self) -> int | None:
        """Resident threads one multiprocessor can hold."""
        if self.max_warps_per_sm is None or self.warp_size is None:
            return None
        return self.max_warps_per_sm * self.warp_size

    def peak(self, dtype: str, unit: str | None = None) -> float | None:
        """Dense FLOP/s (integer OP/s) in `dtype` on `unit`, or on the faster unit; None where there is no such path.

        A format without a path of its own is None even if the device could emulate it: the caller decides what runs
        instead. Raises `UnknownNameError` for a dtype or unit outside `DTYPES` and `UNITS`.
        """
        if dtype not in DTYPES:
            raise unknown("number format", dtype, DTYPES)
        if unit is not None and unit not in UNITS:
            raise unknown("unit", unit, UNITS)
        rates = [self.peaks.get(f"{dtype}.{u}") for u in (UNITS if unit is None else (unit,))]
        return max((rate for rate in rates if rate is not None), default=None)

    def ridge(self, dtype: str, unit: str | None = None) -> float | None:
        """FLOP per byte of memory traffic above which `dtype` arithmetic, not memory, limits (the roofline's ridge)."""
        peak = self.peak(dtype, unit)
        if peak is None or self.memory_bandwidth_bytes_per_s is None:
            return None
        return peak / self.memory_bandwidth_bytes_per_s

    def link(self, kind: str) -> Link | None:
        """The links of one kind (``nvlink``, ``pcie``, …), or None."""
        return next((link for link in self.links if link.kind == kind), None)

    def missing(self) -> tuple[str, ...]:
        """Names of the fields that the catalogue does not know (those that make sense for this kind of device)."""
        skipped = _OPTIONAL if self.kind == "gpu" else _OPTIONAL | _GPU_ONLY
        if self.price_usd is not None or self.price_usd_per_h is not None:  # one is enough to know what it costs
            skipped = skipped | {"price_usd", "price_usd_per_h"}
        return tuple(
            f.name
            for f in fields(self)
            if f.name not in skipped
            and f.name not in ("aliases", "sources")
            and getattr(self, f.name) in (None, (), FrozenMap())
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them; None stays None."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["aliases"] = list(self.aliases)
        data["peaks"] = dict(self.peaks)
        data["links"] = [link.to_dict() for link in self.links]
        data["sources"] = dict(self.sources)
        return data
