"""Where output goes: the console, and progress on standard error for what takes a while."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType

__all__ = ["progress", "show", "show_text"]

# Output that is piped or kept has no width of its own; tables then need not be cut to a screen's.
_PIPED_WIDTH = 160
_DELAY_S = 0.5  # what is done sooner needs no progress bar


def _console() -> Console:
    # A terminal that cannot show a character gets a question mark instead of an error.
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(markup=False, highlight=False, emoji=False, width=_PIPED_WIDTH if piped else None)


def show(*renderables: RenderableType) -> None:
    """Print cards and tables."""
    console = _console()
    if console.is_terminal:
        for renderable in renderables:
            console.print(renderable)
        return
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def show_text(text: str) -> None:
    """Print text as it is, neither wrapped nor coloured: JSON, formulas."""
    print(text)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A spinner with the time since, on standard error, while the block runs; only on a terminal, if it is slow."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    spinner = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    spinner.add_task(what, total=None)
    timer = threading.Timer(_DELAY_S, spinner.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        spinner.stop()
