"""``foretell calibrate``: both ways, from the command line."""

from __future__ import annotations

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
