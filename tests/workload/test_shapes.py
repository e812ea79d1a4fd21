"""The shortcuts give what PyTorch's own fake implementation gives."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from foretell.workload.shapes import SHAPES  # noqa: E402

aten = torch.ops.aten


def described(outputs: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: (tuple(t.shape), t.dtype, t.stride(), t.device), outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm(dtype: Any, channels_last: bool, training: bool, affine: bool) -> None:
    with FakeTensorMode():
        layout = torch.channels_last if channels_last else torch.contiguous_format
        x = torch.empty(2, 8, 5, 6, dtype=dtype, memory_format=layout)
        weight, bias = (torch.empty(8), torch.empty(8)) if affine else (None, None)
        mean, var = torch.empty(8), torch.empty(8)
        forward = aten.native_batch_norm.default
        arguments = (x, weight, bias, mean, var, training, 0.1, 1e-5)
        ours, theirs = described(SHAPES[forward](*arguments)), described(forward(*arguments))
        assert ours[0] == theirs[0]
        if dtype is torch.float32:
            assert ours == theirs
        else:  # cuDNN keeps statistics in float32, PyTorch's decomposition in the input's type
            assert [o[0] for o in ours] == [t[0] for t in theirs]
            assert ours[1][1] is torch.float32
        backward = aten.native_batch_norm_backward.default
        for wanted in ([True, True, True], [False, True, True], [True, False, False]):
            saved = (torch.empty(8), torch.empty(8)) if training else (torch.empty(0), torch.empty(0))
            arguments = (x, x, weight, mean, var, *saved, training, 1e-5, wanted)
            ours, theirs = described(SHAPES[backward](*arguments)), described(backward(*arguments))
            # PyTorch's decomposition makes the input's gradient unasked; its kernels do not
            assert ours == tuple(t if flag else None for t, flag in zip(theirs, wanted, strict=True))
