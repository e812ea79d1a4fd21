"""`Workers`: a few processes of this machine, joined by gloo over the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from types import TracebackType
from typing import Any

from foretell.errors import ForetellError, InputError

__all__ = ["WorkerError", "Workers"]

MOST = 64


class WorkerError(ForetellError):
    """A worker failed, or all took too long; the message has the traceback of the first that failed."""

    exit_code = 1


class Workers:
    """Processes that run functions together, as ranks of one gloo group; a context manager.

    They are spawned once and take any number of jobs. A job fails as a whole: as soon as one rank raises, dies, or
    `timeout_s` has passed, all processes are killed (none is left waiting for a message) and WorkerError is raised;
    the next job starts new ones. They are killed too on interrupt and when the parent exits. Nothing listens but on
    loopback.
    """

    def __init__(self, count: int, *, timeout_s: float = 60.0) -> None:
        if not 1 <= count <= MOST:
            raise InputError(f"{count} workers, want 1 to {MOST}", "Workers")
        self.count, self.timeout_s = count, timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, function: Callable[..., Any], ranks: int | None = None, *arguments: Any) -> list[Any]:
        """What ``function(rank, *arguments)`` returns on each of the first `ranks` workers (None: all).

        `function` is a module's own, as it is sent by name. Raises WorkerError.
        """
        wanted = self.count if ranks is None else ranks
        if not 1 <= wanted <= self.count:
            raise InputError(f"{wanted} ranks wanted of {self.count} workers", "Workers.run")
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes[:wanted]:
                pipe.send((function, arguments))
            return self._collect(wanted)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = _context()
        self._folder = tempfile.TemporaryDirectory(prefix="foretell-")
        meeting = Path(self._folder.name, "rendezvous").as_uri()
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.count, meeting, self.timeout_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, ranks: int) -> list[Any]:
        deadline = time.monotonic() + self.timeout_s
        results: dict[int, Any] = {}
        while len(results) < ranks:
            waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in range(ranks) if rank not in results}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(rank) for rank in waiting.values())
                raise WorkerError(f"ranks {late} of {ranks} did not finish within {self.timeout_s:g} s")
            pipe: Any
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    done, value = pipe.recv()
                except (EOFError, OSError):
                    raise WorkerError(f"the process of rank {rank} died") from None
                if not done:
                    raise WorkerError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End all processes, at once."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _context() -> Any:
    """How processes are made: each anew, or on Linux as copies of one that has imported torch, which is soon done."""
    if not sys.platform.startswith("linux"):
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["foretell.learn.distributed.step"])
    return context


def _serve(rank: int, count: int, meeting: str, timeout_s: float, pipe: Any) -> None:
    """The life of one process: join the group, then run what the parent sends until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=count, timeout=timedelta(seconds=timeout_s)
        )
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # the parent hung up: leave without waiting for the other ranks
        try:
            answer = (True, function(rank, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(OSError):
            pipe.send(answer)
