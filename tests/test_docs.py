"""The documentation is executed: every shell and Python example of the Markdown pages, a page in a folder of its own.

``console`` blocks hold commands after ``$ `` that must succeed; output below a command is compared, with ``…`` for
what may differ. ``python`` blocks run; one that begins with a file's name is also written to that file, as is a
``toml`` one. ``sh`` blocks are for setting up: each line must be a target of the Makefile.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ((?:\w+/)?[\w.-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    where: str


def blocks(page: Path) -> Iterator[Block]:
    source = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(source):
        line = source[: match.start()].count("\n") + 1
        yield Block(match[1], match[2], f"{page.name}:{line}")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, expected output) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def matches(output: str, expected: str) -> bool:
    pattern = ".*".join(re.escape(piece) for piece in expected.strip().split("…"))
    return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from foretell.cli.app import app

    catalogue = import_module("foretell.hardware.catalogue")
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text("[project]\nname = 'a-checkout'\n")  # examples are tried in one
    for block in blocks(page):
        named = _FILE.match(block.text)
        if named and block.language in ("python", "toml"):
            Path(named[1]).parent.mkdir(exist_ok=True)
            Path(named[1]).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
        elif block.language == "console":
            for command, expected in commands(block.text):
                program, *arguments = shlex.split(command)
                assert program == "foretell", f"{block.where}: {command}"
                monkeypatch.setattr(catalogue, "_added", ())  # as in a process of its own
                result = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)
                assert result.exit_code == 0, f"{block.where}: {command}\n{result.output}"
                assert result.output, command
                if expected.strip():
                    assert matches(result.output, expected), f"{block.where}: {command}\n{result.output}"
        elif block.language == "sh":
            for line in block.text.splitlines():
                assert re.fullmatch(r"make [a-z]+", line), f"{block.where}: {line}"
                made = subprocess.run(
                    [*line.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False
                )
                assert made.returncode == 0, made.stderr
        else:
            assert block.language in ("toml", "json"), f"{block.where}: say what language the block is in"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_what_is_compared_can_differ() -> None:
    assert matches("a\nb 12 ms\n", "a\nb … ms")
    assert not matches("a\nb 12 ms\n", "a\nb … s")


def test_the_picture_is_drawn_from_a_real_run(tmp_path: Path) -> None:
    drawn = tmp_path / "card.svg"
    runpy.run_path(str(ROOT / "docs" / "card.py"))["main"](drawn)
    for svg in (drawn, ROOT / "docs" / "card.svg"):
        text = svg.read_text(encoding="utf-8").replace("&#160;", " ")
        for expected in ("timm:resnet50 · inference", "3×224×224", "GFLOP", "learned model"):
            assert expected in text, svg
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # pictures may load nothing


def test_the_tutorial_shows_a_real_run(tmp_path: Path) -> None:
    drawn = tmp_path / "tutorial.svg"
    runpy.run_path(str(ROOT / "docs" / "card.py"))["tutorial"](drawn)
    for svg in (drawn, ROOT / "docs" / "tutorial.svg"):
        text = svg.read_text(encoding="utf-8").replace("&#160;", " ")
        for expected in ("545 GMAC", "largest batch that fits: 224", "nvidia-smi 1.48 GiB", "conformal"):
            assert expected in text, svg
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), svg
