"""Sums of convolutions, checked against running the convolutions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foretell.transform.affine import Affine, Channelwise, added, affine_of


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Conv2d:
    groups = draw(st.sampled_from((1, 2)))
    kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    return nn.Conv2d(
        4,
        4,
        kernel,
        draw(st.sampled_from((1, 2))),
        (draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        draw(st.sampled_from((1, 2))),
        groups,
        bias=draw(st.booleans()),
        dtype=torch.float64,
    )


def run(conv: Affine, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def sizes(conv: nn.Conv2d, length: int) -> tuple[int, ...]:
    return tuple(
        (length + 2 * p - d * (k - 1) - 1) // s + 1
        for p, d, k, s in zip(conv.padding, conv.dilation, conv.kernel_size, conv.stride, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(convolutions(), convolutions(), st.integers(11, 14))
def test_the_sum_of_two_convolutions_is_what_running_both_gives(a: nn.Conv2d, b: nn.Conv2d, length: int) -> None:
    first, second = affine_of(a), affine_of(b)
    assert first is not None
    assert second is not None
    total = added(first, second)
    if total is None:
        return
    assert isinstance(total, Affine)
    x = torch.randn(2, 4, length, length, dtype=torch.float64)
    assert torch.allclose(run(total, x), a(x) + b(x), atol=1e-12)
    assert total.weight.numel() <= first.weight.numel() + second.weight.numel()


@settings(max_examples=100, deadline=None)
@given(convolutions(), convolutions())
def test_odd_kernels_padded_to_keep_the_size_always_add_up(a: nn.Conv2d, b: nn.Conv2d) -> None:
    """The converse: branches a RepVGG-like block is made of must not be refused."""
    size = 1 + 2 * (a.kernel_size[0] // 2)
    large = nn.Conv2d(4, 4, size, a.stride, size // 2, groups=a.groups, dtype=torch.float64)
    small = nn.Conv2d(4, 4, 1, a.stride, groups=a.groups, bias=b.bias is not None, dtype=torch.float64)
    first, second = affine_of(large), affine_of(small)
    assert first is not None
    assert second is not None
    total = added(second, first)
    assert isinstance(total, Affine)
    x = torch.randn(1, 4, 9, 10, dtype=torch.float64)
    assert torch.allclose(run(total, x), large(x) + small(x), atol=1e-12)
    if a.stride == (1, 1):
        scale, shift = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        with_identity = added(Channelwise(scale, shift), total)
        assert isinstance(with_identity, Affine)
        expected = large(x) + small(x) + x * scale[:, None, None] + shift[:, None, None]
        assert torch.allclose(run(with_identity, x), expected, atol=1e-12)


def affine(*args: object, **kwargs: object) -> Affine:
    found = affine_of(nn.Conv2d(*args, **kwargs))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_what_no_convolution_of_as_little_work_computes_is_refused() -> None:
    three = affine(4, 4, 3, padding=1)
    assert added(three, affine(4, 4, 3, 2, padding=1)) is None  # strides
    assert added(three, affine(4, 4, 3, padding=1, groups=2)) is None  # groups
    assert added(three, affine(4, 8, 3, padding=1)) is None  # channels
    assert added(three, affine(4, 4, 3, padding=0)) is None  # sizes: only a broadcast could add them
    assert added(three, affine(4, 4, 3, padding=2, dilation=2)) is None  # interleaved taps: 5×5 = 25 > 9 + 9
    assert added(affine(4, 4, (3, 1), padding=(1, 0)), affine(4, 4, (1, 3), padding=(0, 1))) is None  # 9 > 3 + 3
    assert added(affine(4, 4, 3, 2, padding=1), Channelwise()) is None  # an identity has stride 1
    assert added(affine(4, 8, 3, padding=1), Channelwise()) is None  # and keeps its channels
    assert added(affine(4, 4, 3), Channelwise()) is None  # and its size


def test_padding_in_words_and_padding_we_cannot_express() -> None:
    assert affine(4, 4, (3, 5), padding="same").padding == (1, 2)
    assert affine(4, 4, 3, padding="valid").padding == (0, 0)
    assert affine_of(nn.Conv2d(4, 4, 2, padding="same")) is None  # one more on one side
    assert affine_of(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")) is None
    hooked = nn.Conv2d(4, 4, 3)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert affine_of(hooked) is None


def test_one_and_three_dimensions() -> None:
    for conv, shape in (
        (nn.Conv1d(4, 4, 3, padding=1, dtype=torch.float64), (2, 4, 9)),
        (nn.Conv3d(4, 4, 3, padding=1, dtype=torch.float64), (2, 4, 5, 6, 7)),
    ):
        first = affine_of(conv)
        assert first is not None
        total = added(first, Channelwise())
        assert isinstance(total, Affine)
        x = torch.randn(shape, dtype=torch.float64)
        assert torch.allclose(total.to_module(conv)(x), conv(x) + x, atol=1e-12)
