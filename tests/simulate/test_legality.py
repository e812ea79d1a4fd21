"""The rules of legality, against the frameworks' own assertions written out plan by plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.hardware import Cluster, cluster
from foretell.simulate.training import CHOICES, PlanTable, TrainingPlan
from foretell.simulate.training.legality import KINDS, RULES, Violation, divisors, explain, illegal, legal, supports
from foretell.workload import llm
from foretell.workload.llm import LLMConfig

DENSE = llm.config("llama-3-70b")
EXPERTS = llm.config("mixtral-8x7b")
WINDOWS = llm.config("gemma-2-9b")
LEARNED = llm.config("gpt2")
H100 = cluster("2x dgx-h100")


def broken(plan: TrainingPlan, config: LLMConfig = DENSE, on: Cluster = H100) -> set[str]:
    column = illegal(config, PlanTable.of([plan]), on)[:, 0]
    return {rule.name for rule, wrong in zip(RULES, column, strict=True) if wrong}


BASE = TrainingPlan(64, 8192, tp=4, dp=2, pp=2)

# A plan of 16 devices that breaks exactly one rule, and one like it that does not.
CASES: dict[str, tuple[TrainingPlan, TrainingPlan, LLMConfig, Cluster]] = {
    "devices": (BASE.replace(dp=1), BASE, DENSE, H100),
    "batch": (BASE.replace(micro_batch=3), BASE.replace(micro_batch=4), DENSE, H100),
    "sequence": (
        BASE.replace(cp=2, dp=1, seq_len=8194, sequence_parallel=False),
        BASE.replace(cp=2, dp=1, seq_len=8196, sequence_parallel=False), DENSE, H100,
    ),
    "sequence-parallel": (
        BASE.replace(seq_len=8194), BASE.replace(seq_len=8194, sequence_parallel=False), DENSE, H100,
    ),
    "positions": (
        TrainingPlan(64, 2048, dp=16), TrainingPlan(64, 1024, dp=16), LEARNED, H100,
    ),
    "heads": (
        TrainingPlan(64, 1024, tp=8, dp=2), TrainingPlan(64, 1024, tp=4, dp=4),
        LLMConfig("odd", layers=4, hidden=1536, heads=12, kv_heads=4, intermediate=6144, vocab=1000), H100,
    ),
    "kv-heads": (
        TrainingPlan(64, 1024, tp=4, dp=4), TrainingPlan(64, 1024, tp=2, dp=8),
        LLMConfig("odd", layers=4, hidden=1536, heads=12, kv_heads=6, intermediate=6144, vocab=1000), H100,
    ),
    "width": (
        TrainingPlan(64, 1024, tp=4, dp=4), TrainingPlan(64, 1024, tp=2, dp=8),
        LLMConfig("odd", layers=4, hidden=1536, heads=12, intermediate=6146, vocab=1000), H100,
    ),
    "multiples": (
        TrainingPlan(64, 1024, tp=4, dp=4, precision="fp8"), TrainingPlan(64, 1024, tp=2, dp=8, precision="fp8"),
        LLMConfig("odd", layers=4, hidden=1536, heads=12, intermediate=6176, vocab=1000), H100,
    ),
    "layers": (
        TrainingPlan(64, 1024, pp=16), TrainingPlan(64, 1024, pp=16, first_layers=1, last_layers=1),
        LLMConfig("odd", layers=30, hidden=1536, heads=12, intermediate=6144, vocab=1000), H100,
    ),
    "stages": (
        TrainingPlan(64, 1024, pp=16, framework="fsdp2", zero=3),
        TrainingPlan(64, 1024, pp=8, dp=2, framework="fsdp2", zero=3),
        LLMConfig("odd", layers=12, hidden=1536, heads=12, intermediate=6144, vocab=1000), H100,
    ),
    "interleaving": (BASE.replace(vp=2), BASE.replace(vp=2, schedule="interleaved"), DENSE, H100),
    "zero-bubble": (
        BASE.replace(schedule="zero-bubble", framework="fsdp2", zero=3),
        BASE.replace(schedule="zero-bubble", framework="fsdp2", zero=3, vp=2), DENSE, H100,
    ),
    "both-sequences": (
        BASE.replace(framework="deepspeed", cp=2, dp=1, context_scheme="a2a"),
        BASE.replace(framework="deepspeed", cp=2, dp=1, context_scheme="a2a", sequence_parallel=False), DENSE, H100,
    ),
    "groups": (
        BASE.replace(pp=4, dp=1, global_batch=62, vp=2, schedule="interleaved"),
        BASE.replace(pp=4, dp=1, global_batch=64, vp=2, schedule="interleaved"), DENSE, H100,
    ),
    "two-ranks": (
        BASE.replace(vp=2, schedule="interleaved", overlap_p2p=False),
        BASE.replace(pp=4, dp=1, vp=2, schedule="interleaved", overlap_p2p=False), DENSE, H100,
    ),
    "experts": (
        TrainingPlan(64, 4096, dp=16, ep=16), TrainingPlan(64, 4096, dp=16, ep=8), EXPERTS, H100,
    ),
    "expert-ranks": (
        TrainingPlan(64, 4096, dp=4, pp=4, ep=8), TrainingPlan(64, 4096, tp=8, dp=2, ep=8), EXPERTS, H100,
    ),
    "expert-sequences": (
        TrainingPlan(64, 4096, tp=2, dp=8, sequence_parallel=False), TrainingPlan(64, 4096, tp=2, dp=8), EXPERTS, H100,
    ),
    "dispatcher": (
        TrainingPlan(64, 4096, dp=8, ep=8, dispatcher="deepep"), TrainingPlan(64, 4096, dp=8, ep=8), EXPERTS,
        cluster("mi300x-8x"),
    ),
    "expert-overlap": (
        TrainingPlan(64, 4096, dp=16, overlap_ep=True), TrainingPlan(64, 4096, dp=16, ep=8, overlap_ep=True), EXPERTS,
        H100,
    ),
    "tensor-overlap": (
        BASE.replace(overlap_tp=True, sequence_parallel=False), BASE.replace(overlap_tp=True), DENSE, H100,
    ),
    "exchanged-heads": (
        BASE.replace(tp=8, cp=2, dp=1, pp=1, context_scheme="a2a"),
        BASE.replace(tp=4, cp=2, dp=2, pp=1, context_scheme="a2a"), DENSE, H100,
    ),
    "windows": (
        TrainingPlan(64, 4096, cp=2, dp=8), TrainingPlan(64, 4096, cp=2, dp=8, context_scheme="allgather"), WINDOWS,
        H100,
    ),
    "unfused": (
        BASE.replace(cp=2, dp=1, attention="unfused"), BASE.replace(attention="unfused"), DENSE, H100,
    ),
    "recomputed": (
        BASE.replace(recompute="full", recompute_layers=41), BASE.replace(recompute="full", recompute_layers=40),
        DENSE, H100,
    ),
    "graphs": (BASE.replace(cuda_graph=True, recompute="full"), BASE.replace(cuda_graph=True), DENSE, H100),
    "shard": (
        TrainingPlan(64, 4096, dp=16, zero=3, shard=5), TrainingPlan(64, 4096, dp=16, zero=3, shard=8), DENSE, H100,
    ),
    "zero": (BASE.replace(zero=2), BASE.replace(zero=2, pp=1, dp=4), DENSE, H100),
    "fsdp": (BASE.replace(framework="fsdp2"), BASE.replace(framework="fsdp2", zero=3), DENSE, H100),
    "precision": (BASE.replace(precision="mxfp8"), BASE.replace(precision="fp8"), DENSE, H100),
    "schedule": (
        BASE.replace(schedule="gpipe"), BASE.replace(schedule="gpipe", framework="fsdp2", zero=3), DENSE, H100,
    ),
    "scheme": (
        BASE.replace(framework="deepspeed", cp=2, dp=1, sequence_parallel=False),
        BASE.replace(framework="deepspeed", cp=2, dp=1, context_scheme="a2a", sequence_parallel=False), DENSE, H100,
    ),
}  # fmt: skip


def test_every_rule_has_a_case_and_is_one_of_the_kinds() -> None:
    assert [rule.name for rule in RULES] == list(dict.fromkeys(rule.name for rule in RULES))
    assert {rule.name for rule in RULES} == set(CASES)
    assert {rule.kind for rule in RULES} == set(KINDS)
    assert all(rule.source and rule.mends for rule in RULES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_broken_alone_and_said_with_its_numbers(name: str) -> None:
    wrong, right, config, on = CASES[name]
    assert broken(right, config, on) == set()
    assert broken(wrong, config, on) == {name}
    (found,) = explain(config, wrong, on)
    assert isinstance(found, Violation)
    assert found.rule == name
    assert "{" not in found.reason
    assert found.nearest
    assert found.plans
    for plan in found.plans:
        assert broken(plan, config, on) == set(), plan
    assert explain(config, right, on) == []


def test_nearest_settings_are_named() -> None:
    (one,) = explain(DENSE, BASE.replace(micro_batch=3), H100)
    assert one.nearest.startswith("micro_batch 2 or 4")
    assert "global_batch 60 or 66" in one.nearest
    assert "(6 at a time)" in one.reason
    found = {v.rule: v for v in explain(DENSE, BASE.replace(tp=3), H100)}
    assert found["heads"].reason == "tp 3 does not divide 64 attention heads"
    assert found["heads"].nearest == "tp 2 or 4"
    assert found["devices"].nearest == "tp 4"
    assert {plan.tp for plan in found["devices"].plans} <= {2, 4}
    (one,) = explain(DENSE, BASE.replace(zero=3), H100)
    assert one.nearest == "zero 1; pp 1"
    assert any(plan.zero == 1 and plan.pp == 2 for plan in one.plans)


def test_the_plans_offered_differ_and_the_nearest_comes_first() -> None:
    plans = explain(DENSE, BASE.replace(tp=3), H100)[0].plans
    assert len(plans) == len(set(map(str, plans))) == 3


def _asserted(config: LLMConfig, plan: TrainingPlan, devices: int) -> bool:
    """What Megatron-LM asserts (arguments.py, TransformerConfig, schedules.py), one after the other."""
    model_parallel = plan.tp * plan.cp * plan.pp
    if devices % model_parallel or devices // model_parallel != plan.dp:
        return False
    if plan.global_batch % (plan.micro_batch * plan.dp):
        return False
    if config.heads % plan.tp or (config.kv_heads % plan.tp and plan.tp % config.kv_heads):
        return False
    if config.intermediate % plan.tp:
        return False
    if plan.cp > 1 and plan.seq_len % (2 * plan.cp):
        return False
    if plan.tp > 1 and plan.sequence_parallel and plan.seq_len // plan.cp % plan.tp:
        return False
    if config.layers % plan.pp or config.layers // plan.pp % plan.vp:
        return False
    if plan.vp > 1 and (plan.schedule != "interleaved" or plan.pp < 2):
        return False
    if plan.schedule == "interleaved":
        if plan.vp == 1:
            return False
        if plan.global_batch // (plan.micro_batch * plan.dp) % plan.pp:
            return False
        if not plan.overlap_p2p and plan.pp <= 2:
            return False
    if plan.recompute_layers and (plan.recompute != "full" or plan.recompute_layers > config.layers // plan.pp):
        return False
    if plan.overlap_tp and not (plan.sequence_parallel and plan.tp > 1):
        return False
    return not (plan.pp > 1 and plan.zero > 1)


_COUNTS = st.sampled_from([1, 2, 3, 4, 5, 8, 16])


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        TrainingPlan,
        global_batch=st.sampled_from([12, 16, 64, 96]),
        seq_len=st.sampled_from([1000, 1024, 4096]),
        micro_batch=st.sampled_from([1, 2, 3]),
        tp=_COUNTS, cp=st.sampled_from([1, 2, 4]), dp=_COUNTS, pp=_COUNTS, vp=st.sampled_from([1, 2, 5]),
        schedule=st.sampled_from(["1f1b", "interleaved"]),
        zero=st.integers(0, 3),
        sequence_parallel=st.booleans(), overlap_p2p=st.booleans(), overlap_tp=st.booleans(),
        recompute=st.sampled_from(["none", "full"]), recompute_layers=st.sampled_from([0, 1, 50]),
    ),
    st.sampled_from([DENSE, llm.config("llama-2-7b"), llm.config("gpt-3-175b").replace(positions="rope")]),
    st.booleans(),
)  # fmt: skip
def test_the_table_is_what_megatron_asserts(plan: TrainingPlan, config: LLMConfig, fitted: bool) -> None:
    devices = plan.devices if fitted else 16
    on = Cluster(f"{devices} devices", ((devices, cluster("h100-sxm").groups[0][1]),))
    assert bool(legal(config, PlanTable.of([plan]), on)[0]) == _asserted(config, plan, devices)


def test_rows_are_judged_alike_alone_and_in_a_table() -> None:
    plans = [wrong for wrong, _, config, on in CASES.values() if config is DENSE and on is H100]
    together = illegal(DENSE, PlanTable.of(plans), H100)
    for i, plan in enumerate(plans):
        assert (together[:, i] == illegal(DENSE, PlanTable.of([plan]), H100)[:, 0]).all()


@pytest.mark.parametrize(
    ("name", "able"),
    [
        ("v100-sxm2-16gb", {"fp16"}),
        ("a100-sxm4-80gb", {"fp16", "bf16"}),
        ("l40s", {"fp16", "bf16", "fp8"}),
        ("h100-sxm", {"fp16", "bf16", "fp8"}),
        ("b200", {"fp16", "bf16", "fp8", "mxfp8", "nvfp4"}),
        ("mi300x", {"fp16", "bf16", "fp8"}),
    ],
)
def test_formats_that_devices_have(name: str, able: set[str]) -> None:
    device = cluster(name).groups[0][1].device
    assert {precision for precision in CHOICES["precision"] if supports(device, precision)} == able


def test_divisors() -> None:
    assert divisors(1).tolist() == [1]
    assert divisors(36).tolist() == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(10007).tolist() == [1, 10007]


def test_a_first_stage_one_layer_short_for_the_embedding_may_be_interleaved() -> None:
    # Llama 3.1 405B: 126 layers and 2 for embedding and loss are 128 = 16 ranks of 8 (The Llama 3 Herd, 3.3.2).
    config = llm.config("llama-3.1-405b")
    on = cluster("16x dgx-h100")
    plan = TrainingPlan(128, 8192, tp=8, pp=16, vp=4, schedule="interleaved")
    assert broken(plan, config, on) == {"layers"}
    assert broken(plan.replace(first_layers=7, last_layers=7), config, on) == set()
    assert broken(plan.replace(first_layers=6, last_layers=8), config, on) == {"layers"}
    assert broken(plan.replace(first_layers=8, last_layers=8), config, on) == {"layers"}


def test_a_framework_s_schedules_are_its_own_however_short_the_pipeline() -> None:
    alone = TrainingPlan(64, 8192, tp=4, dp=4)
    assert broken(alone) == set()
    for schedule in ("layered", "zero-bubble", "gpipe"):
        assert broken(alone.replace(schedule=schedule)) == {"schedule"}
    sharded = alone.replace(framework="fsdp2", zero=3)
    for schedule in ("gpipe", "zero-bubble"):
        assert broken(sharded.replace(schedule=schedule)) == set()
    assert broken(sharded.replace(schedule="layered")) == {"schedule"}
    (found,) = explain(DENSE, alone.replace(schedule="zero-bubble"), H100)
    assert found.repairs == (("schedule", ("1f1b", "interleaved")), ("framework", ("fsdp2",)))


def test_the_nearest_stages_are_nearly_equal() -> None:
    llama = llm.config("llama-3-8b")
    on = cluster("3x 8x a100-sxm4-80gb over ib-hdr")
    (found,) = explain(llama, TrainingPlan(64, 4096, dp=8, pp=3), on)
    assert dict(found.repairs)["first_layers"] == ("10",)  # 10, 11, 11
    near = found.plans[0]
    assert (near.dp, near.pp, near.first_layers + near.last_layers) == (8, 3, 10)
    # The Llama 3 Herd, 3.3.2: 126 layers on 16 ranks.
    (found,) = explain(llm.config("llama-3.1-405b"), TrainingPlan(2048, 8192, tp=8, dp=16, pp=16),
                       cluster("256x dgx-h100"))  # fmt: skip
    assert dict(found.repairs)["pp"] == ("14", "18")
    near = found.plans[0]
    assert (near.tp, near.dp, near.pp) == (8, 16, 16)
    assert {near.first_layers, near.last_layers} <= {0, 6, 7}
