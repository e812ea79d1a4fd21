"""``foretell calibrate``: both ways, from the command line."""

from __future__ import annotations

import json

import pytest

from foretell.calibrate import microbench

FEW = (
    microbench.Case("linear", (4, 8), (("linear", 8, 8),)),
    microbench.Case("stream", (2**16,), (("relu_",),)),
)


def test_here_then_predict(run, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(microbench, "cpu_cases", lambda: FEW)
    refused = run("predict", model, "--on", "local-cpu")
    assert refused.exit_code == 2
    assert "run `foretell calibrate --here`" in refused.stderr
    done = run("calibrate", "--here", "--seconds", "1")
    assert done.exit_code == 0, done.output
    assert "2 microbenchmarks" in done.stdout
    assert str(tmp_path / "config" / "foretell" / "local.toml") in done.stdout
    predicted = run("predict", model, "--on", "local-cpu")
    assert predicted.exit_code == 0, predicted.output
    assert "cpu model" in predicted.stdout


def test_from_a_table(run, model, tmp_path):
    table, out = tmp_path / "table.csv", tmp_path / "out.json"
    table.write_text("kind,m,n,k,time_s\n" + "matmul,1024,1024,1024,0.0006\n" * 5)
    done = run("calibrate", "--from", table, "--on", "t4", "--out", out, "--model", "roofline")
    assert done.exit_code == 0, done.output
    assert "5 rows" in done.stdout
    predicted = run("predict", model, "--on", "t4", "--model", "roofline", "--calibration", out)
    assert predicted.exit_code == 0, predicted.output
    assert "scaled by measurements: matmul" in predicted.stdout


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_range_that_is_assumed_is_called_so(run, tmp_path, rows):
    table = tmp_path / "table.csv"
    table.write_text("kind,m,n,k,time_s\n" + "matmul,1024,1024,1024,0.0006\n" * rows)
    text = run("calibrate", "--from", table, "--on", "t4", "--out", tmp_path / "o.json", "--model", "roofline").stdout
    assert ("is assumed, a factor of 2" in text) == (rows < 4)
    assert ("fewer than 4 rows show no range" in text) == (rows < 4)
    assert ("80 % within" in text) == (rows >= 4)
    assert ("  1 row\n" in text) == (rows == 1)


def test_a_table_of_training_and_inference_gives_a_factor_for_each(run, tmp_path):
    gpt2 = ("llm:gpt2", "--seq-len", 512, "--batch", 8)  # large enough that the device never waits

    def seconds(*options):
        done = run("predict", *gpt2, "--on", "t4", "--model", "roofline", "--json", *options)
        assert done.exit_code == 0, done.output
        document = json.loads(done.stdout)
        return document["time_s"], document["interval_basis"]

    graph = {}
    lines = ["workload,time_s"]
    for phase, factor in (("inference", 3.0), ("train", 0.5)):
        graph[phase] = tmp_path / f"{phase}.json"
        run("capture", *gpt2, "--phase", phase, "--out", graph[phase])
        lines += [f"{graph[phase]},{factor * seconds('--phase', phase)[0]:.9g}"] * 12
    table, out = tmp_path / "table.csv", tmp_path / "out.json"
    table.write_text("\n".join(lines))
    done = run("calibrate", "--from", table, "--on", "t4", "--model", "roofline", "--out", out)
    assert done.exit_code == 0, done.output
    assert "all.inference" in done.stdout
    assert "all.train" in done.stdout
    for phase, factor in (("inference", 3.0), ("train", 0.5)):
        (plain, _), (scaled, basis) = seconds("--phase", phase), seconds("--phase", phase, "--calibration", out)
        assert scaled / plain == pytest.approx(factor**0.75, rel=0.03)  # twelve rows: 12 / 16
        assert basis.startswith("12 measurements on t4")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of --here and --from"),
        (("--here", "--from", "x.csv"), "give one of --here and --from"),
        (("--from", "x.csv"), "needs the device"),
        (("--from", "nowhere.csv", "--on", "t4"), "no such file"),
        (("--here", "--on", "t4"), "measures this machine"),
        (("--here", "--seconds", "0"), "0 seconds"),
        (("--here", "--device", "tpu"), "unknown kind of device"),
        (("--here", "--seconds", "1"), "too few for 261 cases; give 40"),
        (("--here", "--seconds", "nan"), "nan seconds"),
        (("--here", "--model", "nonsense"), "leave it out"),
        (("--from", "x.csv", "--on", "t4", "--seconds", "-1"), "goes with --here"),
        (("--from", "x.csv", "--on", "t4", "--device", "gpu"), "goes with --here"),
    ],
)
def test_refusals(run, failed, arguments, said):
    from foretell.cli.group import one_line

    result = run("calibrate", *arguments)
    assert result.exit_code == 2
    assert said in (failed(result) if result.stderr else one_line(result.exception))
