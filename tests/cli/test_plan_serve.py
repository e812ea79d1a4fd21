"""``foretell plan serve``: what it shows, what it writes, and how it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.hardware import device
from foretell.plan.serving.emit import read
from foretell.report import schema
from foretell.simulate.serving import CHOICES, ServingPlan

Run = Callable[..., Any]
#: Few plans of a small model, so that a run takes a second.
PINS = ("--tp", "1", "--pp", "1", "--disaggregate", "0:0", "--max-batched-tokens", "2048", "--max-num-seqs", "64")
ASKED = ("plan", "serve", "llm:opt-1.3b", "--gpus", "l4,a10g", "--rate", "20", "--isl", "256", "--osl", "64",
         "--num-requests", "2000", "--slo", "ttft=500ms,tpot=40ms", *PINS)  # fmt: skip
QUICK = (*ASKED, "--quick")


def document(run: Run, *arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema("foretell.serving-plan/1")).validate(found)
    return found


def test_the_answer_at_80_columns(run: Run) -> None:
    result = run(*QUICK)
    assert result.exit_code == 0, result.output
    expected = document(run, *QUICK)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    assert lines[0] == "serving llm:opt-1.3b"
    text = " ".join(result.stdout.split())
    assert "20 requests/s · 256 tokens in, 64 out on average" in text
    assert "TTFT ≤ 500 ms and TPOT ≤ 40 ms for 90 %" in text
    for unit in expected["units"]:
        assert f"{unit['count']}x {unit['gpu']} tp1" in text
    assert f"${expected['usd_per_h']:.2f} an hour" in text
    said = "Nothing was simulated: a plan by the closed form alone can fail the SLO in simulation."
    assert said in text
    assert "within the SLO" not in text
    assert "in SLO" not in text
    assert not re.search(r"\d%", text)
    assert "Why" in lines
    for sentence in expected["why"]:
        assert " ".join(sentence.split()) in text
    # What does not fit into the width is named, and is there where it does.
    wide, narrow = run(*QUICK, width=160).stdout, run(*QUICK, width=60).stdout
    assert "left out for want of width" not in wide
    assert "left out for want of width" in narrow
    assert all(name in wide for name in ("GPUs", "$/h", "$/M tokens", "batch", "full", "tokens/s/user"))


@pytest.mark.parametrize("width", [50, 60, 80, 100, 160])
def test_numbers_are_never_cut(run: Run, width: int) -> None:
    result = run(*QUICK, "--start-up", "1min", "--window", "30s", width=width)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= width
    assert "…" not in result.stdout


def test_the_document_adds_up(run: Run) -> None:
    found = document(run, *QUICK, "--start-up", "1min", "--window", "30s")
    assert found["simulated"] == 0
    assert found["attained"] is None
    assert found["devices"] == sum(u["count"] * u["devices"] for u in found["units"])
    assert found["usd_per_h"] == pytest.approx(sum(u["count"] * u["usd_per_h"] for u in found["units"]))
    assert found["requests_per_s"] == pytest.approx(20.0)
    assert sum(u["served_requests_per_s"] for u in found["units"]) == pytest.approx(20.0)
    assert sum(b["requests_per_s"] for b in found["buckets"]) == pytest.approx(20.0)
    for unit in found["units"]:
        assert unit["work"] <= unit["count"] + 1e-6
        assert unit["tpot_s"] <= 0.04
        assert unit["ttft_s"] <= 0.5
        assert sum(unit["parts"].values()) == pytest.approx(1.0)
    best = min(one["value"] for one in found["singles"] if one["value"] is not None)
    assert found["usd_per_h"] <= best + 1e-9
    for one in found["scaling"]:
        assert one["cost_usd"] <= one["fixed_cost_usd"]
        assert one["hours"][0]["requests_per_s"] == pytest.approx(20.0, rel=0.2)  # the last window is not full
        assert sum(hour["replica_hours"] for hour in one["hours"]) == pytest.approx(one["replica_hours"])


def test_the_schema_has_the_settings_of_the_code() -> None:
    properties = schema("foretell.serving-plan/1")["properties"]
    for part in ("units", "front"):
        plan = properties[part]["items"]["properties"]["plan"]["properties"]
        assert list(plan) == list(ServingPlan().to_dict())
        for name, choices in CHOICES.items():
            assert tuple(plan[name]["enum"]) == choices


def test_the_simulator_is_in_the_loop(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "serving.sqlite"
    asked = (*ASKED, "--gpus", "l4", "--out", path)
    found = document(run, *asked)
    assert found["simulated"] > 0
    assert found["attained"] >= 0.9
    low, high = found["attained_within"]
    assert low <= found["attained"] <= high
    assert found["close"] == (low < 0.9 < high)
    for unit in found["units"]:
        kept = unit["simulated"]
        assert kept["attainment"] >= 0.9
        assert kept["ttft_p50_s"] < 0.5
        assert kept["attainment_low"] <= kept["attainment"] <= kept["attainment_high"]
        assert 0 < kept["independent"] < kept["requests"]
    again = document(run, *asked)
    assert (again["simulated"], again["reused"] > 0) == (0, True)
    same = {"simulated": 0, "reused": 0}
    assert {**again, **same} == {**found, **same}
    shown = " ".join(run(*asked).stdout.split())
    ends = re.search(r"([\d.]+) % within the SLO when simulated \(([\d.]+)–([\d.]+) %\)", shown)
    assert ends is not None
    for text, value in zip(ends.groups(), (found["attained"], low, high), strict=True):
        assert float(text) == pytest.approx(100 * value, abs=0.101)
    assert "results from the file" in shown
    assert "Nothing was simulated" not in shown
    assert not re.search(r"\d%", shown)
    assert (found["basis"], document(run, *QUICK)["basis"]) == ("simulation", "closed form")
    assert "no other GPU type" not in shown  # one was asked for
    # A full unit's tokens, at the share of it that is used, cost what the line below says.
    (unit,) = found["units"]
    row = re.search(r"1x l4 tp1 +1 +[\d.]+ +(\d+) % .*? 0\.80 +([\d.]+) ", run(*asked, width=160).stdout)
    total = re.search(r"\$([\d.]+) for a million output tokens", shown)
    assert row is not None
    assert total is not None
    assert float(row[2]) / (int(row[1]) / 100) == pytest.approx(float(total[1]), rel=0.02)
    assert int(row[1]) < 100
    assert unit["full"]["usd_per_million_tokens"] == pytest.approx(float(row[2]), rel=0.01)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_commands_are_the_plan(run: Run, name: str) -> None:
    asked = (*QUICK, "--engine", name, "--gpus", "l4")
    written = run(*asked, "--emit", name, "--model", "facebook/opt-1.3b")
    assert written.exit_code == 0, written.output
    plan, model = read(name, written.stdout)
    assert model == "facebook/opt-1.3b"
    (unit,) = document(run, *asked)["units"]
    assert plan == ServingPlan(**{**unit["plan"], "replicas": unit["count"]})
    assert "each on l4" in written.stdout
    assert "# without a prefix cache, as planned" in written.stdout
    assert "--model" not in [word for line in written.stdout.splitlines() if line[:1] == "#" for word in line.split()]
    assert run(*asked, "--emit", name).stdout.startswith("# opt-1.3b is foretell's name: give the model's own, or")


def test_commands_take_no_longer_requests_than_the_cache_holds(run: Run) -> None:
    asked = ("plan", "serve", "llm:llama-3.1-8b", "--gpus", "l4", "--rate", "1", "--quick", *PINS)
    plan, _ = read("vllm", run(*asked, "--emit", "vllm").stdout)
    assert 30_000 < plan.max_model_len < 40_000
    refused = run("plan", "serve", "llm:llama-3.1-8b", "--gpus", "tpu-v6e", "--rate", "1", "--quick", "--emit", "vllm")
    assert (refused.exit_code, "tpu-v6e is none" in refused.stderr) == (2, True)


def test_prices_decide(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('l4 = "100 USD/h"\na10g = 0.5\n')
    found = document(run, *QUICK, "--prices", path)
    assert {unit["gpu"] for unit in found["units"]} == {"a10g"}
    assert found["usd_per_h"] == pytest.approx(0.5 * found["devices"])
    other = tmp_path / "prices.json"
    other.write_text('{"l4": 0.01, "NVIDIA A10G": 100}')
    assert {unit["gpu"] for unit in document(run, *QUICK, "--prices", other)["units"]} == {"l4"}


def test_as_many_as_there_are(run: Run) -> None:
    found = document(run, *QUICK, "--gpus", "1*l4,a10g", "--rate", "60")
    assert sum(unit["count"] for unit in found["units"] if unit["gpu"] == "l4") <= 1
    result = run(*QUICK, "--gpus", "1*l4", "--rate", "500")
    assert result.exit_code == 3
    assert "too few instances (1 of l4) for 500 requests/s" in " ".join(result.output.split())


def test_a_trace_with_rows_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{i * 0.1:.1f},{100 + i % 7},{20 + i % 5}" for i in range(300)] + ["30.0,100,0", "30.1,100,x"]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    result = run("plan", "serve", "llm:opt-1.3b", "--gpus", "l4", "--trace", path, "--quick", *PINS)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert re.search(r"300 requests in \d sizes?( ·)? 2 rows skipped", text)
    found = document(run, "plan", "serve", "llm:opt-1.3b", "--gpus", "l4", "--trace", path, "--quick", *PINS)
    assert sum(found["skipped"].values()) == 2
    assert found["requests_per_s"] == pytest.approx(10.0)
    assert "cut" not in found["trace"]
    cut = ("plan", "serve", "llm:opt-1.3b", "--gpus", "l4", "--trace", path, "--quick", "--num-requests", "100", *PINS)
    assert "trace.csv: the first 100 requests; the file has more" in " ".join(run(*cut).stdout.split())
    assert "the file has more" in document(run, *cut)["trace"]["cut"]


def test_energy_and_gpus(run: Run) -> None:
    energy = document(run, *QUICK, "--objective", "energy")
    least = document(run, *QUICK, "--objective", "gpus")
    assert energy["power_w"] <= least["power_w"] + 1e-6
    assert least["devices"] <= energy["devices"]
    shown = run(*QUICK, "--objective", "energy").stdout
    assert re.search(r"GPU type +GPUs +power +the mix saves\nl4: .* \d+ .* W +\d+", shown)


def test_each_gpu_type_alone_says_how_many_gpus(run: Run) -> None:
    for objective, headed in (("cost", r"GPU type +GPUs +\$/h +the mix saves"),
                              ("gpus", r"GPU type +GPUs +the mix saves")):  # fmt: skip
        asked = (*QUICK, "--rate", "150", "--objective", objective)
        shown = run(*asked).stdout
        assert re.search(f"^{headed}$", shown, re.MULTILINE)
        assert max(map(len, shown.splitlines())) <= 80
        for one in document(run, *asked)["singles"]:
            (unit,) = one["units"]  # one GPU to a unit, as --tp 1 has it
            assert one["devices"] == unit["count"] > 1
            assert re.search(rf"^{one['gpu']}: {unit['count']}x tp1 .* {unit['count']} ", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        (("--slo", "ttft=1us"), 3, "no GPU type serves opt-1.3b within TTFT"),
        (("--slo", "speed=1s"), 2, "unknown latency to limit 'speed'"),
        (("--slo", "ttft"), 2, "is no limit"),
        (("--gpus", "l5"), 2, "l5"),
        (("--gpus", "l4,l4"), 2, "is named twice"),
        (("--gpus", ","), 2, "names no GPU type"),
        (("--rate", "0"), 2, "is no rate"),
        (("--attainment", "0"), 2, "no share of the requests"),
        (("--objective", "speed"), 2, "unknown objective 'speed'"),
        (("--engine", "tgi"), 2, "unknown engine 'tgi'"),
        (("--emit", "trt"), 2, "unknown format to emit 'trt'"),
        (("--emit", "vllm", "--json"), 2, "give one of them"),
        (("--emit", "vllm", "--engine", "sglang"), 2, "give --engine vllm"),
        (("--tp", "5"), 2, "cannot be divided by tp 5"),
        (("--tp", "x"), 2, "'x' is no count"),
        (("--disaggregate", "1"), 2, "is no pair of replicas"),
        (("--disaggregate", "0:2"), 2, "is no pair of replicas"),
        (("--weight-dtype", "fp7"), 2, "fp7"),
        (("--arrivals", "often"), 2, "unknown arrival process"),
        (("--isl", "many"), 2, "many"),
        (("--prices", "/no/such/file.json"), 2, "no such file"),
        (("--start-up", "soon"), 2, "soon"),
        (("--scaling", "never", "--start-up", "1min"), 2, "unknown way to scale 'never'"),
        (("--scaling", "never"), 2, "give --start-up as well"),
        (("--window", "1min"), 2, "give --start-up as well"),
        (("--start-up", "1min", "--window", "0s"), 2, "--window: a window of 0s; give a time above 0"),
        (("--start-up", "1min", "--emit", "vllm"), 2, "give one of them"),
        (("--model", "x"), 2, "give --emit as well"),
        (("--out", "x.sqlite"), 2, "--out, --quick: keeps simulations, and none is done"),
        (("--trace", "x.csv"), 2, "--isl: the trace has lengths of its own"),
        (("--scale", "2x"), 2, "--scale: speeds up the times of a trace; give --trace, and no --rate"),
        (("--gpus", "0*l4"), 2, "--gpus: '0' is no number of l4"),
        (("--gpus", "-1*l4"), 2, "'-1' is no number of l4; give e.g. 4*l4, or l4"),
        (("--gpus", "*l4"), 2, "'' is no number of l4"),
    ],
)
def test_what_is_refused_is_said_in_a_line(
    run: Run, failed: Callable[[Any], str], changed: tuple[str, ...], code: int, said: str
) -> None:
    result = run(*QUICK, *changed)
    assert result.exit_code == code, result.output
    assert said in failed(result)


def test_an_out_that_cannot_be_written(run: Run, failed: Callable[[Any], str]) -> None:
    result = run(*ASKED, "--out", "/no/such/folder/x")
    assert result.exit_code == 2
    assert "cannot be written" in failed(result)


def test_a_trace_that_is_not_there(run: Run, failed: Callable[[Any], str]) -> None:
    result = run("plan", "serve", "llm:opt-1.3b", "--gpus", "l4", "--trace", "/no/such/file.csv")
    assert result.exit_code == 2
    assert "no such file" in failed(result)


def test_arrivals_need_a_rate(run: Run, failed: Callable[[Any], str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,10\n1,10,10\n")
    result = run("plan", "serve", "llm:opt-1.3b", "--gpus", "l4", "--trace", path, "--arrivals", "gamma:2")
    assert result.exit_code == 2
    assert "--arrivals: says how requests come at a rate; give --rate as well" in failed(result)


def test_a_trace_at_another_load_keeps_its_pattern(run: Run, failed: Callable[[Any], str], tmp_path: Path) -> None:
    """Bursts of 50 every 5 s; evened out, the same requests come one every 0.1 s."""
    path = tmp_path / "trace.csv"
    rows = [f"{i // 50 * 5 + i % 50 * 0.001:.3f},{200 + i % 7},{20 + i % 5}" for i in range(1000)]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    asked = ("plan", "serve", "llm:opt-1.3b", "--gpus", "l4", "--trace", path, "--slo", "ttft=500ms", *PINS)
    own, twice, rate = (document(run, *asked, *more) for more in ((), ("--scale", "2x"), ("--scale", "40/s")))
    assert own["requests_per_s"] == pytest.approx(10.5, rel=0.01)  # the last burst is not followed by a pause
    assert twice["requests_per_s"] == pytest.approx(2 * own["requests_per_s"])
    assert rate["requests_per_s"] == pytest.approx(40.0)
    assert (twice["trace"]["scale"], rate["trace"]["scale"]) == ("2 times as fast", "3.806 times as fast")
    drawn = document(run, *asked, "--rate", "40")
    assert rate["devices"] > drawn["devices"]  # bursts take more than the same requests at random
    text = " ".join(run(*asked, "--quick", "--scale", "2x").stdout.split())
    assert "trace.csv: 2 times as fast" in text
    assert "arrivals, not the trace's own" not in text
    # A day of the trace stays a day.
    day = ("--quick", "--start-up", "10s", "--window", "20s")
    (once,), (more,) = (document(run, *asked, *day, "--scale", scale)["scaling"] for scale in ("1x", "2x"))
    assert more["hours"][0]["requests_per_s"] == pytest.approx(2 * once["hours"][0]["requests_per_s"])
    assert more["fixed_replica_hours"] / more["fixed_replicas"] == once["fixed_replica_hours"] / once["fixed_replicas"]
    for changed in (("--scale", "2"), ("--scale", "0x"), ("--scale", "2x", "--rate", "5")):
        result = run(*asked, *changed)
        assert result.exit_code == 2
        assert "--scale: " in failed(result)


def test_a_request_longer_than_the_model_is_refused(run: Run, failed: Callable[[Any], str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{i * 0.1:.1f},{100 + i % 7},{20 + i % 5}" for i in range(300)] + ["30.0,100000,5"]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    asked = ("plan", "serve", "llm:opt-1.3b", "--gpus", "l4", "--trace", path, *PINS)
    text = " ".join(run(*asked, "--quick").stdout.split())
    assert "1 request refused: longer than 2,048 tokens (the longest 100,005)" in text
    found = document(run, *asked)
    assert (sum(found["refused"].values()), found["requests"], found["devices"]) == (1, 300, 1)
    path.write_text("arrival_s,input_tokens,output_tokens\n0,100000,5\n1,100000,5\n")
    result = run(*asked)
    assert result.exit_code == 2
    assert "every request is longer than 2,048 tokens, which is all that opt-1.3b is served with" in failed(result)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n2,10,5\n-3,1,1\n",
         "has one request, which has no rate; 1 row with no time, first at row 2, and 1 row with a negative time, "
         "first at row 4 are left out; give --rate"),
        ("arrival_s,input_tokens,output_tokens\n2,10,5\n", "has one request, which has no rate; give --rate"),
        ("input_tokens,output_tokens\n10,5\n20,5\n", "has no times; give --rate"),
    ],
)  # fmt: skip
def test_a_trace_without_a_rate(run: Run, failed: Callable[[Any], str], tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    result = run("plan", "serve", "llm:opt-1.3b", "--gpus", "l4", "--trace", path, *PINS, "--quick")
    assert result.exit_code == 2
    assert f"trace.csv: {said}" in failed(result)
    told = run("plan", "serve", "llm:opt-1.3b", "--gpus", "l4", "--trace", path, *PINS, "--quick", "--rate", 2)
    assert told.exit_code == 0


def test_a_stop_says_where_the_simulations_are(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("foretell.plan.serving.trial.simulated", stop)
    path = tmp_path / "s.sqlite"
    result = run(*ASKED, "--out", path)
    assert result.exit_code == 130
    assert f"interrupted: simulations so far are in {path}" in " ".join(result.output.split())


def test_what_is_missing_is_named(run: Run, failed: Callable[[Any], str]) -> None:
    for arguments, said in (
        (("plan", "serve", "llm:opt-1.3b", "--gpus", "l4"), "--trace or --rate: is needed"),
        (("plan", "serve", "timm:resnet50", *QUICK[3:]), "is no parametric transformer"),
        (("plan", "serve", "llm:opt-1.4b", *QUICK[3:]), "did you mean"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert said in failed(result)


@pytest.mark.parametrize(("text", "said"), [
    ("[]", "holds no prices"), ('{"l4": true}', "is no price"), ('{"l4": -1}', "is no price"), ('{"l5": 1}', "l5"),
    ("{", "not JSON"), ('{"l4": "much"}', "much"), ('{"l5": 1}', "prices.json: unknown device 'l5'"),
    ('{"L4": 0.5, "l4": 0.9}', "prices.json: l4 has two prices, as L4 and as l4; leave one of them"),
    ('{"l4": 1e-300}', "prices.json: l4: $1e-300 an hour is no price"),
    ('{"l4": "1e9 USD/h"}', "give at most $1,000,000"),
])  # fmt: skip
def test_prices_that_are_none(run: Run, failed: Callable[[Any], str], tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    result = run(*QUICK, "--prices", path)
    assert result.exit_code == 2
    assert said in failed(result)


def test_a_gpu_without_a_price_asks_for_one(run: Run, failed: Callable[[Any], str]) -> None:
    assert device("rtx-3090").price_usd_per_h is None
    result = run(*QUICK, "--gpus", "rtx-3090")
    assert result.exit_code == 2
    assert "no hourly price of rtx-3090 is known; give --prices" in failed(result)
    assert run(*QUICK, "--gpus", "rtx-3090", "--objective", "gpus").exit_code == 0
