"""The files that a prediction is written to: a report to look at, and the timeline of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import InputError

if TYPE_CHECKING:
    from foretell.cost import Estimate, Program
    from foretell.graph import Graph
    from foretell.hardware import Device

__all__ = ["check", "ending", "recapture_of", "writable", "write_report", "write_trace"]

# Beyond this many ops a captured workload is not captured anew at other batches and precisions.
_MOST_RECAPTURED = 4000


def writable(path: Path, option: str = "--out") -> None:
    """Refuse a file that cannot be written, before anything slow begins."""
    try:
        possible = path.parent.is_dir() and not path.is_dir()
    except OSError:  # a name too long, say
        possible = False
    if not possible:
        raise InputError("cannot be written", f"{option} {path}", "give a file in a folder that exists")


def ending(path: Path, option: str, ends: Sequence[str]) -> None:
    """Refuse a file whose name does not say what it will hold."""
    if path.suffix.lower() not in ends:
        raise InputError(f"{path.name!r} does not end in {' or '.join(ends)}", f"{option} {path}", "name it so")


def check(html: Path | None, trace: Path | None, devices: int, workload: str = "") -> None:
    """Raise InputError where a file cannot be written, or cannot show what is asked for."""
    given = Path(workload.rpartition(":")[2])
    for option, path, ends in (("--html", html, (".html", ".htm")), ("--trace", trace, (".json",))):
        if path is None:
            continue
        writable(path, option)
        if not path.exists() or path.is_file():  # a device, as /dev/full is, has no kind of file to it
            ending(path, option, ends)
        if path.exists() and given.is_file() and path.samefile(given):
            raise InputError("would overwrite the workload", f"{option} {path}", "give another file")
    if trace is not None and devices > 1:
        raise InputError("a timeline is of one device", f"--trace {trace}", "name one device with --on")


def recapture_of(
    workload: str, settings: Mapping[str, Any], graph: Graph
) -> Callable[[Mapping[str, Any]], Graph | None] | None:
    """The workload's graph under settings changed, each captured once; None where `workload` is a graph itself."""
    import foretell

    if Path(workload).is_file():
        return None
    if not workload.startswith("llm:") and len(graph.ops) > _MOST_RECAPTURED:
        return None
    known: dict[tuple[tuple[str, Any], ...], Graph] = {}

    def again(changed: Mapping[str, Any]) -> Graph | None:
        if "batch" in changed and settings.get("inputs"):
            return None  # the inputs say what the batch is
        key = tuple(sorted(changed.items()))
        if key not in known:
            known[key] = foretell.capture(workload, **{**settings, **changed})
        return known[key]

    return again


def write_report(
    path: Path,
    *,
    workload: str,
    captured: Mapping[str, Any],
    graph: Graph,
    estimates: Sequence[Estimate],
    devices: Sequence[Device],
    how: Mapping[str, Any],
    settings: Sequence[str],
    command: str,
    largest_batches: Mapping[str, int | None],
) -> None:
    """Write the report of a prediction; `captured` are the settings of the capture, `how` those of the estimates."""
    from foretell.report.html import Page, html_page, variations

    recapture = recapture_of(workload, captured, graph)
    by_name = {estimate.device: estimate for estimate in estimates}
    program: Program = how["program"]
    own = graph.batch // (captured.get("accumulate") or 1) if workload.startswith("py:") else 1  # of its examples
    found = {
        device.name: variations(
            graph,
            device,
            by_name[device.name],
            program=program,
            how=how,
            recapture=recapture,
            batch=captured.get("batch") or own,
        )
        for device in devices
    }
    titles = {device.name: device for device in devices}
    page = Page(
        graph=graph,
        estimates=estimates,
        devices=[titles[estimate.device] for estimate in estimates],
        settings=settings,
        command=command,
        program=program,
        variations=found,
        largest_batches=largest_batches,
    )
    _write(path, "--html", lambda: path.write_text(html_page(page), encoding="utf-8"))


def write_trace(path: Path, graph: Graph, estimate: Estimate, program: Program) -> None:
    """Write the timeline of a predicted step as a Chrome trace."""
    from foretell.timeline import step_timeline, write_chrome

    _write(path, "--trace", lambda: write_chrome(step_timeline(graph, estimate, program), path))


def _write(path: Path, option: str, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", f"{option} {path}", "give another file"
        ) from error
