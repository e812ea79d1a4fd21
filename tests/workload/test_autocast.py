"""CUDA's autocast on fake CPU tensors, against two oracles: the header PyTorch ships, and fake CUDA tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from foretell.graph import kind_of  # noqa: E402
from foretell.workload import autocast  # noqa: E402
from foretell.workload.capture import capture_module  # noqa: E402
from foretell.workload.options import options  # noqa: E402


def header_list(name: str) -> set[str]:
    """The operations of one list of ATen/autocast_mode.h."""
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    block = re.search(rf"#define {name}\(_\)(.*?)\n\n", text.replace("\\\n", " "), re.DOTALL)
    assert block is not None
    entries = re.findall(r"_\(\s*([\w]+)\s*(?:,\s*(\w+)\s*)?\)", block[1].split("\n")[0])
    return {f"{op}.{overload}" if overload else op for op, overload in entries}


def test_lists_are_those_of_the_installed_pytorch() -> None:
    assert set(autocast._FP32.split()) == header_list("AT_FORALL_FP32")
    ours = set(autocast._FP32_RESULT.split()) | set(autocast._FP32_SOFTMAX)
    assert ours == header_list("AT_FORALL_FP32_SET_OPT_DTYPE")
    assert set(autocast._PROMOTE.split()) == header_list("AT_FORALL_PROMOTE")
    assert set(autocast._LOWER.split()) <= header_list("AT_FORALL_LOWER_PRECISION_FP")


def test_pytorch_is_left_as_it_was() -> None:
    x = torch.ones(4, 8)
    before = torch.layer_norm
    with autocast.cuda_autocast(torch.bfloat16):
        assert torch.nn.functional.layer_norm(x.bfloat16(), (8,)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.layer_norm(x.bfloat16(), (8,)).dtype == torch.bfloat16
    assert torch.layer_norm is before


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(first, torch.Tensor):
            self.rows.append((str(func), str(first.dtype).removeprefix("torch."), tuple(first.shape)))
        return out


def _comparable(rows: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (name.replace("cudnn_batch_norm", "native_batch_norm"), dtype, shape)
        for name, dtype, shape in rows
        if kind_of(name) != "view" and not name.startswith(("prim.", "aten.detach", "aten.empty"))
    ]


def on_fake_cuda(module: Any, shape: tuple[int, ...], dtype: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """What a forward under CUDA's own autocast dispatches, on fake CUDA tensors (no driver needed)."""
    names = _Names()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for submodule in module.modules():
            for slots in (submodule._parameters, submodule._buffers):
                for key, value in slots.items():
                    if value is not None:
                        twin = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                        slots[key] = torch.nn.Parameter(twin) if isinstance(value, torch.nn.Parameter) else twin
        x = torch.empty(shape, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        torch.autocast_increment_nesting()
        try:
            with names:
                module(x)
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_enabled("cuda", False)
    return _comparable(names.rows)


@pytest.fixture
def unfused() -> Iterator[None]:
    """Attention as products and a softmax on both sides: fake CUDA decomposes the fused call."""
    layers = pytest.importorskip("timm.layers")
    layers.set_fused_attn(False)
    yield
    layers.set_fused_attn(True)


@pytest.mark.parametrize("precision", ["amp", "amp_bf16"])
@pytest.mark.parametrize(
    "name",
    ["resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto", "xcit_nano_12_p16_224",
     "efficientnet_b0", "hrnet_w18_small"],
)
def test_types_equal_those_on_fake_cuda(name: str, precision: str, unfused: None) -> None:
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        module = timm.create_model(name).eval()
        x = torch.empty(2, *module.default_cfg["input_size"])
    graph = capture_module(module, (x,), options=options(batch=2, precision=precision))
    ours = _comparable(
        (op.name, graph.tensors[op.outputs[0]].dtype, graph.tensors[op.outputs[0]].shape)
        for op in graph.ops
        if op.outputs
    )
    dtype = torch.float16 if precision == "amp" else torch.bfloat16
    assert ours == on_fake_cuda(module, tuple(x.shape), dtype)
