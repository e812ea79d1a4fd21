"""`Row`: one published measurement of a training step, and what the readers of its tables share."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretell.errors import InputError, unknown
from foretell.hardware.cluster import Cluster, cluster
from foretell.simulate.training.plan import TrainingPlan
from foretell.workload.llm import LLMConfig

__all__ = ["LeftOut", "Line", "Row", "gpt", "lines", "machines"]

_PUBLISHED = "use the table as published"


@dataclass(frozen=True, slots=True)
class Row:
    """A step that somebody timed: the model, how it was trained, on what, and seconds for the whole global batch.

    `family` is the shape's name in the source, by which models are left out; `split` is ``fit`` where constants may be
    fitted on the row, else ``judge``. `stated_tflops` is what the source says one device did, in its own way of
    counting (0: not said): never predicted, but a check that shape and batch are read rightly.
    """

    source: str
    label: str
    config: LLMConfig
    plan: TrainingPlan
    cluster: Cluster
    step_s: float
    family: str
    task: str = "pretrain"
    container: str = ""
    split: str = "judge"
    stated_tflops: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.plan.tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices together."""
        return self.tokens / self.step_s

    @property
    def gpus(self) -> int:
        """Devices that take part."""
        return self.plan.devices

    @property
    def device(self) -> str:
        """Name of the device."""
        return self.cluster.groups[0][1].device.name

    @property
    def moe(self) -> bool:
        """Whether the model routes tokens to experts."""
        return self.config.moe is not None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A line of a table that makes no row, and why."""

    label: str
    reason: str


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table by column name, and where it stands."""

    cells: Mapping[str, str]
    where: str

    def text(self, column: str) -> str:
        """A cell. Raises InputError for a column that is missing."""
        value = self.cells.get(column)
        if value is None:
            raise InputError(f"has no column {column!r}", self.where, _PUBLISHED)
        return value.strip()

    def count(self, column: str, missing: int | None = None) -> int:
        """A whole number of at least 1; `missing` stands for an empty cell or ``n/a``, where it is given."""
        value = self.text(column)
        if missing is not None and value.casefold() in ("", "n/a"):
            return missing
        if not value.isdecimal() or not 1 <= int(value) <= 2**31:
            raise InputError(f"{column} is {value[:40]!r}, want a count", self.where, _PUBLISHED)
        return int(value)

    def choice(self, column: str, choices: Mapping[str, Any]) -> Any:
        """What `choices` has for a cell. Raises UnknownNameError for one that is none of them."""
        name = self.text(column)
        if name not in choices:
            raise unknown(f"{column} in {self.where}:", name, choices)
        return choices[name]

    def number(self, column: str) -> float:
        """A number above 0."""
        value = self.text(column)
        try:
            found = float(value)
        except ValueError:
            found = 0.0
        if not 0 < found < 1e18:
            raise InputError(f"{column} is {value[:40]!r}, want a number above 0", self.where, _PUBLISHED)
        return found


def lines(path: Path) -> Iterator[Line]:
    """The lines of a table with a header. Raises InputError where it is missing or not text."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for cells in reader:
                yield Line({k: v for k, v in cells.items() if k and v is not None}, f"{path.name}:{reader.line_num}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read the table: {error}", str(path), _PUBLISHED) from error


@lru_cache(maxsize=1024)
def machines(gpus: int, per_node: int, node: str, device: str, over: str = "") -> Cluster:
    """`gpus` devices of whole nodes where they fill at least one, else of a part of one.

    >>> machines(16, 8, "dgx-h100", "h100-sxm").name, machines(4, 8, "dgx-h100", "h100-sxm").name
    ('2x dgx-h100', '4x h100-sxm')
    """
    if gpus < per_node:
        return cluster(f"{gpus}x {device}")
    if gpus % per_node:
        raise InputError(f"{gpus} devices fill no whole number of {node}, which have {per_node} each")
    count = gpus // per_node
    return cluster(f"{count}x {node}" + (f" over {over}" if over and count > 1 else ""))


def gpt(name: str, *, layers: int, hidden: int, heads: int, vocab: int, context: int, source: str) -> LLMConfig:
    """A GPT as Megatron-LM builds it: biases, a GELU MLP of four times the width, learned positions, a tied head."""
    return LLMConfig(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=4 * hidden,
        vocab=vocab,
        context_length=context,
        gated=False,
        activation="gelu_tanh",
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        fused_qkv=True,
        tied_embeddings=True,
        positions="learned",
        position_rows=context,
        source=source,
    )
