"""The cache shape of a public ``config.json``, also of models whose graphs `llm:` cannot build.

The file is data: nothing in it is run and `transformers` is not imported. Defaults are those that library documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretell.errors import InputError, unknown
from foretell.workload.kv.shape import CacheLayer, CacheShape, State, from_llm
from foretell.workload.llm.hf import MODEL_TYPES as LLM_TYPES
from foretell.workload.llm.hf import from_hf_config

_MOST_LAYERS = 10_000
_REQUIRED = object()


class _Config:
    """A ``config.json`` read key by key; errors name the key and the file."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def count(self, *keys: str, default: Any = _REQUIRED) -> int:
        """The first of `keys` that is given, a positive count."""
        value = next((self.data[key] for key in keys if self.data.get(key) is not None), default)
        if value is _REQUIRED:
            raise InputError(f"{keys[0]!r} is missing", self.where, "add it to the config")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise InputError(f"{keys[0]!r} is {str(value)[:40]!r}, want a count", self.where)
        return value

    @property
    def layers(self) -> int:
        """How many layers there are, of a number that can be walked through."""
        layers = self.count("num_hidden_layers")
        if not 1 <= layers <= _MOST_LAYERS:
            raise InputError(f"'num_hidden_layers' is {layers}", self.where, f"want 1 to {_MOST_LAYERS:,}")
        return layers

    def names(self, *keys: str) -> list[str] | None:
        """The first of `keys` that is given, a name for each layer."""
        value = next((self.data[key] for key in keys if self.data.get(key) is not None), None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise InputError(f"{keys[0]!r} is no list of names", self.where)
        self.same_length(keys[0], len(value))
        return value

    def same_length(self, key: str, entries: int) -> None:
        """Refuse a list that is not as long as there are layers, where their number is given."""
        layers = self.layers if self.data.get("num_hidden_layers") is not None else entries
        if entries != layers or entries > _MOST_LAYERS:
            raise InputError(f"{key!r} has {entries:,} entries for {layers:,} layers", self.where, "make them agree")

    def attention(self, kind: str = "full", window: int | None = None) -> CacheLayer:
        """One layer that keeps the keys and values of its KV heads."""
        heads = self.count("num_attention_heads")
        given = self.count("head_dim", default=0)
        if not given and not heads:
            raise InputError("'num_attention_heads' is 0", self.where, "give head_dim")
        dim = given or self.count("hidden_size") // heads
        return CacheLayer(1, kind, self.count("num_key_value_heads", default=heads), dim, dim, window)

    def by_name(self, names: Sequence[str], known: Mapping[str, CacheLayer | None]) -> list[CacheLayer | None]:
        """The layer each name stands for; None keeps nothing."""
        for name in names:
            if name not in known:
                raise unknown(f"kind of layer in {self.where}:", name[:40], tuple(known))
        return [known[name] for name in names]


def _every(period: int, layers: int, at: int | None = None) -> list[bool]:
    """Which of `layers` are each `period`-th one (the last of a period, or the one `at`). Raises InputError for 0."""
    if period < 1:
        raise InputError("a period of layers is 0", repair="give how many layers a pattern has")
    return [i % period == (period - 1 if at is None else at) for i in range(layers)]


def _gated_delta(c: _Config) -> CacheLayer:
    """Gated delta rule: a convolution over queries, keys and values, and a matrix for each value head."""
    keys = c.count("linear_num_key_heads") * c.count("linear_key_head_dim")
    heads, dim = c.count("linear_num_value_heads"), c.count("linear_value_head_dim")
    state = State(
        2 * keys + heads * dim,
        c.count("linear_conv_kernel_dim", default=4),
        heads * c.count("linear_key_head_dim") * dim,
        heads,
    )
    return CacheLayer(1, "recurrent", state=state)


def _mamba2(c: _Config, heads: int, dim: int, groups: int, size: int, kernel: int) -> CacheLayer:
    """Mamba-2 (arXiv 2405.21060): the convolution sees the inner width and both projections of each group."""
    return CacheLayer(1, "recurrent", state=State(heads * dim + 2 * groups * size, kernel, heads * dim * size, heads))


def _mamba1(inner: int, size: int, kernel: int) -> CacheLayer:
    """Mamba (arXiv 2312.00752): `size` states for each channel of the inner width."""
    return CacheLayer(1, "recurrent", state=State(inner, kernel, inner * size, inner))


def _plain(c: _Config) -> list[CacheLayer | None]:
    return [c.attention()] * c.layers


def _gemma4(c: _Config) -> list[CacheLayer | None]:
    """Full layers have heads of their own width and number; the last layers may reuse earlier ones' cache."""
    layers = c.layers
    kinds = c.names("layer_types") or ["full_attention" if full else "sliding_attention" for full in _every(6, layers)]
    sliding = c.attention("sliding", c.count("sliding_window", default=512))
    heads = sliding.kv_heads
    if c.data.get("attention_k_eq_v"):
        heads = c.count("num_global_key_value_heads", default=heads)
    dim = c.count("global_head_dim", default=512)
    known = {"sliding_attention": sliding, "full_attention": CacheLayer(1, "full", heads, dim, dim)}
    kept = len(kinds) - min(len(kinds), c.count("num_kv_shared_layers", default=0))
    return c.by_name(kinds, known)[:kept]


def _qwen3_next(c: _Config) -> list[CacheLayer | None]:
    """Three layers of gated delta rule to one of attention."""
    kinds = c.names("layer_types")
    if kinds is None:
        every = c.count("full_attention_interval", default=4)
        kinds = ["full_attention" if full else "linear_attention" for full in _every(every, c.layers)]
    return c.by_name(kinds, {"full_attention": c.attention(), "linear_attention": _gated_delta(c)})


def _jamba(c: _Config) -> list[CacheLayer | None]:
    inner = c.count("mamba_expand", default=2) * c.count("hidden_size")
    mamba = _mamba1(inner, c.count("mamba_d_state", default=16), c.count("mamba_d_conv", default=4))
    at = _every(c.count("attn_layer_period", default=8), c.layers, c.count("attn_layer_offset", default=4))
    return [c.attention() if full else mamba for full in at]


def _mamba(c: _Config) -> list[CacheLayer | None]:
    inner = c.count("intermediate_size", default=0) or c.count("expand", default=2) * c.count("hidden_size")
    return [_mamba1(inner, c.count("state_size", default=16), c.count("conv_kernel", default=4))] * c.layers


def _mamba2_alone(c: _Config) -> list[CacheLayer | None]:
    heads, dim = c.count("num_heads", default=128), c.count("head_dim", default=64)
    groups, size = c.count("n_groups", default=8), c.count("state_size", default=128)
    return [_mamba2(c, heads, dim, groups, size, c.count("conv_kernel", default=4))] * c.layers


def _named_mamba2(c: _Config) -> CacheLayer:
    """Mamba-2 under the names Bamba, Granite and Falcon-H1 use."""
    return _mamba2(
        c,
        c.count("mamba_n_heads", default=128),
        c.count("mamba_d_head", default=64),
        c.count("mamba_n_groups", default=1),
        c.count("mamba_d_state", default=256),
        c.count("mamba_d_conv", default=4),
    )


def _bamba(c: _Config) -> list[CacheLayer | None]:
    at = c.data.get("attn_layer_indices") or []
    if not isinstance(at, list) or not all(isinstance(i, int) for i in at):
        raise InputError("'attn_layer_indices' is no list of numbers", c.where)
    chosen = set(at)
    return [c.attention() if i in chosen else _named_mamba2(c) for i in range(c.layers)]


def _granite(c: _Config) -> list[CacheLayer | None]:
    kinds = c.names("layer_types", "layers_block_type") or ["mamba"] * c.layers
    attention, mamba = c.attention(), _named_mamba2(c)
    known = {"attention": attention, "full_attention": attention, "mamba": mamba, "linear_attention": mamba}
    return c.by_name(kinds, known)


def _nemotron_h(c: _Config) -> list[CacheLayer | None]:
    """One letter a layer: M is Mamba-2, * attention; - (MLP) and E (experts) keep nothing."""
    mamba = _mamba2(
        c,
        c.count("mamba_num_heads", default=128),
        c.count("mamba_head_dim", default=64),
        c.count("n_groups", default=8),
        c.count("ssm_state_size", default=128),
        c.count("conv_kernel", default=4),
    )
    attention = c.attention()
    pattern = c.data.get("hybrid_override_pattern")
    names = c.names("layers_block_type")
    if isinstance(pattern, str) and pattern:
        c.same_length("hybrid_override_pattern", len(pattern))
        return c.by_name(list(pattern), {"M": mamba, "*": attention, "-": None, "E": None})
    if names is None:
        raise InputError("'hybrid_override_pattern' is missing", c.where, "add it to the config")
    known = {"mamba": mamba, "linear_attention": mamba, "attention": attention, "full_attention": attention}
    return c.by_name(names, {**known, "mlp": None, "moe": None})


def _falcon_h1(c: _Config) -> list[CacheLayer | None]:
    """Attention and Mamba-2 side by side in every layer."""
    return [c.attention(), _named_mamba2(c)] * c.layers


def _llama4(c: _Config) -> list[CacheLayer | None]:
    layers = c.layers
    kinds = c.names("layer_types")
    if kinds is None:
        every = c.count("no_rope_layer_interval", default=4)
        kinds = ["full_attention" if full else "chunked_attention" for full in _every(every, layers)]
    chunked = c.attention("chunked", c.count("attention_chunk_size", default=8192))
    return c.by_name(kinds, {"full_attention": c.attention(), "chunked_attention": chunked})


def _lfm2(c: _Config) -> list[CacheLayer | None]:
    """Short convolutions between attention layers."""
    kinds = c.names("layer_types")
    if kinds is None:
        raise InputError("'layer_types' is missing", c.where, "add it to the config")
    state = State(c.count("hidden_size"), c.count("conv_L_cache", default=3))
    return c.by_name(kinds, {"full_attention": c.attention(), "conv": CacheLayer(1, "recurrent", state=state)})


def _mla(c: _Config) -> list[CacheLayer | None]:
    rank, rope = c.count("kv_lora_rank"), c.count("qk_rope_head_dim")
    layer = CacheLayer(
        1,
        "latent",
        c.count("num_attention_heads"),
        rank + rope,
        rank,
        expanded_key_dim=c.count("qk_nope_head_dim") + rope,
        expanded_value_dim=c.count("v_head_dim"),
    )
    return [layer] * c.layers


_TYPES: dict[str, Callable[[_Config], list[CacheLayer | None]]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
    "glm4_moe_lite": _mla,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "mamba": _mamba,
    "mamba2": _mamba2_alone,
    "minimax_m2": _plain,
    "nemotron_h": _nemotron_h,
    "qwen3_5": _qwen3_next,
    "qwen3_5_moe": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_next": _qwen3_next,
}

MODEL_TYPES: tuple[str, ...] = tuple(sorted({*_TYPES, *LLM_TYPES}))


def from_config(data: Any, name: str, where: str) -> CacheShape:
    """The cache shape of a parsed ``config.json``; a multimodal one gives its language model.

    Raises InputError naming a missing or odd key, UnknownNameError for a model type that is not known.
    """
    if not isinstance(data, Mapping):
        raise InputError("is not a JSON object", where, "give a config.json")
    text = data.get("text_config")
    kind = data.get("model_type")
    if isinstance(text, Mapping) and (kind in _TYPES or text.get("model_type") in _TYPES):
        data = {**text, "model_type": text.get("model_type", kind)}
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise unknown(f"model_type in {where}:", str(kind)[:60], MODEL_TYPES)
    if kind not in _TYPES:
        return from_llm(from_hf_config(data, name, where))
    counts: dict[CacheLayer, int] = {}
    for layer in _TYPES[kind](_Config(data, where)):
        if layer is not None:
            counts[layer] = counts.get(layer, 0) + 1
    if not counts:
        raise InputError("no layer keeps anything", where, "check layer_types")
    layers = tuple(replace(layer, layers=count) for layer, count in counts.items())
    return CacheShape(name, layers, where)
