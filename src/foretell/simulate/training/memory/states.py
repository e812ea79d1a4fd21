"""Parameters, gradients and optimiser state of one rank, by the rules of the frameworks.

Bytes for each element, where d ranks share what `zero` says they share:

===================  ==================  ==================  =================================
framework            parameters          gradients           optimiser
===================  ==================  ==================  =================================
megatron, deepspeed  2 (zero 3: 2 / d)   g (zero ≥ 2: g / d) 4 + 2 s (zero ≥ 1: all of it / d)
fsdp2, zero 3        4 / d               g / d               2 s / d
fsdp2, zero 1 and 2  4 / d + 2           g / d               2 s / d
===================  ==================  ==================  =================================

with g and s the bytes of `grad_dtype` and `state_dtype`. In fp32 this is Megatron-LM's 18 bytes a parameter, or
6 + 12 / d with its distributed optimizer. FSDP2 keeps fp32 parameters only, and casts what it gathers; in a pipeline it
reduces gradients after the last micro-batch only, so that they are whole until then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretell.hardware.device import Device
from foretell.simulate.training.plan import PRECISIONS, STATE_DTYPES, PlanTable
from foretell.workload.llm.config import LLMConfig
from foretell.workload.llm.weights import GATES, Weight, adapter_weights, layer_weights, model_weights
from foretell.workload.lora import ALL_LINEAR, LoRA

Floats = npt.NDArray[np.float64]

__all__ = ["Divided", "States", "divided", "padded_vocab", "stand_ins", "states"]

#: Bytes of a value of `STATE_DTYPES`, and of a half-precision one.
STATE_BYTES = np.array([4.0, 2.0, 1.0])
HALF = 2.0
#: Bytes of a value in the formats of `PRECISIONS`, block scales included: mxfp8 has a byte for 32 values, nvfp4 for 16.
OPERAND_BYTES = np.array([2.0, 2.0, 1.0, 1.0 + 1 / 32, 0.5 + 1 / 16])
# Rows of the vocabulary are padded to a multiple of this and of the tensor-parallel ranks (Megatron-LM,
# --make-vocab-size-divisible-by).
_VOCAB_MULTIPLE = 128

assert len(STATE_BYTES) == len(STATE_DTYPES)
assert len(OPERAND_BYTES) == len(PRECISIONS)

# Weights that every tensor-parallel rank holds whole: MLA's down-projections (Megatron-core makes them "duplicated"),
# routers, and the biases added after the ranks' results are summed.
_WHOLE = ("q_a_proj.", "kv_a_proj_with_mqa.", "o_proj.bias", "down_proj.bias")
_COLUMN = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj")


@dataclass(frozen=True, slots=True)
class Divided:
    """Elements of some weights by how tensor and expert parallelism divide them.

    `split` is shared out over tp; `keys` too, but not beyond one head of keys and values a rank; `whole` is on each
    rank, of which `whole_matrices` multiply; `experts` is shared out over ep · tp.
    """

    split: float = 0.0
    keys: float = 0.0
    whole: float = 0.0
    experts: float = 0.0
    whole_matrices: float = 0.0

    def dense(self, tp: Floats, kv_heads: int) -> Floats:
        """Elements on a rank but for experts."""
        return self.split / tp + self.keys / np.minimum(tp, kv_heads) + self.whole

    def matrices(self, tp: Floats, kv_heads: int) -> Floats:
        """Those of `dense` that are matrices (biases of split ones counted with them)."""
        return self.split / tp + self.keys / np.minimum(tp, kv_heads) + self.whole_matrices

    def routed(self, tp: Floats, ep: Floats) -> Floats:
        """Elements of experts on a rank."""
        return self.experts / (tp * ep)

    def __add__(self, other: Divided) -> Divided:
        return Divided(self.split + other.split, self.keys + other.keys, self.whole + other.whole,
                       self.experts + other.experts, self.whole_matrices + other.whole_matrices)  # fmt: skip


def _divide(config: LLMConfig, weights: Iterable[Weight]) -> Divided:
    total = Divided()
    for weight in weights:
        size, name = float(weight.elements), weight.name
        if weight.kind == "experts":
            total += Divided(experts=size)
        elif weight.kind == "adapter":
            column = name.rpartition(".lora_")[0].endswith(_COLUMN)
            divided = name.endswith("lora_B.weight") == column
            total += Divided(split=size) if divided else Divided(whole=size)
        elif name in GATES or any(part in name for part in _WHOLE):
            total += Divided(whole=size, whole_matrices=size if weight.kind == "matrix" else 0.0)
        elif "norm" in name and not (config.qk_norm == "full" and name.endswith(("q_norm.weight", "k_norm.weight"))):
            total += Divided(whole=size)
        elif ".k_proj." in name or ".v_proj." in name:
            total += Divided(keys=size)
        elif ".qkv_proj." in name:
            keys = 2 * config.kv_heads / (config.heads + 2 * config.kv_heads)
            total += Divided(split=size * (1 - keys), keys=size * keys)
        else:
            total += Divided(split=size)
    return total


@lru_cache(maxsize=64)
def divided(config: LLMConfig) -> tuple[tuple[Divided, Divided], ...]:
    """For each group of layers, the weights of one layer: norms and attention, and the MLP or the experts."""
    result = []
    for group in config.groups:
        weights = layer_weights(config, group)
        mlp = [weight for weight in weights if weight.name.startswith("mlp.")]
        rest = [weight for weight in weights if not weight.name.startswith("mlp.")]
        result.append((_divide(config, rest), _divide(config, mlp)))
    return tuple(result)


@lru_cache(maxsize=256)
def _adapters(config: LLMConfig, rank: int) -> tuple[Divided, ...]:
    named = adapter_weights(config, LoRA(rank, (ALL_LINEAR,)))
    return tuple(_divide(config, named[group.name]) for group in config.groups)


def padded_vocab(config: LLMConfig, table: PlanTable) -> Floats:
    """Rows of the embedding and of the head, over all tensor-parallel ranks."""
    multiple = np.where(table.chosen("framework", "megatron"), _VOCAB_MULTIPLE * table["tp"], 1)
    return np.asarray(-(-config.vocab // multiple) * multiple, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of states on a rank, each array (rows,) or (rows, groups): of a layer of each group, and of the ends.

    `unit` (parameters, gradients, optimizer) is of one layer, `first` and `last` of what the ends of the pipeline hold
    besides, `tied` of what a rank that is both ends holds only once. `layer_elements`, `first_elements` and
    `last_elements` count weights on a rank before data-parallel sharding.
    """

    unit: tuple[Floats, Floats, Floats]
    first: tuple[Floats, Floats, Floats]
    last: tuple[Floats, Floats, Floats]
    tied: tuple[Floats, Floats, Floats]
    layer_elements: Floats
    first_elements: Floats
    last_elements: Floats


def states(config: LLMConfig, table: PlanTable, device: Device, fp8_parameters: bool = False) -> States:
    """Parameters, gradients and optimiser state of one layer of each group and of the pipeline's two ends.

    With `fp8_parameters` matrices that Megatron multiplies in 8 bits are kept in 8 bits alone.
    """
    tp, ep = table["tp"].astype(np.float64), table["ep"].astype(np.float64)
    vocab = padded_vocab(config, table) / tp
    outer = {weight.name: float(weight.elements) for weight in model_weights(config)}
    embedding = vocab * config.hidden
    first = embedding + outer.get("embed_positions.weight", 0.0)
    first += sum(size for name, size in outer.items() if name.startswith("embed_layernorm"))
    last = np.full_like(first, sum(size for name, size in outer.items() if name.startswith("norm.")))
    last = last + embedding + (vocab if config.head_bias else 0.0)
    units, elements = [], []
    for index, (attention, mlp) in enumerate(divided(config)):
        both = attention + mlp
        dense, routed = both.dense(tp, config.kv_heads), both.routed(tp, ep)
        quantised = both.matrices(tp, config.kv_heads) + routed
        adapters = np.zeros_like(tp)
        for rank in np.unique(table["lora_rank"]):
            if rank:
                chosen = table["lora_rank"] == rank
                adapters[chosen] = _adapters(config, int(rank))[index].dense(tp, config.kv_heads)[chosen]
        units.append(_bytes(table, device, dense, routed, quantised, adapters, fp8_parameters))
        elements.append(dense + routed)
    nothing = np.zeros_like(tp)
    return States(
        unit=tuple(np.stack(parts, axis=1) for parts in zip(*units, strict=True)),  # type: ignore[arg-type]
        first=_bytes(table, device, first, nothing, nothing, nothing),
        last=_bytes(table, device, last, nothing, nothing, nothing),
        # A tied matrix is on both ends of a pipeline, and only once on a rank that is both.
        tied=_bytes(table, device, embedding if config.tied_embeddings else nothing, nothing, nothing, nothing),
        layer_elements=np.stack(elements, axis=1),
        first_elements=first,
        last_elements=last,
    )


def _bytes(
    table: PlanTable, device: Device, dense: Floats, routed: Floats, quantised: Floats, adapters: Floats,
    fp8_parameters: bool = False,
) -> tuple[Floats, Floats, Floats]:
    zero, fsdp, frozen = table["zero"], table.chosen("framework", "fsdp2"), table["lora_rank"] > 0
    shards = table.shards.astype(np.float64)
    # Experts have fewer replicas: what expert parallelism leaves of all ranks of a stage.
    few = np.where(shards > 1, np.maximum(1.0, shards * table["tp"] / table["ep"]), 1.0)
    grad, state = STATE_BYTES[table["grad_dtype"]], STATE_BYTES[table["state_dtype"]]

    def shared(level: npt.NDArray[np.bool_]) -> Floats:
        """Elements left to a rank where `level` says that ranks share them."""
        return np.where(level, dense / shards + routed / few, dense + routed)

    whole = dense + routed
    stored = np.where(fsdp & ~frozen, 4.0, HALF) * shared((zero == 3) | (fsdp & (zero > 0)))
    parameters = stored + np.where(fsdp & (zero < 3), HALF, 0.0) * whole
    copies = np.where(zero < 3, _copy_bytes(table, device), 0.0)
    alone = fp8_parameters & (copies > 0) & table.chosen("precision", "fp8", "mxfp8")
    parameters = parameters + (copies - np.where(alone, HALF, 0.0)) * quantised
    # A pipeline of FSDP2's adds up whole gradients over its micro-batches and reduces them at the end.
    gradients = grad * shared(np.where(fsdp, (zero > 0) & (table["pp"] == 1), zero >= 2))
    optimizer = (np.where(fsdp, 0.0, 4.0) + 2 * state) * shared(zero >= 1)
    # Adapters are few; like the rest, their optimiser state is what is shared out.
    own = np.where(zero >= 1, adapters / shards, adapters)
    parameters = parameters + np.where(fsdp, 4.0, HALF) * adapters
    gradients = np.where(frozen, grad * adapters, gradients)
    optimizer = np.where(frozen, (np.where(fsdp, 0.0, 4.0) + 2 * state) * own, optimizer)
    return parameters, gradients, optimizer


def _copy_bytes(table: PlanTable, device: Device) -> Floats:
    """Bytes of the quantised copies that Transformer Engine keeps beside each weight between micro-batches.

    The backward pass reads weights by the other dimension. Block-scaled formats quantise anew for that; with one scale
    a tensor a transposed copy is enough, which Blackwell's tensor cores (compute capability 10.0) can do without.
    """
    turned = 1.0 if math.floor(float(device.compute_capability or 0)) >= 10 else 2.0
    copies = np.array([0.0, 0.0, turned, 2 * OPERAND_BYTES[3], 2 * OPERAND_BYTES[4]])
    return np.where(table.chosen("framework", "megatron"), copies[table["precision"]], 0.0)


def stand_ins(config: LLMConfig, table: PlanTable) -> tuple[Floats, Floats, Floats]:
    """Half-precision stand-ins for gradients that Transformer Engine keeps: of the attention's matrices (rows,), of
    each group's MLP (rows, groups), and of the head (rows,), in bytes.

    Weight gradients are added to the fp32 buffer as they are computed, yet autograd wants a tensor of the weight's
    shape: one for each distinct shape is made and kept (`get_dummy_wgrad`). Only Megatron accumulates so, and only into
    fp32.
    """
    tp = table["tp"].astype(np.float64)
    fused = table.chosen("framework", "megatron") & table.chosen("grad_dtype", "fp32") & (table["lora_rank"] == 0)
    per_element = np.where(fused, HALF, 0.0)
    parts = divided(config)
    experts = config.moe.experts if config.moe is not None else 1
    attention = per_element * parts[0][0].matrices(tp, config.kv_heads)
    mlps = [per_element * (mlp.matrices(tp, config.kv_heads) + mlp.experts / experts / tp) for _, mlp in parts]
    head = per_element * padded_vocab(config, table) / tp * config.hidden
    return attention, np.stack(mlps, axis=1), head
