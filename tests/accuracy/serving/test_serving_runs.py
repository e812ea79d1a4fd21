"""Runs of an engine request by request, kernels of a profile, and budgets of a cache."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from foretell.accuracy.serving.cache_budgets import budgets
from foretell.accuracy.serving.llmservingsim import host_s, messages_s, plan_of, profiled, runs
from foretell.accuracy.serving.profiled import Grid, Profiled
from foretell.accuracy.slices import data_folder
from foretell.errors import InputError
from foretell.simulate.serving import Batch, ServingPlan
from foretell.workload import llm

try:
    DATA = data_folder()
except InputError:
    DATA = Path("absent")
needs_runs = pytest.mark.skipif(
    not (DATA / "llmservingsim").is_dir(), reason="no folder of measurements 'llmservingsim': set FORETELL_DATA"
)


@needs_runs
def test_runs_are_laid_out_as_their_settings_say() -> None:
    found = {run.label: run for run in runs(DATA)}
    layouts = {name: (run.plan.tp, run.plan.dp, run.plan.ep, run.plan.devices) for name, run in found.items()}
    assert layouts == {
        "Llama-3.1-8B": (1, 1, 1, 1), "Qwen3-30B-A3B-Instruct-2507": (1, 2, 2, 2), "Qwen3-32B": (2, 1, 1, 2),
    }  # fmt: skip
    for run in found.values():
        assert len(run.requests) == len(run.ttft_s) == 300
        assert run.plan.max_num_batched_tokens == 2048
        assert (run.ttft_s > 0).all()
        assert (run.tpot_s > 0).all()
        # The last token comes after the first by as many tokens as were asked for.
        end = run.requests.arrival_s + run.ttft_s + (run.requests.output_tokens - 1) * run.tpot_s
        assert np.allclose(end, run.finished_s, atol=1e-6)


@needs_runs
def test_runs_obey_littles_law() -> None:
    """Requests in the system on average, counted each second by the engine, are arrivals times time in the system."""
    for run in runs(DATA):
        table = DATA / "llmservingsim" / f"RTXPRO6000__{run.label}" / "vllm_timeseries.csv"
        with table.open() as file:
            seen = [float(line["running"]) + float(line["waiting"]) for line in csv.DictReader(file)]
        seconds = run.finished_s.max()
        expected = float((run.finished_s - run.requests.arrival_s).sum()) / seconds
        assert np.sum(seen) / seconds == pytest.approx(expected, rel=0.06), run.label


@needs_runs
def test_profiles_are_interpolated_exactly_where_they_were_taken() -> None:
    run = runs(DATA)[0]
    iterations = profiled(run)
    tables = {}
    for name in ("dense", "per_sequence", "attention"):
        with gzip.open(run.profile / f"{name}.csv.gz", "rt") as file:
            tables[name] = list(csv.DictReader(file))
    dense = {(line["layer"], line["tokens"]): float(line["time_us"]) for line in tables["dense"]}
    heads = {(line["layer"], line["sequences"]): float(line["time_us"]) for line in tables["per_sequence"]}
    attention = {tuple(list(line.values())[:4]): float(line["time_us"]) for line in tables["attention"]}
    names = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    expected = 32 * (sum(dense[name, "64"] for name in names) + 2 * dense["layernorm", "64"])
    expected += 32 * attention["0", "0", "64", "1024"]
    expected += dense["embedding", "64"] + dense["final_layernorm", "64"]
    expected += heads["lm_head", "64"] + heads["sampler", "64"]
    batch = Batch.of(decode_seqs=64, decode_tokens=64 * 1023)  # and the new token
    assert float(iterations.time_s(batch)[0]) == pytest.approx(expected * 1e-6 + host_s(run.plan, batch)[0], rel=1e-9)


def test_a_grid_is_linear_between_and_beyond_its_knots() -> None:
    x, y = np.array([0.0, 1.0, 4.0]), np.array([0.0, 2.0, 4.0, 8.0])
    points = {(float(a), float(b)): 3 * a + 5 * b + a * b for a, b in itertools.product(x, y)}
    del points[4.0, 8.0]
    grid = Grid.of(points, (x, y))
    assert grid.at(np.array([0.5, 2.0]), np.array([1.0, 3.0])) == pytest.approx([7.0, 27.0])
    assert grid.at(np.array([4.0]), np.array([8.0])).tolist() == [84.0]  # continued from (4, 2) and (4, 4)
    assert grid.at(np.array([1.0]), np.array([16.0])).tolist() == [99.0]
    with pytest.raises(InputError, match="have no value"):
        Grid.of({(0.0, 0.0): 1.0}, (x, y))


def profile(folder: Path) -> Path:
    """A profile in which a layer takes 1 µs a token, attention 1 µs a thousand pairs, and a sequence's head 2 µs."""
    place = folder / "tp1"
    place.mkdir(parents=True)

    def write(name: str, head: str, rows: list[str]) -> None:
        (place / f"{name}.csv.gz").write_bytes(gzip.compress("\n".join((head, *rows)).encode()))

    write("dense", "layer,tokens,time_us", [f"o_proj,{n},{n}" for n in (1, 16, 32)])
    write("per_sequence", "layer,sequences,time_us", [f"lm_head,{n},{2 * n}" for n in (1, 16)])
    axis = (0, 16, 32, 1024)
    rows = []
    for chunk, before, n, cached in itertools.product(axis, axis, (0, 1, 16), axis):
        skipped = (before and not chunk) or (cached and not n) or (n and not cached)
        if (chunk or n) and not skipped:
            rows.append(f"{chunk},{before},{n},{cached},{(chunk * (before + chunk / 2) + n * cached) / 1000}")
    write("attention", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", rows)
    hit = [f"{m},{k},{m + 10 * k}" for m, k in itertools.product((1, 16, 32), (2, 4, 8)) if k <= 2 * m]
    write("moe", "tokens,activated_experts,time_us", hit)
    return place


def test_a_profile_adds_up(tmp_path: Path) -> None:
    config = llm.config("llama-3.2-1b").replace(layers=4)
    made = Profiled.of(
        config, ServingPlan(), profile(tmp_path), kv_capacity_tokens=100, kv_bytes_per_token=2.0,
        besides=lambda batch: np.full(len(batch), 1e-3),
    )  # fmt: skip
    batch = Batch.of(decode_seqs=[16, 0, 0], decode_tokens=[16 * 31, 0, 0], prefill_seqs=[0, 2, 0],
                     prefill_tokens=[0, 32, 0])  # fmt: skip
    decode, prompts, nothing = made.time_s(batch)
    assert decode == pytest.approx(1e-3 + 4 * (16 + 16 * 32 / 1000) * 1e-6 + 32e-6)
    assert prompts == pytest.approx(1e-3 + 4 * (32 + 2 * 16 * 8.5 / 1000) * 1e-6 + 4e-6)
    assert nothing == 0.0


def test_experts_of_a_profile_get_the_tokens_of_all_ranks(tmp_path: Path) -> None:
    config = llm.config("qwen3-30b-a3b").replace(layers=1, moe=llm.MoE(16, 2, 768))
    place = profile(tmp_path)

    def made(plan: ServingPlan) -> Profiled:
        return Profiled.of(config, plan, place, kv_capacity_tokens=100, kv_bytes_per_token=2.0,
                           besides=lambda batch: np.zeros(len(batch)))  # fmt: skip

    one, two = made(ServingPlan()), made(ServingPlan(dp=2, ep=2))
    batch = Batch.of(decode_seqs=[4, 4, 4], decode_tokens=[64, 64, 64])
    hit = 16 * (1 - (1 - 2 / 16) ** 8) / 2  # of the eight experts of a rank, by eight tokens of both
    difference = two.time_s(batch) - one.time_s(batch)
    alone = 16 * (1 - (1 - 2 / 16) ** 4)
    assert difference == pytest.approx(np.full(3, 10e-6 * (hit - alone)))
    # One rank has twelve tokens and the other four: the experts get sixteen, whichever is asked.
    uneven = Batch.of(decode_seqs=[12, 4], decode_tokens=[192, 64], rank_tokens=8)
    even = Batch.of(decode_seqs=8, decode_tokens=128)
    experts = two.time_s(uneven) - made(ServingPlan()).time_s(Batch.of(decode_seqs=[12, 4], decode_tokens=[192, 64]))
    assert two._routed(uneven).tolist() == pytest.approx([two._routed(even)[0]] * 2)
    assert experts[1] > experts[0]


def test_messages_take_what_the_link_gives() -> None:
    config = llm.config("qwen3-32b")  # 64 layers of 5,120
    batch = Batch.of(decode_seqs=100, decode_tokens=1000)
    seconds = messages_s(config, ServingPlan(tp=2), batch)
    assert seconds.tolist() == pytest.approx([64 * 2 * 2 * (100 * 5120 / 16e9 + 20e-6)])
    assert messages_s(config, ServingPlan(), batch).tolist() == [0.0]


def test_settings_that_are_no_bf16_engine_are_refused(tmp_path: Path) -> None:
    kwargs = {
        "dtype": "float16", "kv_cache_dtype": "auto", "tensor_parallel_size": 1, "data_parallel_size": 1,
        "enable_expert_parallel": False, "max_num_seqs": 8, "max_num_batched_tokens": 512,
    }  # fmt: skip
    with pytest.raises(InputError, match="bf16"):
        plan_of({"engine_kwargs": kwargs, "vllm_version": "0.19.0"})
    plan = plan_of({"engine_kwargs": {**kwargs, "dtype": "bfloat16"}, "vllm_version": "0.19.0"})
    assert (plan.max_num_seqs, plan.max_num_batched_tokens, plan.ep) == (8, 512, 1)
    place = tmp_path / "llmservingsim" / "RTXPRO6000__Llama-3.1-8B"
    place.mkdir(parents=True)
    (place / "vllm_meta.json").write_text(json.dumps({"model": "a"}))
    with pytest.raises(InputError, match="lacks model"):
        runs(tmp_path)
    (place / "vllm_meta.json").write_text("{")
    with pytest.raises(InputError, match="cannot read it"):
        runs(tmp_path)


def test_budgets_hold_their_tokens() -> None:
    """Ninety-four layers, one key and one value head of 128 a device, two bytes: 48,128 bytes a token."""
    for budget in budgets():
        assert budget.plan.devices == budget.cluster.device_count == 4
        held = budget.nbytes / (94 * 2 * 128 * 2)
        assert budget.tokens == pytest.approx(held, rel=0.012), budget.label
