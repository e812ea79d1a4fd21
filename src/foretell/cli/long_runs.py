"""``foretell plan goodput``, ``stages`` and ``place``: what failures leave, stages that fit, ranks on real links."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.plan import plan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from foretell.hardware.cluster import Cluster
    from foretell.simulate.training.plan import TrainingPlan
    from foretell.workload.llm import LLMConfig

_LIMIT_BYTES = 64 << 20

Workload = Annotated[str, typer.Argument(metavar="WORKLOAD", help="llm:NAME or a config.json.", show_default=False)]
On = Annotated[str, typer.Option("--on", metavar="CLUSTER", help="Such as '8x dgx-a100'.")]
Degree = Annotated[int, typer.Option(metavar="N", min=1, max=2**20)]
Batch = Annotated[int, typer.Option("--global-batch", metavar="N", min=1, help="Sequences in a step.")]
Length = Annotated[int, typer.Option("--seq-len", metavar="N", min=1, help="Tokens of a sequence.")]


@plan.command()
def goodput(
    devices: Annotated[int, typer.Option("--gpus", metavar="N", min=1, help="Devices of the job.")],
    mtbf: Annotated[
        str | None,
        typer.Option("--mtbf", metavar="TIME", help="Mean time between failures of one device, e.g. 50000h (Llama 3's"
                     " H100: 50,675 h).", show_default=False),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="TIME", help="How long training stands still for one.")
    ] = "30s",
    restart: Annotated[
        str, typer.Option("--restart", metavar="TIME", help="From a failure to the next step.")
    ] = "10min",
    interval: Annotated[
        str | None,
        typer.Option("--interval", metavar="TIME", help="Between checkpoints (the best).", show_default=False),
    ] = None,
    work: Annotated[
        str | None,
        typer.Option("--work", metavar="TIME", help="What the run takes without failures, e.g. 1300h.",
                     show_default=False),
    ] = None,
    json: opt.PlainJson = False,
) -> None:
    """How much of a long run is progress: failures, restarts, and how often to save."""
    from rich.table import Table

    from foretell.cli.terminal import show, show_text
    from foretell.errors import InputError
    from foretell.plan.training.goodput import H100_MTBF_S, Reliability
    from foretell.report.documents import json_text
    from foretell.report.text import share
    from foretell.units import format_time, parse_time

    job = Reliability(
        devices=devices,
        mtbf_device_s=H100_MTBF_S if mtbf is None else parse_time(mtbf, "--mtbf"),
        checkpoint_s=parse_time(checkpoint, "--checkpoint"),
        restart_s=parse_time(restart, "--restart"),
    )
    every = None if interval is None else parse_time(interval, "--interval")
    if every is not None and every <= 0:
        raise InputError("checkpoints follow each other without training", "--interval", "give a time above 0")
    found = job.goodput(every)
    wall = None if work is None else found.wall_s(parse_time(work, "--work"))
    if json:
        show_text(json_text({
            "devices": devices, "mtbf_s": job.mtbf_s, "interval_s": found.interval_s, "progress": found.share,
            "checkpoint": found.checkpoint, "lost": found.lost, "restart": found.restart,
            "failures_per_day": found.failures_per_day, "wall_s": wall,
        }))  # fmt: skip
        return
    table = Table.grid(padding=(0, 2))
    rows = [
        ("a failure every", format_time(job.mtbf_s), f"{found.failures_per_day:.3g} a day"),
        ("a checkpoint every", format_time(found.interval_s), "the best" if every is None else "as asked"),
        ("progress", share(found.share), ""),
        ("checkpoints", share(found.checkpoint), ""),
        ("lost work", share(found.lost), "trained and undone by a failure"),
        ("restarts", share(found.restart), ""),
    ]
    if wall is not None:
        rows.append(("the run takes", f"{wall / 86_400:,.1f} days", "expected"))
    for name, value, note in rows:
        table.add_row(name, value, note)
    show(table)


def _plan(
    workload: str, on: str, global_batch: int, seq_len: int, mbs: int, tp: int, pp: int
) -> tuple[LLMConfig, TrainingPlan, Cluster]:
    """A plan of these degrees, dp being what they leave. Raises InputError where it breaks a rule."""
    from foretell.hardware import cluster as named_cluster
    from foretell.plan.training.search import illegal_error
    from foretell.simulate.training import TrainingPlan
    from foretell.simulate.training.legality import explain

    config, cluster = opt.transformer(workload), named_cluster(on)
    made = TrainingPlan(
        global_batch=global_batch, seq_len=seq_len, micro_batch=mbs, tp=tp, pp=pp,
        dp=max(1, cluster.device_count // (tp * pp)),
    )  # fmt: skip
    violations = [v for v in explain(config, made, cluster) if v.rule != "layers"]  # stages need not be equal here
    if violations:
        raise illegal_error(
            violations, asked=made, options=("global_batch", "seq_len", "micro_batch", "tp", "pp")
        )
    return config, made, cluster


@plan.command()
def stages(
    workload: Workload,
    on: On,
    global_batch: Batch,
    seq_len: Length,
    pp: Degree,
    tp: Degree = 1,
    mbs: Degree = 1,
    max_memory: Annotated[str, typer.Option("--max-memory", metavar="SHARE", help="Of a device's memory.")] = "90%",
    json: opt.PlainJson = False,
) -> None:
    """Stages of a 1F1B pipeline, each keeping the activations it has room for (AdaPipe)."""
    from rich.table import Table

    from foretell.cli.plan import _share
    from foretell.cli.terminal import progress, show, show_text
    from foretell.plan.training.units import adapt, model_layers
    from foretell.report.documents import json_text
    from foretell.report.text import Flow, share
    from foretell.units import format_bytes, format_time

    config, made, cluster = _plan(workload, on, global_batch, seq_len, mbs, tp, pp)
    with progress("Cutting stages"):
        found = adapt(config, made, cluster, max_memory=_share(max_memory))
    if json:
        show_text(json_text({
            "time_s": found.time_s, "exact": found.exact, "micro_batches": found.micro_batches,
            "stages": [
                {"first": s.first, "end": s.end, "forward_s": s.forward_s, "backward_s": s.backward_s,
                 "recompute_s": s.recompute_s, "memory_bytes": s.memory_bytes,
                 "kept": [list(names) for names in s.kept_names]}
                for s in found.stages
            ],
        }))  # fmt: skip
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("stage", "layers", "micro-batch", "recomputed", "memory", "made again, in its first layer"):
        table.add_column(name, justify="left" if name.startswith("made") else "right")
    last = len(found.stages) - 1
    units = [unit.name for unit in model_layers(config, made, cluster)[0][1].units]
    for index, stage in enumerate(found.stages):
        # The embedding counts as the first layer of the first stage, the head as the last of the last.
        extra = (index == 0) + (index == last)
        first = min(1, len(stage.kept_names) - 1) if index == 0 else 0
        table.add_row(
            str(index), str(stage.end - stage.first - extra), format_time(stage.forward_s + stage.backward_s),
            share(stage.recompute_s / stage.forward_s if stage.forward_s else 0.0), format_bytes(stage.memory_bytes),
            ", ".join(name for name in units if name not in stage.kept_names[first]) or "nothing",
        )  # fmt: skip
    show(table)
    show_text("")
    show(Flow(f"a step of {format_time(found.time_s)}", "without the exchange of gradients and the update",
              f"{made.micro_batches:,} micro-batches", f"dp {made.dp:,}"))  # fmt: skip


@plan.command()
def place(
    workload: Workload,
    on: On,
    global_batch: Batch,
    seq_len: Length,
    links: Annotated[
        Path,
        typer.Option("--links", metavar="FILE.csv", help="GB/s that a device attains from each machine (row) to each"
                     " (column); or of devices.", show_default=False),
    ],
    pp: Degree,
    tp: Degree = 1,
    mbs: Degree = 1,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0)] = 0,
    moves: Annotated[int, typer.Option("--moves", metavar="N", min=0, max=10_000_000)] = 20_000,
    json: opt.PlainJson = False,
) -> None:
    """Which machine runs which stage where links differ (Pipette): never slower than the order they come in."""
    from rich.table import Table

    from foretell.cli.terminal import progress, show, show_text
    from foretell.plan.training.units import place_plan
    from foretell.report.documents import json_text
    from foretell.report.text import Flow
    from foretell.units import format_time

    config, made, cluster = _plan(workload, on, global_batch, seq_len, mbs, tp, pp)
    rates = _matrix(links)
    with progress("Placing ranks"):
        found = place_plan(config, made, cluster, rates, steps=moves, seed=seed)
    per_node = cluster.groups[0][1].count
    if json:
        show_text(json_text({
            "time_s": found.time_s, "default_s": found.default_s, "tried": found.tried,
            "devices": found.ranks().tolist(),
        }))  # fmt: skip
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage", justify="right")
    table.add_column("machines of its replicas")
    for stage, slots in enumerate(found.order.tolist()):
        machines = [slot * found.block // per_node for slot in slots]
        table.add_row(str(stage), " ".join(map(str, machines)))
    show(table)
    show_text("")
    show(Flow(f"a step of {format_time(found.time_s)}", f"{found.speedup:.3f} times as fast as in the given order",
              f"{found.tried:,} orders tried"))  # fmt: skip


def _matrix(path: Path) -> npt.NDArray[np.float64]:
    """Rates of a CSV file in bytes/s. Raises InputError for one that is no square matrix of positive numbers."""
    import numpy as np

    from foretell.documents import read_text
    from foretell.errors import InputError

    text = read_text(path, "matrix of rates", _LIMIT_BYTES)
    rows: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = [float(cell) for cell in line.split(",")]
        except ValueError:
            what = f"line {number} holds no numbers: {line[:40]!r}"
            raise InputError(what, str(path), "give GB/s, by commas") from None
        if rows and len(row) != len(rows[0]):
            what = f"line {number} has {len(row)} numbers, the first {len(rows[0])}"
            raise InputError(what, str(path), "make it square")
        rows.append(row)
    found = np.array(rows, dtype=np.float64)
    if found.ndim != 2 or found.shape[0] != found.shape[1]:
        raise InputError(f"{len(rows)} rows make no square matrix", str(path), "give a row for each machine")
    off = found[~np.eye(len(found), dtype=bool)]
    if not np.isfinite(found).all() or (off <= 0).any():
        raise InputError("a rate that is not above 0", str(path), "give what a device attains, in GB/s")
    return found * 1e9
