"""Megatron Bridge's published performance (NVIDIA-NeMo/Megatron-Bridge, Apache-2.0, ``docs/performance-summary*.md``).

Containers 25.09 to 26.08 on DGX H100, B200, B300, GB200 and GB300. Identical settings differ by up to 1.8 between
containers before 26.02.01, whose rows are marked ``older`` and not judged.

What the tables leave open is in the repository's recipes (``scripts/performance/configs``): the dispatcher, whether
its all-to-all hides behind compute, CUDA graphs, and recomputed layers. `RECIPES` is what they say, for each model,
system and precision. Where they recompute parts of a layer (an up-projection of MLA, an activation), nothing is taken
to be recomputed, and where only the router is captured in a CUDA graph, no graph. Besides, in all recipes: gradients
are reduced in bf16, optimiser state is sharded (with FSDP, everything), tensor parallelism brings sequence parallelism
and, but for NVFP4, its overlap; tokens are spread evenly among experts and none is dropped.

* Embedding and head each take a layer's place in the pipeline; DeepSeek-V3's and Kimi K2's layouts leave the last
  chunk short instead.
* DeepSeek-V3 is trained with one module of multi-token prediction (its FLOP per token say so to 0.2 %): one more layer,
  and one more pass through the head, which a vocabulary of twice the size stands for.
* A part of an NVL72 rack counts as one machine; more than a rack are machines of 64 devices, or of 72.
* Fine-tuning is on packed questions of SQuAD, as in NeMo's tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.accuracy.training.nemo import LORA_RANK, QUESTION_TOKENS, published
from foretell.accuracy.training.row import LeftOut, Line, Row, lines, machines
from foretell.errors import InputError
from foretell.hardware.catalogue import fold
from foretell.hardware.cluster import Cluster, cluster
from foretell.workload.llm import LLMConfig, catalogue, config

TABLE = "nemo_performance_summary_tidy.csv"
#: Rows of this container and later ones are judged.
JUDGED = (26, 2, 1)
#: Whole node, device and, for racks, the port of each device, by the table's `system`.
SYSTEMS = {
    "DGX-H100": ("dgx-h100", "h100-sxm", ""),
    "DGX-B200": ("dgx-b200", "b200-sxm", ""),
    "DGX-B300": ("dgx-b300", "b300-sxm", ""),
    "DGX-GB200": ("gb200-nvl72", "gb200", "ib-ndr"),
    "DGX-GB300": ("gb300-nvl72", "gb300", "ib-xdr"),
}
RACK = 72
PRECISIONS = {
    "BF16": "bf16",
    "FP8": "fp8",
    "FP8-CS": "fp8",  # one current scale a tensor
    "FP8-SC": "fp8",  # one scale a block of 128 × 128
    "FP8-MX": "mxfp8",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "": "fp8",  # 25.09 has no column
}
TASKS = {"Pre-Training Performance": "pretrain", "SFT Performance": "sft", "LoRA Performance": "lora"}
#: How names of models begin whose layers are not all attention: state spaces, linear attention.
HYBRIDS = ("nemotronh", "nemotron3", "qwen3next", "qwen35")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options of a `TrainingPlan` for one model on some systems, in some precisions (none named: in all).

    With `pp`, only for that depth of the pipeline.
    """

    model: str
    systems: str
    precisions: str = ""
    pp: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, model: str, system: str, precision: str, pp: int) -> bool:
        """Whether a row is of this recipe."""
        return (
            model == self.model
            and system.removeprefix("DGX-") in self.systems.split()
            and (not self.precisions or precision in self.precisions.split())
            and self.pp in (0, pp)
        )


_FUSED = {"dispatcher": "deepep"}
_GRAPH = {"cuda_graph": True}
_HIDDEN = {"overlap_ep": True}
_RACKS = "GB200 GB300"

#: The first that fits counts; without one, options are those of `published`.
RECIPES: tuple[Recipe, ...] = (
    Recipe("llama-3-8b", "B200 B300 GB200 GB300", "bf16 fp8 mxfp8", options=_GRAPH),
    Recipe("llama-3-8b", "GB300", "nvfp4", options=_GRAPH),
    Recipe("llama-3-8b", "H100", "fp8", options={"recompute": "full", "recompute_layers": 5}),
    Recipe("llama-3-70b", "B200", "bf16", options=_GRAPH),
    Recipe("deepseek-v3", _RACKS + " B300", "mxfp8", options=_FUSED | _GRAPH | _HIDDEN),
    Recipe("deepseek-v3", _RACKS, "nvfp4", options=_FUSED | _GRAPH),
    Recipe("deepseek-v3", "GB300", "fp8", options=_FUSED),
    Recipe("deepseek-v3", _RACKS + " B300", options=_FUSED | _GRAPH),
    Recipe("deepseek-v3", "B200", "mxfp8", pp=8, options=_FUSED | _GRAPH | _HIDDEN),
    Recipe("deepseek-v3", "B200", "nvfp4", pp=8, options=_FUSED | _HIDDEN),
    Recipe("deepseek-v3", "B200", options=_FUSED),
    Recipe("deepseek-v3", "H100", options=_FUSED | {"overlap_grad_reduce": False}),
    Recipe("kimi-k2", "GB300", "mxfp8", options=_FUSED | _GRAPH | _HIDDEN),
    Recipe("kimi-k2", _RACKS, options=_FUSED),
    Recipe("kimi-k2", "H100", options={"overlap_grad_reduce": False}),
    Recipe("qwen3-235b-a22b", _RACKS, options=_FUSED | _GRAPH),
    Recipe("qwen3-235b-a22b", "H100", options=_HIDDEN | {"overlap_tp": False}),
    Recipe("qwen3-30b-a3b", "GB200", "bf16 fp8", options=_FUSED | _GRAPH),
    Recipe("qwen3-30b-a3b", "B200", options=_FUSED | _GRAPH),
    Recipe("qwen3-30b-a3b", _RACKS + " B300 H100", options=_FUSED),
    Recipe("gpt-oss-120b", _RACKS, "mxfp8", options=_FUSED | _GRAPH | _HIDDEN),
    Recipe("gpt-oss-120b", "GB300", options=_GRAPH),
    Recipe("gpt-oss-120b", "GB200", options=_HIDDEN),
    Recipe("gpt-oss-120b", "B300", "mxfp8", options=_FUSED | _GRAPH | _HIDDEN),
    Recipe("gpt-oss-120b", "B300", options=_FUSED | _GRAPH),
    Recipe("gpt-oss-20b", "B300 GB200 GB300", options=_FUSED | _GRAPH),
)


def read(folder: Path) -> list[Row | LeftOut]:
    """Every row that is of a transformer the catalogue has, drops no tokens, and fills its devices."""
    return [_row(line) for line in lines(folder / "megatron-bridge" / TABLE)]


def _row(line: Line) -> Row | LeftOut:
    name, system, note = line.text("model"), line.text("system"), line.text("model_note")
    container = line.text("container").partition(" ")[0]
    gpus, written = line.count("num_gpus"), line.text("precision")
    other = line.text("variant").startswith("parenthesised")
    parts = (name, note, f"on {gpus}x {system}", written, line.text("task").partition(" ")[0], container)
    label = " ".join(filter(None, (*parts, "second figure" if other else "")))
    key = fold(name)
    if key.startswith(HYBRIDS):
        return LeftOut(label, "hybrid: not all layers are attention")
    if key not in _known():
        return LeftOut(label, "no configuration of this model is known")
    if note == "tokendrop":
        return LeftOut(label, "drops tokens, and how many is no column")
    for column, choices in (("task", TASKS), ("precision", PRECISIONS), ("system", SYSTEMS)):
        if line.text(column) not in choices:
            return LeftOut(label, f"{column} {line.text(column)!r} is not known")
    known, task = _known()[key], TASKS[line.text("task")]
    precision = PRECISIONS[written]
    if other and not written and system != "DGX-H100":
        precision = "mxfp8"
    tp, pp, cp = line.count("tp"), line.count("pp"), line.count("cp", missing=1)
    vp, sharded = line.count("vp", missing=1), line.text("fsdp") not in ("", "0", "n/a")
    if gpus % (tp * pp * cp):
        return LeftOut(label, f"{tp} × {pp} × {cp} does not divide {gpus} devices")
    model = _trained(known)
    first, last = ends(model, pp, vp)
    options: dict[str, Any] = {"overlap_tp": tp > 1 and precision != "nvfp4"}
    recipe = next((r for r in RECIPES if r.fits(known, system, precision, pp)), None)
    if recipe is not None and task == "pretrain":
        options |= recipe.options
    if sharded:  # whatever was recomputed to fit, fits
        options |= {"zero": 3, "recompute": "none", "recompute_layers": 0}
    plan = published(
        global_batch=line.count("gbs"),
        seq_len=line.count("seq_len"),
        micro_batch=line.count("mbs"),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=gpus // (tp * pp * cp),
        ep=line.count("ep", missing=1),
        vp=vp,
        first_layers=first,
        last_layers=last,
        precision=precision,
        lora_rank=LORA_RANK if task == "lora" else 0,
        document_len=0 if task == "pretrain" else QUESTION_TOKENS,
        **options,
    )
    return Row(
        source="megatron-bridge",
        label=f"{label}: {plan}",
        config=model,
        plan=plan,
        cluster=_cluster(gpus, *SYSTEMS[system]),
        step_s=plan.tokens / (line.number("tokens_per_s_per_gpu") * gpus),
        family=name,
        task=task,
        container=container,
        split="judge" if _version(container, line.where) >= JUDGED else "older",
        stated_tflops=line.number("model_tflops_per_gpu"),
    )


def ends(model: LLMConfig, pp: int, vp: int) -> tuple[int, int]:
    """Layers of the first and last rank of the pipeline where chunks cannot be equal; 0: as many as the others."""
    chunks = pp * vp
    most = -(-model.layers // chunks)
    missing = chunks * most - model.layers
    if pp == 1 or not missing:
        return 0, 0
    # Published layouts of the models with latent attention leave the last chunk short, if one can make up for all.
    at_end = missing if model.mla is not None and missing < most else -(-missing // 2)
    at_start = missing - at_end
    return most * vp - at_start if at_start else 0, most * vp - at_end


def _trained(known: str) -> LLMConfig:
    """The model as the recipes train it."""
    model = config(known)
    if known == "deepseek-v3":  # one module of multi-token prediction
        return model.replace(name=f"{known}-mtp", layers=model.layers + 1, vocab=2 * model.vocab)
    if known == "gpt-oss-20b":  # MLPerf's, with the tokens of Llama 3
        return model.replace(name=f"{known}-mlperf", vocab=128_256)
    return model


def _known() -> dict[str, str]:
    return {fold(name): name for name in catalogue()}


def _cluster(gpus: int, node: str, device: str, port: str) -> Cluster:
    if not port:
        return machines(gpus, 8, node, device)
    if gpus <= RACK:
        return cluster(f"{gpus}x {device}")
    size = 64 if gpus % 64 == 0 else RACK
    if gpus % size:
        raise InputError(f"{gpus} devices fill no whole number of racks of 64 or {RACK}")
    return cluster(f"{gpus // size}x {size}x {device} over {size}x {port}")


def _version(container: str, where: str) -> tuple[int, ...]:
    parts = container.split(".")
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"container is {container[:40]!r}, want a version", where, "use the table as published")
    return tuple(int(part) for part in parts)
