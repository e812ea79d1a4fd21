"""``foretell occupancy``: the calculator, for one launch or for the kernels of a compiled file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as opt
from foretell.cli.app import app

if TYPE_CHECKING:
    from foretell.cost.binaries import Kernel

_KERNEL = "The kernel"
_WHERE = "Where it runs"
_INDENTED = 1000  # a longer list is not read by eye, and takes half as long to write on one line


@app.command()
def occupancy(
    registers: Annotated[
        int | None,
        typer.Option("--registers", metavar="N", help="Registers of a thread.", rich_help_panel=_KERNEL),
    ] = None,
    shared: Annotated[
        str,
        typer.Option(
            "--shared",
            metavar="SIZE",
            help="Shared memory of a block, e.g. 32KiB; with a file, what is dynamic.",
            rich_help_panel=_KERNEL,
        ),
    ] = "0 B",
    block: Annotated[
        int | None, typer.Option("--block", metavar="N", help="Threads of a block.", rich_help_panel=_KERNEL)
    ] = None,
    grid: Annotated[
        int | None,
        typer.Option(
            "--grid", metavar="N", help="Blocks launched: waves and achieved occupancy too.", rich_help_panel=_KERNEL
        ),
    ] = None,
    ptxas: Annotated[
        str | None,
        typer.Option(
            "--ptxas",
            metavar="FILE",
            help="Kernels from what ptxas -v printed; - for standard input.",
            rich_help_panel=_KERNEL,
        ),
    ] = None,
    cubin: Annotated[
        Path | None,
        typer.Option(
            "--cubin", metavar="FILE", help="Kernels of a cubin, fatbin, object or library.", rich_help_panel=_KERNEL
        ),
    ] = None,
    cc: Annotated[
        str | None,
        typer.Option("--cc", metavar="X.Y", help="A compute capability, 3.5 to 12.1.", rich_help_panel=_WHERE),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="DEVICE", help="A device; see foretell devices.", rich_help_panel=_WHERE),
    ] = None,
    carveout: Annotated[
        str | None,
        typer.Option(
            "--carveout",
            metavar="SIZE",
            help="What is configured as shared memory of the L1 array (all it may be).",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    json: opt.Json = False,
) -> None:
    """How many warps a multiprocessor holds, what limits them, and what change would lift it."""
    from foretell.cli.terminal import show, show_text
    from foretell.cost.launches import document, launches, that_run_on
    from foretell.cost.occupancy import limits
    from foretell.errors import InfeasibleError
    from foretell.hardware import device
    from foretell.report.documents import json_text
    from foretell.report.occupancy import launch_table, launch_view
    from foretell.units import parse_bytes

    if cc is not None:
        limits(cc)
    place = None if on is None else device(on)
    kernels, where = _kernels(registers, ptxas, cubin)
    found = launches(
        that_run_on(kernels, cc if place is None else place.compute_capability),
        block=block,
        dynamic_bytes=parse_bytes(shared, "--shared"),
        capability=cc,
        device=place,
        grid=grid,
        carveout_bytes=None if carveout is None else parse_bytes(carveout, "--carveout"),
        where=where,
    )
    if registers is not None and not found[0].calculation.blocks:
        one = found[0].calculation
        hint = ", or ".join(change.text for change in one.changes[:2])
        raise InfeasibleError(
            f"no such block can be resident on {found[0].place}: {' and '.join(one.limiting)} in the way",
            hint or "give smaller blocks, fewer registers or less shared memory",
        )
    if json:
        show_text(json_text(document(found), 2 if len(found) <= _INDENTED else None))
    elif len(found) == 1:
        show(launch_view(found[0]))
    else:
        show(launch_table(found))


def _kernels(registers: int | None, ptxas: str | None, cubin: Path | None) -> tuple[list[Kernel], str | None]:
    """The kernels that were asked about, and the file they are from."""
    from foretell.cost.binaries import Kernel, read_binary, read_ptxas
    from foretell.errors import InputError

    given = [
        name
        for name, value in (("--registers", registers), ("--ptxas", ptxas), ("--cubin", cubin))
        if value is not None
    ]
    if len(given) != 1:
        raise InputError(
            "several kernels" if given else "no kernel",
            ", ".join(given) or "foretell occupancy",
            "give one of --registers N, --ptxas FILE, --cubin FILE",
        )
    if registers is not None:
        return [Kernel("", registers, 0)], None
    if cubin is not None:
        return read_binary(cubin), str(cubin)
    assert ptxas is not None
    return (_piped(), "standard input") if ptxas == "-" else (read_ptxas(Path(ptxas)), ptxas)


def _piped() -> list[Kernel]:
    from foretell.cost.binaries import MOST_CHARACTERS, parse_ptxas
    from foretell.errors import InputError

    data = sys.stdin.buffer.read(MOST_CHARACTERS + 1)
    if len(data) > MOST_CHARACTERS:
        raise InputError(f"is longer than {MOST_CHARACTERS:,} bytes", "standard input", "give what ptxas -v printed")
    return parse_ptxas(data.decode("utf-8", "replace"), "standard input")
