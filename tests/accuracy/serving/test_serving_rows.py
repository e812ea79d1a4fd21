"""The published measurements of serving as rows: counts, devices, loads, and what the tables say of themselves."""

from __future__ import annotations

import collections
import gzip
import itertools
import statistics
from pathlib import Path

import pytest

from foretell.accuracy.serving import SOURCES, Row, left_out, rows, silicon_sample
from foretell.accuracy.serving.models import model
from foretell.accuracy.slices import data_folder
from foretell.errors import InputError, UnknownNameError

try:
    DATA = data_folder()
except InputError:
    DATA = Path("absent")
FOLDERS = {
    "silicon-sample": "aiconfigurator-serving",
    "tensorrt-llm": "tensorrt-llm",
    "ml-energy": "ml-energy",
    "splitwise": "splitwise",
}


def read(source: str) -> list[Row]:
    if not (DATA / FOLDERS[source]).is_dir():
        pytest.skip(f"no folder of measurements {FOLDERS[source]!r}: set FORETELL_DATA")
    return rows(source)


def reasons(source: str) -> dict[str, int]:
    return dict(collections.Counter(item.reason for item in left_out(source)))


@pytest.mark.parametrize("source", SOURCES)
def test_plans_fill_their_devices(source: str) -> None:
    for row in read(source):
        p = row.plan
        assert p.tp * p.pp * p.dp == p.devices == row.cluster.device_count == row.gpus, row.label
        assert (p.tp * p.dp) % p.ep == 0, row.label
        assert row.config.heads % p.tp == 0, row.label
        assert row.moe or p.ep == 1, row.label
        assert row.amount >= 1, row.label
        assert row.osl >= 1
        assert row.tpot_s or row.itl_s or row.tokens_per_s or row.ttft_s, row.label


@pytest.mark.parametrize("source", SOURCES)
def test_labels_tell_rows_apart(source: str) -> None:
    labels = [row.label for row in read(source)]
    assert len(set(labels)) == len(labels)


def test_silicon_sample_is_read_whole() -> None:
    found = read("silicon-sample")
    assert len(found) == 1373
    assert reasons("silicon-sample") == {
        "prefill and decode apart": 291,
        "layout contradicts its id": 101,
        "repeats another line": 112,
        "impossible: no slower at eight times the load": 7,
    }
    impossible = [item.label for item in left_out("silicon-sample") if item.reason.startswith("impossible")]
    assert all("gpt_oss_120b_h100_sxm" in label and "_c512_" in label for label in impossible)


def test_silicon_sample_agrees_with_its_ids() -> None:
    """Ids repeat lengths, load and layout of most rows: a reading that no column of the table takes part in."""
    checked = 0
    for row in read("silicon-sample"):
        assert f"_{row.isl:.0f}x{row.osl:.0f}_" in row.label
        if "_c_" not in row.label:
            assert f"_c{row.amount:.0f}_" in row.label
        assert f"_{row.engine}_" in row.label or "_trtllm_" in row.label
        if "_epnone" in row.label or "_cfg" in row.label:
            continue
        checked += 1
        ranks = row.label.partition("_tp")[2].partition("_")[0]
        assert row.gpus == int(ranks), row.label
        assert f"_ep{row.plan.ep}" in row.label
        assert row.per_rank == row.amount / row.plan.dp
    assert checked == 502


def test_silicon_sample_lengths_are_drawn_where_inferencemax_draws_them() -> None:
    """Its three pairs of lengths, and no other table's run has its dates."""
    drawn = [row for row in read("silicon-sample") if row.shortest < 1]
    assert {(row.isl, row.osl) for row in drawn} == {(1024, 1024), (1024, 8192), (8192, 1024)}
    assert len(drawn) == 565
    assert {row.shortest for row in drawn} == {0.8}
    assert drawn[0].mean_osl == pytest.approx(0.9 * drawn[0].osl)
    assert drawn[0].context == pytest.approx(0.9 * (drawn[0].isl + drawn[0].osl / 2))


def test_silicon_sample_prompts_come_from_the_cache_where_nothing_else_explains_them() -> None:
    found = read("silicon-sample")
    cached = [row for row in found if row.cached_isl]
    assert {row.family for row in cached} == {"Llama-3.1-8B-Instruct-FP8"}
    assert len(cached) == 21
    assert max(map(silicon_sample.peak_share, cached)) == pytest.approx(0.83, abs=0.01)
    assert max(silicon_sample.peak_share(row) for row in found if not row.cached_isl) < 0.45
    assert {row.isl - row.cached_isl for row in cached} == {16.0}


def test_silicon_sample_tokens_take_at_least_the_weights() -> None:
    """No device reads an eighth of the weights that one sequence needs faster than its memory gives them."""
    size = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5, "mxfp4": 0.5, "int4": 0.5}
    for row in read("silicon-sample"):
        device = row.cluster.groups[0][1].device
        nbytes = row.config.active_parameters * size[row.precision] / row.gpus
        assert row.tpot_s > 0.8 * nbytes / device.memory_bandwidth_bytes_per_s, row.label


def test_silicon_sample_latencies_are_those_of_a_closed_loop() -> None:
    """The time of a request grows with the load, and with eight times the load it is longer, per layout."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in read("silicon-sample"):
        p = row.plan
        key = (row.family, row.gpu, p.engine, p.version, p.tp, p.dp, p.ep, row.isl, row.osl)
        groups.setdefault(key, []).append(row)
    slower = faster = 0
    for group in groups.values():
        ordered = sorted(group, key=lambda row: row.amount)
        for a, b in itertools.pairwise(ordered):
            if b.amount > a.amount:
                end = [row.ttft_s + (row.osl - 1) * row.tpot_s for row in (a, b)]
                slower, faster = slower + (end[1] > end[0]), faster + (end[1] <= end[0])
                assert a.amount / end[0] < 1.15 * b.amount / end[1] or b.amount < 4 * a.amount, (a.label, b.label)
    assert faster < 0.05 * slower


HEAD = (
    "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,batch_size,tp_size,pp_size,"
    "attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms"
)


def silicon(folder: Path, *table: str) -> None:
    (folder / "aiconfigurator-serving").mkdir(exist_ok=True)
    text = "\n".join((HEAD, *table)).encode()
    (folder / "aiconfigurator-serving" / "silicon_sample.csv.gz").write_bytes(gzip.compress(text))


def test_silicon_sample_columns(tmp_path: Path) -> None:
    moe, dense = "deepseek-ai/DeepSeek-R1", "nvidia/Llama-3.1-8B-Instruct-FP8"
    silicon(
        tmp_path,
        f"a_tp8_0_ep8_0_1,silicon_concurrency=64;,trtllm,1.1,{moe},h200_sxm,fp8,agg,1024,512,8,1,1,8,1,8,100,20",
        f"b_tp1_epnone_2,silicon_concurrency=4,vllm,0.12.0,{dense},b200_sxm,fp4,agg,1000,1,4,1,1,,1,1,10,3",
        f"c_tp2_epnone_3,none,vllm,0.12.0,{moe},gb300,,agg,1000,1,4,2,1,,4,1,10,4",
        f"d_tp8_ep8_4,concurrency=4,trtllm,,{moe},h200_sxm,fp8,agg,1,1,4,64,1,1,8,8,1,1",
        f"e_cfg5,concurrency=4,trtllm,,{moe},h200_sxm,fp8,agg,1,1,4,64,1,1,8,8,1,2",
        f"f_tp8_0_ep8_0_1,concurrency=64,trtllm,1.1,{moe},h200_sxm,fp8,agg,1024,512,8,1,1,8,1,8,100,20",
        f"g,concurrency=64,trtllm,1.1,{moe},h200_sxm,fp8,disagg,1024,512,8,1,1,8,1,8,100,20",
        "h_tp1_ep1,concurrency=64,trtllm,1.1,acme/None-1T,h200_sxm,fp8,agg,1024,512,8,1,1,1,1,1,100,20",
        f"i_tp1_epnone_2,concurrency=32,vllm,0.12.0,{dense},b200_sxm,fp4,agg,1000,1,4,1,1,,1,1,10,3.01",
    )
    a, b, c = rows("silicon-sample", tmp_path)
    assert (a.plan.tp, a.plan.dp, a.plan.ep, a.gpus, a.amount, a.per_rank) == (1, 8, 8, 8, 64.0, 8.0)
    assert (a.config.name, a.precision, a.plan.kv_dtype, a.ttft_s, a.tpot_s) == ("deepseek-v3", "fp8", "fp8", 0.1, 0.02)
    assert (b.config.name, b.gpu, b.precision, b.plan.kv_dtype) == ("llama-3.1-8b", "b200-sxm", "nvfp4", "bf16")
    assert (c.plan.dp, c.gpus, c.amount, c.precision, c.gpu) == (2, 4, 8.0, "bf16", "gb300")
    assert [item.reason for item in left_out("silicon-sample", tmp_path)] == [
        "layout contradicts its id",
        "layout contradicts its id",
        "repeats another line",
        "prefill and decode apart",
        "no configuration of acme/None-1T is known",
        "impossible: no slower at eight times the load",
    ]
    silicon(tmp_path, "a_tp8_ep8,concurrency=1,vllm,1,openai/gpt-oss-20b,tpu,fp8,agg,1,1,8,1,1,8,1,8,1,1")
    with pytest.raises(UnknownNameError, match=r"system in silicon_sample\.csv\.gz:2"):
        rows("silicon-sample", tmp_path)
    silicon(tmp_path, "a_tp8_ep8,concurrency=1,vllm,1,openai/gpt-oss-20b,gb200,fp8,agg,1,1,8,1,1,8,x,8,1,1")
    with pytest.raises(InputError, match="moe_tp_size is 'x'"):
        rows("silicon-sample", tmp_path)
    (tmp_path / "aiconfigurator-serving" / "silicon_sample.csv.gz").write_bytes(b"no")
    with pytest.raises(InputError, match="cannot read the table"):
        rows("silicon-sample", tmp_path)


def test_tensorrt_llm_is_read_whole() -> None:
    found = read("tensorrt-llm")
    assert len(found) == 582
    assert not reasons("tensorrt-llm")
    assert {row.load for row in found} == {"requests"}
    assert {row.plan.version for row in found} == {"0.14.0", "1.0"}
    # Numbers of requests by lengths, as the document's own table of version 0.14 has them.
    stated = {(128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (2048, 128): 3000, (2048, 2048): 1500,
              (5000, 500): 1500, (1000, 1000): 3000, (500, 2000): 3000, (20000, 2000): 1000}  # fmt: skip
    for row in found:
        if row.plan.version == "0.14.0":
            assert row.amount == stated[row.isl, row.osl], row.label


def test_tensorrt_llm_models_of_one_shape_agree() -> None:
    """Llama 3 70B and 3.1 70B are one architecture: their columns agree within 0.87 to 1.13, on average to 1 %."""
    by: dict[tuple[object, ...], dict[str, float]] = {}
    for row in read("tensorrt-llm"):
        if row.family in ("LLaMA v3 70B", "LLaMA v3.1 70B"):
            key = (row.gpu, row.plan.weight_dtype, row.plan.tp, row.isl, row.osl)
            by.setdefault(key, {})[row.family] = row.tokens_per_s
    ratios = [v["LLaMA v3 70B"] / v["LLaMA v3.1 70B"] for v in by.values() if len(v) == 2]
    assert len(ratios) > 90
    assert 0.86 < min(ratios) < max(ratios) < 1.14
    assert statistics.mean(ratios) == pytest.approx(1.0, abs=0.01)


def test_ml_energy_is_read_whole() -> None:
    found = read("ml-energy")
    assert len(found) == 243
    assert reasons("ml-energy") == {
        "image-chat: not text": 92, "video-chat: not text": 39, "not all layers are attention": 31,
    }  # fmt: skip
    assert {row.split for row in found} == {"judge"}


def test_ml_energy_batches_over_gaps_are_throughputs() -> None:
    """Sequences over the time of a token are the tokens of all devices, so one engine holds the whole batch."""
    ratios = [row.tokens_per_s * row.itl_s / row.amount for row in read("ml-energy")]
    assert statistics.median(ratios) == pytest.approx(0.95, abs=0.01)
    assert max(ratios) < 1.07
    for row in read("ml-energy"):
        assert row.amount <= row.plan.max_num_seqs
        assert row.plan.ep in (1, row.plan.tp)
        # A sequence seen while it decodes is a long one: at least half a mean answer is behind it.
        assert row.context - row.isl > 0.49 * row.osl
        assert 0 < row.power_w / row.gpus < 1.05 * 700.0


def test_splitwise_repeats_are_one_row() -> None:
    found = read("splitwise")
    assert len(found) == 76
    assert {row.plan.tp for row in found} == {2, 4, 8}
    judged = [row for row in found if row.ttft_s]
    assert all(row.amount == 1 and row.isl <= 4096 for row in judged)
    assert len(judged) == 48
    # Over four devices and over eight, a token of one Llama-2-70B sequence takes the same: the host's 45 ms.
    floor = [r.tpot_s for r in found if r.plan.tp in (4, 8) and r.amount == 1 and r.family == "llama2-70b"]
    assert 0.042 < min(floor) < max(floor) < 0.047


def test_splitwise_columns(tmp_path: Path) -> None:
    head = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"
    (tmp_path / "splitwise").mkdir()
    (tmp_path / "splitwise" / "perf_model.csv").write_text(
        f"{head}\nllama2-70b,h100-80gb,512,2,128,9,1,4\nllama2-70b,h100-80gb,512,2,128,9,3,4\n"
        "llama2-70b,h100-80gb-pcap,512,2,128,9,3,4\nllama2-70b,h100-80gb,512,2,128,9,2,4\n"
        "llama2-70b,a100-80gb,512,1,128,200,50,2\nfalcon-9b,a100-80gb,512,1,128,200,50,2\n"
    )
    both, alone = rows("splitwise", tmp_path)
    assert (both.tpot_s, both.ttft_s, both.amount, both.gpu) == (2e-3, 0.0, 2, "h100-sxm")
    assert (both.plan.tp, both.plan.weight_dtype) == (4, "fp16")
    assert (alone.ttft_s, alone.context, alone.gpus, alone.plan.cuda_graph) == (0.2, 576.0, 2, False)
    assert [item.reason for item in left_out("splitwise", tmp_path)] == [
        "h100-80gb-pcap: its power is capped", "no configuration of falcon-9b is known",
    ]  # fmt: skip


def test_models_by_any_of_their_names() -> None:
    names = {
        "LLaMA v3.1 70B": "llama-3.1-70b",
        "Qwen/Qwen3-30B-A3B-Thinking-2507": "qwen3-30b-a3b",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": "qwen3-30b-a3b",
        "google/gemma-3-27b-it": "gemma-3-27b",
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": "llama-4-maverick",
        "Mixtral 8x7B": "mixtral-8x7b",
    }
    for name, shape in names.items():
        found = model(name)
        assert found is not None
        assert found.config.name == shape
    assert model("acme/None-1T") is None
    assert model("GLM-5") is not None


def test_unknown_sources_list_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="silicon-sample"):
        rows("silicon-samples", DATA)
