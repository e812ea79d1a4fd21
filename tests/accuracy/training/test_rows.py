"""The published measurements as rows: counts, devices, and what the tables say of themselves."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from foretell.accuracy.slices import data_folder
from foretell.accuracy.training import SOURCES, Row, left_out, megatron_bridge, nemo, rows
from foretell.accuracy.training.row import lines
from foretell.accuracy.training.score import choices
from foretell.errors import ForetellError, InputError, UnknownNameError
from foretell.workload import llm

try:
    DATA = data_folder()
except InputError:
    DATA = Path("absent")
FOLDERS = {
    "calculon": "calculon",
    "vtrain-single": "vtrain",
    "vtrain-multi": "vtrain",
    "llm-foundry": "llm-foundry",
    "nemo": "nemo",
    "nemo-long": "nemo",
    "megatron-bridge": "megatron-bridge",
}


def read(source: str) -> list[Row]:
    if source in FOLDERS and not (DATA / FOLDERS[source]).is_dir():
        pytest.skip(f"no folder of measurements {FOLDERS[source]!r}: set FORETELL_DATA")
    return rows(source)


@pytest.mark.parametrize("source", SOURCES)
def test_plans_fill_their_clusters(source: str) -> None:
    for row in read(source):
        assert row.plan.devices == row.cluster.device_count == row.gpus, row.label
        assert row.plan.tp <= row.config.heads
        assert row.config.heads % row.plan.tp == 0, row.label
        assert row.tokens_per_s == pytest.approx(row.tokens / row.step_s)
        assert row.moe == (row.config.moe is not None)


@pytest.mark.parametrize("source", SOURCES)
def test_labels_tell_rows_apart(source: str) -> None:
    labels = [(row.label, row.step_s) for row in read(source)]
    assert len(set(labels)) == len(labels)


def test_table_5_is_read_whole() -> None:
    found = read("calculon")
    assert len(found) == 8
    # Models of 22, 175, 530 and 1000 billion parameters, by the paper's table 3.
    sizes = {row.family: row.config.parameters / 1e9 for row in found}
    assert sizes == pytest.approx(
        {"megatron-22B": 22, "gpt3-175B": 175, "turing-530B": 530, "megatron-1T": 1008}, rel=0.01
    )
    # The paper's model FLOP utilisation with selective recomputation (its table 5): 41.5 %, 51.4 %, 56.0 %, 56.3 %,
    # of 72·B·s·l·h²·(1 + s/6h + V/12hl) FLOP (its appendix A) at 312 TFLOP/s.
    published = {"megatron-22B": 0.415, "gpt3-175B": 0.514, "turing-530B": 0.560, "megatron-1T": 0.563}
    for row in found:
        if row.plan.recompute == "selective":
            c, s = row.config, row.plan.seq_len
            logits = c.vocab / (12 * c.hidden * c.layers)
            flops = 72 * row.tokens * c.layers * c.hidden**2 * (1 + s / (6 * c.hidden) + logits)
            assert flops / row.step_s / row.gpus / 312e12 == pytest.approx(published[row.family], abs=0.003)
            assert row.plan.sequence_parallel
    assert {row.plan.vp for row in found if row.plan.schedule == "interleaved"} == {3}


def test_single_node_rows_are_split_by_gpus() -> None:
    found = read("vtrain-single")
    assert len(found) == 1440
    assert {row.gpus for row in found if row.split == "fit"} == {2, 4}
    assert {row.gpus for row in found if row.split == "judge"} == {8}


def test_single_node_rows_are_put_together_from_layers() -> None:
    """No noise: with everything else equal, times over 12, 16, 20 and 24 layers lie on a line."""
    lines_of: dict[tuple[object, ...], dict[int, float]] = {}
    for row in read("vtrain-single"):
        p = row.plan
        key = (row.gpus, row.config.hidden, p.global_batch, p.micro_batch, p.tp, p.dp, p.pp)
        lines_of.setdefault(key, {})[row.config.layers] = row.step_s
    off = [abs(times[24] - 2 * times[20] + times[16]) / times[24] for times in lines_of.values()]
    assert len(off) == 1440 / 4
    assert statistics.median(off) < 1e-4


def test_multi_node_rows_have_the_sizes_of_their_names() -> None:
    sizes = {row.family: round(row.config.parameters / 1e9, 1) for row in read("vtrain-multi")}
    assert sizes == {"gpt-30x3072": 3.6, "gpt-40x6144": 18.4, "gpt-48x8192": 39.1, "gpt-96x12288": 174.6}
    assert {row.gpus for row in read("vtrain-multi")} == {64, 256, 512}


def test_mpt_shapes_have_the_parameters_of_the_table() -> None:
    """To the last digit, for every model and sequence length: so biases and positions are as the module says."""
    found = read("llm-foundry")
    table = list(lines(DATA / "llm-foundry" / "mpt_training_throughput.csv"))
    assert len(found) == len(table)
    for row, line in zip(found, table, strict=True):
        assert row.config.parameters == line.number("NumParams"), row.label
        # Micro-batches, accumulation and devices make up the batch; the last micro-batch may be smaller.
        assert -(-row.plan.global_batch // (row.plan.micro_batch * row.gpus)) == line.count("GradAccum"), row.label


def test_mpt_throughput_gives_the_flops_of_the_table() -> None:
    """The README's formula: 6 FLOP a parameter, and attention in full."""
    for row in read("llm-foundry"):
        c = row.config
        flops = 6 * c.parameters + 12 * c.layers * c.hidden * row.plan.seq_len
        # Figures are whole TFLOP/s, cut off or rounded, of throughput in whole tokens.
        assert flops * row.tokens_per_s / row.gpus / 1e12 == pytest.approx(row.stated_tflops, rel=0.002, abs=1.0)


MPT = (
    "section,Model,SeqLen (T),# GPUs,GPU,MFU,HFU,Model TFLOP,MicroBatchSize,GradAccum,GlobalBatchSize,"
    "Throughput (S/s),Throughput (T/s),Throughput (T/s/GPU),GlobalBatchSize (T),Precision,MP Mode,Sharding Strategy,"
    "Activation Checkpointing,Activation CPUOffload,NumParams"
)


def test_mpt_options_are_read(tmp_path: Path) -> None:
    def line(gpus: int, stated: str, precision: str, mode: str, sharding: str, kept: bool, offload: bool) -> str:
        return (
            f"s,1b,2048,{gpus},h100_80gb,1,1,{stated},2,4,{8 * gpus},1,{1000 * gpus},1000,1,{precision},{mode},"
            f"{sharding},{not kept},{offload},1"
        )

    (tmp_path / "llm-foundry").mkdir()
    table = (
        line(16, "4.5E+14", "amp_fp8", "DEFAULT", "SHARD_GRAD_OP", True, False),
        line(4, "450", "bf16", "PURE", "HYBRID_SHARD", False, False),
        line(8, "450", "bf16", "PURE", "FULL_SHARD", False, True),
    )
    (tmp_path / "llm-foundry" / "mpt_training_throughput.csv").write_text("\n".join((MPT, *table)))
    fp8, hybrid = rows("llm-foundry", tmp_path)
    assert (fp8.plan.precision, fp8.plan.grad_dtype, fp8.plan.zero, fp8.plan.recompute) == ("fp8", "fp32", 2, "none")
    assert (fp8.cluster.name, fp8.stated_tflops, fp8.tokens_per_s) == ("2x dgx-h100", 450.0, 16_000.0)
    assert (hybrid.plan.grad_dtype, hybrid.plan.zero, hybrid.plan.shard) == ("bf16", 3, 8)
    assert (hybrid.plan.recompute, hybrid.cluster.name) == ("full", "4x h100-sxm")
    assert [item.reason for item in left_out("llm-foundry", tmp_path)] == ["offloads activations to the host"]


def test_nemo_throughput_gives_the_flops_of_the_table() -> None:
    found = read("nemo")
    assert len(found) == 18
    for row in found:
        c, seen = row.config, row.plan.seq_len
        # Documents attend to themselves only, and of a mask's scores half are counted there.
        flops = nemo.flops_per_token(c, row.plan.document_len // 2 if row.plan.document_len else seen)
        if row.plan.lora_rank:  # frozen weights have no gradient
            flops *= 2 / 3
        assert flops * row.tokens_per_s / row.gpus / 1e12 == pytest.approx(row.stated_tflops, rel=0.007), row.label


def test_fine_tuning_takes_chunks_from_pre_training() -> None:
    found = {(row.family, row.task): row.plan.vp for row in read("nemo")}
    assert found["LLAMA2-70B", "sft"] == found["LLAMA2-70B", "pretrain"] == 20
    assert found["LLAMA2-13B", "sft"] == 10
    assert found["LLAMA2-13B", "lora"] == 1  # no pipeline


def test_long_sequences_without_a_layout_are_left_out() -> None:
    assert len(read("nemo-long")) == 9
    assert len(left_out("nemo-long")) == 6
    assert {row.plan.cp for row in read("nemo-long")} == {1, 2, 4, 8, 16, 32}


def bridge_flops(row: Row) -> float:
    """FLOP of a token as Megatron Bridge counts them: the causal half of attention; of fine-tuning, all of it."""
    c, seen = row.config, row.plan.seq_len
    weights = llm.count_parameters(c, active=True, lookups=False)
    if c.activation == "swiglu_clamped":  # two of three matrices: it takes anything but SiLU for an MLP of two
        weights -= c.layers * c.moe.top_k * c.hidden * c.moe.intermediate
    if row.plan.lora_rank:  # by the length of the documents, of which attention is next to nothing
        return 4.0 * weights
    # Windows are not counted: a sliding layer like a full one.
    return 6.0 * weights + 6.0 * c.layers * c.heads * (c.query_dim + c.value_dim) * seen / 2


def test_bridge_throughput_gives_the_flops_of_the_table() -> None:
    """Half of the rows of every model within 0.7 %; a few lines of the tables mix figures of two runs."""
    off: dict[str, list[float]] = {}
    for row in read("megatron-bridge"):
        found = bridge_flops(row) * row.tokens_per_s / row.gpus / 1e12
        off.setdefault(f"{row.family} {row.task}", []).append(abs(found / row.stated_tflops - 1))
    assert len(off) >= 8
    assert all(statistics.median(errors) < 0.007 for errors in off.values()), off


def test_bridge_micro_batches_are_those_of_the_table() -> None:
    lines_of = list(lines(DATA / "megatron-bridge" / megatron_bridge.TABLE)) if read("megatron-bridge") else []
    found = megatron_bridge.read(DATA)
    said = [(row, line.count("ga")) for row, line in zip(found, lines_of, strict=True)
            if isinstance(row, Row) and line.text("ga")]  # fmt: skip
    wrong = {row.label: count for row, count in said if row.plan.micro_batches != count}
    assert len(said) >= 10
    # One line of the table is at odds with itself: 512 sequences are 8 micro-batches of 4 on 16 ranks, not 2.
    assert len(wrong) <= 1, wrong


def test_bridge_rows_left_out_have_reasons() -> None:
    found, left = read("megatron-bridge"), left_out("megatron-bridge")
    assert len(found) + len(left) == len(list(lines(DATA / "megatron-bridge" / megatron_bridge.TABLE)))
    assert all("emotron" in item.label or "ext" in item.label for item in left if item.reason.startswith("hybrid"))
    assert not any("emotron" in row.label for row in found)
    assert {row.container for row in found if row.split == "judge"}.isdisjoint({"25.09", "25.11", "26.02"})


@pytest.mark.parametrize(
    ("model", "pp", "vp", "ends"),
    [
        ("llama-3.1-405b", 8, 8, (15, 15)),  # a chunk less for embedding and head
        ("llama-3.1-405b", 16, 4, (7, 7)),
        ("qwen3-235b-a22b", 8, 4, (11, 11)),
        ("qwen3-30b-a3b", 2, 12, (0, 0)),
        ("kimi-k2", 16, 1, (0, 1)),  # four layers each, the last has one
        ("kimi-k2", 1, 1, (0, 0)),
    ],
)
def test_uneven_pipelines_have_short_ends(model: str, pp: int, vp: int, ends: tuple[int, int]) -> None:
    assert megatron_bridge.ends(llm.config(model), pp, vp) == ends


BRIDGE = (
    "file,container,task,variant,model_note,model,system,num_gpus,precision,gbs,mbs,seq_len,fsdp,tp,pp,cp,vp,ep,ga,"
    "tokens_per_s_per_gpu,model_tflops_per_gpu"
)


@pytest.mark.parametrize(
    ("gpus", "system", "name"),
    [
        (64, "DGX-GB200", "64x gb200"),
        (72, "DGX-GB300", "72x gb300"),
        (256, "DGX-GB300", "4x 64x gb300 over 64x ib-xdr"),
        (144, "DGX-GB200", "2x 72x gb200 over 72x ib-ndr"),
        (4, "DGX-B300", "4x b300-sxm"),
        (128, "DGX-B200", "16x dgx-b200"),
    ],
)
def test_systems_become_clusters(tmp_path: Path, gpus: int, system: str, name: str) -> None:
    (tmp_path / "megatron-bridge").mkdir()
    line = f"f,26.04 NeMo,Pre-Training Performance,primary,,LLAMA3_8B,{system},{gpus},BF16,{gpus},1,8192,0,1,1,1,n/a"
    path = tmp_path / "megatron-bridge" / megatron_bridge.TABLE
    path.write_text(f"{BRIDGE}\n{line},n/a,,100,5\n")
    (row,) = rows("megatron-bridge", tmp_path)
    assert (row.cluster.name, row.cluster.device_count, row.plan.dp) == (name, gpus, gpus)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("LLAMA3_8B", "Nemotron_3_Nano"), "hybrid"),
        (("LLAMA3_8B", "LLAMA9_8B"), "no configuration"),
        (("primary,,", "primary,tokendrop,"), "drops tokens"),
        (("DGX-H100", "DGX-R9"), "'DGX-R9' is not known"),
        (("BF16", "FP2"), "'FP2' is not known"),
        (("0,1,1,1,n/a", "0,3,1,1,n/a"), "does not divide"),
    ],
)
def test_what_cannot_be_predicted_is_left_out(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    (tmp_path / "megatron-bridge").mkdir()
    line = "f,26.04 NeMo,Pre-Training Performance,primary,,LLAMA3_8B,DGX-H100,8,BF16,8,1,8192,0,1,1,1,n/a,n/a,,100,5"
    path = tmp_path / "megatron-bridge" / megatron_bridge.TABLE
    path.write_text(f"{BRIDGE}\n{line}\n")
    assert len(rows("megatron-bridge", tmp_path)) == 1
    path.write_text(f"{BRIDGE}\n{line.replace(*change)}\n")
    assert rows("megatron-bridge", tmp_path) == []
    (left,) = left_out("megatron-bridge", tmp_path)
    assert reason in left.reason


def test_vtrain_has_the_groups_of_alternatives() -> None:
    for source, groups in (("vtrain-single", 144), ("vtrain-multi", 4)):
        found = read(source)
        assert len(choices(found, [row.step_s for row in found])) == groups


def test_an_unknown_source_is_named() -> None:
    with pytest.raises(UnknownNameError, match="vtrian"):
        rows("vtrian", DATA)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("8,32,four,1024,16,24,1024,2,2,2,219.7", "micro batch is 'four'"),
        ("8,32,0,1024,16,24,1024,2,2,2,219.7", "micro batch is '0'"),
        ("8,32,4,1024,16,24,1024,2,2,2,-1", "iteration time"),
        ("8,32,4,1024,16,24,1024,2,2,2,nan", "iteration time"),
        ("8,32,4,1024,16", "no column"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    header = (
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
        "data parallelism,pipeline parallelism,iteration time (ms)"
    )
    (tmp_path / "vtrain").mkdir()
    (tmp_path / "vtrain" / "ground_truth_single_node.csv").write_text(f"{header}\n{line}\n")
    with pytest.raises(ForetellError, match="csv:2") as error:
        rows("vtrain-single", tmp_path)
    assert said in str(error.value)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ground_truth_multi_node\.csv"):
        rows("vtrain-multi", tmp_path)


def test_utilisation_of_llama_3_is_the_papers() -> None:
    # Table 4: 43 % of the 989 TFLOP/s of bf16 on 8,192 devices, 41 % on 16,384 (the table rounds 400 / 989 up).
    for row, mfu in zip(rows("llama-3"), (0.43, 0.41), strict=True):
        assert row.stated_tflops * 1e12 / 989e12 == pytest.approx(mfu, abs=0.006)
        assert row.tokens == 2**24  # "16 M tokens a batch"
