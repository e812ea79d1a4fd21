"""Small networks written op by op, without PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from foretell.advise.edit import channels_last
from foretell.graph import Graph, Op, Storage, Tensor
from foretell.graph.op import make_op


class Net:
    """Writes a graph: each method adds one operation and returns the tensor it made."""

    def __init__(self, dtype: str = "float16", nhwc: bool = True, batch: int = 32) -> None:
        self.dtype, self.nhwc, self.batch = dtype, nhwc, batch
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.ops: list[Op] = []

    def new(self, *shape: int, role: str = "temporary") -> int:
        last = channels_last(shape) if self.nhwc and len(shape) == 4 and role != "parameter" else None
        tensor = Tensor(shape, self.dtype, len(self.storages), last)
        self.storages.append(Storage(tensor.nbytes, role))
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def image(self, channels: int, side: int) -> int:
        return self.new(self.batch, channels, side, side, role="input")

    def op(self, name: str, inputs: tuple[int, ...], *shape: int, **attrs: Any) -> int:
        out = self.new(*shape)
        self.ops.append(
            make_op(name, self.tensors, inputs, (out,), module=f"m{len(self.ops)}", attrs=MappingProxyType(attrs))
        )
        return out

    def conv(self, x: int, outputs: int, k: int = 1, stride: int = 1, groups: int = 1) -> int:
        n, channels, side, _ = self.tensors[x].shape
        weight = self.new(outputs, channels // groups, k, k, role="parameter")
        out = side // stride
        return self.op(
            "aten.convolution.default", (x, weight), n, outputs, out, out, stride=(stride, stride),
            padding=(k // 2, k // 2), dilation=(1, 1), transposed=False, output_padding=(0, 0), groups=groups,
        )  # fmt: skip

    def norm(self, x: int) -> int:
        scale = [self.new(self.tensors[x].shape[1], role="parameter") for _ in range(4)]
        return self.op(
            "aten.native_batch_norm.default", (x, *scale), *self.tensors[x].shape, training=False, affine=True
        )

    def relu(self, x: int) -> int:
        return self.op("aten.relu.default", (x,), *self.tensors[x].shape)

    def add(self, x: int, y: int) -> int:
        return self.op("aten.add.Tensor", (x, y), *self.tensors[x].shape)

    def cat(self, *parts: int) -> int:
        n, _, *space = self.tensors[parts[0]].shape
        return self.op("aten.cat.default", parts, n, sum(self.tensors[t].shape[1] for t in parts), *space)

    def pool(self, x: int) -> int:
        n, channels, side, _ = self.tensors[x].shape
        return self.op("aten.max_pool2d_with_indices.default", (x,), n, channels, side // 2, side // 2, window=(3, 3))

    def excite(self, x: int) -> int:
        n, channels, _, _ = self.tensors[x].shape
        mean = self.op("aten.mean.dim", (x,), n, channels, 1, 1, dims=(2, 3))
        squeezed = self.relu(self.conv(mean, max(1, channels // 4)))
        gate = self.op("aten.sigmoid.default", (self.conv(squeezed, channels),), n, channels, 1, 1)
        return self.op("aten.mul.Tensor", (x, gate), *self.tensors[x].shape)

    def attend(self, positions: int, heads: int = 6, depth: int = 64) -> int:
        q, k, v = (self.new(self.batch, heads, positions, depth, role="input") for _ in range(3))
        return self.op("foretell.sdpa.default", (q, k, v), self.batch, heads, positions, depth, causal=False)

    def graph(self, mode: str = "inference", precision: str = "fp16") -> Graph:
        inputs = tuple(i for i, t in enumerate(self.tensors) if self.storages[t.storage].role == "input")
        return Graph(
            "net", mode, precision, tuple(self.ops), tuple(self.tensors), tuple(self.storages), 0, 0,
            MappingProxyType({"images": self.batch}), inputs, self.ops[-1].outputs,
        )  # fmt: skip


@pytest.fixture
def net() -> Callable[..., Net]:
    return Net
