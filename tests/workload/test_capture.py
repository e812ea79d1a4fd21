"""Capture, held to closed forms, to PyTorch's own counter, and to what really happens to storages."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import foretell  # noqa: E402
from foretell.errors import CaptureError, InputError, UnknownNameError  # noqa: E402
from foretell.graph import Graph  # noqa: E402


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", "off")


def mlp(width: int = 16, layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))


# --- counts ---------------------------------------------------------------------------------------------------


def test_published_counts() -> None:
    assert foretell.capture(nn.Linear(3, 8), torch.ones(5, 10, 3)).macs() == 1_200
    pytest.importorskip("torchvision")
    assert foretell.capture("torchvision:vit_b_16", image_size=224).macs() == 17_563_828_224


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (mlp(), (4, 16)),
        (nn.Conv2d(6, 8, 3, stride=2, padding=1), (2, 6, 9, 9)),  # PyTorch miscounts grouped weight gradients
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False)), (2, 3, 8, 8)),
        (nn.Conv1d(4, 8, 5, dilation=2), (2, 4, 30)),
        (nn.Conv3d(2, 4, 3), (1, 2, 6, 6, 6)),
        (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0), (2, 10, 16)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_flops_equal_pytorchs_own_counter(module: nn.Module, shape: tuple[int, ...]) -> None:
    """The oracle really runs the module. It counts the scores that attention's backward recomputes: forward only."""
    x = torch.randn(shape)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        module(x)  # in training mode: the inference fast path hides its operations from the counter
    assert foretell.capture(module, x).flops() == counter.get_total_flops()
    if isinstance(module, nn.TransformerEncoderLayer):
        return
    with FlopCounterMode(display=False) as counter:
        module.train()(x).mean().backward()
    assert foretell.capture(module, x, train=True).flops() == counter.get_total_flops()


def test_training_costs_three_forwards_but_for_the_first_input_gradient() -> None:
    graph = foretell.capture(mlp(16, 3), torch.ones(4, 16), train=True)
    one = 4 * 16 * 16
    assert graph.macs(phase="forward") == 3 * one
    assert graph.macs(phase="backward") == (2 * 3 - 1) * one


def test_frozen_parameters_leave_the_forward_alone() -> None:
    module, x = mlp(), torch.ones(4, 16)
    before = foretell.capture(module, x, train=True)
    for parameter in module[:4].parameters():
        parameter.requires_grad_(False)
    after = foretell.capture(module, x, train=True)
    assert after.macs(phase="forward") == before.macs(phase="forward")
    assert after.macs(phase="backward") == 4 * 16 * 16  # the last layer's weight gradient
    assert after.trainable_parameters == 16 * 17
    assert after.parameters == before.parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_tied_weights_are_one_storage() -> None:
    graph = foretell.capture(Tied(), torch.zeros(2, 3, dtype=torch.int64))
    assert graph.parameters == 400
    assert graph.parameter_bytes == 1_600
    assert graph.macs() == 6 * 8 * 50


class Functional(nn.Module):
    """A layer used twice, attention by function, an in-place update, a branch on shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q, k, v = self.proj(x).chunk(3, -1)
            x = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        if x.shape[0] > 1:
            x.mul_(2)
        return x


def test_what_module_hooks_would_miss() -> None:
    graph = foretell.capture(Functional(), torch.ones(2, 5, 8))
    attention = [op for op in graph.ops if op.kind == "attention"]
    assert len(attention) == 2
    assert all(op.attrs["causal"] for op in attention)
    assert graph.macs() == 2 * (10 * 8 * 24 + 2 * 2 * 5 * 5 * 8)
    update = next(op for op in graph.ops if op.name == "aten.mul_.Tensor")
    assert graph.tensors[update.inputs[0]].storage == graph.tensors[update.outputs[0]].storage
    assert update.inputs[0] != update.outputs[0]
    assert not any(op.name == "aten.mul_.Tensor" for op in foretell.capture(Functional(), torch.ones(1, 5, 8)).ops)


def test_backward_ops_carry_the_module_of_their_forward() -> None:
    graph = foretell.capture(mlp(), torch.ones(4, 16), train=True)
    backward = {op.module for op in graph.ops if op.phase == "backward" and op.kind == "matmul"}
    assert backward == {"0", "2", "4"}


def test_checkpointing_runs_the_forward_again() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.body, self.again = mlp(16, 2), again

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)

    x = torch.ones(4, 16, requires_grad=True)
    plain = foretell.capture(Checkpointed(False), x, train=True)
    again = foretell.capture(Checkpointed(True), x, train=True)
    assert again.macs(phase="backward") > plain.macs(phase="backward")
    kept = [sum(s.nbytes for s in g.storages if s.role == "activation") for g in (plain, again)]
    assert kept[1] < kept[0]


def test_compiled_modules_count_as_eager_ones() -> None:
    x = torch.ones(4, 16)
    eager = foretell.capture(mlp(), x, train=True)
    compiled = foretell.capture(torch.compile(mlp()), x, train=True)
    assert compiled.flops() == eager.flops()
    assert [(op.name, op.module) for op in compiled.ops] == [(op.name, op.module) for op in eager.ops]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_products_are_single_ops(dtype: str) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 16, 32, dtype=getattr(torch, dtype)))

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, self.weight, offs=ends)

    x = torch.ones(40, 16, dtype=getattr(torch, dtype))
    graph = foretell.capture(Experts(), x, torch.zeros(4, dtype=torch.int32), train=True)
    products = [op for op in graph.ops if op.kind == "grouped_matmul"]
    assert [op.phase for op in products] == ["forward", "backward"]  # x needs no gradient
    assert all(op.macs == 40 * 16 * 32 for op in products)


# --- the fused operations compute what they stand for ------------------------------------------------------------


def test_fused_operations_compute_the_real_thing() -> None:
    from foretell.workload.fused import grouped_mm, grouped_mm_weight, sdpa

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(sdpa(q, k, v, None, causal)[0], expected)
    mask = torch.rand(8, 8) > 0.3
    mask[:, 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(sdpa(q, k, v, mask, False)[0], expected)
    a, b, ends = torch.randn(6, 3), torch.randn(2, 3, 5), torch.tensor([2, 6])
    product = torch.cat([a[:2] @ b[0], a[2:] @ b[1]])
    torch.testing.assert_close(grouped_mm(a, b, ends), product)
    expected = torch.autograd.grad(product.sum(), b) if b.requires_grad else None
    assert expected is None
    weight = torch.stack([a[:2].T @ product[:2], a[2:].T @ product[2:]])
    torch.testing.assert_close(grouped_mm_weight(a, product, ends), weight)


def test_attention_elsewhere_is_untouched() -> None:
    foretell.capture(Functional(), torch.ones(2, 5, 8))
    q = torch.randn(1, 2, 4, 8)
    with FlopCounterMode(display=False), torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(q, q, q)
    assert not any("foretell" in event.key for event in profile.key_averages())


# --- memory -----------------------------------------------------------------------------------------------------


def test_lifetimes_are_those_of_the_storages() -> None:
    """y = relu(x·W): the product dies when relu has made its own output, which lives on as the output."""
    graph = foretell.capture(nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU()), torch.ones(2, 8))
    product = next(i for i, op in enumerate(graph.ops) if op.kind == "matmul")
    relu = next(i for i, op in enumerate(graph.ops) if op.name == "aten.relu.default")
    storage = graph.storages[graph.tensors[graph.ops[product].outputs[0]].storage]
    assert (storage.born, storage.dies, storage.role, storage.nbytes) == (product, relu, "temporary", 32)
    output = graph.storages[graph.tensors[graph.ops[relu].outputs[0]].storage]
    assert (output.dies, output.role) == (None, "output")


def test_roles_in_training() -> None:
    graph = foretell.capture(mlp(16, 2), torch.ones(4, 16), train=True, optimizer="adamw")
    total = {role: sum(s.nbytes for s in graph.storages if s.role == role) for role in ("parameter", "gradient")}
    assert total["parameter"] == total["gradient"] == 2 * 17 * 16 * 4
    state = sum(s.nbytes for s in graph.storages if s.role == "optimizer")
    assert state == 2 * total["parameter"] + 4 * 4  # two moments, and a step count for each of 4 parameters
    for storage in graph.storages:
        if storage.role == "activation":
            assert graph.ops[storage.born].phase == "forward"
            assert storage.dies is None or graph.ops[storage.dies].phase != "forward"
    assert all(s.dies is not None for s in graph.storages if s.role == "gradient")


@pytest.mark.parametrize(
    ("optimizer", "states"), [("sgd", 1), ("sgd-plain", 0), ("adam", 2), ("adamw", 2), ("adamw-fused", 2),
                              ("rmsprop", 1), ("adagrad", 1), ("lion", 1)]
)
def test_optimizer_states(optimizer: str, states: int) -> None:
    graph = foretell.capture(mlp(16, 1), torch.ones(4, 16), train=True, optimizer=optimizer)
    parameters = graph.parameter_bytes
    state = sum(s.nbytes for s in graph.storages if s.role == "optimizer")
    assert states * parameters <= state <= states * parameters + 64
    assert any(op.phase == "optimizer" for op in graph.ops)


def test_accumulation_repeats_the_micro_batch() -> None:
    one = foretell.capture(mlp(), torch.ones(4, 16), train=True)
    three = foretell.capture(mlp(), torch.ones(4, 16), train=True, accumulate=3)
    assert three.flops() == 3 * one.flops()
    assert three.batch == 12
    assert sum(op.phase == "optimizer" for op in three.ops) == sum(op.phase == "optimizer" for op in one.ops)


def test_no_weight_is_materialised() -> None:
    with torch.device("meta"):
        huge = nn.Linear(10**6, 10**6, bias=False)  # 4 TB
    graph = foretell.capture(huge, torch.empty(1, 10**6, device="meta"), train=True, optimizer="adamw")
    assert graph.parameters == 10**12


def test_the_module_is_given_back_as_it_was() -> None:
    module = mlp()
    module[0].eval()
    weights = {name: (id(p), p.clone()) for name, p in module.named_parameters()}
    flags = [m.training for m in module.modules()]
    foretell.capture(module, torch.ones(4, 16), train=True)
    with pytest.raises(CaptureError):
        foretell.capture(module, torch.ones(4, 17))
    assert [m.training for m in module.modules()] == flags
    for name, parameter in module.named_parameters():
        assert id(parameter) == weights[name][0]
        assert torch.equal(parameter, weights[name][1])
        assert parameter.grad is None


def test_nothing_is_kept_alive() -> None:
    module = mlp()
    watch = weakref.ref(module)
    foretell.capture(module, torch.ones(4, 16), train=True)
    del module
    gc.collect()
    assert watch() is None


# --- options ----------------------------------------------------------------------------------------------------


def test_precisions() -> None:
    def products(precision: str) -> set[str]:
        graph = foretell.capture(mlp(), torch.ones(4, 16), precision=precision)
        return {op.dtype for op in graph.ops if op.kind == "matmul"}

    assert products("fp32") == products("tf32") == {"float32"}
    assert products("amp") == products("fp16") == {"float16"}
    assert products("amp_bf16") == products("bf16") == {"bfloat16"}
    half = foretell.capture(mlp(), torch.ones(4, 16), precision="bf16")
    assert half.parameter_bytes * 2 == foretell.capture(mlp(), torch.ones(4, 16), precision="amp_bf16").parameter_bytes


def test_channels_last() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    for layout, expected in (("nchw", "contiguous"), ("nhwc", "channels_last")):
        graph = foretell.capture(module, torch.ones(2, 3, 8, 8), layout=layout)
        assert {graph.tensors[op.outputs[0]].layout for op in graph.ops} == {expected}
        assert graph.table().channels_last[0] == (layout == "nhwc")


def test_two_captures_are_equal_and_survive_json(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    first, second = (foretell.capture("timm:mobilenetv3_small_050", batch=2, train=True) for _ in range(2))
    assert first == second
    path = tmp_path / "graph.json"
    first.to_json(path)
    assert Graph.from_json(path) == foretell.capture(str(path)) == first


def test_flops_are_affine_in_the_batch() -> None:
    pytest.importorskip("timm")
    one, two, five = (foretell.capture("timm:efficientnet_b0", batch=b, train=True).flops() for b in (1, 2, 5))
    assert five - one == 4 * (two - one)


def test_recurrent_layers() -> None:
    graph = foretell.capture(nn.LSTM(8, 16, batch_first=True), torch.ones(2, 5, 8))
    assert graph.macs() == 2 * 5 * 4 * 16 * (8 + 16)
    assert not graph.not_counted


CELLS: dict[str, tuple[Any, int]] = {  # layer, gates
    "lstm": (nn.LSTM, 4),
    "gru": (nn.GRU, 3),
    "tanh": (nn.RNN, 1),
    "relu": (lambda *sizes, **flags: nn.RNN(*sizes, nonlinearity="relu", **flags), 1),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "train"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_recurrent_layer_is_one_op_a_direction(cell: str, bias: bool, train: bool) -> None:
    make, gates = CELLS[cell]
    layers = make(8, 16, num_layers=2, bidirectional=True, batch_first=True, bias=bias, dropout=0.5)
    for precision in ("fp32", "fp16"):
        graph = foretell.capture(layers, torch.ones(2, 5, 8), train=train, precision=precision)
        fused = [op for op in graph.ops if op.kind == "recurrent"]
        forward = [2 * 5 * gates * 16 * (width + 16) for width in (8, 8, 32, 32)]  # two directions side by side: 32
        assert [op.macs for op in fused if op.phase == "forward"] == forward
        assert [op.macs for op in fused if op.phase == "backward"] == [2 * n for n in reversed(forward)] * train
        assert graph.macs() == sum(op.macs for op in fused)
        assert not graph.not_counted
        assert {graph.tensors[op.outputs[0]].shape for op in fused if op.phase == "forward"} == {(5, 2, 16)}
        assert graph.parameters == sum(p.numel() for p in layers.parameters())
        assert sum(op.kind == "random" for op in graph.ops) == train  # dropout between the two layers


def test_fused_recurrent_layers_give_the_shapes_of_the_real_ones() -> None:
    from foretell.workload.fused import fused_operations

    for cell, (make, _) in CELLS.items():
        for flags in ({}, {"batch_first": True, "bidirectional": True, "num_layers": 2, "bias": False}):
            layers, x = make(8, 16, **flags), torch.ones(2, 5, 8)
            real = torch.utils._pytree.tree_leaves(layers(x))
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, fused_operations():
                fake = torch.utils._pytree.tree_leaves(layers(mode.from_tensor(x)))
            shapes = [[(t.shape, t.stride(), t.dtype) for t in ts] for ts in (real, fake)]
            assert shapes[0] == shapes[1], (cell, flags)


def test_an_lstm_with_projections_stays_steps() -> None:
    graph = foretell.capture(nn.LSTM(8, 16, proj_size=4), torch.ones(5, 2, 8))
    assert graph.macs() == 5 * 2 * (4 * 16 * (8 + 4) + 16 * 4)  # the state of 4 is projected from 16
    assert not any(op.kind == "recurrent" for op in graph.ops)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_times_of_recurrent_layers_go_by_their_gates(precision: str) -> None:
    gru, lstm = (
        foretell.predict(make(1024, 1024, 2), torch.ones(64, 32, 1024), on="t4", precision=precision).time_s
        for make in (nn.GRU, nn.LSTM)
    )
    assert gru / lstm == pytest.approx(3 / 4, rel=0.05)


# --- what goes wrong ----------------------------------------------------------------------------------------------


class Nosy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the line to be named
            return x
        return -x


def test_value_dependent_control_flow_names_the_line() -> None:
    line = r"test_capture\.py:\d+: if x\.sum\(\) > 0:  # the line to be named"
    with pytest.raises(CaptureError, match=line) as caught:
        foretell.capture(Nosy(), torch.ones(3))
    assert caught.value.hint is not None
    assert "shapes" in caught.value.hint


def test_a_failing_module_names_line_and_shapes() -> None:
    with pytest.raises(CaptureError, match="the module failed: RuntimeError"):
        foretell.capture(mlp(), torch.ones(4, 17))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"batch": 0}, InputError),
        ({"batch": 1.5}, InputError),
        ({"precision": "fp23"}, UnknownNameError),
        ({"optimizer": "adan"}, UnknownNameError),
        ({"layout": "nhcw"}, UnknownNameError),
        ({"phase": "trian"}, UnknownNameError),
        ({"bacth": 2}, UnknownNameError),
        ({"accumulate": 2}, InputError),
        ({"phase": "decode"}, InputError),
        ({"train": True, "phase": "decode"}, InputError),
    ],
)
def test_wrong_options(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        foretell.capture(mlp(), torch.ones(4, 16), **settings)


def test_training_what_cannot_be_trained() -> None:
    with pytest.raises(CaptureError, match="lazy layer"):
        foretell.capture(nn.LazyLinear(3), torch.ones(4, 16))
    with pytest.raises(CaptureError, match="nothing to train"):
        foretell.capture(nn.ReLU(), torch.ones(4), train=True)
    frozen = mlp().requires_grad_(False)
    with pytest.raises(CaptureError, match="requires_grad"):
        foretell.capture(frozen, torch.ones(4, 16), train=True)
    with pytest.raises(InputError, match="no example inputs"):
        foretell.capture(mlp())
    with pytest.raises(InputError, match="not a torch"):
        foretell.capture(42, torch.ones(3))


def test_backward_belongs_to_the_module_of_its_forward() -> None:
    """Batch norm counts its batches and the loss makes its targets: ops without gradients of their own."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4))
    graph = foretell.capture(net, torch.empty(2, 3, 8, 8), train=True)
    found = {op.name.split(".")[1]: op.module for op in graph.ops if op.phase == "backward"}
    assert (found["convolution_backward"], found["native_batch_norm_backward"], found["mm"]) == ("0", "1", "3")
