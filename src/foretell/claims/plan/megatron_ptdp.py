"""Megatron-LM's pipeline, tensor and data parallelism (PTD-P), with interleaved pipeline schedules."""

from __future__ import annotations

from functools import cache

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.gpt import SEQ_LEN, gpt, step_flops
from foretell.claims.rules import Equal, Gain

SYSTEM = "megatron-ptdp"
PEAK_FLOPS_PER_S = 312e12

#: Table 1: heads, hidden, layers, tensor and pipeline parallelism, GPUs, batch, TFLOP/s a GPU as measured.
TABLE_1 = (
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 163),
)


def _source(place: str) -> Source:
    return Source(
        "Narayanan, Shoeybi, Casper, LeGresley, Patwary, Korthikanti, Vainbrand, Kashinkunti, Bernauer, Catanzaro,"
        " Phanishayee, Zaharia: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
        2021,
        "arXiv 2104.04473 (SC)",
        place,
    )


@cache
def _best(row: tuple[int, ...]) -> tuple[float, int, int]:
    """TFLOP/s a GPU of a row of Table 1, its micro-batch and chunks: the fastest that fits into 80 GB."""
    from foretell.hardware import cluster
    from foretell.simulate.training import TrainingPlan
    from foretell.simulate.training.memory import memory
    from foretell.simulate.training.plan import PlanTable
    from foretell.simulate.training.step import steps

    heads, hidden, layers, tp, pp, gpus, batch, _ = row
    dp = gpus // (tp * pp)
    # The paper runs the interleaved schedule and does not say how many chunks: the fewest that divide the layers.
    vp = next((v for v in (2, 3) if pp > 1 and layers % (pp * v) == 0), 1)
    plans = [
        _plan(TrainingPlan, batch, tp, dp, pp, vp, b) for b in (1, 2, 4, 8)
        if batch % (dp * b) == 0 and (vp == 1 or batch // (dp * b) % pp == 0)
    ]  # fmt: skip
    on, config, table = cluster(f"{gpus // 8}x dgx-a100"), gpt(layers, hidden, heads), PlanTable.of(plans)
    fits = memory(config, table, on.groups[0][1].device).fits()
    rate = step_flops(layers, hidden, batch) / steps(config, table, on).time_s / gpus / 1e12
    at = max((i for i in range(len(plans)) if fits[i]), key=lambda i: rate[i])
    return float(rate[at]), plans[at].micro_batch, vp


def _plan(kind, batch, tp, dp, pp, vp, micro_batch):  # type: ignore[no-untyped-def]
    """As the framework was in 2021: no sequence parallelism, full recomputation, unfused attention, gradients reduced
    after the last backward pass."""
    return kind(
        batch, SEQ_LEN, micro_batch=micro_batch, tp=tp, dp=dp, pp=pp, vp=vp,
        schedule="interleaved" if vp > 1 else "1f1b", zero=0, sequence_parallel=False, recompute="full",
        precision="fp16", attention="unfused", overlap_grad_reduce=False, overlap_param_gather=False,
    )  # fmt: skip


def _details() -> dict[str, float | str]:
    details: dict[str, float | str] = {}
    errors = []
    for row in TABLE_1:
        rate, b, vp = _best(row)
        errors.append(abs(rate / row[-1] - 1))
        details[f"{row[2]}x{row[1]} on {row[5]}"] = f"{rate:.0f} for {row[-1]} TFLOP/s (micro-batch {b}, {vp} chunks)"
    details["mean error over table 1"] = round(sum(errors) / len(errors), 4)
    return details


def _throughput() -> Obtained:
    rate, _, _ = _best(TABLE_1[-1])
    total = rate * TABLE_1[-1][5] / 1e3
    return Obtained(f"{total:.0f} petaFLOP/s", total, _details())


def _share() -> Obtained:
    rate, b, vp = _best(TABLE_1[-1])
    share = rate * 1e12 / PEAK_FLOPS_PER_S
    return Obtained(f"{share:.1%}", share, {"TFLOP/s a GPU": round(rate, 1), "micro-batch": b, "chunks": vp})


def _interleaving() -> Obtained:
    """Throughput of two chunks a rank over one, of the model and batches of the paper's figure 12."""
    from foretell.hardware import cluster
    from foretell.simulate.training import TrainingPlan
    from foretell.simulate.training.memory import memory
    from foretell.simulate.training.plan import PlanTable
    from foretell.simulate.training.step import steps

    on, config = cluster("12x dgx-a100"), gpt(96, 12288, 96)
    details: dict[str, float | str] = {}
    gains = []
    for batch in (12, 24, 36, 48, 60):
        table = PlanTable.of([_plan(TrainingPlan, batch, 8, 1, 12, vp, 1) for vp in (1, 2, 4)])
        time_s = steps(config, table, on).time_s
        peak = memory(config, table, on.groups[0][1].device).peak_bytes
        gains.append(float(time_s[0] / time_s[1] - 1))
        details[f"batch {batch}, 2 chunks"] = round(gains[-1], 4)
        details[f"batch {batch}, 4 chunks"] = round(float(time_s[0] / time_s[2] - 1), 4)
        details["memory of 2 chunks over 1"] = round(float(peak[1] / peak[0]), 3)
    mean = sum(gains) / len(gains)
    return Obtained(f"{mean:.1%} on average, {gains[0]:.1%} to {gains[-1]:.1%}", mean, details)


_SETTING_1T = (
    "GPT of 128 layers of 25,600, vocabulary 51,200, 2,048 tokens, batch 3,072, on 3,072 A100 80 GB: tensor parallelism"
    " 8, pipeline 64, data 6 (Table 1)"
)
_NOTE_1T = (
    "FLOP as the paper counts them, recomputation included; fp16, full recomputation, unfused attention, the"
    " interleaved schedule with the fewest chunks that divide the layers (the paper does not say), the micro-batch that"
    " is fastest. Nothing is fitted to this paper's software of 2021: kernels are calibrated to later measurements."
)

CLAIMS = (
    Claim(
        id="megatron-ptdp/interleaving",
        system=SYSTEM,
        title="The interleaved schedule trains faster than plain 1F1B in comparable memory",
        source=_source("abstract; figure 12"),
        metric="throughput gain (share)",
        claimed=Claimed("10 % or more", 0.10),
        setting="GPT of 96 layers of 12,288 (175 B) on 96 A100, tensor parallelism 8, pipeline 12, micro-batches of"
        " one, batches of 12 to 60; two chunks of layers a GPU; mean over batches",
        rule=Gain(),
        how="modelled",
        run=_interleaving,
    ),
    Claim(
        id="megatron-ptdp/throughput-1t",
        system=SYSTEM,
        title="Throughput of training a model of a trillion parameters",
        source=_source("abstract; table 1"),
        metric="petaFLOP/s",
        claimed=Claimed("502 petaFLOP/s", 502.0),
        setting=_SETTING_1T,
        rule=Equal(0.08),
        how="modelled",
        run=_throughput,
        note=_NOTE_1T,
    ),
    Claim(
        id="megatron-ptdp/peak-share-1t",
        system=SYSTEM,
        title="Share of peak that a GPU reaches, training a model of a trillion parameters",
        source=_source("abstract; table 1"),
        metric="share of the peak of 312 TFLOP/s",
        claimed=Claimed("52 % of peak", 0.52),
        setting=_SETTING_1T,
        rule=Equal(0.08),
        how="modelled",
        run=_share,
        note=_NOTE_1T,
    ),
)
