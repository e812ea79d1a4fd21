"""Graphs read from files: what no cost model could make sense of is refused, with the op and the attribute."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foretell.errors import InputError
from foretell.graph import Graph, Storage, Tensor, make_op


def document() -> dict[str, Any]:
    """A convolution, a pooling, a softmax and a product."""
    shapes = ((2, 8, 16, 16), (12, 2, 3, 3), (2, 12, 14, 14), (2, 12, 7, 7), (2, 588), (588, 5), (2, 5))
    tensors = tuple(Tensor(shape, "float32", i) for i, shape in enumerate(shapes))
    convolution = {"stride": (1, 1), "dilation": (1, 1), "groups": 4, "transposed": False}
    ops = (
        make_op("aten.convolution.default", tensors, (0, 1), (2,), attrs=convolution),
        make_op("aten.max_pool2d_with_indices.default", tensors, (2,), (3,), attrs={"window": (2, 2)}),
        make_op("aten._softmax.default", tensors, (4,), (4,), attrs={"dim": -1}),
        make_op("aten.mm.default", tensors, (4, 5), (6,)),
    )
    storages = tuple(Storage(tensor.nbytes, "activation") for tensor in tensors)
    graph = Graph("g", "inference", "fp32", ops, tensors, storages, 0, 0, {"images": 2})
    return json.loads(graph.to_json())


def test_the_document_is_read():
    data = document()
    assert Graph.from_dict(data).to_dict() == data


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [
        (0, "stride", "x"),
        (0, "stride", [0, 0]),
        (0, "stride", [1.5]),
        (0, "stride", [10**18, 10**18]),
        (0, "stride", 2),
        (0, "stride", {"a": 1}),
        (0, "dilation", [0]),
        (0, "dilation", [float("nan")]),
        (0, "groups", 0),
        (0, "groups", -1),
        (0, "groups", "4"),
        (0, "groups", True),
        (0, "groups", 3),
        (0, "groups", 10**400),
        (0, "transposed", "no"),
        (0, "grad_mask", 7),
        (1, "window", [0, 2]),
        (1, "window", "2x2"),
        (1, "window", 2),
        (1, "window", None),
        (1, "window", [10**15, 10**15]),
        (2, "dim", 2),
        (2, "dim", "last"),
    ],
)
def test_a_wrong_attribute_is_refused_with_op_and_name(op, name, value):
    data = document()
    data["ops"][op]["attrs"][name] = value
    with pytest.raises(InputError, match=rf"graph\.json: .*op {op} \(aten\..*attribute '{name}' is") as caught:
        Graph.from_dict(data, "graph.json")
    assert "foretell capture" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("gemm", [1, 10**18, 1, 1], "side above"),
        ("gemm", [1, 10**6, 10**6, 10**6], "more arithmetic than macs"),
        ("gemm", [1, 2, 3], "not enough values"),
        ("gemm", None, "gemm is None, though macs is"),
        ("gemm", [1, 0, 2, 2], r"gemm is \[1, 0, 2, 2\], though macs is"),
        ("repeat", 10**18, "repeat is 1000000000000000000"),
        ("repeat", 0, "repeat is 0"),
        ("repeat", "x", "not a whole number"),
        ("macs", 1e30, "not a whole number"),
        ("inputs", [99, 0], "tensor 99 does not exist"),
        ("inputs", [], "too few operands"),
        ("kind", "mystery", "'mystery' is none of"),
        ("attrs", [1], "no attribute 'items'"),
    ],
)
def test_a_wrong_figure_is_refused_with_its_op(key, value, said):
    data = document()
    data["ops"][3][key] = value
    with pytest.raises(InputError, match=rf"op 3 \(aten\.mm\.default\): .*{said}"):
        Graph.from_dict(data)


def test_a_missing_key_and_what_is_no_op_are_named():
    data = document()
    del data["ops"][1]["macs"]
    with pytest.raises(InputError, match=r"op 1 \(aten\.max_pool2d_with_indices\.default\): missing key 'macs'"):
        Graph.from_dict(data)
    data["ops"][1] = 7
    with pytest.raises(InputError, match=r"op 1 \(None\)"):
        Graph.from_dict(data)


@pytest.mark.parametrize("value", [7, [], [[2], "float32", 0], [[2], "float33", 0, None], [["x"], "float32", 0, None]])
def test_a_wrong_tensor_is_refused_with_its_number(value):
    data = document()
    data["tensors"][2] = value
    with pytest.raises(InputError, match=r"g\.json: .*tensor 2: "):
        Graph.from_dict(data, "g.json")
    data = document()
    data["storages"][3] = value
    with pytest.raises(InputError, match=r"g\.json: .*storage 3: "):
        Graph.from_dict(data, "g.json")


def test_an_unknown_mode_is_refused_with_the_file():
    with pytest.raises(InputError, match=r"g\.json: .*unknown mode 'trian'; did you mean 'train'"):
        Graph.from_dict({**document(), "mode": "trian"}, "g.json")


@pytest.mark.parametrize("gemm", [None, [0, 1, 1, 1], [4, 1, 0, 1], [4, 1, 1, 0]])
def test_a_convolution_is_a_product_even_without_arithmetic(gemm):
    data = document()
    data["ops"][0] |= {"gemm": gemm, "macs": 0}
    with pytest.raises(InputError, match=r"op 0 \(aten\.convolution\.default\): gemm is"):
        Graph.from_dict(data)


def test_a_convolution_of_vectors_is_refused():
    data = document()
    data["tensors"][0] = [[8], "float32", 0, None]
    with pytest.raises(InputError, match=r"op 0 .*no images"):
        Graph.from_dict(data)
