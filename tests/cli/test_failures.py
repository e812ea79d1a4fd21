import errno
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.group import hoisted, one_line
from foretell.errors import InfeasibleError, InputError

Run = Callable[..., Any]
Failed = Callable[[Any], str]


@pytest.mark.parametrize(
    ("option", "slip", "meant"),
    [
        ("--on", "rtx-3009", "rtx-3090"),
        ("--precision", "fp23", "fp32"),
        ("--layout", "ncwh", "nchw"),
        ("--runtime", "compile", "compiled"),
        ("--phase", "trian", "train"),
        ("--optimizer", "adamv", "adamw"),
        ("--model", "rooflin", "roofline"),
        ("--sort", "tme", "time"),
    ],
)
def test_a_slip_is_met_with_the_name_that_was_meant(
    run: Run, failed: Failed, option: str, slip: str, meant: str
) -> None:
    arguments = {"--on": "t4", option: slip}
    result = run("predict", "llm:gpt2", *(word for pair in arguments.items() for word in pair))
    assert result.exit_code == 2
    assert f"unknown {'device' if option == '--on' else ''}" in (line := failed(result))
    assert repr(slip) in line
    assert f"'{meant}'" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("predict", "tim:resnet50", "--on", "t4"), "unknown workload prefix 'tim'; did you mean 'timm'?"),
        (("predict", "resnet50", "--on", "t4"), "names no workload"),
        (("predict", "missing/graph.json", "--on", "t4"), "missing/graph.json: no such file"),
        (("predict", "py:missing.py:make", "--on", "t4"), "missing.py"),
        (("predict", "llm:gpt2", "--on", "t4,,l4"), "--on: 't4,,l4' has an empty name"),
        (("predict", "llm:gpt2", "--on", "t4", "--batch", "0"), "batch is 0"),
        (("predict", "llm:gpt2", "--on", "t4", "--checkpointing"), "add --train"),
        (("predict", "llm:gpt2", "--on", "t4", "--train", "--phase", "decode"), "train"),
        (("predict", "llm:gpt2", "--on", "t4", "--input", "x:3"), "NAME=SHAPE:DTYPE"),
        (("predict", "llm:gpt2", "--on", "t4", "--input", "x=3:flot32"), "'float32'"),
        (("predict", "llm:gpt2"), "Missing option '--on'; see foretell predict --help"),
        (("predict", "llm:gpt2", "--onn", "t4"), "--on"),
        (("predict", "llm:gpt2", "--on", "t4", "--batch", "many"), "--batch"),
        (("predct",), "Did you mean 'predict'?"),
        (("explain", "llm:gpt2", "--on", "t4,l4"), "explain on one"),
        (("capture", "llm:gpt2", "--out", "no/such/folder/graph.json"), "--out no/such/folder/graph.json"),
        (("devices", "t5"), "unknown device 't5'"),
        (("--devices", "no/such/folder", "devices"), "no/such/folder: no such folder"),
    ],
)
def test_wrong_input_gives_one_line_and_exit_code_2(
    run: Run, failed: Failed, arguments: tuple[str, ...], says: str
) -> None:
    result = run(*arguments)
    assert says in failed(result)
    assert result.exit_code == 2


def test_an_operation_that_does_not_exist(run: Run, failed: Failed, model: str) -> None:
    result = run("explain", model, "--on", "t4", "--op", "999")
    assert "op 999 does not exist" in failed(result)
    assert result.exit_code == 2


def test_malformed_toml_says_file_and_line(run: Run, failed: Failed, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('title = "Mine"\nvendor = \n')
    line = failed(run("devices", "mine", "--devices", tmp_path))
    assert "mine.toml: malformed TOML" in line
    assert "line 2" in line


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "foretell.graph/2"}', "null", '{"schema": 1e999}'])
def test_a_file_that_is_no_graph(run: Run, failed: Failed, tmp_path: Path, text: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    result = run("predict", path, "--on", "t4")
    assert f"{path}" in failed(result)
    assert result.exit_code == 2


def test_a_module_that_fails_says_where(run: Run, failed: Failed, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Net(nn.Module):\n    def forward(self, x):\n        return x @ torch.empty(5, 5)\n\n"
        "def make():\n    return Net(), torch.empty(2, 3)\n"
    )
    result = run("predict", f"py:{path}:make", "--on", "t4")
    assert "broken.py" in failed(result)
    assert result.exit_code == 2


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("foretell.hardware.device", fail)


def test_infeasible_differs_from_broken(run: Run, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, InfeasibleError("needs 90 GiB", "take a larger device"))
    result = run("devices", "t4")
    assert failed(result) == "error: needs 90 GiB; take a larger device"
    assert result.exit_code == 3


def test_a_defect_of_ours_is_one_line_too(run: Run, failed: Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, ZeroDivisionError("division\nby zero"))
    result = run("devices", "t4")
    assert failed(result) == "error: ZeroDivisionError: division by zero; run again with --debug for the traceback"
    assert result.exit_code == 1


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("error", [ZeroDivisionError("boom"), InputError("boom")])
def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, place: int) -> None:
    fails_with(monkeypatch, error)
    arguments = ["devices", "t4"]
    arguments.insert(place, "--debug")
    result = run(*arguments)
    assert "Traceback (most recent call last)" in result.stderr
    assert f"{type(error).__name__}: boom" in result.stderr
    assert result.exit_code == (2 if isinstance(error, InputError) else 1)


def test_an_interrupt_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())
    result = run("devices", "t4")
    assert (result.exit_code, result.output) == (130, "")


def test_ctrl_c_ends_a_real_run_quietly(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(
        "import pathlib, time\n\n"
        f"def make():\n    pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("foretell")), "predict", f"py:{path}:make", "--on", "t4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")


def test_exit_codes_of_the_installed_command(shell: Run, failed: Failed) -> None:
    wrong = shell("predict", "llm:gpt2", "--on", "t5")
    assert wrong.returncode == 2
    assert "unknown device 't5'" in failed(wrong)
    assert shell("--version").returncode == 0
    nothing = shell()
    assert nothing.returncode == 2
    assert "Usage: foretell" in nothing.stdout
    assert nothing.stderr == ""


def test_a_reader_that_leaves_early_causes_no_noise() -> None:
    command = f"{Path(sys.executable).with_name('foretell')} devices | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""


def test_a_console_without_unicode_still_gets_its_answer(shell: Run) -> None:
    result = shell("devices", "t4", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert "NVIDIA T4" in result.stdout


def test_options_of_foretell_may_follow_the_command() -> None:
    assert hoisted(["a", "--devices=x", "--debug", "b"]) == ["--devices=x", "--debug", "a", "b"]
    assert hoisted(["a", "--", "--debug"]) == ["a", "--", "--debug"]
    assert hoisted(["a", "--devices"]) == ["--devices", "a"]  # its value is missing, which the parser says


def test_an_error_without_a_message_is_named() -> None:
    assert one_line(AssertionError()).startswith("error: AssertionError: no message;")
    assert one_line(InputError("a\n b", "f.toml", "c")) == "error: f.toml: a b; c"


def test_a_full_disk_is_no_defect_of_ours() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert one_line(full) == "error: output: cannot be written, the disk is full; make room, or write elsewhere"
    assert one_line(OSError(errno.EIO, "x")).startswith("error: OSError: ")


def test_json_output_is_not_mixed_with_errors(run: Run) -> None:
    result = run("predict", "llm:gpt2", "--on", "t5", "--json")
    assert result.stdout == ""
    with pytest.raises(json.JSONDecodeError):
        json.loads(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("predict", "onnx:/dev/zero", "--on", "t4"), "regular file"),
        (("predict", "llm:gpt2", "--on", "t4", "--html", "model.py"), "does not end in .html"),
        (("predict", "llm:gpt2", "--on", "t4", "--trace", "a.html"), "does not end in .json"),
        (("capture", "llm:gpt2", "--out", "net.onnx"), "does not end in .json"),
    ],
)
def test_files_are_neither_waited_for_nor_overwritten(run: Run, failed: Failed, arguments: Any, said: str) -> None:
    assert said in failed(run(*arguments))


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 10**9), ("hidden_size", 10**30)])
@pytest.mark.parametrize("command", ["predict", "capture", "kv"])
def test_absurd_sizes_are_named_at_once(
    run: Run, failed: Failed, tmp_path: Path, command: str, key: str, value: int
) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 1000, key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = f"{'' if command == 'kv' else 'llm:'}{tmp_path / 'config.json'}"
    result = run(command, workload, *(("--on", "t4") if command == "predict" else ()))
    assert result.exit_code == 2
    assert str(value) in failed(result)


def test_sizes_that_multiply_beyond_64_bits_are_refused(run: Run, failed: Failed, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 10**7, "intermediate_size": 10**7, "num_hidden_layers": 10_000}
    config |= {"num_attention_heads": 1, "vocab_size": 10**7, "max_position_embeddings": 10 * 2**20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("predict", f"llm:{tmp_path / 'config.json'}", "--on", "t4")
    assert result.exit_code == 2
    assert "parameters" in failed(result)


def test_nothing_from_data_commands_the_terminal(run: Run, failed: Failed, tmp_path: Path) -> None:
    """Escape sequences and marks that turn text around: in a workload's name, a device's title, an error's text."""
    assert "do not print" in failed(run("predict", "onnx:a\x1b]0;t\x07.onnx", "--on", "t4"))
    assert "do not print" in failed(run("predict", "pt2:a\u202egpj.pt2", "--on", "t4"))
    (tmp_path / "mine.toml").write_text('title = "a\\u001b[31m"\nvendor = "x"\nkind = "gpu"\narchitecture = "y"\n')
    assert "do not print" in failed(run("predict", "llm:gpt2", "--on", "mine", "--devices", tmp_path))
    line = one_line(InputError("kernel \x1b[31m \u202e"))
    assert line.isprintable()
