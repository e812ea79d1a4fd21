"""DeepSpeed: what stands in the files that people have, and what contradicts itself there."""

from __future__ import annotations

import json

import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.hardware import cluster
from foretell.plan.training import emit
from foretell.plan.training.emit import deepspeed
from foretell.simulate.training import TrainingPlan
from foretell.workload import llm
from foretell.workload.llm.config import LLMConfig

MODEL = LLMConfig("m", layers=24, hidden=2048, heads=32, kv_heads=8, intermediate=5632, vocab=32_000)
PLAIN = {
    "train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e7}, "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
}  # fmt: skip


def test_plain_json_tells_the_ranks_by_the_batch() -> None:
    found = deepspeed.read(json.dumps(PLAIN), "ds.json")
    plan = found.training_plan(seq_len=4096)
    assert (plan.dp, plan.micro_batch, plan.global_batch, plan.zero, plan.grad_dtype) == (16, 2, 256, 3, "bf16")
    assert (plan.overlap_grad_reduce, plan.overlap_param_gather) == (True, True)  # ZeRO-3's default
    assert found.notes == (
        "keys that say nothing about the plan: gradient_clipping",
        "of zero_optimization not read: stage3_prefetch_bucket_size",
    )
    assert found.config is None


def test_what_a_trainer_fills_in_is_left_out() -> None:
    auto = PLAIN | {"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
    found = deepspeed.read(json.dumps(auto), "ds.json")
    assert "global_batch" not in found.plan
    assert "train_batch_size is left to the trainer (auto)" in found.notes
    assert "does not say how many devices: give --dp" in found.notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_batch_size": 100}, "train_batch_size 100 is not train_micro_batch_size_per_gpu 2 · gradient"),
        ({"train_batch_size": 0}, "train_batch_size is 0, want a whole number"),
        ({"train_batch_size": True}, "train_batch_size is True"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4, want 0 to 3"),
        ({"zero_optimization": 3}, "zero_optimization is no object"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": "yes"}}, "overlap_comm is yes, want true or false"),
        ({"fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"foretell": {"arguments": ["--pipeline-model-parallel-size", "2"]}}, "ZeRO-3 does not go with pipeline"),
        ({"foretell": {"arguments": ["--micro-batch-size", "4"]}}, "per_gpu is 2 and --micro-batch-size 4; make"),
        ({"foretell": {"arguments": "--bf16"}}, "foretell.arguments is no list of words"),
        ({"foretell": {"launcher": ["--num_gpus", "4", "--num_nodes", "1"]}}, "data-parallel ranks 4; DeepSpeed"),
        (
            {"foretell": {"launcher": ["--num_gpus", "4", "--num_nodes", "1"],
                          "arguments": ["--tensor-model-parallel-size", "3"]}},
            "tp 3 · pp 1 · cp 1 do not divide 4 devices",
        ),
        ({"foretell": {"arguments": ["--num-layers", "many"]}}, "--num-layers is many, want a whole number"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        deepspeed.read(json.dumps(PLAIN | change), "ds.json")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"a": 1}', "[" * 100_000, '{"bf16": ' * 50_000])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"ds\.json"):
        deepspeed.read(text, "ds.json")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"zero": 2, "pp": 2, "dp": 4}, "ZeRO-2 does not go with pipeline parallelism"),
        ({"cp": 2, "tp": 2, "dp": 2}, "DeepSpeed's sequence parallelism excludes Megatron's"),
        ({"pp": 2, "tp": 2, "dp": 2, "schedule": "zero-bubble"}, "zero-bubble schedule excludes sequence parallelism"),
        ({"ep": 2}, "ep 2 does not divide 0 experts"),
        ({"global_batch": 60}, "no multiple of micro-batch 1 · dp 8"),
    ],
)
def test_what_deepspeed_refuses_is_not_written(changes: dict, reason: str) -> None:
    plan = TrainingPlan(64, 4096, dp=8, framework="deepspeed").replace(**changes)
    with pytest.raises(InfeasibleError, match=reason):
        emit.emit("deepspeed", MODEL, plan, cluster("1x dgx-h100"))


def test_zero_bubble_and_sequence_parallelism_are_megatron_deepspeeds() -> None:
    plan = TrainingPlan(64, 4096, dp=4, pp=2, schedule="zero-bubble", framework="deepspeed")
    data = json.loads(emit.emit("deepspeed", MODEL, plan, cluster("1x dgx-h100")))
    assert "--enable-zbh1-pipeline" in data["foretell"]["arguments"]
    plan = TrainingPlan(64, 4096, dp=4, cp=2, context_scheme="a2a", framework="deepspeed")
    data = json.loads(emit.emit("deepspeed", MODEL, plan, cluster("1x dgx-h100")))
    arguments = data["foretell"]["arguments"]
    assert arguments[arguments.index("--ds-sequence-parallel-size") + 1] == "2"


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "mixtral-8x7b", "gemma-2-9b"])
def test_what_is_not_said_of_a_model_is_listed(name: str) -> None:
    config = llm.config(name)
    plan = TrainingPlan(64, 1024, dp=8, framework="deepspeed")
    text = emit.emit("deepspeed", config, plan, cluster("1x dgx-h100"))
    listed = json.loads(text)["foretell"]["not_said_of_the_model"]
    assert "vocab" in listed
    assert ("moe" in listed) == (config.moe is not None)
    read = deepspeed.read(text, "ds.json").model
    assert all(getattr(config, field) == value for field, value in read.items() if field not in listed)
