"""The options of the commands, each declared once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from foretell.workload.llm import LLMConfig

SHAPES = "What is captured"
_TRAINING = "Training"
HOW = "How it runs"
MANY = "Training on many devices"

Workload = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help="timm:NAME, torchvision:NAME, hf:CONFIG.json, llm:NAME, zoo:NAME, py:FILE.py:FACTORY (runs that file), "
        "pt2:FILE (an exported program), onnx:FILE, or a captured graph.json.",
        show_default=False,
    ),
]
On = Annotated[str, typer.Option("--on", metavar="DEVICE[,DEVICE…]", help="Devices; see foretell devices.")]
OnMany = Annotated[
    str,
    typer.Option(
        "--on", metavar="DEVICE[,DEVICE…]", help="Devices; see foretell devices. Or a cluster: '16x dgx-h100'."
    ),
]
OneDevice = Annotated[str, typer.Option("--on", metavar="DEVICE", help="A device; see foretell devices.")]

Batch = Annotated[
    int | None, typer.Option("--batch", metavar="N", help="Samples in a step (1).", rich_help_panel=SHAPES)
]
ImageSize = Annotated[
    int | None,
    typer.Option("--image-size", metavar="N", help="Height and width (the model's own).", rich_help_panel=SHAPES),
]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", metavar="N", help="Tokens of a sequence.", rich_help_panel=SHAPES)
]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=SHAPE:DTYPE",
        help="An input of forward, by its name or position: x=8x3x224x224:float32, 0=8x3x224x224.",
        rich_help_panel=SHAPES,
    ),
]
Phase = Annotated[
    str | None,
    typer.Option(
        "--phase", metavar="PHASE", help="inference (the default), train, prefill or decode.", rich_help_panel=SHAPES
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        help="Tokens cached before a decode step (--seq-len, else up to 2,048).",
        rich_help_panel=SHAPES,
    ),
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

Lora = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="rank=N[,targets=…]",
        help="Train low-rank adapters, e.g. rank=16,targets=q_proj,v_proj (or all-linear).",
        rich_help_panel=_TRAINING,
    ),
]

Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="fp32 (the default), tf32, amp, amp_bf16, bf16 or fp16.",
        rich_help_panel=HOW,
    ),
]
PrecisionMany = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="fp32 (the default), tf32, amp, amp_bf16, bf16 or fp16; on many devices bf16 (the default), fp16, fp8, "
        "mxfp8 or nvfp4.",
        rich_help_panel=HOW,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize", metavar="NAME", help="nf4 or fp4: 4-bit matrices (llm: only).", rich_help_panel=HOW
    ),
]
Layout = Annotated[
    str | None,
    typer.Option("--layout", metavar="NAME", help="nchw (the default) or nhwc (channels last).", rich_help_panel=HOW),
]
Runtime = Annotated[str, typer.Option("--runtime", metavar="NAME", help="eager or compiled.", rich_help_panel=HOW)]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="auto (the default), roofline, kernel, learned, convmeter or cpu.",
        rich_help_panel=HOW,
    ),
]
PowerLimit = Annotated[
    str | None,
    typer.Option(
        "--power-limit", metavar="POWER", help="A power limit, e.g. 250W (the card's own).", rich_help_panel=HOW
    ),
]
Clock = Annotated[
    str | None,
    typer.Option("--clock", metavar="CLOCK", help="A locked clock, e.g. 1.2GHz (up to boost).", rich_help_panel=HOW),
]

Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration", metavar="FILE", help="What foretell calibrate wrote for the device.", rich_help_panel=HOW
    ),
]



def _count(name: str, what: str, metavar: str = "N") -> Any:
    """A number of training on many devices."""
    return Annotated[int | None, typer.Option(name, metavar=metavar, help=what, rich_help_panel=MANY)]


def _word(name: str, what: str, metavar: str = "NAME") -> Any:
    """A word of training on many devices."""
    return Annotated[str | None, typer.Option(name, metavar=metavar, help=what, rich_help_panel=MANY)]


GlobalBatch = _count("--global-batch", "Sequences of a step.")
Tp = _count("--tp", "Tensor-parallel ranks (1).")
Pp = _count("--pp", "Pipeline stages (1).")
Dp = _count("--dp", "Data-parallel ranks (the devices that are left).")
Cp = _count("--cp", "Context-parallel ranks (1).")
Ep = _count("--ep", "Expert-parallel ranks, of those of tp, cp and dp (1).")
Vp = _count("--vp", "Chunks of layers on each stage (1).")
Mbs = _count("--mbs", "Sequences of a micro-batch (1).")
Zero = _count("--zero", "ZeRO stage, 0 to 3 (1; fsdp2: 3).")
Shard = _count("--shard", "Ranks that share one copy, HSDP (all).")
Recompute = _word("--recompute", "none, selective, full, or N layers a stage (none).", "WHAT")
Framework = _word("--framework", "megatron (the default), fsdp2 or deepspeed.")
Schedule = _word("--schedule", "1f1b (the default), interleaved (with --vp), zero-bubble or gpipe.")
FirstLayers = _count("--first-layers", "Layers of the first stage.")
LastLayers = _count("--last-layers", "Layers of the last stage.")
AttentionKernels = _word("--attention", "flash (the default), flash2 or unfused.")
ContextScheme = _word("--context-scheme", "ring (the default), a2a or allgather.")
Dispatcher = _word("--dispatcher", "alltoall (the default), allgather or deepep.")
Overlap = _word("--overlap", "tp, ep or tp,ep: communication beside compute; none.")
NoSp = Annotated[
    bool, typer.Option("--no-sp", help="No sequence parallelism with tp.", rich_help_panel=MANY)
]
CudaGraph = Annotated[
    bool, typer.Option("--cuda-graph", help="Layers are replayed from CUDA graphs.", rich_help_panel=MANY)
]
DocumentLen = _count("--document-len", "Mean tokens of documents packed into a sequence.")
FullFlops = Annotated[
    bool, typer.Option("--full-flops", help="MFU counts attention in full: 6N + 12LhT.", rich_help_panel=MANY)
]
CausalFlops = Annotated[
    bool, typer.Option("--causal-flops", help="MFU counts its causal half (the default).", rich_help_panel=MANY)
]
Tokens = _word("--tokens", "Tokens of the whole run, e.g. 15T: days and dollars.", "N")
CalibrateFrom = Annotated[
    Path | None,
    typer.Option("--calibrate-from", metavar="FILE", help="Runs that you timed (JSON).", rich_help_panel=MANY),
]

#: The parameters of a command that are about training on many devices.
TRAINING_AT_SCALE = (
    *("global_batch", "tp", "pp", "dp", "cp", "ep", "vp", "mbs", "zero", "shard", "recompute", "framework", "schedule"),
    *("first_layers", "last_layers", "attention", "context_scheme", "dispatcher", "overlap", "no_sp"),
    *("cuda_graph", "document_len", "full_flops", "causal_flops", "tokens", "calibrate_from"),
)

Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write a report to look at: one HTML file.", show_default=False),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", help="Also write the step's timeline, for ui.perfetto.dev.", show_default=False
    ),
]

Json = Annotated[bool, typer.Option("--json", help="JSON; its schema is in docs/schema.md.")]
PlainJson = Annotated[bool, typer.Option("--json", help="The same as JSON, every figure in full.")]
Folder = Annotated[Path | None, typer.Option(metavar="DIR")]

# Options that say what is captured; the rest of a command's parameters are its own.
_CAPTURE = (
    *("batch", "image_size", "seq_len", "inputs", "phase", "context", "train", "optimizer"),
    *("accumulate", "checkpointing", "precision", "layout", "lora", "quantize"),
)


def capture_settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the user set of a command's parameters, as keywords of `foretell.capture`."""
    # 0 is given, though it equals False: it is then refused with what is accepted instead.
    unset = (type(None), list, tuple, bool)
    return {name: value for name in _CAPTURE if (value := parameters[name]) or not isinstance(value, unset)}


def transformer(workload: str) -> LLMConfig:
    """The transformer that WORKLOAD is: ``llm:NAME`` or a file of a configuration. Raises InputError for what has no
    configuration, such as a module.
    """
    from foretell.errors import InputError
    from foretell.workload import llm

    name = workload.removeprefix("hf:")
    if not workload.startswith("llm:") and not name.endswith((".json", ".toml")):
        raise InputError(f"{workload[:80]!r} is no parametric transformer", "WORKLOAD",
                         "give llm:NAME, e.g. llm:llama-3.1-8b, or a config.json")  # fmt: skip
    return llm.config(name)


def tokens(text: str) -> float:
    """A number of tokens such as ``15T``."""
    from foretell.errors import InputError

    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,6})?)\s*([kmbgt]?)\s*", text, re.ASCII | re.IGNORECASE)
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    value = float(match[1]) * scale[match[2].lower()] if match else 0.0
    if not 0 < value <= 1e18:
        raise InputError(f"{text[:40]!r} is no number of tokens", "--tokens", "give e.g. 15T, 300B or 2e9 as 2B")
    return value


def hourly_price(usd_per_h: float, where: str) -> float:
    """Dollars an hour that a device can cost, or nothing. Raises InputError for any other price."""
    from foretell.errors import InputError

    if usd_per_h > 1e6 or 0 < usd_per_h < 1e-6:
        end = "at most $1,000,000" if usd_per_h > 1 else "0, or at least $0.000001"
        raise InputError(f"${usd_per_h:g} an hour is no price of a device", where, f"give {end}")
    return usd_per_h


def given(context: typer.Context) -> list[str]:
    """Names of the parameters that the user set."""
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP"):
            found.append(str(parameter.name))
    return found


def command_line(context: typer.Context) -> str:
    """The command as it was given, for a shell: what was left to its default stays out."""
    words = ["foretell"]
    chain: list[Any] = [context]
    while chain[0].parent is not None:
        chain.insert(0, chain[0].parent)
    for each in chain:
        if each is not chain[0]:
            words.append(str(each.info_name))
        for parameter in each.command.params:
            name = str(parameter.name)
            source = each.get_parameter_source(name)
            if source is None or source.name in ("DEFAULT", "DEFAULT_MAP") or name not in each.params:
                continue
            value = each.params[name]
            if parameter.param_type_name == "argument":
                words.append(str(value))
                continue
            option = next(opt for opt in parameter.opts if opt.startswith("--"))
            if isinstance(value, bool):
                words += [option] if value else []
            else:
                for one in value if isinstance(value, (list, tuple)) else [value]:
                    words += [option, str(one)]
    return shlex.join(words)
