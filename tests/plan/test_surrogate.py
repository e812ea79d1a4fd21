"""Search by a surrogate: against exhaustive search and chance; Shapley values against their axioms."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.hardware import cluster
from foretell.plan.training import surrogate
from foretell.plan.training.surrogate import Space, random_search, search, shapley
from foretell.plan.training.units import Achieved
from foretell.simulate.training import TrainingPlan
from foretell.simulate.training.step import step
from foretell.workload import llm

SPACE = Space(
    {
        "tp": (1, 2, 4, 8),
        "pp": (1, 2, 4, 8, 16),
        "micro_batch": (1, 2, 4, 8),
        "accumulate": (1, 2, 4, 8, 16, 32),
        "zero": (0, 1),
        "nodes": (4, 8, 16),
    }
)


def tflops(at: dict[str, Any]) -> float | None:
    """A step's rate in the manner of pipelined training: bubble, tensor-parallel cost, kernel size, memory."""
    tp, pp, b, m = at["tp"], at["pp"], at["micro_batch"], at["accumulate"]
    state = 320 / (tp * pp) * (0.4 if at["zero"] else 1.0)
    if state + 6 * b / tp * min(pp, m) / pp * 4 > 64:
        return None
    bubble = (pp - 1) / (m + pp - 1)
    kernels = b / (b + 0.7 * tp**0.5)
    return 100 * (1 - bubble) * kernels / (1 + 0.06 * (tp - 1) + (0.5 if tp > 4 else 0)) / (1 + 0.002 * at["nodes"])


def best_of(objective: Any, space: Space) -> float:
    values = [objective(dict(zip(space.knobs, v, strict=True))) for v in itertools.product(*space.knobs.values())]
    return max(value for value in values if value is not None)


def test_finds_the_best_of_a_small_space_with_a_part_of_its_evaluations() -> None:
    space = Space({k: SPACE.knobs[k] for k in ("tp", "pp", "micro_batch")})

    def objective(at: dict[str, Any]) -> float | None:
        return tflops({**at, "accumulate": 16, "zero": 1, "nodes": 4})

    best = best_of(objective, space)
    for seed in range(5):
        assert search(objective, space, budget=30, seed=seed).value == pytest.approx(best)
    whole = search(objective, space, budget=500, seed=0)
    assert len(whole.trials) == space.size == 80
    assert whole.value == best


def test_beats_random_search_on_average() -> None:
    best = best_of(tflops, SPACE)
    guided, chance = [], []
    for seed in range(6):
        found = search(tflops, SPACE, budget=50, seed=seed)
        guided.append(found.value / best)
        chance.append(random_search(tflops, SPACE, budget=50, seed=seed).value / best)
        assert len({trial.point for trial in found.trials}) == len(found.trials) == 50
    assert np.mean(guided) > 0.97
    assert np.mean(guided) > np.mean(chance) + 0.1


def test_failures_repel_the_search_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(tflops, SPACE, budget=60, seed=1)
    assert 0 < found.failed < 60
    assert found.failed == sum(tflops(dict(trial.at)) is None for trial in found.trials)
    # Without a view of what fails, it runs into it more often.
    careful = [search(tflops, SPACE, budget=40, seed=seed).failed for seed in range(4)]
    monkeypatch.setattr(surrogate, "CAUTION", 0)
    careless = [search(tflops, SPACE, budget=40, seed=seed).failed for seed in range(4)]
    assert np.mean(careful) < 0.8 * np.mean(careless)
    monkeypatch.undo()

    def raises(at: dict[str, Any]) -> float | None:
        value = tflops(at)
        if value is None:
            raise InfeasibleError("out of memory")
        return value

    assert search(raises, SPACE, budget=60, seed=1).trials == found.trials


def test_batches_are_as_many_trials_and_deterministic() -> None:
    found = search(tflops, SPACE, budget=50, batch=4, seed=2)
    assert len(found.trials) == 50
    assert found.trials == search(tflops, SPACE, budget=50, batch=4, seed=2).trials
    assert found.trials != search(tflops, SPACE, budget=50, batch=4, seed=3).trials
    assert found.value > 0.9 * best_of(tflops, SPACE)


def test_shapley_values_of_a_linear_function_are_its_terms() -> None:
    rng = np.random.default_rng(0)
    w = np.array([3.0, -2.0, 0.0, 1.0])
    points, background = rng.random((20, 4)), rng.random((30, 4))
    values = shapley(lambda x: x @ w, points, background)
    assert values == pytest.approx((points - background.mean(axis=0)) * w)


def test_shapley_values_add_up_and_share_equally() -> None:
    rng = np.random.default_rng(1)
    points, background = rng.random((10, 4)), rng.random((15, 4))

    def crossed(x: np.ndarray) -> np.ndarray:
        return np.exp(x[:, 0]) * x[:, 1] + x[:, 0] * x[:, 1]

    values = shapley(crossed, points, background)
    assert values.sum(axis=1) == pytest.approx(crossed(points) - crossed(background).mean())
    assert values[:, 2:] == pytest.approx(0)  # knobs that do nothing
    symmetric = shapley(lambda x: x[:, 0] * x[:, 1], np.array([[0.5, 0.5, 0.1]]), np.zeros((1, 3)))
    assert symmetric[0].tolist() == pytest.approx([0.125, 0.125, 0.0])  # equal knobs, equal parts


def test_importance_ranks_knobs_by_what_they_matter() -> None:
    space = Space({name: tuple(range(6)) for name in ("much", "some", "none")})
    found = search(lambda at: 10.0 * at["much"] + 3.0 * at["some"], space, budget=40, seed=0)
    shares = found.importance()
    assert list(shares) == ["much", "some", "none"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["much"] == pytest.approx(10 / 13, abs=0.1)
    assert shares["none"] < 0.05
    flat = search(lambda at: 1.0, space, budget=10, seed=0)
    assert max(flat.importance().values()) == 0


def test_large_spaces_are_sampled() -> None:
    space = Space({f"k{i}": tuple(range(8)) for i in range(8)})
    found = search(lambda at: -sum((v - 3) ** 2 for v in at.values()), space, budget=60, seed=0)
    assert found.value > random_search(lambda at: -sum((v - 3) ** 2 for v in at.values()), space, budget=60).value


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(InputError, match="no knobs"):
        Space({})
    with pytest.raises(InputError, match="give each once"):
        Space({"a": (1, 1)})
    with pytest.raises(InputError, match="budget"):
        search(tflops, SPACE, budget=0)
    with pytest.raises(InputError, match="batches"):
        search(tflops, SPACE, budget=5, batch=0)
    with pytest.raises(InputError, match="return None"):
        search(lambda at: math.nan, SPACE, budget=5)
    with pytest.raises(InputError, match="exact for up to"):
        shapley(lambda x: x[:, 0], np.zeros((1, 11)), np.zeros((1, 11)))
    nothing = search(lambda at: None, SPACE, budget=8)
    with pytest.raises(InfeasibleError, match="none of 8"):
        _ = nothing.best


def test_the_simulator_is_an_objective() -> None:
    config, on = llm.config("opt-13b"), cluster("4x dgx-a100")
    base = TrainingPlan(64, 2048, recompute="full", precision="fp16")
    objective = Achieved(config, base, on)
    value = objective({"tp": 4, "pp": 2, "micro_batch": 2, "accumulate": 8, "zero": 1})
    plan = base.replace(tp=4, pp=2, dp=4, micro_batch=2, zero=1, global_batch=64)
    found = step(config, plan, on)
    assert value == float(found.flops_per_device[0] / found.time_s[0])
    assert objective({"tp": 1, "pp": 1, "zero": 0}) is None  # 208 GB of states
    assert objective({"tp": 3}) is None  # 40 heads, 32 devices
    assert objective({"tp": 16, "pp": 4}) is None  # more than there are
    assert objective({"tp": 2, "pp": 16, "accumulate": 16}) is None  # 40 layers: a rule says no
    assert objective({"tp": 4, "pp": 2, "nodes": 2}) is not None
    space = Space({"tp": (1, 2, 4, 8), "pp": (1, 2, 4), "micro_batch": (1, 2, 4), "zero": (0, 1)})
    values = [objective(dict(zip(space.knobs, v, strict=True))) for v in itertools.product(*space.knobs.values())]
    feasible = [v for v in values if v is not None]
    assert 10 < len(feasible) < space.size
    assert search(objective, space, budget=30, seed=0).value > 0.99 * max(feasible)
