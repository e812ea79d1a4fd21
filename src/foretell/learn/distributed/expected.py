"""`expected`: what one rank must send and hold in a step, in closed form, without running anything.

Letters as in `foretell.learn.distributed.model`: S, B, H, A, F, V, and t, d, m for tensor-parallel ranks, data-parallel
ranks and micro-batches. A ring sends (n-1)/n of a buffer for an all-gather or a reduce-scatter, twice that for an
all-reduce. Without dropout, a layer keeps 16·S·B·H + A·S²·B values and the 4·S·B statistics of its two norms: what
Korthikanti et al. (arXiv 2205.05198, section 4.1) count, 34·S·B·H + 5·A·S²·B bytes, less its masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from foretell.learn.distributed.model import kinds
from foretell.learn.distributed.step import check, parts_of
from foretell.simulate.pipeline import in_flight, named
from foretell.simulate.training.plan import TrainingPlan
from foretell.workload.llm.config import LLMConfig

__all__ = ["Expected", "expected"]


@dataclass(frozen=True, slots=True)
class Expected:
    """Of one rank and one step; the fields of `foretell.learn.distributed.Outcome` of these names."""

    sent: Mapping[str, int]
    in_flight: tuple[int, ...]
    activation_bytes: int
    held: Mapping[str, int]


def expected(config: LLMConfig, plan: TrainingPlan, rank: int, itemsize: int = 8) -> Expected:
    """What rank `rank` sends and holds in a step whose values take `itemsize` bytes. Raises InputError."""
    check(config, plan)
    pp_rank = rank // (plan.tp * plan.dp)
    schedule = named(plan.schedule, plan.vp)
    stage_of = {}
    for stage in range(plan.pp * plan.vp):
        owner, chunk = schedule.place(plan.pp, plan.vp, stage)
        if owner == pp_rank:
            stage_of[chunk] = stage
    names = kinds(config)
    chunks = {c: [names[i] for i in parts_of(config, plan, stage)] for c, stage in sorted(stage_of.items())}
    passes = in_flight(plan.schedule, plan.pp, plan.vp, plan.micro_batches)[pp_rank]
    return Expected(
        sent=_sent(config, plan, pp_rank, stage_of, chunks, itemsize),
        in_flight=tuple(int(count) for count in passes),
        activation_bytes=_activation_peak(config, plan, pp_rank, chunks, itemsize),
        held=_held(config, plan, chunks, itemsize),
    )


def _split(plan: TrainingPlan) -> bool:
    return plan.sequence_parallel and plan.tp > 1


def _weights(config: LLMConfig, plan: TrainingPlan, kind: str) -> tuple[int, int]:
    """Values of a part's weights on one tensor-parallel rank: those that are split, and those that are not."""
    h, norm = config.hidden, config.hidden * (2 if config.norm_bias else 1)
    if kind == "embedding":
        return config.vocab * h // plan.tp, config.position_rows * h
    if kind == "head":
        return config.vocab * h // plan.tp, norm
    return (4 * h * h + 2 * h * config.intermediate) // plan.tp, 2 * norm


def _flat(config: LLMConfig, plan: TrainingPlan, kind: str) -> int:
    """Values of a part's flat array: padded to a multiple of the data-parallel ranks."""
    return -(-sum(_weights(config, plan, kind)) // plan.dp) * plan.dp


def _sent(
    config: LLMConfig, plan: TrainingPlan, pp_rank: int, stage_of: Mapping[int, int],
    chunks: Mapping[int, list[str]], itemsize: int,
) -> dict[str, int]:  # fmt: skip
    t, d, m = plan.tp, plan.dp, plan.micro_batches
    tokens = plan.seq_len * plan.micro_batch * itemsize
    stream = tokens * config.hidden
    stages = plan.pp * plan.vp
    boundaries = 0
    if plan.pp > 1:
        boundaries = sum((stage < stages - 1) + (stage > 0) for stage in stage_of.values())
    sent = {"pp": m * boundaries * stream // (t if _split(plan) else 1)}

    # Rings of the residual stream a micro-batch: an all-reduce is two. With the sequence split, the gathered input of
    # a product is not kept, and so gathered again for the gradient of its weight.
    rings = {"embedding": 2, "layer": 10, "head": 3} if _split(plan) else {"embedding": 2, "layer": 8, "head": 2}
    if plan.recompute == "full":
        rings["layer"] += 4
    tensor = 0
    for kind in (kind for parts in chunks.values() for kind in parts):
        tensor += m * rings[kind] * stream
        if kind == "head":
            tensor += m * 3 * 2 * tokens  # of each token the largest logit, the sum of exponentials, the wanted logit
        if _split(plan):
            tensor += 2 * _reductions(plan) * _weights(config, plan, kind)[1] * itemsize
    sent["tp"] = tensor * (t - 1) // t

    # Rings of each part's weights a step.
    rings_of_weights = {0: 2, 1: 2, 2: _reductions(plan) + 1, 3: 3 * _reductions(plan)}[plan.zero]
    weights = sum(_flat(config, plan, kind) for parts in chunks.values() for kind in parts)
    sent["dp"] = rings_of_weights * weights * itemsize * (d - 1) // d
    return {purpose: count for purpose, count in sent.items() if count}


def _reductions(plan: TrainingPlan) -> int:
    """How often a part's gradients are reduced: once, or with ZeRO 2 and 3 after each pass, or run of passes."""
    return plan.micro_batches if plan.zero >= 2 and plan.schedule != "layered" else 1


def _held(config: LLMConfig, plan: TrainingPlan, chunks: Mapping[int, list[str]], itemsize: int) -> dict[str, int]:
    parts = {chunk: [_flat(config, plan, kind) for kind in parts] for chunk, parts in chunks.items()}
    every = sum(sum(sizes) for sizes in parts.values())
    own = every // plan.dp
    # What is whole for a while: a part; with layered passes a chunk; with the backward pass in two, all gradients.
    passing = max((sum if plan.schedule == "layered" else max)(sizes) for sizes in parts.values())
    waiting = every if named(plan.schedule, plan.vp).splits else passing
    return {
        "parameters": itemsize * (every if plan.zero < 3 else own + passing),
        "gradients": itemsize * (every if plan.zero < 2 else own + waiting),
        "optimizer": itemsize * (every if plan.zero == 0 else own),
    }


@dataclass(frozen=True, slots=True)
class _Node:
    """One operation and what it keeps for its backward pass: bytes by name.

    `remade` it has only while its backward pass runs (selective recomputation). `gradient`, of products, is the size of
    what meets them going back, which they keep where their weights' gradients wait.
    """

    keeps: Mapping[str, int]
    gradient: int = 0
    remade: Mapping[str, int] = field(default_factory=dict)


def _nodes(config: LLMConfig, plan: TrainingPlan, kind: str, itemsize: int) -> list[_Node]:
    """The operations of a part in the order of the forward pass."""
    t, split = plan.tp, _split(plan)
    tokens = plan.seq_len * plan.micro_batch
    stream = tokens * config.hidden * itemsize
    own = stream // t if split else stream
    moments = 2 * tokens * itemsize // (t if split else 1)
    inner = tokens * config.intermediate * itemsize // t
    logits = tokens * config.vocab * itemsize // t
    where = 9 * tokens  # which word, and whether it is among this rank's: an int64 and a bool
    if kind == "embedding":
        return [_Node({"where": where})]
    if kind == "head":
        return [
            _Node({"x": own, "moments": moments}),
            _Node({"normed": own}, logits),
            _Node({"shares": logits, "where": where}),
        ]
    attention = {"qkv": 3 * stream // t, "chances": plan.micro_batch * config.heads * plan.seq_len**2 * itemsize // t}
    selective = plan.recompute == "selective"
    return [
        _Node({"x": own, "moments1": moments}),
        _Node({"normed1": own}, 3 * stream // t),
        _Node({"joint": 3 * stream // t}, remade=attention) if selective else _Node(attention),
        _Node({"mixed": stream // t}, stream),
        _Node({"x2": own, "moments2": moments}),
        _Node({"normed2": own}, inner),
        _Node({"up": inner}),
        _Node({"gelu": inner}, stream),
    ]


def _activation_peak(
    config: LLMConfig, plan: TrainingPlan, pp_rank: int, chunks: Mapping[int, list[str]], itemsize: int
) -> int:
    """The most bytes kept at once: the schedule's tasks in order, each as the operations it is made of."""
    schedule = named(plan.schedule, plan.vp)
    users: Counter[tuple[int, int, int, str]] = Counter()
    total = peak = 0
    for task in schedule.order(plan.pp, plan.vp, plan.micro_batches)[pp_rank]:
        parts = list(enumerate(chunks[task.chunk]))
        for place, part in parts if task.kind == "F" else reversed(parts):
            nodes = _nodes(config, plan, part, itemsize)
            full = plan.recompute == "full" and part == "layer"
            for change, keeps in _changes(nodes, task.kind, full, schedule.splits):
                for name, size in keeps.items():
                    key = (task.chunk, task.micro_batch, place, name)
                    users[key] += change
                    if users[key] == max(change, 0):  # the first to keep it, or the last to drop it
                        total += change * size
                peak = max(peak, total)
    assert not total, "what is kept is dropped in the end"
    return peak


def _changes(nodes: list[_Node], kind: str, full: bool, splits: bool) -> Iterator[tuple[int, Mapping[str, int]]]:
    """What a task keeps (+1) and drops (-1) of a part; `full`: the part is recomputed whole, from its input."""
    entry = {"x": nodes[0].keeps["x"]} if full else {}
    gradients = [{f"gradient {i}": node.gradient} if splits and node.gradient else {} for i, node in enumerate(nodes)]
    if kind == "F":
        yield from [(1, entry)] if full else [(1, node.keeps) for node in nodes]
    elif kind == "B":
        if full:
            yield from ((1, node.keeps) for node in nodes)
        for node, gradient in zip(reversed(nodes), reversed(gradients), strict=True):
            yield 1, node.remade
            yield 1, gradient
            yield -1, {} if gradient else node.keeps
            yield -1, node.remade
        yield -1, entry
    else:
        for node, gradient in zip(nodes, gradients, strict=True):
            if gradient:
                yield -1, gradient
                yield -1, node.keeps
