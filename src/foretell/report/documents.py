"""The JSON that Foretell writes: its schemas, and text that any JSON reader takes."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any

from foretell.errors import unknown

__all__ = ["SCHEMAS", "json_text", "schema"]

SCHEMAS: tuple[str, ...] = ("foretell.estimate/1", "foretell.graph/1")


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a document whose ``"schema"`` is `name`, one of `SCHEMAS`."""
    if name not in SCHEMAS:
        raise unknown("schema", name, SCHEMAS)
    kind, version = name.removeprefix("foretell.").split("/")
    text = (files("foretell.report") / "schemas" / f"{kind}-{version}.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def json_text(data: Any, indent: int | None = 2) -> str:
    """`data` as JSON in ASCII. What is not finite becomes null, since JSON has no name for it."""
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
