"""Where output goes: the console, and progress on standard error for what takes a while."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

if TYPE_CHECKING:
    from rich.progress import TaskID

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
def progress(what: str, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show on standard error that the block is at work: only on a terminal, and only if it is slow.

    A spinner with the time since; a bar from when the block calls what it is given with (what, done, total). With
    `lines`, what takes very long says a line for each `what` where there is no terminal.
    """
    if not sys.stderr.isatty():
        said: set[str] = set()

        def note(what: str, done: int, total: int) -> None:
            if lines and what not in said:
                said.add(what)
                print(f"{what}: {total:,}", file=sys.stderr, flush=True)

        yield note
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    text = TextColumn("{task.description}", markup=False)
    spinner = Progress(SpinnerColumn(), text, TimeElapsedColumn(), console=console, transient=True)
    bar = Progress(
        SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    )
    spinner.add_task(what, total=None)
    timer = threading.Timer(_DELAY_S, spinner.start)
    timer.daemon = True
    timer.start()
    tasks: dict[str, TaskID] = {}

    def update(what: str, done: int, total: int) -> None:
        if not tasks:
            timer.cancel()
            timer.join()
            spinner.stop()
            bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done)

    try:
        yield update
    finally:
        timer.cancel()
        timer.join()
        spinner.stop()
        bar.stop()
