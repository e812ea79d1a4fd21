"""The numbers of a device that costing needs, and what stands in where the catalogue does not know one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.graph import DTYPES
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]

# Element type → the number format its arithmetic is done in.
_FORMAT = {
    "float64": "fp64",
    "complex128": "fp64",
    "float32": "fp32",
    "complex64": "fp32",
    "float16": "fp16",
    "complex32": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float8_e8m0fnu": "fp8",
    "float4_e2m1fn": "fp4",
    "float4_e2m1fn_x2": "fp4",
    "int8": "int8",
    "uint8": "int8",
    "int4": "int4",
}

# What a library computes in: the fastest of these, as values can be widened on the way in…
_RUNS_AS: dict[str, tuple[str, ...]] = {
    "fp64": ("fp64",),
    "fp32": ("fp32",),
    "tf32": ("tf32", "fp32"),
    "fp16": ("fp16", "fp32"),
    "bf16": ("bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "fp6": ("fp6", "fp8", "bf16", "fp16", "fp32"),
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
    "int8": ("int8", "fp16", "fp32"),
    "int4": ("int4", "int8", "fp16", "fp32"),
}
# …and where the device has none of them (TPU, Gaudi): rounded, with fp32 sums.
_LAST_RESORT = {"fp32": "bf16", "tf32": "bf16", "fp16": "bf16"}


@dataclass(frozen=True, slots=True)
class Rate:
    """Dense FLOP/s of matrix arithmetic in one format. `note` says what stands in for it, if anything does."""

    flops_per_s: float
    runs_as: str
    unit: str
    note: str | None = None


def matrix_rate(device: Device, number_format: str) -> Rate:
    """The fastest way `device` multiplies matrices of this format, on whichever unit.

    Where it has no path for the format, a wider one that libraries use instead stands in, with a note. Raises
    InputError naming the key to add where nothing is known.
    """
    return _matrix_rate(device, number_format)


@lru_cache(maxsize=1024)
def _matrix_rate(device: Device, number_format: str) -> Rate:
    best = _fastest(device, _RUNS_AS[number_format])
    if best is None and number_format in _LAST_RESORT:
        best = _fastest(device, (_LAST_RESORT[number_format],))
    if best is None:
        repair = f"add `{number_format}.tensor` or `fp32.vector` under [peaks] of {device.name}.toml"
        if device.name == "local":
            repair = "run `foretell calibrate --here`, which measures it"
        raise InputError(
            f"no peak for {number_format} arithmetic, nor for a format that could stand in",
            f"device {device.name!r}",
            repair,
        )
    if best.runs_as != number_format and (number_format, best.runs_as) != ("tf32", "fp32"):
        best = Rate(
            best.flops_per_s,
            best.runs_as,
            best.unit,
            f"{device.name} has no fast {number_format} path: taken at its {best.runs_as} {best.unit} rate",
        )
    return best


def _fastest(device: Device, formats: tuple[str, ...]) -> Rate | None:
    best: Rate | None = None
    for candidate in formats:
        for unit in ("tensor", "vector"):
            peak = device.peak(candidate, unit)
            # A native path wins ties; a slow native path (fp16 on GeForce Pascal) loses to widening.
            if peak is not None and (best is None or peak > best.flops_per_s):
                best = Rate(peak, candidate, unit)
    return best


def vector_rate(device: Device) -> Rate:
    """FLOP/s of ordinary fp32 arithmetic: what pointwise kernels and direct convolutions run on."""
    for number_format in ("fp32", "bf16"):
        peak = device.peak(number_format, "vector")
        if peak is not None:
            return Rate(peak, number_format, "vector")
    best = max((p for p in (device.peak("fp32"), device.peak("bf16"), device.peak("fp16")) if p), default=None)
    if best is None:
        repair = f"add `fp32.vector` under [peaks] of {device.name}.toml"
        if device.name == "local":
            repair = "run `foretell calibrate --here`, which measures it"
        raise InputError("no peak for fp32 arithmetic", f"device {device.name!r}", repair)
    # Matrix engines outrun vector units 8 to 32 times within one chip.
    return Rate(best / 16, "fp32", "vector", f"fp32.vector of {device.name} unknown: taken as 1/16 of its matrix peak")


def bandwidth(device: Device) -> float:
    """Bytes/s of device memory. Raises InputError naming the key to add where unknown."""
    if device.memory_bandwidth_bytes_per_s is None:
        repair = f'add `memory_bandwidth` (as in "2.0TB/s") to {device.name}.toml'
        if device.name == "local":
            repair = "run `foretell calibrate --here`, which measures it"
        raise InputError(
            "memory bandwidth unknown, and nothing stands in for it", f"device {device.name!r}", repair
        )
    return device.memory_bandwidth_bytes_per_s


def format_of(dtype: str) -> str:
    """The number format of an element type; integers and bools count as fp32 (their arithmetic rides on it)."""
    return _FORMAT.get(dtype, "fp32")


# Number format by dtype code, for table columns.
FORMATS: tuple[str, ...] = tuple(format_of(dtype) for dtype in DTYPES)
