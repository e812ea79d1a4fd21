"""``predict --html`` and ``--trace``: the files, what is said of them, and what is refused."""

import html
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Failed = Callable[[Any], str]


def test_both_files_beside_the_card(run: Run, tmp_path: Path) -> None:
    page, trace = tmp_path / "a report's.html", tmp_path / "trace.json"
    arguments = ["predict", "llm:gpt2", "--on", "t4", "--seq-len", "64", "--train", "--batch", "2"]
    arguments += ["--html", str(page), "--trace", str(trace)]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("llm:gpt2 · train on NVIDIA")
    assert result.stdout.endswith(f"\nwrote {page}\nwrote {trace}\n")
    text = page.read_text(encoding="utf-8")
    command = html.unescape(re.search(r"<code>(foretell.*?)</code>", text)[1])  # type: ignore[index]
    words = shlex.split(command)
    assert words[:3] == ["foretell", "predict", "llm:gpt2"]
    assert sorted(words[1:]) == sorted(arguments)  # quoted, nothing more, nothing less
    assert "batch 4" in text
    assert "What if" in text
    # The command is what it says: given again it gives the same report.
    again = run(*words[1:])
    assert again.exit_code == 0
    assert page.read_text(encoding="utf-8") == text


def test_the_trace_takes_as_long_as_the_estimate(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run("predict", "llm:gpt2", "--on", "t4", "--seq-len", "64", "--json", "--trace", trace)
    predicted = json.loads(result.stdout)  # JSON alone: what was written is not said there
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    device = [e["dur"] for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert math.fsum(device) * 1e-6 == pytest.approx(predicted["time_s"], rel=1e-9)


def test_a_report_of_several_devices_in_the_order_asked(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    result = run("predict", "llm:gpt2", "--on", "t4,h100-sxm", "--seq-len", 64, "--sort", "time", "--html", page)
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert text.index('id="tab-0"') < text.index("h100-sxm</button>") < text.index("t4</button>")


def test_a_captured_graph_has_a_report_without_other_batches(run: Run, tmp_path: Path) -> None:
    graph, page = tmp_path / "graph.json", tmp_path / "r.html"
    run("capture", "llm:gpt2", "--seq-len", 64, "--out", graph)
    result = run("predict", graph, "--on", "t4", "--html", page)
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert "memory bandwidth +25" in text
    assert "batch 2" not in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--on", "t4", "--html", "no/such/folder/r.html"), "--html no/such/folder/r.html: cannot be written"),
        (("--on", "t4", "--trace", "."), "--trace .: cannot be written"),
        (("--on", "t4,l4", "--trace", "t.json"), "--trace t.json: a timeline is of one device"),
    ],
)
def test_what_cannot_be_written(run: Run, failed: Failed, options: tuple[str, ...], says: str) -> None:
    result = run("predict", "llm:gpt2", *options)
    assert says in failed(result)
    assert result.exit_code == 2


def test_a_name_that_no_file_can_have(run: Run, failed: Failed, tmp_path: Path) -> None:
    result = run("predict", "llm:gpt2", "--on", "t4", "--html", tmp_path / ("x" * 300))
    assert "cannot be written" in failed(result)
    assert result.exit_code == 2


def test_a_disk_that_is_full(run: Run, failed: Failed) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    for option in ("--html", "--trace"):
        result = run("predict", "llm:gpt2", "--on", "t4", option, full)
        assert f"{option} /dev/full: cannot be written: No space left" in failed(result)
        assert result.exit_code == 2
