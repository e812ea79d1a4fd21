"""Buffers of the collectives, and what a process holds outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.cost.allocator import MIB
from foretell.cost.memory import framework_bytes
from foretell.hardware.device import Device
from foretell.simulate.training.memory.activations import routed_rows, tokens
from foretell.simulate.training.memory.states import HALF, States
from foretell.simulate.training.plan import PlanTable
from foretell.workload.llm.config import LLMConfig

Floats = npt.NDArray[np.float64]

__all__ = ["Buffers", "buffers", "library_workspaces", "outside"]

# DeepSpeed's defaults (its documentation, "ZeRO Optimizations"), in elements: reduce_bucket_size and
# allgather_bucket_size, stage3_max_live_parameters, stage3_prefetch_bucket_size.
_BUCKET, _LIVE, _PREFETCH = 5e8, 1e9, 5e7
# NCCL's buffers for one connection of one channel, outside PyTorch's allocator: the simple protocol has NCCL_BUFFSIZE
# (4 MiB by its documentation), LL 8 lines × 512 threads × 8 steps × 16 B, LL128 120 × 640 × 8 × 8 B (its source,
# device.h).
_CONNECTION_BYTES = 4 * MIB + 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8
# Channels of a communicator, an assumption: NCCL picks them by the wiring, 16 to 24 where GPUs share an NVSwitch and
# fewer over a network.
_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes of communication buffers: on every rank (rows,), for each layer's width the most of its layers (rows,
    groups), and on the ends of the pipeline, each (rows,)."""

    every: Floats
    layer: Floats
    first: Floats
    last: Floats


def buffers(config: LLMConfig, table: PlanTable, states: States) -> Buffers:
    """Buffers that a framework holds for its collectives.

    * Pipeline neighbours: one activation on its way (two with interleaving and overlap); in PyTorch's pipelines buffers
      for the gradients of all micro-batches, and the results that were sent.
    * Sequence parallelism: the input of the head, gathered; with `overlap_tp` two such buffers for each of a layer's
      four products.
    * Ring attention: keys and values of the next rank and their gradients beside those in use. All-gather: of the
      whole sequence.
    * Experts: copies of the tokens on their way; with an all-gather, those of all ranks.
    * FSDP2 and ZeRO 3: gathered parameters of the layer that runs and of the next, half-precision gradients of a layer
      and their fp32 copy being reduced; what lies outside the layers is gathered for the whole step.
    * DeepSpeed: its buckets, at their default sizes.
    * Megatron's distributed optimizer reduces and gathers inside its own buffers: nothing more.
    """
    hidden = HALF * config.hidden * tokens(table)
    outer = np.where(table.flag("sequence_parallel"), table["tp"], 1)
    gathers = table.flag("sequence_parallel") & (table["tp"] > 1)
    every = np.where(table["pp"] > 1, hidden / outer, 0.0) * np.where(
        (table["vp"] > 1) & table.flag("overlap_p2p"), 2.0, 1.0)  # fmt: skip
    fsdp, deepspeed = table.chosen("framework", "fsdp2"), table.chosen("framework", "deepspeed")
    every = np.where(fsdp & (table["pp"] > 1), 2 * table.micro_batches * hidden / outer, every)
    every = every + np.where(gathers, hidden * np.where(table.flag("overlap_tp"), 8.0, 1.0), 0.0)
    width = 2 * config.kv_heads * config.head_dim / np.minimum(table["tp"], config.kv_heads)
    if config.mla is not None:
        width = config.heads * (config.query_dim + config.value_dim) / table["tp"]
    pair = HALF * width * tokens(table)
    around = table["cp"] > 1
    every = every + np.where(around & table.chosen("context_scheme", "ring"), 4 * pair, 0.0)
    every = every + np.where(around & table.chosen("context_scheme", "allgather"), table["cp"] * pair, 0.0)
    spread = table["ep"] > 1
    dispatched = np.where(table.chosen("dispatcher", "allgather"), hidden * table["ep"], routed_rows(config, table))
    every = every + np.where(spread, dispatched, 0.0) * (config.moe is not None)

    shared = table.shards > 1
    gathered = shared & (table["zero"] == 3) & ~deepspeed
    reduced = fsdp & shared & (table["lora_rank"] == 0)
    per_element = np.where(gathered, 2 * HALF, 0.0) + np.where(reduced, HALF + 4.0, 0.0)
    outside_layers = np.where(gathered, HALF, 0.0)
    layers = states.layer_elements
    total = np.asarray(
        (layers * np.array([group.layers for group in config.groups])).sum(axis=1) / table["pp"]
        + states.first_elements + states.last_elements
    )  # fmt: skip
    bucket = np.minimum(_BUCKET, total) * HALF
    every = every + np.where(deepspeed & shared, bucket * np.where(table["zero"] == 2, 2.0, 1.0), 0.0)
    every = every + np.where(
        deepspeed & shared & (table["zero"] == 3), np.minimum(_LIVE + _PREFETCH, total) * HALF, 0.0
    )
    return Buffers(
        every=every,
        layer=layers * per_element[:, None],
        first=states.first_elements * outside_layers,
        last=states.last_elements * outside_layers,
    )


def library_workspaces(device: Device) -> float:
    """cuBLAS's scratch: PyTorch's for the forward and for the backward thread, and as much of Transformer Engine."""
    if device.kind != "gpu" or device.vendor != "NVIDIA":
        return 0.0
    hopper = float(device.compute_capability or 0) >= 9.0
    return 3 * (32 * MIB if hopper else (2 * 4096 + 8 * 16) * 1024)


def outside(table: PlanTable, device: Device) -> Floats:
    """What the driver and NCCL hold outside the allocator: a context, and buffers of each communicator.

    One communicator spans the world, and one each kind of group that a rank is in. Each has a ring of channels.
    """
    if device.kind != "gpu" or device.vendor != "NVIDIA":
        return np.zeros(len(table))
    groups = (table.devices > 1).astype(np.float64)
    for size in (table["tp"], table["cp"], table["pp"], table["ep"], table["dp"] * table["cp"]):
        groups = groups + (size > 1)
    return framework_bytes(device) + groups * _CHANNELS * _CONNECTION_BYTES
