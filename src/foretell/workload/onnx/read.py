"""From a file to a parsed model, or to an error that says what the file is instead.

Parsing a protobuf executes nothing. Weights in other files (external data) are never opened: shape and element type of
a tensor are in the model itself.
"""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from foretell import documents
from foretell.errors import InputError
from foretell.workload.filekind import kind_of_bytes

MOST_BYTES = 2**31  # protobuf's own limit
MOST_ELEMENTS = 2**59 - 1  # what a graph's 64-bit byte counts hold
MOST_RANK = 64
FIRST_OPSET = 7  # before it, broadcasting had another meaning

_EXPORT = "give a file that torch.onnx.export or another ONNX exporter wrote"
_MAYBE = ("an ONNX model", "a file of an unknown kind", "a file of zeros")

def load(path: Path) -> Any:
    """The ``onnx.ModelProto`` in a file. Raises InputError where it is none, or damaged."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from onnx import ModelProto

    where = str(path)
    try:
        if path.is_dir():
            raise InputError("is a folder", where, "give the .onnx file inside it")
        if path.is_file() and (size := path.stat().st_size) > MOST_BYTES:
            repair = "save it with its weights in another file (save_as_external_data)"
            raise InputError(f"has {size:,} bytes; an ONNX file holds at most {MOST_BYTES:,}", where, repair)
        data = documents.read_bytes(path, ".onnx file", MOST_BYTES)  # refuses pipes and devices
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where[:200], "give the path of an .onnx file") from None
    _refuse_other_kinds(data, where)
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RecursionError, UnicodeDecodeError, ValueError):
        raise InputError("is no ONNX model, or a damaged one: its protobuf does not parse", where, _EXPORT) from None
    if not model.HasField("graph") or not model.graph.node:
        raise InputError("is no ONNX model: it has no graph, or one without nodes", where, _EXPORT)
    _check_opset(model, where)
    return model


def _refuse_other_kinds(data: bytes, where: str) -> None:
    kind = kind_of_bytes(data[:512], len(data))
    if data[4:8] == b"ORTM":
        raise InputError("is a model in ONNX Runtime's own format", where, "give the .onnx file that it was made from")
    if kind not in _MAYBE:
        raise InputError(f"is {kind}, not an ONNX model", where, _EXPORT)


def _check_opset(model: Any, where: str) -> None:
    from onnx import defs

    version = opsets(model)[""]
    newest = defs.onnx_opset_version()
    if version > newest:
        raise InputError(f"uses opset {version}; the onnx library here knows up to {newest}", where, "update onnx")
    if version < FIRST_OPSET:
        repair = "convert it with onnx.version_converter.convert_version(model, 17)"
        raise InputError(f"uses opset {version}; the oldest understood is {FIRST_OPSET}", where, repair)


def opsets(model: Any) -> dict[str, int]:
    """Version by domain; the default domain is ``""``. A file of before IR version 3 names none and means 1."""
    found = {"": 1}
    for one in model.opset_import:
        found["" if one.domain == "ai.onnx" else one.domain] = one.version
    return found


# --- tensors ----------------------------------------------------------------------------------------------------

# Element types by ONNX's number. Four-bit floats are taken as four-bit integers: the same bytes.
DTYPES: dict[int, str] = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8_e4m3fn", 18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "int4", 22: "int4",
    23: "int4", 24: "float8_e8m0fnu",
}  # fmt: skip
ELEMENT_TYPE = {name: number for number, name in reversed(DTYPES.items())}

_FIELD = {
    "float32": "float_data", "complex64": "float_data", "float64": "double_data", "complex128": "double_data",
    "int64": "int64_data", "uint32": "uint64_data", "uint64": "uint64_data",
}  # fmt: skip


def dtype_name(number: int, where: str) -> str:
    """The name of an ONNX element type. Raises InputError where we have none."""
    if number == 8:
        raise InputError("holds text", where, "export the part of the model that computes on numbers")
    if number not in DTYPES:
        raise InputError(f"has element type {number}, which is not known here", where, "use a standard element type")
    return DTYPES[number]


def checked_shape(dims: Any, where: str) -> tuple[int, ...]:
    """Dimensions as a tuple. Raises InputError where one is negative or their product too large."""
    shape = tuple(int(d) for d in dims)
    if len(shape) > MOST_RANK:
        raise InputError(f"has {len(shape)} dimensions", where, f"use at most {MOST_RANK}")
    if any(d < 0 for d in shape):
        raise InputError(f"has a negative dimension: {_shown(shape)}", where, "export the model again")
    if math.prod(max(d, 1) for d in shape) > MOST_ELEMENTS:
        raise InputError(f"is too large: {_shown(shape)}", where, "check batch, lengths and widths")
    return shape


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))[:80]


def check_tensor(tensor: Any, where: str) -> tuple[tuple[int, ...], str]:
    """Shape and element type of a stored tensor, after checking that what is stored has that size."""
    from onnx import TensorProto

    from foretell.graph import dtype_bytes

    shape, dtype = checked_shape(tensor.dims, where), dtype_name(tensor.data_type, where)
    elements = math.prod(shape)
    if tensor.data_location == TensorProto.EXTERNAL:
        location = next((e.value for e in tensor.external_data if e.key == "location"), "")
        _check_location(location, where)
        return shape, dtype
    expected = math.ceil(elements * dtype_bytes(dtype))
    if tensor.HasField("raw_data"):
        stored, unit = len(tensor.raw_data), "bytes"
    else:
        stored, unit = len(getattr(tensor, _FIELD.get(dtype, "int32_data"))), "values"
        expected = elements * 2 if dtype.startswith("complex") else elements
        if dtype == "int4":
            expected = math.ceil(elements / 2)
    if stored != expected:
        size = _shown(shape) or "one element"
        what = f"is declared as {size} of {dtype}, which takes {expected:,} {unit}, and holds {stored:,}"
        raise InputError(what, where, "export the model again")
    return shape, dtype


def _check_location(location: str, where: str) -> None:
    """External data lies beside the model; a path that leads elsewhere is refused, though we never open it."""
    posix, windows = PurePosixPath(location), PureWindowsPath(location)
    if posix.is_absolute() or windows.drive or windows.root or ".." in (*posix.parts, *windows.parts):
        raise InputError(
            f"keeps its data at {location[:80]!r}, outside the model's folder", where, "save the model with its data "
            "beside it"
        )
