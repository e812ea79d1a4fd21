"""A browser for the tests of pages, where one is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless Chromium, driven by Playwright; the test is skipped where either is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
