"""NVIDIA NeMo's published performance (NVIDIA/NeMo, Apache-2.0, ``docs/source/performance``): FP8 on DGX H100.

Pre-training, full and low-rank fine-tuning in NeMo 24.07, and Llama 2 7B on long sequences in NeMo 24.03.01.

What the tables leave open, and how it is taken, after NeMo's published configurations (NeMo-Framework-Launcher,
``launcher_scripts/conf/training``): optimiser state is sharded, with gradients reduced and parameters gathered behind
compute; tensor parallelism brings sequence parallelism and its overlap with compute; nothing is recomputed; several
chunks on a rank (``vp``) are interleaved, with sends behind compute. Adapters are of rank 32 (NeMo's LoRA).

* Shapes of GPT-3 and Nemotron are NeMo's own. Nemotron: rotary positions, layer norms, an MLP of two matrices with a
  squared ReLU, no biases, 256,000 words, nothing tied.
* The tables of fine-tuning have no column for chunks: those of the pre-training row of the same model and pipeline.
* Fine-tuning packs questions of SQuAD to 4096 tokens, and these do not attend to each other. FLOP per token of the
  SFT rows leave room for attention over 245 ± 37 (7B) and 238 ± 42 (13B) tokens a question, of LoRA's 7B for 216 ± 25.
* The long-sequence table gives TFLOP/s alone. Tokens per second follow from its FLOP per token, which count attention
  in full. It says nothing of the batch: eight sequences a data-parallel rank are taken. Rows without context
  parallelism have an unpublished layout, and so are left out unless context parallelism is 1 in the row's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.accuracy.training.row import LeftOut, Line, Row, gpt, lines, machines
from foretell.simulate.training.plan import TrainingPlan
from foretell.workload.llm import LLMConfig, config

TABLE = "nemo_24.07_h100_fp8.csv"
LONG_TABLE = "nemo_24.03_llama2_7b_long_sequence_h100_fp8.csv"
#: Tokens of a question of SQuAD with its paragraph and answer.
QUESTION_TOKENS = 220
LORA_RANK = 32
#: Sequences of each data-parallel rank in a step on long sequences.
LONG_BATCH = 8
_NODE, _DEVICE = "dgx-h100", "h100-sxm"
_LAUNCHER = "github.com/NVIDIA/NeMo-Framework-Launcher, launcher_scripts/conf/training"


def _nemotron(name: str, layers: int, hidden: int, heads: int) -> LLMConfig:
    return LLMConfig(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=4 * hidden,
        vocab=256_000,
        context_length=4096,
        gated=False,
        activation="relu",
        norm="layer",
        norm_bias=True,
        fused_qkv=True,
        source=_LAUNCHER,
    )


def _gpt3(name: str, layers: int, hidden: int, heads: int) -> LLMConfig:
    return gpt(name, layers=layers, hidden=hidden, heads=heads, vocab=51_200, context=2048, source=_LAUNCHER)


#: Shapes by the table's `model`.
MODELS: dict[str, LLMConfig] = {
    "GPT3-5B": _gpt3("gpt3-5b", 24, 4096, 32),
    "GPT3-20B": _gpt3("gpt3-20b", 44, 6144, 48),
    "GPT3-175B": _gpt3("gpt3-175b", 96, 12_288, 96),
    "LLAMA2-7B": config("llama-2-7b"),
    "LLAMA2-13B": config("llama-2-13b"),
    "LLAMA2-70B": config("llama-2-70b"),
    "LLAMA3-8B": config("llama-3-8b"),
    "LLAMA3-70B": config("llama-3-70b"),
    "Nemotron-8B": _nemotron("nemotron-8b", 32, 4096, 32),
    "Nemotron-22B": _nemotron("nemotron-22b", 40, 6144, 48),
    "Nemotron-340B": config("nemotron-4-340b"),
}


def published(**given: Any) -> TrainingPlan:
    """A plan of what a table gives, the rest as NeMo's configurations for performance have it."""
    vp, tp = given.get("vp", 1), given.get("tp", 1)
    return TrainingPlan(
        **{
            "schedule": "interleaved" if vp > 1 else "1f1b",
            "zero": 1,
            "sequence_parallel": tp > 1,
            "overlap_tp": tp > 1,
            "overlap_p2p": vp > 1,
            "grad_dtype": "bf16",
            **given,
        }
    )


def read(folder: Path) -> list[Row | LeftOut]:
    """Pre-training and fine-tuning."""
    table = list(lines(folder / "nemo" / TABLE))
    chunks = {(line.text("model"), line.count("pp")): line.count("vp", missing=1) for line in table if line.text("vp")}
    return [_row(line, chunks) for line in table]


def _row(line: Line, chunks: Mapping[tuple[str, int], int]) -> Row:
    task = line.choice("task", {"pretrain": "pretrain", "SFT": "sft", "LoRA": "lora"})
    model, gpus = line.choice("model", MODELS), line.count("gpus")
    tp, pp, cp = line.count("tp"), line.count("pp"), line.count("cp", missing=1)
    plan = published(
        attention="flash2",  # containers of March and July 2024
        global_batch=line.count("gbs"),
        seq_len=line.count("seq_len"),
        micro_batch=line.count("mbs"),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=max(1, gpus // (tp * pp * cp)),
        vp=line.count("vp", missing=chunks.get((line.text("model"), pp), 1)),
        precision=line.choice("precision", {"FP8": "fp8", "BF16": "bf16"}),
        lora_rank=LORA_RANK if task == "lora" else 0,
        document_len=0 if task == "pretrain" else QUESTION_TOKENS,
    )
    return Row(
        source="nemo",
        label=f"{line.text('model')} {task} on {gpus}, batch {plan.global_batch}: {plan}",
        config=model,
        plan=plan,
        cluster=machines(gpus, 8, _NODE, _DEVICE),
        step_s=plan.tokens / (line.number("tokens_per_s_per_gpu") * gpus),
        family=line.text("model"),
        task=task,
        container=line.text("container"),
        stated_tflops=line.number("model_tflops_per_gpu"),
    )


def flops_per_token(model: LLMConfig, seq_len: int) -> float:
    """FLOP of a token, forward and backward, as NeMo counts them: every score of attention, no embedding."""
    weights = model.parameters - model.vocab * model.hidden * (0 if model.tied_embeddings else 1)
    return 6.0 * weights + 12.0 * model.layers * model.heads * model.head_dim * seq_len


def read_long(folder: Path) -> list[Row | LeftOut]:
    """Llama 2 7B with 4,096 to 1,048,576 tokens a sequence."""
    found: list[Row | LeftOut] = []
    model = config("llama-2-7b")
    for line in lines(folder / "nemo" / LONG_TABLE):
        seq_len, gpus, cp = 1024 * line.count("seq_len_k"), line.count("gpus"), line.count("cp")
        dp = line.count("dp")
        plan = published(
        attention="flash2",  # containers of March and July 2024
            global_batch=LONG_BATCH * dp,
            seq_len=seq_len,
            tp=line.count("tp"),
            pp=line.count("pp"),
            dp=dp,
            cp=cp,
            precision="fp8",
        )
        label = f"llama-2-7b {line.text('seq_len_k')}K on {gpus}: {plan}"
        tflops = line.number("with_cp_tflops_per_gpu")
        found.append(
            Row(
                source="nemo-long",
                label=label,
                config=model,
                plan=plan,
                cluster=machines(gpus, 8, _NODE, _DEVICE),
                step_s=plan.tokens * flops_per_token(model, seq_len) / (tflops * 1e12 * gpus),
                family="LLAMA2-7B",
                container="NeMo 24.03.01",
                stated_tflops=tflops,
            )
        )
        if cp > 1:
            found.append(LeftOut(f"{label.partition(':')[0]} without context parallelism", "layout is not published"))
    return found
