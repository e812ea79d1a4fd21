"""``foretell checkpoint``: the sizes of a checkpoint on disk, from its headers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.app import app

#: From the smallest card in common use to the largest.
_DEVICES = "t4,rtx-4090,l40s,a100-sxm4-80gb,h200-sxm,mi300x"
_MOST_SHOWN = 1000


@app.command()
def checkpoint(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A .safetensors or .gguf file, an index.json of several, or their folder.",
            show_default=False,
        ),
    ],
    on: Annotated[
        str,
        typer.Option(
            "--on", metavar="DEVICE[,DEVICE…]", help="Devices to hold it against; see foretell devices."
        ),
    ] = _DEVICES,
    largest: Annotated[int, typer.Option("--largest", metavar="N", help="Largest tensors to list.")] = 5,
    json: opt.Json = False,
) -> None:
    """Parameters, bytes and types of a checkpoint on disk. Only its headers are read."""
    from foretell.cli.app import _devices
    from foretell.cli.terminal import progress, show, show_text
    from foretell.errors import InputError
    from foretell.report.checkpoint import checkpoint_view
    from foretell.report.documents import json_text
    from foretell.workload.checkpoint import read

    if not 0 <= largest <= _MOST_SHOWN:
        raise InputError(f"{largest} tensors", "--largest", f"give a number from 0 to {_MOST_SHOWN:,}")
    devices = _devices(on)
    with progress(f"Reading {path.name}"):
        found = read(path)
    if json:
        show_text(json_text(found.to_dict(), indent=None))
    else:
        show(checkpoint_view(found, devices, largest))
