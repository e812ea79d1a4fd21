"""Memory of distributed training: closed forms of papers, a brute-force count of a graph, published measurements, and
what must hold of any plan."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell import hardware
from foretell.simulate.training import CHOICES, PlanTable, TrainingPlan
from foretell.simulate.training.memory import ALLOCATED, PARTS, MemoryTable, by_rank, memory
from foretell.workload import llm
from foretell.workload.llm.config import LLMConfig

GIB = 2**30
DATA = Path(os.environ.get("FORETELL_DATA", Path(__file__).parents[3] / "shared" / "data"))
H100 = hardware.device("h100-sxm")


def gpt(hidden: int, heads: int, layers: int) -> LLMConfig:
    """A transformer of Korthikanti et al., of one word, so that only its layers count."""
    return LLMConfig(
        name="gpt", layers=layers, hidden=hidden, heads=heads, intermediate=4 * hidden, vocab=1, gated=False,
        activation="gelu", norm="layer", norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, positions="none",
        tied_embeddings=True,
    )  # fmt: skip


def one(config: LLMConfig, plan: TrainingPlan, **options: Any) -> MemoryTable:
    return memory(config, PlanTable.of([plan]), H100, **options)


def random_table(rows: int, seed: int = 0) -> PlanTable:
    """Plans of every framework, schedule and setting, most of them not clever."""
    rng = np.random.default_rng(seed)
    pp = rng.choice([1, 2, 4, 8], rows)
    vp = np.where(pp > 1, rng.choice([1, 2, 3], rows), 1)
    columns: dict[str, Any] = {
        name: rng.integers(0, len(CHOICES[name]), rows) for name in CHOICES if name not in ("schedule", "attention")
    }
    columns |= {
        "attention": rng.choice([0, 0, 0, 1], rows),
        "schedule": np.where(vp > 1, CHOICES["schedule"].index("interleaved"), rng.choice([0, 1, 3], rows)),
        "pp": pp, "vp": vp, "tp": rng.choice([1, 2, 4, 8], rows), "cp": rng.choice([1, 2, 4], rows),
        "dp": rng.choice([1, 2, 8, 32], rows), "ep": rng.choice([1, 2], rows), "zero": rng.integers(0, 4, rows),
        "micro_batch": rng.choice([1, 2, 3], rows), "seq_len": rng.choice([512, 4096], rows),
        "sequence_parallel": rng.integers(0, 2, rows), "overlap_tp": rng.integers(0, 2, rows),
        "recompute_layers": rng.choice([0, 0, 1, 5], rows), "first_layers": rng.choice([0, 0, 2], rows),
        "last_layers": rng.choice([0, 0, 1], rows), "shard": rng.choice([0, 0, 4], rows),
        "lora_rank": rng.choice([0, 0, 8], rows),
    }  # fmt: skip
    columns["global_batch"] = columns["micro_batch"] * columns["dp"] * pp * rng.choice([1, 2, 4], rows)
    return PlanTable.build(columns, rows)


# --- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "parallel"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_those_of_korthikanti(tp: int, parallel: bool, recompute: str) -> None:
    s, b, h, a = 2048, 4, 6144, 64
    found = one(gpt(h, a, 1), TrainingPlan(b, s, micro_batch=b, tp=tp, sequence_parallel=parallel, recompute=recompute,
                                           attention="unfused"), dropout=True)  # fmt: skip
    rest = 34 / tp if parallel else 10 + 24 / tp
    scores = 5 * a * s / h / tp
    expected = {"none": rest + scores, "selective": rest, "full": 2 / (tp if parallel else 1)}[recompute]
    statistics = 0 if recompute == "full" else 16 / h / (tp if parallel else 1)  # which the paper leaves out
    assert found["activations"][0] == pytest.approx(s * b * h * (expected + statistics), rel=1e-12)


def test_states_are_18_bytes_a_parameter_or_6_and_12_shared() -> None:
    config = llm.config("llama-2-7b").replace(vocab=32_768)
    for zero, dp, each in ((0, 1, 18.0), (0, 4, 18.0), (1, 1, 18.0), (1, 4, 6 + 12 / 4), (2, 4, 2 + 16 / 4)):
        found = one(config, TrainingPlan(64, 2048, dp=dp, zero=zero))
        states = sum(found[part][0] for part in ("parameters", "gradients", "optimizer"))
        assert states == pytest.approx(each * config.parameters, rel=1e-12), (zero, dp)


def test_tensor_parallel_ranks_share_matrices_and_repeat_norms_and_key_heads() -> None:
    config = llm.config("llama-3-70b").replace(layers=1)  # 8 heads of keys and values
    h, keys = config.hidden, 2 * config.hidden * 8 * config.head_dim
    norms, matrices = 3 * h, config.parameters - 3 * config.hidden - keys
    for tp, key_ranks in ((2, 2), (8, 8), (16, 8)):
        padding = -config.vocab % (128 * tp) * 2 * h
        expected = norms + (matrices + padding) / tp + keys / key_ranks
        assert one(config, TrainingPlan(8, 512, tp=tp))["parameters"][0] == pytest.approx(2 * expected, rel=1e-12)


def test_experts_are_shared_out_over_expert_ranks_and_fewer_replicas() -> None:
    config = llm.config("mixtral-8x7b")
    assert config.moe is not None
    routed = config.layers * 3 * config.hidden * config.moe.intermediate * config.moe.experts
    one_rank = one(config, TrainingPlan(64, 512, dp=8, ep=1))
    spread = one(config, TrainingPlan(64, 512, dp=8, ep=4))
    # Of the routed weights a rank then has a quarter, whose optimiser state two ranks share instead of eight.
    assert one_rank["parameters"][0] - spread["parameters"][0] == pytest.approx(2 * routed * 3 / 4)
    assert one_rank["optimizer"][0] - spread["optimizer"][0] == pytest.approx(0.0, abs=1.0)


def test_tied_embeddings_are_on_both_ends_of_a_pipeline_and_once_on_one_rank() -> None:
    config = gpt(1024, 16, 4).replace(vocab=128 * 400)
    table = 128 * 400 * 1024
    whole = one(config, TrainingPlan(4, 512))["parameters"][0]
    ends = by_rank(config, TrainingPlan(4, 512, pp=2), H100)["parameters"]
    assert whole == 2 * config.parameters
    assert ends.sum() == whole + 2 * table


def test_sharded_states_of_zero_3_fall_as_the_ranks_grow() -> None:
    config = llm.config("llama-3-8b")
    for framework in ("megatron", "deepspeed", "fsdp2"):
        alone = one(config, TrainingPlan(64, 512, zero=3, framework=framework))
        for dp in (2, 8, 64):
            found = one(config, TrainingPlan(64, 512, dp=dp, zero=3, framework=framework))
            for part in ("parameters", "gradients", "optimizer"):
                assert found[part][0] == pytest.approx(alone[part][0] / dp, rel=1e-12), (framework, dp, part)


# --- a count of what a graph keeps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-xl", "llama-3-8b", "falcon-7b", "phi-2", "gemma-2-9b", "olmo-2-7b", "qwen3-8b"])
def test_activations_are_what_the_training_graph_holds_after_its_forward_pass(name: str) -> None:
    batch, length = 2, 256

    def counted(layers: int) -> tuple[float, float]:
        config = llm.config(name).replace(layers=layers)
        graph = llm.graph(config, phase="train", batch=batch, seq_len=length, fused=True)
        end = max(i for i, op in enumerate(graph.ops) if op.phase == "forward")
        held = sum(s.nbytes for s in graph.storages
                   if s.role not in ("parameter", "gradient", "optimizer") and 0 <= s.born <= end
                   and (s.dies is None or s.dies > end))  # fmt: skip
        return held, float(one(config, TrainingPlan(batch, length, micro_batch=batch))["activations"][0])

    (few, mine_few), (many, mine_many) = counted(2), counted(4)
    graph_bytes, mine = (many - few) / 2, (mine_many - mine_few) / 2
    config = llm.config(name)
    if config.positions == "rope" and config.qk_norm == "none":
        # In the graph v is a view of the joint projection, whose q and k part lives on beside the rotated ones; real
        # kernels get a copy of v.
        graph_bytes -= 2 * batch * length * (config.heads + config.kv_heads) * config.head_dim
    assert mine == pytest.approx(graph_bytes, rel=1e-6)


# --- published figures ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (DATA / "calculon").is_dir(), reason="no folder calculon in FORETELL_DATA")
def test_figures_1_and_7_of_korthikanti() -> None:
    with (DATA / "calculon" / "korthikanti_fig1_fig7_memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    settings = {"none": (False, "none"), "seq": (True, "none"), "sel": (False, "selective"),
                "seqsel": (True, "selective"), "full": (False, "full")}  # fmt: skip

    def parts(row: dict[str, str], mode: str) -> tuple[float, float]:
        config = gpt(int(row["hidden"]), int(row["attn_heads"]), int(row["num_blocks"]))
        parallel, recompute = settings[mode]
        plan = TrainingPlan(
            int(row["batch_size"]), int(row["seq_size"]), micro_batch=int(row["microbatch_size"]),
            tp=int(row["tensor_par"]), pp=int(row["pipeline_par"]), vp=int(row["pipeline_interleaving"]), zero=0,
            sequence_parallel=parallel, recompute=recompute, attention="unfused",
        )  # fmt: skip
        first = by_rank(config, plan, hardware.device("a100-sxm4-80gb"), dropout=True)
        return float(sum(first[part][0] for part in ("parameters", "gradients", "optimizer"))), first["activations"][0]

    worst = 0.0
    for row in rows:
        states, activations = parts(row, row["recompute_mode"])
        value = float(row["value"])
        if row["quantity"].startswith("param"):
            assert states / GIB == pytest.approx(value, rel=5e-3)
        elif row["quantity"].startswith("activation_gib"):
            assert activations / GIB == pytest.approx(value, rel=5e-3)
        else:  # read off a figure: in points of the bar that is 100
            percent = 100 * activations / parts(row, "none")[1]
            worst = max(worst, abs(percent - value))
    assert worst < 0.15


# SimuMax (MooreThreads), docs/b200/b200_release_v1.2_summary.md, 2026: max_memory_allocated of Megatron-LM on 8 B200,
# in GiB, the most of all ranks; 4 micro-batches of one sequence of 4,096 tokens, bf16, fused cross entropy, distributed
# optimizer, sequence parallelism. Models are cut to a few layers.
MEASURED = [
    ("llama-3-70b", 12, {"pp": 2, "dp": 4}, 66.55),
    ("llama-3-70b", 12, {"tp": 2, "dp": 4}, 60.68),
    ("llama-3-70b", 12, {"tp": 8}, 28.29),
    ("llama-3.1-405b", 4, {"pp": 2, "dp": 4}, 87.08),
    ("llama-3.1-405b", 4, {"tp": 4, "dp": 2}, 52.89),
    ("deepseek-v2", 4, {"dp": 8, "ep": 8}, 45.63),
    ("deepseek-v3", 4, {"dp": 4, "ep": 4, "pp": 2}, 114.00),
    ("llama-3-70b", 12, {"tp": 2, "cp": 4, "seq_len": 131_072, "context_scheme": "a2a"}, 112.67),
]


@pytest.mark.parametrize(("name", "layers", "plan", "gib"), MEASURED)
def test_memory_that_megatron_allocated(name: str, layers: int, plan: dict[str, Any], gib: float) -> None:
    config = llm.config(name)
    # The tokenizer of those runs adds one word; they ran 16 heads of keys and values of the largest model.
    config = config.replace(layers=layers, vocab=config.vocab + 1, **({"kv_heads": 16} if "405b" in name else {}))
    if config.moe is not None:
        config = config.replace(moe=dataclasses.replace(config.moe, first_dense=1))
    plan = {"global_batch": 4 * plan.get("dp", 1), "seq_len": 4096, **plan}
    found = memory(config, PlanTable.of([TrainingPlan(**plan)]), hardware.device("b200-sxm"), loss_fusion=True)
    assert found.allocated_bytes[0] / GIB == pytest.approx(gib, rel=0.005)


# --- what holds of any plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "gpt2", "gemma-2-9b"])
def test_parts_are_not_negative_and_sum_to_the_peak(name: str) -> None:
    found = memory(llm.config(name), random_table(500), H100)
    for part in PARTS:
        assert (found[part] >= 0).all(), part
    np.testing.assert_allclose(sum(found[part] for part in ALLOCATED), found.allocated_bytes)
    np.testing.assert_allclose(sum(found[part] for part in PARTS), found.peak_bytes)
    assert (found.reserved_bytes >= found.allocated_bytes).all()


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v2-lite", "gemma-2-9b"])
def test_more_recomputation_never_takes_more_memory(name: str) -> None:
    config, table = llm.config(name), random_table(500, seed=1)
    steps = [("none", 0), ("selective", 0), ("full", 1), ("full", 3), ("full", 0)]
    peaks = []
    for recompute, layers in steps:
        column = np.full(len(table), CHOICES["recompute"].index(recompute))
        changed = PlanTable({**table.columns, "recompute": column, "recompute_layers": np.full(len(table), layers)})
        peaks.append(memory(config, changed, H100).peak_bytes)
    assert (peaks[1] <= peaks[0] * (1 + 1e-12)).all()
    for fewer, more in itertools.pairwise(peaks[2:]):
        assert (more <= fewer * (1 + 1e-12)).all()
    assert (peaks[2] <= peaks[0] * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "gemma-2-9b"])
def test_memory_is_that_of_the_fullest_rank(name: str) -> None:
    config, table = llm.config(name), random_table(60, seed=2)
    found = memory(config, table, H100)
    for row in range(len(table)):
        ranks = by_rank(config, table.plan(row), H100)
        assert len(ranks) == table["pp"][row]
        assert found.peak_bytes[row] == pytest.approx(ranks.peak_bytes.max(), rel=1e-12)
        assert ranks.peak_bytes[found.rank[row]] == pytest.approx(found.peak_bytes[row], rel=1e-12)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    config, table = llm.config("deepseek-v2-lite"), random_table(50, seed=3)
    together = memory(config, table, H100)
    for row in (0, 17, 49):
        alone = memory(config, table.take([row]), H100)
        assert alone.breakdown(0) == pytest.approx(together.breakdown(row))


def test_a_table_without_rows() -> None:
    assert len(memory(llm.config("gpt2"), random_table(4).take(np.zeros(4, dtype=bool)), H100)) == 0
