"""The card: one workload on one device, all that a person asks first, on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretell.cost.estimate import BOUNDS, MEMORY_PARTS, Estimate
from foretell.hardware.device import Device
from foretell.report.text import (
    UNKNOWN,
    Bar,
    Flow,
    Framed,
    add_row,
    not_counted_text,
    rate,
    share,
    singular,
    tail,
)
from foretell.units import (
    format_bytes,
    format_count,
    format_energy,
    format_flops,
    format_money,
    format_power,
    format_time,
)

__all__ = ["card"]

_MODULES = 5  # as many of the dearest modules as are shown


def card(
    estimate: Estimate,
    *,
    settings: Sequence[str] = (),
    device: Device | None = None,
    largest_batch: int | None = None,
) -> RenderableType:
    """A card of `estimate` for `rich.print`.

    `settings` are said beside the workload (batch, image size, …), `device` gives its full title and price,
    `largest_batch` is the largest batch that fits the device, where it is known.
    """
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(ratio=1)

    def add(name: str, *lines: RenderableType) -> None:
        add_row(rows, name, Group(*lines))

    def gap() -> None:
        add_row(rows, "", "")

    add("Settings", Flow(*settings, estimate.precision, estimate.runtime))
    gap()
    low, high = estimate.time_interval_s
    add(
        "Time",
        Flow(Text(f"{format_time(estimate.time_s)} per step", style="bold"), _step(estimate)),
        Text(f"80 % interval {format_time(low)} to {format_time(high)}; {estimate.interval_basis}", style="dim"),
    )
    add("Throughput", Flow(*_throughputs(estimate)))
    gap()
    most = share(_part(estimate, estimate.bound))
    advice = []
    if estimate.bound == "launch" and estimate.runtime == "eager":
        advice.append(Text("--runtime compiled launches fewer kernels", style="dim"))
    add("Bound by", Text(f"{estimate.bound}, for {most} of the time"), _bounds(estimate), *advice)
    gap()
    add("Work", Flow(*_work(estimate)))
    add("Memory", *_memory(estimate, largest_batch))
    add("Energy", _energy(estimate))
    add("Cost", _cost(estimate, device))
    if estimate.modules:
        gap()
        add("Dearest", _modules(estimate))
    if estimate.notes or estimate.not_counted:
        gap()
    if estimate.notes:
        add("Notes", *(Text(note) for note in estimate.notes))
    if estimate.not_counted:
        add("Not counted", Text(not_counted_text(estimate.not_counted)))

    title = f"{estimate.workload} · {estimate.mode} on {device.title if device else estimate.device}"
    return Framed(title, rows, f"{estimate.device} · {estimate.model} model")


def _step(estimate: Estimate) -> str:
    return "a step is " + ", ".join(
        f"{number:,} {noun if number != 1 else singular(noun)}" for noun, number in estimate.items.items()
    )


def _throughputs(estimate: Estimate) -> list[str]:
    if estimate.time_s <= 0:
        return [UNKNOWN]
    once: dict[int, str] = {}  # a token a sequence is one figure, not two
    for noun, number in estimate.items.items():
        once.setdefault(number, noun)
    return [f"{rate(number / estimate.time_s)} {noun}/s" for number, noun in once.items()]


def _part(estimate: Estimate, bound: str) -> float:
    return estimate.breakdown_s[bound] / estimate.time_s if estimate.time_s > 0 else 0.0


def _bounds(estimate: Estimate) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    for bound in BOUNDS:
        part = _part(estimate, bound)
        add_row(grid, bound, Bar(part), share(part), format_time(estimate.breakdown_s[bound]))
    return grid


def _work(estimate: Estimate) -> list[str]:
    mfu = UNKNOWN if estimate.mfu is None else share(estimate.mfu)
    parts = [
        format_flops(estimate.flops),
        f"{format_count(estimate.macs)}MAC" if estimate.macs >= 1000 else f"{estimate.macs} MAC",
        f"{format_count(estimate.parameters)} parameters",
        f"MFU {mfu}",
    ]
    if estimate.occupancy is not None:
        parts.append(f"occupancy {share(estimate.occupancy)}")
    return parts


def _memory(estimate: Estimate, largest_batch: int | None) -> list[RenderableType]:
    memory = estimate.memory
    peak = format_bytes(memory.peak_bytes)
    lines: list[RenderableType] = []
    if memory.capacity_bytes is None:
        lines.append(Text(f"{peak}; the device's capacity is unknown, so whether it fits is too"))
    else:
        used = memory.peak_bytes / memory.capacity_bytes
        fits = "fits by paging" if memory.paged_out_bytes else "fits"
        verdict = Text(fits, style="green") if memory.fits else Text("DOES NOT FIT", style="bold red")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        add_row(
            grid, f"{peak} of {format_bytes(memory.capacity_bytes)}", Bar(used, style=_tint(used)), share(used), verdict
        )
        lines.append(grid)
    if largest_batch is not None:
        none = "no batch fits" if largest_batch < 1 else f"largest batch that fits: {largest_batch:,}"
        lines.append(Text(none))
    parts = sorted(MEMORY_PARTS, key=lambda part: -memory.breakdown.get(part, 0))
    held = {part.replace("_", " "): memory.breakdown.get(part, 0) for part in parts}
    lines.append(Flow(*(f"{part} {format_bytes(size)}" for part, size in held.items() if size)))
    known = memory.breakdown.get("framework", 0) > 0  # as it is for NVIDIA's GPUs
    lines.append(
        Flow(
            f"allocated {format_bytes(memory.allocated_bytes)}",
            f"reserved {format_bytes(memory.reserved_bytes)}",
            f"nvidia-smi {peak}" if known else None,
        )
    )
    if not known:
        lines.append(Text("what the framework itself holds there is not known, and not counted", style="dim"))
    return lines


def _tint(used: float) -> str:
    return "red" if used > 1.0 else "yellow" if used > 0.9 else "cyan"


def _energy(estimate: Estimate) -> RenderableType:
    if estimate.energy_j is None:
        return Text(f"{UNKNOWN}: the device's power is not in the catalogue")
    noun, number = next(iter(estimate.items.items()))
    return Flow(
        f"{format_energy(estimate.energy_j)} per step",
        f"{format_energy(estimate.energy_j / number)} per {singular(noun)}",
        None if estimate.power_w is None else f"{format_power(estimate.power_w)} on average",
    )


def _cost(estimate: Estimate, device: Device | None) -> RenderableType:
    if estimate.cost_usd is None:
        return Text(f"{UNKNOWN}: no hourly price of the device is in the catalogue")
    noun, number = next(iter(estimate.items.items()))
    price = None if device is None else device.price_usd_per_h
    return Flow(
        f"{format_money(estimate.cost_usd)} per step",
        f"{format_money(1e6 * estimate.cost_usd / number)} per million {noun}",
        None if price is None else f"at {format_money(price)} an hour",
    )


def _modules(estimate: Estimate) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    for name, time_s in estimate.modules[:_MODULES]:
        part = time_s / estimate.time_s if estimate.time_s > 0 else 0.0
        add_row(grid, tail(name or "outside modules", 30), Bar(part, width=12), share(part), format_time(time_s))
    return grid
