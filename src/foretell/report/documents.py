"""The JSON that Foretell writes and reads: its schemas, and text that any JSON reader takes."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any

from foretell.errors import unknown

__all__ = ["SCHEMAS", "json_text", "keys_table", "schema"]

SCHEMAS: tuple[str, ...] = (
    "foretell.advice/1",
    "foretell.checkpoint/1",
    "foretell.comparison/1",
    "foretell.estimate/1",
    "foretell.graph/1",
    "foretell.kv/1",
    "foretell.occupancy/1",
    "foretell.plan/1",
    "foretell.serving-plan/1",
    "foretell.serving/1",
    "foretell.shapes/1",
    "foretell.shared-plan/1",
    "foretell.training-run/1",
    "foretell.training-step/1",
)


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a document whose ``"schema"`` is `name`, one of `SCHEMAS`."""
    if name not in SCHEMAS:
        raise unknown("schema", name, SCHEMAS)
    kind, version = name.removeprefix("foretell.").split("/")
    text = (files("foretell.report") / "schemas" / f"{kind}-{version}.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def keys_table(name: str) -> str:
    """The keys of a schema as a Markdown table: what docs/schema.md shows.

    >>> print(keys_table("foretell.estimate/1").splitlines()[3])
    | `workload` | text | The workload as it was named. |
    """
    rows = ["| key | value | meaning |", "|---|---|---|"]

    def add(path: str, part: dict[str, Any]) -> None:
        for key, inner in part.get("properties", {}).items():
            here = f"{path}{key}"
            meaning = inner.get("description", "Name and version of this schema.")
            entry = inner["items"] if isinstance(inner.get("items"), dict) else {}
            if "prefixItems" in entry:  # a fixed row of values, which have no keys to list
                meaning += f" Each: {entry['description']}"
            rows.append(f"| `{here}` | {_kind(inner)} | {meaning} |")
            add(f"{here}[].", entry)
            add(f"{here}.", inner)

    add("", schema(name))
    return "\n".join(rows)


def _kind(part: dict[str, Any]) -> str:
    if "const" in part:
        return f'`"{part["const"]}"`'
    if "enum" in part:
        return "one of " + ", ".join(f"`{value}`" for value in part["enum"])
    names = {"string": "text", "object": "object", "array": "list", "boolean": "true or false", "null": "null"}
    types = part["type"] if isinstance(part["type"], list) else [part["type"]]
    return " or ".join(names.get(kind, str(kind)) for kind in types)


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
