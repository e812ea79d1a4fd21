"""An exported model counts what its PyTorch original counts."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from foretell.errors import UnknownNameError

pytest.importorskip("onnx")
torch = pytest.importorskip("torch")

import foretell  # noqa: E402
from foretell.graph import Graph  # noqa: E402
from foretell.workload.options import options  # noqa: E402


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"onnx_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


models = _load("models")

# The rotary embedding's frequencies are a buffer, which a file stores like a parameter: one for two features of a head.
STORED_BUFFERS = {"llama": 4 // 2}
NO_TORCHSCRIPT = {"llama": "the TorchScript exporter lacks aten::diff"}
# What a graph of one captured step has and the file's does not: masks and indices that depend on shapes alone.
ONCE_AT_LOADING = frozenset({"fill", "indexing", "embedding", "scan", "copy", "pointwise"})


def read(path: Path, **settings: object) -> Graph:
    from foretell.workload.onnx import graph

    return graph(str(path), options(**settings))


@pytest.fixture(scope="module")
def captured() -> dict[str, tuple[object, tuple[object, ...], Graph]]:
    """Models that were built and captured once."""
    return {}


def original(name: str, captured: dict[str, tuple[object, tuple[object, ...], Graph]]) -> tuple[object, ...]:
    if name not in captured:
        torch.manual_seed(0)
        module, args = models.MODELS[name]()
        captured[name] = models.fill(module), args, foretell.capture(module, *args)
    return captured[name]


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", models.MODELS)
def test_counts_are_the_originals(name: str, dynamo: bool, captured: dict, tmp_path: Path) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    elif name in NO_TORCHSCRIPT:
        pytest.skip(NO_TORCHSCRIPT[name])
    module, args, want = original(name, captured)
    got = read(models.export(module, args, tmp_path / "m.onnx", dynamo=dynamo))
    assert got.parameters == want.parameters + STORED_BUFFERS.get(name, 0)
    assert got.macs() == want.macs()
    assert got.macs("fvcore") == want.macs("fvcore")
    assert not got.not_counted
    here, there = (Counter(op.kind for op in g.ops if op.kind != "view") for g in (got, want))
    differ = {kind for kind in {*here, *there} if here[kind] != there[kind]}
    assert differ <= ONCE_AT_LOADING
    if name in ("lstm", "gru"):  # both directions are stacked, and laid out anew, where PyTorch joins them
        return
    assert sum(there.values()) * 0.7 <= sum(here.values()) <= sum(there.values()) * 1.35


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "segmentation", "transposed", "grouped"])
def test_a_convolutional_network_is_the_captured_graph_op_for_op(name: str, captured: dict, tmp_path: Path) -> None:
    module, args, want = original(name, captured)
    got = read(models.export(module, args, tmp_path / "m.onnx", dynamo=False))

    def plain(graph: Graph) -> list[tuple[object, ...]]:
        return [
            (op.name.replace("_.", "."), op.kind, op.gemm, op.dtype, op.bytes_read, op.bytes_written, dict(op.attrs))
            for op in graph.ops
            if op.kind != "view"
        ]

    assert plain(got) == plain(want)
    assert [op.module for op in got.ops if op.kind == "convolution"] == [
        op.module for op in want.ops if op.kind == "convolution"
    ]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_settings_act_as_in_a_capture(layout: str, precision: str, captured: dict, tmp_path: Path) -> None:
    module, args, _ = original("resnet", captured)
    settings = {"layout": layout, "precision": precision}
    want = foretell.capture(module, *args, **settings)
    got = read(models.export(module, args, tmp_path / "m.onnx", dynamo=False), **settings)
    shown = [
        [(op.name, op.dtype, op.bytes_read, g.tensors[op.inputs[0]].layout, g.tensors[op.outputs[0]].layout)
         for op in g.ops if op.kind in ("convolution", "normalization", "pooling")]
        for g in (got, want)
    ]
    assert shown[0] == shown[1]
    assert got.parameter_bytes == want.parameter_bytes


def test_folded_batch_norms_leave_one_bias(captured: dict, tmp_path: Path) -> None:
    """The exporter's own optimiser joins conv and batch norm: scale and shift (2C) become a bias (C)."""
    pytest.importorskip("onnxscript")
    module, args, want = original("resnet", captured)
    channels = sum(m.num_features for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d))
    got = read(models.export(module, args, tmp_path / "m.onnx", dynamo=True, optimize=True))
    assert got.parameters == want.parameters - channels
    assert got.macs() == want.macs()


def test_a_decoders_cache_has_its_role(captured: dict, tmp_path: Path) -> None:
    module, args, _ = original("decoder", captured)
    got = read(models.export(module, args, tmp_path / "m.onnx", dynamo=False))
    caches = sorted(s.nbytes for s in got.storages if s.role == "kv_cache")
    before, after = 2 * 4 * 9 * 4 * 4, 2 * 4 * 10 * 4 * 4  # batch · heads · length · depth · bytes
    assert caches == [before, before, after, after]


@pytest.mark.parametrize("opset", [14, 17])
def test_norms_and_activations_spelled_out_are_put_together(opset: int, captured: dict, tmp_path: Path) -> None:
    """Before opset 17 there is no layer norm, before 20 no GELU."""
    module, args, want = original("decoder", captured)
    path = models.export(module, args, tmp_path / "m.onnx", dynamo=False, opset_version=opset)
    got = read(path)
    assert got.macs("fvcore") == want.macs("fvcore")
    here, there = (Counter(op.kind for op in g.ops if op.kind != "view") for g in (got, want))
    assert here == there


@pytest.mark.parametrize(("name", "opset", "dynamo"), [
    ("resnet", 9, False), ("detection", 9, False), ("swin", 11, False), ("lstm", 9, False), ("decoder", 18, True),
    ("decoder", 23, True), ("detection", 23, True),
])  # fmt: skip
def test_opsets_old_and_new(name: str, opset: int, dynamo: bool, captured: dict, tmp_path: Path) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    module, args, want = original(name, captured)
    got = read(models.export(module, args, tmp_path / "m.onnx", dynamo=dynamo, opset_version=opset))
    assert got.provenance["opset"] == str(opset)
    assert (got.parameters, got.macs(), got.macs("fvcore")) == (want.parameters, want.macs(), want.macs("fvcore"))


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_one_op_and_knows_its_mask(causal: bool, dynamo: bool, tmp_path: Path) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    args = tuple(torch.randn(2, 3, 100, 8) for _ in range(3))
    want = foretell.capture(Attention(), *args)
    got = read(models.export(Attention(), args, tmp_path / "m.onnx", dynamo=dynamo))
    shown = [[(op.name, op.gemm, dict(op.attrs), op.bytes_read) for op in g.ops] for g in (got, want)]
    assert [op for op in shown[0] if op[0].startswith("foretell")] == shown[1]


def test_attention_that_a_model_spells_out_itself_stays_so(tmp_path: Path) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return ((q @ k.transpose(-2, -1)) / 8**0.5).softmax(-1) @ v

    args = tuple(torch.randn(2, 3, 10, 8) for _ in range(3))
    want = foretell.capture(Attention(), *args)
    got = read(models.export(Attention(), args, tmp_path / "m.onnx", dynamo=False))
    assert [op.name for op in got.ops if op.kind != "view"] == [op.name for op in want.ops if op.kind != "view"]


def test_one_file_serves_every_batch(captured: dict, tmp_path: Path) -> None:
    module, args, want = original("resnet", captured)
    path = models.export(
        module, args, tmp_path / "m.onnx", dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "n"}}
    )
    assert read(path, batch=6).macs() == 3 * want.macs()
    assert read(path, inputs=["x=4x3x32x32"]).macs() == 2 * want.macs()
    assert read(path, inputs=["0=4x3x32x32"]).macs() == 2 * want.macs()
    with pytest.raises(UnknownNameError, match="unknown input 'y'"):
        read(path, inputs=["y=4x3x32x32"])
    assert read(path, batch=6).batch == 6
