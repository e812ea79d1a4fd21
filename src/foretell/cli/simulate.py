"""``foretell simulate``: what happens over time. ``simulate pipeline``: one training step of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.app import app
from foretell.cli.group import ForetellGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretell.hardware.cluster import Cluster
    from foretell.simulate.pipeline import Simulation, Times
    from foretell.simulate.training import TrainingPlan
    from foretell.workload.llm import LLMConfig

simulate = typer.Typer(cls=ForetellGroup, name="simulate", no_args_is_help=True, help="What happens over time.")
app.add_typer(simulate)

#: Options that say nothing without a workload.
_OF_A_MODEL = (
    *("on", "tp", "cp", "ep", "mbs", "global_batch", "seq_len", "first_layers", "last_layers", "recompute"),
    "precision",
)
_LONGEST_S = 1e9  # of one pass or message
_TIMES = "Times of a micro-batch on a rank (all its chunks together)"
_MODEL = "Or a model on a cluster"


def _time(name: str, what: str) -> Any:
    return typer.Option(f"--{name}", metavar="TIME", help=what, show_default=False, rich_help_panel=_TIMES)


def _number(name: str, what: str, default: bool = False) -> Any:
    return typer.Option(f"--{name}", metavar="N", help=what, show_default=default, rich_help_panel=_MODEL)


@simulate.command()
def pipeline(
    context_: typer.Context,
    workload: Annotated[
        str | None,
        typer.Argument(metavar="WORKLOAD", help="llm:NAME or a config.json, with --on.", show_default=False),
    ] = None,
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME", help="1f1b, gpipe, interleaved, zero-bubble or layered.")
    ] = "1f1b",
    pp: Annotated[int | None, typer.Option("--pp", metavar="N", help="Ranks of the pipeline (4).")] = None,
    vp: Annotated[int, typer.Option("--vp", metavar="N", help="Chunks of layers on each rank.")] = 1,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", metavar="N", help="Micro-batches of a step (4 × pp).")
    ] = None,
    forward: Annotated[str | None, _time("forward", "Forward pass (10ms).")] = None,
    backward: Annotated[str | None, _time("backward", "Backward pass (twice the forward pass).")] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            "--stages", metavar="TIME,TIME…", help="Forward pass of each rank, first to last, instead.",
            show_default=False, rich_help_panel=_TIMES,
        ),
    ] = None,
    weights: Annotated[
        str | None, _time("weights", "Part of the backward pass that is gradients of weights (half).")
    ] = None,
    p2p: Annotated[str | None, _time("p2p", "A message between two ranks (none).")] = None,
    no_overlap: Annotated[
        bool, typer.Option("--no-overlap", help="A send keeps its rank from computing.", rich_help_panel=_TIMES)
    ] = False,
    gather: Annotated[str | None, _time("gather", "Gathering a rank's parameters, once a step (none).")] = None,
    reduce: Annotated[str | None, _time("reduce", "Reducing a rank's gradients, once a step (none).")] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="CLUSTER", help="Such as '16x dgx-h100'.", show_default=False, rich_help_panel=_MODEL
        ),
    ] = None,
    tp: Annotated[int, _number("tp", "Tensor-parallel ranks.", True)] = 1,
    cp: Annotated[int, _number("cp", "Context-parallel ranks.", True)] = 1,
    ep: Annotated[int, _number("ep", "Expert-parallel ranks.", True)] = 1,
    mbs: Annotated[int, _number("mbs", "Sequences of a micro-batch.", True)] = 1,
    global_batch: Annotated[int | None, _number("global-batch", "Sequences of a step.")] = None,
    seq_len: Annotated[int | None, _number("seq-len", "Tokens of a sequence.")] = None,
    first_layers: Annotated[int, _number("first-layers", "Layers of the first rank (as many as others).")] = 0,
    last_layers: Annotated[int, _number("last-layers", "Layers of the last rank (as many as others).")] = 0,
    recompute: Annotated[
        str,
        typer.Option("--recompute", metavar="NAME", help="none, selective or full.", rich_help_panel=_MODEL),
    ] = "none",
    precision: Annotated[
        str, typer.Option("--precision", metavar="NAME", help="bf16, fp16, fp8, …", rich_help_panel=_MODEL)
    ] = "bf16",
    compare: Annotated[bool, typer.Option("--compare", help="All schedules side by side.")] = False,
    trace: opt.Trace = None,
    json: opt.PlainJson = False,
) -> None:
    """One training step of a pipeline, task by task: its length, bubble, messages, and what each rank holds."""
    from foretell.cli import files
    from foretell.cli.terminal import progress, show, show_text
    from foretell.errors import InputError
    from foretell.report.documents import json_text
    from foretell.report.pipeline import pipeline_table, pipeline_view
    from foretell.simulate.pipeline import named
    from foretell.simulate.pipeline import simulate as simulated

    named(schedule)  # an unknown one shows first
    if trace is not None:
        files.check(None, trace, 1)
        if compare:
            raise InputError("a timeline is of one schedule", "--trace", "leave --compare out")
    times_of: Callable[[str, int], Times]
    settings: list[str] = []
    activation_bytes: list[float] | None = None
    if workload is None:
        for name in opt.given(context_):
            if name in _OF_A_MODEL:
                option = "--" + name.replace("_", "-")
                raise InputError(f"{option} is about a model on a cluster", "WORKLOAD", "name one, e.g. llm:llama-3-8b")
        texts = {"--forward": forward, "--backward": backward, "--stages": stages, "--weights": weights,
                 "--p2p": p2p, "--gather": gather, "--reduce": reduce}  # fmt: skip
        ranks, times_of = _given_times(texts, pp)
        jobs = 4 * ranks if micro_batches is None else micro_batches
    else:
        fixed = {"--forward": forward, "--backward": backward, "--stages": stages, "--weights": weights,
                 "--micro-batches": micro_batches, "--gather": gather, "--reduce": reduce}  # fmt: skip
        for option, value in fixed.items():
            if value is not None:
                raise InputError("follows from the workload", option, "leave it out, or leave out WORKLOAD")
        wanted = {
            "global_batch": global_batch, "seq_len": seq_len, "tp": tp, "cp": cp, "ep": ep, "vp": vp,
            "pp": 4 if pp is None else pp, "micro_batch": mbs, "recompute": recompute, "precision": precision,
            "first_layers": first_layers, "last_layers": last_layers, "schedule": schedule,
        }  # fmt: skip
        plan, config, cluster = _plan(workload, on, wanted)
        ranks, jobs = plan.pp, plan.micro_batches
        times_of = _model_times(plan, config, cluster, p2p)
        settings = [config.name, f"{cluster.device_count:,} devices", f"dp {plan.dp}"]
        if not compare and len(cluster.groups) == 1:
            activation_bytes = _activations(plan, config, cluster)

    def run(name: str, chunks: int) -> Simulation:
        named(name, chunks).check(ranks, chunks, jobs)  # before times are made for it
        return simulated(name, times_of(name, chunks), jobs, overlap_p2p=not no_overlap)

    if compare:
        found, refused = _all(run, vp)
        with progress("Simulating"):
            documents: Any = [one.to_dict() for one in found]
        view = pipeline_table(found, refused)
    else:
        with progress("Simulating"):
            one = run(schedule, vp)
        documents = one.to_dict()
        if activation_bytes is not None:
            for rank, nbytes in zip(documents["ranks"], activation_bytes, strict=True):
                rank["activation_bytes"] = nbytes
        view = pipeline_view(one, settings, activation_bytes)
        if trace is not None:
            _write_trace(trace, one)
    if json:
        show_text(json_text(documents))
        return
    show(view)
    if trace is not None:
        show_text(f"\nwrote {trace}")


def _given_times(texts: dict[str, str | None], pp: int | None) -> tuple[int, Callable[[str, int], Times]]:
    """The ranks there are, and their times for a schedule and a number of chunks, from what was given as text."""
    from foretell.errors import InputError
    from foretell.simulate.pipeline import Times
    from foretell.units import parse_time

    def seconds(option: str, default: float) -> float:
        text = texts[option]
        return default if text is None else bounded(text, option)

    def bounded(text: str, option: str) -> float:
        value = parse_time(text, option)
        if value > _LONGEST_S:
            raise InputError(f"{text.strip()[:40]!r} is longer than 30 years", option, "give a time of one micro-batch")
        return value

    listed = texts["--stages"]
    if listed is None:
        ranks = 4 if pp is None else pp
        if not 1 <= ranks <= _MOST_RANKS:
            raise InputError(f"a pipeline of {ranks} ranks", "--pp", f"give 1 to {_MOST_RANKS:,}")
        each = [seconds("--forward", 10e-3)] * ranks
    else:
        if texts["--forward"] is not None:
            raise InputError("both are given", "--forward, --stages", "give one of them")
        parts = listed.split(",")
        if not all(part.strip() for part in parts):
            raise InputError("an empty time" if listed.strip() else "no stages", "--stages", "write e.g. 10ms,12ms")
        if len(parts) > _MOST_RANKS:
            raise InputError(f"a pipeline of {len(parts):,} ranks", "--stages", f"give 1 to {_MOST_RANKS:,}")
        each = [bounded(part, "--stages") for part in parts]
        if pp is not None and pp != len(parts):
            raise InputError(f"{len(parts)} times for {pp} ranks", "--stages", "give one for each, or leave --pp out")
    back = [seconds("--backward", 2 * value) for value in each]
    part = [seconds("--weights", value / 2) for value in back]

    def times(name: str, chunks: int) -> Times:
        return Times.of(
            [value / chunks for value in each], [value / chunks for value in back], vp=chunks,
            weights_s=[value / chunks for value in part], p2p_s=seconds("--p2p", 0.0),
            gather_s=seconds("--gather", 0.0) / chunks, reduce_s=seconds("--reduce", 0.0) / chunks,
        )  # fmt: skip

    return len(each), times


#: Ranks of a pipeline that is described by hand.
_MOST_RANKS = 4096


def _plan(workload: str, on: str | None, wanted: dict[str, Any]) -> tuple[TrainingPlan, LLMConfig, Cluster]:
    from foretell.errors import InputError
    from foretell.hardware import cluster as named_cluster
    from foretell.plan.training.search import illegal_error
    from foretell.simulate.training import TrainingPlan
    from foretell.simulate.training.legality import explain

    config = opt.transformer(workload)
    for option, value in (("--on", on), ("--global-batch", wanted["global_batch"]), ("--seq-len", wanted["seq_len"])):
        if value is None:
            raise InputError("is needed with a workload", option, f"give {option}")
    assert on is not None
    cluster = named_cluster(on)
    if not cluster.homogeneous:
        alone = " or ".join(f"--on '{count}x {node.name}'" for count, node in cluster.groups)
        raise InputError("devices of several kinds", f"cluster {cluster.name!r}", f"simulate one kind: {alone}")
    model = max(1, wanted["tp"]) * max(1, wanted["cp"]) * max(1, wanted["pp"])
    plan = TrainingPlan(dp=max(1, cluster.device_count // model), **wanted)
    # What frameworks offer is not asked here: any schedule can be simulated.
    usual = plan.replace(schedule="interleaved" if plan.vp > 1 else "1f1b")
    violations = explain(config, usual, cluster)
    if violations:
        # How many data-parallel ranks there are follows from the devices.
        raise illegal_error(violations, asked=usual, options=wanted)
    return plan, config, cluster


def _model_times(
    plan: TrainingPlan, config: LLMConfig, cluster: Cluster, p2p: str | None
) -> Callable[[str, int], Times]:
    from dataclasses import replace

    import numpy as np

    from foretell.simulate.training.step import stage_times
    from foretell.units import parse_time

    message = None if p2p is None else parse_time(p2p, "--p2p")

    def times(name: str, chunks: int) -> Times:
        found = stage_times(config, plan.replace(schedule=name, vp=chunks), cluster)
        return found if message is None else replace(found, p2p_s=np.full_like(found.p2p_s, message))

    return times


def _activations(plan: TrainingPlan, config: LLMConfig, cluster: Cluster) -> list[float]:
    """Bytes of activations that each rank holds at its peak."""
    from foretell.simulate.training.memory import by_rank

    return [float(value) for value in by_rank(config, plan, cluster.groups[0][1].device)["activations"]]


def _all(run: Callable[[str, int], Simulation], vp: int) -> tuple[list[Simulation], list[tuple[str, str]]]:
    """Every schedule that can be had; of the others why not."""
    from foretell.errors import InputError
    from foretell.simulate.pipeline import REGISTRY

    found, refused = [], []
    last: InputError | None = None
    for name, member in REGISTRY.items():
        try:
            found.append(run(name, max(2, vp) if member.chunked else 1))
        except InputError as error:
            last = error
            refused.append((name, f"{error.what}; {error.repair}"))
    if not found:
        assert last is not None
        raise last
    return found, refused


def _write_trace(path: Path, found: Simulation) -> None:
    from foretell.errors import InputError
    from foretell.timeline import write_chrome

    try:
        write_chrome(found.timeline(), path)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", f"--trace {path}", "give another file"
        ) from error
