"""Predictions one after another in a thread of their own, and what has become of each."""

from __future__ import annotations

import queue
import secrets
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import foretell
from foretell import cost
from foretell.cost.memory import largest_batch
from foretell.errors import ForetellError, InfeasibleError
from foretell.graph import Graph
from foretell.hardware import Device
from foretell.report import graph_settings
from foretell.report.html import Page, variations
from foretell.ui.request import Request
from foretell.workload import cache
from foretell.workload.options import options

__all__ = ["Job", "Jobs", "predicted"]

_MOST_WAITING = 8
_MOST_KEPT = 24


@dataclass(slots=True)
class Job:
    """One prediction: `stage` while it runs, then `page`, or `error` (what is wrong, and the repair)."""

    request: Request
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    begun: float = field(default_factory=time.monotonic)
    stage: str = "Waiting"
    page: Page | None = None
    error: tuple[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """What the page is told."""
        state = "failed" if self.error else "done" if self.page else "running"
        told: dict[str, Any] = {"job": self.id, "state": state, "stage": self.stage}
        told["seconds"] = round(time.monotonic() - self.begun, 1)
        if self.error:
            told |= {"message": self.error[0], "repair": self.error[1]}
        return told


class Jobs:
    """A queue and one worker: captures change process-wide settings of PyTorch, so they never run side by side."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._waiting: queue.Queue[Job] = queue.Queue(_MOST_WAITING)
        threading.Thread(target=self._work, name="predictions", daemon=True).start()

    def add(self, request: Request) -> Job | None:
        """Queue a prediction; None where too many wait already."""
        job = Job(request)
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            return None
        with self._lock:
            self._jobs[job.id] = job
            while len(self._jobs) > _MOST_KEPT:
                self._jobs.popitem(last=False)
        return job

    def get(self, name: str) -> Job | None:
        """A job by its id, if it is still kept."""
        with self._lock:
            return self._jobs.get(name)

    def _work(self) -> None:
        while True:
            job = self._waiting.get()

            def stage(text: str, job: Job = job) -> None:
                job.stage = text

            try:
                job.page = predicted(job.request, stage)
            except ForetellError as error:
                job.error = (error.message, error.hint or "")
            except Exception as error:  # whatever comes here is a defect of ours: it is said, and the server goes on
                traceback.print_exc()
                said = " ".join(str(error).split())[:200]
                job.error = (f"{type(error).__name__}: {said}", "this is a fault of Foretell; the terminal has more")


def predicted(request: Request, stage: Callable[[str], None] = lambda text: None) -> Page:
    """Carry out a request. Raises ForetellError."""
    stage(f"Capturing {request.workload}")
    graph = _captured(request.workload, request.settings)
    stage("Predicting")
    program = cost.lower(graph, request.runtime)
    how: dict[str, Any] = {"runtime": request.runtime, "program": program}
    estimates = [cost.estimate(graph, device, **how) for device in request.devices]
    parametric = request.workload.startswith("llm:")
    batches: dict[str, int | None] = {}
    if parametric:
        stage("Finding the largest batch")
        batches = {device.name: _largest(request, device) for device in request.devices}
    stage("Predicting what else would be")
    recaptured: dict[tuple[tuple[str, Any], ...], Graph | None] = {}

    def again(changed: Mapping[str, Any]) -> Graph | None:
        key = tuple(changed.items())
        if key not in recaptured:
            settings = {**request.settings, **changed}
            if parametric or request.alternatives:
                stage("Capturing with " + ", ".join(f"{name} {value}" for name, value in changed.items()))
                recaptured[key] = _captured(request.workload, settings)
            else:  # only what is there already
                recaptured[key] = cache.kept(request.workload, options(**settings))
        return recaptured[key]

    found = {
        device.name: variations(
            graph,
            device,
            predicted,
            program=program,
            how=how,
            recapture=None if request.is_file else again,
            batch=request.options.batch,
        )
        for device, predicted in zip(request.devices, estimates, strict=True)
    }
    stage("Writing the report")
    return Page(
        graph=graph,
        estimates=estimates,
        devices=request.devices,
        settings=graph_settings(graph, None if request.is_file else request.options),
        command=request.command,
        program=program,
        variations=found,
        largest_batches=batches,
    )


def _captured(workload: str, settings: Mapping[str, Any]) -> Graph:
    graph = cache.kept(workload, options(**settings))
    if graph is None:
        graph = foretell.capture(workload, **settings)
    return graph


def _largest(request: Request, device: Device) -> int | None:
    if device.memory_bytes is None:
        return None
    try:
        return largest_batch(lambda n: foretell.capture(request.workload, **{**request.settings, "batch": n}), device)
    except InfeasibleError:
        return 0
