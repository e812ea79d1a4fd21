"""Memory of distributed training against what was published: formulas of a paper, and runs whose memory was read.

    python benchmarks/training_memory.py [--data DIR]

Exits with 1 where a bar is missed. The figures of Korthikanti et al. are read from FORETELL_DATA; the others are in
this file, each with where it was published.

Korthikanti et al. (arXiv 2205.05198), figures 1 and 7: the authors computed them by their formulas, which count layers
and nothing else. The models here therefore have a vocabulary of one word (padded to 128 rows a rank), tied and without
positions; what is compared is, of the first rank, its parameters, gradients and optimiser state, or its activations:
neither logits nor what the running layer needs. Figure 7's bars were read off the picture, so that they agree among
themselves to about 0.1 points of the bar that is 100.

Llama-2-7B on eight H800 under Megatron-LM: gigabytes per GPU, each of one run, without saying what was read. They are
taken as what ``nvidia-smi`` shows. With tensor parallelism 8, sequence parallelism would take 8 GB less than was seen;
the run is taken to be without.

SimuMax (MooreThreads, Apache 2.0), docs/b200/b200_release_v1.2_summary.md of 2026: ``max_memory_allocated`` of
Megatron-LM on eight B200, the most of all ranks. bf16, one sequence of 4,096 tokens a micro-batch, sequence
parallelism, distributed optimizer, fused cross entropy; models cut to a few layers, their tokenizer one word larger
than the model's. Its rows with 8 and 32 micro-batches repeat those with 4.

torchtitan (PyTorch, BSD), benchmarks/llama3_h100_202412_torchtitan.md of 2024: the most memory reserved on eight to 512
H100 (96 GB). FSDP2; `selective` is its checkpointing by operation; pipelines split the local batch into as many
micro-batches as they have ranks, and do not reshard parameters after the forward pass. Sequences are of 8,192 tokens
where the table names none.

Runs whose speed was published tell of memory too: they fitted. `foretell.accuracy.training` reads them; what their
tables do not say is taken from their frameworks' recipes: a fused loss (LLM Foundry, NeMo, Megatron Bridge) and, in
8 bits, parameters in 8 bits alone (NeMo, Megatron Bridge).

NVIDIA DGX Cloud benchmarking, llama3.1/README.md of 2025: the log of Llama 3.1 8B on eight GPUs, bf16, micro-batch 4,
sequences of 8,192, gradients in bf16 (as its 51 GB after the step say), fused cross entropy.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from foretell import hardware
from foretell.accuracy import training
from foretell.simulate.training import PlanTable, TrainingPlan
from foretell.simulate.training.memory import MemoryTable, by_rank, memory
from foretell.workload import llm
from foretell.workload.llm.config import LLMConfig

GB, GIB = 1e9, 2**30


@dataclass(frozen=True)
class Case:
    """One published figure: of which run, what was read (`quantity`), in `unit` bytes."""

    source: str
    label: str
    config: LLMConfig
    plan: TrainingPlan
    device: str
    quantity: str
    unit: float
    value: float
    options: dict[str, bool] = field(default_factory=dict)

    def predicted(self) -> float:
        """The same by `memory`, in the same unit."""
        found = memory(self.config, PlanTable.of([self.plan]), hardware.device(self.device), **self.options)
        return float(getattr(found, f"{self.quantity}_bytes")[0]) / self.unit

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted() / self.value - 1


# --- runs -----------------------------------------------------------------------------------------------------------


def llama_2() -> Iterator[Case]:
    """Megatron-LM on eight H800."""
    config = llm.config("llama-2-7b")
    runs: tuple[tuple[str, dict[str, Any], float], ...] = (
        ("dp4 pp2 mbs2", {"dp": 4, "pp": 2, "micro_batch": 2, "global_batch": 2048}, 49.8),
        ("tp8 mbs4", {"tp": 8, "micro_batch": 4, "global_batch": 128, "sequence_parallel": False}, 28.8),
    )
    for label, plan, value in runs:
        yield Case("llama-2-7b", label, config, TrainingPlan(seq_len=2048, **plan), "h800-sxm", "peak", GB, value)


def _cut(name: str, layers: int) -> LLMConfig:
    config = llm.config(name)
    config = config.replace(layers=layers, vocab=config.vocab + 1)
    if config.moe is not None:
        config = config.replace(moe=dataclasses.replace(config.moe, first_dense=1))
    return config.replace(kv_heads=16) if name == "llama-3.1-405b" else config


_LONG, _LONGER = {"seq_len": 32_768, "context_scheme": "a2a"}, {"seq_len": 131_072, "context_scheme": "a2a"}
_B200: tuple[tuple[str, int, dict[str, Any], float], ...] = (
    ("llama-3-70b", 12, {"pp": 2, "dp": 4}, 66.55),
    ("llama-3-70b", 12, {"tp": 2, "dp": 4}, 60.68),
    ("llama-3-70b", 12, {"tp": 4, "dp": 2}, 39.07),
    ("llama-3-70b", 12, {"tp": 8}, 28.29),
    ("llama-3.1-405b", 4, {"pp": 2, "dp": 4}, 87.08),
    ("llama-3.1-405b", 4, {"tp": 2, "dp": 4}, 81.59),
    ("llama-3.1-405b", 4, {"tp": 4, "dp": 2}, 52.89),
    ("llama-3.1-405b", 4, {"tp": 8}, 38.57),
    ("deepseek-v2", 4, {"dp": 8, "ep": 8}, 45.63),
    ("deepseek-v2", 4, {"dp": 4, "ep": 4, "pp": 2}, 44.70),
    ("deepseek-v3", 4, {"dp": 8, "ep": 8}, 104.30),
    ("deepseek-v3", 4, {"dp": 4, "ep": 4, "pp": 2}, 114.00),
    ("llama-3-70b", 12, {"tp": 2, "cp": 4, **_LONG}, 68.43),
    ("llama-3-70b", 12, {"cp": 8, **_LONG}, 104.51),
    ("llama-3.1-405b", 4, {"tp": 2, "cp": 4, **_LONG}, 87.03),
    ("llama-3.1-405b", 4, {"cp": 8, **_LONG}, 139.22),
    ("llama-3-70b", 12, {"tp": 2, "cp": 4, **_LONGER}, 112.67),
    ("llama-3-70b", 12, {"cp": 8, **_LONGER}, 147.99),
    ("llama-3.1-405b", 4, {"tp": 2, "cp": 4, **_LONGER}, 118.13),
)


def simumax() -> Iterator[Case]:
    """Megatron-LM on eight B200."""
    for name, layers, given, value in _B200:
        plan = TrainingPlan(**{"global_batch": 4 * given.get("dp", 1), "seq_len": 4096, **given})
        yield Case("simumax-b200", f"{name} l{layers} {plan} s{plan.seq_len // 1024}k", _cut(name, layers), plan,
                   "b200-sxm", "allocated", GIB, value, {"loss_fusion": True})  # fmt: skip


_SELECTIVE = {"recompute": "selective", "seq_len": 8192, "micro_batch": 2}
_FULL = {"recompute": "full", "precision": "fp8"}
_PIPELINE = {**_FULL, "tp": 8, "pp": 8, "zero": 2}
_BATCH_32 = {"dp": 8, "global_batch": 256, "micro_batch": 4, "seq_len": 8192}
_TITAN: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("eager", "llama-3.1-8b", {**_SELECTIVE, "dp": 8, "global_batch": 16}, 82.4),
    ("compiled", "llama-3.1-8b", {**_SELECTIVE, "dp": 8, "global_batch": 16}, 77.0),
    ("compiled", "llama-3.1-8b", {**_SELECTIVE, "dp": 8, "global_batch": 16, "precision": "fp8"}, 76.8),
    ("eager", "llama-3.1-8b", {**_SELECTIVE, "dp": 128, "global_batch": 256}, 67.0),
    ("compiled", "llama-3.1-8b", {**_SELECTIVE, "dp": 128, "global_batch": 256}, 62.0),
    ("compiled", "llama-3.1-8b", {**_SELECTIVE, "dp": 128, "global_batch": 256, "precision": "fp8"}, 61.8),
    ("compiled", "llama-3.1-8b", {**_FULL, "dp": 8, "global_batch": 8, "seq_len": 32_768}, 83.9),
    ("compiled", "llama-3.1-8b", {**_FULL, "dp": 4, "cp": 2, "global_batch": 4, "seq_len": 65_536}, 84.2),
    ("compiled", "llama-3.1-8b", {**_FULL, "dp": 2, "cp": 4, "global_batch": 2, "seq_len": 131_072}, 84.0),
    ("compiled", "llama-3.1-8b", {**_FULL, "dp": 1, "cp": 8, "global_batch": 1, "seq_len": 262_144}, 84.5),
    ("compiled", "llama-3.1-70b",
     {**_FULL, "dp": 32, "tp": 8, "global_batch": 512, "micro_batch": 16, "seq_len": 8192}, 71.9),
    ("async TP", "llama-3.1-405b", {**_PIPELINE, **_BATCH_32}, 82.5),
    ("async TP", "llama-3.1-405b", {**_PIPELINE, **_BATCH_32, "vp": 2, "schedule": "interleaved"}, 72.7),
    ("async TP", "llama-3.1-405b", {**_PIPELINE, "dp": 8, "global_batch": 64, "seq_len": 32_768}, 75.3),
    ("async TP", "llama-3.1-405b", {**_PIPELINE, "dp": 4, "cp": 2, "global_batch": 32, "seq_len": 65_536}, 75.9),
    ("async TP", "llama-3.1-405b", {**_PIPELINE, "dp": 2, "cp": 4, "global_batch": 16, "seq_len": 131_072}, 77.1),
    ("async TP", "llama-3.1-405b", {**_PIPELINE, "dp": 1, "cp": 8, "global_batch": 8, "seq_len": 262_144}, 84.9),
)  # fmt: skip


def torchtitan() -> Iterator[Case]:
    """FSDP2 on H100."""
    for label, name, given, value in _TITAN:
        plan = TrainingPlan(**{"framework": "fsdp2", "zero": 3, **given})
        yield Case("torchtitan-h100", f"{name} {plan} {plan.precision} s{plan.seq_len // 1024}k {label}",
                   llm.config(name), plan, "h100-sxm", "reserved", GIB, value)  # fmt: skip


def dgx_cloud() -> Iterator[Case]:
    """Megatron Bridge on eight GB300."""
    plan = TrainingPlan(128, 8192, micro_batch=4, dp=8, grad_dtype="bf16")
    config = llm.config("llama-3.1-8b")
    for quantity, value in (("allocated", 194.41), ("reserved", 216.89)):
        yield Case("dgx-cloud-gb300", f"llama-3.1-8b {plan} {quantity}", config, plan, "gb300", quantity, GB, value,
                   {"loss_fusion": True})  # fmt: skip


SOURCES: dict[str, Callable[[], Iterator[Case]]] = {
    "llama-2-7b": llama_2, "simumax-b200": simumax, "torchtitan-h100": torchtitan, "dgx-cloud-gb300": dgx_cloud,
}  # fmt: skip


# --- formulas -------------------------------------------------------------------------------------------------------

_MODES = {"none": (False, "none"), "seq": (True, "none"), "sel": (False, "selective"), "seqsel": (True, "selective"),
          "full": (False, "full")}  # fmt: skip
STATES = ("parameters", "gradients", "optimizer")


def _first_rank(row: dict[str, str], mode: str) -> MemoryTable:
    """All ranks of a pipeline of Korthikanti et al.; the first is row 0."""
    config = LLMConfig(
        name=row["model"], layers=int(row["num_blocks"]), hidden=int(row["hidden"]), heads=int(row["attn_heads"]),
        intermediate=int(row["feedforward"]), vocab=1, gated=False, activation="gelu", norm="layer", norm_bias=True,
        qkv_bias=True, o_bias=True, mlp_bias=True, positions="none", tied_embeddings=True,
    )  # fmt: skip
    parallel, recompute = _MODES[mode]
    plan = TrainingPlan(
        int(row["batch_size"]), int(row["seq_size"]), micro_batch=int(row["microbatch_size"]),
        tp=int(row["tensor_par"]), pp=int(row["pipeline_par"]), dp=int(row["data_par"]),
        vp=int(row["pipeline_interleaving"]), zero=0, sequence_parallel=parallel, recompute=recompute,
        attention="unfused", precision="fp16",
    )  # fmt: skip
    return by_rank(config, plan, hardware.device("a100-sxm4-80gb"), dropout=True)


def korthikanti(folder: Path) -> list[tuple[str, str, float, float]]:
    """(figure, label, published, obtained) for each bar: GiB, or percent of the bar without savings."""
    with (folder / "korthikanti_fig1_fig7_memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    result = []
    for row in rows:
        found = _first_rank(row, row["recompute_mode"])
        if row["quantity"].startswith("param"):
            obtained = sum(float(found[part][0]) for part in STATES) / GIB
        elif row["quantity"].startswith("activation_gib"):
            obtained = float(found["activations"][0]) / GIB
        else:
            obtained = 100 * float(found["activations"][0] / _first_rank(row, "none")["activations"][0])
        label = f"{row['model']} {row['recompute_mode']} {row['quantity'].partition('_')[0]}"
        result.append((row["source_figure"], label, float(row["value"]), obtained))
    return result


# --- runs that fitted -----------------------------------------------------------------------------------------------

_RECIPES: dict[str, dict[str, bool]] = {
    "calculon": {},
    "vtrain-single": {},
    "vtrain-multi": {},
    "llm-foundry": {"loss_fusion": True},
    "nemo": {"loss_fusion": True, "fp8_parameters": True},
    "nemo-long": {"loss_fusion": True, "fp8_parameters": True},
    "megatron-bridge": {"loss_fusion": True, "fp8_parameters": True},
}


def fitted(source: str, folder: Path) -> dict[str, list[float]]:
    """Share of the device's memory that each run of a source is predicted to take, by its label."""
    result: dict[str, list[float]] = {}
    for row in training.rows(source, folder):
        device = row.cluster.groups[0][1].device
        found = memory(row.config, PlanTable.of([row.plan]), device, **_RECIPES[source])
        result.setdefault(row.label, []).append(float(found.peak_bytes[0]) / device.memory_bytes)
    return result


# --- the report -----------------------------------------------------------------------------------------------------


def main() -> int:
    """Print every figure beside its prediction; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("FORETELL_DATA", Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--data", type=Path, default=Path(default), help="folder of public measurements")
    arguments = parser.parse_args()
    console = Console(width=118)
    bars: list[tuple[str, float, float]] = []

    folder = arguments.data / "calculon"
    if folder.is_dir():
        table = Table("figure", "bar", "published", "obtained", "error", title="Korthikanti et al.")
        errors: dict[str, list[float]] = {}
        relative = []
        for figure, label, published, obtained in korthikanti(folder):
            # A bar of figure 7 is a length in a picture: its error is in points of the longest.
            error = (obtained - published) / 100 if figure == "figure7" else obtained / published - 1
            errors.setdefault(figure, []).append(abs(error))
            relative.append(abs(obtained / published - 1))
            unit = "points" if figure == "figure7" else "%"
            table.add_row(figure, label, f"{published:.4g}", f"{obtained:.4g}", f"{100 * error:+.3f} {unit}")
        console.print(table)
        console.print(f"all bars, each relative to its own length: mean error {100 * np.mean(relative):.2f} %, largest "
                      f"{100 * max(relative):.2f} % (the paper's 2 s b h L is as far from the bars as drawn)\n")
        bars += [(f"Korthikanti et al., {name}, the worst bar", max(found), 0.005) for name, found in errors.items()]
    else:
        console.print(f"no folder {folder}: figures 1 and 7 are left out")

    for source, cases in SOURCES.items():
        table = Table("run", "published", "obtained", "error", title=source)
        found = []
        for case in cases():
            found.append(abs(case.error))
            published = f"{case.value:.2f} {'GB' if case.unit == GB else 'GiB'}"
            table.add_row(case.label, published, f"{case.predicted():.2f}", f"{100 * case.error:+.2f} %")
        console.print(table)
        console.print(f"{source}: mean error {100 * np.mean(found):.2f} %, largest {100 * max(found):.2f} %\n")
        if source == "llama-2-7b":
            bars.append(("Llama-2-7B on eight H800, the worse run", max(found), 0.03))

    table = Table("source", "runs", "predicted not to fit", "median share", "largest", title="runs that fitted")
    for source in _RECIPES:
        if not (arguments.data / source.partition("-")[0]).is_dir() and not (arguments.data / source).is_dir():
            console.print(f"no folder of {source}: left out")
            continue
        shares = fitted(source, arguments.data)
        every = [share for found in shares.values() for share in found]
        table.add_row(source, f"{len(every):,}", str(sum(share > 1 for share in every)),
                      f"{np.median(every):.0%}", f"{max(every):.0%}")  # fmt: skip
        for label, found in shares.items():
            if max(found) > 1:
                console.print(f"{label}: {max(found):.0%} of the device's memory")
    console.print(table)

    missed = 0
    for what, value, bar in bars:
        verdict = "met" if value <= bar else "MISSED"
        missed += value > bar
        console.print(f"{verdict}: {what}: {100 * value:.2f} %, at most {100 * bar:.1f} %")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
