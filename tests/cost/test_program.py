"""What a runtime launches, on graphs small enough to do by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from foretell.cost.program import Program, lower
from foretell.errors import UnknownNameError
from foretell.graph import Graph, OpTable, Storage, Tensor, dtype_bytes, make_op

N = 1024


class Build:
    """A graph written op by op; temporaries die with their last reader."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.roles: list[str] = []
        self.born: list[int] = []
        self.last: list[int] = []
        self.ops: list = []

    def tensor(self, shape: tuple[int, ...], role: str, dtype: str = "float16") -> int:
        self.tensors.append(Tensor(shape, dtype, len(self.roles)))
        self.roles.append(role)
        self.born.append(-1 if role in ("input", "parameter") else len(self.ops))
        self.last.append(len(self.ops))
        return len(self.tensors) - 1

    def op(self, name: str, *ins: int, shape: tuple[int, ...] = (N, N), **attrs: object) -> int:
        out = self.tensor(shape, "temporary")
        for t in (*ins, out):
            self.last[self.tensors[t].storage] = len(self.ops)
        self.ops.append(make_op(name, self.tensors, ins, (out,), attrs=attrs))
        return out

    def graph(self, *outputs: int, mode: str = "inference") -> Graph:
        storages = tuple(
            Storage(
                int(math.prod(self.tensors[i].shape) * dtype_bytes(self.tensors[i].dtype)),
                role,
                self.born[i],
                None if i in outputs or role != "temporary" else self.last[i],
            )
            for i, role in enumerate(self.roles)
        )
        return Graph(
            "hand-made", mode, "amp", tuple(self.ops), tuple(self.tensors), storages, 0, 0, {"images": 1}, (), outputs
        )


def traffic(program: Program) -> float:
    return float((program.table.bytes_read + program.table.bytes_written).sum())


def test_eager_launches_every_op_and_no_view():
    b = Build()
    x = b.tensor((N, N), "input")
    y = b.op("aten.relu.default", x)
    z = b.op("aten.view.default", y, shape=(N * N,))
    program = lower(b.graph(z))
    assert program.kernels.tolist() == [1, 0]
    assert program.issues.tolist() == [1, 1]


def test_a_chain_is_one_kernel_that_reads_and_writes_once():
    b = Build()
    x = b.tensor((N, N), "input")
    y = b.op("aten.relu.default", x)
    y = b.op("aten.mul.Tensor", y, y)
    y = b.op("aten.exp.default", y)
    program = lower(b.graph(y), "compiled")
    assert program.kernels.sum() == 1
    assert traffic(program) == 2 * N * N * 2  # one read, one write, two bytes each
    assert len(set(program.group.tolist())) == 1


def test_what_is_used_outside_a_chain_is_still_written():
    b = Build()
    x, w = b.tensor((N, N), "input"), b.tensor((N, N), "parameter")
    y = b.op("aten.relu.default", x)
    z = b.op("aten.exp.default", y)
    p = b.op("aten.mm.default", y, w)
    program = lower(b.graph(z, p), "compiled")
    assert program.kernels.tolist() == [1, 0, 1]
    assert traffic(program) == (1 + 2 + 3) * N * N * 2  # read x; write y, z; the product's three


def test_products_split_chains():
    b = Build()
    x, w = b.tensor((N, N), "input"), b.tensor((N, N), "parameter")
    y = b.op("aten.relu.default", x)
    y = b.op("aten.mm.default", y, w)
    y = b.op("aten.relu.default", y)
    program = lower(b.graph(y), "compiled")
    assert program.kernels.tolist() == [1, 1, 1]
    assert traffic(program) == traffic(lower(b.graph(y)))


def test_a_residual_joins_both_branches():
    """conv → norm, conv → norm, add, relu: two library calls and one kernel."""
    b = Build()
    x, w = b.tensor((N, N), "input"), b.tensor((N, N), "parameter")
    left = b.op("aten.exp.default", b.op("aten.mm.default", x, w))
    right = b.op("aten.exp.default", b.op("aten.mm.default", x, w))
    out = b.op("aten.relu.default", b.op("aten.add.Tensor", left, right))
    program = lower(b.graph(out), "compiled")
    assert program.kernels.sum() == 3
    assert traffic(program) == (2 * 3 + 3) * N * N * 2


def test_a_chain_never_waits_for_itself():
    """The product needs the first relu, the addition needs the product: they cannot be one kernel."""
    b = Build()
    x, w = b.tensor((N, N), "input"), b.tensor((N, N), "parameter")
    y = b.op("aten.relu.default", x)
    p = b.op("aten.mm.default", y, w)
    z = b.op("aten.add.Tensor", y, p)
    program = lower(b.graph(z), "compiled")
    assert program.group[0] != program.group[2]
    assert program.kernels.tolist() == [1, 1, 1]


def test_a_reduction_joins_what_it_reduces_and_what_scales_by_it():
    b = Build()
    x = b.tensor((N, N), "input")
    y = b.op("aten.exp.default", x)
    total = b.op("aten.sum.dim_IntList", y, shape=(N, 1))
    z = b.op("aten.div.Tensor", y, total)
    program = lower(b.graph(z), "compiled")
    assert program.kernels.sum() == 1
    assert traffic(program) == 2 * N * N * 2


def test_different_sizes_stay_apart():
    b = Build()
    x, small = b.tensor((N, N), "input"), b.tensor((N,), "input")
    y = b.op("aten.relu.default", x)
    z = b.op("aten.relu.default", small, shape=(N,))
    program = lower(b.graph(y, z), "compiled")
    assert program.kernels.tolist() == [1, 1]


def test_what_walks_more_elements_is_a_kernel_of_its_own():
    b = Build()
    x = b.tensor((N, N), "input")
    y = b.op("aten.relu.default", x)
    z = b.op("aten.upsample_nearest2d.default", y, shape=(2 * N, 2 * N))
    program = lower(b.graph(z), "compiled")
    assert program.kernels.tolist() == [1, 1]
    assert traffic(program) == traffic(lower(b.graph(z)))


def test_the_optimizer_is_not_compiled():
    b = Build()
    x = b.tensor((N, N), "parameter")
    y = b.op("aten.mul.Tensor", b.op("aten.neg.default", x), x)
    graph = b.graph(y, mode="train")
    step = replace(graph, ops=tuple(replace(op, phase="optimizer") for op in graph.ops))
    assert lower(graph, "compiled").kernels.sum() == 1
    assert lower(step, "compiled").kernels.sum() == 2


def test_compiled_never_moves_more():
    b = Build()
    x = b.tensor((N, N), "input")
    y = x
    for name in ("relu", "exp", "neg", "tanh"):
        y = b.op(f"aten.{name}.default", y)
    graph = b.graph(y)
    eager, compiled = lower(graph), lower(graph, "compiled")
    assert (compiled.table.bytes_read <= eager.table.bytes_read).all()
    assert (compiled.table.bytes_written <= eager.table.bytes_written).all()
    assert (compiled.kernels <= eager.kernels).all()


def test_the_compiler_moves_convolutions_to_channels_last():
    def program(groups: int, channels: int = 256) -> Program:
        b = Build()
        x = b.tensor((2, channels, 8, 8), "input")
        w = b.tensor((channels, channels // groups, 3, 3), "parameter")
        y = b.op("aten.convolution.default", x, w, shape=(2, channels, 8, 8), groups=groups)
        return lower(b.graph(y), "compiled")

    assert program(1).table.channels_last.all()
    assert not program(32).table.channels_last.any()  # grouped ones are slower so


def test_multi_tensor_ops_launch_by_what_fits_the_arguments():
    def kernels(name: str, tensors: int) -> float:
        pool = [Tensor((8,), "float32", i) for i in range(tensors)]
        op = make_op(name, pool, tuple(range(tensors)), ())
        return float(Program.of(OpTable.from_ops([op], pool)).kernels[0])

    assert kernels("aten._foreach_zero_.default", 110) == 1
    assert kernels("aten._foreach_zero_.default", 111) == 2
    assert kernels("aten._fused_adamw_.default", 4 * 36) == 1
    assert kernels("aten._fused_adamw_.default", 4 * 37) == 2


def test_unknown_runtime_lists_the_known():
    b = Build()
    x = b.tensor((N, N), "input")
    graph = b.graph(b.op("aten.relu.default", x))
    with pytest.raises(UnknownNameError, match="compiled"):
        lower(graph, "compile")


def test_an_empty_table_is_an_empty_program():
    program = Program.of(OpTable.from_ops([], []))
    assert len(program) == 0
    assert np.array_equal(program.kernels, np.zeros(0))
