"""``foretell predict`` of a training plan on many devices: what it shows, what it writes, and how it refuses."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from foretell.hardware import cluster
from foretell.plan.training.measured import fit, read_runs
from foretell.plan.training.predicted import predict, unmasked_flops
from foretell.report import schema
from foretell.simulate.training import PlanTable, TrainingPlan
from foretell.simulate.training.constants import constants
from foretell.simulate.training.memory import PARTS as MEMORY
from foretell.simulate.training.memory import by_rank, over_capacity
from foretell.simulate.training.step import PARTS, step
from foretell.units import format_bytes
from foretell.workload import llm

Run = Callable[..., Any]
Failed = Callable[[Any], str]
ON = "16x dgx-h100"
BATCH = ("--global-batch", "1024", "--seq-len", "8192")
ASKED = ("predict", "llm:llama-3-70b", "--on", ON, "--train", "--tp", "8", "--pp", "4", "--vp", "5", *BATCH)
SMALL = ("predict", "llm:llama-3-8b", "--on", "2x dgx-h100", "--train", "--global-batch", "64", "--seq-len", "4096")
CONFIG = llm.config("llama-3-70b")
PLAN = TrainingPlan(1024, 8192, tp=8, pp=4, dp=4, vp=5, schedule="interleaved")


def written(result: Any) -> Any:
    """The document that a command wrote, which keeps its schema."""
    document = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema("foretell.training-step/1")).validate(document)
    return document


def test_the_card_at_80_columns(run: Run) -> None:
    result = run(*ASKED, "--tokens", "15T")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"llm:llama-3-70b · training on {ON}"
    words = " ".join(result.stdout.split())
    found = step(CONFIG, PLAN, cluster(ON))
    assert "tensor 8 · data 4 · pipeline 4 · chunks a rank 5" in words
    assert "256 micro-batches of 1 schedule interleaved" in words
    assert "sequence parallelism · no recomputation" in words
    assert "80 % interval" in words
    assert f"MFU {100 * found.mfu[0]:.0f} % (causal half of attention)" in words
    assert "--dp not given: 4, what tp 8 · pp 4 leaves of 128 devices" in words
    assert "15 T tokens" in words
    assert "fits" in words


def test_json_is_what_the_parts_say(run: Run) -> None:
    document = written(run(*ASKED, "--json", "--tokens", "15T"))
    found = step(CONFIG, PLAN, cluster(ON))
    memory = by_rank(CONFIG, PLAN, cluster(ON).groups[0][1].device)
    assert document["plan"] == PLAN.to_dict()
    assert sum(document["parts_s"].values()) == document["time_s"] == found.time_s[0]
    low, high = constants().calibration.intervals["default"]
    assert document["time_interval_s"] == pytest.approx([low * found.time_s[0], high * found.time_s[0]])
    communication = sum(document["parts_s"][name] for name in ("tp", "cp", "ep", "pp", "dp"))
    assert document["exposed_s"] == pytest.approx(communication)
    assert document["tokens_per_s"] == pytest.approx(1024 * 8192 / found.time_s[0])
    assert document["mfu"] == pytest.approx(
        document["flops_per_device"] / document["time_s"] / document["peak_flops_per_s"]
    )
    assert [stage["peak_bytes"] for stage in document["memory"]["ranks"]] == memory.peak_bytes.tolist()
    assert [stage["layers"] for stage in document["memory"]["ranks"]] == [20, 20, 20, 20]
    for stage in document["memory"]["ranks"]:
        assert sum(stage["parts_bytes"].values()) == pytest.approx(stage["peak_bytes"])
    assert document["memory"]["fullest"] == 0
    assert document["run"]["time_s"] == pytest.approx(15e12 / (1024 * 8192) * document["time_s"])
    assert document["cost_usd"] == pytest.approx(document["usd_per_h"] * document["time_s"] / 3600)
    assert document["power_w"] == pytest.approx(document["energy_j"] / document["time_s"])
    assert document["calibration"] is None


def test_the_schema_has_the_settings_and_parts_of_the_code() -> None:
    own, of_plans = schema("foretell.training-step/1")["properties"], schema("foretell.plan/1")["properties"]
    assert own["plan"] == of_plans["best"]["items"]["properties"]["plan"]
    assert tuple(own["parts_s"]["properties"]) == tuple(name.removesuffix("_s") for name in PARTS)
    assert tuple(own["memory"]["properties"]["ranks"]["items"]["properties"]["parts_bytes"]["properties"]) == MEMORY


def test_attention_counted_in_full_is_twelve_lht_a_token(run: Run) -> None:
    half, full = (written(run(*ASKED, flag, "--json")) for flag in ("--causal-flops", "--full-flops"))
    assert (half["flops_convention"], full["flops_convention"]) == ("causal", "full")
    more = (full["flops_per_device"] - half["flops_per_device"]) * 128 / (1024 * 8192)
    assert more == pytest.approx(0.5 * 12 * CONFIG.layers * CONFIG.hidden * 8192)
    assert full["mfu"] > half["mfu"]
    assert full["time_s"] == half["time_s"]
    assert "(attention in full)" in run(*ASKED, "--full-flops").stdout


def test_windows_and_documents_count_in_full_too() -> None:
    plan = TrainingPlan(64, 4096, dp=8)
    table = PlanTable.of([plan, plan.replace(document_len=512)])
    for name in ("llama-3-8b", "gemma-3-27b"):  # without and with sliding windows
        config = llm.config(name)
        counted = np.array([step(config, table.plan(i), cluster("dgx-h100")).flops_per_device[0] for i in (0, 1)])
        total = counted + unmasked_flops(config, table)
        assert total[0] == pytest.approx(total[1])
        assert counted[1] < counted[0]


def test_options_reach_the_plan(run: Run) -> None:
    given = {
        "--cp": 2, "--ep": 4, "--dp": 2, "--pp": 4, "--tp": 2, "--mbs": 2, "--zero": 0, "--precision": "fp8",
        "--attention": "flash2", "--context-scheme": "a2a", "--dispatcher": "deepep", "--recompute": 3,
        "--first-layers": 7, "--last-layers": 9, "--schedule": "1f1b", "--document-len": 1024,
    }  # fmt: skip
    words = [str(word) for pair in given.items() for word in pair]
    asked = ("predict", "llm:mixtral-8x7b", "--on", "4x dgx-h100", "--train", "--global-batch", "128", "--seq-len",
             "4096")  # fmt: skip
    plan = written(run(*asked, *words, "--json"))["plan"]
    assert plan["recompute"] == "full"
    assert plan["recompute_layers"] == 3
    names = {"--mbs": "micro_batch"}
    for option, value in given.items():
        if option != "--recompute":
            assert plan[names.get(option, option[2:].replace("-", "_"))] == value, option
    others = ("--shard", "4", "--zero", "3", "--lora", "rank=16", "--cuda-graph", "--optimizer", "adamw")
    plan = written(run(*SMALL, *others, "--json"))["plan"]
    assert (plan["shard"], plan["zero"], plan["lora_rank"], plan["cuda_graph"]) == (4, 3, 16, True)
    plan = written(run(*SMALL, "--tp", "4", "--no-sp", "--json"))["plan"]
    assert (plan["sequence_parallel"], plan["overlap_tp"]) == (False, False)
    plan = written(run(*SMALL, "--tp", "4", "--overlap", "tp", "--json"))["plan"]
    assert (plan["sequence_parallel"], plan["overlap_tp"], plan["dp"]) == (True, True, 4)
    plan = written(run(*SMALL, "--framework", "fsdp2", "--json"))["plan"]
    assert (plan["zero"], plan["framework"]) == (3, "fsdp2")
    plan = written(run(*SMALL[:4], "--phase", "train", *SMALL[5:], "--json"))["plan"]  # is --train
    assert plan["dp"] == 16


def test_one_device_with_an_option_of_many(run: Run) -> None:
    asked = ("predict", "llm:gpt2", "--on", "h100-sxm", "--train", "--global-batch", "8", "--seq-len", "1024")
    document = written(run(*asked, "--json"))
    assert (document["devices"], document["exposed_s"], document["notes"]) == (1, 0.0, [])
    assert "foretell.estimate/1" in run("predict", "llm:gpt2", "--on", "h100-sxm", "--train", "--json").stdout


def test_a_config_file_is_a_workload(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("layers = 8\nhidden = 512\nheads = 8\nintermediate = 2048\nvocab = 1000\n")
    for workload in (f"llm:{config}", f"hf:{config}", config):
        assert written(run("predict", workload, *SMALL[2:], "--json"))["workload"] == "llm:mine"


def test_a_captured_graph_is_no_workload(run: Run, failed: Failed, tmp_path: Path) -> None:
    graph = tmp_path / "graph.json"
    run("capture", "llm:gpt2", "--seq-len", "8", "--out", graph)
    result = run("predict", graph, *SMALL[2:])
    assert result.exit_code == 2
    assert "was captured for one device; give llm:NAME or hf:CONFIG.json" in failed(result)


def test_calibrated_from_a_run(run: Run, failed: Failed, tmp_path: Path) -> None:
    path = tmp_path / "my-run.json"
    plan = {"global_batch": 64, "seq_len": 8192, "tp": 8, "pp": 2, "recompute": "selective"}
    timed = {"model": "llm:llama-3-70b", "on": "2x dgx-h100", "plan": plan, "step_s": 31.0, "memory_bytes": "70 GB"}
    path.write_text(json.dumps({"schema": "foretell.training-run/1", "runs": [timed]}))
    scale = fit(read_runs(path))
    plain = written(run(*ASKED, "--json"))
    document = written(run(*ASKED, "--calibrate-from", path, "--json"))
    assert document["time_s"] == pytest.approx(scale.compute * plain["time_s"])
    low, high = scale.interval(CONFIG, PLAN, cluster(ON))
    assert document["time_interval_s"] == pytest.approx([low * document["time_s"], high * document["time_s"]])
    assert document["interval_basis"] == scale.basis(CONFIG, PLAN, cluster(ON))
    assert document["calibration"] == {
        "runs": 1, "compute": scale.compute, "communication": scale.communication, "memory": scale.memory
    }  # fmt: skip
    words = " ".join(run(*ASKED, "--calibrate-from", path).stdout.split())
    assert "extrapolated from your run of 16 devices: devices 128, measured at 16" in words
    assert f"your runs reserved {scale.memory:.2f} times the memory predicted" in words
    path.write_text("{}")
    result = run(*ASKED, "--calibrate-from", path)
    assert result.exit_code == 2
    assert "foretell.training-run/1" in failed(result)


def test_what_does_not_fit_is_shown_and_exits_with_3(run: Run) -> None:
    plan = PLAN.replace(micro_batch=4)
    excess = over_capacity(CONFIG, plan, cluster(ON))
    assert excess
    for more in ((), ("--json",)):
        result = run(*ASKED, "--mbs", "4", *more)
        assert result.exit_code == 3
        assert result.stderr.splitlines() == [f"error: {excess}"]
    assert written(result)["memory"]["fits"] is False
    card = run(*ASKED, "--mbs", "4").stdout
    assert "DOES NOT FIT" in card
    device = cluster(ON).groups[0][1].device
    missing = by_rank(CONFIG, plan, device).peak_bytes.max() - device.memory_bytes
    assert f"this plan cannot run: {format_bytes(missing)} too many on the fullest device" in " ".join(card.split())
    assert "would fit" in excess


def test_html_escapes_and_loads_nothing(run: Run, tmp_path: Path) -> None:
    path, config = tmp_path / "step.html", tmp_path / "<b>&.toml"
    config.write_text("layers = 8\nhidden = 512\nheads = 8\nintermediate = 2048\nvocab = 1000\n")
    result = run("predict", f"llm:{config}", *SMALL[2:], "--pp", "2", "--tokens", "2B", "--html", path)
    assert result.exit_code == 0, result.output
    assert f"wrote {path}" in result.stdout
    text = path.read_text()
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text
    assert not re.search(r"""(?:src|href)=["']|url\(|@import|<script""", text)
    assert "default-src 'none'" in html.unescape(text)
    for expected in ("foretell predict", "Where the step goes", "stage 1", "causal half of attention", "2 G tokens"):
        assert expected in text
    run(*ASKED, "--mbs", "4", "--html", path)
    assert "Does not fit." in path.read_text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--tp", "3"), "tp 3 · cp 1 · dp 5 · pp 1 = 15 devices, the cluster has 16 (rule devices"),
        (("--tp", "4", "--dp", "3"), "= 12 devices, the cluster has 16 (rule devices; nearest: --dp 4)"),
        (("--tp", "64"), "tp 64 does not divide 32 attention heads (rule heads; nearest: --tp 32)"),
        (("--pp", "3"), "32 layers do not split over pp 3"),
        (("--pp", "2", "--vp", "3"), "32 layers do not split over pp 2 · vp 3"),
        (("--mbs", "3"), "does not split into micro-batches of 3 on 16 data-parallel ranks"),
        (("--ep", "2"), "ep 2 does not divide the model's experts (it has none)"),
        (("--vp", "4"), "want at least two ranks"),
        (("--recompute", "40"), "the nearest plans: --tp 1 --dp 16 --pp 1 --mbs 1 --recompute "),
        (("--tp", "0"), "tp is 0, want 1 to"),
        (("--tp", "-1"), "tp is -1, want 1 to"),
        (("--tp", "100000000000"), "tp is 100000000000, want 1 to"),
        (("--tp", "2147483648", "--pp", "2147483648", "--cp", "2147483648"), "the cluster has 16 (rule devices"),
        (("--tp", "many"), "--tp"),
        (("--global-batch", "0"), "global_batch is 0"),
        (("--seq-len", "0"), "seq_len is 0"),
        (("--zero", "4"), "zero is 4, want 0 to 3"),
        (("--shard", "5", "--zero", "3"), "groups of 5 do not divide the 16 ranks"),
        (("--recompute", "0"), "0 layers are none"),
        (("--recompute", "ful"), "did you mean 'full'"),
        (("--schedule", "1f2b"), "did you mean '1f1b'"),
        (("--framework", "megatorn"), "did you mean 'megatron'"),
        (("--precision", "fp32"), "unknown precision 'fp32'; known: bf16, fp16, fp8, mxfp8, nvfp4"),
        (("--precision", "nvfp4"), "h100-sxm has no arithmetic in nvfp4"),
        (("--attention", "flsh"), "did you mean 'flash'"),
        (("--context-scheme", "rng"), "did you mean 'ring'"),
        (("--dispatcher", "deepp"), "did you mean 'deepep'"),
        (("--overlap", "dp"), "known: tp, ep, none"),
        (("--overlap", "tp"), "wants tp above 1 and sequence parallelism"),
        (("--tokens", "lots"), "no number of tokens"),
        (("--full-flops", "--causal-flops"), "both are given"),
        (("--lora", "rank=0"), "rank"),
        (("--lora", "rank=4,targets=q_proj"), "adapters are beside all matrices here; give --lora rank=4"),
        (("--html", "x.pdf"), "does not end in .html"),
        (("--html", "/no/such/folder/x.html"), "cannot be written"),
        (("--calibrate-from", "/no/such/file"), "no such file"),
        (("--optimizer", "sgd"), "'sgd' is not predicted on many devices; adam and adamw are"),
        (("--batch", "4"), "--batch: means nothing where training on many devices is predicted; leave it out: --glob"),
        (("--image-size", "224", "--layout", "nhwc"), "--image-size, --layout: means nothing"),
        (("--runtime", "eager"), "--framework and --cuda-graph say how it runs"),
        (("--checkpointing",), "--recompute full"),
        (("--trace", "x.json"), "foretell simulate pipeline … --trace"),
        (("--sort", "time"), "foretell plan train ranks many"),
        (("--phase", "decode"), "contradicts --phase decode"),
        (("--on", "2x dgx-h100 + 2x dgx-a100"), "devices of several kinds; predict each kind by itself"),
        (("--on", "2x 8x v100-sxm2-16gb over ib-edr"), "--mbs 1 --precision fp16"),
        (("--on", "2x epyc-9654"), "epyc-9654 has no arithmetic in bf16"),
        (("--on", "dgx-h100,dgx-a100"), "names several; training on many devices is predicted on one cluster"),
        (("--on", "2x dgx-h10"), "unknown node or device 'dgx-h10'; did you mean 'dgx-h100'"),
        (("--on", "dgx-h10"), "unknown node or device 'dgx-h10'; did you mean 'dgx-h100'"),
        (("--on", "2x 8x l40s"), "no network is known"),
        (("--on", "1000000x dgx-h100"), "rule batch"),
        (("--on", "100000000x dgx-h100"), "a cluster of 100,000,000 nodes, want at most 1,000,000"),
        (("--dispatcher", "deepep"), "llama-3-8b has no experts to dispatch tokens to"),
        (("--document-len", "4097"), "4097, more than the 4096 tokens of a sequence"),
        (("--on", "+"), "cannot read ''"),
    ],
)  # fmt: skip
def test_wrong_input_is_said_in_a_line_and_exits_with_2(
    run: Run, failed: Failed, changed: tuple[str, ...], said: str
) -> None:
    result = run(*SMALL, *changed)
    assert result.exit_code == 2, result.output
    assert said in failed(result)


def test_what_is_missing_or_is_no_transformer_is_named(run: Run, failed: Failed) -> None:
    many = ("--on", "2x dgx-h100")
    for arguments, said in (
        ((*SMALL[:5], *SMALL[7:]), "--global-batch N must be given"),
        (SMALL[:7], "--seq-len N must be given"),
        (SMALL[:5], "--global-batch N and --seq-len N must be given"),
        ((*SMALL[:4], *SMALL[5:]), "add --train, or predict inference on one device: --on h100-sxm without --global-"),
        (("predict", "llm:gpt2", "--on", "1x t4"), "add --train, or predict inference on one device: --on t4"),
        (("predict", "llm:gpt2", *many, "--phase", "decode"), "serving on many is foretell simulate serve"),
        (("predict", "timm:resnet50", *many, "--train"), "how data-parallel training of other networks scales is not"),
        (("predict", "timm:resnet50", "--on", "t4", "--train", "--tp", "2"), "give llm:NAME or hf:CONFIG.json"),
        (("predict", "hf:org/name", *many, "--train"), "give its config.json"),
        (("predict", "missing.json", *many, "--train"), "no such file"),
        (("predict", "llm:llama-3-8x", *many, "--train"), "did you mean 'llama-3-8b'"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert said in failed(result), arguments


def test_the_nearest_plans_are_told_apart(run: Run, failed: Failed) -> None:
    plans = failed(run(*SMALL, "--recompute", "40")).partition("the nearest plans: ")[2].split(", or ")
    assert len(set(plans)) == len(plans) > 1
    assert any("--recompute selective" in plan for plan in plans)


def test_what_is_said_to_fit_does(run: Run) -> None:
    result = run(*ASKED, "--mbs", "4")
    (size,) = re.findall(r"micro-batch (\d) \(", result.stderr)
    assert run(*ASKED, "--mbs", size).exit_code == 0


def test_help_names_every_setting_in_a_panel_of_its_own(run: Run) -> None:
    text = run("predict", "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    panel = text.partition("Training on many devices")[2]
    for option in ("--tp", "--cp", "--dp", "--pp", "--ep", "--vp", "--mbs", "--zero", "--recompute", "--full-flops",
                   "--calibrate-from", "--context-scheme"):  # fmt: skip
        assert option in panel
    assert "…" not in panel


def test_from_python() -> None:
    found = predict(CONFIG, PLAN, cluster(ON), tokens=15e12)
    assert found.excess == ""
    assert found.candidate.run(15e12).time_s == pytest.approx(found.to_dict()["run"]["time_s"])


def test_the_guide_shows_the_card_of_its_command(run: Run) -> None:
    text = (Path(__file__).parents[2] / "docs/guides/training-at-scale.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ foretell (predict .* --tokens 15T)\n```$", text, re.MULTILINE)
    shown = text[text.index("    llm:llama-3-70b · training on") : text.index("\n| line |")]
    today = run(*shlex.split(command)).stdout

    def rate(card: str) -> float:
        return float(re.findall(r"([\d,]+) tokens/s a GPU", card)[0].replace(",", ""))

    def memory(card: str) -> list[str]:
        lines = [line.strip() for line in card.splitlines()]
        start = next(i for i, line in enumerate(lines) if line.startswith("GiB on stage"))
        return lines[start : start + 12]

    assert rate(shown) == pytest.approx(rate(today), rel=0.1)  # constants are fitted anew now and then
    assert memory(shown) == memory(today)


def test_no_torch_is_needed(shell: Callable[..., Any]) -> None:
    code = shell(*ASKED, "--json", PYTHONPROFILEIMPORTTIME="1")
    assert code.returncode == 0
    assert json.loads(code.stdout)["devices"] == 128
    assert not re.search(r"\| +torch$", code.stderr, re.MULTILINE)


def test_a_device_that_no_run_was_measured_on_is_said(run: Run) -> None:
    asked = ("--train", "--global-batch", "64", "--seq-len", "4096", "--tp", "8", "--json")
    known = json.loads(run("predict", "llm:llama-3-8b", "--on", "1x dgx-h100", *asked).stdout)
    other = json.loads(run("predict", "llm:llama-3-8b", "--on", "8x mi250x", *asked).stdout)
    assert "mi250x" in other["interval_basis"]
    assert "mi250x" not in known["interval_basis"]
    wide, usual = (d["time_interval_s"][1] / d["time_interval_s"][0] for d in (other, known))
    assert wide == pytest.approx(usual**2)
