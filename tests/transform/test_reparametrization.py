"""Re-parametrised modules compute what the originals do. Oracles: the original's forward, and timm's own conversion."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from foretell.transform import fold_batch_norm, reparametrize
from foretell.workload import zoo
from foretell.workload.zoo.repvgg import RepVGGBlock

Trained = Callable[[nn.Module], nn.Module]


def same(module: nn.Module, other: nn.Module, *shape: int, tolerance: float = 1e-12) -> None:
    """Both compute the same, in float64, to `tolerance` of the largest value."""
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        expected = copy.deepcopy(module).double().eval()(x)
        found = copy.deepcopy(other).double().eval()(x)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def norms(module: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


@pytest.mark.parametrize(
    ("inputs", "outputs", "stride", "groups"),
    [(8, 8, 1, 1), (8, 8, 1, 4), (8, 16, 1, 2), (8, 8, 2, 1), (8, 16, 2, 4), (6, 6, 1, 6)],
)
def test_a_repvgg_block_becomes_one_convolution(
    trained: Trained, inputs: int, outputs: int, stride: int, groups: int
) -> None:
    torch.manual_seed(1)
    block = trained(RepVGGBlock(inputs, outputs, stride, groups)).double().eval()
    result = reparametrize(block)
    same(block, result.module, 2, inputs, 11, 12)
    convs = [m for m in result.module.modules() if isinstance(m, nn.Conv2d)]
    assert [c.kernel_size for c in convs] == [(3, 3)]
    assert convs[0].groups == groups
    assert norms(result.module) == 0
    identity = " + norm" if inputs == outputs and stride == 1 else ""
    assert [c.what for c in result.changes] == [f"3×3 conv·norm + 1×1 conv·norm{identity} → 3×3 conv"]
    assert result.changes[0].parameters_after == outputs * inputs // groups * 9 + outputs


def test_in_float32_the_outputs_agree_to_one_in_ten_thousand(trained: Trained) -> None:
    torch.manual_seed(2)
    model = trained(zoo.build("repvgg_a0", 10)).eval()
    plain = reparametrize(model).module
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        assert (plain(x) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_kernels_are_those_timm_derives(trained: Trained) -> None:
    timm = pytest.importorskip("timm")
    from timm.models.byobnet import MobileOneBlock
    from timm.utils.model import reparameterize_model

    torch.manual_seed(3)
    for model in (
        timm.create_model("repvgg_a0", num_classes=10),
        nn.Sequential(
            MobileOneBlock(3, 8, 3, stride=2, num_conv_branches=2),
            MobileOneBlock(8, 8, 3, group_size=1, num_conv_branches=3),
            MobileOneBlock(8, 8, 1, num_conv_branches=4),
            MobileOneBlock(8, 16, 1),
        ),
    ):
        trained(model).double().eval()
        theirs = reparameterize_model(model)
        ours = reparametrize(model).module
        their_kernels = [m for m in theirs.modules() if isinstance(m, nn.Conv2d)]
        our_kernels = [m for m in ours.modules() if isinstance(m, nn.Conv2d)]
        assert len(their_kernels) == len(our_kernels)
        for their, our in zip(their_kernels, our_kernels, strict=True):
            assert torch.allclose(our.weight, their.weight, atol=1e-12)
            assert their.bias is not None
            assert torch.allclose(our.bias, their.bias, atol=1e-12)
        same(theirs, ours, 1, 3, 64, 64, tolerance=1e-11)
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", ["repvit_m0_9", "fastvit_t8", "resnet18"])
def test_other_architectures_keep_their_meaning(trained: Trained, name: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(4)
    model = trained(timm.create_model(name, num_classes=10)).double().eval()
    result = reparametrize(model)
    same(model, result.module, 1, 3, 64, 64, tolerance=1e-10)
    assert len(result.changes) >= 18
    assert norms(result.module) < norms(model)


def test_published_converted_size() -> None:
    """RepVGG-B1g4: 36.12 M parameters, 7.3 GMAC once converted (Ding et al., table 4)."""
    with torch.device("meta"):
        plain = reparametrize(zoo.build("repvgg_b1g4")).module
    assert sum(p.numel() for p in plain.parameters()) / 1e6 == pytest.approx(36.12, abs=0.01)
    assert norms(plain) == 0


def test_folding_alone_leaves_the_branches(trained: Trained) -> None:
    torch.manual_seed(5)
    block = trained(RepVGGBlock(8, 8)).double().eval()
    result = fold_batch_norm(block)
    same(block, result.module, 2, 8, 9, 9)
    kernels = sorted(m.kernel_size for m in result.module.modules() if isinstance(m, nn.Conv2d))
    assert kernels == [(1, 1), (3, 3)]
    assert norms(result.module) == 1  # the identity branch has no convolution to fold into


class Branches(nn.Module):
    """A stem on which the forwards below differ."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)


class Overwritten(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        first = self.a(y)
        y.relu_()  # the second branch reads another value under the same name
        return first + self.b(y)


class OverwrittenByModule(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        first = self.a(y)
        return first + self.b(self.act(y)) + self.b(y)


class ReadTwice(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.norm(y) + y.sigmoid()  # the convolution's own output is needed too


class CalledTwice(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(self.a(x)))  # one convolution, folded at its second call only


class AddedToItself(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return y + y


class Numbers(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: int | torch.Tensor = 0
        for branch in (self.a, self.b):
            total = total + branch(x)
        return total + 0.5 + x


class InPlace(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.a(x))
        y += self.b(x)
        return y.add_(x)


class PostAddition(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x) + self.b(x) + x)


class OtherSource(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x.relu())


class Functional(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm
        return nn.functional.batch_norm(self.a(x), n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, n.eps)


@pytest.mark.parametrize(
    ("kind", "convolutions", "changes"),
    [
        (Overwritten, 2, 0),
        (OverwrittenByModule, 2, 0),
        (ReadTwice, 1, 0),
        (CalledTwice, 2, 1),
        (AddedToItself, 1, 0),
        (Numbers, 1, 1),
        (InPlace, 1, 1),
        (PostAddition, 1, 1),
        (OtherSource, 2, 0),
        (Functional, 1, 1),
    ],
)
def test_meaning_is_kept_and_what_can_merge_does(
    trained: Trained, kind: type[Branches], convolutions: int, changes: int
) -> None:
    torch.manual_seed(6)
    module = trained(kind()).double().eval()
    result = reparametrize(module)
    same(module, result.module, 2, 4, 7, 7)
    assert len(result.changes) == changes
    if changes:
        assert sum(isinstance(m, nn.Conv2d) for m in result.module.modules()) == convolutions


def test_a_norm_that_uses_the_batchs_statistics_stays() -> None:
    module = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    result = reparametrize(module)
    assert result.changes == ()
    same(module, result.module, 2, 4, 9, 9)


class DependsOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = RepVGGBlock(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) if x.sum() > 0 else self.block(-x)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = RepVGGBlock(4, 4)
        self.extra = RepVGGBlock(4, 4)

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        y = self.block(x)
        return y if more is None else y + self.extra(more)


@pytest.mark.parametrize(
    ("kind", "reason"), [(DependsOnValues, "cannot be traced"), (Optional, "optional arguments (more)")]
)
def test_blocks_inside_a_forward_that_cannot_be_traced_are_rewritten(
    trained: Trained, kind: type[nn.Module], reason: str
) -> None:
    torch.manual_seed(8)
    module = trained(kind()).double().eval()
    result = reparametrize(module)
    assert type(result.module) is kind  # it keeps its own forward
    assert norms(result.module) == 0
    assert [where for where, _ in result.skipped] == [""]
    assert reason in result.skipped[0][1]
    assert "(root): left alone" in str(result)
    same(module, result.module, 2, 4, 7, 7)
    if kind is Optional:
        x, more = (torch.randn(1, 4, 5, 5, dtype=torch.float64) for _ in range(2))
        with torch.no_grad():
            assert torch.allclose(result.module(x, more), module(x, more), atol=1e-12)


def test_what_hooks_do_is_kept(trained: Trained) -> None:
    block = trained(RepVGGBlock(4, 4)).double().eval()
    block.register_forward_hook(lambda module, args, output: output + 1)
    for module in (block, nn.Sequential(block)):
        result = reparametrize(module)
        same(module, result.module, 1, 4, 5, 5)
    hooked = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).double().eval()
    hooked[0].register_forward_hook(lambda module, args, output: output * output)
    result = reparametrize(hooked)
    assert result.changes == ()
    same(hooked, result.module, 1, 4, 5, 5)


def test_frozen_weights_stay_frozen_and_half_precision_stays_half() -> None:
    block = RepVGGBlock(4, 4).bfloat16()
    for parameter in block.parameters():
        parameter.requires_grad = False
    parameters = list(reparametrize(block).module.parameters())
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert not any(p.requires_grad for p in parameters)
