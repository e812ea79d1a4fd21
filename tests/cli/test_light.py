"""What must stay light: no torch unless a workload needs it, a quick import, no noise where output is piped."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import foretell

FORETELL = str(Path(sys.executable).with_name("foretell"))
Shell = Callable[..., Any]

_WITHOUT = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise SystemExit(f"{{name}} was imported")

sys.meta_path.insert(0, Forbidden())
sys.argv = ["foretell", *{arguments!r}]
from foretell.cli import main
main()
"""


_ABSENT = _WITHOUT.replace('raise SystemExit(f"{{name}} was imported")', "raise ModuleNotFoundError(name, name=name)")


@pytest.mark.parametrize(
    "arguments",
    [("calibrate", "--here"), ("claims", "repvgg/equivalence", "--run"), ("predict", "timm:resnet18", "--on", "t4")],
)
def test_what_a_core_install_lacks_is_named_with_the_extra(arguments: tuple[str, ...]) -> None:
    code = _ABSENT.format(forbidden=("torch", "torchvision", "timm", "transformers"), arguments=arguments)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "which does not import here" in line
    assert "pip install 'foretell[" in line


def run_without(forbidden: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = _WITHOUT.format(forbidden=forbidden, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("predict", "--help"),
        ("devices",),
        ("devices", "t4"),
        ("predict", "llm:gpt2", "--seq-len", "128", "--on", "t4,l4"),
        ("explain", "llm:gpt2", "--seq-len", "128", "--on", "t4"),
        ("capture", "llm:gpt2", "--seq-len", "128"),
    ],
)
def test_no_torch_where_none_is_needed(arguments: tuple[str, ...]) -> None:
    result = run_without(("torch", "torchvision", "timm", "transformers"), *arguments)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("option", "slip", "meant"),
    [
        ("--precision", "fp23", "fp32"),
        ("--runtime", "compile", "compiled"),
        ("--model", "rooflin", "roofline"),
        ("--sort", "tme", "time"),
    ],
)
def test_a_wrong_option_shows_before_torch_is_imported(option: str, slip: str, meant: str) -> None:
    result = run_without(("torch",), "predict", "timm:resnet18", "--on", "t4", option, slip)
    assert result.returncode == 2
    assert f"did you mean '{meant}'" in result.stderr


def test_that_an_import_of_torch_would_be_seen() -> None:
    assert "torch was imported" in run_without(("torch",), "predict", "timm:resnet18", "--on", "t4").stderr


def test_help_and_version_import_little() -> None:
    assert run_without(("torch", "numpy"), "--version").returncode == 0
    assert run_without(("torch", "numpy"), "--help").returncode == 0


def test_the_package_runs_as_a_module() -> None:
    run = partial(subprocess.run, capture_output=True, text=True, timeout=120, check=False)
    told = run([sys.executable, "-m", "foretell", "--version"])
    assert (told.returncode, told.stderr) == (0, "")
    assert foretell.__version__ in told.stdout
    assert run([sys.executable, "-m", "foretell", "devices", "no such"]).returncode == 2


def test_importing_foretell_takes_no_time(within: Any) -> None:
    run = partial(subprocess.run, [sys.executable, "-c", "import foretell"], check=True)
    within(0.4, run, clock=time.monotonic)  # the interpreter's own start among it


def read_all(handle: int) -> str:
    text = b""
    while True:
        try:
            chunk = os.read(handle, 4096)
        except OSError:  # Linux says EIO where the other end has closed
            break
        if not chunk:
            break
        text += chunk
    return text.decode()


def on_terminal(*arguments: str) -> tuple[str, str]:
    """Standard output (piped) and standard error (a terminal)."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [FORETELL, *arguments], stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True
    )
    os.close(theirs)
    seen = read_all(ours)
    os.close(ours)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output, seen


def test_progress_is_shown_on_a_terminal_for_what_takes_long(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(
        "import time, torch\n\ndef make():\n    time.sleep(1.5)\n    return torch.nn.Linear(2, 3), torch.empty(1, 2)\n"
    )
    output, seen = on_terminal("predict", f"py:{path}:make", "--on", "t4", "--json")
    assert "Capturing py:" in seen
    assert output.startswith("{")
    assert "Capturing" not in output


def test_a_bar_is_shown_for_what_has_parts() -> None:
    output, seen = on_terminal("claims", "repvgg/parameters-a2", "--run", "--json")
    assert "claims" in seen
    assert "0/1" in seen
    assert output.startswith("[")


def test_nothing_is_shown_for_what_is_quick() -> None:
    output, seen = on_terminal("predict", "llm:gpt2", "--seq-len", "8", "--on", "t4")
    assert "gpt2" in output
    assert seen == ""


def test_a_terminal_gets_a_frame(shell: Shell) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([FORETELL, "devices", "t4"], stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    seen = read_all(ours)
    os.close(ours)
    process.communicate(timeout=60)
    assert "╭" in seen
    assert "\x1b[" in seen
    piped = shell("devices", "t4").stdout
    assert "╭" not in piped
    assert "\x1b" not in piped
    assert all(line == line.rstrip() for line in piped.splitlines())
