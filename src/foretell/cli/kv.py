"""``foretell kv``: the KV cache of a model, engine by engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.app import app

if TYPE_CHECKING:
    from foretell.cost.kv_budget import Budget

_CACHE = "The cache"
_ROOM = "The room for it"


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
        typer.Option("--weights", metavar="DTYPE", help="Type of the layers' matrices (bf16).", rich_help_panel=_ROOM),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option("--experts", metavar="DTYPE", help="Type of routed experts' matrices.", rich_help_panel=_ROOM),
    ] = None,
    json: opt.Json = False,
) -> None:
    """Bytes of the KV cache on one GPU as each engine lays it out, and the room it has."""
    from foretell import report
    from foretell.cli.terminal import show, show_text
    from foretell.errors import InfeasibleError, InputError, UnknownNameError
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
    found: list[caches.KVCache] = []
    budgets: list[Budget | str] = []
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
        if place is not None:
            from foretell.cost.kv_budget import kv_budget, what_helps
            from foretell.simulate.serving.formats import refusal
            from foretell.simulate.serving.plan import ENGINES

            unserved = refusal("int8", place) if "int8" in (weights, experts) and name in ENGINES else None
            if unserved is not None:
                if engine is not None:
                    option = "--weights" if weights == "int8" else "--experts"
                    raise InputError(unserved.what, f"{option} int8", unserved.repair)
                budgets.append(unserved.what)
                continue
            room: dict[str, Any] = {"share": share, "weight_dtype": weights, "expert_dtype": experts}
            asked: dict[str, Any] = {"tokens": tokens, "engine": name, **ask, **room}
            try:
                budgets.append(kv_budget(_config(model), place, **asked))
            except InfeasibleError as error:
                if engine is not None:
                    helps = what_helps(_config(model), place, **asked)
                    raise (InfeasibleError(error.message, "; ".join(helps)) if helps else error) from None
                budgets.append(error.message)
    if not found:
        assert refused is not None
        raise refused
    if json:
        documents = [
            cache.to_dict() | ({"budget": _document(budgets[i])} if budgets else {}) for i, cache in enumerate(found)
        ]
        show_text(report.json_text(documents if engine is None else documents[0]))
    elif engine is None:
        show(report.kv_table(found, budgets))
    else:
        budget = budgets[0] if budgets else None
        assert not isinstance(budget, str)
        show(report.kv_view(found[0], budget))


def _config(model: str) -> Any:
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


def _document(budget: Budget | str) -> Any:
    return budget if isinstance(budget, str) else budget.to_dict()
