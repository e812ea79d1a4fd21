"""Efficient architectures against what their papers publish, and their new parts against loops and closed forms."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from foretell.errors import InputError
from foretell.workload import zoo
from foretell.workload.zoo.e2gc import constant_groups, constant_width, mobilenet_v1, resnext50
from foretell.workload.zoo.efficientmod import Attention, Modulation
from foretell.workload.zoo.ghost_sr import EDSR, GhostConv, LearnableShift, Shift, intrinsic_filters, offsets, spread
from foretell.workload.zoo.vovnet import OneShotAggregation
from foretell.workload.zoo.wavemix import HaarTransform, WaveMixBlock, wavemix_classifier


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Parameters (M) and multiply-adds (G), as printed (None: not printed), and how far our multiply-adds may be off.
PUBLISHED = {
    # Ma et al., ICLR 2024: ImageNet, 224×224.
    "efficientmod_xxs": (4.7, 0.6, 0.05),
    "efficientmod_xs": (6.6, 0.8, 0.05),
    "efficientmod_s": (12.9, 1.4, 0.05),
    "efficientmod_s_conv": (12.9, 1.5, 0.05),
    # Jeevan et al., arXiv 2205.14375, table 1.
    "wavemix_256_16_seg4": (63, None, 0),
    "wavemix_192_16": (28, None, 0),
    # Chaurasia and Culurciello, VCIP 2017: 21.2 GFLOPs. Ours are 8 % less: how the paper counts is not said.
    "linknet": (11.5, 21.2 / 2, 0.09),
    # Lim et al. 2017 and Nie et al. 2022, for a result of 1280×720.
    "edsr_x2": (40.73, 9385, 0.001),
    "edsr_baseline_x2": (1.37, 316, 0.001),
    "ghost_edsr_x2": (0.54 * 40.73, 0.54 * 9385, 0.01),
    # Howard et al. 2017, table 8 (569 M mult-adds); Xie et al. 2017, table 1.
    "mobilenet_v1": (4.2, 0.569, 0.001),
    "resnext50_groups32": (25.0, 4.2, 0.01),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_architecture_is_the_one_in_the_paper(name: str) -> None:
    published_parameters, published_macs, tolerance = PUBLISHED[name]
    with torch.device("meta"):
        module = zoo.build(name).eval()
        x = torch.empty(1, 3, *zoo.input_size(name))
    assert parameters(module) / 1e6 == pytest.approx(published_parameters, rel=0.01)
    if published_macs is not None:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(x)
        assert counter.get_total_flops() / 2e9 == pytest.approx(published_macs, rel=tolerance)


# --- WaveMix -----------------------------------------------------------------------------------------------------


# The authors' table of parameter efficiency, to the last parameter.
@pytest.mark.parametrize(
    ("width", "depth", "channels", "upsample", "published"),
    [
        (8, 10, 1, "nearest", 3566),
        (8, 5, 1, "deconvolution", 7156),
        (32, 7, 3, "nearest", 37058),
        (64, 6, 3, "deconvolution", 520106),
    ],
)
def test_small_wavemix_has_the_published_parameters(
    width: int, depth: int, channels: int, upsample: str, published: int
) -> None:
    with torch.device("meta"):
        model = wavemix_classifier(width, depth, num_classes=10, channels=channels, stride=1, upsample=upsample)
    assert parameters(model) == published


def test_the_wavelet_transform_is_orthonormal_and_inverts() -> None:
    torch.manual_seed(0)
    transform = HaarTransform(3).double()
    x = torch.randn(2, 3, 8, 6, dtype=torch.float64)
    low, high = transform(x)
    assert low.shape == (2, 3, 4, 3)
    assert high.shape == (2, 9, 4, 3)
    assert float(low.square().sum() + high.square().sum()) == pytest.approx(float(x.square().sum()))
    assert torch.allclose(transform.inverse(low, high), x)
    assert torch.allclose(low, 2 * nn.functional.avg_pool2d(x, 2))
    # Down, across and along the diagonal, by hand: channel 1's first square.
    a, b, c, d = x[0, 1, :2, :2].flatten().tolist()
    assert high[0, 3:6, 0, 0].tolist() == pytest.approx([(a - b + c - d) / 2, (a + b - c - d) / 2, (a - b - c + d) / 2])
    assert parameters(transform) == 0


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_wavemix_block_keeps_shape_and_sees_as_far_as_its_levels(levels: int) -> None:
    torch.manual_seed(0)
    block = WaveMixBlock(8, levels, dropout=0.0).eval()
    x = torch.randn(1, 8, 64, 64, requires_grad=True)
    y = block(x)
    assert y.shape == x.shape
    y[0, :, 32, 32].sum().backward()
    assert x.grad is not None
    seen = int((x.grad.abs().sum((0, 1)) > 0).any(0).sum())
    assert 2**levels < seen <= 4 * 2**levels + 4
    assert all(p.grad is not None for p in block.parameters())


# --- EfficientMod ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expansion", [1, 3])
def test_modulation_is_values_times_a_repeated_context(expansion: int) -> None:
    torch.manual_seed(0)
    block = Modulation(6, expansion)
    nn.init.ones_(block.scale)
    x = torch.randn(2, 5, 5, 6)
    normed = nn.functional.layer_norm(x, (6,))
    context = block.context.before(normed).permute(0, 3, 1, 2)
    conv = block.context.conv
    context = nn.functional.gelu(nn.functional.conv2d(context, conv.weight, conv.bias, padding=3, groups=6))
    context = block.context.after(context.permute(0, 2, 3, 1))
    values = block.values(normed)
    values = nn.functional.gelu(values) if expansion > 1 else values
    product = torch.cat([values[..., 6 * i : 6 * (i + 1)] * context for i in range(expansion)], -1)
    assert torch.allclose(block(x), x + block.project(product), atol=1e-5)


def test_attention_is_softmax_of_scaled_products() -> None:
    torch.manual_seed(0)
    block = Attention(16, 2, heads=2)
    x = torch.randn(1, 3, 3, 16)
    tokens = x.reshape(1, 9, 16)
    q, k, v = block.qkv(block.norm(tokens)).reshape(9, 3, 2, 32).unbind(1)
    heads = [torch.softmax(q[:, h] @ k[:, h].T / 32**0.5, -1) @ v[:, h] for h in range(2)]
    mixed = tokens[0] + block.project(torch.cat(heads, -1))
    assert torch.allclose(block(x).reshape(9, 16), mixed + block.mlp(mixed), atol=1e-5)


# --- VoVNet, LinkNet, E2GC ---------------------------------------------------------------------------------------


def test_one_shot_aggregation_joins_once() -> None:
    torch.manual_seed(0)
    block = OneShotAggregation(6, 4, 6, depth=3, residual=True).eval()
    x = torch.randn(1, 6, 7, 7)
    first = block.layers[0](x)
    second = block.layers[1](first)
    third = block.layers[2](second)
    assert torch.equal(block(x), block.mix(torch.cat([x, first, second, third], 1)) + x)
    assert {layer[0].in_channels for layer in block.layers[1:]} == {layer[0].out_channels for layer in block.layers}


@pytest.mark.parametrize("size", [(360, 640), (64, 96), (720, 1280)])
def test_linknet_answers_at_the_size_of_its_input(size: tuple[int, int]) -> None:
    with torch.device("meta"):
        assert zoo.build("linknet", 5).eval()(torch.empty(1, 3, *size)).shape == (1, 5, *size)


def test_adding_costs_less_than_joining() -> None:
    with torch.device("meta"):
        added, joined = zoo.build("linknet"), zoo.build("linknet_joined")
    assert parameters(added) < parameters(joined)


def test_e2gc_keeps_the_width_of_groups_and_the_others_their_number() -> None:
    with torch.device("meta"):
        for network in (mobilenet_v1, resnext50):
            for rule, same in ((lambda c: constant_width(8, c), "width"), (lambda c: constant_groups(16, c), "number")):
                convs = [m for m in network(rule, 10).modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
                found = {m.in_channels // m.groups if same == "width" else m.groups for m in convs}
                assert found == {8 if same == "width" else 16}
        assert parameters(mobilenet_v1(lambda c: c, 1000)) == parameters(zoo.build("mobilenet_v1"))


def test_resnext50_with_32_groups_is_torchvisions() -> None:
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        theirs = torchvision.models.resnext50_32x4d()
        assert parameters(zoo.build("resnext50_groups32")) == parameters(theirs)


# --- GhostSR -----------------------------------------------------------------------------------------------------


def moved(x: torch.Tensor, moves: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """The shift by a loop over pixels."""
    y = torch.zeros_like(x)
    height, width = x.shape[-2:]
    for channel, (down, right) in enumerate(moves):
        for i in range(height):
            for j in range(width):
                if 0 <= i - down < height and 0 <= j - right < width:
                    y[:, channel, i, j] = x[:, channel, i - down, j - right]
    return y


@pytest.mark.parametrize("reach", [1, 2])
def test_a_learned_shift_freezes_into_the_copy_it_computes(reach: int) -> None:
    torch.manual_seed(0)
    shift = LearnableShift(7, reach).eval()
    nn.init.normal_(shift.logits)
    x = torch.randn(2, 7, 6, 5)
    frozen = shift.freeze()
    assert frozen.moves == shift.moves()
    assert len(set(frozen.moves)) > 2
    assert torch.equal(frozen(x), moved(x, frozen.moves))
    assert torch.allclose(shift(x), frozen(x), atol=1e-6)
    with FlopCounterMode(display=False) as counter:
        frozen(x)
    assert counter.get_total_flops() == 0


def test_the_choice_is_hard_and_its_gradient_soft() -> None:
    shift = LearnableShift(3, temperature=0.7).train()
    nn.init.normal_(shift.logits)
    x, target = torch.randn(1, 3, 6, 6), torch.randn(1, 3, 6, 6)
    torch.manual_seed(1)
    y = shift(x)
    # Hard: every channel is one move of the input.
    for channel in range(3):
        candidates = [moved(x, (move,) * 3)[0, channel] for move in offsets(1)]
        assert any(torch.allclose(y[0, channel], c, atol=1e-6) for c in candidates)
    (y * target).sum().backward()
    # Soft: the gradient of Σ p · <moved, target> with p the softmax of the same noisy logits.
    logits = shift.logits.detach().clone().requires_grad_()
    torch.manual_seed(1)
    noise = -torch.empty_like(logits).exponential_().log()
    p = ((logits + noise) / 0.7).softmax(1)
    gains = torch.stack([(moved(x, (move,) * 3) * target).sum((0, 2, 3)) for move in offsets(1)], 1)
    (p * gains).sum().backward()
    assert logits.grad is not None
    assert torch.allclose(shift.logits.grad, logits.grad, atol=1e-5)


def test_a_shift_is_learned_from_examples() -> None:
    torch.manual_seed(0)
    wanted = ((1, 0), (0, -1), (-1, 1), (0, 0))
    shift = LearnableShift(4)
    optimizer = torch.optim.Adam(shift.parameters(), lr=0.1)
    for _ in range(150):
        x = torch.randn(4, 4, 8, 8)
        loss = (shift(x) - moved(x, wanted)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert shift.freeze().moves == wanted


def test_a_ghost_convolution_is_half_a_convolution_and_its_shifts() -> None:
    torch.manual_seed(0)
    conv = GhostConv(3, 8, learn=True).eval()
    nn.init.normal_(conv.shift.logits)
    x = torch.randn(1, 3, 6, 6)
    y = conv(x)
    assert torch.allclose(y[:, 4:], moved(y[:, :4], conv.shift.moves()), atol=1e-6)
    conv.freeze()
    assert isinstance(conv.shift, Shift)
    assert torch.allclose(conv(x), y, atol=1e-6)
    assert len(set(spread(128).moves)) == 9
    with pytest.raises(InputError, match=r"ghost ratio of 0\.7"):
        GhostConv(3, 8, ratio=0.7)


def test_ghost_edsr_runs_learns_and_enlarges() -> None:
    torch.manual_seed(0)
    model = EDSR(factor=2, blocks=1, width=8, ghost=0.5, learn=True)
    y = model(torch.randn(1, 3, 5, 7))
    assert y.shape == (1, 3, 10, 14)
    y.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert any(p.grad.abs().max() > 0 for n, p in model.named_parameters() if n.endswith("logits"))


def test_clusters_find_one_filter_of_each_kind() -> None:
    torch.manual_seed(0)
    kinds = torch.randn(4, 3, 3, 3) * torch.tensor([1.0, 2.0, 4.0, 8.0]).reshape(4, 1, 1, 1)
    weight = kinds.repeat_interleave(5, 0) + 0.01 * torch.randn(20, 3, 3, 3)
    chosen = intrinsic_filters(weight, 4)
    assert sorted(int(i) // 5 for i in chosen) == [0, 1, 2, 3]
    assert intrinsic_filters(weight, 20).tolist() == list(range(20))
    assert len(set(intrinsic_filters(torch.zeros(6, 1, 3, 3), 3).tolist())) == 3
    with pytest.raises(InputError, match="9 intrinsic of 6 filters"):
        intrinsic_filters(torch.zeros(6, 1, 3, 3), 9)
