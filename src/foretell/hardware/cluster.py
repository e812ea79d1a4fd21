"""`Node` and `Cluster`: devices wired into machines, and machines into a network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from foretell import units
from foretell.errors import InputError, UnknownNameError, near_names, unknown
from foretell.hardware.catalogue import device, fold
from foretell.hardware.device import Device, FrozenMap, Link
from foretell.hardware.loader import DATA, Reader, read_count, read_toml, slug_of

__all__ = ["Cluster", "Node", "cluster", "load_node", "network", "networks", "node", "nodes"]

#: How the devices of one machine reach each other.
TOPOLOGIES = ("single", "nvswitch", "full-mesh", "hybrid-mesh", "torus", "pcie-tree")
#: Boxes of plain cards are built for up to this many; larger counts must be split over machines.
MOST_PER_BOX = 16


@dataclass(frozen=True, slots=True)
class Node:
    """One machine, or one rack wired as one (NVL72): `count` equal devices.

    `link` is what joins the devices, seen from one of them: `link.total_bandwidth_bytes_per_s` is what one device can
    send into `topology` (one of `TOPOLOGIES`). `nics` are the ports to other machines, together for the whole node.
    Prices are of the whole node, dated in `sources`; None is unknown.
    """

    name: str
    title: str
    device: Device
    count: int
    topology: str
    link: Link | None = None
    cpu: str | None = None
    host_memory_bytes: int | None = None
    nics: tuple[Link, ...] = ()
    power_w: float | None = None
    price_usd: float | None = None
    price_usd_per_h: float | None = None
    sources: Mapping[str, str] = field(default_factory=FrozenMap)

    @property
    def memory_bytes(self) -> int | None:
        """Device memory of the whole node."""
        return None if self.device.memory_bytes is None else self.count * self.device.memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them; the device by its name."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["device"] = self.device.name
        data["link"] = None if self.link is None else self.link.to_dict()
        data["nics"] = [nic.to_dict() for nic in self.nics]
        data["sources"] = dict(self.sources)
        return data


@dataclass(frozen=True, slots=True)
class Cluster:
    """Groups of equal nodes, and the network between all of them.

    `network` is what one node has: `network.count` ports; None when there is only one node. Where groups have
    different numbers of ports, it is the fewest.
    """

    name: str
    groups: tuple[tuple[int, Node], ...]
    network: Link | None = None

    @property
    def node_count(self) -> int:
        """Machines in all groups."""
        return sum(count for count, _ in self.groups)

    @property
    def device_count(self) -> int:
        """Devices in all machines."""
        return sum(count * node.count for count, node in self.groups)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every machine in order, a group of n as n entries."""
        return tuple(node for count, node in self.groups for _ in range(count))

    @property
    def homogeneous(self) -> bool:
        """Whether all devices are of one kind."""
        return len({node.device.name for _, node in self.groups}) == 1

    @property
    def price_usd_per_h(self) -> float | None:
        """On-demand price of all nodes; None if that of any is unknown."""
        total = 0.0
        for count, node in self.groups:
            if node.price_usd_per_h is None:
                return None
            total += count * node.price_usd_per_h
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        return {
            "name": self.name,
            "groups": [{"count": count, "node": node.to_dict()} for count, node in self.groups],
            "network": None if self.network is None else self.network.to_dict(),
        }


_NODE_KEYS = (
    *("title", "device", "count", "topology", "link", "cpu", "host_memory", "nics", "power"),
    *("price", "price_per_hour", "sources"),
)


def load_node(path: str | Path) -> Node:
    """Read one node file; the same rules as for `load_device`."""
    path = Path(path)
    reader = Reader(path, read_toml(path))
    data = reader.data
    reader.only(data, _NODE_KEYS)
    title, chip, topology = (reader.text(data, key) for key in ("title", "device", "topology"))
    for key, value in (("title", title), ("device", chip), ("topology", topology)):
        if value is None:
            raise InputError(f"{key!r} is missing", str(path), f'add {key} = "…"')
    reader.one_of(str(topology), TOPOLOGIES, "topology")
    try:
        found = device(str(chip))
    except UnknownNameError as error:
        raise InputError(error.message, reader.where("device"), error.hint) from None
    kind = reader.text(data, "link")
    link = None if kind is None else found.link(kind)
    if kind is not None and link is None:
        known = ", ".join(item.kind for item in found.links)
        raise InputError(f"{found.name} has no link {kind!r}", reader.where("link"), f"it has: {known}")
    count = reader.number(data, "count", read_count, "count")
    if count is None:
        raise InputError("'count' is missing", str(path), 'add count = [8, "source key"]')

    nics = []
    for table in data.get("nics", []):
        reader.only(table, ("network", "count"), "nics.")
        name = reader.text(table, "network", "nics.")
        try:
            port = network(name or "")
        except UnknownNameError as error:
            raise InputError(error.message, reader.where("nics.network"), error.hint) from None
        ports = reader.number(table, "count", read_count, f"nics.{name}.count", "nics.")
        nics.append(replace(port, count=ports or 1))
    made = Node(
        name=slug_of(path),
        title=str(title),
        device=found,
        count=count,
        topology=str(topology),
        link=link,
        cpu=reader.text(data, "cpu"),
        host_memory_bytes=reader.number(data, "host_memory", units.parse_bytes, "host_memory_bytes"),
        nics=tuple(nics),
        power_w=reader.number(data, "power", units.parse_power, "power_w"),
        price_usd=reader.number(data, "price", units.parse_money, "price_usd"),
        price_usd_per_h=reader.number(data, "price_per_hour", units.parse_money_per_hour, "price_usd_per_h"),
        sources=FrozenMap(reader.sources),
    )
    reader.finish()
    return made


@cache
def _node_files() -> Mapping[str, Path]:
    return {slug_of(path): path for path in sorted((DATA / "nodes").glob("*.toml"))}


@cache
def _node(name: str) -> Node:
    return load_node(_node_files()[name])


def nodes() -> tuple[str, ...]:
    """Names of all nodes in the catalogue, sorted."""
    return tuple(_node_files())


def node(name: str) -> Node:
    """The node called `name`, in any case and with any separators."""
    keys = {fold(known): known for known in _node_files()}
    if fold(name) not in keys:
        raise unknown("node", name, nodes())
    return _node(keys[fold(name)])


@cache
def _networks() -> Mapping[str, Link]:
    path = DATA / "networks.toml"
    data = read_toml(path)
    reader = Reader(path, data)
    found = {name: reader.link(table, name) for name, table in data.items() if name != "sources"}
    reader.finish()
    return found


def networks() -> tuple[str, ...]:
    """Names of all networks."""
    return tuple(_networks())


def network(name: str) -> Link:
    """One port of the network called `name`."""
    keys = {fold(known): known for known in _networks()}
    if fold(name) not in keys:
        raise unknown("network", name, networks())
    return _networks()[keys[fold(name)]]


GRAMMAR = (
    "write GROUP [+ GROUP]… [over [COUNTx] NETWORK], where GROUP is [COUNTx] NODE or [COUNTx] [COUNTx] DEVICE,"
    " such as '4x dgx-a100 + 2x dgx-h100 over ib-hdr' or '2x 8x l40s over roce-100'"
)
_COUNTED = re.compile(r"(\d+)\s*[x×*]\s*")
_MOST_NODES = 1_000_000  # far above any machine there is, and small enough for what multiplies it
_OVER = re.compile(r"\s+over\s+", re.IGNORECASE)


def cluster(text: str) -> Cluster:
    """The machines that `text` describes.

    ``16x dgx-h100`` is sixteen nodes; ``8x a100-sxm4-80gb`` one node of eight devices; ``2x 8x l40s over roce-100``
    two PCIe boxes with a port each; ``h100-sxm`` a single device. Parts joined by ``+`` share one network: the
    nodes' own ports unless ``over`` names another, which then takes as many ports as each node has (or as it says:
    ``over 4x ib-ndr``).

    Raises `InputError` for text outside this grammar, `UnknownNameError` for a name that is no node, device or network.

    >>> found = cluster("4x dgx-a100 + 2x dgx-h100 over ib-hdr")
    >>> found.node_count, found.device_count, found.network.generation
    (6, 48, 'HDR')
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError("a cluster cannot be empty", None, GRAMMAR)
    body, *over = _OVER.split(text.strip())
    if len(over) > 1 or text.strip().casefold().startswith("over ") or text.strip().casefold().endswith(" over"):
        raise InputError(f"cluster {text!r} needs one network after one 'over'", None, GRAMMAR)
    groups = tuple(_group(part, text) for part in body.split("+"))
    total = sum(count for count, _ in groups)
    if total > _MOST_NODES:
        raise InputError(f"a cluster of {total:,} nodes, want at most {_MOST_NODES:,}", text[:80])
    if total == 1 and over:
        raise InputError(f"cluster {text!r} has one node and so no network", None, "leave out 'over …'")
    return Cluster(text.strip(), groups, None if total == 1 else _between(groups, over, text))


def _group(part: str, text: str) -> tuple[int, Node]:
    counts: list[int] = []
    name = part.strip()
    while match := _COUNTED.match(name):
        counts.append(int(match[1]))
        name = name[match.end() :].strip()
    if not name or name.isdigit() or len(counts) > 2 or 0 in counts:
        raise InputError(f"cannot read {part.strip()!r} in cluster {text!r}", None, GRAMMAR)
    if fold(name) in {fold(known) for known in nodes()}:
        if len(counts) > 1:
            raise InputError(f"{name!r} in cluster {text!r} is a whole node: one count is enough", None, GRAMMAR)
        return (counts[0] if counts else 1), node(name)
    try:
        found = device(name)
    except UnknownNameError as error:
        near = (*near_names(name, nodes(), 2), *error.near)
        # An ambiguous device's own hint lists its variants, which is more use than near names.
        hint = error.hint if error.hint and error.hint.startswith("there is no default") else None
        raise UnknownNameError("node or device", name, near, (*nodes(), *error.known), hint) from None
    per_node = counts[-1] if counts else 1
    return (counts[0] if len(counts) == 2 else 1), _box(found, per_node, text)


def _box(found: Device, count: int, text: str) -> Node:
    """A machine of `count` bare devices, wired as that device's makers wire it."""
    fabric = next((link for link in found.links if link.topology in TOPOLOGIES), None)
    most = MOST_PER_BOX if fabric is None or fabric.topology != "torus" else None
    if most is not None and count > max(most, _rack(found) if count > most else 0):
        raise InputError(
            f"no machine holds {count} of {found.name} (cluster {text!r})",
            None,
            f"split them, e.g. '{-(-count // 8)}x 8x {found.name} over ib-ndr'",
        )
    if count == 1:
        topology, link = "single", None
    elif fabric is not None:
        topology, link = str(fabric.topology), fabric
    else:
        topology, link = "pcie-tree", found.link("pcie")
    price = None if found.price_usd_per_h is None else count * found.price_usd_per_h
    return Node(
        name=f"{count}x {found.name}",
        title=found.title if count == 1 else f"{count} × {found.title}",
        device=found,
        count=count,
        topology=topology,
        link=link,
        price_usd_per_h=price,
        sources=FrozenMap({} if price is None else {"price_usd_per_h": found.sources["price_usd_per_h"]}),
    )


def _rack(found: Device) -> int:
    """Devices of this kind in the largest machine of the catalogue that has them: a part of a rack is a machine too."""
    return max((item.count for item in map(node, nodes()) if item.device.name == found.name), default=0)


def _between(groups: tuple[tuple[int, Node], ...], over: list[str], text: str) -> Link:
    """What one node has to reach the others: the slowest node's ports."""
    ports = [sum(nic.count for nic in item.nics) for _, item in groups]
    if over:
        name = over[0].strip()
        counted = _COUNTED.match(name)
        if counted and int(counted[1]) == 0:
            raise InputError(f"cannot read {name!r} in cluster {text!r}", None, GRAMMAR)
        port = network(name[counted.end() :] if counted else name)
        return replace(port, count=int(counted[1]) if counted else min(p or 1 for p in ports))
    if 0 in ports:
        bare = next(item.name for (_, item), p in zip(groups, ports, strict=True) if p == 0)
        known = ", ".join(networks()[:4])
        raise InputError(
            f"no network is known for {bare!r} in cluster {text!r}", None, f"add 'over NETWORK', such as {known}"
        )
    candidates = [
        replace(nic, count=count)
        for (_, item), count in zip(groups, ports, strict=True)
        for nic in (min(item.nics, key=lambda link: link.bandwidth_bytes_per_s or 0.0),)
    ]
    return min(candidates, key=lambda link: link.total_bandwidth_bytes_per_s or 0.0)
