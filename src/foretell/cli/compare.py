"""``foretell compare``: workloads × devices × precisions × batches, and the best of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.app import app

_OUT = "What is shown"


@app.command()
def compare(
    context_: typer.Context,
    workloads: Annotated[
        list[str], typer.Argument(metavar="WORKLOAD...", help="As for foretell predict.", show_default=False)
    ],
    on: opt.On,
    precisions: Annotated[
        str, typer.Option("--precision", metavar="NAME[,NAME…]", help="Precisions.", rich_help_panel=opt.HOW)
    ] = "fp32",
    batches: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="N[,N…]",
            help="Batches (1, or a file's own).",
            show_default=False,
            rich_help_panel=opt.SHAPES,
        ),
    ] = None,
    image_size: opt.ImageSize = None,
    seq_len: opt.SeqLen = None,
    phase: opt.Phase = None,
    context: opt.Context = None,
    train: opt.Train = False,
    optimizer: opt.Optimizer = None,
    accumulate: opt.Accumulate = None,
    checkpointing: opt.Checkpointing = False,
    lora: opt.Lora = None,
    layout: opt.Layout = None,
    quantize: opt.Quantize = None,
    runtime: opt.Runtime = "eager",
    model: opt.Model = "auto",
    pareto: Annotated[
        str,
        typer.Option(
            "--pareto", metavar="AXIS[,AXIS…]", help="Axes of the front.", rich_help_panel=_OUT
        ),
    ] = "speed,memory,energy,price",
    across: Annotated[
        bool, typer.Option("--across", help="One front for all workloads, not one each.", rich_help_panel=_OUT)
    ] = False,
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="KEY",
            help="Order: asked, time, speed, memory, energy or price.",
            rich_help_panel=_OUT,
        ),
    ] = "asked",
    top: Annotated[
        int, typer.Option("--top", metavar="N", help="Rows shown (0: all).", min=0, rich_help_panel=_OUT)
    ] = 40,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write all rows: .csv, .json or .parquet.",
            show_default=False,
            rich_help_panel=_OUT,
        ),
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="Do not take rows from earlier runs.", rich_help_panel=_OUT)
    ] = False,
    json: opt.Json = False,
) -> None:
    """A table of workloads, devices, precisions and batches with its Pareto front. Goes on where it was stopped."""
    from foretell import report
    from foretell.cli import files
    from foretell.cli.app import check_model
    from foretell.cli.terminal import progress, show, show_text
    from foretell.compare import AXES
    from foretell.compare import compare as run
    from foretell.errors import InputError, unknown
    from foretell.workload.options import options

    check_model(runtime, model)
    axes = _words(pareto, "--pareto")
    for axis in axes:
        if axis not in AXES:
            raise unknown("axis", axis, AXES)
    if sort not in report.COMPARE_SORT:
        raise unknown("sort key", sort, report.COMPARE_SORT)
    if out is not None:
        files.writable(out)
        if out.suffix.lower() not in report.FORMATS:
            raise InputError(f"{out.name!r} names no kind of table", "--out", f"end it in {', '.join(report.FORMATS)}")
    numbers: list[int | None] = []
    for word in [] if batches is None else _words(batches, "--batch"):
        if not word.isascii() or not word.isdigit() or not 1 <= int(word[:12]) <= 10**9:
            raise InputError(f"{word[:40]!r} is no batch", "--batch", "give numbers from 1, e.g. 1,8,64")
        numbers.append(int(word))
    named: dict[str, Any] = {**context_.params, "batch": None, "inputs": None, "precision": None}
    settings = opt.capture_settings(named)
    kinds = _words(precisions, "--precision")
    for kind in kinds:
        # A wrong one shows before torch is imported.
        options(**{**settings, "precision": kind, "batch": numbers[0] if numbers else None})
    with progress("Comparing") as update:
        result = run(
            workloads,
            _words(on, "--on"),
            precisions=kinds,
            batches=numbers or [None],
            axes=axes,
            across=across,
            runtime=runtime,
            model=model,
            keep=not anew,
            progress=update,
            **settings,
        )
    if out is not None:
        report.write_table(result, out)
    if json:
        show_text(report.json_text(result.to_dict()))
    else:
        show(report.compare_table(result, sort=sort, top=top or None))
    if result.interrupted:
        raise typer.Exit(130)
    if result.rows and all(row.problem for row in result.rows):
        raise InputError("nothing could be predicted", repair=result.rows[0].problem)


def _words(text: str, option: str) -> list[str]:
    from foretell.errors import InputError

    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise InputError(f"{text[:80]!r} has an empty entry", option, "write e.g. a,b")
    return words
