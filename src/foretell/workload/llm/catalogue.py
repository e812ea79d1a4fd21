"""The catalogue of public configurations, one TOML file each, and the way to a user's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from foretell import documents
from foretell.errors import InputError, unknown
from foretell.workload.llm.config import LLMConfig, config_from_mapping
from foretell.workload.llm.hf import from_hf_config

_FOLDER = Path(__file__).parent / "configs"


@cache
def catalogue() -> tuple[str, ...]:
    """Names of the configurations that ship with Foretell, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def config(name: str) -> LLMConfig:
    """A configuration by catalogue name, or from a file: TOML with the fields of `LLMConfig`, or a ``config.json``.

    Case does not matter, and ``llm:`` before the name is ignored. Raises UnknownNameError with near names; InputError
    naming file and key where a file is missing or malformed.

    >>> config("llama-3-8b").parameters
    8030261248
    """
    name = name.removeprefix("llm:")
    if name.endswith((".toml", ".json")):
        return _from_file(Path(name))
    if name.casefold() not in catalogue():
        raise unknown("llm configuration", name, catalogue())
    return _from_catalogue(name.casefold())


@cache
def _from_catalogue(name: str) -> LLMConfig:
    return _from_file(_FOLDER / f"{name}.toml")


def _from_file(path: Path) -> LLMConfig:
    if path.suffix == ".json":
        data = documents.read_json(path, "config.json")
        if not isinstance(data, dict):
            raise InputError("not a JSON object", str(path), "give a config.json")
        # Such files are kept as NAME/config.json, or under a name of their own.
        name = path.parent.name if path.stem == "config" else ""
        return from_hf_config(data, name or path.stem, str(path))
    return config_from_mapping(documents.read_toml(path, "TOML configuration"), path.stem, str(path))
