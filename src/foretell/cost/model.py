"""`CostModel`: what every way of predicting time shares, and the registry of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from foretell.cost.program import Program
from foretell.errors import unknown
from foretell.graph import Graph
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]

RUNTIMES: tuple[str, ...] = ("eager", "compiled")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a prediction may depend on besides operations and device.

    `conv_tf32` and `matmul_tf32` say whether fp32 convolutions and matrix products may run in TF32 where the device has
    it. PyTorch's defaults are yes (``torch.backends.cudnn.allow_tf32``) and no
    (``torch.backends.cuda.matmul.allow_tf32``); precision ``tf32`` sets both.
    """

    runtime: str = "eager"
    mode: str = "inference"
    conv_tf32: bool = True
    matmul_tf32: bool = False

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise unknown("runtime", self.runtime, RUNTIMES)

    @staticmethod
    def of(graph: Graph, runtime: str = "eager") -> Settings:
        """The settings a graph of this mode and precision runs under."""
        return Settings(runtime=runtime, mode=graph.mode, matmul_tf32=graph.precision == "tf32")


@dataclass(frozen=True, slots=True)
class OpTimes:
    """What a model says of each op, in seconds; columns parallel to `Program.table`, each for **one** run of the op.

    The device is busy for ``max(compute_s, memory_s) + launch_s``. `host_s` is what the processor spends on issuing it,
    `start_s` (one number) on the step before it issues the first.
    `ideal_s` is the arithmetic alone at the peak of its precision, never more than `compute_s`. `details` holds the
    model's named intermediate columns, for `explain`.
    """

    compute_s: Floats
    memory_s: Floats
    launch_s: Floats
    host_s: Floats
    ideal_s: Floats
    details: Mapping[str, Floats]
    notes: tuple[str, ...] = ()
    start_s: float = 0.0

    @property
    def busy_s(self) -> Floats:
        """Device time of one run of each op."""
        return np.maximum(self.compute_s, self.memory_s) + self.launch_s


@dataclass(frozen=True, slots=True)
class Step:
    """How the ops of one step fall in time. `gap_s` is what the device waits for the host before each op.

    ``time_s == sum(busy_s + gap_s)``, where both are of the whole step (`repeat` included).
    """

    time_s: float
    busy_s: Floats
    gap_s: Floats
    host_s: float


@runtime_checkable
class CostModel(Protocol):
    """A way to predict how long a program takes on a device. Members are stateless and share this interface."""

    @property
    def name(self) -> str:
        """What `models` lists it as."""

    def op_times(self, program: Program, device: Device, settings: Settings) -> OpTimes:
        """Times of every op, vectorised. Raises ForetellError where the device lacks a number that has no stand-in."""

    def step(self, program: Program, times: OpTimes, settings: Settings) -> Step:
        """How those times add up to a step."""

    def interval(
        self, program: Program, times: OpTimes, step: Step, device: Device, settings: Settings
    ) -> tuple[float, float, str]:
        """Factors (low, high) around a predicted step time that hold 80 % of measurements, and what they rest on."""

    def formula(self, program: Program, times: OpTimes, row: int, device: Device) -> list[str]:
        """How the time of one op came about: lines of at most 80 columns with the numbers in them."""


class Registry(Mapping[str, CostModel]):
    """Cost models by name. Looking up an unknown name raises an error with the near ones."""

    def __init__(self) -> None:
        self._models: dict[str, CostModel] = {}

    def register(self, model: CostModel) -> CostModel:
        """Add a model. Raises ValueError where the name is taken, TypeError where it is no `CostModel`."""
        if not isinstance(model, CostModel):
            raise TypeError(f"{model!r} is no CostModel: it needs name, op_times, step, interval and formula")
        if model.name in self._models:
            raise ValueError(f"a cost model named {model.name!r} exists already")
        self._models[model.name] = model
        return model

    def __getitem__(self, name: str) -> CostModel:
        try:
            return self._models[name]
        except KeyError:
            raise unknown("cost model", name, self._models) from None

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


REGISTRY = Registry()


def models() -> Mapping[str, CostModel]:
    """All cost models by name.

    >>> models()["roofline"].name
    'roofline'
    """
    from foretell.cost import convmeter, cpu, kernel, learned, roofline  # noqa: F401  (they register themselves)

    return REGISTRY


AUTO = "auto"


def default_model(device: Device) -> str:
    """The model that predicts `device` best: on a processor that was calibrated here, the one made for it."""
    if device.kind == "cpu" and device.name == "local":
        from foretell.cost.calibration import local

        if local() is not None:
            return "cpu"
    return "learned" if device.kind == "gpu" else "roofline"


def schedule(times: OpTimes, repeat: Floats) -> Step:
    """Lay the ops of one step after another: the host issues them in order and ahead, the device runs them in order.

    An op starts when the device is free and the host has issued it, so op i ends at
    ``max over j ≤ i of (host time up to j + device time of j … i)``. The step begins idle and ends synchronised.
    """
    busy = times.busy_s * repeat
    issued = times.start_s + np.cumsum(times.host_s * repeat)
    before = np.cumsum(busy) - busy
    # The host has issued the first run of a repeated op long before it has issued the last.
    first = issued - times.host_s * np.maximum(repeat - 1, 0)
    waited = np.maximum.accumulate(np.maximum(first - before, 0.0)) if len(busy) else busy
    gap = np.diff(waited, prepend=0.0)
    # A repeated op whose issue takes longer than its run keeps the device waiting between runs as well.
    host = float(issued[-1]) if len(busy) else 0.0
    device = float(before[-1] + busy[-1]) if len(busy) else 0.0
    time = device + (float(waited[-1]) if len(busy) else 0.0)
    if time < host:  # the last op cannot end before the host has issued it
        gap = gap.copy()
        gap[-1] += host - time
        time = host
    return Step(time_s=time, busy_s=busy, gap_s=gap, host_s=host)
