"""Every schedule, ZeRO stage, tensor-parallel form and recomputation, run by several processes.

The oracle is a GPT written again here, plainly, in one process and on the whole batch, with autograd's own products
and losses; bytes and counts are held to closed forms.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from foretell.errors import InputError
from foretell.learn.distributed import Outcome, Workers, assemble, expected, train
from foretell.learn.distributed.model import initial_weights, kinds
from foretell.learn.distributed.step import sample
from foretell.simulate.pipeline import REGISTRY, in_flight, named
from foretell.simulate.training.plan import SCHEDULES, TrainingPlan
from foretell.workload.llm.config import LLMConfig

GPT = LLMConfig(
    "tiny", layers=4, hidden=32, heads=4, intermediate=128, vocab=64, gated=False, activation="gelu", norm="layer",
    norm_bias=True, positions="learned", position_rows=16,
)  # fmt: skip
BASE: dict[str, Any] = {"global_batch": 8, "seq_len": 16}
VP = {"interleaved": 2, "layered": 2}

CASES: dict[str, dict[str, Any]] = {"one process": {}}
for _schedule in SCHEDULES:
    for _recompute in ("none", "selective", "full"):
        CASES[f"{_schedule} {_recompute}"] = {
            "schedule": _schedule, "recompute": _recompute, "pp": 2, "vp": VP.get(_schedule, 1), "micro_batch": 2
        }  # fmt: skip
    for _zero in (0, 1, 2, 3):
        CASES[f"{_schedule} zero{_zero}"] = {
            "schedule": _schedule, "zero": _zero, "dp": 2, "pp": 2, "vp": VP.get(_schedule, 1), "recompute": "full"
        }  # fmt: skip
for _sequence in (False, True):
    for _recompute in ("none", "selective", "full"):
        CASES[f"tp sequence={_sequence} {_recompute}"] = {
            "tp": 2, "sequence_parallel": _sequence, "recompute": _recompute, "micro_batch": 2
        }  # fmt: skip
CASES |= {
    **{f"zero{zero} alone": {"dp": 4, "zero": zero, "micro_batch": 2} for zero in range(4)},
    "tp, pp": {"tp": 2, "pp": 2, "schedule": "zero-bubble", "micro_batch": 2},
    "tp, zero 3": {"tp": 2, "dp": 2, "zero": 3, "recompute": "selective"},
    "tp 4": {"tp": 4, "sequence_parallel": True, "micro_batch": 4},
    "pp 4": {"pp": 4, "schedule": "1f1b"},
    "pp 4, zero bubble": {"pp": 4, "schedule": "zero-bubble"},
    "layered accumulation": {"dp": 2, "vp": 4, "schedule": "layered", "zero": 3},
    "uneven stages": {"pp": 2, "first_layers": 1},
    "fewer micro-batches than ranks": {"pp": 4, "micro_batch": 4},
}


def whole_weights() -> dict[str, torch.Tensor]:
    """All weights, as leaves."""
    return {
        f"{index}.{name}": weight.requires_grad_()
        for index in range(len(kinds(GPT)))
        for name, weight in initial_weights(GPT, index, 0, torch.float64).items()
    }


def plain_loss(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The same GPT in other words: batch first, plain linear layers, softmax and cross-entropy."""
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    size = GPT.hidden // GPT.heads
    x = weights["0.tokens"][tokens[:, :-1]] + weights["0.positions"][:length]
    for i in range(1, GPT.layers + 1):
        normed = functional.layer_norm(x, (GPT.hidden,), weights[f"{i}.norm1"], weights[f"{i}.norm1_bias"])
        joint = functional.linear(normed, weights[f"{i}.qkv"]).view(batch, length, GPT.heads, 3, size)
        q, k, v = joint.permute(3, 0, 2, 1, 4)
        scores = (q @ k.mT / math.sqrt(size)).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, GPT.hidden)
        x = x + functional.linear(mixed, weights[f"{i}.project"])
        normed = functional.layer_norm(x, (GPT.hidden,), weights[f"{i}.norm2"], weights[f"{i}.norm2_bias"])
        x = x + functional.linear(functional.gelu(functional.linear(normed, weights[f"{i}.up"])), weights[f"{i}.down"])
    head = GPT.layers + 1
    normed = functional.layer_norm(x, (GPT.hidden,), weights[f"{head}.norm"], weights[f"{head}.norm_bias"])
    logits = functional.linear(normed, weights[f"{head}.logits"])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Truth:
    """Two steps in this process: losses, gradients of each, weights after each."""

    def __init__(self) -> None:
        weights = whole_weights()
        optimizer = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)
        self.losses, self.gradients, self.parameters = [], [], []
        for step in range(2):
            optimizer.zero_grad()
            loss = plain_loss(weights, sample(GPT, TrainingPlan(**BASE), step, 0))
            loss.backward()
            self.losses.append(loss.item())
            self.gradients.append({name: weight.grad.numpy().copy() for name, weight in weights.items()})
            optimizer.step()
            self.parameters.append({name: weight.detach().numpy().copy() for name, weight in weights.items()})


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], atol: float = 1e-14) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=atol, err_msg=name)
        assert np.abs(array).max() > 1e3 * atol, f"{name} is too small to tell"


def loss(outcomes: list[Outcome], step: int = 0) -> float:
    return sum(outcome.losses[step] for outcome in outcomes if outcome.tp_rank == 0)


@pytest.mark.parametrize("case", CASES)
def test_a_plan_does_what_one_process_does_and_sends_and_holds_what_is_expected(
    case: str, workers: Workers, truth: Truth
) -> None:
    plan = TrainingPlan(**BASE | CASES[case])
    outcomes = workers.run(train, plan.devices, GPT, plan)
    assert loss(outcomes) == pytest.approx(truth.losses[0], abs=1e-13)
    same(assemble(outcomes), truth.gradients[0])
    same(assemble(outcomes, "parameters"), truth.parameters[0])
    for rank, outcome in enumerate(outcomes):
        wanted = expected(GPT, plan, rank)
        assert outcome.sent == wanted.sent
        assert outcome.in_flight == wanted.in_flight
        assert outcome.activation_bytes == wanted.activation_bytes
        assert outcome.held == wanted.held
    if plan.devices == 1:
        assert outcomes[0].sent == {}  # no parallelism, no communication


def test_every_schedule_there_is_is_run() -> None:
    named("1f1b")
    assert {case["schedule"] for case in CASES.values() if "schedule" in case} == set(REGISTRY) == set(SCHEDULES)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_momentum_is_kept_from_step_to_step(zero: int, workers: Workers, truth: Truth) -> None:
    plan = TrainingPlan(**BASE, zero=zero, dp=2, pp=2)
    outcomes = workers.run(two_steps, plan.devices, plan)
    assert [loss(outcomes, step) for step in (0, 1)] == pytest.approx(truth.losses, abs=1e-13)
    same(assemble(outcomes), truth.gradients[1])
    same(assemble(outcomes, "parameters"), truth.parameters[1])
    for rank, outcome in enumerate(outcomes):
        assert outcome.sent == {name: 2 * count for name, count in expected(GPT, plan, rank).sent.items()}


def two_steps(rank: int, plan: TrainingPlan) -> Outcome:
    return train(rank, GPT, plan, steps=2)


def test_single_precision_sends_and_holds_half(workers: Workers, truth: Truth) -> None:
    plan = TrainingPlan(**BASE, tp=2, pp=2)
    outcomes = workers.run(single, plan.devices, plan)
    same(assemble(outcomes), truth.gradients[0], atol=1e-6)
    for rank, outcome in enumerate(outcomes):
        assert outcome.sent == expected(GPT, plan, rank, itemsize=4).sent
        assert outcome.activation_bytes == expected(GPT, plan, rank, itemsize=4).activation_bytes


def single(rank: int, plan: TrainingPlan) -> Outcome:
    return train(rank, GPT, plan, dtype="float32")


def test_figures_that_can_be_checked_by_eye(workers: Workers) -> None:
    """One rank of two that hold four layers: S·B·H is 512 values, a layer's attention A·S²·B 1,024, its moments 64."""
    layer = 8 * (16 * 512 + 1024 + 64)
    where = 9 * 16
    head = 8 * (2 * 512 + 32 + 16 * 64) + where
    one, two = workers.run(train, 2, GPT, TrainingPlan(**BASE, pp=2))
    assert one.activation_bytes == 2 * (2 * layer + where)  # two micro-batches in flight
    assert two.activation_bytes == 2 * layer + head  # one
    assert one.sent == two.sent == {"pp": 8 * 8 * 512}  # eight micro-batches, forward from one, backward from the other
    assert one.messages == {"pp": 8}
    one, two = workers.run(train, 2, GPT, TrainingPlan(**BASE, pp=2, recompute="full"))
    # Inputs of the other micro-batch's two layers, and of this one's first; then all that its last layer keeps.
    assert one.activation_bytes == 2 * where + 3 * 8 * 512 + layer


def test_korthikanti_counts_the_same_less_dropout(workers: Workers) -> None:
    """Section 4 of arXiv 2205.05198 in bytes a value of 2: S·B·H·(10 + 24/t + 5·A·S/(H·t)), over t with SP.

    Its masks, of one byte: two of S·B·H and one of A·S²·B; the masked probabilities A·S²·B of two bytes.
    """
    s, b, h, a = 16, 1, GPT.hidden, GPT.heads
    grow = {sequence: [] for sequence in (False, True)}
    for sequence, found in grow.items():
        for layers in (2, 4):
            plan = TrainingPlan(**BASE, tp=2, sequence_parallel=sequence)
            (outcome, _) = workers.run(train, 2, GPT.replace(layers=layers), plan)
            found.append(outcome.activation_bytes)
    for sequence, (two, four) in grow.items():
        published = s * b * h * ((34 + 5 * a * s / h) / 2 if sequence else 10 + 24 / 2 + 5 * a * s / h / 2)
        masks = (2 * s * b * h / (2 if sequence else 1)) + 3 * a * s * s * b / 2
        moments = 4 * s * b / (2 if sequence else 1) * 2  # they leave out the norms' means and deviations
        assert (four - two) / 2 == 8 / 2 * (published - masks + moments)


def test_layered_accumulation_gathers_a_layer_once_not_once_a_micro_batch(workers: Workers) -> None:
    one_by_one = TrainingPlan(**BASE, dp=2, zero=3)
    layered = one_by_one.replace(schedule="layered", vp=4)
    found = [workers.run(train, 2, GPT, plan)[0] for plan in (one_by_one, layered)]
    micro_batches = one_by_one.micro_batches
    assert micro_batches == 4
    assert found[0].messages["dp"] == 3 * micro_batches * (GPT.layers + 2)
    assert found[1].messages["dp"] == 3 * (GPT.layers + 2)
    assert found[0].sent["dp"] == micro_batches * found[1].sent["dp"]


def test_sharded_states_fall_with_the_ranks(workers: Workers) -> None:
    held = {
        dp: workers.run(train, dp, GPT, TrainingPlan(**BASE, dp=dp, zero=3))[0].held["optimizer"] for dp in (1, 2, 4)
    }
    assert held[1] == 2 * held[2] == 4 * held[4]


def test_interleaving_sends_more_as_its_authors_say(workers: Workers) -> None:
    """Narayanan et al., section 2.2: v chunks a rank, v times the messages (a rank of the middle has both ends)."""
    sent = {}
    for vp in (1, 2):
        outcomes = workers.run(train, 2, GPT, TrainingPlan(**BASE, pp=2, vp=vp, schedule="1f1b"))
        sent[vp] = sum(outcome.messages["pp"] for outcome in outcomes)
        assert [list(outcome.in_flight) for outcome in outcomes] == in_flight("1f1b", 2, vp, 8).tolist()
    assert sent[1] == 8 * 2 * (2 - 1)
    assert sent[2] == 8 * 2 * (2 * 2 - 1)


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        ({"tp": 3}, {}, "heads 4 is no multiple of tp = 3"),
        ({"cp": 2}, {}, "cp is 2, and is not run here"),
        ({"dp": 3}, {}, "global batch 8 is no multiple"),
        ({"pp": 8}, {}, "4 layers for 8 chunks"),
        ({"seq_len": 32}, {}, "32 tokens and 16 positions"),
        ({"vp": 2, "schedule": "gpipe"}, {}, "a rank holds one chunk"),
        ({}, {"gated": True}, "gated is True"),
        ({}, {"norm": "rms"}, "norm is 'rms'"),
    ],
)
def test_what_is_not_run_is_refused(change: dict[str, Any], model: dict[str, Any], message: str) -> None:
    plan = TrainingPlan(**BASE | change)
    for function in (train, lambda rank, *rest: expected(*rest, rank)):
        with pytest.raises(InputError, match=message):
            function(0, GPT.replace(**model), plan)
