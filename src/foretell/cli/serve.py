"""``foretell simulate serve``: a model served under load, request by request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.simulate import simulate

if TYPE_CHECKING:
    from foretell.hardware import Device
    from foretell.hardware.cluster import Cluster
    from foretell.simulate.serving import Requests, ServingPlan
    from foretell.simulate.serving.engine.served import Served
    from foretell.simulate.serving.offload import NamedTier
    from foretell.simulate.serving.simulator import Link
    from foretell.simulate.serving.workloads import Lengths
    from foretell.workload.llm import LLMConfig

__all__ = ["serve"]

_LOAD, _ENGINE, _WHERE, _WHAT = "What is asked for", "The engine", "Where it runs", "What is told"
_SWITCHES = "What the engine does"  # apart: names of what is off are as long as those of what is on
#: Requests that are drawn unless it is said how many.
_REQUESTS = 1000
_LENGTHS = ("1024", "256")
#: Tokens of an iteration, where the engine does not go by the GPU.
_TOKENS = 8192
_OUTSIDE = "times are the engine's: a server adds what its tokeniser, HTTP and streaming take"
_PLAIN = "no run on {} was compared: kernels are at the peaks of its data sheet"
_INT8 = "no open table has INT8 products: they are costed as FP8's kernels at the peak of INT8"
#: Devices of a service: more than any is told of, and some 100 MB of simulator.
_MOST_DEVICES = 16_384
#: What a plan may keep in host memory.
_MOST_HOST_BYTES = 2**50


def _option(panel: str, name: str, metavar: str, what: str, default: bool = False) -> Any:
    return typer.Option(name, metavar=metavar, help=what, show_default=default, rich_help_panel=panel)


def _flag(panel: str, name: str, what: str) -> Any:
    return typer.Option(name, help=what, rich_help_panel=panel)


@simulate.command()
def serve(
    context_: typer.Context,
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help="llm:NAME or a config.json.", show_default=False)],
    on: Annotated[str, typer.Option("--on", metavar="DEVICE", help="A device, or a cluster such as 'dgx-h100'.")],
    tp: Annotated[int, _option(_WHERE, "--tp", "N", "Tensor-parallel ranks.", True)] = 1,
    pp: Annotated[int, _option(_WHERE, "--pp", "N", "Pipeline stages.", True)] = 1,
    dp: Annotated[int, _option(_WHERE, "--dp", "N", "Ranks with attention of their own that share experts.", True)] = 1,
    ep: Annotated[int, _option(_WHERE, "--ep", "N", "Expert-parallel ranks, out of tp · dp.", True)] = 1,
    replicas: Annotated[int, _option(_WHERE, "--replicas", "N", "Replicas behind one router.", True)] = 1,
    router: Annotated[
        str, _option(_WHERE, "--router", "NAME", "round-robin, least-loaded, prefix-aware or two-choices.", True)
    ] = "round-robin",
    disaggregate: Annotated[
        str | None, _option(_WHERE, "--disaggregate", "P:D", "P replicas run prompts, D others decode.")
    ] = None,
    kv_link: Annotated[
        str | None,
        _option(_WHERE, "--kv-link", "RATE", "What caches move over between replicas, a GPU (the machine's link)."),
    ] = None,
    trace: Annotated[
        str | None,
        _option(_LOAD, "--trace", "[NAME:]FILE", "Requests of a trace: azure:conv.csv, servegen:deepseek-r1, a file."),
    ] = None,
    rate: Annotated[
        float | None, _option(_LOAD, "--rate", "N", "Requests a second, instead of a trace's times.")
    ] = None,
    arrivals: Annotated[
        str, _option(_LOAD, "--arrivals", "NAME", "poisson, constant, gamma:CV or mmpp:RATIO:TIME.", True)
    ] = "poisson",
    concurrency: Annotated[
        int | None, _option(_LOAD, "--concurrency", "N", "So many requests at a time: the next as one ends.")
    ] = None,
    offline: Annotated[bool, _flag(_LOAD, "--offline", "All requests at once.")] = False,
    num_requests: Annotated[
        int | None, _option(_LOAD, "--num-requests", "N", f"At most so many ({_REQUESTS:,}; a trace: all).")
    ] = None,
    isl: Annotated[
        str | None, _option(_LOAD, "--isl", "N", f"Input tokens: N or lognormal:MEAN:CV ({_LENGTHS[0]}).")
    ] = None,
    osl: Annotated[
        str | None, _option(_LOAD, "--osl", "N", f"Output tokens: N or lognormal:MEAN:CV ({_LENGTHS[1]}).")
    ] = None,
    lengths: Annotated[
        str | None, _option(_LOAD, "--lengths", "TRACE", "Draw lengths from a trace; fit:TRACE: from a fit to it.")
    ] = None,
    scale: Annotated[
        str | None, _option(_LOAD, "--scale", "2x|N/s", "Speed the trace up, or bring it to a mean rate.")
    ] = None,
    start: Annotated[str | None, _option(_LOAD, "--start", "TIME", "Begin so far into the trace.")] = None,
    duration: Annotated[str | None, _option(_LOAD, "--duration", "TIME", "Take the requests of so long.")] = None,
    seed: Annotated[int, _option(_LOAD, "--seed", "N", "Of everything that is drawn.", True)] = 0,
    engine: Annotated[str, _option(_ENGINE, "--engine", "NAME", "vllm, sglang, trtllm or static.", True)] = "vllm",
    scheduler: Annotated[
        str | None,
        _option(_ENGINE, "--scheduler", "NAME", "Who comes in and who goes: trtllm-max-utilisation, … (the engine's)."),
    ] = None,
    engine_version: Annotated[
        str, _option(_ENGINE, "--engine-version", "VERSION", "Of the engine (the newest known).")
    ] = "",
    max_batched_tokens: Annotated[
        int | None,
        _option(_ENGINE, "--max-batched-tokens", "N", f"Tokens of an iteration ({_TOKENS:,}; SGLang: by the GPU)."),
    ] = None,
    max_num_seqs: Annotated[int, _option(_ENGINE, "--max-num-seqs", "N", "Sequences that run at a time.", True)] = 256,
    max_model_len: Annotated[
        int | None, _option(_ENGINE, "--max-model-len", "N", "Tokens of a request in all (what the model allows).")
    ] = None,
    block_size: Annotated[int, _option(_ENGINE, "--block-size", "N", "Tokens of a KV block.", True)] = 16,
    gpu_memory_utilization: Annotated[
        float | None,
        _option(_ENGINE, "--gpu-memory-utilization", "SHARE", "Of the memory, for the engine (its own default)."),
    ] = None,
    chunked_prefill: Annotated[
        bool, _flag(_SWITCHES, "--chunked-prefill/--no-chunked-prefill", "Cut long prompts into chunks.")
    ] = True,
    prefix_cache: Annotated[
        bool, _flag(_SWITCHES, "--prefix-cache/--no-prefix-cache", "Keep what prompts have in common.")
    ] = False,
    cuda_graph: Annotated[bool, _flag(_SWITCHES, "--cuda-graph/--no-cuda-graph", "Launch whole decode steps.")] = True,
    weight_dtype: Annotated[
        str | None,
        _option(
            _ENGINE, "--weight-dtype", "NAME", "bf16, fp8, nvfp4, mxfp4, int8, w8a16 or int4 (as published, or bf16)."
        ),
    ] = None,
    kv_dtype: Annotated[str, _option(_ENGINE, "--kv-dtype", "NAME", "Format of the KV cache.", True)] = "bf16",
    preemption: Annotated[str, _option(_ENGINE, "--preemption", "NAME", "recompute or swap.", True)] = "recompute",
    host_memory: Annotated[
        str | None, _option(_ENGINE, "--host-memory", "BYTES", "Keep evicted KV blocks there, a rank (none).")
    ] = None,
    kv_tier: Annotated[
        list[str] | None,
        _option(
            _ENGINE, "--kv-tier", "NAME=BYTES",
            "Keep KV caches there for all replicas: cpu=64GiB, disk=2TB,bandwidth=6GB/s; repeatable, fastest first.",
        ),
    ] = None,
    kv_load: Annotated[
        str, _option(_ENGINE, "--kv-load", "NAME", "Beside others' iterations (async), or blocking.", True)
    ] = "async",
    nanoflow: Annotated[
        bool, _flag(_SWITCHES, "--nanoflow", "Overlap operations of nano-batches, by a pipeline searched for the load.")
    ] = False,
    slo: Annotated[
        str | None, _option(_WHAT, "--slo", "LIMITS", "Limits of a request: ttft=500ms,tpot=50ms,e2e=20s.")
    ] = None,
    percentiles: Annotated[
        str, _option(_WHAT, "--percentiles", "P,P…", "Percentiles of latencies.", True)
    ] = "50,90,95,99",
    warm_up: Annotated[str | None, _option(_WHAT, "--warm-up", "TIME", "Leave the beginning out.")] = None,
    cool_down: Annotated[str | None, _option(_WHAT, "--cool-down", "TIME", "Leave the end out.")] = None,
    price: Annotated[
        str | None, _option(_WHAT, "--price", "USD/h", "Of one GPU, e.g. '2.5 USD/h' (the catalogue's).")
    ] = None,
    html: opt.Html = None,
    timeline: Annotated[
        Path | None, _option(_WHAT, "--timeline", "FILE", "Also write iterations and requests, for ui.perfetto.dev.")
    ] = None,
    requests_out: Annotated[
        Path | None, _option(_WHAT, "--requests", "FILE", "Also write a row a request: .csv, .jsonl or .parquet.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """A model served under load: latencies, throughput, memory, energy, cost, and what binds."""
    from foretell.cli import files
    from foretell.cli.terminal import progress, show, show_text
    from foretell.errors import InputError
    from foretell.plan.serving.space import runs
    from foretell.report.documents import json_text
    from foretell.report.served_requests import FORMATS, write_requests
    from foretell.report.serving import service_card
    from foretell.simulate.serving.metrics import parse_slo
    from foretell.simulate.serving.room import own_share
    from foretell.units import parse_money_per_hour, parse_time

    files.check(html, None, 1, workload)
    if timeline is not None:
        files.writable(timeline, "--timeline")
        files.ending(timeline, "--timeline", (".json",))
    if requests_out is not None:
        files.writable(requests_out, "--requests")
        files.ending(requests_out, "--requests", FORMATS)
    asked = context_.params
    for option, path in (("--html", html), ("--timeline", timeline), ("--requests", requests_out)):
        for name in ("workload", "trace", "lengths"):
            if path is not None and path.exists() and any(path.samefile(one) for one in _files(asked[name])):
                what = "config" if name == "workload" else "trace"
                raise InputError(f"would overwrite the {what}", f"{option} {path}", "give another file")
    objective = None if slo is None else parse_slo(slo)
    wanted_percentiles = _percentiles(percentiles)
    if seed < 0:
        raise InputError(f"{seed} is below 0", "--seed", "give 0 or more")
    times = {name: 0.0 if asked[name] is None else parse_time(asked[name], "--" + name.replace("_", "-"))
             for name in ("warm_up", "cool_down", "start")}  # fmt: skip
    usd_per_h = None if price is None else opt.hourly_price(parse_money_per_hour(price, "--price"), "--price")
    if gpu_memory_utilization is not None and not 0.01 <= gpu_memory_utilization <= 1.0:
        what = f"{gpu_memory_utilization:g} is no share of memory"
        raise InputError(what, "--gpu-memory-utilization", "give 0.01 to 1")
    split = (0, 0) if disaggregate is None else _split(disaggregate)
    config, device, machine = _where(workload, on)
    if weight_dtype is None:
        native = config.published_weights
        weight_dtype = native if native and runs(device, native) else "bf16"
    values: dict[str, Any] = {
        "engine": engine, "version": engine_version, "tp": tp, "pp": pp, "dp": dp, "ep": ep,
        "replicas": replicas if disaggregate is None else sum(split), "router": router,
        "prefill_replicas": split[0], "decode_replicas": split[1], "weight_dtype": weight_dtype, "kv_dtype": kv_dtype,
        "max_num_batched_tokens": _tokens(device, engine, max_batched_tokens), "max_num_seqs": max_num_seqs,
        "max_model_len": _longest(config, max_model_len), "block_size": block_size,
        "gpu_memory_percent": round(100 * (gpu_memory_utilization or 0.9), 4), "chunked_prefill": chunked_prefill,
        "prefix_cache": prefix_cache, "cuda_graph": cuda_graph, "preemption": preemption,
        "host_kv_bytes": 0 if host_memory is None else _host_bytes(host_memory),
    }  # fmt: skip
    if disaggregate is not None and replicas != 1:
        raise InputError("both say how many replicas there are", "--replicas, --disaggregate", "give one of them")
    if kv_link is not None and disaggregate is None:
        raise InputError("caches move between replicas only where they are disaggregated", "--kv-link", "leave it out")
    if kv_load == "blocking" and not kv_tier and host_memory is None:
        raise InputError("there is no tier to load caches from", "--kv-load", "leave it out, or give --kv-tier")
    plan = _plan(values)
    if gpu_memory_utilization is None:
        plan = own_share(config, plan, device)
    policy = _policy(plan, scheduler, nanoflow, kv_load, gpu_memory_utilization is not None)
    links = _links(plan, device, machine, kv_link)
    tiers = _tiers(plan, device, kv_tier or [])
    load = _load(asked)
    requests = _requests(asked, times["start"], duration)
    with progress("Simulating"):
        found = _simulated(
            config, device, machine, on, plan, load, requests, concurrency or 0, offline, links, tiers, policy,
            {"slo": objective, "percentiles": wanted_percentiles, "warm_up_s": times["warm_up"],
             "cool_down_s": times["cool_down"]}, usd_per_h, seed,
        )  # fmt: skip
    written = [path for path in (html, timeline, requests_out) if path is not None]
    try:
        if html is not None:
            from foretell.report.serving_html import service_page

            html.write_text(service_page(found, opt.command_line(context_)), encoding="utf-8")
        if timeline is not None:
            from foretell.timeline import write_chrome

            named = {"workload": f"llm:{config.name}", "device": on}
            write_chrome(found.served.to_timeline(about=named), timeline)
        if requests_out is not None:
            write_requests(found.served, requests_out)
    except OSError as error:
        options = {str(html): "--html", str(timeline): "--timeline"}
        where = f"{options.get(str(error.filename), '--requests')} {error.filename}"
        raise InputError(f"cannot be written: {error.strerror or error}", where, "give another file") from error
    if json:
        show_text(json_text(found.to_dict()))
    else:
        show(service_card(found))
        if written:
            show_text("\n" + "\n".join(f"wrote {path}" for path in written))


def _plan(values: dict[str, Any]) -> ServingPlan:
    """What is asked for as a plan, with messages about options."""
    from foretell.errors import InputError, unknown
    from foretell.simulate.serving import ServingPlan
    from foretell.simulate.serving.plan import CHOICES
    from foretell.workload.kv.family import member

    degrees = [values[name] for name in ("tp", "pp", "dp", "replicas")]
    if min(degrees) > 0 and math.prod(degrees) > _MOST_DEVICES:
        repair = f"give at most {_MOST_DEVICES:,} in all"
        raise InputError(f"{math.prod(degrees):,} devices", "--replicas, --tp, --pp, --dp", repair)
    plan = ServingPlan(**values)
    caches = member("vllm" if plan.engine == "static" else plan.engine).formats
    if plan.kv_dtype not in caches:
        known = [name for name in CHOICES["kv_dtype"] if name in caches]
        raise unknown(f"KV cache format of {plan.engine}", plan.kv_dtype, known)
    if plan.max_num_seqs > plan.max_num_batched_tokens:
        what = f"{plan.max_num_seqs:,} sequences take a token each of iterations of {plan.max_num_batched_tokens:,}"
        repair = f"give --max-num-seqs {plan.max_num_batched_tokens} or fewer as well, or more tokens"
        raise InputError(what, "--max-num-seqs, --max-batched-tokens", repair)
    return plan


def _tokens(device: Device, engine: str, given: int | None) -> int:
    """Tokens of an iteration: as asked for, or what the engine takes by itself where it goes by the GPU."""
    from foretell.cost.kv_budget import default_load

    if given is not None:
        return given
    return default_load(device, "sglang")[0] if engine == "sglang" else _TOKENS


def _host_bytes(text: str) -> int:
    from foretell.errors import InputError
    from foretell.units import parse_bytes

    found = parse_bytes(text, "--host-memory")
    if found > _MOST_HOST_BYTES:
        raise InputError("is more than any host has", f"--host-memory {text[:40]}", "give at most 1 PiB")
    return found


def _percentiles(text: str) -> list[float]:
    from foretell.errors import InputError

    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 <= q <= 100 for q in found):
        raise InputError(f"{text[:40]!r} are no percentiles", "--percentiles", "give numbers from 0 to 100: 50,99.9")
    return found


def _split(text: str) -> tuple[int, int]:
    from foretell.errors import InputError

    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and 0 < int(part) <= 4096 for part in parts):
        raise InputError(f"{text[:40]!r} is no split", "--disaggregate", "write P:D, e.g. 1:3")
    return int(parts[0]), int(parts[1])


def _where(workload: str, on: str) -> tuple[LLMConfig, Device, Device | Cluster]:
    """The model, the kind of device, and the machine: a device alone stands for as many as the plan takes."""
    from foretell.errors import InputError
    from foretell.hardware import cluster

    config = opt.transformer(workload)
    if "," in on:
        raise InputError(f"{on[:80]!r} names several", "--on", "a service runs on one kind of device")
    machine = cluster(on)
    if not machine.homogeneous:
        raise InputError(f"{on[:80]!r} has devices of several kinds", "--on", "a service runs on one kind of device")
    device = machine.nodes[0].device
    return config, device, device if machine.device_count == 1 else machine


@dataclass(frozen=True, slots=True)
class _Policy:
    """What an engine does otherwise than its plan says; `scheduler` None: as it does."""

    scheduler: str | None
    nanoflow: bool
    blocking_loads: bool
    #: Whether the share of memory is as asked for.
    given_share: bool


def _policy(plan: ServingPlan, scheduler: str | None, nanoflow: bool, kv_load: str, given_share: bool) -> _Policy:
    from foretell.errors import InputError, unknown
    from foretell.simulate.serving.simulator import SCHEDULERS

    if kv_load not in ("async", "blocking"):
        raise unknown("way to load caches", kv_load, ("async", "blocking"))
    name = plan.engine if scheduler is None else SCHEDULERS.named(scheduler).name
    if (name == "static") != (plan.engine == "static"):
        raise InputError(f"{name} on {plan.engine}", "--engine, --scheduler", "static goes with static alone")
    if nanoflow and plan.engine == "static":
        raise InputError("static batches have prompts and answers one after the other", "--nanoflow",
                         "give another --engine")  # fmt: skip
    if nanoflow and plan.prefill_replicas:
        raise InputError("overlaps prompts with answers, which run on replicas of their own", "--nanoflow",
                         "leave --disaggregate out")  # fmt: skip
    return _Policy(None if name == plan.engine else name, nanoflow, kv_load == "blocking", given_share)


def _tiers(plan: ServingPlan, device: Device, texts: list[str]) -> tuple[NamedTier, ...]:
    """Where caches are kept outside the GPUs."""
    from foretell.errors import InputError
    from foretell.simulate.serving.offload import parse_tier

    for option, given in (("--kv-tier", bool(texts)), ("--host-memory", plan.host_kv_bytes > 0)):
        # Swapped sequences go to host memory all the same.
        if given and not plan.prefix_cache and (option == "--kv-tier" or plan.preemption != "swap"):
            raise InputError("keeps what prompts have in common", option, "give --prefix-cache")
    if texts and plan.host_kv_bytes and plan.preemption != "swap":
        raise InputError("both keep what the GPUs give up", "--kv-tier, --host-memory", "give one of them")
    return tuple(parse_tier(text, _host_link(device)) for text in texts)


def _host_link(device: Device) -> Link | None:
    from foretell.simulate.serving.simulator import Link

    pcie = device.link("pcie")
    host = None if pcie is None else pcie.total_bandwidth_bytes_per_s
    return None if host is None else Link(host, (pcie and pcie.latency_s) or 0.0)


def _longest(config: LLMConfig, given: int | None) -> int:
    """Tokens that a request may have: what is asked for, at most what the model was made for."""
    from foretell.errors import InputError

    allowed = config.context_length or 0
    if given is None:
        return allowed
    if given < 1 or (allowed and given > allowed):
        raise InputError(f"{given:,} tokens", "--max-model-len", f"{config.name} allows 1 to {allowed:,}")
    return given


def _links(
    plan: ServingPlan, device: Device, machine: Device | Cluster, text: str | None
) -> dict[str, Link | None]:
    """What caches move over: between replicas, and to host memory."""
    from foretell.errors import InputError
    from foretell.hardware import Device
    from foretell.simulate.serving.simulator import Link
    from foretell.units import parse_bandwidth

    links: dict[str, Link | None] = {"kv_link": None, "host_link": None}
    if plan.host_kv_bytes or plan.preemption == "swap":
        links["host_link"] = _host_link(device)
        if links["host_link"] is None:
            raise InputError(f"the link of {device.name} to its host is unknown", "--host-memory", "leave it out")
        if not plan.host_kv_bytes:
            raise InputError("sequences are swapped to no memory", "--preemption swap", "give --host-memory")
    if plan.prefill_replicas:
        if text is not None:
            given = parse_bandwidth(text, "--kv-link")
            if given <= 0:
                raise InputError("nothing moves over it", f"--kv-link {text[:40]}", "give a rate above 0: 50GB/s")
            links["kv_link"] = Link(given)
        elif not isinstance(machine, Device) and machine.network is not None:
            # Replicas of several machines: what the network gives each device of one.
            ports, node = machine.network, machine.nodes[0]
            rate = ports.total_bandwidth_bytes_per_s
            if rate is not None:
                links["kv_link"] = Link(rate / node.count, ports.latency_s or 0.0)
        else:
            inside = None if isinstance(machine, Device) else machine.nodes[0].link
            fastest = [one for one in (inside, *device.links) if one is not None and one.total_bandwidth_bytes_per_s]
            if fastest:
                best = max(fastest, key=lambda one: one.total_bandwidth_bytes_per_s or 0.0)
                links["kv_link"] = Link(best.total_bandwidth_bytes_per_s or 0.0, best.latency_s or 0.0)
        if links["kv_link"] is None:
            raise InputError(f"no link of {device.name} is known", "--disaggregate", "say it: --kv-link 50GB/s")
    return links


def _load(asked: dict[str, Any]) -> str:
    """How requests come, in words. Raises InputError where that is said twice or not at all."""
    from foretell.errors import InputError
    from foretell.units import printable

    given = [name for name in ("rate", "concurrency", "offline") if asked[name]]
    if len(given) > 1:
        raise InputError("are different kinds of load", ", ".join(f"--{name}" for name in given), "give one of them")
    if asked["concurrency"] is not None and asked["concurrency"] < 1:
        raise InputError(f"{asked['concurrency']} requests at a time", "--concurrency", "give 1 or more")
    if asked["rate"] is not None and not 0 < asked["rate"] < 1e9:
        raise InputError(f"{asked['rate']:g} requests a second", "--rate", "give a rate above 0 and below 1e9")
    if not given and asked["trace"] is None:
        raise InputError("no load", "simulate serve", "give --trace, --rate, --concurrency or --offline")
    if asked["arrivals"] != "poisson" and asked["rate"] is None:
        raise InputError("says how requests come at a rate", "--arrivals", "give --rate as well")
    if asked["scale"] is not None and (asked["trace"] is None or given):
        raise InputError("speeds up the times of a trace", "--scale", "give --trace, and no other load")
    if asked["start"] is not None and asked["trace"] is None:
        raise InputError("is a time of a trace", "--start", "give --trace")
    if asked["lengths"] is not None and (asked["isl"] or asked["osl"]):
        raise InputError("both say lengths", "--lengths, --isl, --osl", "give one of them")
    if asked["offline"]:
        return "all at once"
    if asked["concurrency"]:
        return f"{asked['concurrency']:,} at a time"
    if asked["rate"] is not None:
        return f"{asked['arrivals']}, {asked['rate']:g} requests/s"
    return f"times of {printable(Path(str(asked['trace'])).name)}"


def _requests(asked: dict[str, Any], start_s: float, duration: str | None) -> Requests:
    from dataclasses import replace

    from foretell.errors import InputError
    from foretell.simulate.serving.workloads import Wanted, offline, read, replayed, synthetic
    from foretell.simulate.serving.workloads.family import MOST_REQUESTS
    from foretell.simulate.serving.workloads.shaping import faster, relengthed
    from foretell.units import parse_time

    seed, count = asked["seed"], asked["num_requests"]
    duration_s = None if duration is None else parse_time(duration, "--duration")
    drawn = _lengths(asked)
    at_once = asked["offline"] or asked["concurrency"] is not None
    if asked["trace"] is None:
        lengths = drawn or _fixed(asked)
        if at_once:
            return offline(lengths, _REQUESTS if count is None else count, seed)
        many = _REQUESTS if count is None and duration_s is None else count
        if many is None and duration_s is not None and asked["rate"] * duration_s > MOST_REQUESTS:
            raise InputError(f"more than {MOST_REQUESTS:,} requests", "--rate, --duration", "give less of one")
        return synthetic(lengths, rate=asked["rate"], count=many, duration_s=duration_s, process=asked["arrivals"],
                         seed=seed)  # fmt: skip
    wanted = Wanted(MOST_REQUESTS if count is None else count, start_s, duration_s, seed, drawn)
    trace = read(asked["trace"], wanted)
    if drawn is not None:
        trace = relengthed(trace, drawn, seed)
    if asked["scale"] is not None:
        trace = faster(trace, asked["scale"])
    if at_once:
        return offline(replace(trace, arrival_s=None))
    return replayed(trace, rate=asked["rate"], process=asked["arrivals"], seed=seed)


def _lengths(asked: dict[str, Any]) -> Lengths | None:
    """The lengths that are asked for, if they are."""
    from foretell.simulate.serving.workloads import Lengths, read

    if asked["lengths"] is None:
        return _fixed(asked) if asked["isl"] or asked["osl"] else None
    spec: str = asked["lengths"]
    fit = spec.startswith("fit:")
    trace = read(spec.removeprefix("fit:"))
    make = Lengths.fitted if fit else Lengths.resampled
    return make(trace.input_tokens, trace.output_tokens, trace.about["trace"])


def _fixed(asked: dict[str, Any]) -> Lengths:
    from foretell.simulate.serving.workloads import parse_lengths

    return parse_lengths(asked["isl"] or _LENGTHS[0], asked["osl"] or _LENGTHS[1])


def _simulated(
    config: LLMConfig, device: Device, machine: Device | Cluster, on: str, plan: ServingPlan, load: str,
    requests: Requests, concurrency: int, offline: bool, links: dict[str, Link | None], tiers: tuple[NamedTier, ...],
    policy: _Policy, told: dict[str, Any], usd_per_h: float | None, seed: int,
) -> Any:  # fmt: skip
    from foretell.cost.energy import power_of
    from foretell.errors import InfeasibleError
    from foretell.hardware import Device
    from foretell.report.serving import Service
    from foretell.simulate.serving.iteration import Iterations
    from foretell.simulate.serving.metrics import measure
    from foretell.simulate.serving.nanoflow import NanoFlow, steady
    from foretell.simulate.serving.offload import engine_tier
    from foretell.simulate.serving.refusals import refusals
    from foretell.simulate.serving.room import what_fits
    from foretell.simulate.serving.simulator import serve as served_by

    many = 1 if isinstance(machine, Device) else machine.device_count
    if many > 1 and plan.devices > many:
        raise InfeasibleError(f"the plan takes {plan.devices} devices and {on} has {many}",
                              "give a larger cluster, or fewer replicas or ranks")  # fmt: skip
    iterations = Iterations.of(config, plan, machine)
    try:
        capacity = iterations.kv_capacity_tokens
    except InfeasibleError as error:
        fits = what_fits(config, plan, device, given_share=policy.given_share)
        repair = "; ".join(fits) or "no number of these devices that was tried holds it"
        raise InfeasibleError(error.message, repair) from error
    costed: Iterations | NanoFlow = iterations
    flow = None
    if policy.nanoflow:
        lengths = float(requests.input_tokens.mean()), float(requests.output_tokens.mean())
        costed = flow = NanoFlow.of(iterations, steady(iterations, *lengths))
    tier = engine_tier(tiers, config, plan, iterations.kv_bytes_per_token) if tiers else None
    result = served_by(
        costed, plan, requests, concurrency=concurrency, offline=offline, seed=seed, scheduler=policy.scheduler,
        kv_link=links["kv_link"], host_link=links["host_link"], tier=tier, blocking_loads=policy.blocking_loads,
    )  # fmt: skip
    if not result.served.any():
        refused = refusals(result, requests, plan)
        reasons = "; ".join(f"{one.count:,} {one.text}" for one in refused)
        repairs = "; ".join(_admitting(config, requests, result, one.reason) for one in refused)
        raise InfeasibleError(f"no request can be served: {reasons}", repairs)
    power = power_of(device)
    price = device.price_usd_per_h if usd_per_h is None else usd_per_h
    figures = measure(
        result, plan, costed=costed, price_usd_per_h=price, idle_w=0.0 if power is None else power.idle_w, **told
    )
    return Service(
        config=config, device=device, where=on, plan=plan, load=load, requests=requests, served=result,
        metrics=figures, slo=told["slo"], kv_capacity_tokens=capacity,
        kv_bytes=capacity * iterations.kv_bytes_per_token, weights_bytes=iterations.weights_bytes,
        price_usd_per_h=price, seed=seed, scheduler=policy.scheduler or plan.engine,
        nanoflow=None if flow is None else flow.found, tiers=tiers, blocking_loads=policy.blocking_loads,
        loaded_tokens={} if tier is None else dict(tier.hierarchy.hit_tokens),
        notes=_notes(plan, device, capacity),
    )  # fmt: skip


def _admitting(config: LLMConfig, requests: Requests, served: Served, reason: str) -> str:
    """What would let the requests be served that were refused for this reason."""
    mine = served.refused == served.reasons.index(reason)
    prompt = int(requests.input_tokens[mine].max())
    whole = int((requests.input_tokens + requests.output_tokens)[mine].max())
    if "max_num_batched_tokens" in reason:
        return f"give --max-batched-tokens {prompt}, or leave --no-chunked-prefill out"
    if "max_model_len" not in reason:
        return "give shorter requests, or a larger cache: --tp, --kv-dtype or --gpu-memory-utilization"
    if config.context_length and whole > config.context_length:
        return "give shorter requests: the model takes no longer ones"
    return f"give --max-model-len {whole}"


def _files(given: str | None) -> list[Path]:
    """Files that what is given may name, with a format before it or a place in it behind."""
    text = given or ""
    after = text.rpartition(":")[2]
    return [one for one in {Path(text), Path(after), Path(after.partition("#")[0])} if one.is_file()]


def _notes(plan: ServingPlan, device: Device, capacity: int) -> tuple[str, ...]:
    notes = [_OUTSIDE]
    if plan.engine == "vllm" and plan.max_model_len > capacity:
        notes.append(
            f"vLLM starts only where a request of --max-model-len fits the cache: give {capacity} or less for this one"
        )
    if plan.weight_dtype == "fp8" and device.peak("fp8") is None:
        notes.append(f"{device.name} has no fp8 arithmetic: weights are widened on the way in, as w8a16")
    if device.kind != "gpu":
        notes.append(_PLAIN.format(device.name))
    elif plan.weight_dtype == "int8":
        notes.append(_INT8)
    return tuple(notes)
