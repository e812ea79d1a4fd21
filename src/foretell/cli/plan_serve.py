"""``foretell plan serve``: which GPUs, how many and which settings serve a model under a load."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli.plan import plan

if TYPE_CHECKING:
    from foretell.hardware import Device
    from foretell.plan.serving.autoscale import Scaling
    from foretell.plan.serving.options import Option
    from foretell.plan.serving.search import Answer
    from foretell.simulate.serving import Requests, ServingPlan
    from foretell.workload.llm import LLMConfig

_LOAD = "The load"
_SEARCH = "The search"
_PINS = "What is tried (the usual, unless given: 8, 4,8 or 2-16)"
_DAY = "Over time"
_OUT = "What is shown and written"
_NUMBERS = {
    "tp": "tp", "pp": "pp", "dp": "dp", "max_batched_tokens": "max_num_batched_tokens", "max_num_seqs": "max_num_seqs",
    "block_size": "block_size", "max_model_len": "max_model_len",
}  # fmt: skip
_ENGINES = ("vllm", "sglang", "trtllm")


def _pin(name: str, what: str, metavar: str = "N[,N…]") -> Any:
    return typer.Option(f"--{name}", metavar=metavar, help=what, show_default=False, rich_help_panel=_PINS)


@plan.command()
def serve(
    context_: typer.Context,
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help="llm:NAME, or a config.json.")],
    gpus: Annotated[
        str,
        typer.Option("--gpus", metavar="GPU[,GPU…]", help="GPU types to choose from: h100-sxm,l4; 4*l4: up to four."),
    ],
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="[FORMAT:]FILE", help="Requests as they came, e.g. azure:conv.csv.",
                     show_default=False, rich_help_panel=_LOAD),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="N", help="Requests a second (with --trace: its requests, drawn at this rate).",
                     show_default=False, rich_help_panel=_LOAD),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option("--scale", metavar="2x|N/s", help="Speed the trace up, or bring it to a mean rate.",
                     show_default=False, rich_help_panel=_LOAD),
    ] = None,
    arrivals: Annotated[
        str, typer.Option("--arrivals", metavar="KIND", help="poisson, gamma:CV, …", rich_help_panel=_LOAD)
    ] = "poisson",
    isl: Annotated[
        str, typer.Option("--isl", metavar="N", help="Input tokens of a request.", rich_help_panel=_LOAD)
    ] = "1024",
    osl: Annotated[
        str, typer.Option("--osl", metavar="N", help="Output tokens of a request.", rich_help_panel=_LOAD)
    ] = "256",
    num_requests: Annotated[
        int,
        typer.Option("--num-requests", metavar="N", help="Requests drawn, or read at most.", min=2, max=2_000_000,
                     rich_help_panel=_LOAD),
    ] = 20_000,
    slo: Annotated[
        str | None,
        typer.Option("--slo", metavar="LIMITS", help="Such as ttft=500ms,tpot=50ms.", show_default=False,
                     rich_help_panel=_LOAD),
    ] = None,
    attainment: Annotated[
        str, typer.Option("--attainment", metavar="SHARE", help="Requests that must keep to it.", rich_help_panel=_LOAD)
    ] = "90%",
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="Dollars an hour by GPU type (TOML or JSON).", show_default=False,
                     rich_help_panel=_SEARCH),
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", metavar="NAME", help="cost, gpus or energy.", rich_help_panel=_SEARCH)
    ] = "cost",
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="vllm, sglang or trtllm.", rich_help_panel=_SEARCH)
    ] = "vllm",
    quick: Annotated[
        bool, typer.Option("--quick", help="The closed form only: nothing is simulated.", rich_help_panel=_SEARCH)
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Keep simulations in this SQLite file, and go on from it.",
                     show_default=False, rich_help_panel=_SEARCH),
    ] = None,
    tp: Annotated[str | None, _pin("tp", "Tensor-parallel ranks.")] = None,
    pp: Annotated[str | None, _pin("pp", "Pipeline stages.")] = None,
    dp: Annotated[str | None, _pin("dp", "Data-parallel ranks of attention (models with experts).")] = None,
    max_batched_tokens: Annotated[str | None, _pin("max-batched-tokens", "Token budget of an iteration.")] = None,
    max_num_seqs: Annotated[str | None, _pin("max-num-seqs", "Sequences at a time.")] = None,
    block_size: Annotated[str | None, _pin("block-size", "Tokens of a KV block.")] = None,
    max_model_len: Annotated[str | None, _pin("max-model-len", "Tokens of a request at most.")] = None,
    disaggregate: Annotated[
        str | None, _pin("disaggregate", "Prefill and decode replicas; 0:0: together.", "P:D[,P:D…]")
    ] = None,
    weight_dtype: Annotated[
        str | None, _pin("weight-dtype", "Formats of weights, e.g. bf16,fp8.", "NAME[,NAME…]")
    ] = None,
    kv_dtype: Annotated[str | None, _pin("kv-dtype", "Formats of the KV cache.", "NAME[,NAME…]")] = None,
    start_up: Annotated[
        str | None,
        typer.Option("--start-up", metavar="TIME", help="Scale over the trace: time until a new replica serves.",
                     show_default=False, rich_help_panel=_DAY),
    ] = None,
    window: Annotated[
        str, typer.Option("--window", metavar="TIME", help="How often the number may change.", rich_help_panel=_DAY)
    ] = "10min",
    scaling: Annotated[
        str, typer.Option("--scaling", metavar="NAME", help="ahead (knows the day) or reactive.", rich_help_panel=_DAY)
    ] = "ahead",
    emit: Annotated[
        str | None,
        typer.Option("--emit", metavar="FORMAT", help="Only the commands that launch it: vllm or sglang.",
                     show_default=False, rich_help_panel=_OUT),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="The model's name or path in these commands.", show_default=False,
                     rich_help_panel=_OUT),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of what is drawn.", rich_help_panel=_LOAD)] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="JSON, schema foretell.serving-plan/1.", rich_help_panel=_OUT)
    ] = False,
) -> None:
    """The cheapest GPUs and settings that serve a model's requests within latency limits."""
    from foretell import report, units
    from foretell.cli import files
    from foretell.cli.options import transformer
    from foretell.cli.terminal import progress, show, show_text
    from foretell.errors import InputError, unknown
    from foretell.plan.serving.autoscale import POLICIES
    from foretell.plan.serving.emit import FORMATS
    from foretell.plan.serving.melange import require_solver
    from foretell.plan.serving.search import search
    from foretell.plan.serving.trial import simulated
    from foretell.simulate.serving.metrics import Slo, parse_slo

    require_solver()
    if emit is not None and emit not in FORMATS:
        raise unknown("format to emit", emit, FORMATS)
    if emit is not None and json:
        raise InputError("are commands, not --json", f"--emit {emit}", "give one of them")
    if engine not in _ENGINES:
        raise unknown("engine", engine, _ENGINES)
    if emit is not None and engine != emit:
        if "engine" in _given(context_):
            raise InputError(f"is for {emit}, and the plan for {engine}", f"--emit {emit}", f"give --engine {emit}")
        engine = emit
    _useless(context_, trace, rate, scale, quick, emit, start_up)
    delay = None if start_up is None else units.parse_time(start_up, "--start-up")
    step = units.parse_time(window, "--window")
    if not step > 0:
        raise InputError(f"a window of {window[:40]}", "--window", "give a time above 0")
    if scaling not in POLICIES:
        raise unknown("way to scale", scaling, POLICIES)
    if out is not None:
        files.writable(out)
    config = transformer(workload)
    limits = Slo() if slo is None else parse_slo(slo)
    devices, available = _gpus(gpus)
    if emit is not None and (other := next((one for one in devices if one.kind != "gpu"), None)) is not None:
        raise InputError(f"has options for GPUs, and {other.name} is none", f"--emit {emit}", "leave it out, or --gpus")
    priced = {} if prices is None else _prices(prices)
    pinned = _pinned(context_.params)
    requests, asked, sped_up = _requests(trace, rate, scale, arrivals, isl, osl, num_requests, seed)
    try:
        with progress("Searching") as update:
            found = search(
                config, requests, limits, devices,
                rate=asked, attainment=_share(attainment), objective=objective, engine=engine, prices=priced,
                available=available, pinned=pinned, out=out, trial=None if quick else simulated, progress=update,
            )  # fmt: skip
    except KeyboardInterrupt:
        if out is not None:
            print(f"interrupted: simulations so far are in {out}; the same command goes on from them", file=sys.stderr)
        raise typer.Exit(130) from None
    over_time = [] if delay is None else _scaled(found, sped_up, delay, step, scaling)
    if emit is not None:
        known = " ".join(config.name.split())  # on one line of the script, whatever the file is called
        said = "" if model else f"# {known} is foretell's name: give the model's own, or its path, by --model\n\n"
        show_text((said + _commands(found, emit, model or config.name)).rstrip("\n"))
        return
    if json:
        document = found.to_dict()
        document["scaling"] = [{"unit": name, **one.to_dict()} for name, one in over_time]
        show_text(report.json_text(document))
        return
    from foretell.report.serving_plan import serving_plan_view

    redrawn = [] if trace is None or rate is None else [f"{arrivals} arrivals, not the trace's own"]
    show(serving_plan_view(found, over_time, [engine, *redrawn]))


def _given(context: typer.Context) -> list[str]:
    from foretell.cli.options import given

    return given(context)


def _useless(
    context: typer.Context, trace: str | None, rate: float | None, scale: str | None, quick: bool, emit: str | None,
    start_up: str | None,
) -> None:  # fmt: skip
    """Refuse options that nothing would come of."""
    from foretell.errors import InputError

    given = _given(context)
    for option in ("isl", "osl"):
        if option in given and trace is not None:
            raise InputError("the trace has lengths of its own", f"--{option}", "leave it out, or give no --trace")
    if scale is not None and (trace is None or rate is not None):
        raise InputError("speeds up the times of a trace", "--scale", "give --trace, and no --rate")
    if "arrivals" in given and rate is None:
        raise InputError("says how requests come at a rate", "--arrivals", "give --rate as well")
    for option in ("window", "scaling"):
        if option in given and start_up is None:
            raise InputError("is for replicas over time", f"--{option}", "give --start-up as well")
    if start_up is not None and emit is not None:
        raise InputError("commands launch a fixed number of units", "--start-up, --emit", "give one of them")
    if "model" in given and emit is None:
        raise InputError("names the model in commands", "--model", "give --emit as well")
    if "out" in given and quick:
        raise InputError("keeps simulations, and none is done", "--out, --quick", "give one of them")


def _gpus(text: str) -> tuple[list[Device], dict[str, int]]:
    """GPU types, and how many there are of those with a number."""
    from foretell.errors import InputError
    from foretell.hardware import device

    found: list[Device] = []
    available: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:([^*]*?)\s*\*\s*)?(.*?)\s*", part, re.ASCII | re.DOTALL)
        assert match is not None
        if not match[2]:
            raise InputError(f"{text[:80]!r} names no GPU type", "--gpus", "give e.g. h100-sxm,l4")
        if match[1] is not None and not (re.fullmatch(r"\d{1,6}", match[1], re.ASCII) and int(match[1])):
            raise InputError(f"{match[1][:40]!r} is no number of {match[2][:40]}", "--gpus", "give e.g. 4*l4, or l4")
        one = device(match[2])
        if one.name in {known.name for known in found}:
            raise InputError(f"{one.name} is named twice", "--gpus")
        found.append(one)
        if match[1]:
            available[one.name] = int(match[1])
    return found, available


def _prices(path: Path) -> dict[str, float]:
    """Dollars an hour of one device by its name."""
    from foretell import units
    from foretell.cli.options import hourly_price
    from foretell.documents import read_json, read_toml
    from foretell.errors import InputError, UnknownNameError
    from foretell.hardware import device

    data = read_toml(path, "file of prices") if path.suffix == ".toml" else read_json(path, "file of prices")
    if not isinstance(data, dict) or not data:
        raise InputError("holds no prices", str(path), 'write e.g. {"l4": 0.80}, dollars an hour of one device')
    found: dict[str, float] = {}
    for name, value in data.items():
        where = f"{path}: {str(name)[:40]}"
        if isinstance(value, str):
            price = units.parse_money_per_hour(value, where)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            price = float(value)
        else:
            raise InputError("is no price", where, 'give a number, or e.g. "0.80 USD/h"')
        if not price > 0:
            raise InputError(f"{price:g} is no price", where, "give dollars an hour above 0")
        try:
            priced = device(str(name)).name
        except UnknownNameError as error:
            raise InputError(error.message, str(path), error.hint) from error
        if priced in found:
            other = next(given for given in data if device(str(given)).name == priced)
            raise InputError(f"{priced} has two prices, as {other} and as {name}", str(path), "leave one of them")
        found[priced] = hourly_price(price, where)
    return found


def _pinned(parameters: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    from foretell.cli.plan import _counts
    from foretell.errors import InputError

    found: dict[str, tuple[Any, ...]] = {}
    for option, name in _NUMBERS.items():
        if (text := parameters.get(option)) is not None:
            found[name] = _counts(text, "--" + option.replace("_", "-"))
    for name in ("weight_dtype", "kv_dtype"):
        if (text := parameters.get(name)) is not None:
            found[name] = tuple(word.strip() for word in text.split(","))
    if (text := parameters.get("disaggregate")) is not None:
        pairs = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d{1,3}):(\d{1,3})\s*", part, re.ASCII)
            if match is None or (int(match[1]) == 0) != (int(match[2]) == 0):
                raise InputError(f"{part.strip()[:40]!r} is no pair of replicas", "--disaggregate", "give e.g. 1:2,0:0")
            pairs.append((int(match[1]), int(match[2])))
        found["disaggregate"] = tuple(pairs)
    return found


def _share(text: str) -> float:
    from foretell.errors import InputError

    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?|\.\d{1,6})\s*(%?)\s*", text, re.ASCII)
    value = float(match[1]) / (100.0 if match[2] else 1.0) if match else 0.0
    if not 0.0 < value <= 1.0:
        raise InputError(f"{text[:40]!r} is no share of the requests", "--attainment", "give 1% to 100%, e.g. 90%")
    return value


def _requests(
    trace: str | None, rate: float | None, scale: str | None, arrivals: str, isl: str, osl: str, count: int, seed: int
) -> tuple[Requests, float | None, float]:
    """The requests, the rate they are wanted at (None: as they come), and how many times faster than in the trace they
    come.
    """
    from foretell.errors import InputError
    from foretell.simulate.serving import workloads
    from foretell.simulate.serving.workloads.shaping import faster

    if rate is not None and not 0 < rate < 1e9:
        raise InputError(f"{rate:g} is no rate", "--rate", "give requests a second above 0")
    if trace is None:
        if rate is None:
            raise InputError("is needed", "--trace or --rate", "give a trace, or a rate with --isl and --osl")
        lengths = workloads.parse_lengths(isl, osl)
        return workloads.synthetic(lengths, rate=rate, count=count, process=arrivals, seed=seed), rate, 1.0
    read = workloads.read(trace, workloads.Wanted(limit=count, seed=seed))
    if rate is None and read.arrival_s is None:
        raise InputError("has no times", trace, "give --rate, requests a second")
    if rate is None and len(read) == 1:
        left = ", and ".join(f"{n:,} row{'s' if n > 1 else ''} with {why}" for why, n in read.skipped.items())
        are = "are" if sum(read.skipped.values()) > 1 else "is"
        what = "has one request, which has no rate" + (f"; {left} {are} left out" if left else "")
        raise InputError(what, trace, "give --rate, or a trace of more")
    if scale is None:
        return workloads.replayed(read, rate=rate, process=arrivals, seed=seed), rate, 1.0
    own, fast = workloads.replayed(read), workloads.replayed(faster(read, scale))
    return fast, None, float(own.arrival_s[-1] / fast.arrival_s[-1]) if fast.arrival_s[-1] > 0 else 1.0


def _scaled(
    found: Answer, sped_up: float, delay: float, window: float, policy: str
) -> list[tuple[str, Scaling]]:
    """Each option's units over the time of the trace, as long as that is by itself: its work grows and falls with the
    rate.
    """
    from dataclasses import replace

    from foretell.plan.serving.autoscale import rates_over_time, scale
    from foretell.plan.serving.load import duration_s

    slow = replace(found.requests, arrival_s=found.requests.arrival_s * sped_up)
    pace = found.rate * duration_s(slow) / len(slow)  # the trace at the rate that was asked for, over the same time
    rates = rates_over_time(slow, window) * pace
    return [
        (unit.option.name, scale(rates, window, found.rate / unit.work, start_s=delay, policy=policy,
                                 usd_per_h=unit.option.usd_per_h))
        for unit in found.units
    ]  # fmt: skip


def _within_cache(option: Option, config: LLMConfig) -> ServingPlan:
    """The option's plan with requests no longer than its cache holds: engines refuse to start where they could be."""
    held = option.kv_capacity_tokens  # of the closed form's columns: no whole number by type
    if option.plan.max_model_len or not 0 < held < (config.context_length or 0):
        return option.plan
    return option.plan.replace(max_model_len=int(held))


def _commands(found: Answer, format: str, model: str) -> str:
    from foretell.hardware import cluster
    from foretell.plan.serving.emit import emit
    from foretell.plan.serving.search import times

    parts: Sequence[str] = [
        emit(format, times(_within_cache(unit.option, found.config), unit.count), model, unit.option.machine,
             cluster(unit.option.machine).node_count)
        for unit in found.units
    ]  # fmt: skip
    return "\n".join(parts)
