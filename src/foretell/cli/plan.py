"""``foretell plan``: how to run a workload. ``plan train``: the best ways to train a model on a cluster."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.app import app
from foretell.cli.group import ForetellGroup

if TYPE_CHECKING:
    from foretell.plan.training.search import Ranking
    from foretell.simulate.training.plan import TrainingPlan
    from foretell.workload.llm import LLMConfig

plan = typer.Typer(cls=ForetellGroup, name="plan", no_args_is_help=True, help="How to run a workload.")
app.add_typer(plan)

_HOW = "What all plans share"
_PINS = "What is tried (all that is legal, unless given: 8, 4,8 or 2-16)"
_SEARCH = "The search"
_OUT = "What is shown and written"

#: Options that pin a setting of the plan, and the setting.
_NUMBERS = {
    "tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "ep": "ep", "vp": "vp", "mbs": "micro_batch", "zero": "zero",
    "shard": "shard", "recompute_layers": "recompute_layers", "first_layers": "first_layers",
    "last_layers": "last_layers",
}  # fmt: skip
_WORDS = ("schedule", "recompute", "context_scheme", "dispatcher")
#: What can be emitted, and the framework that reads it.
_FORMATS = {"megatron": "megatron", "torchtitan": "fsdp2", "deepspeed": "deepspeed"}
_OVERLAPS = ("tp", "ep")
_MOST_VALUES = 4096
_NAMES = "NAME[,NAME…]"


def _pin(name: str, what: str, metavar: str = "N[,N…]") -> Any:
    return typer.Option(f"--{name}", metavar=metavar, help=what, show_default=False, rich_help_panel=_PINS)


@plan.command()
def train(
    context_: typer.Context,
    on: Annotated[
        str, typer.Option("--on", metavar="CLUSTER", help="Such as '16x dgx-h100' or '2x 8x l40s over roce-100'.")
    ],
    workload: Annotated[
        str | None,
        typer.Argument(metavar="WORKLOAD", help="llm:NAME, or a config.json; --import may bring one.",
                       show_default=False),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", metavar="N", help="Sequences in a step.", show_default=False,
                     rich_help_panel=_HOW),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", metavar="N", help="Tokens of a sequence.", show_default=False, rich_help_panel=_HOW),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="NAME", help="bf16 (the default), fp16, fp8, mxfp8 or nvfp4.",
                     show_default=False, rich_help_panel=_HOW),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option("--framework", metavar="NAME", help="megatron (the default), fsdp2 or deepspeed; --emit sets it.",
                     show_default=False, rich_help_panel=_HOW),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="N", help="Tokens of the whole run, e.g. 15T: days and dollars.",
                     show_default=False, rich_help_panel=_HOW),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option("--attention", metavar="NAME", help="flash (the default), flash2 or unfused.", show_default=False,
                     rich_help_panel=_HOW),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option("--lora-rank", metavar="N", help="Train adapters of this rank only.", show_default=False,
                     rich_help_panel=_HOW),
    ] = None,
    document: Annotated[
        int | None,
        typer.Option("--document-len", metavar="N", help="Mean tokens of documents packed into a sequence.",
                     show_default=False, rich_help_panel=_HOW),
    ] = None,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Layers are replayed from CUDA graphs.", rich_help_panel=_HOW)
    ] = False,
    tp: Annotated[str | None, _pin("tp", "Tensor-parallel ranks.")] = None,
    cp: Annotated[str | None, _pin("cp", "Context-parallel ranks.")] = None,
    dp: Annotated[str | None, _pin("dp", "Data-parallel ranks.")] = None,
    pp: Annotated[str | None, _pin("pp", "Pipeline stages.")] = None,
    ep: Annotated[str | None, _pin("ep", "Expert-parallel ranks, of those of tp, cp and dp.")] = None,
    vp: Annotated[str | None, _pin("vp", "Chunks of layers on each pipeline rank.")] = None,
    mbs: Annotated[str | None, _pin("mbs", "Sequences of a micro-batch.")] = None,
    zero: Annotated[str | None, _pin("zero", "ZeRO stages, 0 to 3.")] = None,
    shard: Annotated[str | None, _pin("shard", "Ranks that share one copy (HSDP); 0: all.")] = None,
    first_layers: Annotated[str | None, _pin("first-layers", "Layers of the first stage.")] = None,
    last_layers: Annotated[str | None, _pin("last-layers", "Layers of the last stage.")] = None,
    recompute: Annotated[
        str | None, _pin("recompute", "none, selective or full; or only numbers: layers of a rank.", _NAMES)
    ] = None,
    schedule: Annotated[str | None, _pin("schedule", "1f1b, interleaved, zero-bubble or gpipe.", _NAMES)] = None,
    context_scheme: Annotated[str | None, _pin("context-scheme", "ring, a2a or allgather.", _NAMES)] = None,
    dispatcher: Annotated[str | None, _pin("dispatcher", "alltoall, allgather or deepep.", _NAMES)] = None,
    overlap: Annotated[
        str | None, _pin("overlap", "tp, ep or tp,ep: communication beside compute; none.", "NAME[,NAME]")
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", metavar="NAME", help="time, cost or energy.", rich_help_panel=_SEARCH)
    ] = "time",
    max_memory: Annotated[
        str,
        typer.Option("--max-memory", metavar="SHARE", help="Share of a device's memory to fill.",
                     rich_help_panel=_SEARCH),
    ] = "90%",
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", metavar="N[,N…]", help="Numbers of machines (all; for cost and energy also fewer).",
                     show_default=False, rich_help_panel=_SEARCH),
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", help="Processes.", min=1, max=256, rich_help_panel=_SEARCH)
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Keep every plan that fits in this SQLite file, and go on from it.",
                     show_default=False, rich_help_panel=_SEARCH),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", help="Start from Megatron, torchtitan or DeepSpeed settings.",
                     show_default=False, rich_help_panel=_SEARCH),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", help="Plans shown.", min=1, max=1000, rich_help_panel=_OUT)
    ] = 10,
    emit: Annotated[
        str | None,
        typer.Option("--emit", metavar="FORMAT", help="Only the best plan: megatron, torchtitan or deepspeed.",
                     show_default=False, rich_help_panel=_OUT),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write the ranking as one HTML file.", show_default=False,
                     rich_help_panel=_OUT),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON, schema foretell.plan/1.", rich_help_panel=_OUT)] = False,
) -> None:
    """The best ways to train a model on a cluster: degrees, micro-batch, schedule, recomputation, sharding."""
    from foretell import report
    from foretell.cli import files
    from foretell.cli.terminal import progress, show, show_text
    from foretell.cli.training import experts_only
    from foretell.errors import InputError, unknown
    from foretell.hardware import cluster as named_cluster
    from foretell.plan.training.search import search

    if emit is not None and emit not in _FORMATS:
        raise unknown("format to emit", emit, _FORMATS)
    if emit is not None and json:
        raise InputError("is the plan in another format than --json", f"--emit {emit}", "give one of them")
    if html is not None:
        files.writable(html, "--html")
        files.ending(html, "--html", (".html", ".htm"))
    if out is not None:
        files.writable(out)
    emitted = None if emit is None else _FORMATS[emit]
    if emitted is not None and framework not in (None, emitted):
        raise InputError(f"contradicts --framework {framework}", f"--emit {emit}",
                         f"give --framework {emitted}, or leave it out")  # fmt: skip
    cluster = named_cluster(on)
    pinned = _pinned(context_.params, recompute)
    shared = {"precision": precision, "framework": framework, "attention": attention, "lora_rank": lora,
              "document_len": document, "cuda_graph": cuda_graph or None}  # fmt: skip
    given = {name: value for name, value in shared.items() if value is not None}
    if global_batch is not None:
        given["global_batch"] = global_batch
    if seq_len is not None:
        given["seq_len"] = seq_len
    imported, config, format_, notes = _start(start, workload, given, cluster.device_count)
    experts_only(config, "--dispatcher", dispatcher)
    values: dict[str, Any] = imported.to_dict() if imported is not None else {"framework": "megatron"}
    values |= given
    taken = None
    if emitted is not None and values["framework"] != emitted:
        values["framework"] = emitted
        taken = f"--framework {emitted} is taken, which --emit {emit} is for"
    for name in ("global_batch", "seq_len"):
        if name not in values:
            option = "--" + name.replace("_", "-")
            raise InputError("is needed", option, f"give {option} N")
    shared_names = ("precision", "attention", "lora_rank", "document_len", "cuda_graph", "grad_dtype", "state_dtype")
    settings: dict[str, Any] = {name: values[name] for name in shared_names if name in values}
    kinds = {node.name for _, node in cluster.groups}
    if len(kinds) > 1:
        only = {"--emit": emit, "--html": html, "--out": out, "--import": start, "--nodes": nodes}
        for option, value in only.items():
            if value:
                raise InputError("is for machines of one kind", option, "leave it out, or plan each kind by itself")
        if objective != "time":
            raise InputError("is for machines of one kind", f"--objective {objective}", "take time")
        from foretell.plan.training.uneven import document as shared_plan
        from foretell.plan.training.uneven import search_uneven

        with progress("Sharing out the work"):
            shared_out = search_uneven(
                config, cluster,
                global_batch=values["global_batch"], seq_len=values["seq_len"], framework=values["framework"],
                max_memory=_share(max_memory), top=top, settings=settings, pinned=pinned,
            )  # fmt: skip
        run = None if tokens is None else opt.tokens(tokens)
        if json:
            show_text(report.json_text(shared_plan(config, cluster, shared_out, run)))
        else:
            show(report.uneven_view(config, cluster, shared_out, run))
        return
    with progress("Searching") as update:
        found = search(
            config, cluster,
            global_batch=values["global_batch"], seq_len=values["seq_len"], framework=values["framework"],
            objective=objective, max_memory=_share(max_memory), top=top,
            tokens=None if tokens is None else opt.tokens(tokens),
            settings=settings, pinned=pinned, nodes=() if nodes is None else _counts(nodes, "--nodes"),
            imported=imported, out=out, jobs=jobs, progress=update,
        )  # fmt: skip
    found = replace(found, notes=notes)
    if html is not None:
        _write_html(html, found, opt.command_line(context_))
    if emit is not None:
        from foretell.plan.training.emit import emit as write
        from foretell.plan.training.space import smaller

        best = found.best[0]
        for note in [*(f"--import: {note}" for note in notes), *([taken] if taken else [])]:
            print(f"note: {note}", file=sys.stderr)
        show_text(write(emit, config, best.plan, smaller(cluster, best.nodes)).rstrip("\n"))
        return
    if json:
        show_text(report.json_text(found.to_dict()))
        return
    show(report.ranking_view(found, [f"starting from {format_} settings"] if format_ else ()))
    if html is not None:
        show_text(f"\nwrote {html}")


def _start(
    path: Path | None, workload: str | None, given: dict[str, Any], devices: int
) -> tuple[TrainingPlan | None, LLMConfig, str, tuple[str, ...]]:
    """The plan and the model to start from, the format of the file they are from, and notes on what it says besides."""
    from foretell.errors import InputError
    from foretell.units import format_count

    config = None if workload is None else opt.transformer(workload)
    if path is None:
        if config is None:
            raise InputError("is missing", "WORKLOAD", "give e.g. llm:llama-3-70b, or --import FILE")
        return None, config, "", ()
    from foretell.plan.training.emit import read

    found = read(path)
    config = config or found.config
    if config is None:
        raise InputError("does not give the model's shape", f"--import {path}", "name a workload, e.g. llm:llama-3-70b")
    others = {name: value for name, value in given.items() if name in ("global_batch", "seq_len", "precision")}
    if "dp" not in found.plan:
        model = 1
        for name in ("tp", "cp", "pp"):
            model *= int(found.plan.get(name, 1))
        others["dp"] = max(1, devices // model)
    notes = tuple(note for note in found.notes if not ("dp" in others and note.endswith("give --dp")))
    if workload is not None and found.config is not None and found.config.parameters != config.parameters:
        notes += (f"the file's own model of {format_count(found.config.parameters)} parameters is not used",)
    return found.training_plan(**others), config, found.format, notes


def _pinned(parameters: dict[str, Any], recompute: str | None) -> dict[str, tuple[Any, ...]]:
    from foretell.errors import InputError, unknown
    from foretell.simulate.training.plan import CHOICES

    found: dict[str, tuple[Any, ...]] = {}
    for option, name in _NUMBERS.items():
        text = parameters.get(option)
        if text is not None:
            found[name] = _counts(text, "--" + option.replace("_", "-"))
    for name in _WORDS:
        text = parameters.get(name)
        if text is None:
            continue
        words = [word.strip() for word in text.split(",")]
        counted = [word[:1].isdigit() for word in words]
        if name == "recompute" and any(counted) and not all(counted):
            raise InputError(f"{text[:80]!r} has numbers of layers and names, which do not mix", "--recompute",
                             "ask twice: with the numbers (4,8), and with the names (none,full)")  # fmt: skip
        if name == "recompute" and all(counted):
            layers = _counts(text, "--recompute")
            if 0 in layers:
                raise InputError("0 layers are none", "--recompute", "give none, or a number of layers from 1")
            found |= {"recompute": ("full",), "recompute_layers": layers}
            continue
        for word in words:
            if word not in CHOICES[name]:
                raise unknown(name.replace("_", " "), word, CHOICES[name])
        found[name] = tuple(words)
    text = parameters.get("overlap")
    if text is not None:
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word not in _OVERLAPS and words != ["none"]:
                raise unknown("communication to overlap", word, (*_OVERLAPS, "none"))
        found |= {f"overlap_{name}": (name in words,) for name in _OVERLAPS}
    return found


def _counts(text: str, option: str) -> tuple[int, ...]:
    """``8``, ``4,8`` or ``2-16`` as numbers."""
    from foretell.errors import InputError

    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"{text[:80]!r} is no count", option, "give 8, 4,8 or 2-16")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= _MOST_VALUES:
            raise InputError(f"{part.strip()} is more than {_MOST_VALUES:,} values", option, "give a narrower range")
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))


def _share(text: str) -> float:
    from foretell.errors import InputError

    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?|\.\d{1,6})\s*(%?)\s*", text, re.ASCII)
    value = float(match[1]) / (100.0 if match[2] else 1.0) if match else 0.0
    if not 0.0 < value <= 1.0:
        raise InputError(f"{text[:40]!r} is no share of the memory", "--max-memory", "give 1% to 100%, e.g. 90%")
    return value


def _write_html(path: Path, found: Ranking, command: str) -> None:
    from foretell.errors import InputError
    from foretell.report.training_html import ranking_page

    try:
        path.write_text(ranking_page(found, command), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", f"--html {path}", "give another file"
        ) from error
