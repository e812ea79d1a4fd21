"""`Row`: one published measurement of serving at a steady load, and what the readers of its tables share."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretell.accuracy.training.row import LeftOut, Line
from foretell.errors import InputError
from foretell.hardware.cluster import Cluster, cluster
from foretell.simulate.serving import ServingPlan
from foretell.workload.llm import LLMConfig

__all__ = ["LOADS", "LeftOut", "Line", "Row", "devices", "lines", "unpacked_json"]

#: ``concurrency``: so many requests in the system, a finished one replaced at once. ``batch``: so many sequences decode
#: together, on average. ``requests``: so many are there at the start, and none comes after them.
LOADS = ("concurrency", "batch", "requests")

_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """What somebody measured: model, how it was served, on what, under which load, and the figures, 0 where not stated.

    `load` is one of `LOADS` and `amount` how much of it, of all ranks together. `isl` and `osl` are prompt and output
    tokens of a request, the longest where lengths are drawn evenly from `shortest` of them up, `cached_isl` what of a
    prompt an earlier one has left in the cache, and `context` the cached tokens of a decoding sequence on average (0: a
    prompt and half an answer).
    `tpot_s` is the time of an output token after the first (mean of
    requests), `itl_s` the median gap between tokens, `tokens_per_s` output tokens of all devices together, `power_w`
    that of all devices.

    `family` is the model's name in the source, by which models are left out; `split` is ``fit`` where constants may be
    fitted on the row, else ``judge``. `approximate` says what of the model its configuration cannot express.
    """

    source: str
    label: str
    config: LLMConfig
    plan: ServingPlan
    cluster: Cluster
    load: str
    amount: float
    isl: float
    osl: float
    family: str
    shortest: float = 1.0
    cached_isl: float = 0.0
    context: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_s: float = 0.0
    power_w: float = 0.0
    split: str = "judge"
    approximate: str = ""

    def __post_init__(self) -> None:
        if self.load not in LOADS:
            raise ValueError(f"load is {self.load!r}, not one of {LOADS}")
        if not self.context:
            object.__setattr__(self, "context", self.mean_isl + self.mean_osl / 2.0)
        if self.plan.devices != self.cluster.device_count:
            raise ValueError(f"{self.label}: {self.plan.devices} devices planned, {self.cluster.device_count} there")

    @property
    def mean_isl(self) -> float:
        """Prompt tokens of a request on average."""
        return self.isl * (1.0 + self.shortest) / 2.0

    @property
    def mean_osl(self) -> float:
        """Output tokens of a request on average."""
        return self.osl * (1.0 + self.shortest) / 2.0

    @property
    def gpu(self) -> str:
        """Name of the device."""
        return self.cluster.groups[0][1].device.name

    @property
    def gpus(self) -> int:
        """Devices that serve."""
        return self.plan.devices

    @property
    def precision(self) -> str:
        """Format of the weights."""
        return self.plan.weight_dtype

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self.plan.engine

    @property
    def moe(self) -> bool:
        """Whether the model routes tokens to experts."""
        return self.config.moe is not None

    @property
    def per_rank(self) -> float:
        """`amount` of one data-parallel rank."""
        return self.amount / (self.plan.dp * self.plan.replicas)


@lru_cache(maxsize=256)
def devices(count: int, device: str) -> Cluster:
    """`count` devices of one machine.

    >>> devices(4, "h100-sxm").device_count
    4
    """
    return cluster(f"{count}x {device}")


def lines(path: Path) -> Iterator[Line]:
    """The lines of a table with a header, plain or ``.gz``. Raises InputError where it is missing, huge or not text."""
    repair = "use the table as published"
    try:
        data = path.read_bytes() if path.suffix != ".gz" else _unpacked(path)
        if len(data) > _MOST_BYTES:
            raise InputError(f"has more than {_MOST_BYTES >> 20} MiB", str(path), repair)
        reader = csv.DictReader(io.StringIO(data.decode("utf-8"), newline=""))
        for cells in reader:
            yield Line({k: v for k, v in cells.items() if k and v is not None}, f"{path.name}:{reader.line_num}")
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read the table: {error}", str(path), repair) from error


def _unpacked(path: Path) -> bytes:
    with gzip.open(path, "rb") as file:
        return file.read(_MOST_BYTES + 1)


def unpacked_json(path: Path) -> dict[str, Any]:
    """A JSON object of a ``.gz`` file. Raises InputError where it is missing, huge or none."""
    repair = "use the table as published"
    try:
        data = _unpacked(path)
        if len(data) > _MOST_BYTES:
            raise InputError(f"has more than {_MOST_BYTES >> 20} MiB", str(path), repair)
        found = json.loads(data)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read it: {error}", str(path), repair) from error
    if not isinstance(found, dict):
        raise InputError("is no JSON object", str(path), repair)
    return found
