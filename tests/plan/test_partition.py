"""Stages and kept activations: equal to trying everything, and never worse than what frameworks do."""

import itertools
from typing import Any

import numpy as np
import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.hardware import cluster
from foretell.plan.training.partition import Layer, Unit, even, in_flight, partition, step_time
from foretell.plan.training.units import adapt, model_layers
from foretell.simulate.training import TrainingPlan
from foretell.simulate.training.memory import by_rank
from foretell.simulate.training.step import stage_times, step
from foretell.workload import llm


def pipeline(forward: list[float], backward: list[float], micro_batches: int) -> float:
    """The exact end of a 1F1B step: each stage's tasks in their order, each when what it needs is there."""
    stages = len(forward)
    orders = []
    for s in range(stages):
        warm = min(micro_batches, stages - 1 - s)
        order = [("f", k) for k in range(warm)]
        for k in range(micro_batches - warm):
            order += [("f", warm + k), ("b", k)]
        orders.append(order + [("b", k) for k in range(micro_batches - warm, micro_batches)])
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(orders[s]):
                kind, k = orders[s][at[s]]
                edge = s == 0 if kind == "f" else s == stages - 1
                need = (("f", s, k) if kind == "b" else None) if edge else (kind, s - 1 if kind == "f" else s + 1, k)
                if need is not None and need not in done:
                    break
                start = max(free[s], done[need] if need else 0.0)
                free[s] = done[kind, s, k] = start + (forward[s] if kind == "f" else backward[s])
                at[s] += 1
    return max(done.values())


def random_layers(rng: np.random.Generator, count: int, kinds: int) -> list[Layer]:
    made = [
        Layer(
            tuple(Unit(f"u{i}", float(rng.uniform(1, 5)), int(rng.integers(1, 60))) for i in range(rng.integers(1, 4))),
            backward_s=float(rng.uniform(4, 20)),
            weight_bytes=int(rng.integers(0, 40)),
            input_bytes=int(rng.integers(0, 10)),
            workspace_bytes=int(rng.integers(0, 10)),
            other_forward_s=float(rng.uniform(0, 2)),
        )
        for _ in range(kinds)
    ]
    return [made[int(i)] for i in rng.integers(0, kinds, count)]


def brute(layers: list[Layer], stages: int, micro_batches: int, memory: int) -> float:
    """The best step over every split and every subset of units."""
    held = in_flight(stages, micro_batches)
    best = np.inf
    for cuts in itertools.combinations(range(1, len(layers)), stages - 1):
        bounds = [0, *cuts, len(layers)]
        forward, backward = [], []
        for s in range(stages):
            part = layers[bounds[s] : bounds[s + 1]]
            units = [u for layer in part for u in layer.units]
            static = sum(x.weight_bytes for x in part) + max(x.workspace_bytes for x in part)
            least = np.inf
            for keep in itertools.product((False, True), repeat=len(units)):
                kept = sum(u.nbytes for u, k in zip(units, keep, strict=True) if k) + sum(x.input_bytes for x in part)
                if static + int(held[s]) * kept <= memory:
                    least = min(least, sum(u.seconds for u, k in zip(units, keep, strict=True) if not k))
            forward.append(sum(x.forward_s for x in part))
            backward.append(sum(x.backward_s for x in part) + least)
        if np.isfinite(backward).all():
            best = min(best, step_time(forward, backward, micro_batches))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_equals_trying_every_split_and_every_subset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(1, 5))
    layers = random_layers(rng, int(rng.integers(stages, 7)), int(rng.integers(1, 4)))
    m, memory = int(rng.integers(1, 9)), int(rng.integers(30, 250))
    best = brute(layers, stages, m, memory)
    if not np.isfinite(best):
        with pytest.raises(InfeasibleError, match="more than"):
            partition(layers, stages=stages, micro_batches=m, memory_bytes=memory)
        return
    found = partition(layers, stages=stages, micro_batches=m, memory_bytes=memory)
    assert found.exact
    assert found.time_s == pytest.approx(best, rel=1e-12)
    assert [found.stages[0].first, found.stages[-1].end] == [0, len(layers)]
    for stage in found.stages:
        assert stage.memory_bytes <= memory


def test_the_random_cases_hold_both_kinds() -> None:
    """Or the test above would say nothing of one of them."""
    feasible = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        stages = int(rng.integers(1, 5))
        layers = random_layers(rng, int(rng.integers(stages, 7)), int(rng.integers(1, 4)))
        feasible.append(np.isfinite(brute(layers, stages, int(rng.integers(1, 9)), int(rng.integers(30, 250)))))
    assert 15 <= sum(feasible) <= 55


@pytest.mark.parametrize("seed", range(20))
def test_never_worse_than_even_splits(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    layers = random_layers(rng, 24, 3)
    tried = 0
    for memory in (700, 1500, 4000):
        for keep in ("all", "none", "fit"):
            try:
                default = even(layers, stages=4, micro_batches=8, memory_bytes=memory, keep=keep)
            except InfeasibleError:
                continue
            found = partition(layers, stages=4, micro_batches=8, memory_bytes=memory)
            assert found.time_s <= default.time_s * (1 + 1e-12)
            tried += 1
    assert tried


def test_the_model_of_a_step_is_exact_for_equal_stages_and_close_for_others() -> None:
    for stages, m in itertools.product((1, 2, 3, 5, 8), (1, 2, 4, 8, 16)):
        uniform = step_time([1.0] * stages, [2.0] * stages, m)
        assert uniform == pytest.approx((m + stages - 1) * 3.0)
        assert uniform == pytest.approx(pipeline([1.0] * stages, [2.0] * stages, m))
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(200):
        stages, m = int(rng.integers(2, 9)), int(rng.integers(1, 33))
        f, b = list(rng.uniform(0.8, 1.2, stages)), list(rng.uniform(1.6, 2.6, stages))
        errors.append(step_time(f, b, m) / pipeline(f, b, m) - 1)
    assert np.abs(errors).max() < 0.1
    assert np.abs(errors).mean() < 0.02


@pytest.mark.parametrize(("f", "b", "end"), [([10, 1], [1, 1], 23), ([1, 1], [1, 10], 24), ([1, 1], [10, 1], 23)])
def test_slow_first_and_last_stages_by_hand(f: list[float], b: list[float], end: float) -> None:
    """Two micro-batches: what is slow in the warm-up or ending is waited for, on whichever side."""
    assert pipeline(f, b, 2) == step_time(f, b, 2) == end


def test_earlier_stages_keep_less_and_get_fewer_layers() -> None:
    """What AdaPipe is about: early stages hold more micro-batches, so they recompute more, and are given less to do."""
    units = tuple(Unit(name, t, b) for name, t, b in (("qkv", 3.0, 30), ("core", 4.0, 50), ("mlp", 7.0, 40)))
    layers = [Layer(units, backward_s=28.0, weight_bytes=100, input_bytes=10)] * 24
    found = partition(layers, stages=4, micro_batches=32, memory_bytes=1600)
    shares = [stage.recompute_s / stage.forward_s for stage in found.stages]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.3
    assert shares[-1] < 0.1
    assert found.layers[0] < found.layers[-1]
    flat = even(layers, stages=4, micro_batches=32, memory_bytes=1600, keep="none")
    assert found.time_s < 0.9 * flat.time_s


def test_more_memory_never_hurts() -> None:
    layers = random_layers(np.random.default_rng(5), 16, 4)
    times = [partition(layers, stages=4, micro_batches=8, memory_bytes=m).time_s for m in (600, 800, 1200, 2000, 9000)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_says_how_much_is_missing_and_that_much_more_is_enough() -> None:
    layers = [Layer((Unit("u", 1.0, 50),), 2.0, weight_bytes=1000, input_bytes=100)] * 6
    # Three stages of two layers; the first holds three micro-batches: 2 · 1000 + 3 · 2 · 100 bytes.
    with pytest.raises(InfeasibleError, match=r"need at least 2.54 KiB a device .*, 612 B more than") as error:
        partition(layers, stages=3, micro_batches=8, memory_bytes=2600 - 612)
    assert error.value.exit_code == 3
    assert partition(layers, stages=3, micro_batches=8, memory_bytes=2600).layers == (2, 2, 2)
    with pytest.raises(InfeasibleError):
        partition(layers, stages=3, micro_batches=8, memory_bytes=2599)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 3}, "give each stage a layer"),
        ({"stages": 0}, "give each stage a layer"),
        ({"micro_batches": 0}, "at least 1"),
        ({"memory_bytes": float("inf")}, "give what a device has"),
        ({"memory_bytes": -1}, "give what a device has"),
        ({"layers": [Layer((Unit("u", float("nan"), 1),), 1.0)] * 2}, "finite"),
        ({"layers": [Layer((Unit("u", 1.0, -1),), 1.0)] * 2}, "not negative"),
    ],
)
def test_wrong_questions_are_refused(change: dict, words: str) -> None:
    layer = Layer((Unit("u", 1.0, 1),), 1.0)
    asked = {"layers": [layer] * 2, "stages": 2, "micro_batches": 2, "memory_bytes": 100, **change}
    with pytest.raises(InputError, match=words):
        partition(asked.pop("layers"), **asked)


def test_even_splits_name_their_choices_and_say_when_they_do_not_fit() -> None:
    layers = [Layer((Unit("u", 1.0, 50),), 2.0)] * 5
    assert even(layers, stages=2, micro_batches=4, memory_bytes=1000, keep="all").layers == (3, 2)
    with pytest.raises(InputError, match="all, none or fit"):
        even(layers, stages=2, micro_batches=4, memory_bytes=1000, keep="some")
    with pytest.raises(InfeasibleError, match="50 B more"):
        even(layers, stages=2, micro_batches=4, memory_bytes=250, keep="all")


def test_a_trillion_parameters_on_64_stages_take_seconds(within: Any) -> None:
    units = tuple(
        Unit(name, t, b * 6553600)
        for name, t, b in (
            *(("norm1", 0.1, 2), ("qkv", 2.1, 6), ("core", 1.3, 2), ("proj", 0.7, 2)),
            *(("norm2", 0.1, 2), ("up", 2.8, 8), ("act", 0.2, 8), ("down", 2.8, 2)),
        )
    )
    block = Layer(units, backward_s=20.2, weight_bytes=int(1.8e10), input_bytes=2 * 6553600)
    first = Layer((Unit("embedding", 0.1, 6553600),), 0.1, weight_bytes=int(3e9))
    head = Layer((Unit("logits", 4.0, 9 * 6553600),), 8.0, weight_bytes=int(3e9))
    layers = [first, *[block] * 126, head]
    found = within(30, lambda: partition(layers, stages=64, micro_batches=512, memory_bytes=64e9))
    assert sum(found.layers) == 128
    assert len(found.stages) == 64


def test_a_models_units_add_up_to_what_the_step_and_the_memory_model_say() -> None:
    """The times are those of `stage_times`, the bytes those of `memory`: units only share them out."""
    on = cluster("8x dgx-a100")
    for name, plan in (
        ("gpt-3-175b", TrainingPlan(64, 4096, tp=8, pp=8)),
        ("llama-2-70b", TrainingPlan(64, 8192, tp=4, pp=8, dp=2)),
        ("gpt-3-175b", TrainingPlan(64, 2048, tp=8, pp=8, attention="unfused", sequence_parallel=False)),
    ):
        config = llm.config(name)
        layers, room = model_layers(config, plan, on)
        times = stage_times(config, plan, on)
        body, each = layers[1], config.layers / plan.pp
        assert each * body.forward_s == pytest.approx(times.forward_s[3, 0], rel=0.02)
        assert each * body.backward_s == pytest.approx(times.backward_s[3, 0], rel=0.02)
        ranks = by_rank(config, plan, on.groups[0][1].device).parts
        kept = plan.pp - 3
        activations = each * (body.input_bytes + sum(unit.nbytes for unit in body.units)) * kept
        assert activations == pytest.approx(ranks["activations"][3], rel=0.08)
        states = sum(ranks[part][3] for part in ("parameters", "gradients", "optimizer"))
        assert each * body.weight_bytes == pytest.approx(states, rel=0.02)
        assert 0.8 * 80 * 2**30 < room < 80 * 2**30


def test_a_model_is_split_to_suit_its_memory() -> None:
    config, on = llm.config("gpt-3-175b"), cluster("8x dgx-a100")
    plan = TrainingPlan(64, 8192, tp=4, pp=16)
    found = adapt(config, plan, on)
    assert sum(found.layers) == config.layers + 2
    shares = [stage.recompute_s / stage.forward_s for stage in found.stages]
    assert shares[0] > shares[8] > shares[-1]
    layers, room = model_layers(config, plan, on)
    asked = {"stages": 16, "micro_batches": 64, "memory_bytes": room, "ends": True}
    with pytest.raises(InfeasibleError):
        even(layers, keep="all", **asked)
    full = even(layers, keep="none", **asked)
    assert full.layers == (7, *[6] * 14, 7)
    assert full.time_s > 1.1 * found.time_s
    # The step model agrees on what full recomputation takes, with the last product of each layer made again too, and
    # with messages, optimiser and the like.
    step_s = step(config, plan.replace(recompute="full"), on).time_s[0]
    assert 0.9 * step_s < full.time_s < step_s


def test_models_that_are_not_modelled_are_refused() -> None:
    on = cluster("8x dgx-a100")
    with pytest.raises(InputError, match="no stack of equal dense layers"):
        adapt(llm.config("mixtral-8x7b"), TrainingPlan(64, 4096, tp=8, pp=8), on)
    with pytest.raises(InputError, match="virtual stages"):
        adapt(llm.config("gpt-3-175b"), TrainingPlan(64, 4096, tp=8, pp=8, vp=2, schedule="interleaved"), on)
    with pytest.raises(InputError, match="give each stage a layer"):
        even([Layer((), 1.0)] * 4, stages=3, micro_batches=1, memory_bytes=1, keep="all", ends=True)
