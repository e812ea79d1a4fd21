"""`Measured`: a table of measurements on one device, as one program whose rows fall into measurements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.cost.model import CostModel, OpTimes, Settings
from foretell.cost.program import Program
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ISSUED = ("graph", "step", "call")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement i took `measured_s[i]` for rows ``starts[i]`` … ``starts[i + 1]`` of `program`.

    A table of single operators has ``starts = arange(n)``. `group` names what is held out together (a family, a
    shape). `issued` says how the measured work reached the device: ``graph`` (replayed, nothing waits for the host),
    ``step`` (one op after another by a host) or ``call`` (one call between two events, launch gap included).
    `source` is the file it was read from.
    """

    name: str
    device: Device
    settings: Settings
    program: Program
    starts: Ints
    measured_s: Floats
    group: npt.NDArray[np.object_]
    issued: str
    source: str

    def __post_init__(self) -> None:
        if self.issued not in ISSUED:
            raise ValueError(f"issued is {self.issued!r}, not one of {ISSUED}")
        if not len(self.starts) == len(self.measured_s) == len(self.group):
            raise ValueError("starts, measured_s and group differ in length")

    def __len__(self) -> int:
        return len(self.starts)

    def times(self, model: CostModel) -> Floats:
        """Seconds `model` predicts for each measurement."""
        return self.added(model.op_times(self.program, self.device, self.settings))

    def added(self, times: OpTimes) -> Floats:
        """Seconds of each measurement, given those of its operations."""
        repeat = self.program.table.repeat
        busy = np.add.reduceat(times.busy_s * repeat, self.starts)
        if self.issued == "graph":
            return busy
        host = np.add.reduceat(times.host_s * repeat, self.starts)
        return np.maximum(busy, host)
