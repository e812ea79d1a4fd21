"""Machines and networks for reading: all of them by vendor and device, and one machine with its sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretell.hardware.cluster import Node
from foretell.hardware.device import Link
from foretell.report.devices import quantity
from foretell.report.text import UNKNOWN, Framed, add_row
from foretell.units import format_rate, format_time

__all__ = ["machine_list", "machine_view"]

# Field of `Node` → the heading it is shown under.
_FIELDS = ("cpu", "host_memory_bytes", "power_w", "price_usd", "price_usd_per_h")


def machine_list(nodes: Iterable[Node], networks: Mapping[str, Link]) -> RenderableType:
    """Every machine with its devices, what one of them can send to the others, and the machine's ports; then networks.

    Rates are of one direction, as the signalling allows.
    """
    machines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    machines.add_column("\nmachine", no_wrap=True)
    machines.add_column("\ndevices", no_wrap=True)
    machines.add_column("within\nGB/s", justify="right", no_wrap=True)
    machines.add_column("\nports", no_wrap=True)
    for node in sorted(nodes, key=lambda n: (n.device.vendor.casefold(), n.device.launch_year or 0, n.name)):
        add_row(machines, node.name, f"{node.count} × {node.device.name}", _within(node.link), _ports(node))
    ports = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    ports.add_column("network", no_wrap=True)
    ports.add_column("a port", justify="right", no_wrap=True)
    ports.add_column("latency", justify="right", no_wrap=True)
    for name, link in networks.items():
        add_row(ports, name, _rate(link.bandwidth_bytes_per_s),
                "" if link.latency_s is None else format_time(link.latency_s))  # fmt: skip
    said = ("Rates are of one direction. One machine in full: foretell devices NAME",
            "Several: --on '4x NAME', and where it has no ports --on '4x NAME over NETWORK'")  # fmt: skip
    return Group(machines, Text(""), ports, Text(""), *(Text(line, style="dim") for line in said))


def machine_view(node: Node) -> RenderableType:
    """Every field of a machine with its source."""
    numbers: dict[str, int] = {}

    def noted(value: str, field: str) -> Text:
        source = node.sources.get(field)
        note = "" if source is None else f" [{numbers.setdefault(source, len(numbers) + 1)}]"
        return Text.assemble(value, (note, "dim"))

    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column()
    add_row(rows, "devices", noted(f"{node.count} × {node.device.name}", "count"))
    if node.memory_bytes is not None:
        add_row(rows, "device memory", quantity("memory_bytes", node.memory_bytes)[1])
    add_row(rows, "topology", node.topology)
    if node.link is not None:
        add_row(rows, "link", f"{_called(node.link)}, {_rate(node.link.total_bandwidth_bytes_per_s)} from a device")
    counts = [key for key in node.sources if key.startswith("nics.")]
    for nic, key in zip(node.nics, counts, strict=True):
        add_row(rows, "ports", noted(f"{nic.count} × {_called(nic)}, {_rate(nic.bandwidth_bytes_per_s)} each", key))
    for field in _FIELDS:
        value = getattr(node, field)
        if value is not None:
            name, text = quantity(field, value)
            add_row(rows, name.replace("cpu", "CPU"), noted(text, field))
    parts: list[RenderableType] = [rows]
    missing = [quantity(field, None)[0].replace("cpu", "CPU") for field in _FIELDS if getattr(node, field) is None]
    if missing:
        parts += [Text(""), Text("Not in the catalogue", style="bold"), Text(", ".join(missing))]
    if numbers:
        notes = Table.grid(padding=(0, 1))
        notes.add_column(justify="right", style="dim", no_wrap=True)
        notes.add_column()
        for source, number in numbers.items():
            add_row(notes, f"[{number}]", Text(source))
        parts += [Text(""), Text("Sources", style="bold"), notes]
    parts += [Text(""), Text(f"Its device in full: foretell devices {node.device.name}", style="dim")]
    return Framed(node.title, Group(*parts), node.name)


def _called(link: Link) -> str:
    return f"{link.kind} {link.generation or ''}".strip()


def _rate(value: float | None) -> str:
    return UNKNOWN if value is None else format_rate(value)


def _within(link: Link | None) -> str:
    total = None if link is None else link.total_bandwidth_bytes_per_s
    return "" if total is None else f"{total / 1e9:,.0f}"


def _ports(node: Node) -> str:
    return ", ".join(f"{nic.count} × {_called(nic)}" for nic in node.nics)
