"""``foretell predict`` of a training plan on many devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import options as opt

if TYPE_CHECKING:
    from foretell.plan.training.predicted import PredictedStep
    from foretell.simulate.training.plan import TrainingPlan
    from foretell.workload.llm import LLMConfig

__all__ = ["is_meant", "predict_training"]

#: Options of `predict` and the field of the plan that they set.
_FIELDS = {
    "global_batch": "global_batch", "seq_len": "seq_len", "mbs": "micro_batch", "tp": "tp", "cp": "cp", "dp": "dp",
    "pp": "pp", "ep": "ep", "vp": "vp", "first_layers": "first_layers", "last_layers": "last_layers",
    "schedule": "schedule", "framework": "framework", "zero": "zero", "shard": "shard", "precision": "precision",
    "attention": "attention", "context_scheme": "context_scheme", "dispatcher": "dispatcher",
    "cuda_graph": "cuda_graph", "document_len": "document_len",
}  # fmt: skip
#: Options of one device that say nothing here, and what does.
_ELSEWHERE = {
    "batch": "--global-batch and --mbs say how many sequences",
    "image_size": "a transformer reads tokens: --seq-len",
    "inputs": "a transformer reads tokens: --seq-len",
    "context": "that is of decoding",
    "accumulate": "micro-batches follow from --global-batch, --mbs and --dp",
    "checkpointing": "--recompute full",
    "quantize": "weights are in the plan's precision",
    "layout": "that is of convolutions",
    "runtime": "--framework and --cuda-graph say how it runs",
    "model": "there is one model of training steps",
    "power_limit": "devices run at their own limit",
    "clock": "devices run at their own clock",
    "calibration": "--calibrate-from takes timed runs",
    "sort": "one plan is predicted; foretell plan train ranks many",
    "largest_batch": "what would fit is said where a plan does not",
    "trace": "foretell simulate pipeline … --trace writes a timeline",
}
_OPTIMIZERS = ("adam", "adamw")
_MANY = re.compile(r"\d+\s*[x×*]\s*\S|\+|\s+over\s+", re.IGNORECASE)


def is_meant(context: typer.Context, on: str) -> bool:
    """Whether `predict` is asked about training on many devices: `on` is a cluster, or an option is only about that."""
    from foretell.errors import UnknownNameError, near_names
    from foretell.hardware import device, devices, nodes

    if any(name in opt.TRAINING_AT_SCALE for name in opt.given(context)):
        return True
    for name in (part.strip() for part in on.split(",")):
        try:
            device(name)
        except UnknownNameError:
            # A name that is none of a device: does a machine's come nearest?
            if _MANY.search(name) or near_names(name, (*nodes(), *devices()), 1) in {(node,) for node in nodes()}:
                return True
    return False


def predict_training(context: typer.Context, workload: str, on: str) -> None:
    """Predict the step that the options of `context` describe and show it; what does not fit raises InfeasibleError
    after it was shown."""
    from foretell.cli import files
    from foretell.cli.terminal import progress, show, show_text
    from foretell.errors import InfeasibleError, InputError
    from foretell.hardware import cluster as named_cluster
    from foretell.plan.training.measured import read_runs
    from foretell.plan.training.predicted import predict
    from foretell.report.documents import json_text
    from foretell.report.training_step import step_card

    asked = context.params
    names = opt.given(context)
    if "," in on:
        raise InputError(f"{on[:80]!r} names several", "--on", "training on many devices is predicted on one cluster")
    cluster = named_cluster(on)
    config = _config(workload, cluster.device_count)
    if not asked["train"] and asked["phase"] != "train":
        only = [f"--{name.replace('_', '-')}" for name in names if name in opt.TRAINING_AT_SCALE]
        device = f"--on {cluster.groups[0][1].device.name}" + (f" without {', '.join(only)}" if only else "")
        raise InputError("a step on many devices is one of training", f"--on {on[:80]}",
                         f"add --train, or predict inference on one device: {device}; "
                         "serving on many is foretell simulate serve")  # fmt: skip
    _refuse(names, asked)
    if asked["full_flops"] and asked["causal_flops"]:
        raise InputError("both are given", "--full-flops, --causal-flops", "give one of them")
    if asked["html"] is not None:
        files.check(asked["html"], None, 1, workload)
    tokens = None if asked["tokens"] is None else opt.tokens(asked["tokens"])
    plan, notes = _plan(asked, names, cluster.device_count)
    experts_only(config, "--dispatcher", asked["dispatcher"])
    runs = () if asked["calibrate_from"] is None else read_runs(asked["calibrate_from"], config)
    with progress("Predicting"):
        found = predict(
            config, plan, cluster, runs=runs, full_flops=asked["full_flops"], tokens=tokens, notes=notes
        )
    if asked["html"] is not None:
        _write_html(asked["html"], found, opt.command_line(context))
    if asked["json"]:
        show_text(json_text(found.to_dict()))
    else:
        show(step_card(found))
        if asked["html"] is not None:
            show_text(f"\nwrote {asked['html']}")
    if found.excess:
        raise InfeasibleError(found.excess)


def experts_only(config: LLMConfig, option: str, value: str | None) -> None:
    """Refuse an option about experts where the model has none."""
    from foretell.errors import InputError

    if value is not None and config.moe is None:
        raise InputError(
            f"{config.name} has no experts to dispatch tokens to", f"{option} {value[:40]}", "leave it out"
        )


def _config(workload: str, devices: int) -> LLMConfig:
    """The transformer that is named; of another workload what can be had instead."""
    from foretell.documents import read_json
    from foretell.errors import InputError
    from foretell.workload import llm

    name = workload.removeprefix("hf:")
    if workload.endswith(".json") and ":" not in workload:
        data = read_json(Path(workload), "config.json")
        if isinstance(data, dict) and str(data.get("schema", "")).startswith("foretell."):
            raise InputError(f"{workload[-80:]!r} was captured for one device", "WORKLOAD",
                             "give llm:NAME or hf:CONFIG.json")  # fmt: skip
    if workload.startswith("llm:") or name.endswith((".json", ".toml")):
        return llm.config(name)
    if workload.startswith("hf:"):
        raise InputError(f"{workload[:80]!r} is no file", "WORKLOAD", "give its config.json, as hf:config.json")
    where = "on many devices" if devices > 1 else "with options of training on many devices"
    raise InputError(
        f"{workload[:80]!r} is no transformer with a configuration, and only those are predicted {where}", "WORKLOAD",
        "give llm:NAME or hf:CONFIG.json; or predict one device without them: how data-parallel training of other "
        "networks scales is not predicted",
    )  # fmt: skip


def _refuse(names: Sequence[str], asked: Mapping[str, Any]) -> None:
    from foretell.errors import InputError

    wrong = [name for name in names if name in _ELSEWHERE]
    if asked["phase"] not in (None, "train"):
        raise InputError(f"contradicts --phase {asked['phase']}", "--train", "give one of the two")
    if asked["optimizer"] is not None and asked["optimizer"] not in _OPTIMIZERS:
        raise InputError(
            f"{asked['optimizer'][:40]!r} is not predicted on many devices", "--optimizer", "adam and adamw are"
        )
    if wrong:
        options = ", ".join("--" + name.replace("_", "-").replace("inputs", "input") for name in wrong)
        said = "; ".join(_ELSEWHERE[name] for name in wrong)
        raise InputError("means nothing where training on many devices is predicted", options, f"leave it out: {said}")


def _plan(asked: Mapping[str, Any], names: Sequence[str], devices: int) -> tuple[TrainingPlan, list[str]]:
    """The plan, and what was decided that was not asked for."""
    from foretell.errors import InputError, unknown
    from foretell.simulate.training.plan import CHOICES, TrainingPlan
    from foretell.workload.lora import parse_lora

    missing = [f"--{name.replace('_', '-')} N" for name in ("global_batch", "seq_len") if asked[name] is None]
    if missing:
        raise InputError(" and ".join(missing) + " must be given", "training plan",
                         "sequences of a step, and tokens of a sequence")  # fmt: skip
    values = {field: asked[option] for option, field in _FIELDS.items() if asked[option] is not None}
    notes = []
    text = asked["recompute"]
    if text is not None and text not in CHOICES["recompute"]:
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
            raise unknown("recompute", text, (*CHOICES["recompute"], "a number of layers"))
        if int(text) == 0:
            raise InputError("0 layers are none", "--recompute", "give none, or a number of layers from 1")
        values |= {"recompute": "full", "recompute_layers": int(text)}
    elif text is not None:
        values["recompute"] = text
    words = asked["overlap"] or "none"
    for word in [] if words.strip() == "none" else [word.strip() for word in words.split(",")]:
        if word not in ("tp", "ep"):
            raise unknown("communication to overlap", word, ("tp", "ep", "none"))
        values[f"overlap_{word}"] = True
    if asked["lora"] is not None:
        lora = parse_lora(asked["lora"])
        if "targets" in asked["lora"]:
            raise InputError("adapters are beside all matrices here", "--lora", f"give --lora rank={lora.rank}")
        values["lora_rank"] = lora.rank
    if asked["no_sp"]:
        values["sequence_parallel"] = False
    if "zero" not in values and values.get("framework") == "fsdp2":
        values["zero"] = 3
    if "schedule" not in values and values.get("vp", 1) > 1:
        values["schedule"] = "interleaved"
    if "dp" not in values:
        model = 1
        for name in ("tp", "cp", "pp"):
            model *= max(1, values.get(name, 1))
        values["dp"] = max(1, devices // model)
        if devices > 1:
            said = " · ".join(f"{name} {values[name]}" for name in ("tp", "cp", "pp") if values.get(name, 1) > 1)
            notes.append(f"--dp not given: {values['dp']:,}, " + (
                f"what {said} leaves of {devices:,} devices" if said else f"all {devices:,} devices"
            ))  # fmt: skip
    return TrainingPlan(**values), notes


def _write_html(path: Path, found: PredictedStep, command: str) -> None:
    from foretell.errors import InputError
    from foretell.report.training_step_html import step_page

    try:
        path.write_text(step_page(found, command), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", f"--html {path}", "give another file"
        ) from error
