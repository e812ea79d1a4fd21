"""The published measurements as rows: counts, devices, and what the tables say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.accuracy.slices import data_folder
from foretell.accuracy.training import SOURCES, Row, left_out, nemo, rows
from foretell.accuracy.training.row import lines
from foretell.errors import ForetellError, InputError, UnknownNameError

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
}


def read(source: str) -> list[Row]:
    if not (DATA / FOLDERS[source]).is_dir():
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
    labels = [row.label for row in read(source)]
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
