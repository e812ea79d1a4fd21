"""`Fabric`: the links of a cluster, and how long a collective takes over them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.hardware.cluster import Cluster
from foretell.simulate.collectives import wiring
from foretell.simulate.collectives.family import PASSES, algorithms, check_kind, member
from foretell.simulate.collectives.groups import Floats, Groups
from foretell.simulate.collectives.rates import LinkRates, link_rates

__all__ = ["Fabric", "Route"]

#: Ports of a leaf switch that go down to nodes: half of a 64-port switch (NVIDIA Quantum-2 QM9700).
LEAF_PORTS = 32


@dataclass(frozen=True, slots=True)
class Route:
    """How one collective goes: the algorithm, its time, the others' times, and what holds it up.

    `bus_bytes_per_s` is nccl-tests' bus bandwidth: what each rank would have to send were it a ring. `bottleneck` is
    ``latency``, ``node`` (links within a node), ``network``, ``spine`` or ``node and network``, equally.
    `multiprocessors` are those the kernel takes from compute.
    """

    kind: str
    nbytes: float
    size: int
    stride: int
    algorithm: str
    time_s: float
    bus_bytes_per_s: float
    bottleneck: str
    multiprocessors: int
    candidates: Mapping[str, float]
    why: str

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links of a cluster, level by level: within a node, between nodes under a leaf switch, between leaves.

    Rates are as signalled, bytes/s in one direction. `node_rates` and `network_rates` hold what that kind of link
    makes of them. A cluster of unlike nodes is as slow as its slowest: a collective waits for every rank.
    """

    cluster: Cluster
    #: Ranks on one node.
    local: int
    #: Ranks in all.
    ranks: int
    node_kind: str | None
    network_kind: str | None
    #: One port of a node's network, and how many it has.
    port_rate: float
    ports: int
    rails: bool = True
    oversubscription: float = 1.0
    sharp: bool = False
    peer_access: bool = True
    leaf_nodes: int = LEAF_PORTS
    node_rates: LinkRates | None = None
    network_rates: LinkRates | None = None
    #: Two neighbours joined by a bridge, where cards behind PCIe have bridges.
    pairs: Fabric | None = None
    _geometry: dict[tuple[int, int, bool], tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        *,
        oversubscription: float = 1.0,
        rails: bool | None = None,
        sharp: bool = False,
        peer_access: bool | None = None,
        leaf_ports: int = LEAF_PORTS,
        port_bytes_per_s: float | None = None,
        bridges: bool = False,
    ) -> Fabric:
        """The fabric of `cluster`.

        `oversubscription`: how much more goes into a leaf switch than out of it to the spine. `rails`: each NIC of a
        node is on a leaf of its own, with the same NIC of the other nodes (the default where there is a NIC a
        device), else all NICs of a node are on one leaf. `sharp`: switches reduce (InfiniBand SHARP). `peer_access`:
        cards behind PCIe reach each other without host memory; the default is yes, but for GeForce cards, whose
        driver has it off. `leaf_ports`: ports of a leaf switch that go down.
        `port_bytes_per_s`: what a port of the network is taken to signal, where it is set lower than its kind's.
        `bridges`: cards behind PCIe are joined in pairs, each with the next, by the bridge that their data sheet names.

        Raises InputError for an oversubscription or ports below 1, a machine whose links are not known, or bridges for
        cards that take none.
        """
        if not oversubscription >= 1:
            raise InputError(f"oversubscription {oversubscription} is below 1", None, "1 is a full-rate spine")
        if leaf_ports < 1:
            raise InputError(f"leaf_ports {leaf_ports} is below 1", None, "give a leaf switch a port")
        if port_bytes_per_s is not None and not port_bytes_per_s > 0:
            raise InputError(f"a port of {port_bytes_per_s:g} bytes/s", None, "give it a rate above 0")
        nodes = [node for _, node in cluster.groups]
        if peer_access is None:
            peer_access = not any("GeForce" in node.device.title for node in nodes)
        local = min(node.count for node in nodes)
        many = [node for node in nodes if node.count > 1] if local > 1 else []
        slowest = min(many, key=lambda node: wiring.ring_rate(node, local, 1), default=None)
        node_kind = None if slowest is None else wiring.kind_of_wiring(slowest, peer_access)
        network = cluster.network
        if network is not None and network.bandwidth_bytes_per_s is None and port_bytes_per_s is None:
            raise InputError(f"the bandwidth of the network of {cluster.name!r} is not known", None, "name another")
        ports = 0 if network is None else network.count
        rails = (ports >= local) if rails is None else rails
        return cls(
            cluster=cluster,
            local=local,
            ranks=cluster.device_count,
            node_kind=node_kind,
            network_kind=None if network is None else network.kind,
            port_rate=0.0 if network is None else float(port_bytes_per_s or network.bandwidth_bytes_per_s or 0.0),
            ports=ports,
            rails=rails,
            oversubscription=float(oversubscription),
            sharp=sharp,
            peer_access=peer_access,
            leaf_nodes=leaf_ports if rails else max(1, leaf_ports // max(1, ports)),
            node_rates=None if node_kind is None else link_rates(node_kind, inside=True),
            network_rates=None if network is None else link_rates(network.kind, inside=False),
            pairs=cls.of(Cluster("a pair", ((1, wiring.bridged_pair(nodes[0])),))) if bridges else None,
        )

    def time_s(
        self,
        kind: str,
        nbytes: npt.ArrayLike,
        size: npt.ArrayLike,
        stride: npt.ArrayLike = 1,
        *,
        concurrent: bool = True,
        algorithm: str = "auto",
    ) -> Floats:
        """Seconds of a collective of `kind` on `nbytes` in groups of `size` ranks that are `stride` apart.

        All three broadcast to (rows,); a scalar gives a 0-d array. `concurrent`: the cluster's other ranks do the
        same in their own groups meanwhile, and share ports with this one. `algorithm`: ``auto`` takes the fastest
        that applies. A group of one takes no time. For ``send_recv`` the group is a chain of `size` ranks, each
        sending `nbytes` to the next; the slowest of these counts.

        Raises UnknownNameError for a `kind` or `algorithm` that does not exist, InputError for an algorithm that does
        not do the kind here, and for groups that the cluster does not hold.
        """
        check_kind(kind)
        sent, sizes, strides = np.broadcast_arrays(
            np.asarray(nbytes, np.float64), np.asarray(size, np.int64), np.asarray(stride, np.int64)
        )
        shape = sent.shape
        sent, sizes, strides = sent.ravel(), sizes.ravel(), strides.ravel()
        if sent.size == 0:
            return np.zeros(shape)
        if not np.all(sent >= 0):
            raise InputError("a collective of a negative number of bytes", "nbytes", "give sizes of 0 or more")
        groups = self.groups(sizes, strides, concurrent)
        times = self._over_bridges(kind, sent, groups, algorithm, self._run(kind, sent, groups, algorithm))
        if not np.all(np.isfinite(times)):
            row = int(np.flatnonzero(~np.isfinite(times))[0])
            raise InputError(
                f"{algorithm!r} cannot do {kind} among {sizes[row]} ranks {strides[row]} apart here",
                None,
                f"use 'auto' or one of {', '.join(algorithms(kind))}",
            )
        times = np.where((sizes <= 1) | (sent <= 0), 0.0, times)
        return times.reshape(shape)

    def _run(self, kind: str, sent: Floats, groups: Groups, algorithm: str) -> Floats:
        if algorithm != "auto":
            found = member(algorithm)
            if kind not in found.kinds:
                raise InputError(
                    f"{algorithm!r} does no {kind}", "algorithm", f"use one of {', '.join(algorithms(kind))}"
                )
            return found.run(kind, sent, groups, self)
        runs = [found.run for name in algorithms(kind) if (found := member(name)).auto]
        times: Floats = np.full(sent.shape, np.inf)
        # Groups of one node and groups of several take few of the same algorithms, so each kind goes by itself.
        for rows in (np.flatnonzero(groups.across), np.flatnonzero(~groups.across)):
            if rows.size:
                some, part = (groups, sent) if rows.size == sent.size else (groups.rows(rows), sent[rows])
                best = runs[0](kind, part, some, self)
                for run in runs[1:]:
                    best = np.minimum(best, run(kind, part, some, self))
                times[rows] = best
        return times

    def _over_bridges(self, kind: str, sent: Floats, groups: Groups, algorithm: str, times: Floats) -> Floats:
        """`times`, but of neighbours with a bridge over that."""
        joined = np.flatnonzero((groups.size == 2) & (groups.stride == 1) & (groups.local == 2))
        if self.pairs is None or not joined.size:
            return times
        two = np.full(joined.size, 2)
        over = self.pairs._run(kind, sent[joined], self.pairs.groups(two, two // 2, True), algorithm)
        times = times.copy()
        times[joined] = np.minimum(times[joined], over)
        return times

    def groups(self, size: npt.NDArray[np.int64], stride: npt.NDArray[np.int64], concurrent: bool) -> Groups:
        """The groups of `size` ranks `stride` apart, a row each; shapes are worked out once and kept."""
        code = size * (self.ranks + 1) + np.minimum(stride, self.ranks)
        _, first, index = np.unique(code, return_index=True, return_inverse=True)
        table = np.array([self._group(int(size[row]), int(stride[row]), concurrent) for row in first], np.float64)
        return Groups(*table[index].T)

    def _group(self, size: int, stride: int, concurrent: bool) -> tuple[float, ...]:
        key = (size, stride, concurrent)
        if key not in self._geometry:
            self._geometry[key] = self._work_out(size, stride, concurrent)
        return self._geometry[key]

    def _work_out(self, size: int, stride: int, concurrent: bool) -> tuple[float, ...]:
        if size < 1 or stride < 1:
            raise InputError(f"a group of {size} ranks {stride} apart", None, "both are 1 or more")
        if size > 1 and (size - 1) * stride >= self.ranks:
            raise InputError(
                f"a group of {size} ranks {stride} apart does not fit in {self.ranks}",
                self.cluster.name,
                f"at most {1 + (self.ranks - 1) // stride} ranks {stride} apart do",
            )
        local, nodes = members(self.local, self.ranks, size, stride)
        ring = mesh = pair = np.inf
        if local > 1:
            machines = [node for _, node in self.cluster.groups]
            ring = min(wiring.ring_rate(node, local, stride, not concurrent) for node in machines)
            mesh = min(wiring.mesh_rate(node, local, stride, not concurrent) for node in machines)
            pair = min(wiring.pair_rate(node, stride) for node in machines)
        sharers = max(1, self.local // local) if concurrent else 1
        total = self.port_rate * self.ports
        # A rank alone reaches the ports next to it; with more ranks, more ports.
        near = min(self.ports, max(1, -(-local * self.ports // self.local)))
        node_rate = min(total / sharers, near * self.port_rate) if nodes > 1 else np.inf
        rank_rate = node_rate / local
        crossing = min(stride, self.local) if concurrent else 1
        one = min(self.ports, max(1, self.ports // self.local)) * self.port_rate
        message = min(one, total / crossing) if nodes > 1 else np.inf
        step = max(1, stride // self.local)
        leaf = min(nodes, max(1, self.leaf_nodes // step))
        leaves = -(-nodes // leaf)
        spine = np.inf
        if leaves > 1:
            share = 1.0 if concurrent else self.leaf_nodes / leaf
            spine = node_rate * min(1.0, share / self.oversubscription) if np.isfinite(node_rate) else np.inf
        return tuple(
            float(value)
            for value in (
                *(size, stride, local, nodes, leaf, leaves),
                *(ring, mesh, pair, node_rate, rank_rate, message, spine),
            )
        )

    def route(self, kind: str, nbytes: float, size: int, stride: int = 1, *, concurrent: bool = True) -> Route:
        """Which algorithm one collective takes, and why.

        Raises as `time_s` does.
        """
        check_kind(kind)
        groups = self.groups(np.array([size]), np.array([stride]), concurrent)
        sent = np.array([float(nbytes)])
        candidates = {}
        for name in algorithms(kind):
            took = float(member(name).run(kind, sent, groups, self)[0])
            if np.isfinite(took) and member(name).auto:
                candidates[name] = took
        best = min(candidates, key=lambda name: candidates[name])
        time = float(self.time_s(kind, nbytes, size, stride, concurrent=concurrent))
        if time == 0:
            why = f"{kind} of {size} rank: nothing to send" if size <= 1 else f"{kind} of no bytes"
            return Route(kind, float(nbytes), size, stride, best, 0.0, 0.0, "none", 0, {}, why)
        bus = float(nbytes) * bus_factor(kind, size) / time
        held = self._held_up(kind, sent, groups, best, time)
        others = ", ".join(f"{name} {took * 1e6:,.0f} us" for name, took in sorted(candidates.items()) if name != best)
        why = (
            f"{best}: {time * 1e6:,.0f} us, {bus / 1e9:,.1f} GB/s on the bus, held up by {held}"
            + (f"; {others}" if others else "")
        )
        taken = member(best).multiprocessors
        return Route(kind, float(nbytes), size, stride, best, time, bus, held, taken, candidates, why)

    def share_of_compute(self, algorithm: str) -> float:
        """What part of a device's multiprocessors the kernel of `algorithm` holds while it runs; 0 where not known.

        >>> from foretell.hardware import cluster
        >>> round(Fabric.of(cluster("dgx-h100")).share_of_compute("nvls"), 3)  # 16 of 132
        0.121
        """
        found = [node.device.multiprocessors for _, node in self.cluster.groups]
        fewest = min((count for count in found if count), default=0)
        return min(1.0, member(algorithm).multiprocessors / fewest) if fewest else 0.0

    def _held_up(self, kind: str, sent: Floats, groups: Groups, name: str, time: float) -> str:
        """What would help most were it a hundred times faster."""
        run = member(name).run
        inside = _scaled(groups, "ring_rate", "mesh_rate", "pair_rate")
        outside = _scaled(groups, "node_rate", "rank_rate", "message_rate", "spine_rate")
        faster = {
            "node": inside,
            "network": outside,
            "spine": _scaled(groups, "spine_rate"),
            "node and network": inside | outside,
        }
        gain = {part: time - float(run(kind, sent, replace(groups, **to), self)[0]) for part, to in faster.items()}
        if gain["node and network"] < 0.3 * time:
            return "latency"
        if gain["spine"] > 0.5 * gain["network"] > 0:
            return "spine"
        best = max(("node", "network"), key=lambda part: gain[part])
        return best if gain[best] > 0.5 * gain["node and network"] else "node and network"

    def to_dict(self) -> dict[str, Any]:
        """What the fabric is, as JSON takes it."""
        return {
            "cluster": self.cluster.name,
            "ranks": self.ranks,
            "ranks_per_node": self.local,
            "node_kind": self.node_kind,
            "network_kind": self.network_kind,
            "ports_per_node": self.ports,
            "port_bytes_per_s": self.port_rate,
            "rails": self.rails,
            "oversubscription": self.oversubscription,
            "sharp": self.sharp,
            "peer_access": self.peer_access,
            "bridge_kind": None if self.pairs is None else self.pairs.node_kind,
            "leaf_nodes": self.leaf_nodes,
            "notes": list(self.notes),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Where constants are borrowed from another kind of link."""
        of_pairs = None if self.pairs is None else self.pairs.node_rates
        return tuple(
            f"no measurements of {rates.kind}: constants are those of {rates.measured_on}"
            for rates in (self.node_rates, self.network_rates, of_pairs)
            if rates is not None and rates.kind != rates.measured_on
        )


def members(per_node: int, ranks: int, size: int, stride: int) -> tuple[int, int]:
    """Ranks of a group in one node, and nodes it is on; of groups that lie unlike each other, one on the most nodes.

    >>> members(8, 64, size=16, stride=2)
    (4, 4)
    >>> members(8, 64, size=3, stride=1)  # ranks 6, 7 and 8 are on two nodes
    (2, 2)
    """
    block = size * stride
    if per_node % block == 0 or ranks <= per_node:
        return size, 1
    if block % per_node == 0 and (stride % per_node == 0 or per_node % stride == 0):
        local = max(1, per_node // stride)
        return local, size // local
    if block > ranks:  # only the first group is whole
        rank = np.arange(size) * stride
        group = np.zeros_like(rank)
    else:
        rank = np.arange(min(math.lcm(block, per_node), ranks // block * block))
        group = rank // block * stride + rank % stride
    place, counts = np.unique(group * ranks + rank // per_node, return_counts=True)
    owner, on = np.unique(place // ranks, return_counts=True)
    most = owner[on == on.max()]
    return int(counts[np.isin(place // ranks, most)].max()), int(on.max())


def _scaled(groups: Groups, *names: str) -> dict[str, Floats]:
    return {name: getattr(groups, name) * 100.0 for name in names}


def bus_factor(kind: str, size: int) -> float:
    """What nccl-tests multiplies bytes over time by, to get its bus bandwidth.

    >>> bus_factor("all_reduce", 8)
    1.75
    """
    if kind in PASSES:
        return PASSES[kind] * (size - 1) / size
    return (size - 1) / size if kind == "all_to_all" else 1.0
