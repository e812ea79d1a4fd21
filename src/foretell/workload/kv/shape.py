"""`CacheShape`: what each layer of a model keeps between tokens, before any engine lays it out."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.errors import InputError
from foretell.workload.llm.config import LLMConfig

KINDS: tuple[str, ...] = ("full", "sliding", "chunked", "latent", "recurrent")


@dataclass(frozen=True, slots=True)
class State:
    """The recurrent state of one layer and sequence: past inputs of a convolution, and a matrix.

    `channels` and `kernel` are the convolution's; `matrix` is in elements, of `heads` heads, among which tensor
    parallelism divides both.
    """

    channels: int
    kernel: int
    matrix: int = 0
    heads: int = 1

    @property
    def convolution(self) -> int:
        """Elements of the inputs still needed: all but the newest of a kernel's."""
        return self.channels * max(0, self.kernel - 1)


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """`layers` equal layers and what one of them keeps.

    ``full`` keeps keys and values of every token: `kv_heads` × (`key_dim` + `value_dim`) elements; ``sliding`` of the
    last `window` tokens, ``chunked`` of the current chunk of `window` tokens; ``latent`` (MLA) one latent of
    `key_dim` elements a token, of which the first `value_dim` serve as value, and `kv_heads`, `expanded_key_dim`,
    `expanded_value_dim` say what it expands to; ``recurrent`` a `state` a sequence and nothing a token.
    """

    layers: int
    kind: str
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    expanded_key_dim: int = 0
    expanded_value_dim: int = 0
    state: State | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"layer kind {self.kind!r} is none of {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The layers of a model that keep something, equal ones together, and where that is known from."""

    name: str
    layers: tuple[CacheLayer, ...]
    source: str = ""

    def __post_init__(self) -> None:
        for layer in self.layers:
            sizes = (layer.layers, layer.kv_heads, layer.key_dim, layer.value_dim, layer.window or 0)
            if any(not 0 <= size < 2**31 for size in sizes):
                raise InputError("a size below 0 or beyond 2³¹", self.name, "check its configuration")

    def of(self, *kinds: str) -> tuple[CacheLayer, ...]:
        """The layers of these kinds."""
        return tuple(layer for layer in self.layers if layer.kind in kinds)

    @property
    def hybrid(self) -> bool:
        """Whether layers keep different things."""
        return len({(layer.kind, layer.window) for layer in self.layers}) > 1


def from_llm(config: LLMConfig) -> CacheShape:
    """The shape of a parametric transformer."""
    counts: dict[int | None, int] = {}
    for group in config.groups:
        counts[group.window] = counts.get(group.window, 0) + group.layers
    mla = config.mla
    if mla is not None:
        latent = mla.kv_lora_rank + mla.rope_head_dim
        layer = CacheLayer(
            config.layers,
            "latent",
            config.heads,
            latent,
            mla.kv_lora_rank,
            expanded_key_dim=mla.nope_head_dim + mla.rope_head_dim,
            expanded_value_dim=mla.v_head_dim,
        )
        return CacheShape(config.name, (layer,), config.source)
    return CacheShape(
        config.name,
        tuple(
            CacheLayer(
                count,
                "full" if window is None else "sliding",
                config.kv_heads,
                config.head_dim,
                config.head_dim,
                window,
            )
            for window, count in counts.items()
        ),
        config.source,
    )
