"""Ways to run the command line: within the process, and as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

# A small network in a user's own file, so that the captured path is the real one and yet quick.
MODEL = """
import torch
from torch import nn


def make():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10))
    return net, torch.empty(1, 3, 32, 32)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`run("devices", "t4")` runs the command line in this process."""
    from foretell.cli.app import app

    catalogue = import_module("foretell.hardware.catalogue")

    def invoke(*arguments: object, width: int = 80) -> Result:
        monkeypatch.setattr(catalogue, "_added", ())  # as in a process of its own
        return CliRunner(env={"COLUMNS": str(width)}).invoke(app, [str(a) for a in arguments])

    return invoke


@pytest.fixture
def shell() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`shell("devices", "t4")` runs the installed command in a process of its own."""

    def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(Path(sys.executable).with_name("foretell")), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **environment},
            check=False,
        )

    return call


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A ``py:`` workload."""
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return f"py:{path}:make"


@pytest.fixture
def failed() -> Callable[[Any], str]:
    """What a failed run says: one line on standard error, nothing on standard output, no traceback."""

    def line(result: Any) -> str:
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("error: ")
        return str(lines[0])

    return line
