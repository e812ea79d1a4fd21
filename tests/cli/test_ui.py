"""The local page: to whom it answers, what it refuses, and a prediction from the form to the report."""

from __future__ import annotations

import html
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.errors import ForetellError, InputError
from foretell.ui.request import read_request
from foretell.ui.server import ADDRESS, Server
from foretell.workload import cache
from foretell.workload.options import options

ASK = {"workload": "llm:gpt2", "devices": ["t4"], "seq_len": "64"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(0, tmp_path) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


Answer = tuple[int, dict[str, str], str]


def call(server: Server, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
    connection = http.client.HTTPConnection(ADDRESS, server.server_port, timeout=10)
    sent = {"Host": f"{ADDRESS}:{server.server_port}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    if method == "POST":
        sent.setdefault("Content-Type", "application/json")
    try:
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def below(server: Server, path: str) -> str:
    return f"/{server.token}/{path}"


def finished(server: Server, ask: dict[str, Any]) -> dict[str, Any]:
    status, _, text = call(server, below(server, "predict"), "POST", ask)
    assert status == 202, text
    told: dict[str, Any] = json.loads(text)
    for _ in range(600):
        if told["state"] != "running":
            return told
        time.sleep(0.05)
        told = json.loads(call(server, below(server, f"job/{told['job']}"))[2])
    raise AssertionError(told)


# --- who is answered ---


def test_it_listens_on_this_machine_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"


@pytest.mark.parametrize("path", ["/", "/predict", "/{wrong}/", "/favicon.ico", "//"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_without_the_token_nothing_is_said(server: Server, path: str, method: str) -> None:
    status, _, text = call(server, path.format(wrong=server.token[:-1] + "~"), method, {})
    assert (status, text) == (403, "Open the address that foretell ui printed.\n")


def test_another_host_name_is_refused(server: Server) -> None:
    port = server.server_port
    for host in ("example.com", f"example.com:{port}", "127.0.0.1", f"127.0.0.1.example.com:{port}", ""):
        assert call(server, below(server, ""), Host=host)[0] == 403
    assert call(server, below(server, ""), Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://example.com"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_another_page_cannot_ask(server: Server, headers: dict[str, str]) -> None:
    assert call(server, below(server, "predict"), "POST", ASK, **headers)[0] == 403


def test_a_form_of_another_page_cannot_ask_either(server: Server) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data"):
        assert call(server, below(server, "predict"), "POST", ASK, Content_Type=kind)[0] == 415
    own = {"Origin": f"http://{ADDRESS}:{server.server_port}", "Sec_Fetch_Site": "same-origin"}
    assert call(server, below(server, "predict"), "POST", ASK, **own)[0] == 202


def test_what_is_too_large_or_no_request(server: Server) -> None:
    path = below(server, "predict")
    assert call(server, path, "POST", {"workload": "x" * 70_000})[0] == 413
    assert call(server, path, "POST", ASK, Content_Length="-1")[0] == 413
    assert call(server, path, "POST", [])[0] == 400
    assert call(server, below(server, "elsewhere"), "POST", ASK)[0] == 404
    assert call(server, below(server, "elsewhere"))[0] == 404
    assert call(server, below(server, "job/none"))[0] == 404
    assert call(server, below(server, "report/none"))[0] == 404


def test_headers_that_keep_a_page_to_itself(server: Server) -> None:
    status, headers, text = call(server, below(server, ""))
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "'unsafe-inline'" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(r"https?://|\bsrc\s*=", text)


# --- what may be asked ---


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"workload": "py:model.py:make"}, "py: workloads run code"),
        ({"workload": "pt2:../model.pt2"}, "is outside the folder"),
        ({"workload": "pt2:model.pt"}, "is no .pt2 file"),
        ({"workload": ""}, "no workload is given"),
        ({"workload": 3}, "no workload is given"),
        ({"workload": "x" * 300}, "is no workload"),
        ({"workload": "timm:a\nb"}, "is no workload"),
        ({"workload": "resnet50"}, "names no workload"),
        ({"workload": "tim:resnet50"}, "did you mean 'timm'?"),
        ({"workload": "hf:org/name"}, "is no .json file"),
        ({"workload": "hf:/etc/hostname.json"}, "is outside the folder"),
        ({"workload": "../graph.json"}, "is outside the folder"),
        ({"workload": "link.json"}, "is outside the folder"),
        ({"workload": "llm:../config.json"}, "is outside the folder"),
        ({"workload": "onnx:../model.onnx"}, "is outside the folder"),
        ({"workload": "missing.json"}, "no file 'missing.json'"),
        ({"workload": "folder.json"}, "no file 'folder.json'"),
        ({"devices": []}, "no device is chosen"),
        ({"devices": "t4"}, "no device is chosen"),
        ({"devices": ["t5"]}, "unknown device 't5'"),
        ({"devices": [f"d{n}" for n in range(9)]}, "choose at most 8"),
        ({"batch": "many"}, "'many' is no whole number"),
        ({"batch": "-1"}, "'-1' is no whole number"),
        ({"batch": "0"}, "batch is 0"),
        ({"phase": "trian"}, "did you mean 'train'?"),
        ({"precision": "fp23"}, "did you mean 'fp32'?"),
        ({"runtime": "fast"}, "unknown runtime"),
        ({"calibration": "/etc/passwd"}, "unknown field 'calibration'"),
    ],
)
def test_requests_that_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    folder = tmp_path / "inside"
    (folder / "folder.json").mkdir(parents=True)
    (tmp_path / "graph.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "model.pt2").write_bytes(b"")
    (folder / "link.json").symlink_to(tmp_path / "graph.json")
    with pytest.raises(ForetellError, match=re.escape(says)) as caught:
        read_request(ASK | change, folder)
    assert caught.value.hint


def test_the_command_of_a_request_asks_the_same(tmp_path: Path) -> None:
    ask = {"workload": "llm:gpt2", "devices": ["T4", "l4", "t4"], "batch": 2, "phase": "decode", "context": "128"}
    request = read_request(ask | {"runtime": "compiled"}, tmp_path)
    words = shlex.split(request.command)
    assert words == shlex.split(
        "foretell predict llm:gpt2 --on t4,l4 --batch 2 --context 128 --phase decode --runtime compiled"
    )


def test_a_captured_graph_in_the_folder(server: Server) -> None:
    graph = foretell.capture("llm:gpt2", seq_len=32)
    graph.to_json(server.folder / "my graph.json")
    told = finished(server, {"workload": "my graph.json", "devices": ["t4"]})
    assert told["state"] == "done", told
    page = call(server, below(server, f"report/{told['job']}"))[2]
    assert "foretell predict" in page
    with pytest.raises(InputError, match="a captured graph stays as it is"):
        read_request({"workload": "my graph.json", "devices": ["t4"], "batch": "2"}, server.folder)


def test_a_kept_capture_is_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    for workload in ("timm:resnet18", "torchvision:resnet18", "zoo:repvgg_a0"):
        assert cache.kept(workload, options(batch=2)) is None
        graph = foretell.capture(workload, batch=2)
        assert cache.kept(workload, options(batch=2)) == graph
        assert cache.kept(workload, options(batch=3)) is None
    assert cache.kept("timm:resnet18.a1_in1k", options(batch=2)) is not None  # weights make no difference
    assert cache.kept("llm:gpt2", options()) is None
    monkeypatch.setenv("FORETELL_CACHE", "off")
    assert cache.kept("timm:resnet18", options(batch=2)) is None


# --- from the request to the report ---


def test_a_prediction_from_request_to_report(server: Server) -> None:
    told = finished(server, ASK | {"devices": ["t4", "l4"]})
    assert told["state"] == "done"
    status, headers, text = call(server, below(server, f"report/{told['job']}"))
    assert status == 200
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    inside = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert inside is not None
    assert html.unescape(inside[1]) == headers["Content-Security-Policy"].split("; frame")[0]
    assert "Devices compared" in text
    assert "foretell predict llm:gpt2 --on t4,l4 --seq-len 64" in text
    assert 'id="ask"' in text
    status, headers, saved = call(server, below(server, f"report/{told['job']}.html"))
    assert headers["Content-Disposition"].startswith("attachment")
    assert 'id="ask"' not in saved
    assert server.token not in saved  # a report that is passed on opens no door


def test_what_fails_while_predicting_is_told_with_its_repair(server: Server) -> None:
    told = finished(server, ASK | {"workload": "llm:gpt3"})
    assert told["state"] == "failed"
    assert "unknown llm configuration 'gpt3'" in told["message"]
    assert "did you mean" in told["repair"]


def test_a_defect_of_ours_does_not_end_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        raise ZeroDivisionError("boom")

    with monkeypatch.context() as patched:
        patched.setattr("foretell.ui.jobs.predicted", fail)
        told = finished(server, ASK)
    assert told["message"] == "ZeroDivisionError: boom"
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert finished(server, ASK)["state"] == "done"


def test_more_than_can_wait_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr("foretell.ui.jobs.predicted", lambda request, stage: go.wait(30))
    statuses = [call(server, below(server, "predict"), "POST", ASK)[0] for _ in range(12)]
    go.set()
    assert statuses.count(503) >= 3
    assert statuses.count(202) >= 8


def test_a_hostile_name_stays_text(server: Server) -> None:
    name = "<script>alert(1)</script>"
    graph = foretell.capture("llm:gpt2", seq_len=16).renamed(name)
    graph.to_json(server.folder / "g.json")
    told = finished(server, {"workload": "g.json", "devices": ["t4"]})
    text = call(server, below(server, f"report/{told['job']}"))[2]
    assert name not in text
    assert html.escape(name) in text


# --- the command ---


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("foretell")), "ui", "--no-browser", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", process.stdout.readline())
    assert found is not None
    return process, found[0]


def test_ctrl_c_ends_it_cleanly() -> None:
    process, _ = started("--port", "0")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")


def test_a_taken_port(run: Callable[..., Any], failed: Callable[[Any], str]) -> None:
    with socket.socket() as other:
        other.bind((ADDRESS, 0))
        other.listen()
        port = other.getsockname()[1]
        result = run("ui", "--no-browser", "--port", port)
    assert failed(result) == f"error: --port: port {port} is taken; give another, or 0 for any that is free"
    assert result.exit_code == 2


def test_from_start_to_the_first_report_takes_three_seconds(within: Any) -> None:
    foretell.capture("timm:resnet50", batch=64)  # kept from here on

    def report() -> str:
        process, url = started("--port", "0")
        port, token = re.match(r"http://[\d.]+:(\d+)/([\w-]+)/", url).groups()  # type: ignore[union-attr]
        try:
            here = type("Here", (), {"server_port": int(port), "token": token})()
            told = finished(here, {"workload": "timm:resnet50", "devices": ["a100-sxm4-80gb"], "batch": "64"})
            assert told["state"] == "done"
            return str(call(here, f"/{token}/report/{told['job']}")[2])
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=10)

    assert "Roofline" in within(3.0, report, clock=time.monotonic)


# --- in a browser ---


@pytest.fixture
def page(chromium: Any, server: Server) -> Iterator[Any]:
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    opened = context.new_page()
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(server.url)
    yield opened
    context.close()
    assert asked
    assert all(url.startswith(server.url) for url in asked)


def test_by_keyboard_from_the_form_to_the_report(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "workload"
    page.keyboard.press("Control+a")
    page.keyboard.type("llm:gpt2")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("tesla t4")
    assert page.locator("#choices label:visible").count() == 1
    page.keyboard.press("Tab")
    page.keyboard.press("Tab") if page.evaluate("document.activeElement.id") == "choices" else None
    page.keyboard.press("Space")
    assert page.locator("#chosen").inner_text() == "a100-sxm4-80gb, t4"
    page.locator("#batch").press("Enter")
    page.wait_for_url("**/report/*")
    page.wait_for_selector("[data-plot=icicle] svg")
    assert page.locator("h1").inner_text().startswith("llm:gpt2")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.get_by_text("Ask for another prediction").click()
    assert page.locator("#workload").input_value() == "llm:gpt2"
    assert page.locator("#choices input:checked").count() == 2


def test_every_field_has_a_name(page: Any) -> None:
    for field in page.locator("input, select").all():
        assert field.evaluate("(e) => [...e.labels].map((l) => l.textContent.trim()).join(' ')"), field


def test_an_error_is_announced_with_its_repair(page: Any) -> None:
    page.fill("#workload", "timm:<img src=x>")
    page.fill("#batch", "2")
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("#status .error", timeout=30_000)
    said = page.locator("#status").inner_text()
    assert "<img src=x>" in said
    assert "—" in said
    assert page.locator("#status").get_attribute("aria-live") == "polite"
    assert page.get_by_role("button", name="Predict").is_enabled()
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_server_that_has_gone(page: Any, server: Server) -> None:
    page.route("**/predict", lambda route: route.abort())
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("#status .error")
    assert "is foretell ui still running" in page.locator("#status").inner_text()
