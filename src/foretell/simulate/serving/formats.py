"""Which formats of weights engines can serve on a device."""

from __future__ import annotations

from foretell.errors import InputError
from foretell.hardware.device import Device

__all__ = ["refusal"]

#: Compute capability from which NVIDIA's GPUs have no INT8 products in the engines' libraries: CUTLASS's in vLLM
#: (docs/features/quantization, INT8 W8A8) and SGLang (sgl-kernel, int8_scaled_mm) end at 9.0, as does TensorRT-LLM's
#: support (reference/support-matrix).
_BLACKWELL = 10


def refusal(weight_dtype: str, device: Device) -> InputError | None:
    """Why weights of this format cannot be served on a device, with what can instead; None where they can.

    INT8 is of activations too, and is not emulated. Any other format is widened where the device does not multiply it.

    >>> from foretell.hardware import device
    >>> str(refusal("int8", device("v100-sxm2-16gb")))
    'weight_dtype int8: v100-sxm2-16gb has no INT8 tensor cores; take w8a16 (weights alone in 8 bits) or fp16'
    >>> refusal("int8", device("a100-sxm4-80gb"))
    """
    if weight_dtype != "int8":
        return None
    major = int((device.compute_capability or "0").split(".")[0])
    if device.peak("int8", "tensor") is None:
        what = f"{device.name} has no INT8 tensor cores"
    elif device.vendor == "NVIDIA" and major >= _BLACKWELL:
        what = f"engines have no INT8 products for {device.name} (compute capability {device.compute_capability})"
    else:
        return None
    alike = "fp8" if device.peak("fp8") else "w8a16 (weights alone in 8 bits)"
    return InputError(what, "weight_dtype int8", f"take {alike} or {'bf16' if device.peak('bf16') else 'fp16'}")
