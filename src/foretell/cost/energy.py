"""Energy of a step, first version: what the device draws doing nothing, plus what work adds up to its power limit.

    energy = idle_w · time + (tdp_w − idle_w) · Σ over ops (activity · busy time)

An op's activity is ``base + compute · (share of its time at peak arithmetic) + memory · (share at full bandwidth)``, at
most 1: a kernel that saturates either unit draws close to the limit. The three weights are rough, from the shape of
published power sweeps (a memory-bound kernel draws 60 to 80 % of TDP, a large matrix product all of it).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.cost.model import OpTimes, Step
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]

_BASE, _COMPUTE, _MEMORY = 0.25, 0.70, 0.50
_IDLE_SHARE = 0.15  # of TDP, where idle power is unknown


def energy_of(device: Device, times: OpTimes, step: Step, repeat: Floats) -> tuple[Floats | None, tuple[str, ...]]:
    """Joules of each op in the step (None where the device's power is unknown), and notes on what stood in."""
    if device.tdp_w is None:
        return None, (f"tdp of {device.name} unknown: no energy",)
    notes: tuple[str, ...] = ()
    idle = device.idle_w
    if idle is None:
        idle = _IDLE_SHARE * device.tdp_w
        notes = (f"idle power of {device.name} unknown: taken as {_IDLE_SHARE:.0%} of its TDP",)
    busy = np.maximum(times.busy_s, 1e-30)
    efficiency = times.details.get("memory_efficiency")
    streaming = times.memory_s if efficiency is None else times.memory_s * efficiency
    activity = np.minimum(1.0, _BASE + _COMPUTE * times.ideal_s / busy + _MEMORY * streaming / busy)
    dynamic = max(0.0, device.tdp_w - idle) * activity * step.busy_s
    return idle * (step.busy_s + step.gap_s) + dynamic, notes
