"""What the page may ask for: names and numbers. Nothing in a request is ever run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foretell.cost.model import RUNTIMES
from foretell.errors import InputError, unknown
from foretell.hardware import Device, device
from foretell.workload.options import Options, options

__all__ = ["Request", "read_request"]

_MOST_DEVICES = 8
_MOST_CHARACTERS = 200
_NUMBERS = ("batch", "image_size", "seq_len", "context")
_NAMES = ("phase", "precision")
_FIELDS = frozenset(("workload", "devices", "runtime", "alternatives", *_NUMBERS, *_NAMES))

# Prefixes of which the rest is a name in a catalogue, and those of which it is a file that holds data only.
_CATALOGUES = ("timm", "torchvision", "zoo", "llm")
_FILES = {"hf": (".json",), "onnx": (".onnx",), "pt2": (".pt2",), "llm": (".json", ".toml")}


@dataclass(frozen=True, slots=True)
class Request:
    """A prediction that is asked for. `settings` are keywords of `foretell.capture`, `options` the same, checked.

    With `alternatives` the workload is also captured at other batches and precisions where that takes a while.
    """

    workload: str
    devices: tuple[Device, ...]
    settings: Mapping[str, Any]
    options: Options
    runtime: str
    alternatives: bool

    @property
    def is_file(self) -> bool:
        """Whether the workload is a captured graph, which takes no settings."""
        return ":" not in self.workload

    @property
    def command(self) -> str:
        """The command that predicts the same, for a shell."""
        words = ["foretell", "predict", self.workload, "--on", ",".join(d.name for d in self.devices)]
        for name, value in self.settings.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        if self.runtime != "eager":
            words += ["--runtime", self.runtime]
        return shlex.join(words)


def read_request(data: Any, folder: Path) -> Request:
    """Check what the page sent; files must lie within `folder`. Raises InputError or UnknownNameError."""
    if not isinstance(data, dict):
        raise InputError("the request is no object", repair="use the form")
    for name in data:
        if name not in _FIELDS:
            raise unknown("field", str(name)[:80], _FIELDS)
    workload = _workload(data.get("workload"), folder)
    names = data.get("devices")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InputError("no device is chosen", "Devices", "choose at least one")
    if len(names) > _MOST_DEVICES:
        raise InputError(f"{len(names)} devices are chosen", "Devices", f"choose at most {_MOST_DEVICES}")
    devices = tuple({found.name: found for name in names if (found := device(name[:_MOST_CHARACTERS]))}.values())
    settings: dict[str, Any] = {}
    for name in _NUMBERS:
        value = data.get(name)
        if value is None or value == "":
            continue
        text = str(value).strip()
        if not text.isascii() or not text.isdigit() or len(text) > 12:
            where = name.replace("_", " ").capitalize()
            raise InputError(f"{text[:40]!r} is no whole number", where, "give digits only, or leave it out")
        settings[name] = int(text)
    for name in _NAMES:
        value = data.get(name)
        if value:
            settings[name] = str(value)[:_MOST_CHARACTERS]
    runtime = str(data.get("runtime") or "eager")[:_MOST_CHARACTERS]
    if runtime not in RUNTIMES:
        raise unknown("runtime", runtime, RUNTIMES)
    if ":" not in workload and settings:
        raise InputError("a captured graph stays as it is", ", ".join(settings), "leave these out")
    return Request(
        workload=workload,
        devices=devices,
        settings=MappingProxyType(settings),
        options=options(**settings),
        runtime=runtime,
        alternatives=bool(data.get("alternatives")),
    )


def _workload(value: Any, folder: Path) -> str:
    """The workload string, if it is a name or a data file in `folder`; code of the user is refused."""
    if not isinstance(value, str) or not value.strip():
        raise InputError("no workload is given", "Workload", "write e.g. timm:resnet50 or llm:llama-3.1-8b")
    text = value.strip()
    if len(text) > _MOST_CHARACTERS or not text.isprintable():
        raise InputError(f"{text[:40]!r}… is no workload", "Workload", f"give at most {_MOST_CHARACTERS} characters")
    prefix, separator, name = text.partition(":")
    if not separator:
        if not text.endswith(".json"):
            raise InputError(
                f"{text!r} names no workload", "Workload", "write e.g. timm:resnet50, or the path of a graph.json"
            )
        return str(_inside(text, folder))
    if prefix == "py":
        raise InputError(
            "py: workloads run code, which a page cannot ask for",
            "Workload",
            f"in a terminal: foretell capture {shlex.quote(text)} --out graph.json; then give graph.json here",
        )
    endings = _FILES.get(prefix, ())
    if endings and (prefix not in _CATALOGUES or name.endswith(endings)):
        if not name.endswith(endings):
            raise InputError(f"{name!r} is no {' or '.join(endings)} file", "Workload", "give a file in this folder")
        return f"{prefix}:{_inside(name, folder)}"
    if prefix not in _CATALOGUES:
        raise unknown("workload prefix", prefix, (*_CATALOGUES, *_FILES))
    return text


def _inside(name: str, folder: Path) -> Path:
    """The path of a regular file within `folder`, short where that is where we are; links that lead out are refused."""
    root = folder.resolve()
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise InputError(f"{name!r} is outside the folder", "Workload", f"copy it into {root}, or start there")
        if not path.is_file():
            raise InputError(f"no file {name!r}", "Workload", f"give a file within {root}")
    except OSError as error:
        raise InputError(f"{name!r}: {error.strerror or error}", "Workload", f"give a file within {root}") from error
    return path.relative_to(root) if root == Path.cwd().resolve() else path
