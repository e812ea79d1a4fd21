"""Training plans run for real, in small: a tiny GPT on a few processes of this machine, over torch's gloo.

What `foretell.simulate` says of a plan can so be proven by execution: `train` takes the very task order that the
simulator uses, and reports loss, gradients, bytes sent by each rank and activations held. `expected` states in closed
form what they must be. Every byte that one process sends another passes through `Wire`, which counts it: collectives
are rings of its messages.

Needs torch (``pip install 'foretell[torch]'``); importing this package does not import it.

    from foretell.learn.distributed import Workers, assemble, train
    with Workers(4) as workers:
        outcomes = workers.run(train, plan.devices, config, plan)
    gradients = assemble(outcomes)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.learn.distributed.expected import Expected, expected
    from foretell.learn.distributed.rehearsal import Rehearsal, rehearse
    from foretell.learn.distributed.step import Outcome, assemble, train
    from foretell.learn.distributed.workers import WorkerError, Workers

_PLACES = {
    "Expected": "expected",
    "Outcome": "step",
    "Rehearsal": "rehearsal",
    "WorkerError": "workers",
    "Workers": "workers",
    "assemble": "step",
    "expected": "expected",
    "rehearse": "rehearsal",
    "train": "step",
}

__all__ = [
    "Expected",
    "Outcome",
    "Rehearsal",
    "WorkerError",
    "Workers",
    "assemble",
    "expected",
    "rehearse",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
        globals()[name] = value  # a function named as its module: the function is what is meant
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
