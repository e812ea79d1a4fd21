"""The registry of translations by domain and name."""

from __future__ import annotations

from collections.abc import Callable

from foretell.workload.onnx.builder import Builder
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.values import Value

Translation = Callable[[Builder, Node], list[Value]]

FUSED = "foretell"  # operations that `fuse` has put together again
MICROSOFT = "com.microsoft"

_TRANSLATIONS: dict[tuple[str, str], Translation] = {}


def translates(*names: str, domain: str = "") -> Callable[[Translation], Translation]:
    """Register the translation of operations; refuses a second one for any of them."""

    def register(function: Translation) -> Translation:
        for name in names:
            if (domain, name) in _TRANSLATIONS:
                raise ValueError(f"a translation of {domain or 'ai.onnx'}.{name} exists already")
            _TRANSLATIONS[domain, name] = function
        return function

    return register


def translation(domain: str, name: str) -> Translation | None:
    """The translation of an operation; None where there is none."""
    return _TRANSLATIONS.get((domain, name))
