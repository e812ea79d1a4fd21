"""Programs of zoo workloads at any batch size, from captures at two, kept on disk.

Everything a program's columns hold is affine in the batch: a matrix product over batch·positions rows, bytes of
activations plus bytes of weights. Two captures thus give all batches, and one (model, image size, layout, precision)
serves every table that measured it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from foretell.cost.model import RUNTIMES, Settings
from foretell.cost.program import Program, lower
from foretell.errors import CaptureError, ForetellError
from foretell.graph import OpTable

# Two batch sizes that meet no special case (a batch of one changes strides and may be squeezed away).
BATCHES = (8, 16)

_COLUMNS = tuple(f.name for f in fields(OpTable) if f.name not in ("name", "module"))
_OWN = ("kernels", "issues", "group", "strided")


@dataclass(frozen=True, slots=True)
class Programs:
    """One workload lowered for each runtime, as a function of the batch."""

    workload: str
    family: str
    parameters: int
    settings: Mapping[str, Settings]
    small: Mapping[str, Program]
    large: Mapping[str, Program]

    def at(self, batch: int, runtime: str) -> Program:
        """The program at this batch size."""
        return at_batch(self.small[runtime], self.large[runtime], BATCHES, batch)


def at_batch(small: Program, large: Program, batches: tuple[int, int], batch: int) -> Program:
    """The program at `batch`, on the line through those at two other sizes.

    Raises ForetellError where they differ in more than sizes, as where control flow depends on the batch.
    """
    a, b = small.table, large.table
    same = len(a) == len(b) and bool(np.all(a.name == b.name)) and bool(np.all(a.dtype == b.dtype))
    if not same:
        raise ForetellError(
            f"the workload runs other operations at batch {batches[0]} than at {batches[1]}",
            "capture it at the very batch size",
        )
    share = (batch - batches[0]) / (batches[1] - batches[0])
    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        low, high = getattr(a, name), getattr(b, name)
        if low.dtype.kind == "f":
            low = np.maximum(0.0, np.rint(low + share * (high - low)))
        columns[name] = low
    return replace(small, table=OpTable(name=a.name, module=a.module, **columns))


class Store:
    """Programs on disk under `folder` (None: kept nowhere), one file each, written whole or not at all."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, workload: str, **options: Any) -> Programs:
        """The programs of a workload under capture options (without a batch). Raises what capture raises.

        Two more options are known here: ``fast_norm=True`` and ``fused_attn=False`` build timm models after
        ``timm.layers.set_fast_norm(True)`` and ``set_fused_attn(False)``.
        A capture that failed is remembered too, and fails again with the same message.
        """
        key = _key(workload, options)
        path = None if self._folder is None else self._folder / f"{key}.npz"
        if path is not None and path.exists():
            try:
                return load(path.read_bytes())
            except (ValueError, KeyError, OSError, zipfile.BadZipFile):
                path.unlink(missing_ok=True)  # damaged: made anew
        try:
            programs: Programs | str = _capture(workload, options)
        except ForetellError as error:
            programs = str(error)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(dump(programs))
            part.replace(path)
        if isinstance(programs, str):
            raise CaptureError(programs)
        return programs


def dump(programs: Programs | str) -> bytes:
    """Bytes that `load` reads; text stands for a capture that failed."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    head: dict[str, Any] = {"error": programs} if isinstance(programs, str) else {}
    if isinstance(programs, Programs):
        head = {
            "workload": programs.workload,
            "family": programs.family,
            "parameters": programs.parameters,
            "settings": {
                runtime: {f.name: getattr(s, f.name) for f in fields(Settings)}
                for runtime, s in programs.settings.items()
            },
        }
        for size, group in (("small", programs.small), ("large", programs.large)):
            for runtime, program in group.items():
                for name in _OWN:
                    arrays[f"{size}.{runtime}.{name}"] = getattr(program, name)
                for name in ("name", "module"):
                    arrays[f"{size}.{runtime}.{name}"] = getattr(program.table, name).astype(np.str_)
                for name in _COLUMNS:
                    arrays[f"{size}.{runtime}.{name}"] = getattr(program.table, name)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, head=np.array(json.dumps(head)), **arrays)
    return buffer.getvalue()


def load(data: bytes) -> Programs:
    """What `dump` wrote. Raises CaptureError where that was a failure."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        head = json.loads(str(arrays["head"]))
        if "error" in head:
            raise CaptureError(head["error"])
        sizes: dict[str, dict[str, Program]] = {}
        for size in ("small", "large"):
            sizes[size] = {}
            for runtime in head["settings"]:
                at = f"{size}.{runtime}."
                table = OpTable(
                    name=arrays[at + "name"].astype(object),
                    module=arrays[at + "module"].astype(object),
                    **{name: arrays[at + name] for name in _COLUMNS},
                )
                own = {name: arrays[at + name] for name in _OWN}
                sizes[size][runtime] = replace(Program.of(table), runtime=runtime, **own)
    settings = {runtime: Settings(**values) for runtime, values in head["settings"].items()}
    return Programs(head["workload"], head["family"], head["parameters"], settings, sizes["small"], sizes["large"])


def _capture(workload: str, options: Mapping[str, Any]) -> Programs:
    from foretell.workload.options import options as checked
    from foretell.workload.resolve import resolve

    chosen = dict(options)
    switches = {name: chosen.pop(name) for name in _SWITCHES if name in chosen}
    with _timm_switches(switches), _no_graph_cache():
        graphs = [resolve(workload, checked(batch=batch, **chosen)) for batch in BATCHES]
    small, large = ({runtime: lower(graph, runtime) for runtime in RUNTIMES} for graph in graphs)
    settings = {runtime: Settings.of(graphs[0], runtime) for runtime in RUNTIMES}
    return Programs(workload, family_of(workload), graphs[0].parameters, settings, small, large)


# Switches of timm that change what its models run, with their defaults.
_SWITCHES = {"fast_norm": False, "fused_attn": True}


@contextmanager
def _timm_switches(switches: Mapping[str, bool]) -> Iterator[None]:
    """While active, timm builds models with these switches."""
    if not switches:
        yield
        return
    from timm.layers import set_fast_norm, set_fused_attn

    def turn(values: Mapping[str, bool]) -> None:
        set_fast_norm(values["fast_norm"])
        set_fused_attn(values["fused_attn"])

    turn({**_SWITCHES, **switches})
    try:
        yield
    finally:
        turn(_SWITCHES)


@contextmanager
def _no_graph_cache() -> Iterator[None]:
    """Programs are kept here; keeping the graphs as well would take tens of times the room."""
    before = os.environ.get("FORETELL_CACHE")
    os.environ["FORETELL_CACHE"] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ["FORETELL_CACHE"]
        else:
            os.environ["FORETELL_CACHE"] = before


def family_of(workload: str) -> str:
    """The architecture family: for ``timm:NAME`` the module of timm that defines it, else the workload itself."""
    scheme, _, name = workload.partition(":")
    if scheme != "timm":
        return workload
    from timm.models import get_deprecated_models, model_entrypoint

    current = get_deprecated_models().get(name) or name
    return str(model_entrypoint(current.partition(".")[0]).__module__.rpartition(".")[2])


def _key(workload: str, options: Mapping[str, Any]) -> str:
    from foretell.workload.cache import key  # knows the libraries' versions and this package's code
    from foretell.workload.options import options as checked

    libraries = ["torch", "timm"] if workload.startswith("timm:") else ["torch"]
    chosen = dict(options)
    extra = repr([chosen.pop(name, default) for name, default in _SWITCHES.items()])
    base = key(workload, checked(batch=BATCHES[0], **chosen), libraries)
    return hashlib.sha256((base + extra + _lowering()).encode()).hexdigest()


@cache
def _lowering() -> str:
    """Changes when the code that tabulates and lowers graphs does."""
    from foretell.cost import program
    from foretell.graph import table

    code = b"".join(Path(str(file)).read_bytes() for file in (table.__file__, program.__file__, __file__))
    return hashlib.sha256(code).hexdigest()
