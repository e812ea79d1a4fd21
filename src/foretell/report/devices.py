"""The catalogue for reading: all devices by vendor and architecture, and one with its sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foretell.hardware.device import Device, Link
from foretell.report.text import Flow, Framed, add_row
from foretell.units import format_bytes, format_count, format_money, format_power, format_rate, format_time

__all__ = ["device_list", "device_view", "quantity"]

_KINDS = ("gpu", "accelerator", "cpu")
_WIDE = 90  # cells from which columns are set apart further


def device_list(devices: Iterable[Device]) -> RenderableType:
    """Main numbers of many devices by vendor and architecture: GPUs first, the newest architecture first in each."""
    return Group(
        _Devices(tuple(devices)),
        Text(""),
        Text("Dense peaks, no sparsity. Empty is unknown. One in full: foretell devices NAME", style="dim"),
        Text("Machines and networks: foretell devices --machines", style="dim"),
    )


class _Devices:
    """The table of `device_list`, its columns closer where the console is narrow."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
        self.groups: dict[tuple[str, str, str], list[Device]] = {}
        for device in devices:
            self.groups.setdefault((device.kind, device.vendor, device.architecture), []).append(device)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gap = 2 if options.max_width >= _WIDE else 1
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        table.add_column("\ndevice", no_wrap=True)
        for name in ("memory\nGiB", "bandwidth\nGB/s", "fp32\nTFLOP/s", "16 bit\nTFLOP/s", "TDP\nW", "\nyear", "\n$/h"):
            table.add_column(name, justify="right", no_wrap=True)
        for (_, vendor, architecture), members in sorted(self.groups.items(), key=_newest_first):
            if table.row_count:
                table.add_row()
            title = architecture if architecture.startswith(vendor) else f"{vendor} {architecture}"
            add_row(table, Text(title, style="bold cyan"))
            for device in sorted(members, key=lambda d: (d.launch_year or 0, d.name)):
                half = [rate for rate in (device.peak("fp16"), device.peak("bf16")) if rate is not None]
                add_row(
                    table,
                    f"  {device.name}",
                    _number(device.memory_bytes, 2**30),
                    _number(device.memory_bandwidth_bytes_per_s, 1e9),
                    _number(device.peak("fp32"), 1e12),
                    _number(max(half, default=None), 1e12),
                    _number(device.tdp_w, 1.0),
                    "" if device.launch_year is None else str(device.launch_year),
                    "" if device.price_usd_per_h is None else f"{device.price_usd_per_h:.2f}",
                )
        yield table


def _newest_first(group: tuple[tuple[str, str, str], list[Device]]) -> tuple[int, str, int, str]:
    (kind, vendor, architecture), members = group
    return _KINDS.index(kind), vendor.casefold(), -max(d.launch_year or 0 for d in members), architecture


def _number(value: float | None, unit: float) -> str:
    if value is None:
        return ""
    scaled = value / unit
    return f"{scaled:,.0f}" if scaled >= 99.5 else f"{scaled:.3g}"


# Sections of the full view: heading → fields of `Device`, in the order they are shown.
_SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Device", ("vendor", "kind", "architecture", "compute_capability", "launch_year", "aliases")),
    ("Compute", ("multiprocessors", "base_clock_hz", "boost_clock_hz", "peaks")),
    (
        "Memory",
        ("memory_bytes", "memory_type", "memory_bandwidth_bytes_per_s", "l1_bytes_per_sm", "l2_bytes", "l3_bytes"),
    ),
    (
        "Occupancy",
        (
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
        ),
    ),
    ("Links", ("links",)),
    ("Power, price", ("tdp_w", "idle_w", "price_usd", "price_usd_per_h")),
)
_APART = ("name", "title", "sources")  # said in the frame and the footnotes
_SHOWN = {name for _, names in _SECTIONS for name in names}

# Ending of a field's name → what prints its unit. The first that matches is meant.
_UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_bytes_per_s", format_rate),
    ("_bytes", format_bytes),
    ("_usd_per_h", format_money),
    ("_usd", format_money),
    ("_hz", lambda value: f"{format_count(value)}Hz"),
    ("_w", format_power),
)
_BYTES_PER = re.compile("_bytes(?=_per_(sm|block)$)")


def quantity(field: str, value: Any) -> tuple[str, str]:
    """A field's name without its unit, and its value with it.

    >>> quantity("l2_bytes", 41943040), quantity("shared_bytes_per_sm", 167936), quantity("multiprocessors", 108)
    (('l2', '40 MiB'), ('shared per sm', '164 KiB'), ('multiprocessors', '108'))
    """
    name = _BYTES_PER.sub("", field)
    form: Callable[[float], str] | None = None if name == field else format_bytes
    for ending, printer in _UNITS:
        if field.endswith(ending):
            name, form = field.removesuffix(ending), printer
            break
    if field.endswith("_usd_per_h"):
        name += " per hour"
    return name.replace("_", " "), form(value) if form and isinstance(value, (int, float)) else str(value)


def device_view(device: Device) -> RenderableType:
    """Every field of a device with its source, and the fields that the catalogue does not know."""
    numbers: dict[str, int] = {}  # source → its footnote

    def footnote(field: str) -> str:
        source = device.sources.get(field)
        return "" if source is None else f"[{numbers.setdefault(source, len(numbers) + 1)}]"

    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column()
    known = {f.name for f in fields(Device)}
    others = tuple(sorted(known - _SHOWN - set(_APART)))  # a field added later is shown, not forgotten
    for heading, names in (*_SECTIONS, ("Other", others)):
        entries: list[tuple[str, str, str]] = []
        for field in names:
            value = getattr(device, field)
            if field == "peaks":
                entries += [
                    (f"peak {key.replace('.', ' ')}", format_rate(peak, _operation(key)), footnote(f"peaks.{key}"))
                    for key, peak in device.peaks.items()
                ]
            elif field == "links":
                entries += [
                    (
                        f"{link.kind} {link.generation or ''}".strip(),
                        _link(link),
                        footnote(f"links.{link.kind}.bandwidth"),
                    )
                    for link in device.links
                ]
            elif field == "aliases":
                entries += [("also called", ", ".join(value), "")] if value else []
            elif value is not None:
                entries.append((*quantity(field, value), footnote(field)))
        if entries and rows.row_count:
            rows.add_row()
        for i, (name, value, note) in enumerate(entries):
            add_row(rows, heading if i == 0 else "", name, Text.assemble(value, (f" {note}", "dim") if note else ""))
    parts: list[RenderableType] = [rows]
    missing = device.missing()
    if missing:
        names_ = (quantity(field, None)[0] for field in missing)
        parts += [Text(""), Text("Not in the catalogue", style="bold"), Flow(*names_)]
    if numbers:
        notes = Table.grid(padding=(0, 1))
        notes.add_column(justify="right", style="dim", no_wrap=True)
        notes.add_column()
        for source, number in numbers.items():
            add_row(notes, f"[{number}]", Text(source))
        parts += [Text(""), Text("Sources", style="bold"), notes]
    return Framed(device.title, Group(*parts), device.name)


def _operation(key: str) -> str:
    return "OP" if key.startswith("int") else "FLOP"


def _link(link: Link) -> str:
    parts = []
    if link.bandwidth_bytes_per_s is not None:
        each = format_rate(link.bandwidth_bytes_per_s)
        total = link.total_bandwidth_bytes_per_s or 0.0
        parts.append(f"{link.count} × {each} = {format_rate(total)} one way" if link.count > 1 else f"{each} one way")
    elif link.count > 1:
        parts.append(f"{link.count} links")
    if link.latency_s is not None:
        parts.append(f"latency {format_time(link.latency_s)}")
    if link.topology is not None:
        parts.append(link.topology)
    return ", ".join(parts)
