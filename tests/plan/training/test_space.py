"""The space of plans: every row legal and once, and none missing that the page says is tried."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foretell.errors import InputError, UnknownNameError
from foretell.hardware import cluster
from foretell.plan.training.emit import emit
from foretell.plan.training.emit.megatron import arguments
from foretell.plan.training.emit.megatron_assertions import violated
from foretell.plan.training.space import MICRO_BATCHES, PINNABLE, Space, sizes_of, smaller
from foretell.simulate.training import PlanTable, TrainingPlan
from foretell.simulate.training.legality import explain, legal
from foretell.workload import llm
from foretell.workload.llm import LLMConfig, MoE

SMALL = LLMConfig("small", layers=8, hidden=512, heads=8, kv_heads=4, intermediate=2048, vocab=1024)
ROUTED = SMALL.replace(moe=MoE(experts=4, top_k=2, intermediate=1024))


def plans(space: Space) -> list[TrainingPlan]:
    found = []
    for index in range(space.blocks):
        table, _ = space.block(index)
        found += [table.plan(row) for row in range(len(table))]
    return found


@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "fsdp2"])
@pytest.mark.parametrize("config", [SMALL, ROUTED, llm.config("gemma-2-9b"), llm.config("llama-3.1-405b")])
def test_every_plan_is_legal_and_there_once(framework: str, config: LLMConfig) -> None:
    on = cluster("4x dgx-h100")
    space = Space(config, on, TrainingPlan(256, 8192, framework=framework))
    rows = []
    for index in range(space.blocks):
        table, nodes = space.block(index)
        assert legal(config, table, on).all()
        assert (table.devices == 32).all()
        assert (nodes == 4).all()
        rows.append(np.stack([table[name] for name in table.columns], axis=1))
    every = np.concatenate(rows)
    assert len(every) > 100
    assert len(np.unique(every, axis=0)) == len(every)


@pytest.mark.parametrize(
    ("name", "on", "batch", "seq_len"),
    [
        ("llama-3-70b", "16x dgx-h100", 1024, 8192),
        ("mixtral-8x7b", "8x dgx-h100", 256, 4096),
        ("deepseek-v3", "32x dgx-h100", 1024, 4096),
        ("llama-3.1-405b", "64x dgx-h100", 512, 8192),
        ("gemma-2-9b", "4x dgx-h100", 128, 8192),
        ("gpt2-xl", "2x dgx-a100", 128, 1024),
    ],
)
def test_megatron_takes_them(name: str, on: str, batch: int, seq_len: int) -> None:
    """Written as Megatron-LM's arguments, a sample of the plans breaks none of its assertions."""
    config, machines = llm.config(name), cluster(on)
    space = Space(config, machines, TrainingPlan(batch, seq_len))
    chance = np.random.default_rng(0)
    for index in range(space.blocks):
        table, _ = space.block(index)
        for row in chance.choice(len(table), min(len(table), 12), replace=False):
            text = emit("megatron", config, table.plan(int(row)), machines)  # raises where one is broken
            assert violated(arguments(text, "emitted")[0]) == []


@pytest.mark.parametrize(("form", "framework"), [("torchtitan", "fsdp2"), ("deepspeed", "deepspeed")])
@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b"])
def test_other_frameworks_take_them(form: str, framework: str, name: str) -> None:
    config, machines = llm.config(name), cluster("4x dgx-h100")
    space = Space(config, machines, TrainingPlan(256, 4096, framework=framework))
    chance = np.random.default_rng(0)
    for index in range(space.blocks):
        table, _ = space.block(index)
        for row in chance.choice(len(table), min(len(table), 12), replace=False):
            assert emit(form, config, table.plan(int(row)), machines)  # raises where a rule is broken


def _canonical(plan: TrainingPlan) -> TrainingPlan:
    """The plan with what changes nothing in it as the space writes it."""
    changes: dict[str, object] = {}
    if plan.cp == 1:
        changes["context_scheme"] = "ring"
    if plan.tp == 1:
        changes |= {"overlap_tp": False, "sequence_parallel": True}
    if plan.ep == 1:
        changes |= {"dispatcher": "alltoall", "overlap_ep": False}
    if plan.dp * plan.cp == 1:
        changes["zero"] = 1
    if plan.recompute_layers == SMALL.layers // plan.pp:
        changes["recompute_layers"] = 0
    return plan.replace(**changes)


@pytest.mark.parametrize("config", [SMALL, ROUTED])
def test_nothing_is_missing(config: LLMConfig) -> None:
    """All products of settings that the page names, those kept that break no rule, are rows of the space."""
    on = cluster("4x a100-sxm4-80gb")
    base = TrainingPlan(8, 2048)
    space = Space(config, on, base)
    rows = []
    for tp, cp, pp, vp, ep, mbs, zero in itertools.product(
        (1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4) if config.moe else (1,), MICRO_BATCHES, (1, 2, 3)
    ):
        if 4 % (tp * cp * pp):
            continue
        shares = {0, *(round(s * 8 // pp + 1e-9) for s in (0.25, 0.5, 0.75))} - {8 // pp}
        for recompute, layers, scheme, dispatcher, o_tp, o_ep in itertools.product(
            ("none", "full"), shares, ("ring", "a2a", "allgather"), ("alltoall", "deepep"), (False, True), (False, True)
        ):
            rows.append(base.replace(
                tp=tp, cp=cp, pp=pp, dp=4 // (tp * cp * pp), vp=vp, ep=ep, micro_batch=mbs, zero=zero,
                schedule="interleaved" if vp > 1 else "1f1b", recompute=recompute, recompute_layers=layers,
                context_scheme=scheme, dispatcher=dispatcher, overlap_tp=o_tp, overlap_ep=o_ep,
            ))  # fmt: skip
    good = legal(config, PlanTable.of(rows), on)
    wanted = {_canonical(plan) for plan, kept in zip(rows, good, strict=True) if kept}
    assert any(plan.zero == 2 for plan in wanted)
    found = {plan.replace(shard=0) for plan in plans(space)}
    assert len(wanted) > 300
    assert wanted == found


def test_pins_are_kept_and_bring_back_what_is_not_tried() -> None:
    on = cluster("4x dgx-h100")
    pinned = {"tp": (4,), "pp": (2, 4), "zero": (1,), "recompute": ("selective",), "micro_batch": (3,), "dp": (2, 4)}
    space = Space(SMALL, on, TrainingPlan(12, 8192), pinned)
    found = plans(space)
    assert found
    for plan in found:
        assert (plan.tp, plan.zero, plan.recompute, plan.micro_batch) == (4, 1, "selective", 3)
        assert plan.pp in (2, 4)
        assert plan.dp in (2, 4)
    base = TrainingPlan(32, 4096)
    assert {plan.cuda_graph for plan in plans(Space(SMALL, on, base, {"cuda_graph": (True,)}))} == {True}
    uneven = Space(SMALL, on, base, {"pp": (4,), "first_layers": (1,), "last_layers": (1,), "vp": (1,)})
    assert {(p.first_layers, p.last_layers) for p in plans(uneven)} == {(1, 1)}


@pytest.mark.parametrize("name", [n for n in PINNABLE if n not in ("tp", "cp", "dp", "pp")])
def test_every_setting_can_be_pinned_to_its_own_value(name: str) -> None:
    space = Space(ROUTED, cluster("4x dgx-h100"), TrainingPlan(32, 4096), {name: (getattr(TrainingPlan(1, 1), name),)})
    found = plans(space)
    assert {getattr(plan, name) for plan in found} == {getattr(TrainingPlan(1, 1), name)}


def test_wrong_pins_are_refused() -> None:
    on, base = cluster("4x dgx-h100"), TrainingPlan(32, 4096)
    for pinned, said in (
        ({"world": (1,)}, "cannot be pinned"), ({"tp": ()}, "no value is left"), ({"zero": (5,)}, "want 0 to 3"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            Space(SMALL, on, base, pinned)
    with pytest.raises(UnknownNameError, match="did you mean 'ring'"):
        Space(SMALL, on, base, {"context_scheme": ("rign",)})
    with pytest.raises(InputError, match="several kinds"):
        Space(SMALL, cluster("2x dgx-h100 + 2x dgx-a100"), base, nodes=(2,))


def test_where_nothing_is_legal_the_closest_says_why() -> None:
    on = cluster("4x dgx-h100")
    for pinned, rule in (({"tp": (3,)}, "heads"), ({"pp": (16,)}, "layers"), ({"dp": (5,)}, "devices")):
        space = Space(SMALL, on, TrainingPlan(32, 4096), pinned)
        assert plans(space) == []
        nearest = space.closest()
        assert nearest is not None
        rules = {violation.rule for violation in explain(SMALL, nearest, on)}
        assert rule in rules or (rule == "layers" and "stages" in rules)


def test_layers_that_do_not_divide_stand_in_for_embedding_and_loss() -> None:
    config = llm.config("llama-3.1-405b")  # 126 layers
    space = Space(config, cluster("16x dgx-h100"), TrainingPlan(128, 8192), {"tp": (8,), "pp": (16,)})
    ends = {(plan.first_layers, plan.last_layers, plan.vp) for plan in plans(space)}
    assert ends == {(7, 7, 1), (7, 7, 2), (7, 7, 4)}  # 8 chunks would leave one of the first rank's empty


def test_smaller_clusters() -> None:
    on = cluster("6x dgx-h100")
    assert sizes_of(on) == (6, 3, 1)
    assert sizes_of(cluster("2x dgx-h100 + 2x dgx-a100")) == (4,)
    assert smaller(on, 6) is on
    assert smaller(on, 3).device_count == 24
    assert smaller(on, 3).network == on.network
    assert smaller(on, 1).network is None
    space = Space(SMALL, on, TrainingPlan(48, 4096), nodes=(6, 3))
    for index in range(space.blocks):
        table, nodes = space.block(index)
        assert (table.devices == 8 * nodes).all()
    assert set(np.unique(space.degrees["nodes"])) == {3, 6}


def test_a_prime_number_of_layers_leaves_the_last_rank_fewer() -> None:
    """DeepSeek-V3's 61 layers were trained on 16 ranks (arXiv 2412.19437, section 3.2): 15 of 4 layers and one of 1."""
    space = Space(llm.config("deepseek-v3"), cluster("16x dgx-h100"), TrainingPlan(512, 4096),
                  {"pp": (16,), "tp": (1,), "micro_batch": (1,), "zero": (1,)})  # fmt: skip
    tables = [space.block(i)[0] for i in range(space.blocks)]
    last = {int(value) for table in tables for value in table["last_layers"]}
    assert last == {1}
    assert all(legal(space.config, table, space.cluster).all() for table in tables if len(table))
