"""Reads the TOML files of the catalogue; refuses what is unknown, unsourced or in the wrong unit.

Every number in a file is a pair, the value with its unit and the key of its source::

    memory_bandwidth = ["2039 GB/s", "datasheet"]

    [sources]
    datasheet = "NVIDIA A100 Tensor Core GPU data sheet, 2021"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from foretell import documents, units
from foretell.errors import InputError, UnknownNameError, near_names, unknown
from foretell.hardware.device import DTYPES, KINDS, UNITS, Device, FrozenMap, Link

__all__ = ["Reader", "compute_capabilities", "load_device", "read_count", "read_toml", "slug_of"]

Parser = Callable[[Any, str], Any]

DATA = Path(__file__).parent
_LEAST, _MOST = 1e-12, 1e24  # no figure of a device is zero, nor beyond these in SI units
_MOST_MULTIPROCESSORS = 4096  # of a GPU or processor; a wafer may have more
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def read_count(value: Any, where: str) -> int:
    """A whole number above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{value!r} is not a whole number above zero", where, "write a plain number such as 108")
    return value


def _year(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1970 <= value <= 2100:
        raise InputError(f"{value!r} is not a year", where, "write a year such as 2020")
    return value


#: What a figure may be in SI units, by its parser: from a slow part's to a hundred times today's largest machine's.
_RANGES: Mapping[Parser, tuple[float, float]] = {
    read_count: (1, 2**24),
    units.parse_frequency: (1e6, 1e11),
    units.parse_bytes: (1, 2**60),
    units.parse_bandwidth: (1e3, 1e18),
    units.parse_power: (1e-3, 1e8),
    units.parse_flops: (1e3, 1e22),
}
#: TOML key of a number → (field of `Device`, parser).
NUMBERS: Mapping[str, tuple[str, Parser]] = {
    "launch_year": ("launch_year", _year),
    "multiprocessors": ("multiprocessors", read_count),
    "base_clock": ("base_clock_hz", units.parse_frequency),
    "boost_clock": ("boost_clock_hz", units.parse_frequency),
    "l1_per_sm": ("l1_bytes_per_sm", units.parse_bytes),
    "l2": ("l2_bytes", units.parse_bytes),
    "l3": ("l3_bytes", units.parse_bytes),
    "memory": ("memory_bytes", units.parse_bytes),
    "memory_bandwidth": ("memory_bandwidth_bytes_per_s", units.parse_bandwidth),
    "tdp": ("tdp_w", units.parse_power),
    "idle": ("idle_w", units.parse_power),
    "price": ("price_usd", units.parse_money),
    "price_per_hour": ("price_usd_per_h", units.parse_money_per_hour),
}
#: The same for the limits that a compute capability fixes; a device file may state them too (AMD's do).
LIMITS: Mapping[str, tuple[str, Parser]] = {
    "warp_size": ("warp_size", read_count),
    "max_warps_per_sm": ("max_warps_per_sm", read_count),
    "max_blocks_per_sm": ("max_blocks_per_sm", read_count),
    "max_threads_per_block": ("max_threads_per_block", read_count),
    "registers_per_sm": ("registers_per_sm", read_count),
    "max_registers_per_block": ("max_registers_per_block", read_count),
    "max_registers_per_thread": ("max_registers_per_thread", read_count),
    "register_allocation_unit": ("register_allocation_unit", read_count),
    "warp_allocation_unit": ("warp_allocation_unit", read_count),
    "shared_per_sm": ("shared_bytes_per_sm", units.parse_bytes),
    "shared_per_block": ("shared_bytes_per_block", units.parse_bytes),
    "shared_allocation_unit": ("shared_allocation_unit_bytes", units.parse_bytes),
    "shared_reserved_per_block": ("shared_reserved_bytes_per_block", units.parse_bytes),
    "l1_per_sm": ("l1_bytes_per_sm", units.parse_bytes),
}
_TEXTS = ("title", "vendor", "kind", "architecture", "compute_capability", "memory_type")
_REQUIRED = ("title", "vendor", "kind", "architecture")
_LINK_KEYS = ("kind", "generation", "topology", "bandwidth", "latency", "count")


class Reader:
    """One TOML document, its sources, and where to say an error is."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data
        self.used: set[str] = set()
        sources = data.get("sources", {})
        if not isinstance(sources, dict) or not all(isinstance(t, str) and t.strip() for t in sources.values()):
            raise InputError("must give a text for every key", self.where("sources"), '[sources]\nkey = "title, year"')
        self.texts: dict[str, str] = sources
        #: field → text of its source, filled as numbers are read.
        self.sources: dict[str, str] = {}

    def where(self, key: str) -> str:
        return f"{self.path}: {key}"

    def text(self, table: Mapping[str, Any], key: str, prefix: str = "") -> str | None:
        """The text under `key`, or None if absent."""
        value = table.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{value!r} is not a text", self.where(prefix + key), f'write {key} = "…"')
        if not value.isprintable():  # a terminal would take it for a command
            raise InputError(f"{value[:60]!r} has characters that do not print", self.where(prefix + key), "mend it")
        return value

    def number(self, table: Mapping[str, Any], key: str, parse: Parser, name: str, prefix: str = "") -> Any:
        """The sourced number under `key` (None if absent), parsed; its source is kept under `name`."""
        if key not in table:
            return None
        where = self.where(prefix + key)
        pair = table[key]
        repair = f'write {key} = [value with unit, "source key"] and give that key under [sources]'
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], str):
            raise InputError("a number needs its source", where, repair)
        value, source = pair
        if source not in self.texts:
            near = near_names(source, self.texts)
            hint = f"did you mean {near[0]!r}?" if near else repair
            raise InputError(f"source {source!r} is not under [sources]", where, hint)
        self.used.add(source)
        self.sources[name] = self.texts[source]
        parsed = parse(value, where)
        none = parsed == 0 and key == "shared_reserved_per_block"  # before Ampere none is
        least, most = _RANGES.get(parse, (_LEAST, _MOST))
        if isinstance(parsed, (int, float)) and not none and not least <= parsed <= most:
            raise InputError(f"{str(value)[:40]!r} is no sensible figure", where, "leave out what is not known")
        return parsed

    def only(self, table: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> None:
        """Refuse keys outside `known`."""
        names = tuple(known)
        for key in table:
            if key not in names:
                near = near_names(key, names, 3)
                hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "known: " + ", ".join(names)
                raise InputError(f"unknown key {key!r}", f"{self.path}{': ' + prefix[:-1] if prefix else ''}", hint)

    def one_of(self, value: str, known: tuple[str, ...], key: str) -> str:
        if value not in known:
            near = near_names(value, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
            raise InputError(f"unknown {key} {value!r}", self.where(key), hint)
        return value

    def link(self, table: Any, key: str) -> Link:
        """One entry of ``[[links]]``."""
        if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
            raise InputError("a link needs its kind", self.where(key), '[[links]]\nkind = "pcie"')
        self.only(table, _LINK_KEYS, f"{key}.")
        kind = table["kind"]
        name = f"{key}.{kind}"
        return Link(
            kind=kind,
            generation=self.text(table, "generation", f"{name}."),
            topology=self.text(table, "topology", f"{name}."),
            bandwidth_bytes_per_s=self.number(
                table, "bandwidth", units.parse_bandwidth, f"{name}.bandwidth", f"{name}."
            ),
            latency_s=self.number(table, "latency", units.parse_time, f"{name}.latency", f"{name}."),
            count=self.number(table, "count", read_count, f"{name}.count", f"{name}.") or 1,
        )

    def finish(self) -> None:
        """Refuse sources that no number names: they are most often a slip in a number's key."""
        for key in self.texts:
            if key not in self.used:
                raise InputError(f"source {key!r} is used by no number", self.where("sources"), "remove or use it")


_FOLDER = "use a folder that holds device files only"


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a data file of this room; see `foretell.documents.read_toml`."""
    return documents.read_toml(path, "TOML file")


def slug_of(path: Path) -> str:
    """A device's or node's name: the file name without ``.toml``, lower-case words joined by dashes."""
    if not _SLUG.fullmatch(path.stem):
        repair = f"use a-z, 0-9 and single dashes; {_FOLDER}"
        raise InputError("the file name is the device's name", str(path), repair)
    return path.stem


@cache
def compute_capabilities() -> Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]]:
    """Compute capability → (limits by `Device` field, source of each)."""
    path = DATA / "compute_capability.toml"
    data = read_toml(path)
    found: dict[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {}
    for capability, table in data.items():
        if capability == "sources":
            continue
        reader = Reader(path, {"sources": data["sources"]})
        reader.only(table, LIMITS, f"{capability}.")
        limits = {
            name: reader.number(table, key, parse, name, f"{capability}.") for key, (name, parse) in LIMITS.items()
        }
        found[capability] = (limits, reader.sources)
    return found


def load_device(path: str | Path, aliases: tuple[str, ...] = ()) -> Device:
    """Read one device file; `aliases` are added to those the file gives.

    Raises `InputError`, naming file and key, for malformed TOML (with its line), a number without a source or in the
    wrong unit, an unknown or missing key, or a compute capability that is not in ``compute_capability.toml``.
    """
    path = Path(path)
    reader = Reader(path, read_toml(path))
    data = reader.data
    if not {*_REQUIRED, "peaks"} & data.keys():
        raise InputError("describes no device: it has none of a device's keys", str(path), _FOLDER)
    reader.only(data, (*_TEXTS, "aliases", *NUMBERS, *LIMITS, "peaks", "links", "sources"))
    texts = {key: reader.text(data, key) for key in _TEXTS}
    for key in _REQUIRED:
        if texts[key] is None:
            raise InputError(f"{key!r} is missing", str(path), f'add {key} = "…"')
    reader.one_of(str(texts["kind"]), KINDS, "kind")
    own = data.get("aliases", [])
    if not isinstance(own, list) or not all(isinstance(a, str) and a.strip() for a in own):
        raise InputError("must be a list of texts", reader.where("aliases"), 'write aliases = ["…"]')

    values: dict[str, Any] = {}
    for key, (name, parse) in {**NUMBERS, **LIMITS}.items():
        values[name] = reader.number(data, key, parse, name)
    _consistent(reader, str(texts["kind"]), values)
    peaks = _peaks(reader, data.get("peaks", {}))
    tables = data.get("links", [])
    if not isinstance(tables, list):
        raise InputError("must be a list of tables", reader.where("links"), '[[links]]\nkind = "pcie"')
    links = tuple(reader.link(table, "links") for table in tables)
    reader.finish()

    sources = dict(reader.sources)
    capability = texts["compute_capability"]
    if capability is not None:
        known = compute_capabilities()
        if capability not in known:
            raise InputError(
                f"compute capability {capability!r} is not in the table",
                reader.where("compute_capability"),
                "known: " + ", ".join(known) + "; or leave it out and state the limits",
            )
        limits, limit_sources = known[capability]
        for name, value in limits.items():
            if values[name] is None and value is not None:
                values[name] = value
                sources[name] = limit_sources[name]
    return Device(
        name=slug_of(path),
        title=str(texts["title"]),
        vendor=str(texts["vendor"]),
        kind=str(texts["kind"]),
        architecture=str(texts["architecture"]),
        compute_capability=capability,
        memory_type=texts["memory_type"],
        aliases=(*aliases, *own),
        peaks=FrozenMap(peaks),
        links=links,
        sources=FrozenMap(sources),
        **values,
    )


def _consistent(reader: Reader, kind: str, values: Mapping[str, Any]) -> None:
    """Refuse numbers that no device has together."""
    count = values["multiprocessors"]
    if kind != "accelerator" and count is not None and count > _MOST_MULTIPROCESSORS:
        what = f"{count:,} is more than any {kind} has ({_MOST_MULTIPROCESSORS:,})"
        raise InputError(what, reader.where("multiprocessors"), "give multiprocessors, not cores or threads")
    for low, high in (("base_clock", "boost_clock"), ("idle", "tdp"), ("shared_per_block", "shared_per_sm")):
        least, most = (values[{**NUMBERS, **LIMITS}[key][0]] for key in (low, high))
        if least is not None and most is not None and least > most:
            raise InputError(f"is more than {high}", reader.where(low), "look whether the two are exchanged")


def _peaks(reader: Reader, table: Any) -> dict[str, float]:
    if not isinstance(table, dict):
        raise InputError("must be a table", reader.where("peaks"), "[peaks]")
    peaks: dict[str, float] = {}
    for key in table:
        dtype, _, unit = key.partition(".")
        try:
            if dtype not in DTYPES:
                raise unknown("number format", dtype, DTYPES)
            if unit not in UNITS:
                raise unknown("unit", unit, UNITS)
        except UnknownNameError as error:
            repair = error.hint or ""
            raise InputError(error.message, reader.where(f'peaks."{key}"'), f'{repair}; write "fp16.tensor"') from None
        peaks[key] = reader.number(table, key, units.parse_flops, f"peaks.{key}", "peaks.")
    return peaks
