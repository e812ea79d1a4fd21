"""Attention: the standard operation, and what exporters write for PyTorch's."""

from __future__ import annotations

from foretell.workload.onnx.builder import Builder, Output, dense, row_major
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.ops.movement import concatenate
from foretell.workload.onnx.ops.pointwise import elementwise
from foretell.workload.onnx.ops.registry import FUSED, translates
from foretell.workload.onnx.values import Shape, Value


def sdpa(
    b: Builder, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, window: int = 0
) -> tuple[Value, Value]:
    """Attention of q (…, H, L, D) over k (…, H_kv, S, D), v (…, H_kv, S, D_v): output and log-sum-exp (…, H, L)."""
    assert q.shape is not None
    assert k.shape is not None
    assert v.shape is not None
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or len({len(q.shape), len(k.shape), len(v.shape)}) > 1:
        raise ValueError(f"attention of {q.shape} over {k.shape} and {v.shape}")
    shape = (*q.shape[:-1], v.shape[-1])
    strides = dense(shape, (0, 2, 1, 3)) if len(shape) == 4 else None  # the flash kernel writes (B, L, H, D)
    attrs: dict[str, object] = {"causal": causal, "masked": mask is not None}
    if window > 0:
        attrs["window"] = window
    outputs: list[Output] = [(shape, q.dtype, strides), (shape[:-1], "float32")]
    out, lse = b.emit("foretell.sdpa.default", [q, k, v, mask], outputs, attrs)
    return out, lse


def heads(b: Builder, x: Value, count: int) -> Value:
    """(B, L, H·D) → (B, H, L, D), a view."""
    assert x.shape is not None
    if len(x.shape) == 4:
        return x
    batch, length, width = x.shape
    if count < 1 or width % count:
        raise ValueError(f"{width} features for {count} heads")
    return b.permute(b.reshape(x, (batch, length, count, width // count)), (0, 2, 1, 3), "aten.transpose.int")


def joined(b: Builder, x: Value) -> Value:
    """(B, H, L, D) → (B, L, H·D): a view where the kernel wrote it so."""
    assert x.shape is not None
    batch, count, length, depth = x.shape
    return b.reshape(b.permute(x, (0, 2, 1, 3), "aten.transpose.int"), (batch, length, count * depth))


def extended(b: Builder, past: Value | None, x: Value) -> Value:
    """A cache (B, H, P, D) with new keys or values after it."""
    if past is None or past.shape is None or past.elements == 0:
        return x
    assert x.shape is not None
    shape = (*x.shape[:-2], past.shape[-2] + x.shape[-2], x.shape[-1])
    return concatenate(b, [past, x], shape, x.dtype, 2)


@translates("Attention")
def _attention(b: Builder, n: Node) -> list[Value]:
    """Inputs (q, k, v, mask, past key, past value), of 3 or 4 dimensions."""
    q = heads(b, n.value(0), n.number("q_num_heads", 1))
    k = extended(b, n.input(4), heads(b, n.value(1), n.number("kv_num_heads", 1)))
    v = extended(b, n.input(5), heads(b, n.value(2), n.number("kv_num_heads", 1)))
    out, _ = sdpa(b, q, k, v, n.input(3), bool(n.number("is_causal", 0)))
    flat = len(n.shape(0)) == 3
    results = [joined(b, out) if flat else out, k, v]
    if len(n.outputs) > 3 and n.outputs[3]:
        assert q.shape is not None
        assert k.shape is not None
        results += b.emit("aten.bmm.default", [q, b.transpose(k)], [((*q.shape[:-1], k.shape[-2]), q.dtype)])
    return results


@translates("Attention", domain=FUSED)
def _spelled_out(b: Builder, n: Node) -> list[Value]:
    """Inputs (q, k or its transpose, v, mask): ``scaled_dot_product_attention``, put together again."""
    q, k, v = n.value(0), n.value(1), n.value(2)
    if n.number("k_transposed", 0):
        k = b.transpose(k)
    return [sdpa(b, q, k, v, n.input(3), bool(n.number("is_causal", 0)))[0]]


@translates("RotaryEmbedding")
def _rotary(b: Builder, n: Node) -> list[Value]:
    return [elementwise(b, "foretell.rotary.default", n.inputs, (n.shape(0), n.value(0).dtype))]


@translates("SwiGLU")
def _swiglu(b: Builder, n: Node) -> list[Value]:
    return [elementwise(b, "foretell.swiglu.default", n.inputs, n.out())]


def split_last(b: Builder, x: Value, sizes: list[int]) -> list[Value]:
    """Views of parts of the last dimension."""
    assert x.shape is not None
    if sum(sizes) != x.shape[-1]:
        raise ValueError(f"{x.shape[-1]} features do not split into {sizes}")
    strides = x.strides or row_major(x.shape)
    parts: list[tuple[Shape, Shape | None]] = [((*x.shape[:-1], size), strides) for size in sizes]
    return b.views("aten.split_with_sizes.default", x, parts)
