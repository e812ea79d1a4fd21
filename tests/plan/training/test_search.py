"""The search: its answer is the best of all that was looked at, and what it says of it is true."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from foretell.cost.energy import power_of
from foretell.errors import InfeasibleError, InputError, UnknownNameError
from foretell.hardware import cluster
from foretell.plan.training import search as module
from foretell.plan.training.rows import Rows, budget_bytes, evaluate, hourly_price, needed_bytes
from foretell.plan.training.search import OBJECTIVES, Candidate, Ranking, search, weigh
from foretell.plan.training.space import Space
from foretell.plan.training.why import differences, why
from foretell.simulate.training import PlanTable, TrainingPlan
from foretell.simulate.training.legality import explain
from foretell.simulate.training.step import PARTS, step
from foretell.workload import llm
from foretell.workload.llm import LLMConfig

CONFIG = llm.config("llama-3-8b")
ON = cluster("2x dgx-h100")
ASKED: Mapping[str, Any] = {"global_batch": 64, "seq_len": 8192}


def everything(objective: str = "time", config: LLMConfig = CONFIG) -> Rows:
    """Every plan that fits, in no order."""
    nodes = (2,) if objective == "time" else (2, 1)
    space = Space(config, ON, TrainingPlan(**ASKED), nodes=nodes)
    parts = [evaluate(space, index, budget_bytes(ON, 0.9)) for index in range(space.blocks)]
    return Rows.concatenate([part.rows for part in parts])


@pytest.fixture(scope="module")
def found() -> Ranking:
    return search(CONFIG, ON, **ASKED)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_first_is_the_best_of_all(objective: str) -> None:
    ranking = search(CONFIG, ON, objective=objective, top=5, **ASKED)
    rows = everything(objective)
    column = rows[OBJECTIVES[objective]]
    assert ranking.fitting == len(rows)
    assert ranking.best[0].value(objective) == column.min()
    values = [one.value(objective) for one in ranking.best]
    assert values == sorted(values)
    degrees = [(one.nodes, *(getattr(one.plan, n) for n in ("tp", "cp", "dp", "pp", "ep"))) for one in ranking.best]
    assert len(set(degrees)) == len(degrees) == 5
    for one in ranking.best:  # each is the best of its degrees
        alike = rows["nodes"] == one.nodes
        for name in ("tp", "cp", "dp", "pp", "ep"):
            alike &= rows.plans[name] == getattr(one.plan, name)
        assert column[alike].min() == one.value(objective)


def test_nothing_that_fits_is_better_than_the_front_in_every_axis(found: Ranking) -> None:
    rows = everything()
    every = np.stack([rows[name] for name in ("time_s", "memory_bytes", "energy_j")], axis=1)
    points = np.array([[one.time_s, one.memory_bytes, one.energy_j] for one in found.front])
    for point in points:
        assert not ((every < point / 1.0101).all(axis=1)).any()
    for row in every[:: len(every) // 200]:
        assert (points <= 1.0101 * row).all(axis=1).any()


def test_figures_of_a_candidate_are_those_of_its_plan_alone(found: Ranking) -> None:
    for one in (*found.best, *found.front[:5]):
        alone = step(CONFIG, one.plan, ON)
        assert one.time_s == pytest.approx(alone.time_s[0], rel=1e-9)
        assert one.mfu == pytest.approx(alone.mfu[0], rel=1e-9)
        assert 0 < one.mfu <= 1
        assert sum(one.parts.values()) == pytest.approx(one.time_s, rel=1e-9)
        assert one.memory_bytes == needed_bytes(CONFIG, PlanTable.of([one.plan]), ON)[0]
        assert one.memory_bytes <= found.budget_bytes == 0.9 * ON.groups[0][1].device.memory_bytes
        assert explain(CONFIG, one.plan, ON) == []
        assert one.tokens_per_s_per_device == pytest.approx(64 * 8192 / one.time_s / 16)


def test_energy_is_of_devices_that_compute_or_wait(found: Ranking) -> None:
    one = found.best[0]
    power = power_of(ON.groups[0][1].device)
    assert power is not None
    busy = one.parts["compute_s"] + one.parts["recompute_s"] + one.parts["optimizer_s"]
    joules = 16 * (busy * 700 + (one.time_s - busy) * (power.idle_w + power.leakage_w))
    assert one.energy_j == pytest.approx(joules)


def test_a_run_in_days_hours_and_dollars(found: Ranking) -> None:
    one = found.best[0]
    run = one.run(15e12)
    assert run.steps == pytest.approx(15e12 / (64 * 8192))
    assert run.time_s == pytest.approx(run.steps * one.time_s)
    assert run.device_hours == pytest.approx(16 * run.time_s / 3600)
    assert run.cost_usd == pytest.approx(run.device_hours * 6.88)  # the catalogue's price of an H100
    assert hourly_price(ON) == pytest.approx(16 * 6.88)


def test_the_difference_of_two_plans_is_that_of_their_parts(found: Ranking) -> None:
    first, second = found.best[:2]
    assert sum(differences(first, second).values()) == pytest.approx(second.time_s - first.time_s, rel=1e-9)
    assert found.why == why(first, second)
    assert "faster than" in found.why[0]


def candidate(plan: TrainingPlan, memory: float = 1e10, **parts: float) -> Candidate:
    every = {name: parts.get(name, 0.0) for name in PARTS}
    return Candidate(plan, 2, sum(every.values()), every, 0.0, memory, 0.5, 1e6, 10.0)


def test_why_says_what_is_saved_and_what_is_paid() -> None:
    one = candidate(TrainingPlan(64, 8192, tp=8, pp=2), compute_s=8.0, bubble_s=0.5, tp_s=1.0)
    two = candidate(TrainingPlan(64, 8192, tp=4, pp=4), 2e10, compute_s=8.0, bubble_s=1.75, tp_s=0.5)
    said = why(one, two)
    assert said == (
        "tp8 pp2 mbs1 zero1 is 7.3 % faster than tp4 pp4 mbs1 zero1: 9.5 s a step instead of 10.2 s.",
        "They differ in tp 8 (4), pp 2 (4).",
        "It saves 1.25 s of the pipeline's bubble (500 ms instead of 1.75 s: 64 micro-batches on 2 stages, not 64 "
        "micro-batches on 4 stages).",
        "In return it spends 500 ms of tensor-parallel communication (1 s instead of 500 ms: tp 8, not 4).",
        "It takes 9.31 GiB less memory on the fullest device.",
    )


def test_why_tells_plans_and_times_apart() -> None:
    plan = TrainingPlan(64, 4096, tp=2, dp=8, zero=3, shard=8, overlap_tp=True)
    parts = dict.fromkeys(PARTS, 0.0)
    one = Candidate(plan, 2, 17.96, parts | {"compute_s": 17.96}, 0.0, 1e10, 0.4, None, None)
    two = Candidate(plan.replace(shard=0), 2, 18.01, parts | {"compute_s": 18.01}, 0.0, 1e10, 0.4, None, None)
    head = why(one, two)[0]
    assert head == ("tp2 dp8 mbs1 zero3 shard8 tp-overlap is 0.3 % faster than tp2 dp8 mbs1 zero3 tp-overlap: "
                    "17.96 s a step instead of 18.01 s.")  # fmt: skip


def test_why_of_money_names_the_machines() -> None:
    one = candidate(TrainingPlan(64, 8192, tp=8), compute_s=8.0)
    two = candidate(TrainingPlan(64, 8192, tp=8, dp=2), compute_s=5.0)
    cheap = Candidate(one.plan, 1, one.time_s, one.parts, 0.0, 1e10, 0.5, 1e6, 8.0)
    assert why(cheap, two, "cost")[0] == (
        "tp8 mbs1 zero1 takes 20 % less money than tp8 dp2 mbs1 zero1: $8.00 a step instead of $10.00, on 1 machine "
        "instead of 2; it is 60 % slower: 8 s a step instead of 5 s."
    )


def test_several_processes_find_the_same(found: Ranking) -> None:
    assert Space(CONFIG, ON, TrainingPlan(**ASKED)).blocks > 1
    again = search(CONFIG, ON, jobs=2, **ASKED)
    assert again.to_dict() == found.to_dict()


def test_pinned_settings_that_break_a_rule_are_named_with_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        search(CONFIG, ON, pinned={"tp": (3,)}, **ASKED)
    assert caught.value.exit_code == 2
    assert "tp 3 does not divide 32 attention heads (rule heads; nearest: --tp 2 or 4)" in str(caught.value)
    assert "--tp 4" in str(caught.value) or "--tp 2" in str(caught.value)
    with pytest.raises(InputError, match=r"tp 8 · cp 1 · dp 4 · pp 1 = 32 devices, the cluster has 16"):
        search(CONFIG, ON, pinned={"tp": (8,), "dp": (4,), "pp": (1,), "cp": (1,)}, **ASKED)
    with pytest.raises(InputError, match=r"rule batch; nearest: .*--global-batch 16"):
        search(CONFIG, ON, global_batch=1, seq_len=1000, pinned={"dp": (16,)})


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"objective": "speed"}, UnknownNameError, "objective"),
        ({"max_memory": 0.0}, InputError, "share of 0"),
        ({"max_memory": 1.5}, InputError, "1% to 100%"),
        ({"framework": "megatorn"}, UnknownNameError, "did you mean 'megatron'"),
        ({"settings": {"precision": "mxfp8"}}, InputError, "h100-sxm has no arithmetic in mxfp8"),
        ({"global_batch": 0}, InputError, "want 1 to"),
    ],
)
def test_wrong_questions(wrong: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        search(CONFIG, ON, **{**ASKED, **wrong})


def test_machines_of_several_kinds_are_refused_with_what_is_possible() -> None:
    with pytest.raises(InputError, match=r"plan each by itself: --on '2x dgx-h100' and --on '1x dgx-a100'"):
        search(CONFIG, cluster("2x dgx-h100 + dgx-a100"), **ASKED)


def test_a_price_that_is_not_known_says_so() -> None:
    on = cluster("2x gaudi-3-8x")
    if hourly_price(on) is not None:
        pytest.skip("the catalogue has its price by now")
    with pytest.raises(InputError, match="an hourly price of its devices is not in the catalogue"):
        search(CONFIG, on, objective="cost", **ASKED)


def test_what_does_not_fit_says_how_much_is_missing_and_what_would_fit() -> None:
    big, on = llm.config("llama-3.1-405b"), cluster("2x dgx-h100")
    asked = {"global_batch": 256, "seq_len": 8192}
    with pytest.raises(InfeasibleError) as caught:
        search(big, on, **asked)
    error = caught.value
    assert error.exit_code == 3
    needed, has, missing = (float(x) for x in re.findall(r"([\d.]+) GiB", error.message)[:3])
    assert needed - has == pytest.approx(missing, abs=1.5)  # three digits of each
    assert has == pytest.approx(0.9 * 79.65, abs=0.1)
    machines = int(re.search(r"(\d+) machines of dgx-h100", str(error.hint))[1])  # type: ignore[index]
    assert search(big, cluster(f"{machines}x dgx-h100"), **asked).fitting > 0
    with pytest.raises(InfeasibleError):
        search(big, cluster(f"{machines // 2}x dgx-h100"), **asked)


def test_what_would_fit_names_the_pin_that_is_in_the_way() -> None:
    large, on = llm.config("llama-3-70b"), cluster("4x dgx-h100")
    pinned = {"tp": (1,), "pp": (1,), "zero": (1,)}
    with pytest.raises(InfeasibleError) as caught:
        search(large, on, pinned=pinned, **ASKED)
    assert "with zero 3 instead of 1" in str(caught.value.hint)
    assert search(large, on, pinned=pinned | {"zero": (3,)}, **ASKED).fitting > 0
    with pytest.raises(InfeasibleError) as caught:
        search(large, on, pinned=pinned | {"micro_batch": (2,), "recompute": ("none",)}, **ASKED)
    assert "none of tp, pp, zero, micro batch, recompute pinned" in str(caught.value.hint)


def test_what_would_fit_names_the_share_of_memory() -> None:
    with pytest.raises(InfeasibleError) as caught:
        search(CONFIG, ON, max_memory=0.1, **ASKED)
    share = int(re.search(r"--max-memory (\d+)%", str(caught.value.hint))[1])  # type: ignore[index]
    assert search(CONFIG, ON, max_memory=share / 100, **ASKED).fitting > 0
    with pytest.raises(InfeasibleError):
        search(CONFIG, ON, max_memory=(share - 1) / 100, **ASKED)


def test_a_plan_of_the_callers_is_weighed(found: Ranking) -> None:
    best = found.best[0]
    assert weigh(CONFIG, ON, best.plan) == best
    with pytest.raises(InputError, match="tp 3 does not divide"):
        weigh(CONFIG, ON, best.plan.replace(tp=3))


def test_twenty_thousand_plans_a_second_on_one_core(within: Any) -> None:
    on = cluster("16x dgx-h100")
    space = Space(llm.config("llama-3-70b"), on, TrainingPlan(1024, 8192))
    budget = budget_bytes(on, 0.9)

    def legal() -> int:
        return sum(evaluate(space, index, budget).legal for index in range(space.blocks))

    plans = legal()
    assert plans > 20_000
    assert within(plans / 20_000, legal) == plans


def test_progress_counts_the_parts() -> None:
    seen: list[tuple[int, int]] = []
    search(CONFIG, ON, progress=lambda _, done, total: seen.append((done, total)), **ASKED)
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))


def test_a_worker_ends_with_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unusual in a worker is not swallowed."""
    def fails(space: Space, index: int, budget: float) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(module, "evaluate", fails)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        search(CONFIG, ON, **ASKED)
