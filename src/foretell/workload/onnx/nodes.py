"""`Node`: one operation of an ONNX graph with its operands, attributes and the types of what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.errors import InputError
from foretell.units import printable
from foretell.workload.onnx.read import ELEMENT_TYPE, check_tensor, checked_shape, dtype_name
from foretell.workload.onnx.values import MOST_KNOWN, Shape, Value

Type = tuple[Shape | None, str] | None  # shape (None: not known before the run) and element type


@dataclass(slots=True)
class Node:
    """What a translation reads. `inputs` are None where left out; `types` are the outputs' as far as known."""

    op: str
    domain: str
    name: str
    version: int  # of the domain's opset
    inputs: list[Value | None]
    outputs: list[str]
    attrs: Mapping[str, Any]
    types: list[Type]
    proto: Any

    def value(self, index: int) -> Value:
        """An input that the operation requires."""
        value = self.input(index)
        if value is None:
            raise ValueError(f"input {index} is missing")
        return value

    def input(self, index: int) -> Value | None:
        """An input, or None where it was left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def shape(self, index: int) -> Shape:
        """Shape of an input that the operation requires."""
        shape = self.value(index).shape
        if shape is None:
            raise ValueError(f"the shape of input {index} is not known")
        return shape

    def out(self, index: int = 0) -> tuple[Shape, str]:
        """Shape and element type of an output."""
        kind = self.types[index]
        if kind is None or kind[0] is None:
            raise ValueError(f"the shape of output {index} is not known")
        return kind[0], kind[1]

    def known(self, index: int, attr: str = "") -> list[Any] | None:
        """An attribute, or the content of an input, as a flat list; None where left out or not known."""
        if attr and attr in self.attrs:
            value = self.attrs[attr]
            return list(value) if isinstance(value, (list, tuple)) else [value]
        one = self.input(index)
        return None if one is None or one.known is None else one.known.reshape(-1).tolist()

    def ints(self, attr: str) -> list[int] | None:
        """A list of whole numbers; None where left out."""
        value = self.attrs.get(attr)
        return None if value is None else [int(v) for v in value]

    def text(self, attr: str, default: str) -> str:
        """A textual attribute."""
        value = self.attrs.get(attr, default)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

    def number(self, attr: str, default: int) -> int:
        """A whole-number attribute."""
        return int(self.attrs.get(attr, default))


def attributes(proto: Any, outer: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Attributes by name: numbers, lists, bytes, arrays of small tensors, graphs as they are.

    `outer` are those of the function call around the node, which its own may refer to.
    """
    from onnx import AttributeProto, numpy_helper

    found: dict[str, Any] = {}
    for one in proto.attribute:
        if one.ref_attr_name:
            if one.ref_attr_name in outer:
                found[one.name] = outer[one.ref_attr_name]
            continue
        kind = one.type
        if kind == AttributeProto.FLOAT:
            found[one.name] = one.f
        elif kind == AttributeProto.INT:
            found[one.name] = one.i
        elif kind == AttributeProto.STRING:
            found[one.name] = one.s
        elif kind == AttributeProto.FLOATS:
            found[one.name] = list(one.floats)
        elif kind == AttributeProto.INTS:
            found[one.name] = list(one.ints)
        elif kind == AttributeProto.STRINGS:
            found[one.name] = list(one.strings)
        elif kind == AttributeProto.TENSOR:
            shape, dtype = check_tensor(one.t, f"{where}, attribute {one.name[:40]}")
            found[one.name] = numpy_helper.to_array(one.t) if _is_small(one.t, shape, dtype) else one.t
        elif kind == AttributeProto.GRAPH:
            found[one.name] = one.g
        elif kind == AttributeProto.SPARSE_TENSOR:
            found[one.name] = one.sparse_tensor
    return found


def _is_small(tensor: Any, shape: Shape, dtype: str) -> bool:
    from onnx import TensorProto

    elements = 1
    for size in shape:
        elements *= size
    return elements <= MOST_KNOWN and tensor.data_location != TensorProto.EXTERNAL and is_readable(dtype)


def is_readable(dtype: str) -> bool:
    """Whether NumPy has the type itself."""
    return not dtype.startswith(("bfloat", "float8", "int4", "complex"))


# --- types of outputs -------------------------------------------------------------------------------------------


def infer(proto: Any, inputs: Sequence[Value | None], versions: Mapping[str, int], where: str) -> list[Type]:
    """Types of a standard operation's outputs, by the ``onnx`` library's own inference.

    With concrete inputs it gives concrete outputs, but where they depend on values: those are bounded by
    `_largest`. Raises InputError where the operands do not fit.
    """
    from onnx import defs, helper, shape_inference

    try:
        schema = defs.get_schema(proto.op_type, versions[""], "")
    except defs.SchemaError:
        return [None] * len(proto.output)
    types: dict[str, Any] = {}
    content: dict[str, Any] = {}
    for name, value in zip(proto.input, inputs, strict=True):
        if not name or value is None:
            continue
        types[name] = _type_proto(value)
        if value.known is not None:
            content[name] = _tensor_proto(value)
    imports = [helper.make_opsetid("", versions[""])]
    try:
        found = shape_inference.infer_node_outputs(schema, proto, types, content, opset_imports=imports)
    except Exception as error:  # the library raises its own types, and the standard ones
        reason = printable(" ".join(str(error).split()).removeprefix("[ShapeInferenceError] ")[:160])
        raise InputError(f"its operands do not fit: {reason}", where, "check the input shapes (--input)") from None
    return [_type_of(found.get(name), where) for name in proto.output]


def _type_proto(value: Value) -> Any:
    from onnx import helper

    if "type" not in value.protos:
        value.protos["type"] = helper.make_tensor_type_proto(ELEMENT_TYPE.get(value.dtype, 1), value.shape)
    return value.protos["type"]


def _tensor_proto(value: Value) -> Any:
    from onnx import numpy_helper

    if "content" not in value.protos and value.known is not None:
        value.protos["content"] = numpy_helper.from_array(value.known)
    return value.protos["content"]


def _type_of(proto: Any, where: str) -> Type:
    if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.elem_type:
        return None
    dtype = dtype_name(proto.tensor_type.elem_type, where)
    if not proto.tensor_type.HasField("shape"):
        return None, dtype
    dims = proto.tensor_type.shape.dim
    if any(not d.HasField("dim_value") for d in dims):
        return None, dtype
    return checked_shape((d.dim_value for d in dims), where), dtype


def largest(node: Node) -> list[Type] | None:
    """Outputs of an operation whose sizes depend on values, taken at their largest; None where nothing bounds them."""
    x = node.input(0)
    if x is None or x.shape is None:
        return None
    if node.op == "NonZero":
        return [((len(x.shape), x.elements), "int64")]
    if node.op == "NonMaxSuppression" and len(x.shape) == 3:
        scores, most = node.shape(1), node.known(2)
        boxes = min(int(most[0]), x.shape[1]) if most else 0 if node.input(2) is None else x.shape[1]
        return [((scores[0] * scores[1] * max(boxes, 0), 3), "int64")]
    if node.op == "Compress":
        axis = node.attrs.get("axis")
        shape = (x.elements,) if axis is None else x.shape
        return [(shape, x.dtype)]
    if node.op == "Unique":
        axis = node.attrs.get("axis")
        count = x.elements if axis is None else x.shape[int(axis)]
        return [((count,) if axis is None else x.shape, x.dtype), *[((count,), "int64")] * 3]
    if node.op == "TopK":
        return [(x.shape, x.dtype), (x.shape, "int64")]
    if node.op == "Slice":
        return [(x.shape, x.dtype)]
    return None

