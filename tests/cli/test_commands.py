"""Each command on the true path, from a workload to what is printed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import foretell
from foretell.graph import Graph
from foretell.hardware import devices
from foretell.report import schema

Run = Callable[..., Any]


def printed(result: Any) -> str:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return str(result.stdout)


def loaded(result: Any) -> Any:
    return json.loads(printed(result))


def test_a_card_of_a_real_model(run: Run) -> None:
    text = printed(run("predict", "timm:resnet18", "--on", "a100-sxm4-80gb", "--batch", "8"))
    assert text.startswith("timm:resnet18 · inference on NVIDIA A100 SXM4 80GB\n")
    assert "input 8×3×224×224 float32 · fp32 · eager" in text
    assert "a step is 8 images" in text
    # 1.81 GMAC an image (He et al. 2016, table 1, 1.8·10⁹), 8 images; 11.7 M parameters
    assert "29 GFLOP · 14.5 GMAC · 11.7 M parameters" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_table_of_several_devices(run: Run) -> None:
    text = printed(run("predict", "timm:resnet18", "--on", "t4,a100-sxm4-80gb", "--batch", "8"))
    rows = [line.split()[0] for line in text.splitlines() if line]
    assert rows.index("t4") < rows.index("a100-sxm4-80gb")
    text = printed(run("predict", "timm:resnet18", "--on", "t4,a100-sxm4-80gb", "--batch", "8", "--sort", "time"))
    rows = [line.split()[0] for line in text.splitlines() if line]
    assert rows.index("a100-sxm4-80gb") < rows.index("t4")


def test_the_command_says_what_python_says(run: Run) -> None:
    settings = {"batch": 2, "precision": "amp", "image_size": 64, "train": True, "optimizer": "adamw"}
    expected = foretell.predict("torchvision:resnet18", on="t4", runtime="compiled", **settings)
    written = loaded(
        run("predict", "torchvision:resnet18", "--on", "t4", "--runtime", "compiled", "--batch", 2, "--json",
            "--precision", "amp", "--image-size", 64, "--train", "--optimizer", "adamw")
    )  # fmt: skip
    assert written == json.loads(json.dumps(expected.to_dict()))
    jsonschema.validate(written, schema("foretell.estimate/1"))


def test_every_option_of_capture_reaches_it(run: Run, model: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    printed(
        run("capture", model, "--input", "input=4x3x32x32:float32", "--train", "--accumulate", 2, "--precision", "bf16",
            "--layout", "nhwc", "--optimizer", "sgd-plain", "--out", path)
    )  # fmt: skip
    graph = Graph.from_json(path)
    assert (graph.mode, graph.precision) == ("train", "bf16")
    given = graph.tensors[graph.inputs[0]]
    assert (given.shape, given.dtype, given.layout) == ((4, 3, 32, 32), "bfloat16", "channels_last")
    expected = foretell.capture(
        model,
        inputs=["input=4x3x32x32:float32"],
        train=True,
        accumulate=2,
        precision="bf16",
        layout="nhwc",
        optimizer="sgd-plain",
    )
    assert graph == expected
    single = foretell.capture(
        model, inputs=["input=4x3x32x32:float32"], train=True, precision="bf16", layout="nhwc", optimizer="sgd-plain"
    )
    assert graph.flops() == 2 * single.flops()


def test_decoding_takes_context(run: Run) -> None:
    def kv_cache(context: int) -> int:
        written = loaded(
            run(
                "predict", "llm:gpt2", "--on", "t4", "--phase", "decode", "--context", context, "--seq-len", 1, "--json"
            )
        )
        assert written["mode"] == "decode"
        return int(written["memory"]["breakdown_bytes"]["kv_cache"])

    assert kv_cache(512) > 1.9 * kv_cache(256) > 0


def test_a_graph_in_a_file_is_a_workload(run: Run, model: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    assert "conv" in printed(run("capture", model, "--out", path))
    jsonschema.validate(json.loads(path.read_text()), schema("foretell.graph/1"))
    kept = loaded(run("predict", path, "--on", "t4", "--json"))
    assert kept == loaded(run("predict", model, "--on", "t4", "--json"))
    assert printed(run("explain", path, "--on", "t4", "--op", 0)) == printed(
        run("explain", model, "--on", "t4", "--op", 0)
    )


def test_capture_as_json_is_the_graph(run: Run, model: str) -> None:
    written = loaded(run("capture", model, "--json"))
    assert Graph.from_dict(written) == foretell.capture(model)


def test_the_ops_of_a_capture(run: Run, model: str) -> None:
    lines = printed(run("capture", model, "--ops", width=120)).splitlines()
    graph = foretell.capture(model)
    assert len(lines) == 1 + len(graph.ops)
    first = lines[1].split()
    # 30 × 30 outputs of 8 channels, each 3 · 3 · 3 multiply-adds: 194,400, 2 FLOP each
    assert first[:3] == ["0", "convolution", "1×8×30×30"]
    assert "389 k" in lines[1]


def test_explain_lists_the_dearest_then_explains_one(run: Run, model: str) -> None:
    listed = printed(run("explain", model, "--on", "t4"))
    index = listed.splitlines()[3].split()[0]
    text = printed(run("explain", model, "--on", "t4", "--op", index))
    assert text.startswith(f"op {index} of ")
    assert "t4" in text


def test_a_decode_step_says_how_many_tokens_it_takes_to_be_cached(run: Run, tmp_path: Path) -> None:
    assert "1,023 tokens cached" in printed(run("predict", "llm:gpt2", "--on", "t4", "--phase", "decode"))
    text = printed(run("predict", "llm:gpt2", "--on", "t4", "--phase", "decode", "--context", 77))
    assert text.count("77 tokens cached") == 1
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 99}')
    text = printed(run("predict", f"hf:{config}", "--on", "t4", "--phase", "decode", "--seq-len", 55))
    assert "55 tokens cached" in text
    assert "tokens cached" not in printed(run("predict", "llm:gpt2", "--on", "t4", "--phase", "prefill"))


@pytest.mark.parametrize(("device", "known"), [("t4", True), ("mi300x", False), ("tpu-v5e", False)])
def test_nvidia_smi_is_for_nvidia(run: Run, device: str, known: bool) -> None:
    text = printed(run("predict", "llm:gpt2", "--on", device, "--seq-len", 64))
    assert ("nvidia-smi" in text) == known
    assert "cuDNN" not in printed(run("predict", "torchvision:resnet18", "--on", "mi300x"))


def test_a_part_of_the_catalogue(run: Run) -> None:
    def listed(word: str) -> set[str]:
        text = printed(run("devices", word))
        return {line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.strip()} & {*devices()}

    assert listed("hopper") == {name for name in devices() if foretell.device(name).architecture == "Hopper"}
    assert listed("NVIDIA") == {name for name in devices() if foretell.device(name).vendor == "NVIDIA"}
    assert listed("cpu") == {name for name in devices() if foretell.device(name).kind == "cpu"}
    assert listed("a100") == {name for name in devices() if name.startswith("a100-")}
    result = run("devices", "hoper")
    assert result.exit_code == 2
    assert "unknown device 'hoper'" in result.stderr
    assert "a maker, an architecture or a kind" in result.stderr


def test_explain_takes_what_predict_takes(run: Run, tmp_path: Path) -> None:
    table, scales = tmp_path / "table.csv", tmp_path / "t4.json"
    table.write_text("kind,m,n,k,dtype,time_s\n" + "matmul,1024,1024,1024,fp16,0.0003\n" * 8)
    printed(run("calibrate", "--from", table, "--on", "t4", "--out", scales))
    gpt2 = ("llm:gpt2", "--seq-len", 512, "--batch", 8, "--precision", "fp16", "--on", "t4")
    assert "(included)" in printed(run("explain", *gpt2, "--op", 5, "--calibration", scales))
    assert "(included)" not in printed(run("explain", *gpt2, "--op", 5))
    slow = printed(run("explain", *gpt2, "--clock", "600MHz"))
    assert slow != printed(run("explain", *gpt2))
    result = run("explain", *gpt2, "--power-limit", "1W")
    assert result.exit_code == 2
    assert "--power-limit" in result.stderr or "power" in result.stderr


def test_a_graph_in_a_file_says_how_it_trains(run: Run, model: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    how = ("--train", "--optimizer", "adam", "--accumulate", 2)
    for workload in ("llm:gpt2", model):
        printed(run("capture", workload, *how, "--out", path))
        assert "adam · 2 micro-batches" in " ".join(printed(run("predict", path, "--on", "t4")).split())
        assert " ".join(printed(run("capture", workload, *how)).split()).count("adam") == 1
    text = printed(run("predict", "llm:gpt2", "--on", "t4", "--train", "--seq-len", 64))
    assert "tokens 1×64 int64 · targets 64 int64" in text


def test_help_shows_no_type_for_what_takes_no_value(run: Run) -> None:
    for arguments in ((), ("predict",), ("claims",), ("devices",)):
        assert "<bool>" not in printed(run(*arguments, "--help"))


def test_a_device_named_twice_is_refused(run: Run) -> None:
    result = run("predict", "llm:gpt2", "--seq-len", 128, "--on", "t4,l4,t4")
    assert result.exit_code == 2
    assert "--on t4,l4,t4: a device is given twice; give each once" in result.stderr


def test_several_devices_give_a_list(run: Run) -> None:
    written = loaded(run("predict", "llm:gpt2", "--seq-len", 128, "--on", "t4,l4", "--json"))
    assert [document["device"] for document in written] == ["t4", "l4"]
    for document in written:
        jsonschema.validate(document, schema("foretell.estimate/1"))
        assert document["largest_batch"] > 1


@pytest.mark.parametrize("workload", ["timm:resnet18", "llm:gpt2"])
def test_the_largest_batch_fits_and_the_next_does_not(run: Run, workload: str) -> None:
    def document(batch: int, *options: str) -> Any:
        return loaded(run("predict", workload, "--batch", batch, "--on", "t4", "--json", *options))

    assert ("largest_batch" in document(2)) == (workload == "llm:gpt2")
    largest = document(2, "--largest-batch")["largest_batch"]
    assert document(largest)["memory"]["fits"]
    assert not document(largest + 1)["memory"]["fits"]


@pytest.mark.parametrize("given", [(), ("--input", "input=8x3x32x32"), ("--batch", 3)])
def test_the_largest_batch_of_a_users_own_module(run: Run, model: str, given: tuple[Any, ...]) -> None:
    def document(*options: Any) -> Any:
        return loaded(run("predict", model, "--on", "t4", "--json", *options))

    largest = document("--largest-batch", *given)["largest_batch"]
    assert largest < 1 << 20
    assert document("--batch", largest)["memory"]["fits"]
    assert not document("--batch", largest + 1)["memory"]["fits"]


def test_the_largest_batch_of_inputs_that_show_none(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text(
        "import torch\n\ndef make():\n    return torch.nn.EmbeddingBag(7, 5), torch.zeros(12, dtype=torch.int64), "
        "torch.zeros(4, dtype=torch.int64)\n"
    )
    result = run("predict", f"py:{path}:make", "--on", "t4", "--largest-batch")
    assert result.exit_code == 2
    assert "do not show what the batch is" in result.stderr
    given = ("--input", "input=12:int64", "--input", "offsets=4:int64")
    result = run("predict", f"py:{path}:make", "--on", "t4", "--largest-batch", *given)
    assert result.exit_code == 2
    assert "--largest-batch: inputs of several first dimensions show no batch" in result.stderr


def test_a_graph_in_a_file_has_one_batch(run: Run, model: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    printed(run("capture", model, "--out", path))
    result = run("predict", path, "--on", "t4", "--largest-batch")
    assert result.exit_code == 2
    assert "--largest-batch: a captured graph has one batch" in result.stderr


def test_a_graph_in_a_file_takes_no_settings(run: Run, model: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    printed(run("capture", model, "--out", path))
    result = run("predict", path, "--on", "t4", "--batch", 4, "--train")
    assert result.exit_code == 2
    assert "--batch, --train: a captured graph stays as it is" in result.stderr


def test_devices_of_a_folder_join_the_catalogue(run: Run, tmp_path: Path) -> None:
    (tmp_path / "acme-a1.toml").write_text(
        'title = "Acme A1"\nvendor = "Acme"\nkind = "gpu"\narchitecture = "Anvil"\n'
        'memory = ["64 GiB", "sheet"]\nmemory_bandwidth = ["2.4 TB/s", "sheet"]\n'
        '[peaks]\n"fp32.vector" = ["25 TFLOP/s", "sheet"]\n[sources]\nsheet = "Acme A1 data sheet, 2026"\n'
    )
    assert "acme-a1" not in printed(run("devices"))
    assert "\n  acme-a1 " in printed(run("devices", "--devices", tmp_path))
    one = printed(run("--devices", tmp_path, "devices", "acme-a1"))
    assert "memory bandwidth 2.4 TB/s [1]" in " ".join(one.split())
    assert "[1] Acme A1 data sheet, 2026" in one
    estimate = loaded(run("predict", "llm:gpt2", "--seq-len", 64, "--on", "acme-a1", "--json", f"--devices={tmp_path}"))
    assert estimate["device"] == "acme-a1"
    assert estimate["cost_usd"] is None


@pytest.mark.parametrize("name", foretell.devices())
def test_every_device_can_be_shown(run: Run, name: str) -> None:
    text = printed(run("devices", name))
    assert text.startswith(foretell.device(name).title)
    assert "Sources" in text
    assert max(map(len, text.splitlines())) <= 80


def test_all_devices_are_listed_within_80_columns(run: Run) -> None:
    text = printed(run("devices"))
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("  ")}
    assert set(foretell.devices()) <= listed
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_names_every_command_and_version(run: Run) -> None:
    text = printed(run("--help"))
    for command in ("predict", "capture", "explain", "devices", "claims", "accuracy"):
        assert f"│ {command} " in text
        assert "Usage: foretell " + command in printed(run(command, "--help"))
    assert printed(run("--version")) == f"foretell {foretell.__version__}\n"
