"""vTrain's measurements (Bang et al., MICRO 2024, arXiv 2312.12391; repository VIA-Research/vTrain, MIT licence).

Iterations of Megatron-DeepSpeed on A100s: 1,440 of small models on 2 to 8 GPUs of one node, 109 of models of 3.6 to
175 billion parameters on 64 to 512 GPUs. From the repository's ``config/validation``: 1F1B, activation checkpointing,
gradients reduced after the last backward pass in one piece, 800 Gb/s from node to node (four HDR ports). From its
``src``: fp16, gradients of two bytes reduced between data-parallel ranks, attention of two batched products around a
fused softmax and dropout, and the vocabulary of 51,200.

The rows of one node are no 1,440 independent measurements: over the number of layers they lie on straight lines to a
few 1e-5 of their time, which no two runs do. They are put together from the time of a layer for each of 32 shapes
(width, micro-batch, tensor parallelism), of the head and embedding, of the update and of messages.
"""

from __future__ import annotations

from pathlib import Path

from foretell.accuracy.training.row import Row, gpt, lines, machines
from foretell.simulate.training.plan import TrainingPlan

SINGLE, MULTI = "ground_truth_single_node.csv", "ground_truth_multi_node.csv"
VOCABULARY = 51_200
#: Constants may be fitted on rows of up to this many GPUs of one node.
FITTED_GPUS = 4


def read_single(folder: Path) -> list[Row]:
    """The rows of one node."""
    return _read(folder / "vtrain" / SINGLE, "vtrain-single")


def read_multi(folder: Path) -> list[Row]:
    """The rows of several nodes."""
    return _read(folder / "vtrain" / MULTI, "vtrain-multi")


def _read(path: Path, source: str) -> list[Row]:
    rows = []
    for line in lines(path):
        layers, hidden, heads = line.count("# layers"), line.count("hidden size"), line.count("attention heads")
        gpus, seq_len = line.count("# GPUs"), line.count("sequence length")
        config = gpt(
            f"gpt-{layers}x{hidden}",
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab=VOCABULARY,
            context=seq_len,
            source="github.com/VIA-Research/vTrain, config/validation",
        )
        plan = TrainingPlan(
            global_batch=line.count("global batch"),
            seq_len=seq_len,
            micro_batch=line.count("micro batch"),
            tp=line.count("tensor parallelism"),
            dp=line.count("data parallelism"),
            pp=line.count("pipeline parallelism"),
            framework="deepspeed",
            zero=0,
            sequence_parallel=False,
            recompute="full",
            precision="fp16",
            attention="unfused",
            grad_dtype="bf16",
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            overlap_p2p=False,
        )
        rows.append(
            Row(
                source=source,
                label=f"{config.name} on {gpus}, batch {plan.global_batch}: {plan}",
                config=config,
                plan=plan,
                cluster=machines(gpus, 8, "dgx-a100", "a100-sxm4-80gb", over="4x ib-hdr"),
                step_s=line.number("iteration time (ms)") / 1e3,
                family=config.name,
                split="fit" if gpus <= FITTED_GPUS else "judge",
            )
        )
    return rows
