"""Several estimates of one workload side by side, a row a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foretell.cost.estimate import Estimate
from foretell.errors import unknown
from foretell.report.text import Flow, add_row, interval, middle, not_counted_text, rate, share
from foretell.units import format_bytes, format_energy, format_money, format_time

__all__ = ["SORT_KEYS", "comparison", "sorted_estimates"]

_WIDE = 100  # cells from which columns are set apart further

# Best first; what is unknown comes last, whatever the order.
_ORDER: Mapping[str, Callable[[Estimate], float | None]] = {
    "time": lambda e: e.time_s,
    "throughput": lambda e: -e.throughput_per_s,
    "memory": lambda e: e.memory.peak_bytes,
    "mfu": lambda e: None if e.mfu is None else -e.mfu,
    "energy": lambda e: e.energy_j,
    "cost": lambda e: e.cost_usd,
}
SORT_KEYS: tuple[str, ...] = ("asked", "device", *_ORDER)


def sorted_estimates(estimates: Sequence[Estimate], by: str = "asked") -> list[Estimate]:
    """`estimates` with the best first by one of `SORT_KEYS`; ``asked`` leaves them as they were asked for."""
    if by not in SORT_KEYS:
        raise unknown("sort key", by, SORT_KEYS)
    if by == "asked":
        return list(estimates)
    if by == "device":
        return sorted(estimates, key=lambda e: e.device)

    def rank(estimate: Estimate) -> tuple[bool, float]:
        value = _ORDER[by](estimate)
        return value is None, 0.0 if value is None else value

    return sorted(estimates, key=rank)


def comparison(
    estimates: Sequence[Estimate],
    *,
    settings: Sequence[str] = (),
    largest_batches: Mapping[str, int | None] | None = None,
) -> RenderableType:
    """A table of `estimates`, in their order. They are of one workload in one mode; `settings` are said above it.

    `largest_batches`, the largest batch that fits by device, takes the place of whether this one does.
    """
    first = estimates[0]
    by_model = _models(estimates)
    lines: list[RenderableType] = [
        Text(f"{first.workload} · {first.mode}", style="bold"),
        Flow(*settings, first.precision, first.runtime, "mixed models" if by_model else f"{first.model} model"),
        Text(""),
        _Rows(estimates, largest_batches or {}),
    ]
    # What holds for every device is said once, the rest with its device.
    notes = [Text(by_model)] if by_model else []
    shared = [note for note in first.notes if all(note in e.notes for e in estimates)]
    notes += [Text(note) for note in shared]
    notes += [Text(f"{e.device}: {note}") for e in estimates for note in e.notes if note not in shared]
    left_out: dict[str, int] = {}
    for estimate in estimates:
        left_out.update(estimate.not_counted)
    if left_out:
        notes.append(Text(f"Not counted: {not_counted_text(left_out)}"))
    if notes:
        lines += [Text(""), *notes]
    return Group(*lines)


def _models(estimates: Sequence[Estimate]) -> str:
    """Which devices each model predicted, the one of most devices last; empty where one did all."""
    devices: dict[str, list[str]] = {}
    for estimate in estimates:
        devices.setdefault(estimate.model, []).append(estimate.device)
    if len(devices) < 2:
        return ""
    *fewer, (most, _) = sorted(devices.items(), key=lambda item: len(item[1]))
    return "; ".join([f"{', '.join(names)}: {model} model" for model, names in fewer] + [f"the rest: {most} model"])


# What goes first where not every column fits, and the room the device's name keeps.
_DISPENSABLE = ("80 % range", "energy", "MFU")
_LEAST_DEVICE = 14


class _Rows:
    """The table itself: as many columns as the console holds uncut."""

    def __init__(self, estimates: Sequence[Estimate], batches: Mapping[str, int | None]) -> None:
        self.estimates = estimates
        self.batches = batches

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gap = 3 if options.max_width >= _WIDE else 1
        noun, number = next(iter(self.estimates[0].items.items()))
        columns = self._columns(noun, number)
        width = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
        device = width.pop("device")
        names = columns["device"]
        room = min(device, _LEAST_DEVICE)
        while len({middle(name, room) for name in names}) < len(set(names)):  # a row is told from the others
            room += 1
        for name in _DISPENSABLE:  # numbers are never cut: where they do not all fit, columns go
            if room + sum(w + gap for w in width.values()) <= options.max_width:
                break
            width.pop(name)
        room = max(room, min(device, options.max_width - sum(w + gap for w in width.values())))
        columns["device"] = [middle(name, room) for name in names]
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        table.add_column("device", no_wrap=True, width=room)
        for name in width:
            table.add_column(name, justify="right", no_wrap=True, min_width=width[name])
        rows = zip(*(columns[name] for name in ("device", *width)), strict=True)
        for e, row in zip(self.estimates, rows, strict=True):
            add_row(table, *row, style=None if e.memory.fits is not False else "dim")
        yield table
        yield Text("")
        units = f"time and energy are of one step, cost of a million {noun}"
        if self.batches:
            units += "; fits ≤ is the largest batch that fits"
            if any(e.memory.fits is False for e in self.estimates):
                units += ", no: the one asked for does not"
        yield Text(units + ("; ? is unknown" if self._gaps() else ""), style="dim")

    def _columns(self, noun: str, number: int) -> dict[str, list[str]]:
        estimates = self.estimates
        word = {True: "yes", False: "no", None: "?"}
        batches = [self.batches.get(e.device) for e in estimates]
        return {
            "device": [e.device for e in estimates],
            "time": [format_time(e.time_s) for e in estimates],
            "80 % range": [interval(*e.time_interval_s) for e in estimates],
            f"{noun}/s": [rate(e.throughput_per_s) for e in estimates],
            "memory": [format_bytes(e.memory.peak_bytes) for e in estimates],
            "fits ≤" if self.batches else "fits": [
                word[e.memory.fits] if batch is None else f"{batch:,}" if e.memory.fits else _too_large(batch)
                for e, batch in zip(estimates, batches, strict=True)
            ],
            "MFU": ["?" if e.mfu is None else share(e.mfu) for e in estimates],
            "energy": ["?" if e.energy_j is None else format_energy(e.energy_j) for e in estimates],
            "cost/M": ["?" if e.cost_usd is None else format_money(1e6 * e.cost_usd / number) for e in estimates],
        }

    def _gaps(self) -> bool:
        return any(None in (e.mfu, e.energy_j, e.cost_usd, e.memory.fits) for e in self.estimates)


def _too_large(most: int) -> str:
    return f"no, ≤ {most:,}" if most else "no batch"
