"""`TrainingPlan`: how a transformer is trained on many devices; `PlanTable`: many such plans as columns.

Ranks are numbered as Megatron-LM's default order ``tp-cp-ep-dp-pp`` has it: tensor-parallel neighbours are next to each
other, then come context, data and pipeline neighbours. Expert parallelism takes its ranks from all of a stage's, next
to each other (``tp · cp · dp``; each expert is whole, as with --expert-tensor-parallel-size 1): it is no factor of the
number of devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError, unknown

__all__ = ["CHOICES", "PlanTable", "TrainingPlan"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FRAMEWORKS = ("megatron", "deepspeed", "fsdp2")
#: Orders in which a stage works through its micro-batches (`foretell.simulate.pipeline`).
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "layered")
#: What is thrown away in the forward pass and made again: nothing; the core of attention; whole layers.
RECOMPUTE = ("none", "selective", "full")
#: Formats of the large products. ``fp8`` has one scale a tensor, ``mxfp8`` one for 32 values, ``nvfp4`` one for 16.
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
#: ``flash``: the best fused kernels a device has today (FlashAttention-3, cuDNN 9); ``flash2``: those of up to
#: mid-2024, which knew nothing of the tensor instructions of Hopper; ``unfused``: two batched products around a softmax
#: that stores its probabilities, as before FlashAttention.
ATTENTION = ("flash", "flash2", "unfused")
#: How keys and values reach the other ranks of a sequence (context parallelism).
CONTEXT_SCHEMES = ("ring", "a2a", "allgather")
#: How tokens reach their experts: NCCL's all-to-all, an all-gather of all tokens, or fused kernels (DeepEP, HybridEP).
DISPATCHERS = ("alltoall", "allgather", "deepep")
STATE_DTYPES = ("fp32", "bf16", "fp8")

#: The fields of a plan that take one of a few names, and which.
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "framework": FRAMEWORKS,
        "schedule": SCHEDULES,
        "recompute": RECOMPUTE,
        "precision": PRECISIONS,
        "attention": ATTENTION,
        "context_scheme": CONTEXT_SCHEMES,
        "dispatcher": DISPATCHERS,
        "grad_dtype": STATE_DTYPES,
        "state_dtype": STATE_DTYPES,
    }
)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """One way to train: degrees, batch, and what the framework is told to do. Batches are in sequences.

    ``tp · cp · dp · pp`` is the number of devices. Raises InputError for a value that is wrong by itself; whether the
    plan suits a model and a cluster, `foretell.simulate.training.legality` says.
    """

    global_batch: int
    seq_len: int
    micro_batch: int = 1
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    #: Chunks of layers on each pipeline rank (Megatron's virtual stages); layers are dealt to them in turn.
    vp: int = 1
    #: Layers of the first and last rank of the pipeline, 0: as many as the others.
    first_layers: int = 0
    last_layers: int = 0
    schedule: str = "1f1b"
    framework: str = "megatron"
    #: What data-parallel ranks share out: 0 nothing, 1 optimiser state, 2 gradients too, 3 parameters too.
    zero: int = 1
    #: Ranks that share one copy (HSDP), 0: all of ``dp · cp``.
    shard: int = 0
    #: Norms, dropout and residuals are split over the sequence between tensor-parallel ranks.
    sequence_parallel: bool = True
    recompute: str = "none"
    #: With ``full``: layers of each rank that are recomputed, 0: all.
    recompute_layers: int = 0
    precision: str = "bf16"
    attention: str = "flash"
    grad_dtype: str = "fp32"
    state_dtype: str = "fp32"
    context_scheme: str = "ring"
    dispatcher: str = "alltoall"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    overlap_tp: bool = False
    overlap_p2p: bool = True
    overlap_ep: bool = False
    cuda_graph: bool = False
    #: Rank of low-rank adapters, 0: all weights are trained.
    lora_rank: int = 0
    #: Mean tokens of the documents packed into a sequence, which do not attend to each other; 0: one document.
    document_len: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in CHOICES:
                if value not in CHOICES[field.name]:
                    raise unknown(field.name, str(value), CHOICES[field.name])
            elif isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise InputError(f"{field.name} is {value!r}, want true or false", "training plan")
            elif not isinstance(value, int) or isinstance(value, bool):
                raise InputError(f"{field.name} is {value!r}, want a whole number", "training plan")
            else:
                least = 0 if field.default == 0 or field.name == "zero" else 1
                most = 3 if field.name == "zero" else 2**31
                if not least <= value <= most:
                    raise InputError(f"{field.name} is {value}, want {least} to {most}", "training plan")
        if self.document_len > self.seq_len:
            raise InputError(
                f"document_len is {self.document_len}, more than the {self.seq_len} tokens of a sequence",
                "training plan", "documents are cut where a sequence ends: leave it out",
            )  # fmt: skip

    @property
    def devices(self) -> int:
        """Devices the plan needs."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each rank of the pipeline sees in a step (at least 1, rounded down)."""
        return max(1, self.global_batch // (self.micro_batch * self.dp))

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len

    def replace(self, **changes: Any) -> TrainingPlan:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        parts = [f"{name}{getattr(self, name)}" for name in ("tp", "cp", "dp", "pp", "vp", "ep")
                 if getattr(self, name) > 1]  # fmt: skip
        parts += [f"mbs{self.micro_batch}", f"zero{self.zero}"]
        if self.recompute != "none":
            parts.append(self.recompute + (f"{self.recompute_layers}" if self.recompute_layers else ""))
        return " ".join(parts)


_FIELDS = {field.name: field for field in dataclasses.fields(TrainingPlan)}


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Many plans, one a row: ``table["tp"]`` is a column. Names are stored as indices into `CHOICES`.

    >>> table = PlanTable.of([TrainingPlan(8, 2048, tp=2), TrainingPlan(8, 2048, recompute="full")])
    >>> table["tp"].tolist(), table.chosen("recompute", "full").tolist(), table.plan(0).tp
    ([2, 1], [False, True], 2)
    """

    columns: Mapping[str, Ints]

    @staticmethod
    def of(plans: Iterable[TrainingPlan]) -> PlanTable:
        """The plans as columns."""
        rows = list(plans)
        return PlanTable.build({name: [getattr(plan, name) for plan in rows] for name in _FIELDS}, len(rows))

    @staticmethod
    def build(columns: Mapping[str, Any], rows: int | None = None) -> PlanTable:
        """A table of some columns, the rest by default; a single value stands for all rows.

        Choices are given by name, or already as indices where the column is of numbers. Raises KeyError for a column
        that no plan has.
        """
        given: dict[str, Ints] = {}
        for name, values in columns.items():
            _FIELDS[name]
            if name in CHOICES and not (isinstance(values, np.ndarray) and values.dtype.kind in "iu"):
                names = [values] if isinstance(values, str) else values
                given[name] = np.array([CHOICES[name].index(value) for value in names], dtype=np.int64)
            else:
                given[name] = np.atleast_1d(np.asarray(values)).astype(np.int64)
        count = rows if rows is not None else max((len(c) for c in given.values()), default=0)
        full: dict[str, Ints] = {}
        for name, field in _FIELDS.items():
            if name in given:
                full[name] = np.broadcast_to(given[name], (count,))
            elif field.default is dataclasses.MISSING:
                raise InputError(f"{name} is missing", "plan table")
            else:
                default = CHOICES[name].index(field.default) if name in CHOICES else int(field.default)
                full[name] = np.full(count, default, dtype=np.int64)
        return PlanTable(MappingProxyType(full))

    def __len__(self) -> int:
        return len(self.columns["tp"])

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def chosen(self, name: str, *choices: str) -> Bools:
        """Where the plan's `name` is one of `choices`."""
        return np.isin(self.columns[name], [CHOICES[name].index(choice) for choice in choices])

    def flag(self, name: str) -> Bools:
        """A column of true and false."""
        return np.asarray(self.columns[name] != 0)

    @property
    def devices(self) -> Ints:
        """Devices each plan needs."""
        return np.asarray(self["tp"] * self["cp"] * self["dp"] * self["pp"])

    @property
    def micro_batches(self) -> Ints:
        """Micro-batches each rank of the pipeline sees in a step."""
        return np.maximum(1, self["global_batch"] // (self["micro_batch"] * self["dp"]))

    @property
    def shards(self) -> Ints:
        """Ranks among which states are shared out (1 where nothing is)."""
        every = self["dp"] * self["cp"]
        return np.where(self["zero"] > 0, np.where(self["shard"] > 0, np.minimum(self["shard"], every), every), 1)

    def take(self, rows: Sequence[int] | Ints | Bools) -> PlanTable:
        """Some of the rows."""
        index = np.asarray(rows)
        return PlanTable(MappingProxyType({name: column[index] for name, column in self.columns.items()}))

    def plan(self, row: int) -> TrainingPlan:
        """One row as a plan."""
        values: dict[str, Any] = {}
        for name, field in _FIELDS.items():
            value = int(self.columns[name][row])
            if name in CHOICES:
                values[name] = CHOICES[name][value]
            else:
                values[name] = bool(value) if isinstance(field.default, bool) else value
        return TrainingPlan(**values)

    @staticmethod
    def concatenate(tables: Sequence[PlanTable]) -> PlanTable:
        """One table of all rows, in order."""
        return PlanTable(
            MappingProxyType({name: np.concatenate([t[name] for t in tables]) for name in _FIELDS})
        )
