"""``foretell simulate pipeline``: what it draws, compares and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.report.pipeline import Gantt
from foretell.simulate.pipeline import Times, simulate

Run = Callable[..., Any]
MODEL = ("llm:llama-3-70b", "--on", "16x dgx-h100", "--tp", "8", "--global-batch", "128", "--seq-len", "8192")


def test_a_step_is_drawn(run: Run) -> None:
    result = run("simulate", "pipeline", "--pp", "8", "--micro-batches", "32", "--forward", "10ms")
    assert result.exit_code == 0
    assert "1.17 s" in result.stdout  # (32 + 7) · 30 ms
    assert "18 %" in result.stdout  # 7 / 39
    rows = [line for line in result.stdout.splitlines() if line.strip()[:1].isdigit() and "░" in line]
    assert [line.split()[-1] for line in rows] == ["8", "7", "6", "5", "4", "3", "2", "1"]
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_figures_as_json(run: Run) -> None:
    result = run("simulate", "pipeline", "--pp", "4", "--micro-batches", "8", "--p2p", "1ms", "--no-overlap", "--json")
    document = json.loads(result.stdout)
    assert document["schedule"] == "1f1b"
    # Ranks in the middle send F and B; F on the first and B on the last rank come once less.
    assert [rank["send_s"] for rank in document["ranks"]] == pytest.approx([8e-3, 16e-3, 16e-3, 8e-3])
    assert document["step_s"] == pytest.approx(0.33 + document["p2p_exposed_s"])
    for rank in document["ranks"]:
        assert rank["busy_s"] + rank["send_s"] + rank["bubble_s"] == pytest.approx(document["step_s"])


def test_uneven_stages(run: Run) -> None:
    given = ("--stages", "10ms, 20ms", "--backward", "20ms", "--micro-batches", "2", "--schedule", "gpipe")
    document = json.loads(run("simulate", "pipeline", *given, "--json").stdout)
    assert document["step_s"] == pytest.approx(10e-3 + 3 * 20e-3 + 2 * 20e-3)


def test_chunks_share_a_rank_s_time(run: Run) -> None:
    given = ("--schedule", "interleaved", "--vp", "2", "--pp", "4", "--micro-batches", "8", "--json")
    document = json.loads(run("simulate", "pipeline", *given).stdout)
    assert document["step_s"] == pytest.approx(8 * 30e-3 + 3 * 15e-3)
    assert document["ranks"][0]["in_flight"] == [7, 4]


def test_exchange_between_data_parallel_ranks(run: Run) -> None:
    given = ("--pp", "2", "--micro-batches", "4", "--gather", "1ms", "--reduce", "7ms", "--json")
    document = json.loads(run("simulate", "pipeline", *given).stdout)
    # The second rank waits as well: its first gather runs while the first rank computes; the last reduction is seen.
    assert document["dp_exposed_s"] == pytest.approx(8e-3)


def test_schedules_side_by_side(run: Run) -> None:
    result = run("simulate", "pipeline", "--pp", "4", "--micro-batches", "6", "--compare")
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines() if " ms " in line]
    assert names == ["zero-bubble", "layered", "1f1b", "gpipe"]  # fastest first
    assert "· interleaved: 6 micro-batches are no multiple of the 4 ranks; take 4" in result.stdout
    documents = json.loads(run("simulate", "pipeline", "--pp", "4", "--compare", "--json").stdout)
    by_name = {one["schedule"]: one["step_s"] for one in documents}
    assert len(by_name) >= 5
    assert by_name["zero-bubble"] < by_name["interleaved"] < by_name["1f1b"] == pytest.approx(by_name["gpipe"])
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_timeline_opens_in_perfetto(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    result = run("simulate", "pipeline", "--pp", "2", "--micro-batches", "3", "--p2p", "1ms", "--trace", path)
    assert f"wrote {path}" in " ".join(result.stdout.split())
    events = json.loads(path.read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X" and event["cat"] in ("forward", "backward")]
    assert len(tasks) == 2 * 2 * 3
    assert {event["args"]["micro-batch"] for event in tasks} == {0, 1, 2}
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"rank 0", "rank 0 → next", "rank 1", "rank 1 → previous"}


def test_a_model_on_a_cluster(run: Run) -> None:
    result = run("simulate", "pipeline", *MODEL, "--pp", "4")
    assert result.exit_code == 0
    assert "128 devices" in result.stdout
    assert "GiB" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    document = json.loads(run("simulate", "pipeline", *MODEL, "--pp", "4", "--json").stdout)
    assert document["micro_batches"] == 32
    held = [rank["activation_bytes"] for rank in document["ranks"]]
    assert held == sorted(held, reverse=True)
    # The last rank has the head beside its layers, so the others wait for it.
    assert document["ranks"][3]["bubble_s"] < document["ranks"][1]["bubble_s"]


def test_the_layered_pipeline_of_a_model_is_one_layer_a_chunk(run: Run) -> None:
    document = json.loads(run("simulate", "pipeline", *MODEL, "--pp", "4", "--schedule", "layered", "--json").stdout)
    assert document["vp"] == 20  # 80 layers on 4 ranks
    plain = json.loads(run("simulate", "pipeline", *MODEL, "--pp", "4", "--json").stdout)
    assert document["step_s"] < plain["step_s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pp", "0"), "a pipeline of 0 ranks"),
        (("--micro-batches", "0"), "micro-batches is 0"),
        (("--vp", "0"), "vp is 0"),
        (("--schedule", "interleaved", "--vp", "2", "--micro-batches", "6"), "take 4 or 8 micro-batches"),
        (("--schedule", "gpipe", "--vp", "2"), "take vp 1"),
        (("--schedule", "1f2b"), "did you mean '1f1b'"),
        (("--forward", "-1ms"), "negative"),
        (("--forward", "10"), "has no unit"),
        (("--stages", ""), "no stages"),
        (("--stages", "1ms,,2ms"), "an empty time"),
        (("--stages", "1ms,2ms", "--pp", "3"), "2 times for 3 ranks"),
        (("--stages", ",".join(["1ms"] * 5000)), "a pipeline of 5,000 ranks"),
        (("--stages", "1ms,2ms", "--forward", "1ms"), "give one of them"),
        (("--weights", "1s"), "weights_s is a part of backward_s"),
        (("--pp", "64", "--micro-batches", "1000000"), "take fewer micro-batches"),
        (("--on", "2x dgx-h100"), "name one, e.g. llm:llama-3-8b"),
        (("--trace", "step.txt"), "does not end in .json"),
        (("--trace", "/no/such/folder/step.json"), "a folder that exists"),
        (("--trace", "step.json", "--compare"), "leave --compare out"),
        (("timm:resnet50", "--on", "2x dgx-h100"), "no parametric transformer"),
        (("llm:llama-3-70b", "--seq-len", "8192", "--global-batch", "8"), "give --on"),
        ((*MODEL, "--pp", "4", "--micro-batches", "4"), "follows from the workload"),
        ((*MODEL, "--pp", "3"), "the nearest plans"),
        ((*MODEL, "--pp", "4", "--recompute", "some"), "unknown recompute"),
    ],
)
def test_slips_are_named(run: Run, failed: Callable[[Any], str], arguments: tuple[str, ...], said: str) -> None:
    result = run("simulate", "pipeline", *arguments)
    assert result.exit_code == 2
    assert said in failed(result)


def test_a_drawing_keeps_the_shares() -> None:
    found = simulate("zero-bubble", Times.of(1.0, 2.0, pp=4, weights_s=1.0), 40)
    for rank in range(4):
        cells = Gantt(found, rank).cells(60)
        for kind in "FBW":
            assert cells.count(kind) / 60 == pytest.approx(40 / found.step_s, abs=0.04)
    many = simulate("1f1b", Times.of(1.0, 2.0, pp=4), 400)  # in every cell there is more of B
    assert Gantt(many, 1).cells(60).count("F") / 60 == pytest.approx(400 / many.step_s, abs=0.04)
    exact = simulate("1f1b", Times.of(1.0, 2.0, pp=2), 3)
    assert "".join(kind or "." for kind in Gantt(exact, 0).cells(12)) == "FF..BBFBB.BB"
    assert "".join(kind or "." for kind in Gantt(exact, 1).cells(24)) == "..FFBBBBFFBBBBFFBBBB...."
    nothing = simulate("1f1b", Times.of(0.0, 0.0, pp=2), 3)
    assert set(Gantt(nothing, 0).cells(10)) == {""}
    assert np.isfinite(nothing.bubble)


@pytest.mark.parametrize(
    "given", [("--tp", "8"), ("--mbs", "2"), ("--recompute", "full"), ("--precision", "fp8"), ("--first-layers", "2")]
)
def test_options_of_a_model_want_a_model(run: Run, given: tuple[str, ...]) -> None:
    result = run("simulate", "pipeline", *given)
    assert result.exit_code == 2
    assert f"{given[0]} is about a model on a cluster" in result.stderr


@pytest.mark.parametrize("option", ["--gather", "--reduce"])
def test_exchanges_follow_from_a_model(run: Run, option: str) -> None:
    result = run("simulate", "pipeline", *MODEL, option, "1ms")
    assert result.exit_code == 2
    assert f"{option}: follows from the workload" in result.stderr


def test_one_kind_of_device_is_simulated(run: Run) -> None:
    result = run("simulate", "pipeline", *MODEL[:2], "8x dgx-h100 + 8x dgx-a100", *MODEL[3:])
    assert result.exit_code == 2
    assert "devices of several kinds" in result.stderr
    assert "--on '8x dgx-a100'" in result.stderr


@pytest.mark.parametrize("given", [("--forward", "1e300s"), ("--stages", "1ms,1e12s"), ("--p2p", "1e10s")])
def test_a_pass_of_centuries_is_refused(run: Run, given: tuple[str, ...]) -> None:
    result = run("simulate", "pipeline", *given)
    assert result.exit_code == 2
    assert "is longer than 30 years" in result.stderr


def test_hints_name_only_options_that_there_are(run: Run, failed: Callable[[Any], str]) -> None:
    result = run("simulate", "pipeline", "llm:llama-3-8b", "--on", "1x 8x a100-sxm4-80gb", "--pp", "3",
                 "--global-batch", "64", "--seq-len", "4096")  # fmt: skip
    assert result.exit_code == 2
    line = failed(result)
    assert "nearest: --pp 4" in line
    assert "--first-layers 10" in line
    shown = set(re.findall(r"--[a-z-]+", line))
    offered = set(re.findall(r"--[a-z0-9-]+", run("simulate", "pipeline", "--help", width=160).stdout))
    assert shown <= offered
    assert shown >= {"--tp", "--pp", "--mbs"}
