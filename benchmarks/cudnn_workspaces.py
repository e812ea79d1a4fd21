"""What cuDNN says its convolutions take as workspace, against `foretell.cost.memory.op_workspaces`; no GPU needed.

    python benchmarks/cudnn_workspaces.py [DEVICE …]

Since 9.8 cuDNN ranks and builds execution plans for a device described in JSON, which is made here from the catalogue.
The library is the one PyTorch's wheels bring (``nvidia-cudnn-cu12`` or ``-cu13``). Some combinations end the process
inside cuDNN, so each shape is asked in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from foretell.cost.allocator import MIB
from foretell.cost.memory import op_workspaces
from foretell.graph import Tensor, make_op
from foretell.hardware import Device, device

DEVICES = ("a100-sxm4-40gb", "h100-sxm", "rtx-4090", "t4")
PASSES = ("forward", "input gradient", "weight gradient")
# Batch, input channels, side, output channels, window, stride, groups.
SHAPES = (
    (16, 64, 56, 64, 3, 1, 1),
    (16, 64, 56, 256, 1, 1, 1),
    (16, 128, 56, 256, 3, 2, 1),
    (16, 256, 56, 512, 1, 2, 1),
    (16, 3, 224, 64, 7, 2, 1),
    (16, 3, 224, 768, 16, 16, 1),
    (16, 512, 7, 512, 3, 1, 1),
    (16, 2048, 7, 512, 1, 1, 1),
    (16, 24, 112, 24, 3, 1, 1),
    (16, 160, 14, 960, 1, 1, 1),
    (16, 128, 56, 128, 3, 1, 16),
    (16, 256, 14, 256, 3, 1, 32),
    (32, 64, 224, 64, 3, 1, 1),
)
FORMATS = (("float32", "nchw"), ("float32", "nhwc"), ("float16", "nchw"), ("float16", "nhwc"))
_ELEMENT = {"float32": (0, 4), "float16": (2, 2)}  # cudnnDataType_t, bytes


class Refused(Exception):
    """cuDNN returned an error."""


class Library:
    """cuDNN's backend interface; names and numbers of its enumerators are read from its own header."""

    def __init__(self) -> None:
        home = _package("nvidia.cudnn")
        for runtime in sorted(home.parent.glob("*/lib/libcudart.so.*")):
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        self.calls = ctypes.CDLL(str(next((home / "lib").glob("libcudnn.so.*"))), mode=ctypes.RTLD_GLOBAL)
        self.calls.cudnnGetErrorString.restype = ctypes.c_char_p
        header = (home / "include" / "cudnn_graph.h").read_text(encoding="utf-8")
        pairs = re.findall(r"CUDNN_(\w+)(?: CUDNN_DEPRECATED_ENUM)?\s*=\s*(\d+)", header)
        self.number = {name: int(value) for name, value in pairs}

    def check(self, status: int, what: str) -> None:
        if status:
            raise Refused(f"{what}: {self.calls.cudnnGetErrorString(status).decode()}")


_TYPES: dict[str, Any] = {"INT64": ctypes.c_int64, "DOUBLE": ctypes.c_double, "BACKEND_DESCRIPTOR": ctypes.c_void_p}


class Descriptor:
    """One backend descriptor: created, given attributes, finalised."""

    def __init__(self, library: Library, kind: str) -> None:
        self.library, self.kind = library, kind
        self.handle = ctypes.c_void_p()
        self._kept: list[Any] = []
        number = library.number[f"BACKEND_{kind}_DESCRIPTOR"]
        library.check(library.calls.cudnnBackendCreateDescriptor(number, ctypes.byref(self.handle)), kind)

    def set(self, attribute: str, kind: str, values: Sequence[Any]) -> Descriptor:
        """`kind` is the attribute's type, CUDNN_TYPE_…; a CHAR attribute takes bytes."""
        if kind == "CHAR":
            array: Any = ctypes.create_string_buffer(bytes(values))
        else:
            raw = [v.handle if isinstance(v, Descriptor) else v for v in values]
            array = (_TYPES.get(kind, ctypes.c_int) * len(raw))(*raw)
        self._kept += [array, *values]
        count = len(array)
        status = self.library.calls.cudnnBackendSetAttribute(
            self.handle, self.library.number[f"ATTR_{attribute}"], self.library.number[f"TYPE_{kind}"],
            ctypes.c_int64(count), array,
        )  # fmt: skip
        self.library.check(status, attribute)
        return self

    def done(self) -> Descriptor:
        self.library.check(self.library.calls.cudnnBackendFinalize(self.handle), self.kind)
        return self

    def get(self, attribute: str, kind: str, into: Any, capacity: int) -> int:
        """Fill `into` with the attribute's values; how many there are."""
        count = ctypes.c_int64()
        status = self.library.calls.cudnnBackendGetAttribute(
            self.handle, self.library.number[f"ATTR_{attribute}"], self.library.number[f"TYPE_{kind}"],
            ctypes.c_int64(capacity), ctypes.byref(count), into,
        )  # fmt: skip
        self.library.check(status, attribute)
        return count.value


def described(on: Device) -> dict[str, Any]:
    """The device as cuDNN's JSON has it."""
    return {
        "version": 1, "deviceName": on.title, "cudaDeviceId": 0, "pciDeviceId": 0, "isTccDriver": 0,
        "deviceVer": round(float(on.compute_capability or 0) * 100), "driverVer": 13000,
        "smCountOrigin": 0, "supportCoopLaunch": 1, "warpSize": on.warp_size,
        "multiProcessorCount": on.multiprocessors, "maxCtasPerSM": on.max_blocks_per_sm,
        "maxThreadsPerBlock": on.max_threads_per_block, "maxThreadsPerSM": on.max_threads_per_sm,
        "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": on.max_registers_per_block, "maxRegistersPerSM": on.registers_per_sm,
        "maxSharedMemoryPerBlock": 48 * 1024, "maxSharedMemoryPerBlockOptin": on.shared_bytes_per_block,
        "reservedSharedMemoryPerBlock": on.shared_reserved_bytes_per_block,
        "smClockRateKHz": round((on.boost_clock_hz or 0) / 1e3), "memClockRateKHz": 1_215_000,
        "l2CacheSize": on.l2_bytes, "totalGlobalMem": on.memory_bytes,
    }  # fmt: skip


def strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    _, c, h, w = shape
    return (c * h * w, 1, c * w, c) if layout == "nhwc" else (c * h * w, h * w, w, 1)


def first_plans(on: Device, shape: Sequence[int], dtype: str, layout: str) -> list[int | None]:
    """Workspace bytes of the first-ranked plan of each of `PASSES`; None where cuDNN refuses."""
    library = Library()
    target = Descriptor(library, "DEVICEPROP")
    target.set("DEVICEPROP_JSON_REPRESENTATION", "CHAR", json.dumps(described(on)).encode()).done()
    x, w, y, stride, padding = _dimensions(shape)
    tensors = []
    for uid, dims in enumerate((x, w, y), start=1):
        tensor = Descriptor(library, "TENSOR")
        tensor.set("TENSOR_DATA_TYPE", "DATA_TYPE", [_ELEMENT[dtype][0]]).set("TENSOR_UNIQUE_ID", "INT64", [uid])
        tensor.set("TENSOR_DIMENSIONS", "INT64", dims).set("TENSOR_STRIDES", "INT64", strides(dims, layout))
        tensors.append(tensor.set("TENSOR_BYTE_ALIGNMENT", "INT64", [16]).done())
    convolution = Descriptor(library, "CONVOLUTION")
    convolution.set("CONVOLUTION_COMP_TYPE", "DATA_TYPE", [0]).set("CONVOLUTION_CONV_MODE", "CONVOLUTION_MODE", [1])
    convolution.set("CONVOLUTION_SPATIAL_DIMS", "INT64", [2]).set("CONVOLUTION_DILATIONS", "INT64", [1, 1])
    convolution.set("CONVOLUTION_FILTER_STRIDES", "INT64", [stride] * 2)
    for side in ("PRE", "POST"):
        convolution.set(f"CONVOLUTION_{side}_PADDINGS", "INT64", [padding] * 2)
    convolution.done()
    kinds = (("FORWARD", "FORWARD", "X W Y"), ("BACKWARD_DATA", "BWD_DATA", "DX W DY"),
             ("BACKWARD_FILTER", "BWD_FILTER", "X DW DY"))  # fmt: skip
    found: list[int | None] = []
    for kind, prefix, names in kinds:
        operation = Descriptor(library, f"OPERATION_CONVOLUTION_{kind}")
        for name, tensor in zip(names.split(), tensors, strict=True):
            operation.set(f"OPERATION_CONVOLUTION_{prefix}_{name}", "BACKEND_DESCRIPTOR", [tensor])
        operation.set(f"OPERATION_CONVOLUTION_{prefix}_CONV_DESC", "BACKEND_DESCRIPTOR", [convolution])
        operation.set(f"OPERATION_CONVOLUTION_{prefix}_ALPHA", "DOUBLE", [1.0])
        operation.set(f"OPERATION_CONVOLUTION_{prefix}_BETA", "DOUBLE", [0.0])
        try:
            found.append(_first_plan(library, operation.done(), target))
        except Refused:
            found.append(None)
    return found


def _first_plan(library: Library, operation: Descriptor, target: Descriptor) -> int:
    graph = Descriptor(library, "OPERATIONGRAPH").set("OPERATIONGRAPH_OPS", "BACKEND_DESCRIPTOR", [operation]).done()
    heuristic = Descriptor(library, "ENGINEHEUR").set("ENGINEHEUR_OPERATION_GRAPH", "BACKEND_DESCRIPTOR", [graph])
    heuristic.set("ENGINEHEUR_MODE", "HEUR_MODE", [library.number["HEUR_MODE_A"]])
    heuristic.set("ENGINEHEUR_DEVICEPROP", "BACKEND_DESCRIPTOR", [target]).done()
    choice = Descriptor(library, "ENGINECFG")
    array = (ctypes.c_void_p * 1)(choice.handle)
    if heuristic.get("ENGINEHEUR_RESULTS", "BACKEND_DESCRIPTOR", array, 1) == 0:
        raise Refused("no engine")
    plan = Descriptor(library, "EXECUTION_PLAN").set("EXECUTION_PLAN_ENGINE_CONFIG", "BACKEND_DESCRIPTOR", [choice])
    plan.set("EXECUTION_PLAN_DEVICEPROP", "BACKEND_DESCRIPTOR", [target]).done()
    nbytes = ctypes.c_int64()
    plan.get("EXECUTION_PLAN_WORKSPACE_SIZE", "INT64", ctypes.byref(nbytes), 1)
    return nbytes.value


def ours(on: Device, shape: Sequence[int], dtype: str, layout: str) -> list[int]:
    """The same three figures by the product's rule."""
    x, w, y, _, _ = _dimensions(shape)
    tensors = tuple(Tensor(dims, dtype, i, strides(dims, layout)) for i, dims in enumerate((x, w, y)))
    attrs = MappingProxyType({"groups": shape[6], "grad_mask": (True, True, False)})
    forward = make_op("aten.convolution.default", tensors, (0, 1), (2,), attrs=attrs)
    backward = make_op("aten.convolution_backward.default", tensors, (2, 0, 1), (0, 1), attrs=attrs)
    return [nbytes for op in (forward, backward) for nbytes in op_workspaces(op, tensors, on)]


def _dimensions(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]:
    """x, w, y, stride, padding."""
    n, c, side, k, window, stride, groups = shape
    padding = 0 if stride == window else window // 2
    out = (side + 2 * padding - window) // stride + 1
    return (n, c, side, side), (k, c // groups, window, window), (n, k, out, out), stride, padding


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed: pip install torch brings it on Linux")
    return Path(next(iter(spec.submodule_search_locations)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="*", default=DEVICES)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in the process of its own
    arguments = parser.parse_args(argv)
    if arguments.one:
        name, shape, dtype, layout = json.loads(arguments.one)
        print(json.dumps(first_plans(device(name), shape, dtype, layout)))
        return 0
    console = Console(width=max(130, Console().width))
    for name in arguments.devices:
        table = Table(title=f"workspace of the first-ranked plan, MiB: cuDNN / Foretell, {name}")
        table.add_column("batch, channels, side, out, window, stride, groups")
        table.add_column("operands")
        for heading in PASSES:
            table.add_column(heading, justify="right")
        for dtype, layout in FORMATS:
            for shape in SHAPES:
                request = json.dumps([name, shape, dtype, layout])
                answer = subprocess.run(
                    [sys.executable, __file__, "--one", request], capture_output=True, text=True, check=False
                )
                theirs = json.loads(answer.stdout) if answer.returncode == 0 else [None] * 3
                pairs = zip(theirs, ours(device(name), shape, dtype, layout), strict=True)
                cells = ("–" if a is None else f"{a / MIB:.1f} / {b / MIB:.1f}" for a, b in pairs)
                table.add_row(", ".join(map(str, shape)), f"{dtype} {layout}", *cells)
        console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
