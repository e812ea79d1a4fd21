"""``foretell calibrate``: measure the machine at hand, or scale a model to a table of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.app import app


@app.command()
def calibrate(
    here: Annotated[bool, typer.Option("--here", help="Measure this machine with microbenchmarks.")] = False,
    table: Annotated[
        Path | None,
        typer.Option("--from", metavar="TABLE.csv", help="Measurements; columns: docs/calibrate.md."),
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="DEVICE", help="With --from: the device that was measured.")
    ] = None,
    model: opt.Model = "auto",
    kind: Annotated[
        str | None, typer.Option("--device", metavar="KIND", help="With --here: cpu (the default) or gpu.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="S", help="With --here: how long to take, about; 90 unless given."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The calibration; by default ~/.config/foretell/local.calibration.json, or DEVICE.calibration.json.",
        ),
    ] = None,
) -> None:
    """Calibrate a prediction: to this machine (--here), or to measurements of a device (--from TABLE --on DEVICE).

    --here is interrupted at will and goes on from there when it is called again.
    """
    from foretell.cli.terminal import progress, show_text
    from foretell.errors import InputError

    if here == (table is not None):
        raise InputError("give one of --here and --from", "calibrate", "foretell calibrate --here")
    if here:
        if on is not None:
            raise InputError("measures this machine", f"--on {on}", "leave out --on, or give a table with --from")
        kind = "cpu" if kind is None else kind
        if kind not in ("cpu", "gpu"):
            raise InputError(f"unknown kind of device {kind[:40]!r}", "--device", "give cpu or gpu")
        from foretell.cost.model import AUTO

        if model != AUTO:
            raise InputError("the device decides which model is calibrated", f"--model {model[:40]}", "leave it out")
        seconds = 90.0 if seconds is None else seconds
        from foretell.calibrate.here import MOST_S
        from foretell.calibrate.here import here as measure

        if not 1.0 <= seconds <= MOST_S:
            raise InputError(f"{seconds:g} seconds", "--seconds", f"give 1 to {MOST_S:g}; 90 are enough")

        from foretell.workload.resolve import need

        need("torch", "torch")
        with progress("Calibrating") as update:
            found = measure(out, seconds, kind=kind, progress=update)
        show_text(
            f"{found.device.title}: {found.cases} microbenchmarks, passes differ by {found.spread - 1:.0%} (median), "
            f"the model by {found.error:.0%}\n"
            f"wrote {found.calibration}\nwrote {found.toml}\n"
            f"now: foretell predict WORKLOAD --on {'local-cpu' if kind == 'cpu' else 'local'}"
        )
        return
    assert table is not None
    for option, value in (("--device", kind), ("--seconds", seconds)):
        if value is not None:
            raise InputError("goes with --here, where something is measured", f"{option} {value}", "leave it out")
    if on is None:
        raise InputError("--from needs the device that was measured", "calibrate", "add --on DEVICE")
    from foretell.calibrate.tables import FEW, from_table, write
    from foretell.cost.model import AUTO, default_model
    from foretell.hardware import device
    from foretell.report.text import count

    measured = device(on)
    name = default_model(measured) if model == AUTO else model
    path = out or Path(f"{measured.name}.calibration.json")
    with progress(f"Reading {table}"):
        scales = from_table(table, measured, name)
    write(scales, path)
    lines = []
    for name_, factor in scales.factors.items():
        range_ = f"{factor.mid * factor.low:.3f} … {factor.mid * factor.high:.3f}"
        said = f"80 % within {range_}" if factor.rows >= FEW else f"{range_} is assumed, a factor of 2"
        lines.append(f"{name_:<16}× {factor.mid:.3f}  {said}  {count(factor.rows, 'row')}")
    if any(factor.rows < FEW for factor in scales.factors.values()):
        lines.append(f"fewer than {FEW} rows show no range: measure more")
    now = f"now: foretell predict WORKLOAD --on {measured.name} --model {name} --calibration {path}"
    show_text("\n".join([*lines, f"wrote {path}", now]))
