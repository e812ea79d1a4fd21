"""`kv_cache` and `kv_cache_bytes`: what a cache takes on one GPU, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foretell import documents
from foretell.errors import InputError, unknown
from foretell.workload import llm
from foretell.workload.kv.family import Ask, Member, Part, format_of, member
from foretell.workload.kv.hf import from_config
from foretell.workload.kv.shape import CacheShape, from_llm

_FOLDER = Path(__file__).parent / "configs"
_ALSO_CALLED = {"deepseek-v2-lite-16b": "deepseek-v2-lite"}
_MOST = 2**40  # tokens, sequences
_MOST_GPUS = 100_000


@dataclass(frozen=True, slots=True)
class KVCache:
    """A cache on one GPU.

    `parts` are its layers by kind and sum to `nbytes`. `bytes_per_token` is what one more token of a sequence takes
    in the long run, in the engine's accounting: layers that have filled their window or keep a state add nothing.
    """

    model: str
    engine: str
    version: str
    dtype: str
    tokens: int
    batch: int
    tensor_parallel: int
    parts: tuple[Part, ...]
    bytes_per_token: int
    block: int
    notes: tuple[str, ...]
    source: str

    @property
    def nbytes(self) -> int:
        """All bytes on one GPU."""
        return sum(part.nbytes for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "schema": "foretell.kv/1",
            "model": self.model,
            "engine": self.engine,
            "version": self.version,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "batch": self.batch,
            "tensor_parallel": self.tensor_parallel,
            "bytes": self.nbytes,
            "bytes_per_token": self.bytes_per_token,
            "block_tokens": self.block,
            "parts": [
                {"name": part.name, "layers": part.layers, "tokens": part.tokens, "bytes": part.nbytes}
                for part in self.parts
            ],
            "notes": list(self.notes),
            "source": self.source,
        }


@cache
def catalogue() -> tuple[str, ...]:
    """Names of models whose cache is known: those of `llm:` and the shipped cache configurations, sorted."""
    return tuple(sorted({*llm.catalogue(), *(path.stem for path in _FOLDER.glob("*.json"))}))


def shape(workload: str | llm.LLMConfig | CacheShape) -> CacheShape:
    """What a model keeps: of a name (``llm:`` before it is ignored), a ``config.json``, an `LLMConfig`.

    Raises UnknownNameError with near names; InputError naming file and key.
    """
    if isinstance(workload, CacheShape):
        return workload
    if isinstance(workload, llm.LLMConfig):
        return from_llm(workload)
    name = workload.removeprefix("llm:").removeprefix("hf:")
    name = _ALSO_CALLED.get(name.casefold(), name)
    if name.endswith(".json") or "/" in name:
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        return from_config(documents.read_json(path, "config.json"), path.parent.name or "model", str(path))
    if name.endswith(".toml") or name.casefold() in llm.catalogue():
        return from_llm(llm.config(name))
    folded = name.casefold()
    if folded not in catalogue():
        raise unknown("model", name[:80], catalogue())
    data = documents.read_json(_FOLDER / f"{folded}.json", "config.json")
    found = from_config(data, folded, f"{folded}.json")
    return CacheShape(folded, found.layers, str(data.get("_source", "")))


def kv_cache(
    workload: str | llm.LLMConfig | CacheShape,
    *,
    tokens: int,
    batch: int = 1,
    dtype: str = "auto",
    engine: str = "vllm",
    version: str | None = None,
    tensor_parallel: int = 1,
    block: int | None = None,
    step: int | None = None,
) -> KVCache:
    """The cache of `batch` sequences of `tokens` tokens each, on one of `tensor_parallel` GPUs.

    `dtype` is a format of the engine (``auto``: the model's bf16; fp16 in llama.cpp, where ``K/V`` sets keys and
    values apart); `version` the engine's (None: a recent one, see `kv.engine(name).version`); `block` the page in
    tokens, `step` the tokens of one iteration, where they are not the engine's own.
    Raises UnknownNameError and InputError.
    """
    for what, given, kinds in (
        ("the model", workload, (str, llm.LLMConfig, CacheShape)),
        ("engine", engine, (str,)),
        ("dtype", dtype, (str,)),
        ("version", version, (str, type(None))),
    ):
        if not isinstance(given, kinds):
            raise InputError(f"{what} is {str(given)[:40]!r}, a {type(given).__name__}", repair="give it as text")
    chosen = member(engine)
    for what, value, most in (
        ("tokens", tokens, _MOST),
        ("batch", batch, _MOST),
        ("tensor_parallel", tensor_parallel, _MOST_GPUS),
        ("block", 1 if block is None else block, 2**20),
        ("step", 1 if step is None else step, _MOST),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise InputError(f"{what} is {str(value)[:40]}", repair=f"give a number from 1 to {most:,}")
    stored = _dtype(dtype, chosen)
    used = chosen.version if version is None else version
    model = shape(workload)
    laid = chosen.lay(model, Ask(tokens, batch, stored, chosen.parse(used), tensor_parallel, block, step))
    return KVCache(
        model.name,
        chosen.name,
        used,
        stored,
        tokens,
        batch,
        tensor_parallel,
        laid.parts,
        laid.bytes_per_token,
        laid.block,
        laid.notes,
        model.source,
    )


def _dtype(dtype: str, engine: Member) -> str:
    keys, slash, values = dtype.partition("/")
    if slash and engine.name != "llama.cpp":
        raise InputError(f"{engine.name} stores keys and values alike", f"dtype {dtype[:40]!r}", "give one format")
    if engine.name == "llama.cpp" and keys == "auto":
        keys = "fp16"
    if slash and not (keys and values):
        raise InputError(f"dtype {dtype[:40]!r} lacks a side", "--dtype", "write KEYS/VALUES, e.g. q8_0/q4_0")
    formats = [format_of(one, engine.name, engine.formats) for one in ((keys, values) if slash else (keys,))]
    return "/".join(formats) if slash else formats[0]


def kv_cache_bytes(workload: str | llm.LLMConfig | CacheShape, **ask: Any) -> int:
    """Bytes of `kv_cache` on one GPU; the same arguments.

    >>> kv_cache_bytes("llm:llama-3.1-8b", tokens=4096, batch=8, engine="vllm")
    4294967296
    >>> kv_cache_bytes("llm:llama-3.1-8b", tokens=4096, engine="llama.cpp", dtype="q8_0")
    285212672
    """
    return kv_cache(workload, **ask).nbytes
