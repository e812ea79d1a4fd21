"""Convolutional input/output against sums a reader can do."""

from types import MappingProxyType

from foretell.graph import Graph, Storage, Tensor, make_op
from foretell.graph.traffic import convolution_io_bytes, convolution_io_elements


def graph_of(phase: str = "forward", repeat: int = 1, dtype: str = "float32") -> Graph:
    """A 3×3 convolution from 8 to 16 channels on 10×10, then a ReLU."""
    tensors = (
        Tensor((2, 8, 10, 10), dtype, 0),
        Tensor((16, 8, 3, 3), dtype, 1),
        Tensor((2, 16, 10, 10), dtype, 2),
        Tensor((2, 16, 10, 10), dtype, 3),
    )
    ops = (
        make_op("aten.convolution.default", tensors, (0, 1), (2,), phase=phase, repeat=repeat),
        make_op("aten.relu.default", tensors, (2,), (3,), phase=phase),
    )
    return Graph(
        name="one convolution",
        mode="inference",
        precision="fp32",
        ops=ops,
        tensors=tensors,
        storages=tuple(Storage(t.nbytes, "temporary") for t in tensors),
        parameters=16 * 8 * 9,
        trainable_parameters=16 * 8 * 9,
        items=MappingProxyType({"images": 2}),
    )


def test_one_convolution_moves_its_input_and_its_output() -> None:
    graph = graph_of()
    assert convolution_io_elements(graph) == 2 * 8 * 100 + 2 * 16 * 100  # input + output; no weights, no ReLU
    assert convolution_io_bytes(graph) == 4 * (2 * 8 * 100 + 2 * 16 * 100)


def test_bytes_follow_the_dtype_and_elements_do_not() -> None:
    half = graph_of(dtype="float16")
    assert convolution_io_bytes(half) * 2 == convolution_io_bytes(graph_of())
    assert convolution_io_elements(half) == convolution_io_elements(graph_of())


def test_repeated_layers_count_each_time_and_backward_does_not() -> None:
    assert convolution_io_elements(graph_of(repeat=3)) == 3 * convolution_io_elements(graph_of())
    assert convolution_io_elements(graph_of(phase="backward")) == 0
