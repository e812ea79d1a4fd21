"""Pipette: ranks of 3D-parallel training placed on links as they really are, and plans that fit."""

from __future__ import annotations

from typing import Any

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction

SYSTEM = "pipette"
#: Measured cluster of the public data: machines of 8 H100; four GPUs of each take part.
NODES, LOCAL = 16, 4
MODEL = "opt-13b"
#: Pipeline and data parallelism, tensor parallelism being 4.
DEGREES = ((16, 1), (8, 2), (4, 4), (2, 8))
LARGE = 256 << 20


def _source(place: str) -> Source:
    return Source(
        "Yim, Song, Choi, Lee, Jung, Jang, Lee: Pipette: Automatic Fine-grained Large Language Model Training"
        " Configurator for Real-World Clusters",
        2024,
        "DATE",
        place,
    )


def bandwidths() -> Any:
    """Bytes/s that a GPU attained to another machine while its neighbours sent too, by pair of machines: (16, 16).

    Medians of send-receive tests of 256 MiB and more with four GPUs of each machine; the few pairs without a test are
    taken to be like the median pair. The diagonal is never used: a stage fills a machine.
    """
    import csv
    import gzip

    import numpy as np

    from foretell.claims.data import measurements

    rates: dict[tuple[str, str], list[float]] = {}
    with gzip.open(measurements("nccl-tests-cluster", "h100_pairwise.csv.gz"), "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            kind = row["cluster"], row["collective"], row["gpus_per_node"]
            if kind == ("example-cluster00", "sendrecv", str(LOCAL)) and int(row["size_bytes"]) >= LARGE:
                a, b = row["nodes"].split("_")
                rates.setdefault((a, b), []).append(float(row["oop_busbw_GBps"]) * 1e9)
    names = sorted({name for pair in rates for name in pair})[:NODES]
    medians = {pair: float(np.median(values)) for pair, values in rates.items()}
    made = np.full((NODES, NODES), float(np.median(list(medians.values()))))
    for (a, b), rate in medians.items():
        if a in names and b in names:
            i, j = names.index(a), names.index(b)
            made[i, j] = made[j, i] = rate
    return made


def simulated_s(work, latency, order) -> float:  # type: ignore[no-untyped-def]
    """The step of a placement by the event simulator: each replica's pipeline, then each stage's reduction."""
    import numpy as np

    from foretell.simulate.pipeline import Times, simulate

    hops, rings = latency.hops(order), latency.rings(order)
    end = 0.0
    for hop in hops:
        p2p = np.zeros((work.stages, work.stages))
        for stage, seconds in enumerate(hop):
            p2p[stage, stage + 1] = p2p[stage + 1, stage] = seconds
        times = Times.of(
            np.array(work.forward_s)[:, None], np.array(work.backward_s)[:, None], p2p_s=p2p, reduce_s=rings[:, None]
        )
        end = max(end, simulate("1f1b", times, work.micro_batches).step_s)
    return end


def _speedup() -> Obtained:
    """Steps of the default order over those of the placement found, by the event simulator (share)."""
    from foretell.hardware import cluster
    from foretell.plan.training.placement import Latency, place
    from foretell.plan.training.units import work_of
    from foretell.simulate.training import TrainingPlan
    from foretell.workload import llm

    links = bandwidths()
    off = links[links > 0]
    on, config = cluster(f"{NODES}x {LOCAL}x h100-sxm over {LOCAL}x roce-200"), llm.config(MODEL)
    details: dict[str, float | str] = {
        "GB/s of a pair, least": round(float(off.min()) / 1e9, 2),
        "GB/s of a pair, most": round(float(off.max()) / 1e9, 2),
    }
    gains = []
    for pp, dp in DEGREES:
        plan = TrainingPlan(128, 2048, tp=LOCAL, pp=pp, dp=dp, recompute="full")
        work = work_of(config, plan, on)
        asked = {"block": LOCAL, "per_node": LOCAL, "data": dp}
        found = place(work, links, **asked)  # type: ignore[arg-type]
        latency = Latency(work, links, **asked)  # type: ignore[arg-type]
        default, placed = (simulated_s(work, latency, order) for order in (latency.default(), found.order))
        gains.append(default / placed - 1)
        details[f"pp{pp} dp{dp}: default s"] = round(default, 4)
        details[f"pp{pp} dp{dp}: placed s"] = round(placed, 4)
        details[f"pp{pp} dp{dp}: gain by the planner's own model"] = round(found.speedup - 1, 4)
    mean = sum(gains) / len(gains)
    text = f"{mean:.1%} faster on average, {min(gains):.1%} to {max(gains):.1%}"
    return Obtained(text, mean, details)


def _feasible() -> Obtained:
    """Share of cases whose fastest plan, memory not looked at, would run out, while the planner's fits."""
    import itertools

    import numpy as np

    from foretell.hardware import cluster
    from foretell.simulate.training.legality import legal
    from foretell.simulate.training.memory import memory
    from foretell.simulate.training.plan import PlanTable
    from foretell.simulate.training.step import steps
    from foretell.workload import llm

    details: dict[str, float | str] = {}
    helped = 0
    cases = list(itertools.product(("opt-13b", "gpt-neox-20b", "opt-66b"), ("16x dgx-1v", "16x dgx-a100-320gb")))
    for name, text in cases:
        config, on = llm.config(name), cluster(text)
        rows = [
            (tp, pp, 128 // (tp * pp), b)
            for tp, pp, b in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8))
            if 512 % (128 // (tp * pp) * b) == 0
        ]
        tp, pp, dp, b = np.array(rows).T
        table = PlanTable.build({
            "global_batch": 512, "seq_len": 2048, "tp": tp, "pp": pp, "dp": dp, "micro_batch": b, "precision": "fp16",
            "attention": "unfused",
        }, len(rows))  # fmt: skip
        table = table.take(legal(config, table, on))
        time_s = steps(config, table, on).time_s
        fits = memory(config, table, on.groups[0][1].device).fits()
        blind = int(np.argmin(time_s))
        if fits.any() and not fits[blind]:
            helped += 1
            best = int(np.flatnonzero(fits)[np.argmin(time_s[fits])])
            details[f"{name} on {text}"] = f"{table.plan(blind)} runs out; {table.plan(best)} fits"
        else:
            details[f"{name} on {text}"] = f"{table.plan(blind)} fits" if fits[blind] else "nothing fits"
    share = helped / len(cases)
    return Obtained(f"in {helped} of {len(cases)} cases the fastest plan runs out and ours fits", share, details)


CLAIMS = (
    Claim(
        id="pipette/speedup",
        system=SYSTEM,
        title="Placing ranks by the links' real bandwidths trains faster than the default order",
        source=_source("abstract"),
        metric="speed-up less one",
        claimed=Claimed("significant speed-up over prior art"),
        setting=f"OPT 13B, batch 128 of 2,048 tokens, tensor parallelism 4, on {NODES} machines with four H100 each"
        " whose pairs attained 3.4 to 14.6 GB/s a GPU in public NCCL tests; mean over four splits into pipeline and"
        " data",
        rule=Direction(),
        how="public data",
        run=_speedup,
        note="Measured bandwidths, simulated steps: both orders run in the event simulator, not in the model that"
        " chose. The comparison with AMP and Varuna, which also choose other degrees, is not made. Whether slow pairs"
        " stay slow the tests do not say.",
    ),
    Claim(
        id="pipette/memory",
        system=SYSTEM,
        title="Configurations satisfy memory limits, where faster-looking ones would run out",
        source=_source("abstract"),
        metric="share of cases in which the fastest plan would run out of memory and the planner's fits",
        claimed=Claimed("prior art often recommends configurations that run out of memory"),
        setting="OPT 13B and 66B and GPT-NeoX 20B on 128 V100 16 GB or A100 40 GB, batch 512 of 2,048 tokens, no"
        " recomputation, tensor, pipeline, data parallelism and micro-batch free",
        rule=Direction(),
        how="modelled",
        run=_feasible,
        note="The memory model stands in for the authors' network trained on profiled runs.",
    ),
)
