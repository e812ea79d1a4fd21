"""Training steps in closed form: what must hold whatever the constants are, and counts another path arrives at."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.hardware import Cluster, cluster
from foretell.simulate.pipeline import simulate
from foretell.simulate.training import PlanTable, TrainingPlan
from foretell.simulate.training.step import PARTS, stage_times, step, steps
from foretell.workload import llm
from foretell.workload.llm.weights import layer_weights

LLAMA = llm.config("llama-3-8b")
NODE = cluster("1x dgx-h100")


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-3-175b", "deepseek-v3", "qwen3-30b-a3b", "falcon-7b", "mpt-7b"])
def test_arithmetic_is_that_of_the_graph_less_the_masked_half(name: str) -> None:
    config = llm.config(name)
    graph = llm.graph(config, phase="train", batch=1, seq_len=1024)
    attention = sum(op.flops * op.repeat for op in graph.ops if op.kind == "attention")
    one = step(config, TrainingPlan(1, 1024), cluster("1x h100-sxm"))
    assert one.flops_per_device[0] == pytest.approx(graph.flops() - attention / 2, rel=2e-3)


@pytest.mark.parametrize(
    "degrees", [{"tp": 8}, {"dp": 8}, {"pp": 8}, {"tp": 2, "pp": 2, "dp": 2}, {"cp": 4, "dp": 2}, {"dp": 8, "zero": 3}]
)
def test_arithmetic_does_not_depend_on_how_it_is_shared(degrees: dict[str, int]) -> None:
    alone = step(LLAMA, TrainingPlan(16, 2048), cluster("1x h100-sxm"))
    shared = step(LLAMA, TrainingPlan(16, 2048, **degrees), NODE)
    assert shared.flops_per_device[0] * 8 == pytest.approx(alone.flops_per_device[0])


def test_no_parallelism_no_communication() -> None:
    one = step(LLAMA, TrainingPlan(4, 2048), cluster("1x h100-sxm")).parts()
    assert {one[name] for name in ("tp_s", "cp_s", "ep_s", "pp_s", "dp_s", "bubble_s")} == {0.0}
    assert one["compute_s"] > 0


@pytest.mark.parametrize(
    ("degrees", "part"),
    [({"tp": 8}, "tp_s"), ({"dp": 8, "zero": 0, "overlap_grad_reduce": False}, "dp_s"), ({"pp": 8}, "pp_s"),
     ({"pp": 8}, "bubble_s"), ({"cp": 8, "context_scheme": "a2a"}, "cp_s")],
)  # fmt: skip
def test_each_degree_costs_its_own_part(degrees: dict[str, object], part: str) -> None:
    assert step(LLAMA, TrainingPlan(16, 2048, **degrees), NODE).parts()[part] > 0  # type: ignore[arg-type]


def test_bubble_of_1f1b() -> None:
    # Equal stages: the ends are the embedding's and the head's, taken off by a model that is nearly all layers.
    config = LLAMA.replace(layers=64, vocab=128)
    for p, m in ((2, 4), (4, 16), (8, 8)):
        parts = step(config, TrainingPlan(m, 2048, pp=p, overlap_p2p=False), NODE).parts()
        busy = parts["compute_s"]
        assert parts["bubble_s"] / (busy + parts["bubble_s"]) == pytest.approx((p - 1) / (m + p - 1), rel=0.03)


def test_interleaving_divides_the_bubble() -> None:
    plain = step(LLAMA, TrainingPlan(16, 2048, pp=4), NODE).parts()
    four = step(LLAMA, TrainingPlan(16, 2048, pp=4, vp=4, schedule="interleaved"), NODE).parts()
    assert four["bubble_s"] == pytest.approx(plain["bubble_s"] / 4, rel=0.02)


plans = st.builds(
    TrainingPlan,
    global_batch=st.sampled_from([32, 64]),
    seq_len=st.sampled_from([1024, 4096]),
    micro_batch=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 8]),
    dp=st.sampled_from([1, 4]),
    pp=st.sampled_from([1, 4]),
    cp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
    precision=st.sampled_from(["bf16", "fp8"]),
    attention=st.sampled_from(["flash", "unfused"]),
    framework=st.sampled_from(["megatron", "deepspeed", "fsdp2"]),
    overlap_grad_reduce=st.booleans(),
    overlap_p2p=st.booleans(),
    overlap_tp=st.booleans(),
)


@given(plan=plans)
@settings(deadline=None, max_examples=60)
def test_parts_are_sound(plan: TrainingPlan) -> None:
    found = step(LLAMA, plan, cluster("32x dgx-h100"))
    parts = found.parts()
    assert set(parts) == set(PARTS)
    assert all(value >= 0 and np.isfinite(value) for value in parts.values())
    assert found.time_s[0] == pytest.approx(sum(parts.values()))
    assert 0 < found.mfu[0] <= 1
    assert found.hidden_s[0] >= 0


@given(plan=plans)
@settings(deadline=None, max_examples=40)
def test_faster_links_never_hurt(plan: TrainingPlan) -> None:
    slow, fast = cluster("32x dgx-h100"), _twice_as_fast(cluster("32x dgx-h100"))
    assert step(LLAMA, plan, fast).time_s[0] <= step(LLAMA, plan, slow).time_s[0] * (1 + 1e-9)


def _twice_as_fast(given: Cluster) -> Cluster:
    (count, node), network = given.groups[0], given.network
    assert node.link is not None
    assert network is not None
    link = dataclasses.replace(node.link, bandwidth_bytes_per_s=2 * node.link.bandwidth_bytes_per_s)
    network = dataclasses.replace(network, bandwidth_bytes_per_s=2 * network.bandwidth_bytes_per_s)
    nics = tuple(dataclasses.replace(n, bandwidth_bytes_per_s=2 * n.bandwidth_bytes_per_s) for n in node.nics)
    return dataclasses.replace(
        given, groups=((count, dataclasses.replace(node, link=link, nics=nics)),), network=network
    )


def test_a_table_says_what_each_plan_says_by_itself() -> None:
    some = [
        TrainingPlan(32, 2048, tp=2, dp=2, pp=2, recompute="full"),
        TrainingPlan(32, 2048, tp=8, precision="fp8"),
        TrainingPlan(32, 4096, pp=8, vp=2, schedule="interleaved", micro_batch=2),
        TrainingPlan(32, 2048, dp=8, zero=3, framework="fsdp2"),
    ]
    together = steps(LLAMA, PlanTable.of(some), NODE)
    for row, plan in enumerate(some):
        assert together.parts(row) == pytest.approx(step(LLAMA, plan, NODE).parts())


def test_adapters_need_less_than_full_training() -> None:
    full = step(LLAMA, TrainingPlan(8, 4096, dp=8), NODE)
    lora = step(LLAMA, TrainingPlan(8, 4096, dp=8, lora_rank=16), NODE)
    assert 0.6 < lora.time_s[0] / full.time_s[0] < 0.9
    # Weights: forward and one gradient of two; adapters add rank · (in + out) a matrix.
    assert 0.66 < lora.flops_per_device[0] / full.flops_per_device[0] < 0.72


def test_packed_documents_attend_less() -> None:
    whole = step(LLAMA, TrainingPlan(8, 8192, dp=8), NODE)
    packed = step(LLAMA, TrainingPlan(8, 8192, dp=8, document_len=256), NODE)
    assert packed.flops_per_device[0] < whole.flops_per_device[0]
    assert packed.time_s[0] < whole.time_s[0]


@pytest.mark.parametrize(
    "changes",
    [{}, {"first_layers": 5, "last_layers": 7}, {"schedule": "gpipe"}, {"schedule": "zero-bubble"},
     {"vp": 4, "schedule": "interleaved"}, {"recompute": "full"}, {"tp": 2, "dp": 1}],
)  # fmt: skip
def test_a_pipeline_takes_what_its_simulation_takes(changes: dict[str, object]) -> None:
    plan = TrainingPlan(**{"global_batch": 32, "seq_len": 4096, "pp": 4, "dp": 2, "overlap_p2p": False, **changes})  # type: ignore[arg-type]
    simulated = simulate(plan.schedule, stage_times(LLAMA, plan, NODE), plan.micro_batches, overlap_p2p=False).step_s
    parts = step(LLAMA, plan, NODE).parts()
    # Beyond the pipeline: exchange of gradients, the update, and what the host does for each micro-batch and step.
    closed = sum(parts[name] for name in ("compute_s", "recompute_s", "tp_s", "pp_s", "bubble_s"))
    assert closed == pytest.approx(simulated, rel=1e-3)


@pytest.mark.parametrize("name", ["tpu-v5p", "tpu-v6e", "gaudi-3"])
def test_devices_without_multiprocessors_are_costed_by_their_roofs(name: str) -> None:
    """No tile of a GPU: the arithmetic is never faster than the peak, and with long sequences not far from it."""
    one = step(LLAMA, TrainingPlan(8, 8192, tp=8, sequence_parallel=True), cluster(f"8x {name}"))
    busy = one.flops_per_device[0] / (one.compute_s[0] * one.peak_flops_per_s[0])
    assert 0.4 < busy < 1.0


def test_experts_are_gathered_among_those_that_hold_the_same() -> None:
    # 64 ranks 8 apart share a rank's experts, one in each machine: their gather goes through the machine's ports.
    config, on = llm.config("mixtral-8x7b"), cluster("8x dgx-h100")
    plan = TrainingPlan(512, 4096, dp=64, ep=8, zero=3, recompute="full")
    expert = sum(w.elements for w in layer_weights(config, config.groups[0]) if w.kind == "experts") / 8
    ports = 2 * expert * (1 - 1 / 8) / on.network.bandwidth_bytes_per_s  # type: ignore[union-attr, operator]
    found = step(config, plan, on)
    waits = float(found.dp_s[0] + found.hidden_s[0])
    assert waits > plan.micro_batches * config.layers * 2 * ports  # forward and backward


def test_longer_sequences_take_longer_where_traffic_rules() -> None:
    on = cluster("8x dgx-b200")
    short, long = (TrainingPlan(512, tokens, tp=4, cp=8, dp=2, zero=3) for tokens in (4096, 8192))
    assert step(LLAMA, long, on).time_s[0] > step(LLAMA, short, on).time_s[0]
