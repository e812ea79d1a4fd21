"""A checkpoint for reading: what is stored in which types, the largest tensors, and what memory holds it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foretell.hardware import Device
from foretell.report.text import UNKNOWN, Bar, Flow, add_row, count, share, shorten, tail
from foretell.units import format_bytes, format_count
from foretell.workload.checkpoint import Checkpoint

__all__ = ["checkpoint_view"]

_KINDS = {"safetensors": "safetensors", "gguf": "GGUF"}
_SHOWN = 6  # metadata, by the names models give it
_TOLD = (
    "general.name", "general.architecture", "general.size_label", "block_count", "context_length", "embedding_length",
    "format", "modelspec.architecture", "modelspec.title",
)


def checkpoint_view(checkpoint: Checkpoint, devices: Sequence[Device], largest: int = 5) -> RenderableType:
    """Kind, parameters and bytes; by type; the `largest` tensors; which `devices` hold the weights alone."""
    return _View(checkpoint, tuple(devices), largest)


class _View:
    """The parts; names of tensors give way where the console is narrow."""

    def __init__(self, checkpoint: Checkpoint, devices: tuple[Device, ...], largest: int) -> None:
        self.checkpoint, self.devices, self.largest = checkpoint, devices, largest

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 100)
        one = self.checkpoint
        per = 8 * one.nbytes / one.parameters if one.parameters else 0.0
        yield Text(shorten(f"{_KINDS[one.kind]} checkpoint {tail(one.path, width - 24)}", width), style="bold")
        yield Flow(
            count(len(one.tensors), "tensor"),
            f"{format_count(one.parameters)} parameters",
            format_bytes(one.nbytes),
            f"{per:.3g} bits each" if per else None,
            f"{count(len(one.files), 'file')} of {format_bytes(one.file_bytes)}",
        )
        told = self._metadata()
        if told:
            yield Flow(*told)
        yield Text("")
        yield self._types()
        if one.tensors and self.largest:
            yield Text("")
            yield self._tensors(width)
        if self.devices:
            yield Text("")
            yield Group(
                Text("Memory that holds the weights as they are stored, and nothing else", style="bold"),
                self._devices(),
            )

    def _metadata(self) -> list[str]:
        found = self.checkpoint.metadata
        keys = [key for name in _TOLD for key in found if key == name or key.endswith("." + name)]
        return [f"{key.rpartition('.')[2].replace('_', ' ')} {shorten(found[key], 30)}" for key in keys[:_SHOWN]]

    def _types(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("type", no_wrap=True)
        for name in ("tensors", "parameters", "bytes"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("of all bytes", no_wrap=True)
        total = max(1, self.checkpoint.nbytes)
        for dtype, (tensors, elements, nbytes) in self.checkpoint.by_dtype.items():
            bar = Bar(nbytes / total, width=16)
            add_row(table, dtype, f"{tensors:,}", format_count(elements), format_bytes(nbytes), bar)
        return table

    def _tensors(self, width: int) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("largest tensors", no_wrap=True)
        table.add_column("shape", no_wrap=True)
        table.add_column("type", no_wrap=True)
        table.add_column("bytes", justify="right", no_wrap=True)
        rows = [(t.name, "×".join(map(str, t.shape)) or "scalar", t.dtype, format_bytes(t.nbytes))
                for t in self.checkpoint.largest(self.largest)]
        shapes = min(30, max([5, *(len(row[1]) for row in rows)]))
        used = shapes + max([4, *(len(row[2]) for row in rows)]) + max([5, *(len(row[3]) for row in rows)]) + 8
        room = max(12, width - used)
        for name, shape, dtype, nbytes in rows:
            name = name if name.isprintable() else "?"
            add_row(table, tail(name, room), shorten(shape, shapes), dtype, nbytes)
        return table

    def _devices(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "left", "right", "left"):
            table.add_column(no_wrap=True, justify=justify)
        needed = self.checkpoint.nbytes
        for device in self.devices:
            if device.memory_bytes is None:
                add_row(table, f"  {device.name}", UNKNOWN, "", "", "")
                continue
            part = needed / device.memory_bytes
            cards = -(-needed // device.memory_bytes)
            says = "holds them" if part <= 1.0 else f"takes {cards:,} or more"
            memory = format_bytes(device.memory_bytes)
            add_row(table, f"  {device.name}", memory, Bar(part, width=16), share(part), says)
        return table
