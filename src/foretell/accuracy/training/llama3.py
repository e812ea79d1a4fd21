"""Pre-training of Llama 3 405B in bf16 (Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783, table 4).

Two of the table's three rows, those of 8,192 tokens: TP 8, PP 16, and 430 TFLOP/s on each of 8,192 H100, 400 on each
of 16,384. How long a step was follows from the convention that the paper cites for its utilisation (Chowdhery et al.,
arXiv 2204.02311, appendix B): six FLOP a weight and attention in full. The third row, of sequences of 131,072, is left
out: there the step's time would follow from that convention alone.

From the text of section 3.3: sharded optimiser states, weights kept between forward and backward; an interleaved
schedule, a layer less on the first and the last rank; gradients summed and reduced in fp32; RoCE of 400 Gb/s a device.
Not said, and taken: one sequence a micro-batch, chunks of one layer, nothing recomputed, gradients reduced once a step.
"""

from __future__ import annotations

from pathlib import Path

from foretell.accuracy.training.row import LeftOut, Row
from foretell.hardware.cluster import cluster
from foretell.simulate.training.plan import TrainingPlan
from foretell.workload.llm import config, six_n_flops_per_token

#: Devices, data-parallel ranks, and TFLOP/s of each device.
TABLE = ((8192, 64, 430.0), (16_384, 128, 400.0))
SEQUENCE, SEQUENCES = 8192, 2048


def read(folder: Path) -> list[Row | LeftOut]:
    """The two rows; they are in this module, not in `folder`."""
    model = config("llama-3.1-405b")
    rows: list[Row | LeftOut] = []
    for gpus, dp, tflops in TABLE:
        plan = TrainingPlan(
            global_batch=SEQUENCES, seq_len=SEQUENCE, tp=8, pp=16, dp=dp, vp=8, first_layers=7, last_layers=7,
            schedule="interleaved", overlap_tp=False,
        )  # fmt: skip
        rows.append(
            Row(
                source="llama-3",
                label=f"Llama 3 405B on {gpus} H100",
                config=model,
                plan=plan,
                cluster=cluster(f"{gpus // 8}x dgx-h100 over 8x roce-400"),
                step_s=plan.tokens * six_n_flops_per_token(model, SEQUENCE) / (tflops * 1e12 * gpus),
                family="llama-3.1-405b",
                stated_tflops=tflops,
            )
        )
    return rows
