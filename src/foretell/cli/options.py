"""The options of the commands, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

_SHAPES = "What is captured"
_TRAINING = "Training"
_HOW = "How it runs"

Workload = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="timm:NAME, torchvision:NAME, hf:CONFIG.json, llm:NAME, zoo:NAME, py:FILE.py:FACTORY (runs that file), "
        "or a captured graph.json.",
        show_default=False,
    ),
]
On = Annotated[str, typer.Option("--on", metavar="DEVICE[,DEVICE…]", help="Devices; see foretell devices.")]
OneDevice = Annotated[str, typer.Option("--on", metavar="DEVICE", help="A device; see foretell devices.")]

Batch = Annotated[
    int | None, typer.Option("--batch", metavar="N", help="Samples in a step (1).", rich_help_panel=_SHAPES)
]
ImageSize = Annotated[
    int | None,
    typer.Option("--image-size", metavar="N", help="Height and width (the model's own).", rich_help_panel=_SHAPES),
]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", metavar="N", help="Tokens of a sequence.", rich_help_panel=_SHAPES)
]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=SHAPE:DTYPE",
        help="An input, e.g. x=8x3x224x224:float32; repeatable.",
        rich_help_panel=_SHAPES,
    ),
]
Phase = Annotated[
    str | None,
    typer.Option(
        "--phase", metavar="PHASE", help="inference (the default), train, prefill or decode.", rich_help_panel=_SHAPES
    ),
]
Context = Annotated[
    int | None,
    typer.Option("--context", metavar="N", help="Tokens cached before a decode step.", rich_help_panel=_SHAPES),
]

Train = Annotated[bool, typer.Option("--train", help="A training step: --phase train.", rich_help_panel=_TRAINING)]
Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", metavar="NAME", help="sgd (the default), adam, adamw, …", rich_help_panel=_TRAINING),
]
Accumulate = Annotated[
    int | None,
    typer.Option("--accumulate", metavar="N", help="Micro-batches per optimiser step (1).", rich_help_panel=_TRAINING),
]
Checkpointing = Annotated[
    bool, typer.Option("--checkpointing", help="Recompute activations in backward.", rich_help_panel=_TRAINING)
]

Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="fp32 (the default), tf32, amp, amp_bf16, bf16 or fp16.",
        rich_help_panel=_HOW,
    ),
]
Layout = Annotated[
    str | None,
    typer.Option("--layout", metavar="NAME", help="nchw (the default) or nhwc (channels last).", rich_help_panel=_HOW),
]
Runtime = Annotated[str, typer.Option("--runtime", metavar="NAME", help="eager or compiled.", rich_help_panel=_HOW)]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="auto (the default), roofline, kernel, learned, convmeter or cpu.",
        rich_help_panel=_HOW,
    ),
]
PowerLimit = Annotated[
    str | None,
    typer.Option(
        "--power-limit", metavar="POWER", help="A power limit, e.g. 250W (the card's own).", rich_help_panel=_HOW
    ),
]
Clock = Annotated[
    str | None,
    typer.Option("--clock", metavar="CLOCK", help="A locked clock, e.g. 1.2GHz (up to boost).", rich_help_panel=_HOW),
]

Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration", metavar="FILE", help="What foretell calibrate wrote for the device.", rich_help_panel=_HOW
    ),
]

Json = Annotated[bool, typer.Option("--json", help="JSON; its schema is in docs/schema.md.")]
Folder = Annotated[Path | None, typer.Option(metavar="DIR")]

# Options that say what is captured; the rest of a command's parameters are its own.
_CAPTURE = (
    *("batch", "image_size", "seq_len", "inputs", "phase", "context", "train", "optimizer"),
    *("accumulate", "checkpointing", "precision", "layout"),
)


def capture_settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the user set of a command's parameters, as keywords of `foretell.capture`."""
    # 0 is given, though it equals False: it is then refused with what is accepted instead.
    unset = (type(None), list, tuple, bool)
    return {name: value for name in _CAPTURE if (value := parameters[name]) or not isinstance(value, unset)}
