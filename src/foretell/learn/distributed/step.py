"""`train`: one rank's part of some training steps under a plan, in the simulator's own task order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.errors import InputError
from foretell.learn.distributed import model
from foretell.learn.distributed.activations import Activations
from foretell.learn.distributed.wire import Group, Wire
from foretell.learn.distributed.zero import Unit
from foretell.simulate.pipeline import Order, Task, named
from foretell.simulate.training.plan import TrainingPlan
from foretell.simulate.training.stages import layers_of
from foretell.workload.llm.config import LLMConfig

__all__ = ["Outcome", "assemble", "check", "parts_of", "sample", "train"]

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank has to say after its steps.

    `losses` holds, a step, what this rank adds to the mean loss (nothing but on the last stage). `gradients` (of the
    last step) and `parameters` (after it) are this tensor-parallel rank's, by ``PART.WEIGHT``. `sent` is bytes by
    purpose: ``pp``, ``tp``, ``dp``; `messages` their number; both of all steps. `in_flight` has a count a chunk (see
    `foretell.simulate.pipeline.in_flight`), `activation_bytes` is the most that autograd kept at once, `held` the most
    bytes of parameters, gradients and optimiser.
    """

    tp_rank: int
    dp_rank: int
    pp_rank: int
    losses: tuple[float, ...]
    gradients: Arrays
    parameters: Arrays
    sent: Mapping[str, int]
    messages: Mapping[str, int]
    in_flight: tuple[int, ...]
    activation_bytes: int
    held: Mapping[str, int]


def check(config: LLMConfig, plan: TrainingPlan) -> None:
    """Raise InputError for a model or plan that is not run here."""
    model.check(config)
    for name in ("cp", "ep"):
        if getattr(plan, name) != 1:
            raise InputError(f"{name} is {getattr(plan, name)}, and is not run here", "training plan", f"take {name} 1")
    for what, size, degree, by in (
        ("heads", config.heads, "tp", plan.tp),
        ("the MLP's width", config.intermediate, "tp", plan.tp),
        ("vocabulary", config.vocab, "tp", plan.tp),
        ("sequence", plan.seq_len, "tp", plan.tp),
        ("global batch", plan.global_batch, "dp · micro-batch", plan.dp * plan.micro_batch),
    ):
        if size % by:
            raise InputError(f"{what} {size} is no multiple of {degree} = {by}", "training plan")
    if config.layers < plan.pp * plan.vp:
        raise InputError(f"{config.layers} layers for {plan.pp * plan.vp} chunks", "training plan", "take fewer chunks")
    if plan.seq_len > config.position_rows:
        raise InputError(f"{plan.seq_len} tokens and {config.position_rows} positions", "training plan")
    named(plan.schedule, plan.vp).check(plan.pp, plan.vp, plan.micro_batches)


def parts_of(config: LLMConfig, plan: TrainingPlan, stage: int) -> range:
    """Which of `model.kinds` a stage holds: its layers, the first also the embedding, the last also the head."""
    counts = layers_of(config, plan.pp, plan.vp, plan.first_layers, plan.last_layers).sum(-1)
    before = int(counts.T.reshape(-1)[:stage].sum())
    last = stage == plan.pp * plan.vp - 1
    start = 0 if stage == 0 else before + 1
    return range(start, before + 1 + int(counts.T.reshape(-1)[stage]) + last)


def sample(config: LLMConfig, plan: TrainingPlan, step: int, seed: int) -> Tensor:
    """Tokens of one step: (global batch, sequence + 1), the same on every rank."""
    dice = torch.Generator().manual_seed(seed * 7919 + step)
    return torch.randint(config.vocab, (plan.global_batch, plan.seq_len + 1), generator=dice)


def train(
    rank: int,
    config: LLMConfig,
    plan: TrainingPlan,
    *,
    steps: int = 1,
    seed: int = 0,
    dtype: str = "float64",
    rate: float = 0.1,
    momentum: float = 0.9,
    order: Order | None = None,
) -> Outcome:
    """Run `steps` steps as rank `rank` of `plan.devices`; all those ranks must call it together.

    Weights and tokens follow from `seed`. The order of tasks is that of the plan's schedule, or `order`. The loss is
    the mean over all tokens of the global batch. Raises InputError.
    """
    check(config, plan)
    return _Rank(rank, config, plan, seed, getattr(torch, dtype), order).run(steps, rate, momentum)


@dataclass(slots=True)
class _Part:
    """One part of the model on this rank."""

    index: int
    kind: str
    unit: Unit


class _Rank:
    def __init__(
        self, rank: int, config: LLMConfig, plan: TrainingPlan, seed: int, dtype: torch.dtype, order: Order | None
    ) -> None:
        self.config, self.plan, self.seed, self.dtype = config, plan, seed, dtype
        self.tp_rank, self.dp_rank, self.pp_rank = (
            rank % plan.tp, rank // plan.tp % plan.dp, rank // (plan.tp * plan.dp)
        )  # fmt: skip
        self.wire = Wire(rank)
        self.tensor = Group(self.wire, [rank - self.tp_rank + i for i in range(plan.tp)], "tp")
        self.data = Group(self.wire, [rank + plan.tp * (i - self.dp_rank) for i in range(plan.dp)], "dp")
        schedule = named(plan.schedule, plan.vp)
        self.place = partial(schedule.place, plan.pp, plan.vp)
        self.stages = plan.pp * plan.vp
        self.splits = schedule.splits
        self.tasks = (order or schedule.order(plan.pp, plan.vp, plan.micro_batches))[self.pp_rank]
        partial_grads = plan.sequence_parallel and plan.tp > 1
        names = model.kinds(config)
        self.stage_of: dict[int, int] = {}  # chunk → stage
        self.chunks: dict[int, list[_Part]] = {}
        for stage in range(self.stages):
            owner, chunk = self.place(stage)
            if owner != self.pp_rank:
                continue
            self.stage_of[chunk] = stage
            self.chunks[chunk] = [
                _Part(index, names[index], Unit(
                    model.local_weights(model.initial_weights(config, index, seed, dtype), self.tp_rank, plan.tp),
                    self.data, self.tensor, stage=plan.zero, partial=partial_grads,
                ))
                for index in parts_of(config, plan, stage)
            ]  # fmt: skip
        mask = torch.full((plan.seq_len, plan.seq_len), -torch.inf, dtype=dtype).triu(1)
        self.context = model.Context(config, self.tensor, plan.sequence_parallel, plan.recompute, mask)
        self.activations = Activations()
        self.activations.exclude([mask, *(unit.storage for unit in self.units)])
        split = plan.tp if self.context.split_sequence else 1
        self.boundary = torch.empty(plan.seq_len // split, plan.micro_batch, config.hidden, dtype=dtype)
        self.held: Counter[str] = Counter()
        self.passes: dict[tuple[int, int], list[tuple[_Part, Tensor, Tensor]]] = {}
        self.put_off: dict[tuple[int, int], list[tuple[Tensor, Any, list[Any]]]] = {}
        self.handed: dict[int, Tensor] = {}

    @property
    def units(self) -> list[Unit]:
        return [part.unit for parts in self.chunks.values() for part in parts]

    def run(self, steps: int, rate: float, momentum: float) -> Outcome:
        losses = []
        gradients: Arrays = {}
        for step in range(steps):
            self.loss = 0.0
            tokens = sample(self.config, self.plan, step, self.seed)
            for task, after in zip(self.tasks, [*self.tasks[1:], None], strict=True):
                # Layered: a chunk's weights stay, and its gradients wait, while pass after pass is of that chunk.
                stay = self.plan.schedule == "layered" and after is not None and after[:2] == task[:2]
                {"F": self._forward, "B": self._backward, "W": self._weights}[task.kind](task, tokens, stay)
            for unit in self.units:
                unit.close_step()
                self._note()
            if step == steps - 1:
                gradients = self._named(unit.gradients() for unit in self.units)
            for unit in self.units:
                unit.update(rate, momentum)
            self.wire.flush()
            losses.append(self.loss)
        return Outcome(
            self.tp_rank, self.dp_rank, self.pp_rank, tuple(losses), gradients,
            self._named(unit.parameters() for unit in self.units), dict(self.wire.sent), dict(self.wire.messages),
            tuple(self.activations.peak_passes[chunk] for chunk in sorted(self.chunks)),
            self.activations.peak_bytes, dict(self.held),
        )  # fmt: skip

    def _named(self, reports: Iterable[Mapping[str, Tensor]]) -> Arrays:
        """What each unit reports, by ``PART.WEIGHT``."""
        parts = [part for parts in self.chunks.values() for part in parts]
        return {
            f"{part.index}.{name}": tensor.detach().numpy()
            for part, report in zip(parts, reports, strict=True)
            for name, tensor in report.items()
        }

    def _forward(self, task: Task, tokens: Tensor, stay: bool) -> None:
        key = (task.chunk, task.micro_batch)
        stage = self.stage_of[task.chunk]
        batch = self._batch(tokens, task.micro_batch)
        x = batch[:-1] if stage == 0 else self._take("F", stage, task.micro_batch)
        context = self.context
        if self.splits:
            context = replace(context, later=partial(self._later, key))
        kept = self.passes[key] = []
        for part in self.chunks[task.chunk]:
            part.unit.gather()
            self._note()
            entry = x if part.kind == "embedding" else x.detach().requires_grad_()
            with self.activations.of(*key):
                x = model.forward(part.kind, part.unit.weights, entry, context, batch[1:])
            kept.append((part, entry, x))
            if not stay:
                part.unit.release()
        if stage == self.stages - 1:
            self.loss += float(x.detach()) / self.plan.tokens
        else:
            self._give("F", stage + 1, task.micro_batch, x.detach())

    def _backward(self, task: Task, tokens: Tensor, stay: bool) -> None:
        key = (task.chunk, task.micro_batch)
        stage = self.stage_of[task.chunk]
        if stage == self.stages - 1:
            grad = torch.tensor(1.0 / self.plan.tokens, dtype=self.dtype)
        else:
            grad = self._take("B", stage, task.micro_batch)
        kept = self.passes.pop(key)
        while kept:
            part, entry, y = kept.pop()
            part.unit.gather()
            part.unit.open_gradients()
            self._note()
            with self.activations.of(*key):
                torch.autograd.backward(y, grad)
            del y
            if not stay:
                part.unit.release()
                if not self.splits:
                    part.unit.close_pass()
            if entry.grad is not None:
                grad = entry.grad
        if stage > 0:
            self._give("B", stage - 1, task.micro_batch, grad)

    def _weights(self, task: Task, tokens: Tensor, stay: bool) -> None:
        for part in self.chunks[task.chunk]:
            part.unit.open_gradients()
        for weight, gradient, kept in self.put_off.pop((task.chunk, task.micro_batch)):
            assert weight.grad is not None
            weight.grad += gradient(*(getattr(held, "tensor", held) for held in kept))
            del kept[:]
        self._note()
        for part in self.chunks[task.chunk]:
            part.unit.close_pass()

    def _later(self, key: tuple[int, int], weight: Tensor, gradient: Any, tensors: tuple[Tensor, ...]) -> None:
        """A gradient that waits for its ``W``; what it is made of counts as activations until then."""
        kept = [self.activations.hold(tensor, *key) for tensor in tensors]
        self.put_off.setdefault(key, []).append((weight, gradient, kept))

    def _batch(self, tokens: Tensor, micro_batch: int) -> Tensor:
        """This rank's micro-batch: (S + 1, B)."""
        size, count = self.plan.micro_batch, self.plan.micro_batches
        first = (self.dp_rank * count + micro_batch) * size
        return tokens[first : first + size].T.contiguous()

    def _tag(self, kind: str, stage: int, micro_batch: int) -> int:
        """A name for what enters `stage`, forward or backward."""
        return ((micro_batch * self.stages) + stage) * 2 + (kind == "B")

    def _give(self, kind: str, stage: int, micro_batch: int, tensor: Tensor) -> None:
        owner, tag = self.place(stage)[0], self._tag(kind, stage, micro_batch)
        if owner == self.pp_rank:
            self.handed[tag] = tensor
        else:
            self.wire.send(tensor, self._at(owner), "pp", tag)

    def _take(self, kind: str, stage: int, micro_batch: int) -> Tensor:
        tag = self._tag(kind, stage, micro_batch)
        if tag in self.handed:
            return self.handed.pop(tag)
        owner = self.place(stage + (1 if kind == "B" else -1))[0]
        return self.wire.receive(self.boundary, self._at(owner), tag)

    def _at(self, pp_rank: int) -> int:
        return self.wire.rank + (pp_rank - self.pp_rank) * self.plan.tp * self.plan.dp

    def _note(self) -> None:
        now: Counter[str] = Counter()
        for unit in self.units:
            now.update(unit.held())
        for name, count in now.items():
            self.held[name] = max(self.held[name], count)


def assemble(outcomes: Sequence[Outcome], what: str = "gradients") -> Arrays:
    """Whole ``gradients`` or ``parameters`` of the model from those of all ranks, by ``PART.WEIGHT``.

    Data-parallel ranks agree, and so do tensor-parallel ranks on weights that are not split: taken from the first.
    """
    whole: dict[str, dict[int, np.ndarray]] = {}
    for outcome in outcomes:
        if outcome.dp_rank == 0:
            for name, array in getattr(outcome, what).items():
                whole.setdefault(name, {})[outcome.tp_rank] = array
    joined = {}
    for name, pieces in whole.items():
        weight = name.partition(".")[2]
        ordered = [pieces[rank] for rank in sorted(pieces)]
        joined[name] = np.concatenate(ordered, model.SPLIT[weight]) if weight in model.SPLIT else ordered[0]
    return joined
