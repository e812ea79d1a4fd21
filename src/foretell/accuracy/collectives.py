"""Published measurements of collectives: NCCL on nine systems, serving engines' own all-reduce, DeepEP.

Every reader gives `Timed` columns: one system, one kind of collective, seconds. Sizes are bytes as
`foretell.simulate.collectives` counts them; nccl-tests counts the same.

Traps, and what is done: AIConfigurator's ``message_size`` is in elements; a size that several versions of NCCL were
timed on stays several rows. Where GPUs of several nodes take part, but not all of a node's, the cluster is described as
nodes of that many GPUs with a port each, as the source says the nodes have.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.hardware import cluster
from foretell.simulate.collectives import Fabric
from foretell.simulate.collectives.experts import FP8_BYTES, exchange_s, spread

__all__ = ["SOURCES", "Exchanged", "Timed", "custom_all_reduce", "read", "read_exchanges", "vidur_bridges"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_LARGEST = 2.0**45  # bytes a collective may have
_LONGEST_S = 600.0
#: AIConfigurator's systems, by its names, as clusters.
_SYSTEMS = {
    "a100_sxm": "dgx-a100",
    "h100_sxm": "dgx-h100",
    "h200_sxm": "dgx-h200",
    "b200_sxm": "dgx-b200",
    "b300_sxm": "dgx-b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "l40s": "8x l40s",
    "rtx_pro_6000_server": "8x rtx-pro-6000-server",
}
_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
}


@dataclass(frozen=True)
class Timed:
    """Measurements of one kind of collective on one system: rows of bytes, ranks of a group, stride, seconds.

    `clear` says whether the source states all that a prediction needs: links within nodes and between.
    """

    source: str
    system: str
    cluster: str
    kind: str
    nbytes: Floats
    size: Ints
    time_s: Floats
    algorithm: str = "auto"
    clear: bool = True
    peer_access: bool | None = None
    bridges: bool = False

    def fabric(self) -> Fabric:
        """The fabric it was measured on."""
        return Fabric.of(cluster(self.cluster), peer_access=self.peer_access, bridges=self.bridges)

    def where(self, rows: npt.NDArray[np.bool_]) -> Timed:
        """Only the `rows` that are true."""
        return replace(self, nbytes=self.nbytes[rows], size=self.size[rows], time_s=self.time_s[rows])

    @property
    def nvswitch_or_infiniband(self) -> bool:
        """Whether all links used are NVSwitch or InfiniBand."""
        fabric = self.fabric()
        return (fabric.node_kind or "nvswitch").endswith("nvswitch") and fabric.network_kind in (None, "infiniband")


class _Rows:
    """Rows gathered by what they have in common."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: dict[tuple[object, ...], list[tuple[float, int, float]]] = defaultdict(list)

    def add(
        self,
        system: str,
        text: str,
        kind: str,
        nbytes: float,
        size: int,
        time_s: float,
        *,
        where: str,
        algorithm: str = "auto",
        clear: bool = True,
        peer_access: bool | None = None,
        bridges: bool = False,
    ) -> None:
        if not (0 < nbytes <= _LARGEST and 0 < time_s <= _LONGEST_S and 1 < size <= 2**20):
            raise InputError(
                f"{nbytes:g} bytes among {size} in {time_s:g} s cannot be", where, "use the table as published"
            )
        self.found[system, text, kind, algorithm, clear, peer_access, bridges].append((nbytes, size, time_s))

    def tables(self) -> list[Timed]:
        tables = []
        for (system, text, kind, algorithm, clear, peer, bridges), rows in self.found.items():
            nbytes, size, time_s = (np.array(column) for column in zip(*rows, strict=True))
            tables.append(
                Timed(
                    self.source, str(system), str(text), str(kind), nbytes.astype(float), size.astype(np.int64),
                    time_s.astype(float), str(algorithm), bool(clear), None if peer is None else bool(peer),
                    bool(bridges),
                )
            )  # fmt: skip
        return tables


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Rows of a table with where they are, opened as its name says."""
    if not path.is_file():
        raise InputError("is not there", str(path), "place the files that its SOURCE.md lists")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            yield f"{path.name}:{number}", row


def aiconfigurator(folder: Path) -> list[Timed]:
    """AIConfigurator's tables of NCCL on one node. Its L40S are given no peer access: four reach 5 GB/s."""
    rows = _Rows("aiconfigurator")
    for where, row in _lines(folder / "aiconfigurator-serving" / "comm_nccl.csv.gz"):
        width = {"half": 2, "int8": 1}[row["nccl_dtype"]]
        rows.add(
            row["system"],
            _SYSTEMS[row["system"]],
            _KINDS[row["op_name"]],
            float(row["message_size"]) * width,
            int(row["num_gpus"]),
            float(row["latency"]) * 1e-3,
            where=where,
            peer_access=False if row["system"] == "l40s" else None,
        )
    return rows.tables()


def cluster01(folder: Path, name: str = "example-cluster01") -> list[Timed]:
    """nccl-tests on nodes of eight H100, one node and all pairs of nodes, out of place; 400 Gb/s a GPU."""
    rows = _Rows("nccl-tests-cluster")
    for table in ("h100_single_and_multi_node.csv.gz", "h100_pairwise.csv.gz"):
        for where, row in _lines(folder / "nccl-tests-cluster" / table):
            if row["cluster"] != name:
                continue
            nodes, per_node = int(row["num_nodes"]), int(row["gpus_per_node"])
            machine = "dgx-h100" if nodes == 1 else f"{nodes}x {per_node}x h100-sxm over {per_node}x ib-ndr"
            rows.add(
                f"{name.removeprefix('example-')}, {nodes} node" + ("s" if nodes > 1 else ""),
                machine,
                _KINDS[row["collective"]],
                float(row["size_bytes"]),
                nodes * per_node,
                float(row["oop_time_us"]) * 1e-6,
                where=where,
                clear=name.endswith("01"),
            )
    return rows.tables()


def vtrain(folder: Path) -> list[Timed]:
    """vTrain's all-reduce tables, 2 to 8 GPUs of one node of A100 (NVSwitch) or V100 (DGX-1's mesh)."""
    rows = _Rows("vtrain")
    machines = {"a100": "dgx-a100", "v100": "dgx-1v"}
    for where, row in _lines(folder / "vtrain" / "all_reduce_nccl_1M_1024M.csv.gz"):
        rows.add(
            row["gpu"], machines[row["gpu"]], "all_reduce", float(row["size_bytes"]), int(row["num_gpus"]),
            float(row["oop_time_ns"]) * 1e-9, where=where,
        )  # fmt: skip
    return rows.tables()


def vidur(folder: Path) -> list[Timed]:
    """Vidur's profiles of all-reduce and send-receive, as PyTorch timed them (median of three calls)."""
    rows = _Rows("vidur")
    chips = {"a100_dgx": "a100-sxm4-80gb", "h100_dgx": "h100-sxm"}
    networks = {"a100_dgx": "ib-hdr", "h100_dgx": "ib-ndr"}
    for name, chip in chips.items():
        for op in ("all_reduce", "send_recv"):
            for where, row in _lines(folder / "vidur" / "network" / name / f"{op}.csv.gz"):
                size, per_node = int(row["num_workers"]), int(row["devices_per_node"])
                nodes = size // per_node
                text = f"8x {chip}" if nodes == 1 else f"{nodes}x {per_node}x {chip} over {per_node}x {networks[name]}"
                rows.add(
                    name + ("" if nodes == 1 else ", 2 nodes"),
                    text,
                    op,
                    float(row["size"]),
                    size,
                    float(row[f"time_stats.{op}.median"]) * 1e-3,
                    where=where,
                    clear=nodes == 1,
                )
    return rows.tables()


def vidur_bridges(folder: Path) -> list[Timed]:
    """Vidur's profiles on four cards joined in pairs; its send-receive of H100 repeats A100's, so neither is read."""
    rows = _Rows("vidur")
    for name, chip in (("a100_pairwise_nvlink", "a100-pcie-80gb"), ("h100_pairwise_nvlink", "h100-nvl")):
        for where, row in _lines(folder / "vidur" / "network" / name / "all_reduce.csv.gz"):
            time_s = float(row["time_stats.all_reduce.median"]) * 1e-3
            size = int(row["num_workers"])
            rows.add(name, f"4x {chip}", "all_reduce", float(row["size"]), size, time_s, where=where, bridges=True)
    return rows.tables()


def custom_all_reduce(folder: Path) -> list[Timed]:
    """All-reduce kernels of serving engines within a node, without those timed launch by launch."""
    rows = _Rows("custom-all-reduce")
    for where, row in _lines(folder / "aiconfigurator-serving" / "comm_custom_allreduce.csv.gz"):
        if row["system"] not in _SYSTEMS or "eager" in row["backend"]:
            continue
        width = 4 if "32" in row["allreduce_dtype"] else 1 if "8" in row["allreduce_dtype"] else 2
        rows.add(
            row["system"],
            _SYSTEMS[row["system"]],
            "all_reduce",
            float(row["message_size"]) * width,
            int(row["num_gpus"]),
            float(row["latency"]) * 1e-3,
            where=where,
            algorithm="direct",
            peer_access=False if row["system"] == "l40s" else None,
        )
    return rows.tables()


#: Readers by source, each folder → tables.
SOURCES = {
    "aiconfigurator": aiconfigurator,
    "nccl-tests-cluster": cluster01,
    "vtrain": vtrain,
    "vidur": vidur,
}


def read(folder: Path) -> list[Timed]:
    """Every table of `SOURCES` in the data folder. Raises InputError naming the row of what is malformed."""
    return [table for reader in SOURCES.values() for table in reader(folder)]


@dataclass(frozen=True)
class Exchanged:
    """Measurements of DeepEP's kernels on one system, one phase, rows of what a call moves."""

    source: str
    system: str
    cluster: str
    phase: str
    low_latency: bool
    elastic: bool
    tokens: Floats
    hidden: Floats
    topk: Floats
    experts: Floats
    size: Ints
    multiprocessors: Floats
    time_s: Floats

    def fabric(self) -> Fabric:
        """The fabric it was measured on."""
        return Fabric.of(cluster(self.cluster))

    def predicted_s(self) -> Floats:
        """What `foretell.simulate.collectives.experts` says."""
        return exchange_s(
            self.fabric(),
            self.phase,
            self.tokens,
            self.hidden,
            self.topk,
            self.experts,
            self.size,
            low_latency=self.low_latency,
            multiprocessors=self.multiprocessors,
            elastic=self.elastic,
        )


#: GPUs of a node in AIConfigurator's DeepEP tables: trays of four in the racks.
_TRAY = {"gb200": ("4x gb200", 4), "gb300": ("4x gb300", 4)}
_EXCHANGE = ("tokens", "hidden", "topk", "experts", "size", "multiprocessors", "time_s")


class _Exchanges:
    """Rows gathered by what they have in common."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str, str, bool, bool], list[tuple[float, ...]]] = defaultdict(list)

    def add(self, key: tuple[str, str, str, str, bool, bool], row: tuple[float, ...], where: str) -> None:
        if not all(0 < value < _LARGEST for value in row[:6]) or not 0 < row[6] <= _LONGEST_S:
            raise InputError(f"an exchange of {row} cannot be", where, "use the table as published")
        self.found[key].append(row)

    def tables(self) -> list[Exchanged]:
        tables = []
        for key, rows in self.found.items():
            columns = dict(zip(_EXCHANGE, np.array(rows).T, strict=True))
            columns["size"] = columns["size"].astype(np.int64)
            tables.append(Exchanged(*key, **columns))
        return tables


def deepep_tables(folder: Path) -> list[Exchanged]:
    """AIConfigurator's tables of DeepEP: normal kernels (the transmission, without its notice) and low-latency ones."""
    rows = _Exchanges()
    for table, fast in (("normal", False), ("ll", True)):
        for where, row in _lines(folder / "aiconfigurator-serving" / f"comm_wideep_deepep_{table}.csv.gz"):
            system, nodes = row["system"], int(row["node_num"])
            text, per_node = _TRAY.get(system, (f"{nodes}x {_SYSTEMS[system]}" if nodes > 1 else _SYSTEMS[system], 8))
            for phase in ("dispatch", "combine"):
                time_us = float(row[f"{phase}_avg_t_us" if fast else f"{phase}_transmit_us"])
                what = (
                    float(row["num_token"]),
                    float(row["hidden_size"]),
                    float(row["num_topk"]),
                    float(row["num_experts"]),
                    float(nodes * per_node),
                    24.0 if fast else float(row[f"{phase}_sms"]),
                    time_us * 1e-6,
                )
                rows.add(("aiconfigurator-deepep", f"{system}, {nodes} nodes", text, phase, fast, False), what, where)
    return rows.tables()


def deepep_published(folder: Path) -> list[Exchanged]:
    """DeepEP's own figures: H800 nodes with 400 Gb/s a GPU, and the second version's kernels.

    Where a bandwidth is given and no time, the time is the bytes that DeepEP counts over it: in a node those every rank
    gets, its own tokens included; between nodes one copy for each node reached, the own one included.
    """
    machines = {"H800": "hgx-h800", "SM90": "dgx-h100", "SM100": "dgx-b200"}
    rows = _Exchanges()
    for where, row in _lines(folder / "deepseek-deepep" / "moe_all_to_all.csv"):
        size = int(np.prod([int(part) for part in row["ep"].split("x")]))
        nodes = max(1, size // 8)
        fast = row["kernel"] == "low-latency"
        tokens, hidden, topk, experts = float(row["tokens_per_batch"]), float(row["hidden"]), float(row["topk"]), 256.0
        if row["latency_us"]:
            time_s = float(row["latency_us"]) * 1e-6
        else:
            groups = min(nodes, 4)
            within = experts * groups / nodes
            copies = spread(8, experts, topk) if row["bottleneck"] == "NVLink" else spread(groups, within, topk)
            each = FP8_BYTES if row["phase"] == "dispatch" else 2.0
            time_s = float(tokens * float(copies) * hidden * each / (float(row["bandwidth_GBps"]) * 1e9))
        machine = machines[row["arch"]]
        text = f"{nodes}x {machine}" if nodes > 1 else machine
        source, system = f"DeepEP {row['version']}", f"{row['arch']}, {nodes} nodes"
        key = (source, system, text, row["phase"], fast, row["version"] == "V2")
        rows.add(key, (tokens, hidden, topk, experts, float(size), float(row["num_sms"] or 24), time_s), where)
    return rows.tables()


def read_exchanges(folder: Path) -> list[Exchanged]:
    """Every table of DeepEP in the data folder. Raises InputError naming the row of what is malformed."""
    return [*deepep_tables(folder), *deepep_published(folder)]
