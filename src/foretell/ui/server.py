"""The server of the page: on this machine only, for whoever has its address, and without a request to anywhere.

Every path begins with a random token, so that another page in the same browser cannot guess an address; the Host header
must name this machine, so that another name cannot be made to lead here; what changes anything must be JSON from this
very page (Origin), which no foreign page can send without being asked about first.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from foretell.cost.model import RUNTIMES
from foretell.errors import ForetellError, InputError
from foretell.graph import MODES
from foretell.hardware import Device, device, devices
from foretell.report.html.page import content_policy, environment, html_page
from foretell.ui.jobs import Job, Jobs
from foretell.ui.request import read_request
from foretell.units import format_bytes, format_money
from foretell.workload.llm.catalogue import catalogue as llms
from foretell.workload.options import PRECISIONS

__all__ = ["ADDRESS", "Server"]

ADDRESS = "127.0.0.1"
_MOST_BYTES = 64 * 1024
_EXAMPLES = ("timm:resnet50", "timm:vit_base_patch16_224", "torchvision:efficientnet_b0", "zoo:hardnet68")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Server(ThreadingHTTPServer):
    """Serves the page below `url`. Files of requests must lie within `folder`. Raises InputError for a taken port."""

    daemon_threads = True

    def __init__(self, port: int = 0, folder: Path | None = None) -> None:
        self.token = secrets.token_urlsafe(18)
        self.folder = (folder or Path.cwd()).resolve()
        self.jobs = Jobs()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0).lower()
            raise InputError(f"port {port} {reason}", "--port", "give another, or 0 for any that is free") from error
        self.hosts = tuple(f"{name}:{self.server_port}" for name in (ADDRESS, "localhost"))

    @property
    def url(self) -> str:
        """The address to open."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that leaves early is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # seconds a connection may say nothing
    server_version = "foretell"
    sys_version = ""

    def do_GET(self) -> None:
        path = self._path()
        if path is None:
            return
        if path == "":
            self._html(_start(self.server))
        elif path.startswith("job/"):
            job = self.server.jobs.get(path.removeprefix("job/"))
            if job is None:
                self._json({"message": "this prediction is no longer kept", "repair": "ask anew"}, HTTPStatus.NOT_FOUND)
            else:
                self._json(job.to_dict())
        elif path.startswith("report/"):
            name = path.removeprefix("report/")
            job = self.server.jobs.get(name.removesuffix(".html"))
            if job is None or job.page is None:
                self._plain("This report is no longer kept: ask anew.", HTTPStatus.NOT_FOUND)
            elif name.endswith(".html"):
                self._send(html_page(job.page), "text/html; charset=utf-8", HTTPStatus.OK, save=True)
            else:
                self._html(_report(self.server, job))
        else:
            self._plain("There is no such page.", HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        path = self._path()
        if path is None:
            return
        origin = self.headers.get("Origin")
        if origin is not None and origin not in [f"http://{host}" for host in self.server.hosts]:
            self._plain("Requests from other pages are refused.", HTTPStatus.FORBIDDEN)
            return
        if self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            self._plain("Requests from other pages are refused.", HTTPStatus.FORBIDDEN)
            return
        if self.headers.get_content_type() != "application/json":
            self._plain("The request must be JSON.", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            return
        if path != "predict":
            self._plain("There is no such page.", HTTPStatus.NOT_FOUND)
            return
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > _MOST_BYTES:
            self._plain("The request is too large.", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        try:
            data = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            self._json({"message": "the request is no JSON", "repair": "use the form"}, HTTPStatus.BAD_REQUEST)
            return
        try:
            request = read_request(data, self.server.folder)
        except ForetellError as error:
            self._json({"message": error.message, "repair": error.hint or ""}, HTTPStatus.BAD_REQUEST)
            return
        job = self.server.jobs.add(request)
        if job is None:
            told = {"message": "too many predictions wait", "repair": "try again when they are done"}
            self._json(told, HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            self._json(job.to_dict(), HTTPStatus.ACCEPTED)

    def _path(self) -> str | None:
        """The path below the token; None where the request was refused."""
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self._plain("This server answers to its own address only.", HTTPStatus.FORBIDDEN)
            return None
        token, _, rest = self.path.split("?", 1)[0].lstrip("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._plain("Open the address that foretell ui printed.", HTTPStatus.FORBIDDEN)
            return None
        return rest

    def _html(self, text: str) -> None:
        self._send(text, "text/html; charset=utf-8", HTTPStatus.OK)

    def _plain(self, text: str, status: HTTPStatus) -> None:
        self._send(text + "\n", "text/plain; charset=utf-8", status)

    def _json(self, data: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(data), "application/json", status)

    def _send(self, text: str, kind: str, status: HTTPStatus, save: bool = False) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", f"{_policy()}; frame-ancestors 'none'")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if save:
            self.send_header("Content-Disposition", 'attachment; filename="foretell-report.html"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what matters is shown on the page."""


def _policy() -> str:
    return content_policy(("report.js", "ui.js"), connect=True)


def _form(server: Server, job: Job | None) -> dict[str, Any]:
    """What the form is filled with: what was asked for last, or an example."""
    request = None if job is None else job.request
    chosen = {d.name for d in request.devices} if request else {"a100-sxm4-80gb"}
    return {
        "root": f"/{server.token}/",
        "report": None if job is None else f"/{server.token}/report/{job.id}.html",
        "policy_text": _policy(),
        "workload": request.workload if request else "timm:resnet50",
        "settings": dict(request.settings) if request else {"batch": 64},
        "runtime": request.runtime if request else "eager",
        "alternatives": bool(request and request.alternatives),
        "suggestions": [*_EXAMPLES, *(f"llm:{name}" for name in llms())],
        "choices": [_choice(device(name), name in chosen) for name in sorted(devices(), key=lambda n: n not in chosen)],
        "phases": MODES,
        "precisions": PRECISIONS,
        "runtimes": RUNTIMES,
    }


def _choice(one: Device, chosen: bool) -> dict[str, Any]:
    about = [
        one.title,
        "" if one.memory_bytes is None else format_bytes(one.memory_bytes),
        "" if one.price_usd_per_h is None else f"{format_money(one.price_usd_per_h)}/h",
    ]
    return {"name": one.name, "about": ", ".join(part for part in about if part), "chosen": chosen}


def _start(server: Server) -> str:
    return environment().get_template("ui.html").render(title="Foretell", views=[], form=_form(server, None))


def _report(server: Server, job: Job) -> str:
    assert job.page is not None
    return html_page(job.page, "ui.html", form=_form(server, job))
