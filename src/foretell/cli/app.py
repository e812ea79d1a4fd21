"""The commands. Each checks what is cheap to check first, so that a slip shows before anything slow begins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as opt
from foretell.cli.group import ForetellGroup

if TYPE_CHECKING:
    from foretell.graph import Graph
    from foretell.hardware import Device
    from foretell.workload.options import Options

__all__ = ["app"]

app = typer.Typer(
    cls=ForetellGroup,
    name="foretell",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="--devices and --debug may also follow the command.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from foretell import __version__

        typer.echo(f"foretell {__version__}")
        raise typer.Exit


@app.callback()
def _foretell(
    devices: Annotated[
        Path | None,
        typer.Option(
            "--devices", metavar="DIR", help="Also read device files (TOML) from this folder.", show_default=False
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """How fast, how large, how full and how dear a workload will be on given hardware, before anything runs."""
    if devices is not None:
        from foretell.hardware import add_devices

        add_devices(devices)


@app.command()
def predict(
    context_: typer.Context,
    workload: opt.Workload,
    on: opt.OnMany,
    batch: opt.Batch = None,
    image_size: opt.ImageSize = None,
    seq_len: opt.SeqLen = None,
    inputs: opt.Input = None,
    phase: opt.Phase = None,
    context: opt.Context = None,
    train: opt.Train = False,
    optimizer: opt.Optimizer = None,
    accumulate: opt.Accumulate = None,
    checkpointing: opt.Checkpointing = False,
    lora: opt.Lora = None,
    precision: opt.PrecisionMany = None,
    quantize: opt.Quantize = None,
    layout: opt.Layout = None,
    runtime: opt.Runtime = "eager",
    model: opt.Model = "auto",
    power_limit: opt.PowerLimit = None,
    clock: opt.Clock = None,
    calibration: opt.Calibration = None,
    global_batch: opt.GlobalBatch = None,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    dp: opt.Dp = None,
    cp: opt.Cp = None,
    ep: opt.Ep = None,
    vp: opt.Vp = None,
    mbs: opt.Mbs = None,
    zero: opt.Zero = None,
    shard: opt.Shard = None,
    recompute: opt.Recompute = None,
    framework: opt.Framework = None,
    schedule: opt.Schedule = None,
    first_layers: opt.FirstLayers = None,
    last_layers: opt.LastLayers = None,
    attention: opt.AttentionKernels = None,
    context_scheme: opt.ContextScheme = None,
    dispatcher: opt.Dispatcher = None,
    overlap: opt.Overlap = None,
    no_sp: opt.NoSp = False,
    cuda_graph: opt.CudaGraph = False,
    document_len: opt.DocumentLen = None,
    full_flops: opt.FullFlops = False,
    causal_flops: opt.CausalFlops = False,
    tokens: opt.Tokens = None,
    calibrate_from: opt.CalibrateFrom = None,
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="KEY",
            help="Order of several devices: asked, device, time, throughput, memory, mfu, energy or cost.",
        ),
    ] = "asked",
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Also find the largest batch that fits (always done for llm:).")
    ] = False,
    html: opt.Html = None,
    trace: opt.Trace = None,
    json: opt.Json = False,
) -> None:
    """Time, memory, energy and cost of one step: a card for one device, a table for several.

    With --train and a cluster, or the options of training on many devices: one step of such a plan.
    """
    from foretell.cli.training import is_meant, predict_training

    if is_meant(context_, on):
        predict_training(context_, workload, on)
        return
    from foretell import cost, report
    from foretell.cli import files
    from foretell.cli.terminal import progress, show, show_text

    devices = _devices(on)
    files.check(html, trace, len(devices), workload)
    check_model(runtime, model)
    limits = _limits(devices, power_limit, clock)
    report.sorted_estimates([], sort)
    graph, options = _capture(workload, context_)
    with progress(f"Costing {graph.name}"):
        program = cost.lower(graph, runtime)
        how: dict[str, Any] = {"runtime": runtime, "model": model, "program": program, **limits}
        how["calibration"] = calibration
        estimates = [cost.estimate(graph, d, **how) for d in devices]
    batches: dict[str, int | None] = {}
    if largest_batch or workload.startswith("llm:"):
        with progress("Finding the largest batch"):
            batches = {d.name: _largest_batch(workload, context_, graph, d) for d in devices}
    estimates = report.sorted_estimates(estimates, sort)
    settings = report.graph_settings(graph, options)
    if html is not None:
        with progress("Writing the report"):
            files.write_report(
                html, workload=workload, captured=opt.capture_settings(context_.params), graph=graph,
                estimates=estimates, devices=devices, how=how, settings=settings,
                command=opt.command_line(context_), largest_batches=batches,
            )  # fmt: skip
    if trace is not None:
        files.write_trace(trace, graph, estimates[0], program)
    if json:
        documents = [e.to_dict() | ({"largest_batch": batches[e.device]} if batches else {}) for e in estimates]
        show_text(report.json_text(documents if len(devices) > 1 else documents[0]))
    elif len(devices) > 1:
        show(report.comparison(estimates, settings=settings, largest_batches=batches))
    else:
        largest = batches.get(devices[0].name)
        show(report.card(estimates[0], settings=settings, device=devices[0], largest_batch=largest))
    if not json and (written := [path for path in (html, trace) if path is not None]):
        show_text("\n" + "\n".join(f"wrote {path}" for path in written))


@app.command()
def capture(
    context_: typer.Context,
    workload: opt.Workload,
    batch: opt.Batch = None,
    image_size: opt.ImageSize = None,
    seq_len: opt.SeqLen = None,
    inputs: opt.Input = None,
    phase: opt.Phase = None,
    context: opt.Context = None,
    train: opt.Train = False,
    optimizer: opt.Optimizer = None,
    accumulate: opt.Accumulate = None,
    checkpointing: opt.Checkpointing = False,
    lora: opt.Lora = None,
    precision: opt.Precision = None,
    quantize: opt.Quantize = None,
    layout: opt.Layout = None,
    ops: Annotated[bool, typer.Option("--ops", help="List every operation.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.json", help="Write the graph to a file.", show_default=False)
    ] = None,
    json: opt.Json = False,
) -> None:
    """What one step does: operations, arithmetic, traffic, parameters. Nothing runs."""
    from foretell import report
    from foretell.cli import files
    from foretell.cli.terminal import show, show_text

    if out is not None:
        files.writable(out)
        files.ending(out, "--out", (".json",))
    graph, options = _capture(workload, context_)
    if out is not None:
        _write(graph, out)
    if json:
        show_text(report.json_text(graph.to_dict(), indent=None))
    elif ops:
        show(report.op_table(graph))
    else:
        show(report.graph_summary(graph, settings=report.graph_settings(graph, options)))


@app.command()
def explain(
    context_: typer.Context,
    workload: opt.Workload,
    on: opt.OneDevice,
    op: Annotated[
        int | None,
        typer.Option(
            "--op", metavar="N", help="Index of an operation; without it the dearest are listed.", show_default=False
        ),
    ] = None,
    batch: opt.Batch = None,
    image_size: opt.ImageSize = None,
    seq_len: opt.SeqLen = None,
    inputs: opt.Input = None,
    phase: opt.Phase = None,
    context: opt.Context = None,
    train: opt.Train = False,
    optimizer: opt.Optimizer = None,
    accumulate: opt.Accumulate = None,
    checkpointing: opt.Checkpointing = False,
    lora: opt.Lora = None,
    precision: opt.Precision = None,
    quantize: opt.Quantize = None,
    layout: opt.Layout = None,
    runtime: opt.Runtime = "eager",
    model: opt.Model = "auto",
    power_limit: opt.PowerLimit = None,
    clock: opt.Clock = None,
    calibration: opt.Calibration = None,
) -> None:
    """How the time of one operation comes about: the formula with its numbers in it."""
    from foretell import cost, report
    from foretell.cli.terminal import show, show_text
    from foretell.errors import InputError

    devices = _devices(on)
    if len(devices) > 1:
        raise InputError(f"{on!r} names several devices", "--on", "explain on one")
    check_model(runtime, model)
    how: dict[str, Any] = {"runtime": runtime, "model": model, "calibration": calibration}
    how |= _limits(devices, power_limit, clock)
    graph, _ = _capture(workload, context_)
    if op is not None:
        show_text(cost.explain(graph, devices[0], op, **how))
    else:
        estimate = cost.estimate(graph, devices[0], **how)
        show(report.dearest_ops(graph, estimate))


@app.command("devices")
def devices_(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A device or machine to show in full, or a maker, architecture, kind or beginning of names to list.",
            show_default=False,
        ),
    ] = None,
    machines: Annotated[bool, typer.Option("--machines", help="The machines and networks instead.")] = False,
) -> None:
    """The catalogue of devices, or one device or machine in full with the source of every number."""
    from foretell import report
    from foretell.cli.terminal import show
    from foretell.errors import InputError, UnknownNameError, near_names
    from foretell.hardware import device, devices, network, networks, node, nodes

    if machines:
        if name is not None:
            raise InputError("lists them all", "--machines", f"leave one of it and {name[:80]!r} out")
        show(report.machine_list(map(node, nodes()), {one: network(one) for one in networks()}))
        return
    try:
        if name is not None:
            show(report.device_view(device(name)))
            return
    except UnknownNameError as error:
        try:
            machine = node(str(name))
        except UnknownNameError:
            machine = None
        if machine is not None:
            show(report.machine_view(machine))
            return
        members = [one for known in devices() if _belongs(one := device(known), str(name))]
        if not members:
            likely = " or ".join(near_names(str(name), nodes(), 1)) or "--machines lists them"
            repair = (f"{error.hint or ''}; or name a machine ({likely}), a maker, an architecture or a kind (gpu, "
                      "cpu, accelerator)")  # fmt: skip
            raise UnknownNameError(error.kind, str(name), error.near, error.known, repair) from None
    else:
        members = [device(known) for known in devices()]
    show(report.device_list(members))


def _belongs(device: Device, word: str) -> bool:
    """Whether a device is of this maker, architecture or kind, or its name begins so."""
    word = " ".join(word.casefold().replace("-", " ").split())
    names = (device.vendor, device.architecture, device.name.replace("-", " "))
    return len(word) > 1 and (word == device.kind or any(f"{n.casefold()} ".startswith(f"{word} ") for n in names))


@app.command()
def claims(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID", help="Claims or systems to show in full; all, as a table.", show_default=False
        ),
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Obtain the figures anew.")] = False,
    json: opt.PlainJson = False,
) -> None:
    """What published techniques claim, what Foretell obtains, and how."""
    from foretell import claims as ledger
    from foretell import report
    from foretell.cli.terminal import progress, show, show_text

    chosen = ledger.claims(*ids or ())
    if run:
        with progress("Obtaining the figures anew") as update, _libraries():
            names = [claim.id for claim in chosen if claim.run is not None]
            chosen = ledger.run(
                *(claim.id for claim in chosen),
                progress=lambda claim: update("claims", names.index(claim.id), len(names)),
            )
    if json:
        show_text(report.json_text([claim.to_dict() for claim in chosen]))
    else:
        show(report.claims_in_full(chosen) if ids else report.claims_table(chosen))


@app.command()
def accuracy(
    slices: Annotated[
        list[str] | None,
        typer.Option(
            "--slice",
            metavar="NAME",
            help="A slice or source of measurements; repeatable (all). list names them.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Folder of measurements ($FORETELL_DATA).", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", help="Only a sample of N workloads, or operators.", show_default=False),
    ] = None,
    model: opt.Model = "auto",
    json: opt.PlainJson = False,
) -> None:
    """How well predictions agree with public measurements, slice by slice. Goes on where it was interrupted."""
    from foretell import report
    from foretell.accuracy import offered, run, to_dict
    from foretell.cli.terminal import progress, show, show_text

    check_model("eager", model)
    if slices == ["list"]:
        show_text("\n".join(offered(data)))
        return
    with progress("Reading the measurements", lines=True) as update:
        outcome = run(slices, data, model=model, limit=limit, progress=lambda p: update(p.slice, p.done, p.total))
    if json:
        show_text(report.json_text(to_dict(outcome)))
    else:
        show(report.accuracy_view(outcome))
    if outcome.interrupted:
        raise typer.Exit(130)


@contextlib.contextmanager
def _libraries() -> Iterator[None]:
    """Say how to install the library that a claim lacks."""
    from foretell.errors import ForetellError

    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "foretell":
            raise  # a defect of ours
        message = f"obtaining a claim's figure needs {error.name}, which does not import here"
        raise ForetellError(message, "pip install 'foretell[zoo]'") from error


def _devices(names: str) -> list[Device]:
    from foretell.errors import InputError
    from foretell.hardware import device

    wanted = [name.strip() for name in names.split(",")]
    if not all(wanted):
        raise InputError(f"{names!r} has an empty name", "--on", "write e.g. --on t4,a100-sxm4-80gb")
    found = [device(name) for name in wanted]
    if len({one.name for one in found}) < len(found):
        raise InputError("a device is given twice", f"--on {names[:80]}", "give each once")
    return found


def check_model(runtime: str, model: str) -> None:
    """Refuse a runtime or model that is not known, before anything slow begins."""
    from foretell.cost.model import AUTO, Settings, models

    Settings(runtime=runtime)
    if model != AUTO:
        models()[model]


def _limits(devices: list[Device], power_limit: str | None, clock: str | None) -> dict[str, float | None]:
    """What the devices are set to, as keywords of `estimate`; refused where one does not allow it."""
    from foretell.cost.energy import check_limits
    from foretell.units import parse_frequency, parse_power

    limit_w = None if power_limit is None else parse_power(power_limit, "--power-limit")
    clock_hz = None if clock is None else parse_frequency(clock, "--clock")
    for device in devices:
        check_limits(device, limit_w, clock_hz)
    return {"power_limit_w": limit_w, "clock_hz": clock_hz}


def _capture(workload: str, context: typer.Context) -> tuple[Graph, Options | None]:
    """The graph of a workload and the options it was captured with (None for a file, which holds the graph itself)."""
    import foretell
    from foretell.cli.terminal import progress
    from foretell.errors import InputError
    from foretell.workload.options import options

    settings = opt.capture_settings(context.params)
    chosen = options(**settings)  # a wrong one shows before torch is imported
    is_file = Path(workload).is_file()
    if is_file and settings:
        given = ", ".join("--" + name.replace("_", "-").replace("inputs", "input") for name in settings)
        raise InputError("a captured graph stays as it is", given, "capture the workload anew with it")
    with progress(f"Capturing {workload}"):
        graph: Graph = foretell.capture(workload, **settings)
    return graph, None if is_file else chosen


def _largest_batch(workload: str, context: typer.Context, graph: Graph, device: Device) -> int | None:
    """The largest batch that fits `device`: 0 where none does, None where its memory is unknown."""
    import foretell
    from foretell.cost.memory import largest_batch
    from foretell.errors import InfeasibleError, InputError
    from foretell.graph.affine import AffineFamily
    from foretell.workload.options import InputSpec, parse_inputs

    if device.memory_bytes is None:
        return None
    settings = opt.capture_settings(context.params)
    if Path(workload).is_file():
        raise InputError("a captured graph has one batch", "--largest-batch", "name the workload it was captured from")

    micro_batches = settings.get("accumulate") or 1  # a step's items are those of all of them
    inputs = None if settings.get("inputs") is None else parse_inputs(settings["inputs"])
    if inputs is not None and len({spec.shape[:1] for spec in inputs.values()}) != 1:
        raise InputError("inputs of several first dimensions show no batch", "--largest-batch", "leave it out")

    def at(batch: int) -> Graph:
        changed: dict[str, Any] = {"batch": batch}
        if inputs is not None:
            changed["inputs"] = {name: InputSpec((batch, *s.shape[1:]), s.dtype) for name, s in inputs.items()}
        again: Graph = foretell.capture(workload, **{**settings, **changed})
        return again

    family: Callable[[int], Graph] = at
    if not workload.startswith("llm:"):  # whose graphs cost next to nothing
        with contextlib.suppress(InputError):  # it does other things at other batches: look at each
            line = AffineFamily(graph, at(2 * max(1, graph.batch // micro_batches)))

            def family(batch: int) -> Graph:
                return line(batch * micro_batches)
    most = min(int(graph.provenance.get("most_batch", 1 << 20)), 1 << 20)  # an exported program takes no more
    try:
        return largest_batch(family, device, limit=most)
    except InfeasibleError:
        return 0


def _write(graph: Graph, path: Path) -> None:
    from foretell.errors import InputError

    try:
        graph.to_json(path)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", f"--out {path}", "give another file"
        ) from error


# Commands with files of their own; each registers itself on `app`, so it must exist by now.
from foretell.cli import (  # noqa: E402, F401
    advise,
    calibrate,
    checkpoint,
    compare,
    kv,
    long_runs,
    occupancy,
    plan,
    plan_serve,
    serve,
    simulate,
    ui,
)
