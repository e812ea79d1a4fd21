"""Element types and their sizes."""

from __future__ import annotations

from foretell.errors import unknown

# Bits an element takes. Names are PyTorch's, without the "torch." prefix.
_BITS = {
    "float64": 64,
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn": 4,
    "float4_e2m1fn_x2": 8,  # two packed values an element, as PyTorch has them
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "int4": 4,
    "uint64": 64,
    "uint32": 32,
    "uint16": 16,
    "uint8": 8,
    "bool": 8,
    "complex64": 64,
    "complex128": 128,
    "complex32": 32,
}

DTYPES: tuple[str, ...] = tuple(_BITS)


def dtype_bytes(dtype: str) -> float:
    """Bytes one element takes (0.5 for int4). Raises UnknownNameError."""
    try:
        return _BITS[dtype] / 8
    except KeyError:
        raise unknown("dtype", dtype, DTYPES) from None


def is_floating(dtype: str) -> bool:
    """Whether the element type is a real floating-point format."""
    return dtype.startswith(("float", "bfloat"))
