"""``foretell kv``: the KV cache of a model, engine by engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.app import app

if TYPE_CHECKING:
    from foretell.cost.kv_budget import Budget
    from foretell.errors import ForetellError
    from foretell.hardware import Device
    from foretell.workload.llm import LLMConfig

_CACHE = "The cache"
_ROOM = "The room for it"
#: Formats of published weights that engines for one user run as they are: of transformers its documentation's
#: quantization/finegrained_fp8 and mxfp4, of llama.cpp ggml/include/ggml.h (GGML_TYPE_MXFP4). Others are unpacked.
_AS_PUBLISHED = {"llama.cpp": ("mxfp4",), "transformers": ("fp8", "mxfp4")}


@app.command()
def kv(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="llm:NAME, a name of a shipped cache configuration, or a config.json.",
            show_default=False,
        ),
    ],
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Cached tokens of a sequence.", rich_help_panel=_CACHE)
    ] = 4096,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Sequences.", rich_help_panel=_CACHE)] = 1,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="FORMAT",
            help="bf16, fp8, q8_0, q4_0, …; K/V for llama.cpp.",
            rich_help_panel=_CACHE,
        ),
    ] = "auto",
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="vllm, sglang, trtllm, llama.cpp or transformers (all, side by side).",
            show_default=False,
            rich_help_panel=_CACHE,
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--engine-version",
            metavar="V",
            help="The engine's version, e.g. 0.11.0, b7900 or 2025-06-01.",
            show_default=False,
            rich_help_panel=_CACHE,
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option("--tp", metavar="N", help="GPUs that share the model.", rich_help_panel=_CACHE)
    ] = 1,
    block: Annotated[
        int | None,
        typer.Option("--block", metavar="N", help="Tokens of a page (the engine's own).", rich_help_panel=_CACHE),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="DEVICE",
            help="Also what the engine leaves for the cache there.",
            show_default=False,
            rich_help_panel=_ROOM,
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            "--share",
            metavar="X",
            help="Share of the device the engine takes (its own default).",
            rich_help_panel=_ROOM,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="FORMAT",
            help="Of the layers' matrices (as published, or bf16).",
            show_default=False,
            rich_help_panel=_ROOM,
        ),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            "--experts",
            metavar="FORMAT",
            help="Of routed experts' matrices (as --weights).",
            show_default=False,
            rich_help_panel=_ROOM,
        ),
    ] = None,
    json: opt.Json = False,
) -> None:
    """Bytes of the KV cache on one GPU as each engine lays it out, and the room it has."""
    from foretell import report
    from foretell.cli.terminal import show, show_text
    from foretell.errors import ForetellError, InfeasibleError, InputError, UnknownNameError
    from foretell.hardware import device
    from foretell.workload import kv as caches

    place = None if on is None else device(on)
    if place is None and (share is not None or weights is not None or experts is not None):
        raise InputError("--share, --weights and --experts say what is left on a device", repair="give --on DEVICE")
    if dtype.count("/") and engine is None:
        engine = "llama.cpp"  # the only one that stores keys and values apart
    if engine is None and version is not None:
        raise InputError("--engine-version is one engine's", repair="give --engine")
    shape = caches.shape(model)
    config = None if place is None else _config(model)
    if config is not None and experts is not None and config.moe is None:
        raise InputError(f"{config.name} has no experts", f"--experts {experts[:40]}", f"give --weights {experts[:40]}")
    found: list[caches.KVCache] = []
    budgets: list[Budget | ForetellError] = []
    formats: dict[str, str] = {}
    names = caches.engines() if engine is None else (engine,)
    ask: dict[str, Any] = {"version": version, "dtype": dtype, "tensor_parallel": tp}
    refused: UnknownNameError | None = None
    for name in names:
        try:
            found.append(caches.kv_cache(shape, tokens=tokens, batch=batch, engine=name, block=block, **ask))
        except UnknownNameError as error:  # a format this engine has not
            if engine is not None:
                raise
            refused = error
            continue
        if place is None or config is None:
            continue
        from foretell.cost.kv_budget import kv_budget, what_helps
        from foretell.simulate.serving.formats import refusal
        from foretell.simulate.serving.plan import ENGINES

        unserved = refusal("int8", place) if "int8" in (weights, experts) and name in ENGINES else None
        if unserved is not None:
            if engine is not None:
                option = "--weights" if weights == "int8" else "--experts"
                raise InputError(unserved.what, f"{option} int8", unserved.repair)
            budgets.append(InputError(f"not served: {unserved.what}", repair=unserved.repair))
            continue
        if weights is None and experts is None and config.published_weights:
            formats[name] = _published(config, place, name)
        stored = _stored(config, weights or formats.get(name), experts, 1 if name == "llama.cpp" else tp)
        asked: dict[str, Any] = {"tokens": tokens, "engine": name, "share": share, **ask, **stored}
        try:
            budgets.append(kv_budget(config, place, **asked))
        except InfeasibleError as error:
            if engine is not None:
                helps = what_helps(config, place, **asked)
                raise (InfeasibleError(error.message, "; ".join(helps)) if helps else error) from None
            budgets.append(InfeasibleError(error.message))
    if not found:
        assert refused is not None
        raise refused
    said = "" if config is None or not formats else _said(config, formats)
    if json:
        documents = [
            cache.to_dict() | ({"budget": _document(budgets[i], said)} if budgets else {})
            for i, cache in enumerate(found)
        ]
        show_text(report.json_text(documents if engine is None else documents[0]))
    elif engine is None:
        show(report.kv_table(found, budgets, "" if place is None else place.name, said))
    else:
        budget = budgets[0] if budgets else None
        assert not isinstance(budget, ForetellError)
        show(report.kv_view(found[0], budget, said))


def _config(model: str) -> LLMConfig:
    """The transformer whose weights and activations a budget needs."""
    from foretell.errors import InputError
    from foretell.workload import kv as caches
    from foretell.workload import llm

    name = model.removeprefix("llm:").removeprefix("hf:")
    if name.casefold() in caches.catalogue() and name.casefold() not in llm.catalogue():
        raise InputError(
            f"of {name} only the cache is known, not the weights", "--on", "leave --on out, or give a model of llm:"
        )
    return llm.config(name)


def _published(config: LLMConfig, place: Device, engine: str) -> str:
    """The format in which an engine runs a model's published weights on a device."""
    from foretell.plan.serving.space import runs

    published = config.published_weights
    whole = published in _AS_PUBLISHED.get(engine, (published,)) and runs(place, published)
    return published if whole else "bf16"


def _stored(config: LLMConfig, weights: str | None, experts: str | None, gpus: int) -> dict[str, Any]:
    """How weights of these formats lie in memory: types of their values, and what scales take on each GPU."""
    from foretell.errors import unknown
    from foretell.graph import DTYPES
    from foretell.simulate.serving.iteration.model import element_type
    from foretell.simulate.serving.iteration.sizes import dense_format
    from foretell.simulate.serving.plan import FORMATS
    from foretell.simulate.serving.room import scale_bytes

    for name in (weights, experts):
        if name is not None and name not in (*FORMATS, "fp4", *DTYPES):
            raise unknown("format of weights", name, (*FORMATS, "fp4"))
    dense, inner = weights or "bf16", experts or weights or "bf16"
    if experts is None:
        dense = dense_format(config, dense)
    return {
        "weight_dtype": element_type(dense),
        "expert_dtype": (element_type(inner) or ("bf16" if element_type(dense) else None)) if config.moe else None,
        "scale_bytes": scale_bytes(config, dense, inner, gpus),
    }


def _said(config: LLMConfig, formats: dict[str, str]) -> str:
    """In which formats engines have a model's published weights, in words."""
    published = config.published_weights
    only = config.moe is not None and published in ("mxfp4", "int4")
    unpacked = [name for name, format in formats.items() if format != published]
    if len(unpacked) == len(formats):
        return f"weights in 16 bits where they are published in {published}"
    return f"weights {'of the experts ' if only else ''}in {published}, as published" + (
        f"; in bf16 for {', '.join(unpacked)}" if unpacked else ""
    )


def _document(budget: Budget | ForetellError, said: str) -> Any:
    from foretell.errors import ForetellError

    if isinstance(budget, ForetellError):
        return str(budget)
    document = budget.to_dict()
    return document | {"notes": [*([said] if said else []), *document["notes"]]}
