"""Layered gradient accumulation and modular pipeline parallelism, for a transformer of a trillion parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Gain

SYSTEM = "layered-gradient-accumulation"

_BATCH, _SEQ_LEN, _TP, _DEVICES = 3072, 2048, 8, 24_576
_INFINIBAND, _ETHERNET = "3072x dgx-a100", "3072x dgx-a100 over 4x roce-100"
_SETTING = (
    "GPT of 1.008 T parameters (Megatron-LM's, SC 2021, Table 1: 128 layers of 25,600, batch 3,072, 2,048 tokens),"
    " 24,576 A100-80GB: as many as have a sequence each at tensor parallelism 8; full recomputation, micro-batches of"
    " one sequence, any pipeline that memory allows"
)


def _source(place: str) -> Source:
    return Source(
        "Lamy-Poirier: Layered gradient accumulation and modular pipeline parallelism: fast and efficient training of"
        " large language models",
        2021,
        "arXiv 2106.02679",
        place,
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """The fastest step found: seconds, ranks of the pipeline, the exchange that nothing hides, the fullest GPU."""

    step_s: float
    pp: int
    exposed_s: float
    peak_bytes: float
    capacity_bytes: float


@cache
def _best(network: str, layered: bool, devices: int = _DEVICES) -> _Step:
    """The fastest pipeline of either kind whose memory fits, on so many devices of a network that has as many.

    Standard: contiguous stages under 1F1B, ZeRO-1; each layer's gradients are reduced while the last micro-batch's
    backward pass runs on. Layered: layers dealt out in turn, everything sharded (ZeRO-3); each layer's parameters are
    gathered before its forward passes and again before its backward passes, its gradients reduced after those.
    """
    from foretell.hardware import cluster as named_cluster
    from foretell.simulate.collectives import Fabric
    from foretell.simulate.pipeline import simulate
    from foretell.simulate.training import TrainingPlan
    from foretell.simulate.training.memory import by_rank
    from foretell.simulate.training.step import stage_times
    from foretell.workload.llm import LLMConfig

    config = LLMConfig(
        "gpt-1t", layers=128, hidden=25_600, heads=160, intermediate=102_400, vocab=51_200, gated=False,
        activation="gelu", norm="layer", norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True,
        positions="learned", position_rows=2048, tied_embeddings=True,
    )  # fmt: skip
    cluster = named_cluster(network)
    device = cluster.groups[0][1].device
    fabric = Fabric.of(cluster)
    layer_bytes = 2 * (config.parameters - config.vocab * config.hidden) / config.layers / _TP  # 16-bit, on a GPU
    found: list[_Step] = []
    for pp in (1, 2, 4, 8, 16, 32, 64, 128):
        dp = devices // (_TP * pp)
        if dp > _BATCH:
            continue
        plan = TrainingPlan(
            _BATCH, _SEQ_LEN, tp=_TP, dp=dp, pp=pp, recompute="full", zero=3 if layered else 1, grad_dtype="bf16",
            schedule="layered" if layered else "1f1b",
        )  # fmt: skip
        memory = by_rank(config, plan, device)
        fullest = float(memory.peak_bytes.max())
        if not memory.fits().all():
            continue
        # What gathering weights within a layer costs under ZeRO-3 without layering is no part of these times.
        times = stage_times(config, plan.replace(zero=0), cluster)

        def seconds(kind: str, nbytes: float, size: int = dp) -> float:
            return float(np.ravel(fabric.time_s(kind, nbytes, size, _TP))[0])

        if layered:
            gather, scatter = seconds("all_gather", layer_bytes), seconds("reduce_scatter", layer_bytes)
            shape = times.forward_s.shape
            # The lane is as busy with the next layer's second gather as with this one's reduction.
            exchange = {"gather_s": np.full(shape, gather), "reduce_s": np.full(shape, gather + scatter)}
        else:
            layers = config.layers // pp
            reduce = seconds("reduce_scatter", layer_bytes * layers) + seconds("all_gather", layer_bytes * layers)
            shape = times.forward_s.shape
            exchange = {"reduce_s": np.full(shape, reduce), "pieces": np.full(shape, float(layers))}
        step = simulate(plan.schedule, replace(times, **exchange), plan.micro_batches)
        found.append(_Step(step.step_s, pp, step.dp_exposed_s, fullest, float(device.memory_bytes or np.nan)))
    return min(found, key=lambda one: one.step_s)


def _shorter(ours: _Step, theirs: _Step) -> Obtained:
    return Obtained(
        f"{1 - ours.step_s / theirs.step_s:.0%} shorter: {ours.step_s:.2f} s on {ours.pp} ranks against"
        f" {theirs.step_s:.2f} s on {theirs.pp}",
        1 - ours.step_s / theirs.step_s,
        {
            "layered_step_s": ours.step_s, "layered_pp": ours.pp, "layered_exchange_exposed_s": ours.exposed_s,
            "standard_step_s": theirs.step_s, "standard_pp": theirs.pp,
            "standard_exchange_exposed_s": theirs.exposed_s,
        },
    )  # fmt: skip


def _shortest() -> Obtained:
    """And what is saved on half and on twice as many devices."""
    found = _shorter(_best(_INFINIBAND, True), _best(_INFINIBAND, False))
    others = {
        f"saved_on_{devices}": _shorter(_best(network, True, devices), _best(network, False, devices)).value
        for network, devices in ((_INFINIBAND, _DEVICES // 2), ("6144x dgx-a100", 2 * _DEVICES))
    }
    return replace(found, details={**found.details, **others})


def _slow_network() -> Obtained:
    """The layered pipeline over Ethernet beside the standard one over InfiniBand."""
    slow, fast = _best(_ETHERNET, True), _best(_INFINIBAND, True)
    found = _shorter(slow, _best(_INFINIBAND, False))
    return replace(found, details={**found.details, "layered_on_infiniband_step_s": fast.step_s})


def _memory() -> Obtained:
    """Share of a GPU's memory that the fastest layered plan leaves free."""
    best, standard = _best(_INFINIBAND, True), _best(_INFINIBAND, False)
    used = best.peak_bytes / best.capacity_bytes
    return Obtained(
        f"{used:.0%} of the GPU's memory used ({best.peak_bytes / 1e9:.1f} GB); {standard.peak_bytes / 1e9:.0f} GB by"
        " the standard plan",
        1 - used,
        {"layered_bytes": best.peak_bytes, "standard_bytes": standard.peak_bytes, "gpu_bytes": best.capacity_bytes},
    )


CLAIMS = (
    Claim(
        id=f"{SYSTEM}/shortest-training",
        system=SYSTEM,
        title="Layered order on a modular pipeline halves the shortest training time",
        source=_source("abstract"),
        metric="step time saved at equal devices (share)",
        claimed=Claimed("cut the shortest training time by half", 0.5),
        setting=f"{_SETTING}; HDR InfiniBand, a port a GPU",
        rule=Gain(),
        how="modelled",
        run=_shortest,
        note="Every task and reduction is simulated; the optimiser's own time is left out on both sides. The paper's"
        " batch follows from scaling laws; ours is Megatron-LM's for a model of this size. With a sequence for each"
        " tensor-parallel group a standard pipeline of p ranks has p micro-batches and is idle almost half the time;"
        " on fewer devices, or on more, less is saved (about 30 % on half or twice as many).",
        cheap=True,
        tolerance=0.1,
    ),
    Claim(
        id=f"{SYSTEM}/network",
        system=SYSTEM,
        title="A fast InfiniBand network is not needed",
        source=_source("abstract"),
        metric="step time saved over Ethernet, beside the standard pipeline over InfiniBand (share)",
        claimed=Claimed("lowers the network requirement to a point where fast InfiniBand is not necessary"),
        setting=f"{_SETTING}; four 100 Gb/s Ethernet ports for the eight GPUs of a node, against eight of 200 Gb/s",
        rule=Direction(),
        how="modelled",
        run=_slow_network,
        note="Not free: the layered pipeline itself is slower there than over InfiniBand, and takes more ranks.",
        cheap=True,
        tolerance=0.1,
    ),
    Claim(
        id=f"{SYSTEM}/memory",
        system=SYSTEM,
        title="Memory falls to a small part of what a GPU has",
        source=_source("abstract"),
        metric="share of a GPU's memory left free",
        claimed=Claimed("reduces the memory usage to a tiny fraction of the available GPU memory"),
        setting=f"{_SETTING}; the fastest layered plan, everything sharded over the data-parallel ranks",
        rule=Direction(least=0.75),
        how="modelled",
        run=_memory,
        cheap=True,
        tolerance=0.1,
    ),
)
