"""Low-rank adapters and 4-bit weights as settings: what `Options.lora` and `Options.quantize` hold.

Conventions are those of the libraries that run them: ``peft`` for adapters (LoRA, arXiv 2106.09685) and
``bitsandbytes`` for 4-bit weights and 8-bit or paged optimizers (QLoRA, arXiv 2305.14314).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from foretell.errors import InputError, unknown

ALL_LINEAR = "all-linear"
MOST_RANK = 1 << 16

#: Formats of 4-bit weights: 16 levels placed by the normal distribution, or those of a 4-bit float. Equal in size.
QUANTIZED: tuple[str, ...] = ("nf4", "fp4")
# bitsandbytes and QLoRA's "double quantization": a scale for each 64 weights, itself kept in 8 bits, with an fp32
# scale for each 256 of those.
VALUES_PER_SCALE = 64
SCALES_PER_SCALE = 256


DEFAULT_TARGETS = ("q_proj", "v_proj")  # peft's for models like Llama


@dataclass(frozen=True, slots=True)
class LoRA:
    """Adapters of `rank` beside the linear layers named by `targets`; all else is frozen.

    A layer y = W x becomes y = W x + s·B (A x) with A (rank, in) and B (out, rank). A target is a module's name or the
    end of its path, as in peft; ``all-linear`` means every linear layer but the head and the routers of experts.
    """

    rank: int
    targets: tuple[str, ...] = DEFAULT_TARGETS

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 1 <= self.rank <= MOST_RANK:
            raise InputError(f"rank is {str(self.rank)[:40]}", "--lora", f"give a whole number from 1 to {MOST_RANK:,}")
        if not self.targets or not all(isinstance(name, str) and name for name in self.targets):
            raise InputError("targets names no layer", "--lora", "write e.g. targets=q_proj,v_proj")

    def choose(self, layers: Iterable[str], where: str) -> frozenset[str]:
        """Those of the linear `layers` (dotted paths) that get an adapter. Raises UnknownNameError for a target that
        none of them is called."""
        known = tuple(layers)
        if ALL_LINEAR in self.targets:
            return frozenset(known)
        chosen: set[str] = set()
        for target in self.targets:
            found = {name for name in known if name == target or name.endswith(f".{target}")}
            if not found:
                names = {name.rpartition(".")[2] for name in known}
                if self.targets == DEFAULT_TARGETS:
                    raise InputError(
                        f"{where} has no {target}, one of the targets where none is given", "--lora",
                        f"give targets= one or more of {', '.join((*sorted(names), ALL_LINEAR))}",
                    )
                raise unknown(f"LoRA target of {where}", target, (*sorted(names), ALL_LINEAR))
            chosen |= found
        return frozenset(chosen)

    def check(self, layer: str, outputs: int, inputs: int) -> None:
        """Refuse an adapter that would not be of low rank."""
        if self.rank > min(outputs, inputs):
            raise InputError(
                f"rank {self.rank} exceeds that of {layer}, a matrix of {outputs}×{inputs}", "--lora",
                f"give a rank of at most {min(outputs, inputs)}",
            )


def parse_lora(text: object) -> LoRA:
    """``rank=16,targets=q_proj,v_proj`` as `LoRA`; names without ``=`` continue the targets. A `LoRA` stays one.

    >>> parse_lora("rank=16,targets=q_proj,v_proj,o_proj")
    LoRA(rank=16, targets=('q_proj', 'v_proj', 'o_proj'))
    """
    if isinstance(text, LoRA):
        return text
    example = "write e.g. --lora rank=16,targets=q_proj,v_proj"
    fields: dict[str, list[str]] = {}
    key = ""
    for part in str(text).split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if equals:
            key = name
            if key not in ("rank", "targets"):
                raise unknown("LoRA setting", key[:40], ("rank", "targets"))
            if key in fields:
                raise InputError(f"{key} is given twice", "--lora", example)
            fields[key] = [value]
        elif key == "targets":
            fields[key].append(name)
        else:
            raise InputError(f"{name[:40]!r} belongs to no setting", "--lora", example)
    if "rank" not in fields:
        raise InputError("rank is missing", "--lora", example)
    rank = fields["rank"][0]
    if not (rank.isascii() and rank.isdigit() and len(rank) < 10):
        raise InputError(f"rank is {rank[:40]!r}", "--lora", f"give a whole number from 1 to {MOST_RANK:,}")
    return LoRA(int(rank), tuple(fields["targets"])) if "targets" in fields else LoRA(int(rank))


def packed_bytes(elements: int) -> int:
    """Bytes of a 4-bit matrix with its doubly quantised scales.

    >>> packed_bytes(1 << 20) / (1 << 20) == 0.5 + 1 / 64 + 4 / (64 * 256)
    True
    """
    return math.ceil(elements / 2) + scale_bytes(elements)


def scale_bytes(elements: int) -> int:
    """The part of `packed_bytes` that is scales."""
    scales = math.ceil(elements / VALUES_PER_SCALE)
    return scales + 4 * math.ceil(scales / SCALES_PER_SCALE)
