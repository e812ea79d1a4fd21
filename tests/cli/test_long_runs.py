"""``foretell plan goodput``, ``stages`` and ``place`` on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.hardware import cluster
from foretell.plan.training.goodput import H100_MTBF_S, Reliability
from foretell.plan.training.units import adapt
from foretell.simulate.training import TrainingPlan
from foretell.workload import llm

Run = Callable[..., Any]
STAGES = ("plan", "stages", "llm:llama-3-70b", "--on", "4x dgx-a100", "--global-batch", "64", "--seq-len", "8192",
          "--tp", "8", "--pp", "4", "--mbs", "2")  # fmt: skip
PLACE = ("plan", "place", "llm:opt-13b", "--on", "4x dgx-a100", "--global-batch", "64", "--seq-len", "2048",
         "--tp", "8", "--pp", "4", "--moves", "2000", "--links")  # fmt: skip


def test_goodput_is_that_of_the_job(run: Run) -> None:
    asked = ("plan", "goodput", "--gpus", "16384", "--checkpoint", "5s", "--restart", "10min", "--work", "1000h")
    found = json.loads(run(*asked, "--json").stdout)
    job = Reliability(devices=16_384, mtbf_device_s=H100_MTBF_S, checkpoint_s=5, restart_s=600).goodput()
    assert found["progress"] == pytest.approx(job.share)
    assert found["progress"] + found["checkpoint"] + found["lost"] + found["restart"] == pytest.approx(1)
    assert found["wall_s"] == pytest.approx(1000 * 3600 / job.share)
    shown = run(*asked).stdout
    assert "92 %" in shown  # as the Llama 3 paper: above 90 %
    worse = json.loads(run(*asked, "--interval", "2h", "--json").stdout)
    assert worse["progress"] < found["progress"]


def test_stages_are_those_of_the_partition(run: Run) -> None:
    found = json.loads(run(*STAGES, "--json").stdout)
    plan = TrainingPlan(64, 8192, micro_batch=2, tp=8, pp=4, dp=1)
    same = adapt(llm.config("llama-3-70b"), plan, cluster("4x dgx-a100"))
    assert [(s["first"], s["end"]) for s in found["stages"]] == [(s.first, s.end) for s in same.stages]
    assert found["time_s"] == pytest.approx(same.time_s)
    shown = run(*STAGES).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "norm 1, norm 2" in shown  # what the first stage makes again


def test_slow_links_are_kept_off_the_pipeline(run: Run, tmp_path: Path) -> None:
    links = tmp_path / "links.csv"
    slow = [[20.0] * 4 for _ in range(4)]
    slow[1][2] = slow[2][1] = 1.0
    links.write_text("\n".join(",".join(map(str, row)) for row in slow))
    found = json.loads(run(*PLACE, str(links), "--json").stdout)
    assert found["time_s"] < found["default_s"]
    machines = [device // 8 for device in found["devices"][::8]]
    assert sorted(machines) == [0, 1, 2, 3]
    assert abs(machines.index(1) - machines.index(2)) > 1  # not next to each other
    assert "times as fast as in the given order" in run(*PLACE, str(links)).stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [("1,2\n3\n", "line 2 has 1 numbers"), ("1,x\n2,3\n", "holds no numbers"), ("1,2,3\n4,5,6\n", "no square matrix"),
     ("1,0\n2,1\n", "not above 0"), ("1,nan\n2,1\n", "not above 0"), ("", "no square matrix")],
)  # fmt: skip
def test_a_wrong_matrix_is_refused(run: Run, tmp_path: Path, text: str, said: str) -> None:
    links = tmp_path / "links.csv"
    links.write_text(text)
    result = run(*PLACE, str(links))
    assert result.exit_code == 2
    assert said in result.stderr


def test_what_is_wrong_or_cannot_be(run: Run) -> None:
    assert run("plan", "goodput", "--gpus", "8", "--interval", "0s").exit_code == 2
    assert run("plan", "goodput", "--gpus", "1000000000", "--restart", "10h").exit_code == 3
    assert run(*STAGES[:10], "--pp", "4", "--mbs", "64").exit_code == 2  # a batch that does not split
    small = run(*(word if word != "4x dgx-a100" else "1x 4x a100-sxm4-40gb" for word in STAGES[:9]), "--pp", "4")
    assert small.exit_code == 3
    assert "GiB" in small.stderr or "GB" in small.stderr


def test_hints_name_only_options_of_these_commands(run: Run) -> None:
    for asked in (STAGES, (*PLACE, "no-such-file")):
        wrong = run(*(word if word != "8" else "3" for word in asked))
        assert wrong.exit_code == 2
        shown = set(re.findall(r"--[a-z-]+", wrong.stderr))
        assert "--tp" in shown
        assert shown <= {"--global-batch", "--seq-len", "--mbs", "--tp", "--pp"}
