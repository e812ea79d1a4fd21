"""Slices of timm's published benchmark tables (huggingface/pytorch-image-models, results/, Apache-2.0).

One table is one GPU, framework version, precision, layout and runtime; one row is one model at one image and batch
size. Inference steps are a forward under ``inference_mode`` on synthetic input already on the device, synchronised by
the host clock; training steps are forward, backward and an SGD step.

The tables do not say so, but the inference ones must have been made with timm's ``fast_norm`` (layer and group norm in
half precision under autocast), and the training ones without: with autocast's own float32 norms, networks with group
norms would be predicted 1.6 to 2.4 times too slow for inference in eager mode, on each GPU, where with ``fast_norm``
they agree as well as the others; ResNet-50 with group norms, training, is 3 % off without it and 46 % with.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from foretell.accuracy.slices import REGISTRY, Row, Slice
from foretell.errors import InputError

# (slice, file, device, precision, layout, runtime, conditions)
_INFERENCE = (
    ("3090-amp-nchw-pt240", "amp-nchw-pt240-cu124-rtx3090", "rtx-3090"),
    ("3090-amp-nhwc-pt240", "amp-nhwc-pt240-cu124-rtx3090", "rtx-3090"),
    ("4090-amp-nchw-pt240", "amp-nchw-pt240-cu124-rtx4090", "rtx-4090"),
    ("4090-amp-nhwc-pt240", "amp-nhwc-pt240-cu124-rtx4090", "rtx-4090"),
    ("4090-amp-nchw-pt240-dynamo", "amp-nchw-pt240-cu124-rtx4090-dynamo", "rtx-4090"),
    ("4090-amp-nchw-pt291", "amp-nchw-pt291-cu128-4090", "rtx-4090"),
    ("4090-amp-nchw-pt291-dynamo", "amp-nchw-pt291-cu128-4090-dynamo", "rtx-4090"),
    ("5090-amp-nchw-pt291", "amp-nchw-pt291-cu130-5090", "rtx-5090"),
    ("5090-amp-nchw-pt291-dynamo", "amp-nchw-pt291-cu130-5090-dynamo", "rtx-5090"),
    ("pro6000maxq-amp-nchw-pt291", "amp-nchw-pt291-cu130-pro6000maxq", "rtx-pro-6000-maxq"),
    ("pro6000maxq-amp-nchw-pt291-dynamo", "amp-nchw-pt291-cu130-pro6000maxq-dynamo", "rtx-pro-6000-maxq"),
    ("pro6000maxq-amp_bf16-nchw-pt291-dynamo", "amp_bf16-nchw-pt291-cu130-pro6000maxq-dynamo", "rtx-pro-6000-maxq"),
    ("pro6000maxq-bf16-nchw-pt291-dynamo", "bf16-nchw-pt291-cu130-pro6000maxq-dynamo", "rtx-pro-6000-maxq"),
)
_TRAINING = (
    ("3090-amp-nchw-pt112", "amp-nchw-pt112-cu113-rtx3090", "rtx-3090"),
    ("3090-amp-nhwc-pt112", "amp-nhwc-pt112-cu113-rtx3090", "rtx-3090"),
)


def read_rows(path: Path, prefix: str, options: dict[str, object], root: Path) -> list[Row]:
    """Rows of one table; `prefix` is ``infer`` or ``train``. Rows without a time are dropped (two are known).

    Raises InputError naming a missing column, or the row of a value that is no positive number.
    """
    shown = str(path.relative_to(root))
    repair = "use the table as timm publishes it"
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline=""))
        needed = ("model", f"{prefix}_step_time", f"{prefix}_batch_size", f"{prefix}_img_size")
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"lacks the column {missing[0]!r}", shown, repair)
        rows = [
            _row([record[name] or "" for name in needed], record.get("param_count"), options, f"{shown}:{line}")
            for line, record in enumerate(reader, start=2)
            if record[needed[1]]
        ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"is no CSV table in UTF-8: {error}", shown, repair) from error
    if not rows:
        raise InputError("has no rows with a time", shown, repair)
    return rows


def _row(cells: list[str], parameters: str | None, options: dict[str, object], where: str) -> Row:
    """One measurement; `cells` are model, milliseconds, batch and image size, `parameters` millions to two decimals."""
    model, *numbers = cells
    try:
        time_ms, batch, size = (float(n) for n in numbers)
        count = float(parameters or 0)
    except ValueError:
        raise InputError(f"row of {model!r} holds {numbers}, not numbers", where) from None
    if not (0 < time_ms < 1e6 and 1 <= batch < 1e6 and 1 <= size < 1e5 and 0 <= count < 1e6):
        raise InputError(
            f"row of {model!r} has step time {time_ms} ms, batch {batch}, size {size}",
            where,
            "times are milliseconds per batch and must be above 0",
        )
    known = ((count - 0.006) * 1e6, (count + 0.006) * 1e6) if count else None
    return Row(f"timm:{model}", {**options, "image_size": int(size)}, int(batch), time_ms / 1e3, where, known)


def _register(name: str, kind: str, stem: str, device: str) -> None:
    precision, layout = stem.split("-")[:2]
    runtime = "compiled" if stem.endswith("-dynamo") else "eager"
    file = f"timm/benchmark-{kind}-{stem}.csv"
    options: dict[str, object] = {"precision": precision, "layout": layout, "fast_norm": True}
    if kind == "train":
        options |= {"phase": "train", "optimizer": "sgd"}
        options["fast_norm"] = False
        options["fused_attn"] = False  # PyTorch 1.12 has no scaled_dot_product_attention

    def read(folder: Path) -> list[Row]:
        return read_rows(folder / file, kind, options, folder)

    phase = "inference" if kind == "infer" else "train"
    REGISTRY.register(
        Slice(
            name=f"timm-{phase}-{name}",
            device=device,
            runtime=runtime,
            files=(file,),
            read=read,
            conditions={"precision": precision, "layout": layout, "torch": stem.split("-")[2], "mode": phase},
        )
    )


for _name, _stem, _device in _INFERENCE:
    _register(_name, "infer", _stem, _device)
for _name, _stem, _device in _TRAINING:
    _register(_name, "train", _stem, _device)
