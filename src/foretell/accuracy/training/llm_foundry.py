"""Throughput of MPT models in llm-foundry (mosaicml/llm-foundry, Apache-2.0, ``scripts/train/benchmarking``).

PyTorch FSDP under Composer on A100 and H100 nodes of eight. Shapes and heads are those of the repository's
``scripts/train/yamls/mpt``; biases and learned positions as long as the sequence follow from the table's number of
parameters, which the shapes give to the last digit.

* ``PURE`` mixed precision reduces gradients in bf16, ``DEFAULT`` in fp32; master weights are fp32 in both.
* Activation checkpointing recomputes whole layers. Attention is a fused kernel (Triton's or FlashAttention's).
* A global batch that micro-batches do not divide ends with a smaller one.
* The last table leaves H100's network open: what a DGX H100 has is taken.
"""

from __future__ import annotations

from pathlib import Path

from foretell.accuracy.training.row import LeftOut, Line, Row, gpt, lines, machines
from foretell.simulate.training.plan import TrainingPlan

TABLE = "mpt_training_throughput.csv"
VOCABULARY = 50_368
#: Layers, width and heads by the table's `Model`.
SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
#: Whole node, device and what joins nodes, by the table's `GPU`.
NODES = {
    "a100_80gb": ("dgx-a100", "a100-sxm4-80gb", "8x roce-200"),
    "a100_40gb": ("dgx-a100-320gb", "a100-sxm4-40gb", "8x roce-200"),
    "h100_80gb": ("dgx-h100", "h100-sxm", ""),
}
PRECISIONS = {"bf16": "bf16", "amp_bf16": "bf16", "fp16": "fp16", "amp_fp16": "fp16", "amp_fp8": "fp8"}
#: ZeRO stage and ranks that share one copy (0: all) by FSDP's sharding strategy.
SHARDING = {"FULL_SHARD": (3, 0), "SHARD_GRAD_OP": (2, 0), "HYBRID_SHARD": (3, 8), "NO_SHARD": (0, 0)}
REDUCED_IN = {"PURE": "bf16", "DEFAULT": "fp32"}


def read(folder: Path) -> list[Row | LeftOut]:
    """Every row of the tables; those that offload activations to the host are left out."""
    return [_row(line) for line in lines(folder / "llm-foundry" / TABLE)]


def _row(line: Line) -> Row | LeftOut:
    layers, hidden, heads = line.choice("Model", SHAPES)
    node, device, over = line.choice("GPU", NODES)
    zero, shard = line.choice("Sharding Strategy", SHARDING)
    name, seq_len, gpus = line.text("Model"), line.count("SeqLen (T)"), line.count("# GPUs")
    plan = TrainingPlan(
        global_batch=line.count("GlobalBatchSize"),
        seq_len=seq_len,
        micro_batch=line.count("MicroBatchSize"),
        dp=gpus,
        framework="fsdp2",
        attention="flash2",  # its tables are of 2023 and early 2024
        zero=zero,
        shard=shard,
        sequence_parallel=False,
        recompute="full" if line.choice("Activation Checkpointing", {"True": True, "False": False}) else "none",
        precision=line.choice("Precision", PRECISIONS),
        grad_dtype=line.choice("MP Mode", REDUCED_IN),
    )
    label = f"mpt-{name} {seq_len} on {gpus}x {device}, {plan.precision}, batch {plan.global_batch}: {plan}"
    if line.choice("Activation CPUOffload", {"True": True, "False": False}):
        return LeftOut(label, "offloads activations to the host")
    stated = line.number("Model TFLOP")
    return Row(
        source="llm-foundry",
        label=label,
        config=gpt(
            f"mpt-{name}",
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab=VOCABULARY,
            context=seq_len,
            source="github.com/mosaicml/llm-foundry, scripts/train/yamls/mpt",
        ),
        plan=plan,
        cluster=machines(gpus, 8, node, device, over),
        step_s=plan.tokens / line.number("Throughput (T/s)"),
        family=f"mpt-{name}",
        stated_tflops=stated / 1e12 if stated > 1e6 else stated,  # H100's tables give FLOP/s
    )
