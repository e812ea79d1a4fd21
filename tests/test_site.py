"""The documentation as a site: it builds strictly, loads nothing from elsewhere, and leaves no page out."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*href=["']?((?:https?:)?//[^"'\s>]+)"""
)


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="the site needs pip install 'foretell[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.glob("**/*.html"))
    assert pages
    for page in pages:
        assert not _LOADED.findall(page.read_text(encoding="utf-8")), page
    for sheet in tmp_path.glob("**/*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_what_counts_as_loaded() -> None:
    assert _LOADED.search('<script defer src="https://cdn.example/x.js">')
    assert _LOADED.search('<link rel="stylesheet" href="//cdn.example/x.css">')
    assert not _LOADED.search('<a href="https://example.org">a link</a>')


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").glob("**/*.md")}


def test_the_reference_of_commands_is_current() -> None:
    written = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    assert written == runpy.run_path(str(ROOT / "docs/reference/cli.py"))["page"]()
