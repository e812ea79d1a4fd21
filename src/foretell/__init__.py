"""Foretell: how fast, how large, how full and how dear a workload will be, before anything runs."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["capture", "cluster", "device", "devices", "kv_cache", "kv_cache_bytes", "predict"]

_HOMES = {
    "capture": "foretell.api",
    "predict": "foretell.api",
    "device": "foretell.hardware",
    "devices": "foretell.hardware",
    "cluster": "foretell.hardware",
    "kv_cache": "foretell.workload.kv",
    "kv_cache_bytes": "foretell.workload.kv",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for: ``import foretell`` stays instant."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'foretell' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
