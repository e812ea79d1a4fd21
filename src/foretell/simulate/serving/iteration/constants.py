"""Constants of serving: how far engines fall short of what kernels do by themselves, and what their hosts take.

They are in ``serving/calibration.json``, fitted by ``benchmarks/serving_fit.py`` on openly licensed measurements; each
says there on which. None depends on a model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration, parse
from foretell.simulate.serving.plan import ServingPlan

__all__ = ["Constants", "constants", "host_of", "launches_graphs"]


@dataclass(frozen=True)
class Constants:
    """The constants by name."""

    calibration: Calibration

    def __getitem__(self, name: str) -> float:
        return self.calibration[name]

    def __contains__(self, name: str) -> bool:
        return name in self.calibration.constants

    def exposed_s(self, host: str, sequences: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds of a host in iterations of so many sequences that nothing hides."""
        return np.asarray(self[f"host.{host}.step_s"] + self[f"host.{host}.sequence_s"] * sequences)

    def __hash__(self) -> int:
        return id(self.calibration)

    def replace(self, changes: dict[str, float]) -> Constants:
        """The same with some constants changed."""
        return Constants(self.calibration.replace(changes))


@cache
def constants() -> Constants:
    """The shipped constants."""
    source = files("foretell.simulate.serving") / "calibration.json"
    return Constants(parse(source.read_text(encoding="utf-8"), source.name))


#: First versions of vLLM with CUDA graphs (0.2.6, December 2023), with the engine called V1 by default (0.8), and that
#: prepare an iteration while one runs (0.14).
_GRAPHS, _V1, _AHEAD = (0, 2, 6), (0, 8), (0, 14)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def host_of(plan: ServingPlan) -> str:
    """Whose host constants apply: an engine's, or those of an older generation of it."""
    if plan.engine == "vllm" and plan.version:
        numbers = _numbers(plan.version)
        if numbers < _GRAPHS:
            return "vllm-eager"
        if numbers < _V1:
            return "vllm-v0"
        if numbers < _AHEAD:
            return "vllm-v1"
    return plan.engine


def launches_graphs(plan: ServingPlan) -> bool:
    """Whether iterations that only decode are launched as one CUDA graph."""
    return plan.cuda_graph and host_of(plan) != "vllm-eager"
