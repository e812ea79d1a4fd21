"""Hand-made graphs whose counts a reader can check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from foretell import predict  # noqa: E402
from foretell.errors import ForetellError, InputError, UnknownNameError  # noqa: E402
from foretell.graph import Graph  # noqa: E402
from foretell.workload.onnx import graph  # noqa: E402
from foretell.workload.options import options  # noqa: E402

F = TensorProto.FLOAT
NODE = helper.make_node
MS = "com.microsoft"


def tensor(name: str, array: Any, dtype: str = "float32") -> Any:
    return numpy_helper.from_array(np.asarray(array, dtype=dtype), name)


def zeros(name: str, *shape: int, dtype: str = "float32") -> Any:
    return tensor(name, np.zeros(shape), dtype)


def value(name: str, shape: Sequence[int | str] | None, kind: int = F) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def save(
    folder: Path, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[str], stored: Sequence[Any] = (),
    opset: int = 20, **settings: Any,
) -> Path:
    made = helper.make_graph(list(nodes), "g", list(inputs), [value(n, None) for n in outputs], list(stored))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MS, 1), helper.make_opsetid("com.acme", 3)]
    path = folder / "m.onnx"
    path.write_bytes(helper.make_model(made, opset_imports=imports, **settings).SerializeToString())
    return path


def read(path: Path, **settings: Any) -> Graph:
    return graph(str(path), options(**settings))


def names(made: Graph) -> list[str]:
    return [op.name for op in made.ops if op.kind != "view"]


# --- inputs -----------------------------------------------------------------------------------------------------


def test_an_open_dimension_names_itself_and_the_repair(tmp_path: Path) -> None:
    path = save(tmp_path, [NODE("Relu", ["tokens.in"], ["y"])], [value("tokens.in", ["n", "length", 7])], ["y"])
    with pytest.raises(InputError, match=r"input tokens\.in: dimension 1 \('length'\) is left open") as caught:
        read(path)
    assert caught.value.repair == "write --input tokens.in=1x128x7"
    assert read(path, inputs=["tokens.in=3x5x7"]).tensors[0].shape == (3, 5, 7)
    for wrong, message in (("3x5", "has 3 dimensions, not 2"), ("3x5x8", "dimension 2 is 7 in the file, not 8")):
        with pytest.raises(InputError, match=message):
            read(path, inputs=[f"tokens.in={wrong}"])


def test_inputs_share_their_symbols(tmp_path: Path) -> None:
    inputs = [value("a", ["n", "t"]), value("b", ["n", "t"])]
    path = save(tmp_path, [NODE("Add", ["a", "b"], ["y"])], inputs, ["y"])
    assert [t.shape for t in read(path, inputs=["a=2x9"]).tensors[:2]] == [(2, 9), (2, 9)]
    with pytest.raises(InputError, match="'t' is 9 by --input a and 8 by --input b"):
        read(path, inputs=["a=2x9", "b=2x8"])
    with pytest.raises(UnknownNameError, match="unknown input 'c'"):
        read(path, inputs=["a=2x9", "c=2x9"])


@pytest.mark.parametrize(
    ("settings", "repair"),
    [
        ({"train": True}, "py:FILE.py:FACTORY"),
        ({"phase": "decode"}, "leave --train and --phase out"),
        ({"precision": "amp"}, "--precision fp16"),
        ({"seq_len": 4}, "--input NAME=SHAPE"),
        ({"batch": 3}, "dynamic batch"),
    ],
)
def test_what_a_file_cannot_do_is_refused(settings: dict[str, Any], repair: str, tmp_path: Path) -> None:
    path = save(tmp_path, [NODE("Relu", ["x"], ["y"])], [value("x", [2, 3])], ["y"])
    with pytest.raises(InputError) as caught:
        read(path, **settings)
    assert repair in str(caught.value.repair)


def test_provenance_and_prediction(tmp_path: Path) -> None:
    path = save(tmp_path, [NODE("Relu", ["x"], ["y"])], [value("x", [2, 3])], ["y"], producer_name="acme")
    made = read(path)
    assert dict(made.provenance) == {"source": "onnx", "opset": "20", "producer": "acme"}
    assert Graph.from_json(made.to_json()) == made
    assert predict(f"onnx:{path}", on="t4").time_s > 0


# --- shapes, views, lifetimes ----------------------------------------------------------------------------------------


def test_shapes_written_as_graphs_are_numbers(tmp_path: Path) -> None:
    nodes = [
        NODE("Shape", ["x"], ["s"]),
        NODE("Gather", ["s", "one"], ["t"]),
        NODE("Mul", ["t", "two"], ["d"]),
        NODE("Unsqueeze", ["d", "axis"], ["u"]),
        NODE("Concat", ["minus", "u"], ["shape"], axis=0),
        NODE("Reshape", ["x", "shape"], ["r"]),
        NODE("Relu", ["r"], ["y"]),
    ]
    stored = [tensor(n, v, "int64") for n, v in (("one", 1), ("two", 2), ("axis", [0]), ("minus", [-1]))]
    made = read(save(tmp_path, nodes, [value("x", [4, 3, 2])], ["y"], stored))
    assert [op.name for op in made.ops] == ["aten.view.default", "aten.relu.default"]
    assert made.tensors[made.outputs[0]].shape == (4, 6)


def test_a_transposition_is_a_view_and_what_needs_rows_copies(tmp_path: Path) -> None:
    nodes = [NODE("Transpose", ["x"], ["t"], perm=[0, 2, 1]), NODE("Reshape", ["t", "flat"], ["y"])]
    made = read(save(tmp_path, nodes, [value("x", [2, 3, 4])], ["y"], [tensor("flat", [-1], "int64")]))
    assert [op.name for op in made.ops] == ["aten.transpose.int", "aten.clone.default", "aten._unsafe_view.default"]
    x, t, copy, y = made.tensors
    assert (x.storage, t.strides) == (t.storage, (12, 1, 4))
    assert copy.storage == y.storage != x.storage
    assert made.ops[1].bytes_read == made.ops[1].bytes_written == 24 * 4


def test_storages_live_from_their_writer_to_their_last_reader(tmp_path: Path) -> None:
    nodes = [
        NODE("MatMul", ["x", "w"], ["a"]),  # op 0
        NODE("Relu", ["a"], ["b"]),  # op 1
        NODE("Neg", ["a"], ["c"]),  # op 2
        NODE("Add", ["b", "c"], ["y"]),  # op 3
    ]
    made = read(save(tmp_path, nodes, [value("x", [2, 3])], ["y"], [zeros("w", 3, 5)]))
    assert [(s.role, s.nbytes, s.born, s.dies) for s in made.storages] == [
        ("input", 24, -1, None),
        ("parameter", 60, -1, None),
        ("temporary", 40, 0, 2),
        ("temporary", 40, 1, 3),
        ("temporary", 40, 2, 3),
        ("output", 40, 3, None),
    ]


def test_what_no_output_needs_does_not_run(tmp_path: Path) -> None:
    nodes = [NODE("Relu", ["x"], ["y"]), NODE("Exp", ["x"], ["unused"])]
    assert names(read(save(tmp_path, nodes, [value("x", [3])], ["y"]))) == ["aten.relu.default"]


def test_nodes_may_come_in_any_order(tmp_path: Path) -> None:
    nodes = [NODE("Relu", ["a"], ["y"]), NODE("Exp", ["x"], ["a"])]
    assert names(read(save(tmp_path, nodes, [value("x", [3])], ["y"]))) == ["aten.exp.default", "aten.relu.default"]


def test_sizes_that_depend_on_values_are_taken_at_their_largest(tmp_path: Path) -> None:
    nodes = [NODE("NonZero", ["x"], ["i"]), NODE("Cast", ["i"], ["y"], to=F)]
    made = read(save(tmp_path, nodes, [value("x", [4, 5])], ["y"]))
    assert made.tensors[made.outputs[0]].shape == (2, 20)
    assert made.provenance["at_most"] == "1 NonZero"


def test_external_weights_are_counted_and_never_opened(tmp_path: Path) -> None:
    weight = zeros("w", 3, 5)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="not/there.bin")
    path = save(tmp_path, [NODE("MatMul", ["x", "w"], ["y"])], [value("x", [2, 3])], ["y"], [weight])
    made = read(path)
    assert (made.parameters, made.parameter_bytes, made.macs()) == (15, 60, 2 * 3 * 5)
    for location in ("../w.bin", "/etc/passwd", "a/../../w.bin", "C:\\w.bin", "\\\\host\\w"):
        weight.external_data[0].value = location
        path = save(tmp_path, [NODE("MatMul", ["x", "w"], ["y"])], [value("x", [2, 3])], ["y"], [weight])
        with pytest.raises(InputError, match="outside the model's folder"):
            read(path)


# --- quantised --------------------------------------------------------------------------------------------------


def quantised(folder: Path, relu: bool = False) -> Path:
    nodes = [
        NODE("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        NODE("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        NODE("DequantizeLinear", ["w", "s", "z"], ["wd"]),
        NODE("Conv", ["xd", "wd"], ["c"]),
        *([NODE("Relu", ["c"], ["r"])] if relu else []),
        NODE("QuantizeLinear", ["r" if relu else "c", "s", "z"], ["yq"]),
        NODE("DequantizeLinear", ["yq", "s", "z"], ["y"]),
    ]
    stored = [tensor("s", 0.1), tensor("z", 0, "int8"), zeros("w", 4, 3, 2, 2, dtype="int8")]
    return save(folder, nodes, [value("x", [1, 3, 5, 5])], ["y"], stored)


@pytest.mark.parametrize("relu", [False, True])
def test_between_dequantise_and_quantise_runs_in_int8(relu: bool, tmp_path: Path) -> None:
    made = read(quantised(tmp_path, relu))
    conv = next(op for op in made.ops if op.kind == "convolution")
    assert conv.dtype == "int8"
    assert (conv.bytes_read, conv.bytes_written) == (3 * 25 + 48, 4 * 16)  # one byte each
    assert (made.parameters, made.parameter_bytes, conv.macs) == (48, 48, 16 * 48)
    quantize, dequantize = (f"quantized_decomposed.{x}quantize_per_tensor.default" for x in ("", "de"))
    middle = ["aten.convolution.default", *(["aten.relu.default"] if relu else [])]
    assert names(made) == [quantize, *middle, dequantize]


def test_scales_written_as_constants_after_their_use_are_found(tmp_path: Path) -> None:
    zero = NODE("Constant", [], ["late"], value=tensor("", 0, "int8"))
    nodes = [
        NODE("DequantizeLinear", ["x", "s"], ["xd"]),
        NODE("DequantizeLinear", ["w", "s"], ["wd"]),
        NODE("MatMul", ["xd", "wd"], ["c"]),
        zero,
        NODE("QuantizeLinear", ["c", "s", "late"], ["y"]),
    ]
    stored = [tensor("s", 0.1), zeros("w", 6, 4, dtype="int8")]
    made = read(save(tmp_path, nodes, [value("x", [2, 6], TensorProto.INT8)], ["y"], stored))
    assert [(op.name, op.dtype, op.bytes_written) for op in made.ops] == [("aten._int_mm.default", "int8", 8)]


def test_weights_alone_in_int8_are_widened(tmp_path: Path) -> None:
    nodes = [NODE("DequantizeLinear", ["w", "s"], ["wd"]), NODE("MatMul", ["x", "wd"], ["y"])]
    stored = [tensor("s", 0.1), zeros("w", 6, 4, dtype="int8")]
    made = read(save(tmp_path, nodes, [value("x", [2, 6])], ["y"], stored))
    assert [(op.name.split(".")[1], op.dtype) for op in made.ops] == [
        ("dequantize_per_tensor", "float32"),
        ("mm", "float32"),
    ]
    assert made.parameter_bytes == 24


QLINEAR = {
    "QLinearConv": (NODE("QLinearConv", ["x", "s", "z", "w", "s", "z", "s", "z"], ["y"]), (1, 3, 5, 5), (4, 3, 2, 2),
                    16 * 48),
    "QLinearMatMul": (NODE("QLinearMatMul", ["x", "s", "z", "w", "s", "z", "s", "z"], ["y"]), (2, 6), (6, 4), 48),
    "MatMulInteger": (NODE("MatMulInteger", ["x", "w"], ["y"]), (2, 6), (6, 4), 48),
    "ConvInteger": (NODE("ConvInteger", ["x", "w"], ["y"]), (1, 3, 5, 5), (4, 3, 2, 2), 16 * 48),
}  # fmt: skip


@pytest.mark.parametrize("name", QLINEAR)
def test_operations_on_integers(name: str, tmp_path: Path) -> None:
    node, x, w, macs = QLINEAR[name]
    stored = [tensor("s", 0.1), tensor("z", 0, "int8"), zeros("w", *w, dtype="int8")]
    made = read(save(tmp_path, [node], [value("x", x, TensorProto.INT8)], ["y"], stored))
    assert [(op.dtype, op.macs) for op in made.ops if op.macs] == [("int8", macs)]
    assert made.parameters == int(np.prod(w))


# --- contributed operations -----------------------------------------------------------------------------------------

X, H = [2, 6, 16], [2, 4, 6, 4]  # batch 2, length 6, 4 heads of 4
SCORES = 2 * 2 * 4 * 6 * 6 * 4  # two products, batch · heads · queries · keys · depth
CONTRIBUTED = {
    "Attention": (NODE("Attention", ["x", "w"], ["y"], domain=MS, num_heads=4), [X], [("w", (16, 48))],
                  2 * 6 * 16 * 48 + SCORES),
    "MultiHeadAttention": (NODE("MultiHeadAttention", ["x", "x1", "x2"], ["y"], domain=MS, num_heads=4), [X, X, X], [],
                           SCORES),
    "GroupQueryAttention": (NODE("GroupQueryAttention", ["x", "x1", "x2", "x3", "x4"], ["y", "k", "v"], domain=MS,
                                 num_heads=4, kv_num_heads=2), [X, [2, 6, 8], [2, 6, 8], [2, 2, 3, 4], [2, 2, 3, 4]],
                            [], 2 * 2 * 4 * 6 * 9 * 4),
    "SkipLayerNormalization": (NODE("SkipLayerNormalization", ["x", "x1", "g"], ["y"], domain=MS), [X, X],
                               [("g", (16,))], 0),
    "FusedMatMul": (NODE("FusedMatMul", ["x", "w"], ["y"], domain=MS, transB=1), [X], [("w", (5, 16))], 12 * 16 * 5),
    "BiasGelu": (NODE("BiasGelu", ["x", "g"], ["y"], domain=MS), [X], [("g", (16,))], 0),
    "FastGelu": (NODE("FastGelu", ["x"], ["y"], domain=MS), [X], [], 0),
    "RotaryEmbedding": (NODE("RotaryEmbedding", ["x", "x1", "c", "s"], ["y"], domain=MS), [H, [2, 6]],
                        [("c", (9, 2)), ("s", (9, 2))], 0),
    "LayerNormalization": (NODE("LayerNormalization", ["x", "g"], ["y"], domain=MS), [X], [("g", (16,))], 0),
    "MatMulNBits": (NODE("MatMulNBits", ["x", "b", "g"], ["y"], domain=MS, K=16, N=5, bits=4, block_size=16), [X],
                    [("b", (5, 1, 8)), ("g", (5,))], 12 * 16 * 5),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRIBUTED)
def test_contributed_operations_have_rules_of_their_own(name: str, tmp_path: Path) -> None:
    node, shapes, stored, macs = CONTRIBUTED[name]
    inputs = [value(f"x{i or ''}", shape) for i, shape in enumerate(shapes)]
    kept = [zeros(n, *shape, dtype="uint8" if n == "b" else "float32") for n, shape in stored]
    made = read(save(tmp_path, [node], inputs, list(node.output), kept))
    assert made.macs() == macs
    assert not made.not_counted


def test_four_bit_weights_take_half_a_byte(tmp_path: Path) -> None:
    node, shapes, stored, _ = CONTRIBUTED["MatMulNBits"]
    kept = [zeros(n, *shape, dtype="uint8" if n == "b" else "float32") for n, shape in stored]
    made = read(save(tmp_path, [node], [value("x", shapes[0])], ["y"], kept))
    assert (made.parameters, made.parameter_bytes) == (16 * 5, 40)


def test_what_no_rule_knows_is_named(tmp_path: Path) -> None:
    nodes = [
        NODE("Warp", ["x"], ["a"], domain="com.acme"),
        NODE("MatMul", ["a", "w"], ["b"]),  # its operand's shape is not known either
        NODE("Det", ["x"], ["c"]),
    ]
    made = read(save(tmp_path, nodes, [value("x", [3, 3])], ["b", "c"], [zeros("w", 3, 3)]))
    assert dict(made.not_counted) == {"onnx.Det": 1, "onnx.MatMul": 1, "onnx.com_acme:Warp": 1}


# --- control flow -----------------------------------------------------------------------------------------------


def branch(name: str, columns: int) -> Any:
    node = NODE("MatMul", ["x", f"w{columns}"], [f"{name}_y"])
    return helper.make_graph([node], name, [], [value(f"{name}_y", None)], [zeros(f"w{columns}", 3, columns)])


def test_of_two_branches_the_larger_is_counted_and_said(tmp_path: Path) -> None:
    node = NODE("If", ["c"], ["y"], then_branch=branch("t", 4), else_branch=branch("e", 9))
    path = save(tmp_path, [node], [value("x", [2, 3]), value("c", [], TensorProto.BOOL)], ["y"])
    made = read(path)
    assert (made.macs(), made.provenance["branches"]) == (2 * 3 * 9, "1 else")
    known = NODE("If", ["k"], ["y"], then_branch=branch("t", 4), else_branch=branch("e", 9))
    made = read(save(tmp_path, [known], [value("x", [2, 3])], ["y"], [tensor("k", True, "bool")]))
    assert made.macs() == 2 * 3 * 4
    assert "branches" not in made.provenance


def loop_body() -> Any:
    inputs = [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("h", [3, 3])]
    nodes = [NODE("MatMul", ["h", "w"], ["h2"]), NODE("Identity", ["go"], ["go2"])]
    return helper.make_graph(nodes, "b", inputs, [value(n, None) for n in ("go2", "h2")])


def test_a_loop_of_known_length_runs_its_body_that_often(tmp_path: Path) -> None:
    node = NODE("Loop", ["n", "", "x"], ["y"], body=loop_body())
    made = read(save(tmp_path, [node], [value("x", [3, 3])], ["y"], [tensor("n", 7, "int64"), zeros("w", 3, 3)]))
    assert made.macs() == 7 * 27
    free = [value("x", [3, 3]), value("n", [], TensorProto.INT64)]
    made = read(save(tmp_path, [node], free, ["y"], [zeros("w", 3, 3)]))
    assert dict(made.not_counted) == {"onnx.Loop": 1}


def test_a_scan_runs_its_body_for_each_element(tmp_path: Path) -> None:
    nodes = [NODE("MatMul", ["h", "w"], ["m"]), NODE("Add", ["m", "e"], ["h2"]), NODE("Relu", ["h2"], ["o"])]
    body = helper.make_graph(nodes, "b", [value("h", [3]), value("e", [3])], [value("h2", None), value("o", None)])
    node = NODE("Scan", ["s", "x"], ["last", "all"], body=body, num_scan_inputs=1)
    made = read(save(tmp_path, [node], [value("s", [3]), value("x", [5, 3])], ["last", "all"], [zeros("w", 3, 3)]))
    assert made.macs() == 5 * 9
    assert made.tensors[made.outputs[1]].shape == (5, 3)


def test_functions_of_the_model_are_taken_apart(tmp_path: Path) -> None:
    twice = helper.make_function("com.acme", "Twice", ["a"], ["c"], [NODE("Relu", ["a"], ["b"]),
                                 NODE("Exp", ["b"], ["c"])], [helper.make_opsetid("", 20)])
    path = save(tmp_path, [NODE("Twice", ["x"], ["y"], domain="com.acme")], [value("x", [3])], ["y"], functions=[twice])
    assert names(read(path)) == ["aten.relu.default", "aten.exp.default"]
    again = helper.make_function("com.acme", "Twice", ["a"], ["c"], [NODE("Twice", ["a"], ["c"], domain="com.acme")],
                                 [helper.make_opsetid("", 20)])
    path = save(tmp_path, [NODE("Twice", ["x"], ["y"], domain="com.acme")], [value("x", [3])], ["y"], functions=[again])
    with pytest.raises(InputError, match="functions call each other in a circle"):
        read(path)


# --- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"\x80\x02}q\x00.", "a pickle"),
        (b"GGUF" + bytes(60), "a GGUF checkpoint"),
        (b"\x89PNG\r\n\x1a\n" + bytes(60), "a PNG image"),
        (b'{"a": 1}', "a JSON document"),
        ((10).to_bytes(8, "little") + b'{"a": {} }' + bytes(9), "a safetensors checkpoint"),
        (b"\x18\x00\x00\x00ORTM" + bytes(60), "ONNX Runtime's own format"),
        (b"", "an empty file"),
        (bytes(64), "does not parse|no ONNX model"),
    ],
)
def test_another_kind_of_file_is_named(content: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match=kind):
        read(path)


@pytest.mark.parametrize("opset", [1, 6, 999])
def test_an_opset_out_of_range_is_refused(opset: int, tmp_path: Path) -> None:
    path = save(tmp_path, [NODE("Relu", ["x"], ["y"])], [value("x", [3])], ["y"], opset=opset)
    with pytest.raises(InputError, match=f"opset {opset}"):
        read(path)


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.onnx", tmp_path):
        with pytest.raises(ForetellError, match=r"no such file|a folder|is a folder"):
            read(path)
