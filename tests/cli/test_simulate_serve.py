"""``foretell simulate serve``: what it tells, writes and refuses."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.report import schema
from foretell.report.documents import json_text
from foretell.report.served_requests import COLUMNS

Run = Callable[..., Any]
FEW = ("--num-requests", "4")
BASE = ("simulate", "serve", "llm:llama-3.1-8b", "--on", "h100-sxm")
SMALL = ("--num-requests", "40", "--isl", "200", "--osl", "20")


def document(run: Run, *arguments: object) -> dict[str, Any]:
    result = run(*BASE, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_card_at_eighty_columns(run: Run) -> None:
    result = run(*BASE, "--rate", "20", *SMALL, "--slo", "ttft=500ms,tpot=50ms")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    for said in (
        "TTFT", "TPOT", "ITL", "E2E", "p99", "Throughput", "KV cache", "Bound by", "Waiting for", "per million",
        "of requests keep it", "TTFT ≤ 500 ms", "no request", "poisson, 20 requests/s", "200 input tokens each",
    ):  # fmt: skip
        assert said in result.stdout, said


def test_the_document_follows_its_schema_and_leaves_nothing_undocumented(run: Run) -> None:
    found = document(run, "--rate", "20", *SMALL, "--slo", "ttft=500ms", "--percentiles", "50,99.9")
    own = schema("foretell.serving/1")
    jsonschema.Draft202012Validator(own).validate(found)
    assert list(found) == list(own["properties"])
    for key in ("plan", "load", "throughput", "slo", "batch", "kv", "latency_s"):
        assert list(found[key]) == list(own["properties"][key]["properties"]), key
    assert list(found["latency_s"]["ttft"]) == ["mean", "min", "p50", "p99.9", "max"]
    assert found["load"]["input_tokens"] == {"mean": 200.0, "p50": 200.0, "p99": 200.0, "max": 200}
    wrong = json.loads(json_text(found))
    wrong["kv"]["mean"] = 1.5
    with pytest.raises(jsonschema.ValidationError, match=r"1\.5"):
        jsonschema.Draft202012Validator(own).validate(wrong)


@pytest.mark.parametrize(("on", "tp"), [("h100-sxm", 1), ("a100-sxm4-80gb", 4), ("l4", 1)])
def test_sglang_takes_the_share_of_memory_that_kv_says(run: Run, on: str, tp: int) -> None:
    cache = run("kv", "llm:llama-3.1-8b", "--engine", "sglang", "--on", on, "--tp", tp, "--json")
    budget = json.loads(cache.stdout)["budget"]
    load = ("--rate", 5, "--num-requests", 3, "--isl", 20, "--osl", 2)
    served = run("simulate", "serve", "llm:llama-3.1-8b", "--engine", "sglang", "--on", on, "--tp", tp, *load, "--json")
    found = json.loads(served.stdout)
    assert found["plan"]["gpu_memory_percent"] == pytest.approx(100 * budget["share"], abs=0.05)
    assert found["kv"]["capacity_tokens"] == budget["tokens"]
    card = run("simulate", "serve", "llm:llama-3.1-8b", "--engine", "sglang", "--on", on, "--tp", tp, *load)
    assert f"{round(100 * budget['share'])} % of memory" in card.stdout


def test_figures_hang_together(run: Run) -> None:
    found = document(run, "--offline", *SMALL, "--price", "2 USD/h")
    seconds = found["until_s"] - found["since_s"]
    assert found["requests"] == found["finished"] == 40
    assert found["throughput"]["output_tokens_per_s"] == pytest.approx(40 * 20 / seconds)
    assert found["throughput"]["input_tokens_per_s"] == pytest.approx(40 * 200 / seconds)
    assert found["cost_usd"] == pytest.approx(2 * seconds / 3600)
    assert found["usd_per_million_output_tokens"] == pytest.approx(1e6 * found["cost_usd"] / 800)
    assert found["energy_j"] == pytest.approx(found["power_w"] * seconds)
    assert sum(found["bound"].values()) == pytest.approx(1.0)
    assert found["slo"] is None
    assert found["latency_s"]["e2e"]["max"] == pytest.approx(seconds)


def test_the_same_seed_gives_the_same_bytes(run: Run) -> None:
    given = (*BASE, "--rate", "30", "--num-requests", "30", "--osl", "lognormal:40:1", "--json")
    first = run(*given, "--seed", "5").stdout
    assert run(*given, "--seed", "5").stdout == first
    assert run(*given, "--seed", "6").stdout != first


def test_a_closed_loop_keeps_so_many_under_way(run: Run) -> None:
    found = document(run, "--concurrency", "4", *SMALL)
    assert found["load"]["kind"] == "4 at a time"
    assert found["batch"]["running"] == pytest.approx(4.0, rel=0.05)


TRACE = "arrival_s,input_tokens,output_tokens\n0,100,10\n1,200,20\n2,300,0\n3,400,40\n-1,5,5\n4,200000,5\n"


def test_rows_that_are_left_out_are_counted(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    found = document(run, "--trace", path)
    skipped = {"an output of 0 tokens, first at row 4": 1, "a negative time, first at row 6": 1}
    assert found["load"]["skipped"] == skipped
    assert found["refused"] == {"longer than max_model_len": 1}
    assert found["first_refused"] == [
        {"reason": "longer than max_model_len", "request": 3, "row": 7, "input_tokens": 200_000, "output_tokens": 5,
         "limit_tokens": 131_072}
    ]  # fmt: skip
    assert found["finished"] == 3
    shown = " ".join(run(*BASE, "--trace", path).stdout.split())
    assert "1 row of the trace with a negative time, first at row 6" in shown
    refusal = "longer than max_model_len, of which 131,072 are allowed, first row 7 of 200,000 + 5 tokens"
    assert f"1 request refused: {refusal}" in shown
    assert "50,175 input tokens on average (p50 300, p99 " in shown


def test_the_first_refused_is_of_the_time_that_is_told_of(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i},{i + 1},300\n" for i in range(20))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    found = document(run, "--trace", path, "--max-model-len", "307", "--warm-up", "10s")
    assert found["refused"] == {"longer than max_model_len": 10}
    assert [(one["request"], one["row"]) for one in found["first_refused"]] == [(10, 12)]
    assert document(run, "--offline", *SMALL, "--num-requests", "2")["first_refused"] == []


def test_a_trace_sped_up_cut_and_with_other_lengths(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},{50 + i},5\n" for i in range(60)))
    part = document(run, "--trace", path, "--start", "10s", "--duration", "20s", "--scale", "4x")
    assert part["load"]["requests"] == 20
    assert part["load"]["about"]["scale"] == "4 times as fast"
    assert part["since_s"] == 0.0
    assert part["until_s"] == pytest.approx(19 / 4, abs=0.3)
    lengths = document(run, "--rate", "50", "--lengths", path, "--num-requests", "30")["load"]["input_tokens"]
    assert 50 <= lengths["p50"] <= 110
    fitted = document(run, "--rate", "50", "--lengths", f"fit:{path}", "--num-requests", "30")
    assert "lognormal, fitted to" in fitted["load"]["about"]["lengths"]
    other = document(run, "--trace", path, "--rate", "100", "--isl", "77")
    assert other["load"]["input_tokens"]["max"] == 77
    assert other["load"]["kind"] == "poisson, 100 requests/s"
    at_once = document(run, "--trace", path, "--offline", "--num-requests", "10")
    assert at_once["load"]["requests"] == 10


def test_the_engine_s_settings_reach_it(run: Run) -> None:
    wide = document(run, "--offline", *SMALL)
    few = document(run, "--offline", *SMALL, "--max-num-seqs", "4")
    assert few["queue"]["max-num-seqs"] > 0.5
    assert few["until_s"] > wide["until_s"]
    eight = document(run, "--offline", *SMALL, "--weight-dtype", "fp8", "--kv-dtype", "fp8", "--tp", "2")
    assert eight["weights_bytes"] < 0.6 * wide["weights_bytes"] / 2 * 1.2
    assert eight["devices"] == 2
    assert eight["kv"]["capacity_tokens"] > 2 * wide["kv"]["capacity_tokens"]
    less = document(run, "--offline", *SMALL, "--gpu-memory-utilization", "0.5")
    assert less["kv"]["capacity_tokens"] < wide["kv"]["capacity_tokens"]
    for engine in ("sglang", "trtllm", "static"):
        assert document(run, "--offline", *SMALL, "--engine", engine)["finished"] == 40


def test_replicas_and_disaggregation(run: Run) -> None:
    split = document(run, "--rate", "20", *SMALL, "--disaggregate", "1:2")
    assert (split["devices"], split["plan"]["prefill_replicas"], split["plan"]["decode_replicas"]) == (3, 1, 2)
    slow = document(run, "--rate", "20", *SMALL, "--disaggregate", "1:2", "--kv-link", "100MB/s")
    assert slow["latency_s"]["e2e"]["p50"] > split["latency_s"]["e2e"]["p50"] + 0.1
    many = document(run, "--rate", "20", *SMALL, "--replicas", "3", "--router", "least-loaded")
    assert many["devices"] == 3
    assert many["throughput"]["output_tokens_per_s_per_device"] == pytest.approx(
        many["throughput"]["output_tokens_per_s"] / 3
    )


def test_a_page_that_loads_nothing(run: Run, tmp_path: Path) -> None:
    trace, page = tmp_path / "<b>.csv", tmp_path / "x.html"
    trace.write_text(TRACE)
    result = run(*BASE, "--trace", trace, "--html", page, "--slo", "ttft=1s")
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "<b>.csv" not in text
    assert "&lt;b&gt;.csv" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert "<script" not in text
    assert text.count('class="curve') >= 4
    for said in ("first at row 6", "TTFT ≤ 1 s", "1 request refused"):
        assert said in text


def test_a_page_in_a_browser(run: Run, tmp_path: Path, chromium: Any) -> None:
    page = tmp_path / "x.html"
    run(*BASE, "--rate", "20", *SMALL, "--html", page)
    for width in (1280, 390):
        tab = chromium.new_page(viewport={"width": width, "height": 800})
        said: list[str] = []
        tab.on("console", lambda message, said=said: said.append(message.text))
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        boxes = tab.evaluate("[...document.querySelectorAll('path.curve')].map(c => c.getBoundingClientRect().width)")
        assert sum(box > 20 for box in boxes) >= 8
        assert said == []
        tab.close()


def test_the_timeline_opens_in_perfetto(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    result = run(*BASE, "--rate", "20", *SMALL, "--timeline", path)
    assert f"wrote {path}" in result.stdout.replace("\n", " ") or str(path) in "".join(result.stdout.split("\n"))
    events = json.loads(path.read_text())["traceEvents"]
    requests = [event for event in events if event["ph"] == "X" and event.get("cat") == "request"]
    assert {event["name"] for event in requests} >= {"prompt", "answer"}
    # The rules of the trace event format: known kinds, microseconds from 0, names of lanes, slices that nest in order.
    assert {event["ph"] for event in events} == {"X", "C", "M"}
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0 <= event["ts"]
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(lanes) <= named
    for slices in lanes.values():
        assert all(start >= end - 1e-3 for (_, end), (start, _) in itertools.pairwise(slices))


def test_the_beginning_left_out(run: Run) -> None:
    whole = document(run, "--rate", "20", *SMALL)
    later = document(run, "--rate", "20", *SMALL, "--warm-up", "1s", "--cool-down", "100ms")
    assert later["since_s"] == pytest.approx(whole["since_s"] + 1.0)
    assert later["requests"] < whole["requests"]


def test_what_does_not_fit_says_by_how_much_and_what_would(run: Run) -> None:
    result = run("simulate", "serve", "llm:llama-3.1-70b", "--on", "h100-sxm", "--offline")
    assert result.exit_code == 3
    said = " ".join(result.stderr.split())
    assert "--tp 2 leaves room for" in said
    # 141 GB of weights, and some of activations and context, in 90 % of 79.6 GiB.
    assert 58 < float(said.split("it lacks ")[1].split(" GiB")[0]) < 66


def test_weights_are_taken_as_they_are_published(run: Run) -> None:
    given = ("--offline", "--num-requests", "2", "--json")
    for workload, on, form in (
        ("llm:gpt-oss-120b", "h100-sxm", "mxfp4"), ("llm:gpt-oss-20b", "a100-sxm4-80gb", "mxfp4"),
        ("llm:llama-3.1-8b", "h100-sxm", "bf16"),
    ):  # fmt: skip
        result = run("simulate", "serve", workload, "--on", on, *given)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["plan"]["weight_dtype"] == form
    # An A100 computes nothing in fp8, and widens it; in bf16 671 GB are two bytes each, a sixteenth 78 GiB and more.
    asked = ("simulate", "serve", "llm:deepseek-v3", "--on", "a100-sxm4-80gb", "--tp", "16", *given)
    assert json.loads(run(*asked).stdout)["plan"]["weight_dtype"] == "fp8"
    result = run(*asked, "--weight-dtype", "bf16")
    said = " ".join(result.stderr.split())
    assert 78 < float(said.split(" GiB of weights")[0].split()[-1]) < 82
    assert "--weight-dtype fp8 leaves room for" in said
    wide = run("simulate", "serve", "llm:gpt-oss-120b", "--on", "h100-sxm", "--weight-dtype", "bf16", "--offline")
    assert wide.exit_code == 3
    said = " ".join(wide.stderr.split())
    assert "--weight-dtype mxfp4 leaves room for" in said
    assert "--tp 4 leaves room for" in said
    both = run("simulate", "serve", "llm:llama-3.1-405b", "--on", "l4", "--offline")
    assert "--weight-dtype int4 --tp 16 leaves room for" in " ".join(both.stderr.split())


def test_weights_and_activations_in_int8(run: Run, tmp_path: Path) -> None:
    """W8A8 where a GPU has INT8 tensor cores; as a checkpoint says; refused with what else to take."""
    given = ("--rate", "5", "--num-requests", "20", "--isl", "2000", "--osl", "20")
    shown, plain = (run("simulate", "serve", "llm:llama-3.1-8b", "--on", "a100-sxm4-80gb", *given, *form)
                    for form in (("--weight-dtype", "int8"), ()))  # fmt: skip
    said = " ".join(shown.stdout.split())
    assert "int8 weights" in said
    assert "no open table has INT8 products" in said
    assert "INT8" not in plain.stdout
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192,
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8, "type": "int"}}}},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for on, form in (("a100-sxm4-80gb", "int8"), ("t4", "int8"), ("b200-sxm", "bf16")):
        result = run("simulate", "serve", f"llm:{tmp_path / 'config.json'}", "--on", on, *given, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["plan"]["weight_dtype"] == form
    refused = run("simulate", "serve", "llm:llama-3.1-8b", "--on", "b200-sxm", *given, "--weight-dtype", "int8")
    assert refused.exit_code == 2
    assert "take fp8 or bf16" in " ".join(refused.stderr.split())


def test_the_card_says_what_the_times_leave_out(run: Run) -> None:
    shown = " ".join(run(*BASE, "--offline", *SMALL).stdout.split())
    assert "times are the engine's: a server adds what its tokeniser, HTTP and streaming take" in shown


def test_too_few_devices(run: Run) -> None:
    result = run("simulate", "serve", "llm:llama-3.1-8b", "--on", "dgx-h100", "--replicas", "9", "--offline", *SMALL)
    assert result.exit_code == 3
    assert "the plan takes 9 devices and dgx-h100 has 8" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "why", "repair"),
    [
        (
            ("--isl", "300000"),
            "3 longer than max_model_len, of which 131,072 are allowed, first request 0 of 300,000 + 256 tokens",
            "give shorter requests: the model takes no longer ones",
        ),
        (("--isl", "3000", "--max-model-len", "2000"), "3 longer than max_model_len", "give --max-model-len 3256"),
        (
            ("--isl", "100000", "--on", "l4", "--weight-dtype", "fp8"),
            "3 longer than the KV cache",
            "give shorter requests, or a larger cache: --tp, --kv-dtype or --gpu-memory-utilization",
        ),
        (
            ("--isl", "3000", "--no-chunked-prefill", "--max-batched-tokens", "2048"),
            "longer than max_num_batched_tokens",
            "give --max-batched-tokens 3000, or leave --no-chunked-prefill out",
        ),
    ],
)
def test_nothing_that_can_be_served(run: Run, arguments: tuple[str, ...], why: str, repair: str) -> None:
    result = run(*BASE, "--offline", "--num-requests", "3", *arguments)
    assert result.exit_code == 3
    said = " ".join(result.stderr.split())
    assert "no request can be served: 3 " in said
    assert why in said
    assert said.endswith(repair)


def test_names_of_files_are_no_commands_to_a_terminal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31mb.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,5\n1,10,5\n")
    shown = run(*BASE, "--trace", path).stdout
    assert "times of a?[31mb.csv" in shown
    assert "\x1b[31mb" not in shown
    for lengths in (path, f"fit:{path}"):
        found = document(run, "--rate", "1", "--lengths", lengths, "--num-requests", "2")
        assert "a?[31mb.csv" in found["load"]["about"]["lengths"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --trace, --rate, --concurrency or --offline"),
        (("--rate", "1", "--offline"), "are different kinds of load"),
        (("--rate", "0"), "give a rate above 0"),
        (("--rate", "1e9"), "give a rate above 0 and below 1e9"),
        (("--rate", "1e-12", *SMALL), "give times up to 1e+10 s, or a higher rate"),
        (("--rate", "1", "--seed", "-1"), "--seed: -1 is below 0; give 0 or more"),
        (("--rate", "1", "--replicas", "99999999"), "99,999,999 devices; give at most 16,384 in all"),
        (("--rate", "1", "--tp", "256", "--replicas", "65"), "16,640 devices; give at most 16,384 in all"),
        (("--rate", "1", "--max-num-seqs", "99999999"), "want 1 to 1,048,576"),
        (("--rate", "1", "--max-batched-tokens", "1"), "give --max-num-seqs 1 or fewer as well, or more tokens"),
        (("--rate", "1", "--weight-dtype", "int4", "--kv-dtype", "int4"), "'int4'; did you mean 'int8'?"),
        (("--rate", "1", "--kv-dtype", "int8"), "KV cache format of vllm 'int8'; known: bf16, fp16, fp8"),
        (("--rate", "1", "--kv-dtype", "nope", "--engine", "trtllm"), "known: bf16, fp16, fp8, nvfp4, int8"),
        (("--rate", "1", "--disaggregate", "1:1", "--kv-link", "0GB/s"), "--kv-link 0GB/s: nothing moves over it"),
        (("--rate", "nan"), "give a rate above 0"),
        (("--concurrency", "0"), "give 1 or more"),
        (("--offline", "--arrivals", "gamma:2"), "give --rate as well"),
        (("--rate", "1", "--arrivals", "gama:2"), "did you mean 'gamma'"),
        (("--rate", "1", "--scale", "2x"), "speeds up the times of a trace"),
        (("--rate", "1", "--start", "2s"), "is a time of a trace"),
        (("--rate", "1", "--lengths", "x", "--isl", "1"), "both say lengths"),
        (("--rate", "1", "--isl", "0"), "give 1 to"),
        (("--rate", "1", "--num-requests", "0"), "give a whole number from 1 to 20,000,000"),
        (("--rate", "1", "--engine", "vlm"), "did you mean 'vllm'"),
        (("--rate", "1", "--slo", "ttft"), "write e.g. ttft=500ms"),
        (("--rate", "1", "--percentiles", "50,x"), "no percentiles"),
        (("--rate", "1", "--percentiles", "101"), "no percentiles"),
        (("--rate", "1", "--disaggregate", "1"), "write P:D"),
        (("--rate", "1", "--disaggregate", "1:1", "--replicas", "3"), "give one of them"),
        (("--rate", "1", "--kv-link", "1GB/s"), "only where they are disaggregated"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "cpu=1MiB"), "less than a block of 16 tokens; give it 2 MiB"),
        (("--rate", "1", "--prefix-cache", "--tp", "8", "--kv-tier", "d=1MiB,bandwidth=1GB/s"), "give it 2 MiB"),
        (("--rate", "1", "--prefix-cache", "--host-memory", "1MiB"), "less than a block of 16 tokens"),
        (("--rate", "1", "--gpu-memory-utilization", "1.5"), "is no share of memory"),
        (("--rate", "1", "--max-model-len", "1000000"), "allows 1 to 131,072"),
        (("--rate", "1", "--warm-up", "5"), "has no unit"),
        (("--rate", "1", "--warm-up", "1h", *SMALL), "nothing is left"),
        (("--rate", "1", "--price", "3"), "hourly price"),
        (("--trace", "none.csv"), "no such file"),
        (("--trace", "mooncak:x"), "did you mean 'mooncake'"),
        (("--rate", "1", "--html", "x.txt"), "does not end in .html"),
        (("--rate", "1", "--timeline", "x.txt"), "does not end in .json"),
        (("--rate", "1", "--tp", "0"), "tp is 0"),
        (("--rate", "1", "--kv-tier", "cpu=1GB"), "give --prefix-cache"),
        (("--rate", "1", "--host-memory", "1GB"), "give --prefix-cache"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "cpu"), "is no tier"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "cpu=64"), "has no unit"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "cpu=0B"), "holds nothing"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "disk=1TB"), "say it: disk=1TB,bandwidth=6GB/s"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "disk=1TB,bandwith=1GB/s"), "did you mean 'bandwidth'"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "disk=1TB,bandwidth"), "sets nothing"),
        (("--rate", "1", "--prefix-cache", *(("--kv-tier", "cpu=1GB") * 2)), "cpu is given twice"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "cpu=1GB", "--host-memory", "1GB"), "give one of them"),
        (
            ("--rate", "1", "--prefix-cache", "--kv-tier", "disk=1TB,bandwidth=6GB/s", "--kv-tier", "cpu=2TB"),
            "--kv-tier cpu: gives a GPU 63 GB/s, and disk before it 6 GB/s; give the fastest first",
        ),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "cpu=99999999999TB"), "cpu: 86736 EiB are more than any tier"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "d=1TB,bandwidth=1B/s"), "d: 1 B/s is no bandwidth of a tier"),
        (("--rate", "1", "--prefix-cache", "--kv-tier", "d=1TB,bandwidth=1e30B/s"), "give 1 MB/s to 1 PB/s"),
        (("--rate", "1", "--prefix-cache", "--host-memory", "1e30TB"), "--host-memory 1e30TB: is more than any host"),
        (("--rate", "5", "--duration", "1e300s"), "--duration: more than 20,000,000 requests; give less of one"),
        (("--rate", "5", "--duration", "1e9s"), "--rate, --duration: more than 20,000,000 requests"),
        (("--rate", "1", "--price", "1e308 USD/h"), "$1e+308 an hour is no price of a device; give at most $1,000,000"),
        (("--rate", "1", "--price", "1e-300 USD/h"), "--price: $1e-300 an hour"),
        (("--rate", "1", "--kv-load", "now"), "known: async, blocking"),
        (("--rate", "1", "--kv-load", "blocking"), "--kv-load: there is no tier to load caches from"),
        (("--rate", "1", "--nanoflow", "--engine", "static"), "give another --engine"),
        (("--rate", "1", "--nanoflow", "--disaggregate", "1:1"), "leave --disaggregate out"),
        (("--rate", "1", "--scheduler", "trtlm"), "did you mean 'trtllm'"),
        (("--rate", "1", "--scheduler", "static"), "static goes with static alone"),
        (("--rate", "1", "--preemption", "swap"), "give --host-memory"),
        (("--rate", "1", "--requests", "x.txt"), "does not end in .csv or .jsonl or .parquet"),
    ],
)
def test_wrong_input_says_what_and_how_to_repair_it(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run(*BASE, *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("workload", "on", "message"),
    [
        ("timm:resnet50", "t4", "no parametric transformer"),
        ("llm:lama", "t4", "unknown"),
        ("llm:gpt2", "t4,a10g", "names several"),
        ("llm:gpt2", "dgx-a100 + dgx-h100", "several kinds"),
        ("llm:gpt2", "h1000", "unknown"),
    ],
)
def test_wrong_models_and_machines(run: Run, workload: str, on: str, message: str) -> None:
    result = run("simulate", "serve", workload, "--on", on, "--offline")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


DOCUMENTS = "arrival_s,input_tokens,output_tokens,prefix,prefix_tokens\n" + "".join(
    f"{i / 6},6050,60,{i % 20},6000\n" for i in range(60)
)


def test_caches_kept_outside_the_gpu(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "documents.csv"
    path.write_text(DOCUMENTS)
    given = ("--trace", path, "--prefix-cache", "--gpu-memory-utilization", "0.3")
    alone = document(run, *given)
    assert alone["kv"]["tiers"] == []
    tiers = ("--kv-tier", "cpu=8GB", "--kv-tier", "disk=1TB,bandwidth=20GB/s,latency=100us")
    kept = document(run, *given, *tiers)
    jsonschema.Draft202012Validator(schema("foretell.serving/1")).validate(kept)
    host, disk = kept["kv"]["tiers"]
    assert (host["name"], host["capacity_bytes"], host["own_links"]) == ("cpu", 8e9, True)
    assert (disk["bytes_per_s"], disk["latency_s"], disk["own_links"]) == (20e9, pytest.approx(1e-4), False)
    # All 40 later questions find their document; 20 of them are 16 GB, which host memory has not room for.
    assert kept["kv"]["prefix_cached"] == pytest.approx(40 / 60 * 6000 / 6050, rel=0.01)
    assert alone["kv"]["prefix_cached"] < 0.1
    assert disk["loaded_tokens"] > 10 * 5984
    assert kept["latency_s"]["ttft"]["mean"] < alone["latency_s"]["ttft"]["mean"]
    shown = run(*BASE, *given, *tiers).stdout
    assert f"disk: 931 GiB at 20 GB/s for all, {disk['loaded_tokens']:,} tokens loaded" in " ".join(shown.split())
    held = document(run, *given, *tiers, "--kv-load", "blocking")
    assert (kept["kv"]["load"], held["kv"]["load"]) == ("async", "blocking")
    assert held["latency_s"]["tpot"]["mean"] > kept["latency_s"]["tpot"]["mean"]
    # Two tensor-parallel ranks have halves of each cache, of the tiers and of the disk's rate.
    two = document(run, *given, *tiers, "--tp", "2", "--gpu-memory-utilization", "0.2")
    assert two["kv"]["prefix_cached"] == pytest.approx(kept["kv"]["prefix_cached"], rel=0.01)


def test_nano_batches(run: Run) -> None:
    given = ("--offline", "--num-requests", "100", "--isl", "500", "--osl", "100", "--max-num-seqs", "64")
    sequence, flow = document(run, *given), document(run, *given, "--nanoflow")
    jsonschema.Draft202012Validator(schema("foretell.serving/1")).validate(flow)
    assert sequence["nanoflow"] is None
    found = flow["nanoflow"]
    assert found["nano_batches"] >= 1
    assert found["lower_bound_s"] <= found["layer_s"] <= found["sequential_s"]
    assert flow["until_s"] < sequence["until_s"]
    said = run(*BASE, *given, "--nanoflow").stdout
    assert "nano-batch" in said


def test_another_scheduler_than_the_engine_s(run: Run) -> None:
    given = ("--offline", "--num-requests", "200", "--isl", "500", "--osl", "800", "--gpu-memory-utilization", "0.25")
    full = document(run, *given, "--engine", "trtllm")
    most = document(run, *given, "--engine", "trtllm", "--scheduler", "trtllm-max-utilisation")
    assert (full["scheduler"], most["scheduler"]) == ("trtllm", "trtllm-max-utilisation")
    assert full["kv"]["preemptions"] == 0 < most["kv"]["preemptions"]
    swapped = document(run, *given, "--preemption", "swap", "--host-memory", "10GB")
    assert swapped["kv"]["preemptions"] > 0
    assert swapped["until_s"] != document(run, *given)["until_s"]
    shown = run(*BASE, *given, "--scheduler", "trtllm").stdout
    assert "scheduled by trtllm" in " ".join(shown.split())


def test_a_row_for_each_request(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    tables = []
    for ending in ("csv", "jsonl", "parquet"):
        path = tmp_path / f"requests.{ending}"
        result = run(*BASE, "--trace", trace, "--requests", path)
        assert result.exit_code == 0, result.output
        assert f"requests.{ending}" in "".join(result.stdout.split())
        tables.append(table(path))
    assert tables[0] == tables[1] == tables[2]
    rows = tables[0]
    assert [row["input_tokens"] for row in rows] == [100, 200, 400, 200_000]
    assert [row["output_tokens"] for row in rows] == [10, 20, 40, 0]
    assert [row["refused"] for row in rows] == ["", "", "", "longer than max_model_len"]
    assert rows[3]["finished_s"] is rows[3]["replica"] is rows[3]["ttft_s"] is None
    for row in rows[:3]:
        assert row["ttft_s"] == pytest.approx(row["first_token_s"] - row["arrival_s"])
        assert row["queued_s"] == pytest.approx(row["scheduled_s"] - row["arrival_s"])
        assert row["e2e_s"] == pytest.approx(row["ttft_s"] + row["tpot_s"] * (row["output_tokens"] - 1))
    page = (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8")
    named = page.split("<!-- columns of requests, from the code -->")[1].split("<!-- end of columns -->")[0]
    assert [f"| `{name}` | {what} |" for name, what in COLUMNS.items()] == named.strip().splitlines()[2:]
    assert list(rows[0]) == list(COLUMNS)
    same = run(*BASE, "--trace", trace, "--requests", trace)
    assert same.exit_code == 2
    assert "would overwrite the trace" in " ".join(same.stderr.split())


def test_a_model_file_is_not_written_over(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    result = run("simulate", "serve", config, "--on", "l4", "--rate", "1", "--timeline", config)
    assert result.exit_code == 2
    assert "would overwrite the config" in " ".join(result.stderr.split())
    assert config.read_text() == '{"model_type": "llama"}'


def test_notes_say_what_an_engine_would_not_start_with(run: Run) -> None:
    asked = ("simulate", "serve", "llm:llama-3.1-70b", "--on", "h100-sxm", "--tp", "2", "--rate", "1", *FEW)
    said = " ".join(run(*asked).stdout.split())
    found = re.search(r"vLLM starts only where a request of --max-model-len fits the cache: give (\d+) or less", said)
    assert found is not None
    assert "starts only" not in " ".join(run(*asked, "--max-model-len", found[1]).stdout.split())
    said = " ".join(run(*BASE, "--rate", "1", "--on", "a100-sxm4-80gb", "--weight-dtype", "fp8").stdout.split())
    assert "no fp8 arithmetic: weights are widened on the way in, as w8a16" in said


def table(path: Path) -> list[dict[str, Any]]:
    """Rows with None for what is empty."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return found
    with path.open() as file:
        return [
            {
                key: text if key == "refused" else None if not text else float(text) if "." in text or "e" in text
                else int(text)
                for key, text in row.items()
            }
            for row in csv.DictReader(file)
        ]  # fmt: skip
