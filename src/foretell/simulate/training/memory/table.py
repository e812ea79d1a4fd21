"""`memory`: what the fullest GPU of each plan holds, by part; `by_rank`: the same of each pipeline rank of one plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from foretell.hardware.device import Device
from foretell.simulate.training.memory import activations
from foretell.simulate.training.memory.communication import buffers, library_workspaces, outside
from foretell.simulate.training.memory.ranks import Ranks, ranks_of
from foretell.simulate.training.memory.states import stand_ins, states
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.workload.llm.config import LLMConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

__all__ = ["ALLOCATED", "PARTS", "MemoryTable", "by_rank", "memory"]

#: Parts of what is allocated; they sum to it.
ALLOCATED = ("parameters", "gradients", "optimizer", "activations", "logits", "temporaries", "communication")
#: All parts; they sum to the peak. ``fragmentation`` is what the allocator reserves and has not given out,
#: ``framework`` what the driver and NCCL hold outside it.
PARTS = (*ALLOCATED, "fragmentation", "framework")

# What PyTorch's allocator reserves beyond what is allocated, as a share of what comes and goes within a step, but for
# room that only half-precision logits fit (`activations.Head.cached`). Logs of
# Megatron runs that print both show 3 to 5 % of everything (max-allocated 214.65, 285.84 and 48.46 GB, max-reserved
# 221.08, 295.52 and 50.28); states, allocated once, waste next to nothing.
_FRAGMENTATION = 0.05


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Bytes on one rank of each row, by part (`PARTS`), each (rows,), at the moment when most is in use.

    `rank` is the pipeline rank; the ranks that share it by tensor, data and context parallelism hold as much.
    `capacity_bytes` is what the device has, None where that is unknown.
    """

    parts: Mapping[str, Floats]
    rank: Ints
    capacity_bytes: int | None

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, part: str) -> Floats:
        return self.parts[part]

    @property
    def allocated_bytes(self) -> Floats:
        """What tensors take (``torch.cuda.max_memory_allocated``)."""
        return _sum(self.parts[part] for part in ALLOCATED)

    @property
    def reserved_bytes(self) -> Floats:
        """What the allocator holds (``torch.cuda.max_memory_reserved``)."""
        return self.allocated_bytes + self.parts["fragmentation"]

    @property
    def peak_bytes(self) -> Floats:
        """What the process holds, as ``nvidia-smi`` shows it."""
        return self.reserved_bytes + self.parts["framework"]

    def fits(self, share: float = 1.0) -> npt.NDArray[np.bool_]:
        """Where the peak is at most `share` of the capacity; everywhere, if that is unknown."""
        if self.capacity_bytes is None:
            return np.ones(len(self), dtype=bool)
        return np.asarray(self.peak_bytes <= share * self.capacity_bytes)

    def take(self, rows: Ints | npt.NDArray[np.bool_]) -> MemoryTable:
        """Some of the rows."""
        parts = {name: column[rows] for name, column in self.parts.items()}
        return MemoryTable(MappingProxyType(parts), self.rank[rows], self.capacity_bytes)

    def breakdown(self, row: int) -> dict[str, float]:
        """One row's bytes by part."""
        return {part: float(self.parts[part][row]) for part in PARTS}


def _sum(columns: object) -> Floats:
    return np.asarray(sum(columns))  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class _Switches:
    dropout: bool
    loss_fusion: bool
    fp8_parameters: bool


def memory(
    config: LLMConfig, table: PlanTable, device: Device, *, dropout: bool = False, loss_fusion: bool = False,
    fp8_parameters: bool = False,
) -> MemoryTable:
    """Memory of the fullest rank of each plan in `table`.

    What a plan does not say: `dropout` keeps masks, and the attention's dropped probabilities, as models before 2022
    had them; `loss_fusion` makes the cross entropy one kernel (Megatron-LM's ``--cross-entropy-loss-fusion``,
    FlashAttention's or Liger's); `fp8_parameters` keeps matrices that Megatron multiplies in 8 bits in 8 bits alone
    (``--fp8-param-gather``).

    Rows routed to experts are taken to be spread evenly. Raises nothing for plans that break rules: ask
    `foretell.simulate.training.legality` first.
    """
    if not len(table):
        return MemoryTable(MappingProxyType({part: np.zeros(0) for part in PARTS}), np.zeros(0, np.int64),
                           device.memory_bytes)  # fmt: skip
    ranks = ranks_of(config, table)
    every = _on_ranks(config, table, device, ranks, _Switches(dropout, loss_fusion, fp8_parameters))
    peak = every.peak_bytes
    most = np.maximum.reduceat(peak, ranks.start)
    # The first rank that has as much as the most of its plan.
    candidates = np.flatnonzero(peak >= most[ranks.row])
    _, first = np.unique(ranks.row[candidates], return_index=True)
    return every.take(candidates[first])


def by_rank(
    config: LLMConfig, plan: TrainingPlan, device: Device, *, dropout: bool = False, loss_fusion: bool = False,
    fp8_parameters: bool = False,
) -> MemoryTable:
    """Memory of one plan on each rank of the pipeline, first to last; arguments as for `memory`."""
    table = PlanTable.of([plan])
    ranks = ranks_of(config, table, prune=False)
    return _on_ranks(config, table, device, ranks, _Switches(dropout, loss_fusion, fp8_parameters))


def _on_ranks(
    config: LLMConfig, table: PlanTable, device: Device, ranks: Ranks, switches: _Switches
) -> MemoryTable:
    row, first, last = ranks.row, ranks.first, ranks.last
    state = states(config, table, device, switches.fp8_parameters)
    parts: dict[str, Floats] = {}
    for name, unit, start, end, tied in zip(ALLOCATED, state.unit, state.first, state.last, state.tied, strict=False):
        parts[name] = (
            (unit[row] * ranks.layers).sum(axis=1)
            + np.where(first, start[row], 0.0) + np.where(last, end[row], 0.0) - np.where(first & last, tied[row], 0.0)
        )  # fmt: skip

    layers = [activations.layer(config, group, table, switches.dropout) for group in config.groups]
    kept, everything, running = (
        np.stack([getattr(layer, name) for layer in layers], axis=1)[row] for name in ("kept", "everything", "running")
    )
    # Of a rank's layers, the share that is recomputed: all, or the first `recompute_layers` of them.
    count = np.maximum(ranks.layers.sum(axis=1), 1.0)
    asked = np.where(table.chosen("recompute", "full"), table["recompute_layers"], 0)[row]
    share = np.where(asked > 0, np.minimum(asked, count) / count, 1.0)
    parts["activations"] = (
        (kept * ranks.held).sum(axis=1) * share + (everything * ranks.held).sum(axis=1) * (1.0 - share)
    )
    # The layer that runs its backward pass; made again before, where nothing of its micro-batch that was kept is gone.
    again = np.where(share[:, None] < 1.0, 0.0, everything - kept)
    present = ranks.layers > 0
    running = np.where(present, running + again, 0.0).max(axis=1)

    head = activations.head(config, table, switches.loss_fusion)
    head_kept, head_running, head_cached = head.kept[row], head.running[row], head.cached[row]
    at_head = last & (head_kept + head_running >= running)
    attention, mlps, of_head = stand_ins(config, table)
    parts["logits"] = np.where(last, head_kept * (ranks.heads - ~at_head) + np.where(at_head, head_running, 0.0), 0.0)
    parts["temporaries"] = (
        np.where(at_head, 0.0, running)
        + np.where(present.any(axis=1), attention[row], 0.0) + np.where(present, mlps[row], 0.0).sum(axis=1)
        + np.where(last, of_head[row], 0.0) + library_workspaces(device)
    )  # fmt: skip
    buffer = buffers(config, table, state)
    parts["communication"] = (
        buffer.every[row] + np.where(present, buffer.layer[row], 0.0).max(axis=1)
        + np.where(first, buffer.first[row], 0.0) + np.where(last, buffer.last[row], 0.0)
    )  # fmt: skip
    parts["fragmentation"] = _FRAGMENTATION * (
        parts["activations"] + parts["logits"] + parts["temporaries"] + parts["communication"]
    ) + np.where(last, head_cached, 0.0)
    parts["framework"] = outside(table, device)[row]
    return MemoryTable(MappingProxyType(parts), ranks.rank, device.memory_bytes)
