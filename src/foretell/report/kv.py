"""KV caches for reading: one engine in full, or engines side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretell.cost.kv_budget import Budget
from foretell.errors import ForetellError, InfeasibleError
from foretell.report.text import Flow, count
from foretell.units import format_bytes
from foretell.workload.kv import KVCache

__all__ = ["kv_table", "kv_view"]


def _head(cache: KVCache) -> RenderableType:
    return Flow(
        f"{cache.tokens:,} tokens",
        count(cache.batch, "sequence"),
        f"tensor parallel {cache.tensor_parallel}" if cache.tensor_parallel > 1 else None,
    )


def kv_view(cache: KVCache, budget: Budget | None = None, weights: str = "") -> RenderableType:
    """What one engine's cache takes on one GPU, kind of layer by kind, and what it leaves room for.

    `weights` says in which format they are, where that is not as asked for.
    """
    parts = Table.grid(padding=(0, 2))
    parts.add_column()
    for _ in range(3):
        parts.add_column(justify="right")
    for part in cache.parts:
        held = f"{part.tokens:,} tokens each" if part.tokens else "a state each"
        parts.add_row(part.name, count(part.layers, "layer"), held, format_bytes(part.nbytes))
    parts.add_row(Text("all", style="bold"), "", "", Text(format_bytes(cache.nbytes), style="bold"))
    page = f" · pages of {count(cache.block, 'token')}" if cache.block > 1 else ""
    lines: list[RenderableType] = [
        Text(f"KV cache of {cache.model} in {cache.engine} {cache.version}, {cache.dtype}", style="bold"),
        _head(cache),
        Text(""),
        parts,
        Text(""),
        Text(f"{cache.bytes_per_token:,} B for each further token{page}"),
        *(Text(f"· {note}", style="dim") for note in cache.notes),
    ]
    if budget is not None:
        lines += [Text(""), *_budget(cache, budget, weights)]
    if cache.source:
        lines += [Text(""), Text(f"Sizes: {cache.source}", style="dim")]
    return Group(*lines)


def _budget(cache: KVCache, budget: Budget, weights: str) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, nbytes in (
        ("weights", budget.weights_bytes),
        ("activations of one iteration", budget.activations_bytes),
        ("context and code", budget.framework_bytes - budget.communication_bytes),
        *([("buffers between GPUs", budget.communication_bytes)] if budget.communication_bytes else []),
        ("left alone by the engine", budget.reserve_bytes),
    ):
        table.add_row(name, format_bytes(nbytes))
    table.add_row(Text("KV cache", style="bold"), Text(format_bytes(budget.kv_bytes), style="bold"))
    holds = f"holds {count(budget.sequences, 'sequence')} of {cache.tokens:,} tokens"
    if budget.tokens:
        holds += f", {budget.tokens:,} tokens in all"
    head = f"On {budget.device}, {format_bytes(budget.capacity_bytes)}, of which it takes {budget.share:.0%}"
    return [
        Text(head, style="bold"),
        table,
        Text(holds),
        *(Text(f"· {note}", style="dim") for note in (*([weights] if weights else []), *budget.notes)),
    ]


def kv_table(
    caches: Sequence[KVCache], budgets: Sequence[Budget | ForetellError] = (), device: str = "", weights: str = ""
) -> RenderableType:
    """Engines side by side; `budgets` on `device` in the same order, or why there is none.

    That is an InfeasibleError where nothing is left. `weights` says in which format they are, where that is not as
    asked for.
    """
    first = caches[0]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("engine", no_wrap=True)
    table.add_column("version", no_wrap=True)
    table.add_column("format", no_wrap=True)
    table.add_column("cache", justify="right", no_wrap=True)
    table.add_column("B/token", justify="right", no_wrap=True)
    if budgets:
        table.add_column("share", justify="right", no_wrap=True)
        table.add_column("room", justify="right", no_wrap=True)
        table.add_column("sequences", justify="right", no_wrap=True)
    problems = []
    for i, cache in enumerate(caches):
        row = [cache.engine, cache.version, cache.dtype, format_bytes(cache.nbytes), f"{cache.bytes_per_token:,}"]
        if budgets:
            budget = budgets[i]
            if isinstance(budget, ForetellError):
                row += ["–", "none", "0"] if isinstance(budget, InfeasibleError) else ["–"] * 3
                problems.append(f"{cache.engine}: {budget}")
            else:
                row += [f"{budget.share:.0%}", format_bytes(budget.kv_bytes), f"{budget.sequences:,}"]
        table.add_row(*row)
    notes = [weights] if weights else []
    notes += [f"{cache.engine}: {note}" for cache in caches for note in cache.notes] + problems
    return Group(
        Text(f"KV cache of {first.model} on one GPU" + (f", {device}" if device else ""), style="bold"),
        _head(first),
        Text(""),
        table,
        Text(""),
        *(Text(f"· {note}", style="dim") for note in notes),
    )
