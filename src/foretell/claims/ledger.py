"""The ledger: every module below this package that has `CLAIMS`, and the figures committed beside it."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretell.claims.claim import Claim, Obtained, Record
from foretell.errors import ForetellError, InputError, unknown

Progress = Callable[[Claim], None]


def claims(*ids: str) -> tuple[Claim, ...]:
    """The claims of these ids or systems, all without any; in the order of rooms, systems and modules.

    Listing runs nothing and imports no framework. Raises UnknownNameError with near names.
    """
    return _chosen(ids, _ledger())


def run(*ids: str, progress: Progress | None = None) -> tuple[Claim, ...]:
    """Those claims with their figures obtained anew; claims not tried come back as they are.

    `progress` is told each claim before it runs.
    """
    return tuple(_rerun(claim, progress) for claim in claims(*ids))


def record(*ids: str, progress: Progress | None = None) -> tuple[Claim, ...]:
    """`run`, and write each figure to the data file beside its claim, to be committed.

    Figures of claims that are gone are dropped from the files it writes.
    """
    places = {claim.id: path for claim, path in _found()}
    # The claims as their modules state them: malformed figures must not stop their being recorded anew.
    chosen = _chosen(ids, {claim.id: claim for claim, _ in _found()})
    done: list[Claim] = []
    for claim in chosen:
        done.append(new := _rerun(claim, progress))
        if new.obtained is None or new.record is None:
            continue
        path = places[claim.id]
        data = _read(path) | {claim.id: _written(new.obtained, new.record)}
        ordered = {name: data[name] for name, place in places.items() if place == path and name in data}
        path.write_text(json.dumps(ordered, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _ledger.cache_clear()
    return tuple(done)


def _chosen(ids: tuple[str, ...], ledger: Mapping[str, Claim]) -> tuple[Claim, ...]:
    if not ids:
        return tuple(ledger.values())
    systems = dict.fromkeys(claim.system for claim in ledger.values())
    chosen: dict[str, Claim] = {}
    for name in ids:
        folded = _folded(name)
        found = [c for c in ledger.values() if folded in (_folded(c.id), _folded(c.system))]
        if not found:
            raise unknown("claim or system", name, [*systems, *ledger])
        chosen.update((c.id, c) for c in found)
    return tuple(chosen.values())


def _rerun(claim: Claim, progress: Progress | None) -> Claim:
    if claim.run is None:
        return claim
    if progress is not None:
        progress(claim)
    start = time.perf_counter()
    obtained = claim.run()
    made = Record(
        date=date.today().isoformat(),
        versions=MappingProxyType(_versions()),
        command=f"foretell claims {claim.id} --run",
        took_s=round(time.perf_counter() - start, 1),
    )
    return replace(claim, obtained=obtained, record=made)


def collect(found: Iterator[tuple[Claim, Path]]) -> dict[str, Claim]:
    """Claims by id, with their committed figures. Refuses ids that differ in case or punctuation only."""
    ledger: dict[str, Claim] = {}
    spelled: dict[str, str] = {}
    files: dict[Path, dict[str, Any]] = {}
    for claim, path in found:
        other = spelled.setdefault(_folded(claim.id), claim.id)
        if claim.id in ledger or other != claim.id:
            raise ForetellError(f"two claims are called {other!r} and {claim.id!r}", "give one of them another id")
        data = files.setdefault(path, _read(path))
        ledger[claim.id] = _with_figures(claim, data[claim.id], path) if claim.id in data else claim
    for path, data in files.items():
        for name in data:
            if name not in ledger:
                raise InputError(f"figures for {name!r}, which is no claim", str(path), "remove or rename them")
    return ledger


@cache
def _ledger() -> Mapping[str, Claim]:
    return MappingProxyType(collect(_found()))


def _found() -> Iterator[tuple[Claim, Path]]:
    """Every claim, with the data file that holds its figures (beside its module; it need not exist)."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    for room in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not room.ispkg:
            continue
        for system in pkgutil.iter_modules(importlib.import_module(room.name).__path__, f"{room.name}."):
            module = importlib.import_module(system.name)
            assert module.__file__ is not None
            for claim in getattr(module, "CLAIMS", ()):
                yield claim, Path(module.__file__).with_suffix(".json")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", str(path), "restore it, or delete it and record anew") from error
    if not isinstance(data, dict):
        raise InputError("not a JSON object", str(path), "restore it, or delete it and record anew")
    return data


def _with_figures(claim: Claim, data: Any, path: Path) -> Claim:
    try:
        obtained = Obtained(str(data["text"]), float(data["value"]), MappingProxyType(dict(data["details"])))
        made = Record(
            str(data["date"]), MappingProxyType(dict(data["versions"])), str(data["command"]), float(data["took_s"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"the figures of {claim.id!r} are malformed: {error!r}", str(path), "record them anew"
        ) from error
    return replace(claim, obtained=obtained, record=made)


def _written(obtained: Obtained, made: Record) -> dict[str, Any]:
    return {
        "text": obtained.text,
        "value": obtained.value,
        "details": dict(obtained.details),
        "date": made.date,
        "versions": dict(made.versions),
        "command": made.command,
        "took_s": made.took_s,
    }


def _versions() -> dict[str, str]:
    """Versions of what a figure may depend on."""
    from foretell import __version__

    found = {"foretell": __version__, "python": platform.python_version()}
    for library in ("torch", "torchvision", "timm", "transformers"):
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} CPUs"
    return found


def _folded(name: str) -> str:
    return name.casefold().replace("_", "-")
