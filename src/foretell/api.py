"""The two calls most users need: `capture` and `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from foretell.errors import InputError
from foretell.graph import Graph
from foretell.hardware import Device

__all__ = ["capture", "predict"]


def capture(workload: Any, *example_inputs: Any, **settings: Any) -> Graph:
    """What one step of a workload does, as a `Graph`; nothing runs and no weight is made.

    `workload` is a workload string (``timm:resnet50``, ``torchvision:…``, ``hf:config.json``, ``llm:…``,
    ``py:FILE.py:FACTORY``), the path of a captured ``graph.json``, a `Graph`, or a ``torch.nn.Module`` followed by its
    example inputs. `settings` are the fields of `foretell.workload.options.Options` and ``train=True``.
    Raises UnknownNameError, InputError or CaptureError.
    """
    from foretell.workload.options import options
    from foretell.workload.resolve import capture_given, need, resolve

    if isinstance(workload, Graph):
        if example_inputs or settings:
            raise InputError("a captured graph takes no inputs or settings", repair="capture it anew with them")
        return workload
    chosen = options(**settings)
    if isinstance(workload, str):
        if example_inputs:
            repair = 'give inputs={"x": ((8, 3), "float32")}'
            raise InputError("a workload string takes no example inputs", repair=repair)
        return resolve(workload, chosen)
    need("torch", "torch")
    return capture_given(workload, example_inputs, chosen)


@overload
def predict(workload: Any, *example_inputs: Any, on: str | Device, **settings: Any) -> Any: ...
@overload
def predict(workload: Any, *example_inputs: Any, on: Sequence[str | Device], **settings: Any) -> list[Any]: ...
def predict(
    workload: Any,
    *example_inputs: Any,
    on: str | Device | Sequence[str | Device],
    runtime: str = "eager",
    model: str = "auto",
    calibration: str | Path | None = None,
    power_limit_w: float | None = None,
    clock_hz: float | None = None,
    **settings: Any,
) -> Any:
    """What one step takes on a device: an `Estimate` (time, memory, energy, cost, and what limits it).

    `on` is a device name, a `Device`, or several (``"t4,l4"`` or a list), which give a list of estimates.
    `runtime` is ``eager`` or ``compiled``, `model` a name of `foretell.cost.models` or ``auto`` (the one that
    knows the device best), `calibration` a file that ``foretell calibrate`` wrote; `power_limit_w` and `clock_hz` are
    what the device is set to (its TDP, boost); the rest goes to `capture`.
    """
    from foretell.cost import estimate, lower
    from foretell.cost.energy import check_limits
    from foretell.hardware import device

    several = not isinstance(on, (str, Device)) or (isinstance(on, str) and "," in on)
    names = on.split(",") if isinstance(on, str) else [on] if isinstance(on, Device) else list(on)
    devices = [name if isinstance(name, Device) else device(name.strip()) for name in names]
    for one in devices:
        check_limits(one, power_limit_w, clock_hz)
    graph = capture(workload, *example_inputs, **settings)
    program = lower(graph, runtime)  # once for all devices
    how: dict[str, Any] = {"runtime": runtime, "model": model, "program": program}
    how |= {"power_limit_w": power_limit_w, "clock_hz": clock_hz}
    how["calibration"] = None if calibration is None else Path(calibration)
    estimates = [estimate(graph, d, **how) for d in devices]
    return estimates if several else estimates[0]
