"""Writes cli.md beside it from the commands themselves: ``python docs/reference/cli.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.main

from foretell.cli.app import app


def page() -> str:
    """The Markdown of every command, its arguments and its options."""
    lines = ["# Commands", "", "Written from the commands by `docs/reference/cli.py`."]
    _describe(typer.main.get_command(app), "foretell", lines)
    return "\n".join(lines) + "\n"


def _describe(command: Any, name: str, lines: list[str]) -> None:
    if name != "foretell":
        lines += ["", f"## {name}", "", _cell((command.help or "").split("\n\n")[0])]
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    if shown:
        lines += ["", "| | |", "|---|---|"]
    for parameter in shown:
        option = parameter.param_type_name == "option"
        names = ", ".join(parameter.opts + parameter.secondary_opts) if option else parameter.name.upper()
        lines.append(f"| `{names}` | {_cell(getattr(parameter, 'help', None) or '')} |")
    for child in getattr(command, "commands", {}).values():
        if not child.hidden:
            _describe(child, f"{name} {child.name}", lines)


def _cell(text: str) -> str:
    text = " ".join(text.split())
    for mark, escaped in (("\\", ""), ("|", "\\|"), ("<", "&lt;"), ("[", "&#91;"), ("]", "&#93;"), ("*", "\\*")):
        text = text.replace(mark, escaped)
    return text


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(page(), encoding="utf-8")
