"""Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198), Table 5.

Iteration times of Megatron-LM on Selene (DGX A100 80 GB), as the repository calculon-ai/calculon (Apache-2.0) keeps
them with their configurations. Eight rows: four models, each with full recomputation, and with sequence parallelism
and selective recomputation.

What the table leaves open, and how it is taken: fp16, vocabulary 51,200 (as the paper's models have it), no optimiser
sharding, dropout and a softmax that stores its probabilities (the paper precedes FlashAttention in Megatron-LM), and
messages between pipeline stages that nothing overlaps.
"""

from __future__ import annotations

from pathlib import Path

from foretell.accuracy.training.row import Row, gpt, lines, machines
from foretell.simulate.training.plan import TrainingPlan

TABLE = "korthikanti_table5_iteration_time.csv"
VOCABULARY = 51_200
#: Recomputation and sequence parallelism by the table's `recompute_mode`.
MODES = {"full": ("full", False), "seqsel": ("selective", True)}


def read(folder: Path) -> list[Row]:
    """The eight rows of Table 5, `batch_size` being that of one data-parallel replica."""
    rows = []
    for line in lines(folder / "calculon" / TABLE):
        recompute, sequence_parallel = line.choice("recompute_mode", MODES)
        vp, gpus = line.count("pipeline_interleaving"), line.count("num_procs")
        config = gpt(
            line.text("model"),
            layers=line.count("num_blocks"),
            hidden=line.count("hidden"),
            heads=line.count("attn_heads"),
            vocab=VOCABULARY,
            context=line.count("seq_size"),
            source="arXiv 2205.05198, table 3",
        )
        plan = TrainingPlan(
            global_batch=line.count("batch_size") * line.count("data_par"),
            seq_len=line.count("seq_size"),
            micro_batch=line.count("microbatch_size"),
            tp=line.count("tensor_par"),
            dp=line.count("data_par"),
            pp=line.count("pipeline_par"),
            vp=vp,
            schedule="interleaved" if vp > 1 else "1f1b",
            zero=0,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
            precision="fp16",
            attention="unfused",
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            overlap_p2p=False,
        )
        rows.append(
            Row(
                source="calculon",
                label=f"{config.name} {line.text('recompute_mode')}",
                config=config,
                plan=plan,
                cluster=machines(gpus, 8, "dgx-a100", "a100-sxm4-80gb"),
                step_s=line.number("measured"),
                family=config.name,
            )
        )
    return rows
