"""`LLMConfig`: the shape of a decoder-only transformer, and what follows from it alone.

Everything a cost needs and nothing else: no rotary base, no dropout, no token ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from foretell.errors import InputError, unknown

ACTIVATIONS: tuple[str, ...] = ("silu", "gelu", "gelu_tanh", "gelu_new", "relu", "swiglu_clamped")
NORMS: tuple[str, ...] = ("rms", "layer")
POSITIONS: tuple[str, ...] = ("rope", "learned", "alibi", "none")
QK_NORMS: tuple[str, ...] = ("none", "head", "full")
SCORINGS: tuple[str, ...] = ("softmax", "sigmoid", "softmax_after_topk")

# Where a layer's norms sit: before attention and MLP; after each, inside the residual; both; or one residual for
# attention and MLP side by side, behind one shared norm or one norm each.
BLOCKS: tuple[str, ...] = ("pre_norm", "post_norm", "sandwich", "parallel", "parallel_two_norms")

ATTENTION: tuple[str, ...] = ("full", "sliding")

#: Formats of published weights besides 16-bit ones. With ``int8`` ones go activations in INT8, with ``w8a16`` not.
WEIGHTS: tuple[str, ...] = ("fp8", "nvfp4", "mxfp4", "int8", "w8a16", "int4")

# Beyond any model there will be: sizes of matrices and of a whole model stay far below what 64 bits hold.
MOST_LAYERS, MOST_SIZE, MOST_TOKENS = 10_000, 10_000_000, 2**31
_TOKENS = ("context_length", "position_rows", "sliding_window")


@dataclass(frozen=True, slots=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are cached as one latent.

    `q_lora_rank` is 0 where queries are projected directly.
    """

    kv_lora_rank: int
    rope_head_dim: int
    nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts in place of an MLP, in layers from `first_dense` on, every `every`-th one.

    `intermediate` is one routed expert's width, `shared_intermediate` that of all shared experts together (0: none),
    `shared_gate` whether a sigmoid of the token scales the shared part (Qwen2-MoE). `router_fp32` says that the
    router runs in fp32 (DeepSeek).
    """

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    first_dense: int = 0
    every: int = 1
    router_bias: bool = False
    expert_bias: bool = False
    router_fp32: bool = False
    scoring: str = "softmax"
    renormalize: bool = True


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` equal layers: their attention window (None: full) and whether they route to experts."""

    layers: int
    window: int | None
    moe: bool
    name: str


@dataclass(frozen=True, slots=True)
class LLMConfig:
    """The shape of a decoder-only transformer. Sizes are in elements.

    `attention_pattern` is cycled over the layers (``("sliding", "full")``: every other layer sees `sliding_window`
    tokens only). `norm_fp32` says that an RMS norm multiplies by its weight before it goes back to the model's dtype
    (Gemma, gpt-oss). `rotary_dim` is how much of a head rotates (None: all), `position_rows` the rows of a learned
    position table, `fused_qkv` and `fused_gate_up` whether projections are one matrix. `source` names the repository
    of the public ``config.json``; `published_parameters` and `published_active_parameters` are what its authors
    state, where they do (`published_source` says in which words). `published_weights` is the format of its weights,
    where they are not of 16 bits ("fp8", "mxfp4" …; so in the experts only counts as well).

    Raises InputError where sizes do not fit together.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden / heads
    context_length: int | None = None
    gated: bool = True
    activation: str = "silu"
    norm: str = "rms"
    norm_bias: bool = False
    norm_fp32: bool = False
    block: str = "pre_norm"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: str = "none"
    fused_qkv: bool = False
    fused_gate_up: bool = False
    tied_embeddings: bool = False
    positions: str = "rope"
    rotary_dim: int | None = None
    position_rows: int = 0
    embedding_norm: bool = False
    embedding_scale: bool = False
    sliding_window: int | None = None
    attention_pattern: tuple[str, ...] = ("full",)
    attention_sinks: bool = False
    final_softcap: bool = False
    mla: MLA | None = None
    moe: MoE | None = None
    source: str = ""
    published_parameters: int | None = None
    published_active_parameters: int | None = None
    published_source: str = ""
    published_weights: str = ""

    def __post_init__(self) -> None:
        def fail(what: str, repair: str | None = None) -> InputError:
            return InputError(what, f"llm config {self.name!r}", repair)

        for field in ("layers", "hidden", "heads", "intermediate", "vocab"):
            most = MOST_LAYERS if field == "layers" else MOST_SIZE
            if not 1 <= getattr(self, field) <= most:
                raise fail(f"{field} is {str(getattr(self, field))[:40]}, want 1 to {most:,}")
        for part in (self, self.mla, self.moe):
            for item in () if part is None else dataclasses.fields(part):
                value = getattr(part, item.name)
                most = MOST_TOKENS if item.name in _TOKENS else MOST_SIZE
                if isinstance(value, int) and not item.name.startswith("published") and value > most:
                    raise fail(f"{item.name} is {str(value)[:40]}, want at most {most:,}")
        if not self.head_dim:
            if self.hidden % self.heads:
                raise fail(f"hidden {self.hidden} is no multiple of heads {self.heads}", "give head_dim")
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise fail(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        for field, names in (
            ("activation", ACTIVATIONS), ("norm", NORMS), ("positions", POSITIONS), ("qk_norm", QK_NORMS),
            ("block", BLOCKS),
        ):
            if getattr(self, field) not in names:
                raise unknown(f"{field} of llm config {self.name!r},", getattr(self, field), names)
        if self.published_weights and self.published_weights not in WEIGHTS:
            raise unknown(f"published_weights of llm config {self.name!r},", self.published_weights, WEIGHTS)
        for kind in self.attention_pattern:
            if kind not in ATTENTION:
                raise unknown(f"attention_pattern entry of llm config {self.name!r},", kind, ATTENTION)
        if not self.attention_pattern:
            raise fail("attention_pattern is empty", "leave it out for full attention in every layer")
        if "sliding" in self.attention_pattern and not self.sliding_window:
            raise fail("attention_pattern has sliding layers and sliding_window is missing", "give sliding_window")
        if self.positions == "learned" and not self.position_rows:
            raise fail("learned positions and position_rows is missing", "give the rows of the position table")
        moe = self.moe
        if moe is not None:
            if moe.scoring not in SCORINGS:
                raise unknown(f"moe.scoring of llm config {self.name!r},", moe.scoring, SCORINGS)
            if not 1 <= moe.top_k <= moe.experts:
                raise fail(f"moe.top_k {moe.top_k} is not between 1 and moe.experts {moe.experts}")

    @property
    def query_dim(self) -> int:
        """Elements of one query or key head."""
        return self.head_dim if self.mla is None else self.mla.nope_head_dim + self.mla.rope_head_dim

    @property
    def value_dim(self) -> int:
        """Elements of one value head."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers as groups of equal ones, in order of first appearance."""
        return _groups(self)

    @property
    def parameters(self) -> int:
        """Elements of all weights, tied ones once."""
        from foretell.workload.llm.weights import count_parameters

        return count_parameters(self)

    @property
    def active_parameters(self) -> int:
        """Weights one token meets: all but the routed experts it is not sent to (embeddings included)."""
        from foretell.workload.llm.weights import count_parameters

        return count_parameters(self, active=True)

    def replace(self, **changes: Any) -> LLMConfig:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)


def layer_kinds(config: LLMConfig) -> list[tuple[int | None, bool]]:
    """Attention window (None: full) of each layer, and whether it routes to experts, from the first layer on."""
    kinds = []
    for layer in range(config.layers):
        sliding = config.attention_pattern[layer % len(config.attention_pattern)] == "sliding"
        moe = config.moe is not None and layer >= config.moe.first_dense and (layer + 1) % config.moe.every == 0
        kinds.append((config.sliding_window if sliding else None, moe))
    return kinds


@lru_cache(maxsize=256)
def _groups(config: LLMConfig) -> tuple[LayerGroup, ...]:
    counts: dict[tuple[int | None, bool], int] = {}
    for key in layer_kinds(config):
        counts[key] = counts.get(key, 0) + 1
    several_windows = len({window for window, _ in counts}) > 1
    several_mlps = len({moe for _, moe in counts}) > 1
    return tuple(
        LayerGroup(count, window, moe, "layers" + "".join(
            f".{label}" for label, wanted in (
                ("full" if window is None else "sliding", several_windows),
                ("experts" if moe else "dense", several_mlps),
            ) if wanted
        ))
        for (window, moe), count in counts.items()
    )


def config_from_mapping(data: Mapping[str, Any], name: str, where: str) -> LLMConfig:
    """An `LLMConfig` from plain data (a TOML table). Raises errors that name the key."""
    fields = {**data}
    for key, part in (("mla", MLA), ("moe", MoE)):
        if key in fields:
            fields[key] = _build(part, fields[key], f"{where}: [{key}]")
    fields.setdefault("name", name)
    config: LLMConfig = _build(LLMConfig, fields, where)
    return config


def _build(kind: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise InputError("is not a table", where)
    known = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            raise unknown(f"key in {where}:", key, known)
        values[key] = _checked(str(known[key].type), key, value, where)
    for field in known.values():
        if field.default is dataclasses.MISSING and field.name not in values:
            raise InputError(f"{field.name!r} is missing", where)
    return kind(**values)


def _checked(annotation: str, key: str, value: Any, where: str) -> Any:
    """`value` if it is of the annotated type; a list becomes a tuple."""
    if annotation.startswith("tuple"):
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise InputError(f"{key!r} is {value!r}, want a list of strings", where)
        return tuple(value)
    if annotation.startswith("bool") and not isinstance(value, bool):
        raise InputError(f"{key!r} is {value!r}, want true or false", where)
    if annotation.startswith("str") and not isinstance(value, str):
        raise InputError(f"{key!r} is {value!r}, want a string", where)
    if annotation.startswith("int") and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InputError(f"{key!r} is {value!r}, want a count", where)
    return value
