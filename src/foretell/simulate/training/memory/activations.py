"""What a layer keeps for its backward pass, and what it needs while that runs; and the same of the model's head.

Counted in bytes a token, for one micro-batch. h: hidden, q and k: width of the queries and of the keys on a rank, f:
width of the MLP on a rank, a: heads on a rank, s: length of the sequence, w: bytes of an operand of a matrix product
(2, or less in the low-precision formats, which Transformer Engine keeps instead of the half-precision tensor).

=================================  =====================================================================
norm                               2 h input, w h output, statistics in fp32
attention, flash                   2 (q + 2 k) operands, 2 q output, 4 a log-sum-exp, w q if w < 2
attention, unfused                 2 (q + 2 k), 2 q, and 2 a s probabilities; with dropout 3 a s more
latent attention (MLA)             both latents before and after their norm, expanded queries, keys, values
MLP, gated                         4 f input of the gate, w f input of the second product
MLP, plain                         2 f and w f
experts                            w h of each of k copies of the token, and the above for each of them
router                             13 bytes for each expert: logits, scores, weights, whether chosen
dropout                            1 h behind attention, 1 h behind the MLP
=================================  =====================================================================

Norms, dropouts and what lies between them are whole on each tensor-parallel rank, or with sequence parallelism shared
out; but PyTorch's tensor parallelism keeps the gathered operand of a product whole. With dropout, unfused attention and
a plain MLP of 4 h this is s b h (34 + 5 a s / h) of Korthikanti et al. (arXiv 2205.05198), equation 1, and with tensor
parallelism their equations 2 and 4. What FSDP2 keeps is that of compiled layers, whose norms, rotations and gates are
fused as Transformer Engine's are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.simulate.training.memory.states import HALF, OPERAND_BYTES, padded_vocab
from foretell.simulate.training.plan import PlanTable
from foretell.workload.llm.config import LayerGroup, LLMConfig
from foretell.workload.llm.weights import GATES, layer_weights

Floats = npt.NDArray[np.float64]

__all__ = ["Head", "Layer", "head", "layer", "tokens"]

# Norms of a layer: those that keep their input, and products' operands that they make.
_NORMS = {"pre_norm": (2, 2), "post_norm": (2, 2), "sandwich": (4, 2), "parallel": (1, 1), "parallel_two_norms": (1, 2)}
# fp32 logits, scores and weights of a router for each expert, and a flag whether it was chosen.
_ROUTER_BYTES = 3 * 4 + 1


def tokens(table: PlanTable) -> Floats:
    """Tokens of a micro-batch on one context-parallel rank."""
    return np.asarray(table["micro_batch"] * table["seq_len"] / table["cp"])


def _sharing(table: PlanTable) -> Floats:
    """Ranks that share out what lies between the products of a layer."""
    return np.where(table.flag("sequence_parallel"), table["tp"], 1).astype(np.float64)


def routed_rows(config: LLMConfig, table: PlanTable) -> Floats:
    """Bytes of the copies that experts get, of all tokens of a micro-batch: k tokens wide, whole on each tp rank."""
    return HALF * (config.moe.top_k if config.moe else 0) * config.hidden * tokens(table)


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes of one layer and micro-batch on a rank, each (rows,).

    `kept` until the backward pass, by what the plan recomputes; `everything` with nothing recomputed; `running` what
    the backward pass needs beyond `everything` at its fullest.
    """

    kept: Floats
    everything: Floats
    running: Floats


def layer(config: LLMConfig, group: LayerGroup, table: PlanTable, dropout: bool) -> Layer:
    """One layer of `group`, by the formulas above."""
    c, tp, outer = config, table["tp"].astype(np.float64), _sharing(table)
    fsdp = table.chosen("framework", "fsdp2")
    w = np.where(fsdp, HALF, OPERAND_BYTES[table["precision"]])  # torchao quantises anew for the backward pass
    h = float(c.hidden)
    count = tokens(table)
    unfused = table.chosen("attention", "unfused")
    inputs, outputs = _NORMS[c.block]
    statistics = 4.0 if c.norm == "rms" else 8.0
    between = np.full(len(table), HALF * inputs * h + statistics * inputs + (HALF * h if dropout else 0.0))
    # What a product reads of the gathered sequence, Transformer Engine gathers again for its backward pass.
    operands = w * outputs * h / np.where(fsdp, 1.0, outer)
    heads = c.heads / tp
    queries, keys, values, results = (size * heads for size in (c.query_dim, c.query_dim, c.value_dim, c.value_dim))
    if c.mla is not None:
        between = between + (HALF + w) * (c.mla.q_lora_rank + c.mla.kv_lora_rank)
    else:
        sharing = np.minimum(tp, c.kv_heads)
        keys, values = (c.kv_heads * c.head_dim / sharing,) * 2
    core = HALF * (queries + keys + values)
    if c.qk_norm != "none":
        core = core + HALF * (queries + keys) + 4.0 * (
            2 if c.qk_norm == "full" else heads + c.kv_heads / np.minimum(tp, c.kv_heads))  # fmt: skip
    result = HALF * results + np.where(w < HALF, w * results, 0.0)
    # Gathering heads instead of tokens, the attention keeps its own result and the exchanged one.
    result = result + np.where((table["cp"] > 1) & table.chosen("context_scheme", "a2a"), HALF * results, 0.0)
    seen = np.minimum(table["seq_len"], group.window or table["seq_len"]).astype(np.float64)
    scores = np.where(unfused, (5.0 if dropout else 2.0) * heads * seen, 4.0 * heads)
    gates = (2 if c.gated else 1) * HALF
    if group.moe:
        assert c.moe is not None
        k = c.moe.top_k
        each, shared = c.moe.intermediate / tp, c.moe.shared_intermediate / tp
        between = between + _ROUTER_BYTES * c.moe.experts
        mlp = w * k * h + (gates + w) * (k * each + shared)
        widest = k * each
        # Gradients of all copies, on their way back to their tokens, beside where they came from.
        backward = np.maximum(2 * HALF * k * h, gates * widest + HALF * k * h)
    else:
        each = c.intermediate / tp
        mlp = (gates + w) * each
        widest = each
        # Gradients of the gate's input and output, the output being freed; or of the output beside the gathered
        # gradient of the layer's result.
        gathered = np.where(table.flag("sequence_parallel") & (table["tp"] > 1), HALF * h, 0.0)
        backward = np.maximum(gates * each, HALF * each + gathered)
    # Unfused attention's gradients of probabilities and of scores, when those of the MLP are gone.
    backward = np.maximum(backward, np.where(unfused, 2 * HALF * heads * seen - mlp, 0.0))
    everything = between / outer + operands + core + result + scores + mlp
    entry = HALF * h / outer
    selective = np.where(
        fsdp, entry + _saved_products(config, group, table) + HALF * results
        + np.where(unfused, 0.0, scores), everything - scores,
    )  # fmt: skip
    kept = np.where(table.chosen("recompute", "full"), entry,
                    np.where(table.chosen("recompute", "selective"), np.minimum(selective, everything), everything))
    return Layer(kept * count, everything * count, (backward + entry) * count)


def _saved_products(config: LLMConfig, group: LayerGroup, table: PlanTable) -> Floats:
    """Results of every other matrix product, which torchtitan's selective checkpointing saves, in bytes a token.

    Compiled layers drop those that no gradient needs: what is only added to the residual. Eager ones keep them.
    """
    total = np.zeros(len(table))
    products = [weight for weight in layer_weights(config, group) if weight.kind in ("matrix", "experts")
                and weight.name not in GATES and len(weight.shape) > 1 and "bias" not in weight.name]
    for weight in products[::2]:
        if weight.name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            continue
        copies = config.moe.top_k if weight.kind == "experts" and config.moe is not None else 1
        key = ".k_proj." in weight.name or ".v_proj." in weight.name
        ranks = np.minimum(table["tp"], config.kv_heads) if key else table["tp"]
        total = total + HALF * copies * float(weight.shape[-2]) / ranks
    return total


@dataclass(frozen=True, slots=True)
class Head:
    """Bytes of the final norm, the logits and the loss of one micro-batch on the last rank, each (rows,).

    `kept` from the loss to the backward pass, `running` what is needed besides while loss and backward run, `cached`
    what the allocator holds on to meanwhile.
    """

    kept: Floats
    running: Floats
    cached: Floats


def head(config: LLMConfig, table: PlanTable, loss_fusion: bool) -> Head:
    """The head, with V the vocabulary on a rank, in bytes a token.

    A fused loss writes gradients into the half-precision logits (2 V, kept). Otherwise Megatron's turns the logits
    (2 V) into fp32 and those into probabilities in place (4 V, kept). PyTorch's keeps fp32 log-probabilities (4 V), and
    its backward pass has their gradient and that of the logits besides, both in fp32; ``loss_parallel``, for logits
    split by tensor parallelism, three fp32 tensors (`torch.distributed.tensor.parallel.loss`). The half-precision
    logits are freed by then, but no fp32 tensor fits where they were.
    """
    width = padded_vocab(config, table) / table["tp"]
    outer, h = _sharing(table), HALF * config.hidden
    torch = np.where(table["tp"] > 1, 3 * 4.0, 2 * 4.0)
    beside = 0.0 if loss_fusion else np.where(table.chosen("framework", "megatron"), HALF, torch)
    kept = (HALF if loss_fusion else 4.0) * width + 2 * h / outer
    gathered = np.where(table["tp"] > 1, h, 0.0)
    cached = 0.0 if loss_fusion else np.where(table.chosen("framework", "megatron"), 0.0, HALF) * width
    return Head(*(size * tokens(table) for size in (kept, beside * width + gathered, cached)))
