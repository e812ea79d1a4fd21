"""Captured graphs on disk, addressed by what they depend on: the request, the libraries, and this package's own code.

The folder is ``$FORETELL_CACHE`` (default ``~/.cache/foretell``); ``FORETELL_CACHE=off`` turns it off.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from foretell.errors import ForetellError
from foretell.graph import Graph
from foretell.workload.options import Options

# The files that decide what a captured graph holds.
_CODE = (
    "graph/op.py",
    "graph/rules.py",
    "graph/kinds.py",
    "workload/trace.py",
    "workload/capture.py",
    "workload/autocast.py",
    "workload/fused.py",
    "workload/lora.py",
    "workload/lora_torch.py",
    "workload/shapes.py",
    "workload/hf.py",
    "workload/resolve.py",
)


def folder() -> Path | None:
    """Where captures are kept; None when the cache is off."""
    setting = os.environ.get("FORETELL_CACHE", "")
    if setting.lower() in ("off", "0", "none"):
        return None
    return Path(setting) if setting else Path.home() / ".cache" / "foretell"


@cache
def _code_fingerprint() -> str:
    """Changes whenever the code that makes graphs does."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for file in _CODE:
        digest.update((package / file).read_bytes())
    return digest.hexdigest()


def key(workload: str, options: Options, libraries: Sequence[str]) -> str:
    """The address of a capture."""
    versions = {name: importlib.metadata.version(name) for name in libraries}
    request = [workload, options.to_dict(), versions, sys.version_info[:2], _code_fingerprint()]
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


# The libraries that captures of a prefix depend on, as `resolve` names them.
_LIBRARIES = {"timm": ("torch", "timm"), "torchvision": ("torch", "torchvision"), "zoo": ("torch",)}


def kept(workload: str, options: Options) -> Graph | None:
    """The capture of a workload string where one is kept, without importing what would make it; None otherwise."""
    prefix, _, name = workload.partition(":")
    home = folder()
    if home is None or prefix not in _LIBRARIES:
        return None
    label = f"timm:{name.partition('.')[0]}" if prefix == "timm" else workload  # weights make no difference
    try:
        path = home / "graphs" / f"{key(label, options, _LIBRARIES[prefix])}.json.gz"
        return Graph.from_dict(json.loads(gzip.decompress(path.read_bytes())), str(path))
    except (importlib.metadata.PackageNotFoundError, OSError, EOFError, zlib.error, ValueError, RecursionError,
            ForetellError):  # fmt: skip
        return None


def cached(
    workload: str, options: Options, libraries: Sequence[str], make: Callable[[Options], Graph]
) -> Graph:
    """`make(options)`, or what it gave before for the same request, libraries and code."""
    home = folder()
    if home is None:
        return make(options)
    path = home / "graphs" / f"{key(workload, options, libraries)}.json.gz"
    try:
        return Graph.from_dict(json.loads(gzip.decompress(path.read_bytes())), str(path))
    except FileNotFoundError:
        pass
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, ForetellError):
        with contextlib.suppress(OSError):
            path.unlink()  # a damaged entry is made anew
    graph = make(options)
    _write(path, gzip.compress(graph.to_json().encode(), compresslevel=1))
    return graph


def _write(path: Path, data: bytes) -> None:
    """Write whole or not at all; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except OSError:
        pass
