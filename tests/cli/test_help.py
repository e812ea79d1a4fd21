"""What each command says of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer.main

from foretell.cli.app import app


def commands(command: Any, *names: str) -> Iterator[Any]:
    children = [child for child in getattr(command, "commands", {}).values() if not child.hidden]
    for child in children:
        yield from commands(child, *names, child.name)
    if not children:
        yield pytest.param(command, names, id=" ".join(names))


@pytest.mark.parametrize(("command", "names"), commands(typer.main.get_command(app)))
def test_names_of_options_are_whole(run: Callable[..., Any], command: Any, names: tuple[str, ...]) -> None:
    text = run(*names, "--help", width=80).output
    given = [name for p in command.params if not getattr(p, "hidden", False) for name in p.opts + p.secondary_opts]
    options = [name for name in given if name.startswith("--")]
    assert options
    assert [name for name in options if not re.search(rf"{name}(?![\w-])", text)] == []
