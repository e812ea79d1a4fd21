"""Which formats of weights engines can serve on a device."""

from __future__ import annotations

from foretell.errors import InputError
from foretell.hardware.device import Device

__all__ = ["refusal"]

#: Compute capability from which NVIDIA's GPUs have no INT8 products in the engines' libraries: CUTLASS's in vLLM
#: (docs/features/quantization, INT8 W8A8) and SGLang (sgl-kernel, int8_scaled_mm) end at 9.0, as does TensorRT-LLM's
#: support (reference/support-matrix).
_BLACKWELL = 10
#: Compute capability from which vLLM's and SGLang's kernels that widen these weights on the way in run (Marlin).
_WIDENED = ("fp8", "mxfp4", "nvfp4")
_TURING = (7, 5)


def refusal(weight_dtype: str, device: Device) -> InputError | None:
    """Why weights of this format cannot be served on a device, with what can instead; None where they can.

    INT8 is of activations too, and is not emulated. Any other format is widened where the device does not multiply it,
    if engines have kernels that do.

    >>> from foretell.hardware import device
    >>> str(refusal("int8", device("v100-sxm2-16gb")))
    'weight_dtype int8: v100-sxm2-16gb has no INT8 tensor cores; take w8a16 (weights alone in 8 bits) or fp16'
    >>> str(refusal("fp8", device("v100-sxm2-16gb")))
    'weight_dtype fp8: engines have no kernels for it on v100-sxm2-16gb (compute capability 7.0); take int4 or fp16'
    >>> refusal("int8", device("a100-sxm4-80gb")), refusal("fp8", device("a100-sxm4-80gb"))
    (None, None)
    """
    version = tuple(int(part) for part in (device.compute_capability or "0").split("."))
    half = "bf16" if device.peak("bf16") else "fp16"
    on = f"{device.name} (compute capability {device.compute_capability})"
    where = f"weight_dtype {weight_dtype}"
    if weight_dtype in _WIDENED:
        if device.vendor == "NVIDIA" and device.kind == "gpu" and version < _TURING:
            return InputError(f"engines have no kernels for it on {on}", where, f"take int4 or {half}")
        if weight_dtype == "nvfp4" and device.vendor != "NVIDIA":
            what = f"engines serve NVIDIA's format on no {device.vendor} device"
            return InputError(what, where, f"take mxfp4 or {half}")
        return None
    if weight_dtype != "int8":
        return None
    if device.peak("int8", "tensor") is None:
        what = f"{device.name} has no INT8 tensor cores"
    elif device.vendor == "NVIDIA" and version[0] >= _BLACKWELL:
        what = f"engines have no INT8 products for {on}"
    else:
        return None
    alike = "fp8" if device.peak("fp8") else "w8a16 (weights alone in 8 bits)"
    return InputError(what, where, f"take {alike} or {half}")
