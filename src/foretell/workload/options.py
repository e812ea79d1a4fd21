"""`Options`: how a workload is run. Checked once, here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretell.errors import InputError, unknown
from foretell.graph import DTYPES, MODES
from foretell.workload.lora import QUANTIZED, LoRA, parse_lora

PRECISIONS: tuple[str, ...] = ("fp32", "tf32", "amp", "amp_bf16", "bf16", "fp16")
LAYOUTS: tuple[str, ...] = ("nchw", "nhwc")
OPTIMIZERS: tuple[str, ...] = (
    *("sgd", "sgd-plain", "adam", "adamw", "adamw-fused", "rmsprop", "adagrad", "lion"),
    *("adamw-8bit", "paged-adamw", "paged-adamw-8bit"),  # of bitsandbytes; llm: only
)

MOST = 10**9
MOST_DIMENSIONS = 16
MOST_MICRO_BATCHES = 128  # each is recorded: what one more adds is plain long before that

DTYPE_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int": "int64", "long": "int64"}
_INPUT = re.compile(r"(?P<name>[A-Za-z_][\w./:-]*|[0-9]+)=(?P<shape>[0-9]+([x,][0-9]+)*)?(:(?P<dtype>[\w.]+))?")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape and element type of one example input."""

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Options:
    """How a workload is run; equal options on equal code give equal graphs.

    ``precision``: ``fp32``; ``tf32`` (matrix products of fp32 operands on TF32 units); ``amp`` and ``amp_bf16``
    (autocast to float16 or bfloat16, float32 weights); ``bf16`` and ``fp16`` (weights and inputs converted).
    ``context`` is the number of tokens cached before a decode step. ``optimizer`` applies to training:
    ``sgd`` has momentum 0.9, ``sgd-plain`` none. ``accumulate`` is micro-batches of `batch` per optimiser step.
    ``lora`` trains low-rank adapters instead of the model; ``quantize`` (llm: only) keeps its matrices in 4 bits.
    ``batch_given`` says that the caller named the batch: inputs of another one then contradict it.
    """

    phase: str = "inference"
    batch: int = 1
    image_size: int | None = None
    seq_len: int | None = None
    context: int | None = None
    inputs: Mapping[str, InputSpec] | None = None
    optimizer: str = "sgd"
    accumulate: int = 1
    checkpointing: bool = False
    precision: str = "fp32"
    layout: str = "nchw"
    lora: LoRA | None = None
    quantize: str | None = None
    batch_given: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("phase", self.phase, MODES),
            ("precision", self.precision, PRECISIONS),
            ("layout", self.layout, LAYOUTS),
            ("optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise unknown(name, value, known)
        for name in ("batch", "image_size", "seq_len", "context", "accumulate"):
            value = getattr(self, name)
            least = 0 if name == "context" else 1
            if value is None and name not in ("batch", "accumulate"):
                continue
            most = MOST_MICRO_BATCHES if name == "accumulate" else MOST
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                repair = f"give a whole number from {least} to {most:,}"
                raise InputError(f"{name} is {str(value)[:40]}", repair=repair)
        if self.quantize is not None and self.quantize not in QUANTIZED:
            raise unknown("quantization", str(self.quantize)[:40], QUANTIZED)
        if self.lora is not None and self.phase != "train":
            raise InputError("LoRA applies to training only", repair="add --train (train=True)")
        if self.quantize is not None and self.phase == "train" and self.lora is None:
            raise InputError(
                f"weights in {self.quantize} cannot be trained", "--quantize",
                "train adapters beside them: add --lora rank=16 (lora='rank=16')",
            )  # fmt: skip
        if self.phase != "train" and (self.accumulate > 1 or self.checkpointing):
            raise InputError(
                "accumulation and checkpointing apply to training only", repair="add --train (train=True)"
            )

    @property
    def names_batch(self) -> bool:
        """Whether the caller said which batch: a file or an input of another one then contradicts it."""
        return self.batch_given or self.batch != 1

    @property
    def trains(self) -> bool:
        """Whether the step is a training step."""
        return self.phase == "train"

    def training(self) -> tuple[str, ...]:
        """How the step trains, in words; nothing where it does not."""
        if not self.trains:
            return ()
        words = [self.optimizer]
        if self.lora is not None:
            words.append(f"LoRA rank {self.lora.rank} on {' '.join(self.lora.targets)}")
        if self.accumulate > 1:
            words.append(f"{self.accumulate} micro-batches")
        if self.checkpointing:
            words.append("checkpointing")
        return tuple(words)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for cache keys and reports."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "batch_given"}


def options(*, train: bool = False, inputs: Any = None, **settings: Any) -> Options:
    """`Options` from a user's keywords: ``train=True`` means ``phase="train"``; unknown keywords list near names."""
    known = (*(field.name for field in dataclasses.fields(Options) if field.name != "batch_given"), "train")
    for name in settings:
        if name not in known:
            raise unknown("option", name, known)
    if train:
        if settings.get("phase") not in (None, "inference", "train"):
            raise InputError(f"train=True contradicts phase={settings['phase']!r}", repair="give one of the two")
        settings["phase"] = "train"
    if inputs is not None:
        settings["inputs"] = parse_inputs(inputs)
    if settings.get("lora") is not None:
        settings["lora"] = parse_lora(settings["lora"])
    given = {name: value for name, value in settings.items() if value is not None}
    made = Options(**given, batch_given="batch" in given)
    if settings.get("optimizer") is not None and not made.trains:
        raise InputError(f"optimizer {made.optimizer} applies to training only", repair="add --train (train=True)")
    return made


def parse_inputs(inputs: Any) -> dict[str, InputSpec]:
    """``["x=8x3x224x224:float32"]``, or a mapping of name → (shape, dtype) or `InputSpec`, as `InputSpec` by name."""
    if isinstance(inputs, Mapping):
        specs: dict[str, InputSpec] = {}
        for name, value in inputs.items():
            if isinstance(value, InputSpec):
                specs[str(name)] = value
                continue
            try:
                shape, dtype = value if isinstance(value[0], (tuple, list)) else (value, "float32")
                specs[str(name)] = InputSpec(tuple(int(n) for n in shape), _dtype(dtype, f"input {name}"))
            except (TypeError, ValueError, IndexError) as error:
                raise InputError(
                    f"{value!r} is no shape", f"input {name}", 'give {"x": ((8, 3, 224, 224), "float32")}'
                ) from error
        return specs
    specs = {}
    for text in [inputs] if isinstance(inputs, str) else inputs:
        match = _INPUT.fullmatch(str(text).replace(" ", ""))
        if match is None:
            repair = "write e.g. --input x=8x3x224x224:float32"
            raise InputError(f"{str(text)[:60]!r} is not NAME=SHAPE:DTYPE", "--input", repair)
        dimensions = re.split("[x,]", match["shape"]) if match["shape"] else []
        if len(dimensions) > MOST_DIMENSIONS or any(len(n) > 18 for n in dimensions):
            raise InputError(f"{str(text)[:60]!r} is no sensible shape", "--input", "write e.g. --input x=8x3x224x224")
        shape = tuple(int(n) for n in dimensions)
        specs[match["name"]] = InputSpec(shape, _dtype(match["dtype"] or "float32", f"--input {match['name']}"))
    return specs


def _dtype(name: Any, where: str) -> str:
    dtype = str(name).removeprefix("torch.")
    dtype = DTYPE_SHORT.get(dtype, dtype)
    if dtype not in DTYPES:
        raise unknown(f"dtype ({where})", dtype, DTYPES)
    return dtype
