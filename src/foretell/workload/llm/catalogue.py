"""The catalogue of public configurations, one TOML file each, and the way to a user's own."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path

from foretell.errors import InputError, UnknownNameError, unknown
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
    naming file and key where a file is malformed.

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
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnknownNameError("file", str(path), hint=f"or name one of {len(catalogue())} configurations") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", str(path)) from None
    try:
        if path.suffix == ".json":
            return from_hf_config(json.loads(text), path.parent.name or None, str(path))
        return config_from_mapping(tomllib.loads(text), path.stem, str(path))
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"is malformed: {error}", str(path)) from None
