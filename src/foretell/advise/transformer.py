"""Transformer shapes that a GPU likes: each product's tiles and waves, rules that a shape breaks, better shapes nearby.

Q. Anthony et al., The Case for Co-Designing Model Architectures with Hardware, ICPP 2024. Sizes: b sequences of s
tokens, hidden h, a heads, t GPUs that share each layer (tensor parallelism), p pipeline stages.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from foretell.advise.bench import held, step_time_s
from foretell.advise.edit import Edit
from foretell.cost import Estimate
from foretell.cost import estimate as estimated
from foretell.cost.model import AUTO, Settings
from foretell.cost.program import lower
from foretell.errors import InputError, unknown
from foretell.graph import Graph, Op
from foretell.hardware import Device
from foretell.workload import llm
from foretell.workload.llm import LLMConfig

SCHEMA = "foretell.shapes/1"
SOURCE = "Anthony et al., The Case for Co-Designing Model Architectures with Hardware, ICPP 2024"

#: How attention is run: one kernel that keeps scores on chip, or products and a softmax between them.
ATTENTIONS = ("fused", "products")

#: Elements that sizes should be multiples of: beyond 128 bytes of 16-bit values nothing more is gained.
ALIGNED = 64
#: A gain below this is less than a cost model can tell shapes apart by.
LEAST = 0.01
_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
_MOST_CANDIDATES = 2000


@dataclass(frozen=True, slots=True)
class Setting:
    """How a transformer is trained: what its products' sizes follow from beside its own shape."""

    batch: int = 4
    seq_len: int = 2048
    tensor_parallel: int = 1
    stages: int = 1
    precision: str = "bf16"
    attention: str = "fused"

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "tensor_parallel", "stages"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}", "how it is trained", "give at least 1")
        if self.attention not in ATTENTIONS:
            raise unknown("way to run attention", self.attention, ATTENTIONS)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of the forward pass on one GPU: `batch` of (m, k) · (k, n), run `count` times a step.

    `alignment` is the largest power of two, up to 64, that divides the lengths of all its rows in memory. `fill` is
    the share of the tiles' area that is no padding, `waves` how many rounds of tiles the multiprocessors make and
    `wave_fill` how full these are on average; None where the cost model chose no tile. `efficiency` is the share of
    the peak that is reached.
    """

    name: str
    batch: int
    m: int
    n: int
    k: int
    count: int
    alignment: int
    tile: tuple[int, int] | None
    fill: float | None
    waves: float | None
    wave_fill: float | None
    efficiency: float
    time_s: float


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a shape breaks: the size it is about, its value, and what it should be a multiple of."""

    size: str
    value: float
    multiple: int
    why: str


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape near the one given. `gain` is the rise of tokens a second, counted at equal parameters.

    Of two models the one with fewer parameters is faster for that alone, so throughput is multiplied by parameters.
    """

    config: LLMConfig
    time_s: float
    tokens_per_s: float
    gain: float
    changes: MappingProxyType[str, tuple[int, int]]
    violations: tuple[Violation, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What there is to say of a transformer's shape on a device; `better` is sorted, best first."""

    config: LLMConfig
    setting: Setting
    estimate: Estimate
    tokens_per_s: float
    products: tuple[Product, ...]
    violations: tuple[Violation, ...]
    better: tuple[Shape, ...]
    tried: int
    within: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, schema ``foretell.shapes/1`` (documented in docs/schema.md)."""
        setting = self.setting
        return {
            "schema": SCHEMA,
            "model": self.config.name,
            "device": self.estimate.device,
            "batch": setting.batch,
            "seq_len": setting.seq_len,
            "tensor_parallel": setting.tensor_parallel,
            "stages": setting.stages,
            "precision": setting.precision,
            "attention": setting.attention,
            "parameters": self.config.parameters,
            "time_s": self.estimate.time_s,
            "tokens_per_s": self.tokens_per_s,
            "products": [
                {
                    "name": p.name, "batch": p.batch, "m": p.m, "n": p.n, "k": p.k, "count": p.count,
                    "alignment": p.alignment, "tile": None if p.tile is None else list(p.tile), "fill": p.fill,
                    "waves": p.waves, "wave_fill": p.wave_fill, "efficiency": p.efficiency, "time_s": p.time_s,
                }
                for p in self.products
            ],
            "violations": [_violation(v) for v in self.violations],
            "tried": self.tried,
            "within": self.within,
            "better": [
                {
                    "changes": {name: list(pair) for name, pair in shape.changes.items()},
                    "parameters": shape.config.parameters, "time_s": shape.time_s,
                    "tokens_per_s": shape.tokens_per_s, "gain": shape.gain,
                    "violations": [_violation(v) for v in shape.violations],
                }
                for shape in self.better
            ],
            "source": SOURCE,
        }  # fmt: skip


def _violation(v: Violation) -> dict[str, Any]:
    return {"size": v.size, "value": v.value, "multiple": v.multiple, "why": v.why}


def shapes(
    config: LLMConfig,
    device: Device,
    setting: Setting | None = None,
    *,
    within: float = 0.02,
    count: int = 5,
    model: str = AUTO,
) -> Shapes:
    """What training `config` on `device` reaches, and the `count` best shapes of as many parameters (± `within`).

    Raises InputError where the heads or widths cannot be shared by the GPUs, or the device is no GPU.
    """
    setting = setting or Setting()
    if device.kind != "gpu" or device.multiprocessors is None:
        why = "is no GPU" if device.kind != "gpu" else "has an unknown number of multiprocessors"
        raise InputError(f"{why}: tiles and waves are a GPU's", device.name, "name one of foretell devices")
    if not 0.0 <= within <= 0.1:
        raise InputError(f"{within:g} of the parameters", "--within", "give a share from 0 to 0.1")
    trouble = _unshared(config, setting)
    if trouble:
        raise InputError(trouble, f"llm:{config.name}", "give another --tp or --pp")
    graph = training_graph(config, setting)
    estimate = estimated(graph, device, model=model)
    cost_model = held(estimate.model)
    base_s = step_time_s(graph, device, cost_model, "eager")
    tokens = setting.batch * setting.seq_len
    rate = tokens / estimate.time_s
    parameters = config.parameters
    found: list[Shape] = []
    tried = 0
    for other in nearby(config, setting, within):
        tried += 1
        ratio = base_s / step_time_s(training_graph(other, setting), device, cost_model, "eager")
        changes = {name: (getattr(config, name), getattr(other, name)) for name in _SIZES}
        found.append(
            Shape(
                config=other,
                time_s=estimate.time_s / ratio,
                tokens_per_s=rate * ratio,
                gain=ratio * other.parameters / parameters - 1.0,
                changes=MappingProxyType({name: pair for name, pair in changes.items() if pair[0] != pair[1]}),
                violations=tuple(violations(other, setting)),
            )
        )
    better = sorted((s for s in found if s.gain >= LEAST), key=lambda s: (-s.gain, len(s.changes), s.config.layers))
    return Shapes(
        config=config,
        setting=setting,
        estimate=estimate,
        tokens_per_s=rate,
        products=tuple(products(graph, device, model=estimate.model)),
        violations=tuple(violations(config, setting)),
        better=tuple(better[:count]),
        tried=tried,
        within=within,
    )


_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")


# --- rules ----------------------------------------------------------------------------------------------------------


def violations(config: LLMConfig, setting: Setting) -> Iterator[Violation]:
    """The rules that the shape breaks, in the order of the paper's section on what to choose."""
    t = setting.tensor_parallel
    checks = (
        ("vocabulary", config.vocab, ALIGNED, "the logits' rows are that long"),
        ("size of a head", config.query_dim, ALIGNED, "products inside attention sum over it"),
        ("hidden / t", config.hidden / t, ALIGNED, "projections on one GPU are that wide"),
        ("intermediate / t", config.intermediate / t, ALIGNED, "the MLP on one GPU is that wide"),
        ("tokens b · s", setting.batch * setting.seq_len, ALIGNED, "every projection has that many rows"),
        ("b · a / t", setting.batch * config.heads / t, 1, "each GPU runs that many products in attention"),
        ("layers", config.layers, setting.stages, "pipeline stages should take equally long"),
    )
    for size, value, multiple, why in checks:
        if value % multiple:
            yield Violation(size, float(value), multiple, why)


def _unshared(config: LLMConfig, setting: Setting) -> str | None:
    """Why `tensor_parallel` GPUs cannot share the model; None where they can."""
    t = setting.tensor_parallel
    for name in ("heads", "intermediate", "hidden"):
        if getattr(config, name) % t:
            return f"{name} {getattr(config, name)} are no multiple of {t} GPUs"
    if config.moe is not None and (config.moe.intermediate % t or config.moe.shared_intermediate % t):
        return f"experts' width {config.moe.intermediate} is no multiple of {t} GPUs"
    if config.kv_heads % t and t % config.kv_heads:
        return f"{config.kv_heads} heads of keys cannot be shared by {t} GPUs"
    return None


# --- graphs and products --------------------------------------------------------------------------------------------


def training_graph(config: LLMConfig, setting: Setting) -> Graph:
    """One training step on one of `tensor_parallel` GPUs, each with its heads, part of the MLP and of the vocabulary.

    What the GPUs send each other is left out: it is the same for all shapes with as many layers and hidden values.
    """
    t = setting.tensor_parallel
    if t > 1:
        moe = config.moe
        if moe is not None:
            moe = dataclasses.replace(
                moe, intermediate=moe.intermediate // t, shared_intermediate=moe.shared_intermediate // t
            )
        config = config.replace(
            moe=moe,
            heads=config.heads // t,
            kv_heads=max(1, config.kv_heads // t),
            head_dim=config.head_dim,
            intermediate=config.intermediate // t,
            vocab=math.ceil(config.vocab / t),
        )
    graph = llm.graph(
        config, phase="train", batch=setting.batch, seq_len=setting.seq_len, precision=setting.precision
    )
    return graph if setting.attention == "fused" else unfused(graph)


def unfused(graph: Graph) -> Graph:
    """`graph` with each fused attention as two products and a softmax, and four and its gradient in backward."""
    edit = Edit(graph)
    for index, op in enumerate(graph.ops):
        if op.kind != "attention":
            continue
        edit.drop(index)
        backward = op.phase == "backward"
        given = op.inputs[1:] if backward else op.inputs
        (b, a, s, d), (_, _, keys, _) = (edit.tensors[t].shape for t in given[:2])
        value = edit.tensors[given[2]].shape[3]

        def new(*shape: int, like: int = op.inputs[0], lead: int = b * a) -> int:
            return edit.tensor((lead, *shape), like)

        q, k, v, scores, out = new(s, d), new(d, keys), new(keys, value), new(s, keys), new(s, value)
        if not backward:
            edit.put(index, "aten.bmm.default", (q, k), (scores,))
            edit.put(index, "aten._softmax.default", (scores,), (scores,), MappingProxyType({"dim": -1}))
            edit.put(index, "aten.bmm.default", (scores, v), (out,))
            continue
        vt, scores_t = new(value, keys), new(keys, s)
        edit.put(index, "aten.bmm.default", (out, vt), (scores,))
        edit.put(index, "aten.bmm.default", (scores_t, out), (v,))
        attrs = MappingProxyType({"dim": -1})
        edit.put(index, "aten._softmax_backward_data.default", (scores, scores), (scores,), attrs)
        edit.put(index, "aten.bmm.default", (scores, new(keys, d)), (q,))
        edit.put(index, "aten.bmm.default", (scores_t, q), (new(keys, d),))
    return edit.graph()


def alignment(*lengths: int) -> int:
    """The largest power of two, up to 64, that divides all of them.

    >>> alignment(2560, 80), alignment(50257), alignment(4096)
    (16, 1, 64)
    """
    return math.gcd(ALIGNED, *lengths)


def products(graph: Graph, device: Device, *, model: str) -> Iterator[Product]:
    """Each matrix product of the forward pass, dearest first; fused attention as the two it stands for."""
    cost_model = held(model)
    program = lower(graph, "eager")
    times = cost_model.op_times(program, device, Settings.of(graph, "eager"))
    rows = [
        i
        for i, op in enumerate(graph.ops)
        if op.phase == "forward" and op.gemm is not None and op.macs
    ]
    busy = times.busy_s
    sms = float(device.multiprocessors or 1)
    for i in sorted(rows, key=lambda i: -busy[i] * graph.ops[i].repeat):
        op = graph.ops[i]
        detail = {name: float(column[i]) for name, column in times.details.items()}
        efficiency = float(min(1.0, times.ideal_s[i] / busy[i])) if busy[i] > 0 else 0.0
        for name, batch, m, n, k, share in _parts(op, graph):
            tile: tuple[int, int] | None = None
            fill = waves = last = None
            if op.kind != "attention" and detail.get("tile_m"):
                tile = (int(detail["tile_m"]), int(detail["tile_n"]))
                tiles = batch * math.ceil(m / tile[0]) * math.ceil(n / tile[1])
                fill = batch * m * n / (tiles * tile[0] * tile[1])
                waves = detail["blocks"] / sms
                last = waves / math.ceil(waves)
            aligned = alignment(n, k)
            time_s = float(busy[i]) * op.repeat * share
            yield Product(name, batch, m, n, k, op.repeat, aligned, tile, fill, waves, last, efficiency, time_s)


def _parts(op: Op, graph: Graph) -> Iterator[tuple[str, int, int, int, int, float]]:
    """(name, batch, m, n, k, share of the op's time) of the products an op does."""
    assert op.gemm is not None
    batch, m, n, k = op.gemm
    name = op.module.rpartition(".")[2] or op.name.split(".")[1]
    if op.kind != "attention":
        inside = op.kind == "batched_matmul" and not op.module.endswith(("_proj", "lm_head"))
        yield (("scores" if k < n else "mix") if inside else name), batch, m, n, k, 1.0
        return
    value = graph.tensors[op.inputs[2]].shape[-1]
    yield "scores", batch, m, n, k, k / (k + value)
    yield "mix", batch, m, value, n, value / (k + value)


# --- search ---------------------------------------------------------------------------------------------------------


def nearby(config: LLMConfig, setting: Setting, within: float) -> Iterator[LLMConfig]:
    """Shapes of as many parameters (± `within`), the one given left out.

    Varied are heads (the widths of all together stay), hidden and layers (by up to an eighth), the MLP's width (as
    close to its share of hidden as multiples allow); heads change by at most a factor of four, and the vocabulary is
    padded. A shape breaks no rule that the one given keeps.
    """
    target = config.parameters
    broken = {v.size for v in violations(config, setting)}
    own = tuple(getattr(config, name) for name in _SIZES)
    square = config.mla is None and config.heads * config.head_dim == config.hidden
    hiddens = _around(config.hidden, ALIGNED * setting.tensor_parallel) if square else [config.hidden]
    depths = range(math.ceil(config.layers * 7 / 8), config.layers * 9 // 8 + 1) if square else ()
    layers = [n for n in depths if n % setting.stages == 0] or [config.layers]
    vocab = _up(config.vocab, ALIGNED * setting.tensor_parallel)
    made = 0
    for hidden, depth in itertools.product(hiddens, layers):
        widths = _widths(config, hidden, setting)
        for (heads, kv_heads, head_dim), width in itertools.product(_heads(config, hidden), widths):
            sizes = (depth, hidden, heads, kv_heads, head_dim, width, vocab)
            if sizes == own:
                continue
            other = config.replace(**dict(zip(_SIZES, sizes, strict=True)))
            if abs(other.parameters / target - 1.0) > within or _unshared(other, setting):
                continue
            if not {v.size for v in violations(other, setting)} <= broken:
                continue
            made += 1
            if made > _MOST_CANDIDATES:
                return
            yield other


def _around(size: int, step: int) -> list[int]:
    """`size` and the multiples of `step` within an eighth of it."""
    low, high = math.ceil(size * 7 / 8 / step), math.floor(size * 9 / 8 / step)
    every = max(1, (high - low) // 8)
    return sorted({size, *(n * step for n in range(low, high + 1, every))})


def _heads(config: LLMConfig, hidden: int) -> Iterator[tuple[int, int, int]]:
    """(heads, heads of keys, size of a head) whose widths stay in proportion to the hidden size."""
    if config.mla is not None:
        yield config.heads, config.kv_heads, config.head_dim
        return
    wide = config.heads * config.head_dim * hidden // config.hidden
    sharing = config.heads // config.kv_heads
    for head_dim in sorted({*_HEAD_DIMS, config.head_dim}):
        if wide % head_dim or (config.rotary_dim or 0) > head_dim:
            continue
        heads = wide // head_dim
        if heads % sharing == 0 and config.heads <= 4 * heads and heads <= 4 * config.heads:
            yield heads, heads // sharing, head_dim


def _widths(config: LLMConfig, hidden: int, setting: Setting) -> list[int]:
    """Widths of the MLP: in proportion to hidden, and the multiples of 64 and 256 (a GPU's part) next to that."""
    wanted = config.intermediate * hidden / config.hidden
    found = set()
    for multiple in (ALIGNED * setting.tensor_parallel, 4 * ALIGNED * setting.tensor_parallel):
        found |= {math.floor(wanted / multiple) * multiple, math.ceil(wanted / multiple) * multiple}
    if wanted == int(wanted):
        found.add(int(wanted))
    return sorted(width for width in found if width > 0)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
