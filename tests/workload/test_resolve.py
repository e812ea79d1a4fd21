"""Workload strings, the cache of captures, and what a user gets wrong."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import foretell  # noqa: E402
from foretell.errors import CaptureError, ForetellError, InputError, UnknownNameError  # noqa: E402
from foretell.workload import cache, resolve  # noqa: E402
from foretell.workload.options import InputSpec, options, parse_inputs  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "error", "text"),
    [
        ("timm:resnet5O", UnknownNameError, "did you mean 'resnet50'"),
        ("torchvision:vit_b16", UnknownNameError, "vit_b_16"),
        ("tim:resnet50", UnknownNameError, "did you mean 'timm'"),
        ("timm:", InputError, "timm:resnet50"),
        ("resnet50", InputError, "PREFIX:NAME"),
        ("hf:no/such/config.json", InputError, "config.json"),
        ("zoo:hardnet", UnknownNameError, "hardnet"),
        ("llm:llama-3-9b", UnknownNameError, "llama-3-8b"),
        ("py:model.py", InputError, "FILE.py:FACTORY"),
        ("py:nowhere.py:make", InputError, "no such file"),
        ("nothing.json", InputError, "no such file"),
    ],
)
def test_wrong_names(workload: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        foretell.capture(workload)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ForetellError, match=r"pip install 'foretell\[zoo\]'"):
        foretell.capture("timm:resnet18")


def test_a_second_source_with_one_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="exists already"):
        resolve.source("timm")(lambda name, options: foretell.capture(name))


@pytest.mark.parametrize("name", ["resnet18", "swin_t", "inception_v3", "r3d_18", "lraspp_mobilenet_v3_large"])
def test_torchvision_families(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    graph = foretell.capture(f"torchvision:{name}", batch=2)
    with torch.device("meta"):
        kwargs: dict[str, Any] = {"weights_backbone": None} if name.startswith("lraspp") else {}
        module = torchvision.models.get_model(name, weights=None, **kwargs)
    assert graph.parameters == sum(p.numel() for p in module.parameters())
    assert graph.batch == 2
    assert graph.items == {"images": 2}
    assert not graph.not_counted


def test_detection_post_processing_is_explained() -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(CaptureError, match=r"depends on values.* at .*torchvision"):
        foretell.capture("torchvision:fasterrcnn_mobilenet_v3_large_fpn")


def test_timm_image_size() -> None:
    pytest.importorskip("timm")
    small = foretell.capture("timm:vit_tiny_patch16_224", image_size=160)  # the size is an argument of the model
    assert small.tensors[small.inputs[0]].shape == (1, 3, 160, 160)
    conv = foretell.capture("timm:resnet18", image_size=448)
    assert conv.macs() > 3.9 * foretell.capture("timm:resnet18", image_size=224).macs()


def test_checkpointing_of_library_models() -> None:
    pytest.importorskip("timm")
    plain = foretell.capture("timm:vit_tiny_patch16_224", train=True)
    again = foretell.capture("timm:vit_tiny_patch16_224", train=True, checkpointing=True)
    recomputed = again.macs(phase="backward") - plain.macs(phase="backward")
    outside = 196 * 192 * 768 + 192 * 1000  # patch embedding and head
    last = 12 * 197 * 768 * 192  # each block's last product is not run again: nothing needs its output
    assert recomputed == plain.macs(phase="forward") - outside - last
    with pytest.raises(CaptureError, match="does not support checkpointing"):
        foretell.capture("torchvision:resnet18", train=True, checkpointing=True)


def test_a_captured_graph_takes_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    foretell.capture(torch.nn.Linear(3, 8), torch.ones(5, 3)).to_json(path)
    assert foretell.capture(str(path)).macs() == 120
    with pytest.raises(InputError, match="takes no settings"):
        foretell.capture(str(path), batch=4)


# --- the user's own code ------------------------------------------------------------------------------------------

USER = """
import torch
from torch import nn
from helper import WIDTH

def make():
    return nn.Linear(WIDTH, 5), torch.ones(4, WIDTH)

def alone():
    return nn.Linear(WIDTH, 5)

def loads():
    layer = nn.Linear(WIDTH, 5)
    layer.load_state_dict({"weight": torch.rand(5, WIDTH), "bias": torch.zeros(5)})
    return layer, torch.ones(4, WIDTH)

def reads():
    scale = float(torch.rand(3).sum())
    return nn.Linear(WIDTH, int(scale) + 5), torch.ones(4, WIDTH)

def wrong():
    return 42

def broken():
    raise KeyError("weights.bin")
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 3\n")
    path = tmp_path / "model.py"
    path.write_text(USER)
    return path


def test_a_users_factory(user_file: Path) -> None:
    assert foretell.capture(f"py:{user_file}:make").macs() == 4 * 3 * 5
    assert foretell.capture(f"py:{user_file}:loads").macs() == 4 * 3 * 5
    assert foretell.capture(f"py:{user_file}:alone", inputs="input=7x3:float32").macs() == 7 * 3 * 5
    assert foretell.capture(f"py:{user_file}:make", train=True).mode == "train"


def test_another_batch_replaces_that_of_the_examples(user_file: Path) -> None:
    make = f"py:{user_file}:make"
    assert foretell.capture(make, batch=32).macs() == 32 * 3 * 5
    assert foretell.capture(make, batch=1).batch == 1  # 1 is said, though it is also the default
    assert foretell.capture(make, batch=32).items == {"samples": 32}
    layer = torch.nn.Linear(3, 5)
    assert foretell.capture(layer, torch.ones(4, 3), batch=9).macs() == 9 * 3 * 5
    assert foretell.capture(layer, torch.ones(4, 3)).macs() == 4 * 3 * 5
    assert foretell.capture(layer, torch.ones(4, 3), batch=4).macs() == 4 * 3 * 5


def test_a_batch_that_the_examples_do_not_show_is_refused() -> None:
    bilinear = torch.nn.Bilinear(3, 3, 5)
    assert foretell.capture(bilinear, torch.ones(4, 3), torch.ones(4, 3), batch=6).batch == 6
    table = torch.nn.EmbeddingBag(7, 5)
    words, offsets = torch.ones(12, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InputError, match=r"inputs of 12, 4 do not show what the batch is; leave --batch out"):
        foretell.capture(table, words, offsets, batch=6)


def test_a_batch_beside_an_input_of_another_is_refused(user_file: Path) -> None:
    for batch in (1, 32):
        with pytest.raises(InputError, match=f"--batch {batch} contradicts an input of 8; leave --batch out"):
            foretell.capture(f"py:{user_file}:alone", inputs="0=8x3", batch=batch)
    assert foretell.capture(f"py:{user_file}:alone", inputs="0=8x3", batch=8).batch == 8


def test_inputs_go_by_real_names_and_positions(user_file: Path) -> None:
    alone = f"py:{user_file}:alone"
    with pytest.raises(UnknownNameError, match="unknown input 'inptu'; did you mean 'input'"):
        foretell.capture(alone, inputs="inptu=7x3")
    with pytest.raises(UnknownNameError, match="unknown input 'y'; known: input"):
        foretell.capture(alone, inputs="y=7x3")
    with pytest.raises(InputError, match="inputs 1: positions count from 0"):
        foretell.capture(alone, inputs="1=7x3")

    class Many(torch.nn.Module):
        def forward(self, *parts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.cat(parts, 1) * scale

    inputs = {str(n): (2, n + 1) for n in (10, 2, 1, 0, 3, 4, 5, 6, 7, 8, 9)} | {"scale": (2, 1)}
    graph = foretell.capture(Many(), inputs=inputs)
    assert [graph.tensors[i].shape for i in graph.inputs] == [(2, n + 1) for n in range(11)] + [(2, 1)]
    with pytest.raises(UnknownNameError, match="unknown input 'parts'"):
        foretell.capture(Many(), inputs={"parts": (2, 3)})


@pytest.mark.parametrize(
    ("factory", "error", "text"),
    [
        ("mak", UnknownNameError, "did you mean 'make'"),
        ("alone", InputError, "no example inputs"),
        ("wrong", InputError, "int, not a torch.nn.Module"),
        ("broken", CaptureError, "KeyError"),
        ("reads", CaptureError, r"model\.py:18.*read no tensor values"),
    ],
)
def test_a_wrong_factory(user_file: Path, factory: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        foretell.capture(f"py:{user_file}:{factory}")


def test_a_file_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_library\n")
    with pytest.raises(CaptureError, match="importing it failed: ModuleNotFoundError"):
        foretell.capture(f"py:{tmp_path / 'bad.py'}:make")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x=8x3x224x224", {"x": InputSpec((8, 3, 224, 224), "float32")}),
        ("ids=2,7:int64", {"ids": InputSpec((2, 7), "int64")}),
        ("x=8:bf16", {"x": InputSpec((8,), "bfloat16")}),
        ({"x": (8, 3)}, {"x": InputSpec((8, 3), "float32")}),
        ({"x": ((8, 3), "int64")}, {"x": InputSpec((8, 3), "int64")}),
    ],
)
def test_inputs(text: Any, expected: Any) -> None:
    assert parse_inputs(text) == expected


@pytest.mark.parametrize("text", ["x", "x=", "x=axb", "x=8x3:float99", "=8", {"x": "eight"}, {"x": ()}])
def test_wrong_inputs(text: Any) -> None:
    if text == "x=":  # a scalar
        assert parse_inputs(text) == {"x": InputSpec((), "float32")}
        return
    with pytest.raises(ForetellError):
        parse_inputs(text)


# --- the cache ----------------------------------------------------------------------------------------------------


def test_captures_are_kept_and_damage_is_repaired(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    first = foretell.capture("timm:resnet10t", batch=2)
    (entry,) = (own_cache / "graphs").iterdir()
    monkeypatch.setattr(resolve, "on_meta", None)  # a second capture would fail
    assert foretell.capture("timm:resnet10t", batch=2) == first
    monkeypatch.undo()
    monkeypatch.setenv("FORETELL_CACHE", str(own_cache))
    for damage in (b"", b"no gzip", gzip.compress(b"{}"), gzip.compress(json.dumps(first.to_dict())[:-9].encode())):
        entry.write_bytes(damage)
        assert foretell.capture("timm:resnet10t", batch=2) == first
        assert len(list((own_cache / "graphs").iterdir())) == 1


def test_the_key_holds_what_a_graph_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    base = cache.key("timm:resnet18", options(batch=2), ("torch",))
    assert base == cache.key("timm:resnet18", options(batch=2), ("torch",))
    assert base != cache.key("timm:resnet18", options(batch=3), ("torch",))
    assert base != cache.key("timm:resnet34", options(batch=2), ("torch",))
    assert base != cache.key("timm:resnet18", options(batch=2), ("torch", "timm"))
    monkeypatch.setattr(cache, "_code_fingerprint", lambda: "other code")
    assert base != cache.key("timm:resnet18", options(batch=2), ("torch",))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "file"))
    pytest.importorskip("timm")
    assert foretell.capture("timm:resnet10t").parameters > 0


# --- lightness ----------------------------------------------------------------------------------------------------


def test_the_light_paths_import_no_torch() -> None:
    code = (
        "import sys, foretell; foretell.device('t4'); foretell.capture('llm:llama-3-8b', phase='decode', context=100);"
        "heavy = {'torch', 'timm', 'transformers', 'torchvision', 'polars'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_optimizer_without_training_is_refused() -> None:
    from foretell.workload.options import options

    assert options(train=True, optimizer="adam").optimizer == "adam"
    assert options(optimizer=None).optimizer == "sgd"
    with pytest.raises(InputError, match="optimizer adam applies to training only; add --train"):
        options(optimizer="adam")
