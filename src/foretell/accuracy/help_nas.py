"""HELP's latencies of three search spaces on desktop GPUs, as `Measured` tables.

H. Lee et al., HELP: Hardware-Adaptive Efficient Latency Prediction for NAS via Meta-Learning, NeurIPS 2021, repository
HayeonLee/HELP (MIT licence), ``data/{nasbench201,fbnet,ofa}/latency``. One file is a space, one column a GPU and batch
size: milliseconds of a forward pass, fp32, in PyTorch (the repository asks for 1.8.1 with CUDA 10.2).

What the repository leaves open, and how it is taken here:

* ``titanx`` is the Pascal TITAN X. On NAS-Bench-201 at batch 256 it takes 1.09 times a GTX 1080 Ti's time (medians
  24.6 and 22.6 ms); peak and bandwidth of the Pascal card say 1.01 to 1.03, of the Maxwell card 1.44 to 1.72.
* ``v100`` is taken as the SXM2 card of 16 GB. Of its variants only the clock matters here.
* FBNet is of CIFAR-100 in HW-NAS-Bench's form, whose pool of 5,000 architectures HELP measured: 32 × 32 images.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.accuracy.measured import Measured
from foretell.accuracy.spaces import fbnet, nasbench201, ofa
from foretell.accuracy.spaces.rows import Rows, stack
from foretell.cost.model import Settings
from foretell.cost.program import Program
from foretell.errors import ForetellError, InputError
from foretell.hardware import device

#: The catalogue's names of the GPUs.
DEVICES = {
    "1080ti": "gtx-1080-ti",
    "2080ti": "rtx-2080-ti",
    "titan_rtx": "titan-rtx",
    "titanx": "titan-x-pascal",
    "titanxp": "titan-xp",
    "titan_xp": "titan-xp",
    "v100": "v100-sxm2-16gb",
}
_BATCH = re.compile("[1-9][0-9]{0,5}")
_PUBLISHED = "use the table as published"


def _ofa(arch: dict[str, Any], batch: int) -> Rows:
    return ofa.rows(arch["ks"], arch["e"], arch["d"], arch["r"], batch)


#: Spaces whose latencies add up layer by layer (a sum over the layers' blocks explains 0.99 of the ranks at batch 64).
_ADDED_UP = ("fbnet",)

#: By space: how its ``arch`` column is read, and what an architecture's ops are at a batch size.
SPACES: dict[str, tuple[Callable[[str], Any], Callable[[Any, int], Rows]]] = {
    "nasbench201": (str, nasbench201.rows),
    "fbnet": (json.loads, fbnet.rows),
    "ofa": (json.loads, _ofa),
}


def read(folder: Path, *, spaces: tuple[str, ...] = tuple(SPACES), every: int = 1) -> list[Measured]:
    """Every (space, GPU, batch size) that is there; `every` takes each so-many-th architecture only.

    `folder` is the one that holds ``help-nas``. Equal ops of an architecture are one row, repeated. Groups are
    architectures. Raises InputError naming file and row of what is malformed.
    """
    tables: list[Measured] = []
    for space in spaces:
        path = folder / "help-nas" / f"{space}_gpu_latency_ms.csv.gz"
        if path.exists():
            tables += _read(path, space, every)
    return tables


def _read(path: Path, space: str, every: int) -> Iterator[Measured]:
    parse, compose = SPACES[space]
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        lines = [(number, line) for number, line in enumerate(reader, start=2) if number % every == 0 or every == 1]
    if header[:2] != ["index", "arch"]:
        raise InputError("does not begin with the columns index, arch", path.name, _PUBLISHED)
    architectures = []
    for number, line in lines:
        try:
            architectures.append(parse(line[1]))
        except (ValueError, IndexError, RecursionError) as error:
            raise InputError(f"no architecture: {error}", f"{path.name}:{number}", _PUBLISHED) from None
    columns = [_column(name, path.name) for name in header[2:]]
    programs: dict[int, tuple[Program, npt.NDArray[np.int64]]] = {}
    names = np.array([f"{space}:{line[0]}" for _, line in lines], dtype=object)
    for position, (gpu, batch) in enumerate(columns, start=2):
        if batch not in programs:
            programs[batch] = _program(architectures, compose, batch, [n for n, _ in lines], path.name)
        program, starts = programs[batch]
        yield Measured(
            name=f"help-nas-{space}-{gpu}-{batch}",
            device=device(DEVICES[gpu]),
            settings=Settings(),
            program=program,
            starts=starts,
            measured_s=np.array([_seconds(line, position, path.name, number) for number, line in lines]),
            group=names,
            issued="op" if space in _ADDED_UP else "step",
            source=path.name,
        )


def _column(name: str, where: str) -> tuple[str, int]:
    gpu, _, batch = name.rpartition("_")
    if gpu not in DEVICES or not _BATCH.fullmatch(batch):
        raise InputError(f"column {name[:40]!r} is no GPU_BATCH of {', '.join(DEVICES)}", where, _PUBLISHED)
    return gpu, int(batch)


def _program(
    architectures: list[Any], compose: Callable[[Any, int], Rows], batch: int, numbers: list[int], where: str
) -> tuple[Program, npt.NDArray[np.int64]]:
    networks = []
    for number, arch in zip(numbers, architectures, strict=True):
        try:
            networks.append(compose(arch, batch))
        except (ForetellError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            reason = str(error)[:200]
            raise InputError(f"no architecture of this space: {reason}", f"{where}:{number}", _PUBLISHED) from None
    table, starts = stack(networks)
    return Program.of(table), starts


def _seconds(line: list[str], position: int, where: str, number: int) -> float:
    try:
        milliseconds = float(line[position])
    except (ValueError, IndexError):
        raise InputError(f"{line[position:position + 1]} is no latency", f"{where}:{number}") from None
    if not 0 < milliseconds < 1e5:
        raise InputError(
            f"latency {milliseconds} ms", f"{where}:{number}", "latencies are milliseconds per batch, above 0"
        )
    return milliseconds / 1e3
