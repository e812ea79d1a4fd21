"""How long large ONNX graphs take to load: five of 5,000 nodes or more, of the kinds that exporters write.

    python benchmarks/speed_onnx.py

Weights are declared as external data, so that the files are small; the reader never opens them. Each must load in 5 s.
Exit code 1 where one does not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from foretell.workload.onnx import graph
from foretell.workload.options import options

MOST_SECONDS = 5.0
LEAST_NODES = 5_000
F = TensorProto.FLOAT


class Writer:
    """A model being written: names, stored tensors, nodes. Each method returns the name of its result."""

    def __init__(self, **inputs: list[int | str]) -> None:
        self.inputs = [helper.make_tensor_value_info(n, F, s) for n, s in inputs.items()]
        self.nodes: list[Any] = []
        self.stored: list[Any] = []

    def op(self, kind: str, *inputs: str, **attrs: Any) -> str:
        """One node of one output."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attrs))
        return name

    def weight(self, *shape: int) -> str:
        """A parameter whose data lies elsewhere."""
        tensor = TensorProto(name=f"w{len(self.stored)}", data_type=F, dims=shape, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="weights.bin")
        self.stored.append(tensor)
        return str(tensor.name)

    def constant(self, content: Any, dtype: str = "float32") -> str:
        """A Constant node, as exporters write numbers."""
        return self.op("Constant", value=numpy_helper.from_array(np.array(content, dtype=dtype)))

    def save(self, path: Path, *outputs: str) -> int:
        """Write it; returns how many nodes it has."""
        results = [helper.make_tensor_value_info(n, F, None) for n in outputs]
        made = helper.make_graph(self.nodes, "g", self.inputs, results, self.stored)
        path.write_bytes(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
        return len(self.nodes)

    # --- layers -------------------------------------------------------------------------------------------------

    def conv(self, x: str, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> str:
        """A convolution and its batch norm."""
        pad = [kernel // 2] * 4
        w = self.weight(out, channels // groups, kernel, kernel)
        y = self.op("Conv", x, w, strides=[stride] * 2, pads=pad, group=groups, kernel_shape=[kernel] * 2)
        return self.op("BatchNormalization", y, *(self.weight(out) for _ in range(4)))

    def silu(self, x: str) -> str:
        """x · sigmoid(x)."""
        return self.op("Mul", x, self.op("Sigmoid", x))

    def norm(self, x: str, width: int) -> str:
        """A layer norm as exporters wrote it before opset 17."""
        centred = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        variance = self.op("ReduceMean", self.op("Pow", centred, self.constant(2.0)), axes=[-1])
        root = self.op("Sqrt", self.op("Add", variance, self.constant(1e-5)))
        normal = self.op("Div", centred, root)
        return self.op("Add", self.op("Mul", normal, self.weight(width)), self.weight(width))

    def linear(self, x: str, width: int, out: int) -> str:
        """A product with a stored matrix, and a bias."""
        return self.op("Add", self.op("MatMul", x, self.weight(width, out)), self.weight(out))

    def shape_of(self, x: str, *tail: int) -> str:
        """The leading two dimensions of `x`, then `tail`, as exporters write a view."""
        size = self.op("Shape", x)
        picked = [self.op("Gather", size, self.constant(i, "int64"), axis=0) for i in (0, 1)]
        parts = [self.op("Unsqueeze", p, self.constant([0], "int64")) for p in picked]
        return self.op("Concat", *parts, self.constant(list(tail), "int64"), axis=0)


def efficientnet(path: Path, copies: int = 6) -> int:
    """EfficientNet-B7's stages (width 2, depth 3.1), deepened till they are large."""
    w = Writer(x=["n", 3, 600, 600])
    x, channels = w.silu(w.conv("x", 3, 64, 3, 2)), 64
    stages = ((1, 32, 4, 1, 3), (6, 48, 7, 2, 3), (6, 80, 7, 2, 5), (6, 160, 10, 2, 3), (6, 224, 10, 1, 5),
              (6, 384, 13, 2, 5), (6, 640, 4, 1, 3))  # fmt: skip
    for expand, out, depth, stride, kernel in stages:
        for block in range(depth * copies):
            wide, step = channels * expand, stride if not block else 1
            y = w.silu(w.conv(x, channels, wide)) if expand > 1 else x
            y = w.silu(w.conv(y, wide, wide, kernel, step, wide))
            gate = w.op("GlobalAveragePool", y)
            gate = w.silu(w.op("Conv", gate, w.weight(channels // 4, wide, 1, 1), w.weight(channels // 4)))
            gate = w.op("Sigmoid", w.op("Conv", gate, w.weight(wide, channels // 4, 1, 1), w.weight(wide)))
            y = w.conv(w.op("Mul", y, gate), wide, out)
            x = w.op("Add", x, y) if step == 1 and channels == out else y
            channels = out
    x = w.op("Flatten", w.op("GlobalAveragePool", w.silu(w.conv(x, channels, 2560))), axis=1)
    return w.save(path, w.op("Gemm", x, w.weight(1000, 2560), w.weight(1000), transB=1))


def transformer(path: Path, layers: int = 50) -> int:
    """A 50-layer encoder, width 1600, with norms, GELU and shapes spelled out."""
    width, heads = 1600, 25
    w = Writer(x=["n", 512, width])
    x = "x"
    for _ in range(layers):
        y = w.norm(x, width)
        parts = []
        for _ in range(3):
            part = w.linear(y, width, width)
            parts.append(w.op("Transpose", w.op("Reshape", part, w.shape_of(part, heads, 64)), perm=[0, 2, 1, 3]))
        q, k, v = parts
        scale = w.constant(64**-0.25)
        scores = w.op("MatMul", w.op("Mul", q, scale), w.op("Mul", w.op("Transpose", k, perm=[0, 1, 3, 2]), scale))
        y = w.op("Transpose", w.op("MatMul", w.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        x = w.op("Add", x, w.linear(w.op("Reshape", y, w.shape_of(y, width)), width, width))
        y = w.linear(w.norm(x, width), width, 4 * width)
        erf = w.op("Add", w.op("Erf", w.op("Div", y, w.constant(2**0.5))), w.constant(1.0))
        y = w.op("Mul", w.op("Mul", y, erf), w.constant(0.5))
        x = w.op("Add", x, w.linear(y, 4 * width, width))
    return w.save(path, x)


def nasnet(path: Path, cells: int = 96) -> int:
    """Cells of five pairs of separable convolutions and pools over the two cells before, joined."""
    w = Writer(x=["n", 3, 331, 331])
    before = now = w.conv("x", 3, 168, 3, 2)
    for _ in range(cells):
        first, second = (w.conv(w.op("Relu", h), 168, 168) for h in (before, now))
        made = []
        for pair in range(5):
            ends = []
            for source, kernel in ((first, 5), (second, 3)):
                if pair > 2:
                    ends.append(w.op("AveragePool", source, kernel_shape=[3, 3], pads=[1] * 4, strides=[1, 1]))
                    continue
                y = source
                for _ in range(2):
                    depthwise, pad = w.weight(168, 1, kernel, kernel), [kernel // 2] * 4
                    y = w.conv(w.op("Conv", w.op("Relu", y), depthwise, group=168, pads=pad), 168, 168)
                ends.append(y)
            made.append(w.op("Add", *ends))
        before, now = now, w.conv(w.op("Concat", *made, axis=1), 5 * 168, 168)
    return w.save(path, w.op("GlobalAveragePool", now))


def densenet(path: Path, repeat: int = 6) -> int:
    """DenseNet-264's blocks (6, 12, 64, 48 layers of growth 32), deepened till they are large."""
    w = Writer(x=["n", 3, 224, 224])
    x, channels = w.op("MaxPool", w.op("Relu", w.conv("x", 3, 64, 7, 2)), kernel_shape=[3, 3], strides=[2, 2]), 64
    for block, layers in enumerate((6, 12, 64, 48)):
        parts = [x]
        for _ in range(layers * repeat):
            y = w.op("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
            parts = [y]
            y = w.op("Relu", w.op("BatchNormalization", y, *(w.weight(channels) for _ in range(4))))
            y = w.op("Relu", w.conv(y, channels, 128))
            parts.append(w.op("Conv", y, w.weight(32, 128, 3, 3), pads=[1] * 4))
            channels += 32
        x = w.op("Concat", *parts, axis=1)
        if block < 3:
            x = w.op("AveragePool", w.conv(x, channels, channels // 2), kernel_shape=[2, 2], strides=[2, 2])
            channels //= 2
    return w.save(path, w.op("GlobalAveragePool", x))


def unrolled(path: Path, steps: int = 400) -> int:
    """An LSTM cell of width 512 written out step by step."""
    w = Writer(x=["n", steps, 512], h=["n", 512], c=["n", 512])
    kernel, hidden, bias = w.weight(512, 2048), w.weight(512, 2048), w.weight(2048)
    h, c = "h", "c"
    for step in range(steps):
        now = w.op("Gather", "x", w.constant(step, "int64"), axis=1)
        gates = w.op("Add", w.op("Add", w.op("MatMul", now, kernel), bias), w.op("MatMul", h, hidden))
        parts = [f"s{step}_{k}" for k in range(4)]
        w.nodes.append(helper.make_node("Split", [gates, w.constant([512] * 4, "int64")], parts, axis=1))
        i, f, o = (w.op("Sigmoid", part) for part in parts[:3])
        c = w.op("Add", w.op("Mul", f, c), w.op("Mul", i, w.op("Tanh", parts[3])))
        h = w.op("Mul", o, w.op("Tanh", c))
    return w.save(path, h)


GRAPHS = (efficientnet, transformer, nasnet, densenet, unrolled)


def main() -> int:
    """One line a graph."""
    late = 0
    with tempfile.TemporaryDirectory() as folder:
        for build in GRAPHS:
            path = Path(folder) / f"{build.__name__}.onnx"
            nodes = build(path)
            before = time.perf_counter()
            made = graph(str(path), options())
            seconds = time.perf_counter() - before
            late += seconds > MOST_SECONDS or nodes < LEAST_NODES
            print(f"{build.__name__:14}{nodes:7,} nodes{len(made.ops):7,} ops{made.parameters / 1e6:9.1f} M parameters"
                  f"{made.macs() / 1e9:10.1f} GMAC{seconds:7.2f} s  {made.provenance.get('joined', '')}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
