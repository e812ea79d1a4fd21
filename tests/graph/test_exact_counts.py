"""Counts a reader can check by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import InputError, UnknownNameError
from foretell.graph import Graph, Op, OpTable, Storage, Tensor, kind_of, make_op


def tensors(*shapes: tuple[int, ...], dtype: str = "float32") -> list[Tensor]:
    return [Tensor(shape, dtype, i) for i, shape in enumerate(shapes)]


def op(name: str, ins: list[Tensor], outs: list[Tensor], **attrs: object) -> Op:
    both = [*ins, *outs]
    return make_op(
        name, both, tuple(range(len(ins))), tuple(range(len(ins), len(both))), attrs=attrs
    )


def graph_of(*ops: Op, tensors: list[Tensor]) -> Graph:
    return Graph(
        name="toy",
        mode="inference",
        precision="fp32",
        ops=ops,
        tensors=tuple(tensors),
        storages=tuple(Storage(t.nbytes, "temporary") for t in tensors),
        parameters=0,
        trainable_parameters=0,
        items={"samples": 1},
    )


@pytest.mark.parametrize(
    ("shape", "flops"),
    [((1, 12, 64, 64), 12_582_912), ((2, 5, 9, 4), 12_960)],  # 2 products × 2 × B·H·L·L·D
)
def test_attention(shape: tuple[int, ...], flops: int) -> None:
    assert op("foretell.sdpa.default", tensors(shape, shape, shape), tensors(shape)).flops == flops


def test_attention_over_a_window_counts_the_window() -> None:
    q = (1, 2, 100, 8)
    assert op("foretell.sdpa.default", tensors(q, q, q), tensors(q), window=10).macs == 2 * 2 * 100 * 10 * 8


def test_grouped_queries_are_rows_of_one_product() -> None:
    q, kv = (2, 8, 5, 4), (2, 2, 9, 4)
    attention = op("foretell.sdpa.default", tensors(q, kv, kv), tensors(q))
    assert attention.gemm == (2 * 2, 4 * 5, 9, 4)
    assert attention.macs == 2 * 8 * 5 * 9 * (4 + 4)


def test_linear() -> None:
    assert op("aten.addmm.default", tensors((8,), (50, 3), (3, 8)), tensors((50, 8))).macs == 1_200


def test_convolution_and_its_gradients() -> None:
    x, w, y = (2, 6, 8, 8), (4, 3, 3, 3), (2, 4, 8, 8)  # two groups of 3 → 2 channels
    forward = op("aten.convolution.default", tensors(x, w), tensors(y), groups=2)
    assert forward.macs == 2 * 64 * 4 * 27
    assert forward.gemm == (2, 128, 2, 27)
    for mask, factor in (((True, True, True), 2), ((False, True, False), 1), ((False, False, True), 0)):
        backward = op("aten.convolution_backward.default", tensors(y, x, w), tensors(x, w), groups=2, grad_mask=mask)
        assert backward.macs == factor * forward.macs


def test_transposed_convolution_counts_inputs() -> None:
    x, w, y = (1, 6, 5, 5), (6, 4, 2, 2), (1, 4, 10, 10)
    assert op("aten.convolution.default", tensors(x, w), tensors(y), transposed=True).macs == 25 * 6 * 4 * 4


def test_grouped_product_does_not_depend_on_the_groups() -> None:
    a, b, ends, y = (10, 4), (3, 4, 7), (3,), (10, 7)
    forward = op("foretell.grouped_mm.default", tensors(a, b, ends), tensors(y))
    weight = op("foretell.grouped_mm_weight.default", tensors(a, y, ends), tensors(b))
    assert forward.macs == weight.macs == 10 * 4 * 7


def test_traffic_is_two_reads_and_a_write() -> None:
    n = (1024, 1024)
    add = op("aten.add.Tensor", tensors(n, n), tensors(n))
    assert add.bytes_read + add.bytes_written == 1024 * 1024 * 4 * 3  # 2 reads + 1 write


def test_traffic_of_what_touches_less() -> None:
    table, ids, rows = (50_000, 64), (8,), (8, 64)
    lookup = op("aten.embedding.default", [*tensors(table), Tensor(ids, "int64", 1)], tensors(rows))
    assert lookup.bytes_read == 8 * 64 * 4 + 8 * 8
    fill = op("aten.zero_.default", tensors((100,)), tensors((100,)))
    assert (fill.bytes_read, fill.bytes_written) == (0, 400)
    assert op("aten.view.default", tensors((100,)), tensors((10, 10))).bytes_read == 0
    expanded = Tensor((64, 100), "float32", 0, (0, 1))
    assert expanded.nbytes == 400


def test_layouts() -> None:
    assert Tensor((2, 3, 4, 5), "float32", 0).layout == "contiguous"
    assert Tensor((2, 3, 4, 5), "float32", 0, (60, 1, 15, 3)).layout == "channels_last"
    assert Tensor((2, 3, 4, 5), "float32", 0, (60, 5, 15, 1)).layout == "strided"


def test_in_place_ops_are_of_the_same_kind() -> None:
    for name in ("aten.add.Tensor", "aten.add_.Tensor", "aten._foreach_add_.List"):
        assert kind_of(name) == "pointwise"
    assert kind_of("aten.__and__.Tensor") == "pointwise"
    assert kind_of("aten.something_new.default") == "other"


def test_an_unknown_op_is_reported_not_hidden() -> None:
    t = tensors((4,), (4,))
    strange = op("custom.mystery.default", t[:1], t[1:])
    graph = graph_of(strange, strange, tensors=t)
    assert dict(graph.not_counted) == {"custom.mystery.default": 2}
    known = op("aten.add.Tensor", t[:1], t[1:])
    assert not graph_of(known, tensors=t).not_counted


def test_conventions() -> None:
    t = tensors((2, 8, 4, 4), (2, 8, 4, 4))
    norm = op("aten.native_batch_norm.default", t[:1], t[1:])
    graph = graph_of(norm, tensors=t)
    assert graph.macs("matmul") == 0
    assert graph.macs("fvcore") == 2 * 256
    assert graph.flops("fvcore") == 2 * graph.macs("fvcore")
    with pytest.raises(UnknownNameError, match="did you mean 'matmul'"):
        graph.flops("matmull")


def test_causal_attention_can_be_counted_by_half() -> None:
    q = (1, 2, 16, 8)
    t = tensors(q, q, q, q)
    graph = graph_of(op("foretell.sdpa.default", t[:3], t[3:], causal=True), tensors=t)
    assert graph.flops(causal="half") * 2 == graph.flops()


def test_json_round_trip_and_its_refusals() -> None:
    t = tensors((2, 8, 4, 4), (2, 8, 4, 4))
    graph = graph_of(op("aten.relu.default", t[:1], t[1:]), tensors=t)
    assert Graph.from_json(graph.to_json()) == graph
    data = graph.to_dict()
    for path, value in (
        (("schema",), "other/1"),
        (("mode",), "dreaming"),
        (("ops", 0, "kind"), "magic"),
        (("ops", 0, "inputs"), [99]),
        (("ops", 0, "macs"), -1),
        (("tensors", 0), [[2], "float32"]),
        (("items",), {}),
        (("tensors", 0), [[2], "fl9at32", 0, None]),
        (("tensors", 0), [[2, 2], "float32", 0, [1]]),
        (("tensors", 0), [[10**9] * 9, "float32", 0, None]),
        (("ops", 0, "macs"), 10**300),
        (("ops", 0, "dtype"), "None"),
        (("ops", 0, "kind"), "convolution"),
        (("storages", 0), [10**20, "temporary", 0, None]),
        (("storages", 0), [1, "temporary", -7, None]),
    ):
        broken = Graph.from_json(graph.to_json()).to_dict()
        target = broken
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        with pytest.raises((InputError, UnknownNameError)):
            Graph.from_dict(broken)
    assert Graph.from_dict(data) == graph
    for text in ("{", "[1]", '{"schema": "foretell.graph/1"}', "{" * 5000):
        with pytest.raises(InputError):
            Graph.from_json(text if text.startswith("{") else "{" + text)
    with pytest.raises(InputError, match="no such file"):
        Graph.from_json("no/such/file.json")


def test_table_has_a_row_an_op() -> None:
    t = tensors((50, 3), (3, 8), (50, 8))
    product = op("aten.mm.default", t[:2], t[2:])
    table = graph_of(product, tensors=t).table()
    assert len(table) == 1
    assert (table.gemm_m[0], table.gemm_n[0], table.gemm_k[0]) == (50, 8, 3)
    assert table.macs[0] == 1_200
    assert len(OpTable.concatenate([table, table])) == 2


def test_producers_follow_storages() -> None:
    a, b = Tensor((4,), "float32", 0), Tensor((2, 2), "float32", 0)  # a view of it
    c = Tensor((4,), "float32", 1)
    ts = [a, b, c]
    write = make_op("aten.relu_.default", ts, (0,), (0,))
    view = make_op("aten.view.default", ts, (0,), (1,))
    read = make_op("aten.neg.default", ts, (1,), (2,))
    assert list(graph_of(write, view, read, tensors=ts).producers()) == [(), (0,), (0,)]


@given(m=st.integers(1, 50), n=st.integers(1, 50), k=st.integers(1, 50), batch=st.integers(1, 9))
def test_flops_are_affine_in_the_batch(m: int, n: int, k: int, batch: int) -> None:
    one = op("aten.bmm.default", tensors((1, m, k), (1, k, n)), tensors((1, m, n)))
    many = op("aten.bmm.default", tensors((batch, m, k), (batch, k, n)), tensors((batch, m, n)))
    assert many.macs == batch * one.macs


@given(length=st.integers(1, 500))
def test_attention_grows_faster_than_its_length(length: int) -> None:
    def macs(n: int) -> int:
        q = (1, 2, n, 8)
        return op("foretell.sdpa.default", tensors(q, q, q), tensors(q)).macs

    assert macs(2 * length) == 4 * macs(length)
