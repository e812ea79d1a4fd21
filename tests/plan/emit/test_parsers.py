"""What is written is read by the frameworks' own parsers, and means to them what the plan says.

torchtitan and DeepSpeed come with the extra ``emit``. Megatron-LM's argument parser is in the wheel ``megatron-core``
from 0.19 on, which wants Python 3.12; elsewhere its assertions as a table stand in (test_megatron.py).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from types import SimpleNamespace

import pytest

from foretell.hardware import cluster
from foretell.plan.training import emit
from foretell.plan.training.emit import megatron, torchtitan
from foretell.simulate.training import TrainingPlan
from foretell.workload import llm
from foretell.workload.llm.config import LLMConfig, MoE

DENSE = LLMConfig("dense", layers=24, hidden=2048, heads=32, kv_heads=8, intermediate=5632, vocab=32_000)
EXPERTS = LLMConfig(
    "experts", layers=24, hidden=2048, heads=32, intermediate=5632, vocab=32_000,
    moe=MoE(experts=16, top_k=2, intermediate=1408, shared_intermediate=1408, first_dense=1),
)  # fmt: skip
ON = cluster("4x dgx-h100")
#: Plans of 32 devices that differ in everything a framework can be told.
PLANS = {
    "data": (DENSE, TrainingPlan(128, 4096, micro_batch=2, dp=32)),
    "replicated": (DENSE, TrainingPlan(128, 4096, dp=32, zero=0, overlap_grad_reduce=False)),
    "sharded": (DENSE, TrainingPlan(128, 4096, dp=32, zero=3)),
    "gradients": (DENSE, TrainingPlan(128, 4096, dp=32, zero=2, shard=8)),
    "tensor": (DENSE, TrainingPlan(128, 4096, tp=8, dp=4, overlap_tp=True, recompute="selective")),
    "context": (DENSE, TrainingPlan(64, 4096, cp=4, dp=8, zero=2)),
    "pipeline": (DENSE, TrainingPlan(64, 4096, tp=2, dp=4, pp=4, recompute="full", recompute_layers=3)),
    "interleaved": (
        DENSE, TrainingPlan(64, 4096, tp=2, dp=4, pp=4, vp=3, schedule="interleaved", recompute="full")
    ),
    "uneven": (DENSE, TrainingPlan(64, 4096, dp=8, pp=4, first_layers=5, last_layers=5)),
    "formats": (DENSE, TrainingPlan(64, 4096, dp=32, precision="fp8", grad_dtype="bf16", state_dtype="bf16")),
    "blocks": (DENSE, TrainingPlan(64, 4096, dp=32, precision="mxfp8", cuda_graph=True)),
    "half": (DENSE, TrainingPlan(64, 4096, dp=32, precision="fp16", attention="unfused")),
    "experts": (EXPERTS, TrainingPlan(64, 4096, tp=2, dp=16, ep=8, overlap_ep=True)),
    "deepep": (EXPERTS, TrainingPlan(64, 4096, dp=32, ep=8, dispatcher="deepep", cuda_graph=True)),
}  # fmt: skip


def framework(name: str):
    """An installed framework's module; skips, with the reason, where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'foretell[emit]'")


@pytest.mark.parametrize("case", PLANS)
def test_torchtitan_reads_it(case: str, tmp_path) -> None:
    config_module = framework("torchtitan.config")
    dims_module = framework("torchtitan.distributed.parallel_dims")
    config, plan = PLANS[case]
    path = tmp_path / "plan.toml"
    path.write_text(emit.emit("torchtitan", config, plan, ON))
    job = config_module.ConfigManager().parse_args(["--job.config_file", str(path)])
    p, t = job.parallelism, job.training
    degrees = (p.tensor_parallel_degree, p.context_parallel_degree, p.pipeline_parallel_degree)
    assert degrees == (plan.tp, plan.cp, plan.pp)
    assert (t.seq_len, t.global_batch_size) == (plan.seq_len, plan.global_batch)
    assert job.model.flavor == config.name
    # As train.py does: the mesh, the accumulation steps.
    dims = dims_module.ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree, dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree, tp=p.tensor_parallel_degree, pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree, etp=p.expert_tensor_parallel_degree, world_size=plan.devices,
    )  # fmt: skip
    batch = dims.dp_replicate * dims.dp_shard
    assert batch == plan.dp
    assert t.global_batch_size % (t.local_batch_size * batch) == 0
    accumulated = t.global_batch_size // (t.local_batch_size * batch)
    inside = t.local_batch_size // p.pipeline_parallel_microbatch_size if plan.pp > 1 else 1
    assert accumulated * inside == plan.micro_batches
    assert accumulated == 1 or plan.pp == 1  # a pipeline is filled once a step


@pytest.mark.parametrize("case", ["pipeline", "interleaved"])
def test_torchtitan_makes_the_stages_of_the_plan(case: str, tmp_path) -> None:
    """Its own function deals the layers; where we give a list, torchtitan takes that instead."""
    pipeline = framework("torchtitan.distributed.pipeline_parallel")
    config, plan = PLANS[case]
    path = tmp_path / "plan.toml"
    path.write_text(emit.emit("torchtitan", config, plan, ON))
    p = framework("torchtitan.config").ConfigManager().parse_args(["--job.config_file", str(path)]).parallelism
    parts = p.module_fqns_per_model_part
    if parts is None:
        ends = (p.pipeline_parallel_first_stage_less_layers, p.pipeline_parallel_last_stage_less_layers)
        stages = -(-(config.layers + sum(ends)) // p.pipeline_parallel_layers_per_stage)
        parts = pipeline.generate_llm_fqn_per_model_part(stages, config.layers, *ends)
    assert len(parts) == plan.pp * plan.vp
    names = [name for part in parts for name in part if name.startswith("layers.")]
    assert names == [f"layers.{i}" for i in range(config.layers)]
    assert {sum(name.startswith("layers.") for name in part) for part in parts} == {24 // (plan.pp * plan.vp)}
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    schedule = get_schedule_class(p.pipeline_parallel_schedule)
    assert issubclass(schedule, PipelineScheduleMulti) == (plan.vp > 1)


def test_torchtitan_knows_every_setting_that_is_read() -> None:
    job = framework("torchtitan.config").JobConfig()
    newer = {"enable_sequence_parallel"}  # since 0.3
    for section, names in torchtitan.KINDS.items():
        fields = {field.name for field in dataclasses.fields(getattr(job, section))}
        assert set(names) - fields <= newer, section


def test_torchtitan_refuses_what_it_does_not_know(tmp_path) -> None:
    """The parser can fail: the tests above see a wrong name."""
    path = tmp_path / "plan.toml"
    text = emit.emit("torchtitan", *PLANS["tensor"], ON)
    path.write_text(text.replace("tensor_parallel_degree", "tensor_paralel_degree"))
    manager = framework("torchtitan.config").ConfigManager()
    with pytest.raises(ValueError, match="tensor_paralel_degree"):
        manager.parse_args(["--job.config_file", str(path)])


@pytest.fixture
def deepspeed_config(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    module = framework("deepspeed.runtime.config")
    monkeypatch.setattr(module.dist, "get_rank", lambda *_: 0)
    return module.DeepSpeedConfig


@pytest.mark.parametrize("case", PLANS)
def test_deepspeed_reads_it(case: str, deepspeed_config) -> None:
    config, plan = PLANS[case]
    plan = plan.replace(context_scheme="a2a", sequence_parallel=plan.cp == 1)
    data = json.loads(emit.emit("deepspeed", config, plan, ON))
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: plan.dp)
    made = deepspeed_config(data, mpu=mpu)
    assert made.train_batch_size == plan.global_batch
    assert made.gradient_accumulation_steps == plan.micro_batches
    assert int(made.zero_optimization_stage) == plan.zero
    assert made.bfloat16_config.enabled == (plan.precision != "fp16")
    assert made.float16_config.enabled == (plan.precision == "fp16")
    if plan.zero:
        assert made.zero_config.overlap_comm == plan.overlap_grad_reduce


def test_deepspeed_refuses_what_does_not_multiply(deepspeed_config) -> None:
    _, plan = PLANS["data"]
    data = json.loads(emit.emit("deepspeed", DENSE, plan, ON))
    wrong = SimpleNamespace(get_data_parallel_world_size=lambda: plan.dp * 2)
    with pytest.raises(AssertionError, match="train_batch_size"):
        deepspeed_config(data, mpu=wrong)
    data["zero_optimization"]["stages"] = 1
    with pytest.raises(ValueError, match="stages"):
        deepspeed_config(data, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: plan.dp))


# --- Megatron-LM ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PLANS)
def test_megatron_reads_it(case: str, validated) -> None:
    config, plan = PLANS[case]
    args = validated(emit.emit("megatron", config, plan, ON)).args
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (plan.tp, plan.pp)
    assert (args.context_parallel_size, args.data_parallel_size) == (plan.cp, plan.dp)
    assert args.virtual_pipeline_model_parallel_size == (plan.vp if plan.vp > 1 else None)
    assert args.overlap_grad_reduce == plan.overlap_grad_reduce
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size) == (24, 2048, 5632)


@pytest.mark.parametrize("name", llm.catalogue())
def test_megatron_takes_the_shape_of_every_model(name: str, validated) -> None:
    config = llm.config(name)
    plan = TrainingPlan(64, min(2048, config.position_rows or 2048), dp=32)
    made = validated(emit.emit("megatron", config, plan, ON)).config
    assert (made.num_layers, made.hidden_size, made.num_attention_heads) == (config.layers, config.hidden, config.heads)
    assert made.num_moe_experts == (config.moe.experts if config.moe else None)
    if config.moe and isinstance(made.moe_layer_freq, list):
        assert sum(made.moe_layer_freq) == sum(group.layers for group in config.groups if group.moe)


def test_megatron_knows_every_option_that_is_read(validated) -> None:
    import argparse

    arguments = sys.modules["megatron.training.arguments"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    known = {name: action for action in parser._actions for name in action.option_strings}
    own = {"--nnodes", "--nproc-per-node", "--world-size"}
    assert set(megatron.OPTIONS) - own <= set(known)
    for name, value in megatron.DEFAULTS.items():
        default = known[name].default
        default = getattr(default, "name", default)
        default = tuple(default) if isinstance(default, list) else default
        if default is None and name == "--recompute-modules":
            default = ("core_attn",)  # set later
        assert str(default) == str(value), name
