"""Graphs at a third batch against graphs made there: by hand, by hypothesis, and by capture."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import InputError
from foretell.graph import Graph, Storage, Tensor, make_op
from foretell.graph.affine import AffineFamily, at_batch


def linear(batch: int, features: int = 3, classes: int = 8, tokens: int = 5) -> Graph:
    """y = softmax(x Wᵀ) over `tokens` positions, as ops are captured; strided output, whole-number attributes."""
    rows = batch * tokens
    tensors = (
        Tensor((batch, tokens, features), "float32", 0),
        Tensor((classes, features), "float32", 1),
        Tensor((rows, features), "float32", 0),
        Tensor((features, classes), "float32", 1, (1, features)),
        Tensor((rows, classes), "float32", 2),
        Tensor((tokens, classes, batch), "float32", 2, (batch * classes, 1, classes)),
        Tensor((rows, classes), "float32", 3),
    )
    ops = (
        make_op("aten.view.default", tensors, (0,), (2,), attrs=MappingProxyType({"size": (rows, features)})),
        make_op("aten.t.default", tensors, (1,), (3,)),
        make_op("aten.mm.default", tensors, (2, 3), (4,)),
        make_op("aten.permute.default", tensors, (4,), (5,)),
        make_op("aten._softmax.default", tensors, (4,), (6,), attrs=MappingProxyType({"dim": -1, "rows": rows})),
    )
    storages = (
        Storage(4 * rows * features, "input"),
        Storage(4 * classes * features, "parameter"),
        Storage(4 * rows * classes, "temporary", 2, 4),
        Storage(4 * rows * classes, "output", 4),
    )
    items = MappingProxyType({"sequences": batch, "tokens": rows})
    parameters = classes * features
    return Graph(
        "linear", "inference", "fp32", ops, tensors, storages, parameters, parameters, items, (0,), (6,)
    )  # fmt: skip


@given(st.tuples(*(st.integers(1, 9),) * 3).filter(lambda t: t[0] != t[1]), st.integers(1, 40))
def test_equals_the_graph_made_at_that_batch(sizes: tuple[int, int, int], tokens: int) -> None:
    a, b, batch = sizes
    assert at_batch(linear(a, tokens=tokens), linear(b, tokens=tokens), batch) == linear(batch, tokens=tokens)


def test_work_is_counted_anew() -> None:
    assert at_batch(linear(2), linear(3), 7).macs() == 7 * 5 * 3 * 8


def changed(graph: Graph, **fields: Any) -> Graph:
    return replace(graph, **fields)


def with_op(graph: Graph, index: int, **fields: Any) -> Graph:
    return replace(graph, ops=(*graph.ops[:index], replace(graph.ops[index], **fields), *graph.ops[index + 1 :]))


def with_tensor(graph: Graph, index: int, tensor: Tensor) -> Graph:
    return replace(graph, tensors=(*graph.tensors[:index], tensor, *graph.tensors[index + 1 :]))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (linear(2), "both captures have batch 2"),
        (changed(linear(3), mode="train"), "mode differs"),
        (changed(linear(3), ops=linear(3).ops[:-1]), "number of ops differs"),
        (with_op(linear(3), 1, name="aten.transpose.int"), "op 1's name differs"),
        (with_op(linear(3), 1, inputs=(0,)), "op 1's inputs differs"),
        (with_op(linear(3), 4, attrs=MappingProxyType({"dim": -1})), "attributes of op 4 differs"),
        (with_tensor(linear(3), 6, Tensor((15, 8), "float16", 3)), "tensor 6's type differs"),
        (with_tensor(linear(3), 6, Tensor((15, 9), "float32", 3)), "tensor 6 grows with the batch along two"),
        (with_tensor(linear(3), 6, Tensor((15, 8), "float32", 3, (1, 15))), "tensor 6's layout differs"),
        (changed(linear(3), storages=(*linear(3).storages[:3], Storage(480, "output", 3))), "life of storage 3"),
    ],
)
def test_captures_of_different_structure_are_refused(other: Graph, says: str) -> None:
    with pytest.raises(InputError, match=says):
        AffineFamily(linear(2), other)


def test_sizes_that_are_no_whole_numbers_are_refused() -> None:
    odd = changed(linear(3), storages=(Storage(4 * 15 * 3 + 1, "input"), *linear(3).storages[1:]))
    family = AffineFamily(linear(1), odd)
    with pytest.raises(InputError, match=r"storage 0 is 60 and 181, which makes 120\.5 at batch 2"):
        family(2)


def test_a_word_that_differs_is_refused() -> None:
    def reduced(batch: int, mode: str) -> Graph:
        graph = linear(batch)
        attrs = MappingProxyType({**graph.ops[4].attrs, "mode": mode})
        tensors, op = graph.tensors, graph.ops[4]
        return replace(graph, ops=(*graph.ops[:4], make_op(op.name, tensors, op.inputs, op.outputs, attrs=attrs)))

    with pytest.raises(InputError, match="mode is 'a' in one capture and 'b' in the other"):
        AffineFamily(reduced(2, "a"), reduced(3, "b"))(5)
    assert AffineFamily(reduced(2, "a"), reduced(3, "a"))(5) == reduced(5, "a")


def test_a_graph_counted_by_other_rules_is_refused() -> None:
    with pytest.raises(InputError, match=r"op 2 \(aten.mm.default\) was not counted by this version's rules"):
        AffineFamily(with_op(linear(2), 2, macs=1), linear(3))


def test_batches_start_at_one() -> None:
    with pytest.raises(InputError, match="0 is no batch size"):
        at_batch(linear(2), linear(3), 0)


@pytest.mark.parametrize(
    ("model", "train"), [("resnet18", True), ("vit_tiny_patch16_224", True), ("mobilenetv3_small_050", False)]
)
def test_equals_a_capture_at_the_third_batch(model: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    import foretell

    monkeypatch.setenv("FORETELL_CACHE", "off")
    a, b, c = (foretell.capture(f"timm:{model}", batch=n, train=train, image_size=None) for n in (3, 4, 9))
    assert at_batch(a, b, 9) == c
