"""The family of engines: one problem, one signature, one registry."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from foretell.errors import InputError, unknown
from foretell.workload.kv.shape import CacheLayer, CacheShape

# Element formats of a cache: (elements of a block, bytes of a block). Block formats of ggml: ggml-common.h, block_q*;
# nvfp4 and fp4: one fp8 scale for 16 values (NVIDIA, "Introducing NVFP4", 2025).
FORMATS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "fp32": (1, 4),
        "bf16": (1, 2),
        "fp16": (1, 2),
        "fp8": (1, 1),
        "int8": (1, 1),
        "nvfp4": (16, 9),
        "fp4": (16, 9),
        "q8_0": (32, 34),
        "q5_1": (32, 24),
        "q5_0": (32, 22),
        "q4_1": (32, 20),
        "q4_0": (32, 18),
        "iq4_nl": (32, 18),
    }
)
_ALIASES = {
    "auto": "bf16",
    "float32": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "f16": "fp16",
    "half": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def row_bytes(elements: int, format_: str) -> int:
    """Bytes of a row of `elements` in a cache format; the last block of a row is whole."""
    block, size = FORMATS[format_]
    return math.ceil(elements / block) * size


def format_of(name: str, engine: str, known: tuple[str, ...]) -> str:
    """The cache format of this name, if `engine` has it. Raises UnknownNameError with the engine's formats."""
    folded = name.casefold()
    folded = _ALIASES.get(folded, folded)
    if folded not in FORMATS:
        raise unknown("cache format", name, FORMATS)
    if folded not in known:
        raise unknown(f"cache format of {engine}", name, known)
    return folded


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of an engine.

    `tokens` are those cached for each of `batch` sequences. `dtype` is a format of `FORMATS`, or ``K/V`` where an
    engine stores keys and values differently. `block` is the page in tokens (None: the engine's own), `step` the
    tokens the engine takes in one iteration (None: its own).
    """

    tokens: int
    batch: int
    dtype: str
    version: tuple[int, ...]
    tensor_parallel: int = 1
    block: int | None = None
    step: int | None = None

    def heads(self, layer: CacheLayer) -> int:
        """KV heads on one GPU: divided among them, and replicated once there are more GPUs than heads.

        Raises InputError where one number is no multiple of the other.
        """
        heads, gpus = layer.kv_heads, self.tensor_parallel
        if heads % gpus and (gpus % heads or layer.kind == "latent"):
            raise InputError(f"{heads} heads cannot be shared by {gpus} GPUs", "--tp", "give a divisor or a multiple")
        return max(1, heads // gpus)


@dataclass(frozen=True, slots=True)
class Part:
    """What equal layers take on one GPU: `tokens` held for each sequence (0 for a state), and all `nbytes`."""

    name: str
    layers: int
    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Laid:
    """An engine's answer: `parts` on one GPU, what one more token of a sequence takes in the engine's accounting,
    the tokens of a page, and what to know about it."""

    parts: tuple[Part, ...]
    bytes_per_token: int
    block: int = 1
    notes: tuple[str, ...] = ()


def token_bytes(layer: CacheLayer, ask: Ask, *, latent: bool = True) -> int:
    """Bytes a token takes in one layer on one GPU: its KV heads' rows; MLA's latent, replicated, or what it becomes."""
    keys, values = layer.key_dim, layer.value_dim
    if layer.kind == "latent":
        ask.heads(layer)  # queries are shared among GPUs even so
        if latent:
            return row_bytes(keys, ask.dtype)
        keys, values = layer.expanded_key_dim, layer.expanded_value_dim
    return ask.heads(layer) * (row_bytes(keys, ask.dtype) + row_bytes(values, ask.dtype))


def state_part(layer: CacheLayer, ask: Ask, convolution_bytes: int = 2, matrix_bytes: int = 2) -> Part:
    """What recurrent layers keep on one GPU, given the bytes of an element of each state."""
    one = state_bytes(layer, ask, convolution_bytes, matrix_bytes)
    return Part(kind_name(layer), layer.layers, 0, layer.layers * one * ask.batch)


def state_bytes(layer: CacheLayer, ask: Ask, convolution_bytes: int = 2, matrix_bytes: int = 2) -> int:
    """Bytes of one layer's and sequence's state on one GPU; tensor parallelism divides it among heads."""
    assert layer.state is not None
    share = min(ask.tensor_parallel, layer.state.heads)
    convolution, matrix = (math.ceil(size / share) for size in (layer.state.convolution, layer.state.matrix))
    return convolution_bytes * convolution + matrix_bytes * matrix


Engine = Callable[[CacheShape, Ask], Laid]
Version = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Member:
    """A registered engine: how it lays a cache out, the formats it has, and the version assumed unless one is given."""

    name: str
    lay: Engine
    formats: tuple[str, ...]
    version: str
    parse: Version
    summary: str
    sources: tuple[str, ...]


_MODULES = ("vllm", "sglang", "trtllm", "llama_cpp", "transformers")
_members: dict[str, Member] = {}


def dotted(version: str) -> tuple[int, ...]:
    """``v0.11.2`` as (0, 11, 2); what follows a third number or a letter is ignored. Raises InputError."""
    numbers = []
    for piece in version.casefold().removeprefix("v").split(".")[:3]:
        digits = piece[: len(piece) - len(piece.lstrip("0123456789"))]
        if not digits or len(digits) > 6:
            break
        numbers.append(int(digits))
        if digits != piece:
            break
    if not numbers or numbers[0] > 99:
        raise InputError(f"{version[:40]!r} is no version", "--engine-version", "write e.g. 0.11.0")
    return tuple(numbers)


def engine(
    name: str, *, formats: tuple[str, ...], version: str, parse: Version = dotted, sources: tuple[str, ...] = ()
) -> Callable[[Engine], Engine]:
    """Register an engine; the first line of its docstring is its summary. Refuses a second one of the name."""

    def register(lay: Engine) -> Engine:
        if name in _members:
            raise ValueError(f"engine {name!r} is registered already")
        summary = (lay.__doc__ or "").strip().partition("\n")[0]
        _members[name] = Member(name, lay, formats, version, parse, summary, sources)
        return lay

    return register


@cache
def _discover() -> None:
    package = __name__.rpartition(".")[0]
    for module in _MODULES:
        importlib.import_module(f"{package}.{module}")


def engines() -> tuple[str, ...]:
    """Names of the engines."""
    _discover()
    return tuple(_members)


def member(name: str) -> Member:
    """The engine of this name. Raises UnknownNameError with near names."""
    _discover()
    folded = name.casefold().replace("_", "-")
    folded = {"llamacpp": "llama.cpp", "llama-cpp": "llama.cpp", "tensorrt-llm": "trtllm", "hf": "transformers"}.get(
        folded, folded
    )
    if folded not in _members:
        raise unknown("engine", name, tuple(_members))
    return _members[folded]


def kind_name(layer: CacheLayer) -> str:
    """What a report calls the layers."""
    if layer.kind == "sliding":
        return f"sliding window of {layer.window:,}"
    if layer.kind == "chunked":
        return f"chunks of {layer.window:,}"
    return {"full": "full attention", "latent": "latent (MLA)", "recurrent": "recurrent state"}[layer.kind]
