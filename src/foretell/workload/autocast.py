"""CUDA's autocast rules, applied to fake CPU tensors.

PyTorch keeps one list of casts per device: CPU autocast leaves layer and group norm, softmax, pow, exp, sum and
interpolation in half precision where CUDA's goes to float32 (lists: ATen/autocast_mode.h, which a PyTorch
installation includes; a test compares them). While `cuda_autocast` is active, the CPU lists are CUDA's; the real ones
are put back afterwards. A test holds the resulting types equal to a forward on fake CUDA tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_KEY = torch._C.DispatchKey.AutocastCPU
_HALF = (torch.float16, torch.bfloat16)

_LOWER = """addmv addr mv prelu chain_matmul linalg_multi_dot"""

_FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"""

# The result type is set to float32 inside the kernel: no separate cast of the operand.
_FP32_RESULT = """prod prod.dim_int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList"""
_FP32_SOFTMAX = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}

# CPU's own lists cast or promote these; CUDA's leave them alone.
_ALONE = """avg_pool3d polar trace view_as_complex quantile nanquantile stft fake_quantize_per_tensor_affine
    _adaptive_avg_pool3d binary_cross_entropy cat stack index_copy"""


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


# Mixed operands are cast to the widest type among them.
_PROMOTE = """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"""


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible and value.dtype != dtype else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(v, dtype) for v in value)
    return value


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return function(*args, **kwargs)

    return call


def _to_lower(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        return op(*_cast(args, dtype), **{k: _cast(v, dtype) for k, v in kwargs.items()})

    return _without_autocast(call)


def _to_fp32(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*_cast(args, torch.float32), **{k: _cast(v, torch.float32) for k, v in kwargs.items()})

    return _without_autocast(call)


def _to_widest(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        wide = any(t.dtype == torch.float32 for t in leaves)
        dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
        return op(*_cast(args, dtype), **{k: _cast(v, dtype) for k, v in kwargs.items()})

    return _without_autocast(call)


def _with_fp32_result(op: Any) -> Callable[..., Any]:
    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype in _HALF and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        return op(x, *args, **kwargs)

    return _without_autocast(call)


def _softmax(op: Any, fused: Any) -> Callable[..., Any]:
    def call(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if x.dtype in _HALF and dtype in (None, torch.float32):
            return fused(x, dim, x.dtype == torch.float16) if x.dtype == torch.float16 else op(x, dim, torch.float32)
        return op(x, dim, dtype)

    return _without_autocast(call)


def _registrations() -> Iterator[tuple[str, Callable[..., Any]]]:
    makers: tuple[tuple[str, Callable[[Any], Callable[..., Any]]], ...] = (
        (_LOWER, _to_lower),
        (_FP32, _to_fp32),
        (_FP32_RESULT, _with_fp32_result),
        (_PROMOTE, _to_widest),
        (_ALONE, _without_autocast),
    )
    for names, maker in makers:
        for name in names.split():
            op = _overload(name)
            if op is not None:
                yield name, maker(op)
    for name, fused in _FP32_SOFTMAX.items():
        yield name, _softmax(_overload(name), getattr(torch.ops.aten, fused).default)


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast fake CPU tensors to `dtype` the way CUDA's autocast would."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding registered kernels is the point
            for name, function in _registrations():
                library.impl(name, function, "AutocastCPU")
        with torch.autocast("cpu", dtype=dtype):
            yield
    finally:
        library._destroy()
