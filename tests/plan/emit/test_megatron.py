"""Megatron-LM: its assertions, each of which can fail, and its options in the files that people keep them in."""

from __future__ import annotations

import dataclasses

import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.hardware import cluster
from foretell.plan.training import emit
from foretell.plan.training.emit import megatron
from foretell.plan.training.emit.found import METADATA
from foretell.plan.training.emit.megatron_assertions import ASSERTIONS, violated
from foretell.simulate.training import TrainingPlan
from foretell.workload import llm
from foretell.workload.llm.config import LLMConfig, MoE

RULES = {rule.name: rule for rule in ASSERTIONS}
#: Options that meet every assertion: 32 processes, a dense model and one of experts.
DENSE = {
    "--nnodes": 4, "--nproc-per-node": 8, "--num-layers": 24, "--hidden-size": 2048, "--num-attention-heads": 32,
    "--ffn-hidden-size": 5632, "--max-position-embeddings": 4096, "--seq-length": 4096, "--micro-batch-size": 1,
    "--global-batch-size": 64, "--tensor-model-parallel-size": 2, "--pipeline-model-parallel-size": 4, "--bf16": True,
    "--disable-bias-linear": True, "--sequence-parallel": True, "--position-embedding-type": "rope",
    "--attention-backend": "flash", "--untie-embeddings-and-output-weights": True, "--vocab-size": 32000,
}  # fmt: skip
EXPERTS = DENSE | {
    "--num-experts": 16, "--moe-ffn-hidden-size": 1408, "--expert-model-parallel-size": 4,
    "--expert-tensor-parallel-size": 1, "--moe-token-dispatcher-type": "alltoall",
    "--pipeline-model-parallel-size": 1,
}  # fmt: skip
TORCH = DENSE | {
    "--pipeline-model-parallel-size": 1, "--tensor-model-parallel-size": 1, "--sequence-parallel": None,
    "--use-torch-fsdp2": True, "--no-gradient-accumulation-fusion": True,
}  # fmt: skip
FSDP = DENSE | {"--use-megatron-fsdp": True, "--use-distributed-optimizer": True, "--ckpt-format": "fsdp_dtensor"}

#: For each assertion options that break it and nothing else: what to change of the ones above; None leaves one out.
BROKEN = {
    "world-size": (DENSE, {"--context-parallel-size": 3, "--seq-length": 3072}),
    "context-levels": (DENSE, {"--context-parallel-size": 2, "--cp-comm-type": "a2a+p2p"}),
    "micro-batch": (DENSE, {"--micro-batch-size": None}),
    "global-batch": (DENSE, {"--global-batch-size": 0}),
    "batch-divides": (DENSE, {"--global-batch-size": 66}),
    "virtual-once": (
        DENSE, {"--num-virtual-stages-per-pipeline-rank": 2, "--num-layers-per-virtual-pipeline-stage": 3}
    ),
    "uneven-virtual": (
        DENSE, {"--decoder-first-pipeline-num-layers": 6, "--num-layers-per-virtual-pipeline-stage": 3}
    ),
    "layers-divide": (DENSE, {"--num-layers": 26}),
    "stage-divides": (DENSE, {"--num-layers-per-virtual-pipeline-stage": 4}),
    "virtual-divides": (DENSE, {"--num-virtual-stages-per-pipeline-rank": 4}),
    "middle-divides": (DENSE, {"--decoder-first-pipeline-num-layers": 4}),
    "uneven-chunks": (
        DENSE, {"--decoder-first-pipeline-num-layers": 3, "--num-virtual-stages-per-pipeline-rank": 3,
                "--num-layers": 30, "--decoder-last-pipeline-num-layers": 7},
    ),
    "uneven-or-counted": (
        DENSE, {"--decoder-first-pipeline-num-layers": 6, "--account-for-loss-in-pipeline-split": True}
    ),
    "interleaved-ranks": (
        DENSE, {"--num-virtual-stages-per-pipeline-rank": 2, "--pipeline-model-parallel-size": 2,
                "--no-overlap-p2p-communication": True},
    ),
    "interleaved-batches": (DENSE, {"--num-virtual-stages-per-pipeline-rank": 2, "--global-batch-size": 24}),
    "param-gather-sharded": (DENSE, {"--overlap-param-gather": True, "--overlap-grad-reduce": True}),
    "param-gather-reduce": (DENSE, {"--overlap-param-gather": True, "--use-distributed-optimizer": True}),
    "torch-fsdp-pipeline": (TORCH, {"--pipeline-model-parallel-size": 2}),
    "torch-fsdp-optimizer": (TORCH, {"--use-distributed-optimizer": True}),
    "torch-fsdp-fusion": (TORCH, {"--no-gradient-accumulation-fusion": None}),
    "torch-fsdp-untied": (TORCH, {"--untie-embeddings-and-output-weights": None}),
    "torch-fsdp-fp16": (TORCH, {"--bf16": None, "--fp16": True}),
    "fp8-gather-sharded": (DENSE, {"--fp8-param-gather": True, "--fp8-format": "hybrid"}),
    "fp8-gather-format": (DENSE, {"--fp8-param-gather": True, "--use-distributed-optimizer": True}),
    "fp4-or-fp8": (DENSE, {"--fp4-format": "e2m1", "--fp8-format": "hybrid"}),
    "fsdp-checkpoint": (FSDP, {"--ckpt-format": "torch_dist"}),
    "checkpoint-fsdp": (FSDP, {"--use-megatron-fsdp": None}),
    "fp16-or-bf16": (DENSE, {"--fp16": True}),
    "gradients-fp32": (
        DENSE, {"--accumulate-allreduce-grads-in-fp32": True, "--main-grads-dtype": "bf16",
                "--use-precision-aware-optimizer": True, "--use-distributed-optimizer": True},
    ),
    "graph-nan": (DENSE, {"--cuda-graph-impl": "full_iteration"}),
    "shape-given": (DENSE, {"--num-attention-heads": None}),
    "heads-divide-hidden": (DENSE, {"--num-attention-heads": 30}),
    "sequence-divides": (DENSE, {"--context-parallel-size": 4, "--seq-length": 4092}),
    "positions": (DENSE, {"--max-position-embeddings": 2048}),
    "distributed-activations": (
        DENSE, {"--distribute-saved-activations": True, "--recompute-granularity": "full",
                "--recompute-method": "uniform", "--recompute-num-layers": 1},
    ),
    "selective-method": (DENSE, {"--recompute-granularity": "selective", "--recompute-method": "uniform"}),
    "selective-layers": (DENSE, {"--recompute-granularity": "selective", "--recompute-num-layers": 1}),
    "full-method": (DENSE, {"--recompute-granularity": "full", "--recompute-num-layers": 1}),
    "full-layers": (DENSE, {"--recompute-granularity": "full", "--recompute-method": "uniform"}),
    "recompute-modules": (DENSE, {"--recompute-granularity": "selective", "--recompute-modules": "attention"}),
    "recompute-experts": (EXPERTS, {"--recompute-granularity": "selective", "--recompute-modules": "moe_act"}),
    "recompute-latent": (DENSE, {"--recompute-granularity": "selective", "--recompute-modules": "mla_up_proj"}),
    "sequence-parallel": (DENSE, {"--tensor-model-parallel-size": 1}),
    "tensor-overlap": (DENSE, {"--tp-comm-overlap": True, "--sequence-parallel": None}),
    "experts-given": (EXPERTS, {"--num-experts": None, "--moe-ffn-hidden-size": None}),
    "experts-divide": (EXPERTS, {"--num-experts": 18}),
    "expert-ranks": (EXPERTS, {"--expert-model-parallel-size": 16, "--expert-tensor-parallel-size": 4}),
    "expert-width": (DENSE, {"--moe-ffn-hidden-size": 1408}),
    "expert-sequences": (EXPERTS, {"--sequence-parallel": None}),
    "expert-bias": (EXPERTS, {"--disable-bias-linear": None, "--expert-tensor-parallel-size": None}),
    "deepep-flex": (EXPERTS, {"--moe-enable-deepep": True}),
    "shared-overlap": (
        EXPERTS, {"--moe-shared-expert-overlap": True, "--moe-shared-expert-intermediate-size": 1408,
                  "--moe-token-dispatcher-type": "allgather"},
    ),
    "expert-overlap-ranks": (
        EXPERTS, {"--overlap-moe-expert-parallel-comm": True, "--expert-model-parallel-size": 1}
    ),
    "expert-overlap-virtual": (
        EXPERTS, {"--overlap-moe-expert-parallel-comm": True, "--pipeline-model-parallel-size": 2}
    ),
    "expert-overlap-dispatcher": (
        EXPERTS, {"--overlap-moe-expert-parallel-comm": True, "--moe-token-dispatcher-type": "allgather"}
    ),
    "expert-overlap-recompute": (
        EXPERTS, {"--overlap-moe-expert-parallel-comm": True, "--recompute-granularity": "full",
                  "--recompute-method": "uniform", "--recompute-num-layers": 1},
    ),
    "expert-overlap-format": (EXPERTS, {"--overlap-moe-expert-parallel-comm": True, "--bf16": None}),
    "graph-recompute": (
        DENSE, {"--cuda-graph-impl": "transformer_engine", "--recompute-granularity": "full",
                "--recompute-method": "uniform", "--recompute-num-layers": 1},
    ),
    "graph-modules": (
        DENSE, {"--cuda-graph-impl": "full_iteration", "--cuda-graph-modules": "attn",
                "--no-check-for-nan-in-loss-and-grad": True},
    ),
    "latent-groups": (
        DENSE, {"--multi-latent-attention": True, "--group-query-attention": True, "--num-query-groups": 8}
    ),
    "heads-divide": (DENSE, {"--num-attention-heads": 33, "--kv-channels": 64}),
    "groups-divide": (
        DENSE, {"--group-query-attention": True, "--num-query-groups": 6, "--tensor-model-parallel-size": 4,
                "--num-attention-heads": 36, "--kv-channels": 64},
    ),
    "aware-sharded": (DENSE, {"--use-precision-aware-optimizer": True}),
    "aware-states": (DENSE, {"--exp-avg-dtype": "bf16", "--use-distributed-optimizer": True}),
    "instances-divide": (DENSE, {"--num-distributed-optimizer-instances": 3, "--use-distributed-optimizer": True}),
}  # fmt: skip
#: Where Megatron-LM's parser and configurations look; the rest is asserted when it builds groups, layers and schedules.
PARSED = ("arguments.py", "transformer_config.py", "optimizer_config.py")


def spelt(base: dict, changes: dict) -> str:
    options = {name: value for name, value in (base | changes).items() if value is not None}
    return "\n".join(name if value is True else f"{name} {value}" for name, value in options.items())


@pytest.mark.parametrize("base", [DENSE, EXPERTS, TORCH, FSDP], ids=["dense", "experts", "torch", "fsdp"])
def test_good_options_meet_every_assertion(base: dict) -> None:
    found, notes = megatron.arguments(spelt(base, {}), "options")
    assert violated(found) == []
    assert notes == []


def test_each_assertion_has_an_example_that_breaks_it() -> None:
    assert len(RULES) == len(ASSERTIONS)
    assert set(BROKEN) == set(RULES)


@pytest.mark.parametrize("name", BROKEN)
def test_an_assertion_fails_where_it_should(name: str) -> None:
    found, _ = megatron.arguments(spelt(*BROKEN[name]), "options")
    assert [rule.name for rule in violated(found)] == [name]
    assert set(RULES[name].options) <= set(megatron.OPTIONS)


@pytest.mark.parametrize("base", [DENSE, EXPERTS, TORCH, FSDP], ids=["dense", "experts", "torch", "fsdp"])
def test_megatron_agrees_that_they_are_good(base: dict, validated) -> None:
    assert validated(spelt(base, {})).args.data_parallel_size in (4, 16, 32)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.source.endswith(PARSED)])
def test_megatron_agrees_that_they_are_bad(name: str, validated) -> None:
    with pytest.raises((AssertionError, ValueError, TypeError)):
        validated(spelt(*BROKEN[name]))


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.mended and not rule.presence])
def test_reading_what_contradicts_itself_names_the_line(name: str) -> None:
    text = spelt(*BROKEN[name])
    with pytest.raises(InputError, match=r"run\.sh: line \d+: --") as caught:
        megatron.read(text, "run.sh")
    assert RULES[name].reason in str(caught.value)
    line = int(str(caught.value).split("line ")[1].split(":")[0])
    assert text.splitlines()[line - 1].split()[0] in RULES[name].options


def test_what_megatron_mends_or_wants_elsewhere_is_a_note() -> None:
    for name in ("sequence-parallel", "micro-batch", "shape-given"):
        found = megatron.read(spelt(*BROKEN[name]), "run.sh")
        assert any(RULES[name].reason in note for note in found.notes), name


def test_a_plan_that_megatron_refuses_is_not_written() -> None:
    model = LLMConfig("m", layers=24, hidden=2048, heads=32, intermediate=5632, vocab=32_000)
    plan = TrainingPlan(64, 4096, tp=2, dp=4, pp=4, vp=4, schedule="interleaved")
    with pytest.raises(InfeasibleError, match="layers of a rank are a multiple of its virtual stages"):
        emit.emit("megatron", model, plan, cluster("4x dgx-h100"))
    experts = dataclasses.replace(model, moe=MoE(experts=16, top_k=2, intermediate=1408))
    with pytest.raises(InfeasibleError, match="experts are a multiple of expert-parallel ranks"):
        emit.emit("megatron", experts, TrainingPlan(64, 4096, dp=32, ep=32), cluster("4x dgx-h100"))


@pytest.mark.parametrize("name", llm.catalogue())
def test_a_model_comes_back_but_for_what_is_listed(name: str) -> None:
    config = llm.config(name)
    plan = TrainingPlan(64, min(2048, config.position_rows or 2048), dp=8)
    text = emit.emit("megatron", config, plan, cluster("1x dgx-h100"))
    again = megatron.read(text, "plan").config
    assert again is not None
    lost = megatron.unsaid_model(config)
    fields = {field.name for field in dataclasses.fields(config) if field.name not in METADATA}
    assert {field for field in fields if getattr(config, field) != getattr(again, field)} <= set(lost)
    for field, reason in lost.items():
        assert f"# not said of the model: {field} " in text
        assert reason in text
    if not set(lost) - {"activation", "context_length"}:
        assert again.parameters == config.parameters


# --- the files that people keep ---------------------------------------------------------------------------------------

SCRIPT = r"""#!/bin/bash
# Trains a model. --num-layers 99 in a comment says nothing.
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=4
PP=${PP:-2}
GLOBAL_BATCH=$((8 * 16))
DISTRIBUTED_ARGS=(
    --nproc_per_node 8 \
    --nnodes 2 \
    --master_addr $MASTER_ADDR
)
GPT_ARGS="
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size ${PP} \
    --sequence-parallel
    --num-layers 24 --hidden-size 2048 \
    --num-attention-heads=32
    --seq-length 4096
    --max-position-embeddings 4096
"
BATCH="--micro-batch-size 2 --global-batch-size $GLOBAL_BATCH"
EXTRA+=(
    "--fp8-format hybrid" "--fp8-recipe tensorwise"
    --attention-backend fused) # (flash/fused)
rm -rf /tmp/never; $(touch FLAG); `touch FLAG`
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_ARGS} --bf16 --recompute-activations \
    --lr 0.00015 --data-path "my data" \
    --use-distributed-optimizer 2>&1 | tee log.txt
"""


def test_a_shell_script_is_read_and_not_run(tmp_path, monkeypatch) -> None:
    flag = tmp_path / "flag"
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("FLAG", str(flag)))
    found = emit.read(path)
    plan = found.training_plan(global_batch=64)
    assert (plan.tp, plan.pp, plan.dp, plan.micro_batch, plan.seq_len) == (4, 2, 2, 2, 4096)
    assert (plan.zero, plan.recompute, plan.sequence_parallel) == (1, "selective", True)
    assert (plan.precision, plan.attention) == ("fp8", "flash")
    assert (found.model["layers"], found.model["hidden"], found.model["heads"]) == (24, 2048, 32)
    assert found.config is None  # no vocabulary
    notes = "\n".join(found.notes)
    assert "line 21: --global-batch-size is $GLOBAL_BATCH, which only a shell could tell; left out" in notes
    assert "options that say nothing about the plan: --master-addr, --lr, --data-path" in notes
    assert not flag.exists()


def test_yaml_with_options_as_keys_is_read() -> None:
    text = """ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --tensor-model-parallel-size: 2
  --bf16: true
  --use-distributed-optimizer: false   # off
  --cp-comm-type: [p2p]
TEST_TYPE: regular
"""
    found = megatron.read(text, "model_config.yaml")
    assert found.training_plan().replace(dp=1) == TrainingPlan(
        32, 1024, micro_batch=4, tp=2, zero=0, sequence_parallel=False, overlap_grad_reduce=False,
        overlap_param_gather=False,
    )  # fmt: skip
    assert found.model["layers"] == 12


def test_two_values_of_one_option_are_refused_with_both_lines() -> None:
    with pytest.raises(InputError, match="run: line 3: --num-layers is 4 on line 1 and 8 here"):
        megatron.read("--num-layers 4\n--bf16\n--num-layers 8", "run")
    assert megatron.read("--num-layers 4\n--bf16\n--num-layers 4", "run").model["layers"] == 4


@pytest.mark.parametrize("value", ["four", "", "4.5", "1e3", "9" * 40, "--bf16"])
def test_values_of_another_kind_are_refused(value: str) -> None:
    with pytest.raises(InputError, match=r"run: line 2: --num-layers is .*, want a whole number"):
        megatron.read(f"--bf16\n--num-layers {value}\n", "run")


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        ("1", {"first_dense": 0}),
        ("[0]*3+[1]*21", {"first_dense": 3}),
        ("([0]*1+[1]*1)*12", {"every": 2}),
        ("([0]+[1])*12", {"every": 2}),
        ("[0,1]*12", {"every": 2}),
        ("[0,0,0,1]*6", {"every": 4}),
    ],
)
def test_which_layers_route(freq: str, expected: dict) -> None:
    found = megatron.read(spelt(EXPERTS, {"--moe-layer-freq": freq}), "run")
    moe = found.model["moe"]
    assert {key: moe[key] for key in expected} == expected
    assert not any("--moe-layer-freq" in note for note in found.notes)


@pytest.mark.parametrize(
    "freq", ["__import__('os')", "[1]*9**9**9", "([1]*9999)*9999", "(" * 5000, "[1", "[]", "[2]*24", "[1,0,0]*8", "2"]
)
def test_patterns_that_are_none_are_noted(freq: str) -> None:
    found = megatron.read(spelt(EXPERTS, {"--moe-layer-freq": freq}), "run")
    assert any("--moe-layer-freq" in note for note in found.notes)


def test_a_variable_that_refers_to_itself_ends() -> None:
    assert megatron.read("A=$A$A$A\nB=$A$A\n--num-layers $B\n--bf16 --micro-batch-size 1", "run").notes[0] == (
        "line 3: --num-layers is $A$A$A$A$A$A, which only a shell could tell; left out"
    )


def test_a_run_of_several_machines_meets_somewhere_and_the_rotary_base_is_not_said() -> None:
    plan = TrainingPlan(64, 4096, tp=8, dp=2)
    many = megatron.write(llm.config("llama-3-8b"), plan, cluster("2x dgx-h100")).splitlines()
    assert sum("torchrun --rdzv-backend c10d --rdzv-endpoint HOST:PORT $(" in line for line in many) == 1
    assert any("not said of the model: --rotary-base" in line for line in many)
    alone = megatron.write(llm.config("gpt2"), TrainingPlan(64, 1024, dp=8), cluster("1x dgx-h100"))
    assert "rdzv" not in alone
    assert "--rotary-base" not in alone
