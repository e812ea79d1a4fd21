"""Constants of training steps: how far libraries and frameworks fall short of what kernels do by themselves.

They are in ``calibration.json``, fitted by ``benchmarks/training_fit.py`` on openly licensed measurements; each says
there on which. None depends on a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from foretell.cost.calibration import Calibration, parse
from foretell.cost.kernels.gemm import operands_in_shared
from foretell.hardware.device import Device

__all__ = ["Constants", "constants", "generation", "measured_on"]


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants by name."""

    calibration: Calibration

    def __getitem__(self, name: str) -> float:
        return self.calibration[name]

    def efficiency(self, precision: str, device: Device) -> float:
        """What products in training reach of what the library's products do alone: ``half``, or a low precision."""
        return self.calibration[f"product.{precision}.{generation(device)}"]

    def replace(self, **changes: float) -> Constants:
        """The same with some constants changed; dots in their names are written as ``__``."""
        return Constants(self.calibration.replace({k.replace("__", "."): v for k, v in changes.items()}))


def generation(device: Device) -> str:
    """Where the tensor instructions of a device keep what they work on: ``registers`` (up to 8.x, and 12.x), ``shared``
    memory for operands (9.0), or ``tensor_memory`` for sums besides (10.x)."""
    if not operands_in_shared(device):
        return "registers"
    return "tensor_memory" if (device.compute_capability or "").startswith("10.") else "shared"


def measured_on() -> tuple[str, ...]:
    """Names of the devices whose training runs the shipped constants were fitted on or compared with."""
    return tuple(constants().calibration.provenance["devices"])


@cache
def constants() -> Constants:
    """The shipped constants."""
    source = files("foretell.simulate.training") / "calibration.json"
    return Constants(parse(source.read_text(encoding="utf-8"), source.name))
