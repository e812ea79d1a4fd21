"""torchtitan: what stands in the files that people have, and what contradicts itself there."""

from __future__ import annotations

import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.hardware import cluster
from foretell.plan.training import emit
from foretell.plan.training.emit import torchtitan
from foretell.simulate.training import TrainingPlan
from foretell.workload.llm.config import LLMConfig

MODEL = LLMConfig('a "model"\n[training]', layers=22, hidden=2048, heads=32, intermediate=5632, vocab=32_000)
TODAY = """
[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[metrics]
log_freq = 10
"""


def test_a_file_of_today() -> None:
    found = torchtitan.read(TODAY, "8b.toml")
    assert found.training_plan() == TrainingPlan(
        8, 8192, tp=2, dp=8, zero=3, framework="fsdp2", recompute="selective", precision="fp8"
    )
    assert "settings that say nothing about the plan: metrics" in found.notes
    assert any("llama3 8B of torchtitan's registry" in note for note in found.notes)


def test_a_file_of_version_0_1() -> None:
    older = """
[model]
converters = "float8"
[training]
batch_size = 2
seq_len = 8192
compile = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = 'full'
[float8]
filter_fqns = "output"
"""
    found = torchtitan.read(older, "405b.toml")
    assert "data_parallel_shard_degree -1 is whatever devices are left: give --dp" in found.notes
    plan = found.training_plan(dp=16, global_batch=32)
    assert (plan.tp, plan.micro_batch, plan.precision, plan.recompute, plan.overlap_tp) == (8, 2, "fp8", "full", True)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("seq_len = 8192", "seq_len = 8192\nglobal_batch_size = 12", "8b.toml: line 9: global_batch_size 12 is no"),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 0", "line 11: tensor_parallel_degree is 0"),
        ("tensor_parallel_degree = 2", 'tensor_parallel_degree = "2"', "line 11: parallelism.tensor_parallel_degree"),
        ("shard_degree = 8", "shard_degree = 0", "line 10: data_parallel_replicate_degree is 1 and"),
        ("shard_degree = 8", "shard_degree = true", "line 10: parallelism.data_parallel_shard_degree is True"),
        ("[training]", "[training", "malformed TOML"),
        ("local_batch_size = 1", "local_batch_size = 0", "line 7: local_batch_size is 0, want 1 or more"),
        (
            "local_batch_size = 1", "local_batch_size = 3\n[parallelism]\npipeline_parallel_degree = 2\n[x]",
            "malformed TOML",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_their_line(before: str, after: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        torchtitan.read(TODAY.replace(before, after), "8b.toml")


def test_a_batch_that_does_not_split_into_micro_batches_is_refused() -> None:
    text = TODAY.replace("local_batch_size = 1", "local_batch_size = 3").replace(
        "tensor_parallel_degree = 2", "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 2"
    )
    with pytest.raises(InputError, match="line 7: local_batch_size 3 is no multiple of pipeline_parallel_microbatch"):
        torchtitan.read(text, "8b.toml")


@pytest.mark.parametrize("text", ["", "[other]\na = 1", "a" * 10])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"has neither|malformed"):
        torchtitan.read(text, "x.toml")


def test_what_a_name_holds_does_not_reach_the_settings() -> None:
    plan = TrainingPlan(64, 4096, dp=8, zero=3, framework="fsdp2")
    text = emit.emit("torchtitan", MODEL, plan, cluster("1x dgx-h100"))
    assert torchtitan.read(text, "x").training_plan().seq_len == 4096
    assert text.count("[training]") == 2  # the section, and within the quotes of the flavor
    assert '\nflavor = "a \\"model\\"?[training]"\n' in text


def test_uneven_stages_are_told_layer_by_layer() -> None:
    plan = TrainingPlan(64, 4096, dp=2, pp=4, zero=3, framework="fsdp2", first_layers=5, last_layers=4)
    text = emit.emit("torchtitan", MODEL, plan, cluster("1x dgx-h100"))
    assert '[["tok_embeddings", "layers.0"' in text
    assert '"layers.21", "norm", "output"]]' in text
    found = torchtitan.read(text, "x").training_plan()
    assert (found.first_layers, found.last_layers) == (5, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"zero": 0, "tp": 2, "dp": 4}, "replicated data parallelism goes with no other"),
        ({"seq_len": 4095, "tp": 2, "dp": 4}, "no multiple of tp 2"),
        ({"seq_len": 4092, "cp": 4, "dp": 2}, "no multiple of tp 1 · 2 · cp 4"),
        ({"shard": 3}, "3 ranks to a copy do not divide dp 8 · cp 1"),
        ({"pp": 2, "dp": 4, "schedule": "interleaved"}, "Interleaved1F1B wants at least 2 stages"),
        ({"pp": 2, "dp": 4, "vp": 2}, "1F1B wants 1 stage on a rank"),
        ({"ep": 2}, "wants experts, and the model has none"),
        ({"pp": 8, "dp": 1, "vp": 3, "schedule": "interleaved"}, "22 layers do not fill pp 8 · vp 3 stages"),
        ({"global_batch": 60}, "no multiple of local batch 1 · dp 8"),
    ],
)
def test_what_torchtitan_refuses_is_not_written(changes: dict, reason: str) -> None:
    plan = TrainingPlan(64, 4096, dp=8, zero=3, framework="fsdp2").replace(**changes)
    with pytest.raises(InfeasibleError, match=reason):
        emit.emit("torchtitan", MODEL, plan, cluster("1x dgx-h100"))
