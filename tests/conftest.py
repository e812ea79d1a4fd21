"""A browser for the tests of pages, where one is installed, and limits on time, held only when asked."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--speed", action="store_true", help="run only the tests with limits on time, and hold them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--speed"):
        items[:] = [item for item in items if "within" in getattr(item, "fixturenames", ())]


@pytest.fixture
def within(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Do some work and return what it gives; under `--speed`, fail if the best of three tries takes longer.

    How fast a shared machine is says nothing about a change, so that `make test` holds no limit: `make speed`
    does, on a machine that is otherwise idle. Processor time unless another clock is given.
    """
    tries = 3 if request.config.getoption("--speed") else 0

    def within(seconds: float, work: Callable[[], T], clock: Callable[[], float] = time.process_time) -> T:
        if not tries:
            return work()
        spent = []
        for _ in range(tries):
            start = clock()
            made = work()
            spent.append(clock() - start)
            if spent[-1] <= seconds:
                return made
        raise AssertionError(f"took {min(spent):.3g} s at best, the limit is {seconds:.3g} s")

    return within
