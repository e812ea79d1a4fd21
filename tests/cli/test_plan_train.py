"""``foretell plan train``: what it shows, what it writes, and how it refuses."""

from __future__ import annotations

import html
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.errors import InputError
from foretell.hardware import cluster
from foretell.plan.training.emit import read
from foretell.plan.training.search import search
from foretell.report import schema
from foretell.simulate.training import CHOICES, TrainingPlan
from foretell.simulate.training.legality import explain
from foretell.workload import llm

Run = Callable[..., Any]
ASKED = ("plan", "train", "llm:llama-3-8b", "--on", "2x dgx-h100", "--global-batch", "64", "--seq-len", "8192")


@pytest.fixture(scope="module")
def expected() -> Any:
    return search(llm.config("llama-3-8b"), cluster("2x dgx-h100"), global_batch=64, seq_len=8192, tokens=15e12)


def test_the_ranking_at_80_columns(run: Run, expected: Any) -> None:
    result = run(*ASKED, "--tokens", "15T")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "training llm:llama-3-8b on 2x dgx-h100"
    assert f"{expected.legal:,} legal plans · {expected.fitting:,} fit into 71.7 GiB a device" in result.stdout
    best = expected.best[0]
    (first,) = [line for line in lines if re.match(r" ?1 ", line)]
    assert str(best.plan).split()[0] in first
    assert f"{best.tokens_per_s_per_device:,.0f}" in first
    assert "Pareto front of time, memory, cost and energy" in result.stdout
    assert "Why the first is first" in result.stdout
    assert " ".join(expected.why[0].split()) in " ".join(result.stdout.split())
    assert re.search(r"15 T tokens · [\d,]+ steps · [\d,.]+ days · [\d,]+ GPU-hours", " ".join(result.stdout.split()))
    assert "…" not in result.stdout
    # What does not fit into the width is named, and is there where it does.
    assert "left out for want of width" in result.stdout
    wide = run(*ASKED, "--tokens", "15T", width=160).stdout
    assert "left out for want of width" not in wide
    assert all(name in wide for name in ("exposed", "energy", "cost", "memory", "MFU"))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_numbers_are_never_cut(run: Run, expected: Any, width: int) -> None:
    result = run(*ASKED, width=width)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= width
    assert "…" not in result.stdout


def test_json_is_what_the_search_found(run: Run, expected: Any) -> None:
    result = run(*ASKED, "--tokens", "15T", "--json", "--top", "3")
    document = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema("foretell.plan/1")).validate(document)
    assert len(document["best"]) == 3
    assert document["best"][0] == json.loads(json.dumps(expected.best[0].to_dict(15e12)))
    assert len(document["front"]) == len(expected.front)
    assert document["imported"] is None
    for one in (*document["best"], *document["front"]):
        assert sum(one["parts_s"].values()) == pytest.approx(one["time_s"])
        assert explain(llm.config("llama-3-8b"), TrainingPlan(**one["plan"]), cluster("2x dgx-h100")) == []


def test_the_schema_has_the_settings_and_names_of_the_code() -> None:
    plan = schema("foretell.plan/1")["properties"]["best"]["items"]["properties"]["plan"]["properties"]
    assert list(plan) == list(TrainingPlan(1, 1).to_dict())
    for name, choices in CHOICES.items():
        assert tuple(plan[name]["enum"]) == choices


def test_pins_and_ranges(run: Run) -> None:
    result = run(*ASKED, "--json", "--tp", "2-4", "--pp", "1,2", "--mbs", "2", "--recompute", "4", "--vp", "1")
    assert result.exit_code == 0, result.output
    for one in json.loads(result.stdout)["best"]:
        plan = one["plan"]
        assert plan["tp"] in (2, 4)
        assert plan["pp"] in (1, 2)
        assert (plan["micro_batch"], plan["recompute"], plan["recompute_layers"], plan["vp"]) == (2, "full", 4, 1)


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "deepspeed"])
def test_the_best_plan_is_emitted_and_read_again(run: Run, tmp_path: Path, name: str) -> None:
    framework = {"torchtitan": "fsdp2"}.get(name, name)
    asked = (*ASKED, "--framework", framework)
    written = run(*asked, "--emit", name)
    assert written.exit_code == 0, written.output
    path = tmp_path / {"megatron": "args.txt", "torchtitan": "job.toml", "deepspeed": "ds.json"}[name]
    path.write_text(written.stdout)
    best = json.loads(run(*asked, "--json").stdout)["best"][0]["plan"]
    found = read(path).plan
    for field in ("tp", "pp", "cp", "micro_batch"):
        if field in found:
            assert found[field] == best[field], field
    again = run(*ASKED, "--framework", framework, "--import", path, "--json")
    assert again.exit_code == 0, again.output
    imported = json.loads(again.stdout)["imported"]
    assert imported["plan"]["tp"] == best["tp"]
    shown = run(*ASKED, "--framework", framework, "--import", path)
    assert "The plan that was imported" in shown.stdout


def test_a_file_of_results_is_kept_and_gone_on_from(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plans.sqlite"
    first = run(*ASKED, "--out", path, "--json")
    assert first.exit_code == 0, first.output
    with sqlite3.connect(path) as db:
        (count,) = db.execute("SELECT count(*) FROM plans").fetchone()
        (best,) = db.execute("SELECT min(time_s) FROM plans").fetchone()
    db.close()
    document = json.loads(first.stdout)
    assert count == document["fitting"]
    assert best == document["best"][0]["time_s"]
    again = run(*ASKED, "--out", path)
    assert "from the file" in again.stdout
    assert run(*ASKED, "--out", path, "--json").stdout == first.stdout


def test_html_escapes_and_loads_nothing(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plans.html"
    config = tmp_path / "<b>&.toml"
    config.write_text("layers = 8\nhidden = 512\nheads = 8\nintermediate = 2048\nvocab = 1000\n")
    result = run("plan", "train", config, *ASKED[3:], "--tokens", "2B", "--html", path)
    assert result.exit_code == 0, result.output
    assert f"wrote {path}" in result.stdout
    text = path.read_text()
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text
    assert not re.search(r"""(?:src|href)=["']|url\(|@import|<script""", text)
    assert "default-src 'none'" in html.unescape(text)
    assert "foretell plan train" in text
    assert "Why the first is first" in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--tp", "3"), "tp 3 does not divide 32 attention heads (rule heads; nearest: --tp 2 or 4)"),
        (("--tp", "8", "--pp", "1", "--cp", "1", "--dp", "4"), "= 32 devices, the cluster has 16 (rule devices"),
        (("--pp", "4", "--vp", "3"), "no legal plan has pp 4, vp 3; the nearest breaks a rule: 32 layers do not split"),
        (("--pp", "3"), "pp 3 = 12 devices, the cluster has 16 (rule devices; nearest: --pp 4)"),
        (("--mbs", "3"), "a global batch of 64 does not split into micro-batches of 3"),
        (("--ep", "2"), "ep 2 does not divide the model's experts (it has none)"),
        (("--precision", "nvfp4"), "h100-sxm has no arithmetic in nvfp4"),
        (("--framework", "deepspeed", "--zero", "3", "--pp", "2"), "ZeRO stage 3 does not go with a pipeline"),
        (("--schedule", "layered"), "megatron has no pipeline schedule layered (it has 1f1b, interleaved)"),
        (("--schedule", "zero-bubble"), "nearest: --schedule 1f1b or interleaved; --framework fsdp2"),
        (("--framework", "fsdp2", "--schedule", "layered"), "fsdp2 has no pipeline schedule layered"),
        (("--framework", "deepspeed", "--schedule", "gpipe"), "deepspeed has no pipeline schedule gpipe (it has 1f1b)"),
        (("--tp", "x"), "'x' is no count"),
        (("--tp", "8-2"), "'8-2' is no count"),
        (("--tp", "1-99999"), "more than 4,096 values"),
        (("--tp", "0"), "tp is 0, want 1 to"),
        (("--schedule", "1f2b"), "unknown schedule '1f2b'"),
        (("--max-memory", "120%"), "no share of the memory"),
        (("--max-memory", "0"), "no share of the memory"),
        (("--tokens", "lots"), "no number of tokens"),
        (("--tokens", "0"), "no number of tokens"),
        (("--objective", "speed"), "unknown objective 'speed'"),
        (("--framework", "megatorn"), "did you mean 'megatron'"),
        (("--emit", "jax"), "unknown format to emit 'jax'"),
        (("--emit", "megatron", "--json"), "give one of them"),
        (("--html", "x.pdf"), "does not end in .html"),
        (("--out", "/no/such/folder/x"), "cannot be written"),
        (("--import", "/no/such/file"), "no such file"),
        (("--global-batch", "0"), "global_batch is 0"),
        (("--nodes", "3"), "3 machines"),
        (("--on", "2x dgx-h100 + 2x dgx-a100 over ib-hdr", "--html", "x.html"), "--html: is for machines of one kind"),
        (("--on", "2x dgx-h100 + 2x dgx-a100 over ib-hdr", "--objective", "cost"), "is for machines of one kind"),
        (("--on", "2x dgx-h100 + 2x dgx-a100 over ib-hdr", "--vp", "2"), "vp cannot be pinned on machines of several"),
    ],
)  # fmt: skip
def test_wrong_input_is_said_in_a_line_and_exits_with_2(
    run: Run, failed: Callable[[Any], str], changed: tuple[str, ...], said: str
) -> None:
    result = run(*ASKED, *changed)
    assert result.exit_code == 2, result.output
    assert said in failed(result)


def test_what_is_missing_is_named(run: Run, failed: Callable[[Any], str]) -> None:
    for arguments, said in (
        (ASKED[:5] + ASKED[7:], "--global-batch: is needed"),
        (ASKED[:7], "--seq-len: is needed"),
        (("plan", "train", *ASKED[3:]), "WORKLOAD: is missing"),
        (("plan", "train", "timm:resnet50", *ASKED[3:]), "is no parametric transformer"),
        (("plan", "train", "llm:llama-3-8x", *ASKED[3:]), "did you mean"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert said in failed(result)


def test_what_fits_nowhere_exits_with_3(run: Run, failed: Callable[[Any], str]) -> None:
    result = run("plan", "train", "llm:llama-3.1-405b", *ASKED[3:])
    assert result.exit_code == 3
    line = failed(result)
    assert re.search(r"needs [\d,.]+ GiB a device and has 71\.7 GiB \(90% of h100-sxm\); [\d.]+ GiB are missing", line)
    assert re.search(r"it would fit with .*\d+ machines of dgx-h100", line)


def test_machines_of_several_kinds_share_the_work(run: Run) -> None:
    on = "2x dgx-h100 + 2x dgx-a100 over ib-hdr"
    result = run("plan", "train", "llm:llama-3-8b", "--on", on, *ASKED[5:], "--tp", "2", "--mbs", "1", "--tokens", "1B")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "1. uneven" in result.stdout
    assert "2x dgx-h100:" in result.stdout
    assert "2x dgx-a100:" in result.stdout
    assert "The step is that of the slowest kind" in result.stdout
    data = json.loads(run("plan", "train", "llm:llama-3-8b", "--on", on, *ASKED[5:], "--tp", "2", "--json").stdout)
    jsonschema.validate(data, schema("foretell.shared-plan/1"))
    assert all(sum(kind["machines"] for kind in one["kinds"]) == 4 for one in data["best"])
    assert [one["time_s"] for one in data["best"]] == sorted(one["time_s"] for one in data["best"])


def test_help_names_every_setting(run: Run) -> None:
    text = run("plan", "train", "--help", width=120).stdout
    for option in ("--tp", "--cp", "--dp", "--pp", "--ep", "--vp", "--mbs", "--zero", "--recompute", "--emit"):
        assert option in text
    assert "train" in run("plan", "--help").stdout


def test_no_torch_is_needed(shell: Callable[..., Any]) -> None:
    result = shell("plan", "train", "--help")
    assert result.returncode == 0
    assert InputError  # what the failures above are


def test_what_an_imported_file_says_besides_is_shown(run: Run, tmp_path: Path) -> None:
    given = tmp_path / "run.txt"
    given.write_text("--micro-batch-size 2\n--use-distributed-optimizer\n--my-\x1b[31mown 7\n", encoding="utf-8")
    asked = (*ASKED, "--top", "1", "--import", str(given))
    text = run(*asked, width=160).stdout
    said = "options that say nothing about the plan: --my-?[31mown"
    assert said in text
    assert "\x1b" not in text
    assert json.loads(run(*asked, "--json").stdout)["notes"][0] == said
    page = tmp_path / "plan.html"
    written = run(*asked, "--emit", "megatron", "--html", str(page))
    assert f"note: --import: {said}" in written.stderr
    assert "--my-?[31mown" in page.read_text(encoding="utf-8")


def test_a_model_that_is_not_used_is_said(run: Run, tmp_path: Path) -> None:
    given = tmp_path / "run.txt"
    emitted = run(*ASKED[:2], "llm:llama-3.2-1b", *ASKED[3:], "--emit", "megatron").stdout
    given.write_text(emitted, encoding="utf-8")
    text = run(*ASKED, "--top", "1", "--import", str(given), width=160).stdout
    assert "the file's own model of 1.24 G parameters is not used" in text


def test_no_layers_are_no_number_of_recomputed_layers(run: Run) -> None:
    result = run(*ASKED, "--recompute", "0")
    assert result.exit_code == 2
    assert "--recompute: 0 layers are none" in result.stderr


def test_the_nearest_plans_say_the_batch_they_are_of(run: Run) -> None:
    result = run("plan", "train", "llm:llama-3-8b", "--on", "1x dgx-h100", "--global-batch", "7", "--seq-len", "8192",
                 "--dp", "8")  # fmt: skip
    assert result.exit_code == 2
    for said in result.stderr.split("the nearest plans: ")[1].split(", or "):
        assert ("--dp 8" in said) == ("--global-batch" in said)


def test_devices_that_are_no_gpu_are_costed_by_a_roofline_and_it_is_said(run: Run) -> None:
    asked = ("plan", "train", "llm:llama-3-8b", "--on", "8x tpu-v5p", *ASKED[5:], "--top", "1")
    assert "tpu-v5p is no GPU" in " ".join(run(*asked).stdout.split())
    assert 0.3 < json.loads(run(*asked, "--json").stdout)["best"][0]["mfu"] < 0.8


@pytest.mark.parametrize(("emit", "framework"), [("torchtitan", "fsdp2"), ("deepspeed", "deepspeed")])
def test_what_is_emitted_is_planned_for_the_framework_that_reads_it(
    run: Run, failed: Callable[[Any], str], emit: str, framework: str
) -> None:
    pins = ("--tp", "2", "--cp", "1", "--pp", "1", "--mbs", "1")
    taken = run(*ASKED, *pins, "--emit", emit)
    assert taken.exit_code == 0, taken.output
    assert f"note: --framework {framework} is taken, which --emit {emit} is for" in taken.stderr
    named = run(*ASKED, *pins, "--emit", emit, "--framework", framework)
    assert named.stdout == taken.stdout
    assert "note: --framework" not in named.stderr
    wrong = run(*ASKED, *pins, "--emit", emit, "--framework", "megatron")
    assert wrong.exit_code == 2
    assert f"--emit {emit}: contradicts --framework megatron; give --framework {framework}" in failed(wrong)


def test_overlap_is_pinned_or_forbidden(run: Run, failed: Callable[[Any], str]) -> None:
    asked = (*ASKED, "--cp", "1", "--pp", "1", "--mbs", "1", "--json")
    for given, wanted in (("tp", True), ("none", False)):
        best = json.loads(run(*asked, "--tp", "4", "--overlap", given).stdout)["best"]
        assert {one["plan"]["overlap_tp"] for one in best} == {wanted}
        assert {one["plan"]["overlap_ep"] for one in best} == {False}
    refused = run(*asked, "--tp", "1", "--overlap", "tp")
    assert refused.exit_code == 2
    assert "rule tensor-overlap; nearest: without --overlap tp" in failed(refused)
    for given in ("dp", "tp,none"):
        wrong = run(*asked, "--overlap", given)
        assert wrong.exit_code == 2
        assert "unknown communication to overlap" in failed(wrong)


def test_numbers_of_layers_and_names_do_not_mix(run: Run, failed: Callable[[Any], str]) -> None:
    wrong = run(*ASKED, "--recompute", "4,none")
    assert wrong.exit_code == 2
    assert "--recompute: '4,none' has numbers of layers and names, which do not mix" in failed(wrong)


def test_what_would_fit_is_a_cluster_that_can_be_asked(run: Run, failed: Callable[[Any], str]) -> None:
    small = ("--global-batch", "16", "--seq-len", "4096", "--mbs", "1")
    result = run("plan", "train", "llm:llama-3-8b", "--on", "h100-sxm", *small)
    assert result.exit_code == 3
    found = re.search(r"one machine of (\d): --on '(\d)x h100-sxm'", failed(result))
    assert found is not None
    assert found[1] == found[2]
    assert run("plan", "train", "llm:llama-3-8b", "--on", f"{found[1]}x h100-sxm", *small).exit_code == 0
    result = run("plan", "train", "llm:llama-3-70b", "--on", "8x a100-sxm4-80gb", *small)
    assert result.exit_code == 3
    found = re.search(r"(\d+ machines of 8x a100-sxm4-80gb over ib-ndr)", failed(result))
    assert found is not None
    on = found[1].replace(" machines of", "x")
    assert run("plan", "train", "llm:llama-3-70b", "--on", on, *small).exit_code == 0


def test_a_model_from_a_file_is_called_by_its_name(run: Run, tmp_path: Path) -> None:
    shape = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000}  # fmt: skip
    pins = ("--tp", "1", "--cp", "1", "--pp", "1", "--mbs", "1")
    for path, name in ((tmp_path / "mine.json", "mine"), (tmp_path / "ours" / "config.json", "ours")):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(shape), encoding="utf-8")
        result = run("plan", "train", path, *ASKED[3:], *pins)
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[0] == f"training llm:{name} on 2x dgx-h100"
