"""``foretell advise``: what to change in an architecture, and what each change gains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.app import app

if TYPE_CHECKING:
    from foretell.hardware import Device

advise = typer.Typer(no_args_is_help=True, help="What to change in an architecture, and what each change gains.")
app.add_typer(advise, name="advise")


@advise.command()
def architecture(
    context_: typer.Context,
    workload: opt.Workload,
    on: opt.OneDevice,
    rule: Annotated[
        list[str] | None,
        typer.Option("--rule", metavar="NAME", help="A rule to check; repeatable (all).", show_default=False),
    ] = None,
    most: Annotated[int, typer.Option("--most", metavar="N", help="Findings to show.")] = 8,
    batch: opt.Batch = None,
    image_size: opt.ImageSize = None,
    seq_len: opt.SeqLen = None,
    inputs: opt.Input = None,
    phase: opt.Phase = None,
    train: opt.Train = False,
    precision: opt.Precision = None,
    layout: opt.Layout = None,
    runtime: opt.Runtime = "eager",
    model: opt.Model = "auto",
    json: opt.Json = False,
) -> None:
    """Design rules of efficient networks that a workload breaks, each with its predicted gain."""
    from foretell.advise import advise as advised
    from foretell.advise import member
    from foretell.cli.app import _capture, check_model
    from foretell.cli.terminal import progress, show, show_text
    from foretell.errors import InputError
    from foretell.report.advise import advice_view
    from foretell.report.documents import json_text

    device = _one_device(on)
    if workload.startswith("llm:"):
        raise InputError("is a language model", workload, f"ask foretell advise transformer {workload} --on {on}")
    if train or phase not in (None, "inference"):
        asked = "--train" if train else f"--phase {phase}"
        raise InputError(f"{asked} is given", workload, "leave it out: rules cost the forward pass of inference")
    if most < 1:
        raise InputError(f"{most} findings", "--most", "give at least 1")
    for name in rule or ():
        member(name)
    check_model(runtime, model)
    for name in opt._CAPTURE:  # options of training are not offered
        context_.params.setdefault(name, None)
    graph, _ = _capture(workload, context_)
    with progress(f"Checking {graph.name}"):
        advice = advised(graph, device, names=rule or (), runtime=runtime, model=model)
    if json:
        show_text(json_text(advice.to_dict()))
    else:
        show(advice_view(advice, most))


@advise.command()
def transformer(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="llm:NAME, or a config.json.", show_default=False)
    ],
    on: opt.OneDevice,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Sequences in a step.")] = 4,
    seq_len: Annotated[int, typer.Option("--seq-len", metavar="N", help="Tokens of a sequence.")] = 2048,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option("--pp", metavar="N", help="Pipeline stages.")] = 1,
    precision: Annotated[
        str, typer.Option("--precision", metavar="NAME", help="fp32, tf32, bf16, fp16, amp or amp_bf16.")
    ] = "bf16",
    attention: Annotated[
        str, typer.Option("--attention", metavar="HOW", help="fused, or products with a softmax between.")
    ] = "fused",
    within: Annotated[
        float, typer.Option("--within", metavar="X", help="Share by which parameters may differ.")
    ] = 0.02,
    most: Annotated[int, typer.Option("--most", metavar="N", help="Better shapes to show.")] = 4,
    json: opt.Json = False,
) -> None:
    """A transformer's products on a GPU, rules its shape breaks, and shapes nearby that train faster."""
    from foretell.advise.transformer import Setting, shapes
    from foretell.cli.terminal import progress, show, show_text
    from foretell.errors import InputError
    from foretell.report.advise import shapes_view
    from foretell.report.documents import json_text
    from foretell.workload import llm

    device = _one_device(on)
    if most < 1:
        raise InputError(f"{most} shapes", "--most", "give at least 1")
    prefix, separator, _ = model.partition(":")
    if separator and prefix not in ("llm", "hf"):
        raise InputError("is no language model", model, "ask foretell advise architecture, or give llm:NAME")
    config = llm.config(model.removeprefix("llm:").removeprefix("hf:"))
    setting = Setting(batch, seq_len, tp, pp, precision, attention)
    with progress(f"Trying shapes near {config.name}"):
        found = shapes(config, device, setting, within=within, count=most)
    if json:
        show_text(json_text(found.to_dict()))
    else:
        show(shapes_view(found))


def _one_device(on: str) -> Device:
    from foretell.cli.app import _devices
    from foretell.errors import InputError

    devices = _devices(on)
    if len(devices) > 1:
        raise InputError(f"{on!r} names several devices", "--on", "ask for one")
    return devices[0]
