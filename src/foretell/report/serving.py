"""A simulated service for reading: its card, and its document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretell.hardware.device import Device
from foretell.report.text import UNKNOWN, Bar, Flow, Framed, add_row, count, rate, share
from foretell.simulate.serving.engine.served import Served
from foretell.simulate.serving.metrics import Metrics, Slo
from foretell.simulate.serving.nanoflow import Found
from foretell.simulate.serving.offload import NamedTier
from foretell.simulate.serving.plan import ServingPlan
from foretell.simulate.serving.refusals import Refusal, refusals
from foretell.simulate.serving.requests import Requests
from foretell.units import format_bytes, format_energy, format_money, format_power, format_time
from foretell.workload.llm.config import LLMConfig

__all__ = ["SCHEMA", "Service", "service_card"]

SCHEMA = "foretell.serving/1"
#: Columns of latencies that are shown; all are in the document.
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Service:
    """A model that was served in a simulation, with everything that is said of it.

    `where` is the machine as it was named, `load` how requests came, in words; `kv_capacity_tokens`, `kv_bytes` and
    `weights_bytes` are of one rank's device. `price_usd_per_h` is of one device, None: unknown. `scheduler` is the
    policy that was followed, `nanoflow` the pipeline of nano-batches if there is one, `tiers` where caches are kept
    outside the devices, with the tokens loaded from each, and whether iterations waited for that.
    """

    config: LLMConfig
    device: Device
    where: str
    plan: ServingPlan
    load: str
    requests: Requests
    served: Served
    metrics: Metrics
    slo: Slo | None
    kv_capacity_tokens: int
    kv_bytes: float
    weights_bytes: float
    price_usd_per_h: float | None
    seed: int
    scheduler: str = ""
    nanoflow: Found | None = None
    tiers: tuple[NamedTier, ...] = ()
    loaded_tokens: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    blocking_loads: bool = False
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> list[Refusal]:
        """The requests of the time that the figures are about that were refused, by reason."""
        since, until = self.metrics.since_s, self.metrics.until_s
        arrival = self.served.arrival_s
        return refusals(self.served, self.requests, self.plan, (arrival >= since) & (arrival <= until))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, schema ``foretell.serving/1``."""
        one, served = self.metrics, self.served
        return {
            "schema": SCHEMA,
            "workload": self.config.name,
            "parameters": self.config.parameters,
            "machine": self.where,
            "device": self.device.name,
            "devices": self.plan.devices,
            "plan": self.plan.to_dict(),
            "scheduler": self.scheduler or self.plan.engine,
            "nanoflow": None if self.nanoflow is None else {
                "nano_batches": self.nanoflow.pipeline.nano_batches,
                "layer_s": self.nanoflow.layer_s,
                "sequential_s": self.nanoflow.sequential_s,
                "lower_bound_s": self.nanoflow.interference_bound_s,
            },
            "seed": self.seed,
            "load": {
                "kind": self.load,
                "requests": len(self.requests),
                "input_tokens": _lengths(self.requests.input_tokens),
                "output_tokens": _lengths(self.requests.output_tokens),
                "about": dict(self.requests.about),
                "skipped": dict(self.requests.skipped),
            },
            "since_s": one.since_s,
            "until_s": one.until_s,
            "requests": one.requests,
            "finished": one.finished,
            "refused": dict(one.refused),
            "first_refused": [
                {"reason": who.reason, "request": who.request, "row": who.row, "input_tokens": who.input_tokens,
                 "output_tokens": who.output_tokens, "limit_tokens": who.limit_tokens}
                for who in self.refused
            ],
            "latency_s": {name: dict(values) for name, values in one.latency_s.items()},
            "throughput": {
                "requests_per_s": one.requests_per_s,
                "input_tokens_per_s": one.input_tokens_per_s,
                "output_tokens_per_s": one.output_tokens_per_s,
                "output_tokens_per_s_per_device": one.output_tokens_per_s_per_device,
            },
            "slo": None if self.slo is None or one.attainment is None else {
                "limits_s": self.slo.limits,
                "attainment": one.attainment,
                "attainment_by": dict(one.attainment_by),
                "goodput_per_s": one.goodput_per_s,
            },
            "batch": {"running": one.running, "waiting": one.waiting, "busy": one.busy,
                      "iterations": int(served.runs.iterations.sum(dtype=np.int64))},
            "kv": {
                "capacity_tokens": self.kv_capacity_tokens,
                "capacity_bytes": self.kv_bytes,
                "mean": one.kv_mean,
                "peak": one.kv_peak,
                "preemptions": one.preemptions,
                "prefix_cached": one.cached_share,
                "load": "blocking" if self.blocking_loads else "async",
                "tiers": [
                    {"name": tier.name, "capacity_bytes": tier.capacity_bytes, "bytes_per_s": tier.bytes_per_s,
                     "latency_s": tier.latency_s, "own_links": tier.own_links,
                     "loaded_tokens": self.loaded_tokens.get(tier.name, 0)}
                    for tier in self.tiers
                ],
            },
            "weights_bytes": self.weights_bytes,
            "bound": dict(one.bound),
            "queue": dict(one.queue),
            "energy_j": one.energy_j,
            "power_w": one.power_w,
            "energy_per_output_token_j": one.energy_per_output_token_j,
            "usd_per_h": None if self.price_usd_per_h is None else self.price_usd_per_h * self.plan.devices,
            "cost_usd": one.cost_usd,
            "usd_per_million_output_tokens": one.usd_per_million_output_tokens,
            "usd_per_million_tokens": one.usd_per_million_tokens,
            "notes": list(self.notes),
        }  # fmt: skip


def _lengths(tokens: Any) -> dict[str, float]:
    median, late = np.percentile(tokens, (50, 99))
    return {"mean": float(tokens.mean()), "p50": float(median), "p99": float(late), "max": int(tokens.max())}


def service_card(found: Service) -> RenderableType:
    """The whole of a service, for `rich.print`."""
    one, plan = found.metrics, found.plan
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(ratio=1)

    def add(name: str, *lines: RenderableType) -> None:
        add_row(rows, name, Group(*lines))

    def gap() -> None:
        add_row(rows, "", "")

    add("Plan", Flow(*degrees(plan)), Flow(*settings(plan), *policies(found)))
    add("Load", *(Flow(*line) for line in load_lines(found)))
    gap()
    add("Latency", latency_table(one.latency_s))
    if found.slo is not None and one.attainment is not None:
        kept = Text.assemble((kept_text(one.attainment), "bold"), " of requests keep it")
        add("Objective", kept, Flow(*limits(found)))
    gap()
    add("Throughput", Flow(
        Text(f"{rate(one.output_tokens_per_s)} output tokens/s", style="bold"),
        f"{rate(one.output_tokens_per_s_per_device)} a GPU" if plan.devices > 1 else None,
        f"{rate(one.input_tokens_per_s)} input tokens/s", f"{rate(one.requests_per_s)} requests/s",
    ))  # fmt: skip
    add("Batch", Flow(
        f"{one.running:,.1f} running and {one.waiting:,.1f} waiting on average", f"busy {share(one.busy)} of the time"
    ))
    grid = Table.grid(padding=(0, 2))
    add_row(grid, f"{share(one.kv_mean)} on average", Bar(one.kv_mean, 16), f"{share(one.kv_peak)} at most")
    add("KV cache", grid, Flow(*kv_lines(found)))
    gap()
    if one.bound:
        add("Bound by", _bars(one.bound))
    add("Waiting for", _bars(one.queue) if one.queue else Text("nothing: no request waited for another"))
    gap()
    add("Energy", Flow(*energy_lines(one)))
    add("Cost", Flow(*cost_lines(found)))
    gap()
    add("Left out", *(Text(line) for line in left_out(found)))
    if notes := notes_of(found):
        add("Notes", *(Text(note) for note in notes))
    return Framed(f"llm:{found.config.name} · served by {plan.engine} on {found.where}", rows,
                  count(plan.devices, "device"))  # fmt: skip


def latency_table(latency_s: Mapping[str, Mapping[str, float]]) -> Table:
    """Latencies in rows, their mean, percentiles and largest in columns."""
    columns = [name for name in next(iter(latency_s.values())) if name != "min"]
    shown = columns if len(columns) <= _SHOWN else [*columns[: _SHOWN - 1], columns[-1]]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for name, values in latency_s.items():
        add_row(table, name.upper(), *(time_text(values[column]) for column in shown))
    return table


def time_text(seconds: float) -> str:
    """A time in a column of them, in seconds from one on; a dash where there is none, as the TPOT of one token.

    >>> time_text(0.0123), time_text(125.4), time_text(float("nan"))
    ('12.3 ms', '125 s', '–')
    """
    if seconds != seconds:
        return "–"
    return format_time(seconds) if seconds < 59.95 else f"{seconds:,.0f} s"


def kept_text(part: float) -> str:
    """A share of requests that keep a limit, rounded down: 100 % are all of them.

    >>> kept_text(1.0), kept_text(0.99996), kept_text(0.5)
    ('100 %', '99.9 %', '50.0 %')
    """
    return "100 %" if part >= 1.0 else f"{math.floor(1000.0 * part) / 10.0:.1f} %"


def _bars(shares: Mapping[str, float]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_column(justify="right", no_wrap=True)
    for name, part in shares.items():
        add_row(grid, name, Bar(part, 20), share(part) + " of the time")
    return grid


def degrees(plan: ServingPlan) -> list[str]:
    """How many devices do what."""
    words = {"tp": "tensor", "pp": "pipeline", "dp": "data", "ep": "expert"}
    split = plan.prefill_replicas or plan.decode_replicas
    copies = f"{plan.prefill_replicas} for prompts, {plan.decode_replicas} to decode" if split else None
    return [copies or count(plan.replicas, "replica"),
            *(f"{word} {getattr(plan, name)}" for name, word in words.items() if getattr(plan, name) > 1),
            *([f"router {plan.router}"] if plan.replicas > 1 else []),
            f"{plan.weight_dtype} weights", f"{plan.kv_dtype} KV cache"]  # fmt: skip


def settings(plan: ServingPlan) -> list[str | None]:
    """What the engine is told; None for what does not apply."""
    static = plan.engine == "static"
    return [
        f"{plan.engine} {plan.version}".strip(),
        f"batches of {plan.max_num_seqs}" if static else f"up to {plan.max_num_seqs:,} sequences",
        None if static else f"{plan.max_num_batched_tokens:,} tokens an iteration",
        None if static or not plan.chunked_prefill else "chunked prefill",
        "prefix cache" if plan.prefix_cache else None,
        f"blocks of {plan.block_size}",
        f"{plan.gpu_memory_percent:g} % of {'free ' if plan.engine == 'trtllm' else ''}memory",
        f"at most {plan.max_model_len:,} tokens a request" if plan.max_model_len else None,
        f"{format_bytes(plan.host_kv_bytes)} of host memory" if plan.host_kv_bytes else None,
    ]


def policies(found: Service) -> list[str]:
    """What the engine does beside what its plan says."""
    lines = []
    if found.scheduler not in ("", found.plan.engine):
        lines.append(f"scheduled by {found.scheduler}")
    if (flow := found.nanoflow) is not None:
        parts = flow.pipeline.nano_batches
        faster = f"{parts} nano-batches, layers {flow.speedup:.2f}x as fast"
        lines.append(faster if parts > 1 else "one nano-batch: no cut is faster")
    return lines


def load_lines(found: Service) -> list[list[str]]:
    """How requests came, and how long they are."""
    requests, one = found.requests, found.metrics
    asked, answered = (_lengths(side) for side in (requests.input_tokens, requests.output_tokens))

    def said(name: str, side: Mapping[str, float]) -> str:
        if side["max"] == side["mean"]:
            return f"{side['max']:,} {name} tokens each"
        return f"{side['mean']:,.0f} {name} tokens on average (p50 {side['p50']:,.0f}, p99 {side['p99']:,.0f})"

    return [
        [found.load, count(len(requests), "request"), f"{format_time(one.duration_s)}"],
        [said("input", asked), said("output", answered)],
    ]


def limits(found: Service) -> list[str]:
    """Each limit with the share of requests that keep it, and the goodput."""
    assert found.slo is not None
    one = found.metrics
    kept = [f"{name.upper()} ≤ {format_time(limit)}: {kept_text(one.attainment_by[name])}"
            for name, limit in found.slo.limits.items()]  # fmt: skip
    return [*kept, f"goodput {rate(one.goodput_per_s or 0.0)} requests/s"]


def kv_lines(found: Service) -> list[str | None]:
    """The cache's capacity and what became of it."""
    one, plan = found.metrics, found.plan
    rank = " a rank" if plan.replicas * plan.dp > 1 else ""
    return [
        f"{found.kv_capacity_tokens:,} tokens{rank}, {format_bytes(found.kv_bytes)} a GPU",
        count(one.preemptions, "preemption"),
        f"{share(one.cached_share)} of input tokens found in it" if plan.prefix_cache else None,
        *(f"{tier.text}, {found.loaded_tokens.get(tier.name, 0):,} tokens loaded" for tier in found.tiers),
        "iterations wait for loads" if found.blocking_loads and (found.tiers or plan.host_kv_bytes) else None,
    ]


def energy_lines(one: Metrics) -> list[str]:
    """Energy in all, by token, and the mean power."""
    if one.energy_j is None or one.power_w is None:
        return [f"{UNKNOWN}: the device's power is not in the catalogue"]
    each = one.energy_per_output_token_j
    return [format_energy(one.energy_j), f"{UNKNOWN if each is None else format_energy(each)} an output token",
            f"{format_power(one.power_w)} a GPU on average"]  # fmt: skip


def cost_lines(found: Service) -> list[str]:
    """Dollars by token and by hour."""
    one, price = found.metrics, found.price_usd_per_h
    if price is None:
        return [f"{UNKNOWN}: no hourly price of {found.device.name} is in the catalogue; give --price"]
    out, both = one.usd_per_million_output_tokens, one.usd_per_million_tokens
    return [f"{UNKNOWN if out is None else format_money(out)} per million output tokens",
            f"{UNKNOWN if both is None else format_money(both)} per million tokens",
            f"at {format_money(price * found.plan.devices)} an hour"]  # fmt: skip


def left_out(found: Service) -> list[str]:
    """Rows of the trace that are no requests, and requests that were refused, by reason."""
    skipped = found.requests.skipped
    lines = [f"{count(n, 'row')} of the trace with {reason}" for reason, n in skipped.items()]
    lines += [f"{count(one.count, 'request')} refused: {one.text}" for one in found.refused]
    return lines or ["no row of the trace and no request" if "trace" in found.requests.about else "no request"]


def notes_of(found: Service) -> list[str]:
    """What there is to know of where requests are from, and what else was noted."""
    said = ("order", "part", "cut", "scale", "lengths", "drawn", "prefixes", "benchmark")
    of_trace = [found.requests.about[key] for key in said if key in found.requests.about]
    return [*(of_trace if "trace" in found.requests.about else ()), *found.notes]
